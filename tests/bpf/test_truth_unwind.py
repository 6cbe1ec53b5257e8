# SPDX-License-Identifier: Apache-2.0
"""Stacks of code without frame pointers, walked by unwind tables.

Each program is recorded twice: at first its tables may have to be built, and stacks are walked
by frame pointer meanwhile; from then on they are in the cache.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import support
from aiflame.agent.capture.reader import read_capture
from aiflame.agent.model.profile import COMPLETE_REASONS, Profile, SampleClass, StopReason
from recordings import Workload, frames_of, record_workload, rows_of

pytestmark = pytest.mark.bpf

# Debian's and Ubuntu's interpreter has no frame pointers, and is on every machine that runs these.
_PYTHON = "/usr/bin/python3"
# OpenBLAS's kernels for matrices have no CFI. Its threads only wait, and are of no interest here.
_MATRICES = "import numpy; a = numpy.random.rand(300, 300)\nwhile True: a @ a; numpy.linalg.inv(a)"
_ONE_THREAD = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
_BUSY = "import json\nwhile True: json.dumps(list(range(200)))"


def walked_share(profile: Profile, end: StopReason) -> float:
    """Returns the share of time in stacks with this end, among those that were walked at all."""
    others = [StopReason.NOT_WALKED, StopReason.NOT_RUN_YET, StopReason.KERNEL_ONLY]
    walked = ~np.isin(profile.stacks.ends, others)
    rows = profile.samples[walked[profile.samples["stack"]]]
    has_end = profile.stacks.ends[rows["stack"]] == end
    return float(rows["ns"][has_end].sum() / rows["ns"].sum())


def _record_twice(folder: Path, *command: str, **keywords: Any) -> Profile:
    """Records a program twice; returns what came second."""
    with subprocess.Popen(command, **keywords) as program:
        try:
            for name, seconds in (("first", "1"), ("second", "2")):
                output = ("-o", str(folder / f"{name}.aiflame"))
                words = ("-q", "-p", str(program.pid), "-d", seconds, "-F", "499", *output)
                subprocess.run([*support.AIFLAME, "record", *words], check=True, timeout=120)
        finally:
            program.kill()
    return read_capture(folder / "second.aiflame")


def test_pythons_own_code_is_walked_to_its_start(tmp_path: Path) -> None:
    profile = _record_twice(tmp_path, _PYTHON, "-c", _BUSY)
    # One in two hundred may be caught in a lazy binding stub or in the dynamic loader.
    assert walked_share(profile, StopReason.ROOTED) > 0.995
    assert not profile.losses


@pytest.mark.breadth
def test_numpys_matrices_are_walked_to_their_start(tmp_path: Path) -> None:
    profile = _record_twice(tmp_path, sys.executable, "-c", _MATRICES, env=_ONE_THREAD)
    rows = rows_of(profile, None, None, SampleClass.ON_CPU)
    is_complete = np.isin(profile.stacks.ends[rows["stack"]], [*COMPLETE_REASONS])
    assert rows["ns"][is_complete].sum() > 0.98 * rows["ns"].sum()
    # All that computes is below the line that says so.
    in_python = rows_of(profile, "<module>", None, SampleClass.ON_CPU)["ns"].sum()
    assert in_python > 0.98 * rows["ns"].sum()


def test_two_hundred_calls_without_frame_pointers_are_two_hundred_frames(
    tmp_path_factory: pytest.TempPathFactory, workload: Callable[..., Path]
) -> None:
    program = workload("burns", "-fomit-frame-pointer")
    for name in ("first", "second"):
        folder = tmp_path_factory.mktemp(name)
        profile, _ = record_workload(folder, Workload([program]), "-F", 499)
    rows = rows_of(profile, "descend", "shallow")
    stacks = [frames_of(profile, int(stack)) for stack in rows["stack"]]
    # Its last calls are on their way in or out in some samples; none may have more than there are.
    depths = np.array([frames.count("descend") for frames in stacks])
    assert depths.max() == 200
    assert np.average(depths == 200, weights=rows["ns"]) > 0.99
    assert all(frames.index("descend") <= 3 for frames in stacks)


_KEEPING = ("aligned_kernel", "slot_kernel", "brief_kernel")
_CALLERS = ["main", "spend", "with_array", "inner"]


def test_kernels_that_align_their_stack_are_walked_by_what_they_keep_of_it(
    tmp_path_factory: pytest.TempPathFactory, workload: Callable[..., Path]
) -> None:
    program = workload("kernels", "-fomit-frame-pointer")
    for name in ("first", "second"):
        folder = tmp_path_factory.mktemp(name)
        profile, _ = record_workload(folder, Workload([program]), "-F", 999)
    shares = {}
    for kernel in (*_KEEPING, "borrowing_kernel"):
        rows = rows_of(profile, kernel, None, SampleClass.ON_CPU)
        ends = profile.stacks.ends[rows["stack"]]
        for stack, end in zip(rows["stack"].tolist(), ends.tolist(), strict=True):
            frames = frames_of(profile, stack)
            native = frames[: frames.index(kernel) + 1]
            # THEN every frame is a true one, whatever RBX holds
            if end in COMPLETE_REASONS:
                native = native[native.index("main") :]
                assert native == [*_CALLERS, kernel]
            else:
                assert native == [kernel]
        is_complete = np.isin(ends, [*COMPLETE_REASONS])
        shares[kernel] = float(rows["ns"][is_complete].sum() / rows["ns"].sum())
    # At any instruction of a kernel that keeps its RBX; of one that does not, while it has it.
    assert all(shares[kernel] > 0.98 for kernel in _KEEPING), shares
    assert 0.3 < shares["borrowing_kernel"] < 0.7, shares


@pytest.mark.breadth
def test_functions_of_a_stripped_program_are_one_row_each(
    workload: Callable[..., Path], tmp_path: Path
) -> None:
    # GIVEN two programs that differ in their symbols only
    listing = subprocess.run(
        ["nm", workload("serving")], capture_output=True, text=True, check=True
    ).stdout
    row = next(line for line in listing.splitlines() if line.endswith(" matrix_multiply"))
    # WHEN the one without is recorded
    with support.serving(workload("serving", "-Wl,-s")) as process:
        command = [*support.AIFLAME, "record", "-q", "-p", str(process.pid)]
        options = ["-d", "2", "-F", "499", "-o", str(tmp_path / "run.aiflame")]
        subprocess.run([*command, *options], check=True, timeout=120)
    profile = read_capture(tmp_path / "run.aiflame")
    # THEN each function is called by where it begins, whichever of its instructions ran
    names = [function.name for function in profile.functions]
    own = {name for name in names if name.startswith("[serving-")}
    wanted = f" fn@{int(row.split()[0], 16):#x}]"
    (hot,) = [name for name in own if name.endswith(wanted)]
    assert all(" fn@" in name for name in own)
    frames = profile.frames[profile.frames["function"] == names.index(hot)]
    assert len(np.unique(frames["address"])) > 1
