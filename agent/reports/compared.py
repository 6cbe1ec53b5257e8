# SPDX-License-Identifier: Apache-2.0
"""Functions of two recordings by how their shares differ.

Chance is taken from how seconds of a recording differ (see change.py), of longer recordings from
how longer parts do, since a program is often in a phase for seconds (batch means: Law, Simulation
Modeling and Analysis, 5th ed. 2015, 9.5.3). How one run differs from the next nobody can tell from
one of each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from aiflame.agent.model.profile import Difference, Profile
from aiflame.agent.reports.base import Frames
from aiflame.agent.reports.change import (
    F64,
    Compared,
    Side,
    by_difference,
    change,
    changes_table,
    lost_note,
    whose_time,
    with_lost,
)
from aiflame.agent.reports.difference import side_ns
from aiflame.agent.reports.own_code import charged_frames, functions_of, innermost_functions
from aiflame.agent.reports.rows import TRUNCATED_REASONS, label_of
from aiflame.agent.reports.selection import shown_stacks
from aiflame.agent.reports.table import Table, functions_by_stack, row_by_sample
from aiflame.agent.reports.words import showable

I64 = npt.NDArray[np.int64]

# Parts of a recording. Of simulated programs that had not changed (30 functions, 99 Hz, 30 to 300
# s) 3 to 5 % gave a false alarm where each function had 20 phases or more, as promised, and 18 to
# 38 % where it had five or fewer. With 64 parts these were 5 to 13 % and 45 to 73 %, with bounds
# a tenth narrower.
_MOST_GROUPS = 16

OwnNs = Callable[[npt.NDArray[np.uint32], F64], F64]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two recordings; of pairs, base is the first.

    Attributes:
        of: Which.
        functions: Largest difference first.
        samples: On-CPU samples, and intervals off the CPU.
        groups: How many parts of their time chance is taken from.
        window_s: The longest time of which it is not known when in it something was.
        lost: Part of each side's time whose stack was lost, 0 to 1: it is in no share.
        is_self: Time is that of functions by themselves.
    """

    of: Difference
    functions: tuple[Compared, ...]
    samples: tuple[int, int]
    groups: tuple[int, int]
    window_s: int
    lost: tuple[float, float]
    is_self: bool

    @property
    def group_words(self) -> str:
        """What chance is taken from, where there is little of it."""
        return "seconds" if self.window_s == 1 else f"windows of {self.window_s} s"

    def table(self, limit: int, *, is_sure: bool) -> Table:
        """Return it as a table.

        Args:
            limit: At most so many rows.
            is_sure: There is enough to tell what chance leaves open.
        """
        sure = ""
        if is_sure:
            sure = (
                "; 90 % sure: the difference is between low and high, for all"
                f" {len(self.functions):,} functions at once, as far as {self.group_words} of a"
                " recording differ by chance, whatever other runs are like"
            )
        sides = "; ".join(
            f"{word}: {showable(name)}, {count:,} samples and waits"
            for word, name, count in zip(
                ("base", "new"), (self.of.base, self.of.new), self.samples, strict=True
            )
        )
        whole = (
            f"shares of a side's {self.of.time}, {whose_time(is_self=self.is_self)}{sure}"
            f"{lost_note(self.lost, is_sure=is_sure)}. {sides}"
        )
        return changes_table(self.functions, limit, whole, is_sure=is_sure)


def compare(
    profile: Profile, difference: Difference, *, is_self: bool, least_share: float
) -> Comparison:
    """Compare both sides of a profile.

    An agent that is over its budget loses stacks for a while and keeps their time. Counted in, all
    shares would fall by it, while the program does the same. So shares are of what has a stack.

    Args:
        profile: As `joined` makes it; each side has some time.
        difference: Its own.
        is_self: Time of a function by itself, not with what it calls.
        least_share: Functions that have less of both sides are left out, 0 to 1.
    """
    profile = replace(profile, stacks=shown_stacks(profile, Frames.BOTH))
    profile, lost = _with_stacks(profile, difference)
    samples, spans = profile.samples, profile.spans
    is_new = difference.is_new[samples["thread"]]
    is_new_span = is_new[spans["sample"]]
    sides = (spans[~is_new_span], spans[is_new_span])
    window_s = profile.recording.window_s
    own_ns_of = _self_ns(profile) if is_self else _total_ns(profile)
    own, whole = [], []
    for side in sides:
        parts = [
            (weight.sum(), own_ns_of(side["sample"], weight)) for weight in _weights(side, window_s)
        ]
        whole.append(np.array([ns for ns, _ in parts]))
        own.append(np.array([ns for _, ns in parts]))
    counts = (int(samples["count"][~is_new].sum()), int(samples["count"][is_new].sum()))
    shares = [ns.sum(axis=0) / all_ns.sum() for ns, all_ns in zip(own, whole, strict=True)]
    wanted = np.flatnonzero(np.maximum(*shares) > least_share).tolist()
    found = []
    for i in wanted:
        # A part of one long wait is no whole one.
        before, after = (Side(own[k][:, i], whole[k], max(1, counts[k])) for k in range(2))
        name = label_of(profile.functions[i], 0)
        found.append(Compared(name, with_lost(change(before, after, len(wanted)), lost)))
    groups = (int(np.count_nonzero(whole[0])), int(np.count_nonzero(whole[1])))
    return Comparison(difference, by_difference(found), counts, groups, window_s, lost, is_self)


def _with_stacks(profile: Profile, difference: Difference) -> tuple[Profile, tuple[float, float]]:
    """Return a profile without samples whose stack was lost, and their part of each side's time."""
    stacks = profile.stacks
    is_lost = (np.diff(stacks.offsets) == 0) & np.isin(stacks.ends, TRUNCATED_REASONS)
    known = profile.with_samples(~is_lost[profile.samples["stack"]])
    (base, new), (all_base, all_new) = (side_ns(one, difference) for one in (known, profile))
    lost = (1 - base / all_base, 1 - new / all_new)
    # Where a side has no stack at all there is nothing else to compare.
    return (known if base and new else profile), lost


def _weights(spans: npt.NDArray[np.void], window_s: int) -> Iterator[F64]:
    """Yield the time that each span has in one part of a recording after the other."""
    first = spans["first_s"].astype(np.int64)
    stop = first + spans["seconds"]
    # Windows begin at multiples of their length.
    begin, end = int(first.min()) // window_s * window_s, int(stop.max())
    windows = -(-(end - begin) // window_s)
    group_s = window_s * -(-windows // _MOST_GROUPS)
    for group in range(begin, end, group_s):
        inside = np.minimum(stop, group + group_s) - np.maximum(first, group)
        yield spans["ns"] * np.maximum(inside, 0).astype(np.float64)


def _self_ns(profile: Profile) -> OwnNs:
    """Return what adds weights of samples up by function, innermost ones alone."""
    charged = functions_of(profile, charged_frames(profile))
    function_of = row_by_sample(profile.samples, innermost_functions(profile), charged)

    def own_ns(sample: npt.NDArray[np.uint32], weight: F64) -> F64:
        function = function_of[sample]
        there = function >= 0
        return _summed(function[there], weight[there], len(profile.functions))

    return own_ns


def _total_ns(profile: Profile) -> OwnNs:
    """Return what adds weights of samples up by function, each that is anywhere in the stack."""
    stacks = len(profile.stacks)
    pairs = [*functions_by_stack(profile, np.ones(stacks, np.bool_))]
    owner, function = (np.concatenate(column) for column in zip(*pairs, strict=True))

    def own_ns(sample: npt.NDArray[np.uint32], weight: F64) -> F64:
        by_stack = _summed(profile.samples["stack"][sample], weight, stacks)
        return _summed(function, by_stack[owner], len(profile.functions))

    return own_ns


def _summed(keys: npt.NDArray[np.integer], weights: F64, size: int) -> F64:
    """Return the sum of weights by key, 0 to `size`; as floats also where there are none."""
    found: F64 = np.bincount(keys, weights, size).astype(np.float64)
    return found
