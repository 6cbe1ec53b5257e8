# SPDX-License-Identifier: Apache-2.0
"""The names of CPython's trampolines in a target's perf-PID.map, where it runs with -X perf.

Each Python function then is called through a stub of its own, for profilers that know native code
only. Beside the Python frames that are read here such a stub is one more frame of the interpreter;
where those are missing it tells at least the function and its file, without a line.
"""

from __future__ import annotations

from aiflame.agent.symbols.frames import SourceFrame

# "py::%s:%s", qualified name and file name (v3.12.1 Python/perf_trampoline.c)
_PREFIX = "py::"


def trampoline_source(name: str) -> SourceFrame | None:
    """The Python function that a name in a perf-PID.map is the trampoline of, None for others."""
    if not name.startswith(_PREFIX):
        return None
    function, colon, file = name[len(_PREFIX) :].partition(":")
    return SourceFrame(function, file, 0, False) if function and colon else None
