# SPDX-License-Identifier: Apache-2.0
"""Windows to the rows of a capture.

A capture says in seconds what windows say: a row of samples belongs to the second in which its
window began. Time off the CPU is charged to each window that it lasts through, and one row in a
capture, in the second in which it ended (see `capture.spans`, which spreads it again).
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Container, Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from aiflame.agent.capture.writer import CaptureWriter
from aiflame.agent.losses import LossKind
from aiflame.agent.model.gpu import BUSY_UNKNOWN, NO_SIZE, Direction
from aiflame.agent.model.profile import SampleClass, StopReason
from aiflame.agent.model.window import (
    MADE_STACKS,
    NO_STACK,
    NO_TIME,
    NONE,
    Rows,
    Timing,
    Window,
)
from aiflame.agent.sinks.bounded_naming import NAMED_AT_ONCE, by_importance
from aiflame.agent.sinks.index import Numbers
from aiflame.agent.sinks.kernel_files import KernelFiles
from aiflame.agent.sinks.launch_ids import LaunchIds
from aiflame.agent.sinks.launch_order import LaunchOrder
from aiflame.agent.sinks.named_read_outs import NamedReadOuts
from aiflame.agent.sinks.names import MAX_INTEGER, Names
from aiflame.agent.sinks.open_times import OpenTimes, keys_of
from aiflame.agent.sinks.told_kernels import ToldKernels
from aiflame.agent.symbolize.mapped import by_process, laid_over
from aiflame.agent.symbolize.raw_stacks import RawRow
from aiflame.agent.symbolize.stacks import KERNEL_CUT, LEFT_OUT, NamedStack, UnnamedStack

U32 = npt.NDArray[np.uint32]

_INTERVAL_NS = 1_000_000_000
# By how much a window may reach past the second that it begins in, which is not told: those of a
# second end some 0.1 ms late, and on a busy host 100.
_LATE_NS = 10_000_000

# Of all calls' work and bytes, as readers add them up: what programs ask for need not exist.
_LARGEST_SUM = 1 << 62

# Of rows that are made tuples of: those of a host with 10,000 threads would take some MB at once.
_TUPLES_AT_ONCE = 1024


class _Known(enum.IntEnum):
    """Whether a later window may say more of a stack."""

    WHOLE = 0
    LOST = 1  # it may come
    EARLY = 2  # it may be walked on
    UNNAMED = 3  # there was no time to name it


_KNOWN_BITS = 2
_ALL_KNOWN = tuple(_Known)  # to call an enum takes longer than all else that is done with a stack
_KNOWN_BY_REASON: dict[int, _Known] = {
    StopReason.LOST: _Known.LOST,
    StopReason.NO_TABLE_YET: _Known.EARLY,
}


class StackNamer(Protocol):
    """Names the stacks of windows (symbolize.namer)."""

    def name(self, window: Window, stacks: Sequence[UnnamedStack]) -> list[NamedStack]:
        """Names stacks of a window, in their order."""


class CaptureSink:
    """Writes windows into a capture.

    Args:
        writer: Open capture; committing and closing it stay the caller's.
        start_ns: Where the capture begins, since the recording's start: windows before are not
            given.
        names: Functions, frames and binaries of the capture.
        namer: Gives stacks names of these; without one they keep their addresses alone.
        kernel_files: Keeps files of kernels; without them kernels are listed by others, or never.

    Attributes:
        losses: By name, added up.
        end_ns: Where the last window ended, since the capture's beginning.
        lost_stacks: How many stacks never came.
        unnamed_stacks: How many there was no time to name.
    """

    def __init__(
        self,
        writer: CaptureWriter,
        start_ns: int = 0,
        names: Names | None = None,
        namer: StackNamer | None = None,
        kernel_files: KernelFiles | None = None,
    ) -> None:
        self._writer = writer
        self._start_ns = start_ns
        self._names = names or Names()
        self._namer = namer
        self._kernel_files = kernel_files
        self.losses: Counter[str] = Counter()
        self.end_ns = 0
        self.lost_stacks = 0
        self.unnamed_stacks = 0
        # Of stacks by id, and by -1 - process for want of one: the row and a `_Known`.
        self._rows = Numbers()
        self._row_count = 0
        self._mapped = Numbers()  # by process: a hash of what it had mapped
        self._launch_order = LaunchOrder()
        self._launch_ids = LaunchIds()
        self._named_read_outs = NamedReadOuts()
        self._told_kernels = ToldKernels(self._launch_ids)
        self._open_times = OpenTimes()
        self._interval, self._interval_begin_ns = -1, 0
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
        self._names.write(self._writer)
        self._rows.turn()
        self._mapped.turn()
        if interval != self._interval:
            self._interval, self._interval_begin_ns = interval, max(first_ns, 0)
        # Of the windows that begin in a second only the last one does.
        if self.end_ns > (interval + 1) * _INTERVAL_NS + _LATE_NS:
            row = interval, self._interval_begin_ns, self.end_ns
            self._writer.put("intervals", [row])
        self._put_samples(window, interval)
        self._put_calls(window, interval)
        self._put_devices(window, interval, binaries)
        for name, count in window.losses[["name", "count"]].tolist():
            self.losses[window.texts[name]] += count
        if window.is_last:  # it lists the waits that were open at the recording's end
            self._finish()

    def finish(self) -> None:
        """Writes the waits that were open when the last window ended, and names told since."""
        # Nothing has listed them where a recording goes on past the capture.
        self._writer.put("waits", self._open_waits())
        self._finish()

    def _open_waits(self) -> Iterator[tuple[int, ...]]:
        """Yields rows for open waits, so that readers know in which seconds their time was."""
        parts: dict[tuple[int, int], Counter[int]] = {}
        for row, thread, kind, ns in self._open_times.rows():
            if kind != SampleClass.PREEMPTED:
                parts.setdefault((row, thread), Counter())[kind] += ns
        for (row, thread), ns_by_kind in parts.items():
            if ns_by_kind.total() >= _INTERVAL_NS:  # others are in the last second, or nearly
                blocked_ns = ns_by_kind[SampleClass.BLOCKED]
                runnable_ns = ns_by_kind[SampleClass.WAITING_TO_RUN]
                start_ns = max(self.end_ns - blocked_ns - runnable_ns, 0)
                yield row, thread, start_ns, blocked_ns, runnable_ns

    def _finish(self) -> None:
        interval = max(self.end_ns - 1, 0) // _INTERVAL_NS
        rows = [
            (interval, row, thread, kind, 1, ns)
            for row, thread, kind, ns in self._open_times.rows()
        ]
        self._open_times.clear()
        self._writer.put("samples", rows)
        self._writer.put("kernels", self._told_kernels.rows())
        for launches, ended_ns in self._launch_order.finish():
            self._put_launches(launches, ended_ns)

    def _time(self, ns: int) -> int:
        return max(ns - self._start_ns, 0)

    def _put_facts(self, window: Window) -> dict[int, int | None]:
        """Writes processes, threads and what they map; returns the ids of binaries."""
        texts = window.texts
        self._writer.put("processes", self._process_rows(window))
        self._writer.put_threads(
            (thread, process, tid, texts[name])
            for thread, process, tid, name in _tuples(window.threads)
        )
        times = window.thread_times[["on_cpu_ns", "observed_ns", "thread"]]
        self._writer.add_thread_times(_tuples(times))
        binaries: dict[int, int | None] = {NONE: None}
        for binary, path, build_id in window.binaries.tolist():
            binaries[binary] = self._names.binary(texts[path], texts[build_id])
        self._put_mappings(window.mappings, binaries)
        return binaries

    def _process_rows(self, window: Window) -> Iterator[tuple[Any, ...]]:
        texts = window.texts
        cgroups = {int(row["cgroup"]): row for row in window.cgroups}
        for row in window.processes:
            cgroup = cgroups.get(int(row["cgroup"]))
            group = (0, 0) if cgroup is None else (cgroup["path"], cgroup["container_id"])
            exited_ns = int(row["exited_ns"])
            yield (
                *(int(row[name]) for name in ("process", "pid", "parent_pid")),
                *(texts[row[name]] for name in ("name", "executable", "command_line")),
                *(texts[text] for text in group),
                self._time(int(row["started_ns"])),
                None if exited_ns == NO_TIME else self._time(exited_ns),
            )

    def _put_mappings(self, mappings: Rows, binaries: dict[int, int | None]) -> None:
        mapped = mappings[mappings["binary"] != NONE]
        for process, rows in by_process(mapped).items():
            content = hash(rows.tobytes())
            known_content = self._mapped.find(process)
            if known_content == content:
                continue
            if known_content is not None:  # the table is gone through for it
                self._writer.drop_mappings([process])
            self._mapped.set(process, content)
            self._writer.put(
                "mappings",
                [
                    (process, start, end, offset, bias if bias <= MAX_INTEGER else 0, known)
                    for start, end, offset, bias, binary in laid_over(rows)
                    if (known := binaries[binary]) is not None
                ],
            )

    def unnamed(self, windows: Sequence[Window]) -> list[tuple[Window, list[RawRow]]]:
        """Returns, with each of some windows, the stacks that are named first once it is put.

        Args:
            windows: That are put next, one after another.
        """
        seen: set[int] = set()
        found = []
        for window in windows:
            addresses = np.ascontiguousarray(window.addresses).view("<u8")
            rows: list[RawRow] = []
            for row in window.stacks[by_importance(window, self._are_named(window, seen))]:
                seen.add(int(row["stack"]))
                first, depth = int(row["first"]), int(row["kernel_depth"])
                last = first + depth + int(row["user_depth"])
                process, end = int(row["process"]), int(row["stop_reason"])
                rows.append((0, process, depth, end, addresses[first:last].tobytes()))
                if len(rows) == NAMED_AT_ONCE:
                    break
            found.append((window, rows))
        return found

    def _are_named(self, window: Window, others: Container[int] = ()) -> npt.NDArray[np.bool_]:
        """Returns which stacks of a window, and which others, are as they are to be."""
        stacks = window.stacks["stack"].tolist()
        named = (x in others or self._find(x)[1] is _Known.WHOLE for x in stacks)
        return np.fromiter(named, np.bool_, len(stacks))

    def _put_stacks(self, window: Window) -> None:
        addresses = np.ascontiguousarray(window.addresses).view("<u8")
        samples = window.samples
        switched = {*samples["stack"][samples["kind"] > SampleClass.ON_CPU].tolist()}
        switched.update(window.waits["stack"].tolist())
        new: list[tuple[int, int, UnnamedStack]] = []
        # Whoever names them may run out of time.
        order = by_importance(window, self._are_named(window))
        for at, stack in zip(order.tolist(), window.stacks["stack"][order].tolist(), strict=True):
            row, known = self._find(stack)
            found = window.stacks[at]
            now = _KNOWN_BY_REASON.get(int(found["stop_reason"]), _Known.WHOLE)
            if now is known or (now is _Known.LOST and known is not None):
                continue
            if known is _Known.UNNAMED and len(new) >= NAMED_AT_ONCE:
                continue  # there will be no time again: what is new comes first
            self.unnamed_stacks -= known is _Known.UNNAMED
            row = self._set(stack, row, now)
            self.lost_stacks += (now is _Known.LOST) - (known is _Known.LOST)
            first, depth = int(found["first"]), int(found["kernel_depth"])
            kernel = addresses[first : first + depth]
            user = addresses[first + depth : first + depth + int(found["user_depth"])]
            if found["is_kernel_cut"]:
                kernel = np.append(kernel, np.uint64(KERNEL_CUT))
            unnamed = UnnamedStack(
                process=int(found["process"]),
                kernel_depth=len(kernel),
                stop_reason=int(found["stop_reason"]),
                addresses=kernel.tobytes() + user.tobytes(),
                chain=int(found["chain"]),
                gil=int(found["gil"]),
                # What the host half makes are stacks of threads that sleep.
                is_from_switch=stack in switched or stack >> 32 == MADE_STACKS,
            )
            new.append((stack, row, unnamed))
        self._put_rows(window, new)

    def _find(self, key: int) -> tuple[int, _Known | None]:
        """Returns the row of a stack and what is known of it: of a new one, that it would get."""
        found = self._rows.find(key)
        if found is None:
            return self._row_count, None
        return found >> _KNOWN_BITS, _ALL_KNOWN[found & (1 << _KNOWN_BITS) - 1]

    def _set(self, key: int, row: int, known: _Known) -> int:
        """Takes note of what is known of a stack; returns its row."""
        self._rows.set(key, row << _KNOWN_BITS | known)
        self._row_count = max(self._row_count, row + 1)
        return row

    def _put_rows(self, window: Window, new: list[tuple[int, int, UnnamedStack]]) -> None:
        """Writes new stacks, named if there is somebody who can; each with its key and row."""
        stacks = [stack for *_, stack in new]
        named: Sequence[NamedStack | None] = [None] * len(stacks)
        if self._namer is not None:
            named = self._namer.name(window, stacks)
        rows = []
        for (key, row, stack), found in zip(new, named, strict=True):
            if found is LEFT_OUT:
                self._set(key, row, _Known.UNNAMED)
                self.unnamed_stacks += 1
            end = stack.stop_reason if found is None else found.stop_reason
            raw = (stack.process, stack.kernel_depth, end, stack.addresses)
            rows.append((row, *raw, *((None, 0) if found is None else (found.frames, found.gil))))
        self._writer.put("stacks", rows)

    def _row_of(self, stack: int, process: int) -> int:
        """Returns the row of a stack; of a thread without one, the row that says so."""
        row, known = self._find(stack if stack != NO_STACK else -1 - process)
        if known is None:
            row = self._set(-1 - process, row, _Known.WHOLE)
            end, frames = int(StopReason.NOT_WALKED), None if self._namer is None else b""
            self._writer.put("stacks", [(row, process, 0, end, b"", frames, 0)])
        return row

    def _rows_of(self, stacks: npt.NDArray[np.uint64], processes: U32) -> npt.NDArray[np.int64]:
        """Returns what `_row_of` does of each; a stack is looked for once, whoever has it."""
        distinct, which = np.unique(stacks, return_inverse=True)
        found = []
        for stack in distinct.tolist():
            row, known = (0, None) if stack == NO_STACK else self._find(stack)
            found.append(-1 if known is None else row)
        rows = np.array(found, np.int64)[which]
        for at in np.flatnonzero(rows < 0).tolist():
            rows[at] = self._row_of(int(stacks[at]), int(processes[at]))
        return rows

    def _put_samples(self, window: Window, interval: int) -> None:
        samples, waits = window.samples, window.waits
        rows = self._rows_of(samples["stack"], _processes_of(window, samples["thread"]))
        keys = keys_of(rows, samples["thread"], samples["kind"])
        has_ended = samples["count"] > 0
        ended = samples[has_ended]
        ns = ended["weight_ns"] + self._open_times.take(keys[has_ended])
        self._open_times.add(keys[~has_ended], samples["weight_ns"][~has_ended])
        columns = (rows[has_ended], ended["thread"], ended["kind"], ended["count"], ns)
        found = np.rec.fromarrays(columns)
        self._writer.put("samples", ((interval, *row) for row in _tuples(found)))
        rows_of_waits = self._rows_of(waits["stack"], _processes_of(window, waits["thread"]))
        self._writer.put(
            "waits",
            (
                (
                    row,
                    thread,
                    self._time(start_ns),
                    # The part before the capture begins is not in it.
                    max(blocked_ns - max(self._start_ns - start_ns, 0), 0),
                    runnable_ns,
                )
                for row, (_, thread, start_ns, blocked_ns, runnable_ns, _) in zip(
                    rows_of_waits.tolist(), _tuples(waits), strict=True
                )
            ),
        )

    def _put_calls(self, window: Window, interval: int) -> None:
        texts, writer = window.texts, self._writer
        process_of: dict[int, int] = {}
        if len(window.calls) or len(window.launches):
            process_of.update(window.threads[["thread", "process"]].tolist())
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
        for launch in _launches_added_up(window.launches[window.launches["count"] > 0]):
            function, thread, stack, kernel, count, work = launch
            row = self._row_of(stack, process_of[thread])
            items = self._bounded("work", work)
            unknown = int(Direction.UNKNOWN)
            calls.append((interval, row, thread, function, kernel, unknown, count, items, 0))
        writer.put("api_calls", calls)
        for rows, ended_ns in self._launch_order.put(window):
            self._put_launches(rows, ended_ns)
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

    def _put_launches(self, launches: Rows, ended_ns: npt.NDArray[np.int64]) -> None:
        fields = ["stack", "process", "thread", "function", "kernel", "queue"]
        times = ["enqueued_ns", "last_enqueued_ns"]
        rows = []
        for what, between, sums, end_ns in zip(
            launches[fields].tolist(),
            launches[times].tolist(),
            launches[["count", "work"]].tolist(),
            ended_ns.tolist(),
            strict=True,
        ):
            stack, process, thread, function, kernel, queue = what
            row = self._row_of(stack, process)
            until_ns = None if end_ns == NO_TIME else self._time(end_ns)
            who = (row, thread, function, kernel, min(queue, MAX_INTEGER))
            count, work = sums
            work = min(work, MAX_INTEGER)
            rows.append((*who, *map(self._time, between), until_ns, count, work))
        self._writer.put("launches", rows)

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
                (*(device, texts[family], texts[name], tier), texts[limit], period_ns, texts[more])
                for device, family, name, tier, limit, more, period_ns in window.devices.tolist()
            ],
        )
        writer.put(
            "stall_reasons",
            [
                (reason, texts[family], texts[name])
                for reason, family, name in window.reasons.tolist()
            ],
        )
        objects = {}
        if self._kernel_files is not None:
            objects = self._kernel_files.put(window, self._lose)
        writer.put(
            "kernel_codes",
            [
                (code, kernel, binaries[binary], 0, objects.get(code))
                for code, kernel, binary in window.codes.tolist()
            ],
        )
        self._launch_ids.put(window)
        self._told_kernels.put(window)
        process_of = dict(window.kernels[["kernel", "process"]].tolist())
        kernel_of = dict(window.codes[["code", "kernel"]].tolist())
        kernels = [kernel_of[code] for code in window.device_samples["code"].tolist()]
        stacks = self._launched_from(kernels, process_of, window.device_samples)
        is_named = np.array([stack is not None for stack in stacks], bool)
        processes = np.array([process_of[kernel] for kernel in kernels], np.int64)
        self._named_read_outs.put(processes[is_named], window.device_samples[is_named])
        rows = []
        for sample, stack in zip(window.device_samples.tolist(), stacks, strict=True):
            device, code, offset, reason, _, timing, begin_ns, end_ns, count = sample
            if timing == Timing.NONE:
                begin_ns, end_ns = window.start_ns, window.end_ns
            times = (self._time(begin_ns), self._time(end_ns))
            at = interval if timing == Timing.NONE else times[0] // _INTERVAL_NS
            rows.append((at, device, code, offset, reason, stack, *times, count))
        writer.put("device_samples", rows)
        self._put_kernel_times(window.kernel_times, process_of)
        writer.put(
            "device_readings",
            [
                (
                    *(device, self._time(begin_ns), self._time(end_ns)),
                    None if busy == BUSY_UNKNOWN else busy,
                    *((None, None) if used == NO_SIZE else (used, total)),
                )
                for device, begin_ns, end_ns, busy, used, total in window.device_readings.tolist()
            ],
        )

    def _lose(self, kind: LossKind) -> None:
        self.losses[kind.stored_name] += 1

    def _put_kernel_times(self, times: Rows, process_of: dict[int, int]) -> None:
        """Writes kernel times: those of one stack as one row, since it is all that they tell.

        But for times in which samples have stacks as well: how long kernels ran there is known.
        """
        stacks = self._launched_from(times["kernel"].tolist(), process_of, times)
        builders = self._built_at(times, process_of)
        processes = np.array([process_of[kernel] for kernel in times["kernel"].tolist()], np.int64)
        named = self._named_read_outs.at(processes, times)
        together: dict[tuple[int, int, int, int | None, int, int], tuple[int, ...]] = {}
        rows: list[tuple[int | None, ...]] = []
        columns = (times.tolist(), stacks, builders, named.tolist())
        for time, stack, built, stretch in zip(*columns, strict=True):
            device, kernel, queue, _, begin_ns, end_ns, count, duration_ns, _ = time
            begin_ns, end_ns = self._time(begin_ns), self._time(end_ns)
            if stack is None:
                what = (device, kernel, min(queue, MAX_INTEGER), None)
                rows.append((*what, begin_ns, end_ns, count, duration_ns, built))
                continue
            # Readers have a row's time in the second in which it ended.
            key = device, kernel, stack, built, stretch, end_ns // _INTERVAL_NS
            first_ns, last_ns, counts, sum_ns = together.get(key, (begin_ns, end_ns, 0, 0))
            between = min(first_ns, begin_ns), max(last_ns, end_ns)
            together[key] = (*between, counts + count, sum_ns + duration_ns)
        for (device, kernel, stack, built, *_), sums in together.items():
            rows.append((device, kernel, 0, stack, *sums, built))
        self._writer.put("kernel_times", rows)

    def _built_at(self, times: Rows, process_of: dict[int, int]) -> list[int | None]:
        """Returns the rows of the stacks that have built the nodes of graphs that ran."""
        if not times["built_id"].any():
            return [None] * len(times)
        processes = [process_of[kernel] for kernel in times["kernel"].tolist()]
        found = self._launch_ids.builders(np.array(processes, np.int64), times["built_id"])
        self.losses[LossKind.GRAPH_BUILDERS_FULL.stored_name] = self._launch_ids.builders_lost
        return [
            None if stack == NO_STACK else self._row_of(stack, process)
            for stack, process in zip(found.tolist(), processes, strict=True)
        ]

    def _launched_from(
        self, kernels: Sequence[int], process_of: dict[int, int], told: Rows
    ) -> list[int | None]:
        """Returns the rows of the stacks of launches that a device named by their numbers.

        Args:
            kernels: Of each.
            process_of: The process of each kernel.
            told: What the device told, with a `launch_id`.
        """
        processes = [process_of[kernel] for kernel in kernels]
        found = self._launch_ids.stacks(np.array(processes, np.int64), told["launch_id"])
        return [
            None if stack == NO_STACK else self._row_of(stack, process)
            for stack, process in zip(found.tolist(), processes, strict=True)
        ]


def _tuples(rows: Rows) -> Iterator[tuple[Any, ...]]:
    for first in range(0, len(rows), _TUPLES_AT_ONCE):
        yield from rows[first : first + _TUPLES_AT_ONCE].tolist()


def _processes_of(window: Window, threads: U32) -> U32:
    """Returns the process of each thread."""
    known = window.threads
    order = np.argsort(known["thread"])
    at = np.searchsorted(known["thread"], threads, sorter=order)
    processes: U32 = known["process"][order[at]]
    return processes


def _launches_added_up(launches: Rows) -> Iterator[tuple[int, ...]]:
    """Yields (function, thread, stack, kernel, count, work) of a window's launches."""
    fields = ["function", "thread", "stack", "kernel"]
    keys, which = np.unique(launches[fields], return_inverse=True)
    counts, work = np.zeros((2, len(keys)), np.uint64)
    np.add.at(counts, which, launches["count"])
    np.add.at(work, which, launches["work"])
    for key, *sums in zip(keys.tolist(), counts.tolist(), work.tolist(), strict=True):
        yield (*key, *sums)


def _sound(text: str) -> str:
    """Returns what UTF-8 can express: names and paths are bytes."""
    return text.encode(errors="surrogateescape").decode(errors="replace")
