# SPDX-License-Identifier: Apache-2.0
"""The error of sharing by time as it is measured where a device named launches for a while."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from dataclasses import replace

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
    SharingError,
    StallReason,
)
from aiflame.agent.reports.device_facts import error_words
from aiflame.gpu.attribution import Certainty, attribution_of
from aiflame.gpu.attribution.calibration import Cells, Named, fitted
from aiflame.gpu.attribution.kernel_times import measured_times

_MS, _S = 10**6, 10**9
_SCALE, _FILL = 0, 1
_ONCE, _OFTEN, _OTHER = 0, 1, 2  # stacks

# (second, stack, kernel, launches, ns of each)
Ran = tuple[int, int, int, int, int]
# (begin in ms, end in ms, kernel, stack or NONE, samples)
Sampled = tuple[int, int, int, int, int]


def _profile(ran: Sequence[Ran], sampled: Sequence[Sampled]) -> GpuProfile:
    calls = [(s, stack, 0, 0, kernel, 0, n, 0, 0) for s, stack, kernel, n, _ in ran]
    times = [
        (0, kernel, 7, stack, s * _S, s * _S + _S - 1, n, n * ns, NONE)
        for s, stack, kernel, n, ns in ran
    ]
    samples = [
        (begin // 1000, 0, kernel, 0x10, 0, stack, begin * _MS, end * _MS, count)
        for begin, end, kernel, stack, count in sampled
    ]
    return GpuProfile(
        functions=(ApiFunction("cuda", "aiflame_gpu_launch", Operation.LAUNCH),),
        kernels=(Kernel(0, "cuda", "scale", ""), Kernel(0, "cuda", "fill", "")),
        codes=(KernelCode(0, None, 0), KernelCode(1, None, 0)),
        reasons=(StallReason("nvidia", "smsp__pcsamp_warps_issue_stalled_wait"),),
        calls=np.array(calls, CALL_DTYPE),
        times=np.array(times, KERNEL_TIME_DTYPE),
        samples=np.array(samples, DEVICE_SAMPLE_DTYPE),
    )


def _measured(gpu: GpuProfile) -> MeasuredError | None:
    return attribution_of(gpu, measured_times(gpu)).error.measured


# Three launches to one, of the same length.
_RAN = ((0, _OFTEN, _SCALE, 300, 1000), (0, _ONCE, _SCALE, 100, 1000), (0, _ONCE, _FILL, 9, 1000))


def test_what_is_shared_wrongly_in_windows_is_measured() -> None:
    # GIVEN two stacks that have the same samples in two windows, for 3:1 of the time
    windows = (
        *((10, 20, _SCALE, _OFTEN, 200), (10, 20, _SCALE, _ONCE, 200)),
        *((20, 30, _SCALE, _OFTEN, 200), (600, 610, _SCALE, _ONCE, 200)),
    )
    others = ((0, 10, _SCALE, NONE, 4000), (30, 600, _FILL, NONE, 70))
    gpu = _profile(_RAN, (*windows, *others))
    # THEN a quarter is with the other stack, of those that would have been shared
    assert _measured(gpu) == MeasuredError(2, 800, 0.25)
    # AND what the device named stays where that was, exactly
    found = attribution_of(gpu, measured_times(gpu)).rows
    named = found[found["sample"] < len(windows)]
    assert named["stack"].tolist() == [_OFTEN, _ONCE, _OFTEN, _ONCE]
    assert set(named["certainty"].tolist()) == {Certainty.EXACT}
    # AND the order of rows makes no difference
    for seed in range(10):
        order = np.random.default_rng(seed).permutation(len(gpu.samples))
        assert _measured(replace(gpu, samples=gpu.samples[order])) == _measured(gpu)


def test_what_sharing_would_have_right_is_no_error() -> None:
    windows = ((10, 20, _SCALE, _OFTEN, 300), (10, 20, _SCALE, _ONCE, 100))
    measured = _measured(_profile(_RAN, (*windows, (20, 90, _SCALE, NONE, 400))))
    assert measured is not None
    assert (measured.windows, measured.samples) == (1, 400)
    assert measured.off < 0.005  # in whole numbers


@pytest.mark.parametrize(
    "sampled",
    [
        (),
        # Nobody named a launch.
        ((10, 20, _SCALE, NONE, 400),),
        # What is named is of one stack anyway.
        ((10, 20, _FILL, _ONCE, 400), (20, 30, _SCALE, NONE, 400)),
        # A moment is known, as of devices that name all launches.
        ((10, 10, _SCALE, _ONCE, 400), (20, 30, _SCALE, NONE, 400)),
        ((10, 20, _SCALE, _ONCE, 0),),
    ],
)
def test_where_there_is_nothing_to_compare_nothing_is_said(sampled: Sequence[Sampled]) -> None:
    assert _measured(_profile(_RAN, sampled)) is None


def test_windows_of_several_processes_are_counted_for_each() -> None:
    # GIVEN the same kernel in two processes, at the same times, one of which has one window more
    own = ((10, 20, _SCALE, _ONCE, 5), (20, 30, _SCALE, _ONCE, 5), (550, 560, _SCALE, _ONCE, 5))
    gpu = _profile((*_RAN, (0, _OTHER, _FILL, 9, 1000)), (*own, (10, 25, _FILL, _ONCE, 5)))
    two = (gpu.kernels[0], replace(gpu.kernels[1], process=1))
    measured = _measured(replace(gpu, kernels=two))
    assert measured is not None and (measured.windows, measured.samples) == (3, 20)


def test_the_windows_of_a_day_cost_memory_by_what_is_in_them() -> None:
    # GIVEN a kernel of 2,000 stacks in a recording of a day, a window each ten seconds, in each of
    # which six of them launch it
    stacks, windows, of_window = 2_000, 8_640, 6
    random = np.random.default_rng(0)
    stack = random.integers(0, stacks, (windows, of_window)).ravel()
    window = np.arange(windows).repeat(of_window)
    name = np.zeros(len(stack), np.int64)
    ran_ns = Cells(name, stack, window, random.integers(1_000, 2_000, len(stack)))
    samples = replace(ran_ns, value=random.poisson(ran_ns.value * (1 + stack % 2) / 100))
    named = Named(np.arange(len(stack)), samples, ran_ns, windows)
    # WHEN densities are fitted
    tracemalloc.start()
    found = fitted(named)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # THEN they are right, and it took what a few dozen numbers for each of these take
    odd, even = (found.of(np.zeros(1_000, np.int64), np.arange(at, stacks, 2)) for at in (1, 0))
    assert odd.mean() / even.mean() == pytest.approx(2, rel=0.02)
    assert peak_bytes < 64 * 8 * len(stack)


def test_a_user_reads_what_was_measured() -> None:
    windows = ((10, 20, _SCALE, _OFTEN, 500), (10, 20, _SCALE, _ONCE, 500))
    gpu = _profile(_RAN, (*windows, (20, 90, _SCALE, NONE, 400)))
    assert error_words(attribution_of(gpu, measured_times(gpu)).error) == (
        "Shared is an estimate; sharing measured in 1 serialised window: about 25 % with another"
        " stack, of 1,000 samples there of kernels that several stacks launch."
    )


def test_a_user_reads_what_was_corrected() -> None:
    error = SharingError(0.0, 0.0, MeasuredError(4, 1000, 0.004, 0.25))
    assert error_words(error) == (
        "Shared is an estimate, corrected by what 4 serialised windows tell: less than 0.5 % with"
        " another stack in windows that it was not fitted to, about 25 % without the correction, of"
        " 1,000 samples there of kernels that several stacks launch."
    )
