# SPDX-License-Identifier: Apache-2.0
"""How a recording ends: by signals, by force, for want of space; and what it leaves."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import stat
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from aiflame.agent.capture.reader import read_capture
from breadth import cases
from recordings import Recording, Workload, children_of, public_folder
from support import AIFLAME, serving, wait_until

pytestmark = pytest.mark.bpf


@pytest.fixture
def busy(workload: Callable[..., Path]) -> Iterator[subprocess.Popen[bytes]]:
    """A program that both computes and waits, for longer than any test takes."""
    with serving(workload("serving")) as process:
        yield process


def _files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@cases("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_ends_a_recording_in_order(
    busy: subprocess.Popen[bytes], tmp_path: Path, number: int
) -> None:
    with Recording(tmp_path, "-p", busy.pid) as recording:
        ended = recording.stop(number)
    assert ended.returncode == 0, ended.stderr
    assert _files(tmp_path) == {"run.aiflame", "run.html"}
    assert "Wrote run.aiflame" in ended.stderr
    assert "Next: aiflame" in ended.stderr
    assert len(ended.profile.samples)


def test_a_signal_to_its_group_as_well_ends_it_in_order(
    busy: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    # As timeout(1) ends a command.
    with Recording(tmp_path, "-p", busy.pid) as recording:
        recording.process.send_signal(signal.SIGTERM)
        ended = recording.stop(signal.SIGTERM)
    assert ended.returncode == 0, ended.stderr
    assert _files(tmp_path) == {"run.aiflame", "run.html"}


@contextmanager
def _completing(folder: Path, pid: int) -> Iterator[Recording]:
    """A recording that a Ctrl-C has ended, and that waits for its capture, whose writer stops."""
    with Recording(folder, "-v", "-p", pid) as recording:
        wait_until(recording.windows, 60)
        (writer,) = _helpers(recording.pid, "capture_worker")
        os.kill(writer, signal.SIGSTOP)
        recording.process.send_signal(signal.SIGINT)
        assert recording.process.stderr is not None
        said = ""
        while not said.startswith("Stopping"):
            said = recording.process.stderr.readline()
            assert said, "it has ended"
        yield recording


def test_a_second_ctrl_c_leaves_nothing(
    busy: subprocess.Popen[bytes],
    tmp_path: Path,
    run_aiflame: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    with _completing(tmp_path, busy.pid) as recording:
        # What comes within half a second may be the same request.
        later_s = time.monotonic() + 0.5
        wait_until(lambda: time.monotonic() > later_s)
        ended = recording.stop(signal.SIGINT)
    assert ended.returncode == 130, ended.stderr
    assert "aborted: nothing was written" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert _files(tmp_path) == set()
    assert f"{tmp_path}/run.aiflame" not in run_aiflame("recover").stdout


@cases("number", [signal.SIGTERM, signal.SIGQUIT])
def test_a_second_signal_of_a_supervisor_leaves_it_to_recover(
    busy: subprocess.Popen[bytes],
    tmp_path: Path,
    run_aiflame: Callable[..., subprocess.CompletedProcess[str]],
    number: int,
) -> None:
    # GIVEN a recording that was told to end, and takes long, WHEN it is told so by another signal
    with _completing(tmp_path, busy.pid) as recording:
        ended = recording.stop(number)
    # THEN it ends at once, and says where what it has recorded is
    assert ended.returncode == 1, ended.stderr
    assert f"{signal.Signals(number).name}; the recording is kept" in ended.stderr
    assert f"aiflame recover {tmp_path}/run.aiflame" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert _files(tmp_path) == set()
    # AND nothing of that is lost.
    recovered = run_aiflame("recover", "run.aiflame")
    assert recovered.returncode == 0, recovered.stderr
    assert len(read_capture(tmp_path / "run.aiflame").samples)


def test_a_command_is_not_begun_by_a_recorder_that_was_told_to_end(tmp_path: Path) -> None:
    # GIVEN a recorder that prepares, and heeds signals by now
    command = [*AIFLAME, "record", "-o", "run.aiflame", "--", "touch", "it ran"]
    recorder = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    while not _catches(recorder.pid, signal.SIGTERM):  # without pauses: it takes half a second
        assert recorder.poll() is None
    # WHEN it is told to end, and its command is not
    recorder.send_signal(signal.SIGTERM)
    _, said = recorder.communicate(timeout=60)
    # THEN the command never runs, and it says so
    assert recorder.returncode == 130, said
    assert "told to end before the command began: nothing was written" in said
    assert _files(tmp_path) == set()


def _catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal (proc_pid_status(5))."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (mask,) = (int(line.split()[1], 16) for line in lines if line.startswith("SigCgt"))
    return bool(mask >> (number - 1) & 1)


def test_the_end_of_the_target_ends_a_recording(
    busy: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    with Recording(tmp_path, "-p", busy.pid) as recording:
        busy.kill()
        ended = recording.wait()
    assert ended.returncode == 0, ended.stderr
    assert _files(tmp_path) == {"run.aiflame", "run.html"}
    assert all(process.exited_ns is not None for process in ended.profile.processes)


@cases("report", [["stats"], ["report", "-f", "folded", "-o", "-"]])
def test_ctrl_c_ends_other_verbs_without_a_trace(
    busy: subprocess.Popen[bytes], tmp_path: Path, report: list[str]
) -> None:
    # GIVEN a verb that waits to be read, since the pipe it writes to is full
    with Recording(tmp_path, "-p", busy.pid) as recording:
        recording.stop()
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    os.write(writer, bytes(4096))
    command = [*AIFLAME, report[0], "run.aiflame", *report[1:]]
    verb = subprocess.Popen(command, cwd=tmp_path, stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    # The system call it is in: write (1) to standard output (1); proc.rst, v6.1.
    wait_until(lambda: Path(f"/proc/{verb.pid}/syscall").read_text().startswith("1 0x1 "), 60)
    # WHEN Ctrl-C is pressed
    verb.send_signal(signal.SIGINT)
    _, said = verb.communicate(timeout=60)
    os.close(reader)
    # THEN it ends as programs do that a Ctrl-C ends
    assert verb.returncode == 130
    assert b"Traceback" not in said


def test_ctrl_c_ends_doctor_without_a_trace(tmp_path: Path) -> None:
    doctor = subprocess.Popen(
        [*AIFLAME, "doctor"], cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    # It compiles in a child, as a recording does: by then it is at work.
    wait_until(lambda: children_of(doctor.pid) or doctor.poll() is not None, 60)
    doctor.send_signal(signal.SIGINT)
    _, said = doctor.communicate(timeout=60)
    assert doctor.returncode in (0, 130)
    assert b"Traceback" not in said


def test_a_killed_recording_leaves_nothing_that_runs_or_is_half(
    busy: subprocess.Popen[bytes], tmp_path: Path, run_aiflame: Callable[..., object]
) -> None:
    with Recording(tmp_path, "-p", busy.pid) as recording:
        children = children_of(recording.pid)
        ended = recording.stop(signal.SIGKILL)
    assert ended.returncode == -signal.SIGKILL
    assert _files(tmp_path) == set()
    wait_until(lambda: not any(Path(f"/proc/{child}").exists() for child in children))
    run_aiflame("recover", "run.aiflame", "--discard")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """`small_disk(kilobytes)` mounts a file system of that size."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def mount(kilobytes: int) -> Path:
        options = f"size={kilobytes}k"
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", folder], check=True)
        return folder

    yield mount
    subprocess.run(["umount", "--lazy", folder], check=True)


@cases("kilobytes", [16, 100])
def test_a_full_disk_loses_nothing(
    workload: Callable[..., Path],
    small_disk: Callable[[int], Path],
    run_aiflame: Callable[..., subprocess.CompletedProcess[str]],
    kilobytes: int,
) -> None:
    # GIVEN a disk that has no room for a capture
    folder = small_disk(kilobytes)
    command = [*AIFLAME, "record", "-o", "run.aiflame"]
    with Workload([workload("lives"), "crowd"]) as crowd:
        # WHEN two thousand threads are recorded
        recorder = subprocess.Popen(
            [*command, "-p", str(crowd.pid), "-d", "1"],
            cwd=folder,
            stderr=subprocess.PIPE,
            text=True,
        )
        crowd.go()
        crowd.truth()
        _, said = recorder.communicate(timeout=60)
    # THEN it says so, and leaves nothing there
    assert recorder.returncode == 1, said
    assert "free some space" in said
    assert f"aiflame recover {folder}/run.aiflame" in said
    assert "Traceback" not in said
    assert _files(folder) == set()
    # until there is room.
    subprocess.run(["mount", "-o", "remount,size=50m", folder], check=True)
    ended = run_aiflame("recover", folder / "run.aiflame")
    assert ended.returncode == 0, ended.stderr
    profile = read_capture(folder / "run.aiflame")
    assert len(profile.threads) > 2000
    assert "incomplete" not in dict(profile.recording.facts)


def test_the_command_runs_as_the_sudo_user_who_owns_the_files(
    workload: Callable[..., Path],
) -> None:
    user = {"SUDO_UID": "65534", "SUDO_GID": "65534", "SUDO_USER": "nobody"}
    with public_folder() as folder:
        program = shutil.copy(workload("lives"), folder)
        with Recording(folder, "--", program, "first", env={**os.environ, **user}) as recording:
            out, said = recording.process.communicate(timeout=60)
        assert recording.process.returncode == 0, said
        assert out == "uid 65534 gid 65534 home /nonexistent\n"
        for name in ("run.aiflame", "run.html"):
            status = (folder / name).stat()
            assert (status.st_uid, status.st_gid) == (65534, 65534)
            assert stat.S_IMODE(status.st_mode) == 0o600


@cases(
    "script, exit_code, words",
    [
        ("exit 0", 0, None),
        ("exit 3", 3, "sh ended with exit code 3."),
        ("kill -KILL $$", 137, "sh was killed by signal 9 (SIGKILL): exit code 137."),
    ],
)
def test_the_recorder_ends_with_its_command_and_as_it_did(
    tmp_path: Path, script: str, exit_code: int, words: str | None
) -> None:
    with Recording(tmp_path, "--", "sh", "-c", script) as recording:
        ended = recording.wait()
    assert ended.returncode == exit_code, ended.stderr
    assert _files(tmp_path) == {"run.aiflame", "run.html"}
    said = [line for line in ended.stderr.splitlines() if "exit code" in line]
    assert said == ([] if words is None else [words])


@cases("options", [["-d", "1"], []])
def test_a_command_that_is_ended_by_the_recorder_did_not_fail(
    workload: Callable[..., Path], tmp_path: Path, options: list[str]
) -> None:
    with Recording(tmp_path, *options, "--", workload("serving"), "600") as recording:
        wait_until(recording.windows, 60)
        ended = recording.wait() if options else recording.stop()
    assert ended.returncode == 0, ended.stderr
    assert "exit code" not in ended.stderr


def test_a_failure_to_write_comes_before_the_command_s(
    tmp_path: Path, small_disk: Callable[[int], Path]
) -> None:
    folder = small_disk(16)
    with Recording(folder, "--", "sh", "-c", "exit 3") as recording:
        ended = recording.wait()
    assert ended.returncode == 1, ended.stderr
    discard = [*AIFLAME, "recover", "--discard", str(folder / "run.aiflame")]
    subprocess.run(discard, capture_output=True, check=True)


def test_children_of_the_recorder_that_die_cost_nothing(
    workload: Callable[..., Path], tmp_path: Path
) -> None:
    # GIVEN a program whose unwind table no cache has, so that a child builds it
    number = int.from_bytes(os.urandom(8), "little")
    program = workload("serving", f"-Wl,--build-id=0x{number:016x}")
    target = subprocess.Popen([program, "600"], stdout=subprocess.DEVNULL)
    try:
        with Recording(tmp_path, "-p", target.pid) as recording:
            # WHEN its children are killed while they wait for work, and the target works on
            for module in ("unwind.worker", "symbols.worker"):
                wait_until(partial(_idle_helpers, recording.pid, module), 60)
                for helper in _idle_helpers(recording.pid, module):
                    os.kill(helper, signal.SIGKILL)
            so_far_s, used_s = _cpu_s(target.pid), _cpu_s(recording.pid)
            wait_until(lambda: _cpu_s(target.pid) > so_far_s + 1, 60)
            used_s = _cpu_s(recording.pid) - used_s
            ended = recording.stop()
    finally:
        target.kill()
        target.wait()
    # THEN everything has its name, and the recorder has not spun
    assert {function.name for function in ended.profile.functions} >= {"main"}
    assert used_s < 0.5


def test_a_capture_is_written_once_more_if_its_process_dies(
    busy: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    with Recording(tmp_path, "-p", busy.pid) as recording:
        wait_until(recording.windows, 60)
        (writer,) = _helpers(recording.pid, "capture_worker")
        os.kill(writer, signal.SIGKILL)
        ended = recording.stop()
    assert ended.returncode == 0, ended.stderr
    assert "the capture is written once more" in ended.stderr
    assert {function.name for function in ended.profile.functions} >= {"main"}
    assert dict(ended.profile.recording.facts).keys().isdisjoint({"incomplete", "symbols"})


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")  # utime, stime


def _helpers(pid: int, module: str) -> list[int]:
    """Children, and children of these, that run a module."""
    children = children_of(pid)
    below = [*children, *(each for child in children for each in children_of(child))]
    return [each for each in below if module.encode() in _command(each)]


def _idle_helpers(pid: int, module: str) -> list[int]:
    """Those that read (0) standard input (0): they wait for work."""
    return [
        helper
        for helper in _helpers(pid, module)
        if Path(f"/proc/{helper}/syscall").read_text().startswith("0 0x0 ")
    ]


def _command(pid: int) -> bytes:
    """Its command line, and what it is called now: as what a fork of the fork server runs."""
    try:
        return b"".join(Path(f"/proc/{pid}/{name}").read_bytes() for name in ("cmdline", "comm"))
    except OSError:
        return b""
