# SPDX-License-Identifier: Apache-2.0
"""Which stacks device samples are given to, case by case."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import numpy as np
from aiflame.agent.model.gpu import (
    CALL_DTYPE,
    DEVICE_SAMPLE_DTYPE,
    KERNEL_TIME_DTYPE,
    LAUNCH_DTYPE,
    NONE,
    ApiFunction,
    GpuProfile,
    Kernel,
    KernelCode,
    Operation,
)
from aiflame.agent.model.profile import NS_PER_S
from aiflame.gpu.attribution import TIME_DTYPE, Certainty, attribute
from aiflame.gpu.attribution.kernel_times import measured_times
from device_profiles import device_samples

# Kernels 0 to 4 of `gpu_of`; code `i` is that of kernel `i`.
K, SAME_AS_K, OTHER, K_ELSEWHERE, UNNAMED = range(5)
_KERNELS = (
    Kernel(0, "cuda", "k", ""),
    Kernel(0, "cuda", "k", ""),
    Kernel(0, "cuda", "other", ""),
    Kernel(1, "cuda", "k", ""),
    Kernel(0, "cuda", "", "made before the recording"),
)
_FUNCTIONS = tuple(
    ApiFunction("cuda", operation.name.lower(), operation) for operation in Operation
)


def call(
    stack: int, count: int = 1, work: int = 0, interval: int = 0, kernel: int = K, function: int = 0
) -> tuple[int, ...]:
    return (interval, stack, 0, function, kernel, 0, count, work, 0)


def sample(
    count: int, interval: int = 0, kernel: int = K, offset: int = 0, stack: int = NONE
) -> tuple[int, ...]:
    return (interval, 0, kernel, offset, 0, stack, count)


def gpu_of(
    calls: Sequence[tuple[int, ...]],
    samples: Sequence[tuple[int, ...]],
) -> GpuProfile:
    return GpuProfile(
        functions=_FUNCTIONS,
        kernels=_KERNELS,
        codes=tuple(KernelCode(kernel, None, 0) for kernel in range(len(_KERNELS))),
        calls=np.array(calls, CALL_DTYPE),
        samples=device_samples(samples),
    )


def parts(gpu: GpuProfile, times: np.ndarray | None = None) -> list[tuple[int, int, str, int]]:
    """(sample, stack, certainty, count), as one would read them."""
    return [
        (sample, stack, Certainty(certainty).label, count)
        for sample, stack, certainty, count in attribute(gpu, times).tolist()
    ]


def by_stack(gpu: GpuProfile, times: np.ndarray | None = None) -> dict[int, int]:
    found: Counter[int] = Counter()
    for _, stack, _, count in parts(gpu, times):
        found[stack] += count
    return dict(found)


def test_nothing_gives_nothing() -> None:
    assert parts(GpuProfile()) == []
    assert parts(gpu_of([call(7)], [])) == []


def test_one_launching_stack_gets_every_sample_of_its_kernel() -> None:
    gpu = gpu_of(
        [call(7, interval=3), call(7, interval=9), call(8, kernel=OTHER)],
        [sample(5), sample(6, interval=3, offset=16), sample(2, interval=50, kernel=OTHER)],
    )
    assert parts(gpu) == [(0, 7, "exact", 5), (1, 7, "exact", 6), (2, 8, "exact", 2)]


def test_rows_of_one_name_in_one_process_are_one_kernel() -> None:
    # GIVEN a kernel that was made twice, its handles being called by the same name
    gpu = gpu_of([call(7, kernel=SAME_AS_K), call(7)], [sample(4), sample(3, kernel=SAME_AS_K)])
    assert parts(gpu) == [(0, 7, "exact", 4), (1, 7, "exact", 3)]


def test_nothing_crosses_processes_or_names() -> None:
    gpu = gpu_of(
        [call(7, kernel=K_ELSEWHERE), call(8, kernel=OTHER)],
        [sample(4), sample(1, kernel=K_ELSEWHERE)],
    )
    assert parts(gpu) == [(0, NONE, "unattributed", 4), (1, 7, "exact", 1)]


def test_unnamed_kernels_match_nothing_not_even_each_other() -> None:
    gpu = gpu_of([call(7, kernel=UNNAMED)], [sample(4), sample(1, kernel=UNNAMED)])
    assert parts(gpu) == [(0, NONE, "unattributed", 4), (1, NONE, "unattributed", 1)]


def test_calls_that_launch_nothing_do_not_count() -> None:
    gpu = gpu_of(
        [
            call(7),
            call(8, function=Operation.COPY),
            call(9, function=Operation.SYNCHRONIZE, kernel=NONE),
            call(10, count=0),
        ],
        [sample(4)],
    )
    assert parts(gpu) == [(0, 7, "exact", 4)]


def test_the_number_of_a_launch_beats_every_other_rule() -> None:
    gpu = gpu_of(
        [call(7), call(8)],
        [sample(4, stack=6), sample(9, kernel=UNNAMED, stack=5), sample(1)],
    )
    found = parts(gpu)
    assert found[:2] == [(0, 6, "exact", 4), (1, 5, "exact", 9)]
    assert [row[2] for row in found[2:]] == ["shared"], "without one it is not known"


def test_two_stacks_share_by_work_of_the_second() -> None:
    gpu = gpu_of(
        [
            call(7, count=10, work=3_000),
            call(8, count=10, work=1_000),
            call(7, count=10, work=1_000, interval=1),
            call(8, count=10, work=1_000, interval=1),
        ],
        [sample(400), sample(20, interval=1)],
    )
    assert parts(gpu) == [
        (0, 7, "shared", 300),
        (0, 8, "shared", 100),
        (1, 7, "shared", 10),
        (1, 8, "shared", 10),
    ]


def test_they_share_by_launches_where_any_launch_hides_its_work() -> None:
    gpu = gpu_of(
        [
            call(7, count=1, work=9_000),
            call(8, count=3, work=1_000),
            call(8, count=1, interval=5),
        ],
        [sample(400)],
    )
    assert parts(gpu) == [(0, 7, "shared", 100), (0, 8, "shared", 300)]


def test_measured_time_beats_work() -> None:
    # GIVEN times of some of the launches: 2 us each of stack 7, 8 us each of stack 8
    calls = [call(7, count=8, work=9_000), call(8, count=2, work=1_000)]
    times = np.array([(7, K, 2, 4_000), (8, SAME_AS_K, 1, 8_000)], TIME_DTYPE)
    assert by_stack(gpu_of(calls, [sample(100)]), times) == {7: 50, 8: 50}
    # WHEN one of the stacks has none THEN none is used
    assert by_stack(gpu_of(calls, [sample(100)]), times[:1]) == {7: 90, 8: 10}
    other = np.array([(7, OTHER, 1, 1), (8, K_ELSEWHERE, 1, 1), (8, K, 0, 0)], TIME_DTYPE)
    assert by_stack(gpu_of(calls, [sample(100)]), other) == {7: 90, 8: 10}


def test_runs_that_are_known_by_launch_beat_calls() -> None:
    # GIVEN four launches of stack 7 that ran, one of stack 8 that was captured, and two runs of the
    # graph by stack 9, whose call names no kernel
    calls = [call(7, count=4, work=9_000), call(8, work=9_000), call(9, count=2, kernel=UNNAMED)]
    times = [(0, K, 0, 7, 0, 500, 4, 4_000, NONE), (0, SAME_AS_K, 0, 9, 0, 900, 2, 8_000, NONE)]
    runs = np.array(times, KERNEL_TIME_DTYPE)
    gpu = replace(gpu_of(calls, [sample(120), sample(30, kernel=OTHER)]), times=runs)
    # THEN they share by what they ran
    shared = {7: 40, 9: 80, NONE: 30}
    assert by_stack(gpu, measured_times(gpu)) == shared
    # AND a kernel of a graph alone belongs to its launch
    alone = replace(
        gpu, times=np.append(runs, np.array([(0, OTHER, 0, 9, 0, 9, 2, 10, NONE)], runs.dtype))
    )
    assert by_stack(alone, measured_times(alone)) == {7: 40, 9: 110}
    # AND where no run is known, calls tell
    unknown = replace(gpu, times=np.array([(0, K, 0, NONE, 0, 9, 2, 10, NONE)], runs.dtype))
    assert by_stack(unknown) == {7: 60, 8: 60, NONE: 30}


def test_runs_that_are_added_up_count_for_the_seconds_in_which_they_ran() -> None:
    # GIVEN runs of two stacks, those of each in one row, as a read-out a moment after the end of a
    # second has them: of one of the stacks a run ended in that moment
    begin_ns = NS_PER_S // 2
    times = [
        (0, K, 0, 7, begin_ns, NS_PER_S - 100, 1_000, 9_000, NONE),
        (0, K, 0, 8, begin_ns, NS_PER_S + 300, 1_000, 9_000, NONE),
    ]
    samples = [sample(100), sample(40, interval=1)]
    gpu = replace(gpu_of([], samples), times=np.array(times, KERNEL_TIME_DTYPE))
    # THEN they have as much of that second
    assert parts(gpu, measured_times(gpu))[:2] == [(0, 7, "shared", 50), (0, 8, "shared", 50)]
    # AND all of the one after it is that run's
    assert by_stack(gpu, measured_times(gpu)) == {7: 50, 8: 90}


def test_runs_of_a_row_that_lasts_for_ever_count_for_its_last_second() -> None:
    times = [(0, K, 0, 7, 0, 1 << 62, 5, 10, NONE), (0, K, 0, 8, 0, 500, 5, 10, NONE)]
    gpu = replace(gpu_of([], [sample(40)]), times=np.array(times, KERNEL_TIME_DTYPE))
    assert by_stack(gpu, measured_times(gpu)) == {8: 40}


def test_a_second_without_launches_is_shared_as_the_nearest_earlier_one() -> None:
    gpu = gpu_of(
        [call(7, interval=2), call(8, interval=4), call(7, interval=9), call(8, interval=9)],
        [sample(10, interval=i) for i in (0, 2, 3, 4, 8, 9, 99)],
    )
    found = {row: {} for row in range(7)}
    for row, stack, certainty, count in parts(gpu):
        assert certainty == "shared"
        found[row][stack] = count
    only_7, only_8, both = {7: 10}, {8: 10}, {7: 5, 8: 5}
    assert list(found.values()) == [only_7, only_7, only_7, only_8, only_8, both, both]


def test_launches_whose_stack_was_lost_keep_their_share() -> None:
    assert parts(gpu_of([call(NONE)], [sample(3)])) == [(0, NONE, "unattributed", 3)]
    gpu = gpu_of([call(7, count=3), call(NONE)], [sample(4)])
    assert parts(gpu) == [(0, 7, "shared", 3), (0, NONE, "unattributed", 1)]


def test_many_small_rows_add_up_to_the_weights() -> None:
    # GIVEN a thousand rows of one sample, at forty instructions in each of twenty-five seconds
    calls = [call(7, work=3_000, interval=i) for i in range(25)]
    calls += [call(8, work=1_000, interval=i) for i in range(25)]
    samples = [sample(1, interval=i, offset=4 * j) for i, j in product(range(25), range(40))]
    gpu = gpu_of(calls, samples)
    # WHEN they are shared THEN three quarters go to the first stack in all,
    assert by_stack(gpu) == {7: 750, 8: 250}
    # and of every instruction as well, whole numbers permitting.
    first = Counter(samples[row][3] for row, stack, _, _ in parts(gpu) if stack == 7)
    assert len(first) == 40
    assert all(18 <= count <= 20 for count in first.values()), first


def test_one_sample_a_second_is_no_advantage_for_the_larger_stack() -> None:
    seconds = range(400)
    calls = [call(stack, count=4 - stack, interval=i) for i in seconds for stack in (1, 2, 3)]
    assert by_stack(gpu_of(calls, [sample(1, interval=i) for i in seconds])) == {
        1: 200,
        2: 133,
        3: 67,
    }


def test_a_stack_gets_nothing_of_a_second_in_which_it_did_not_launch() -> None:
    calls = [call(stack, interval=stack) for stack in range(70)] + [call(99, interval=70)]
    calls += [call(0, interval=70)]
    samples = [sample(3, interval=i, offset=4 * j) for i, j in product(range(70), range(5))]
    for row, stack, _, count in parts(gpu_of(calls, samples)):
        assert (samples[row][0], count) == (stack, 3)


def test_counts_beyond_the_precision_of_floats_are_kept_to_the_unit() -> None:
    large = 2**62 + 1
    gpu = gpu_of([call(7, count=2), call(8)], [sample(large), sample(large)])
    rows = attribute(gpu)
    for row in (0, 1):
        assert int(rows["count"][rows["sample"] == row].sum()) == large
    assert set(rows["stack"].tolist()) == {7, 8}


def test_each_part_says_how_its_stack_is_known() -> None:
    gpu = gpu_of(
        [call(7), call(8), call(7, kernel=OTHER)],
        [sample(10), sample(5, kernel=OTHER), sample(2, kernel=K_ELSEWHERE)],
    )
    assert parts(gpu) == [
        (0, 7, "shared", 5),
        (0, 8, "shared", 5),
        (1, 7, "exact", 5),
        (2, NONE, "unattributed", 2),
    ]


def test_launches_without_an_order_are_shared_by_the_second() -> None:
    # GIVEN a process of which no launch could be told apart from the others
    launches = np.zeros(2, LAUNCH_DTYPE)
    launches["stack"], launches["count"] = (0, 1), 1
    launches["first_ns"] = launches["last_ns"] = 10, 20
    launches["ended_ns"] = 100
    calls = np.zeros(2, CALL_DTYPE)
    calls["stack"], calls["count"] = (0, 1), 1
    samples = np.zeros(1, DEVICE_SAMPLE_DTYPE)
    samples["stack"], samples["count"] = NONE, 8
    gpu = GpuProfile(
        functions=(ApiFunction("cuda", "cuLaunchKernel", Operation.LAUNCH),),
        kernels=(Kernel(0, "cuda", "a", ""),),
        codes=(KernelCode(0, None, 0),),
        calls=calls,
        launches=launches,
        samples=samples,
    )
    assert attribute(gpu)["count"].tolist() == [4, 4]
