# SPDX-License-Identifier: Apache-2.0
"""Pyroscope, by its own way in: push.v1.PusherService/Push, with profiles in pprof's format.

Sources: api/push/v1/push.proto and pkg/validation of https://github.com/grafana/pyroscope (2.2);
https://connectrpc.com/docs/protocol#unary-request; pprof's profile.proto. Each class of each batch
is a series. Its name and types are those by which Pyroscope knows the same data when it comes by
OTLP, so that both ways add up; series that came by OTLP have __delta__, __otel__ and service.name
besides.

What is older than an hour is refused there; requests stay below its rate limit, which no retry can
pass that is longer.
"""

from __future__ import annotations

import gzip
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from aiflame.agent.model.batch import Batch
from aiflame.agent.reports.pprof_parts import ProfileField
from aiflame.agent.reports.protowire import message_field, varint_field
from aiflame.agent.sinks import pyroscope_limits
from aiflame.agent.sinks.posting import NOT_LET_IN, Answer, Poster, PostSettings, check_files
from aiflame.agent.sinks.pprof_series import PprofTables
from aiflame.agent.sinks.pushed import (
    PushedClass,
    Series,
    pushed,
    series_parts,
    shown_text,
)
from aiflame.agent.sinks.pushed_series import Failures, PushField, failures_of
from aiflame.agent.sinks.requests import Request, Rest, SinkAway, SinkRefused
from aiflame.agent.sinks.series_labels import (
    DEFAULT_LABELS,
    MAX_VALUE_BYTES,
    checked_labels,
    series_labels,
)

_PATH = "/push.v1.PusherService/Push"

# Level 6 takes three times as long for 12 % less.
_GZIP_LEVEL = 1

_LATER = (408, 429, *NOT_LET_IN)


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
class Settings(PostSettings):
    """The keys of `[sinks.pyroscope]`.

    Attributes:
        labels: Of series, besides service_name and what is asked for by name: those of
            `labels.LABELS`.
    """

    labels: tuple[str, ...] = DEFAULT_LABELS


def check(settings: Settings) -> None:
    """Refuse settings that make no sense, or whose files cannot be read.

    Raises:
        UsageError: They are refused.
    """
    PyroscopeSink(settings)
    check_files(settings)


def make(settings: Settings, node: str) -> PyroscopeSink:
    """Make the sink of a host. Its name is in the labels of what is pushed.

    Raises:
        UsageError: The settings make no sense.
    """
    return PyroscopeSink(settings)


def describe(settings: Settings) -> str:
    """Say where it sends."""
    return f"Pyroscope at {settings.url}"


class PyroscopeSink:
    """Pushes to a Pyroscope; see the module.

    Raises:
        UsageError: The settings make no sense.
    """

    name = "pyroscope"
    sends_spans = False
    modules: tuple[str, ...] = ()
    max_age_s: float | None = pyroscope_limits.MAX_AGE_S

    def __init__(self, settings: Settings) -> None:
        self._labels = checked_labels(settings.labels)
        headers = {"Content-Type": "application/proto", "Connect-Protocol-Version": "1"}
        self._poster = Poster(settings, _PATH, headers)

    def encode(self, batches: Sequence[Batch]) -> Iterator[Request]:
        """Encode batches of one stretch of time."""
        waiting: list[_Encoded] = []
        size = 0
        for one in self._profiles(batches):
            if waiting and size + one.raw_bytes > pyroscope_limits.MAX_BYTES:
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
            tables, comments = PprofTables(of.tables), tuple(_comments(batch))
            for series in of.series:
                type_ = _type_of(series)
                key = (type_, *labels)
                for part, profile in _split(tables, series, comments):
                    begin_ns = batch.begin_unix_ns + times[key] * pyroscope_limits.APART_NS
                    times[key] += 1
                    yield _Encoded.of(labels, type_, profile, begin_ns, batch, part.sample_count)

    def send(self, request: Request) -> Counter[str]:
        """Send a request; return about how many samples were refused, by what was said.

        Of series that were refused, so many are counted as is their share of all stacks.

        Raises:
            SinkAway: It is to be sent again, or some of it.
            SinkRefused: It is not.
        """
        answer = self._poster.post(request.body)
        if answer.is_taken and not answer.body:
            return Counter()
        if answer.is_taken:
            why = "no Pyroscope at this URL"
            raise SinkRefused(f"{self.name}: {why}: it answers {answer.words}", why)
        is_final = answer.status not in _LATER and answer.status < 500
        words = f"{self.name}: {answer.words}"
        failures = None
        if not answer.is_cut:
            failures = failures_of(request.body, answer.body, is_final=is_final)
        if failures is not None:
            return self._told_apart(request, failures, answer, words)
        if not is_final:
            raise SinkAway(words, answer.retry_after_s)
        raise SinkRefused(words, answer.reason)

    def _told_apart(
        self, request: Request, failures: Failures, answer: Answer, words: str
    ) -> Counter[str]:
        series, refused, later = failures
        if len(later) == len(series):
            raise SinkAway(words, answer.retry_after_s)
        if len(refused) == len(series):
            raise SinkRefused(words, answer.reason)
        counted: Counter[str] = Counter()
        if refused:
            counted[answer.words] = failures.samples(refused, request.samples)
        if not later:
            return counted
        body = b"".join(one.field for one in later)
        samples = failures.samples(later, request.samples)
        rest = replace(request, body=body, samples=samples)
        raise SinkAway(words, answer.retry_after_s, Rest(rest, counted))


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


def _split(
    tables: PprofTables, series: Series, comments: Sequence[str]
) -> Iterator[tuple[Series, bytes]]:
    # As many profiles as the limits ask for. Values stay whole, so that sums do.
    parts = -(-len(series) // pyroscope_limits.MAX_SAMPLES)
    if parts < 2:
        type_ = _type_of(series)
        encoded = tables.profile(series, type_.sample, type_.period, comments)
        parts = -(-len(encoded) // pyroscope_limits.MAX_BYTES)
        if parts < 2 or len(series) < 2:
            yield series, encoded
            return
    for part in series_parts(series, parts):
        yield from _split(tables, part, comments)


def _comments(batch: Batch) -> Iterator[str]:
    yield f"aiflame {batch.profile.recording.aiflame_version}"
    for loss in batch.profile.losses:
        yield shown_text(f"lost: {loss.name} {loss.count}", MAX_VALUE_BYTES)
