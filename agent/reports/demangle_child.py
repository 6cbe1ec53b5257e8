# SPDX-License-Identifier: Apache-2.0
"""The process in which kernel_names.py demangles: a script of its own, with little of everything.

One name a line from standard input, one line back for each, as they come. A name can ask
libstdc++ for gigabytes and minutes; then this process dies, and whoever started it has the lines
before that.
"""

from __future__ import annotations

import resource
import signal
import sys

# What one name may take; real ones take 2 us and a few KB. The interpreter itself is in the first.
_MEMORY_BYTES = 512 * 1024 * 1024
_CPU_S = 0.25

# A readable name is cut at this; it is shown in one line.
_MAX_READABLE_CHARS = 16_384


def main() -> int:
    """Demangle what comes in; returns the exit code."""
    try:
        import cxxfilt
    except ImportError:
        return 1
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin:
        name = line.rstrip("\n")
        signal.setitimer(signal.ITIMER_VIRTUAL, _CPU_S)
        try:
            readable = cxxfilt.demangle(name)
        except cxxfilt.Error:
            readable = name
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        print(readable[:_MAX_READABLE_CHARS], flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
