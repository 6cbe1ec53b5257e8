# SPDX-License-Identifier: Apache-2.0
"""Real recordings pushed to every back-end: each gets the sums of the capture, and equal stacks."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from aiflame.agent.capture.reader import read_capture
from pushes import (
    CPU,
    LAUNCH,
    OFF_CPU,
    RUN_DELAY,
    TIMED_SAMPLES,
    all_ways,
    batch_of,
    sums_of,
    totals_of,
)
from recordings import Workload, record_workload
from support import AIFLAME, WORKLOADS

pytestmark = pytest.mark.bpf

# Where Debian's pyopencl is.
_SYSTEM_PYTHON = "/usr/bin/python3"


def test_a_python_program_on_a_device(tmp_path: Path) -> None:
    # GIVEN a recording of a model on an OpenCL device
    capture = tmp_path / "inference.aiflame"
    program = [_SYSTEM_PYTHON, WORKLOADS / "inference.py", "2"]
    subprocess.run(
        [*AIFLAME, "record", "-F", "499", "-o", capture, "--", *program],
        check=True,
        capture_output=True,
        env={**os.environ, "POCL_CACHE_DIR": str(tmp_path), "HOME": str(tmp_path)},
    )
    profile = read_capture(capture)
    # WHEN it is pushed
    ways = all_ways([batch_of(profile)])
    # THEN each way has what the capture has of each class
    totals = totals_of([profile])
    assert [sums_of(way) for way in ways] == [totals] * 3
    assert min(totals[name] for name in (CPU, OFF_CPU, RUN_DELAY, LAUNCH, TIMED_SAMPLES)) > 0
    assert ways[0] == ways[1] == ways[2]
    # THEN samples are of kernels, under the Python functions that launched them
    stacks = ways[0][TIMED_SAMPLES]
    under_python = sum(
        weight
        for stack, weight in stacks.items()
        if stack[:2] == ("issuing", "matmul") and "clEnqueueNDRangeKernel" in stack
    )
    assert under_python > 0


def test_threads_that_wait(tmp_path: Path, workload: Callable[..., Path]) -> None:
    # GIVEN a recording of threads that block in several ways
    started = Workload([workload("waits", "-lpthread"), 300])
    profile, _ = record_workload(tmp_path, started, "-F", 499)
    # WHEN it is pushed THEN nothing of their time is missing, and causes are leaves
    ways = all_ways([batch_of(profile)])
    assert [sums_of(way) for way in ways] == [totals_of([profile])] * 3
    assert ways[0] == ways[1] == ways[2]
    causes = {stack[0] for stack in ways[0][OFF_CPU]}
    assert {"[blocked: sleep]", "[blocked: lock]"} <= causes
