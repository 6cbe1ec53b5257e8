# SPDX-License-Identifier: Apache-2.0
"""Device samples as pprof's profile.proto.

A sample is one instruction of a kernel under the stack that launched it: the leaf's function is the
kernel, its address the instruction's offset, its file and line the instruction's. What it waited
for is in labels, which `-tagleaf=stall_reason` turns into frames: `stall_reason` in the vendor's
words, `stall_category`, `instruction`, `kernel` by its whole name, `device`, and `attribution`,
which is exact, shared or unattributed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np
from aiflame.agent.model.gpu import Instruction
from aiflame.agent.model.profile import Binary, Profile
from aiflame.agent.reports.base import ReportOptions
from aiflame.agent.reports.device_rows import UNKNOWN_LAUNCH, DeviceSamples, device_samples
from aiflame.agent.reports.pprof_parts import (
    LineField,
    LocationField,
    Locations,
    Period,
    ProfileField,
    SampleField,
    facts,
    function_message,
    functions,
    label,
    mapping,
    mappings,
    value_type,
)
from aiflame.agent.reports.protowire import StringTable, message_field, packed, varint_field
from aiflame.agent.reports.selection import shown_stacks
from aiflame.agent.reports.words import showable
from aiflame.gpu.attribution import Certainty
from aiflame.gpu.stalls import StallCategory

_TYPE = ("device_samples", "count")

# In brackets, as other readers write mappings that are no files.
_DEVICE_MAPPING = "[device]"

_U64_MAX = (1 << 64) - 1


def encode_device(profile: Profile, options: ReportOptions) -> Iterator[bytes]:
    """Yield the Profile message of a profile's device samples."""
    samples = device_samples(profile)
    stacks = shown_stacks(profile, options.frames, options.hide_importlib)
    profile = replace(profile, stacks=stacks)
    strings = StringTable()
    locations = Locations(profile, np.unique(samples.stack[samples.stack >= 0]).astype(np.uint32))
    device_locations = _DeviceLocations(profile, samples, locations)
    parts = [message_field(ProfileField.SAMPLE_TYPE, value_type(strings, *_TYPE))]
    parts += _samples(profile, samples, device_locations, strings)
    parts += mappings(profile, locations, strings)
    parts += device_locations.mapping(strings)
    parts += locations.encoded()
    parts += device_locations.encoded()
    parts += functions(profile, locations, strings)
    parts += device_locations.functions(strings)
    parts += facts(profile, options, strings, Period(*_TYPE, 1, _TYPE[0]))
    parts += [message_field(ProfileField.STRING_TABLE, text) for text in strings.encoded()]
    yield b"".join(parts)


class _DeviceLocations:
    """The locations on devices, and the one of an unknown launch; numbered after all others."""

    def __init__(self, profile: Profile, samples: DeviceSamples, locations: Locations) -> None:
        self._samples = samples
        self._of_stack = locations.of_stack
        self._mapping = len(profile.binaries) + 2  # after that of Python
        self._first_location = locations.next_id
        self._first_function = locations.next_function
        self._ids: dict[tuple[int, int], int] = {}
        self._functions: dict[tuple[int, str], int] = {}
        self.instructions: dict[tuple[int, int], Instruction] = {
            (i.code, i.offset): i for i in samples.gpu.instructions
        }

    def stack(self, code: int, offset: int, stack: int) -> bytes:
        """Return the locations of a sample, leaf first, as a field of it."""
        location = self._ids.setdefault((code, offset), len(self._ids))
        leaf = packed(SampleField.LOCATION_ID, [self._first_location + 1 + location])
        if stack < 0:
            return leaf + packed(SampleField.LOCATION_ID, [self._first_location])
        # A repeated field may come in pieces.
        return leaf + self._of_stack[stack]

    def mapping(self, strings: StringTable) -> Iterator[bytes]:
        """Yield the mapping of kernels."""
        limit = min(int(self._samples.offset.max(initial=0)) + 1, _U64_MAX)
        yield mapping(self._mapping, Binary(_DEVICE_MAPPING, ""), limit, strings)

    def encoded(self) -> Iterator[bytes]:
        """Yield the Location messages."""
        yield self._location(self._first_location, b"", self._first_function, 0)
        for (code, offset), location in self._ids.items():
            known = self.instructions.get((code, offset))
            file, line = (known.file, known.line) if known is not None else ("", 0)
            kernel = self._samples.gpu.codes[code].kernel
            number = self._functions.setdefault((kernel, file), len(self._functions))
            head = varint_field(LocationField.MAPPING_ID, self._mapping)
            head += varint_field(LocationField.ADDRESS, offset)
            yield self._location(
                self._first_location + 1 + location, head, self._first_function + 1 + number, line
            )

    @staticmethod
    def _location(number: int, head: bytes, function_id: int, line: int) -> bytes:
        source = varint_field(LineField.FUNCTION_ID, function_id)
        source += varint_field(LineField.LINE, line)
        body = varint_field(LocationField.ID, number) + head
        body += message_field(LocationField.LINE, source)
        return message_field(ProfileField.LOCATION, body)

    def functions(self, strings: StringTable) -> Iterator[bytes]:
        """Yield the Function messages; after `encoded`, which numbers them."""
        yield function_message(self._first_function, UNKNOWN_LAUNCH, "", strings)
        for (kernel, file), number in self._functions.items():
            name = self._samples.names[kernel].whole
            yield function_message(self._first_function + 1 + number, name, file, strings)


def _samples(
    profile: Profile,
    samples: DeviceSamples,
    device_locations: _DeviceLocations,
    strings: StringTable,
) -> Iterable[bytes]:
    columns = (
        *(samples.stack, samples.code, samples.offset, samples.kernel, samples.reason),
        *(samples.category, samples.device, samples.certainty, samples.count),
    )
    for row in zip(*(column.tolist() for column in columns), strict=True):
        stack, code, offset, kernel, reason, category, device, certainty, count = row
        process = profile.processes[samples.gpu.kernels[kernel].process]
        known = device_locations.instructions.get((code, offset))
        texts = {
            "stall_reason": samples.gpu.reasons[reason].name,
            "stall_category": StallCategory(category).label,
            "instruction": known.text if known is not None else "",
            "kernel": samples.names[kernel].whole,
            "device": samples.gpu.devices[device].name or samples.gpu.devices[device].family,
            "attribution": Certainty(certainty).label,
            "process": process.name,
            "container": process.container_id,
        }
        body = device_locations.stack(code, offset, stack) + packed(SampleField.VALUE, [count])
        for key, text in texts.items():
            if text:
                body += label(strings, key, text=showable(text))
        body += label(strings, "pid", number=process.pid)
        yield message_field(ProfileField.SAMPLE, body)
