# SPDX-License-Identifier: Apache-2.0
"""Which launches a capture keeps one by one: those that may have run when a device was sampled.

A program may launch tens of thousands of kernels a second, of which a sampled device tells of some
hundred. A launch can own samples between its enqueueing and the next known end of its queue's work;
one that has none there is in the counts alone. A launch waits here until its end is known, or until
there are too many: then it is kept with an end that is not known, if it may own a sample.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from aiflame.agent.model.window import COLUMNS, NO_TIME, Rows, Timing, Window

I64 = npt.NDArray[np.int64]

# Of a process: more than queues hold, or come in two windows.
_MOST_WAITING = 1 << 14
# Longer than kernels run: what nobody waits for is not waited for either.
_LONGEST_NS = 30_000_000_000
# Later than any time of a recording.
_NEVER_NS = np.iinfo(np.int64).max


@dataclass(slots=True)
class _Process:
    """What is not decided of a process."""

    launches: Rows = field(default_factory=lambda: np.zeros(0, COLUMNS["launches"].dtype))
    waits: Rows = field(default_factory=lambda: np.zeros(0, COLUMNS["queue_waits"].dtype))
    # Ascending times, as (begin, end), of samples since the first of the launches.
    samples: I64 = field(default_factory=lambda: np.zeros((0, 2), np.int64))


class LaunchOrder:
    """Launches of windows, as they are decided."""

    def __init__(self) -> None:
        self._processes: dict[int, _Process] = {}
        self._sampled: set[int] = set()

    def put(self, window: Window) -> Iterator[tuple[Rows, I64]]:
        """Takes a window.

        Yields:
            Launches to be kept, and when each had ended at the latest, NO_TIME where that is not
            known.
        """
        samples = _samples_by_process(window)
        launches = window.launches[window.launches["count"] > 0]
        has_order = launches["queue"] != 0
        launches, others = launches[has_order], launches[~has_order]
        self._sampled.update(samples)
        others = others[np.isin(others["process"], list(self._sampled))]
        yield others, np.full(len(others), NO_TIME, np.int64)
        told = (*launches["process"].tolist(), *window.queue_waits["process"].tolist())
        for process in sorted({*told, *self._processes}):
            known = self._processes.setdefault(process, _Process())
            own = launches[launches["process"] == process]
            waits = window.queue_waits[window.queue_waits["process"] == process]
            known.launches = np.concatenate([known.launches, own])
            known.waits = np.concatenate([known.waits, waits])
            sampled = samples.get(process, known.samples[:0])
            known.samples = np.concatenate([known.samples, sampled])
            yield self._decide(known, window.start_ns)
            if not len(known.launches):
                del self._processes[process]

    def finish(self) -> Iterator[tuple[Rows, I64]]:
        """Yields what is left, as `put` does."""
        for known in self._processes.values():
            yield self._decide(known, _NEVER_NS)
        self._processes.clear()

    def _decide(self, known: _Process, before_ns: int) -> tuple[Rows, I64]:
        ended_ns = _ends(known.launches, known.waits)
        # Samples may come a window later than they were taken: so much later it is decided.
        is_over = ended_ns < before_ns
        is_over |= known.launches["enqueued_ns"] < before_ns - _LONGEST_NS
        is_over[: max(len(is_over) - _MOST_WAITING, 0)] = True
        first_ns = known.launches["enqueued_ns"]
        samples = known.samples[np.argsort(known.samples[:, 1], kind="stable")]
        # The least beginning of all samples that end at that time or later.
        begins = np.append(samples[:, 0], _NEVER_NS)
        begins = np.minimum.accumulate(begins[::-1])[::-1]
        may_own = begins[np.searchsorted(samples[:, 1], first_ns)] <= ended_ns
        may_own &= begins[np.searchsorted(samples[:, 1], first_ns)] < _NEVER_NS
        # All that one wait ends, if any of it: what launches cost is told by how long all took.
        may_own |= np.isin(ended_ns, ended_ns[may_own & (ended_ns < _NEVER_NS)])
        keeps = is_over & may_own
        found = known.launches[keeps], np.where(ended_ns < _NEVER_NS, ended_ns, NO_TIME)[keeps]
        known.launches = known.launches[~is_over]
        if len(known.launches):
            since_ns = int(known.launches["enqueued_ns"].min())
            known.samples = known.samples[known.samples[:, 1] >= since_ns]
            known.waits = known.waits[known.waits["begin_ns"] >= since_ns]
        return found


def _ends(launches: Rows, waits: Rows) -> I64:
    """Returns when each launch had ended at the latest, _NEVER_NS where no wait tells."""
    found = np.full(len(launches), _NEVER_NS, np.int64)
    if not len(launches):
        return found
    waits = waits[np.argsort(waits["begin_ns"], kind="stable")]
    of_all = waits[waits["queue"] == 0]
    waits = waits[np.argsort(waits["queue"], kind="stable")]
    order = np.argsort(launches["queue"], kind="stable")
    queues, first = np.unique(launches["queue"][order], return_index=True)
    for queue, is_own in zip(queues, np.split(order, first[1:]), strict=True):
        left, right = (np.searchsorted(waits["queue"], queue, side) for side in ("left", "right"))
        own = waits[left:right]
        if len(of_all):
            own = np.concatenate([own, of_all])
            own = own[np.argsort(own["begin_ns"], kind="stable")]
        # The first end of all waits that began at that time or later.
        ends = np.append(own["end_ns"], _NEVER_NS)
        ends = np.minimum.accumulate(ends[::-1])[::-1]
        found[is_own] = ends[np.searchsorted(own["begin_ns"], launches["last_enqueued_ns"][is_own])]
    return found


def _samples_by_process(window: Window) -> dict[int, I64]:
    """Returns the times of samples whose moment is known, by process."""
    samples = window.device_samples
    samples = samples[samples["timing"] == Timing.INSTANT]
    process_of_kernel = dict(window.kernels[["kernel", "process"]].tolist())
    process_of_code = {
        code: process_of_kernel[kernel]
        for code, kernel in window.codes[["code", "kernel"]].tolist()
        if kernel in process_of_kernel
    }
    processes = np.array([process_of_code.get(code, -1) for code in samples["code"].tolist()])
    times = np.stack([samples["begin_ns"], samples["end_ns"]], axis=1)
    return {
        process: times[processes == process]
        for process in np.unique(processes).tolist()
        if process >= 0
    }
