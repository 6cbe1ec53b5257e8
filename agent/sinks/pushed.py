# SPDX-License-Identifier: Apache-2.0
"""What is pushed of a profile: weights by stack, for each class of time or of device work.

Sinks of back-ends share it, so that all send the same sums. Threads and processes are not told
apart: a back-end would make a series of each. Frames are those that reports show by default.

A stack is leaf first. Below its frames stands what a class adds: `[blocked: lock]`; a kernel; the
kernel and, as the leaf, the stall reason. At its root stands `[truncated: reason]` where the walk
did not reach the thread's start, and `[unknown launch]` where nobody knows who launched a kernel.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from aiflame.agent.model.batch import Batch
from aiflame.agent.model.gpu import NONE, Kernel, Operation
from aiflame.agent.model.profile import FrameKind, Profile, SampleClass, Stacks, StopReason
from aiflame.agent.model.ranges import ranges
from aiflame.agent.reports.base import Frames
from aiflame.agent.reports.causes import CAUSES, Cause, classify
from aiflame.agent.reports.device_rows import UNKNOWN_LAUNCH, device_samples
from aiflame.agent.reports.device_times import device_times
from aiflame.agent.reports.kernel_names import kernel_names
from aiflame.agent.reports.rows import TRUNCATED_REASONS
from aiflame.agent.reports.selection import shown_stacks
from aiflame.agent.reports.words import showable

I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]

# Pyroscope cuts stacks of more than 1,000 (its limit `max_profile_stacktrace_depth`). The rest is
# for what is added: a marker at the root; a kernel and a stall reason at the leaf.
MAX_FRAMES = 997

# A stack of as many frames with the longest names stays below what a Pyroscope takes at once, 2 MB
# (its limit `ingestion_burst_size_mb`): 1,000 * (1,024 + 512) bytes, and some for numbers.
_MAX_NAME_BYTES = 1_024
_MAX_FILE_BYTES = 512

# Formats have signed numbers of 64 bits, and a request with a larger one is refused as a whole.
MAX_WEIGHT = (1 << 63) - 1
# Of one row, far above any that is true: in ns, 104 days. Some are told by processes, which may
# lie; a thousand rows of one stack still add up.
_MAX_ROW = 1 << 53

# As reports call what has an empty name.
_UNNAMED = showable("")

# In hexadecimal digits; what stands for the rest of a text that was cut.
_DIGEST_DIGITS = 12


def shown_text(text: str, max_bytes: int) -> str:
    """Return a text that any back-end takes: valid UTF-8, one line, of bounded length.

    Two texts that differ after the cut stay two, by a digest at the end. "" stays "".
    """
    if not text:
        return ""
    # A control character or a lone surrogate becomes one character, so that no text grows.
    shown = showable(text)
    encoded = shown.encode()
    if len(encoded) <= max_bytes:
        return shown
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
    ending = f"...#{digest[:_DIGEST_DIGITS]}"
    return encoded[: max_bytes - len(ending)].decode("utf-8", "ignore") + ending


class PushedClass(enum.Enum):
    """What a weight is of."""

    ON_CPU = enum.auto()
    BLOCKED = enum.auto()
    WAITING_TO_RUN = enum.auto()
    PREEMPTED = enum.auto()
    LAUNCHES = enum.auto()
    KERNEL_TIME = enum.auto()
    DEVICE_SAMPLES = enum.auto()


_OF_SAMPLES = {
    SampleClass.ON_CPU: PushedClass.ON_CPU,
    SampleClass.BLOCKED: PushedClass.BLOCKED,
    SampleClass.WAITING_TO_RUN: PushedClass.WAITING_TO_RUN,
    SampleClass.PREEMPTED: PushedClass.PREEMPTED,
}


class FrameType:
    """`profile.frame.type` of OpenTelemetry's semantic conventions, whose values are open.

    Those from `GIL` on are our own; a kernel's is its API ("cuda", which is a known one, "opencl").
    """

    NATIVE = "native"
    KERNEL = "kernel"
    PYTHON = "cpython"
    TRUNCATED = "abort-marker"
    OTHER = "unknown"
    GIL = "gil"
    OFF_CPU = "off-cpu"
    STALL = "gpu-stall"


_TYPE_OF_KIND = {
    FrameKind.NATIVE: FrameType.NATIVE,
    FrameKind.KERNEL: FrameType.KERNEL,
    FrameKind.PYTHON: FrameType.PYTHON,
    FrameKind.MARKER: FrameType.OTHER,
    FrameKind.INTERPRETER: FrameType.NATIVE,
}


class Function(NamedTuple):
    """A name, and the source file it is in, "" where unknown."""

    name: str
    file: str


class Mapping(NamedTuple):
    """A mapped file, or the kernel; its build id in hexadecimal, "" where it has none."""

    file: str
    build_id: str


# One frame with the functions inlined into it: its `FrameType`; an index into `Tables.mappings`, -1
# for none; the binary's own virtual address, 0 for none; and (index into `Tables.functions`, line
# or 0) of each function, innermost first. A plain tuple, as there are tens of thousands.
Location = tuple[str, int, int, tuple[tuple[int, int], ...]]


@dataclass(frozen=True, slots=True)
class Series:
    """The weights of one class: one row for a stack, none of whose values is 0.

    Attributes:
        klass: What they are of.
        period_ns: What one sample stands for; 0 where a weight is no sample, or no time.
        stack: Index into the stacks of the tables, each at most once.
        value: ns of the times; a number of the launches and the device samples.
        count: Of on-CPU time, how many periods; else as `value`.
        samples: How many samples of threads or devices these are, as `Request.samples` counts them;
            0 for launches and the times of kernels.
    """

    klass: PushedClass
    period_ns: int
    stack: I64
    value: U64
    count: U64
    samples: U64

    def rows(self, which: slice) -> Series:
        """Return some of it."""
        return replace(
            self,
            stack=self.stack[which],
            value=self.value[which],
            count=self.count[which],
            samples=self.samples[which],
        )

    @property
    def sample_count(self) -> int:
        """How many samples all of it is."""
        return int(self.samples.sum())

    def __len__(self) -> int:
        return len(self.stack)


@dataclass(frozen=True, slots=True)
class Tables:
    """What the series of a batch refer to, each thing once.

    The locations of stack `i` are `locations_of[offsets[i]:offsets[i + 1]]`, leaf first: indexes
    into `locations`. None is empty.
    """

    functions: Sequence[Function]
    mappings: Sequence[Mapping]
    locations: Sequence[Location]
    offsets: I64
    locations_of: I64

    def stacks(self, which: I64) -> tuple[I64, I64]:
        """Return offsets and locations of some stacks, in the form in which the tables have all."""
        return _Rows(self.offsets, self.locations_of).chosen(which)


@dataclass(frozen=True, slots=True)
class Pushed:
    """A batch, ready to be encoded."""

    batch: Batch
    tables: Tables
    series: tuple[Series, ...]


def pushed(batch: Batch) -> Pushed:
    """Return what is pushed of a batch, which may be nothing."""
    return _Builder(batch.profile).build(batch)


def series_parts(series: Series, count: int) -> Iterator[Series]:
    """Yield a series in so many parts of about the same size, at most one for each row."""
    bounds = np.linspace(0, len(series), min(count, len(series)) + 1).astype(np.int64).tolist()
    for begin, end in pairwise(bounds):
        yield series.rows(slice(begin, end))


class _Rows(NamedTuple):
    # Rows of ids of any lengths.
    offsets: I64
    flat: I64

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]]) -> _Rows:
        offsets = np.zeros(len(rows) + 1, np.int64)
        np.cumsum([len(row) for row in rows], out=offsets[1:])
        return cls(offsets, np.array([one for row in rows for one in row], np.int64))

    def chosen(self, which: I64) -> _Rows:
        lengths = np.diff(self.offsets)[which]
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        return _Rows(offsets, self.flat[ranges(self.offsets[which], lengths)])

    def followed_by(self, others: _Rows) -> _Rows:
        offsets = np.append(self.offsets, self.offsets[-1] + others.offsets[1:])
        return _Rows(offsets, np.append(self.flat, others.flat))

    def joined(self, which: I64, others: _Rows, which_others: I64) -> _Rows:
        # Some rows, each with one of the others after it.
        lengths = np.diff(self.offsets)[which]
        more = np.diff(others.offsets)[which_others]
        offsets = np.zeros(len(which) + 1, np.int64)
        np.cumsum(lengths + more, out=offsets[1:])
        flat = np.empty(int(offsets[-1]), np.int64)
        flat[ranges(offsets[:-1], lengths)] = self.flat[ranges(self.offsets[which], lengths)]
        at = ranges(offsets[:-1] + lengths, more)
        flat[at] = others.flat[ranges(others.offsets[which_others], more)]
        return _Rows(offsets, flat)


class _Weights(NamedTuple):
    # Of one series, before equal stacks are summed. `stack` may be NONE: not known.
    klass: PushedClass
    period_ns: int
    stack: I64
    head: I64
    value: U64
    counted: U64
    samples: U64


class _Builder:
    """Makes the tables of one profile."""

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._functions: dict[Function, int] = {}
        self._mappings: dict[Mapping, int] = {}
        self._locations: dict[Location, int] = {}
        self._known_functions: dict[int, tuple[str, int, int]] = {}
        # What stands below the frames of stacks, leaf first; nothing, most often.
        self._heads: dict[tuple[int, ...], int] = {(): 0}

    def build(self, batch: Batch) -> Pushed:
        found = [*self._times(), *self._device()]
        found = [one for one in found if len(one.stack)]
        stacks = [one.stack for one in found]
        used = np.unique(np.concatenate(stacks)) if stacks else np.zeros(0, np.int64)
        bases, base_of = self._bases(used)
        heads = _Rows.of(list(self._heads))
        keys = [
            one.head * len(base_of) + base_of[np.searchsorted(used, one.stack)] for one in found
        ]
        distinct = np.unique(np.concatenate(keys)) if keys else np.zeros(0, np.int64)
        head, base = np.divmod(distinct, max(1, len(base_of)))
        rows = heads.joined(head, bases, base)
        tables = Tables(list(self._functions), list(self._mappings), list(self._locations), *rows)
        series = (
            _summed(one, np.searchsorted(distinct, key))
            for one, key in zip(found, keys, strict=True)
        )
        return Pushed(batch, tables, tuple(one for one in series if len(one)))

    def _times(self) -> Iterator[_Weights]:
        profile, samples = self._profile, self._profile.samples
        stacks = samples["stack"].astype(np.int64)
        for klass, name in _OF_SAMPLES.items():
            chosen = samples["klass"] == klass
            stack = stacks[chosen]
            head = np.zeros(len(stack), np.int64)
            if klass is SampleClass.BLOCKED and len(stack):
                head = self._causes()[classify(profile)[stack]]
            period_ns = profile.recording.period_ns if klass is SampleClass.ON_CPU else 0
            value = count = samples["ns"][chosen]
            if period_ns:  # a sample may stand for several
                count = (value + np.uint64(period_ns // 2)) // np.uint64(period_ns)
            yield _Weights(name, period_ns, stack, head, value, count, samples["count"][chosen])

    def _causes(self) -> I64:
        is_gil = [cause is Cause.GIL for cause in Cause]
        types = [FrameType.GIL if gil else FrameType.OFF_CPU for gil in is_gil]
        named = zip(types, CAUSES, strict=True)
        return self._heads_of([(self._marker(t, f"[blocked: {c}]"),) for t, c in named])

    def _device(self) -> Iterator[_Weights]:
        gpu = self._profile.gpu
        if not any(map(len, (gpu.calls, gpu.samples, gpu.times))):
            return
        kernels = [
            self._location(_api_of(kernel), name.whole)
            for kernel, name in zip(gpu.kernels, kernel_names(gpu.kernels), strict=True)
        ]
        of_kernel = self._heads_of([(kernel,) for kernel in kernels])
        yield self._launches(of_kernel)
        if len(gpu.times):
            times = device_times(self._profile)
            stack = np.where(times.stack < 0, NONE, times.stack)
            head = of_kernel[times.kernel]
            columns = (times.ns, times.ns, np.zeros_like(times.ns))
            yield _Weights(PushedClass.KERNEL_TIME, 0, stack, head, *columns)
        if len(gpu.samples):
            yield from self._device_samples()

    def _launches(self, of_kernel: I64) -> _Weights:
        calls = self._profile.gpu.calls_of(Operation.LAUNCH)
        kernel = calls["kernel"].astype(np.int64)
        # A launch of nothing that is known: it has its API's function as the leaf.
        head = np.append(of_kernel, 0)[np.where(kernel == NONE, len(of_kernel), kernel)]
        stack = calls["stack"].astype(np.int64)
        columns = (calls["count"], calls["count"], np.zeros_like(calls["count"]))
        return _Weights(PushedClass.LAUNCHES, 0, stack, head, *columns)

    def _device_samples(self) -> Iterator[_Weights]:
        found = device_samples(self._profile)
        gpu = found.gpu
        known = {(i.code, i.offset): i for i in gpu.instructions if i.file or i.line}
        # Offsets are summed by source line: of each of them a back-end would keep a stack.
        offsets, at = np.unique(found.offset, return_inverse=True)
        sites, site = np.unique(found.code * max(1, len(offsets)) + at, return_inverse=True)
        codes, which = np.divmod(sites, max(1, len(offsets)))
        places = []
        for code, offset in zip(codes.tolist(), offsets[which].tolist(), strict=True):
            kernel = gpu.codes[code].kernel
            one = known.get((code, offset))
            file, line = (one.file, one.line) if one is not None else ("", 0)
            name = found.names[kernel].whole
            places.append(self._location(_api_of(gpu.kernels[kernel]), name, file, line))
        reasons = [self._marker(FrameType.STALL, reason.name) for reason in gpu.reasons]
        pairs, pair = np.unique(site * max(1, len(reasons)) + found.reason, return_inverse=True)
        head_of = self._heads_of(
            [
                (reasons[reason], places[place])
                for place, reason in (divmod(p, len(reasons)) for p in pairs.tolist())
            ]
        )
        stack = np.where(found.stack < 0, NONE, found.stack)
        periods = [min(device.period_ns, _MAX_ROW) for device in gpu.devices]
        period_of = np.array(periods, np.int64)
        period = period_of[found.device]
        for period_ns in np.unique(period).tolist():
            chosen = period == period_ns
            count = found.count[chosen]
            columns = (stack[chosen], head_of[pair[chosen]], count, count, count)
            yield _Weights(PushedClass.DEVICE_SAMPLES, period_ns, *columns)

    def _heads_of(self, heads: Sequence[tuple[int, ...]]) -> I64:
        numbers = [self._heads.setdefault(head, len(self._heads)) for head in heads]
        return np.array(numbers, np.int64)

    def _function(self, name: str, file: str = "") -> int:
        shown = Function(
            shown_text(name, _MAX_NAME_BYTES) or _UNNAMED, shown_text(file, _MAX_FILE_BYTES)
        )
        return self._functions.setdefault(shown, len(self._functions))

    def _number(self, location: Location) -> int:
        return self._locations.setdefault(location, len(self._locations))

    def _location(self, type_: str, name: str, file: str = "", line: int = 0) -> int:
        return self._number((type_, -1, 0, ((self._function(name, file), line),)))

    def _marker(self, type_: str, name: str) -> int:
        return self._location(type_, name)

    def _bases(self, used: I64) -> tuple[_Rows, I64]:
        """Return the frames of stacks, equal ones once, and which of them each stack has."""
        is_known = used != NONE
        shown = shown_stacks(self._profile, Frames.BOTH)
        rows, is_cut = self._frames(shown, used[is_known])
        # What is added at the root: a marker, or nothing.
        roots: list[tuple[int, ...]] = [()]
        ends = shown.ends[used[is_known]].tolist()
        marks: dict[str, int] = {}
        which = []
        for end, cut, length in zip(
            ends, is_cut.tolist(), np.diff(rows.offsets).tolist(), strict=True
        ):
            text = ""
            if cut or StopReason(end) in TRUNCATED_REASONS:
                text = f"[truncated: {(StopReason.TOO_DEEP if cut else StopReason(end)).label}]"
            elif not length:
                # A back-end would drop what has no frame at all.
                text = f"[no frames: {StopReason(end).label}]"
            if text and text not in marks:
                marks[text] = len(roots)
                roots.append((self._marker(FrameType.TRUNCATED, text),))
            which.append(marks.get(text, 0))
        known = np.arange(len(ends), dtype=np.int64)
        whole = rows.joined(known, _Rows.of(roots), np.array(which, np.int64))
        bounds = whole.offsets.tolist()
        numbers: dict[bytes, int] = {}
        distinct: list[int] = []
        base_of = np.zeros(len(used), np.int64)
        equal = []
        for stack, (begin, end) in enumerate(pairwise(bounds)):
            number = numbers.setdefault(whole.flat[begin:end].tobytes(), len(numbers))
            if number == len(distinct):
                distinct.append(stack)
            equal.append(number)
        base_of[is_known] = equal
        # The last one is that of unknown launches.
        base_of[~is_known] = len(distinct)
        unknown = _Rows.of([(self._marker(FrameType.OTHER, UNKNOWN_LAUNCH),)])
        return whole.chosen(np.array(distinct, np.int64)).followed_by(unknown), base_of

    def _frames(self, shown: Stacks, used: I64) -> tuple[_Rows, npt.NDArray[np.bool_]]:
        """Return the locations of stacks, leaf first, and which of them were cut at the root."""
        frames = self._profile.frames
        ends = shown.offsets[used + 1].astype(np.int64)
        starts = shown.offsets[used].astype(np.int64)
        is_cut = ends - starts > MAX_FRAMES
        starts = np.maximum(starts, ends - MAX_FRAMES)
        lengths = ends - starts
        flat = shown.frames[ranges(starts, lengths)].astype(np.int64)
        in_use, at = np.unique(flat, return_inverse=True)
        # A frame opens a location, unless it was inlined into the one before.
        opens = ~frames["inlined"][in_use][at]
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        opens[offsets[:-1][lengths > 0]] = True
        first = np.flatnonzero(opens)
        sizes = np.diff(np.append(first, len(flat)))
        found = self._found(frames[in_use], at, first, sizes)
        before = np.concatenate([np.zeros(1, np.int64), np.cumsum(opens)])
        location_offsets = before[offsets]
        counts = np.diff(location_offsets)
        last = location_offsets[1:] - 1
        leaf_first = np.repeat(last + location_offsets[:-1], counts) - np.arange(len(found))
        return _Rows(location_offsets, found[leaf_first]), is_cut

    def _found(self, frames: npt.NDArray[np.void], at: I64, first: I64, sizes: I64) -> I64:
        """Return the location of each run of frames.

        Args:
            frames: Those in use.
            at: Which of them, frame by frame.
            first: Where each run begins in `at`.
            sizes: How long each is.
        """
        columns = (frames[name].tolist() for name in ("function", "line", "address"))
        whole, lines = [], []
        for function, line, address in zip(*columns, strict=True):
            type_, mapping, number = self._of_function(function)
            lines.append((number, line))
            # Of code that is in no file, addresses say nothing.
            whole.append((type_, mapping, address if mapping >= 0 else 0))
        is_alone = sizes == 1
        found = np.zeros(len(first), np.int64)
        alone, which = np.unique(at[first[is_alone]], return_inverse=True)
        numbers = [self._number((*whole[i], (lines[i],))) for i in alone.tolist()]
        found[is_alone] = np.array(numbers, np.int64)[which]
        groups: dict[tuple[int, ...], int] = {}
        several = np.flatnonzero(~is_alone)
        frame_at = at.tolist() if len(several) else []
        bounds = (column[several].tolist() for column in (first, sizes))
        for run, begin, size in zip(several.tolist(), *bounds, strict=True):
            group = tuple(frame_at[begin : begin + size])
            if group not in groups:
                # The innermost one is the last, as in stacks.
                inlined = tuple(lines[i] for i in reversed(group))
                groups[group] = self._number((*whole[group[0]], inlined))
            found[run] = groups[group]
        return found

    def _of_function(self, index: int) -> tuple[str, int, int]:
        """Return type, mapping and number of a function of the profile."""
        if index not in self._known_functions:
            self._known_functions[index] = self._new_function(index)
        return self._known_functions[index]

    def _new_function(self, index: int) -> tuple[str, int, int]:
        function = self._profile.functions[index]
        mapping = -1
        if function.binary is not None and function.kind is not FrameKind.PYTHON:
            binary = self._profile.binaries[function.binary]
            shown = Mapping(
                shown_text(binary.path, _MAX_FILE_BYTES) or _UNNAMED,
                shown_text(binary.build_id, _MAX_FILE_BYTES),
            )
            mapping = self._mappings.setdefault(shown, len(self._mappings))
        number = self._function(function.name, function.file)
        return _TYPE_OF_KIND[function.kind], mapping, number


def _api_of(kernel: Kernel) -> str:
    return shown_text(kernel.api, _MAX_NAME_BYTES) or FrameType.OTHER


def _summed(weights: _Weights, stack: I64) -> Series:
    # Equal stacks summed; what weighs nothing is left out. Its samples are counted with the others:
    # nothing of their time is missing.
    stacks, at = np.unique(stack, return_inverse=True)
    sums = np.zeros((3, len(stacks)), np.uint64)
    columns = (weights.value, weights.counted, weights.samples)
    for total, column in zip(sums, columns, strict=True):
        np.add.at(total, at, np.minimum(column, np.uint64(_MAX_ROW)))
    np.minimum(sums, np.uint64(MAX_WEIGHT), out=sums)
    weighs = sums[0] > 0
    value, count, samples = sums[:, weighs]
    if len(samples):
        samples[0] += sums[2, ~weighs].sum()
    return Series(weights.klass, weights.period_ns, stacks[weighs], value, count, samples)
