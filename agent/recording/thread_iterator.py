# SPDX-License-Identifier: Apache-2.0
"""The task iterator alone, for who looks at threads once and records nothing.

bpf/threads.bpf.c has no maps and compiles as a unit of its own, so that it is loaded in a
millisecond once it was compiled. Nothing is attached, so nothing of the target ever runs it.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from aiflame.agent.errors import EnvironmentUnfit
from aiflame.agent.recording.loader import LoadFailed, load_unit

_PROGRAM = "bpf_iter__task"


def load_thread_iterator(cache: Path | None) -> int:
    """Loads the program that `threads.thread_registers` reads by; returns its descriptor.

    Args:
        cache: Directory that keeps what was compiled; without one it is compiled anew.

    Raises:
        EnvironmentUnfit: BCC is missing or foreign, the compile failed, or the kernel has no such
            programs (they came in v5.8).
    """
    request = {
        "unit": "threads.bpf.c",
        "programs": {},
        "iterators": {_PROGRAM: "bpf_iter_task"},
        "maps": [],
        "templates": {},
    }
    with contextlib.suppress(LoadFailed):
        programs = load_unit(request, {}, cache).programs
        if _PROGRAM in programs:
            return programs[_PROGRAM]
    raise EnvironmentUnfit(
        "this kernel does not tell the registers of threads (task iterators, v5.8)",
        "aiflame record -p PID shows what it does while it is recorded",
    )
