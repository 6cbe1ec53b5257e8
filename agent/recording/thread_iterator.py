# SPDX-License-Identifier: Apache-2.0
"""The task iterator alone, for who looks at threads once and records nothing.

bpf/threads.bpf.c has no maps and compiles as a unit of its own, so that it is loaded in a
millisecond once it was compiled. Nothing is attached, so nothing of the target ever runs it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import aiflame.bpf
from aiflame.agent.errors import EnvironmentUnfit
from aiflame.agent.recording.compile import paste_includes
from aiflame.agent.recording.loader import LoadFailed, ask_child, load_kept
from aiflame.agent.recording.program_cache import bundle_name
from aiflame.agent.recording.syscalls import lift_memlock_limit
from aiflame.agent.symbols.store import Store

_UNIT, _PROGRAM = "threads.bpf.c", "bpf_iter__task"


def load_thread_iterator(cache: Path | None) -> int:
    """Loads the program that `threads.thread_registers` reads by; returns its descriptor.

    Args:
        cache: Directory that keeps what was compiled; without one it is compiled anew.

    Raises:
        EnvironmentUnfit: BCC is missing or foreign, the compile failed, or the kernel has no such
            programs (they came in v5.8).
    """
    folder = Path(next(iter(aiflame.bpf.__path__))).resolve()
    # bpf_task_pt_regs is missing before v5.15: the registers are found without it.
    variants: list[dict[str, int | str]] = [{"HAVE_TASK_PT_REGS": have} for have in (1, 0)]
    store = Store(cache)
    source = paste_includes(folder, _UNIT)
    lift_memlock_limit()
    if store.usable:
        for macros in variants:
            kept = load_kept(store, bundle_name(source, macros))
            if kept is not None:
                return kept[0][_PROGRAM]
    for macros in variants:
        found = _compiled(folder, cache, macros, bundle_name(source, macros), store.usable)
        if found is not None:
            return found
    raise EnvironmentUnfit(
        "this kernel does not tell the registers of threads (task iterators, v5.8)",
        "aiflame record -p PID shows what it does while it is recorded",
    )


def _compiled(
    folder: Path, cache: Path | None, macros: dict[str, int | str], bundle: str, is_kept: bool
) -> int | None:
    request: dict[str, Any] = {
        "bpf_folder": str(folder),
        "unit": _UNIT,
        "programs": {},
        "iterators": {_PROGRAM: "bpf_iter_task"},
        "maps": [],
        "templates": {},
        "cache": str(cache),
        "macros": macros,
        "bundle": bundle if is_kept else None,
    }
    try:
        programs, maps = ask_child(request)
    except LoadFailed:
        return None
    for fd in maps.values():
        os.close(fd)
    return programs.get(_PROGRAM)
