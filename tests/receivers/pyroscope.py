# SPDX-License-Identifier: Apache-2.0
"""A Pyroscope 2 with its default limits, as far as its push goes.

Rules: pkg/validation (validate.go, limits.go), pkg/distributor and pkg/pprof of
https://github.com/grafana/pyroscope, Connect's for errors
(https://connectrpc.com/docs/protocol#error-end-stream), and of pprof's ids those of Parca, which
are narrower (consecutive from 1).
"""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from email.message import Message
from typing import Any

from google.protobuf.message import DecodeError

from receivers.protos import PprofProfile, PushRequest
from receivers.server import Reply

HOUR_NS = 3_600 * 10**9
_TEN_MINUTES_NS = 600 * 10**9
_LABEL_NAME = re.compile(r"[A-Za-z0-9_.]+")
_METRIC_NAME = re.compile(r"[A-Za-z_:][A-Za-z0-9_:]*")

# A stack as its functions' names, leaf first.
Stack = tuple[str, ...]
SeriesLabels = tuple[tuple[str, str], ...]


class Refused(Exception):
    """Args: the HTTP status, Connect's code, and why."""

    def __init__(self, status: int, code: str, why: str) -> None:
        super().__init__(why)
        self.status, self.code = status, code


def _need(condition: object, why: str, status: int = 400, code: str = "invalid_argument") -> None:
    if not condition:
        raise Refused(status, code, why)


@dataclass
class Stored:
    """What can be asked for of one series."""

    type_id: str
    labels: SeriesLabels
    profiles: dict[int, Any] = field(default_factory=dict)  # by the millisecond
    stacks: Counter[Stack] = field(default_factory=Counter)


@dataclass
class Pyroscope:
    """One; `now_ns` is its clock."""

    now_ns: int
    is_multi_tenant: bool = False
    authorization: str = ""
    old_status: int = 400
    burst_bytes: int = 2_000_000
    is_unknown: bool = False  # errors of series have no code of their own: Connect makes it a 500
    faults: dict[str, tuple[int, str]] = field(default_factory=dict)  # by service, for its next one
    series: dict[tuple[str, SeriesLabels], Stored] = field(default_factory=dict)
    ids: list[str] = field(default_factory=list)

    def take(self, path: str, headers: Message, body: bytes) -> Reply:
        try:
            self._take(path, headers, body)
        except Refused as refused:
            told = json.dumps({"code": refused.code, "message": str(refused)}).encode()
            content = (("Content-Type", "application/json"),)
            return Reply(refused.status, told, content)
        return Reply(200, b"", (("Content-Type", "application/proto"),))

    def _take(self, path: str, headers: Message, body: bytes) -> None:
        _need(path == "/push.v1.PusherService/Push", path, 404, "unimplemented")
        _need(headers["Content-Type"] == "application/proto", "content type", 415, "unknown")
        _need(headers["Content-Encoding"] in (None, "identity"), "encoding", 415, "unknown")
        if self.authorization:
            allowed = headers["Authorization"] == self.authorization
            _need(allowed, "no credentials", 401, "unauthenticated")
        has_tenant = not self.is_multi_tenant or headers["X-Scope-OrgID"]
        _need(has_tenant, "no org id", 401, "unauthenticated")
        try:
            request = PushRequest.FromString(body)
        except DecodeError as error:
            raise Refused(400, "invalid_argument", str(error)) from error
        _need(request.series, "no series")
        self._push_batch([(one, sample) for one in request.series for sample in one.samples])

    def _push_batch(self, samples: list[tuple[Any, Any]]) -> None:
        """Pushes each by itself, and tells of those that failed in one text."""
        self.ids += [sample.ID for _, sample in samples]
        failed = []
        self._left_bytes = self.burst_bytes
        for at, (series, sample) in enumerate(samples):
            if error := self._push_series(series, sample):
                which = f"push series with index {at} and id {sample.ID}"
                failed.append((error, f"{which} failed: {error.code}: {error}"))
        if not failed:
            return
        many = f"{len(failed)} errors: " if len(failed) > 1 else ""
        first = failed[0][0]
        status, code = (500, "unknown") if self.is_unknown else (first.status, first.code)
        raise Refused(status, code, many + "; ".join(text for _, text in failed))

    def _push_series(self, series: Any, sample: Any) -> Refused | None:
        try:
            labels = self._labels(series)
            size, profile = self._profile(sample.raw_profile)
            _need(size <= self._left_bytes, "rate limit", 429, "resource_exhausted")
            self._left_bytes -= size
            if fault := self.faults.pop(labels.get("service_name", ""), None):
                raise Refused(*fault, "a fault")
            self._store(labels, profile)
        except Refused as error:
            return error
        return None

    def _labels(self, series: Any) -> dict[str, str]:
        labels = [(pair.name, pair.value) for pair in series.labels]
        _need(len(labels) <= 30, "max_label_names_per_series")
        _need(len(dict(labels)) == len(labels), "duplicate_label_names")
        _need([*labels] == sorted(labels), "labels_not_sorted")
        for name, value in labels:
            _need(len(name) <= 1_024, "label_name_too_long")
            _need(len(value.encode()) <= 2_048, "label_value_too_long")
            _need(_LABEL_NAME.fullmatch(name) and value, f"labels_invalid: {name!r}={value!r}")
        name = dict(labels).get("__name__", "")
        _need(_METRIC_NAME.fullmatch(name), f"no profile name: {name!r}")
        _need(series.samples, "no profiles")
        return dict(labels)

    def _profile(self, raw: bytes) -> tuple[int, Any]:
        if raw[:2] == b"\x1f\x8b":
            raw = gzip.decompress(raw)
        _need(len(raw) <= 4 << 20, "max_profile_size_bytes")
        try:
            profile = PprofProfile.FromString(raw)
        except DecodeError as error:
            raise Refused(400, "invalid_argument", f"malformed profile: {error}") from error
        check_pprof(profile)
        _need(len(profile.sample) <= 16_000, "max_profile_stacktrace_samples")
        for sample in profile.sample:
            _need(len(sample.location_id) <= 1_000, "max_profile_stacktrace_depth")
            _need(len(sample.label) <= 100, "max_profile_stacktrace_sample_labels")
        is_young = profile.time_nanos >= self.now_ns - HOUR_NS
        is_past = profile.time_nanos <= self.now_ns + _TEN_MINUTES_NS
        _need(is_young and is_past, "not_in_ingestion_window", self.old_status)
        return len(raw), profile

    def _store(self, labels: dict[str, str], profile: Any) -> None:
        text = profile.string_table
        name = labels.pop("__name__")
        labels.setdefault("service_name", "unknown_service")
        period = (text[profile.period_type.type], text[profile.period_type.unit])
        functions = {one.id: text[one.name] for one in profile.function}
        locations = {
            one.id: [functions[line.function_id] for line in one.line] for one in profile.location
        }
        for i, type_ in enumerate(profile.sample_type):
            parts = (name, text[type_.type], text[type_.unit], *period)
            type_id = ":".join(parts)
            for sample in profile.sample:
                # Each text of a sample is a label of its series.
                more = [(text[one.key], text[one.str]) for one in sample.label if one.str]
                key = (type_id, tuple(sorted([*labels.items(), *more])))
                stored = self.series.setdefault(key, Stored(*key))
                # Of two profiles of one millisecond, queries see one (issue 2483).
                seen = stored.profiles.setdefault(profile.time_nanos // 10**6, profile)
                if seen is profile:
                    stack = tuple(n for one in sample.location_id for n in locations[one])
                    stored.stacks[stack] += sample.value[i]

    def stacks(self) -> dict[str, Counter[Stack]]:
        """Returns the weights of stacks by type id, over all series."""
        found: dict[str, Counter[Stack]] = defaultdict(Counter)
        for (type_id, _), stored in self.series.items():
            found[type_id].update(stored.stacks)
        return dict(found)


def check_pprof(profile: Any) -> None:
    """Refuses what the format, Pyroscope or Parca does not allow."""
    text = profile.string_table
    _need(len(text) and text[0] == "", "string_table[0] is not empty")
    _need(len(set(text)) == len(text), "a string twice")
    _need(profile.sample_type, "no sample type")
    for type_ in profile.sample_type:
        name = text[type_.type]
        _need(name and "-" not in name and text[type_.unit], f"sample type {name!r}")
    for table in (profile.mapping, profile.location, profile.function):
        _need([one.id for one in table] == [*range(1, len(table) + 1)], "ids")
    _need(profile.sample, "no samples")
    for sample in profile.sample:
        _need(len(sample.value) == len(profile.sample_type), "values")
        _need(all(value > 0 for value in sample.value), "a sample of nothing, or less")
        _need(sample.location_id, "a sample without a stack")
        known = all(0 < one <= len(profile.location) for one in sample.location_id)
        _need(known, "an unknown location")
    for location in profile.location:
        _need(location.mapping_id <= len(profile.mapping), "an unknown mapping")
        if location.mapping_id:
            mapping = profile.mapping[location.mapping_id - 1]
            in_it = mapping.memory_start <= location.address < mapping.memory_limit
            _need(in_it or location.address == (1 << 64) - 1, "an address outside its mapping")
        _need(location.line, "a location without a function")
        known = all(0 < one.function_id <= len(profile.function) for one in location.line)
        _need(known, "an unknown function")
    for function in profile.function:
        _need(0 < function.name < len(text), "a function without a name")
        _need(max(function.filename, function.system_name) < len(text), "an unknown string")
    for mapping in profile.mapping:
        _need(max(mapping.filename, mapping.build_id) < len(text), "an unknown string")
    _need(all(0 <= one < len(text) for one in profile.comment), "an unknown comment")
    has_period = bool(profile.period_type.type)
    _need(has_period == (profile.period > 0), "a period without a type, or a type without one")
    _need(profile.duration_nanos > 0, "no duration")
