# SPDX-License-Identifier: Apache-2.0
"""What `make demo` records is what its flame graph is said to show."""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path

import pytest
from aiflame.agent.model.gpu import NONE
from aiflame.gpu.attribution import attribute
from recordings import Recording, python_frames_of
from support import WORKLOADS

pytestmark = pytest.mark.bpf

# Where Debian's pyopencl is.
_SYSTEM_PYTHON = "/usr/bin/python3"

# The functions that launch each kernel, by way of Device.
_SITES = {
    "matmul": {"Attention.forward", "FeedForward.forward", "Model.forward"},
    "softmax": {"Attention.forward", "Model.forward"},
    "gelu": {"FeedForward.forward"},
    "layer_norm": {"FeedForward.forward"},
}


def test_each_call_site_of_the_demo_gets_samples_of_its_kernel(tmp_path: Path) -> None:
    # GIVEN the program of the demo, recorded from its first instruction
    environment = {**os.environ, "HOME": str(tmp_path)}
    command = [_SYSTEM_PYTHON, WORKLOADS / "inference.py", 6]
    with Recording(tmp_path, "-F", 999, "--", *command, env=environment) as recording:
        profile = recording.wait().profile
    gpu = profile.gpu
    # WHEN its samples are given to the stacks that launched them
    found: dict[str, set[str]] = defaultdict(set)
    for row in attribute(gpu):
        sample = gpu.samples[row["sample"]]
        assert row["stack"] != NONE
        frames = python_frames_of(profile, int(row["stack"]))
        names = [frame.name for frame in frames if frame.file.endswith("inference.py")]
        caller = next(name for name in reversed(names) if not name.startswith("Device."))
        found[gpu.kernels[gpu.codes[sample["code"]].kernel].name].add(caller)
    # THEN they are spread over all lines that launch the kernel, and no other
    assert found["matmul"] == _SITES["matmul"]
    assert all(found[kernel] <= _SITES[kernel] for kernel in found)
    # AND lines are those of the file of kernels
    lines = {Path(i.file).name for i in gpu.instructions if i.line}
    assert lines == {"inference.cl"}
