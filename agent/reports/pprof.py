# SPDX-License-Identifier: Apache-2.0
"""pprof's profile.proto, gzipped, for `go tool pprof` and everything else that reads it.

Source of the format: https://github.com/google/pprof/blob/main/proto/profile.proto, whose field
numbers are in pprof_parts.py. The encoder is written out, because the format is small and a
protobuf runtime is not. Device samples and GPU time are in files of their own (pprof_device.py).

One sample is one (stack, thread, class); its values are, in this order, on-CPU samples, on-CPU
nanoseconds, off-CPU waits, off-CPU nanoseconds, and wall nanoseconds, the sum of both times.
Thread, process, container, off-CPU class and cause, and on Python's stacks the state of the GIL,
are labels: `-tagroot process,thread` or `-tagleaf off_cpu_cause` turns them into frames. Kernel and
Python functions are told apart by their mapping, `[kernel]` and `[python]`, not by a suffix; a
Python function's name is without the line, which pprof shows where it is asked for lines.

Addresses are the binary's own virtual addresses, without the load bias.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import pairwise, starmap

import numpy as np
import numpy.typing as npt
from aiflame.agent.model.profile import GilState, Profile, SampleClass
from aiflame.agent.reports.base import ReportOptions, View
from aiflame.agent.reports.causes import CAUSES, classify
from aiflame.agent.reports.pprof_device import encode_device, encode_times
from aiflame.agent.reports.pprof_parts import (
    Locations,
    Period,
    ProfileField,
    SampleField,
    facts,
    functions,
    label,
    mappings,
    value_type,
)
from aiflame.agent.reports.protowire import (
    StringTable,
    message_field,
    message_opening,
    varints,
)
from aiflame.agent.reports.selection import shown_stacks
from aiflame.agent.reports.words import showable

# pprof's convention: counts first. `wall` saves adding two columns, which no reader can do.
_SAMPLE_TYPES = (
    ("samples", "count"),
    ("on_cpu", "nanoseconds"),
    ("waits", "count"),
    ("off_cpu", "nanoseconds"),
    ("wall", "nanoseconds"),
)
_DEFAULT_TYPE = {View.WALL: "wall", View.CPU: "on_cpu", View.OFFCPU: "off_cpu"}

# zlib's default: a level higher costs three times the time for 3 % of the size.
_GZIP_LEVEL = 6

# So many are Python objects at a time.
_SAMPLES_AT_ONCE = 8_192


class PprofReport:
    """Writes gzipped profile.proto; see the module."""

    name = "pprof"
    extension = ".pb.gz"
    is_binary = True

    def render(self, profile: Profile, options: ReportOptions) -> bytes:
        """Return the gzip file, with no time and no name in its header."""
        encode = {View.GPU: encode_device, View.GPU_TIME: encode_times}.get(options.view, _encode)
        # wbits 31 asks zlib for the gzip container; gzip.compress would write the clock.
        compressor = zlib.compressobj(_GZIP_LEVEL, zlib.DEFLATED, 31)
        packed = [compressor.compress(part) for part in encode(profile, options)]
        return b"".join(packed) + compressor.flush()


def _encode(profile: Profile, options: ReportOptions) -> Iterator[bytes]:
    samples = profile.samples[options.view.selects(profile.samples["klass"])]
    causes = classify(profile)
    stacks = shown_stacks(profile, options.frames, options.hide_importlib)
    profile = replace(profile, stacks=stacks)
    strings = StringTable()
    for names in _SAMPLE_TYPES:
        yield message_field(ProfileField.SAMPLE_TYPE, value_type(strings, *names))
    locations = Locations(profile, samples["stack"])
    yield from _samples(samples, causes, locations, _Labels(profile, strings))
    yield from mappings(profile, locations, strings)
    yield b"".join(locations.encoded())
    yield b"".join(functions(profile, locations, strings))
    period_ns = profile.recording.period_ns
    period = Period("on_cpu", "nanoseconds", period_ns, _DEFAULT_TYPE[options.view])
    yield from facts(profile, options, strings, period)
    yield b"".join(message_field(ProfileField.STRING_TABLE, text) for text in strings.encoded())


def _samples(
    samples: npt.NDArray[np.void],
    causes: npt.NDArray[np.uint8],
    locations: Locations,
    labels: _Labels,
) -> Iterator[bytes]:
    order = np.lexsort((samples["klass"], samples["thread"], samples["stack"]))
    opening: dict[int, bytes] = {}  # of a message, by its length
    for first in range(0, len(order), _SAMPLES_AT_ONCE):
        part = samples[order[first : first + _SAMPLES_AT_ONCE]]
        stack = part["stack"]
        is_blocked = part["klass"] == SampleClass.BLOCKED
        cause = np.where(is_blocked, causes[stack].astype(np.int64), -1)
        keys = zip(
            part["thread"].tolist(),
            part["klass"].tolist(),
            cause.tolist(),
            locations.gil_states[stack].tolist(),
            strict=True,
        )
        places = map(locations.of_stack.__getitem__, stack.tolist())
        fields = zip(places, _values(part), starmap(labels.encoded, keys), strict=True)
        pieces: list[bytes] = []
        for place, values, label_fields in fields:
            length = len(place) + len(values) + len(label_fields)
            if length not in opening:
                opening[length] = message_opening(ProfileField.SAMPLE, length)
            pieces += (opening[length], place, values, label_fields)
        yield b"".join(pieces)


def _values(samples: npt.NDArray[np.void]) -> Iterator[bytes]:
    """Yield the values of samples as fields of these."""
    is_on = samples["klass"] == SampleClass.ON_CPU
    nothing = np.zeros(len(samples), np.uint64)
    columns = (
        np.where(is_on, samples["count"], nothing),
        np.where(is_on, samples["ns"], nothing),
        np.where(is_on, nothing, samples["count"]),
        np.where(is_on, nothing, samples["ns"]),
        samples["ns"],
    )
    encoded, starts = varints(np.stack(columns, axis=1).ravel())
    ends = starts[:: len(columns)].tolist()
    # No number takes more than ten bytes: the lengths of these fields are one byte each.
    openings = [message_opening(SampleField.VALUE, n) for n in range(10 * len(columns) + 1)]
    for begin, end in pairwise(ends):
        yield openings[end - begin] + encoded[begin:end]


class _Labels:
    """The labels of samples, encoded once per (thread, class, cause, GIL)."""

    def __init__(self, profile: Profile, strings: StringTable) -> None:
        self._profile = profile
        self._strings = strings
        self._known: dict[tuple[int, int, int, int], bytes] = {}

    def encoded(self, thread: int, klass: int, cause: int, gil: int) -> bytes:
        key = (thread, klass, cause, gil)
        if key not in self._known:
            self._known[key] = b"".join(self._make(*key))
        return self._known[key]

    def _make(self, thread_id: int, klass: int, cause: int, gil: int) -> Iterable[bytes]:
        thread = self._profile.threads[thread_id]
        process = self._profile.processes[thread.process]
        yield label(self._strings, "thread", text=showable(thread.name))
        yield label(self._strings, "tid", number=thread.tid)
        yield label(self._strings, "process", text=showable(process.name))
        yield label(self._strings, "pid", number=process.pid)
        if process.container_id:
            yield label(self._strings, "container", text=showable(process.container_id))
        if klass != SampleClass.ON_CPU:
            yield label(self._strings, "off_cpu_class", text=SampleClass(klass).label)
        if cause >= 0:
            yield label(self._strings, "off_cpu_cause", text=CAUSES[cause])
        if gil != GilState.NO_PYTHON:
            yield label(self._strings, "gil", text=GilState(gil).name.lower())
