# SPDX-License-Identifier: Apache-2.0
"""Sharing that serialised windows correct, of simulated programs whose truth is known."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
from aiflame.agent.model.gpu import (
    CALL_DTYPE,
    DEVICE_SAMPLE_DTYPE,
    KERNEL_TIME_DTYPE,
    NONE,
    ApiFunction,
    GpuProfile,
    Kernel,
    KernelCode,
    MeasuredError,
    Operation,
    StallReason,
)
from aiflame.gpu.attribution import Certainty, attribution_of
from aiflame.gpu.attribution.kernel_times import measured_times

_MS, _S = 10**6, 10**9
_WINDOW_NS, _READ_OUT_NS = 250 * _MS, 10 * _MS
_SEEDS = 20


@dataclass(frozen=True)
class Program:
    """One that launches a kernel from several sites.

    Attributes:
        density: Samples of each site for each microsecond of its launches.
        took_us: What a launch of each takes.
        launches: Of each, in a second.
        windows: How many seconds of ten have a serialised one.
        mixture: By which part of it the number of launches scatters, in seconds and in windows.
        together: As how many a launch's samples scatter: each stands for so many.
    """

    density: tuple[float, ...] = (0.1, 0.1)
    took_us: tuple[float, ...] = (300.0, 300.0)
    launches: tuple[int, ...] = (1500, 500)
    windows: int = 3
    mixture: float = 0.2
    together: int = 1

    def run(self, seed: int) -> tuple[GpuProfile, np.ndarray]:
        """Returns a profile, and how many samples of each site it has outside of windows."""
        random = np.random.default_rng(seed)
        calls, times, samples = [], [], []
        truth = np.zeros(len(self.density))
        for second in range(10 * self.windows):
            begin_ns = second * _S
            in_window = second % 10 == 1
            shared = 0
            for site in range(len(self.density)):
                per_ns = self.launches[site] / _S
                spans = [(begin_ns, _S)]
                if in_window:
                    window_ns = begin_ns + 300 * _MS
                    spans = [(begin_ns, _S - _WINDOW_NS)]
                    spans += [
                        (at, _READ_OUT_NS)
                        for at in range(window_ns, window_ns + _WINDOW_NS, _READ_OUT_NS)
                    ]
                launched = 0
                of_window = [0, 0]
                varied = [max(random.normal(1, self.mixture), 0.1) for _ in range(2)]
                for number, (at_ns, length_ns) in enumerate(spans):
                    count = int(random.poisson(per_ns * length_ns * varied[number > 0]))
                    took_ns = int(count * self.took_us[site] * 1000)
                    launched += count
                    expected = took_ns / 1000 * self.density[site] / self.together
                    taken = int(random.poisson(expected)) * self.together
                    if number:
                        of_window[0] += count
                        of_window[1] += took_ns
                        row = (second, 0, 0, 0x10, 0, site, at_ns, at_ns + length_ns, taken)
                        samples.append(row)
                    elif count:
                        shared += taken
                        truth[site] += taken
                        row = (0, 0, 7, site, at_ns, at_ns + _S - 1, count, took_ns, NONE)
                        times.append(row)
                if of_window[0]:
                    row = (window_ns, window_ns + _WINDOW_NS, *of_window, NONE)
                    times.append((0, 0, 7, site, *row))
                calls.append((second, site, 0, 0, 0, 0, launched, 0, 0))
            samples.append((second, 0, 0, 0x10, 0, NONE, begin_ns, begin_ns + _S, shared))
        gpu = GpuProfile(
            functions=(ApiFunction("cuda", "aiflame_gpu_launch", Operation.LAUNCH),),
            kernels=(Kernel(0, "cuda", "scale", ""),),
            codes=(KernelCode(0, None, 0),),
            reasons=(StallReason("nvidia", "smsp__pcsamp_warps_issue_stalled_wait"),),
            calls=np.array(calls, CALL_DTYPE),
            times=np.array(times, KERNEL_TIME_DTYPE),
            samples=np.array(samples, DEVICE_SAMPLE_DTYPE),
        )
        return gpu, truth


def _off(gpu: GpuProfile, truth: np.ndarray) -> tuple[float, MeasuredError]:
    """Returns which part of what is shared is with the wrong stack, and what is told of it."""
    found = attribution_of(gpu, measured_times(gpu))
    rows = found.rows[found.rows["certainty"] == Certainty.SHARED]
    given = np.bincount(rows["stack"], rows["count"], len(truth))
    assert given.sum() == truth.sum()
    assert found.error.measured is not None
    return float(abs(given - truth).sum() / 2 / truth.sum()), found.error.measured


def _by_time(gpu: GpuProfile, truth: np.ndarray) -> float:
    """Returns the first of both without the windows: of the others alone."""
    samples = gpu.samples[gpu.samples["stack"] == NONE]
    found = attribution_of(replace(gpu, samples=samples), measured_times(gpu))
    given = np.bincount(found.rows["stack"], found.rows["count"], len(truth))
    return float(abs(given - truth).sum() / 2 / truth.sum())


_PROGRAMS = {
    "equal": Program(),
    "3:1": Program(density=(0.3, 0.1)),
    "1:9": Program(density=(0.1, 0.9)),
    "1:9, two windows": Program(density=(0.1, 0.9), windows=2),
    "1:9, samples come together": Program(density=(0.1, 0.9), together=16),
    "unequal times": Program(density=(0.1, 0.9), took_us=(30.0, 900.0), launches=(9000, 500)),
    "mixture varies": Program(density=(0.1, 0.9), mixture=0.6, windows=6),
    "ten sites": Program(
        density=(0.1, 0.2, 0.3, 0.1, 0.9, 0.05, 0.1, 0.4, 0.1, 0.6),
        took_us=(100.0,) * 10,
        launches=(900, 700, 700, 500, 500, 500, 300, 300, 100, 100),
    ),
}


@pytest.mark.parametrize("name", _PROGRAMS)
def test_what_is_shared_outside_of_windows_is_corrected(name: str) -> None:
    program = _PROGRAMS[name]
    runs = [program.run(seed) for seed in range(_SEEDS)]
    found = [_off(*run) for run in runs]
    true = float(np.mean([off for off, _ in found]))
    told = float(np.mean([measured.off for _, measured in found]))
    by_time = float(np.mean([_by_time(*run) for run in runs]))
    # What chance leaves: of samples, of launches, and of which of them are in windows.
    assert true < 0.03, (true, told, by_time)
    if len(set(program.density)) > 1:
        assert by_time > 0.1 and true < by_time / 5, (true, told, by_time)
    # What is told covers it, and is no alarm: it has chance in it, of a fraction of the samples.
    assert true < 1.1 * told + 0.002, (true, told, by_time)
    assert told < 0.10, (true, told, by_time)


@pytest.mark.parametrize("density", [(1e-4, 1e-4), (3e-4, 1e-4), (1e-4, 9e-4), (1e-3, 1e-3)])
@pytest.mark.parametrize("together", [1, 4])
def test_few_exact_samples_make_nothing_worse(density: tuple[float, ...], together: int) -> None:
    # GIVEN windows with some tens of samples, or less
    program = Program(density=density, together=together)
    runs = [program.run(seed) for seed in range(5 * _SEEDS)]
    off = np.array([_off(*run)[0] for run in runs])
    by_time = np.array([_by_time(*run) for run in runs])
    # THEN what they correct is less wrong in the mean, or as wrong
    assert off.mean() < by_time.mean() + 0.005, (off.mean(), by_time.mean())


def test_one_window_measures_and_corrects_nothing() -> None:
    # GIVEN one window, beside which there is none to try it on
    gpu, truth = Program(density=(0.1, 0.9), windows=1, mixture=0.0).run(0)
    off, measured = _off(gpu, truth)
    # THEN samples are shared by time, and the error is that of it
    assert (measured.windows, measured.uncorrected) == (1, None)
    assert off == _by_time(gpu, truth)
    assert measured.off == pytest.approx(off, abs=0.03)


def test_what_is_told_is_of_windows_that_had_no_part_in_the_fit() -> None:
    # GIVEN windows of which every other one has a third of the samples of the seldom site
    gpu, _ = Program(density=(0.1, 0.9), windows=6, mixture=0.0).run(0)
    samples = gpu.samples.copy()
    seldom = (samples["stack"] == 1) & (samples["interval"] // 10 % 2 == 1)
    samples["count"][seldom] //= 3
    measured = attribution_of(replace(gpu, samples=samples), measured_times(gpu)).error.measured
    # THEN what one half says is wrong by a quarter of the other, though right in the mean of both
    assert measured is not None and measured.uncorrected is not None
    assert measured.off == pytest.approx(0.25, abs=0.05)


def test_the_order_of_rows_makes_no_difference() -> None:
    gpu, truth = _PROGRAMS["ten sites"].run(0)
    expected = _off(gpu, truth)
    for seed in range(3):
        random = np.random.default_rng(seed)
        samples = gpu.samples[random.permutation(len(gpu.samples))]
        times = gpu.times[random.permutation(len(gpu.times))]
        assert _off(replace(gpu, samples=samples, times=times), truth) == expected


def test_kernels_whose_time_in_windows_is_not_known_are_shared_by_time() -> None:
    # GIVEN a capture of old, in which what ran in a window is in one row with the rest of a second
    gpu, truth = _PROGRAMS["1:9"].run(0)
    times = gpu.times.copy()
    times["begin_ns"] = times["begin_ns"] // _S * _S
    times["end_ns"] = times["begin_ns"] + _S - 1
    old = replace(gpu, times=times)
    off, measured = _off(old, truth)
    assert measured.uncorrected is None and off == _by_time(old, truth)
    assert measured.off == pytest.approx(off, abs=0.05)
