# SPDX-License-Identifier: Apache-2.0
"""Recordings of programs that know the truth about themselves, and questions to a profile.

A test starts a workload (see workloads/truth.h), attaches, lets the workload run, reads what it
measured itself, ends the recording, and compares. Nothing here sleeps: each step waits for the
line in which the other side says that it is there.
"""

from __future__ import annotations

import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from aiflame.agent.capture.reader import read_capture
from aiflame.agent.model.profile import FrameKind, Profile, SampleClass, Thread
from aiflame.agent.model.window import Window
from aiflame.agent.sinks.segments import RecordedWindows, are_segments
from support import AIFLAME

# Where root's recordings are until they have their names.
_RECORDINGS = Path("/var/lib/aiflame/recordings")

# A recorder needs a second to stop; a machine with other work several.
_PATIENCE_S = 60


class Workload(AbstractContextManager["Workload"]):
    """A program that follows the protocol of workloads/truth.h.

    Args:
        command: Program and arguments.
        keywords: As for subprocess.Popen.
    """

    def __init__(self, command: Sequence[object], **keywords: Any) -> None:
        self.process = subprocess.Popen(
            [*map(str, command)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            **keywords,
        )
        self.pid = self.process.pid
        assert self.line() == "ready"

    def line(self) -> str:
        """Waits for a line that it writes."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the workload ended early: {self.process.poll()}"
        return line.rstrip("\n")

    def go(self) -> None:
        """Lets it begin."""
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def truth(self) -> dict[str, int]:
        """Waits until it is done; returns what it measured."""
        measured = {}
        while (line := self.line()) != "done":
            name, value = line.split()
            measured[name] = int(value)
        return measured

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
        try:
            self.process.wait(_PATIENCE_S)
        finally:
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait()


@dataclass(frozen=True, slots=True)
class Ended:
    """An `aiflame record` that has ended."""

    returncode: int
    stderr: str
    capture: Path

    @property
    def profile(self) -> Profile:
        """Its capture."""
        assert self.returncode == 0, self.stderr
        return read_capture(self.capture)


class Recording(AbstractContextManager["Recording"]):
    """An `aiflame record` in the background, attached once this returns.

    Args:
        folder: Where it runs; its capture is run.aiflame there unless arguments say -o.
        arguments: What follows the verb.
        patience_s: How long it may take to end.
        program: What records.
        keywords: As for subprocess.Popen.
    """

    def __init__(
        self,
        folder: Path,
        *arguments: object,
        patience_s: float = _PATIENCE_S,
        program: Sequence[str] = (*AIFLAME, "record"),
        **keywords: Any,
    ) -> None:
        self._patience_s = patience_s
        words = [*map(str, arguments)]
        if "-o" not in words:
            words = ["-o", "run.aiflame", *words]
        self.capture = folder / words[words.index("-o") + 1]
        self.process = subprocess.Popen(
            [*program, *words],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **keywords,
        )
        self.pid = self.process.pid
        assert self.process.stderr is not None
        self._said = ""
        while not self._said.rpartition("\n")[0].rpartition("\n")[2].startswith("attached"):
            line = self.process.stderr.readline()
            assert line, f"not attached: {self._said}"
            self._said += line

    def windows(self) -> list[Window]:
        """Returns what it has written so far."""
        found = next(_RECORDINGS.glob(f"*-{self.pid}"), None)
        return list(RecordedWindows(found)) if found is not None and are_segments(found) else []

    def stop(self, number: int = signal.SIGINT) -> Ended:
        """Ends it as a user does."""
        self.process.send_signal(number)
        return self.wait()

    def wait(self) -> Ended:
        """Waits until it ends by itself."""
        _, rest = self.process.communicate(timeout=self._patience_s)
        return Ended(self.process.returncode, self._said + rest, self.capture)

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.communicate()
            # What it kept for `recover` is of no use to anybody.
            discard = [*AIFLAME, "recover", "--discard", str(self.capture.absolute())]
            subprocess.run(discard, capture_output=True, check=False)


def record_workload(
    folder: Path, workload: Workload, *arguments: object
) -> tuple[Profile, dict[str, int]]:
    """Records a whole run of a workload; returns the profile and the truth."""
    with workload, Recording(folder, "-p", workload.pid, *arguments) as recording:
        workload.go()
        truth = workload.truth()
        return recording.stop().profile, truth


def frames_of(profile: Profile, stack: int) -> list[str]:
    """Returns the names of a stack's frames, root first."""
    begin, end = profile.stacks.offsets[stack : stack + 2]
    functions = profile.frames["function"][profile.stacks.frames[begin:end]]
    return [profile.functions[function].name for function in functions]


def stacks_with(profile: Profile, function: str) -> npt.NDArray[np.bool_]:
    """Returns which stacks a function is in, shape (stacks,)."""
    stacks = range(len(profile.stacks))
    return np.array([function in frames_of(profile, stack) for stack in stacks], bool)


def rows_of(
    profile: Profile,
    function: str | None = None,
    thread: str | None = None,
    *classes: SampleClass,
) -> npt.NDArray[np.void]:
    """Returns the samples under a function, of the threads of a name, of some classes (or all)."""
    rows = profile.samples
    if function is not None:
        rows = rows[stacks_with(profile, function)[rows["stack"]]]
    if thread is not None:
        rows = rows[[profile.threads[index].name == thread for index in rows["thread"]]]
    return rows[np.isin(rows["klass"], classes)] if classes else rows


def ns_of(
    profile: Profile,
    function: str | None = None,
    thread: str | None = None,
    *classes: SampleClass,
) -> int:
    """Returns the nanoseconds of `rows_of`."""
    return int(rows_of(profile, function, thread, *classes)["ns"].sum())


def count_of(
    profile: Profile,
    function: str | None = None,
    thread: str | None = None,
    *classes: SampleClass,
) -> int:
    """Returns the samples or intervals of `rows_of`."""
    return int(rows_of(profile, function, thread, *classes)["count"].sum())


OFF_CPU = (SampleClass.BLOCKED, SampleClass.WAITING_TO_RUN, SampleClass.PREEMPTED)


def thread_named(profile: Profile, name: str) -> Thread:
    """Returns the one thread of a name."""
    (thread,) = (thread for thread in profile.threads if thread.name == name)
    return thread


def off_cpu_by_thread(profile: Profile) -> npt.NDArray[np.int64]:
    """Returns the exact off-CPU nanoseconds of each thread, shape (threads,)."""
    rows = profile.samples[profile.samples["klass"] != SampleClass.ON_CPU]
    sums = np.bincount(rows["thread"], weights=rows["ns"], minlength=len(profile.threads))
    return sums.astype(np.int64)


def children_of(pid: int) -> list[int]:
    """Returns the pids of a process's children, the youngest last: pids begin anew now and then."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and f"\nPPid:\t{pid}\n" in (folder / "status").read_text():
                # Documentation/filesystems/proc.rst: starttime, ticks since boot.
                words = (folder / "stat").read_text().rpartition(")")[2].split()
                found.append((int(words[19]), int(folder.name)))
        except OSError:  # noqa: PERF203 - it has ended since the listing
            continue
    return [child for _, child in sorted(found)]


@contextmanager
def public_folder() -> Iterator[Path]:
    """Yields a folder that every user may enter and write to; pytest closes those of its own."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o777)
        yield Path(name)


class PythonLine(NamedTuple):
    """One Python frame of a stack."""

    name: str
    file: str
    line: int


def python_frames_of(profile: Profile, stack: int) -> tuple[PythonLine, ...]:
    """Returns the Python frames of a stack, root first."""
    begin, end = profile.stacks.offsets[stack : stack + 2]
    found = []
    for row in profile.frames[profile.stacks.frames[begin:end]]:
        function = profile.functions[row["function"]]
        if function.kind is FrameKind.PYTHON:
            found.append(PythonLine(function.name, function.file, int(row["line"])))
    return tuple(found)


def rows_of_process(profile: Profile, pid: int, *classes: SampleClass) -> npt.NDArray[np.void]:
    """Returns the samples of a process, of some classes (or all)."""
    rows = rows_of(profile, None, None, *classes)
    owners = (profile.threads[index].process for index in rows["thread"])
    return rows[[profile.processes[owner].pid == pid for owner in owners]]
