# SPDX-License-Identifier: Apache-2.0
"""A program with the helper for NVIDIA in it, and what the helper tells.

The driver, CUPTI and the runtime are those of tests/standin. The memory is read, and the control
pipe written, as a recorder does it.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import stat
import struct
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from aiflame.agent.losses import LossKind
from aiflame.gpu import protocol
from aiflame.gpu.base import Host
from aiflame.gpu.protocol import (
    Code,
    Context,
    Failed,
    Hello,
    HelperDevice,
    HelperError,
    HelperLoss,
    HelperTier,
    Name,
    Node,
    Passing,
    Reasons,
    State,
)
from aiflame.gpu.ring import RingReader
from support import wait_until

ROOT = Path(__file__).parents[1]
STANDIN = ROOT / "tests/standin"
HELPER = ROOT / "gpu/nvidia/helper"

_CONTROL = struct.Struct("<8I")
_MAGIC, _START, _STOP = 0x63666961, 1, 2
MEMFD = "/memfd:aiflame-"
# Of a helper that only its test knows.
ALONE = '-DMEMORY_NAME=\\"aiflame-alone\\"'
# memory_header.control_fd
_CONTROL_FD = struct.Struct("<i")
_CONTROL_FD_AT = 48
# memory_header.facts_head
_FACTS_HEAD = struct.Struct("<Q")
_FACTS_HEAD_AT = 40

# As STANDIN of standin.h has it.
BLOCK_NS = 1000
SAMPLES_OF_BLOCK = 8


# Where those without any flag are, for all that run tests: they are made once, and copied.
_BUILT = ROOT / "build/standin"
_CUPTI, _LIBRARY = "libcupti.so.12", "libaiflame-nvidia.so"


def _make_standin(folder: Path, *words: str) -> None:
    command = ["make", "--silent", "--no-print-directory", "-C", STANDIN, f"OUT={folder}", *words]
    subprocess.run(command, check=True)


def _make_helper(folder: Path, *flags: str) -> None:
    command = ["make", "--silent", "--no-print-directory", "-C", HELPER]
    words = (f"OUT={folder / _LIBRARY}", f"EXTRA={' '.join(flags)}")
    subprocess.run([*command, *words], check=True)


@cache
def prebuilt() -> Path:
    """Returns the stand-ins and the helper, made where their sources have changed."""
    _BUILT.mkdir(parents=True, exist_ok=True)
    # `make test` has several runs of pytest side by side.
    with _BUILT.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _make_standin(_BUILT)
        _make_helper(_BUILT)
    return _BUILT


@cache
def _prebuilt_alone() -> Path:
    folder = _BUILT / "alone"
    with _BUILT.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        folder.mkdir(exist_ok=True)
        _make_helper(folder, ALONE)
    return folder / _LIBRARY


def build(folder: Path, *flags: str, without: str = "", cupti: str = "") -> Path:
    """Puts the stand-ins and the helper into a folder.

    Args:
        folder: Is made.
        flags: For the compiler, of the helper.
        without: A function that CUPTI's stand-in lacks.
        cupti: A flag for the compiler, of CUPTI's stand-in.
    """
    shutil.copytree(prebuilt(), folder, dirs_exist_ok=True)
    if without:
        cupti = f"-D{without}=absent_{without}"
    if cupti:
        (folder / _CUPTI).unlink()
        _make_standin(folder, f"WITHOUT={cupti}", f"{folder / _CUPTI}")
    if flags:
        (folder / _LIBRARY).unlink()
        _make_helper(folder, *flags)
    return folder


def build_all(folder: Path, *flags: str) -> Path:
    """The same, all of it with flags for the compiler."""
    folder.mkdir(parents=True, exist_ok=True)
    _make_standin(folder, f"EXTRA={' '.join(flags)}")
    _make_helper(folder, *flags)
    return folder


def build_alone(folder: Path, *flags: str, without: str = "", cupti: str = "") -> Path:
    """Does as `build`, with a helper that recorders of the whole machine do not find.

    Other tests run such recorders at the same time, which ask each helper for what they want.
    """
    build(folder, without=without, cupti=cupti)
    (folder / _LIBRARY).unlink()
    if flags:
        _make_helper(folder, *flags, ALONE)
    else:
        shutil.copy(_prebuilt_alone(), folder)
    return folder


@dataclass
class Told:
    """All that a helper told so far."""

    hellos: list[Hello] = field(default_factory=list)
    devices: dict[int, HelperDevice] = field(default_factory=dict)
    contexts: dict[int, Context] = field(default_factory=dict)
    reasons: dict[int, dict[int, str]] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=lambda: {0: ""})
    codes: list[Code] = field(default_factory=list)
    nodes: dict[int, Node] = field(default_factory=dict)
    times: list[npt.NDArray[np.void]] = field(default_factory=list)
    stalls: list[protocol.Stalls] = field(default_factory=list)
    unloaded: list[protocol.CodeUnloaded] = field(default_factory=list)
    windows: list[protocol.Serialised] = field(default_factory=list)
    losses: Counter[HelperLoss] = field(default_factory=Counter)
    errors: list[Failed] = field(default_factory=list)
    states: list[State] = field(default_factory=list)
    damaged: Counter[LossKind] = field(default_factory=Counter)

    def lose(self, kind: LossKind, count: int = 1) -> None:
        self.damaged[kind] += count

    @property
    def tier(self) -> HelperTier:
        return HelperTier(self.hellos[-1].tier)

    @property
    def failed(self) -> list[tuple[HelperError, str]]:
        return [(HelperError(error.error), error.what) for error in self.errors]

    @property
    def kernel_times(self) -> npt.NDArray[np.void]:
        """All rows of protocol.TIMES."""
        return np.concatenate([np.empty(0, protocol.TIMES), *self.times])

    def durations_ns(self) -> dict[str, int]:
        """Nanoseconds of kernels by name."""
        found: Counter[str] = Counter()
        for row in self.kernel_times:
            found[self.names[int(row["name"])]] += int(row["end_ns"]) - int(row["begin_ns"])
        return dict(found)

    def samples(self) -> Counter[tuple[str, int, str]]:
        """Samples by function, offset and reason."""
        found: Counter[tuple[str, int, str]] = Counter()
        for batch in self.stalls:
            reasons = self.reasons[batch.context]
            for row in batch.stalls:
                name, reason = self.names[int(row["name"])], reasons[int(row["reason"])]
                found[name, int(row["offset"]), reason] += int(row["count"])
        return found

    def takes(self, fact: protocol.AnyFact) -> None:
        """Adds a fact."""
        if isinstance(fact, Hello):
            self.hellos.append(fact)
        elif isinstance(fact, HelperDevice):
            self.devices[fact.device] = fact
        elif isinstance(fact, Context):
            self.contexts[fact.context] = fact
        elif isinstance(fact, Reasons):
            self.reasons[fact.context] = {
                int(row["reason"]): self.names[int(row["name"])] for row in fact.reasons
            }
        elif isinstance(fact, Name):
            self.names[fact.name] = fact.text
        elif isinstance(fact, Code):
            self.codes.append(fact)
        else:
            self.nodes[fact.node] = fact


class Memory:
    """What a process shares, found as a recorder finds it."""

    process = 0

    def __init__(self, pid: int) -> None:
        line = next(line for line in _maps(pid) if MEMFD in line)
        begin = int(line.split("-")[0], 16)
        self._base = 0
        try:
            self._fd = os.open(f"/proc/{pid}/map_files/{line.split()[0]}", os.O_RDONLY)
        except OSError:  # not root
            self._fd = os.open(f"/proc/{pid}/mem", os.O_RDONLY)
            self._base = begin

    def read(self, size: int, offset: int) -> bytes:
        try:
            return os.pread(self._fd, size, self._base + offset)
        except OSError:
            return b""

    def close(self) -> None:
        os.close(self._fd)


def _maps(pid: int) -> list[str]:
    with suppress(OSError):
        return Path(f"/proc/{pid}/maps").read_text().splitlines()
    return []


class Helped:
    """A process with the helper in it: what that tells, and its control pipe."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.told = Told()
        self._memory: Memory | None = None
        self._ring: RingReader | None = None
        self._facts: protocol.Facts | None = None

    def close(self) -> None:
        if self._memory is not None:
            self._memory.close()
            self._memory = None

    def find_memory(self) -> Memory:
        if self._memory is None:
            wait_until(lambda: any(MEMFD in line for line in _maps(self.pid)))
            self._memory = Memory(self.pid)
            host = cast(Host, self.told)
            self._ring = RingReader(self._memory, host)
            self._facts = protocol.Facts(self._memory, host)
            wait_until(lambda: self._memory is not None and self._memory.read(7, 0) == b"aiflame")
        return self._memory

    def read(self) -> Told:
        """Takes what is new: the ring, and then the facts that it speaks of."""
        self.find_memory()
        assert self._ring is not None and self._facts is not None
        records = list(self._ring.read())
        facts = list(self._facts.read())
        while facts:
            for fact in facts:
                self.told.takes(fact)
            facts = list(self._facts.read())
        for record in records:
            self._take(record)
        return self.told

    def _take(self, record: Any) -> None:
        told = self.told
        if record.kind == Passing.TIMES:
            told.times.append(protocol.times(record))
        elif record.kind == Passing.STALLS:
            told.stalls.append(protocol.stalls(record))
        elif record.kind == Passing.CODE_UNLOADED:
            told.unloaded.append(protocol.code_unloaded(record))
        elif record.kind == Passing.SERIALISED:
            told.windows.append(protocol.serialised(record))
        elif record.kind == Passing.LOSSES:
            for row in protocol.losses(record):
                told.losses[HelperLoss(int(row["loss"]))] += int(row["count"])
        elif record.kind == Passing.ERROR:
            told.errors.append(protocol.failed(record))
        elif record.kind == Passing.STATE:
            told.states.append(protocol.state(record))
        else:
            raise AssertionError(record)

    def read_anew(self) -> Told:
        """Takes all that is there, as a recorder does that comes now."""
        self.close()
        self.told = Told()
        return self.read()

    def read_until(self, holds: Callable[[Told], object], timeout_s: float = 10.0) -> Told:
        """Reads until something holds of what was told."""
        wait_until(lambda: holds(self.read()), timeout_s)
        return self.told

    def facts_bytes(self) -> int:
        """How many bytes of facts it has told."""
        data = self.find_memory().read(_FACTS_HEAD.size, _FACTS_HEAD_AT)
        return int(_FACTS_HEAD.unpack(data)[0])

    def code(self, code: Code) -> bytes:
        self.find_memory()
        assert self._facts is not None
        return self._facts.code(code)

    @contextmanager
    def control(self) -> Iterator[Control]:
        """The control pipe: whoever has it open keeps the helper on."""
        data = self.find_memory().read(_CONTROL_FD.size, _CONTROL_FD_AT)
        number = _CONTROL_FD.unpack(data)[0]
        path = os.open(f"/proc/{self.pid}/fd/{number}", os.O_PATH)
        try:
            assert stat.S_ISFIFO(os.fstat(path).st_mode)
            pipe = os.open(f"/proc/self/fd/{path}", os.O_WRONLY | os.O_NONBLOCK)
        finally:
            os.close(path)
        control = Control(pipe)
        try:
            yield control
        finally:
            control.close()

    def threads(self) -> set[str]:
        """Names of its threads."""
        tasks = Path(f"/proc/{self.pid}/task").iterdir()
        return {(task / "comm").read_text().strip() for task in tasks}

    def switches_of_helper(self) -> int:
        """How often the helper's thread has slept."""
        for task in Path(f"/proc/{self.pid}/task").iterdir():
            if (task / "comm").read_text().strip() == "aiflame-nvidia":
                found = re.search(r"^voluntary_ctxt_switches:\s+(\d+)", status(task), re.MULTILINE)
                assert found is not None
                return int(found[1])
        raise AssertionError("no such thread")


class Target(Helped):
    """The program of tests/standin, which obeys.

    Args:
        folder: What `build` has made.
        standin: What goes wrong (standin.h).
        gpu: The environment's AIFLAME_GPU; None: the helper is not loaded by the driver.
        program: Instead of the one of tests/standin.
        arguments: Its arguments.
        environment: Besides.
    """

    def __init__(
        self,
        folder: Path,
        standin: str = "",
        gpu: str | None = None,
        program: Path | None = None,
        arguments: Sequence[object] = (),
        environment: dict[str, str] | None = None,
    ) -> None:
        self.helper = folder / _LIBRARY
        variables = {
            **os.environ,
            "LD_LIBRARY_PATH": str(folder),
            "STANDIN": standin,
            **(environment or {}),
        }
        if gpu is not None:
            variables |= {"CUDA_INJECTION64_PATH": str(self.helper), "AIFLAME_GPU": gpu}
        self.process = subprocess.Popen(
            [program or folder / "program", *map(str, arguments)],
            env=variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        super().__init__(self.process.pid)

    def __enter__(self) -> Target:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            with suppress(OSError):
                if stream is not None:
                    stream.close()
        self.close()

    def send(self, command: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()

    def obey(self, *commands: str) -> int:
        """Has commands done one after the other; returns what the last one answered."""
        answer = 0
        assert self.process.stdout is not None
        for command in commands:
            self.send(command)
            line = self.process.stdout.readline()
            assert line.startswith("ok "), (command, line, self.process.poll())
            answer = int(line.split()[1])
        return answer

    def truth(self) -> dict[str, int]:
        """Lets a program of truth.h go, and returns what it measured."""
        assert self.process.stdout is not None
        found: dict[str, int] = {}
        self.send("go")
        for line in self.process.stdout:
            if line.strip() == "done":
                return found
            if line.strip() != "ready":
                name, value = line.split()
                found[name] = int(value)
        raise AssertionError("it ended")


def status(task: Path) -> str:
    return (task / "status").read_text()


@dataclass
class Control:
    """The recorder's end of the pipe."""

    pipe: int

    def start(
        self,
        tier: int = 2,
        duty: int = 1000,
        period: int = 0,
        read_out_ms: int = 20,
        serialised: int = 0,
    ) -> None:
        self.write(_START, tier, duty, period, read_out_ms, serialised)

    def stop(self) -> None:
        self.write(_STOP, 0, 0, 0, 0, 0)

    def write(self, verb: int, *more: int) -> None:
        os.write(self.pipe, _CONTROL.pack(_MAGIC, protocol.VERSION, verb, *more))

    def close(self) -> None:
        if self.pipe >= 0:
            os.close(self.pipe)
            self.pipe = -1
