# SPDX-License-Identifier: Apache-2.0
"""What is learned where a device named launches for a while: weights, and by how much they are off.

NVIDIA's devices name the launch of a sample only while they run kernels one after the other. Short
windows of that are sampled. There it is known how many samples each stack's launches of a kernel
have, and how long these ran: how dense its samples are. Elsewhere stacks share samples by time
times density.

Densities are known as well as there are samples. So they are shrunk to their mean, which is sharing
by time alone: by as much as chance explains of how they differ, those of few samples more than
those of many (DerSimonian and Laird, 1986, for effects that vary). Where chance explains all of it,
nothing changes.

The error that is told is of windows that had no part in the fit: what every other window says,
tried on those between. Chance is in it, the more the fewer samples there are, and so is what a
window's launches differ in from those of its second, by which samples are shared.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from aiflame.agent.model.gpu import NONE, GpuProfile
from aiflame.agent.model.read_outs import NOWHERE, ReadOutSpans
from aiflame.gpu.attribution.costs import most_by_chance
from aiflame.gpu.attribution.launches import (
    UNNAMED,
    launches_that_ran,
    name_ids,
    stacks_by_name,
)

I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

# Of one window: read-outs whose launches nobody knows may lie between others. Two windows are
# seconds apart.
_GAP_NS = 100_000_000

# Every other window is fitted to when the others are tried.
FOLDS = 2

# How many samples launches have scatters by this times as much as if each sample were by chance, as
# those of one launch come together; that is known as well as so many windows of a stack tell. Not
# less than chance, since a launch of a few samples has one more or less by its moment.
_SCATTER, _PRIOR_WINDOWS, _LEAST_SCATTER = 4.0, 4.0, 1.0


@dataclass(frozen=True, slots=True)
class Cells:
    """Something of kernels that several stacks launch, by window; all of shape (rows,).

    Attributes:
        name: A number for the name of the kernel.
        stack: Who launched it.
        window: Which one of its process, from 0.
        value: Samples, or ns.
    """

    name: I64
    stack: I64
    window: I64
    value: I64

    @property
    def key(self) -> I64:
        """Name and stack."""
        return (self.name << 32) | self.stack

    def where(self, chosen: Mask | I64 | slice) -> Cells:
        """Returns the chosen rows."""
        return Cells(self.name[chosen], self.stack[chosen], self.window[chosen], self.value[chosen])

    def by_name(self) -> Iterator[tuple[int, Cells]]:
        """Yields the rows of each kernel, by name ascending."""
        ordered = self.where(np.argsort(self.name, kind="stable"))
        names, first = np.unique(ordered.name, return_index=True)
        bounds = [*first.tolist(), len(ordered.name)]
        for name, begin, end in zip(names.tolist(), bounds[:-1], bounds[1:], strict=True):
            yield name, ordered.where(slice(begin, end))


@dataclass(frozen=True, slots=True)
class Named:
    """Samples whose launches a device named, of kernels that several stacks launch.

    Attributes:
        row: Of GpuProfile.samples, ascending.
        samples: How many each stands for.
        ran_ns: How long such kernels ran in windows.
        windows: In how many windows samples were taken.
    """

    row: I64
    samples: Cells
    ran_ns: Cells
    windows: int

    def in_fold(self, fold: int) -> Mask:
        """Whether samples are of one half of the windows."""
        found: Mask = self.samples.window % FOLDS == fold
        return found

    def wrong(self, chosen: Mask, rows: npt.NDArray[np.void]) -> float:
        """Returns how many samples others give to another stack than the device, all in all.

        Args:
            chosen: Which samples are compared.
            rows: ATTRIBUTED_DTYPE; those of these samples add up to their own.
        """
        row, own = self.row[chosen], self.samples.where(chosen)
        rows = rows[np.isin(rows["sample"], row)]
        name = own.name[np.searchsorted(row, rows["sample"])]
        given = (name << 32) | rows["stack"].astype(np.int64)
        keys, of_key = np.unique(np.concatenate((own.key, given)), return_inverse=True)
        differs = np.concatenate((own.value, -rows["count"].astype(np.int64)))
        off = np.bincount(of_key, differs.astype(np.float64), len(keys))
        return float(abs(off).sum()) / 2


def named_in_windows(gpu: GpuProfile) -> Named:
    """Finds the samples of windows in which a device named launches.

    They were read out, and no moment is known of them: those whose moment is known are not shared
    by the second, and devices that tell it name launches always, or never.
    """
    samples = gpu.samples
    is_named = (samples["stack"] != NONE) & (samples["begin_ns"] < samples["end_ns"])
    row = np.flatnonzero(is_named & (samples["count"] > 0))
    names = name_ids(gpu)
    process = np.array([one.process for one in gpu.kernels], np.int64)
    kernel = np.array([code.kernel for code in gpu.codes], np.int64)[samples["code"][row]]
    begin_ns, end_ns = (samples[when][row].astype(np.int64) for when in ("begin_ns", "end_ns"))
    stretches = ReadOutSpans.of(process[kernel], begin_ns, end_ns)
    window = _windows(stretches)
    stacks, _ = stacks_by_name(launches_that_ran(gpu), int(names.max(initial=UNNAMED)) + 1)
    is_shared = np.append(stacks > 1, False)[names]  # UNNAMED is the last one

    ran = gpu.times[gpu.times["stack"] != NONE]
    ran_at = stretches.at(
        process[ran["kernel"]], ran["begin_ns"].astype(np.int64), ran["end_ns"].astype(np.int64)
    )
    is_within = (ran_at != NOWHERE) & is_shared[ran["kernel"]]
    ran, ran_at = ran[is_within], ran_at[is_within]

    at = stretches.at(process[kernel], begin_ns, end_ns)
    chosen = is_shared[kernel]
    row, kernel, at = row[chosen], kernel[chosen], at[chosen]
    return Named(
        row,
        _cells(names[kernel], samples["stack"][row], window[at], samples["count"][row]),
        _cells(names[ran["kernel"]], ran["stack"], window[ran_at], ran["duration_ns"]),
        len(np.unique((process[kernel] << 32) | window[at])),
    )


def _cells(
    name: I64,
    stack: npt.NDArray[np.uint32],
    window: I64,
    value: npt.NDArray[np.uint64],
) -> Cells:
    return Cells(name, stack.astype(np.int64), window, value.astype(np.int64))


def _windows(stretches: ReadOutSpans) -> I64:
    """Returns which window of its process each stretch is of, from 0."""
    found = np.zeros(len(stretches.process), np.int64)
    for at in range(1, len(found)):
        if stretches.process[at] == stretches.process[at - 1]:
            gap_ns = stretches.begin_ns[at] - stretches.end_ns[at - 1]
            found[at] = found[at - 1] + (gap_ns > _GAP_NS)
    return found


@dataclass(frozen=True, slots=True)
class Densities:
    """How dense the samples of a kernel are by who launched it; by key, ascending.

    Attributes:
        key: Name and stack, as of `Cells`.
        value: In units of the mean of all that launch the kernel, above 0.
    """

    key: I64
    value: F64

    def __len__(self) -> int:
        return len(self.key)

    def of(self, name: I64, stack: I64) -> F64:
        """Returns densities, 1 where nothing else is known."""
        if not len(self.key):
            return np.ones(len(name))
        key = (name << 32) | stack
        at = np.minimum(np.searchsorted(self.key, key), len(self.key) - 1)
        return np.where(self.key[at] == key, self.value[at], 1.0)


def no_densities() -> Densities:
    """Returns those of sharing by time alone."""
    return Densities(np.zeros(0, np.int64), np.zeros(0))


def fitted(named: Named, fold: int | None = None) -> Densities:
    """Fits densities to windows.

    Args:
        named: What was named there.
        fold: Half of the windows, None for all.

    Returns:
        Those of kernels of which both halves of the windows have samples: what is told of the error
        of others is that of sharing by time. Of a kernel that chance explains there are none.
    """
    ran_ns = dict(named.ran_ns.by_name())
    found = [no_densities()]
    for name, taken in named.samples.by_name():
        if name not in ran_ns or len(np.unique(taken.window % FOLDS)) < FOLDS:
            continue
        ns = ran_ns[name]
        if fold is not None:
            taken, ns = (cells.where(cells.window % FOLDS == fold) for cells in (taken, ns))
        found.append(_fitted(taken, ns))
    return Densities(
        np.concatenate([one.key for one in found]), np.concatenate([one.value for one in found])
    )


def _fitted(samples: Cells, ran_ns: Cells) -> Densities:
    """Fits the densities of one kernel."""
    keys = np.unique(ran_ns.key[ran_ns.value > 0])
    samples = samples.where(np.isin(samples.key, keys))
    ran_ns = ran_ns.where(np.isin(ran_ns.key, keys))
    taken = _sums(np.searchsorted(keys, samples.key), samples.value, len(keys))
    ns = _sums(np.searchsorted(keys, ran_ns.key), ran_ns.value, len(keys))
    if len(keys) < 2 or not taken.sum():
        return no_densities()
    expected = ns * taken.sum() / ns.sum()
    scatter = _scatter(samples, ran_ns)
    # In units of what all have together: by time alone it is 1 for each.
    density, variance = taken / expected, scatter / expected
    weight, free = 1 / variance, len(keys) - 1
    differ = float((weight * (density - 1) ** 2).sum())
    if differ <= most_by_chance(free):
        return no_densities()
    between = (differ - free) / (weight.sum() - (weight**2).sum() / weight.sum())
    own = 1 / (variance + between)
    mean = float((own * density).sum() / own.sum())
    return Densities(keys, 1 + (density / mean - 1) * between / (between + variance))


def _scatter(samples: Cells, ran_ns: Cells) -> float:
    """Returns the variance of samples in units of their number, as windows of a stack differ."""
    keys, of = np.unique(np.concatenate((samples.key, ran_ns.key)), return_inverse=True)
    windows = int(max(samples.window.max(initial=0), ran_ns.window.max(initial=0))) + 1
    window = np.concatenate((samples.window, ran_ns.window))
    # Only pairs that occur: of a day there are thousands of windows, with few of a kernel's stacks.
    pairs, at = np.unique(of * windows + window, return_inverse=True)
    taken = _sums(at[: len(samples.key)], samples.value, len(pairs))
    ns = _sums(at[len(samples.key) :], ran_ns.value, len(pairs))
    key = pairs // windows
    expected = ns * (_sums(key, taken, len(keys)) / _sums(key, ns, len(keys)))[key]
    has_any = expected > 0
    free = int((np.bincount(key[has_any], minlength=len(keys)) - 1).clip(0).sum())
    differ = float(((taken - expected)[has_any] ** 2 / expected[has_any]).sum())
    found = (differ + _PRIOR_WINDOWS * _SCATTER) / (free + _PRIOR_WINDOWS)
    return max(found, _LEAST_SCATTER)


def _sums(key: I64, values: I64 | F64, size: int) -> F64:
    return np.bincount(key, values.astype(np.float64), size).astype(np.float64)
