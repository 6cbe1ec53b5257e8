# SPDX-License-Identifier: Apache-2.0
"""Receivers of OTLP's profiles: a Collector, and what Parca and Pyroscope make of a request.

Rules: opentelemetry-proto 1.10 (profiles.proto's comments, docs/specification.md), and of the two
back-ends their conversions (Pyroscope's pkg/ingester/otlp, Parca's pkg/normalizer), as far as they
refuse, rename or drop something.
"""

from __future__ import annotations

import gzip
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from email.message import Message
from typing import Any, NamedTuple

from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.profiles.v1development import profiles_service_pb2 as service

from receivers.server import Reply

Stack = tuple[str, ...]

_TABLES = ("mapping", "location", "function", "link", "string", "attribute", "stack")


class Refused(Exception):
    """Why."""

    def __init__(self, why: str, status: int = 400) -> None:
        super().__init__(why)
        self.status = status


def _need(condition: object, why: str, status: int = 400) -> None:
    if not condition:
        raise Refused(why, status)


@dataclass(frozen=True)
class Got:
    """One Profile, with its indices looked up."""

    resource: dict[str, str | int]
    scope: str
    sample_type: str  # "type:unit"
    period_type: str  # "type:unit", "" for none
    period: int
    time_ns: int
    duration_ns: int
    attributes: dict[str, str | int]
    samples: tuple[tuple[Stack, dict[str, str | int], int], ...]
    types: frozenset[str]  # of frames
    build_ids: frozenset[str]


@dataclass
class Collector:
    """A Collector with an otlp receiver, as strict as the standard's SHOULDs."""

    max_bytes: int = 4 << 20
    rejects: tuple[int, str] = (0, "")
    got: list[Got] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)

    def take(self, path: str, headers: Message, body: bytes) -> Reply:
        try:
            _need(path == "/v1development/profiles", path, 404)
            _need(headers["Content-Type"] == "application/x-protobuf", "content type", 415)
            _need(headers["Content-Encoding"] == "gzip", "content encoding", 415)
            raw = gzip.decompress(body)
            _need(len(raw) <= self.max_bytes, "request body too large", 413)
            try:
                request = service.ExportProfilesServiceRequest.FromString(raw)
            except DecodeError as error:
                raise Refused(str(error)) from error
            self.sizes.append(len(raw))
            self.charge(request)
            self.keep([*profiles(request)])
        except Refused as refused:
            return Reply(refused.status, str(refused).encode(), (("Content-Type", "text/plain"),))
        answer = service.ExportProfilesServiceResponse()
        if self.rejects[0]:
            answer.partial_success.rejected_profiles = self.rejects[0]
            answer.partial_success.error_message = self.rejects[1]
        content = (("Content-Type", "application/x-protobuf"),)
        return Reply(200, answer.SerializeToString(), content)

    def charge(self, request: Any) -> None:
        """Refuses what is too much at once."""

    def keep(self, got: list[Got]) -> None:
        """Takes profiles in."""
        self.got += got

    def stacks(self) -> dict[str, Counter[Stack]]:
        """Returns the weights of stacks by sample type."""
        found: dict[str, Counter[Stack]] = defaultdict(Counter)
        for one in self.got:
            for stack, _, value in one.samples:
                found[one.sample_type][stack] += value
        return dict(found)


@dataclass
class Pyroscope(Collector):
    """Pyroscope's own receiver: every attribute of a resource or a sample makes a series.

    Each profile is converted by itself, with the dictionary, and counts so against what it takes at
    once; all that is wrong with none of them is a 500.
    """

    burst_bytes: int = 2_000_000
    at_once: list[int] = field(default_factory=list)  # profiles of each request
    adds: tuple[str, ...] = ()  # labels, where its limits say so
    series: dict[tuple[str, tuple[tuple[str, str], ...]], dict[int, Counter[Stack]]] = field(
        default_factory=dict
    )

    def charge(self, request: Any) -> None:
        sizes = [
            profile.ByteSize() + request.dictionary.ByteSize()
            for resource in request.resource_profiles
            for scope in resource.scope_profiles
            for profile in scope.profiles
        ]
        _need(sum(sizes) <= self.burst_bytes, "rate limit", 500)
        self.at_once.append(len(sizes))

    def keep(self, got: list[Got]) -> None:
        super().keep(got)
        for one in got:
            _need(len(one.samples) <= 16_000, "max_profile_stacktrace_samples")
            _need(all(len(stack) <= 1_000 for stack, _, _ in one.samples), "depth")
            type_id, factor = _type_id(one)
            of_series = _series_labels(one, self.adds)
            for stack, attributes, value in one.samples:
                labels = of_series | {k: str(v) for k, v in attributes.items()}
                key = (type_id, tuple(sorted(labels.items())))
                at = self.series.setdefault(key, {})
                at.setdefault(one.time_ns // 10**6, Counter())[stack] += value * factor
        # Of two profiles of one series and millisecond, queries see one.
        times = Counter(
            (_type_id(one), tuple(sorted(one.resource.items())), one.time_ns // 10**6)
            for one in self.got
        )
        _need(max(times.values()) == 1, "two profiles of one time")

    def weights(self) -> dict[str, Counter[Stack]]:
        """Returns the weights of stacks by type id."""
        found: dict[str, Counter[Stack]] = defaultdict(Counter)
        for (type_id, _), times in self.series.items():
            for stacks in times.values():
                found[type_id].update(stacks)
        return dict(found)


def _series_labels(one: Got, adds: Sequence[str]) -> dict[str, str]:
    """Returns Pyroscope's labels of a profile, but for its name, which it counts with them."""
    labels = [("__delta__", "false"), ("__otel__", "true")]
    labels += [(k, str(v)) for k, v in one.resource.items() if k != "__name__"]
    service = one.resource.get("service.name", "unknown_service")
    labels += [("service_name", str(service)), *((name, "x") for name in adds)]
    _need(len(labels) + 1 <= 30, "max_label_names_per_series")
    _need(len(dict(labels)) == len(labels), "duplicate_label_names")
    for name, value in labels:
        _need(len(name) <= 1_024, "label_name_too_long")
        _need(len(value.encode()) <= 2_048, "label_value_too_long")
        _need(re.fullmatch(r"[A-Za-z0-9_.]+", name), f"labels_invalid: {name!r}")
    return dict(labels)


def _type_id(one: Got) -> tuple[str, int]:
    """Returns Pyroscope's name of a profile, and what its values are multiplied by."""
    if (one.sample_type, one.period_type) == ("samples:count", "cpu:nanoseconds"):
        _need(one.period, "a period of 0")
        return "process_cpu:cpu:nanoseconds:cpu:nanoseconds", one.period
    if one.sample_type == "off_cpu:nanoseconds" and not one.period_type:
        return "off_cpu:off_cpu:nanoseconds::", 1
    _need(one.period_type and one.period, "no name")
    return f"{one.period_type.partition(':')[0]}:{one.sample_type}:{one.period_type}", 1


@dataclass
class Parca(Collector):
    """Parca behind a Collector."""

    series: set[tuple[str, tuple[tuple[str, str], ...]]] = field(default_factory=set)

    def keep(self, got: list[Got]) -> None:
        super().keep(got)
        for one in got:
            name = re.sub(r"[^a-zA-Z0-9_]", "_", one.scope) or "unknown"
            parts = [name, one.sample_type]
            if one.period_type:
                parts += [one.period_type, "delta"]
            for _, attributes, _ in one.samples:
                labels = {
                    re.sub(r"[^a-zA-Z0-9_]", "_", key): value
                    for key, value in (one.resource | attributes).items()
                    if isinstance(value, str)  # numbers are dropped
                }
                self.series.add((":".join(parts), tuple(sorted(labels.items()))))


def profiles(request: Any) -> Iterator[Got]:
    """Yields what a request holds.

    Raises:
        Refused: It is not as the standard has it.
    """
    checked = _Checked(request.dictionary)
    _need(request.resource_profiles, "no profiles")
    for resource in request.resource_profiles:
        attributes = {one.key: _value(one.value) for one in resource.resource.attributes}
        _need(len(attributes) == len(resource.resource.attributes), "a resource attribute twice")
        _need(all(attributes), "a resource attribute without a name")
        _need(resource.scope_profiles, "no scopes")
        for scope in resource.scope_profiles:
            _need(scope.profiles, "no profiles of a scope")
            for profile in scope.profiles:
                yield checked.profile(attributes, scope.scope.name, profile)
    checked.check_for_orphans()


def _value(value: Any) -> str | int:
    which = value.WhichOneof("value")
    _need(which in ("string_value", "int_value"), f"an attribute's value: {which}")
    found: str | int = getattr(value, which)
    return found


class _Location(NamedTuple):
    names: tuple[str, ...]
    type: str
    build_ids: tuple[str, ...]


class _Checked:
    """A dictionary whose entries are looked up, and counted as used."""

    def __init__(self, dictionary: Any) -> None:
        self._tables = {name: getattr(dictionary, f"{name}_table") for name in _TABLES}
        self._used: dict[str, set[int]] = {name: set() for name in _TABLES}
        self._known: dict[int, _Location] = {}
        for name, table in self._tables.items():
            _need(len(table), f"no {name}_table[0]")
            entries = [one if name == "string" else one.SerializeToString(True) for one in table]
            if name == "link":
                zero = entries[0] in (
                    b"",
                    type(table[0])(trace_id=bytes(16), span_id=bytes(8)).SerializeToString(True),
                )
                _need(zero, "link_table[0] is not zero")
            else:
                _need(not entries[0], f"{name}_table[0] is not zero")
            _need(len(set(entries)) == len(entries), f"an entry of {name}_table twice")

    def _get(self, name: str, index: int) -> Any:
        _need(0 <= index < len(self._tables[name]), f"{name}_table[{index}] of none")
        self._used[name].add(index)
        return self._tables[name][index]

    def _text(self, index: int) -> str:
        text: str = self._get("string", index)
        return text

    def _attributes(self, indices: Sequence[int]) -> dict[str, str | int]:
        found = {}
        for index in indices:
            _need(index, "attribute 0")
            one = self._get("attribute", index)
            key = self._text(one.key_strindex)
            self._text(one.unit_strindex)
            _need(key and key not in found, f"attribute {key!r}")
            found[key] = _value(one.value)
        return found

    def _type(self, type_: Any) -> str:
        parts = (self._text(type_.type_strindex), self._text(type_.unit_strindex))
        return ":".join(parts) if any(parts) else ""

    def profile(self, resource: dict[str, str | int], scope: str, profile: Any) -> Got:
        """Returns a Profile with its indices looked up."""
        sample_type, period_type = self._type(profile.sample_type), self._type(profile.period_type)
        _need(sample_type and not sample_type.startswith(":"), "no sample type")
        _need(bool(period_type) == (profile.period > 0), f"period {profile.period}: {period_type}")
        _need(profile.time_unix_nano and profile.duration_nano, "no time")
        _need(profile.samples, "no samples")
        samples, identities, types, build_ids = [], set(), set(), set()
        for sample in profile.samples:
            _need(len(sample.values) == 1, "not one value")
            _need(not sample.timestamps_unix_nano, "another shape than of the others")
            _need(sample.values[0] > 0, "a sample of nothing, or less")
            self._get("link", sample.link_index)
            _need(sample.stack_index, "no stack")
            attributes = self._attributes(sample.attribute_indices)
            identity = (sample.stack_index, frozenset(sample.attribute_indices), sample.link_index)
            _need(identity not in identities, "two samples of one identity")
            identities.add(identity)
            stack = self._get("stack", sample.stack_index)
            _need(stack.location_indices, "an empty stack")
            names: list[str] = []
            for index in stack.location_indices:
                if index not in self._known:
                    self._known[index] = self._location(index)
                found = self._known[index]
                names += found.names
                types.add(found.type)
                build_ids.update(found.build_ids)
            samples.append((tuple(names), attributes, sample.values[0]))
        return Got(
            resource,
            scope,
            sample_type,
            period_type,
            profile.period,
            profile.time_unix_nano,
            profile.duration_nano,
            self._attributes(profile.attribute_indices),
            tuple(samples),
            frozenset(types),
            frozenset(build_ids),
        )

    def _location(self, index: int) -> _Location:
        _need(index, "location 0")
        location = self._get("location", index)
        type_ = str(self._attributes(location.attribute_indices)["profile.frame.type"])
        mapping = self._get("mapping", location.mapping_index)
        build_ids: tuple[str, ...] = ()
        if location.mapping_index:
            in_it = mapping.memory_start <= location.address < mapping.memory_limit
            _need(in_it or location.address == (1 << 64) - 1, "an address outside its mapping")
            self._text(mapping.filename_strindex)
            build_ids = tuple(map(str, self._attributes(mapping.attribute_indices).values()))
        _need(location.lines, "a location without a line")
        names = []
        for line in location.lines:
            _need(line.function_index, "function 0")
            function = self._get("function", line.function_index)
            self._text(function.filename_strindex)
            self._text(function.system_name_strindex)
            names.append(self._text(function.name_strindex))
            _need(names[-1], "a function without a name")
        return _Location(tuple(names), type_, build_ids)

    def check_for_orphans(self) -> None:
        """Refuses entries that nothing refers to."""
        for name, table in self._tables.items():
            orphans = set(range(1, len(table))) - self._used[name]
            _need(not orphans, f"entries of {name}_table without a use: {sorted(orphans)[:5]}")
