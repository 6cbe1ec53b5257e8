# SPDX-License-Identifier: Apache-2.0
"""What the kernel accounts itself, whoever records, read at both ends of a recording."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

# Of a thread that was there when the recording ended, from /proc/PID/task/TID/schedstat
# (Documentation/scheduler/sched-stats.rst), and of one that has_ended within it, from taskstats:
# time on a CPU, time in a run queue, and how often it was put on a CPU. misaligned_ns: by how much
# the two readings together miss the recording's ends; open_wait_ns: how long it may have stood in a
# run queue when it was read, which an account has when that is over. `thread` is an index.
THREAD_ACCOUNT_DTYPE = np.dtype(
    [
        ("thread", "<u4"),
        ("on_cpu_ns", "<u8"),
        ("run_queue_ns", "<u8"),
        ("timeslices", "<u8"),
        ("misaligned_ns", "<u8"),
        ("open_wait_ns", "<u8"),
        ("has_ended", "?"),
    ]
)

# What tasks wait for, as delay accounting tells it apart (Documentation/accounting/
# delay-accounting.rst, v6.18): the kernel's name of it, and in words. Waits for a CPU are in every
# thread's schedstat.
DELAY_CAUSES = {
    "blkio": "block I/O",
    "swapin": "swap-in",
    "freepages": "memory reclaim",
    "thrashing": "thrashing: pages read back soon after reclaim",
    "compact": "memory compaction",
    "wpcopy": "copying pages on write",
    "irq": "interrupts",
}


def _no_accounts() -> npt.NDArray[np.void]:
    return np.zeros(0, THREAD_ACCOUNT_DTYPE)


@dataclass(frozen=True, slots=True)
class Delay:
    """What the threads of a process waited for together, those that have ended with them.

    Attributes:
        process: Index of the process.
        cause: One of DELAY_CAUSES.
        count: Waits.
        ns: How long all of them took.
    """

    process: int
    cause: str
    count: int
    ns: int


@dataclass(frozen=True, slots=True)
class Accounts:
    """All that the kernel accounts of a recording.

    Attributes:
        threads: THREAD_ACCOUNT_DTYPE: of those that were there when it ended, and those that ended
            within it where the kernel accounts delays.
        interrupted_ns: Of all CPUs together, in interrupts or stolen by the hypervisor: it is in
            no thread's account, and between the switches of one.
        delays: None where the kernel does not account delays.
    """

    threads: npt.NDArray[np.void] = field(default_factory=_no_accounts)
    interrupted_ns: int = 0
    delays: tuple[Delay, ...] = ()
