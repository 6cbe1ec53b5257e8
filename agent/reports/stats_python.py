# SPDX-License-Identifier: Apache-2.0
"""The tables of a profile with Python frames: its lines, its functions, and the GIL by thread."""

from __future__ import annotations

import numpy as np
from aiflame.agent.model.profile import GilState, Profile
from aiflame.agent.reports.base import View
from aiflame.agent.reports.python_frames import I64, PythonFrames, python_frames
from aiflame.agent.reports.table import Table, ms, ns_by_stack, percent, self_by_row
from aiflame.agent.reports.wait_words import WaitWords
from aiflame.agent.reports.words import duration, process_label, showable

_STATE_HEADINGS = {
    GilState.HELD: ">held",
    GilState.WAITING: ">waiting",
    GilState.RELEASED: ">released",
    GilState.UNKNOWN: ">unknown",
    GilState.NO_PYTHON: ">no Python",
}


def python_tables(
    profile: Profile,
    view: View,
    limit: int,
    of_what: str,
    hide_importlib: bool = False,
    waits: WaitWords | None = None,
) -> list[Table]:
    """Return the tables of Python's lines and functions; none without Python frames.

    Args:
        profile: What was recorded.
        view: Which classes of time count.
        limit: At most this many rows of each.
        of_what: What the percentages are of, in words.
        hide_importlib: Leave out the frames that import modules or start the program.
        waits: What waits were for; then they are charged to code that is not of Python's library.
    """
    found = python_frames(profile, hide_importlib)
    tables = []
    if len(found):
        function = profile.frames["function"][found.frame].astype(np.int64)
        line = function << 32 | profile.frames["line"][found.frame].astype(np.int64)
        tables = [
            _top(profile, view, limit, found, line, "line", waits, of_what),
            _top(profile, view, limit, found, function << 32, "function", waits, of_what),
        ]
    return tables


def gil_tables(profile: Profile, limit: int) -> list[Table]:
    """Return the table of what threads had to do with the GIL, of all time; none without Python."""
    is_python = bool((profile.stacks.gil != GilState.NO_PYTHON).any())
    return [_gil(profile, limit)] if is_python else []


def _top(
    profile: Profile,
    view: View,
    limit: int,
    found: PythonFrames,
    key: I64,
    what: str,
    waits: WaitWords | None,
    of_what: str,
) -> Table:
    # A key is a function, and in the lower half the line, where lines are told apart.
    stack_ns = ns_by_stack(profile, view)
    whole, stacks = int(stack_ns.sum()), len(profile.stacks)
    keys, of = np.unique(key, return_inverse=True)
    innermost = found.row_of_stacks(of, stacks, found.is_leaf)
    charged = innermost if waits is None else found.row_of_stacks(of, stacks, found.is_own)
    own_ns = self_by_row(profile, view, innermost, charged, len(keys))
    total_ns = found.total_of(of, stack_ns, len(keys)).astype(np.int64)
    order = np.lexsort((keys, -total_ns, -own_ns))
    order = order[total_ns[order] > 0]
    reasons = waits.by_key(charged, own_ns) if waits is not None else ()
    rows = []
    for i in order[:limit].tolist():
        function = profile.functions[int(keys[i]) >> 32]
        line = int(keys[i]) & 0xFFFFFFFF
        own, total = int(own_ns[i]), int(total_ns[i])
        times = (ms(own), percent(own, whole), ms(total), percent(total, whole))
        file = showable(function.file) if function.file else ""
        waited = (reasons[i],) if waits is not None else ()
        where = f"{file}:{line}" if file and what == "line" else file
        rows.append((*times, showable(function.name), *waited, where))
    return Table(
        f"Top Python {what}s, {view.label}",
        f"100 % = {duration(whole)} of {of_what}; self: it was the"
        " innermost Python frame, so native code that it called counts"
        + ("" if waits is None else ", waits without Python's own library (--raw: with)")
        + "; total: anywhere in the stack",
        (
            *(">self ms", ">self", ">total ms", ">total", "function"),
            *(("self waited for",) if waits is not None else ()),
            "/where",
        ),
        tuple(rows),
        max(0, len(order) - limit),
    )


def _gil(profile: Profile, limit: int) -> Table:
    ns = np.zeros((len(profile.threads), len(GilState)), dtype=np.uint64)
    state = profile.stacks.gil[profile.samples["stack"]]
    np.add.at(ns, (profile.samples["thread"], state), profile.samples["ns"])
    ran = np.flatnonzero(np.delete(ns, GilState.NO_PYTHON, axis=1).any(axis=1)).tolist()
    states = [s for s in _STATE_HEADINGS if s is not GilState.UNKNOWN or ns[:, s].any()]
    ran.sort(key=lambda i: (*(-int(ns[i, s]) for s in states), profile.threads[i].tid, i))
    rows = []
    for i in ran[:limit]:
        thread = profile.threads[i]
        process = profile.processes[thread.process]
        rows.append(
            (
                *(ms(int(ns[i, s])) for s in states),
                f"{showable(thread.name)} ({thread.tid})",
                process_label(process.name, process.pid),
            )
        )
    return Table(
        "GIL by thread, ms",
        "wall time of threads that ran Python, on the CPU and off it, by what the thread had to do"
        " with the lock of its interpreter when it was seen",
        (*(_STATE_HEADINGS[s] for s in states), "thread", "process"),
        tuple(rows),
        max(0, len(ran) - limit),
    )
