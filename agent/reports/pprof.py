# SPDX-License-Identifier: Apache-2.0
"""pprof's profile.proto, gzipped, for `go tool pprof` and everything else that reads it.

Source of the format: https://github.com/google/pprof/blob/main/proto/profile.proto, whose field
numbers are named below. The encoder is written out, because the format is small and a protobuf
runtime is not.

One sample is one (stack, thread, class); its values are, in this order, on-CPU samples, on-CPU
nanoseconds, off-CPU waits, off-CPU nanoseconds, and wall nanoseconds, the sum of both times.
Thread, process, container, off-CPU class and cause are labels: `-tagroot process,thread` or
`-tagleaf off_cpu_cause` turns them into frames. Kernel and Python functions are told apart by
their mapping, `[kernel]` and `[python]`, not by a suffix; a Python function's name is without the
line, which pprof shows where it is asked for lines.

Addresses are the binary's own virtual addresses, without the load bias.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import numpy.typing as npt
from aiflame.agent.model import Binary, FrameKind, Profile, SampleClass, StackEnd
from aiflame.agent.reports.base import ReportOptions, View
from aiflame.agent.reports.causes import CAUSES, classify
from aiflame.agent.reports.protowire import StringTable, message_field, packed, varint_field
from aiflame.agent.reports.rows import TRUNCATED_ENDS, showable
from aiflame.agent.reports.selection import shown_stacks


class _Profile:
    SAMPLE_TYPE, SAMPLE, MAPPING, LOCATION, FUNCTION, STRING_TABLE = 1, 2, 3, 4, 5, 6
    TIME_NANOS, DURATION_NANOS, PERIOD_TYPE, PERIOD, COMMENT, DEFAULT_SAMPLE_TYPE = range(9, 15)


class _ValueType:
    TYPE, UNIT = 1, 2


class _Sample:
    LOCATION_ID, VALUE, LABEL = 1, 2, 3


class _Label:
    KEY, STR, NUM = 1, 2, 3


class _Mapping:
    ID, MEMORY_START, MEMORY_LIMIT, FILE_OFFSET, FILENAME, BUILD_ID = 1, 2, 3, 4, 5, 6
    HAS_FUNCTIONS, HAS_FILENAMES, HAS_LINE_NUMBERS = 7, 8, 9


class _Location:
    ID, MAPPING_ID, ADDRESS, LINE = 1, 2, 3, 4


class _Line:
    FUNCTION_ID, LINE = 1, 2


class _Function:
    ID, NAME, FILENAME = 1, 2, 4


# pprof's convention: counts first. `wall` saves adding two columns, which no reader can do.
_SAMPLE_TYPES = (
    ("samples", "count"),
    ("on_cpu", "nanoseconds"),
    ("waits", "count"),
    ("off_cpu", "nanoseconds"),
    ("wall", "nanoseconds"),
)
_DEFAULT_TYPE = {View.WALL: "wall", View.CPU: "on_cpu", View.OFFCPU: "off_cpu"}

_U64_MAX = (1 << 64) - 1

# In brackets, as other readers write mappings that are no files.
_PYTHON_MAPPING = "[python]"

# zlib's default: a level higher costs three times the time for 3 % of the size.
_GZIP_LEVEL = 6


class PprofReport:
    """Writes gzipped profile.proto; see the module."""

    name = "pprof"
    extension = ".pb.gz"
    is_binary = True

    def render(self, profile: Profile, options: ReportOptions) -> bytes:
        """Return the gzip file, with no time and no name in its header."""
        encoded = _encode(profile, options)
        # wbits 31 asks zlib for the gzip container; gzip.compress would write the clock.
        compressor = zlib.compressobj(_GZIP_LEVEL, zlib.DEFLATED, 31)
        return compressor.compress(encoded) + compressor.flush()


def _encode(profile: Profile, options: ReportOptions) -> bytes:
    samples = profile.samples[options.view.selects(profile.samples["klass"])]
    causes = classify(profile)
    stacks = shown_stacks(profile, options.frames, options.hide_importlib)
    profile = replace(profile, stacks=stacks)
    strings = StringTable()
    parts = [
        message_field(_Profile.SAMPLE_TYPE, _value_type(strings, *names)) for names in _SAMPLE_TYPES
    ]
    locations = _Locations(profile, samples["stack"])
    parts += _samples(samples, causes, locations, _Labels(profile, strings))
    parts += _mappings(profile, locations, strings)
    parts += locations.encoded()
    parts += _functions(profile, locations, strings)
    parts += _facts(profile, options, strings)
    parts += [message_field(_Profile.STRING_TABLE, text) for text in strings.encoded()]
    return b"".join(parts)


def _value_type(strings: StringTable, name: str, unit: str) -> bytes:
    return varint_field(_ValueType.TYPE, strings.id(name)) + varint_field(
        _ValueType.UNIT, strings.id(unit)
    )


class _Locations:
    """The places of the stacks in use.

    A location is one address: a function and the ones inlined into it there. Its number is that of
    its only frame, plus one; the markers of cut stacks are numbered after all of these, and the
    locations with inlined functions after those.
    """

    def __init__(self, profile: Profile, stacks: npt.NDArray[np.uint32]) -> None:
        self._profile = profile
        self._first_marker = len(profile.frames) + 1
        self._first_inlined = self._first_marker + len(StackEnd)
        self._inlined: dict[tuple[int, ...], int] = {}
        self.used_frames: set[int] = set()
        self.markers: list[StackEnd] = []
        self._single: set[int] = set()
        self.of_stack: dict[int, bytes] = {}
        # A frame opens a location unless it was inlined into the one before.
        opens = ~profile.frames["inlined"][profile.stacks.frames]
        for stack in np.unique(stacks).tolist():
            self.of_stack[stack] = packed(_Sample.LOCATION_ID, self._ids(stack, opens))

    def _ids(self, stack: int, opens: npt.NDArray[np.bool_]) -> list[int]:
        # Leaf first, as the format wants it.
        stacks = self._profile.stacks
        start, stop = (int(offset) for offset in stacks.offsets[stack : stack + 2])
        frames = stacks.frames[start:stop].tolist()
        self.used_frames.update(frames)
        if opens[start:stop].all():
            self._single.update(frames)
            ids = [frame + 1 for frame in frames]
        else:
            ids = self._grouped(frames, opens[start:stop].tolist())
        end = StackEnd(int(stacks.ends[stack]))
        if end in TRUNCATED_ENDS:
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

    def _marker(self, end: StackEnd) -> int:
        if end not in self.markers:
            self.markers.append(end)
        return self._first_marker + int(end)

    def marker_function(self, end: StackEnd) -> int:
        return len(self._profile.functions) + 1 + int(end)

    def encoded(self) -> Iterable[bytes]:
        """Yield the Location messages as fields of a Profile, in the order of their ids."""
        for frame in sorted(self._single):
            yield self._location(frame + 1, (frame,))
        for group, position in self._inlined.items():
            yield self._location(self._first_inlined + position, group)
        for end in self.markers:
            line = varint_field(_Line.FUNCTION_ID, self.marker_function(end))
            body = varint_field(_Location.ID, self._marker(end))
            yield message_field(_Profile.LOCATION, body + message_field(_Location.LINE, line))

    def _location(self, number: int, group: tuple[int, ...]) -> bytes:
        frames = self._profile.frames
        outermost = frames[group[0]]
        function = self._profile.functions[int(outermost["function"])]
        parts = [varint_field(_Location.ID, number)]
        if function.kind is FrameKind.PYTHON:
            mapping = len(self._profile.binaries) + 1
            parts.append(varint_field(_Location.MAPPING_ID, mapping))
        elif function.binary is not None:
            parts.append(varint_field(_Location.MAPPING_ID, function.binary + 1))
        parts.append(varint_field(_Location.ADDRESS, int(outermost["address"])))
        # The innermost inlined function first, the one that holds the code last.
        for frame in reversed(group):
            line = varint_field(_Line.FUNCTION_ID, int(frames[frame]["function"]) + 1)
            line += varint_field(_Line.LINE, int(frames[frame]["line"]))
            parts.append(message_field(_Location.LINE, line))
        return message_field(_Profile.LOCATION, b"".join(parts))


def _samples(
    samples: npt.NDArray[np.void],
    causes: npt.NDArray[np.uint8],
    locations: _Locations,
    labels: _Labels,
) -> Iterable[bytes]:
    order = np.lexsort((samples["klass"], samples["thread"], samples["stack"]))
    fields = ("stack", "thread", "klass", "count", "ns")
    columns = [samples[name][order].tolist() for name in fields]
    for stack, thread, klass, count, ns in zip(*columns, strict=True):
        on_cpu = klass == SampleClass.ON_CPU
        values = (count, ns, 0, 0, ns) if on_cpu else (0, 0, count, ns, ns)
        cause = int(causes[stack]) if klass == SampleClass.BLOCKED else -1
        body = locations.of_stack[stack] + packed(_Sample.VALUE, values)
        yield message_field(_Profile.SAMPLE, body + labels.encoded(thread, klass, cause))


class _Labels:
    """The labels of samples, encoded once per (thread, class, cause)."""

    def __init__(self, profile: Profile, strings: StringTable) -> None:
        self._profile = profile
        self._strings = strings
        self._known: dict[tuple[int, int, int], bytes] = {}

    def encoded(self, thread: int, klass: int, cause: int) -> bytes:
        key = (thread, klass, cause)
        if key not in self._known:
            self._known[key] = b"".join(self._make(*key))
        return self._known[key]

    def _make(self, thread_id: int, klass: int, cause: int) -> Iterable[bytes]:
        thread = self._profile.threads[thread_id]
        process = self._profile.processes[thread.process]
        yield self._label("thread", text=showable(thread.name))
        yield self._label("tid", number=thread.tid)
        yield self._label("process", text=showable(process.name))
        yield self._label("pid", number=process.pid)
        if process.container_id:
            yield self._label("container", text=showable(process.container_id))
        if klass != SampleClass.ON_CPU:
            yield self._label("off_cpu_class", text=SampleClass(klass).label)
        if cause >= 0:
            yield self._label("off_cpu_cause", text=CAUSES[cause])

    def _label(self, key: str, text: str | None = None, number: int = 0) -> bytes:
        body = varint_field(_Label.KEY, self._strings.id(key))
        if text is not None:
            body += varint_field(_Label.STR, self._strings.id(text))
        else:
            body += varint_field(_Label.NUM, number)
        return message_field(_Sample.LABEL, body)


def _mappings(profile: Profile, locations: _Locations, strings: StringTable) -> Iterable[bytes]:
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
        item = binaries[binary]
        body = varint_field(_Mapping.ID, binary + 1)
        body += varint_field(_Mapping.MEMORY_LIMIT, limits[binary])
        body += varint_field(_Mapping.FILENAME, strings.id(showable(item.path)))
        build_id = showable(item.build_id) if item.build_id else ""
        body += varint_field(_Mapping.BUILD_ID, strings.id(build_id))
        # Said of every mapping, lest a reader looks the binaries up on the machine it runs on and
        # replaces names by what a same-named file there has at these addresses.
        for flag in (_Mapping.HAS_FUNCTIONS, _Mapping.HAS_FILENAMES, _Mapping.HAS_LINE_NUMBERS):
            body += varint_field(flag, 1)
        yield message_field(_Profile.MAPPING, body)


def _functions(profile: Profile, locations: _Locations, strings: StringTable) -> Iterable[bytes]:
    used = {int(profile.frames[frame]["function"]) for frame in locations.used_frames}
    for number in sorted(used):
        function = profile.functions[number]
        yield _function(number + 1, function.name, function.file, strings)
    for end in locations.markers:
        name = f"[truncated: {end.label}]"
        yield _function(locations.marker_function(end), name, "", strings)


def _function(number: int, name: str, file: str, strings: StringTable) -> bytes:
    # Without a system_name: where it equals the name, readers demangle it once more, and take
    # `alert(1)` for a function with its arguments.
    body = varint_field(_Function.ID, number)
    body += varint_field(_Function.NAME, strings.id(showable(name)))
    body += varint_field(_Function.FILENAME, strings.id(showable(file) if file else ""))
    return message_field(_Profile.FUNCTION, body)


def _facts(profile: Profile, options: ReportOptions, strings: StringTable) -> Iterable[bytes]:
    recording = profile.recording
    yield varint_field(_Profile.TIME_NANOS, recording.started_unix_ns)
    yield varint_field(_Profile.DURATION_NANOS, recording.duration_ns)
    yield message_field(_Profile.PERIOD_TYPE, _value_type(strings, "on_cpu", "nanoseconds"))
    yield varint_field(_Profile.PERIOD, recording.period_ns)
    comments = [
        *([options.title] if options.title else []),
        f"aiflame {recording.aiflame_version}: {options.view.label} of {recording.target}",
        f"command: {recording.command}",
        *(f"{title}: {text}" for title, text in recording.facts),
        *(f"lost: {loss.name} {loss.count}: {loss.meaning}" for loss in profile.losses),
    ]
    for comment in comments:
        yield varint_field(_Profile.COMMENT, strings.id(showable(comment)), keep_zero=True)
    default = strings.id(_DEFAULT_TYPE[options.view])
    yield varint_field(_Profile.DEFAULT_SAMPLE_TYPE, default)
