# SPDX-License-Identifier: Apache-2.0
"""A profile as tables: what `aiflame stats` prints, before any layout.

Every table says in words what its percentages are of. Exact figures (from the scheduler) and
sampled ones stand in columns of their own and are never added up. Nothing here knows of terminals.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
from aiflame.agent.model.profile import FrameKind, Profile, SampleClass, StopReason
from aiflame.agent.reports.accounts import account_tables
from aiflame.agent.reports.base import Frames, Merge, View
from aiflame.agent.reports.causes import CAUSES, Cause, classify
from aiflame.agent.reports.device_facts import device_lines, has_device
from aiflame.agent.reports.facts import MODULE_MARKS, module_of, recording_facts, truncated_modules
from aiflame.agent.reports.idle import idle_included, idle_left_out, without_idle
from aiflame.agent.reports.merge import default_merge, first_alike, merged
from aiflame.agent.reports.own_code import (
    charged_frames,
    functions_of,
    innermost_functions,
    innermost_of_highest,
)
from aiflame.agent.reports.rows import label_of
from aiflame.agent.reports.selection import shown_stacks
from aiflame.agent.reports.stats_device import device_tables, load_table, time_tables
from aiflame.agent.reports.stats_python import gil_tables, python_tables
from aiflame.agent.reports.table import (
    Table,
    functions_by_stack,
    ms,
    ns_by_stack,
    percent,
    self_by_row,
)
from aiflame.agent.reports.wait_words import WaitWords
from aiflame.agent.reports.words import duration, process_label, showable

I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]


def tables(
    profile: Profile,
    view: View,
    limit: int,
    frames: Frames = Frames.BOTH,
    hide_importlib: bool = False,
    *,
    is_raw: bool = False,
    is_idle_shown: bool = False,
    merge: Merge | None = None,
) -> tuple[Table, ...]:
    """Return all tables of a profile, in the order of reading.

    Args:
        profile: What was recorded.
        view: Which classes of time are counted. Tables of off-CPU time are left out of the CPU
            view; those of devices have no others.
        limit: At most this many rows of functions, threads, modules and waits; greater than 0.
        frames: Which frames the table of functions knows.
        hide_importlib: Leave out the Python frames that import modules or start the program.
        is_raw: Time off the CPU is, as that on it, of the innermost function whatever it is.
        is_idle_shown: Tables of functions and lines have idle threads, too.
        merge: Which processes are one; None: by name where all processes were recorded, else none.
    """
    merge = merge or default_merge(profile)
    apart = profile  # kernels are told apart by their process
    profile = merged(profile, merge)
    if view is View.GPU_TIME:
        return tuple(time_tables(apart, limit, frames))
    if view is View.GPU:
        return tuple(device_tables(apart, limit, frames))
    causes = classify(profile)
    shown = replace(profile, stacks=shown_stacks(profile, frames, hide_importlib))
    whole = f"{view.label}, summed over threads"
    # As of flame graphs: idle threads would come first in what a program spends its time in.
    is_folded = view is View.WALL and not is_idle_shown
    awake = without_idle(profile)[0] if is_folded else profile
    of_awake = whole + (idle_left_out(profile) if is_folded else "")
    whole += idle_included(profile) if view is View.WALL else ""
    waits = None if is_raw or view is View.CPU else WaitWords(awake, view, causes)
    functions = replace(awake, stacks=shown.stacks)
    found = [_functions(functions, view, limit, waits, of_awake)]
    found += python_tables(awake, view, limit, of_awake, hide_importlib, waits)
    found += gil_tables(profile, limit)
    if merge is not Merge.NONE:
        found.append(_processes(profile, view, limit, merge))
    found.append(_threads(profile, view, limit))
    found += account_tables(apart, limit)
    if view is not View.CPU:
        found += [_classes(profile), _causes(profile, causes)]
        found.append(_waits(profile, causes, limit, shown, is_raw=is_raw))
    if has_device(profile.gpu):
        found += device_tables(apart, limit, frames)
    elif len(profile.gpu.readings):
        found.append(load_table(profile))
    found += [_ends(profile, view, whole), _modules(profile, view, limit), _losses(profile)]
    facts = (*recording_facts(apart), *device_lines(profile.gpu))
    found.append(Table("Recording", "", ("fact", "value"), facts))
    return tuple(found)


def _functions(
    profile: Profile, view: View, limit: int, waits: WaitWords | None, of_what: str
) -> Table:
    stack_ns = ns_by_stack(profile, view)
    innermost = innermost_functions(profile)
    charged = innermost
    if waits is not None:
        charged = functions_of(profile, charged_frames(profile))
    self_ns = self_by_row(profile, view, innermost, charged, len(profile.functions))
    total_ns = _total(profile, stack_ns)
    whole = int(stack_ns.sum())
    order = np.lexsort((-total_ns.astype(np.int64), -self_ns))
    order = order[total_ns[order] > 0]
    reasons = waits.by_key(charged, self_ns) if waits is not None else ()
    rows = []
    for i in order[:limit].tolist():
        function = profile.functions[i]
        where = module_of(profile, function.binary) or function.file
        own, total = int(self_ns[i]), int(total_ns[i])
        times = (ms(own), percent(own, whole), ms(total), percent(total, whole))
        waited = (reasons[i],) if waits is not None else ()
        rows.append((*times, showable(function.name), *waited, showable(where) if where else ""))
    return Table(
        f"Top functions, {view.label}",
        f"100 % = {duration(whole)} of {of_what}; self: it was innermost"
        + (
            ", waits without the kernel, libc and Python's own (--raw: with)"
            if waits is not None
            else ""
        )
        + "; total: it was anywhere in the stack",
        (
            *(">self ms", ">self", ">total ms", ">total", "function"),
            *(("self waited for",) if waits is not None else ()),
            "/where",
        ),
        tuple(rows),
        max(0, len(order) - limit),
    )


def _total(profile: Profile, stack_ns: U64) -> U64:
    total_ns = np.zeros(len(profile.functions), dtype=np.uint64)
    for owner, function in functions_by_stack(profile, stack_ns > 0):
        np.add.at(total_ns, function, stack_ns[owner])
    return total_ns


def _processes(profile: Profile, view: View, limit: int, merge: Merge) -> Table:
    first = first_alike(profile)
    of_thread = np.array([first[thread.process] for thread in profile.threads], np.int64)
    ns = np.zeros((len(first), len(SampleClass)), dtype=np.int64)
    samples = profile.samples
    owner = of_thread[samples["thread"]]
    np.add.at(ns, (owner, samples["klass"]), samples["ns"].astype(np.int64))
    counted = view.selects(np.arange(len(SampleClass), dtype=np.uint8))
    ranks = ns[:, counted].sum(axis=1)
    threads = np.bincount(of_thread, minlength=len(first))
    order = [i for i in np.lexsort((first, -ranks)).tolist() if ns[i].any()]
    images = np.bincount(first, minlength=len(first))
    rows = []
    for i in order[:limit]:
        process = profile.processes[i]
        names = (f"{images[i]:,}", f"{threads[i]:,}", process_label(process.name, process.pid))
        rows.append((*(ms(time) for time in ns[i].tolist()), *names))
    return Table(
        f"Time by {merge.value}, ms",
        "sampled: on-CPU samples times their period; processes: one each time that a program began",
        (
            *(">sampled CPU", ">blocked", ">wait to run", ">preempted"),
            *(">processes", ">threads", merge.value),
        ),
        tuple(rows),
        max(0, len(order) - limit),
    )


def _threads(profile: Profile, view: View, limit: int) -> Table:
    n_threads, n_classes = len(profile.threads), len(SampleClass)
    ns = np.zeros((n_threads, n_classes), dtype=np.uint64)
    np.add.at(ns, (profile.samples["thread"], profile.samples["klass"]), profile.samples["ns"])
    counted = view.selects(np.arange(n_classes, dtype=np.uint8))
    ranks = ns[:, counted].sum(axis=1).tolist()
    is_part = profile.recording.time_range is not None
    # A thread without any time may not have been there in that part.
    there = [i for i in range(n_threads) if not is_part or ns[i].any()]
    order = sorted(there, key=lambda i: (-ranks[i], profile.threads[i].tid, i))
    rows = []
    for i in order[:limit]:
        thread = profile.threads[i]
        process = profile.processes[thread.process]
        exact = () if is_part else (thread.observed_ns, thread.on_cpu_ns)
        names = (
            f"{showable(thread.name)} ({thread.tid})",
            process_label(process.name, process.pid),
        )
        rows.append((*(ms(time) for time in (*exact, *ns[i].tolist())), *names))
    return Table(
        "Time by thread, ms",
        "sampled: on-CPU samples times their period; exact times are known of the whole"
        " recording only"
        if is_part
        else "exact: counted at every context switch; sampled: on-CPU samples times their period",
        (
            *(() if is_part else (">observed", ">exact CPU")),
            ">sampled CPU",
            ">blocked",
            ">wait to run",
            ">preempted",
            "thread",
            "process",
        ),
        tuple(rows),
        max(0, len(order) - limit),
    )


def _classes(profile: Profile) -> Table:
    classes = [klass for klass in SampleClass if klass is not SampleClass.ON_CPU]
    samples = profile.samples
    sums = [_ns_and_count(samples[samples["klass"] == klass]) for klass in classes]
    whole = sum(ns for ns, _ in sums)
    return Table(
        "Off-CPU time by class",
        f"100 % = {duration(whole)} off the CPU, summed over threads{_counted_where(profile)}",
        (">ms", ">share", ">intervals", "class"),
        tuple(
            (ms(ns), percent(ns, whole), f"{count:,}", klass.label)
            for klass, (ns, count) in zip(classes, sums, strict=True)
        ),
    )


def _counted_where(profile: Profile) -> str:
    return "" if profile.recording.time_range is None else "; counted where they ended"


def _causes(profile: Profile, causes: npt.NDArray[np.uint8]) -> Table:
    blocked = profile.samples[profile.samples["klass"] == SampleClass.BLOCKED]
    of_sample = causes[blocked["stack"]]
    sums = {cause: _ns_and_count(blocked[of_sample == cause]) for cause in Cause}
    whole = sum(ns for ns, _ in sums.values())
    order = sorted((cause for cause in Cause if any(sums[cause])), key=lambda c: (-sums[c][0], c))
    return Table(
        "Blocked time by cause",
        f"100 % = {duration(whole)} blocked, summed over threads{_counted_where(profile)};"
        " read from the names of the kernel's and libc's functions",
        (">ms", ">share", ">waits", "cause"),
        tuple(
            (ms(sums[c][0]), percent(sums[c][0], whole), f"{sums[c][1]:,}", CAUSES[c])
            for c in order
        ),
    )


def _waits(
    profile: Profile,
    causes: npt.NDArray[np.uint8],
    limit: int,
    shown: Profile,
    *,
    is_raw: bool,
) -> Table:
    waits = profile.waits
    length = waits["blocked_ns"].astype(np.int64) + waits["runnable_ns"].astype(np.int64)
    order = np.lexsort((waits["thread"], waits["start_ns"], -length))[:limit]
    charged = _user_leaves(profile) if is_raw else charged_frames(shown)
    rows = []
    for wait in waits[order]:
        thread = profile.threads[int(wait["thread"])]
        stack = int(wait["stack"])
        times = [ms(int(wait[name])) for name in ("blocked_ns", "runnable_ns", "start_ns")]
        names = (f"{showable(thread.name)} ({thread.tid})", _frame_label(profile, charged[stack]))
        rows.append((*times, CAUSES[int(causes[stack])], *names))
    cut = "" if profile.recording.time_range is None else "; as far as they were in the time range"
    return Table(
        "Longest waits, ms",
        f"one by one, from the recording's threshold on; at: since the recording's start{cut}",
        (">blocked", ">then runnable", ">at", "cause", "thread", "in"),
        tuple(rows),
        max(0, len(waits) - limit),
    )


def _user_leaves(profile: Profile) -> I64:
    """Return the innermost frame of each stack that is neither the kernel's nor an interpreter's.

    Of stacks with none, the innermost one; -1 for stacks without frames.
    """
    hidden = (FrameKind.KERNEL, FrameKind.INTERPRETER)
    is_user = np.array([f.kind not in hidden for f in profile.functions], np.uint8)
    at = innermost_of_highest(is_user[profile.frames["function"]], profile.stacks)
    found: I64 = np.append(profile.stacks.frames.astype(np.int64), -1)[at]
    return found


def _frame_label(profile: Profile, frame: int) -> str:
    if frame < 0:
        return "[no stack]"
    row = profile.frames[frame]
    return label_of(profile.functions[int(row["function"])], int(row["line"]))


def _ends(profile: Profile, view: View, of_what: str) -> Table:
    stack_ns = ns_by_stack(profile, view)
    ends = profile.stacks.ends
    sums = {end: int(stack_ns[ends == end].sum()) for end in StopReason}
    counts = {end: int(((ends == end) & (stack_ns > 0)).sum()) for end in StopReason}
    whole = int(stack_ns.sum())
    order = [end for end in StopReason if counts[end]]
    return Table(
        "How stacks ended",
        f"100 % = {duration(whole)} of {of_what}",
        (">ms", ">share", ">distinct stacks", "end", "meaning"),
        tuple(
            (ms(sums[e]), percent(sums[e], whole), f"{counts[e]:,}", e.label, e.meaning)
            for e in order
        ),
    )


def _modules(profile: Profile, view: View, limit: int) -> Table:
    stack_ns = ns_by_stack(profile, view)
    sums = truncated_modules(profile, stack_ns)
    whole = sum(sums.values())
    return Table(
        "Modules whose callers are missing",
        f"100 % = {duration(whole)} of {view.label} in truncated stacks, summed over threads"
        + "".join(f"; {mark}: {words}" for mark, words in MODULE_MARKS.items() if mark in sums),
        (">ms", ">share", "module of the outermost function found"),
        tuple((ms(ns), percent(ns, whole), m) for m, ns in [*sums.items()][:limit]),
        max(0, len(sums) - limit),
    )


def _losses(profile: Profile) -> Table:
    lost = [loss for loss in profile.losses if loss.count]
    when = "" if profile.recording.time_range is None else ", in the whole recording"
    return Table(
        "Losses",
        (f"seen but not kept{when}" if lost else "everything that was seen was kept"),
        (">count", "name", "meaning"),
        tuple((f"{loss.count:,}", showable(loss.name), showable(loss.meaning)) for loss in lost),
    )


def _ns_and_count(samples: npt.NDArray[np.void]) -> tuple[int, int]:
    return int(samples["ns"].sum()), int(samples["count"].sum())
