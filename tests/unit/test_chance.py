# SPDX-License-Identifier: Apache-2.0
"""Off-CPU stacks by chance: sums of those that were chosen, scaled to what all were."""

from __future__ import annotations

import time
from collections import Counter

import numpy as np
import numpy.typing as npt
import pytest
from aiflame.agent.kernel import abi
from aiflame.agent.model.profile import SampleClass
from aiflame.agent.processes.table import ProcessTable
from aiflame.agent.recording.chance import (
    EarlierStacks,
    Part,
    SharedOut,
    as_chosen,
    fill_in,
    share_out,
)
from aiflame.agent.recording.thread_times import ThreadTimes
from aiflame.agent.recording.window_builder import Bounds, WindowBuilder
from support import blind_inspector

_BLOCKED, _WAITING = SampleClass.BLOCKED, SampleClass.WAITING_TO_RUN
_IMAGE, _PID = 1_000, 7
_SECOND_NS = 1_000_000_000
# stack, tid, kind, weight, count, ns
Row = tuple[int, int, SampleClass, int, int, int]
_ANY = abi.NOT_SAMPLED_STACK


def _part(*rows: Row) -> Part:
    keys = [(stack, _IMAGE, _PID, tid, int(kind), weight) for stack, tid, kind, weight, *_ in rows]
    values = [(count, ns) for *_, count, ns in rows]
    return np.array(keys, abi.SUM_KEY_DTYPE), np.array(values, abi.SUM_VALUE_DTYPE)


def _total(tid: int, kind: SampleClass, count: int, ns: int) -> Row:
    return _ANY, tid, kind, abi.WEIGHT_NOT_CHOSEN, count, ns


def _found(shared: SharedOut) -> dict[tuple[int, int, int], tuple[int, int]]:
    """Count and ns by stack, thread and kind, added up."""
    counts, ns = Counter[tuple[int, int, int]](), Counter[tuple[int, int, int]]()
    for key, value in zip(shared.keys.tolist(), shared.values.tolist(), strict=True):
        stack, _, _, tid, kind, weight = key
        assert weight == abi.WEIGHT_EXACT
        counts[stack, tid, kind] += value[0]
        ns[stack, tid, kind] += value[1]
    return {name: (counts[name], ns[name]) for name in counts}


def test_exact_rows_stay_as_they_are() -> None:
    rows = _part((5, 8, _BLOCKED, abi.WEIGHT_EXACT, 3, 700))
    assert _found(share_out(rows, _part())) == {(5, 8, _BLOCKED): (3, 700)}


def test_chosen_waits_stand_for_all_of_their_thread_and_kind() -> None:
    # GIVEN one in ten chosen of a thread that waited in two stacks, another thread and an exact row
    rows = _part(
        (5, 8, _BLOCKED, 10, 1_000, 30_000),
        (6, 8, _BLOCKED, 10, 2_000, 10_000),
        (5, 9, _BLOCKED, 10, 1, 1_000),
        (5, 8, _WAITING, 10, 1, 5),
        (5, 8, _BLOCKED, abi.WEIGHT_EXACT, 1, 2_000),
    )
    totals = _part(
        *(_total(8, _BLOCKED, 27_000, 440_000), _total(9, _BLOCKED, 1, 1_000)),
        _total(8, _WAITING, 3, 6),
    )
    found = _found(share_out(rows, totals))
    # THEN each thread and kind has its total,
    assert found[5, 9, _BLOCKED] == (1, 1_000) and found[5, 8, _WAITING] == (3, 6)
    (count, ns), (other_count, other_ns) = found[5, 8, _BLOCKED], found[6, 8, _BLOCKED]
    assert (count + other_count, ns + other_ns) == (27_000 + 1, 440_000 + 2_000)
    # divided as the weighted sums say: of so many intervals there is next to no bias to correct.
    assert count == pytest.approx(9_000, rel=1e-3)
    assert ns == pytest.approx(330_000 + 2_000, rel=1e-3)


def test_weights_of_several_sizes_count_as_what_they_are() -> None:
    # GIVEN a thread whose chances changed: one of 90 ns for one, one of 10 ns for nine
    rows = _part((5, 8, _BLOCKED, 1, 5_000, 450_000), (6, 8, _BLOCKED, 9, 5_000, 50_000))
    found = _found(share_out(rows, _part(_total(8, _BLOCKED, 50_000, 1_800_000))))
    assert found[5, 8, _BLOCKED] == pytest.approx((5_000, 900_000), rel=1e-3)
    assert found[6, 8, _BLOCKED] == pytest.approx((45_000, 900_000), rel=1e-3)


def test_what_adds_up_already_is_left_alone() -> None:
    rows = _part((5, 8, _BLOCKED, 1, 1, 333_333_333), (6, 8, _BLOCKED, 1, 2, 666_666_661))
    found = _found(share_out(rows, _part(_total(8, _BLOCKED, 3, 999_999_994))))
    assert found == {(5, 8, _BLOCKED): (1, 333_333_333), (6, 8, _BLOCKED): (2, 666_666_661)}


def test_a_thread_of_which_nothing_was_chosen_says_so() -> None:
    rows = _part((5, 8, _BLOCKED, 4, 1, 30))
    shared = share_out(rows, _part(_total(8, _BLOCKED, 4, 100), _total(9, _WAITING, 7, 50)))
    assert _found(shared) == {(5, 8, _BLOCKED): (4, 100), (_ANY, 9, _WAITING): (7, 50)}
    assert shared.unsampled == 7


def test_what_was_chosen_before_stands_for_windows_in_which_nothing_is() -> None:
    # GIVEN a thread of which two stacks were chosen, and a third that windows know no more
    earlier = EarlierStacks(lambda stack: stack != 7)
    earlier.add(
        _part(
            (5, 8, _BLOCKED, 64, 1_000, 30_000),
            (6, 8, _BLOCKED, 64, 1_000, 10_000),
            (7, 8, _BLOCKED, 64, 5, 90),
            (4, 8, _BLOCKED, abi.WEIGHT_EXACT, 1, 900),
        ),
        _SECOND_NS,
    )
    # WHEN it waits and nothing is chosen of it, nor of another, of a third something is
    totals = _part(
        _total(8, _BLOCKED, 6, 400), _total(9, _BLOCKED, 1, 7), _total(3, _BLOCKED, 1, 2)
    )
    rows = _part((5, 3, _BLOCKED, 64, 1, 2))
    shared = share_out(rows, totals, earlier.of)
    # THEN its time is divided as it was, and the other's has no stack
    assert _found(shared) == {
        (5, 8, _BLOCKED): (3, 300),
        (6, 8, _BLOCKED): (3, 100),
        (_ANY, 9, _BLOCKED): (1, 7),
        (5, 3, _BLOCKED): (1, 2),
    }
    assert shared.unsampled == 1
    # AND what is chosen now counts alone
    shared = share_out(_part((9, 8, _BLOCKED, 64, 1, 1)), totals, earlier.of)
    assert _found(shared)[9, 8, _BLOCKED] == (6, 400)


def test_what_was_chosen_long_ago_stands_for_nothing() -> None:
    earlier = EarlierStacks(lambda stack: True)
    earlier.add(_part((5, 8, _BLOCKED, 64, 1, 30)), _SECOND_NS)
    thread = _part(_total(8, _BLOCKED, 6, 400))[0]
    earlier.add(_part(), 128 * _SECOND_NS)
    assert len(earlier.of(thread)[0]) == 1
    earlier.add(_part(), 130 * _SECOND_NS)
    assert len(earlier.of(thread)[0]) == 0


def test_what_is_remembered_is_bounded() -> None:
    earlier = EarlierStacks(lambda stack: True)
    for stack in range(1, 30_001):
        if stack % 1_000 == 0:
            rows = [(each, 8, _BLOCKED, 64, 1, 30) for each in range(stack - 999, stack + 1)]
            earlier.add(_part(*rows), _SECOND_NS)
    keys, values = earlier.of(_part(_total(8, _BLOCKED, 1, 1))[0])
    assert len(keys) == len(values) == 1 << 13
    assert keys["stack"].max() == 30_000


def test_long_waits_without_a_stack_have_those_of_their_thread() -> None:
    exact = abi.WEIGHT_EXACT
    # GIVEN long waits of a thread in two stacks, of another in one, and some that wait to run or
    # have never run
    walked = _part(
        *((5, 8, _BLOCKED, exact, 1, 3_000), (6, 8, _BLOCKED, exact, 2, 1_000)),
        *((7, 9, _BLOCKED, exact, 1, 9), (abi.NOT_RUN_STACK, 8, _WAITING, exact, 1, 5)),
    )
    # WHEN the first, and a third thread, have others that nobody has walked
    bare = _part(
        *((_ANY, 8, _BLOCKED, exact, 6, 8_000), (_ANY, 4, _BLOCKED, exact, 1, 50)),
        (_ANY, 8, _WAITING, exact, 6, 12),
    )
    filled = fill_in(bare, as_chosen(walked))
    # THEN these are in the stacks of their own thread and kind, as much in each as those that have
    # one, and all else is as it was.
    assert _found(filled) == {
        (5, 8, _BLOCKED): (2, 6_000),
        (6, 8, _BLOCKED): (4, 2_000),
        (_ANY, 4, _BLOCKED): (1, 50),
        (_ANY, 8, _WAITING): (6, 12),
    }
    assert filled.unsampled == 7


def test_samples_leave_room_to_remember_long_waits() -> None:
    earlier = EarlierStacks(lambda stack: True, are_long=True)
    earlier.add(as_chosen(_part((5, 8, _BLOCKED, abi.WEIGHT_EXACT, 1, 30))), _SECOND_NS)
    # GIVEN on-CPU samples of more threads than there is room for
    sample = (6, 0, SampleClass.ON_CPU, abi.WEIGHT_EXACT, 1, 10)
    samples = _part(*[sample] * 40_000)
    samples[0]["tid"] = np.arange(40_000)
    earlier.add(as_chosen(samples), 2 * _SECOND_NS)
    filled = fill_in(_part(_total(8, _BLOCKED, 1, 100)), _part(), earlier.of)
    assert _found(filled) == {(5, 8, _BLOCKED): (1, 100)}


def test_long_waits_are_remembered_as_they_last_were() -> None:
    earlier = EarlierStacks(lambda stack: True, are_long=True)
    # GIVEN a thread that waited in one place, and then in another
    earlier.add(_part((5, 8, _BLOCKED, 1, 1, 30), (5, 9, _BLOCKED, 1, 1, 30)), _SECOND_NS)
    earlier.add(_part((6, 8, _BLOCKED, 1, 1, 10), (6, 8, _WAITING, 1, 1, 1)), 2 * _SECOND_NS)
    bare = _part(*(_total(tid, _BLOCKED, 1, 100) for tid in (8, 9)))
    filled = fill_in(bare, _part(), earlier.of)
    assert _found(filled) == {(6, 8, _BLOCKED): (1, 100), (5, 9, _BLOCKED): (1, 100)}
    # Longer than others, and not for ever.
    earlier.add(_part(), 500 * _SECOND_NS)
    assert fill_in(bare, _part(), earlier.of).unsampled == 0
    earlier.add(_part(), 600 * _SECOND_NS)
    assert fill_in(bare, _part(), earlier.of).unsampled == 2


def test_chosen_waits_of_no_time_share_by_their_number() -> None:
    # GIVEN stacks that were chosen, but were past the boundary with all of their time
    rows = _part((5, 8, _BLOCKED, 2, 1, 0), (6, 8, _BLOCKED, 2, 3, 0))
    found = _found(share_out(rows, _part(_total(8, _BLOCKED, 8, 1_000))))
    assert found == {(5, 8, _BLOCKED): (2, 250), (6, 8, _BLOCKED): (6, 750)}


def test_nothing_is_nothing() -> None:
    assert _found(share_out(_part(), _part())) == {}


@pytest.mark.parametrize("seed", range(20))
def test_sums_are_whole_and_exact_whatever_comes(seed: int) -> None:
    # GIVEN rows of any size, up to what a day's window holds, and totals that differ from them
    random = np.random.default_rng(seed)
    n = 2_000
    kinds = [_BLOCKED, _WAITING, SampleClass.PREEMPTED]
    rows = _part(
        *(
            (
                int(random.integers(3, 50)),
                int(random.integers(1, 100)),
                kinds[int(random.integers(3))],
                int(random.choice([1, 2, 64, 65_536])),
                int(random.integers(0, 100)),
                int(10 ** random.uniform(0, 12)) - 1,
            )
            for _ in range(n)
        )
    )
    totals = [
        _total(tid, kind, int(random.integers(0, 10**6)), int(10 ** random.uniform(0, 14)))
        for tid in range(1, 120)
        for kind in kinds
    ]
    begun = time.process_time()
    shared = share_out(rows, _part(*totals))
    assert time.process_time() - begun < 1
    # THEN each thread and kind has exactly its total.
    whole = Counter[tuple[int, int]]()
    count = Counter[tuple[int, int]]()
    for (_, tid, kind), (number, ns) in _found(shared).items():
        whole[tid, kind] += ns
        count[tid, kind] += number
    for _, tid, kind, _, number, ns in totals:
        assert (count[tid, kind], whole[tid, kind]) == (number, ns)
    assert int(shared.values["ns"].max()) <= 10**14


def _drawn(
    random: np.random.Generator, lengths: npt.NDArray[np.int64], stacks: npt.NDArray[np.int64]
) -> dict[int, float]:
    """Draws one in 16 of waits; returns what is said of each stack."""
    is_chosen = random.random(len(lengths)) < 1 / 16
    rows = [
        (stack, 8, _BLOCKED, 16, 1, ns)
        for stack, ns in zip(stacks[is_chosen].tolist(), lengths[is_chosen].tolist(), strict=True)
    ]
    totals = _part(_total(8, _BLOCKED, len(lengths), int(lengths.sum())))
    found = Counter[int]()
    for (stack, _, _), (_, ns) in _found(share_out(_part(*rows), totals)).items():
        found[stack] += ns
    return dict(found)


def test_shares_are_right_on_average_where_few_are_chosen_in_each_window() -> None:
    # GIVEN windows of waits in two stacks, in one twice as long as in the other
    random = np.random.default_rng(1)
    waits, windows = 128, 4_000
    found = true = 0
    for _ in range(windows):
        stacks = random.integers(5, 7, waits)
        lengths = np.where(stacks == 5, 2_000, 1_000) * random.integers(50, 150, waits)
        # WHEN one in sixteen is chosen, eight in each
        found += _drawn(random, lengths, stacks).get(5, 0)
        true += int(lengths[stacks == 5].sum())
    # THEN the sum of all windows is right, within four of its standard errors; only scaled it would
    # be 3.4 % too small.
    assert found == pytest.approx(true, rel=0.02)


def test_shares_are_right_on_average() -> None:
    # GIVEN 4,000 waits in two stacks, of which those in one last ten times as long
    random = np.random.default_rng(1)
    stacks = random.integers(5, 7, 4_000)
    lengths = np.where(stacks == 5, 1_000, 100) * random.integers(50, 150, 4_000)
    true_ns = {stack: int(lengths[stacks == stack].sum()) for stack in (5, 6)}
    # WHEN that is drawn a hundred times
    drawn = [_drawn(random, lengths, stacks) for _ in range(100)]
    # THEN the mean is within five of its standard errors, and one draw is as far off as it may be.
    for stack, other in ((5, 6), (6, 5)):
        errors = np.array([one[stack] for one in drawn]) / true_ns[stack] - 1
        share = true_ns[other] / sum(true_ns.values())
        # One over the root of the number chosen, of each stack; lengths vary by 0.3 of their mean.
        expected = share * np.sqrt(2 * (1 + 0.3**2) / (2_000 / 16))
        assert abs(errors.mean()) < 5 * expected / np.sqrt(100)
        assert errors.std() == pytest.approx(expected, rel=0.4)


_START_NS, _TID = 1_000_000, 8
_SECOND_NS = 1_000_000_000


def _times() -> tuple[ThreadTimes, WindowBuilder]:
    window = WindowBuilder(Bounds())
    times = ThreadTimes(window, ProcessTable(_START_NS, lambda pid: _START_NS, blind_inspector()))
    times.start(_START_NS)
    return times, window


def _state(
    switched_ns: int, kind: SampleClass, weight: int, told: tuple[tuple[int, int], ...]
) -> npt.NDArray[np.void]:
    """A thread since the start; told: count and ns it was blocked for, of each total."""
    state = np.zeros(1, abi.THREAD_STATE_DTYPE)
    state["first_seen_ns"], state["switched_ns"] = _START_NS, _START_NS + switched_ns
    state["image"], state["tgid"], state["off_class"] = _START_NS, _PID, kind
    state["stack"], state["weight"] = 77, weight
    for slot, (count, ns) in enumerate(told):
        state["by_chance"]["count"][0, slot, _BLOCKED] = count
        state["by_chance"]["ns"][0, slot, _BLOCKED] = ns
    return state


def _close(
    times: ThreadTimes, at_ns: int, state: npt.NDArray[np.void], written: int
) -> tuple[list[tuple[int, int]], list[tuple[int, int, int]]]:
    """Returns count and ns of totals, and weight, stack and ns of what is charged."""
    tids = np.array([_TID], np.uint32)
    charged = times.close(_START_NS + at_ns, tids, state, set(), written=written)
    totals = [(int(v["count"]), int(v["ns"])) for v in charged.totals[1]]
    rows = zip(charged.keys, charged.values, strict=True)
    return totals, [(int(k["weight"]), int(k["stack"]), int(v["ns"])) for k, v in rows]


def test_each_window_has_what_was_told_since_the_last_of_its_kind() -> None:
    times, _ = _times()
    # GIVEN a thread that runs at each boundary; its two totals take turns
    found = []
    for at, told in enumerate([((5, 500), (0, 0)), ((5, 500), (2, 90)), ((9, 700), (2, 90))]):
        state = _state(at * _SECOND_NS, SampleClass.ON_CPU, abi.WEIGHT_EXACT, told)
        found.append(_close(times, (at + 1) * _SECOND_NS, state, at % 2)[0])
    assert found == [[(5, 500)], [(2, 90)], [(4, 200)]]


@pytest.mark.parametrize(
    ("age_ns", "weight", "expected"),
    [
        (50_000_000, 16, 16),
        (50_000_000, abi.WEIGHT_NOT_CHOSEN, abi.WEIGHT_NOT_CHOSEN),
        # Old enough to be exact whether it was chosen or not,
        (abi.OPEN_WAIT_NS, 16, abi.WEIGHT_EXACT),
        (abi.OPEN_WAIT_NS, abi.WEIGHT_NOT_CHOSEN, abi.WEIGHT_EXACT),
        # and exact from the beginning.
        (50_000_000, abi.WEIGHT_EXACT, abi.WEIGHT_EXACT),
    ],
)
def test_a_wait_that_is_open_at_a_boundary_has_a_weight_by_its_age(
    age_ns: int, weight: int, expected: int
) -> None:
    times, _ = _times()
    state = _state(_SECOND_NS - age_ns, _BLOCKED, weight, ((0, 0), (0, 0)))
    assert _close(times, _SECOND_NS, state, 0) == ([], [(expected, 77, age_ns)])


def test_a_thread_that_ends_leaves_nothing_untold() -> None:
    times, _ = _times()
    state = _state(0, SampleClass.ON_CPU, abi.WEIGHT_EXACT, ((5, 500), (0, 0)))
    _close(times, _SECOND_NS, state, 0)
    # WHEN it ends in the next window
    end = np.zeros(1, abi.THREAD_EVENT_DTYPE)
    end["ns"], end["first_seen_ns"] = _START_NS + _SECOND_NS + 7, _START_NS
    end["tid"], end["tgid"], end["image"] = _TID, _PID, _START_NS
    end["by_chance"] = state["by_chance"]
    end["by_chance"]["count"][0, 1, _BLOCKED], end["by_chance"]["ns"][0, 1, _BLOCKED] = 3, 33
    times.end(end.tobytes())
    none = np.zeros(0, abi.THREAD_STATE_DTYPE)
    charged = times.close(
        _START_NS + 2 * _SECOND_NS, np.zeros(0, np.uint32), none, set(), written=1
    )
    # THEN that has what it did since, and no more.
    assert [(int(v["count"]), int(v["ns"])) for v in charged.totals[1]] == [(3, 33)]
