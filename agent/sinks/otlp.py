# SPDX-License-Identifier: Apache-2.0
"""OTLP's profiles over HTTP, as proto 1.10.0 and later have them (v1development, alpha).

Sources: https://github.com/open-telemetry/opentelemetry-proto (profiles.proto, docs/specification)
and its classes from PyPI. Servers of an older proto misread it, without an error.

One ResourceProfiles for each batch, one Profile for each class, and one dictionary for a request:
each entry once, those at 0 zero values, none without a use. Receivers differ in what they make of
it; `Flavour` says for whom it is.

What an agent records with knows of its sinks no more than their settings: the classes, of 3 MB, are
imported by who encodes and sends (`otlp_message`).
"""

from __future__ import annotations

import enum
import gzip
import http
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from aiflame.agent.errors import UsageError
from aiflame.agent.model.batch import Batch, Labels
from aiflame.agent.reports.words import showable
from aiflame.agent.sinks import pyroscope_limits
from aiflame.agent.sinks.posting import NOT_LET_IN, Poster, PostSettings, check_files
from aiflame.agent.sinks.pushed import (
    Series,
    pushed,
    series_parts,
    shown_text,
)
from aiflame.agent.sinks.requests import Request, SinkAway, SinkRefused
from aiflame.agent.sinks.series_labels import (
    DEFAULT_LABELS,
    MAX_NAME_BYTES,
    MAX_VALUE_BYTES,
    SERVICE,
    checked_labels,
    series_labels,
)

if TYPE_CHECKING:
    from aiflame.agent.sinks.otlp_message import Part

_PATH = "/v1development/profiles"

# A Collector takes 4 MiB by gRPC if nothing else is configured (max_recv_msg_size_mib), where one
# hands requests on to the next; the rest is for its own attributes.
_MAX_BYTES = 4_000_000

_GZIP_LEVEL = 1

# Answers after which a request is to be sent again (OTLP specification, "Retryable Response
# Codes"); all others are final, but for those that the next token may mend.
_LATER = (429, 502, 503, 504, *NOT_LET_IN)

# As Pyroscope's own way in has them as well.
_TIMED_OUT, _FAILED = http.HTTPStatus.REQUEST_TIMEOUT, http.HTTPStatus.INTERNAL_SERVER_ERROR

# Labels that Pyroscope adds, and counts: __name__, __delta__, __otel__, and service_name beside
# service.name; where its limits say so, also __order__ and __sampled__.
_PYROSCOPE_ADDS = 6
# Parca adds the profile's name.
_PARCA_ADDS = 1

# Pyroscope pushes the profiles of a request one after the other, most in 0.3 s: so many take a
# quarter of the time limit. An error at one of them leaves out those after it.
_PYROSCOPE_PROFILES = 8

# Of workloads, by kind, as semantic conventions name them.
_WORKLOADS = {
    kind: f"k8s.{kind.lower()}.name"
    for kind in ("Deployment", "StatefulSet", "DaemonSet", "ReplicaSet", "Job", "CronJob")
}


class Flavour(enum.Enum):
    """Whose OTLP it is."""

    COLLECTOR = "collector"  # as the standard has it
    PARCA = "parca"  # through a Collector: names of Parca's agent, all of them labels
    PYROSCOPE = "pyroscope"  # few labels, each of which makes series, and its limits


@dataclass(frozen=True, kw_only=True)
class Settings(PostSettings):
    """The keys of `[sinks.otlp]`.

    Attributes:
        flavour: "collector", "parca" or "pyroscope"; see `Flavour`.
        labels: For Parca and Pyroscope, labels besides the service, and what is asked for by name:
            those of `labels.LABELS`. A Collector is sent all that is known.
    """

    flavour: str = Flavour.COLLECTOR.value
    labels: tuple[str, ...] = DEFAULT_LABELS


def check(settings: Settings) -> None:
    """Refuse settings that make no sense, or whose files cannot be read.

    Raises:
        UsageError: They are refused.
    """
    OtlpSink(settings)
    check_files(settings)


def make(settings: Settings, node: str) -> OtlpSink:
    """Make the sink of a host. Its name is in the labels of what is pushed.

    Raises:
        UsageError: The settings make no sense.
    """
    return OtlpSink(settings)


def describe(settings: Settings) -> str:
    """Say where it sends."""
    return f"OTLP at {settings.url}, as for {settings.flavour}"


class OtlpSink:
    """Pushes profiles by OTLP; see the module.

    Raises:
        UsageError: The settings make no sense.
    """

    name = "otlp"
    sends_spans = False
    modules = ("aiflame.agent.sinks.otlp_message",)

    def __init__(self, settings: Settings) -> None:
        try:
            self._flavour = Flavour(settings.flavour)
        except ValueError as error:
            known = ", ".join(flavour.value for flavour in Flavour)
            raise UsageError(f"no flavour {settings.flavour!r}", f"there are: {known}") from error
        self._labels = checked_labels(settings.labels)
        is_pyroscope = self._flavour is Flavour.PYROSCOPE
        self._max_bytes = pyroscope_limits.MAX_BYTES if is_pyroscope else _MAX_BYTES
        self.max_age_s: float | None = pyroscope_limits.MAX_AGE_S if is_pyroscope else None
        headers = {"Content-Type": "application/x-protobuf", "Content-Encoding": "gzip"}
        self._poster = Poster(settings, _PATH, headers)

    def encode(self, batches: Sequence[Batch]) -> Iterator[Request]:
        """Encode batches of one stretch of time."""
        from aiflame.agent.sinks.otlp_message import Part

        times = _Times(self._flavour)
        parts = []
        for batch in batches:
            of = pushed(batch)
            attributes = _attributes(batch.labels, self._flavour, self._labels)
            for series in of.series:
                whole = Part(of, attributes, series)
                parts += [
                    whole._replace(series=some, later_ns=times.next(whole))
                    for some in self._limited(series)
                ]
        is_pyroscope = self._flavour is Flavour.PYROSCOPE
        at_once = _PYROSCOPE_PROFILES if is_pyroscope else max(1, len(parts))
        for at in range(0, len(parts), at_once):
            yield from self._requests(parts[at : at + at_once], times)

    def _limited(self, series: Series) -> Iterable[Series]:
        if self._flavour is Flavour.PYROSCOPE and len(series) > pyroscope_limits.MAX_SAMPLES:
            return series_parts(series, -(-len(series) // pyroscope_limits.MAX_SAMPLES))
        return (series,)

    def _requests(self, parts: Sequence[Part], times: _Times) -> Iterator[Request]:
        from aiflame.agent.sinks.otlp_message import Message

        message = Message(self._flavour)
        body = message.encoded(parts)
        size = len(body)
        if self._flavour is Flavour.PYROSCOPE:
            # It charges each profile by itself, and each has the dictionary.
            size += (len(parts) - 1) * message.dictionary_bytes
        pieces = -(-size // self._max_bytes)
        if pieces < 2 or (len(parts) == 1 and len(parts[0].series) == 1):
            samples = sum(part.series.sample_count for part in parts)
            begin_ns = min(part.of.batch.begin_unix_ns for part in parts)
            yield Request(gzip.compress(body, _GZIP_LEVEL, mtime=0), begin_ns, samples)
        elif len(parts) > 1:
            for some in _divided(parts, pieces):
                yield from self._requests(some, times)
        else:
            yield from self._requests_of_one(parts[0], pieces, times)

    def _requests_of_one(self, part: Part, pieces: int, times: _Times) -> Iterator[Request]:
        for i, some in enumerate(series_parts(part.series, pieces)):
            later_ns = times.next(part) if i else part.later_ns
            yield from self._requests([part._replace(series=some, later_ns=later_ns)], times)

    def send(self, request: Request) -> Counter[str]:
        """Send a request; return about how many samples were refused, by what was said.

        A partial success tells the number of profiles. Those with the most stacks are counted, with
        as many samples as is their share of the stacks. Of one that is too long to be read to its
        end, it is all of them.

        Raises:
            SinkAway: It is to be sent again.
            SinkRefused: It is not.
        """
        from aiflame.agent.sinks.otlp_message import is_partial, rejected, samples_refused

        answer = self._poster.post(request.body)
        if self._is_for_later(answer.status):
            raise SinkAway(f"{self.name}: {answer.words}", answer.retry_after_s)
        if not answer.is_taken:
            raise SinkRefused(f"{self.name}: {answer.words}", answer.reason)
        if answer.is_cut and is_partial(answer.body):
            return Counter({_CUT: request.samples})
        try:
            if answer.is_cut:
                raise ValueError("longer than any answer of OTLP's")
            profiles, why = rejected(answer.body)
        except ValueError as error:
            why = "no OTLP at this URL"
            raise SinkRefused(f"{self.name}: {why}: it answers {answer.words}", why) from error
        if profiles <= 0:
            return Counter()
        why = why[:_MAX_WORDS]
        # Without the numbers that make a reason of its own of each answer.
        reason = _NUMBERS.sub("N", showable(why)) if why else "partial success without a reason"
        return Counter({reason: samples_refused(request, profiles)})

    def _is_for_later(self, status: int) -> bool:
        # Pyroscope says 500 to all that is no fault of the request, as of a store that is away
        # (pkg/ingester/otlp/ingest_handler.go).
        is_pyroscope = self._flavour is Flavour.PYROSCOPE
        return status in _LATER or (is_pyroscope and (status == _TIMED_OUT or status >= _FAILED))


# Nothing in the beginning of an answer is sure to tell how much of a request was refused.
_CUT = "at most so many, by a partial success that is too long to be read"
# Of what a server says of refused profiles.
_MAX_WORDS = 100
_NUMBERS = re.compile(r"\d+")


class _Times:
    # By how much later the profiles of a series begin than their stretch, so that a receiver keeps
    # them apart that goes by their time.

    def __init__(self, flavour: Flavour) -> None:
        self._is_needed = flavour is Flavour.PYROSCOPE
        self._found: Counter[object] = Counter()

    def next(self, part: Part) -> int:
        if not self._is_needed:
            return 0
        key = (part.attributes, part.series.klass)
        self._found[key] += 1
        return (self._found[key] - 1) * pyroscope_limits.APART_NS


def _divided(parts: Sequence[Part], count: int) -> Iterator[Sequence[Part]]:
    """Yield parts in at most so many runs with about as many samples, at least two."""
    sizes = np.cumsum([len(part.series) for part in parts])
    bounds = np.linspace(0, int(sizes[-1]), min(count, len(parts)) + 1)[1:-1]
    cuts = {int(cut) for cut in np.searchsorted(sizes, bounds) + 1 if cut < len(parts)}
    ordered = sorted(cuts) or [len(parts) // 2]
    for begin, end in zip([0, *ordered], [*ordered, len(parts)], strict=True):
        yield parts[begin:end]


def _attributes(
    labels: Labels, flavour: Flavour, names: Sequence[str]
) -> tuple[tuple[str, str], ...]:
    if flavour is not Flavour.COLLECTOR:
        reserved = _PYROSCOPE_ADDS if flavour is Flavour.PYROSCOPE else _PARCA_ADDS
        found = series_labels(labels, names, reserved)
        return tuple(("service.name" if k == SERVICE else k, value) for k, value in found)
    is_pod = bool(labels.pod)
    known = {
        "service.name": labels.service or "unknown_service",
        "service.version": labels.version,
        "host.name": labels.node,
        "container.id": labels.container_id,
        "container.name": labels.container,
        "container.runtime.name": labels.engine,
        "k8s.namespace.name": labels.namespace,
        "k8s.pod.name": labels.pod,
        "k8s.pod.uid": labels.pod_uid,
        "k8s.container.name": labels.container if is_pod else "",
        "k8s.node.name": labels.node if is_pod else "",
        _WORKLOADS.get(labels.workload_kind, "k8s.workload.name"): labels.workload,
        "systemd.unit": labels.unit,
    }
    for name, value in labels.extra:
        known.setdefault(shown_text(name, MAX_NAME_BYTES), value)
    shown = ((name, shown_text(value, MAX_VALUE_BYTES)) for name, value in known.items())
    return tuple((name, value) for name, value in shown if name and value)
