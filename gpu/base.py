# SPDX-License-Identifier: Apache-2.0
"""What a device family is to the recorder, which knows devices through this alone.

A family is asked what it finds, started with the recording, drained once an interval, stopped, and
then asked for the instructions of what it sampled.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from aiflame.agent.losses import LossKind
from aiflame.agent.model.gpu import Device
from aiflame.agent.target_files import TargetFile


@dataclass(frozen=True, slots=True)
class CpuSample:
    """Samples of a thread in a file that a family owns: a device may be made of CPUs.

    Attributes:
        process: Which process image, by an id of the recorder's.
        thread: Its thread id.
        file: Which file, by an id of the recorder's.
        address: Of the innermost frame that is in the file, as the file counts addresses.
        is_caller: That frame had called something outside the file: `address` is the last byte of
            the call, not the first of an instruction.
        count: How many.
    """

    process: int
    thread: int
    file: int
    address: int
    is_caller: bool
    count: int


@dataclass(frozen=True, slots=True)
class Interval:
    """What the recorder hands to a family at a drain: `number` is seconds since the start."""

    number: int
    cpu_samples: Sequence[CpuSample] = ()


@dataclass(frozen=True, slots=True)
class CodeKey:
    """Machine code of one kernel: where it is, and what the kernel is called there."""

    process: int
    file: int | None
    name: str


@dataclass(frozen=True, slots=True)
class KernelSample:
    """Samples of one instruction; fields as in agent/model/gpu.py."""

    interval: int
    device: int  # index into what `detect` found
    code: CodeKey
    offset: int
    reason: str
    count: int
    launch_id: int = 0


@dataclass(frozen=True, slots=True)
class Line:
    """One instruction of a kernel; fields as in agent/model/gpu.py."""

    offset: int
    text: str
    file: str
    line: int


@dataclass(frozen=True, slots=True)
class Listing:
    """The instructions of one kernel's code, in order, and its size in bytes."""

    size_bytes: int
    lines: tuple[Line, ...]


@dataclass(frozen=True, slots=True)
class Finding:
    """What a family says of itself; `devices` is empty, and `why` set, where there is none."""

    devices: tuple[Device, ...]
    why: str = ""


class Files(Protocol):
    """The files that targets map, as the recorder keeps them: open, even if deleted since."""

    def path(self, file: int) -> str:
        """Returns the path as the target sees it."""
        ...

    def opened(self, file: int) -> AbstractContextManager[TargetFile, bool] | None:
        """Returns a context that hands the file out to be read, None where it was not opened.

        Whatever is raised in there ends it quietly, and is counted.
        """
        ...

    def lines(self, file: int, addresses: Sequence[int]) -> Sequence[tuple[str, int]]:
        """Returns (source file, line) by DWARF for each address as the file counts them.

        To be asked in `Family.resolve` only; ("", 0) where nothing is known.
        """
        ...


class Family(Protocol):
    """One family of devices. Adding one is one new folder and one line in gpu/families.py."""

    name: str  # as typed after --gpu
    api: str  # by which its kernels are launched, as in gpu/apis/

    def detect(self, cpu_period_ns: int = 0) -> Finding:
        """Looks for devices. Needs no target; never raises for what a machine lacks.

        Asked again after samples of a family that had found none: the driver may be in a container.

        Args:
            cpu_period_ns: What one CPU sample stands for, for families that are made of them.
        """
        ...

    def start(self, files: Files) -> None:
        """Begins with the recording."""
        ...

    def owns(self, file: int) -> bool:
        """Whether a mapped file holds kernels of this family, for CPU samples of them.

        Asked once for every file of every target: what is no kernel has to be told cheaply.
        """
        ...

    def runs_by(self, path: str) -> bool:
        """Whether a process that maps a file may run kernels of this family on CPUs.

        Samples of such a process at addresses that cannot be told any more are counted as lost.
        """
        ...

    def drain(self, interval: Interval) -> Iterable[KernelSample]:
        """Returns what was sampled since the last drain."""
        ...

    def stop(self) -> Iterable[KernelSample]:
        """Ends sampling; returns what is left."""
        ...

    def resolve(self, code: CodeKey, offsets: frozenset[int]) -> Listing | None:
        """Returns a kernel's instructions, None where they cannot be had."""
        ...

    def losses(self) -> dict[LossKind, int]:
        """Returns what was lost."""
        ...
