# SPDX-License-Identifier: Apache-2.0
"""CPU samples that are samples of a device, for devices that are made of CPUs.

The kernel half counts samples by stack. Each stack is looked at when its record comes: if a frame
is in a file of a device family, the innermost such frame is the stack's location. Counts of stacks
whose record has not come yet wait for it.

A location is kept as an address and looked up at each drain, since a file may be mapped where
another one was: PoCL unmaps the oldest of more than 128 kernels. Counts are kept by the window, so
samples of the window in which that happens may be counted to the new file; they are counted here
too.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from aiflame.agent.losses import LossKind
from aiflame.agent.model.profile import SampleClass
from aiflame.agent.processes.elf_images import ElfImages
from aiflame.agent.processes.table import NO_BINARY, ProcessImage, ProcessTable
from aiflame.gpu.base import CpuSample

U64 = npt.NDArray[np.uint64]

# Stacks with an address in no known mapping whose addresses are kept for a second look. A process
# whose stacks are all like that is one of a JIT, and has new ones all the time.
_MAX_UNKNOWN = 4096


class LocatedStack(NamedTuple):
    """A stack, and what its addresses are in.

    Attributes:
        stack: Its id.
        image: Whose it is.
        user: Its user addresses, leaf first.
        found: The mapping of each, as ProcessImage.find returns it.
        binaries: All that it has addresses in.
    """

    stack: int
    image: ProcessImage
    user: U64
    found: npt.NDArray[np.int64]
    binaries: Collection[int]


@dataclass(slots=True)
class _Location:
    image: ProcessImage
    address: int  # of the innermost frame, for callers of their last byte
    is_caller: bool
    binary: int


class DeviceLocations:
    """Finds them.

    Args:
        table: Process table of the recording.
        images: ELF headers of its binaries.
        owns: Whether a binary, by index, is a device family's.
        runs_kernels: Whether a process may run kernels of a device family.
        period_ns: What one sample stands for. Where fewer are taken, one is worth several.
    """

    def __init__(
        self,
        table: ProcessTable,
        images: ElfImages,
        owns: Callable[[int], bool],
        runs_kernels: Callable[[ProcessImage], bool],
        period_ns: int,
    ) -> None:
        self._table = table
        self._period_ns = period_ns
        self._images = images
        self._owns = owns
        self._runs_kernels = runs_kernels
        self._locations: dict[int, _Location] = {}
        self._unknown: dict[int, tuple[ProcessImage, U64]] = {}
        self._with_kernels: dict[int, ProcessImage] = {}
        # Samples by stack and thread: of one interval, and of stacks that have not come.
        self._sums: defaultdict[int, Counter[int]] = defaultdict(Counter)
        self._waiting: defaultdict[int, Counter[int]] = defaultdict(Counter)
        self._waited: set[int] = set()  # those that were waited for when samples were last taken
        # When samples were taken, by stack and thread, ascending.
        self._times: defaultdict[int, defaultdict[int, list[int]]] = defaultdict(
            lambda: defaultdict(list)
        )
        self.losses: Counter[LossKind] = Counter()

    def refresh(self) -> None:
        """Reads mappings again, before new stacks are looked at, of processes with kernels."""
        for image in self._with_kernels.values():
            if image.exited_ns is None:
                self._table.read_mappings(image)

    def add_stack(self, stack: LocatedStack) -> None:
        """Looks at a new stack."""
        number, image, user, found, binaries = stack
        is_unknown = bool((found < 0).any())
        if any(map(self._owns, binaries)):
            self._locate(number, image, user, found)
        elif is_unknown and len(self._unknown) < _MAX_UNKNOWN:
            self._unknown[number] = image, user.copy()
        elif is_unknown:
            self.losses[LossKind.DEVICE_STACKS_NOT_KEPT] += 1
        waiting = self._waiting.pop(number, None)
        if waiting is not None and (number in self._locations or number in self._unknown):
            self._sums[number].update(waiting)

    def _locate(
        self, stack: int, image: ProcessImage, user: U64, found: npt.NDArray[np.int64]
    ) -> None:
        for depth, at in enumerate(found.tolist()):
            binary = image.mappings[at].binary if at >= 0 else NO_BINARY
            if binary != NO_BINARY and self._owns(binary):
                address = int(user[depth]) - (depth > 0)
                self._locations[stack] = _Location(image, address, depth > 0, binary)
                self._with_kernels[image.index] = image
                return

    def add_sums(
        self, keys: npt.NDArray[Any], values: npt.NDArray[Any], has_come: Callable[[int], bool]
    ) -> None:
        """Takes the sums of an interval.

        Args:
            keys: Of abi.SUM_KEY_DTYPE, shape (n,).
            values: Of abi.SUM_VALUE_DTYPE, shape (n,).
            has_come: Whether the record of a stack was seen.
        """
        on_cpu = keys["sample_class"] == int(SampleClass.ON_CPU)
        ns = values["ns"][on_cpu].astype(np.int64)
        counts = (ns + self._period_ns // 2) // self._period_ns
        rows = zip(
            keys["stack"][on_cpu].tolist(),
            keys["tid"][on_cpu].tolist(),
            counts.tolist(),
            strict=True,
        )
        for stack, tid, count in rows:
            if stack in self._locations or stack in self._unknown:
                self._sums[stack][tid] += count
            elif stack and not has_come(stack):
                self._waiting[stack][tid] += count

    def add_time(self, stack: int, tid: int, ns: int, has_come: Callable[[int], bool]) -> None:
        """Takes the time of one of the samples that `add_sums` counts, monotonic."""
        if stack in self._locations or stack in self._unknown or not has_come(stack):
            self._times[stack][tid].append(ns)

    def take(self, until_ns: int) -> list[CpuSample]:
        """Returns the samples since the last call, those of late stacks among them.

        Args:
            until_ns: Where the window ends, monotonic: times after it are kept for the next one.
        """
        self._look_again()
        # Their stacks are lost: they come with the sums, or in the next drain.
        for stack in self._waited & self._waiting.keys():
            del self._waiting[stack]
        self._waited = {*self._waiting}
        found: list[CpuSample] = []
        for stack, by_thread in self._sums.items():
            location = self._locations.get(stack)
            if location is None:
                continue
            now = self._now_at(location)
            if now is None or now[0] != location.binary:
                self.losses[LossKind.DEVICE_CODE_REPLACED] += sum(by_thread.values())
            if now is None:
                del self._locations[stack]
                continue
            location.binary = now[0]
            for tid, count in by_thread.items():
                sample = CpuSample(location.image.index, tid, *now, location.is_caller, count)
                found += _at_times(sample, self._taken_at(stack, tid, until_ns)[:count])
        self._sums.clear()
        self._drop_times(until_ns)
        return found

    def _taken_at(self, stack: int, tid: int, until_ns: int) -> list[int]:
        """Takes the times of a stack's samples up to a time."""
        times = self._times[stack][tid] if stack in self._times else []
        first_after = bisect_right(times, until_ns)
        taken = times[:first_after]
        del times[:first_after]
        return taken

    def _drop_times(self, until_ns: int) -> None:
        """Drops times of samples that are none of a device."""
        for stack in [stack for stack in self._times if stack not in self._waiting]:
            by_thread = self._times[stack]
            for tid in list(by_thread):
                del by_thread[tid][: bisect_right(by_thread[tid], until_ns)]
                if not by_thread[tid]:
                    del by_thread[tid]
            if not by_thread:
                del self._times[stack]

    def forget_images(self, images: Collection[int]) -> None:
        """Forgets process images that have ended."""
        for index in images:
            self._with_kernels.pop(index, None)
        gone = [key for key, found in self._locations.items() if found.image.index in images]
        for stack in gone:
            del self._locations[stack]

    def _look_again(self) -> None:
        """Looks at stacks whose mappings were not known, once: they have been read since."""
        for stack, (image, user) in self._unknown.items():
            found = image.find(user)
            self._locate(stack, image, user, found)
            if stack not in self._locations and int(found[0]) < 0 and self._runs_kernels(image):
                self.losses[LossKind.DEVICE_CODE_NOT_MAPPED] += sum(self._sums[stack].values())
        self._unknown.clear()

    def _now_at(self, location: _Location) -> tuple[int, int] | None:
        """Returns the binary that is at a location, and the address as it counts; None for none."""
        at = int(location.image.find(np.array([location.address], np.uint64))[0])
        if at < 0:
            return None
        mapping = location.image.mappings[at]
        if mapping.binary == NO_BINARY or not self._owns(mapping.binary):
            return None
        return mapping.binary, location.address - self._images.bias(mapping)


def _at_times(sample: CpuSample, times: Sequence[int]) -> list[CpuSample]:
    """Divides samples among the times that are known of some; those of the others are like these.

    One was taken at each of these times, and may stand for several.
    """
    if not times:
        return [sample]
    each, left = divmod(sample.count, len(times))
    return [replace(sample, count=each + (at < left), taken_ns=ns) for at, ns in enumerate(times)]
