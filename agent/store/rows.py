# SPDX-License-Identifier: Apache-2.0
"""Rows of a store, made of batches.

A stack is known by 64 bits of BLAKE2 over its frames, so that every host gives the same stack the
same id: of ten million stacks, two are mistaken for one with a chance of 3 in a million.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from typing import Any

import numpy as np
import numpy.typing as npt
from aiflame.agent.model.batch import Batch, Labels
from aiflame.agent.model.gpu import NONE, GpuProfile, Operation
from aiflame.agent.model.profile import (
    NS_PER_S,
    FrameKind,
    GilState,
    Profile,
    SampleClass,
    StopReason,
)
from aiflame.gpu.attribution import attribution_of
from aiflame.gpu.attribution.kernel_times import attributed_times, measured_times
from aiflame.gpu.stalls import StallCategory, category_of

Row = dict[str, Any]
I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]

# No stack: a launch that nobody knows.
NO_STACK = 0

# The longest names are C++ templates of near 4,000 characters; labels have Kubernetes' 253.
_MAX_NAME_CHARACTERS = 4_096
_MAX_LABEL_CHARACTERS = 512
_MAX_EXTRA_LABELS = 32

# What a DateTime of ClickHouse holds.
_MAX_TIME_S = 2**32 - 1
_MAX_SPAN_S = 2**16 - 1

_CLASS_NAMES = {klass: klass.name.lower() for klass in SampleClass}


@dataclass
class BatchRows:
    """What one batch becomes.

    Attributes:
        samples: Of the table of that name.
        gpu: The same.
        stacks: By their ids, those that the others mention.
        begin_s: When it began, in seconds of Unix.
    """

    samples: list[Row] = field(default_factory=list)
    gpu: list[Row] = field(default_factory=list)
    stacks: dict[int, Row] = field(default_factory=dict)
    begin_s: int = 0


def batch_rows(batch: Batch, cluster: str = "", step_s: int | None = None) -> BatchRows:
    """Turns a batch into rows.

    Args:
        batch: It.
        cluster: Whose hosts it is of.
        step_s: Rows are of so many seconds, where the profile knows when its time was; None: of
            all of the batch.

    Returns:
        Rows that add up to the samples of the batch exactly.
    """
    found = BatchRows(begin_s=_time_s(batch.begin_unix_ns))
    stacks = _StackRows(batch.profile, found.stacks)
    who = _who(batch.labels, cluster)
    periods = _Periods(batch, step_s)
    _add_samples(found.samples, batch, who, stacks, periods)
    _add_gpu(found.gpu, batch, who, stacks, periods)
    return found


def agent_rows(batch: Batch, samples: int, cluster: str = "") -> list[Row]:
    """Returns what a batch tells of the agent that made it: one row, and one for each loss.

    Args:
        batch: Any one of a stretch of time.
        samples: Of threads, of all batches of that stretch.
        cluster: Whose host it is.
    """
    recording = batch.profile.recording
    base = {
        "t": _time_s(batch.begin_unix_ns),
        "span_s": _span_s(batch),
        "cluster": bounded(cluster, _MAX_LABEL_CHARACTERS),
        "node": bounded(batch.labels.node, _MAX_LABEL_CHARACTERS),
        "agent_version": bounded(recording.aiflame_version, _MAX_LABEL_CHARACTERS),
    }
    own = {
        "loss": "",
        "lost": 0,
        "samples": samples,
        "self_cpu_ns": recording.recorder_cpu_ns,
        "rss_bytes": recording.recorder_peak_rss_bytes,
    }
    nothing = {"samples": 0, "self_cpu_ns": 0, "rss_bytes": 0}
    losses = [
        {**base, **nothing, "loss": bounded(x.name, _MAX_LABEL_CHARACTERS), "lost": x.count}
        for x in batch.profile.losses
        if x.count
    ]
    return [{**base, **own}, *losses]


def monday(time_s: int) -> str:
    """Returns the Monday of the week of a time, as a Date."""
    day = datetime.fromtimestamp(time_s, timezone.utc).date()
    return (day - timedelta(days=day.weekday())).isoformat()


def json_lines(rows: Sequence[Row]) -> bytes:
    """Returns rows as they are inserted: one JSON object a line."""
    lines = (json.dumps(row, ensure_ascii=False, separators=(",", ":")) for row in rows)
    return "".join(f"{line}\n" for line in lines).encode("utf-8", "replace")


def bounded(text: str, characters: int) -> str:
    """Returns a text of at most so many characters, all of which have UTF-8."""
    return text[:characters].encode("utf-8", "replace").decode()


def _time_s(unix_ns: int) -> int:
    return min(max(0, unix_ns // NS_PER_S), _MAX_TIME_S)


def _span_s(batch: Batch) -> int:
    """Returns how many seconds a batch has, so that those of one after the other add up.

    Rounded up each, stretches of 5 s were 6 s, and the cost of an agent a sixth less.
    """
    end_s = _time_s(batch.begin_unix_ns + batch.duration_ns)
    return min(max(1, end_s - _time_s(batch.begin_unix_ns)), _MAX_SPAN_S)


def _who(labels: Labels, cluster: str) -> Row:
    values = {
        "cluster": cluster,
        "node": labels.node,
        "service": labels.service,
        "version": labels.version,
        "namespace": labels.namespace,
        "pod": labels.pod,
        "workload": labels.workload,
        "container": labels.container,
        "container_id": labels.container_id,
    }
    return {name: bounded(value, _MAX_LABEL_CHARACTERS) for name, value in values.items()}


class _Periods:
    """Parts of a batch that rows are of."""

    def __init__(self, batch: Batch, step_s: int | None) -> None:
        self.begin_s = _time_s(batch.begin_unix_ns)
        whole_s = _span_s(batch)
        self.step_s = whole_s if step_s is None else min(step_s, whole_s)
        self.count = -(-whole_s // self.step_s)

    def of_second(self, second: npt.NDArray[Any]) -> I64:
        """Returns the part that each second since the beginning is in."""
        found: I64 = np.minimum(second.astype(np.int64) // self.step_s, self.count - 1)
        return found

    def row(self, period: int) -> Row:
        """Returns what its rows say of it."""
        return {
            "t": min(self.begin_s + period * self.step_s, _MAX_TIME_S),
            "span_s": self.step_s,
        }


class _StackRows:
    """Gives stacks their ids, and rows to those that are asked for."""

    def __init__(self, profile: Profile, into: dict[int, Row]) -> None:
        self._profile = profile
        self._into = into
        self._ids: dict[int, int] = {}
        self._functions: dict[int, tuple[str, str, str, str]] = {}
        self._digests: dict[int, bytes] = {}

    def id_of(self, stack: int) -> int:
        """Returns the id of a stack; its row is there afterwards."""
        known = self._ids.get(stack)
        if known is None:
            known = self._ids[stack] = self._add(stack)
        return known

    def _add(self, stack: int) -> int:
        stacks = self._profile.stacks
        begin, end = (int(offset) for offset in stacks.offsets[stack : stack + 2])
        frames = stacks.frames[begin:end][::-1].tolist()
        end, state = StopReason(int(stacks.ends[stack])), GilState(int(stacks.gil[stack]))
        ending, gil = end.name.lower(), state.name.lower()
        stack_id = stack_id_of(end, state, map(self._digest, frames))
        if stack_id not in self._into:
            parts = [self._function(frame) for frame in frames]
            self._into[stack_id] = {
                "stack_id": stack_id,
                "frames": [name for _, name, _, _ in parts],
                "kinds": [kind for kind, _, _, _ in parts],
                "modules": [module for _, _, module, _ in parts],
                "files": [file for _, _, _, file in parts],
                "lines": [int(self._profile.frames["line"][frame]) for frame in frames],
                "ending": ending,
                "gil": gil,
            }
        return stack_id

    def _function(self, frame: int) -> tuple[str, str, str, str]:
        number = int(self._profile.frames["function"][frame])
        known = self._functions.get(number)
        if known is None:
            function = self._profile.functions[number]
            binary = None if function.binary is None else self._profile.binaries[function.binary]
            known = self._functions[number] = (
                FrameKind(function.kind).name.lower(),
                bounded(function.name, _MAX_NAME_CHARACTERS),
                bounded(binary.path, _MAX_NAME_CHARACTERS) if binary is not None else "",
                bounded(function.file, _MAX_NAME_CHARACTERS),
            )
        return known

    def _digest(self, frame: int) -> bytes:
        known = self._digests.get(frame)
        if known is None:
            kind, name, module, file = self._function(frame)
            function = self._profile.functions[int(self._profile.frames["function"][frame])]
            if function.binary is not None:
                # One build is the same wherever it lies.
                module = self._profile.binaries[function.binary].build_id or module
            line = str(int(self._profile.frames["line"][frame]))
            text = _joined(kind, name, module, file, line)
            known = hashlib.blake2b(text, digest_size=16).digest()
            self._digests[frame] = known
        return known


def stack_id_of(end: StopReason, gil: GilState, frames: Iterable[bytes] = ()) -> int:
    """Returns the id of a stack: how it ended, its state, and digests of its frames, leaf first."""
    known = hashlib.blake2b(_joined(end.name.lower(), gil.name.lower()), digest_size=8)
    for frame in frames:
        known.update(frame)
    # 0 says that there is none.
    return int.from_bytes(known.digest(), "little") or 1


def _joined(*parts: str) -> bytes:
    # With their lengths: names may hold whatever would stand between them.
    encoded = [part.encode("utf-8", "replace") for part in parts]
    return b"".join(len(part).to_bytes(4, "little") + part for part in encoded)


def _add_samples(
    into: list[Row], batch: Batch, who: Row, stacks: _StackRows, periods: _Periods
) -> None:
    profile = batch.profile
    process_of = np.array([thread.process for thread in profile.threads], np.int64)
    sample, period, count, ns = _parts(profile, periods)
    samples = profile.samples[sample]
    keys = np.zeros(
        len(sample), [("klass", "u1"), ("period", "<u4"), ("process", "<u4"), ("stack", "<u4")]
    )
    keys["klass"], keys["period"] = samples["klass"], period
    thread = samples["thread"]
    keys["process"], keys["stack"] = process_of[thread], samples["stack"]
    found, row = np.unique(keys, return_inverse=True)
    counts, sums = np.zeros((2, len(found)), np.uint64)
    np.add.at(counts, row, count)
    np.add.at(sums, row, ns)
    labels = _extra(batch.labels)
    columns = (found.tolist(), counts.tolist(), sums.tolist())
    for (klass, part, process, stack), events, value in zip(*columns, strict=True):
        into.append(
            {
                **periods.row(part),
                "class": _CLASS_NAMES[SampleClass(klass)],
                "unit": "ns",
                **who,
                **_process(profile, process, batch.labels.service),
                "labels": labels,
                "stack_id": stacks.id_of(stack),
                "value": value,
                "events": events,
            }
        )


def _extra(labels: Labels) -> dict[str, str]:
    return {
        bounded(name, _MAX_LABEL_CHARACTERS): bounded(value, _MAX_LABEL_CHARACTERS)
        for name, value in labels.extra[:_MAX_EXTRA_LABELS]
    }


def _parts(profile: Profile, periods: _Periods) -> tuple[I64, I64, U64, U64]:
    """Returns the samples of each period: index of the sample, period, count and ns."""
    samples, spans = profile.samples, profile.spans
    everything = np.arange(len(samples), dtype=np.int64)
    if periods.count == 1 or not len(spans):
        return everything, np.zeros_like(everything), samples["count"], samples["ns"]
    first, seconds = spans["first_s"].astype(np.int64), spans["seconds"].astype(np.int64)
    begin, end = periods.of_second(first), periods.of_second(first + seconds - 1)
    touched = end - begin + 1
    span = np.repeat(np.arange(len(spans)), touched)
    number = np.arange(len(span)) - np.repeat(np.cumsum(touched) - touched, touched)
    period = begin[span] + number
    lowest = np.maximum(first[span], period * periods.step_s)
    # All that lies past the last period is in it.
    limit = np.where(period == periods.count - 1, np.iinfo(np.int64).max, 0)
    limit = np.maximum(limit, (period + 1) * periods.step_s)
    inside = (np.minimum((first + seconds)[span], limit) - lowest).astype(np.uint64)
    sample = spans["sample"].astype(np.int64)[span]
    count, ns = spans["count"][span] * inside, spans["ns"][span] * inside
    # What the spans do not tell of is in the first period, so that nothing is missing.
    told_count, told_ns = np.zeros((2, len(samples)), np.uint64)
    np.add.at(told_count, sample, count)
    np.add.at(told_ns, sample, ns)
    rest = np.flatnonzero((samples["count"] > told_count) | (samples["ns"] > told_ns))
    return (
        np.concatenate((sample, rest)),
        np.concatenate((period, np.zeros_like(rest))),
        np.concatenate((count, _less(samples["count"][rest], told_count[rest]))),
        np.concatenate((ns, _less(samples["ns"][rest], told_ns[rest]))),
    )


def _less(whole: U64, told: U64) -> U64:
    return np.where(whole > told, whole - np.minimum(told, whole), np.uint64(0))


# One row of the table `gpu` before it has names: what it is of, and who launched it.
_GPU_KEY = np.dtype(
    [
        ("period", "<u4"),
        ("device", "<i8"),
        ("kernel", "<u4"),
        ("reason", "<i8"),
        ("stack", "<u4"),
    ]
)
_NOTHING = -1
# As large as the column; captures of others may have as many devices as they like.
_MOST_DEVICE = (1 << 16) - 1


def _add_gpu(
    into: list[Row], batch: Batch, who: Row, stacks: _StackRows, periods: _Periods
) -> None:
    gpu = batch.profile.gpu
    for part in (_sampled(gpu, periods), _ran(gpu, periods), _launched(gpu, periods)):
        for (period, device, kernel, reason, stack), figures in part:
            into.append(
                {
                    **periods.row(period),
                    **who,
                    **_process(batch.profile, gpu.kernels[kernel].process, batch.labels.service),
                    **_device(gpu, device, gpu.kernels[kernel].api),
                    "kernel": bounded(
                        gpu.kernels[kernel].name or "[unnamed kernel]", _MAX_NAME_CHARACTERS
                    ),
                    **_reason(gpu, reason),
                    "launch_stack": NO_STACK if stack == NONE else stacks.id_of(stack),
                    **_NO_FIGURES,
                    **figures,
                }
            )


_NO_FIGURES: Row = {
    "samples": 0,
    "stalled": 0,
    "period_ns": 0,
    "launches": 0,
    "runs": 0,
    "busy_ns": 0,
}
_Part = Iterator[tuple[tuple[int, int, int, int, int], Row]]


def _process(profile: Profile, process: int, service: str) -> Row:
    found = profile.processes[process]
    comm = bounded(found.name, _MAX_LABEL_CHARACTERS)
    # Of a single capture nobody may have said whose it is.
    named = {} if service else {"service": comm}
    return {"pid": found.pid, "comm": comm, **named}


def _device(gpu: GpuProfile, device: int, api: str) -> Row:
    if device == _NOTHING:
        # A launch does not say on which device it was.
        return {"family": bounded(api, _MAX_LABEL_CHARACTERS), "model": "", "device": 0}
    found = gpu.devices[device]
    return {
        "family": bounded(found.family, _MAX_LABEL_CHARACTERS),
        "model": bounded(found.name, _MAX_LABEL_CHARACTERS),
        "device": min(device, _MOST_DEVICE),
    }


def _reason(gpu: GpuProfile, reason: int) -> Row:
    if reason == _NOTHING:
        return {"reason": "", "category": ""}
    found = gpu.reasons[reason]
    return {
        "reason": bounded(found.name, _MAX_LABEL_CHARACTERS),
        "category": category_of(found).name.lower(),
    }


def _sampled(gpu: GpuProfile, periods: _Periods) -> _Part:
    if not len(gpu.samples):
        return
    rows = attribution_of(gpu, measured_times(gpu)).rows
    of = gpu.samples[rows["sample"]]
    keys = np.zeros(len(rows), _GPU_KEY)
    keys["period"], keys["device"] = periods.of_second(of["interval"]), of["device"]
    keys["kernel"] = np.array([code.kernel for code in gpu.codes], np.uint32)[of["code"]]
    keys["reason"], keys["stack"] = of["reason"], rows["stack"]
    is_issuing = [category_of(reason) is StallCategory.ISSUING for reason in gpu.reasons]
    for key, (count,) in _summed(keys, rows["count"]):
        yield (
            key,
            {
                "samples": count,
                "stalled": 0 if is_issuing[key[3]] else count,
                "period_ns": gpu.devices[key[1]].period_ns,
            },
        )


def _ran(gpu: GpuProfile, periods: _Periods) -> _Part:
    if not len(gpu.times):
        return
    rows = attributed_times(gpu)
    of = gpu.times[rows["time"]]
    keys = np.zeros(len(rows), _GPU_KEY)
    keys["period"] = periods.of_second(of["end_ns"] // NS_PER_S)
    keys["device"], keys["kernel"] = of["device"], of["kernel"]
    keys["reason"], keys["stack"] = _NOTHING, rows["stack"]
    # Runs are of a time; of those that several stacks share, the first has them.
    is_first = np.append(True, rows["time"][1:] != rows["time"][:-1])
    runs = np.where(is_first, of["count"], 0).astype(np.uint64)
    for key, (ns, count) in _summed(keys, rows["ns"], runs):
        yield key, {"busy_ns": ns, "runs": count}


def _launched(gpu: GpuProfile, periods: _Periods) -> _Part:
    calls = gpu.calls_of(Operation.LAUNCH)
    calls = calls[calls["kernel"] != NONE]
    keys = np.zeros(len(calls), _GPU_KEY)
    keys["period"], keys["kernel"] = periods.of_second(calls["interval"]), calls["kernel"]
    keys["device"], keys["reason"], keys["stack"] = _NOTHING, _NOTHING, calls["stack"]
    for key, (count,) in _summed(keys, calls["count"]):
        yield key, {"launches": count}


def _summed(
    keys: npt.NDArray[np.void], *values: U64
) -> Iterator[tuple[tuple[int, int, int, int, int], list[int]]]:
    found, row = np.unique(keys, return_inverse=True)
    sums = np.zeros((len(values), len(found)), np.uint64)
    for total, value in zip(sums, values, strict=True):
        np.add.at(total, row, value)
    yield from zip(found.tolist(), sums.T.tolist(), strict=True)
