# SPDX-License-Identifier: Apache-2.0
"""The first recording of a program is whole, and its start does what the program needs."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from aiflame.agent.capture.reader import read_capture
from aiflame.agent.model.profile import Profile, SampleClass
from aiflame.agent.reports.rows import TRUNCATED_REASONS
from recordings import Recording
from support import AIFLAME

pytestmark = pytest.mark.bpf

_PYTHON = "/usr/bin/python3"
_INFERENCE = Path(__file__).parents[1] / "workloads/inference.py"

# Time in libcrypto, libz, libm and the interpreter.
_BUSY = """
import hashlib, math, sys, zlib
print("ready", flush=True)
sys.stdin.readline()
data = bytes(range(256)) * 400
while True:
    hashlib.sha256(zlib.compress(data)).digest()
    sum(math.gamma(1 + i % 20) for i in range(5000))
"""

_LATE_OPENCL = """
import runpy, sys
print("ready", flush=True)
sys.stdin.readline()
sys.argv = [sys.argv[1], "4"]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@contextmanager
def _running(script: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """Runs a script that says when it is ready, and waits for a line."""
    process = subprocess.Popen(
        [_PYTHON, "-c", script, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
        process.kill()


def _go(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()


def _complete_share(profile: Profile) -> float:
    samples = profile.samples[profile.samples["klass"] == SampleClass.ON_CPU]
    truncated = np.isin(profile.stacks.ends, TRUNCATED_REASONS)[samples["stack"]]
    assert samples["count"].sum() > 100
    return 1 - float(samples["ns"][truncated].sum() / samples["ns"].sum())


def test_a_first_recording_is_as_complete_as_the_second(tmp_path: Path) -> None:
    # GIVEN a busy process, and a machine on which nothing was ever recorded
    record = shlex.join([*AIFLAME, "record", "--force", "-q", "-F", "499", "-d", "2", "-o"])
    with _running(_BUSY) as process:
        _go(process)
        script = "\n".join(
            (
                "set -e",
                "mount -t tmpfs -o mode=0700 none /run/aiflame",
                "mount -t tmpfs -o mode=0700 none /var/cache/aiflame",
                f"{record} first.aiflame -p {process.pid}",
                f"{record} second.aiflame -p {process.pid}",
            )
        )
        for folder in ("/run/aiflame", "/var/cache/aiflame"):
            Path(folder).mkdir(mode=0o700, exist_ok=True)
        subprocess.run(["unshare", "-m", "sh", "-c", script], cwd=tmp_path, check=True, timeout=120)
    # THEN both are complete
    for name in ("first", "second"):
        assert _complete_share(read_capture(tmp_path / f"{name}.aiflame")) >= 0.98


def test_no_device_is_looked_for_where_no_process_uses_one(tmp_path: Path) -> None:
    with _running(_BUSY) as process, Recording(tmp_path, "-p", process.pid) as recording:
        _go(process)
        ended = recording.stop()
    assert ended.profile.gpu.devices == ()
    assert "device opencl" not in ended.stderr


def test_a_device_that_is_used_later_is_recorded(tmp_path: Path) -> None:
    # GIVEN a process that knows nothing of OpenCL when the recording begins
    with (
        _running(_LATE_OPENCL, _INFERENCE) as process,
        Recording(tmp_path, "-p", process.pid) as recording,
    ):
        _go(process)
        process.wait(60)
        ended = recording.wait()
    # THEN its device, samples and launches are there
    gpu = ended.profile.gpu
    (device,) = gpu.devices
    assert device.name.startswith("PoCL")
    assert gpu.samples["count"].sum() > 50
    launched = {gpu.kernels[kernel].name for kernel in gpu.launches["kernel"].tolist()}
    assert launched == {"matmul", "softmax", "gelu", "layer_norm"}
