# SPDX-License-Identifier: Apache-2.0
"""Closes what a fork has open of the process that forked it."""

from __future__ import annotations

import os
from collections.abc import Collection


def close_all_but(kept: Collection[int]) -> None:
    """Closes all descriptors but some; only for a process with one thread.

    Up to the highest that is open, not up to the limit: a recording raises that as far as it may,
    which can be to a billion, and where the C library that Python was built with has no
    close_range(2), `os.closerange` closes each number by itself.
    """
    try:
        with os.scandir("/proc/self/fd") as entries:
            last = max(int(entry.name) for entry in entries)
    except OSError:  # no descriptor is left to look with: all up to the limit are open
        last = os.sysconf("SC_OPEN_MAX")
    first = 0
    for number in sorted(kept):
        if first < number:  # else it would close all
            os.closerange(first, number)
        first = number + 1
    if first <= last:
        os.closerange(first, last + 1)
