# SPDX-License-Identifier: Apache-2.0
"""Which CPU stacks the samples of kernels belong to: a pure function of a profile's device half.

Rules, in this order. A sample whose launch the device named belongs to that one's stack. Else the
candidates are the stacks that launched a kernel of the same name in the same process: if there is
one, it is that. If there are several, times tell (by_time.py, timeline.py): what can have run when
the sample was taken, and what of that probably did. Where times are not known, they share the
samples of each second, by the weights of sharing.py and in whole numbers (rounding.py). What no
launch explains stays unattributed. Each part says how it is known: only one can be, which is exact,
or an estimate.

"One stack" means one that was seen: launches before the recording, lost ones and those of unnamed
kernels are unknown here, and samples of them go to the stacks that are known.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from aiflame.agent.model.gpu import NO_END, NONE, GpuProfile, MeasuredError, SharingError
from aiflame.gpu.attribution.by_time import stacks_by_time
from aiflame.gpu.attribution.calibration import (
    FOLDS,
    Densities,
    Named,
    fitted,
    named_in_windows,
    no_densities,
)
from aiflame.gpu.attribution.error import Variances, add_by_second, add_by_time, add_unseen
from aiflame.gpu.attribution.launches import (
    UNNAMED,
    Mask,
    launches_that_ran,
    name_ids,
    order_by,
    stacks_by_name,
)
from aiflame.gpu.attribution.mixing import mixed
from aiflame.gpu.attribution.rounding import Parts, divide
from aiflame.gpu.attribution.sharing import Windows, pools_of, windows_of
from aiflame.gpu.attribution.timeline import timeline_of

__all__ = [
    "ATTRIBUTED_DTYPE",
    "TIME_DTYPE",
    "Attribution",
    "Certainty",
    "attribute",
    "attribution_of",
    "mean_times",
]

I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]
U64 = npt.NDArray[np.uint64]


class Certainty(enum.IntEnum):
    """How a sample's stack is known."""

    EXACT = 0  # by the launch's number, or since one stack alone can have launched it
    SHARED = 1  # an estimate
    UNATTRIBUTED = 2

    @property
    def label(self) -> str:
        """The word used in every report."""
        return self.name.lower()


# `sample` is a row of GpuProfile.samples, `stack` an index of Profile.stacks or NONE. Rows come in
# the order of (sample, stack); the counts of one sample add up to that of its row.
ATTRIBUTED_DTYPE = np.dtype(
    [("sample", "<u4"), ("stack", "<u4"), ("certainty", "u1"), ("count", "<u8")]
)

# Measured time on the device by (stack, kernel): of `launches` of them, which need not be all.
TIME_DTYPE = np.dtype(
    [("stack", "<u4"), ("kernel", "<u4"), ("launches", "<u8"), ("time_ns", "<u8")]
)


@dataclass(frozen=True, slots=True)
class Attribution:
    """The stacks of a profile's device samples.

    Attributes:
        rows: ATTRIBUTED_DTYPE.
        error: How much of the samples is probably with another stack than its own; also as far as
            that was measured.
    """

    rows: npt.NDArray[np.void]
    error: SharingError


def attribute(gpu: GpuProfile, times: npt.NDArray[np.void] | None = None) -> npt.NDArray[np.void]:
    """Returns the rows of `attribution_of`."""
    return attribution_of(gpu, times).rows


def attribution_of(gpu: GpuProfile, times: npt.NDArray[np.void] | None = None) -> Attribution:
    """Finds the stacks of a profile's device samples.

    Args:
        gpu: The profile's device half.
        times: Measured time on the device, TIME_DTYPE, where there is any.

    Returns:
        The counts of each sample's rows add up to its own exactly. The same input gives the same
        output, and the order of a profile's rows makes no difference. Of a time range, what it was
        in the whole recording.
    """
    if gpu.attributed is not None and gpu.error is not None:
        return Attribution(gpu.attributed, gpu.error)
    named = named_in_windows(gpu)
    densities = fitted(named)
    found = _attribution_of(gpu, times, densities)
    measured = _measured(gpu, times, named, is_corrected=len(densities) > 0)
    return Attribution(found.rows, replace(found.error, measured=measured))


def _measured(
    gpu: GpuProfile, times: npt.NDArray[np.void] | None, named: Named, *, is_corrected: bool
) -> MeasuredError | None:
    """Compares what devices named in windows with what sharing makes of the same samples.

    By time alone all windows are taken together; by densities only halves of them, of which each
    is shared by what the other half says.
    """
    whole = int(named.samples.value.sum())
    if not whole:
        return None

    def wrong(chosen: Mask, densities: Densities) -> float:
        samples = gpu.samples.copy()
        samples["stack"][named.row[chosen]] = NONE
        rows = _attribution_of(replace(gpu, samples=samples), times, densities).rows
        return named.wrong(chosen, rows)

    by_time = wrong(np.ones(len(named.row), bool), no_densities()) / whole
    if not is_corrected:
        return MeasuredError(named.windows, whole, by_time)
    halves = [wrong(named.in_fold(fold), fitted(named, FOLDS - 1 - fold)) for fold in range(FOLDS)]
    return MeasuredError(named.windows, whole, sum(halves) / whole, by_time)


def _attribution_of(
    gpu: GpuProfile, times: npt.NDArray[np.void] | None, densities: Densities
) -> Attribution:
    samples = gpu.samples
    names = name_ids(gpu)
    launches = launches_that_ran(gpu)
    stacks, one = stacks_by_name(launches, int(names.max(initial=UNNAMED)) + 1)

    stack = samples["stack"].astype(np.int64)
    name = names[np.array([code.kernel for code in gpu.codes], np.int64)[samples["code"]]]
    open_ = np.flatnonzero((stack == NONE) & (name != UNNAMED))
    alone = open_[stacks[name[open_]] == 1]
    stack[alone] = one[name[alone]]
    shared = open_[stacks[name[open_]] > 1]
    certainty = np.zeros(len(samples), np.uint8)
    variances = Variances(1 + _last(gpu.launches["stack"], launches.stack))
    is_found, exact = _by_time(gpu, names, _Shared(shared, name[shared]), times, stack, variances)
    certainty[shared] = np.where(exact, Certainty.EXACT, Certainty.SHARED)
    of_several, shared = shared, shared[~is_found]

    parts = Parts(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.int64))
    if len(shared):
        windows = windows_of(launches.where(stacks[launches.name] > 1))
        own = windows.launches
        time_ns = mean_times(own.name, own.stack, names, times)
        time_ns *= densities.of(own.name, own.stack)
        parts = _share(gpu, windows, _Shared(shared, name[shared]), time_ns, variances)
        of_name = np.bincount(own.name, own.count)
        sampled = np.bincount(name[of_several], samples["count"][of_several], len(of_name))
        one = sampled / np.maximum(of_name, 1.0)
        unseen = parts.where(_unseen(gpu, names, parts.row))
        add_unseen(variances, name[unseen.row], unseen.party, unseen.count, one)
    undivided = np.delete(np.arange(len(samples)), shared)
    rows = _rows(samples, stack, certainty, undivided, parts)
    return Attribution(rows, variances.error(int(samples["count"].sum())))


def _unseen(gpu: GpuProfile, names: I64, row: I64) -> Mask:
    """Returns which samples were taken before the first launch of their kernel that was seen."""
    first_ns = np.full(int(names.max(initial=UNNAMED)) + 2, NO_END)
    np.minimum.at(first_ns, names[gpu.launches["kernel"]], gpu.launches["first_ns"])
    kernel = np.array([code.kernel for code in gpu.codes], np.int64)[gpu.samples["code"][row]]
    first_ns[UNNAMED] = NO_END
    first_ns = np.where(first_ns < NO_END, first_ns, 0)[names[kernel]]
    found: Mask = gpu.samples["end_ns"][row].astype(np.int64) < first_ns
    return found


def _last(*stacks: npt.NDArray[np.integer[Any]]) -> int:
    """Returns the highest number of a stack, -1 where there is none."""
    found = np.concatenate([stack.astype(np.int64) for stack in stacks])
    return int(found[found != NONE].max(initial=-1))


@dataclass(frozen=True, slots=True)
class _Shared:
    """Samples whose kernel several stacks launched."""

    row: I64
    name: I64


@dataclass(frozen=True, slots=True)
class _Groups:
    """Rows by a key.

    Attributes:
        keys: Ascending, each once.
        order: Rows by key, ascending for each.
        first: Where those of each key begin in there, and after the last of them the end.
    """

    keys: I64
    order: I64
    first: I64

    @classmethod
    def of(cls, key: I64) -> _Groups:
        order = np.argsort(key, kind="stable")
        keys, first = np.unique(key[order], return_index=True)
        return cls(keys, order, np.append(first, len(key)))

    def rows(self, key: int) -> I64:
        """Returns the rows of a key, ascending."""
        at = int(np.searchsorted(self.keys, key))
        if at == len(self.keys) or int(self.keys[at]) != key:
            return self.order[:0]
        return self.order[int(self.first[at]) : int(self.first[at + 1])]


# Of a process: each is gone through for all of its samples.
_MOST_QUEUES = 32


def _by_time(
    gpu: GpuProfile,
    names: I64,
    shared: _Shared,
    times: npt.NDArray[np.void] | None,
    stack: I64,
    variances: Variances,
) -> tuple[Mask, Mask]:
    """Finds the stacks of samples by when they were taken, and enters them, and their variances.

    Returns:
        Of which of the shared samples that was possible, and of which it is exact; shape (shared,).
    """
    is_found, is_exact = np.zeros((2, len(shared.row)), bool)
    if not len(gpu.launches) or not len(shared.row):
        return is_found, is_exact
    launch_name = names[gpu.launches["kernel"]]
    mean_ns = mean_times(launch_name, gpu.launches["stack"].astype(np.int64), names, times)
    process_of_kernel = np.array([kernel.process for kernel in gpu.kernels], np.int64)
    has_order = gpu.launches["queue"] != 0
    kernel = np.array([code.kernel for code in gpu.codes], np.int64)[gpu.samples["code"]]
    sample_name = names[kernel]
    launches_of_process = _Groups.of(process_of_kernel[gpu.launches["kernel"]])
    samples_of_process = _Groups.of(process_of_kernel[kernel])
    shared_of_process = _Groups.of(process_of_kernel[kernel[shared.row]])
    for process in shared_of_process.keys.tolist():
        own = launches_of_process.rows(process)
        own, unordered = own[has_order[own]], own[~has_order[own]]
        if not 0 < len(np.unique(gpu.launches["queue"][own])) <= _MOST_QUEUES:
            continue
        # Those of all kernels bound each other.
        rows = samples_of_process.rows(process)
        sampled_ns = gpu.samples["begin_ns"][rows].astype(np.int64)
        timeline = timeline_of(
            *(gpu.launches[own], launch_name[own], mean_ns[own]),
            *(sampled_ns, sample_name[rows], gpu.launches[unordered]),
        )
        of_time = stacks_by_time(
            timeline, gpu.samples[rows], sample_name[rows], gpu.launches[unordered]
        )
        at = shared_of_process.rows(process)
        found = np.searchsorted(rows, shared.row[at])
        is_found[at] = of_time.stack[found] != NONE
        is_exact[at] = of_time.is_exact[found]
        stack[shared.row[at]] = of_time.stack[found]
        estimated = at[is_found[at] & ~is_exact[at]]
        if len(estimated):
            add_by_time(
                variances, timeline, gpu.samples[shared.row[estimated]], shared.name[estimated]
            )
    return is_found, is_exact


def mean_times(name: I64, stack: I64, names: I64, times: npt.NDArray[np.void] | None) -> F64:
    """Returns the mean time of a launch in ns by name and stack, NaN where unknown."""
    if times is None or not len(times):
        return np.full(len(name), np.nan)
    times = times[times["launches"] > 0]
    kernel = times["kernel"]
    times = times[names[kernel] != UNNAMED]
    own = (name << 32) | stack
    kernel = times["kernel"]
    measured = (names[kernel] << 32) | times["stack"].astype(np.int64)
    keys, at = np.unique(np.concatenate((own, measured)), return_inverse=True)
    mine, theirs = at[: len(own)], at[len(own) :]
    total = np.bincount(theirs, times["time_ns"].astype(np.float64), len(keys))
    count = np.bincount(theirs, times["launches"].astype(np.float64), len(keys))
    mean = np.divide(total, count, out=np.full(len(keys), np.nan), where=count > 0)
    found: F64 = mean[mine]
    return found


def _share(
    gpu: GpuProfile, windows: Windows, shared: _Shared, times_ns: F64, variances: Variances
) -> Parts:
    """Divides shared samples; returns parts by row of gpu.samples and stack."""
    order = _order(gpu.samples, shared)
    row, name = shared.row[order], shared.name[order]
    counts = gpu.samples["count"][row].astype(np.int64)
    window = windows.of(name, gpu.samples["interval"][row].astype(np.int64))
    pools = pools_of(windows, times_ns)
    parts = divide(counts, window, name, pools)
    in_pool = np.bincount(window, counts, pools.count).astype(np.float64)
    add_by_second(variances, windows, pools, in_pool, times_ns)
    stack = windows.stack_of(name[parts.row], parts.party)
    return Parts(row[parts.row], stack, parts.count)


def _order(samples: npt.NDArray[np.void], shared: _Shared) -> I64:
    """Orders shared samples by name, instruction and reason, interval; then by what is left."""
    scattered = _scattered(samples, shared.row)
    order, is_first = order_by(
        shared.name,
        (scattered >> np.uint64(32)).astype(np.int64),
        samples["interval"][shared.row].astype(np.int64),
    )
    alike = np.flatnonzero(~(is_first & np.append(is_first[1:], True)))
    again = order[alike]
    group = np.cumsum(is_first)[alike]
    rows = shared.row[again]
    order[alike] = again[np.lexsort((rows, samples["count"][rows], scattered[again], group))]
    return order


def _scattered(samples: npt.NDArray[np.void], row: I64) -> U64:
    """Returns a number for each row's instruction and reason, the same for the same, in no order.

    What neighbours are given is close to their due, so samples of one instruction have to be
    neighbours; and no pattern of the code may meet the pattern in which stacks take turns.
    """
    return mixed(*(samples[field][row] for field in ("device", "code", "offset", "reason")))


def _rows(
    samples: npt.NDArray[np.void],
    stack: I64,
    certainty: npt.NDArray[np.uint8],
    whole: I64,
    parts: Parts,
) -> npt.NDArray[np.void]:
    """Puts undivided samples and parts together."""
    whole = whole[samples["count"][whole] > 0]
    found = np.zeros(len(whole) + len(parts.row), ATTRIBUTED_DTYPE)
    found["sample"] = np.concatenate((whole, parts.row))
    found["stack"] = np.concatenate((stack[whole], parts.party))
    found["certainty"][: len(whole)] = certainty[whole]
    found["certainty"][len(whole) :] = Certainty.SHARED
    found["certainty"][found["stack"] == NONE] = Certainty.UNATTRIBUTED
    found["count"][: len(whole)] = samples["count"][whole]
    found["count"][len(whole) :] = parts.count
    key = (found["sample"].astype(np.int64) << 32) | found["stack"]
    ordered: npt.NDArray[np.void] = found[np.argsort(key)]
    return ordered
