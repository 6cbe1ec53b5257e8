# SPDX-License-Identifier: Apache-2.0
"""Turns what the kernel half holds into rows of the capture, once an interval.

Stacks are told apart by their 64-bit hash; a sum may arrive before its stack does (another CPU
was between the two writes), so a row number is given out at the first mention of a hash and its
content is filled in when it comes. A stack that never comes is entered as lost at the end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from aiflame.agent.capture.writer import CaptureWriter
from aiflame.agent.kernel import abi
from aiflame.agent.losses import LossKind
from aiflame.agent.model.profile import StackEnd
from aiflame.agent.processes.table import ProcessImage, ProcessTable

# Stands where kernel frames are missing between the kernel's and the user's part of a stack.
KERNEL_CUT = 0


class StackSink:
    """Stores each distinct stack once.

    Args:
        writer: Open capture.
        table: Process table, told of addresses in no known mapping.
    """

    def __init__(self, writer: CaptureWriter, table: ProcessTable) -> None:
        self._writer = writer
        self._table = table
        self._rows: dict[int, int] = {}
        # Those whose content has come, and the binaries that each has addresses in.
        self._filled: dict[int, tuple[int, ...]] = {}
        self._binaries: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._unfilled: dict[int, ProcessImage] = {}
        self._unwritten: list[int] = []
        # Row, image, id of the Python frames and abi.PythonGil of each stack that has an eval loop.
        self.with_python: list[tuple[int, ProcessImage, int, int]] = []
        # Is shown every stack: its id, image, user addresses, their mappings, and its binaries.
        self.on_stack: Callable[..., None] = lambda *_: None
        # Puts the call of a device API that a stack is inside of among its user addresses.
        self.with_call: Callable[..., npt.NDArray[np.uint64]] = lambda _, user, *__: user

    def row(self, stack: int, fallback: ProcessImage) -> int:
        """Returns the row of a stack id, giving one out at its first mention."""
        row = self._rows.get(stack)
        if row is None:
            row = self._rows[stack] = len(self._rows)
            self._unfilled[stack] = fallback
            self._unwritten.append(stack)
        return row

    def add(self, keys: npt.NDArray[Any], records: npt.NDArray[Any]) -> None:
        """Stores the new ones among a chunk of the kernel's stack store."""
        rows = []
        unknown: dict[int, bool] = {}
        for stack, record in zip(keys.tolist(), records, strict=True):
            if stack in self._filled:
                continue
            image = self._table.image(int(record["tgid"]), int(record["image"]))
            user = record["user"][: int(record["user_depth"])]
            if record["call_return"]:
                user = self.with_call(image, user, int(record["call"]), int(record["call_return"]))
            found = image.find(user)
            binaries = tuple(sorted(set(image.binaries_at(found))))
            unmapped = found < 0
            if unmapped.any():
                # The leaf is where the processor was; callers found by frame pointer may be junk.
                unknown[image.index] = unknown.get(image.index, False) or bool(unmapped[0])
            # Stacks are many, sets of binaries few: each is kept once.
            self._filled[stack] = self._binaries.setdefault(binaries, binaries)
            self.on_stack(stack, image, user, found, binaries)
            row = self.row(stack, image)
            del self._unfilled[stack]
            if record["python"] or record["gil"]:
                python = (int(record["python"]), int(record["gil"]))
                self.with_python.append((row, image, *python))
            kernel = record["kernel"][: int(record["kernel_depth"])]
            if record["kernel_cut"]:
                kernel = np.append(kernel, np.uint64(KERNEL_CUT))
            addresses = kernel.tobytes() + user.tobytes()
            rows.append((row, image.index, len(kernel), int(record["end"]), addresses, None))
        self._writer.put("stacks", rows)
        for index, is_certain in unknown.items():
            self._table.unknown_address(self._table.images[index], is_certain)

    def binaries_of(self, stacks: npt.NDArray[np.uint64]) -> Counter[int]:
        """Returns in how many of some stacks each binary is."""
        found: Counter[int] = Counter()
        for stack in np.unique(stacks).tolist():
            found.update(self._filled.get(stack, ()))
        return found

    def add_made(
        self, stack: int, image: ProcessImage, kernel: list[int], user: list[int], end: StackEnd
    ) -> None:
        """Stores a stack made by the host half, of kernel and user addresses, leaf first."""
        row = self.row(stack, image)
        self._unfilled.pop(stack, None)
        self._filled[stack] = ()
        blob = np.array([*kernel, *user], np.uint64).tobytes()
        self._writer.put("stacks", [(row, image.index, len(kernel), int(end), blob, None)])

    def write_unfilled(self) -> None:
        """Enters the stacks that were mentioned and have not come: no row may refer to nothing."""
        rows = []
        for stack in self._unwritten:
            image = self._unfilled.get(stack)
            if image is not None:
                # Below 0: there never was one, for instance of a thread that has not run yet.
                end = StackEnd.NOT_WALKED if stack < 0 else StackEnd.LOST
                rows.append((self._rows[stack], image.index, 0, int(end), b"", None))
        self._writer.put("stacks", rows)
        self._unwritten = []

    def lost(self) -> int:
        """Returns how many stacks never came; they stay as they were entered."""
        return sum(stack >= 0 for stack in self._unfilled)

    def has_come(self, stack: int) -> bool:
        """Whether the content of a stack is known."""
        return stack in self._filled

    def mentions(self, stack: int) -> bool:
        """Whether any sample or wait refers to a stack id."""
        return stack in self._rows


class SampleSink:
    """Writes sums and waits, and keeps the totals for the progress line.

    Args:
        writer: Open capture.
        table: Process table.
        stacks: Where the stacks of these samples go.
    """

    def __init__(self, writer: CaptureWriter, table: ProcessTable, stacks: StackSink) -> None:
        self._writer = writer
        self._table = table
        self._stacks = stacks
        self.samples = 0
        self.ns_by_class = [0, 0, 0, 0]

    def add(self, interval: int, keys: npt.NDArray[Any], values: npt.NDArray[Any]) -> None:
        """Writes one interval's sums."""
        rows = []
        for key, value in zip(keys.tolist(), values.tolist(), strict=True):
            stack, image_id, tgid, tid, sample_class, _ = key
            count, ns = value
            image = self._table.image(tgid, image_id)
            # 0 means "no stack": one row of its own for each process image.
            row = self._stacks.row(stack or -1 - image.index, image)
            thread = self._table.thread(image, tid)
            rows.append((interval, row, thread.index, sample_class, count, ns))
            self.ns_by_class[sample_class] += ns
            if sample_class == 0:
                self.samples += count
        self._writer.put("samples", rows)

    def add_wait(self, event: Any) -> None:
        """Writes one long wait from its ring-buffer event."""
        stack = int(event["stack"])
        image = self._table.image(int(event["tgid"]), int(event["image"]))
        row = self._stacks.row(stack or -1 - image.index, image)
        thread = self._table.thread(image, int(event["tid"]))
        start_ns = max(int(event["start_ns"]) - self._table.start_ns, 0)
        waits = (row, thread.index, start_ns, int(event["blocked_ns"]), int(event["runnable_ns"]))
        self._writer.put("waits", [waits])


def read_counters(counters: Any, possible_cpus: int) -> dict[abi.Counter, int]:
    """Returns the counters that tell of no loss, each added up over the CPUs."""
    return {counter: _total(counters, counter, possible_cpus) for counter in abi.Counter}


def read_losses(counters: Any, possible_cpus: int) -> Counter[LossKind]:
    """Returns what the kernel half has lost so far."""
    return Counter(
        {kind: _total(counters, slot, possible_cpus) for kind, slot in abi.LOSS_SLOTS.items()}
    )


def _total(counters: Any, slot: int, possible_cpus: int) -> int:
    values = counters.lookup(slot.to_bytes(4, "little"), possible_cpus)
    return 0 if values is None else int(values.sum())
