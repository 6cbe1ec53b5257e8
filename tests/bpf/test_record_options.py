# SPDX-License-Identifier: Apache-2.0
"""What the options of `record` do, and with which code and words it refuses."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from aiflame.agent.capture.reader import read_capture
from aiflame.agent.model.profile import FrameKind, Profile, SampleClass, StopReason
from breadth import cases
from recordings import Recording, Workload, children_of, public_folder
from support import wait_until

pytestmark = pytest.mark.bpf

RunAiflame = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def asleep(workload: Callable[..., Path]) -> Iterator[Workload]:
    """A process whose two threads wait for good."""
    with Workload([workload("waits")]) as waiting:
        yield waiting


def _kinds(profile: Profile) -> set[FrameKind]:
    return {FrameKind(profile.functions[f].kind) for f in profile.frames["function"]}


def _record(
    run_aiflame: RunAiflame, folder: Path, target: int, *options: str
) -> tuple[Profile, str]:
    done = run_aiflame("record", "-p", target, "-d", "600ms", *options, "-f", "aiflame", "-o", "x")
    assert done.returncode == 0, done.stderr
    return read_capture(folder / "x"), done.stderr


def test_user_frames_only(
    busy: subprocess.Popen[bytes], run_aiflame: RunAiflame, tmp_path: Path
) -> None:
    profile, _ = _record(run_aiflame, tmp_path, busy.pid, "-U")
    assert FrameKind.KERNEL not in _kinds(profile)
    assert FrameKind.NATIVE in _kinds(profile)


def test_kernel_frames_only(
    busy: subprocess.Popen[bytes], run_aiflame: RunAiflame, tmp_path: Path
) -> None:
    profile, _ = _record(run_aiflame, tmp_path, busy.pid, "-K")
    assert FrameKind.NATIVE not in _kinds(profile)
    assert FrameKind.KERNEL in _kinds(profile)
    ends = {StopReason(end) for end in profile.stacks.ends}
    assert StopReason.EXCLUDED in ends
    assert StopReason.ROOTED not in ends


def test_without_off_cpu_time(
    busy: subprocess.Popen[bytes], run_aiflame: RunAiflame, tmp_path: Path
) -> None:
    profile, said = _record(run_aiflame, tmp_path, busy.pid, "--no-off-cpu")
    assert set(profile.samples["klass"]) == {SampleClass.ON_CPU}
    assert len(profile.waits) == 0
    assert "on CPU only" in said


def test_frequency_sets_the_weight_of_a_sample(
    busy: subprocess.Popen[bytes], run_aiflame: RunAiflame, tmp_path: Path
) -> None:
    profile, _ = _record(run_aiflame, tmp_path, busy.pid, "-F", "250")
    on_cpu = profile.samples[profile.samples["klass"] == SampleClass.ON_CPU]
    assert profile.recording.period_ns == 4_000_000
    assert (on_cpu["ns"] == 4_000_000 * on_cpu["count"]).all()
    assert on_cpu["count"].sum() > 0


def test_duration_is_kept(
    busy: subprocess.Popen[bytes], run_aiflame: RunAiflame, tmp_path: Path
) -> None:
    profile, _ = _record(run_aiflame, tmp_path, busy.pid)
    # To the end of the interval that was asked for, and what it takes to notice on a busy machine.
    assert 600_000_000 <= profile.recording.duration_ns < 1_600_000_000


def test_long_waits_are_listed_from_the_length_asked_for(
    busy: subprocess.Popen[bytes], run_aiflame: RunAiflame, tmp_path: Path
) -> None:
    profile, _ = _record(run_aiflame, tmp_path, busy.pid, "--min-wait", "20ms")
    lengths_ns = profile.waits["blocked_ns"] + profile.waits["runnable_ns"]
    assert len(lengths_ns) > 0
    assert lengths_ns.min() >= 20_000_000
    assert lengths_ns.min() < 100_000_000


@cases(
    "options, files",
    [
        (["-o", "a.aiflame"], {"a.aiflame", "a.html"}),
        (["-o", "a.svg"], {"a.svg"}),
        (["-o", "a.folded"], {"a.folded"}),
        (["-f", "speedscope", "-o", "a.json"], {"a.json"}),
        (["-f", "aiflame", "-o", "a.aiflame"], {"a.aiflame"}),
        (["-f", "pprof", "-o", "a.aiflame"], {"a.pb.gz"}),
    ],
)
def test_output_decides_what_is_written(
    busy: subprocess.Popen[bytes],
    run_aiflame: RunAiflame,
    tmp_path: Path,
    options: list[str],
    files: set[str],
) -> None:
    done = run_aiflame("record", "-p", busy.pid, "-d", "200ms", *options)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in tmp_path.iterdir()} == files
    assert all(f"Wrote {name}" in done.stderr for name in files)
    assert done.stdout == ""


def test_default_names_say_what_and_when(
    busy: subprocess.Popen[bytes], run_aiflame: RunAiflame, tmp_path: Path
) -> None:
    done = run_aiflame("record", "-p", busy.pid, "-d", "200ms", "-q")
    assert (done.returncode, done.stderr) == (0, "")
    names = sorted(path.name for path in tmp_path.iterdir())
    stem = names[0].removesuffix(".aiflame")
    assert names == [f"{stem}.aiflame", f"{stem}.html"]
    assert stem.startswith(f"aiflame-serving-{busy.pid}-")


def test_no_samples_is_an_exit_code_of_its_own(
    asleep: Workload, run_aiflame: RunAiflame, tmp_path: Path
) -> None:
    done = run_aiflame("record", "-p", asleep.pid, "-d", "200ms", "--no-off-cpu", "-o", "x.aiflame")
    assert done.returncode == 4
    assert "No samples were captured" in done.stderr
    assert len(read_capture(tmp_path / "x.aiflame").samples) == 0


def _refusal(run_aiflame: RunAiflame, folder: Path, *arguments: object, code: int) -> str:
    before = {path.name for path in folder.iterdir()}
    done = run_aiflame("record", *arguments)
    assert done.returncode == code, done.stderr
    assert {path.name for path in folder.iterdir()} == before
    assert "Traceback" not in done.stderr
    message, _, hint = done.stderr.strip().partition("\n\n  ")
    assert message.startswith("aiflame: ")
    assert hint
    return done.stderr


def test_a_process_that_is_not_there(run_aiflame: RunAiflame, tmp_path: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    said = _refusal(run_aiflame, tmp_path, "-p", ended.pid, code=1)
    assert f"no such process: {ended.pid}" in said


def test_a_thread_is_no_process(
    busy: subprocess.Popen[bytes], run_aiflame: RunAiflame, tmp_path: Path
) -> None:
    threads = {int(path.name) for path in Path(f"/proc/{busy.pid}/task").iterdir()}
    thread = max(threads - {busy.pid})
    said = _refusal(run_aiflame, tmp_path, "-p", thread, code=2)
    assert f"{thread} is a thread" in said
    assert f"aiflame record -p {busy.pid}" in said


@cases("existing", ["x.aiflame", "x.html"])
def test_files_are_not_replaced_unless_forced(
    busy: subprocess.Popen[bytes], run_aiflame: RunAiflame, tmp_path: Path, existing: str
) -> None:
    (tmp_path / existing).write_text("precious")
    options = ("-p", busy.pid, "-d", "200ms", "-o", "x.aiflame")
    assert "--force" in _refusal(run_aiflame, tmp_path, *options, code=2)
    assert (tmp_path / existing).read_text() == "precious"
    assert run_aiflame("record", *options, "--force").returncode == 0
    assert (tmp_path / existing).read_bytes()[:8] != b"precious"


def test_a_command_that_is_not_there(run_aiflame: RunAiflame, tmp_path: Path) -> None:
    assert "no-such-program" in _refusal(run_aiflame, tmp_path, "--", "./no-such-program", code=2)


def test_a_folder_is_no_cgroup(run_aiflame: RunAiflame, tmp_path: Path) -> None:
    assert "not a cgroup v2" in _refusal(run_aiflame, tmp_path, "--cgroup", tmp_path, code=2)


def test_not_permitted(busy: subprocess.Popen[bytes], aiflame_command: tuple[str, ...]) -> None:
    nobody = ("setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups")
    with public_folder() as folder:
        done = subprocess.run(
            [*nobody, *aiflame_command, "record", "-p", str(busy.pid)],
            capture_output=True,
            check=False,
            text=True,
            cwd=folder,
            timeout=60,
        )
        assert list(folder.iterdir()) == []
    assert done.returncode == 3, done.stderr
    assert "not permitted: needs CAP_BPF to load programs" in done.stderr
    assert "sudo" in done.stderr


# What a recording needs, without what it can do without (setpriv's words).
_NEEDED = "-all,+bpf,+perfmon,+sys_ptrace"


def test_missing_capabilities_are_said_with_the_cure_that_helps(
    busy: subprocess.Popen[bytes], aiflame_command: tuple[str, ...], tmp_path: Path
) -> None:
    # GIVEN a kernel that shows its addresses to those with CAP_SYSLOG
    assert Path("/proc/sys/kernel/kptr_restrict").read_text().strip() in "01"
    limited = ("setpriv", f"--bounding-set={_NEEDED}", f"--inh-caps={_NEEDED}")
    done = subprocess.run(
        [*limited, *aiflame_command, "record", "-p", str(busy.pid), "-d", "1", "-o", "run.aiflame"],
        capture_output=True,
        check=False,
        text=True,
        cwd=tmp_path,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    (said,) = (line for line in done.stderr.splitlines() if "kernel_symbols_hidden" in line)
    assert "CAP_SYSLOG" in said and "sysctl" not in said


def _children_commands(pid: int) -> list[str]:
    found = []
    for child in children_of(pid):
        with suppress(OSError):  # it has ended since
            found.append(Path(f"/proc/{child}/cmdline").read_text())
            found += [Path(f"/proc/{fork}/comm").read_text() for fork in children_of(child)]
    return found


def test_of_files_that_were_recorded_before_no_table_is_built(tmp_path: Path) -> None:
    # GIVEN a program of the system, all of whose tables are in the cache, that of the vDSO as well
    sleeping = subprocess.Popen(["sleep", "600"])
    try:
        for name in ("first", "second"):
            (tmp_path / name).mkdir()
            with Recording(tmp_path / name, "-p", sleeping.pid) as recording:
                wait_until(
                    lambda pid=recording.pid: any(
                        "capture_worker" in command for command in _children_commands(pid)
                    )
                )
                commands = _children_commands(recording.pid)
                recording.stop()
    finally:
        sleeping.kill()
        sleeping.wait()
    assert not any("unwind.worker" in command for command in commands)
