# SPDX-License-Identifier: Apache-2.0
"""How busy devices of NVIDIA were, from the stand-in of NVML to the capture and its reports."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiflame.agent.losses import LossKind
from aiflame.agent.model.profile import Profile
from aiflame.agent.reports import FORMATS, ReportOptions
from nvidia_family import RECORD
from nvidia_helper import Target, build
from recordings import Recording
from support import AIFLAME, wait_until

pytestmark = [pytest.mark.bpf, pytest.mark.breadth]

_S = 1_000_000_000
_GIB, _MIB = 1 << 30, 1 << 20
_BEGIN = ("init", "context 0", "module 4096", "function 0 _Z4gemmPf")
_ROUND = ("launch 0 64 20 0", "sync")


@pytest.fixture(scope="module")
def standin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("standin") / "out")


@pytest.fixture
def target(standin: Path) -> Iterator[Target]:
    with Target(standin) as running:
        running.obey(*_BEGIN)
        yield running


def _recording(folder: Path, target: Target, standin: Path, words: str) -> Recording:
    environment = {**os.environ, "LD_LIBRARY_PATH": str(standin), "NVML_STANDIN": words}
    arguments = ("-p", target.pid, "--gpu", "nvidia")
    return Recording(folder, *arguments, program=RECORD, env=environment)


def _readings(recording: Recording) -> int:
    return sum(len(window.device_readings) for window in recording.windows())


def _run(recording: Recording, target: Target, readings: int) -> Profile:
    """Has the target launch kernels until the recording has so many readings; ends it."""

    def has_enough() -> bool:
        target.obey(*_ROUND)
        return _readings(recording) >= readings

    wait_until(has_enough, 60)
    return recording.stop().profile


def _is_given_up(recording: Recording) -> bool:
    return any("not listened to" in text for one in recording.windows() for text in one.texts)


def _area(begin_s: float, end_s: float) -> float:
    """Returns for how many seconds a device was busy between two times of its curve."""
    parts = ((0.9, 0, 1), (0.5, 2, 1 << 20))
    return sum(
        share * max(0, min(end_s, last) - max(begin_s, first)) for share, first, last in parts
    )


def test_a_capture_has_the_load_of_the_device(
    target: Target, standin: Path, tmp_path: Path
) -> None:
    # GIVEN a device that is busy for a second, idle for one, and then half of the time
    from_ns = time.monotonic_ns() + 5 * _S
    words = f"from={from_ns} curve=90/0/50 devices=2 no-busy"
    with _recording(tmp_path, target, standin, words) as recording:
        profile = _run(recording, target, 14)
    devices = profile.gpu.devices
    number = [device.name for device in devices].index("Standin A")
    rows = profile.gpu.readings[profile.gpu.readings["device"] == number]
    # THEN its readings follow each other, at seconds of the recording
    assert (rows["begin_ns"][1:] == rows["end_ns"][:-1]).all()
    assert (rows["end_ns"] <= profile.recording.duration_ns).all()
    # AND THEN they add up to the curve
    step_ns = time.time_ns() - time.monotonic_ns() - profile.recording.started_unix_ns
    lasted_s = (rows["end_ns"] - rows["begin_ns"]) / _S
    busy_s = float((lasted_s * rows["busy_permille"] / 1000).sum())
    between = (
        (int(ns) - from_ns - step_ns) / _S for ns in (rows["begin_ns"][0], rows["end_ns"][-1])
    )
    assert busy_s == pytest.approx(_area(*between), abs=0.3)
    assert rows["busy_permille"].max() <= 900
    assert rows["busy_permille"][-2] == 500
    assert (rows["total_bytes"] == 80 * _GIB).all()
    sizes = {_GIB, _GIB + 9_000 * _MIB, _GIB + 5_000 * _MIB}
    assert {int(size) for size in rows["used_bytes"]} <= sizes
    assert rows["used_bytes"][-1] == _GIB + 5_000 * _MIB
    # AND THEN of the other device memory alone is known, with the reason
    (other,) = (n for n, device in enumerate(devices) if device.name == "Standin B")
    assert "NVML does not tell how busy it is (Not Supported)" in devices[other].details
    # AND THEN nothing was lost, and what users read has it
    lost = {loss.name: loss.count for loss in profile.losses if loss.count}
    assert LossKind.DEVICE_READINGS_MISSED.stored_name not in lost
    page = FORMATS["html"].render(profile, ReportOptions()).decode()
    assert re.search(r'"name":"GPU \d","model":"Standin A","busy":\[[^]]*\b500\b', page)
    said = subprocess.run(
        [*AIFLAME, "stats", recording.capture], capture_output=True, text=True, check=True
    ).stdout
    assert re.search(r"\d\.\d %  +\d+\.\d %  +\d\.\d\d  +\S+  +80\.00  GPU \d +Standin A", said)


def test_a_call_that_hangs_costs_the_readings_alone(
    target: Target, standin: Path, tmp_path: Path
) -> None:
    # GIVEN a device of which no call returns after a while
    with _recording(tmp_path, target, standin, "curve=40 hang=2500") as recording:
        wait_until(lambda: _is_given_up(recording) and target.obey(*_ROUND) == 0, 60)
        ended = recording.stop()
    profile = ended.profile
    # THEN it is said, and what is missing is counted
    (device,) = (device for device in profile.gpu.devices if device.name == "Standin A")
    assert "NVML had not answered for 5 s, and is not listened to" in device.details
    losses = {loss.name: loss.count for loss in profile.losses}
    assert losses[LossKind.DEVICE_READINGS_MISSED.stored_name] >= 4
    # AND the rest is there
    assert len(profile.gpu.times) > 0
    assert profile.gpu.readings["busy_permille"][-1] == 400
