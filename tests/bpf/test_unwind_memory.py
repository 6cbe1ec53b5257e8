# SPDX-License-Identifier: Apache-2.0
"""Unwind tables that do not fit into the kernel together: those in use are there."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from aiflame.agent.model.profile import StopReason
from recordings import Ended, Recording, Workload, rows_of
from support import WORKLOADS

pytestmark = [pytest.mark.bpf, pytest.mark.slow]

# Three rows each, so that a library's table takes 0.7 MB: one fits into 1 MB, two do not.
_FILLER = """\
.text
.rept 60000
.cfi_startproc
push %rbx
.cfi_def_cfa_offset 16
pop %rbx
.cfi_def_cfa_offset 8
ret
.cfi_endproc
.endr
.section .note.GNU-stack
"""
# What no sample needed for three drains, one a second, may leave.
_TURNS_MS = (1500, 6000)


def _library(folder: Path, side: str) -> Path:
    filler, path = folder / "filler.S", folder / f"lib{side}.so"
    filler.write_text(_FILLER)
    names = [f"-DINNER={side}_inner", f"-DOUTER={side}_outer", "-DROOM=400"]
    flags = ["-O2", "-fomit-frame-pointer", "-shared", "-fPIC"]
    command = ["gcc", *flags, *names, "-o", path, WORKLOADS / "twin.c", filler]
    subprocess.run(command, check=True)
    return path


def _record_in_turn(
    folder: Path, program: Path, turns_ms: tuple[int, int], *options: object
) -> Ended:
    """Records two processes, of which the second begins when the first is done."""
    commands = [
        [program, "loads", turns_ms[0], folder / "libleft.so"],
        [program, "loads", turns_ms[1], folder / "libright.so"],
    ]
    with ExitStack() as stack:
        loads = [stack.enter_context(Workload(command)) for command in commands]
        target = ",".join(str(load.pid) for load in loads)
        recording = stack.enter_context(
            Recording(folder, "-p", target, "--no-off-cpu", "--force", *options)
        )
        for load in loads:
            load.go()
            load.truth()
        return recording.stop()


def test_tables_that_samples_need_take_the_place_of_others(
    workload: Callable[..., Path], tmp_path: Path
) -> None:
    # GIVEN two libraries whose tables are in the cache
    program = workload("hostile", "-fomit-frame-pointer")
    for side in ("left", "right"):
        _library(tmp_path, side)
    _record_in_turn(tmp_path, program, (300, 300))
    # WHEN there is room for one of them
    ended = _record_in_turn(tmp_path, program, _TURNS_MS, "--unwind-memory", 1)
    profile = ended.profile
    # THEN both were walked while they ran, though the second not at once
    for side in ("left", "right"):
        rows = rows_of(profile, f"{side}_inner")
        rooted = profile.stacks.ends[rows["stack"]] == StopReason.ROOTED
        assert rows["count"][rooted].sum() > 50
        assert np.isin(
            profile.stacks.ends[rows["stack"]], [StopReason.ROOTED, StopReason.NO_TABLE]
        ).all()
    # AND who had to wait is named
    (loss,) = profile.losses
    assert loss.name == "unwind_memory_full"
    assert "libright.so" in loss.meaning or "libleft.so" in loss.meaning
