# SPDX-License-Identifier: Apache-2.0
"""Device samples and GPU time as pprof's profile.proto.

A sample is one instruction of a kernel under the stack that launched it: the leaf's function is the
kernel, its address the instruction's offset, its file and line the instruction's. What it waited
for is in labels, which `-tagleaf=stall_reason` turns into frames: `stall_reason` in the vendor's
words, `stall_category`, `instruction`, `kernel` by its whole name, `device`, and `attribution`,
which is exact, shared or unattributed.

Of GPU time, a sample is the nanoseconds of a kernel under the stack that launched it; `kernel`,
`device` and `attribution` are labels too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from aiflame.agent.model.gpu import Device
from aiflame.agent.model.profile import Binary, Profile
from aiflame.agent.reports.base import ReportOptions
from aiflame.agent.reports.device_rows import UNKNOWN_LAUNCH, DeviceSamples, device_samples
from aiflame.agent.reports.device_times import DeviceTimes, device_times
from aiflame.agent.reports.kernel_names import KernelName
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
from aiflame.agent.reports.rows import I64
from aiflame.agent.reports.selection import shown_stacks
from aiflame.agent.reports.words import showable
from aiflame.gpu.attribution import Certainty
from aiflame.gpu.stalls import StallCategory

_TYPE = ("device_samples", "count")
_TIME_TYPE = ("gpu_time", "nanoseconds")

# In brackets, as other readers write mappings that are no files.
_DEVICE_MAPPING = "[device]"

_U64_MAX = (1 << 64) - 1


def encode_device(profile: Profile, options: ReportOptions) -> Iterator[bytes]:
    """Yield the Profile message of a profile's device samples."""
    samples = device_samples(profile)
    message = _Message(profile, options, _TYPE, samples.stack, samples.names)
    yield message.of(_samples(profile, samples, message))


def encode_times(profile: Profile, options: ReportOptions) -> Iterator[bytes]:
    """Yield the Profile message of a profile's GPU time."""
    times = device_times(profile)
    message = _Message(profile, options, _TIME_TYPE, times.stack, times.names)
    yield message.of(_times(profile, times, message))


class _Site(NamedTuple):
    """A location on a device: an instruction of a kernel's code, or just a kernel."""

    kernel: int
    code: int = 0
    offset: int = 0
    file: str = ""
    line: int = 0


class _Message:
    """A Profile message of what kernels did.

    Args:
        profile: Whose.
        options: How it is to be shown.
        of_what: Type and unit of the values.
        stack: The launching stacks, -1 for an unknown one.
        names: Of kernels.
    """

    def __init__(
        self,
        profile: Profile,
        options: ReportOptions,
        of_what: tuple[str, str],
        stack: I64,
        names: Sequence[KernelName],
    ) -> None:
        stacks = shown_stacks(profile, options.frames, options.hide_importlib)
        self._profile = replace(profile, stacks=stacks)
        self._options = options
        self._type = of_what
        self._strings = StringTable()
        self._type_field = message_field(
            ProfileField.SAMPLE_TYPE, value_type(self._strings, *of_what)
        )
        self._locations = Locations(self._profile, np.unique(stack[stack >= 0]).astype(np.uint32))
        self._names = names
        # Of the unknown launch; those on devices follow.
        self._first_location = self._locations.next_id
        self._first_function = self._locations.next_function
        self._sites: dict[_Site, int] = {}
        self._functions: dict[tuple[int, str], int] = {}

    def sample(self, site: _Site, stack: int, value: int, texts: dict[str, str], pid: int) -> bytes:
        """Return a Sample as a field of the Profile; empty texts are no labels."""
        number = self._sites.setdefault(site, len(self._sites))
        body = packed(SampleField.LOCATION_ID, [self._first_location + 1 + number])
        # A repeated field may come in pieces.
        if stack < 0:
            body += packed(SampleField.LOCATION_ID, [self._first_location])
        else:
            body += self._locations.of_stack[stack]
        body += packed(SampleField.VALUE, [value])
        for key, text in texts.items():
            if text:
                body += label(self._strings, key, text=showable(text))
        body += label(self._strings, "pid", number=pid)
        return message_field(ProfileField.SAMPLE, body)

    def of(self, samples: Iterable[bytes]) -> bytes:
        """Return the whole message of some samples."""
        parts = [self._type_field, *samples]
        parts += mappings(self._profile, self._locations, self._strings)
        parts.append(self._mapping())
        parts += self._locations.encoded()
        parts += self._device_locations()
        parts += functions(self._profile, self._locations, self._strings)
        parts += self._device_functions()
        period = Period(*self._type, 1, self._type[0])
        parts += facts(self._profile, self._options, self._strings, period)
        parts += [
            message_field(ProfileField.STRING_TABLE, text) for text in self._strings.encoded()
        ]
        return b"".join(parts)

    @property
    def _mapping_id(self) -> int:
        return len(self._profile.binaries) + 2  # after that of Python

    def _mapping(self) -> bytes:
        limit = min(max((site.offset for site in self._sites), default=0) + 1, _U64_MAX)
        return mapping(self._mapping_id, Binary(_DEVICE_MAPPING, ""), limit, self._strings)

    def _device_locations(self) -> Iterator[bytes]:
        yield self._location(self._first_location, b"", self._first_function, 0)
        for site, location in self._sites.items():
            number = self._functions.setdefault((site.kernel, site.file), len(self._functions))
            head = varint_field(LocationField.MAPPING_ID, self._mapping_id)
            head += varint_field(LocationField.ADDRESS, site.offset)
            function = self._first_function + 1 + number
            yield self._location(self._first_location + 1 + location, head, function, site.line)

    @staticmethod
    def _location(number: int, head: bytes, function_id: int, line: int) -> bytes:
        source = varint_field(LineField.FUNCTION_ID, function_id)
        source += varint_field(LineField.LINE, line)
        body = varint_field(LocationField.ID, number) + head
        body += message_field(LocationField.LINE, source)
        return message_field(ProfileField.LOCATION, body)

    def _device_functions(self) -> Iterator[bytes]:
        # After the locations, which number them.
        yield function_message(self._first_function, UNKNOWN_LAUNCH, "", self._strings)
        for (kernel, file), number in self._functions.items():
            name = self._names[kernel].whole
            yield function_message(self._first_function + 1 + number, name, file, self._strings)


def _samples(profile: Profile, samples: DeviceSamples, message: _Message) -> Iterable[bytes]:
    instructions = {(i.code, i.offset): i for i in samples.gpu.instructions}
    columns = (
        *(samples.stack, samples.code, samples.offset, samples.kernel, samples.reason),
        *(samples.category, samples.device, samples.certainty, samples.count),
    )
    for row in zip(*(column.tolist() for column in columns), strict=True):
        stack, code, offset, kernel, reason, category, device, certainty, count = row
        process = profile.processes[samples.gpu.kernels[kernel].process]
        known = instructions.get((code, offset))
        file, line = (known.file, known.line) if known is not None else ("", 0)
        texts = {
            "stall_reason": samples.gpu.reasons[reason].name,
            "stall_category": StallCategory(category).label,
            "instruction": known.text if known is not None else "",
            "kernel": samples.names[kernel].whole,
            "device": _called(samples.gpu.devices[device]),
            "attribution": Certainty(certainty).label,
            "process": process.name,
            "container": process.container_id,
        }
        site = _Site(kernel, code, offset, file, line)
        yield message.sample(site, stack, count, texts, process.pid)


def _times(profile: Profile, times: DeviceTimes, message: _Message) -> Iterable[bytes]:
    columns = (times.stack, times.kernel, times.device, times.certainty, times.ns)
    for row in zip(*(column.tolist() for column in columns), strict=True):
        stack, kernel, device, certainty, ns = row
        process = profile.processes[times.gpu.kernels[kernel].process]
        texts = {
            "kernel": times.names[kernel].whole,
            "device": _called(times.gpu.devices[device]),
            "attribution": Certainty(certainty).label,
            "process": process.name,
            "container": process.container_id,
        }
        yield message.sample(_Site(kernel), stack, ns, texts, process.pid)


def _called(device: Device) -> str:
    return device.name or device.family
