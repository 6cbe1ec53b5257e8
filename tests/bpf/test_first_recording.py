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
from aiflame.agent.model.profile import Profile, SampleClass, StopReason
from aiflame.agent.reports.rows import TRUNCATED_REASONS
from aiflame.agent.symbols.known import file_key
from breadth import cases
from recordings import Recording, frames_of, rows_of
from short_processes import SCRIPT, busy_loops
from support import AIFLAME, wait_until

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


def _recorded_cold(folder: Path, times: int, *arguments: object) -> list[Profile]:
    """Records so many times, one after the other, as if nothing had ever been recorded before.

    What recordings keep is in memory, in a mount namespace of these. What they know of files is
    copied to `facts`.
    """
    kept = ("/run/aiflame", "/var/cache/aiflame")
    for place in kept:
        Path(place).mkdir(mode=0o700, exist_ok=True)
    names = [f"{number}.aiflame" for number in range(times)]
    lines = [
        *("set -e", *(f"mount -t tmpfs -o mode=0700 none {place}" for place in kept)),
        *(
            shlex.join(map(str, [*AIFLAME, "record", "--force", "-o", n, *arguments]))
            for n in names
        ),
        "cp -a /run/aiflame/facts .",
    ]
    script = "\n".join(lines)
    subprocess.run(["unshare", "-m", "sh", "-c", script], cwd=folder, check=True, timeout=120)
    return [read_capture(folder / name) for name in names]


def _complete_share(profile: Profile) -> float:
    samples = profile.samples[profile.samples["klass"] == SampleClass.ON_CPU]
    truncated = np.isin(profile.stacks.ends, TRUNCATED_REASONS)[samples["stack"]]
    assert samples["count"].sum() > 100
    return 1 - float(samples["ns"][truncated].sum() / samples["ns"].sum())


def test_a_first_recording_is_as_complete_as_the_second(tmp_path: Path) -> None:
    # GIVEN a busy process, and a machine on which nothing was ever recorded
    record = ("-q", "-F", "499", "-d", "2")
    with _running(_BUSY) as process:
        _go(process)
        first, second = _recorded_cold(tmp_path, 2, *record, "-p", process.pid)
    # THEN both are complete
    assert _complete_share(first) >= 0.98
    assert _complete_share(second) >= 0.98


@cases("loops", [0, 2], ids=["quiet", "busy"])
def test_short_processes_are_complete_the_first_time(tmp_path: Path, loops: int) -> None:
    # GIVEN three hundred processes of some milliseconds, maybe on a machine that is busy
    with busy_loops(loops):
        # WHEN they are recorded, and nothing was ever recorded before
        (profile,) = _recorded_cold(tmp_path, 1, "-F", "999", "--", "bash", "-c", SCRIPT)
    # THEN there is a stack for their time, down to what they began with
    assert _complete_share(profile) >= 0.95
    on_cpu = rows_of(profile, None, None, SampleClass.ON_CPU)
    stacks = [frames_of(profile, stack) for stack in on_cpu["stack"].tolist()]
    is_gone = np.array(["[exited before it could be read]" in frames for frames in stacks])
    assert on_cpu["ns"][is_gone].sum() < 0.01 * on_cpu["ns"].sum()
    # AND exec, which has no stack once the program that called it is gone, is said to have none
    in_exec = [any(name.endswith("_sys_execve") for name in frames) for frames in stacks]
    ends = profile.stacks.ends[on_cpu["stack"][np.array(in_exec)]].tolist()
    assert StopReason.KERNEL_ONLY in ends
    assert ends.count(StopReason.UNREADABLE) == 0
    # AND so is a child that waits for its first turn on a CPU
    waiting = rows_of(profile, None, None, SampleClass.WAITING_TO_RUN)
    assert StopReason.NOT_RUN_YET in profile.stacks.ends[waiting["stack"]]
    assert StopReason.NOT_WALKED not in profile.stacks.ends


def test_a_commands_files_are_known_before_it_runs(tmp_path: Path) -> None:
    # GIVEN a machine on which nothing was ever recorded
    # WHEN a command is
    (profile,) = _recorded_cold(tmp_path, 1, "-F", "999", "--", _PYTHON, "-c", "sum(range(9**7))")
    # THEN all was asked about its C library and the vDSO before it began, and kept no stack of its
    # first milliseconds waiting
    (libc,) = (one.path for one in profile.binaries if one.path.endswith("/libc.so.6"))
    (vdso,) = (tmp_path / "facts").glob("x-*")
    for answers in (tmp_path / "facts" / file_key(Path(libc).stat()), vdso):
        assert answers.stat().st_mtime_ns < profile.recording.started_unix_ns


def test_no_device_is_looked_for_where_no_process_uses_one(tmp_path: Path) -> None:
    with _running(_BUSY) as process, Recording(tmp_path, "-p", process.pid) as recording:
        _go(process)
        wait_until(recording.windows, 60)
        ended = recording.stop()
    gpu = ended.profile.gpu
    assert gpu.devices == gpu.functions == ()
    assert len(gpu.calls) == len(gpu.samples) == 0
    assert "device opencl" not in ended.stderr


@pytest.mark.breadth
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
    assert gpu.samples["count"].sum() > 10  # fewer, the busier the machine is
    launched = {gpu.kernels[kernel].name for kernel in gpu.launches["kernel"].tolist()}
    assert launched == {"matmul", "softmax", "gelu", "layer_norm"}
