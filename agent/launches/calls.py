# SPDX-License-Identifier: Apache-2.0
"""Calls of device APIs: probes what targets map, and makes rows of what the kernel half brings.

A launch names its kernel by a handle or by a host address. Each gets a row in `kernels` when it is
first seen; what it is called is filled in at the end (see `kernel_names`).
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence
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
from aiflame.agent.model.window import (
    CALL_EVENT_DTYPE,
    COLUMNS,
    NONE,
    OpenWindow,
    Rows,
    added_up,
    rows_of,
)
from aiflame.agent.processes.elf_images import ElfImages
from aiflame.agent.processes.table import NO_BINARY, Mapping, ProcessImage, ProcessTable
from aiflame.gpu.apis.base import Api, Call

# Whose last wait is remembered: twice what the kernel half knows.
_MOST_QUEUES = 8192

# What the row of a call depends on.
_ROW_OF = ("call", "stack", "kind", "tgid", "image", "tid", "kernel")


class _FoundFunction(NamedTuple):
    """Where a process has a function, as long as these are its mappings and the same are probed."""

    mappings: Sequence[Mapping]
    changes: int
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


# The same in columns.
_DESCRIBED_DTYPE = np.dtype(
    [
        ("process", "<u4"),
        ("thread", "<u4"),
        ("stack", "<u8"),
        ("function", "<u4"),
        ("kernel", "<u4"),
        ("direction", "u1"),
    ]
)


def _filled(column: str, calls: Rows) -> Rows:
    """Returns rows of a column with what it has of described calls."""
    rows = np.zeros(len(calls), COLUMNS[column].dtype)
    for name in _DESCRIBED_DTYPE.names or ():
        if name in (rows.dtype.names or ()):
            rows[name] = calls[name]
    return rows


class ApiCalls:
    """All calls of a recording.

    Args:
        programs: Loaded programs.
        table: Process table.
        images: ELF headers of the targets' files.
        kernels: Gives out rows of kernels.
        window: Where calls go.
        helpers: Of device families.
    """

    def __init__(
        self,
        programs: Programs,
        table: ProcessTable,
        images: ElfImages,
        kernels: KernelTable,
        window: OpenWindow,
        helpers: Sequence[Api] = (),
    ) -> None:
        self._window = window
        self._programs = programs
        self._table = table
        self._images = images
        self.probes = ApiProbes(programs, table.binaries.facts, helpers=helpers)
        self._names = KernelNames(table, images, kernels, window)
        self._events: list[bytes] = []
        self._identities: dict[int, FileIdentity] = {}
        self._addresses: dict[tuple[int, int], _FoundFunction] = {}  # by image and slot
        self._functions_told: set[int] = set()
        # When the last wait that was told of a process's queue was over.
        self._told_waits: OrderedDict[tuple[int, int], int] = OrderedDict()

    def prepare(self, runtimes: Iterable[Path], opener: Opener) -> None:
        """Probes files that may hold runtimes, before a process maps them."""
        for path in runtimes:
            self.probes.look_at_path(path, opener)

    @property
    def is_waiting(self) -> bool:
        """Whether there are probes that wait for their programs."""
        return self.probes.is_waiting

    def poll(self, *, is_waiting: bool = False) -> None:
        """As `ApiProbes.poll`; looks again at files that lack probes, once they may have them."""
        self.probes.poll(is_waiting=is_waiting)
        if self.probes.are_any_due():
            for image in [*self._table.images.values()]:
                if image.laid and not image.is_over:
                    self.look(image)

    def take_probes_off(self) -> None:
        """As `ApiProbes.take_off`: nothing more is recorded."""
        self.probes.take_off()

    def look(self, image: ProcessImage) -> None:
        """Probes what a process has mapped."""
        files = self._table.binaries.files
        for binary in sorted({mapping.binary for mapping in image.mappings} - {NO_BINARY}):
            descriptor = files[binary].fd
            identity = self._identities.get(binary)
            is_new = identity is None or self.probes.is_due(identity, image.pid)
            if descriptor is not None and is_new:
                path = files[binary].path
                found = self.probes.look(descriptor, path, image.pid, image.payer)
                if found is not None:  # else it is looked at again
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
        changes = self.probes.changes
        # A process's mappings are never changed, only replaced by others.
        if found is None or found.mappings is not image.mappings or found.changes != changes:
            found = _FoundFunction(image.mappings, changes, *self._look_for(image, slot))
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
        described, which = self._distinct(keys)
        is_known = described["process"] != NONE
        is_launch = described["kernel"] != NONE
        keeps = is_known[which] & ~is_launch[which]
        calls = _filled("calls", described[which[keeps]])
        calls["count"], calls["bytes"] = values["count"][keeps], values["bytes"][keeps]
        self._window.add("calls", added_up(calls, COLUMNS["calls"]))
        keeps = is_known[which] & is_launch[which]
        self._add_launches(described[which[keeps]], keys[keeps], values[keeps], (begin_ns, end_ns))
        self._add_waits(end_ns)
        self._window.add("call_events", np.array(list(self._listed()), CALL_EVENT_DTYPE))

    def _distinct(self, keys: Rows) -> tuple[Rows, npt.NDArray[np.intp]]:
        """Describes calls, each of several runs once.

        Returns:
            _DESCRIBED_DTYPE, with a process of NONE for what is not known; and which of them each
            key is.
        """
        _, first, which = np.unique(keys[list(_ROW_OF)], return_index=True, return_inverse=True)
        found = np.zeros(len(first), _DESCRIBED_DTYPE)
        found["process"] = NONE
        for at, key in enumerate(keys[first]):
            call = self._described(key)
            if call is not None:
                found[at] = call
        return found, which

    def _add_launches(
        self, calls: Rows, keys: Rows, values: Rows, window_ns: tuple[int, int]
    ) -> None:
        rows = _filled("launches", calls)
        # Those that are not told apart have no order on their queue.
        rows["queue"] = np.where(keys["run"] > 0, keys["queue"], 0)
        names = (("enqueued_ns", "first_ns"), ("last_enqueued_ns", "last_ns"))
        for (name, ns), bound_ns in zip(names, window_ns, strict=True):
            at_ns = values[ns].astype(np.int64) - self._table.start_ns
            rows[name] = np.where(values[ns] > 0, np.clip(at_ns, 0, window_ns[1]), bound_ns)
        rows["count"], rows["work"] = values["count"], values["work"]
        rows["launch_id"] = values["launch_id"]
        self._window.add("launches", rows[np.argsort(rows["enqueued_ns"], kind="stable")])
        waits = _filled("queue_waits", calls)
        waits["queue"] = keys["queue"]
        self._tell_waits(waits, values, window_ns[1])

    def _add_waits(self, end_ns: int) -> None:
        """Adds the last waits of queues on which nothing was launched afterwards."""
        keys, states = self._programs.queues.read_all()
        waits = np.zeros(len(keys), COLUMNS["queue_waits"].dtype)
        is_known = np.zeros(len(keys), bool)
        for at, key in enumerate(keys):
            image = self._table.known(int(key["tgid"]), int(key["image"]))
            is_known[at] = image is not None
            if image is None:
                self._programs.queues.delete(key.tobytes())
            else:
                waits["process"][at] = image.index
        waits["queue"] = np.where(keys["queue"] == abi.ALL_QUEUES, 0, keys["queue"])
        self._tell_waits(waits[is_known], states[is_known], end_ns)

    def _tell_waits(self, waits: Rows, values: Rows, end_ns: int) -> None:
        """Adds waits that are over by the window's end and were not told before."""
        start_ns = self._table.start_ns
        begin_ns = values["waited_from_ns"].astype(np.int64) - start_ns
        waits["begin_ns"] = np.maximum(begin_ns, 0)
        waits["end_ns"] = values["waited_until_ns"].astype(np.int64) - start_ns
        is_over = (waits["end_ns"] >= waits["begin_ns"]) & (waits["end_ns"] <= end_ns)
        waits = np.unique(waits[is_over])
        rows = []
        for row in waits[np.argsort(waits["end_ns"], kind="stable")]:
            queue = int(row["process"]), int(row["queue"])
            if self._told_waits.get(queue, -1) < int(row["end_ns"]):
                self._told_waits[queue] = int(row["end_ns"])
                rows.append(row)
        while len(self._told_waits) > _MOST_QUEUES:  # one that is told again does no harm
            self._told_waits.popitem(last=False)
        self._window.add("queue_waits", np.array(rows, COLUMNS["queue_waits"].dtype))

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
        for known in (self._addresses, self._told_waits):
            for key in [key for key in known if key[0] in images]:
                del known[key]
        self._names.forget_images(images)

    def forget_binaries(self, binaries: Collection[int]) -> None:
        """Forgets files that nobody maps any more."""
        for binary in binaries:
            identity = self._identities.pop(binary, None)
            # Another binary may be the same file, where the kernel tells of it by other numbers.
            if identity is not None and identity not in self._identities.values():
                self.probes.forget(identity)
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
