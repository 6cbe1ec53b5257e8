# SPDX-License-Identifier: Apache-2.0
"""Pyroscope, by its own way in: push.v1.PusherService/Push, with profiles in pprof's format.

Sources: api/push/v1/push.proto and pkg/validation of https://github.com/grafana/pyroscope (2.2);
https://connectrpc.com/docs/protocol#unary-request; pprof's profile.proto. Each class of each batch
is a series. Its name and types are those by which Pyroscope knows the same data when it comes by
OTLP, so that both ways give the same series.

What is older than an hour is refused there; requests stay below its rate limit, which no retry can
pass that is longer.
"""

from __future__ import annotations

import gzip
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from aiflame.agent.model.batch import Batch
from aiflame.agent.model.profile import Binary
from aiflame.agent.reports.pprof_parts import (
    LineField,
    LocationField,
    ProfileField,
    SampleField,
    function_message,
    mapping,
    value_type,
)
from aiflame.agent.reports.protowire import (
    StringTable,
    message_field,
    packed,
    varint,
    varint_field,
    varints,
)
from aiflame.agent.sinks.labels import (
    DEFAULT_LABELS,
    MAX_VALUE_BYTES,
    checked_labels,
    series_labels,
)
from aiflame.agent.sinks.posting import Poster, PostSettings
from aiflame.agent.sinks.pushed import (
    Pushed,
    PushedClass,
    Series,
    Tables,
    pushed,
    series_parts,
    shown_text,
)
from aiflame.agent.sinks.requests import Request, SinkAway, SinkRefused

_PATH = "/push.v1.PusherService/Push"

# Pyroscope's limits, if nothing else is configured there: `max_profile_stacktrace_samples`, and of
# bytes `ingestion_burst_size_mb`, which is less than a profile may have by itself (4 MiB). Half a
# request more is for the labels.
_MAX_SAMPLES = 16_000
_MAX_BYTES = 1_900_000

# `reject_older_than` is an hour; a minute of it is for clocks that differ, and for the way.
_MAX_AGE_S = 3_540.0

# Level 6 takes three times as long for 12 % less.
_GZIP_LEVEL = 1

# Profiles of one series are told apart by their milliseconds (grafana/pyroscope#2483).
_APART_NS = 1_000_000

_LATER = (408, 429)

_U64_MAX = (1 << 64) - 1


class PushField:
    """Of PushRequest, RawProfileSeries, RawSample and LabelPair of push.proto."""

    SERIES = 1
    LABELS, SAMPLES = 1, 2
    RAW_PROFILE, ID = 1, 2
    NAME, VALUE = 1, 2


class _Type(NamedTuple):
    # `period` is () where there is none. A period of one stands where samples have none of theirs.
    name: str
    sample: tuple[str, str]
    period: tuple[str, ...]


def _type_of(series: Series) -> _Type:
    ns, count = "nanoseconds", "count"
    if series.klass is PushedClass.DEVICE_SAMPLES:
        unit = ns if series.period_ns else count
        return _Type("gpu_pcsample", ("gpu_pcsample", count), ("gpu_pcsample", unit))
    return _TYPES[series.klass]


_TYPES = {
    PushedClass.ON_CPU: _Type("process_cpu", ("cpu", "nanoseconds"), ("cpu", "nanoseconds")),
    PushedClass.BLOCKED: _Type("off_cpu", ("off_cpu", "nanoseconds"), ()),
    **{
        klass: _Type(name, (name, unit), (name, unit))
        for klass, name, unit in (
            (PushedClass.WAITING_TO_RUN, "run_delay", "nanoseconds"),
            (PushedClass.PREEMPTED, "preempted", "nanoseconds"),
            (PushedClass.LAUNCHES, "gpu_launch", "count"),
            (PushedClass.KERNEL_TIME, "gpu_kernel_time", "nanoseconds"),
        )
    },
}


@dataclass(frozen=True, kw_only=True)
class PyroscopeSettings(PostSettings):
    """The keys of `[sinks.pyroscope]`.

    Attributes:
        labels: Of series, besides service_name and what is asked for by name: those of
            `labels.LABELS`.
    """

    labels: tuple[str, ...] = DEFAULT_LABELS


class PyroscopeSink:
    """Pushes to a Pyroscope; see the module.

    Raises:
        UsageError: The settings make no sense.
    """

    name = "pyroscope"
    max_age_s: float | None = _MAX_AGE_S

    def __init__(self, settings: PyroscopeSettings) -> None:
        self._labels = checked_labels(settings.labels)
        headers = {"Content-Type": "application/proto", "Connect-Protocol-Version": "1"}
        self._poster = Poster(settings, _PATH, headers)

    def encode(self, batches: Sequence[Batch]) -> Iterator[Request]:
        """Encode batches of one stretch of time."""
        waiting: list[_Encoded] = []
        size = 0
        for one in self._profiles(batches):
            if waiting and size + one.raw_bytes > _MAX_BYTES:
                yield _request(waiting)
                waiting, size = [], 0
            waiting.append(one)
            size += one.raw_bytes
        if waiting:
            yield _request(waiting)

    def _profiles(self, batches: Sequence[Batch]) -> Iterator[_Encoded]:
        times: Counter[tuple[object, ...]] = Counter()
        for batch in batches:
            # Those of a pod's containers may be one series, if that is no label.
            labels = series_labels(batch.labels, self._labels, 1)
            of = pushed(batch)
            for series in of.series:
                type_ = _type_of(series)
                key = (type_, *labels)
                for part, profile in _split(of, series):
                    begin_ns = batch.begin_unix_ns + times[key] * _APART_NS
                    times[key] += 1
                    yield _Encoded.of(labels, type_, profile, begin_ns, batch, len(part))

    def send(self, request: Request) -> Counter[str]:
        """Send a request.

        Raises:
            SinkAway: It is to be sent again.
            SinkRefused: It is not.
        """
        answer = self._poster.post(request.body)
        if answer.is_taken and not answer.body:
            return Counter()
        if answer.is_taken:
            raise SinkRefused(f"{self.name}: no Pyroscope at this URL: it answers {answer.words}")
        if answer.status in _LATER or answer.status >= 500:
            raise SinkAway(f"{self.name}: {answer.words}", answer.retry_after_s)
        raise SinkRefused(f"{self.name}: {answer.words}")


class _Encoded(NamedTuple):
    series: bytes
    raw_bytes: int
    samples: int
    begin_unix_ns: int

    @classmethod
    def of(
        cls,
        labels: Sequence[tuple[str, str]],
        type_: _Type,
        profile: bytes,
        begin_ns: int,
        batch: Batch,
        samples: int,
    ) -> _Encoded:
        raw = profile + varint_field(ProfileField.TIME_NANOS, begin_ns)
        raw += varint_field(ProfileField.DURATION_NANOS, batch.duration_ns)
        # Without the clock in its header: an equal profile is equal bytes.
        sample = message_field(PushField.RAW_PROFILE, gzip.compress(raw, _GZIP_LEVEL, mtime=0))
        sample += message_field(PushField.ID, str(uuid.uuid4()).encode())
        body = b"".join(
            message_field(PushField.LABELS, _pair(name, value))
            for name, value in sorted([("__name__", type_.name), *labels])
        )
        body += message_field(PushField.SAMPLES, sample)
        begin_unix_ns = batch.begin_unix_ns
        return cls(message_field(PushField.SERIES, body), len(raw), samples, begin_unix_ns)


def _pair(name: str, value: str) -> bytes:
    return message_field(PushField.NAME, name.encode()) + message_field(
        PushField.VALUE, value.encode()
    )


def _request(series: Sequence[_Encoded]) -> Request:
    return Request(
        b"".join(one.series for one in series),
        min(one.begin_unix_ns for one in series),
        sum(one.samples for one in series),
    )


def _split(of: Pushed, series: Series) -> Iterator[tuple[Series, bytes]]:
    # As many profiles as the limits ask for. Values stay whole, so that sums do.
    parts = -(-len(series) // _MAX_SAMPLES)
    if parts < 2:
        encoded = _profile(of, series)
        parts = -(-len(encoded) // _MAX_BYTES)
        if parts < 2 or len(series) < 2:
            yield series, encoded
            return
    for part in series_parts(series, parts):
        yield from _split(of, part)


def _profile(of: Pushed, series: Series) -> bytes:
    """Return pprof's Profile of a series, without its time."""
    tables, type_ = of.tables, _type_of(series)
    strings = StringTable()
    offsets, flat = tables.stacks(series.stack)
    in_use, at = np.unique(flat, return_inverse=True)
    # Each table's ids count from 1, without a gap, as Parca wants them.
    encoded, ends = varints((at + 1).astype(np.uint64))
    values, value_ends = varints(series.value)
    bounds, value_bounds = ends[offsets].tolist(), value_ends.tolist()
    parts = [message_field(ProfileField.SAMPLE_TYPE, value_type(strings, *type_.sample))]
    for i in range(len(series)):
        body = message_field(SampleField.LOCATION_ID, encoded[bounds[i] : bounds[i + 1]])
        body += message_field(SampleField.VALUE, values[value_bounds[i] : value_bounds[i + 1]])
        parts.append(message_field(ProfileField.SAMPLE, body))
    parts += _tables(tables, in_use.tolist(), strings)
    if type_.period:
        parts.append(message_field(ProfileField.PERIOD_TYPE, value_type(strings, *type_.period)))
        parts.append(varint_field(ProfileField.PERIOD, series.period_ns or 1))
    comments = [strings.id(text) for text in _comments(of.batch)]
    parts.append(packed(ProfileField.COMMENT, comments))
    parts += [message_field(ProfileField.STRING_TABLE, text) for text in strings.encoded()]
    return b"".join(parts)


def _comments(batch: Batch) -> Iterator[str]:
    yield f"aiflame {batch.profile.recording.aiflame_version}"
    for loss in batch.profile.losses:
        yield shown_text(f"lost: {loss.name} {loss.count}", MAX_VALUE_BYTES)


def _tables(tables: Tables, in_use: Sequence[int], strings: StringTable) -> Iterator[bytes]:
    functions: dict[int, int] = {}
    mappings: dict[int, int] = {}
    limits: Counter[int] = Counter()
    # Tens of thousands: each call counts.
    id_, mapping_id, at = (varint(field << 3) for field in _LOCATION_NUMBERS)
    function_id, line_number = (varint(field << 3) for field in _LINE_NUMBERS)
    for number, index in enumerate(in_use, 1):
        _, in_mapping, address, lines = tables.locations[index]
        body = id_ + varint(number)
        if in_mapping >= 0:
            identity = mappings.setdefault(in_mapping, len(mappings) + 1)
            if address >= limits[identity]:
                limits[identity] = min(address + 1, _U64_MAX)
            body += mapping_id + varint(identity) + at + varint(address)
        for function, line in lines:
            identity = functions.setdefault(function, len(functions) + 1)
            source = function_id + varint(identity) + line_number + varint(line)
            body += message_field(LocationField.LINE, source)
        yield message_field(ProfileField.LOCATION, body)
    for index, number in mappings.items():
        yield mapping(number, Binary(*tables.mappings[index]), limits[number], strings)
    for index, number in functions.items():
        yield function_message(number, *tables.functions[index], strings)


_LOCATION_NUMBERS = (LocationField.ID, LocationField.MAPPING_ID, LocationField.ADDRESS)
_LINE_NUMBERS = (LineField.FUNCTION_ID, LineField.LINE)
