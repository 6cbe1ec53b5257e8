# SPDX-License-Identifier: Apache-2.0
"""Limits of processes, setrlimit(2): what whoever started us allows is never exceeded."""

from __future__ import annotations

import errno
import resource

from aiflame.agent import kernelfs

# No descriptor or no memory is left: nothing is wrong with what was asked for, and there may be
# some the next time.
OUT_OF_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)

# Samples a second: the kernel's own limit for clock events is a period of 10 us
# (perf_swevent_init_hrtimer).
MAX_FREQUENCY_HZ = 100_000

# No room is left on a disk, or of a user's share of it: files that are removed make some.
DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


def limit_self(*limits: tuple[int, int]) -> None:
    """Lowers limits of this process and what it starts, for good.

    One that is lower already stays so: only CAP_SYS_RESOURCE may raise it.

    Args:
        limits: Of resource.RLIMIT_*, and how much of each is allowed.
    """
    for which, most in limits:
        _, hard = resource.getrlimit(which)
        value = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(which, (value, value))


def more_memory(most: int) -> tuple[int, int]:
    """Returns the limit under which this process may have so much memory more than it has.

    What a fork has from whoever forked it is in the kernel's count (mm->data_vm, which RLIMIT_DATA
    limits), and is not its own as long as it does not write to it.

    Args:
        most: In bytes.
    """
    pages = int(kernelfs.read_text("/proc/self/statm").split()[5])  # proc_pid_statm(5): data
    return resource.RLIMIT_DATA, most + pages * resource.getpagesize()


def is_disk_full(error: BaseException) -> bool:
    """Whether an error, or the one that it was raised from, is for want of room on a disk."""
    for one in (error, error.__cause__):
        if isinstance(one, OSError):
            return one.errno in DISK_FULL
    return False


def room_hint() -> str:
    """Returns what helps where a file cannot be written for want of room.

    SQLite says of a file that is larger than allowed that the disk is full, or does not work.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    free = "free some space on that disk"
    if soft == resource.RLIM_INFINITY:
        return free
    return f"raise the limit of files (ulimit -f), which is {soft / 1e6:,.1f} MB, or {free}"
