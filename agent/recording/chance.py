# SPDX-License-Identifier: Apache-2.0
"""Off-CPU stacks that were taken by chance, and what stands for those that were not.

Of a recording by chance the kernel half knows all of a thread's time off the CPU, by kind, and the
stacks of some of its waits. Each of these was chosen with a probability that did not depend on how
long it would last, and stands for so many (its weight): on average the weighted sums are right.
Here they are scaled to the totals, which are exact, so that on + off = wall in every window
(a ratio estimator: Cochran, Sampling Techniques, 6.1). Where few were chosen, it is biased against
long waits: one more of these makes the sum larger by which all are divided. That bias is corrected
to the first order (Tin, Comparison of some ratio estimators, Journal of the American Statistical
Association 60, 1965). Where few stacks may be taken, none of a
thread's waits may be chosen in a window: those that were in the windows before stand for them. Of a
thread of which there are none either the time is there under a stack that says so.

Waits of a second and more are exact, whether they were chosen or not; those that were not are
looked at while they last (`long_waits`). Where there are too many for that, those of the same
thread that have a stack stand for them: it was not known how long they would be when they were
chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from aiflame.agent.kernel import abi
from aiflame.agent.kernel.loader import Programs
from aiflame.agent.model.profile import SampleClass
from aiflame.gpu.base import HelperLoad

Array = npt.NDArray[Any]
# Keys and values of sums.
Part = tuple[Array, Array]

# For how long what was chosen stands for what comes: within that a thread is chosen again, however
# few stacks may be taken (fleet/cost.py, the largest spacing).
_REMEMBERED_NS = 128_000_000_000
# Rows of stacks, thread and kind, those that came last: few are needed where many come.
_MOST_REMEMBERED = 1 << 13
# Of long waits, for which others stand that are as rare: 10,000 threads, of two kinds each; one in
# eight is chosen of threads that wait every ten seconds.
_MOST_LONG_REMEMBERED, _LONG_REMEMBERED_NS = 1 << 15, 4 * _REMEMBERED_NS


@dataclass(frozen=True, slots=True)
class Chances:
    """Of how many switch-outs one takes a stack.

    Attributes:
        one_in: Of cgroups that are not named.
        by_cgroup: By cgroup id, as bpf_get_current_cgroup_id() has it.
        spacing_ns: Threads that are switched out less often than this have all their stacks taken,
            and others at least so many.
        samples_one_in: Of how many on-CPU samples one is taken, and stands for all.
        thrift: How many times less is done of all else that takes the recorder's time and can be
            left: looks at what is new, walks of who sleeps, windows, the list of long waits. 1: as
            much as there is.
        details_after_ns: Processes that end before they are so old, and of which no on-CPU sample
            was taken, are joined by cgroup and name. 0: each is told of.
        delay_factor: How many times later than with that thrift it may be told what was recorded:
            windows of devices are so many times longer, and so is what an agent sends at once.
    """

    one_in: int
    by_cgroup: Mapping[int, int] = field(default_factory=dict)
    spacing_ns: int = 0
    samples_one_in: int = 1
    thrift: int = 1
    details_after_ns: int = 0
    delay_factor: int = 1


@dataclass(frozen=True, slots=True)
class Load:
    """What a window cost, as far as it is known. Times in ns.

    Attributes:
        window_ns: How long it was.
        by_cgroup: Switch-outs by cgroup id; 0 stands for those that are not known.
        stacks: How many of them took a stack.
        samples: On-CPU samples.
        calls: Of device APIs.
        own_cpu_ns: What the recorder's processes took.
        bpf_ns: What programs took at switches and wake-ups; None where the kernel does not count.
        helpers: What helpers of devices have told, by process image.
        joined: Images that were joined, since each by itself takes too much.
    """

    window_ns: int
    by_cgroup: Mapping[int, int]
    stacks: int
    samples: int
    calls: int
    own_cpu_ns: int
    bpf_ns: int | None
    helpers: Mapping[int, HelperLoad] = field(default_factory=dict)
    joined: int = 0


class Steers(Protocol):
    """Whoever decides about chances."""

    def first(self) -> Chances:
        """Returns what a recording begins with."""

    def next(self, load: Load) -> Chances:
        """Returns what is to hold from now on, after a window."""

    def duties(self) -> dict[int, float]:
        """Returns for how much of the time that is wanted stalls may be sampled, by process image.

        Those that are not named may be sampled for all of it.
        """

    def accounted_ns(self) -> int:
        """Returns what was taken in threads of targets in the window that `next` was told of last.

        By programs and helpers: events times what each takes.
        """

    def take_said(self) -> list[str]:
        """Returns what a user should know, each line once."""


@dataclass(frozen=True, slots=True)
class SharedOut:
    """Rows of a window without weights.

    Attributes:
        keys, values: As the kernel's sums have them.
        unsampled: Intervals that have no stack, not even one from before.
    """

    keys: Array
    values: Array
    unsampled: int


def write_chances(programs: Programs, chances: Chances, before: Chances | None) -> None:
    """Tells programs of new chances.

    Args:
        programs: Loaded.
        chances: What is to hold.
        before: What held; None at first.
    """
    known = {} if before is None else before.by_cgroup
    for cgroup in known.keys() - chances.by_cgroup.keys():
        programs.chances.delete(cgroup.to_bytes(8, "little"))
    for cgroup, one_in in chances.by_cgroup.items():
        if known.get(cgroup) != one_in:
            programs.chances.update(cgroup.to_bytes(8, "little"), one_in.to_bytes(4, "little"))
    programs.set(abi.Setting.ONE_IN, chances.one_in)
    programs.set(abi.Setting.SPACING_NS, chances.spacing_ns)
    programs.set(abi.Setting.SAMPLES_ONE_IN, chances.samples_one_in)
    programs.set(abi.Setting.DETAILS_AFTER_NS, chances.details_after_ns)
    listed_ns = abi.LONG_WAIT_NS * chances.thrift if chances.thrift > 1 else 0
    programs.set(abi.Setting.WAIT_LISTED_NS, listed_ns)


class EarlierStacks:
    """Waits that were chosen in the windows before, by stack, thread and kind.

    Args:
        is_kept: Whether windows know a stack still.
        are_long: They are long waits: of each thread and kind, those of one window are remembered,
            the last that had any, and for longer.
    """

    def __init__(self, is_kept: Callable[[int], bool], *, are_long: bool = False) -> None:
        self._is_kept = is_kept
        self._are_long = are_long
        self._most = _MOST_LONG_REMEMBERED if are_long else _MOST_REMEMBERED
        self._for_ns = _LONG_REMEMBERED_NS if are_long else _REMEMBERED_NS
        self._keys: Array = np.zeros(0, abi.SUM_KEY_DTYPE)  # the oldest first
        self._values: Array = np.zeros(0, abi.SUM_VALUE_DTYPE)
        self._window_ns: Array = np.zeros(0, np.int64)  # when the window of each ended

    def add(self, rows: Part, boundary_ns: int) -> None:
        """Takes note of what was chosen in a window that ends at a monotonic time."""
        keys, values = rows
        is_chosen = _are_chosen(keys)
        ends_ns = np.full(int(is_chosen.sum()), boundary_ns, np.int64)
        if self._are_long:
            self._keep(~np.isin(_names(self._keys), _names(keys[is_chosen])))
        self._keys = np.concatenate([self._keys, keys[is_chosen]])[-self._most :]
        self._values = np.concatenate([self._values, values[is_chosen]])[-self._most :]
        self._window_ns = np.concatenate([self._window_ns, ends_ns])[-self._most :]
        self._keep(self._window_ns >= boundary_ns - self._for_ns)

    def _keep(self, which: npt.NDArray[np.bool_]) -> None:
        self._keys, self._values = self._keys[which], self._values[which]
        self._window_ns = self._window_ns[which]

    def of(self, threads: Array) -> Part:
        """Returns what there is of threads and kinds, SUM_KEY_DTYPE with one row for each."""
        _, _, of_threads, of_rows = _groups(threads, self._keys)
        is_theirs = np.isin(of_rows, of_threads)
        stacks = np.unique(self._keys["stack"][is_theirs])
        kept = stacks[[self._is_kept(stack) for stack in stacks.tolist()]]
        is_theirs &= np.isin(self._keys["stack"], kept)
        return self._keys[is_theirs], self._values[is_theirs]


def _are_chosen(keys: Array) -> npt.NDArray[np.bool_]:
    weights = keys["weight"]
    found: npt.NDArray[np.bool_] = weights != abi.WEIGHT_EXACT
    found &= weights != abi.WEIGHT_NOT_CHOSEN
    return found


def _no_earlier(_threads: Array) -> Part:
    return np.zeros(0, abi.SUM_KEY_DTYPE), np.zeros(0, abi.SUM_VALUE_DTYPE)


def share_out(
    rows: Part, totals: Part, earlier: Callable[[Array], Part] = _no_earlier
) -> SharedOut:
    """Scales what was chosen to what all was.

    Args:
        rows: Sums by stack, thread, kind and weight. Exact ones stay as they are.
        totals: Of intervals by chance, chosen or not, by thread and kind; of any stack.
        earlier: Returns what stands for threads and kinds of which nothing was chosen.

    Returns:
        Rows of weight 0. For each thread and kind, those by chance add up to the total to the ns.
    """
    keys, values = rows
    is_exact = keys["weight"] == abi.WEIGHT_EXACT
    is_chosen = _are_chosen(keys)
    chosen, raw = keys[is_chosen], values[is_chosen]
    missing = _without(totals[0], chosen)
    if len(missing):
        stand_ins, of_stand_ins = earlier(missing)
        chosen, raw = np.concatenate([chosen, stand_ins]), np.concatenate([raw, of_stand_ins])
    groups, first, of_total, of_chosen = _groups(totals[0], chosen)
    whole_ns = _sums(groups, of_total, totals[1]["ns"].astype(np.int64))
    whole_count = _sums(groups, of_total, totals[1]["count"].astype(np.int64))
    weights = chosen["weight"].astype(np.int64)
    scaled = np.zeros(len(chosen), abi.SUM_VALUE_DTYPE)
    seen = raw["count"].astype(np.int64)
    ns = _bias_corrected(weights * raw["ns"].astype(np.int64), seen, weights, of_chosen, groups)
    count = _bias_corrected(weights * seen, seen, weights, of_chosen, groups)
    scaled["ns"] = _allotted(ns, np.maximum(count, 1), of_chosen, whole_ns)
    scaled["count"] = _allotted(count, np.maximum(ns, 1), of_chosen, whole_count)
    chosen = chosen.copy()
    chosen["weight"] = abi.WEIGHT_EXACT

    is_bare = np.ones(groups, bool)
    is_bare[of_chosen] = False
    is_bare &= (whole_ns > 0) | (whole_count > 0)
    bare_keys = totals[0][first[is_bare]].copy()
    bare_keys["stack"], bare_keys["weight"] = abi.NOT_SAMPLED_STACK, abi.WEIGHT_EXACT
    bare = np.zeros(len(bare_keys), abi.SUM_VALUE_DTYPE)
    bare["ns"], bare["count"] = whole_ns[is_bare], whole_count[is_bare]
    return SharedOut(
        np.concatenate([keys[is_exact], chosen, bare_keys]),
        np.concatenate([values[is_exact], scaled, bare]),
        int(bare["count"].sum()),
    )


def as_chosen(rows: Part) -> Part:
    """Returns those of exact rows that are waits with a stack, each standing for itself alone."""
    keys, values = rows
    is_known = (keys["stack"] != abi.NOT_RUN_STACK) & (keys["stack"] != abi.NOT_SAMPLED_STACK)
    is_known &= keys["sample_class"] != SampleClass.ON_CPU
    found = keys[is_known]
    found["weight"] = 1
    return found, values[is_known]


def fill_in(bare: Part, known: Part, earlier: Callable[[Array], Part] = _no_earlier) -> SharedOut:
    """Gives long waits that have no stack those that others of their thread have.

    Args:
        bare: Sums without a stack, by thread and kind.
        known: Such with one, as `as_chosen` makes them; of any thread.
        earlier: As for `share_out`.

    Returns:
        As `share_out` does: of each thread and kind as much as there was, and what is left bare.
    """
    keys, values = known
    _, _, of_bare, of_known = _groups(bare[0], keys)
    is_theirs = np.isin(of_known, of_bare)
    return share_out((keys[is_theirs], values[is_theirs]), bare, earlier)


def _bias_corrected(
    sums: npt.NDArray[np.int64],
    seen: npt.NDArray[np.int64],
    weights: npt.NDArray[np.int64],
    which: npt.NDArray[np.int64],
    groups: int,
) -> npt.NDArray[np.int64]:
    """Returns weighted sums whose shares in those of their group have less bias.

    A share is too small by its covariance with the whole, and too large by its part of the whole's
    variance, both over the square of the whole. Intervals are chosen one by one: the covariance is
    a sum's own variance, which is taken as if its intervals were equal.

    Args:
        sums: Of each row.
        seen: Of how many intervals each is.
        weights: For how many each of these stands.
        which: Group of each row.
        groups: How many there are.
    """
    own = sums.astype(np.float64)
    variances = own**2 / np.maximum(seen, 1) * (1 - 1 / np.maximum(weights, 1))
    wholes = np.maximum(np.bincount(which, own, groups), 1.0)[which]
    share = np.bincount(which, variances, groups)[which] / wholes**2
    found = np.round(own * (1 - share) + variances / wholes).astype(np.int64)
    return np.where(share > 0, found, sums)  # what is known of all stays as it is


def _without(totals: Array, chosen: Array) -> Array:
    """Returns threads and kinds of which nothing was chosen, a row of each."""
    groups, first, of_total, of_chosen = _groups(totals, chosen)
    is_there = np.zeros(groups, bool)
    is_there[of_total] = True
    is_there[of_chosen] = False
    found: Array = totals[first[is_there]]
    return found


def _groups(
    totals: Array, chosen: Array
) -> tuple[int, npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Numbers the threads and kinds of rows.

    Returns:
        How many there are; the first row of each, which for those that have a total is one of
        these; and the numbers of the rows of both.
    """
    names = np.concatenate([_names(totals), _names(chosen)])
    _, first, numbers = np.unique(names, return_index=True, return_inverse=True)
    return len(first), first, numbers[: len(totals)], numbers[len(totals) :]


def _names(keys: Array) -> npt.NDArray[np.uint64]:
    """Returns one number for each thread and kind: an image is a time, so few bits of it tell."""
    # Tids end below 2^22 (PID_MAX_LIMIT), and there are four kinds.
    images = keys["image"].astype(np.uint64) << np.uint64(24)
    found: npt.NDArray[np.uint64] = images | keys["tid"].astype(np.uint64) << np.uint64(2)
    return found | keys["sample_class"].astype(np.uint64)


def _sums(
    groups: int, which: npt.NDArray[np.int64], values: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    found = np.zeros(groups, np.int64)
    np.add.at(found, which, values)
    return found


def _allotted(
    shares: npt.NDArray[np.int64],
    others: npt.NDArray[np.int64],
    which: npt.NDArray[np.int64],
    wholes: npt.NDArray[np.int64],
) -> npt.NDArray[np.int64]:
    """Divides the whole of each group among its rows, in whole numbers that add up to it.

    Args:
        shares: Of each row.
        others: What counts in a group all of whose shares are 0; above 0.
        which: Group of each row.
        wholes: Of each group.
    """
    sums = _sums(len(wholes), which, shares)
    shares = np.where(sums[which] > 0, shares, others)
    sums = _sums(len(wholes), which, shares)
    order = np.argsort(which, kind="stable")
    group = which[order]
    # Of each group from 0 on: one after the other they would lose precision.
    parts = shares[order] / np.maximum(sums[group], 1)
    ends = np.cumsum(parts)
    is_first = np.ones(len(order), bool)
    is_first[1:] = group[1:] != group[:-1]
    is_last = np.ones(len(order), bool)
    is_last[:-1] = is_first[1:]
    begins = (ends - parts)[is_first]
    ends -= np.repeat(begins, np.diff([*np.flatnonzero(is_first), len(order)]))
    bounds = np.clip(np.round(ends * wholes[group]).astype(np.int64), 0, wholes[group])
    bounds[is_last] = wholes[group][is_last]
    before = np.zeros_like(bounds)
    before[1:] = bounds[:-1]
    before[is_first] = 0
    found = np.zeros_like(bounds)
    # What rounding left over goes to the last, which must not be below 0 for it.
    found[order] = np.maximum(bounds - before, 0)
    # What adds up already stays as it is, to the last ns.
    is_whole = (sums == wholes)[which]
    return np.where(is_whole, shares, found)
