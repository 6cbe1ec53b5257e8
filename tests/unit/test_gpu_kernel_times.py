# SPDX-License-Identifier: Apache-2.0
"""Which stacks kernel times are given to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from aiflame.agent.model.gpu import KERNEL_TIME_DTYPE, NONE, GpuProfile
from aiflame.agent.reports.device_rows import device_samples
from aiflame.agent.reports.time_range import in_range, whole_seconds
from aiflame.gpu.attribution import Certainty, attribution_of
from aiflame.gpu.attribution.kernel_times import attributed_times, measured_times
from device_profiles import Launch, Ran, Timed, device_profile_of, with_times
from hypothesis import given
from hypothesis import strategies as st
from test_gpu_attribution import K_ELSEWHERE, OTHER, SAME_AS_K, UNNAMED, K, call, gpu_of

_S = 1_000_000_000


def ran(
    ns: int, stack: int = NONE, kernel: int = K, second: int = 0, count: int = 1
) -> tuple[int, ...]:
    begin_ns = second * _S
    return (0, kernel, 0, stack, begin_ns, begin_ns + ns, count, ns, NONE)


def timed(calls: Sequence[tuple[int, ...]], times: Sequence[tuple[int, ...]]) -> GpuProfile:
    return replace(gpu_of(calls, []), times=np.array(times, KERNEL_TIME_DTYPE))


def parts(gpu: GpuProfile) -> list[tuple[int, int, str, int]]:
    """(time, stack, certainty, ns), as one would read them."""
    return [
        (time, stack, Certainty(certainty).label, ns)
        for time, stack, certainty, ns in attributed_times(gpu).tolist()
    ]


def test_nothing_gives_nothing() -> None:
    assert parts(GpuProfile()) == []
    assert parts(timed([call(7)], [])) == []
    assert parts(timed([call(7)], [ran(0)])) == []


def test_what_the_device_named_is_exact_and_so_is_what_one_stack_launched() -> None:
    gpu = timed(
        [call(7, 3), call(8, 1), call(9, 2, kernel=OTHER), call(5, kernel=K_ELSEWHERE)],
        [
            ran(600, 7),
            ran(200, 8, SAME_AS_K),
            ran(50, kernel=OTHER),
            ran(70, kernel=K_ELSEWHERE, second=9),
            # Its launch was not seen, but the device named a stack.
            ran(10, 6, UNNAMED),
        ],
    )
    assert parts(gpu) == [
        (0, 7, "exact", 600),
        (1, 8, "exact", 200),
        (2, 9, "exact", 50),
        (3, 5, "exact", 70),
        (4, 6, "exact", 10),
    ]


def test_what_no_launch_explains_is_unattributed() -> None:
    gpu = timed(
        [call(7, kernel=K_ELSEWHERE), call(8, kernel=UNNAMED), call(NONE, kernel=OTHER)],
        [ran(5), ran(6, kernel=UNNAMED), ran(7, kernel=OTHER)],
    )
    assert parts(gpu) == [(i, NONE, "unattributed", 5 + i) for i in range(3)]


def test_what_several_launched_is_shared_by_number_of_launches() -> None:
    gpu = timed([call(7, 3), call(8, 1)], [ran(1_000), ran(3)])
    assert parts(gpu) == [
        (0, 7, "shared", 750),
        (0, 8, "shared", 250),
        (1, 7, "shared", 2),
        (1, 8, "shared", 1),
    ]


def test_work_weighs_more_than_numbers_and_measured_time_more_than_work() -> None:
    calls = [call(7, 3, 30), call(8, 1, 90)]
    gpu = timed(calls, [ran(1_000)])
    assert parts(gpu) == [(0, 7, "shared", 250), (0, 8, "shared", 750)]
    # Launches of the one took 100 ns each, those of the other 200.
    gpu = timed(calls, [ran(1_000, second=1), ran(100, 7), ran(400, 8, count=2)])
    assert parts(gpu)[:2] == [(0, 7, "shared", 600), (0, 8, "shared", 400)]


def test_a_time_is_shared_by_the_launches_of_its_second() -> None:
    gpu = timed(
        [call(7, 1, interval=0), call(8, 1, interval=2)],
        [ran(10, second=0), ran(20, second=1), ran(30, second=5)],
    )
    assert parts(gpu) == [
        (0, 7, "shared", 10),
        (1, 7, "shared", 20),
        (2, 8, "shared", 30),
    ]


_STACKS = st.integers(5, 8)
_CALLS = st.lists(
    st.builds(
        call,
        stack=_STACKS,
        count=st.integers(1, 1_000),
        work=st.integers(0, 1_000),
        interval=st.integers(0, 3),
        kernel=st.sampled_from([K, SAME_AS_K, OTHER, UNNAMED]),
    ),
    max_size=8,
)
_TIMES = st.lists(
    st.builds(
        ran,
        ns=st.integers(0, 1 << 52),
        stack=st.sampled_from([NONE, NONE, 5, 6]),
        kernel=st.sampled_from([K, SAME_AS_K, OTHER, K_ELSEWHERE, UNNAMED]),
        second=st.integers(0, 4),
        count=st.integers(1, 50),
    ),
    max_size=12,
)


@given(_CALLS, _TIMES)
def test_no_nanosecond_is_lost_or_made(
    calls: list[tuple[int, ...]], times: list[tuple[int, ...]]
) -> None:
    gpu = timed(calls, times)
    rows = attributed_times(gpu)
    sums = np.zeros(len(times), np.uint64)
    np.add.at(sums, rows["time"], rows["ns"])
    assert sums.tolist() == gpu.times["duration_ns"].tolist()
    named = gpu.times["stack"][rows["time"]]
    assert (rows["stack"][named != NONE] == named[named != NONE]).all()
    assert (rows["certainty"][named != NONE] == Certainty.EXACT).all()
    is_unknown = rows["stack"] == NONE
    assert (is_unknown == (rows["certainty"] == Certainty.UNATTRIBUTED)).all()
    # AND what stacks have is the same for another order of rows, but for rounding
    turned = attributed_times(replace(gpu, times=gpu.times[::-1], calls=gpu.calls[::-1]))
    of_stacks = [np.bincount(r["stack"] % 16, r["ns"].astype(float), 16) for r in (rows, turned)]
    assert of_stacks[0] == pytest.approx(of_stacks[1], rel=1e-6, abs=2 * len(times))


def test_measured_times_are_those_that_the_device_named() -> None:
    gpu = timed([], [ran(600, 7, count=3), ran(100, 7, second=2), ran(5), ran(50, 8, OTHER)])
    assert measured_times(gpu).tolist() == [(7, K, 4, 700), (8, OTHER, 1, 50)]


def test_samples_are_shared_by_what_launches_were_measured_to_take() -> None:
    # GIVEN a kernel whose launches by `slow` take four times as long as those by `fast`
    profile = with_times(
        device_profile_of(
            [Launch("main;fast", "k", 60), Launch("main;slow", "k", 60)],
            [Ran("k", 0, 1_000)],
        ),
        [Timed("k", 6_000, 0, 60), Timed("k", 24_000, 1, 60)],
    )
    # THEN its samples, of which the device named no launch, are shared by that
    assert sorted(device_samples(profile).count.tolist()) == [200, 800]
    # AND a time range keeps it
    part = in_range(profile, whole_seconds(0, _S, 2 * _S))
    assert sorted(attribution_of(part.gpu).rows["count"].tolist()) == [200, 800]


def test_a_time_range_keeps_the_stacks_of_the_whole_recording() -> None:
    # GIVEN two stacks that launched a kernel, one of them in the first second only
    profile = with_times(
        device_profile_of(
            [Launch("main;a", "k", 1, interval=0), Launch("main;b", "k", 1, interval=2)],
        ),
        [
            Timed("k", 500, None, end_ns=_S - 1),
            Timed("k", 700, None, end_ns=_S + 700),
            Timed("k", 900, None, end_ns=2 * _S + 900),
        ],
    )
    stacks = profile.gpu.calls["stack"].tolist()
    # WHEN the second without launches is chosen, THEN its time is with the earlier one's stack
    part = in_range(profile, whole_seconds(_S, 2 * _S, 3 * _S))
    assert attributed_times(part.gpu).tolist() == [(0, stacks[0], Certainty.SHARED, 700)]
    # AND all seconds together have what the whole has
    seconds = [in_range(profile, whole_seconds(s * _S, (s + 1) * _S, 3 * _S)) for s in range(3)]
    found = [row[1:] for p in seconds for row in attributed_times(p.gpu).tolist()]
    assert found == [row[1:] for row in attributed_times(profile.gpu).tolist()]
