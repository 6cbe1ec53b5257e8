# SPDX-License-Identifier: Apache-2.0
"""What the scheduler accounts of threads, as /proc tells it. It needs no rights."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
from aiflame.agent import kernelfs
from aiflame.agent.processes import procfs

# One reading of a thread; `read_ns` is monotonic.
READING_DTYPE = np.dtype(
    [
        ("pid", "<u4"),
        ("tid", "<u4"),
        ("on_cpu_ns", "<u8"),
        ("run_queue_ns", "<u8"),
        ("timeslices", "<u8"),
        ("read_ns", "<i8"),
    ]
)

# A reading takes 10 us, and a process may have millions of threads: 0.3 s and 10 MB.
MOST_THREADS = 1 << 15

# Counters of the kernel have 64 bits, 20 digits; a capture's integers are signed.
_MOST, _MOST_DIGITS = 1 << 63, 20

# Of the line "cpu" of /proc/stat (proc_stat(5)), words from 0: irq, softirq, steal.
_INTERRUPTED = (6, 7, 8)


def read_accounts(
    pids: Iterable[int], most: int = MOST_THREADS
) -> tuple[npt.NDArray[np.void], bool]:
    """Reads the threads of processes; of what is gone there is none.

    A process that has ended has its main thread as long as nobody has waited for it.

    Args:
        pids: The processes.
        most: Of their threads, the first ones.

    Returns:
        READING_DTYPE, and whether these are all.
    """
    threads = ((pid, tid) for pid in pids for tid in procfs.thread_ids(pid))
    rows = []
    for pid, tid in itertools.islice(threads, most):
        times = parse_schedstat(kernelfs.read_text(f"/proc/{pid}/task/{tid}/schedstat", 256))
        if times is not None:
            rows.append((pid, tid, *times, time.monotonic_ns()))
    return np.array(rows, READING_DTYPE), next(threads, None) is None


def parse_schedstat(text: str) -> tuple[int, int, int] | None:
    """Returns ns on a CPU, ns in a run queue, and time slices; None if it says something else."""
    words = text.split()
    if len(words) != 3 or any(len(word) > _MOST_DIGITS for word in words):
        return None
    if not all(word.isascii() and word.isdigit() for word in words):
        return None
    on_cpu_ns, run_queue_ns, timeslices = map(int, words)
    if max(on_cpu_ns, run_queue_ns, timeslices) >= _MOST:
        return None
    return on_cpu_ns, run_queue_ns, timeslices


def interrupted_ns() -> int:
    """Returns how long all CPUs were in interrupts, or stolen by the hypervisor, since boot.

    It is 0 where /proc/stat does not say.
    """
    words = kernelfs.read_text("/proc/stat", 4096).partition("\n")[0].split()
    if len(words) <= max(_INTERRUPTED) or words[0] != "cpu":
        return 0
    ticks = sum(int(words[at]) for at in _INTERRUPTED)
    return ticks * 1_000_000_000 // os.sysconf("SC_CLK_TCK")
