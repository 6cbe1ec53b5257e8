# SPDX-License-Identifier: Apache-2.0
"""Device families in a recording: asks them once an interval, and stores what they say.

Rows refer to each other and a capture is readable at any moment, so kernels and their codes are
written before the first sample of theirs; instructions, sizes and files come when all is over.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from aiflame.agent.capture.writer import CaptureWriter
from aiflame.agent.devices.locations import DeviceLocations
from aiflame.agent.launches.gpu_kernels import KernelTable
from aiflame.agent.losses import LossKind
from aiflame.agent.model.gpu import Device, Tier
from aiflame.agent.model.window import COLUMNS, NONE, OpenWindow, Timing, rows_of
from aiflame.agent.processes.binaries import BinaryTable
from aiflame.agent.processes.elf_images import ElfImages
from aiflame.agent.processes.table import ProcessImage, ProcessTable
from aiflame.agent.symbols.frames import clean_name
from aiflame.agent.symbols.service import Request, SymbolService
from aiflame.agent.target_files import GuardedFile
from aiflame.gpu.base import CodeKey, Family, Interval, KernelSample, Listing

# Of what families count in (gpu.base.Interval).
_INTERVAL_NS = 1_000_000_000


class _MappedFiles:
    """What families see of the files of targets (gpu.base.Files)."""

    def __init__(self, binaries: BinaryTable) -> None:
        self._binaries = binaries
        self.service: SymbolService | None = None

    def path(self, file: int) -> str:
        return self._binaries.files[file].path

    def opened(self, file: int) -> GuardedFile | None:
        known = self._binaries.files[file]
        return None if known.fd is None else self._binaries.guard.each_file(known.path, known.fd)

    def lines(self, file: int, addresses: Sequence[int]) -> Sequence[tuple[str, int]]:
        known = self._binaries.files[file]
        if self.service is None or known.fd is None:
            return [("", 0)] * len(addresses)
        path = f"/proc/{os.getpid()}/fd/{known.fd}"
        request = Request(path, known.root, np.array(addresses, np.uint64))
        (result,) = self.service.resolve_many([request])
        return [(c[0].file, c[0].line) if c and c[0].line else ("", 0) for c in result.frames]


class _Running:
    """A family in this recording; ids of its devices in the capture count from `first`."""

    def __init__(self, family: Family, first: int, devices: tuple[Device, ...]) -> None:
        self.family = family
        self.first = first
        self.devices = devices


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
    ) -> None:
        self._tell_binary = tell_binary
        self._families = families
        self._table = table
        self._window = window
        self._kernels = kernels
        self._cpu_period_ns = cpu_period_ns
        self._files = _MappedFiles(table.binaries)
        self._running: list[_Running] = []
        self._owners: dict[int, Family | None] = {}
        self._codes: dict[tuple[str, CodeKey], int] = {}
        self._reasons: dict[tuple[str, str], int] = {}
        self._offsets: defaultdict[tuple[str, CodeKey], set[int]] = defaultdict(set)
        self._locations = DeviceLocations(
            table, images, lambda file: self._owner(file) is not None, self._runs_by
        )
        self.samples = 0

    def start(self) -> None:
        """Looks for devices and begins. Rows of families that find none say why."""
        first = 0
        for family in self._families:
            finding = family.detect(self._cpu_period_ns)
            absent = Device(family.name, "", Tier.LAUNCHES, finding.why, 0)
            devices = finding.devices or (absent,)
            self._running.append(_Running(family, first, devices))
            first += len(devices)
            family.start(self._files)
        self._tell_devices()

    def _tell_devices(self) -> None:
        text = self._window.text
        rows = [
            (
                *(running.first + at, text(d.family), text(clean_name(d.name))),
                *(int(d.tier), text(d.limit), d.period_ns),
            )
            for running in self._running
            for at, d in enumerate(running.devices)
        ]
        self._window.define("devices", np.array(rows, COLUMNS["devices"].dtype))

    def _owner(self, file: int) -> Family | None:
        """Returns the family whose kernels a file holds, None for most files."""
        if file not in self._owners:
            self._owners[file] = next((f for f in self._families if f.owns(file)), None)
        return self._owners[file]

    def _runs_by(self, file: int) -> bool:
        path = self._files.path(file)
        return any(family.runs_by(path) for family in self._families)

    def before_stacks(self) -> None:
        """To be called at a drain before new stacks are added."""
        self._locations.refresh()

    def add_stack(
        self,
        stack: int,
        image: ProcessImage,
        user: npt.NDArray[np.uint64],
        found: npt.NDArray[np.int64],
        binaries: Iterable[int],
    ) -> None:
        """Sees every new stack, as DeviceLocations.add_stack does."""
        if self._families:
            self._locations.add_stack(stack, image, user, found, binaries)

    def add_sums(
        self, keys: npt.NDArray[Any], values: npt.NDArray[Any], has_come: Callable[[int], bool]
    ) -> None:
        """Sees the sums of an interval, as DeviceLocations.add_sums does."""
        if self._families:
            self._locations.add_sums(keys, values, has_come)

    def drain(self, interval: int, end_ns: int) -> None:
        """Takes in what families sampled.

        Args:
            interval: Seconds since the start.
            end_ns: Of the window, since the start.
        """
        by_family = defaultdict(list)
        for sample in self._locations.take():
            by_family[self._owner(sample.file)].append(sample)
        for running in self._running:
            found = running.family.drain(Interval(interval, by_family[running.family]))
            self._take(running, found, end_ns)

    def stop(self, end_ns: int) -> None:
        """Ends sampling; end_ns as for `drain`."""
        for running in self._running:
            self._take(running, running.family.stop(), end_ns)

    def _take(self, running: _Running, samples: Iterable[KernelSample], end_ns: int) -> None:
        rows = []
        for sample in samples:
            code = self._code(running.family, sample.code)
            self._offsets[running.family.name, sample.code].add(sample.offset)
            reason = self._reason(running.family.name, sample.reason)
            device = running.first + sample.device
            begin_ns = sample.interval * _INTERVAL_NS
            times = (Timing.INTERVAL, min(begin_ns, end_ns), min(begin_ns + _INTERVAL_NS, end_ns))
            what = (device, code, sample.offset, reason, sample.launch_id)
            rows.append((*what, *times, sample.count))
            self.samples += sample.count
        if rows and not running.devices[0].name:
            self._found_late(running)
        self._window.add("device_samples", np.array(rows, COLUMNS["device_samples"].dtype))

    def _found_late(self, running: _Running) -> None:
        """A driver that is not installed here, but where the target runs."""
        found = running.family.detect(self._cpu_period_ns).devices
        # One row was written for it; more would shift the ids of other families.
        running.devices = found[:1] or running.devices
        self._tell_devices()

    def _code(self, family: Family, key: CodeKey) -> int:
        known = self._codes.get((family.name, key))
        if known is None:
            known = self._codes[family.name, key] = len(self._codes)
            kernel = self._kernels.id_of(key.process, family.api, key.name)
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
        self._files.service = service
        families = {running.family.name: running.family for running in self._running}
        for (name, key), code in self._codes.items():
            offsets = frozenset(self._offsets[name, key])
            listing = self._listing(families[name], key, offsets)
            size_bytes = 0 if listing is None else listing.size_bytes
            kernel = self._kernels.id_of(key.process, families[name].api, key.name)
            binary = None if key.file is None else self._binary_id(writer, images, key.file)
            writer.put("kernel_codes", [(code, kernel, binary, size_bytes)])
            lines = () if listing is None else listing.lines
            rows = [
                (code, line.offset, clean_name(line.text), clean_name(line.file), line.line)
                for line in lines
            ]
            writer.put("instructions", rows)
        self._files.service = None

    def _binary_id(self, writer: CaptureWriter, images: ElfImages, binary: int) -> int:
        elf = images.of(binary)
        path = clean_name(self._table.binaries.files[binary].path)
        return writer.binary_id(path, "" if elf is None else elf.build_id)

    def _listing(self, family: Family, key: CodeKey, offsets: frozenset[int]) -> Listing | None:
        path = key.name if key.file is None else self._files.path(key.file)
        with self._table.binaries.guard.each_file(path):
            return family.resolve(key, offsets)
        return None

    def kernel_names(self) -> dict[int, frozenset[str]]:
        """Returns the names of kernels that ran, by index of process image."""
        found: defaultdict[int, set[str]] = defaultdict(set)
        for _, key in self._codes:
            found[key.process].add(key.name)
        return {process: frozenset(names) for process, names in found.items()}

    @property
    def losses(self) -> Counter[LossKind]:
        """What was lost or is not sure."""
        found = Counter(self._locations.losses)
        for running in self._running:
            found.update(running.family.losses())
        return found
