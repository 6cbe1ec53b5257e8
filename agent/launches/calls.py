# SPDX-License-Identifier: Apache-2.0
"""Calls of device APIs: probes what targets map, and makes rows of what the kernel half brings.

A launch names its kernel by a handle or by a host address. Each gets a row in `kernels` when it is
first seen; what it is called is filled in at the end (see `kernel_names`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from collections.abc import Mapping as AnyMapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from aiflame.agent.inspector.opener import Opener
from aiflame.agent.kernel import abi
from aiflame.agent.kernel.loader import Programs
from aiflame.agent.launches.gpu_kernel_names import KernelNames
from aiflame.agent.launches.gpu_kernels import KernelTable
from aiflame.agent.launches.probes import ApiProbes, FileIdentity
from aiflame.agent.losses import LossKind
from aiflame.agent.model.gpu import Direction, Operation
from aiflame.agent.model.window import CALL_EVENT_DTYPE, COLUMNS, NONE, OpenWindow, rows_of
from aiflame.agent.processes.elf_images import ElfImages
from aiflame.agent.processes.table import NO_BINARY, Mapping, ProcessImage, ProcessTable
from aiflame.gpu.apis.base import Api, Call

# What the row of a call depends on.
_ROW_OF = ("call", "stack", "kind", "tgid", "image", "tid", "kernel")


class _FoundFunction(NamedTuple):
    """Where a process has a function, as long as these are its mappings and so many are probed."""

    mappings: list[Mapping]
    probed: int
    address: int
    size_bytes: int


class _Described(NamedTuple):
    """A call as windows know it; kernel is NONE for what is no launch."""

    process: int
    thread: int
    stack: int
    function: int
    kernel: int
    direction: int


class ApiCalls:
    """All calls of a recording.

    Args:
        programs: Loaded programs.
        table: Process table.
        images: ELF headers of the targets' files.
        kernels: Gives out rows of kernels.
        window: Where calls go.
    """

    def __init__(
        self,
        programs: Programs,
        table: ProcessTable,
        images: ElfImages,
        kernels: KernelTable,
        window: OpenWindow,
    ) -> None:
        self._window = window
        self._programs = programs
        self._table = table
        self._images = images
        self.probes = ApiProbes(programs, table.binaries.facts)
        self._names = KernelNames(table, images, kernels, window)
        self._events: list[bytes] = []
        self._identities: dict[int, FileIdentity] = {}
        self._addresses: dict[tuple[int, int], _FoundFunction] = {}  # by image and slot
        self._functions_told: set[int] = set()

    def prepare(self, runtimes: Iterable[Path], opener: Opener) -> None:
        """Probes files that may hold runtimes, before a process maps them."""
        for path in runtimes:
            self.probes.look_at_path(path, opener)

    def look(self, image: ProcessImage) -> None:
        """Probes what a process has mapped."""
        files = self._table.binaries.files
        for binary in sorted({mapping.binary for mapping in image.mappings} - {NO_BINARY}):
            descriptor = files[binary].fd
            identity = self._identities.get(binary)
            is_new = identity is None or self.probes.may_pay(identity, image.pid)
            if descriptor is not None and is_new:
                path = files[binary].path
                found = self.probes.look(descriptor, path, image.pid, image.payer)
                self._identities[binary] = found

    def with_call(
        self, image: ProcessImage, user: npt.NDArray[np.uint64], slot: int, return_address: int
    ) -> npt.NDArray[np.uint64]:
        """Puts the call that a stack is inside of into it, if it left no frame of its own.

        Args:
            image: Whose stack it is.
            user: User addresses, leaf first.
            slot: Of the function.
            return_address: Where the call returns to.
        """
        at = np.flatnonzero(user == return_address)
        start, size_bytes = self._address(image, slot)
        if not len(at) or not start:
            return user
        before = int(user[at[0] - 1]) - 1 if at[0] else 0
        if start <= before < start + max(size_bytes, 1):
            return user
        # Callers are looked up one byte before.
        return np.insert(user, at[0], np.uint64(start + 1))

    def _address(self, image: ProcessImage, slot: int) -> tuple[int, int]:
        """Returns where a process has a function, and its size; 0 where it has none."""
        found = self._addresses.get((image.index, slot))
        probed = len(self.probes.ranges)
        # A process's list of mappings is never changed, only replaced by another.
        if found is None or found.mappings is not image.mappings or found.probed != probed:
            found = _FoundFunction(image.mappings, probed, *self._look_for(image, slot))
            self._addresses[image.index, slot] = found
        return found.address, found.size_bytes

    def _look_for(self, image: ProcessImage, slot: int) -> tuple[int, int]:
        for mapping in image.mappings:
            identity = self._identities.get(mapping.binary)
            probed = None if identity is None else self.probes.ranges.get((identity, slot))
            if probed is not None:
                address = mapping.start + probed[0] - mapping.file_offset
                if mapping.start <= address < mapping.end:
                    return address, probed[1]
        return 0, 0

    def take_event(self, kind: int, payload: bytes) -> None:
        """Takes in an event of the ring buffer: a call, or a kernel's name."""
        if kind == abi.EventType.KERNEL_NAMED:
            self._names.take(payload)
        else:
            self._events.append(payload)

    def drain(self, begin_ns: int, end_ns: int, idle: int) -> None:
        """Takes in the calls of a window.

        Args:
            begin_ns: Where it begins, since the recording's start.
            end_ns: Where it ends.
            idle: Which of the two maps of sums the kernel half does not write.
        """
        keys, values = self._programs.calls[idle].take_all()
        calls, launches = [], []
        for key, value in zip(keys, values, strict=True):
            call = self._described(key)
            if call is None:
                continue
            count = int(value["count"])
            if call.kernel == NONE:
                what = (call.function, call.thread, call.stack, call.direction)
                calls.append((*what, count, int(value["bytes"])))
            else:
                who = (call.process, call.thread, 0, call.stack, call.function, call.kernel)
                launches.append((*who, 0, begin_ns, end_ns, count, int(value["work"])))
        self._window.add("calls", np.array(calls, COLUMNS["calls"].dtype))
        self._window.add("launches", np.array(launches, COLUMNS["launches"].dtype))
        self._window.add("call_events", np.array(list(self._listed()), CALL_EVENT_DTYPE))

    def _listed(self) -> Iterator[tuple[int, ...]]:
        """Yields calls that came one by one, as many as a ring brings in a second."""
        events = np.frombuffer(b"".join(self._events), abi.CALL_EVENT_DTYPE)
        self._events = []
        known: dict[tuple[Any, ...], _Described | None] = {}
        columns = (events[name].tolist() for name in (*_ROW_OF, "ns", "queue", "bytes"))
        axes = np.concatenate([events["grid"], events["block"]], axis=1).tolist()
        for number, (*words, ns, queue, size) in enumerate(zip(*columns, strict=True)):
            key = tuple(words)
            if key not in known:
                known[key] = self._described(events[number])
            call = known[key]
            if call is not None:
                start_ns = max(ns - self._table.start_ns, 0)
                what = (call.stack, call.thread, call.function, call.kernel, call.direction)
                yield (start_ns, *what, queue, *axes[number], size)

    def _described(self, call: np.void) -> _Described | None:
        """Returns what a call is, None for one of a function that is not known."""
        slot, stack, kind = int(call["call"]), int(call["stack"]), int(call["kind"])
        found = self._call(slot)
        if found is None:
            return None
        api, function = found
        image = self._table.image(int(call["tgid"]), int(call["image"]))
        thread = self._table.thread(image, int(call["tid"])).index
        if function.operation is not Operation.LAUNCH:
            direction = _direction(api, function, kind)
            return _Described(image.index, thread, stack, self._told(slot), NONE, int(direction))
        is_named = bool(kind & abi.CALL_KERNEL_IS_NAMED)
        kernel = self._names.kernel(image, api.name, int(call["kernel"]), is_named, stack)
        return _Described(
            image.index, thread, stack, self._told(slot), kernel, int(Direction.UNKNOWN)
        )

    def _call(self, slot: int) -> tuple[Api, Call] | None:
        """What a slot stands for; None for nothing that was given out."""
        if slot >= len(self.probes.functions):
            return None
        api, function = self.probes.functions[slot]
        return (api, function) if isinstance(function, Call) else None

    def function_of(self, slot: int) -> int:
        """Returns the function of a slot, NONE where it is no function of a window."""
        return NONE if self._call(slot) is None else self._told(slot)

    def _told(self, slot: int) -> int:
        """Tells windows of a function, once; returns its number."""
        found = self._call(slot)
        if found is not None and slot not in self._functions_told:
            self._functions_told.add(slot)
            (api, function), text = found, self._window.text
            row = (slot, text(api.name), text(function.symbol), int(function.operation))
            self._window.define("functions", rows_of("functions", row))
        return slot

    def forget_images(self, images: Collection[int]) -> None:
        """Forgets process images that have ended."""
        gone = {key for key in self._addresses if key[0] in images}
        for key in gone:
            del self._addresses[key]
        self._names.forget_images(images)

    def forget_binaries(self, binaries: Collection[int]) -> None:
        """Forgets files that nobody maps any more."""
        for binary in binaries:
            self._identities.pop(binary, None)
        self._names.forget_binaries(binaries)

    def finish(
        self, run: AnyMapping[int, frozenset[str]], images: Collection[int] | None = None
    ) -> None:
        """Names kernels that no name was told of.

        Args:
            run: By index of process image, the names of kernels that it was seen to run.
            images: Only the kernels of these; None for all.
        """
        self._names.finish(run, images)

    @property
    def losses(self) -> Counter[LossKind]:
        """What was lost."""
        return self.probes.losses + Counter(
            {
                LossKind.KERNEL_NAMES_UNREAD: self._names.lost,
            }
        )

    def close(self) -> None:
        """Takes the probes off."""
        self.probes.close()


def _direction(api: Api, call: Call, kind: int) -> Direction:
    if call.kind is not None and kind < len(api.directions):
        return api.directions[kind]
    return call.direction
