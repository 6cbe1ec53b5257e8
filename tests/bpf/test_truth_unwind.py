# SPDX-License-Identifier: Apache-2.0
"""Stacks of code without frame pointers, walked by unwind tables.

Each program is recorded twice: at first its tables may have to be built, and stacks are walked
by frame pointer meanwhile; from then on they are in the cache.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import support
from aiflame.agent.capture.reader import read_capture
from aiflame.agent.model.profile import Profile, StopReason
from recordings import Workload, frames_of, record_workload, rows_of

pytestmark = pytest.mark.bpf

# Debian's and Ubuntu's interpreter has no frame pointers, and is on every machine that runs these.
_PYTHON = "/usr/bin/python3"
_BUSY = "import json\nwhile True: json.dumps(list(range(200)))"


def walked_share(profile: Profile, end: StopReason) -> float:
    """Returns the share of time in stacks with this end, among those that were walked at all."""
    others = [StopReason.NOT_WALKED, StopReason.NOT_RUN_YET, StopReason.KERNEL_ONLY]
    walked = ~np.isin(profile.stacks.ends, others)
    rows = profile.samples[walked[profile.samples["stack"]]]
    has_end = profile.stacks.ends[rows["stack"]] == end
    return float(rows["ns"][has_end].sum() / rows["ns"].sum())


@pytest.fixture(scope="module")
def python() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([_PYTHON, "-c", _BUSY])
    yield process
    process.kill()
    process.wait()


def test_pythons_own_code_is_walked_to_its_start(
    python: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    command = [*support.AIFLAME, "record", "-q", "-p", str(python.pid), "--force"]
    for name in ("first.aiflame", "second.aiflame"):
        options = ["-d", "2", "-F", "499", "-o", str(tmp_path / name)]
        subprocess.run([*command, *options], check=True, timeout=120)
    profile = read_capture(tmp_path / "second.aiflame")
    # One in two hundred may be caught in a lazy binding stub or in the dynamic loader.
    assert walked_share(profile, StopReason.ROOTED) > 0.995
    assert not profile.losses


def test_a_hundred_calls_without_frame_pointers_are_a_hundred_frames(
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
    assert depths.max() == 100
    assert np.average(depths == 100, weights=rows["ns"]) > 0.99
    assert all(frames.index("descend") <= 3 for frames in stacks)
