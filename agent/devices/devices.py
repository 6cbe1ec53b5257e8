# SPDX-License-Identifier: Apache-2.0
"""Device families in a recording: asks them once an interval, and stores what they say.

A family begins when a target is seen that may use its devices: most use none.

Rows refer to each other and a capture is readable at any moment, so kernels and their codes are
written before the first sample of theirs; instructions, sizes and files come when all is over.
"""

from __future__ import annotations

import math
import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt
from aiflame.agent.capture.code_objects import StoredCode
from aiflame.agent.devices.helper_loads import HelperLoads
from aiflame.agent.devices.line_process import LineProcess
from aiflame.agent.devices.locations import DeviceLocations, LocatedStack
from aiflame.agent.devices.memories import Memories
from aiflame.agent.file_questions import Question
from aiflame.agent.inspector.tools import is_sound, run_tool
from aiflame.agent.launches.gpu_kernels import KernelTable
from aiflame.agent.losses import LossKind
from aiflame.agent.model.gpu import (
    BUSY_UNKNOWN,
    LONGEST_READING_NS,
    MOST_PERMILLE,
    NO_SIZE,
    Device,
    Tier,
)
from aiflame.agent.model.window import COLUMNS, NONE, OpenWindow, Timing, rows_of
from aiflame.agent.processes.elf_images import ElfImages
from aiflame.agent.processes.table import NO_BINARY, Mapping, ProcessImage, ProcessTable
from aiflame.agent.symbols.frames import clean_name
from aiflame.agent.symbols.service import Request, SymbolService
from aiflame.agent.symbols.store import cache_dir
from aiflame.gpu.apis import APIS
from aiflame.gpu.base import (
    ALWAYS,
    CodeKey,
    DeviceReading,
    Family,
    HelperLibrary,
    HelperLoad,
    Interval,
    KernelSample,
    KernelTime,
    Listing,
    Loading,
    Sampler,
    SharedMemory,
    SourceLines,
    Wanted,
)

if TYPE_CHECKING:  # SQLite is for the end
    from aiflame.agent.capture.writer import CaptureWriter

# What is left out of stalls is told in seconds.
_INTERVAL_NS = 1_000_000_000

T = TypeVar("T")

# Executions that one kernel time tells of: a device starts no more than a million a second.
_MAX_EXECUTIONS = 1 << 24
# Of the kernel times of a recording, as readers add them up: of one process, 52 days, and of all.
_MAX_KERNEL_NS_OF_PROCESS, _MAX_KERNEL_NS = 1 << 52, 1 << 62

# Of a recording, as they are kept for its end: codes, and instructions of theirs that were sampled.
# Eight large programs have 10,000 kernels each, of which a few are hot; these are some 200 MB.
# Where nothing is listed in the end, of a window (`_forget_unsampled`).
_MAX_CODES, _MAX_SITES = 1 << 17, 1 << 21
# Of a recording: NVIDIA's devices have 40, and a helper may say anything.
_MAX_REASONS = 1 << 12


# Of a process: names of kernels that ran, by which those of its handles are found.
_MOST_NAMES = 1 << 14

# Kernel times of a family that wait for their window: a second of short kernels on a fast device.
# Of one process at most half of them: each may lie.
_MAX_WAITING_TIMES = 1 << 16
_MAX_WAITING_TIMES_OF_PROCESS = _MAX_WAITING_TIMES // 2
# Readings of a family that wait for their window: 64 devices for a minute.
_MAX_WAITING_READINGS = 1 << 12
# No device has so much memory, and readers add up as many as a recording of a year has.
_MAX_MEMORY_BYTES = 1 << 50
# By how much a device's clock may be ahead of this machine's; what ends later has not ended.
_MAX_AHEAD_NS = 1_000_000_000


class _FamilyHost:
    """A family in this recording, and what it sees of that (gpu.base.Host).

    Args:
        family: The family.
        devices: Those that it found, or one without a name.
        table: Process table.
        watch: Has the recorder wake up for a descriptor.
        wanted: What the user asks of helpers.

    Attributes:
        devices: What it told last.
        numbers: Of its devices in windows.
        is_news: What it tells of its devices has changed.
        sampler: The family's half of the recording.
        shared: What processes share with it.
        losses: Of the family.
        duties: By process image: for how much of the time that is wanted stalls may be sampled.
        loads: What helpers have told since these were taken last, likewise.
        left_out_ns: For how long stalls were not sampled, that is not counted yet.
        held: Files that the family may read when the recording is over.
    """

    def __init__(
        self,
        family: Family,
        devices: tuple[Device, ...],
        table: ProcessTable,
        watch: Callable[[int], None],
        wanted: Wanted,
    ) -> None:
        self.family = family
        self.devices = devices
        self.numbers: list[int] = []
        self.is_news = True
        self.wanted = wanted
        self._table = table
        self._binaries = table.binaries
        self.shared = Memories(table, family.memory)
        self._watch = watch
        self._replaced: set[int] = set()
        self._takes: list[Callable[[], None]] = []
        self._hears: list[Callable[[int], None]] = []
        self._times: list[KernelTime] = []
        self._times_of: Counter[int] = Counter()  # by process
        self._is_mentioned = False
        self._said: list[str] = []
        library = family.helper
        self._loads = None
        if library is not None and wanted.loading is Loading.DONE:
            self._loads = HelperLoads(
                library, cache_dir(), table.first_image, lambda: table.start_ns
            )
        self._samples: list[KernelSample] = []
        self._readings: list[DeviceReading] = []
        self._processes: list[LineProcess] = []
        self.losses: Counter[LossKind] = Counter()
        self.duties: dict[int, float] = {}
        self.loads: dict[int, HelperLoad] = {}
        self.left_out_ns = 0
        self.held: set[int] = set()
        self.sampler: Sampler = family.start(self)

    def look(self, image: ProcessImage, libraries: Collection[str]) -> None:
        """Looks for what a process shares, and at what it has for that, by its libraries' names."""
        self.shared.look(image)
        library = self.family.helper
        if library is None or not any(name.startswith(library.beside) for name in libraries):
            return
        if self._loads is not None:
            self._loads.ask(image)
        elif self.wanted.loading is not Loading.MENTIONED or self._is_mentioned:
            return
        elif self._lacks_helper(image, library):
            self._is_mentioned = True
            self._said.append(
                f"{image.name} ({image.pid}) runs on a device of {self.family.name}:"
                f" --gpu {self.family.name} loads {library.path.name} into it, which adds"
                f" {library.adds}"
            )

    def _lacks_helper(self, image: ProcessImage, library: HelperLibrary) -> bool:
        """Whether a process has no helper, and will not load it by itself once it uses a device.

        That is not known of one that is over.
        """
        variables = self._table.environment(image)
        values = (variables.get(name, "") for name in library.variables(self.wanted))
        names = {value.rpartition("/")[2] for value in values}
        is_there = any(memory.process == image.index for memory in self.shared.all())
        return bool(variables) and library.path.name not in names and not is_there

    def load_helpers(self) -> list[str]:
        """Loads helpers where they are missing; returns what is to be said."""
        said, self._said = self._said, []
        if self._loads is not None:
            for memory in self.shared.all():
                self._loads.has_helper(memory.process)
            said += self._loads.look()
            for image in self._loads.take_there():
                self.shared.look(image)
                if not any(memory.process == image.index for memory in self.shared.all()):
                    said += self._loads.lose_forked(image)
        return said

    def finish_loads(self) -> list[str]:
        """Loads no more helpers; returns what is to be said of those that are loaded."""
        return [] if self._loads is None else self._loads.finish()

    def forget_images(self, images: Collection[int]) -> None:
        """Forgets process images that have ended."""
        self.shared.forget_images(images)
        if self._loads is not None:
            for index in images:
                self._loads.forget(index)

    def close(self) -> None:
        """Closes what processes share, and ends those of the family."""
        self.shared.close()
        for process in self._processes:
            process.close()
        if self._loads is not None:
            self._loads.close()

    @property
    def all_losses(self) -> Counter[LossKind]:
        """Of the family, and of its helpers."""
        loading = Counter() if self._loads is None else self._loads.losses
        return self.losses + self.shared.losses + loading

    @property
    def since_ns(self) -> int:
        return self._table.start_ns

    def found(self, devices: Sequence[Device]) -> None:
        if devices and tuple(devices) != self.devices:
            self.devices = tuple(devices)
            self.is_news = True

    def replaced(self, device: int) -> None:
        self._replaced.add(device)
        self.is_news = True

    def path(self, file: int) -> str:
        return self._binaries.files[file].path

    def is_open(self, file: int) -> bool:
        return self._binaries.files[file].fd is not None

    def ask(self, file: int, question: Question[T]) -> T | None:
        return self._binaries.ask(file, question)

    def files(self, process: int) -> Collection[int]:
        image = self._table.images.get(process)
        mappings = () if image is None else image.mappings
        found = {one.binary for one in mappings if one.binary != NO_BINARY}
        self.held |= found
        return found

    def about(self, name: str, data: bytes, question: Question[T]) -> T | None:
        return self._binaries.ask_about(name, data, question)

    def run(self, program: str, arguments: Sequence[str], data: bytes) -> bytes | None:
        return run_tool(program, arguments, data) if is_sound(program) else None

    def beside(self, module: str, arguments: Sequence[str]) -> LineProcess:
        process = LineProcess(module, arguments)
        self._processes = [*(one for one in self._processes if not one.is_over()), process]
        return process

    def memories(self) -> Collection[SharedMemory]:
        return self.shared.all()

    def duty_permille(self, process: int) -> int:
        # Rounded up: 0 is never.
        return math.ceil(self.wanted.duty_permille * self.duties.get(process, 1))

    def add_load(self, process: int, load: HelperLoad) -> None:
        self.loads[process] = self.loads.get(process, HelperLoad()) + load

    def watch(self, descriptor: int, take: Callable[[], None]) -> None:
        self._takes.append(take)
        self._watch(descriptor)

    def listen(self, hear: Callable[[int], None]) -> None:
        self._hears.append(hear)

    def add_samples(self, samples: Iterable[KernelSample]) -> None:
        self._samples += samples

    def add_times(self, times: Iterable[KernelTime]) -> None:
        latest_ns = time.monotonic_ns() + _MAX_AHEAD_NS
        for one in times:
            has_room = self._times_of[one.process] < _MAX_WAITING_TIMES_OF_PROCESS
            if one.end_ns > latest_ns:
                self.lose(LossKind.KERNEL_TIMES_REFUSED)
            elif has_room and len(self._times) < _MAX_WAITING_TIMES:
                self._times.append(one)
                self._times_of[one.process] += 1
            else:
                self.lose(LossKind.WINDOW_EVENTS_FULL)

    def add_readings(self, readings: Iterable[DeviceReading]) -> None:
        for one in readings:
            if len(self._readings) < _MAX_WAITING_READINGS:
                self._readings.append(one)
            else:
                self.lose(LossKind.WINDOW_EVENTS_FULL)

    def lose(self, kind: LossKind, count: int = 1) -> None:
        self.losses[kind] += count

    def poll(self) -> None:
        """Has the family take its events."""
        for take in self._takes:
            take()

    def ring(self, image: ProcessImage, kernel_times_gone: int) -> None:
        """Tells the family that a process has something to tell."""
        self.shared.heard(image, kernel_times_gone)
        for hear in self._hears:
            hear(image.index)

    def take_replaced(self) -> set[int]:
        """Returns which of the devices are others since last."""
        replaced, self._replaced = self._replaced, set()
        return replaced

    def take_samples(self) -> list[KernelSample]:
        """Returns the samples since last."""
        samples, self._samples = self._samples, []
        return samples

    def take_times(self, until_ns: int) -> list[KernelTime]:
        """Returns the kernel times up to a monotonic time; later ones are for the next window."""
        times = [time for time in self._times if time.end_ns <= until_ns]
        self._times = [time for time in self._times if time.end_ns > until_ns]
        self._times_of = Counter(time.process for time in self._times)
        return times

    def end_readings(self, end_ns: int) -> None:
        """Cuts the last readings at the end of the recording, a monotonic time."""
        self._readings = [
            replace(one, end_ns=min(one.end_ns, end_ns))
            for one in self._readings
            if one.begin_ns < end_ns
        ]

    def take_readings(self, until_ns: int) -> list[DeviceReading]:
        """Returns the readings up to a monotonic time; later ones are for the next window."""
        readings = [one for one in self._readings if one.end_ns <= until_ns]
        self._readings = [one for one in self._readings if one.end_ns > until_ns]
        return readings


class Devices:
    """The families of a recording.

    Args:
        families: Those that were asked for.
        table: Process table of the recording.
        images: ELF headers of its binaries.
        window: Where samples go.
        kernels: Where kernels get their ids.
        cpu_period_ns: What one CPU sample stands for.
        tell_binary: Tells windows of a binary, by its index.
        watch: Has `poll` called soon after a descriptor became readable.
        time_samples: Has `take_sample` told of the samples of a process, by its pid.
        wanted: What the user asks of helpers.

    Attributes:
        samples: Device samples so far.
    """

    def __init__(
        self,
        families: Sequence[Family],
        table: ProcessTable,
        images: ElfImages,
        window: OpenWindow,
        kernels: KernelTable,
        cpu_period_ns: int,
        tell_binary: Callable[[int], None],
        watch: Callable[[int], None],
        time_samples: Callable[[int], None],
        wanted: Wanted = ALWAYS,
    ) -> None:
        self._wanted = wanted
        self._tell_binary = tell_binary
        self._watch = watch
        self._families = families
        self._table = table
        self._window = window
        self._kernels = kernels
        self._cpu_period_ns = cpu_period_ns
        self._idle = [*families]
        self._libraries = {family.name: _libraries_of(family) for family in families}
        self._considered: dict[int, Sequence[Mapping]] = {}  # by index of the image
        self._running: list[_FamilyHost] = []
        self._owners: dict[int, _FamilyHost | None] = {}
        self._codes: dict[tuple[str, CodeKey], int] = {}
        self._next_code = 0
        self._kernel_of: dict[int, int] = {}  # by code: their processes may be forgotten
        self._reasons: dict[tuple[str, str], int] = {}
        self._offsets: defaultdict[tuple[str, CodeKey], set[int]] = defaultdict(set)
        self._sites = 0  # of all codes
        self._locations = DeviceLocations(
            *(table, images, lambda file: self._owner(file) is not None, self._runs_kernels),
            cpu_period_ns,
        )
        self._timed: set[int] = set()
        self._time_samples = time_samples
        self._kernel_ns_left = _MAX_KERNEL_NS
        self._kernel_ns_of: Counter[int] = Counter()  # by index of the image
        self._ran: defaultdict[int, set[str]] = defaultdict(set)  # the same
        self._next_device = 0
        self._gone_devices: list[int] = []  # which the open window may mention
        self._window_began_ns = self._drained_ns = 0  # since the start
        self._is_within = False
        self._said: list[str] = []
        self.samples = 0

    def start(self) -> None:
        """Begins with all families, also those whose devices no target uses: the user wants them.

        Rows of families that find no device say why.
        """
        for family in [*self._idle]:
            self._begin(family)

    def _begin(self, family: Family) -> None:
        """Looks for devices of a family, and begins to sample them."""
        self._idle.remove(family)
        finding = family.detect(self._cpu_period_ns)
        absent = Device(family.name, "", Tier.LAUNCHES, finding.why, 0)
        devices = finding.devices or (absent,)
        self._running.append(_FamilyHost(family, devices, self._table, self._watch, self._wanted))
        self._owners.clear()
        self._tell_devices()

    @property
    def are_used(self) -> bool:
        """Whether a device can be sampled that targets use: a family may have found none."""
        devices = (device for running in self._running for device in running.devices)
        return any(device.tier is not Tier.LAUNCHES for device in devices)

    @property
    def are_running(self) -> bool:
        """Whether families have begun: what they hear of others waits in small places."""
        return bool(self._running)

    def _consider(self, image: ProcessImage) -> None:
        """Begins with the families whose devices a process may use, by what it has mapped."""
        # A process's mappings are never changed, only replaced by others.
        if not self._idle or self._considered.get(image.index) is image.mappings:
            return
        self._considered[image.index] = image.mappings
        paths = self._paths(image)
        for family in [*self._idle]:
            if any(self._may_use(family, path) for path in paths):
                self._begin(family)

    def _may_use(self, family: Family, path: str) -> bool:
        """Whether a process that maps a file may use devices of a family."""
        name = path.rpartition("/")[2]
        return name.startswith(self._libraries[family.name]) or family.runs_by(path)

    def _paths(self, image: ProcessImage) -> set[str]:
        files = self._table.binaries.files
        return {files[m.binary].path for m in image.mappings if m.binary != NO_BINARY}

    def _tell_devices(self) -> None:
        text = self._window.text
        rows = []
        for running in self._running:
            if not running.is_news:
                continue
            running.is_news = False
            for index in running.take_replaced():
                self._gone_devices.append(running.numbers[index])
                running.numbers[index] = self._next_device
                self._next_device += 1
            while len(running.numbers) < len(running.devices):
                running.numbers.append(self._next_device)
                self._next_device += 1
            rows += [
                (
                    *(number, text(d.family), text(clean_name(d.name)), int(d.tier)),
                    *(text(d.limit), text(clean_name(d.details)) if d.details else 0, d.period_ns),
                )
                for number, d in zip(running.numbers, running.devices, strict=True)
            ]
        self._window.define("devices", np.array(rows, COLUMNS["devices"].dtype))

    def _owner(self, file: int) -> _FamilyHost | None:
        """Returns the family whose kernels a file holds, None for most files."""
        if file not in self._owners:
            owners = (running for running in self._running if running.sampler.owns(file))
            self._owners[file] = next(owners, None)
        return self._owners[file]

    def _runs_by(self, file: int) -> bool:
        path = self._table.binaries.files[file].path
        return any(running.family.runs_by(path) for running in self._running)

    def poll(self) -> None:
        """Has families take their events; never waits."""
        for running in self._running:
            running.poll()

    def before_stacks(self) -> None:
        """To be called at a drain before new stacks are added."""
        self._locations.refresh()

    def add_stack(self, stack: LocatedStack) -> None:
        """Sees every new stack, as DeviceLocations.add_stack does."""
        if self._families:
            self._consider(stack.image)
            self._locations.add_stack(stack)

    def add_sums(
        self, keys: npt.NDArray[Any], values: npt.NDArray[Any], has_come: Callable[[int], bool]
    ) -> None:
        """Sees the sums of an interval, as DeviceLocations.add_sums does."""
        if self._families:
            self._locations.add_sums(keys, values, has_come)

    def look(self, image: ProcessImage) -> None:
        """Finds out what a process may use, by what it has mapped.

        The times of its samples are asked for if it may run a device's kernels itself.
        """
        self._consider(image)
        if image.index not in self._timed and self._runs_kernels(image):
            self._timed.add(image.index)
            self._time_samples(image.pid)
        sharing = self._sharing(image)
        if sharing:
            names = {path.rpartition("/")[2] for path in self._paths(image)}
            for running in sharing:
                running.look(image, names)

    def ring(self, image: ProcessImage, kernel_times_gone: int) -> None:
        """Tells families that the helper in a process has something to tell.

        Args:
            image: The process.
            kernel_times_gone: As for `Memories.heard`.
        """
        for running in self._sharing(image):
            running.ring(image, kernel_times_gone)

    def _sharing(self, image: ProcessImage) -> list[_FamilyHost]:
        """Returns the families that a process may share memory with."""
        sharing = [running for running in self._running if running.family.memory]
        paths = self._paths(image) if sharing else ()
        return [one for one in sharing if any(self._may_use(one.family, path) for path in paths)]

    def _runs_kernels(self, image: ProcessImage) -> bool:
        binaries = {mapping.binary for mapping in image.mappings} - {NO_BINARY}
        return any(map(self._runs_by, binaries))

    def take_sample(self, stack: int, tid: int, ns: int, has_come: Callable[[int], bool]) -> None:
        """Takes the time of one of the samples that `add_sums` brings.

        Args:
            stack: Its id.
            tid: Of its thread.
            ns: When it was taken, monotonic.
            has_come: As for `add_sums`.
        """
        if self._families:
            self._locations.add_time(stack, tid, ns, has_come)

    def drain(self, interval: int, end_ns: int, *, is_within: bool = False) -> None:
        """Takes in what families sampled.

        Args:
            interval: Seconds since the start.
            end_ns: Of the window, since the start; or now, within it.
            is_within: The window goes on, and sums of its CPU samples have not come yet.
        """
        if not self._is_within:
            self._window_began_ns = self._drained_ns
            if self._gone_devices:
                self._window.drop("devices", self._gone_devices)
                self._gone_devices = []
            if not self._wanted.lists:  # what is read together is a stretch, and not months
                self._kernel_ns_left = _MAX_KERNEL_NS
                self._kernel_ns_of.clear()
                self._forget_unsampled()
        self._is_within = is_within
        by_family = defaultdict(list)
        # Those of a window have no order; the files of kernels are numbered as they were made.
        found = [] if is_within else self._locations.take(self._table.start_ns + end_ns)
        for sample in sorted(found, key=lambda sample: sample.file):
            by_family[self._owner(sample.file)].append(sample)
        for running in self._running:
            running.poll()
            running.shared.look_again()
            self._said += running.load_helpers()
            running.sampler.drain(Interval(interval, by_family[running]))
            self._take(running, end_ns)
        self._drained_ns = end_ns

    def take_loads(self) -> dict[int, HelperLoad]:
        """Returns what helpers have told since last, by process image."""
        found: defaultdict[int, HelperLoad] = defaultdict(HelperLoad)
        for running in self._running:
            for process, load in running.loads.items():
                found[process] += load
            running.loads = {}
        return {**found}

    def steer(self, duties: dict[int, float], window_ns: int) -> None:
        """Has stalls sampled for less of the time, or for as much as before; says so.

        Args:
            duties: As `recording.chance.Steers` says.
            window_ns: For how long what was said before has held.
        """
        for running in self._running:
            sharing = {memory.process for memory in running.shared.all()}
            for process in sharing:
                before, now = (each.get(process, 1.0) for each in (running.duties, duties))
                running.left_out_ns += 0 if before else window_ns
                if _degree(before) != _degree(now):
                    self._said.append(_duty_words(self._table.images[process], now))
            left_out_s, running.left_out_ns = divmod(running.left_out_ns, _INTERVAL_NS)
            running.lose(LossKind.DEVICE_STALLS_LEFT_OUT, left_out_s)
            running.duties = duties

    def take_said(self) -> list[str]:
        """Returns what is to be said since last."""
        said, self._said = self._said, []
        return said

    def stop(self, end_ns: int) -> None:
        """Ends sampling; end_ns as for `drain`."""
        for running in self._running:
            self._said += running.finish_loads()
            running.sampler.stop()
            running.end_readings(self._table.start_ns + end_ns)
            self._take(running, end_ns)

    def _take(self, running: _FamilyHost, end_ns: int) -> None:
        """Fills the open window with what a family gave."""
        if running.is_news:
            self._tell_devices()
        rows = []
        for sample in running.take_samples():
            if not self._has_place(running.family.name, sample):
                running.lose(LossKind.DEVICE_SAMPLES_REFUSED, sample.count)
                continue
            code = self._code(running.family, sample.code)
            reason = self._reason(running.family.name, sample.reason)
            device = running.numbers[sample.device]
            times = self._times(sample, end_ns)
            what = (device, code, sample.offset, reason, sample.launch_id)
            rows.append((*what, *times, sample.count))
            self.samples += sample.count
        if rows and not running.devices[0].name:
            self._found_late(running)
        self._window.add("device_samples", np.array(rows, COLUMNS["device_samples"].dtype))
        self._take_times(running, end_ns)
        self._take_readings(running, end_ns)

    def _has_place(self, family: str, sample: KernelSample) -> bool:
        """Whether the instruction and the reason of a sample can be told apart from all others.

        Notes the instruction if so.
        """
        key = family, sample.code
        if (family, sample.reason) not in self._reasons and len(self._reasons) == _MAX_REASONS:
            return False
        if key in self._offsets and sample.offset in self._offsets[key]:
            return True
        is_new = key not in self._codes
        if self._sites == _MAX_SITES or (is_new and len(self._codes) == _MAX_CODES):
            return False
        self._sites += 1
        self._offsets[key].add(sample.offset)
        return True

    def _forget_unsampled(self) -> None:
        """Forgets instructions, and of many codes those that the last window has no samples of.

        A process that compiles kernels all day has ever new ones.
        """
        if len(self._codes) > _MAX_CODES // 2:
            self._forget_codes([known for known in self._codes if known not in self._offsets])
        self._offsets.clear()
        self._sites = 0

    def forget_unused_kernels(self) -> None:
        """Has kernels forgotten that windows have not mentioned for long, where there are many.

        To be called when a window was closed, before anything is added to the next. Where kernels
        are listed in the end, all are kept.
        """
        if self._wanted.lists:
            return
        sampled = {self._kernel_of[self._codes[known]] for known in self._offsets}
        gone = self._kernels.forget_unused(sampled)
        if gone:
            self._forget_codes(
                [known for known, code in self._codes.items() if self._kernel_of[code] in gone]
            )

    def _forget_codes(self, gone: Collection[tuple[str, CodeKey]]) -> None:
        numbers = [self._codes.pop(known) for known in gone]
        for number in numbers:
            del self._kernel_of[number]
        self._window.drop("codes", numbers)

    def _times(self, sample: KernelSample, end_ns: int) -> tuple[Timing, int, int]:
        """Returns what is known of when a sample was taken, since the start."""
        if sample.end_ns:
            start_ns = self._table.start_ns
            between = (sample.begin_ns - start_ns, sample.end_ns - start_ns)
            timing = Timing.INSTANT if sample.begin_ns == sample.end_ns else Timing.INTERVAL
        else:
            timing, between = Timing.INTERVAL, (self._window_began_ns, end_ns)
        first_ns, last_ns = (min(max(ns, 0), end_ns) for ns in between)
        return timing, first_ns, last_ns

    def _take_times(self, running: _FamilyHost, end_ns: int) -> None:
        start_ns, rows = self._table.start_ns, []
        for told in running.take_times(start_ns + end_ns):
            if told.end_ns < start_ns:
                continue
            one = _since(told, start_ns) if _is_sound(told) else None
            if one is None or not self._has_room(one):
                running.lose(LossKind.KERNEL_TIMES_REFUSED)
                continue
            kernel = self._kernels.id_of(one.process, running.family.api, one.kernel)
            if one.kernel and len(self._ran[one.process]) < _MOST_NAMES:
                self._ran[one.process].add(one.kernel)
            self._kernel_ns_left -= one.duration_ns
            self._kernel_ns_of[one.process] += one.duration_ns
            times = (one.begin_ns - start_ns, one.end_ns - start_ns)
            what = (running.numbers[one.device], kernel, one.queue, one.launch_id)
            rows.append((*what, *times, one.count, one.duration_ns, one.built_id))
        self._window.add("kernel_times", np.array(rows, COLUMNS["kernel_times"].dtype))

    def _take_readings(self, running: _FamilyHost, end_ns: int) -> None:
        start_ns, rows = self._table.start_ns, []
        for told in running.take_readings(start_ns + end_ns):
            if told.end_ns <= start_ns:
                continue
            if not _is_possible(told):
                running.lose(LossKind.DEVICE_READINGS_MISSED)
                continue
            begin_ns = max(told.begin_ns - start_ns, 0)
            busy = BUSY_UNKNOWN if told.busy_permille is None else told.busy_permille
            used, total = told.memory or (NO_SIZE, 0)
            device = running.numbers[told.device]
            rows.append((device, begin_ns, told.end_ns - start_ns, busy, used, total))
        column = "device_readings"
        self._window.add(column, np.array(rows, COLUMNS[column].dtype))

    def _has_room(self, time: KernelTime) -> bool:
        """Whether a kernel time can be added up with all others."""
        of_process = self._kernel_ns_of[time.process] + time.duration_ns
        return of_process <= _MAX_KERNEL_NS_OF_PROCESS and time.duration_ns <= self._kernel_ns_left

    def _found_late(self, running: _FamilyHost) -> None:
        """A driver that is not installed here, but where the target runs."""
        found = running.family.detect(self._cpu_period_ns, has_samples=True).devices
        running.found(found)
        self._tell_devices()

    def _code(self, family: Family, key: CodeKey) -> int:
        known = self._codes.get((family.name, key))
        if known is None:
            known = self._codes[family.name, key] = self._next_code
            self._next_code += 1
            kernel = self._kernels.id_of(key.process, family.api, key.name)
            self._kernel_of[known] = kernel
            file = NONE if key.file is None else key.file
            if key.file is not None:
                self._tell_binary(key.file)
            self._window.define("codes", rows_of("codes", (known, kernel, file)))
        return known

    def _reason(self, family: str, name: str) -> int:
        known = self._reasons.get((family, name))
        if known is None:
            known = self._reasons[family, name] = len(self._reasons)
            text = self._window.text
            row = (known, text(family), text(clean_name(name)))
            self._window.define("reasons", rows_of("reasons", row))
        return known

    def resolve(self, service: SymbolService, writer: CaptureWriter, images: ElfImages) -> None:
        """Stores instructions and source lines of all that was sampled.

        Args:
            service: Answers DWARF questions.
            writer: Open capture.
            images: ELF headers of binaries.
        """
        running_by_name = {running.family.name: running for running in self._running}
        objects = StoredCode(writer.put)

        def lines_of(file: int, addresses: Sequence[int]) -> Sequence[tuple[str, int]]:
            known = self._table.binaries.files[file]
            if known.fd is None:
                return [("", 0)] * len(addresses)
            path = f"/proc/{os.getpid()}/fd/{known.fd}"
            request = Request(path, known.root, np.array(addresses, np.uint64))
            (result,) = service.resolve_many([request])
            return [(c[0].file, c[0].line) if c and c[0].line else ("", 0) for c in result.frames]

        for (name, key), code in self._codes.items():
            running, offsets = running_by_name[name], frozenset(self._offsets[name, key])
            listing = self._listing(running, key, offsets, lines_of)
            size_bytes = 0 if listing is None else listing.size_bytes
            kernel = self._kernel_of[code]
            file = running.sampler.file(key)
            binary = None if file is None else self._binary_id(writer, images, file)
            kept = objects.put(name, key.process, running.sampler.code(key), running.lose)
            writer.put("kernel_codes", [(code, kernel, binary, size_bytes, kept)])
            lines = () if listing is None else listing.lines
            rows = [
                (code, line.offset, clean_name(line.text), clean_name(line.file), line.line)
                for line in lines
            ]
            writer.put("instructions", rows)

    def _binary_id(self, writer: CaptureWriter, images: ElfImages, binary: int) -> int:
        elf = images.of(binary)
        path = clean_name(self._table.binaries.files[binary].path)
        return writer.binary_id(path, "" if elf is None else elf.build_id)

    def _listing(
        self, running: _FamilyHost, key: CodeKey, offsets: frozenset[int], lines: SourceLines
    ) -> Listing | None:
        path = key.name if key.file is None else running.path(key.file)
        with self._table.binaries.guard.each_file(path):
            return running.sampler.resolve(key, offsets, lines)
        return None

    def kernel_names(self) -> dict[int, frozenset[str]]:
        """Returns the names of kernels that ran, by index of process image."""
        found = defaultdict(set, {image: {*names} for image, names in self._ran.items()})
        for _, key in self._codes:
            found[key.process].add(key.name)
        return {process: frozenset(names) for process, names in found.items()}

    def used_binaries(self) -> set[int]:
        """Returns the files that `resolve` will read."""
        found = {key.file for _, key in self._codes if key.file is not None}
        return found.union(*(running.held for running in self._running))

    def forget_images(self, images: Collection[int]) -> None:
        """Forgets process images that have ended.

        What was sampled of them is kept for listings, where there are to be any.
        """
        if not self._wanted.lists:
            for known in [known for known in self._codes if known[1].process in images]:
                del self._kernel_of[self._codes.pop(known)]
                self._sites -= len(self._offsets.pop(known, ()))
        self._locations.forget_images(images)
        self._timed.difference_update(images)
        for running in self._running:
            running.forget_images(images)
        for index in images:
            self._considered.pop(index, None)
            self._kernel_ns_of.pop(index, None)
            self._ran.pop(index, None)

    def close(self) -> None:
        """Closes what processes share."""
        for running in self._running:
            running.close()

    def forget_binaries(self, binaries: Collection[int]) -> None:
        """Forgets files that nobody maps any more."""
        for binary in binaries:
            self._owners.pop(binary, None)

    @property
    def losses(self) -> Counter[LossKind]:
        """What was lost or is not sure."""
        found = Counter(self._locations.losses)
        for running in self._running:
            found.update(running.all_losses)
        return found


def _degree(duty: float) -> int:
    """Returns whether stalls are sampled never, less than is wanted, or as is wanted."""
    return (duty > 0) + (duty >= 1)


def _duty_words(image: ProcessImage, duty: float) -> str:
    who = f"{image.name} ({image.pid})"
    if duty >= 1:
        return f"stalls of {who} are sampled as configured again"
    if duty:
        return (
            f"stalls of {who} are sampled for {100 * duty:.3g} % of the time that is configured:"
            " more would exceed the agent's budget"
        )
    return f"stalls of {who} are not sampled for a while: that would exceed the agent's budget"


def _libraries_of(family: Family) -> tuple[str, ...]:
    """Returns how the names of libraries begin that processes use a family's devices by."""
    apis = (*(api for api in APIS if api.name == family.api), *family.probes)
    beside = () if family.helper is None else family.helper.beside
    return (*(name for api in apis for name in api.libraries), *beside)


def _since(time: KernelTime, start_ns: int) -> KernelTime:
    """Returns what of a sound kernel time is in a recording; it may have begun before."""
    if time.begin_ns >= start_ns:
        return time
    # Several executions: nobody knows how many had ended by then.
    duration_ns = time.duration_ns * (time.end_ns - start_ns) // (time.end_ns - time.begin_ns)
    return replace(time, begin_ns=start_ns, duration_ns=duration_ns)


def _is_possible(reading: DeviceReading) -> bool:
    """Whether a reading can be one."""
    used, total = reading.memory or (0, 0)
    return (
        0 <= reading.end_ns - reading.begin_ns <= LONGEST_READING_NS
        and 0 <= (reading.busy_permille or 0) <= MOST_PERMILLE
        and 0 <= used <= total < _MAX_MEMORY_BYTES
    )


def _is_sound(time: KernelTime) -> bool:
    """Whether a kernel time can be one: it may come from a target."""
    # Several executions may overlap.
    at_most_ns = time.count * (time.end_ns - time.begin_ns)
    return (
        0 < time.count <= _MAX_EXECUTIONS
        and 0 <= time.duration_ns <= at_most_ns
        and 0 <= time.queue < 1 << 64
        and 0 <= time.launch_id < 1 << 63
        and 0 <= time.built_id < 1 << 63
    )
