# SPDX-License-Identifier: Apache-2.0
"""OTLP's profiles over HTTP, as proto 1.10.0 and later have them (v1development, alpha).

Sources: https://github.com/open-telemetry/opentelemetry-proto (profiles.proto, docs/specification)
and its classes from PyPI. Servers of an older proto misread it, without an error.

One ResourceProfiles for each batch, one Profile for each class, and one dictionary for a request:
each entry once, those at 0 zero values, none without a use. Receivers differ in what they make of
it; `Flavour` says for whom it is.
"""

from __future__ import annotations

import enum
import gzip
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from aiflame.agent.errors import UsageError
from aiflame.agent.model.batch import Batch, Labels
from aiflame.agent.reports.words import showable
from aiflame.agent.sinks.labels import (
    DEFAULT_LABELS,
    MAX_NAME_BYTES,
    MAX_VALUE_BYTES,
    SERVICE,
    checked_labels,
    series_labels,
)
from aiflame.agent.sinks.posting import NOT_LET_IN, Poster, PostSettings
from aiflame.agent.sinks.pushed import (
    MAX_WEIGHT,
    Pushed,
    PushedClass,
    Series,
    Tables,
    pushed,
    series_parts,
    shown_text,
)
from aiflame.agent.sinks.requests import Request, SinkAway, SinkRefused
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.profiles.v1development import profiles_service_pb2 as service
from opentelemetry.proto.profiles.v1development import profiles_pb2 as proto

I64 = npt.NDArray[np.int64]

_PATH = "/v1development/profiles"

# A Collector takes 4 MiB by gRPC if nothing else is configured (max_recv_msg_size_mib), where one
# hands requests on to the next; the rest is for its own attributes.
_MAX_BYTES = 4_000_000
# Pyroscope's, as in pyroscope.py: of samples in a profile, of bytes at once, and of age.
_PYROSCOPE_SAMPLES = 16_000
_PYROSCOPE_BYTES = 1_900_000
_PYROSCOPE_AGE_S = 3_540.0
_APART_NS = 1_000_000

_GZIP_LEVEL = 1

# Answers after which a request is to be sent again (OTLP specification, "Retryable Response
# Codes"); all others are final, but for those that the next token may mend.
_LATER = (429, 502, 503, 504, *NOT_LET_IN)

_U64_MAX = (1 << 64) - 1

_SCOPE = "aiflame"
# Parca makes the name of a profile of its scope's; this is what its users' queries begin with.
_PARCA_SCOPE = "parca_agent"

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


class _Types(NamedTuple):
    # Of a Profile; `period` is () where there is none.
    sample: tuple[str, str]
    period: tuple[str, ...]
    value: int


def _types_of(series: Series, flavour: Flavour) -> _Types:
    ns, count = "nanoseconds", "count"
    klass = series.klass
    if klass is PushedClass.ON_CPU:
        return _Types(("samples", count), ("cpu", ns), series.period_ns)
    if klass is PushedClass.BLOCKED and flavour is Flavour.PARCA:
        return _Types(("wallclock", ns), ("samples", count), 1)
    if klass is PushedClass.BLOCKED:
        return _Types(("off_cpu", ns), (), 0)
    if klass is PushedClass.DEVICE_SAMPLES and series.period_ns:
        return _Types(("gpu_pcsample", count), ("gpu_pcsample", ns), series.period_ns)
    same = _OTHERS[klass]
    return _Types(same, same, 1)


# Their samples are of no period of their own: one stands for one.
_OTHERS = {
    PushedClass.WAITING_TO_RUN: ("run_delay", "nanoseconds"),
    PushedClass.PREEMPTED: ("preempted", "nanoseconds"),
    PushedClass.LAUNCHES: ("gpu_launch", "count"),
    PushedClass.KERNEL_TIME: ("gpu_kernel_time", "nanoseconds"),
    PushedClass.DEVICE_SAMPLES: ("gpu_pcsample", "count"),
}


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

    def __init__(self, settings: Settings) -> None:
        try:
            self._flavour = Flavour(settings.flavour)
        except ValueError as error:
            known = ", ".join(flavour.value for flavour in Flavour)
            raise UsageError(f"no flavour {settings.flavour!r}", f"there are: {known}") from error
        self._labels = checked_labels(settings.labels)
        is_pyroscope = self._flavour is Flavour.PYROSCOPE
        self._max_bytes = _PYROSCOPE_BYTES if is_pyroscope else _MAX_BYTES
        self.max_age_s: float | None = _PYROSCOPE_AGE_S if is_pyroscope else None
        headers = {"Content-Type": "application/x-protobuf", "Content-Encoding": "gzip"}
        self._poster = Poster(settings, _PATH, headers)

    def encode(self, batches: Sequence[Batch]) -> Iterator[Request]:
        """Encode batches of one stretch of time."""
        times = _Times(self._flavour)
        parts = []
        for batch in batches:
            of = pushed(batch)
            attributes = _attributes(batch.labels, self._flavour, self._labels)
            for series in of.series:
                whole = _Part(of, attributes, series)
                parts += [
                    whole._replace(series=some, later_ns=times.next(whole))
                    for some in self._limited(series)
                ]
        yield from self._requests(parts, times)

    def _limited(self, series: Series) -> Iterable[Series]:
        if self._flavour is Flavour.PYROSCOPE and len(series) > _PYROSCOPE_SAMPLES:
            return series_parts(series, -(-len(series) // _PYROSCOPE_SAMPLES))
        return (series,)

    def _requests(self, parts: Sequence[_Part], times: _Times) -> Iterator[Request]:
        if not parts:
            return
        body = _Message(self._flavour).encoded(parts)
        pieces = -(-len(body) // self._max_bytes)
        if pieces < 2 or (len(parts) == 1 and len(parts[0].series) == 1):
            samples = sum(len(part.series) for part in parts)
            begin_ns = min(part.of.batch.begin_unix_ns for part in parts)
            yield Request(gzip.compress(body, _GZIP_LEVEL, mtime=0), begin_ns, samples)
        elif len(parts) > 1:
            for some in _divided(parts, pieces):
                yield from self._requests(some, times)
        else:
            yield from self._requests_of_one(parts[0], pieces, times)

    def _requests_of_one(self, part: _Part, pieces: int, times: _Times) -> Iterator[Request]:
        for i, some in enumerate(series_parts(part.series, pieces)):
            later_ns = times.next(part) if i else part.later_ns
            yield from self._requests([part._replace(series=some, later_ns=later_ns)], times)

    def send(self, request: Request) -> Counter[str]:
        """Send a request; return how many samples were refused, at most, by what was said.

        A partial success tells the number of profiles: those with the most samples are counted.

        Raises:
            SinkAway: It is to be sent again.
            SinkRefused: It is not.
        """
        answer = self._poster.post(request.body)
        if answer.status in _LATER:
            raise SinkAway(f"{self.name}: {answer.words}", answer.retry_after_s)
        if not answer.is_taken:
            raise SinkRefused(f"{self.name}: {answer.words}", answer.reason)
        try:
            told = service.ExportProfilesServiceResponse.FromString(answer.body)
        except DecodeError as error:
            why = "no OTLP at this URL"
            raise SinkRefused(f"{self.name}: {why}: it answers {answer.words}", why) from error
        partial = told.partial_success
        if partial.rejected_profiles <= 0:
            return Counter()
        why = partial.error_message[:_MAX_WORDS]
        # Without the numbers that make a reason of its own of each answer.
        reason = _NUMBERS.sub("N", showable(why)) if why else "partial success without a reason"
        return Counter({reason: _most_samples(request, partial.rejected_profiles)})


# Of what a server says of refused profiles.
_MAX_WORDS = 100
_NUMBERS = re.compile(r"\d+")


def _most_samples(request: Request, profiles: int) -> int:
    sent = service.ExportProfilesServiceRequest.FromString(gzip.decompress(request.body))
    sizes = (
        len(profile.samples)
        for resource in sent.resource_profiles
        for scope in resource.scope_profiles
        for profile in scope.profiles
    )
    return sum(sorted(sizes, reverse=True)[:profiles])


class _Part(NamedTuple):
    # One series of one batch, or some of its samples.
    of: Pushed
    attributes: tuple[tuple[str, str], ...]
    series: Series
    later_ns: int = 0


class _Times:
    # By how much later the profiles of a series begin than their stretch, so that a receiver keeps
    # them apart that goes by their time.

    def __init__(self, flavour: Flavour) -> None:
        self._is_needed = flavour is Flavour.PYROSCOPE
        self._found: Counter[object] = Counter()

    def next(self, part: _Part) -> int:
        if not self._is_needed:
            return 0
        key = (part.attributes, part.series.klass)
        self._found[key] += 1
        return (self._found[key] - 1) * _APART_NS


def _divided(parts: Sequence[_Part], count: int) -> Iterator[Sequence[_Part]]:
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
        # Pyroscope adds the profile's name.
        found = series_labels(labels, names, 1)
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


class _Message:
    """A request, and its dictionary."""

    def __init__(self, flavour: Flavour) -> None:
        self._flavour = flavour
        self._request = service.ExportProfilesServiceRequest()
        self._dictionary = self._request.dictionary
        # All seven tables begin with their zero value.
        self._dictionary.mapping_table.add()
        self._dictionary.location_table.add()
        self._dictionary.function_table.add()
        self._dictionary.link_table.add(trace_id=bytes(16), span_id=bytes(8))
        self._dictionary.attribute_table.add()
        self._dictionary.stack_table.add()
        self._strings = {"": 0}
        self._attributes: dict[tuple[str, str | int, str], int] = {}
        self._functions: dict[tuple[str, str], int] = {}
        self._mappings: dict[tuple[str, str], int] = {}
        self._limits: Counter[int] = Counter()
        self._locations: dict[tuple[object, ...], int] = {}
        self._stacks: dict[bytes, int] = {}

    def encoded(self, parts: Sequence[_Part]) -> bytes:
        """Return the request of some parts: those of a batch follow each other."""
        at = 0
        while at < len(parts):
            of, end = parts[at].of, at
            while end < len(parts) and parts[end].of is of:
                end += 1
            self._add(parts[at:end])
            at = end
        self._dictionary.string_table.extend(self._strings)
        for mapping, limit in self._limits.items():
            self._dictionary.mapping_table[mapping].memory_limit = limit
        return bytes(self._request.SerializeToString())

    def _add(self, parts: Sequence[_Part]) -> None:
        of = parts[0].of
        resource = self._request.resource_profiles.add()
        for name, value in parts[0].attributes:
            attribute = resource.resource.attributes.add(key=name)
            attribute.value.string_value = value
        scope = resource.scope_profiles.add()
        scope.scope.name = _PARCA_SCOPE if self._flavour is Flavour.PARCA else _SCOPE
        scope.scope.version = of.batch.profile.recording.aiflame_version
        which = np.unique(np.concatenate([part.series.stack for part in parts]))
        stack_ids = self._stack_ids(of.tables, which)
        for part in parts:
            ids = stack_ids[np.searchsorted(which, part.series.stack)].tolist()
            self._profile(scope.profiles.add(), part, ids)

    def _profile(self, profile: proto.Profile, part: _Part, stacks: Sequence[int]) -> None:
        series, batch = part.series, part.of.batch
        types = _types_of(series, self._flavour)
        profile.time_unix_nano = batch.begin_unix_ns + part.later_ns
        # Pyroscope takes 0 for ten seconds.
        profile.duration_nano = max(1, batch.duration_ns)
        self._set_type(profile.sample_type, types.sample)
        if types.period:
            self._set_type(profile.period_type, types.period)
            profile.period = types.value
        for loss in batch.profile.losses:
            name = f"aiflame.lost.{shown_text(loss.name, MAX_NAME_BYTES)}"
            profile.attribute_indices.append(
                self._attribute(name, min(loss.count, MAX_WEIGHT), "{event}")
            )
        is_counted = series.klass is PushedClass.ON_CPU
        values = (series.count if is_counted else series.value).tolist()
        add = profile.samples.add
        if series.klass is not PushedClass.DEVICE_SAMPLES or self._flavour is Flavour.PYROSCOPE:
            for stack, value in zip(stacks, values, strict=True):
                add(stack_index=stack, values=(value,))
            return
        key = "cuda_stall_reason" if self._flavour is Flavour.PARCA else "gpu.stall.reason"
        tables = part.of.tables
        leaves = tables.locations_of[tables.offsets[series.stack]].tolist()
        for stack, value, leaf in zip(stacks, values, leaves, strict=True):
            function = tables.locations[leaf][3][0][0]
            reason = self._attribute(key, tables.functions[function].name)
            add(stack_index=stack, values=(value,), attribute_indices=(reason,))

    def _set_type(self, message: proto.ValueType, names: Sequence[str]) -> None:
        message.type_strindex, message.unit_strindex = map(self._string, names)

    def _string(self, text: str) -> int:
        return self._strings.setdefault(text, len(self._strings))

    def _attribute(self, key: str, value: str | int, unit: str = "") -> int:
        identity = (key, value, unit)
        if identity not in self._attributes:
            self._attributes[identity] = len(self._dictionary.attribute_table)
            entry = self._dictionary.attribute_table.add(
                key_strindex=self._string(key), unit_strindex=self._string(unit)
            )
            if isinstance(value, int):
                entry.value.int_value = value
            else:
                entry.value.string_value = value
        return self._attributes[identity]

    def _stack_ids(self, tables: Tables, which: I64) -> I64:
        """Return the numbers of stacks here."""
        offsets, flat = tables.stacks(which)
        in_use, at = np.unique(flat, return_inverse=True)
        known = self._location_ids(tables, in_use.tolist())
        ids = np.array(known, np.int32)[at]
        flat_ids, bounds = ids.tolist(), offsets.tolist()
        add, found = self._dictionary.stack_table.add, []
        for i in range(len(which)):
            begin, end = bounds[i], bounds[i + 1]
            content = ids[begin:end].tobytes()
            number = self._stacks.get(content)
            if number is None:
                number = self._stacks[content] = len(self._stacks) + 1
                add(location_indices=flat_ids[begin:end])
            found.append(number)
        return np.array(found, np.int64)

    def _location_ids(self, tables: Tables, in_use: Sequence[int]) -> list[int]:
        functions: dict[int, int] = {}
        found = []
        add = self._dictionary.location_table.add
        for index in in_use:
            type_, mapping, address, lines = tables.locations[index]
            numbered = []
            for function, line in lines:
                number = functions.get(function)
                if number is None:
                    number = functions[function] = self._function(*tables.functions[function])
                numbered.append((number, line))
            mapping_id = self._mapping(*tables.mappings[mapping], address) if mapping >= 0 else 0
            identity = (type_, mapping_id, address, *numbered)
            known = self._locations.get(identity)
            if known is None:
                known = self._locations[identity] = len(self._locations) + 1
                kind = self._attribute("profile.frame.type", type_)
                entry = add(mapping_index=mapping_id, address=address, attribute_indices=(kind,))
                for number, line in numbered:
                    entry.lines.add(function_index=number, line=line)
            found.append(known)
        return found

    def _function(self, name: str, file: str) -> int:
        if (name, file) not in self._functions:
            self._functions[name, file] = len(self._dictionary.function_table)
            self._dictionary.function_table.add(
                name_strindex=self._string(name), filename_strindex=self._string(file)
            )
        return self._functions[name, file]

    def _mapping(self, file: str, build_id: str, address: int) -> int:
        number = self._mappings.get((file, build_id))
        if number is None:
            number = self._mappings[file, build_id] = len(self._mappings) + 1
            entry = self._dictionary.mapping_table.add(filename_strindex=self._string(file))
            if build_id:
                known = self._attribute("process.executable.build_id.gnu", build_id)
                entry.attribute_indices.append(known)
        # Addresses are the binary's own: it begins at 0.
        if address >= self._limits[number]:
            self._limits[number] = min(address + 1, _U64_MAX)
        return number
