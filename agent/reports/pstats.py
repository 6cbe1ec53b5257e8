# SPDX-License-Identifier: Apache-2.0
"""A file for Python's own pstats module, and for the viewers that read its files.

Source of the format: Lib/pstats.py and Lib/cProfile.py of CPython 3.8 to 3.13. The file is one
marshalled dictionary: (file, line, function) to (primitive calls, calls, own seconds, seconds with
callees, callers), callers being (file, line, function) to (calls, primitive calls, own seconds,
seconds with callees).

A sampler sees no calls. Instead there are samples, and intervals of time off the CPU: a primitive
one for each stack that the function is in, and one for each of its frames there. The line is the
lowest that was seen executing. Native code counts as its Python caller's own; what no Python frame
called stands under `[no Python frames]`, since the module refuses an empty file.
"""

from __future__ import annotations

import marshal
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from aiflame.agent.model.profile import Profile
from aiflame.agent.reports.base import ReportOptions
from aiflame.agent.reports.python_frames import I64, U64, PythonFrames, python_frames
from aiflame.agent.reports.words import showable

_Label = tuple[str, int, str]
_Figures = tuple[int, int, float, float]

# Before 3, marshal writes an object in full each time, so that the same data gives the same bytes.
_MARSHAL_VERSION = 2

# "~" stands where cProfile knows no file.
_NO_PYTHON: _Label = ("~", 0, "[no Python frames]")


class PstatsReport:
    """Writes pstats' marshalled dictionary; see the module."""

    name = "pstats"
    extension = ".pstats"
    is_binary = True

    def render(self, profile: Profile, options: ReportOptions) -> bytes:
        """Return the whole file."""
        found = python_frames(profile, options.hide_importlib)
        samples = profile.samples[options.view.selects(profile.samples["klass"])]
        sums = _Sums(*(_by_stack(profile, samples, name) for name in ("count", "ns")))
        functions = profile.frames["function"][found.frame].astype(np.int64)
        keys, of = np.unique(functions, return_inverse=True)
        labels = _labels(profile, keys)
        callers: dict[_Label, dict[_Label, _Figures]] = {}
        for caller, callee, (cc, nc, tt, ct) in _calls(found, sums, of, len(keys)):
            callers.setdefault(labels[callee], {})[labels[caller]] = (nc, cc, tt, ct)
        document: dict[_Label, tuple[int, int, float, float, dict[_Label, _Figures]]] = {
            label: (*figures, callers.get(label, {}))
            for label, figures in zip(labels, sums.figures(found, of, len(keys)), strict=True)
            if figures[0]
        }
        seen = np.isin(np.arange(len(profile.stacks)), found.stack)
        count, ns = int(sums.count[~seen].sum()), int(sums.ns[~seen].sum())
        if count or not document:
            document[_NO_PYTHON] = (count, count, ns / 1e9, ns / 1e9, {})
        return marshal.dumps(document, _MARSHAL_VERSION)


@dataclass(frozen=True, slots=True)
class _Sums:
    count: U64  # samples and intervals of each stack
    ns: U64

    def figures(self, found: PythonFrames, key: I64, keys: int) -> list[_Figures]:
        """Return (primitive calls, calls, own seconds, seconds) of each key."""
        columns = (
            found.total_of(key, self.count, keys).tolist(),
            found.occurrences_of(key, self.count, keys).tolist(),
            (found.self_of(key, self.ns, keys) / 1e9).tolist(),
            (found.total_of(key, self.ns, keys) / 1e9).tolist(),
        )
        return list(zip(*columns, strict=True))


def _by_stack(profile: Profile, samples: npt.NDArray[np.void], name: str) -> U64:
    sums = np.zeros(len(profile.stacks), dtype=np.uint64)
    np.add.at(sums, samples["stack"], samples[name])
    return sums


def _labels(profile: Profile, functions: I64) -> list[_Label]:
    lines = np.full(len(profile.functions), 1 << 32, dtype=np.int64)
    known = profile.frames[profile.frames["line"] > 0]
    np.minimum.at(lines, known["function"], known["line"])
    labels: list[_Label] = []
    taken: set[_Label] = set()
    for i in functions.tolist():
        function, line = profile.functions[i], int(lines[i])
        name = showable(function.name)
        label = (showable(function.file or "~"), 0 if line >> 32 else line, name)
        # What differs only in what cannot be shown stays apart.
        while label in taken:
            label = (label[0], label[1], f"{label[2]}'")
        taken.add(label)
        labels.append(label)
    return labels


def _calls(
    found: PythonFrames, sums: _Sums, of: I64, keys: int
) -> Iterator[tuple[int, int, _Figures]]:
    # Caller, callee and figures of each pair of functions that stood next to each other.
    has_caller = np.flatnonzero(found.stack[1:] == found.stack[:-1]) + 1
    pairs = of[has_caller - 1] * max(1, keys) + of[has_caller]
    names, pair = np.unique(pairs, return_inverse=True)
    callees = replace(
        found,
        stack=found.stack[has_caller],
        frame=found.frame[has_caller],
        is_leaf=found.is_leaf[has_caller],
    )
    figures = sums.figures(callees, pair, len(names))
    for name, figure in zip(names.tolist(), figures, strict=True):
        if figure[0]:
            yield name // keys, name % keys, figure
