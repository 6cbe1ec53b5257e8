# SPDX-License-Identifier: Apache-2.0
"""What a device family and the recorder are to each other: `Family`, and the `Host` it is handed.

The recorder knows devices through a `Family` alone: it asks what there is, starts it with the
recording, drains it once an interval, stops it, and then asks for the instructions of what it
sampled. A family knows the recorder through the `Host` alone: files that targets map, memory that
they share, events that come by a descriptor, and the open window, which takes samples, kernel times
and losses.

A family may have a helper in its targets: a library, whose functions it names as those of an API
are named (`Family.probes`), so that a launch has a number and a stack, and which writes what the
device tells of that number into memory that it shares (`Family.memory`).
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from aiflame.agent.file_questions import Question
from aiflame.agent.losses import LossKind
from aiflame.agent.model.gpu import Device
from aiflame.gpu.apis.base import Api

T = TypeVar("T")


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
        taken_ns: When, monotonic; 0 where only the interval is known.
    """

    process: int
    thread: int
    file: int
    address: int
    is_caller: bool
    count: int
    taken_ns: int = 0


@dataclass(frozen=True, slots=True)
class Interval:
    """What the recorder hands to a family at a drain: `number` is seconds since the start."""

    number: int
    cpu_samples: Sequence[CpuSample] = ()


@dataclass(frozen=True, slots=True)
class CodeKey:
    """Machine code of one kernel: where it is, and what the kernel is called there.

    Attributes:
        process: Which process image, by an id of the recorder's.
        file: Which file holds it, None for none.
        name: The kernel's linkage name.
        object: Which code object of the process's, by a number of the family's; 0 for none.
    """

    process: int
    file: int | None
    name: str
    object: int = 0


@dataclass(frozen=True, slots=True)
class KernelSample:
    """Samples of one instruction; fields as in agent/model/gpu.py.

    They were taken between begin_ns and end_ns, monotonic, which are the same where the moment is
    known; 0 where only the interval is. launch_id is as of `KernelTime`.
    """

    interval: int
    device: int  # index into what `detect` found
    code: CodeKey
    offset: int
    reason: str
    count: int
    launch_id: int = 0
    begin_ns: int = 0
    end_ns: int = 0


@dataclass(frozen=True, slots=True)
class KernelTime:
    """How long a device ran a kernel, exactly.

    Attributes:
        device: Index into what `detect` found.
        process: Which process image, by an id of the recorder's.
        kernel: Its linkage name.
        begin_ns: When the first of these executions began, monotonic.
        end_ns: When the last one ended.
        duration_ns: Of all.
        count: How many.
        queue: Handle of the stream or queue, 0 where it is not known.
        launch_id: Number of the launch, as `Call.launch_id` has it; 0 where there is none.
        built_id: Of a kernel that a graph runs: number of the launch by whose capture the graph's
            node was built; 0 where there is none.
    """

    device: int
    process: int
    kernel: str
    begin_ns: int
    end_ns: int
    duration_ns: int
    count: int = 1
    queue: int = 0
    launch_id: int = 0
    built_id: int = 0


@dataclass(frozen=True, slots=True)
class DeviceReading:
    """What a device tells of itself by the second: of all that runs on it, whose ever it is.

    Attributes:
        device: Index into what `detect` found.
        begin_ns: Of the time that `busy_permille` is of, monotonic.
        end_ns: Its end, and when the memory was read.
        busy_permille: For how much of the time it did anything; None where it does not tell.
        memory: Bytes in use, and of how many; None where it does not tell.
    """

    device: int
    begin_ns: int
    end_ns: int
    busy_permille: int | None
    memory: tuple[int, int] | None


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
    """What a family says of itself.

    Attributes:
        devices: What is here.
        why: Why nothing is, "" where something is.
        cure: What helps then, or else to reach a higher tier; "" for none.
    """

    devices: tuple[Device, ...]
    why: str = ""
    cure: str = ""


# (source file, line) by DWARF for addresses of a file, which is given by its id, as the file counts
# them; ("", 0) where nothing is known.
SourceLines = Callable[[int, Sequence[int]], Sequence[tuple[str, int]]]


@dataclass(frozen=True, slots=True)
class HelperLoad:
    """What a helper has told since it was read last, by which its cost is known.

    Attributes:
        times: Kernel times.
        samples: Rows of stall samples.
        read_outs: How often it had to ask for these.
        sampled_ns: For how long stalls were sampled for them, in any context.
    """

    times: int = 0
    samples: int = 0
    read_outs: int = 0
    sampled_ns: int = 0

    def __add__(self, other: HelperLoad) -> HelperLoad:
        return HelperLoad(
            self.times + other.times,
            self.samples + other.samples,
            self.read_outs + other.read_outs,
            self.sampled_ns + other.sampled_ns,
        )


class SharedMemory(Protocol):
    """Memory that a process shares with a family. It is the process's, and may hold anything.

    Attributes:
        process: Which process image, by an id of the recorder's.
    """

    @property
    def process(self) -> int: ...

    def read(self, size: int, offset: int) -> bytes:
        """Returns up to `size` bytes of what is there now, fewer or none where it has fewer."""
        ...

    def tell(self, number: int, message: bytes) -> bool:
        """Writes into a pipe of the process's, which stays open to the end of the recording.

        Args:
            number: The descriptor of the pipe's other end in the process, as it says itself.
            message: Written at once, or not at all.

        Returns:
            Whether it was. A pipe that has a name is none.
        """
        ...

    def is_over(self) -> bool:
        """Whether nobody has the other end of that pipe any more: the process has ended."""
        ...

    def leave(self) -> None:
        """Closes that pipe: what was told holds no more, unless others have told it too."""
        ...


@dataclass(frozen=True, slots=True)
class HelperLibrary:
    """A library of a family that is loaded into processes, where it is asked for.

    Attributes:
        path: Its file.
        beside: How the names of libraries begin of which a process that runs on the family's
            devices has one.
        variables: What a command is started with, so that its driver, and those of its children,
            load the library themselves and sample as is wanted.
        adds: What there is more of with it, in words.
        calls: Names of the system calls that it makes by itself, before it is told anything, of
            those that `agent.injection.seccomp.Call` has: a process may have given some up.
    """

    path: Path
    beside: tuple[str, ...]
    variables: Callable[[Wanted], Mapping[str, str]]
    adds: str
    calls: tuple[str, ...] = ()


class Loading(enum.Enum):
    """What becomes of processes that have no helper."""

    MENTIONED = enum.auto()  # it is said once what a helper would add
    DONE = enum.auto()  # it is loaded
    LEFT = enum.auto()


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the user asks of helpers, and of what they tell.

    Attributes:
        duty_permille: For how much of the time stalls are sampled.
        loading: Of processes without one.
        calibrates: The error of sharing is measured, in short times in which devices that name no
            launches otherwise run kernels one after the other, which slows processes down.
        lists: Kernels are listed when the recording is over, for which their code is kept.
    """

    duty_permille: int = 1000
    loading: Loading = Loading.MENTIONED
    calibrates: bool = False
    lists: bool = True


ALWAYS = Wanted()


class Lines(Protocol):
    """A process of a family's, which asks what may never answer, and says so in lines."""

    def take(self) -> Sequence[bytes]:
        """Returns the lines since last, without their ends; never waits."""
        ...

    def finish(self) -> None:
        """Ends its standard input: it is to say what is left, and to end."""
        ...

    def is_over(self) -> bool:
        """Whether it has ended, or said more than it may."""
        ...

    def close(self) -> None:
        """Ends it, or leaves it alone where no signal gets through to it."""
        ...


class CodeTools(Protocol):
    """What machine code is read with: in a recording its `Host`, and for a report the same."""

    def about(self, name: str, data: bytes, question: Question[T]) -> T | None:
        """Answers a question about bytes; as `Host.about`."""
        ...

    def run(self, program: str, arguments: Sequence[str], data: bytes) -> bytes | None:
        """Runs a program on bytes; as `Host.run`."""
        ...

    def lose(self, kind: LossKind, count: int = 1) -> None:
        """Counts what was lost."""
        ...


class Host(Protocol):
    """The recording, as a family sees it.

    Files are those that targets map, by ids of the recorder's; they are kept open, so that they can
    be read even if they were deleted since.

    Attributes:
        wanted: What the user asks of helpers.
        since_ns: When the recording began, monotonic. A family may begin later, and a process have
            told something by then.
    """

    @property
    def wanted(self) -> Wanted: ...

    @property
    def since_ns(self) -> int: ...

    def duty_permille(self, process: int) -> int:
        """Returns for how much of the time stalls of a process may be sampled now.

        What the user wants (`Wanted.duty_permille`), or less for as long as that would cost too
        much: samples are scaled then, and stand for as many as if it were that.

        Args:
            process: By an id of the recorder's.
        """
        ...

    def add_load(self, process: int, load: HelperLoad) -> None:
        """Tells what a helper has told, for its cost."""
        ...

    def found(self, devices: Sequence[Device]) -> None:
        """Tells of the devices anew: more is known of them, or there are more.

        Args:
            devices: All; those that were told of before, in their order, or what has `replaced`
                them, and then the new ones.
        """
        ...

    def replaced(self, device: int) -> None:
        """Tells that an index is another device's from now on, of which `found` tells next.

        Args:
            device: Of one of which nothing was told for a while, and nothing will be.
        """
        ...

    def path(self, file: int) -> str:
        """Returns the path of a file as the target sees it."""
        ...

    def is_open(self, file: int) -> bool:
        """Whether a file could be opened."""
        ...

    def ask(self, file: int, question: Question[T]) -> T | None:
        """Answers a question about a file, which a process without rights reads.

        Returns:
            None where it was not opened, or is bad, which is counted.
        """
        ...

    def files(self, process: int) -> Collection[int]:
        """Returns the files that a process maps to run their code, as far as is known.

        They stay open to the end of the recording, also when nobody maps them any more.

        Args:
            process: By an id of the recorder's.
        """
        ...

    def about(self, name: str, data: bytes, question: Question[T]) -> T | None:
        """Answers a question about bytes of a target's, which a process without rights reads.

        Args:
            name: What they are called, for the user.
            data: The bytes.
            question: The question, which is not kept.

        Returns:
            None where they are bad, which is counted.
        """
        ...

    def run(self, program: str, arguments: Sequence[str], data: bytes) -> bytes | None:
        """Runs a program of this machine's on bytes of a target's, without rights.

        Args:
            program: Its path. One that others than root can have put there is not run.
            arguments: "{}" among them stands for the path of a file with the bytes.
            data: The bytes.

        Returns:
            What it says; None where it is not there, fails, or takes or says too much.
        """
        ...

    def beside(self, module: str, arguments: Sequence[str]) -> Lines:
        """Runs a module of the family's in a process of its own, to the end of the recording.

        Its standard input ends with the recording. It is killed then, and not waited for.

        Args:
            module: Its whole name.
            arguments: Of its command line.

        Returns:
            What it says. Where no process can be started, it is over.
        """
        ...

    def memories(self) -> Collection[SharedMemory]:
        """Returns what processes share that are there, or were until a moment ago.

        It is the same object each time, and of one process at most four.
        """
        ...

    def watch(self, descriptor: int, take: Callable[[], None]) -> None:
        """Has events taken as they come, to the end of the recording.

        Args:
            descriptor: Readable when there are some; stays the family's.
            take: Reads what there is and never waits. It is also called when there is nothing.
        """
        ...

    def listen(self, hear: Callable[[int], None]) -> None:
        """Has the family told when a helper rings a bell (`Api.bells`).

        Args:
            hear: Takes the process, reads what it shares, and never waits.
        """
        ...

    def add_samples(self, samples: Iterable[KernelSample]) -> None:
        """Adds samples to the open window."""
        ...

    def add_times(self, times: Iterable[KernelTime]) -> None:
        """Adds kernel times to the window in which they end, or to the open one if that is over.

        Those that ended before the recording are left out.
        """
        ...

    def add_readings(self, readings: Iterable[DeviceReading]) -> None:
        """Adds readings to the window in which they end, or to the open one if that is over.

        Of one that began before the recording, what is in it.
        """
        ...

    def lose(self, kind: LossKind, count: int = 1) -> None:
        """Counts what was lost."""
        ...


class Sampler(Protocol):
    """A family in a recording."""

    def owns(self, file: int) -> bool:
        """Whether a mapped file holds kernels of this family, for CPU samples of them.

        Asked once for every file of every target: what is no kernel has to be told cheaply.
        """
        ...

    def drain(self, interval: Interval) -> None:
        """Gives the host what was sampled since the last drain."""
        ...

    def stop(self) -> None:
        """Ends sampling, and gives the host what is left."""
        ...

    def resolve(self, code: CodeKey, offsets: frozenset[int], lines: SourceLines) -> Listing | None:
        """Returns a kernel's instructions, None where they cannot be had.

        Args:
            code: Which.
            offsets: Of all samples.
            lines: Has source lines of files; the recording is over by then.
        """
        ...

    def code(self, code: CodeKey) -> bytes:
        """Returns what a capture keeps, so that a report can list a kernel's instructions.

        Args:
            code: Of a kernel that was sampled; the recording is over.

        Returns:
            Bytes for the family's `Lists`, the same for all kernels that are in one code object;
            b"" for none.
        """
        ...

    def file(self, code: CodeKey) -> int | None:
        """Returns the file that holds a kernel's code, as far as is known; None for none.

        Args:
            code: Of a kernel that was sampled, after `resolve`.
        """
        ...


class Lists(Protocol):
    """Lists kernels of which a capture has kept the code, and no instructions."""

    def __call__(
        self, tools: CodeTools, code: bytes, sampled: Mapping[str, Mapping[int, int]]
    ) -> dict[str, Listing]:
        """Returns, by name, those that can be listed.

        Args:
            tools: What reads the code.
            code: As `Sampler.code` gave it; but a capture may hold anything.
            sampled: By linkage name: how many samples there are of each offset.
        """
        ...


class Family(Protocol):
    """One family of devices. Adding one is one new folder and one line in gpu/families.py.

    Attributes:
        name: As typed after --gpu.
        api: By which its kernels are launched, as in gpu/apis/.
        probes: What is probed besides, in libraries of its own: those whose names begin as
            `Api.libraries` says. An API of the name of another one adds to that.
        memory: How the names begin of memory that it shares with targets, as /proc/PID/maps has
            them ("/memfd:..."); "" for none. It is looked for where `runs_by` or a library of the
            API or of `probes` says so.
        helper: What shares that memory, where it can be loaded; None for none.
    """

    name: str
    api: str
    probes: tuple[Api, ...]
    memory: str
    helper: HelperLibrary | None

    def runs_by(self, path: str) -> bool:
        """Whether a process that maps a file may run kernels of this family on CPUs.

        Samples of such a process at addresses that cannot be told any more are counted as lost.
        """
        ...

    def detect(self, cpu_period_ns: int = 0, *, has_samples: bool = False) -> Finding:
        """Looks for devices. Needs no target; never raises for what a machine lacks.

        Args:
            cpu_period_ns: What one CPU sample stands for, for families that are made of them.
            has_samples: Samples have come although none was found: the driver is where the target
                runs, in a container.
        """
        ...

    def start(self, host: Host) -> Sampler:
        """Begins, once a target has mapped a library of the API or a file that `runs_by` knows."""
        ...
