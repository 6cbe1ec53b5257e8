# SPDX-License-Identifier: Apache-2.0
"""How many samples parts of stretches have: what costs of launches are fitted to.

Samples name their kernel. So a cell is a kernel in a stretch, at least. Programs that do the same
again and again have many stretches that are alike, of which each may have a sample or none:
together they show one launch after the other. There a cell is a run, of launches of one kernel that
follow each other, and which samples are of which run is told by their order: the parts of their
stretches at which they were taken, and their kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from aiflame.gpu.attribution.launches import UNNAMED
from aiflame.gpu.attribution.mixing import mixed

I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]

# By what costs of equal work differ from each other, if they do: as a standard deviation of their
# logarithms; about 3 to 1.
UNEQUAL = 1.0

# Stretches that are alike are looked at in so many groups: what differs between these is chance.
_LEAST_GROUPS, _MOST_GROUPS = 2, 8
# Of a group and a kernel, for each of its runs in the mean: with fewer, runs that happen to have
# none are not told from their neighbours.
_LEAST_SAMPLES = 5
# The logarithm of the odds that a sample is of its run's kernel: a fifth may not be, as work begins
# now earlier and now later.
_MATCH = 1.4
# A run has at most so many times what is expected of it, and a sample.
_MOST_UNEQUAL = 20
# Of a group: samples, times what its runs have at most: some tenths of a second; and of one run,
# which are in memory at once, three numbers of eight bytes each.
_MOST_STEPS = 20_000_000
_MOST_STEPS_OF_RUN = 4_000_000
# Of a recording.
_MOST_KINDS = 32


@dataclass(frozen=True, slots=True)
class Sampled:
    """When samples of launches were taken, and of what; of shape (samples,).

    Attributes:
        stretch: The number of the stretch that each is in.
        part: In which part of it, 0 to 1; NaN where its end is not known.
        name: A number for the name of its kernel, or UNNAMED.
    """

    stretch: I64
    part: F64
    name: I64


@dataclass(frozen=True, slots=True)
class Launched:
    """What was launched in stretches, in its order; of shape (launches,).

    Attributes:
        stretch: Ascending.
        name: As of samples.
        key: What those that cost the same for each unit of work have in common.
        work: In units.
    """

    stretch: I64
    name: I64
    key: I64
    work: F64


@dataclass(frozen=True, slots=True)
class Observed:
    """What was observed of cells.

    Attributes:
        cell: Of which each launch is a part, shape (launches,).
        value: Of each cell, in any unit.
    """

    cell: I64
    value: F64

    def sums(self, values: F64) -> F64:
        """Returns the sums of what launches have, by cell."""
        return np.bincount(self.cell, values, len(self.value)).astype(np.float64)


def samples_of_cells(launched: Launched, sampled: Sampled, *, is_in_order: bool) -> Observed:
    """Counts samples by cells.

    Args:
        launched: In stretches of known length.
        sampled: There, and elsewhere.
        is_in_order: Whether launches are on one queue, and ran in their order.
    """
    is_known = np.isin(sampled.stretch, launched.stretch) & (sampled.name != UNNAMED)
    stretch, name = sampled.stretch[is_known], sampled.name[is_known]
    first_free = int(launched.stretch.max(initial=-1)) + 1
    of_launch = launched.stretch << 32 | np.maximum(launched.name, 0)
    of_launch[launched.name == UNNAMED] = first_free << 32
    of_sample = stretch << 32 | name
    if is_in_order:
        run = _runs(launched)
        part = sampled.part[is_known]
        for number, alike in enumerate(_alike(launched, run, stretch, name), first_free + 1):
            is_own = np.isin(stretch, alike.stretches) & np.isin(name, alike.runs)
            own = np.flatnonzero(is_own)
            own = own[np.argsort(part[own], kind="stable")]
            of_sample[own] = number << 32 | _in_turn(alike.runs, alike.expected, name[own])
            rows = np.flatnonzero(np.isin(launched.stretch, alike.stretches))
            of_launch[rows] = number << 32 | run[rows]
    cells, cell = np.unique(of_launch, return_inverse=True)
    at = np.minimum(np.searchsorted(cells, of_sample), max(len(cells) - 1, 0))
    launched_it = cells[at] == of_sample if len(cells) else np.zeros(0, bool)
    return Observed(cell, np.bincount(at[launched_it], minlength=len(cells)).astype(np.float64))


def _runs(launched: Launched) -> I64:
    """Returns the number of each launch's run in its stretch, from 0."""
    is_new = np.ones(len(launched.stretch), bool)
    is_first = np.ones(len(launched.stretch), bool)
    is_first[1:] = launched.stretch[1:] != launched.stretch[:-1]
    is_new[1:] = is_first[1:] | (launched.name[1:] != launched.name[:-1])
    run = np.cumsum(is_new)
    found: I64 = run - run[np.flatnonzero(is_first)][np.cumsum(is_first) - 1]
    return found


@dataclass(frozen=True, slots=True)
class _Alike:
    """A group of stretches of the same launches.

    Attributes:
        stretches: Their numbers.
        runs: The name of each run, in their order.
        expected: How many samples of its name it has in all, if launches of equal work cost the
            same.
    """

    stretches: I64
    runs: I64
    expected: F64


def _alike(launched: Launched, run: I64, stretch: I64, name: I64) -> Iterator[_Alike]:
    """Yields groups of stretches of the same launches: those that samples tell runs of.

    Args:
        launched: In stretches.
        run: Of each launch.
        stretch: Of each sample.
        name: And its kernel.
    """
    stretches, first = np.unique(launched.stretch, return_index=True)
    if not len(stretches):
        return
    launches = np.diff(np.append(first, len(launched.stretch)))
    position = np.arange(len(launched.stretch)) - np.repeat(first, launches)
    made_of = np.add.reduceat(mixed(position, launched.key, launched.work), first)
    _, kind, count = np.unique(made_of, return_inverse=True, return_counts=True)
    kind_of_sample = kind[np.searchsorted(stretches, stretch)]
    for number in np.argsort(-count, kind="stable")[:_MOST_KINDS].tolist():
        own = np.flatnonzero(kind == number)
        rows = slice(int(first[own[0]]), int(first[own[0]] + launches[own[0]]))
        _, a_launch = np.unique(run[rows], return_index=True)
        runs = launched.name[rows][a_launch]
        names, of_run, has = np.unique(runs, return_inverse=True, return_counts=True)
        at = np.searchsorted(names, name[kind_of_sample == number])
        is_one = names[np.minimum(at, len(names) - 1)] == name[kind_of_sample == number]
        sampled = np.bincount(at[is_one], minlength=len(names))
        groups = min(int((sampled / has).min() / _LEAST_SAMPLES), _MOST_GROUPS)
        if len(names) == 1 or groups < _LEAST_GROUPS:
            continue
        work = np.bincount(run[rows], launched.work[rows])
        of_name = np.bincount(of_run, work)
        expected = (sampled / of_name / groups)[of_run] * work
        if _is_small(expected, int(sampled.sum() / groups)):
            for group in range(groups):
                yield _Alike(stretches[own[group::groups]], runs, expected)


def _most(expected: F64, size: int) -> I64:
    """Returns how many samples each run has at most, of `size` of them."""
    found: I64 = np.minimum(size, _MOST_UNEQUAL * (expected + 1)).astype(np.int64)
    return found


def _is_small(expected: F64, size: int) -> bool:
    """Whether samples can be dealt to runs within the bounds of time and memory."""
    steps = (size + 1) * (_most(expected, size) + 1)
    return bool(steps.max() <= _MOST_STEPS_OF_RUN and steps.sum() <= _MOST_STEPS)


def _in_turn(runs: I64, expected: F64, samples: I64) -> I64:
    """Deals samples to runs that follow each other, so that most are of the name of their run.

    That, and how far each run has as many as expected, are logarithms of probabilities, of whose
    sum the largest is found run by run (Bellman, 1957).

    Args:
        runs: The name of each.
        expected: How many samples of its name it has, if launches of equal work cost the same.
        samples: The name of each sample, in their order; all are of some run's.

    Returns:
        The run of each sample; one that is out of order has the nearest one of its name.
    """
    size = len(samples)
    # By how many samples are before: the best with the runs so far; and how many the last run has.
    best: F64 = np.full(size + 1, -np.inf)
    best[0] = 0.0
    chosen = np.zeros((len(runs), size + 1), np.int64)
    for number, (name, most) in enumerate(zip(runs.tolist(), _most(expected, size), strict=True)):
        has = np.arange(most + 1)
        off = np.log((has + 0.5) / (expected[number] + 0.5)) / UNEQUAL
        own = np.append(0.0, np.cumsum(samples == name)) * _MATCH
        before = np.concatenate((np.full(most, -np.inf), best - own))
        # Of [i, d]: d samples of the first i are this run's.
        by_size = np.lib.stride_tricks.sliding_window_view(before, most + 1)[:, ::-1] - off**2 / 2
        chosen[number] = by_size.argmax(axis=1)
        best = own + by_size.max(axis=1)
    found: I64 = np.zeros(size, np.int64)
    end = size
    for number in range(len(runs) - 1, -1, -1):
        begin = end - int(chosen[number, end])
        found[begin:end] = number
        end = begin
    for name in np.unique(samples[runs[found] != samples]).tolist():
        of_name = np.flatnonzero(runs == name)
        moved = np.flatnonzero((samples == name) & (runs[found] != name))
        found[moved] = of_name[np.argmin(abs(found[moved][:, None] - of_name), axis=1)]
    return found
