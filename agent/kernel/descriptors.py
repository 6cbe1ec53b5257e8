# SPDX-License-Identifier: Apache-2.0
"""How many files a recording may hold open, and how many of them are kept for itself.

Each file that a target maps is held open until its symbols are read, so a recording of a host needs
thousands of descriptors, and a shell hands out 1,024. The limit is raised as far as it may be; past
it, files of targets are lost one by one, and counted, while pipes, /proc and the maps of the kernel
half still find room.

The kernel gives out the lowest number that is free (POSIX, open), so a number tells how many are in
use.
"""

from __future__ import annotations

import contextlib
import os
import resource

from aiflame.agent.errors import EnvironmentUnfit
from aiflame.agent.kernel.probes import online_cpus

# Kept free of files of targets: three children with 8 descriptors each while they start, reads of
# /proc, and arrays on their way into the kernel, some at a time.
_RESERVE = 40
_RESERVE_OF_ARRAYS = 20
# Programs, maps, tracepoints, pipes and the capture (60 to 68 were seen), without what each CPU
# has, a clock and a ring, and without files of targets.
_OWN = 68


def raise_limit() -> None:
    """Raises this process's limit as far as it may be raised.

    To be called after the fork of a command that is recorded: it is to run under the limit that it
    would have had. Files that it selects on may not have numbers above 1,023.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def require_enough() -> None:
    """Refuses to go on with too few descriptors for a recording itself.

    Raises:
        EnvironmentUnfit: Says how many it takes.
    """
    needed = _OWN + _RESERVE + 2 * len(online_cpus())
    if _limit() < needed:
        raise EnvironmentUnfit(
            f"at most {_limit()} files may be open, and a recording needs {needed}",
            "ulimit -n 65536  (systemd: LimitNOFILE=65536)",
        )


def for_targets() -> int:
    """Returns how many descriptors there are for files of targets."""
    return max(_limit() - _RESERVE - _OWN, 0)


def is_for_targets(fd: int) -> bool:
    """Whether a new descriptor may be kept for a file of a target."""
    return fd < _limit() - _RESERVE


def is_last_array(fd: int) -> bool:
    """Whether those of arrays that are on their way into the kernel are to be closed first."""
    return fd >= _limit() - _RESERVE_OF_ARRAYS


def keep(fd: int | None) -> int | None:
    """Returns a descriptor for a file of a target, None and closes it where it may not be kept."""
    if fd is None or is_for_targets(fd):
        return fd
    os.close(fd)
    return None


def _limit() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft
