# SPDX-License-Identifier: Apache-2.0
"""Off-CPU stacks that were taken by chance, and what stands for those that were not.

Of a recording by chance the kernel half knows all of a thread's time off the CPU, by kind, and the
stacks of some of its waits. Each of these was chosen with a probability that did not depend on how
long it would last, and stands for so many (its weight): on average the weighted sums are right.
Here they are scaled to the totals, which are exact, so that on + off = wall in every window
(a ratio estimator: Cochran, Sampling Techniques, 6.1). Of a thread none of whose waits was chosen
the time is there under a stack that says so.

Waits of a second and more are not sampled: `long_waits`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from aiflame.agent.kernel import abi
from aiflame.agent.kernel.loader import Programs
from aiflame.gpu.base import HelperLoad

Array = npt.NDArray[Any]
# Keys and values of sums.
Part = tuple[Array, Array]

_GROUP = ("image", "tid", "sample_class")


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
    """

    one_in: int
    by_cgroup: Mapping[int, int] = field(default_factory=dict)
    spacing_ns: int = 0
    samples_one_in: int = 1
    thrift: int = 1
    details_after_ns: int = 0


@dataclass(frozen=True, slots=True)
class CgroupLoad:
    """Switch-outs of a cgroup in a window, and how many of them took a stack."""

    switches: int
    stacks: int


@dataclass(frozen=True, slots=True)
class Load:
    """What a window cost, as far as it is known. Times in ns.

    Attributes:
        window_ns: How long it was.
        by_cgroup: By cgroup id; 0 stands for those that are not known.
        samples: On-CPU samples.
        calls: Of device APIs.
        own_cpu_ns: What the recorder's processes took.
        bpf_ns: What programs took at switches and wake-ups; None where the kernel does not count.
        helpers: What helpers of devices have told, by process image.
        joined: Images that were joined, since each by itself takes too much.
    """

    window_ns: int
    by_cgroup: Mapping[int, CgroupLoad]
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

    def take_said(self) -> list[str]:
        """Returns what a user should know, each line once."""


@dataclass(frozen=True, slots=True)
class SharedOut:
    """Rows of a window without weights.

    Attributes:
        keys, values: As the kernel's sums have them.
        unsampled: Intervals that have no stack.
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


def share_out(rows: Part, totals: Part) -> SharedOut:
    """Scales what was chosen to what all was.

    Args:
        rows: Sums by stack, thread, kind and weight. Exact ones stay as they are.
        totals: Of intervals by chance, chosen or not, by thread and kind; of any stack.

    Returns:
        Rows of weight 0. For each thread and kind, those by chance add up to the total to the ns.
    """
    keys, values = rows
    is_exact = keys["weight"] == abi.WEIGHT_EXACT
    is_chosen = ~is_exact & (keys["weight"] != abi.WEIGHT_NOT_CHOSEN)
    chosen, raw = keys[is_chosen].copy(), values[is_chosen]
    groups, first, of_total, of_chosen = _groups(totals[0], chosen)
    whole_ns = _sums(groups, of_total, totals[1]["ns"].astype(np.int64))
    whole_count = _sums(groups, of_total, totals[1]["count"].astype(np.int64))
    weights = chosen["weight"].astype(np.int64)
    scaled = np.zeros(len(chosen), abi.SUM_VALUE_DTYPE)
    ns, count = weights * raw["ns"].astype(np.int64), weights * raw["count"].astype(np.int64)
    scaled["ns"] = _allotted(ns, np.maximum(count, 1), of_chosen, whole_ns)
    scaled["count"] = _allotted(count, np.maximum(ns, 1), of_chosen, whole_count)
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


def _groups(
    totals: Array, chosen: Array
) -> tuple[int, npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Numbers the threads and kinds of rows.

    Returns:
        How many there are; the first row of each, which for those that have a total is one of
        these; and the numbers of the rows of both.
    """
    columns = [np.concatenate([totals[name], chosen[name]]) for name in _GROUP]
    order = np.lexsort(columns)  # stable: totals come before
    is_new = np.zeros(len(order), bool)
    is_new[:1] = True
    for column in columns:
        is_new[1:] |= column[order][1:] != column[order][:-1]
    numbers = np.zeros(len(order), np.int64)
    numbers[order] = np.cumsum(is_new) - 1
    count = int(is_new.sum())
    return count, order[is_new], numbers[: len(totals)], numbers[len(totals) :]


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
