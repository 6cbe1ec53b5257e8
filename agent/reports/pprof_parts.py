# SPDX-License-Identifier: Apache-2.0
"""The messages of profile.proto that time and device samples have in common.

Field numbers are those of https://github.com/google/pprof/blob/main/proto/profile.proto.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from aiflame.agent.model.profile import Binary, FrameKind, Profile, StopReason
from aiflame.agent.reports.base import ReportOptions
from aiflame.agent.reports.facts import range_words
from aiflame.agent.reports.protowire import (
    I64,
    StringTable,
    message_field,
    packed,
    varint_field,
    varints,
)
from aiflame.agent.reports.rows import TRUNCATED_REASONS
from aiflame.agent.reports.selection import by_frame
from aiflame.agent.reports.words import showable


class ProfileField:
    """Of Profile."""

    SAMPLE_TYPE, SAMPLE, MAPPING, LOCATION, FUNCTION, STRING_TABLE = 1, 2, 3, 4, 5, 6
    TIME_NANOS, DURATION_NANOS, PERIOD_TYPE, PERIOD, COMMENT, DEFAULT_SAMPLE_TYPE = range(9, 15)


class ValueTypeField:
    """Of ValueType."""

    TYPE, UNIT = 1, 2


class SampleField:
    """Of Sample."""

    LOCATION_ID, VALUE, LABEL = 1, 2, 3


class LabelField:
    """Of Label."""

    KEY, STR, NUM = 1, 2, 3


class MappingField:
    """Of Mapping."""

    ID, MEMORY_START, MEMORY_LIMIT, FILE_OFFSET, FILENAME, BUILD_ID = 1, 2, 3, 4, 5, 6
    HAS_FUNCTIONS, HAS_FILENAMES, HAS_LINE_NUMBERS = 7, 8, 9


class LocationField:
    """Of Location."""

    ID, MAPPING_ID, ADDRESS, LINE = 1, 2, 3, 4


class LineField:
    """Of Line."""

    FUNCTION_ID, LINE = 1, 2


class FunctionField:
    """Of Function."""

    ID, NAME, FILENAME = 1, 2, 4


_U64_MAX = (1 << 64) - 1

# Arrays of their frames stay in the processor's cache.
_STACKS_AT_ONCE = 2_048

# In brackets, as other readers write mappings that are no files.
_PYTHON_MAPPING = "[python]"


@dataclass(frozen=True, slots=True)
class Period:
    """What a sample weighs, and which sample type a reader is shown first."""

    type: str
    unit: str
    value: int
    default: str


def label(strings: StringTable, key: str, text: str | None = None, number: int = 0) -> bytes:
    """Return a label of a sample: a text, or a number."""
    body = varint_field(LabelField.KEY, strings.id(key))
    if text is not None:
        body += varint_field(LabelField.STR, strings.id(text))
    else:
        body += varint_field(LabelField.NUM, number)
    return message_field(SampleField.LABEL, body)


def value_type(strings: StringTable, name: str, unit: str) -> bytes:
    """Return a ValueType."""
    return varint_field(ValueTypeField.TYPE, strings.id(name)) + varint_field(
        ValueTypeField.UNIT, strings.id(unit)
    )


class Locations:
    """The locations of the stacks in use.

    `of_stack` has the location ids of each stack as a field of a Sample.

    A location is one address: a function and the ones inlined into it there. Its number is that of
    its only frame, plus one; the markers of cut stacks are numbered after all of these, and the
    locations with inlined functions after those.
    """

    def __init__(self, profile: Profile, stacks: npt.NDArray[np.uint32]) -> None:
        self._profile = profile
        self.gil_states = profile.stacks.gil
        self._first_marker = len(profile.frames) + 1
        self._first_inlined = self._first_marker + len(StopReason)
        self._inlined: dict[tuple[int, ...], int] = {}
        self.used_frames: set[int] = set()
        self.markers: list[StopReason] = []
        self._single: set[int] = set()
        self.of_stack: dict[int, bytes] = {}
        # A frame opens a location unless it was inlined into the one before.
        opens = by_frame(~profile.frames["inlined"], profile.stacks)
        used = np.unique(stacks).astype(np.int64)
        self._mark_ends(used)
        for first in range(0, len(used), _STACKS_AT_ONCE):
            self._add(used[first : first + _STACKS_AT_ONCE], opens)

    def _mark_ends(self, used: I64) -> None:
        for end in dict.fromkeys(self._profile.stacks.ends[used].tolist()):
            if StopReason(end) in TRUNCATED_REASONS:
                self.markers.append(StopReason(end))

    def _add(self, used: I64, opens: npt.NDArray[np.bool_]) -> None:
        """Encodes some stacks: all at once those in which each frame is a location of its own."""
        stacks = self._profile.stacks
        starts = stacks.offsets[used].astype(np.int64)
        lengths = stacks.offsets[used + 1].astype(np.int64) - starts
        before = np.cumsum(lengths) - lengths
        owner = np.repeat(np.arange(len(used)), lengths)
        # Leaf first, as the format wants it.
        at = np.repeat(starts + lengths - 1 + before, lengths) - np.arange(len(owner))
        frames = stacks.frames[at]
        is_simple = ~np.isin(stacks.ends[used], TRUNCATED_REASONS)
        is_simple[owner[~opens[at]]] = False
        self.used_frames.update(np.unique(frames).tolist())
        self._single.update(np.unique(frames[is_simple[owner]]).tolist())
        encoded, ends = varints(frames.astype(np.uint64) + np.uint64(1))
        begins, ends = ends[before], ends[before + lengths]
        columns = (used.tolist(), is_simple.tolist(), begins.tolist(), ends.tolist())
        for stack, simple, begin, end in zip(*columns, strict=True):
            self.of_stack[stack] = (
                message_field(SampleField.LOCATION_ID, encoded[begin:end])
                if simple
                else packed(SampleField.LOCATION_ID, self._ids(stack, opens))
            )

    def _ids(self, stack: int, opens: npt.NDArray[np.bool_]) -> list[int]:
        stacks = self._profile.stacks
        start, stop = (int(offset) for offset in stacks.offsets[stack : stack + 2])
        ids: list[int] = []
        if start < stop:
            ids = self._grouped(stacks.frames[start:stop].tolist(), opens[start:stop].tolist())
        end = StopReason(int(stacks.ends[stack]))
        if end in TRUNCATED_REASONS:
            ids.insert(0, self._marker(end))
        ids.reverse()
        return ids

    def _grouped(self, frames: list[int], opens: list[bool]) -> list[int]:
        starts = [i for i, is_open in enumerate(opens) if is_open or i == 0]
        ids = []
        for start, stop in zip(starts, [*starts[1:], len(frames)], strict=True):
            group = tuple(frames[start:stop])
            if len(group) == 1:
                self._single.add(group[0])
                ids.append(group[0] + 1)
            else:
                position = self._inlined.setdefault(group, len(self._inlined))
                ids.append(self._first_inlined + position)
        return ids

    def _marker(self, end: StopReason) -> int:
        return self._first_marker + int(end)

    @property
    def next_id(self) -> int:
        """The first location id that is not in use here."""
        return self._first_inlined + len(self._inlined)

    @property
    def next_function(self) -> int:
        """The first function id that is not in use here."""
        return len(self._profile.functions) + 1 + len(StopReason)

    def marker_function(self, end: StopReason) -> int:
        """Return the id of the function that stands for the end of a cut stack."""
        return len(self._profile.functions) + 1 + int(end)

    def encoded(self) -> Iterable[bytes]:
        """Yield the Location messages as fields of a Profile, in the order of their ids."""
        for frame in sorted(self._single):
            yield self._location(frame + 1, (frame,))
        for group, position in self._inlined.items():
            yield self._location(self._first_inlined + position, group)
        for end in self.markers:
            line = varint_field(LineField.FUNCTION_ID, self.marker_function(end))
            body = varint_field(LocationField.ID, self._marker(end))
            yield message_field(
                ProfileField.LOCATION, body + message_field(LocationField.LINE, line)
            )

    def _location(self, number: int, group: tuple[int, ...]) -> bytes:
        frames = self._profile.frames
        outermost = frames[group[0]]
        function = self._profile.functions[int(outermost["function"])]
        parts = [varint_field(LocationField.ID, number)]
        if function.kind is FrameKind.PYTHON:
            mapping = len(self._profile.binaries) + 1
            parts.append(varint_field(LocationField.MAPPING_ID, mapping))
        elif function.binary is not None:
            parts.append(varint_field(LocationField.MAPPING_ID, function.binary + 1))
        parts.append(varint_field(LocationField.ADDRESS, int(outermost["address"])))
        # The innermost inlined function first, the one that holds the code last.
        for frame in reversed(group):
            line = varint_field(LineField.FUNCTION_ID, int(frames[frame]["function"]) + 1)
            line += varint_field(LineField.LINE, int(frames[frame]["line"]))
            parts.append(message_field(LocationField.LINE, line))
        return message_field(ProfileField.LOCATION, b"".join(parts))


def mappings(profile: Profile, locations: Locations, strings: StringTable) -> Iterable[bytes]:
    """Yield the Mapping messages of the locations."""
    # Python code is in no mapped file; its mapping says so.
    binaries = (*profile.binaries, Binary(_PYTHON_MAPPING, ""))
    limits: dict[int, int] = {}
    for frame in locations.used_frames:
        row = profile.frames[frame]
        function = profile.functions[int(row["function"])]
        is_python = function.kind is FrameKind.PYTHON
        binary = len(profile.binaries) if is_python else function.binary
        if binary is not None:
            limits[binary] = max(limits.get(binary, 0), min(int(row["address"]) + 1, _U64_MAX))
    for binary in sorted(limits):
        yield mapping(binary + 1, binaries[binary], limits[binary], strings)


def mapping(number: int, item: Binary, limit: int, strings: StringTable) -> bytes:
    """Return a Mapping that ends at an address."""
    body = varint_field(MappingField.ID, number)
    body += varint_field(MappingField.MEMORY_LIMIT, limit)
    body += varint_field(MappingField.FILENAME, strings.id(showable(item.path)))
    build_id = showable(item.build_id) if item.build_id else ""
    body += varint_field(MappingField.BUILD_ID, strings.id(build_id))
    # Said of every mapping, lest a reader looks the binaries up on the machine it runs on and
    # replaces names by what a same-named file there has at these addresses.
    flags = (MappingField.HAS_FUNCTIONS, MappingField.HAS_FILENAMES, MappingField.HAS_LINE_NUMBERS)
    for flag in flags:
        body += varint_field(flag, 1)
    return message_field(ProfileField.MAPPING, body)


def functions(profile: Profile, locations: Locations, strings: StringTable) -> Iterable[bytes]:
    """Yield the Function messages of the locations."""
    used = {int(profile.frames[frame]["function"]) for frame in locations.used_frames}
    for number in sorted(used):
        function = profile.functions[number]
        yield function_message(number + 1, function.name, function.file, strings)
    for end in locations.markers:
        name = end.marker
        yield function_message(locations.marker_function(end), name, "", strings)


def function_message(number: int, name: str, file: str, strings: StringTable) -> bytes:
    """Return a Function."""
    # Without a system_name: where it equals the name, readers demangle it once more, and take
    # `alert(1)` for a function with its arguments.
    body = varint_field(FunctionField.ID, number)
    body += varint_field(FunctionField.NAME, strings.id(showable(name)))
    body += varint_field(FunctionField.FILENAME, strings.id(showable(file) if file else ""))
    return message_field(ProfileField.FUNCTION, body)


def facts(
    profile: Profile, options: ReportOptions, strings: StringTable, period: Period
) -> Iterable[bytes]:
    """Yield the fields about the recording."""
    recording, shown = profile.recording, profile.recording.shown_range
    yield varint_field(ProfileField.TIME_NANOS, recording.started_unix_ns + shown.start_ns)
    yield varint_field(ProfileField.DURATION_NANOS, shown.duration_ns)
    yield message_field(ProfileField.PERIOD_TYPE, value_type(strings, period.type, period.unit))
    yield varint_field(ProfileField.PERIOD, period.value)
    comments = [
        *([options.title] if options.title else []),
        f"aiflame {recording.aiflame_version}: {options.view.label} of {recording.target}",
        *([f"time range: {range_words(recording)}"] if recording.time_range is not None else []),
        f"command: {recording.command}",
        *(f"{title}: {text}" for title, text in recording.facts),
        *(f"lost: {loss.name} {loss.count}: {loss.meaning}" for loss in profile.losses),
    ]
    for comment in comments:
        yield varint_field(ProfileField.COMMENT, strings.id(showable(comment)), keep_zero=True)
    yield varint_field(ProfileField.DEFAULT_SAMPLE_TYPE, strings.id(period.default))
