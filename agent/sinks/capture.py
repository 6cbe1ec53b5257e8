# SPDX-License-Identifier: Apache-2.0
"""Windows to the rows of a capture.

A capture says in seconds what windows say: a row of samples belongs to the second in which its
window began. Time off the CPU is charged to each window that it lasts through, and one row in a
capture, in the second in which it ended (see `capture.spans`, which spreads it again).
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from aiflame.agent.capture.writer import CaptureWriter
from aiflame.agent.model.gpu import Direction
from aiflame.agent.model.profile import StackEnd
from aiflame.agent.model.window import NO_STACK, NO_TIME, NONE, Rows, Timing, Window
from aiflame.agent.sinks.names import MAX_INTEGER, Names
from intervaltree import IntervalTree

_INTERVAL_NS = 1_000_000_000

# Stands in the addresses of a capture where kernel frames are missing between the kernel's and the
# user's part of a stack.
KERNEL_CUT = 0

# Of all calls' work and bytes, as readers add them up: what programs ask for need not exist.
_LARGEST_SUM = 1 << 62


class PythonHalf(NamedTuple):
    """Python frames of a stack: whose, the id of their chain, and an enum python_gil."""

    process: int
    chain: int
    gil: int


class CaptureSink:
    """Writes windows into a capture.

    Args:
        writer: Open capture; committing and closing it stay the caller's.
        start_ns: Where the capture begins, since the recording's start: windows before are not
            given.

    Attributes:
        names: Functions, frames and binaries of the capture.
        pythons: Python halves, by row of the stack.
        losses: By name, added up.
        end_ns: Where the last window ended, since the capture's beginning.
    """

    def __init__(self, writer: CaptureWriter, start_ns: int = 0) -> None:
        self._writer = writer
        self._start_ns = start_ns
        self.names = Names()
        self.pythons: dict[int, PythonHalf] = {}
        self.losses: Counter[str] = Counter()
        self.end_ns = 0
        self._rows: dict[int, int] = {}  # of stacks by id, and by -1 - process for want of one
        self._lost: set[int] = set()
        self._mapped: dict[int, int] = {}
        self._open_ns: Counter[tuple[int, int, int]] = Counter()
        self._left = {"work": _LARGEST_SUM, "bytes": _LARGEST_SUM}

    def put(self, window: Window) -> None:
        """Writes a window.

        Raises:
            DiskFull: Nothing since the last commit is kept.
        """
        if not all(map(str.isascii, window.texts)):
            window = replace(window, texts=tuple(map(_sound, window.texts)))
        first_ns = window.start_ns - self._start_ns
        self.end_ns = window.end_ns - self._start_ns
        interval = max(min(first_ns, self.end_ns - 1), 0) // _INTERVAL_NS
        binaries = self._put_facts(window)
        self._put_stacks(window)
        self._put_samples(window, interval)
        self._put_calls(window, interval)
        self._put_devices(window, interval, binaries)
        for name, count in window.losses[["name", "count"]].tolist():
            self.losses[window.texts[name]] += count
        if window.is_last:
            self.finish()

    def finish(self) -> None:
        """Writes the waits that were open when the last window ended."""
        interval = max(self.end_ns - 1, 0) // _INTERVAL_NS
        rows = [
            (interval, row, thread, kind, 1, ns)
            for (row, thread, kind), ns in self._open_ns.items()
        ]
        self._open_ns.clear()
        self._writer.put("samples", rows)

    def user_addresses(self, stack: int) -> bytes:
        """Returns the user half of a stack's addresses, leaf first, as little-endian u64."""
        row = self._rows.get(stack)
        return b"" if row is None else self._writer.user_addresses(row)

    @property
    def lost_stacks(self) -> int:
        """How many stacks never came."""
        return len(self._lost)

    def _time(self, ns: int) -> int:
        return max(ns - self._start_ns, 0)

    def _put_facts(self, window: Window) -> dict[int, int | None]:
        """Writes processes, threads and what they map; returns the ids of binaries."""
        texts = window.texts
        cgroups = {int(row["cgroup"]): row for row in window.cgroups}
        rows = []
        for row in window.processes:
            cgroup = cgroups.get(int(row["cgroup"]))
            group = (0, 0) if cgroup is None else (cgroup["path"], cgroup["container_id"])
            exited_ns = int(row["exited_ns"])
            rows.append(
                (
                    *(int(row[name]) for name in ("process", "pid", "parent_pid")),
                    *(texts[row[name]] for name in ("name", "executable", "command_line")),
                    *(texts[text] for text in group),
                    self._time(int(row["started_ns"])),
                    None if exited_ns == NO_TIME else self._time(exited_ns),
                )
            )
        self._writer.put("processes", rows)
        self._writer.put_threads(
            (thread, process, tid, texts[name])
            for thread, process, tid, name in window.threads.tolist()
        )
        times = window.thread_times[["on_cpu_ns", "observed_ns", "thread"]]
        self._writer.add_thread_times(times.tolist())
        binaries: dict[int, int | None] = {NONE: None}
        for binary, path, build_id in window.binaries.tolist():
            binaries[binary] = self.names.binary(texts[path], texts[build_id])
        self._put_mappings(window.mappings, binaries)
        self.names.write(self._writer)
        return binaries

    def _put_mappings(self, mappings: Rows, binaries: dict[int, int | None]) -> None:
        mapped = mappings[mappings["binary"] != NONE]
        for process in np.unique(mapped["process"]).tolist():
            rows = mapped[mapped["process"] == process]
            content = hash(rows.tobytes())
            if self._mapped.get(process) == content:
                continue
            if process in self._mapped:  # the table is gone through for it
                self._writer.drop_mappings([process])
            self._mapped[process] = content
            self._writer.put(
                "mappings",
                [
                    (process, start, end, offset, bias if bias <= MAX_INTEGER else 0, known)
                    for start, end, offset, bias, binary in laid_over(rows)
                    if (known := binaries[binary]) is not None
                ],
            )

    def _put_stacks(self, window: Window) -> None:
        addresses = np.ascontiguousarray(window.addresses).view("<u8")
        rows = []
        for at, stack in enumerate(window.stacks["stack"].tolist()):
            known = self._rows.get(stack)
            if known is not None and stack not in self._lost:
                continue
            found = window.stacks[at]
            is_lost = int(found["stop_reason"]) == StackEnd.LOST
            if known is None:
                known = self._rows[stack] = len(self._rows)
            elif is_lost:
                continue
            (self._lost.add if is_lost else self._lost.discard)(stack)
            first, depth = int(found["first"]), int(found["kernel_depth"])
            kernel = addresses[first : first + depth]
            user = addresses[first + depth : first + depth + int(found["user_depth"])]
            if found["is_kernel_cut"]:
                kernel = np.append(kernel, np.uint64(KERNEL_CUT))
            process, chain, gil = int(found["process"]), int(found["chain"]), int(found["gil"])
            if chain or gil:
                self.pythons[known] = PythonHalf(process, chain, gil)
            blob = kernel.tobytes() + user.tobytes()
            rows.append((known, process, len(kernel), int(found["stop_reason"]), blob, None))
        self._writer.put("stacks", rows)

    def _row_of(self, stack: int, process: int) -> int:
        """Returns the row of a stack; of a thread without one, the row that says so."""
        if stack != NO_STACK:
            return self._rows[stack]
        row = self._rows.get(-1 - process)
        if row is None:
            row = self._rows[-1 - process] = len(self._rows)
            end = int(StackEnd.NOT_WALKED)
            self._writer.put("stacks", [(row, process, 0, end, b"", None)])
        return row

    def _put_samples(self, window: Window, interval: int) -> None:
        process_of = dict(window.threads[["thread", "process"]].tolist())
        rows = []
        for stack, thread, kind, count, ns in window.samples.tolist():
            key = (self._row_of(stack, process_of[thread]), thread, kind)
            if count:
                rows.append((interval, *key, count, ns + self._open_ns.pop(key, 0)))
            else:
                self._open_ns[key] += ns
        self._writer.put("samples", rows)
        self._writer.put(
            "waits",
            [
                (
                    self._row_of(stack, process_of[thread]),
                    thread,
                    self._time(start_ns),
                    # The part before the capture begins is not in it.
                    max(blocked_ns - max(self._start_ns - start_ns, 0), 0),
                    runnable_ns,
                )
                for stack, thread, start_ns, blocked_ns, runnable_ns, _ in window.waits.tolist()
            ],
        )

    def _put_calls(self, window: Window, interval: int) -> None:
        texts, writer = window.texts, self._writer
        process_of = dict(window.threads[["thread", "process"]].tolist())
        writer.put(
            "api_functions",
            [
                (function, texts[api], texts[name], operation)
                for function, api, name, operation in window.functions.tolist()
            ],
        )
        writer.put(
            "kernels",
            [
                (kernel, process, texts[api], texts[name], texts[unnamed])
                for kernel, process, api, name, unnamed in window.kernels.tolist()
            ],
        )
        calls: list[tuple[int | None, ...]] = []
        fields = ["function", "thread", "stack", "direction", "count", "bytes"]
        for function, thread, stack, direction, count, size_bytes in window.calls[fields].tolist():
            row = self._row_of(stack, process_of[thread])
            size = self._bounded("bytes", size_bytes)
            calls.append((interval, row, thread, function, None, direction, count, 0, size))
        fields = ["function", "thread", "stack", "kernel", "count", "work"]
        for function, thread, stack, kernel, count, work in window.launches[fields].tolist():
            row = self._row_of(stack, process_of[thread])
            items = self._bounded("work", work)
            unknown = int(Direction.UNKNOWN)
            calls.append((interval, row, thread, function, kernel, unknown, count, items, 0))
        writer.put("api_calls", calls)
        events = []
        for start_ns, stack, thread, function, kernel, *rest in window.call_events.tolist():
            direction, queue, *axes, size_bytes = rest
            row = self._row_of(stack, process_of[thread])
            launched = None if kernel == NONE else kernel
            events.append(
                (
                    *(self._time(start_ns), row, thread, function, launched, direction),
                    *(min(queue, MAX_INTEGER), *axes, min(size_bytes, MAX_INTEGER)),
                )
            )
        writer.put("api_events", events)

    def _bounded(self, name: str, size: int) -> int:
        """Returns a sum of sizes, less where all together would be more than can be added up."""
        taken = min(size, self._left[name])
        self._left[name] -= taken
        self.losses["call_sizes_cut"] += taken < size
        return taken

    def _put_devices(self, window: Window, interval: int, binaries: dict[int, int | None]) -> None:
        texts, writer = window.texts, self._writer
        writer.put(
            "devices",
            [
                (device, texts[family], texts[name], tier, texts[limit], period_ns)
                for device, family, name, tier, limit, period_ns in window.devices.tolist()
            ],
        )
        writer.put(
            "stall_reasons",
            [
                (reason, texts[family], texts[name])
                for reason, family, name in window.reasons.tolist()
            ],
        )
        writer.put(
            "kernel_codes",
            [(code, kernel, binaries[binary], 0) for code, kernel, binary in window.codes.tolist()],
        )
        rows = []
        for sample in window.device_samples.tolist():
            device, code, offset, reason, launch_id, timing, begin_ns, _, count = sample
            at = interval if timing == Timing.NONE else self._time(begin_ns) // _INTERVAL_NS
            rows.append((at, device, code, offset, reason, launch_id, count))
        writer.put("device_samples", rows)
        times = []
        for time in window.kernel_times.tolist():
            device, kernel, queue, launch_id, begin_ns, end_ns, count, duration_ns = time
            what = (device, kernel, min(queue, MAX_INTEGER), launch_id)
            times.append((*what, self._time(begin_ns), self._time(end_ns), count, duration_ns))
        writer.put("kernel_times", times)


def _sound(text: str) -> str:
    """Returns what UTF-8 can express: names and paths are bytes."""
    return text.encode(errors="surrogateescape").decode(errors="replace")


def laid_over(rows: Rows) -> list[tuple[int, int, int, int, int]]:
    """Lays newer mappings over older ones.

    Args:
        rows: MAPPING_DTYPE of one process, the newest last.

    Returns:
        (start, end, file_offset, bias, binary), none of which overlap.
    """
    mappings = rows[["start", "end", "file_offset", "bias", "binary"]].tolist()
    ordered = sorted(mappings)
    if all(one[1] <= following[0] for one, following in itertools.pairwise(ordered)):
        return ordered
    tree = IntervalTree()
    for mapping in mappings:
        start, end = mapping[:2]
        if start < end:
            tree.chop(start, end)
            tree.addi(start, end, mapping)
    return [
        (part.begin, part.end, offset + part.begin - start, bias, binary)
        for part in sorted(tree)
        for start, _, offset, bias, binary in (part.data,)
    ]
