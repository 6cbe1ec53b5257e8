# SPDX-License-Identifier: Apache-2.0
"""The messages of OTLP's profiles: what a request holds, and what an answer says; see `otlp`."""

from __future__ import annotations

import gzip
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from aiflame.agent.sinks.otlp import Flavour
from aiflame.agent.sinks.pushed import (
    MAX_WEIGHT,
    Pushed,
    PushedClass,
    Series,
    Tables,
    shown_text,
)
from aiflame.agent.sinks.requests import Request
from aiflame.agent.sinks.series_labels import MAX_NAME_BYTES
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.profiles.v1development import profiles_service_pb2 as service
from opentelemetry.proto.profiles.v1development import profiles_pb2 as proto

I64 = npt.NDArray[np.int64]

_U64_MAX = (1 << 64) - 1

# Of ExportProfilesServiceResponse: field 1, a message; and of a length that protobuf allows.
_PARTIAL_SUCCESS = b"\x0a"
_MOST_VARINT_BYTES = 5

_SCOPE = "aiflame"
# Parca makes the name of a profile of its scope's; this is what its users' queries begin with.
_PARCA_SCOPE = "parca_agent"


def rejected(body: bytes) -> tuple[int, str]:
    """Returns of how many profiles an answer says that they were refused, and why.

    Raises:
        ValueError: It is no answer of OTLP's.
    """
    try:
        told = service.ExportProfilesServiceResponse.FromString(body)
    except DecodeError as error:
        raise ValueError(str(error)) from error
    return told.partial_success.rejected_profiles, told.partial_success.error_message


def is_partial(beginning: bytes) -> bool:
    """Returns whether a cut answer is one that tells of a partial success.

    It begins with that field, which is longer than what was read; a page that begins as such a
    field would has one of less than 128 bytes.
    """
    tag, rest = beginning[:1], beginning[1:]
    size = 0
    for at, byte in enumerate(rest[:_MOST_VARINT_BYTES]):
        size |= (byte & 0x7F) << 7 * at
        if byte < 0x80:
            return tag == _PARTIAL_SUCCESS and size > len(rest) - at - 1
    return False


def samples_refused(request: Request, profiles: int) -> int:
    """Returns how many samples so many profiles of a request have, those with the most stacks.

    A profile does not say how many it has, so it is as many as is its share of all stacks.
    """
    sent = service.ExportProfilesServiceRequest.FromString(gzip.decompress(request.body))
    sizes = [
        len(profile.samples)
        for resource in sent.resource_profiles
        for scope in resource.scope_profiles
        for profile in scope.profiles
    ]
    refused = sum(sorted(sizes, reverse=True)[:profiles])
    return -(-request.samples * refused // max(1, sum(sizes)))


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


class Part(NamedTuple):
    """One series of one batch, or some of its samples; they begin so much later than the batch."""

    of: Pushed
    attributes: tuple[tuple[str, str], ...]
    series: Series
    later_ns: int = 0


class Message:
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

    def encoded(self, parts: Sequence[Part]) -> bytes:
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

    @property
    def dictionary_bytes(self) -> int:
        """How much of what was encoded is the dictionary."""
        return int(self._dictionary.ByteSize())

    def _add(self, parts: Sequence[Part]) -> None:
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

    def _profile(self, profile: proto.Profile, part: Part, stacks: Sequence[int]) -> None:
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
