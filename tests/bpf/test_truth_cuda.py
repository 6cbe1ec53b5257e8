# SPDX-License-Identifier: Apache-2.0
"""A program that nvcc built, which knows what each of its launch sites launched, to the page.

Driver, runtime and CUPTI are stand-ins (tests/standin): a block takes a microsecond, and is sampled
eight times.
"""

from __future__ import annotations

import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from aiflame.agent.model.gpu import NONE, Tier
from aiflame.agent.model.profile import Profile
from aiflame.agent.reports.device_rows import device_samples
from nvidia_helper import SAMPLES_OF_BLOCK, Target, build
from recordings import Recording, frames_of

pytestmark = pytest.mark.bpf

# Some half second, so that sampling has begun before the last one.
_ROUNDS = 2000
_SITES = ("often", "seldom", "once", "replay")
_SCALE, _FILL, _REDUCE = "_Z5scalePf", "_Z4fillPf", "_Z6reducePf"
# Of a round, as cudatruth.cu has it: microseconds, and so blocks.
_US = {
    ("often", _SCALE): 120,
    ("seldom", _SCALE): 40,
    ("once", _FILL): 80,
    ("replay", _SCALE): 80,
    ("replay", _REDUCE): 40,
}


@pytest.fixture(scope="module")
def standin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("standin"))


def _site(profile: Profile, stack: int) -> str:
    if stack in (NONE, -1):
        return "unknown"
    frames = " ".join(frames_of(profile, stack))
    return next((site for site in _SITES if site in frames), f"none of {frames}")


def _ran_ns(profile: Profile) -> Counter[tuple[str, str]]:
    """Returns the time on the device by call site and kernel."""
    gpu, found = profile.gpu, Counter[tuple[str, str]]()
    for row in gpu.times:
        site = _site(profile, int(row["stack"]))
        found[site, gpu.kernels[row["kernel"]].name] += int(row["duration_ns"])
    return found


def _sampled(profile: Profile) -> Counter[tuple[str, str]]:
    """Returns samples by call site and kernel, without those that are counted twice."""
    samples, found = device_samples(profile), Counter[tuple[str, str]]()
    columns = (samples.stack, samples.kernel, samples.count)
    for stack, kernel, count in zip(*(column.tolist() for column in columns), strict=True):
        found[_site(profile, stack), profile.gpu.kernels[kernel].name] += count
    return found


@pytest.mark.parametrize("late", [False, True], ids=["from the start", "late"])
def test_times_of_a_program_of_nvcc_are_under_its_sites(
    standin: Path,
    tmp_path: Path,
    late: bool,
    cuda_workload: Callable[..., Path],
    run_aiflame: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    # GIVEN one kernel from three sites, two others, two streams, and replays of a graph
    flags = ("-cudart", "shared", "-arch=sm_90", "--no-compress", "-lineinfo")
    program = cuda_workload("cudatruth", *flags)
    gpu = "" if late else "tier=2,read-out=100"
    with (
        Target(standin, gpu=gpu, program=program, arguments=[_ROUNDS]) as target,
        Recording(tmp_path, "-p", target.pid) as recording,
    ):
        target.read_until(lambda told: told.tier)
        truth = target.truth()
        ended = recording.stop()
    # THEN each nanosecond is under the site that launched it, also of kernels of a graph
    profile = ended.profile
    assert _ran_ns(profile) == {key: us * 1000 * _ROUNDS for key, us in _US.items()}
    assert sum(_ran_ns(profile).values()) == sum(truth.values())
    # AND samples are: of kernels of one site exactly, of the other one by measured time
    sampled = _sampled(profile)
    whole = sum(sampled.values())
    if not late:
        assert whole == sum(_US.values()) * _ROUNDS * SAMPLES_OF_BLOCK
    assert {key: count / whole for key, count in sampled.items()} == {
        key: pytest.approx(us / sum(_US.values()), abs=0.02) for key, us in _US.items()
    }
    assert profile.gpu.devices[0].tier == Tier.STALLS
    # AND that is what a user sees
    folded = tmp_path / "time.folded"
    run_aiflame("report", ended.capture, "--view", "gputime", "-f", "folded", "-o", folded)
    seen: Counter[str] = Counter()
    for line in folded.read_text().splitlines():
        frames, _, ns = line.rpartition(" ")
        seen[next(site for site in _SITES if site in frames)] += int(ns)
    assert {f"{site}.ns": ns for site, ns in seen.items()} == truth
