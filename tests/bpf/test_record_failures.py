# SPDX-License-Identifier: Apache-2.0
"""What was recorded outlives every error: each step fails once, and a capture is there."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest
from aiflame.agent.capture.reader import read_capture
from aiflame.agent.errors import CaptureError
from aiflame.agent.model.profile import Profile
from breadth import cases
from recordings import Recording, frames_of
from support import AIFLAME, wait_until

pytestmark = pytest.mark.bpf

_FAILING = Path(__file__).parents[1] / "failing.py"
_SESSION = "aiflame.agent.commands.record_session"
_RECORDING = "aiflame.agent.recording"
_RECORDINGS = Path("/var/lib/aiflame/recordings")

# A function of the recorded program (workloads/serving.c).
_OWN = "matrix_multiply"

RunAiflame = Callable[..., subprocess.CompletedProcess[str]]


def _names(profile: Profile) -> set[str]:
    used = set(profile.samples["stack"].tolist())
    return {name for stack in used for name in frames_of(profile, stack)}


def _has_addresses_only(profile: Profile) -> bool:
    names = _names(profile)
    return any(name.startswith("[serving+0x") for name in names) and all(
        name.startswith("[") for name in names
    )


def _left(run_aiflame: RunAiflame, folder: Path) -> list[str]:
    """What `aiflame recover` lists of a folder."""
    listed = run_aiflame("recover")
    assert listed.returncode == 0, listed.stderr
    return [line for line in listed.stdout.splitlines() if f" {folder}/" in line]


def _record_failing(
    folder: Path, pid: int, where: str, call: int | str, *options: str
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, _FAILING, where, str(call), "record", "-p", str(pid), *options]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )


@cases(
    "where, call, has_names, is_complete",
    [
        (f"{_RECORDING}.recorder:Recorder._next_window", 2, True, False),
        (f"{_RECORDING}.recorder:Recorder.stop", 1, True, False),
        (f"{_RECORDING}.recorder:give_all_sleepers", 1, True, False),
        ("aiflame.agent.symbols.service:SymbolService.resolve_many", 1, False, False),
        ("aiflame.agent.symbolize.namer:Namer.name", 2, False, False),
        ("aiflame.agent.symbolize.namer:RawStacks.final_stop_reasons", 1, False, False),
        ("aiflame.agent.devices.devices:Devices.resolve", 1, True, False),
        ("aiflame.agent.launches.calls:ApiCalls.finish", 3, True, False),
        (f"{_SESSION}:loss_rows", 1, True, False),
        (f"{_SESSION}:_opened", 1, True, False),
        (f"{_RECORDING}.recorder:Recorder.__exit__", 1, True, True),
        ("aiflame.agent.capture.reader:read_capture", 1, True, True),
        ("aiflame.agent.reports.html:HtmlReport.render", 1, True, True),
        (f"{_SESSION}:write_output", 1, True, True),
        ("aiflame.agent.commands.record_summary:device_lines", 1, True, True),
    ],
)
def test_an_error_leaves_a_capture(
    busy: subprocess.Popen[bytes],
    tmp_path: Path,
    run_aiflame: RunAiflame,
    where: str,
    call: int,
    has_names: bool,
    is_complete: bool,
) -> None:
    # WHEN something fails after the first second
    ended = _record_failing(tmp_path, busy.pid, where, call, "-d", "2", "-o", "run.aiflame")
    # THEN that is said,
    assert ended.returncode == 1, ended.stderr
    assert f"injected into {where.partition(':')[2]}" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert "Wrote run.aiflame" in ended.stderr
    # there is a capture,
    profile = read_capture(tmp_path / "run.aiflame")
    assert len(profile.samples)
    assert stat.S_IMODE((tmp_path / "run.aiflame").stat().st_mode) == 0o600
    assert (_OWN in _names(profile)) is has_names
    assert _has_addresses_only(profile) is not has_names
    facts = dict(profile.recording.facts)
    assert ("incomplete" in facts) is not is_complete
    assert (facts.get("symbols") == "not resolved") is not has_names
    # which can be rendered, and nothing else is left of it.
    assert run_aiflame("report", "run.aiflame", "-f", "svg").returncode == 0
    assert {path.name for path in tmp_path.iterdir()} <= {"run.aiflame", "run.html", "run.svg"}
    assert _left(run_aiflame, tmp_path) == []


@cases(
    "where", [f"{_RECORDING}.recorder:Recorder.stop", "aiflame.agent.reports.svg:SvgReport.render"]
)
def test_where_no_capture_was_asked_for_an_error_leaves_one(
    busy: subprocess.Popen[bytes], tmp_path: Path, where: str
) -> None:
    ended = _record_failing(tmp_path, busy.pid, where, 1, "-d", "2", "-o", "run.svg")
    assert ended.returncode == 1, ended.stderr
    assert "run.partial.aiflame" in ended.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["run.partial.aiflame"]
    assert len(read_capture(tmp_path / "run.partial.aiflame").samples)


@pytest.mark.breadth
def test_a_capture_that_could_not_be_written_meanwhile_is_written_at_the_end(
    busy: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    where = "aiflame.agent.sinks.capture:CaptureSink.put"
    ended = _record_failing(tmp_path, busy.pid, where, "=2", "-d", "3", "-o", "run.aiflame")
    assert ended.returncode == 0, ended.stderr
    assert "injected into CaptureSink.put" in ended.stderr
    profile = read_capture(tmp_path / "run.aiflame")
    assert _OWN in _names(profile)
    assert len(np.unique(profile.spans["first_s"])) >= 3
    assert "incomplete" not in dict(profile.recording.facts)


@pytest.mark.breadth
def test_a_capture_that_cannot_be_written_at_all_is_made_of_segments_later(
    busy: subprocess.Popen[bytes], tmp_path: Path, run_aiflame: RunAiflame
) -> None:
    where = "aiflame.agent.sinks.capture:CaptureSink.put"
    ended = _record_failing(tmp_path, busy.pid, where, 1, "-d", "2", "-o", "run.aiflame")
    assert ended.returncode == 1, ended.stderr
    assert "aiflame recover" in ended.stderr
    assert list(tmp_path.iterdir()) == []
    recovered = run_aiflame("recover", "run.aiflame")
    assert recovered.returncode == 0, recovered.stderr
    assert _OWN in _names(read_capture(tmp_path / "run.aiflame"))
    assert _left(run_aiflame, tmp_path) == []


def test_an_error_before_anything_was_recorded_leaves_nothing(
    busy: subprocess.Popen[bytes], tmp_path: Path, run_aiflame: RunAiflame
) -> None:
    ended = _record_failing(tmp_path, busy.pid, f"{_RECORDING}.recorder:Recorder.start", 1)
    assert ended.returncode == 1, ended.stderr
    assert list(tmp_path.iterdir()) == []
    assert _left(run_aiflame, tmp_path) == []


@pytest.mark.breadth
def test_a_capture_that_cannot_be_published_is_kept(
    busy: subprocess.Popen[bytes], tmp_path: Path, run_aiflame: RunAiflame
) -> None:
    # GIVEN a folder that goes away while the recording runs
    folder = tmp_path / "folder"
    folder.mkdir()
    with Recording(tmp_path, "-p", busy.pid, "-o", "folder/run.aiflame") as recording:
        folder.rmdir()
        ended = recording.stop()
    assert ended.returncode == 1, ended.stderr
    assert "the recording is kept" in ended.stderr
    assert f"aiflame recover {folder}/run.aiflame" in ended.stderr
    # WHEN it is there again, and the command that was named is typed
    assert len(_left(run_aiflame, folder)) == 1
    folder.mkdir()
    recovered = run_aiflame("recover", folder / "run.aiflame")
    # THEN the capture is there, with names, as it was recorded to the end.
    assert recovered.returncode == 0, recovered.stderr
    profile = read_capture(folder / "run.aiflame")
    assert "__libc_start_main" in _names(profile)
    assert "incomplete" not in dict(profile.recording.facts)
    assert _left(run_aiflame, folder) == []


@pytest.fixture
def killed(busy: subprocess.Popen[bytes], tmp_path: Path) -> Iterator[Path]:
    """Where a recording was to go that was killed in its second second."""
    with _recording(tmp_path, busy.pid) as recording:
        recording.stop(signal.SIGKILL)
    yield tmp_path / "run.aiflame"
    subprocess.run([*AIFLAME, "recover", tmp_path / "run.aiflame", "--discard"], check=False)


@contextmanager
def _recording(folder: Path, pid: int) -> Iterator[Recording]:
    """A recording that has written its first second."""
    with Recording(folder, "-p", pid) as recording:
        wait_until(recording.windows, 60)
        yield recording


def test_a_killed_recording_is_found_and_finished(
    killed: Path, tmp_path: Path, run_aiflame: RunAiflame
) -> None:
    # GIVEN a recording that was killed: nothing has its name, and only root can get to it
    assert list(tmp_path.iterdir()) == []
    for directory in (_RECORDINGS, _RECORDINGS.parent):
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    # WHEN what is there is read as it is, that works
    (line,) = _left(run_aiflame, tmp_path)
    folder = _RECORDINGS / line.split()[0]
    for segments in (folder, *folder.glob("segment-*")):
        shown = run_aiflame("stats", segments)
        assert shown.returncode == 0, shown.stderr
        assert _OWN in shown.stdout
    # WHEN it is asked for
    recovered = run_aiflame("recover", "run.aiflame")
    # THEN it is there.
    assert recovered.returncode == 0, recovered.stderr
    assert f"Wrote {killed}" in recovered.stderr
    assert stat.S_IMODE(killed.stat().st_mode) == 0o600
    profile = read_capture(killed)
    assert len(profile.samples)
    assert _OWN in _names(profile)
    assert "incomplete" in dict(profile.recording.facts)
    assert _left(run_aiflame, tmp_path) == []
    assert run_aiflame("recover", "run.aiflame").returncode == 1


@pytest.mark.breadth
def test_a_killed_recording_names_generated_code_of_a_process_that_is_gone(
    workload: Callable[..., Path], tmp_path: Path, run_aiflame: RunAiflame
) -> None:
    # GIVEN a program that runs code of which its perf map tells the name
    with subprocess.Popen([workload("generated")], stdout=subprocess.PIPE) as target:
        assert target.stdout is not None
        assert target.stdout.readline() == b"ready\n"
        maps = Path(f"/proc/{target.pid}/maps").read_text()
        code = next(line for line in maps.splitlines() if " rwxp " in line).partition("-")[0]
        perf_map = Path(f"/tmp/perf-{target.pid}.map")  # noqa: S108 - the interface
        perf_map.write_text(f"{code} 1000 Generated::spin\n")
        try:
            # WHEN its recording is killed, and then it and its map are gone
            with _recording(tmp_path, target.pid) as recording:
                wait_until(lambda: any(len(w.jit_symbols) for w in recording.windows()), 60)
                recording.stop(signal.SIGKILL)
        finally:
            perf_map.unlink()
            target.kill()
    # THEN the name is in what is recovered
    recovered = run_aiflame("recover", "run.aiflame")
    assert recovered.returncode == 0, recovered.stderr
    assert "Generated::spin" in _names(read_capture(tmp_path / "run.aiflame"))


@pytest.mark.breadth
def test_the_next_command_finishes_a_killed_recording(
    killed: Path, run_aiflame: RunAiflame
) -> None:
    ended = run_aiflame("report", "run.aiflame", "-f", "folded")
    assert ended.returncode == 0, ended.stderr
    assert "a recording that was killed" in ended.stderr
    assert killed.exists()
    assert killed.with_suffix(".folded").exists()


@pytest.mark.breadth
def test_the_next_recording_names_a_killed_one(
    killed: Path, busy: subprocess.Popen[bytes], tmp_path: Path, run_aiflame: RunAiflame
) -> None:
    # GIVEN that another recording takes its name
    ended = run_aiflame("record", "-p", busy.pid, "-d", "1", "-o", "run.aiflame")
    assert ended.returncode == 0, ended.stderr
    assert "killed earlier, and not finished" in ended.stderr
    # THEN that one is not replaced,
    before = killed.read_bytes()
    refused = run_aiflame("recover", "run.aiflame")
    assert refused.returncode == 1
    assert "file exists" in refused.stderr
    assert killed.read_bytes() == before
    # and it can go elsewhere, or away.
    assert run_aiflame("recover", "run.aiflame", "-o", "other.aiflame").returncode == 0
    assert len(read_capture(tmp_path / "other.aiflame").samples)


@pytest.mark.breadth
def test_a_killed_recording_can_be_thrown_away(
    killed: Path, tmp_path: Path, run_aiflame: RunAiflame
) -> None:
    (line,) = _left(run_aiflame, tmp_path)
    assert run_aiflame("recover", line.split()[0], "--discard").returncode == 0
    assert _left(run_aiflame, tmp_path) == []
    assert not killed.exists()


@pytest.mark.breadth
def test_a_running_recording_is_left_alone(
    busy: subprocess.Popen[bytes], tmp_path: Path, run_aiflame: RunAiflame
) -> None:
    with _recording(tmp_path, busy.pid) as recording:
        assert _left(run_aiflame, tmp_path) == []
        assert run_aiflame("recover", "run.aiflame").returncode == 1
        # It can be looked at, as far as it has come.
        so_far = run_aiflame("report", "run.aiflame", "-f", "folded", "-o", "-")
        assert "still being recorded" in so_far.stderr
        assert f";{_OWN}" in so_far.stdout
        ended = recording.stop()
    assert len(ended.profile.samples)


@cases("number", [signal.SIGHUP, signal.SIGQUIT])
def test_a_signal_to_the_whole_job_ends_it_in_order(
    busy: subprocess.Popen[bytes], tmp_path: Path, number: int
) -> None:
    with Recording(tmp_path, "-p", busy.pid, start_new_session=True) as recording:
        os.killpg(recording.pid, number)
        ended = recording.wait()
    assert ended.returncode == 0, ended.stderr
    # However short it was: whoever reads symbols was hit as well.
    assert "__libc_start_main" in _names(ended.profile)
    assert (tmp_path / "run.html").exists()


def test_a_hang_up_aborts_nothing(busy: subprocess.Popen[bytes], tmp_path: Path) -> None:
    # A shell passes it on, and systemd sends it with SIGTERM: all arrive at once.
    with Recording(tmp_path, "-p", busy.pid) as recording:
        for number in (signal.SIGSTOP, signal.SIGHUP, signal.SIGTERM):
            recording.process.send_signal(number)
        ended = recording.stop(signal.SIGCONT)
    assert ended.returncode == 0, ended.stderr
    assert len(ended.profile.samples)


@pytest.mark.breadth
def test_a_hang_up_that_is_ignored_ends_nothing(
    busy: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    # GIVEN nohup
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with _recording(tmp_path, busy.pid) as recording:
            recording.process.send_signal(signal.SIGHUP)
            wait_until(lambda: not _pending(recording.pid, signal.SIGHUP))
            assert recording.process.poll() is None
            assert len(recording.stop().profile.samples)
    finally:
        signal.signal(signal.SIGHUP, before)


def _pending(pid: int, number: int) -> bool:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    masks = [int(line.split()[1], 16) for line in lines if line.startswith(("ShdPnd", "SigPnd"))]
    return any(mask >> (number - 1) & 1 for mask in masks)


def test_a_terminal_that_is_gone(busy: subprocess.Popen[bytes], tmp_path: Path) -> None:
    # GIVEN a recording in a terminal of its own
    terminal, end = os.openpty()
    command = [*AIFLAME, "record", "-p", str(busy.pid), "-o", "run.aiflame"]
    recorder = subprocess.Popen(
        ["setsid", "--ctty", "--wait", *command], cwd=tmp_path, stdin=end, stdout=end, stderr=end
    )
    os.close(end)
    said = b""
    while b"attached" not in said:
        said += os.read(terminal, 4096)
    # WHEN it is closed, which sends SIGHUP
    os.close(terminal)
    # THEN the recording ends in order.
    assert recorder.wait(60) == 0
    assert len(read_capture(tmp_path / "run.aiflame").samples)
    assert (tmp_path / "run.html").exists()


def _hung_up(recording: Recording) -> None:
    """Takes the reader of its output away, as where an ssh without a terminal is cut."""
    for stream in (recording.process.stdout, recording.process.stderr):
        assert stream is not None
        stream.close()


def test_a_reader_that_goes_ends_a_recording_in_order(
    busy: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    with Recording(tmp_path, "-p", busy.pid) as recording:
        wait_until(recording.windows, 60)
        _hung_up(recording)
        assert recording.process.wait(60) == 0
    assert len(read_capture(tmp_path / "run.aiflame").samples)
    assert (tmp_path / "run.html").exists()


def test_a_reader_that_goes_ends_no_flight_recorder(
    busy: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    with Recording(tmp_path, "--keep", "10m", "-p", busy.pid) as recording:
        wait_until(recording.windows, 60)
        _hung_up(recording)
        several = len(recording.windows()) + 3
        wait_until(lambda: len(recording.windows()) >= several, 60)
        recording.process.send_signal(signal.SIGINT)
        assert recording.process.wait(60) == 0
    assert len(read_capture(tmp_path / "run.aiflame").samples)


# The line of progress comes after ten seconds.
_UNREAD = [("2>&1 | head -n 1", 12), ("2>/dev/full", 2), ("2>/dev/full", 12), (">&- 2>&-", 2)]


@pytest.fixture(scope="module")
def unread(
    busy: subprocess.Popen[bytes], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[tuple[str, int], tuple[Path, subprocess.Popen[bytes]]]]:
    """Recordings whose messages nobody can read, all at once, and their folders."""
    with ExitStack() as stack:
        started = {}
        for redirection, seconds in _UNREAD:
            folder = tmp_path_factory.mktemp("unread")
            words = " ".join([*AIFLAME, "record", "-p", str(busy.pid), "-d", str(seconds)])
            script = f"set -o pipefail; {words} -o run.aiflame {redirection}"
            process = subprocess.Popen(["bash", "-c", script], cwd=folder)
            started[redirection, seconds] = (folder, stack.enter_context(process))
        yield started


@cases("redirection, seconds", _UNREAD)
def test_messages_that_nobody_can_read(
    unread: dict[tuple[str, int], tuple[Path, subprocess.Popen[bytes]]],
    redirection: str,
    seconds: int,
) -> None:
    folder, recorder = unread[redirection, seconds]
    assert recorder.wait(120) == 0
    assert len(read_capture(folder / "run.aiflame").samples)
    assert (folder / "run.html").read_bytes().startswith(b"<!doctype html>")


def _has_a_window(recordings: Path, copy: Path) -> bool:
    """Whether the capture of another mount namespace holds something, of which a copy tells."""
    databases = list(recordings.glob("*/capture.aiflame"))
    if not databases:
        return False
    copy.write_bytes(databases[0].read_bytes())
    try:
        return len(read_capture(copy).samples) > 0
    except CaptureError:  # it is being written
        return False


def test_a_full_disk_under_the_working_directory(
    busy: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    # GIVEN a recording whose working directory is on a small disk, in a mount namespace of its own
    _RECORDINGS.mkdir(mode=0o700, parents=True, exist_ok=True)
    words = " ".join([*AIFLAME, "record", "-p", str(busy.pid), "-o", "run.aiflame"])
    mount = f"mount -t tmpfs -o size=8m,mode=700 none {_RECORDINGS}; mount -t tmpfs -o ro none /run"
    recorder = subprocess.Popen(
        ["unshare", "-m", "sh", "-c", f"{mount}; exec {words}"],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
    )
    recordings = Path(f"/proc/{recorder.pid}/root/{_RECORDINGS}")
    assert recorder.stderr is not None
    # Beyond which it may say that tables are being made: it has no cache.
    assert any(line.startswith("attached") for line in recorder.stderr)
    wait_until(lambda: _has_a_window(recordings, tmp_path / "copy"), 60)
    (tmp_path / "copy").unlink()
    # WHEN that disk is full
    with pytest.raises(OSError, match="No space left"), (recordings / "filler").open("wb") as file:
        while file.write(bytes(4096)):
            file.flush()
    # THEN the recording ends and says so, and what was stored by then has its name.
    _, said = recorder.communicate(timeout=120)
    assert recorder.returncode == 1, said
    assert "free some space" in said
    assert "Traceback" not in said
    assert [path.name for path in tmp_path.iterdir()] == ["run.aiflame"]
    assert len(read_capture(tmp_path / "run.aiflame").samples)
