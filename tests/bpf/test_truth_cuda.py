# SPDX-License-Identifier: Apache-2.0
"""A program that nvcc built, which knows what each of its launch sites launched, to the page.

Driver, runtime and CUPTI are stand-ins (tests/standin): a block takes a microsecond, and is sampled
eight times.
"""

from __future__ import annotations

import subprocess
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import fatbins
import pytest
from aiflame.agent.model.gpu import NONE, Tier
from aiflame.agent.model.profile import Profile
from aiflame.agent.reports.device_rows import device_samples
from browser.chromium import Page
from fatbins import needs_nvdisasm
from nvidia_helper import SAMPLES_OF_BLOCK, Target, build
from recordings import Ended, Recording, frames_of

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
_SHARES = {key: us / sum(_US.values()) for key, us in _US.items()}
# As pages call them.
_NAMES = {"scale": _SCALE, "fill": _FILL, "reduce": _REDUCE}


@dataclass(frozen=True)
class Recorded:
    """A recording of the program, and what each site has launched, in ns of the device."""

    ended: Ended
    truth: dict[str, int]
    is_late: bool
    program: Path


@pytest.fixture(
    scope="module",
    params=[False, pytest.param(True, marks=pytest.mark.breadth)],
    ids=["from the start", "late"],
)
def recorded(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    cuda_workload: Callable[..., Path],
) -> Recorded:
    """One kernel from three sites, two others, two streams, and replays of a graph."""
    standin = build(tmp_path_factory.mktemp("standin"))
    # The stand-in decompresses nothing: late, nobody needs what it has loaded.
    packing = fatbins.ZSTD if request.param else fatbins.PLAIN
    flags = ("-cudart", "shared", "-arch=sm_90", "-lineinfo", *packing)
    program = cuda_workload("cudatruth", *flags)
    gpu = "" if request.param else "tier=2,read-out=100"
    with (
        Target(standin, gpu=gpu, program=program, arguments=[_ROUNDS]) as target,
        Recording(tmp_path_factory.mktemp("run"), "-p", target.pid) as recording,
    ):
        # Late, a context is seen with its first launch.
        target.read_until(lambda told: told.tier and (request.param or told.contexts))
        target.send("go")
        target.read_until(lambda told: told.contexts)
        truth = target.truth()
        return Recorded(recording.stop(), truth, request.param, program)


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


def test_each_nanosecond_is_under_the_site_that_launched_it(recorded: Recorded) -> None:
    profile = recorded.ended.profile
    assert _ran_ns(profile) == {key: us * 1000 * _ROUNDS for key, us in _US.items()}
    assert sum(_ran_ns(profile).values()) == sum(recorded.truth.values())
    assert profile.gpu.devices[0].tier == Tier.STALLS


def test_samples_are_exact_by_kernel_and_by_measured_time_under_its_sites(
    recorded: Recorded,
) -> None:
    sampled = _sampled(recorded.ended.profile)
    whole = sum(sampled.values())
    if not recorded.is_late:
        assert whole == sum(_US.values()) * _ROUNDS * SAMPLES_OF_BLOCK
    assert {key: count / whole for key, count in sampled.items()} == {
        key: pytest.approx(share, abs=0.02) for key, share in _SHARES.items()
    }


def test_folded_text_has_the_times(
    recorded: Recorded,
    tmp_path: Path,
    run_aiflame: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    folded = tmp_path / "time.folded"
    capture = recorded.ended.capture
    run_aiflame("report", capture, "--view", "gputime", "-f", "folded", "-o", folded)
    seen: Counter[str] = Counter()
    for line in folded.read_text().splitlines():
        frames, _, ns = line.rpartition(" ")
        seen[next(site for site in _SITES if site in frames)] += int(ns)
    assert {f"{site}.ns": ns for site, ns in seen.items()} == recorded.truth


# Of each frame of a kernel that is drawn: the frames from the root, its part of the width.
_DRAWN = """((graph) => graph.boxes.filter((box) => box.node && !box.more).map((box) => {
    const names = [];
    for (let at = box.node; at > 0; at = graph.tree.parent[at]) names.unshift(graph.nameOf(at));
    return [box.node, names, box.width / graph.width];
}))(aiflame.graph)"""
# Where the middle of a frame is in the window, which is scrolled there.
_MIDDLE = """((graph) => {
    const box = graph.boxOf(%d), canvas = graph.canvas;
    const y = () => canvas.getBoundingClientRect().top + graph.top(box) + 9;
    window.scrollBy(0, y() - innerHeight / 2);
    return [canvas.getBoundingClientRect().left + box.x + box.width / 2, y()];
})(aiflame.graph)"""


def _on_the_page(page: Page) -> dict[tuple[str, str], tuple[float, str]]:
    """Returns each kernel's part of the width and its tooltip, by call site and kernel."""
    found = {}
    for node, names, width in page.value(_DRAWN):
        if names[-1] not in _NAMES:
            continue
        x, y = page.value(_MIDDLE % node)
        page.settle()
        page.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        sites = [name.removesuffix("()") for name in names if name.removesuffix("()") in _SITES]
        (site,) = sites
        found[site, _NAMES[names[-1]]] = (width, page.text("tip"))
    return found


def test_the_page_shows_kernels_under_their_sites_as_wide_as_they_took(
    recorded: Recorded, page: Page
) -> None:
    page.open(recorded.ended.capture.with_suffix(".html"), "#view=gputime")
    assert page.text("whole").startswith("100 % = 720.000 ms of GPU time")
    seen = _on_the_page(page)
    assert {key: width for key, (width, _) in seen.items()} == pytest.approx(_SHARES, abs=1e-3)
    for key, (_, tip) in seen.items():
        ms, percent = _US[key] * _ROUNDS / 1000, 100 * _SHARES[key]
        assert f"{ms:.3f} ms, {percent:.2f} % of all" in tip
        assert "100.00 % of the frame" in tip  # exact
        assert f"ran{_ROUNDS:,} runs, {_US[key]:.3f} us each" in tip
    assert page.complaints == []


def test_the_page_shows_samples_under_their_sites(recorded: Recorded, page: Page) -> None:
    page.open(recorded.ended.capture.with_suffix(".html"), "#view=gpu")
    seen = _on_the_page(page)
    assert {key: width for key, (width, _) in seen.items()} == pytest.approx(_SHARES, abs=0.02)
    for (_, kernel), (_, tip) in seen.items():
        assert ("100.00 % shared" in tip) == (kernel == _SCALE)
        assert "long_scoreboard 50.00 %" in tip
    # AND below each kernel its lines
    drawn = [" ".join(names) for _, names, _ in page.value(_DRAWN)]
    assert [one for one in drawn if "often() " in one and " cudatruth.cu:23" in one]
    assert page.complaints == []


@needs_nvdisasm
def test_a_listing_has_instructions_and_says_where_late_code_was_found(
    recorded: Recorded, page: Page
) -> None:
    page.open(recorded.ended.capture.with_suffix(".html"), "#view=gpu")
    node = next(node for node, names, _ in page.value(_DRAWN) if names[-1] == "scale")
    x, y = page.value(_MIDDLE % node)
    page.click(x, y)
    page.press("l")
    listed = page.text("listing-body")
    assert "FADD" in listed or "FMUL" in listed
    assert "EXIT" in listed
    assert "cudatruth.cu:23" in listed
    # AND code that CUPTI did not give is told from what it gave
    note = f"found by the kernel's name in {recorded.program}: it was loaded before the recording"
    assert (note in listed) == recorded.is_late
    losses = [loss.name for loss in recorded.ended.profile.losses]
    assert not [name for name in losses if name.startswith("device_code")]
    assert page.complaints == []
