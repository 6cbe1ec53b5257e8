# SPDX-License-Identifier: Apache-2.0
"""pprof's profile.proto, gzipped, for `go tool pprof` and everything else that reads it.

Source of the format: https://github.com/google/pprof/blob/main/proto/profile.proto, whose field
numbers are in pprof_parts.py. The encoder is written out, because the format is small and a
protobuf runtime is not. Device samples are in a file of their own (pprof_device.py).

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
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import numpy.typing as npt
from aiflame.agent.model.profile import GilState, Profile, SampleClass
from aiflame.agent.reports.base import ReportOptions, View
from aiflame.agent.reports.causes import CAUSES, classify
from aiflame.agent.reports.pprof_device import encode_device
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
from aiflame.agent.reports.protowire import StringTable, message_field, packed
from aiflame.agent.reports.rows import showable
from aiflame.agent.reports.selection import shown_stacks

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


class PprofReport:
    """Writes gzipped profile.proto; see the module."""

    name = "pprof"
    extension = ".pb.gz"
    is_binary = True

    def render(self, profile: Profile, options: ReportOptions) -> bytes:
        """Return the gzip file, with no time and no name in its header."""
        encode = encode_device if options.view is View.GPU else _encode
        encoded = encode(profile, options)
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
        message_field(ProfileField.SAMPLE_TYPE, value_type(strings, *names))
        for names in _SAMPLE_TYPES
    ]
    locations = Locations(profile, samples["stack"])
    parts += _samples(samples, causes, locations, _Labels(profile, strings))
    parts += mappings(profile, locations, strings)
    parts += locations.encoded()
    parts += functions(profile, locations, strings)
    period_ns = profile.recording.period_ns
    period = Period("on_cpu", "nanoseconds", period_ns, _DEFAULT_TYPE[options.view])
    parts += facts(profile, options, strings, period)
    parts += [message_field(ProfileField.STRING_TABLE, text) for text in strings.encoded()]
    return b"".join(parts)


def _samples(
    samples: npt.NDArray[np.void],
    causes: npt.NDArray[np.uint8],
    locations: Locations,
    labels: _Labels,
) -> Iterable[bytes]:
    gil_states = locations.gil_states
    order = np.lexsort((samples["klass"], samples["thread"], samples["stack"]))
    fields = ("stack", "thread", "klass", "count", "ns")
    columns = [samples[name][order].tolist() for name in fields]
    for stack, thread, klass, count, ns in zip(*columns, strict=True):
        on_cpu = klass == SampleClass.ON_CPU
        values = (count, ns, 0, 0, ns) if on_cpu else (0, 0, count, ns, ns)
        cause = int(causes[stack]) if klass == SampleClass.BLOCKED else -1
        body = locations.of_stack[stack] + packed(SampleField.VALUE, values)
        gil = int(gil_states[stack])
        yield message_field(ProfileField.SAMPLE, body + labels.encoded(thread, klass, cause, gil))


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
        if gil != GilState.NONE:
            yield label(self._strings, "gil", text=GilState(gil).name.lower())
