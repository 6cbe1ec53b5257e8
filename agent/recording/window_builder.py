# SPDX-License-Identifier: Apache-2.0
"""Builds windows: what the collector learns goes in as it comes, and out as closed windows.

A fact is said once and holds for the whole recording (a process, a mapping, a stack): a window gets
those that it mentions, and those that are new or have changed. What is counted or timed belongs to
the window that is open. Nothing here knows BPF.

Memory is bounded: of the open window by `Bounds`, of stacks between windows by a cache. A stack
that is mentioned, and is not in the cache or has never come, is there as lost: only its time is
known.
Facts of what is gone are dropped by `forget`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from aiflame.agent.losses import LossKind
from aiflame.agent.model.profile import StopReason
from aiflame.agent.model.window import (
    COLUMNS,
    NO_COST,
    NO_STACK,
    NONE,
    Column,
    Cost,
    Rows,
    Window,
    added_up,
    key_numbers,
    lengths,
    newest,
)
from aiflame.agent.processes.owners import owners_of, past_fair_share
from aiflame.agent.recording.kept_rows import KeptRows
from aiflame.agent.rows import join_rows

Array = npt.NDArray[Any]

_LOST = {"stacks": LossKind.STACK_LOST, "chains": LossKind.PYTHON_CHAIN_LOST}

_WITH_PARTS = tuple(name for name, column in COLUMNS.items() if column.parts)
_PARTS = tuple(COLUMNS[name].parts for name in _WITH_PARTS)
_MEASURES = tuple(name for name, column in COLUMNS.items() if column.adds)
_EVENTS = tuple(name for name, c in COLUMNS.items() if not c.key and name not in _PARTS)
# Facts that no row refers to: they come with their process, those of Python code with the chains
# that have it.
_OF_CODE = ("code_objects", "code_lines")
_OF_PROCESSES = ("mappings", *_OF_CODE)
# Of Python code: beyond, what no chain has that is kept is dropped.
_MOST_CODE_ROWS = 1 << 15
# Of stacks that are known between windows, however little memory there may be: 10,000 threads that
# sleep have some thousand different ones.
_LEAST_KEPT_STACKS = 1 << 12
# How often kept stacks are gone through for those of processes that are gone.
_LOOK_THROUGH_NS = 20_000_000_000
# Texts beyond what was left when they were last gone through.
_MOST_NEW_TEXTS = 1 << 13
# Facts in an order in which each comes before those that its rows refer to.
_FACTS = (
    *("codes", "kernels", "threads"),
    *_OF_PROCESSES,
    *("processes", "cgroups", "binaries", "functions", "devices", "reasons"),
)


# An odd number: products tell apart what they are made of (Knuth, The Art of Computer Programming
# 3, 6.4). Where two meet, a fact too many is in a window.
_MIX = np.uint64(0x9E37_79B9_7F4A_7C15)


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a window may hold. Past it time is kept, and what it was spent on is lost.

    The defaults are what the kernel half keeps between two drains, and twice that for the stacks of
    threads that sleep through many windows.

    Attributes:
        stacks: Distinct stacks of samples, those that most time was spent in. Launches, waits and
            calls keep theirs: `events` and `rows` bound these.
        stacks_of_process: Of these, of one process. Of all, each container has a fair share.
        rows: Of each column of measures.
        events: Of each column of events, the first ones.
        kept_stacks: Stacks that are known between windows.
        stacks_at_once: That may come before it is looked again how many there are.
    """

    stacks: int = 1 << 14
    stacks_of_process: int = 1 << 13
    rows: int = 1 << 16
    events: int = 1 << 16
    kept_stacks: int = 1 << 15
    stacks_at_once: int = 1 << 13

    def before(self, stacks: int) -> int:
        """Returns at how many of so many that there may be a window is to end."""
        return max(stacks - self.stacks_at_once, stacks // 2)


class _OpenStacks:
    """The stacks of the open window.

    Attributes:
        most_of_process: How many the process has that has most.
        new: Those that were not there before, or that have changed.
    """

    def __init__(self) -> None:
        self._stacks: set[int] = set()
        self._of_process: dict[int, int] = {}
        self.new: set[int] = set()
        self.most_of_process = 0

    def __len__(self) -> int:
        return len(self._stacks)

    def add(self, stack: int, process: int) -> None:
        """Adds one, unless it is there."""
        if stack in self._stacks:
            return
        self._stacks.add(stack)
        count = self._of_process[process] = self._of_process.get(process, 0) + 1
        self.most_of_process = max(self.most_of_process, count)

    def clear(self) -> None:
        """Begins anew."""
        self._stacks.clear()
        self._of_process.clear()
        self.new.clear()
        self.most_of_process = 0


class WindowBuilder:
    """The open window, and what is known for those to come.

    Args:
        bounds: Of each window.

    Attributes:
        start_ns: Where the open window begins, since the recording's start.
    """

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self._kept_stacks = bounds.kept_stacks
        self._number = 0
        self.start_ns = 0
        self._texts: dict[str, int] = {"": 0}
        self._facts: dict[str, Rows] = {name: np.zeros(0, COLUMNS[name].dtype) for name in _FACTS}
        self._new_facts: dict[str, list[Rows]] = {name: [] for name in _FACTS}
        self._kept = {name: KeptRows(name) for name in _WITH_PARTS}
        self._looked_through_ns = 0
        self._late: dict[str, set[int]] = {name: set() for name in _WITH_PARTS}
        self._open: dict[str, list[Rows]] = {name: [] for name in (*_MEASURES, *_EVENTS)}
        self._open_rows: Counter[str] = Counter()
        self._most_code_rows = _MOST_CODE_ROWS
        self._most_texts = _MOST_NEW_TEXTS
        self._most_events = 0
        self._open_stacks = _OpenStacks()
        self._needed_stacks = 0
        self._losses: Counter[LossKind] = Counter()
        self._lost_ns: Counter[LossKind] = Counter()

    @property
    def is_filling(self) -> bool:
        """Whether the open window may have no room for what comes next.

        That is for events, kernel times among them, of which one second brings nearly as many as
        there may be, for stacks of one process or of all, or for samples of devices, which come
        each second. Past half of the stacks that are kept, new ones would take the room of
        others that the window mentions.
        """
        bounds, stacks = self._bounds, self._open_stacks
        return (
            self._most_events > bounds.events // 2
            or self._open_rows["kernel_times"] > bounds.events // 4
            or self._open_rows["device_samples"] > bounds.rows // 2
            or stacks.most_of_process > bounds.before(bounds.stacks_of_process)
            or len(stacks) > min(bounds.before(bounds.stacks), self._kept_stacks // 2)
        )

    @property
    def known_rows(self) -> int:
        """How many facts are kept, stacks and chains aside."""
        new = (len(rows) for parts in self._new_facts.values() for rows in parts)
        return sum(map(len, self._facts.values())) + sum(new)

    def text(self, words: str) -> int:
        """Returns what stands for a text in the rows that are added here."""
        return self._texts.setdefault(words, len(self._texts))

    def define(
        self, column: str, rows: Rows, parts: Rows | None = None, *, is_late: bool = False
    ) -> None:
        """Adds facts, or what they have become; as OpenWindow.define says."""
        if column not in self._kept:
            self._new_facts[column].append(rows)
            return
        if parts is None:
            raise ValueError(f"{column} have parts")
        self._kept[column].put(rows, parts)
        key = COLUMNS[column].key[0]
        if is_late:
            self._late[column].update(rows[key].tolist())
        elif column == "stacks":
            for number, process in rows[[key, "process"]].tolist():
                self._open_stacks.add(number, process)
                self._open_stacks.new.add(number)
        self._drop_oldest()

    def _drop_oldest(self) -> None:
        for kept in self._kept.values():
            kept.drop_oldest(self._kept_stacks)

    def keep_less(self) -> None:
        """Keeps half as many stacks between windows from now on, down to those that are needed."""
        least = max(_LEAST_KEPT_STACKS, self._needed_stacks)
        self._kept_stacks = min(max(self._kept_stacks // 2, least), self._kept_stacks)
        self._drop_oldest()
        for kept in self._kept.values():
            kept.drop_unused_parts()

    def keep_more(self) -> bool:
        """Keeps twice as many again, up to as many as at first; False if it keeps these already."""
        if self._kept_stacks >= self._bounds.kept_stacks:
            return False
        self._kept_stacks = min(2 * self._kept_stacks, self._bounds.kept_stacks)
        return True

    def is_kept(self, column: str, number: int) -> bool:
        """Whether a stack or a chain is known; as OpenWindow.is_kept says."""
        process = self._kept[column].mention(number)  # what has come again is about to be mentioned
        if process is not None and column == "stacks":
            self._open_stacks.add(number, process)
        return process is not None

    def stack(self, stack: int) -> tuple[np.void, npt.NDArray[np.uint64]] | None:
        """Returns what is known of a stack; as OpenWindow.stack says."""
        kept = self._kept["stacks"].get(stack)
        if kept is None:
            return None
        row, parts = kept
        return row, np.frombuffer(parts, "<u8")

    def user_addresses(self, stack: int) -> npt.NDArray[np.uint64]:
        """Returns the user half of a stack; as OpenWindow.user_addresses says."""
        known = self.stack(stack)
        if known is None:
            return np.zeros(0, np.uint64)
        row, addresses = known
        return addresses[int(row["kernel_depth"]) :]

    def drop(self, column: str, numbers: Collection[int]) -> None:
        """Drops facts of windows before; as OpenWindow.drop says."""
        rows = self._facts[column]
        is_gone = np.isin(rows[COLUMNS[column].key[0]], np.array([*numbers], np.uint32))
        self._facts[column] = rows[~is_gone]

    def add(self, column: str, rows: Rows) -> None:
        """Adds measures or events to the open window."""
        parts = self._open[column]
        parts.append(rows)
        self._open_rows[column] += len(rows)
        if column in _MEASURES:
            if self._open_rows[column] > 2 * self._bounds.rows:
                parts[:] = [self._bounded_measures(column)]
                self._open_rows[column] = len(parts[0])
            return
        events = self._open_rows[column]
        self._most_events = max(self._most_events, events)
        excess = events - self._bounds.events
        if excess > 0:
            parts.pop()
            if excess < len(rows):
                parts.append(rows[:-excess])
            self._open_rows[column] = self._bounds.events
            self.lose(LossKind.WINDOW_EVENTS_FULL, excess)

    def lose(self, kind: LossKind, count: int, thread_ns: int = 0) -> None:
        """Counts a loss, and the thread time that is missing for it."""
        if count:
            self._losses[kind] += count
            self._lost_ns[kind] += thread_ns

    def _bounded_measures(self, column: str) -> Rows:
        """Returns a column of measures, added up, with no more rows than may be."""
        layout = COLUMNS[column]
        rows = added_up(join_rows(self._open[column], layout.dtype), layout)
        excess = len(rows) - self._bounds.rows
        if excess <= 0 or column == "thread_times":  # as many as there are threads
            return rows
        weight = layout.adds[-1]
        order = np.argsort(rows[weight], kind="stable")
        least, most = rows[order[:excess]], rows[np.sort(order[excess:])]
        if "stack" in layout.key:
            return self._without_stacks(column, least, most)
        self.lose(LossKind.WINDOW_ROWS_FULL, int(least["count"].sum()))
        return most

    def _without_stacks(self, column: str, rows: Rows, others: Rows) -> Rows:
        """Returns rows without their stacks, and others, added up; counts that."""
        layout = COLUMNS[column]
        self.lose(
            LossKind.WINDOW_STACKS_FULL,
            # Of a wait that goes on past the window, none has ended in it.
            int(np.maximum(rows["count"], 1).sum()),
            int(rows["weight_ns"].sum()) if column == "samples" else 0,
        )
        bare = rows.copy()
        bare["stack"] = NO_STACK
        return added_up(join_rows([others, bare], layout.dtype), layout)

    def close(self, end_ns: int, *, is_last: bool = False, cost: Cost = NO_COST) -> Window:
        """Closes the open window; another begins where it ends.

        Args:
            end_ns: Its boundary, since the recording's start.
            is_last: The recording ends with it.
            cost: The recorder's own, in this window.
        """
        changed = self._take_in_facts()
        columns: dict[str, Rows] = {
            name: self._bounded_measures(name) for name in _MEASURES if name != "losses"
        }
        columns |= {name: join_rows(self._open[name], COLUMNS[name].dtype) for name in _EVENTS}
        self._bound_stacks(columns)
        self._add_stacks(columns)
        # With fewer, windows would lose stacks of those who sleep on, and end early each time. New
        # ones that do not come again may take no more than there is memory for.
        new = np.fromiter(self._open_stacks.new, np.uint64, len(self._open_stacks.new))
        needed = 2 * len(np.setdiff1d(columns["stacks"]["stack"], new))
        self._needed_stacks = min(needed, self._bounds.kept_stacks)
        self._kept_stacks = max(self._kept_stacks, self._needed_stacks)
        self._add_facts(columns, changed)
        columns["losses"] = self._loss_rows()
        window = Window.of(
            self._number,
            self.start_ns,
            end_ns,
            columns,
            texts=self._localise(columns),
            is_last=is_last,
            cost=cost,
        )
        self._number += 1
        self.start_ns = end_ns
        for parts in self._open.values():
            parts.clear()
        self._open_rows.clear()
        self._most_events = 0
        self._open_stacks.clear()
        self._losses.clear()
        self._lost_ns.clear()
        return window

    def _take_in_facts(self) -> dict[str, Rows]:
        """Adds what was defined since the last window; returns that, which is now at the end."""
        changed: dict[str, Rows] = {}
        for name, parts in self._new_facts.items():
            column = COLUMNS[name]
            changed[name] = newest(join_rows(parts, column.dtype), column)
            if len(changed[name]):
                self._facts[name] = _with_changed(self._facts[name], changed[name], column)
            parts.clear()
        return changed

    def _bound_stacks(self, columns: dict[str, Rows]) -> None:
        """Takes the stacks of the least weight away, where there are more than may be.

        Of each container, as many as are past its fair share: nobody spends another's.
        """
        samples = columns["samples"]
        stacks, which = np.unique(samples["stack"], return_inverse=True)
        weights = np.zeros(len(stacks), np.uint64)
        np.add.at(weights, which, samples["weight_ns"])
        # Those of launches and calls are few, and what a window is looked at for.
        for name in (*_EVENTS, "calls"):
            if "stack" in (columns[name].dtype.names or ()):
                weights[np.isin(stacks, columns[name]["stack"])] = np.iinfo(np.uint64).max
        weights[stacks == NO_STACK] = np.iinfo(np.uint64).max
        processes = np.zeros(len(stacks), np.int64)
        processes[which] = self._processes_of(samples["thread"])
        order = np.lexsort((weights, processes))[::-1]
        rank = _rank_in_runs(processes[order])
        keeps = np.zeros(len(stacks), bool)
        keeps[order[rank < self._bounds.stacks_of_process]] = True
        heaviest = np.argsort(weights, kind="stable")[::-1]
        heaviest = heaviest[keeps[heaviest]]
        if len(heaviest) > self._bounds.stacks:
            owners = owners_of(processes[heaviest], self._facts, tuple(self._texts))
            is_past = past_fair_share(owners, self._bounds.stacks)
            is_past &= weights[heaviest] != np.iinfo(np.uint64).max
            heaviest = heaviest[np.argsort(is_past, kind="stable")]
            keeps[heaviest[self._bounds.stacks :]] = False
        if not keeps.all():
            has_stack = keeps[which]
            columns["samples"] = self._without_stacks(
                "samples", samples[~has_stack], samples[has_stack]
            )

    def _processes_of(self, threads: npt.NDArray[np.uint32]) -> npt.NDArray[np.int64]:
        """Returns the process of each thread, NONE where it is not known."""
        known = self._facts["threads"]
        order = np.argsort(known["thread"])
        numbers = known["thread"][order]
        at = np.minimum(np.searchsorted(numbers, threads), max(len(numbers) - 1, 0))
        if not len(numbers):
            return np.full(len(threads), NONE, np.int64)
        found = known["process"][order][at].astype(np.int64)
        return np.where(numbers[at] == threads, found, NONE)

    def _add_stacks(self, columns: dict[str, Rows]) -> None:
        """Adds the stacks that rows mention, and the chains that these do."""
        stacks, processes = [], []
        for name in (*_MEASURES, *_EVENTS):
            rows = columns.get(name)
            if rows is not None and "stack" in (rows.dtype.names or ()):
                stacks.append(rows["stack"])
                processes.append(self._processes_of(rows["thread"]))
        columns["stacks"], columns["addresses"] = self._from_kept(
            "stacks", np.concatenate(stacks), np.concatenate(processes)
        )
        rows = columns["stacks"]
        columns["chains"], columns["chain_frames"] = self._from_kept(
            "chains", rows["chain"], rows["process"]
        )

    def _from_kept(self, column: str, numbers: Array, owners: Array) -> tuple[Rows, Rows]:
        """Returns kept rows and their parts: those that are mentioned, and those given late.

        Args:
            column: What they are.
            numbers: Ids that are mentioned, 0 for none; shape (n,).
            owners: Of each its process, should it not be there any more.
        """
        layout = COLUMNS[column]
        there = self._facts["processes"]["process"]
        late = np.fromiter(self._late[column], np.uint64, len(self._late[column]))
        self._late[column].clear()
        numbers, at = np.unique(np.concatenate([numbers, late]), return_index=True)
        is_mentioned = at < len(owners)  # what is only late, and not kept any more, is left out
        is_kept, found, parts = self._kept[column].take(numbers, there)
        is_lost = ~is_kept & is_mentioned & (numbers != NO_STACK)
        self.lose(_LOST[column], int(is_lost.sum()))
        lost = _lost(column, numbers[is_lost], owners[at[is_lost]])
        rows = np.concatenate([found, lost])
        count = lengths(column, rows)
        rows["first"] = np.cumsum(count) - count
        return rows, np.frombuffer(parts, COLUMNS[layout.parts].dtype)

    def _add_facts(self, columns: dict[str, Rows], changed: dict[str, Rows]) -> None:
        """Adds the facts that rows refer to, and those that have changed."""
        wanted: dict[str, list[npt.NDArray[np.uint32]]] = {name: [] for name in COLUMNS}
        for name, rows in columns.items():
            for reference, other in COLUMNS[name].refers.items():
                wanted[other].append(rows[reference])
        for name in _FACTS:
            column, known = COLUMNS[name], self._facts[name]
            number = column.key[0]
            if name in _OF_CODE:
                chosen = self._in_chains(name, known, columns)
            elif name in _OF_PROCESSES:
                chosen = np.isin(known["process"], np.concatenate(wanted["processes"]))
            else:
                chosen = np.isin(known[number], join_rows(wanted[name], known[number].dtype))
            chosen[len(known) - len(changed[name]) :] = True
            columns[name] = known[chosen]
            for reference, other in column.refers.items():
                wanted[other].append(columns[name][reference])

    def _loss_rows(self) -> Rows:
        rows = np.zeros(len(self._losses), COLUMNS["losses"].dtype)
        for row, (kind, count) in zip(rows, self._losses.items(), strict=True):
            row["name"], row["count"] = self.text(kind.stored_name), count
            row["thread_ns"] = self._lost_ns[kind]
        return rows

    def _localise(self, columns: dict[str, Rows]) -> tuple[str, ...]:
        """Gives columns texts of the window's own; returns these."""
        words = tuple(self._texts)
        local: dict[int, int] = {0: 0}
        for name, column in COLUMNS.items():
            if not column.texts or not len(columns.get(name, ())):
                continue
            rows = columns[name] = columns[name].copy()
            for text in column.texts:
                rows[text] = [local.setdefault(t, len(local)) for t in rows[text].tolist()]
        return tuple(words[text] for text in local)

    def _in_chains(self, name: str, known: Rows, columns: dict[str, Rows]) -> npt.NDArray[np.bool_]:
        """Tells which facts of Python code a window's chains have."""
        chains, frames = columns["chains"], columns["chain_frames"]
        processes = np.repeat(chains["process"], lengths("chains", chains))
        chosen: npt.NDArray[np.bool_] = np.isin(
            _code_keys(name, known["process"], known), _code_keys(name, processes, frames)
        )
        return chosen

    def forget(self, processes: Collection[int], threads: Collection[int]) -> None:
        """Drops the facts of processes and threads that are gone, for good.

        To be called when a window was closed, before anything is defined for the next.
        """
        self._take_in_facts()
        gone = np.array(sorted(processes), np.uint32)
        for name in _FACTS:
            rows = self._facts[name]
            if len(gone) and "process" in (rows.dtype.names or ()):
                self._facts[name] = rows[~np.isin(rows["process"], gone)]
        known = self._facts["threads"]
        gone = np.array(sorted(threads), np.uint32)
        self._facts["threads"] = known[~np.isin(known["thread"], gone)]
        for name, number, used_in, field in (
            ("codes", "kernel", "kernels", "kernel"),
            ("cgroups", "cgroup", "processes", "cgroup"),
        ):
            rows = self._facts[name]
            self._facts[name] = rows[np.isin(rows[number], self._facts[used_in][field])]
        if self.start_ns - self._looked_through_ns >= _LOOK_THROUGH_NS:
            self._looked_through_ns = self.start_ns
            self._drop_stacks_of_gone()
        self._drop_code()
        self._drop_texts()

    def mapped_binaries(self) -> set[int]:
        """Returns the files that processes are known to have mapped, now or before."""
        found: set[int] = set(np.unique(self._facts["mappings"]["binary"]).tolist())
        return found

    def forget_binaries(self, binaries: Collection[int]) -> None:
        """Drops files that nobody maps any more, as `forget` does."""
        self._take_in_facts()
        rows = self._facts["binaries"]
        self._facts["binaries"] = rows[~np.isin(rows["binary"], np.array([*binaries], np.uint32))]

    def _drop_stacks_of_gone(self) -> None:
        """Drops kept stacks and chains that windows would only show as lost."""
        for kept in self._kept.values():
            kept.drop_gone(self._facts["processes"]["process"])
            kept.drop_unused_parts()

    def _drop_code(self) -> None:
        """Drops facts of Python code that no chain has that is kept, where there are many."""
        if sum(len(self._facts[name]) for name in _OF_CODE) <= self._most_code_rows:
            return
        kept = self._kept["chains"]
        frames = np.frombuffer(kept.parts, COLUMNS["chain_frames"].dtype)
        columns = {"chains": kept.rows, "chain_frames": frames}
        for name in _OF_CODE:
            rows = self._facts[name]
            self._facts[name] = rows[self._in_chains(name, rows, columns)]
        left = sum(len(self._facts[name]) for name in _OF_CODE)
        self._most_code_rows = max(_MOST_CODE_ROWS, 2 * left)

    def _drop_texts(self) -> None:
        """Drops texts that no fact has, where there are many."""
        if len(self._texts) <= self._most_texts:
            return
        words = tuple(self._texts)
        self._texts = {"": 0}
        for name in _FACTS:
            for text in COLUMNS[name].texts:
                rows = self._facts[name]
                rows[text] = [self.text(words[index]) for index in rows[text].tolist()]
        self._most_texts = 2 * len(self._texts) + _MOST_NEW_TEXTS


def _with_changed(known: Rows, changed: Rows, column: Column) -> Rows:
    """Returns facts, each once: those that are as they were, and after these what has changed.

    Most changes are of processes and threads that are new, and are compared with nothing.

    Args:
        known: One row of each key.
        changed: The same.
    """
    number = column.key[0]
    is_old = np.isin(known[number], changed[number])
    if is_old.any() and len(column.key) > 1:
        both = key_numbers(np.concatenate([known[is_old], changed]), column)
        count = len(both) - len(changed)
        is_old[is_old] = np.isin(both[:count], both[count:])
    return np.concatenate([known[~is_old], changed])


def _code_keys(name: str, processes: npt.NDArray[np.uint32], rows: Rows) -> npt.NDArray[np.uint64]:
    """Returns a number for each (process, code), of lines (process, code, position)."""
    keys: npt.NDArray[np.uint64] = rows["code"] * _MIX + processes.astype(np.uint64)
    if name == "code_lines":
        keys = keys * _MIX + rows["position"].astype(np.int64).view(np.uint64)
    return keys


def _rank_in_runs(values: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Returns for each value how many of the same stand directly before it."""
    at = np.arange(len(values))
    begins = np.r_[True, values[1:] != values[:-1]] if len(values) else np.zeros(0, bool)
    rank: npt.NDArray[np.int64] = at - np.maximum.accumulate(np.where(begins, at, 0))
    return rank


def _lost(column: str, numbers: Array, processes: Array) -> Rows:
    """Returns the rows of stacks or chains whose content is not there."""
    rows = np.zeros(len(numbers), COLUMNS[column].dtype)
    rows[COLUMNS[column].key[0]], rows["process"] = numbers, processes
    if column == "stacks":
        rows["stop_reason"], rows["call"] = StopReason.LOST, NONE
    return rows
