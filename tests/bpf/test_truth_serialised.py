# SPDX-License-Identifier: Apache-2.0
"""Sharing as serialised windows correct it, and the error that is told, against the truth.

Driver and CUPTI are stand-ins (tests/standin): a block takes a microsecond, and is sampled eight
times for each of its warps, so that two sites of a kernel may take the same time and differ in
samples.
"""

from __future__ import annotations

import re
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from aiflame.agent.model.gpu import NONE, Tier
from aiflame.agent.model.profile import Profile
from aiflame.agent.reports.device_rows import device_samples
from aiflame.gpu.attribution import Certainty
from breadth import cases
from nvidia_helper import SAMPLES_OF_BLOCK, Target, build
from recordings import Recording, frames_of

pytestmark = pytest.mark.bpf

_SETUP = ("init", "context 0", "module 1000", "function 0 scale", "stream")
# Windows of 50 ms in each two seconds, as the recorder asks for a fortieth of the time.
_WINDOWS = "-DWINDOWS_NS=2000000000ull"
_BLOCKS = 100
# In a round three launches by one site, and one by the other, of as many blocks: 3:1 of the time.
_OFTEN, _SELDOM = 3, 1


@pytest.fixture(scope="module")
def standin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("standin"), _WINDOWS)


def _site(profile: Profile, stack: int) -> str:
    if stack in (NONE, -1):
        return "unknown"
    return "seldom" if "launch_dense" in frames_of(profile, stack) else "often"


def _windows_of(target: Target, done_ns: Sequence[int]) -> int:
    """Returns in how many serialised windows something was done."""
    windows = target.read().windows
    return sum(any(one.begin_ns < ns < one.end_ns for ns in done_ns) for one in windows)


# How many warps the blocks of the seldom site have, and so which part of the samples is its own.
@cases("warps", [3, 9, 1])
def test_sharing_is_corrected_and_its_error_measured(
    standin: Path,
    tmp_path: Path,
    warps: int,
    run_aiflame: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    # GIVEN two sites of a kernel, of which sharing by time knows 3:1 only
    rounds = 0
    with Target(standin, gpu="") as target:
        target.obey(*_SETUP)
        with Recording(tmp_path, "-p", target.pid, "--gpu-calibrate") as recording:
            target.read_until(lambda told: any(state.tier for state in told.states))
            launches = (f"launch 0 {_BLOCKS} {_OFTEN} 0", f"dense 0 {_BLOCKS} {_SELDOM} {warps}")
            until_s = time.monotonic() + 60
            done_ns: list[int] = []
            # On a crowded machine there may be windows in which nothing was launched.
            while _windows_of(target, done_ns) < 2 and time.monotonic() < until_s:
                target.obey(*launches, "sync")
                done_ns.append(time.monotonic_ns())
                rounds += 1
            for _ in range(500):
                target.obey(*launches, "sync")
                rounds += 1
            ended = recording.stop()
    profile = ended.profile
    # WHEN samples are given to stacks
    given: Counter[tuple[str, Certainty]] = Counter()
    found = device_samples(profile)
    columns = (found.stack, found.certainty, found.count)
    for stack, certainty, count in zip(*(column.tolist() for column in columns), strict=True):
        given[_site(profile, stack), Certainty(certainty)] += count
    whole = given.total()
    # Sampling began with the first launch, and pauses when windows begin and end.
    in_round = _BLOCKS * SAMPLES_OF_BLOCK * (_OFTEN + _SELDOM * warps)
    assert 0.8 * rounds * in_round < whole <= rounds * in_round
    # THEN those of windows are exact
    own = _SELDOM * warps / (_OFTEN + _SELDOM * warps)
    exact = {site: given[site, Certainty.EXACT] for site in ("often", "seldom")}
    assert sum(exact.values()) > 5000
    assert exact["seldom"] / sum(exact.values()) == pytest.approx(own, abs=0.03)
    # AND the others are shared as these say, though by time alone a quarter would be the seldom's
    shared = {site: given[site, Certainty.SHARED] for site in ("often", "seldom")}
    assert sum(shared.values()) > sum(exact.values())
    off = abs(shared["seldom"] / sum(shared.values()) - own)
    assert off < 0.03
    # AND what is told is what one window says of the other
    measured = found.error.measured
    assert measured is not None and measured.windows >= 2
    assert measured.samples == sum(exact.values())
    assert off < measured.off + 0.02
    assert measured.off < 0.06
    many = f"{measured.windows} serialised windows"
    words = f"sharing measured in {many}: (?:about|less than) ([0-9.]+) % with"
    if warps > 1:
        words = (
            f"corrected by what {many} tell: (?:about|less than) ([0-9.]+) % with"
            " another stack in windows that it was not fitted to, about ([0-9.]+) % without"
        )
    (told,) = re.findall(words, ended.stderr)
    percents = [measured.off]
    if warps > 1:
        assert measured.uncorrected == pytest.approx(own - 0.25, abs=0.03)
        percents.append(measured.uncorrected)
    found_percents = [told] if isinstance(told, str) else [*told]
    assert [float(one) for one in found_percents] == [
        pytest.approx(100 * share, abs=0.51) for share in percents
    ]
    # AND how long the program was slowed down
    device = profile.gpu.devices[0]
    assert device.tier is Tier.STALLS
    (seconds, windows) = re.findall(
        r"serialised for ([0-9.]+) s, in (\d+) windows", device.details
    )[0]
    assert measured.windows <= int(windows) and 0.04 < float(seconds) / int(windows) < 0.13
    samples = run_aiflame("stats", ended.capture, "--view", "gpu").stdout
    assert many in " ".join(samples.split())
    facts = run_aiflame("stats", ended.capture).stdout
    assert f"serialised for {seconds} s" in " ".join(facts.split())


def test_without_the_flag_nothing_is_serialised(standin: Path, tmp_path: Path) -> None:
    with Target(standin, gpu="") as target:
        target.obey(*_SETUP)
        with Recording(tmp_path, "-p", target.pid) as recording:
            target.read_until(lambda told: any(state.tier for state in told.states))
            until_s = time.monotonic() + 1
            while time.monotonic() < until_s:
                target.obey("launch 0 100 3 0", "dense 0 100 1 3", "sync")
            ended = recording.stop()
        assert target.read().windows == []
    assert "serialised" not in ended.stderr + ended.profile.gpu.devices[0].details
    assert "Shared is an estimate, off by" in ended.stderr
    assert (ended.profile.gpu.samples["stack"] == NONE).all()


def test_a_mode_that_is_not_there_is_told(standin: Path, tmp_path: Path) -> None:
    with Target(standin, gpu="", standin="no-serialized") as target:
        target.obey(*_SETUP)
        with Recording(tmp_path, "-p", target.pid, "--gpu-calibrate") as recording:
            target.read_until(lambda told: any(state.tier for state in told.states))
            while not target.read().errors:
                target.obey("launch 0 100 3 0", "dense 0 100 1 3", "sync")
            target.obey("launch 0 100 3 0", "sync")
            ended = recording.stop()
    device = ended.profile.gpu.devices[0]
    assert device.tier is Tier.STALLS
    assert (
        "a window to measure the error of sharing failed (cuptiPCSamplingSetConfigurationAttribute"
        in device.details
    )
    assert "Shared is an estimate, off by" in ended.stderr
