# SPDX-License-Identifier: Apache-2.0
"""Samples with times and launches in order: whose are they?"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from aiflame.agent.model.gpu import (
    CALL_DTYPE,
    DEVICE_SAMPLE_DTYPE,
    LAUNCH_DTYPE,
    NO_END,
    NONE,
    ApiFunction,
    GpuProfile,
    Kernel,
    KernelCode,
    Operation,
)
from aiflame.gpu.attribution import Certainty, attribute
from hypothesis import given, settings
from hypothesis import strategies as st

_US, _MS = 1_000, 1_000_000
_A, _B = 0, 1  # kernels, and their codes
_Q, _R = 0x1000, 0x2000  # queues

Launch = tuple[int, int, int, int, int]  # at, end, stack, kernel, queue


def profile(
    launches: list[Launch], samples: list[tuple[int, int]], work: dict[int, int] | None = None
) -> GpuProfile:
    """A process with launches, and samples of (time, kernel)."""
    rows = [
        (stack, 0, 0, kernel, queue, at, at, end, 1, (work or {}).get(stack, 64))
        for at, end, stack, kernel, queue in launches
    ]
    calls = [(0, stack, 0, 0, kernel, 0, 1, 64, 0) for _, _, stack, kernel, _ in launches]
    return GpuProfile(
        functions=(ApiFunction("opencl", "launch", Operation.LAUNCH),),
        kernels=(Kernel(0, "opencl", "a", ""), Kernel(0, "opencl", "b", "")),
        codes=(KernelCode(_A, None, 0), KernelCode(_B, None, 0)),
        calls=np.array(calls, CALL_DTYPE),
        launches=np.array(rows, LAUNCH_DTYPE),
        samples=np.array(
            [(0, 0, kernel, 0, 0, NONE, at, at, 1) for at, kernel in samples], DEVICE_SAMPLE_DTYPE
        ),
    )


def found(gpu: GpuProfile) -> list[tuple[int, str]]:
    """The stack of each sample, and how it is known."""
    return [
        (stack, Certainty(certainty).label) for _, stack, certainty, _ in attribute(gpu).tolist()
    ]


def test_launch_and_wait_in_turn_is_exact() -> None:
    # GIVEN launches from two stacks in turn, each awaited before the next
    launches = [(i * 10 * _MS, (i + 1) * 10 * _MS, 1 + i % 2, _A, _Q) for i in range(6)]
    samples = [(at * _MS, _A) for at in (15, 19, 21, 35, 45, 58)]
    # THEN each sample is that of the launch that it lies in
    assert found(profile(launches, samples)) == [
        *((2, "exact"), (2, "exact"), (1, "exact"), (2, "exact"), (1, "exact"), (2, "exact")),
    ]


def test_what_ran_when_nothing_had_been_awaited_yet_is_no_certainty() -> None:
    # It may have been launched before the recording.
    launches = [(0, 10 * _MS, 1, _A, _Q), (10 * _MS, 20 * _MS, 2, _A, _Q)]
    assert found(profile(launches, [(5 * _MS, _A), (15 * _MS, _A)])) == [
        (1, "shared"),
        (2, "exact"),
    ]


def test_a_first_launch_whose_stack_was_cut_costs_itself_alone() -> None:
    launches = [(0, 10 * _MS, 9, _A, _Q)]
    launches += [(i * 10 * _MS, (i + 1) * 10 * _MS, 1, _A, _Q) for i in range(1, 9)]
    samples = [(at * _MS + 5 * _MS, _A) for at in range(0, 90, 10)]
    assert found(profile(launches, samples)) == [(9, "shared"), *[(1, "exact")] * 8]


def test_another_kernel_between_tells_queued_launches_apart() -> None:
    # GIVEN a(1), b(3), a(2) queued at once after an awaited launch
    at, end = 10 * _MS, 100 * _MS
    launches = [(0, at, 3, _B, _Q)]
    launches += [(at + i, end, s, k, _Q) for i, (s, k) in enumerate([(1, _A), (3, _B), (2, _A)])]
    samples = [(20 * _MS, _A), (40 * _MS, _A), (50 * _MS, _B), (60 * _MS, _A), (70 * _MS, _A)]
    # THEN what comes before b was launched before it, and what comes after it, after it
    assert found(profile(launches, samples)) == [
        *((1, "exact"), (1, "exact"), (3, "exact"), (2, "exact"), (2, "exact")),
    ]


def test_queued_launches_of_one_kernel_take_turns_as_long_as_their_work() -> None:
    launches = [(0, 10 * _MS, 3, _B, _Q)]
    launches += [(10 * _MS + i, 50 * _MS, s, _A, _Q) for i, s in enumerate([1, 2])]
    samples = [(at * _MS, _A) for at in (12, 20, 30, 38, 42, 48)]
    # 30 ms of the 40 are the first one's.
    assert found(profile(launches, samples, {1: 300, 2: 100})) == [
        *((1, "shared"), (1, "shared"), (1, "shared"), (1, "shared")),
        *((2, "shared"), (2, "shared")),
    ]


def test_what_launches_cost_is_learnt_from_how_long_stretches_took() -> None:
    # GIVEN launches of equal work, of which those of stack 1 take five times as long
    launches, at = [], 0
    for i in range(40):
        ones = 1 + i % 3
        end = at + (50 * ones + 10 * (4 - ones)) * _MS
        launches += [(at + j, end, 1 if j < ones else 2, _A, _Q) for j in range(4)]
        at = end
    # WHEN one of each was queued, THEN five sixths of the time are the first one's
    launches += [(at, at + 60 * _MS, 1, _A, _Q), (at + 1, at + 60 * _MS, 2, _A, _Q)]
    samples = [(at + ms * _MS, _A) for ms in (5, 45, 55)]
    assert [stack for stack, _ in found(profile(launches, samples))] == [1, 1, 2]


@pytest.mark.parametrize(("stretches", "has_samples"), [(12, True), (3, False)])
def test_what_others_take_of_a_device_is_no_cost_of_launches(
    stretches: int, has_samples: bool
) -> None:
    # GIVEN launches of equal work, and others on the device whenever many were of stack 1, of which
    # either samples tell, or that there are few stretches
    launches: list[Launch] = []
    samples, at = [], 0
    for i in range(stretches):
        ones = 1 + i % 3
        end = at + (40 + 40 * ones) * _MS
        launches += [(at + j, end, 1 if j < ones else 2, _A, _Q) for j in range(4)]
        samples += [(at + (end - at) * k // 80, _A) for k in range(80 if has_samples else 0)]
        at = end
    # WHEN one of each was queued, THEN half the time is the first one's
    launches += [(at, at + 60 * _MS, 1, _A, _Q), (at + 1, at + 60 * _MS, 2, _A, _Q)]
    samples += [(at + ms * _MS, _A) for ms in range(0, 60, 2)]
    parts = found(profile(launches, samples))[-30:]
    assert 13 <= sum(stack == 1 for stack, _ in parts) <= 17


# Of kernels A, B, A, B, of stacks 1 to 4: a launch of A costs 6 and 2 ms, of B 1 ms each.
_IN_TURN = ((1, _A, 6), (2, _B, 1), (3, _A, 2), (4, _B, 1))


def in_turn(rounds: int, lead_ms: int) -> tuple[list[Launch], list[tuple[int, int]], list[int]]:
    """Waits that are all alike, a sample in each; and the stack of each sample.

    Args:
        rounds: How many waits.
        lead_ms: So long after the enqueueing work begins.
    """
    launches: list[Launch] = []
    samples, stacks = [], []
    length_ms = lead_ms + sum(ms for _, _, ms in _IN_TURN)
    for number in range(rounds):
        at = number * length_ms * _MS
        launches += [
            (at + i, at + length_ms * _MS, stack, kernel, _Q)
            for i, (stack, kernel, _) in enumerate(_IN_TURN)
        ]
        after_us = number * 997 % 10_000  # of the work, in no order
        end_us = 0
        for stack, kernel, ms in _IN_TURN:
            end_us += ms * 1000
            if after_us < end_us:
                samples.append((at + lead_ms * _MS + after_us * _US, kernel))
                stacks.append(stack)
                break
    return launches, samples, stacks


def test_samples_tell_what_a_work_item_of_each_kernel_costs() -> None:
    # GIVEN work items of A that cost 8 times as much as those of B, and few samples
    launches, samples, stacks = in_turn(60, lead_ms=0)
    work = {1: 600, 2: 800, 3: 200, 4: 800}
    parts = found(profile(launches, samples, work))
    # THEN a sample in each of many waits that are alike is where its time is
    wrong = sum(stack != true for (stack, _), true in zip(parts, stacks, strict=True))
    assert wrong <= 3


@pytest.mark.parametrize("lead_ms", [0, 5])
def test_other_kernels_between_tell_what_launches_of_equal_work_cost(lead_ms: int) -> None:
    # GIVEN launches of A of equal work, of which one takes three times as long, in waits that are
    # all alike and of which a third may be idle
    launches, samples, stacks = in_turn(400, lead_ms)
    parts = found(profile(launches, samples))
    # THEN those of B between them tell
    wrong = sum(stack != true for (stack, _), true in zip(parts, stacks, strict=True))
    assert wrong <= 0.03 * len(stacks)


def test_stretches_with_launches_that_had_no_order_tell_no_costs() -> None:
    # GIVEN waits that seem to be for one launch of stack 1 alone and take long, since others were
    # launched of which the order was not kept
    launches: list[Launch] = [(i * 100 * _MS, (i + 1) * 100 * _MS, 1, _A, _Q) for i in range(40)]
    lost = [(i * 100 * _MS, NO_END, 2, _A, 0) for i in range(40)]
    begin = 4000 * _MS
    launches += [
        (begin + i * 20 * _MS + j, begin + (i + 1) * 20 * _MS, 1 + (i + j) % 2, _A, _Q)
        for i in range(40)
        for j in range(2)
    ]
    samples = [(begin + (20 * i + ms) * _MS, _A) for i in range(40) for ms in (3, 7, 13, 17)]
    # THEN launches of equal work have equal shares
    parts = found(profile(lost + launches, samples))
    assert sum(stack == 1 for stack, _ in parts) == len(samples) / 2


def test_only_one_queue_that_can_have_run_is_exact() -> None:
    launches = [
        *((0, 10 * _MS, 1, _A, _Q), (0, 12 * _MS, 2, _A, _R)),
        *((20 * _MS, 30 * _MS, 1, _A, _Q), (40 * _MS, 50 * _MS, 2, _A, _R)),
    ]
    assert found(profile(launches, [(25 * _MS, _A), (45 * _MS, _A)])) == [
        (1, "exact"),
        (2, "exact"),
    ]


def test_two_queues_at_once_are_shared() -> None:
    launches = [
        *((0, 10 * _MS, 1, _A, _Q), (0, 10 * _MS, 2, _A, _R)),
        *((20 * _MS, 40 * _MS, 1, _A, _Q), (20 * _MS, 40 * _MS, 2, _A, _R)),
    ]
    parts = found(profile(launches, [(at * _MS, _A) for at in (22, 26, 34, 38)]))
    assert [certainty for _, certainty in parts] == ["shared"] * 4
    assert {stack for stack, _ in parts} == {1, 2}


def test_a_queue_that_is_not_in_order_bounds_nothing_by_its_order() -> None:
    # GIVEN a(1) and b(3) queued again and again, with samples of b before those of a
    launches, samples = [(0, 10 * _MS, 3, _B, _Q)], []
    for i in range(1, 20):
        at, end = i * 10 * _MS, (i + 1) * 10 * _MS
        launches += [(at, end, 1, _A, _Q), (at + 1, end, 3, _B, _Q), (at + 2, end, 2, _A, _Q)]
        samples += [(at + 3 * _MS, _B), (at + 5 * _MS, _A), (at + 7 * _MS, _B), (at + 9 * _MS, _A)]
    # THEN nothing of a is said to be exact
    parts = found(profile(launches, samples))
    assert {certainty for stack, certainty in parts if stack != 3} == {"shared"}


def test_last_launches_whose_end_nothing_tells_take_turns_by_their_samples() -> None:
    # GIVEN stretches of two launches and 30 samples, and after them one of two launches whose end
    # is not known, on a device that others have taken half the time of
    launches, samples = [], []
    for i in range(20):
        at, end = i * 60 * _MS, (i + 1) * 60 * _MS
        launches += [(at, end, 1, _A, _Q), (at + 1, end, 2, _A, _Q)]
        samples += [(at + ms * _MS, _A) for ms in range(0, 60, 2)]
    last = 20 * 60 * _MS
    launches += [(last, NO_END, 1, _A, _Q), (last + 1, NO_END, 2, _A, _Q)]
    samples += [(last + ms * _MS, _A) for ms in range(0, 120, 4)]
    # THEN each has as many as in the other stretches, and not the first one those of 30 ms
    parts = found(profile(launches, samples, {1: 100, 2: 100}))[-30:]
    assert 13 <= sum(stack == 1 for stack, _ in parts) <= 17


def test_while_launches_had_no_order_times_tell_nothing() -> None:
    launches = [(i * 10 * _MS, (i + 1) * 10 * _MS, 1 + i % 2, _A, _Q) for i in range(4)]
    launches += [(40 * _MS, NO_END, 1, _A, 0), (40 * _MS, NO_END, 2, _A, 0)]
    gpu = profile(launches, [(25 * _MS, _A), (45 * _MS, _A)])
    gpu.launches["last_ns"][-2:] = 60 * _MS
    (first, second) = found(gpu)
    assert (first, second[1]) == ((1, "exact"), "shared")


def test_samples_that_no_launch_can_own_are_shared_by_the_second() -> None:
    launches = [(10 * _MS, 20 * _MS, 1, _A, _Q), (20 * _MS, 30 * _MS, 2, _A, _Q)]
    ((_, certainty),) = found(profile(launches, [(5 * _MS, _A)]))
    assert certainty == "shared"


def test_what_the_host_does_after_a_wait_is_no_part_of_launches() -> None:
    # GIVEN four launches of 1 ms, two from each of two stacks, awaited and then 20 ms of host work
    launches, samples, truth, at = [], [], [], 0
    random = np.random.default_rng(1)
    for _ in range(100):
        launches += [(at + j, at + 24 * _MS, 1 + j // 2, _A, _Q) for j in range(4)]
        for taken_at in np.sort(random.integers(1_000, 4 * _MS, 2)).tolist():
            samples.append((at + taken_at, _A))
            truth.append(1 + taken_at // (2 * _MS))
        at += 24 * _MS
    parts = found(profile(launches, samples))
    right = sum(stack == true for (stack, _), true in zip(parts, truth, strict=True))
    assert right > 0.9 * len(truth)


def test_a_launch_that_nobody_waits_for_leaves_other_queues_as_they_are() -> None:
    launches = [(0, NO_END, 3, _B, _R)]
    launches += [(i * 10 * _MS, (i + 1) * 10 * _MS, 1 + i % 2, _A, _Q) for i in range(6)]
    samples = [(at * _MS, _A) for at in (15, 25, 35, 45, 55)]
    assert found(profile(launches, samples)) == [
        *((2, "exact"), (1, "exact"), (2, "exact"), (1, "exact"), (2, "exact")),
    ]


def test_without_any_known_end_the_second_is_shared() -> None:
    launches = [(i * 10 * _MS + j, NO_END, 1 + j, _A, _Q) for i in range(20) for j in (0, 1)]
    samples = [(i * 10 * _MS + ms * _MS, _A) for i in range(20) for ms in (2, 7)]
    parts = found(profile(launches, samples))
    assert {how for _, how in parts} == {"shared"}
    assert abs(sum(stack == 1 for stack, _ in parts) - 20) <= 1


def test_what_had_no_order_may_run_until_the_next_known_end() -> None:
    launches = [(i * 10 * _MS, (i + 1) * 10 * _MS, 1, _A, _Q) for i in range(4)]
    launches += [(41 * _MS, 150 * _MS, 1, _A, _Q), (40 * _MS, NO_END, 2, _A, 0)]
    ((_, certainty),) = found(profile(launches, [(60 * _MS, _A)]))
    assert certainty == "shared"


def test_the_order_in_which_threads_begin_to_launch_bounds_nothing() -> None:
    at, end = 10 * _MS, 100 * _MS
    launches = [(0, at, 3, _B, _Q)]
    launches += [(at + i, end, s, k, _Q) for i, (s, k) in enumerate([(1, _A), (3, _B), (2, _A)])]
    gpu = profile(launches, [(20 * _MS, _A), (50 * _MS, _B), (60 * _MS, _A)])
    gpu.launches["thread"][1] = 7
    assert {how for stack, how in found(gpu) if stack != 3} == {"shared"}


def test_a_sample_at_the_edge_costs_the_order_of_others_nothing() -> None:
    launches, samples = [(0, 10 * _MS, 3, _B, _Q)], []
    for i in range(1, 101):
        at, end = i * 10 * _MS, (i + 1) * 10 * _MS
        launches += [(at, end, 1, _A, _Q), (at + 1, end, 3, _B, _Q), (at + 2, end, 2, _A, _Q)]
        samples += [(at + 2 * _MS, _A), (at + 5 * _MS, _B), (at + 8 * _MS, _A)]
    # One that was taken late: a of stack 1 after b of the same stretch, and b after a again.
    samples[4] = (samples[4][0] + 4 * _MS, _B)
    parts = found(profile(launches, samples))
    assert sum(how == "exact" for _, how in parts) > 0.95 * len(parts)


@st.composite
def _random_runs(draw: st.DrawFn) -> tuple[list[Launch], list[tuple[int, int]], list[int]]:
    """A queue that runs in order, launches with or without waits, and who was sampled."""
    at, launches, samples, truth = 0, [], [], []
    for _ in range(draw(st.integers(1, 12))):
        batch = draw(
            st.lists(st.tuples(st.integers(1, 3), st.integers(0, 1)), min_size=1, max_size=5)
        )
        took = [draw(st.integers(1, 50)) * _US for _ in batch]
        end = at + sum(took)
        start = at
        for number, ((stack, kernel), took_ns) in enumerate(zip(batch, took, strict=True)):
            # Kernel b has stacks of its own.
            stack += 10 * kernel
            launches.append((at + number, end, stack, kernel, _Q))
            for _ in range(draw(st.integers(0, 2))):
                samples.append((start + draw(st.integers(number + 1, took_ns - 1)), kernel))
                truth.append(stack)
            start += took_ns
        at = end
    return launches, samples, truth


@settings(max_examples=300, deadline=None)
@given(_random_runs())
def test_what_is_said_to_be_exact_is_right(
    case: tuple[list[Launch], list[tuple[int, int]], list[int]],
) -> None:
    launches, samples, truth = case
    parts = found(profile(launches, samples))
    assert len(parts) == len(truth)
    for (stack, certainty), right in zip(parts, truth, strict=True):
        assert certainty != "unattributed"
        assert certainty != "exact" or stack == right


@pytest.mark.parametrize("size", [0, 1])
def test_little_or_nothing_is_no_error(size: int) -> None:
    launches: list[Launch] = [(0, NO_END, 1, _A, _Q), (1, NO_END, 2, _A, _Q)][:size]
    assert len(found(profile(launches, [(5, _A)]))) == 1


def test_the_order_of_rows_makes_no_difference() -> None:
    random = np.random.default_rng(1)
    launches = [(i * 10 * _MS, (i // 3 + 1) * 30 * _MS, 1 + i % 2, i % 2, _Q) for i in range(30)]
    samples = [(int(at), int(at) % 2) for at in random.integers(0, 300 * _MS, 50)]
    gpu = profile(launches, samples)
    expected = attribute(gpu)
    shuffled: npt.NDArray[np.void] = gpu.launches[random.permutation(len(launches))]
    gpu.launches[:] = shuffled
    assert attribute(gpu).tolist() == expected.tolist()
