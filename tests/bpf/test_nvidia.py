# SPDX-License-Identifier: Apache-2.0
"""NVIDIA from the driver's call to the report: the real helper, recorder and family.

Driver, runtime and CUPTI are stand-ins (tests/standin), which know what they have told.
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from aiflame.agent.model.gpu import NONE, Tier
from aiflame.agent.model.profile import Profile
from aiflame.agent.reports import FORMATS, ReportOptions
from aiflame.agent.reports.device_rows import device_samples
from aiflame.agent.reports.kernel_stats import launch_calls
from aiflame.gpu.nvidia.sampler import NOT_USED
from breadth import cases
from deployment import capabilities
from nvidia_helper import BLOCK_NS, SAMPLES_OF_BLOCK, Target, build
from recordings import Recording, frames_of
from support import AIFLAME

pytestmark = pytest.mark.bpf

# A context, a module with two kernels, and a stream beside the default one.
_SETUP = ("init", "context 0", "module 1000", "function 0 scale", "function 0 fill", "stream")
_STALL = "smsp__pcsamp_warps_issue_stalled_"


@pytest.fixture(scope="module")
def standin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("standin"))


def _site(profile: Profile, stack: int) -> str:
    if stack in (NONE, -1):
        return "unknown"
    return "runtime" if "launch_by_runtime" in frames_of(profile, stack) else "driver"


def _ran_ns(profile: Profile) -> Counter[tuple[str, str]]:
    """Nanoseconds by call site and kernel."""
    gpu, found = profile.gpu, Counter[tuple[str, str]]()
    for row in gpu.times:
        key = _site(profile, int(row["stack"])), gpu.kernels[row["kernel"]].name
        found[key] += int(row["duration_ns"])
    return found


def _sampled(profile: Profile) -> Counter[tuple[str, int, str]]:
    """Samples by kernel, offset and reason."""
    samples, found = device_samples(profile), Counter[tuple[str, int, str]]()
    columns = (samples.kernel, samples.offset, samples.reason, samples.count)
    for kernel, offset, reason, count in zip(*(c.tolist() for c in columns), strict=True):
        name, word = profile.gpu.kernels[kernel].name, profile.gpu.reasons[reason].name
        found[name, offset, word.removeprefix(_STALL)] += count
    return found


def _truth(kernel: str, blocks: int) -> Counter[tuple[str, int, str]]:
    """Base samples alone: those of _not_issued are among them."""
    samples = blocks * SAMPLES_OF_BLOCK
    return Counter(
        {
            (kernel, 0x10, "long_scoreboard"): samples // 2,
            (kernel, 0x20, "selected"): samples // 4,
            (kernel, 0x40, "wait"): samples // 4,
        }
    )


@cases("gpu", ["", "tier=2,read-out=20"], ids=["switched on", "on from the start"])
def test_times_and_stalls_are_under_the_stacks_that_launched(
    standin: Path,
    tmp_path: Path,
    gpu: str,
    run_aiflame: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    # GIVEN a process with the helper in it
    with Target(standin, gpu=gpu) as target:
        target.obey(*_SETUP)
        with Recording(tmp_path, "-p", target.pid) as recording:
            target.read_until(lambda told: any(state.tier for state in told.states))
            # That its context is there is told by its first launch.
            target.obey("launch 1 50 1 1", "sync")
            target.read_until(lambda told: any(state.tier == 2 for state in told.states))
            # WHEN it launches from two places, the one taking three times as long
            target.obey("launch 0 300 20 0", "runtime 0 100 20", "launch 1 50 9 1", "sync")
            ended = recording.stop()
        # AND is as it was, afterwards
        target.read_until(lambda told: told.states[-1].tier == 0)
        target.obey("launch 0 1 1 0", "sync")
    # THEN each nanosecond is where it was launched
    profile = ended.profile
    assert _ran_ns(profile) == {
        ("driver", "scale"): 6_000 * BLOCK_NS,
        ("runtime", "scale"): 2_000 * BLOCK_NS,
        ("driver", "fill"): 500 * BLOCK_NS,
    }
    # AND each sample is there once
    sampled = _sampled(profile)
    fill = sum(n for (kernel, _, _), n in sampled.items() if kernel == "fill") // SAMPLES_OF_BLOCK
    # Sampling began with the first one: it was sampled in part, or not.
    assert fill == 500 if gpu else 450 <= fill <= 500
    assert sampled == _truth("scale", 8_000) + _truth("fill", fill)
    shared = device_samples(profile)
    by_site: Counter[str] = Counter()
    for stack, count in zip(shared.stack.tolist(), shared.count.tolist(), strict=True):
        by_site[_site(profile, stack)] += count
    # Those of the kernel of two places are shared by what its launches took: 3:1. That is done
    # second by second, so it is exact where all were in one.
    assert by_site.total() == (8_000 + fill) * SAMPLES_OF_BLOCK
    launches, samples = launch_calls(profile.gpu), profile.gpu.samples
    seconds = {*launches["interval"].tolist(), *samples["interval"].tolist()}
    assert len(seconds) > 1 or by_site == {
        "driver": (6_000 + fill) * SAMPLES_OF_BLOCK,
        "runtime": 2_000 * SAMPLES_OF_BLOCK,
    }
    # What the stand-in loads is no machine code, and in no file, where it would be looked for late.
    lost = ("kernel_not_disassembled", 2) if gpu else ("device_code_not_found", 1)
    assert [(loss.name, loss.count) for loss in profile.losses] == [lost]
    # AND the device says how it was sampled
    device, unused = profile.gpu.devices
    assert (device.family, device.tier, device.limit) == ("nvidia", Tier.STALLS, "")
    assert (unused.tier, unused.limit) == (Tier.LAUNCHES, NOT_USED)
    assert "CUPTI" in device.details
    assert "while nothing was issued" in device.details
    assert device.name in ended.stderr
    assert "8.500 ms of GPU time in 2 kernels." in ended.stderr
    assert "Attribution of GPU time: 100.00 % exact" in ended.stderr
    # AND a user sees it
    shown = run_aiflame("stats", ended.capture, "--view", "gputime").stdout
    assert "8.50 ms" in shown or "8.500 ms" in shown


@cases("way", ["none", "environment", "another profiler's", "injected"])
def test_a_helper_is_offered_where_there_is_none(standin: Path, tmp_path: Path, way: str) -> None:
    # GIVEN a process without a helper, one that loads it, now or once it uses a device, by its
    # environment; and one that has it otherwise
    library = standin / "libaiflame-nvidia.so"
    variables = {"environment": f"/srv/{library.name}", "another profiler's": "/srv/libother.so"}
    environment = {"CUDA_INJECTION64_PATH": variables[way]} if way in variables else {}
    with Target(standin, environment=environment) as target:
        target.obey(*_SETUP)
        if way == "injected":
            target.obey(f"load {library}")
            target.find_memory()
        # WHEN it is recorded without a word of devices
        with Recording(tmp_path, "-p", target.pid) as recording:
            target.obey("launch 0 300 20 0", "sync")
            ended = recording.stop()
    # THEN it is said what a helper would add, to the first and the third only
    offer = f"program ({target.pid}) runs on a device of nvidia: --gpu nvidia loads {library.name}"
    assert (offer in ended.stderr) == (way in ("none", "another profiler's"))


def test_who_is_refused_is_told_why(standin: Path, tmp_path: Path) -> None:
    # GIVEN a process whose CUPTI is another profiler's, on a machine that tells of no driver
    with Target(standin, gpu="", standin="taken") as target:
        target.obey(*_SETUP)
        with Recording(tmp_path, "-p", target.pid) as recording:
            target.read_until(lambda told: told.errors)
            target.obey("launch 0 300 20 0", "sync")
            ended = recording.stop()
    # THEN its launches are there, and record and page say what is missing, and what helps
    assert launch_calls(ended.profile.gpu)["count"].sum() == 20
    words = (
        "tier 0, launches; another profiler uses CUPTI: nsys;"
        " another profiler has CUPTI (cuptiSubscribe, nsys): end it"
    )
    assert f"device nvidia: NVIDIA device: {words}." in ended.stderr
    page = FORMATS["html"].render(ended.profile, ReportOptions()).decode()
    assert f"NVIDIA device (nvidia): {words}" in page


def test_helpers_of_other_users_are_told_with_the_rights_of_a_deployed_agent(
    standin: Path, tmp_path: Path
) -> None:
    for folder in (standin, standin.parent, standin.parent.parent):
        folder.chmod(folder.stat().st_mode | 0o055)
    # GIVEN a process of another user's, and root that never gets more rights than in a container
    nobody = ("--reuid", 65534, "--regid", 65534, "--clear-groups", standin / "program")
    bounds = ",".join(f"+{name.lower()}" for name in capabilities())
    contained = ("setpriv", f"--bounding-set=-all,{bounds}", *AIFLAME, "record")
    with Target(standin, gpu="", program=Path("/usr/bin/setpriv"), arguments=nobody) as target:
        target.obey(*_SETUP)
        # WHEN it is recorded
        with Recording(tmp_path, "-p", target.pid, program=contained) as recording:
            # THEN it is told to begin
            target.read_until(lambda told: any(state.tier for state in told.states), 60)
            ended = recording.stop()
    assert "device_control_refused" not in {loss.name for loss in ended.profile.losses}


# Enters a time namespace whose clock is so many seconds later than the host's (CLONE_NEWTIME).
_TIME_NAMESPACE = """
import ctypes, os, sys
libc = ctypes.CDLL(None)
assert not libc.unshare(0x80)
with open("/proc/self/timens_offsets", "w") as file:
    file.write(f"monotonic {sys.argv[1]} 0")
assert not libc.setns(os.open("/proc/self/ns/time_for_children", os.O_RDONLY), 0x80)
os.execv(sys.argv[2], sys.argv[2:])
"""


@pytest.mark.parametrize("later_s", [1000, -20])
def test_kernels_of_a_time_namespace_have_the_times_of_the_host(
    standin: Path, tmp_path: Path, later_s: int
) -> None:
    inside = ("-S", "-c", _TIME_NAMESPACE, later_s, standin / "program")
    with Target(standin, gpu="", program=Path(sys.executable), arguments=inside) as target:
        target.obey(*_SETUP)
        with Recording(tmp_path, "-p", target.pid) as recording:
            target.read_until(lambda told: any(state.tier for state in told.states), 60)
            target.obey("launch 0 1000 7 0", "sync")
            target.read_until(lambda told: len(told.kernel_times) >= 7)
            profile = recording.stop().profile
    # Times of another clock would be refused, or those of before the recording.
    assert _ran_ns(profile)["driver", "scale"] == 7 * 1000 * BLOCK_NS


def test_a_process_that_may_not_sample_has_times(standin: Path, tmp_path: Path) -> None:
    with Target(standin, gpu="", standin="no-rights") as target:
        target.obey(*_SETUP)
        with Recording(tmp_path, "-p", target.pid) as recording:
            target.read_until(lambda told: any(state.tier for state in told.states))
            target.obey("launch 0 300 20 0", "sync")
            target.read_until(lambda told: told.errors)
            ended = recording.stop()
    profile = ended.profile
    assert _ran_ns(profile) == {("driver", "scale"): 6_000 * BLOCK_NS}
    device = profile.gpu.devices[0]
    assert device.tier is Tier.TIMES
    assert "may not sample stalls" in device.limit
    assert not len(profile.gpu.samples)
