# SPDX-License-Identifier: Apache-2.0
"""The cost controller, on loads that were recorded, and on hostile ones."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import pytest
from aiflame.agent.fleet.cost import Budget, CostController, Prices
from aiflame.agent.kernel.abi import WEIGHT_MAX
from aiflame.agent.recording.chance import Chances, Load
from aiflame.gpu.base import HelperLoad

_S = 1_000_000_000
# What this host's kernel says in the tests: dearer than the prices that are given.
_TRUE_SWITCH, _TRUE_STACK = 650.0, 6_000.0
_PROGRAMS = Budget(host_share=0, cpu_share=0.10, with_own_cpu=False)


def _host(
    chances: Chances, switches: Mapping[int, int], seldom: Mapping[int, int] | None = None
) -> Load:
    """A second of a host: switches by cgroup, of them some of threads that wait seldom."""
    seldom = seldom or {}
    stacks = 0
    for cgroup, count in switches.items():
        one_in = chances.by_cgroup.get(cgroup, chances.one_in)
        few = seldom.get(cgroup, 0)
        # Threads that wait 20 times a second, at the first spacing: fewer of their waits at more.
        few_taken = few * min(50_000_000 / max(chances.spacing_ns, 1), 1) if one_in > 1 else few
        stacks += round((count - few) / one_in + few_taken)
    bpf_ns = round(sum(switches.values()) * _TRUE_SWITCH + stacks * _TRUE_STACK)
    return Load(_S, switches, stacks, 0, 0, own_cpu_ns=0, bpf_ns=bpf_ns)


def _cost(load: Load) -> float:
    assert load.bpf_ns is not None
    return load.bpf_ns / _S


def _run(
    controller: CostController, seconds: int, load: Callable[[int], Mapping[int, int]]
) -> list[float]:
    chances, costs = controller.first(), []
    for second in range(seconds):
        found = _host(chances, load(second))
        costs.append(_cost(found))
        chances = controller.next(found)
    return costs


def test_a_steady_load_is_within_its_budget_and_stays_so() -> None:
    controller = CostController(2, _PROGRAMS)
    costs = _run(controller, 20, lambda _: {1: 50_000, 2: 300})
    # THEN within two windows the budget holds, most of it is used, and nothing swings.
    assert max(costs[2:]) < 0.10
    assert min(costs[4:]) > 0.05
    assert max(costs[8:]) - min(costs[8:]) < 0.01
    assert not controller.is_over
    # AND the quiet cgroup has all its stacks.
    assert controller.chances.by_cgroup[2] == 1
    assert controller.chances.by_cgroup[1] > 1


def test_a_jump_of_the_load_is_met_within_two_windows() -> None:
    controller = CostController(2, _PROGRAMS)
    costs = _run(controller, 30, lambda s: {1: 100_000 if s >= 10 else 1_000, 2: 50})
    assert all(cost < 0.10 for cost in costs[2:10])
    assert all(cost < 0.10 for cost in costs[11:])
    assert controller.chances.by_cgroup[2] == 1


def test_a_load_that_comes_and_goes_does_not_break_the_budget() -> None:
    controller = CostController(2, _PROGRAMS)
    costs = _run(controller, 40, lambda s: {1: 80_000 if s % 2 else 100})
    assert np.mean(costs[2:]) < 0.10
    assert max(costs[4:]) < 0.11


def test_a_load_that_has_gone_gets_its_stacks_back() -> None:
    controller = CostController(2, _PROGRAMS)
    _run(controller, 40, lambda s: {1: 100_000 if s < 5 else 500})
    assert controller.chances.by_cgroup[1] == 1


def test_busy_cgroups_do_not_take_from_quiet_ones() -> None:
    # GIVEN a hundred quiet cgroups, and three that are busy in different degrees
    controller = CostController(2, _PROGRAMS)
    quiet = dict.fromkeys(range(100), 20)
    _run(controller, 10, lambda _: {**quiet, 200: 10_000, 201: 30_000, 202: 50_000})
    chances = controller.chances.by_cgroup
    # THEN the quiet have all, and the others about as many stacks each as the next one.
    assert {chances[cgroup] for cgroup in quiet} == {1}
    taken = [10_000 / chances[200], 30_000 / chances[201], 50_000 / chances[202]]
    assert max(taken) < 1.5 * min(taken)


def test_prices_are_learnt_from_what_the_kernel_counts() -> None:
    controller = CostController(2, _PROGRAMS, Prices(switch=300, stack=2_000))
    costs = _run(controller, 20, lambda s: {1: 40_000 + 1_000 * (s % 3)})
    # What was thought to cost a third of it would have broken the budget.
    assert max(costs[3:]) < 0.10


def test_without_the_kernels_account_prices_are_believed() -> None:
    controller = CostController(2, _PROGRAMS)
    load = Load(_S, {1: 50_000}, 800, 0, 0, own_cpu_ns=0, bpf_ns=None)
    one_in = controller.next(load).by_cgroup[1]
    prices = controller.prices
    assert 50_000 * prices.switch + 50_000 / one_in * prices.stack <= 0.10 * _S


def test_what_is_planned_does_not_depend_on_how_long_windows_are() -> None:
    # GIVEN a load that has gone, told by the second or in fives
    by_second, in_fives = CostController(2, _PROGRAMS), CostController(2, _PROGRAMS)
    for controller in (by_second, in_fives):
        controller.next(_host(controller.chances, {1: 50_000, 2: 500}))
    for _ in range(10):
        by_second.next(Load(_S, {2: 500}, 10, 0, 0, 0, 400_000))
    for _ in range(2):
        in_fives.next(Load(5 * _S, {2: 2_500}, 50, 0, 0, 0, 2_000_000))
    # THEN as much of it is remembered
    (one, five) = (controller.chances.by_cgroup[1] for controller in (by_second, in_fives))
    assert five == pytest.approx(one, rel=0.1)


def test_exact_totals_that_take_the_budget_alone_are_said_and_leave_some_stacks() -> None:
    controller = CostController(2, Budget(host_share=0, cpu_share=0.03, with_own_cpu=False))
    costs = _run(controller, 9, lambda _: {1: 100_000, 2: 100})
    assert controller.take_said() == []  # it might be a start
    costs += _run(controller, 20, lambda _: {1: 100_000, 2: 100})
    assert controller.is_over
    (said,) = controller.take_said()
    assert re.fullmatch(
        r"recording takes \d+\.\d % of one CPU, more than its budget of 3\.0 %,"
        r" with as little done as there may be",
        said,
    )
    # What is above what cannot be helped is a tenth of the budget, and what prices are off.
    stacks = 0.1 * 0.03 * _TRUE_STACK / Prices().stack
    assert max(costs[3:]) < 100_100 * _TRUE_SWITCH / _S + 1.1 * stacks
    assert controller.chances.by_cgroup[1] < WEIGHT_MAX


def test_a_load_that_is_remembered_is_no_cost() -> None:
    # GIVEN a load that takes more than all of the budget, and has gone
    controller = CostController(2, Budget(host_share=0, cpu_share=0.03, with_own_cpu=False))
    _run(controller, 5, lambda _: {1: 100_000})
    assert controller.is_over
    _run(controller, 12, lambda _: {1: 100})
    # THEN it is planned for, and nobody says that it is exceeded.
    assert not controller.is_over
    assert controller.take_said() == []


def test_the_agent_pays_all_it_takes_from_its_budget() -> None:
    # GIVEN 64 CPUs, of which the agent may take 0.64 of one
    budget = Budget()
    assert budget.ns_per_s(64) == pytest.approx(0.64 * _S)
    assert budget.ns_per_s(2) == pytest.approx(0.03 * _S)
    controller, prices = CostController(64, budget), Prices()
    # WHEN its process, samples and calls take some of that
    load = Load(
        _S,
        {1: 300_000},
        5_000,
        samples=20_000,
        calls=10_000,
        own_cpu_ns=50_000_000,
        bpf_ns=None,
    )
    one_in = controller.next(load).by_cgroup[1]
    whole = 50_000_000 + 20_000 * prices.sample + 10_000 * (prices.call + prices.trap)
    whole += 300_000 * prices.switch + 300_000 / one_in * prices.stack
    assert 0.5 * 0.64 * _S < whole <= 0.64 * _S


def test_threads_that_wait_seldom_are_thinned_out_only_when_they_are_too_many() -> None:
    # GIVEN a host of which most switches are of threads that wait 20 times a second
    controller = CostController(2, _PROGRAMS)
    chances = controller.first()
    before = chances.spacing_ns
    costs = []
    for _ in range(12):
        load = _host(chances, {1: 60_000}, {1: 40_000})
        costs.append(_cost(load))
        chances = controller.next(load)
    assert chances.spacing_ns > before
    assert costs[-1] < 0.10
    # WHEN they have gone
    for _ in range(20):
        chances = controller.next(_host(chances, {1: 1_000}))
    # THEN they would have all their stacks again.
    assert chances.spacing_ns == before


@pytest.mark.parametrize("seed", range(10))
def test_chances_are_chances_whatever_comes(seed: int) -> None:
    random = np.random.default_rng(seed)
    controller = CostController(int(random.integers(1, 512)))
    for _ in range(50):
        loads = {
            int(cgroup): int(10 ** random.uniform(0, 9))
            for cgroup in random.integers(0, 2**63, int(random.integers(0, 200)))
        }
        load = Load(
            int(random.choice([0, 1, 10**6, _S, 10**13])),
            loads,
            int(random.integers(10**11)),
            int(random.integers(10**9)),
            int(random.integers(10**9)),
            int(random.integers(10**12)),
            bpf_ns=None if random.random() < 0.5 else int(random.integers(10**12)),
        )
        chances = controller.next(load)
        assert 1 <= chances.one_in <= WEIGHT_MAX
        assert all(1 <= one_in <= WEIGHT_MAX for one_in in chances.by_cgroup.values())
        assert len(chances.by_cgroup) <= 4096
        assert 0 < chances.spacing_ns < 2**40
        assert math.isfinite(controller.cost_ns_per_s)


def test_a_cgroup_that_seldom_switches_has_all_of_its_stacks_beside_a_busy_one() -> None:
    controller = CostController(2, _PROGRAMS)
    switches = {1: 250_000, 2: 1}
    chances = controller.next(Load(5 * _S, switches, 1_000, 0, 0, own_cpu_ns=0, bpf_ns=None))
    assert chances.by_cgroup[1] > 1
    assert chances.by_cgroup[2] == 1


@pytest.mark.parametrize("window_s", [1, 5])
def test_threads_that_wait_seldom_are_within_the_budget_as_soon_with_longer_windows(
    window_s: int,
) -> None:
    controller = CostController(2, Budget(host_share=0, cpu_share=0.03, with_own_cpu=False))
    chances = controller.first()
    # GIVEN 20,000 waits a second of threads that each take a stack once in the spacing
    for second in range(0, 15, window_s):
        stacks = round(20_000 * window_s * min(50_000_000 / chances.spacing_ns, 1))
        cost = stacks * Prices().stack / window_s
        if second >= 5:
            assert cost <= 0.03 * _S
        switches = {1: 20_000 * window_s}
        chances = controller.next(
            Load(window_s * _S, switches, stacks, 0, 0, own_cpu_ns=0, bpf_ns=None)
        )


def test_threads_that_wait_seldom_are_thinned_out_though_chances_take_a_little_too_much() -> None:
    controller = CostController(2, Budget(host_share=0, cpu_share=0.03, with_own_cpu=False))
    chances = controller.first()
    for _ in range(30):
        # GIVEN waits of 1.2 s, twenty times as many as there may be stacks, and others, of which
        # chance takes a tenth more than there may be
        affordable = 0.03 * 0.85 * _S / Prices().stack
        seldom = 20 * affordable * min(1.2e9 / max(chances.spacing_ns, 1), 1)
        switches = round(1.1 * affordable * chances.one_in)
        load = Load(_S, {1: switches}, round(1.1 * affordable + seldom), 0, 0, 0, bpf_ns=None)
        chances = controller.next(load)
    # THEN few of those are left.
    assert 20 * 1.2e9 / chances.spacing_ns < 1


def test_cgroups_beyond_those_that_are_told_apart_have_the_chance_of_the_busiest() -> None:
    controller = CostController(2, _PROGRAMS)
    switches = {cgroup: 10 + cgroup for cgroup in range(6_000)}
    chances = controller.next(Load(_S, switches, 60_000, 0, 0, own_cpu_ns=0, bpf_ns=None))
    assert len(chances.by_cgroup) == 4096
    assert 5_999 in chances.by_cgroup
    assert chances.one_in == max(chances.by_cgroup.values())


def test_a_window_of_no_length_changes_nothing() -> None:
    controller = CostController(2)
    assert controller.next(Load(0, {}, 0, 0, 0, 0, None)) == controller.first()


# What programs at switches, samples and the agent itself take: half of the budget of 0.03.
_REST_NS = 15_000_000


class _Devices:
    """Processes whose devices bring so many rows of stall samples in a second of sampling.

    Sampling is on for the first part of each ten seconds, as the controller wanted it before them.
    """

    def __init__(self, rows: Mapping[int, int], controller: CostController) -> None:
        self.rows = rows
        self._controller = controller
        self._second = 0
        self.held: dict[int, float] = {}
        self.taken = dict.fromkeys(rows, 0.0)  # rows
        self.stood_for = dict.fromkeys(rows, 0.0)  # as they are scaled

    def second(self, rest_ns: int = _REST_NS, times: int = 0) -> float:
        """Has one pass; returns what stalls have cost, in CPUs."""
        loads, cost = {}, 0.0
        for process, rows in self.rows.items():
            wanted = self._controller.duties().get(process, 1.0)
            held = self.held.setdefault(process, wanted)
            if self._second % 10 == 0 or held in (0, 1):
                held = self.held[process] = wanted
            on = min(max(10 * held - self._second % 10, 0), 1)
            loads[process] = HelperLoad(times, round(rows * on), 0, round(on * _S))
            self.taken[process] += rows * on
            self.stood_for[process] += rows * on / held if held else 0
            cost += rows * on * self._controller.prices.stall / _S
        self._second += 1
        self._controller.next(Load(_S, {}, 0, 0, 0, rest_ns, None, loads))
        return cost

    def mean_cost(self, seconds: int, rest_ns: int = _REST_NS) -> float:
        return sum(self.second(rest_ns) for _ in range(seconds)) / seconds


def test_stalls_of_a_busy_device_are_within_the_budget_and_their_sums_survive() -> None:
    # GIVEN a process whose stalls cost six times what is left, and one whose cost little
    controller = CostController(2)
    devices = _Devices({1: 120_000, 2: 500}, controller)
    devices.mean_cost(20)
    taken, stood_for = devices.taken[1], devices.stood_for[1]
    # THEN what they cost stays in the budget,
    assert devices.mean_cost(600) + _REST_NS / _S < 0.03
    # each is sampled, the quiet one always,
    assert 0 < controller.duties()[1] < 1
    assert 2 not in controller.duties()
    # AND what is sampled stands for all.
    assert devices.taken[1] - taken < 600 * 120_000 / 4
    assert devices.stood_for[1] - stood_for == pytest.approx(600 * 120_000, rel=0.05)
    assert devices.stood_for[2] == devices.taken[2]


def test_stalls_that_are_too_many_are_left_out_and_come_back_where_there_is_room() -> None:
    controller = CostController(2)
    devices = _Devices({1: 120_000}, controller)
    # WHEN all else takes the budget
    devices.mean_cost(20, rest_ns=40_000_000)
    assert controller.duties() == {1: 0}
    # but for a try now and then
    assert devices.mean_cost(10, rest_ns=40_000_000) == 0
    assert devices.mean_cost(300, rest_ns=40_000_000) < 0.1 * 0.03
    # THEN they come back when it does not any more, within a cycle
    devices.mean_cost(15, rest_ns=0)
    assert controller.duties().get(1, 1) > 0
    assert devices.mean_cost(60, rest_ns=0) > 0


def test_stalls_that_cost_little_are_sampled_however_much_all_else_takes() -> None:
    controller = CostController(2)
    devices = _Devices({1: 20_000, 2: 100}, controller)
    costs = [devices.second(rest_ns=300_000_000) for _ in range(60)]
    assert 0 < controller.duties()[1] < 1
    assert 2 not in controller.duties()
    assert sum(costs[20:]) / 40 <= 0.1 * 0.03


def test_stalls_that_were_left_out_for_what_they_cost_are_tried_again() -> None:
    # GIVEN a process whose stalls cost more than the budget even in the least share
    controller = CostController(2)
    devices = _Devices({1: 2_000_000}, controller)
    devices.mean_cost(20)
    assert controller.duties() == {1: 0}
    # WHEN it does little from then on
    devices.rows = {1: 100}
    costs = [devices.second() for _ in range(600)]
    # THEN that is found out, and all of it is sampled
    assert sum(costs[-60:]) > 0
    assert 1 not in controller.duties()


def test_a_duty_cycle_does_not_tremble() -> None:
    controller = CostController(2)
    devices, seen = _Devices({1: 50_000}, controller), set()
    for second in range(400):
        devices.rows = {1: 50_000 + 1_000 * (second % 5)}
        devices.second(_REST_NS + 500_000 * (second % 3))
        if second > 50:
            seen.add(controller.duties().get(1, 1.0))
    assert len(seen) == 1


def test_a_read_out_of_a_moment_is_no_reason_to_leave_stalls_out() -> None:
    controller = CostController(2)
    usual = HelperLoad(0, 100, 2, _S)
    for load in (usual, usual, HelperLoad(0, 1, 1, 5_000_000), usual):
        controller.next(Load(_S, {}, 0, 0, 0, _REST_NS, None, {1: load}))
        assert not controller.duties()


def test_kernel_times_are_paid_before_stalls() -> None:
    controller = CostController(2)
    devices = _Devices({1: 10_000}, controller)
    costs = [devices.second() for _ in range(30)]
    assert not controller.duties()
    assert controller.cost_ns_per_s == _REST_NS + costs[-1] * _S
    costs = [devices.second(times=3_000) for _ in range(31)]
    assert 0 < controller.duties()[1] < 1
    of_times = 3_000 * controller.prices.kernel_time
    assert controller.cost_ns_per_s == _REST_NS + of_times + costs[-1] * _S


def test_a_recording_of_one_program_leaves_its_devices_alone() -> None:
    controller = CostController(2, _PROGRAMS)
    devices = _Devices({1: 1_000_000}, controller)
    devices.mean_cost(20)
    assert not controller.duties()


def _agents_second(own_cpu: float) -> Load:
    """A second in which all of an agent's processes took so much of a CPU."""
    return Load(_S, {1: 500}, 50, 20, 0, own_cpu_ns=round(own_cpu * _S), bpf_ns=None)


def _thrifts(
    controller: CostController, seconds: int, own_cpu: Callable[[int], float]
) -> list[int]:
    """What an agent takes depends on what it is told to do."""
    found = [1]
    for _ in range(seconds):
        found.append(controller.next(_agents_second(own_cpu(found[-1]))).thrift)
    return found


def test_an_agent_that_takes_too_much_does_less_until_it_is_within_its_budget() -> None:
    controller = CostController(2)
    # GIVEN a host that would take 15 % of a CPU, but for 0.4 % all of what can be done less often
    thrifts = _thrifts(controller, 60, lambda thrift: 0.004 + 0.146 / thrift)
    # THEN within half a minute it takes less than 3 %, and stays so
    assert all(0.004 + 0.146 / thrift < 0.03 for thrift in thrifts[30:])
    assert len({*thrifts[30:]}) == 1
    assert not controller.is_over
    assert controller.take_said() == []
    # AND samples are thinned out last.
    assert controller.chances.samples_one_in == max(thrifts[-1] // 4, 1)
    # WHEN the load has gone
    thrifts = _thrifts(controller, 150, lambda thrift: 0.004 + 0.002 / thrift)
    # THEN all is done again: from an eighth on it is looked once a minute.
    assert (thrifts[-1], controller.chances.samples_one_in) == (1, 1)


def test_a_moment_is_no_reason_to_do_less() -> None:
    # GIVEN a window of a tenth of a second in which much was done, as when maps are half full
    controller = CostController(2)
    busy = Load(_S // 10, {1: 50}, 5, 2, 0, own_cpu_ns=40_000_000, bpf_ns=None)
    for second in range(20):
        chances = controller.next(busy if second % 10 == 0 else _agents_second(0.01))
        assert chances.thrift == 1


def test_it_is_said_that_the_budget_is_exceeded_once_nothing_more_can_be_left() -> None:
    controller = CostController(2)
    _thrifts(controller, 15, lambda _: 0.5)
    assert controller.take_said() == []
    thrifts = _thrifts(controller, 90, lambda _: 0.5)
    assert thrifts[-1] == 16
    # Before that is said, it is tried to tell of things later.
    _thrifts(controller, 60, lambda _: 0.5)
    assert controller.chances.delay_factor == 2
    assert controller.take_said() == []
    _thrifts(controller, 120, lambda _: 0.5)
    assert controller.is_over
    (said,) = controller.take_said()
    assert said.startswith("recording takes 50.")
    # AND not again while it stays so, but after an hour with room
    _thrifts(controller, 1_000, lambda _: 0.5)
    assert controller.take_said() == []
    _thrifts(controller, 4_000, lambda _: 0.001)
    _thrifts(controller, 600, lambda _: 0.5)
    assert len(controller.take_said()) == 1


def test_what_comes_once_a_minute_counts_for_the_minute() -> None:
    # GIVEN an agent that did as little as it may, and names a minute's windows at once from then on
    controller = CostController(2)
    while controller.chances.thrift < 16:
        _thrifts(controller, 1, lambda _: 0.5)
    for _ in range(5):
        _thrifts(controller, 59, lambda _: 0.012)
        _thrifts(controller, 1, lambda _: 0.7)
    # THEN 2.3 % is less than its budget of 3,
    assert controller.take_said() == []
    assert controller.chances.delay_factor == 1
    # and 3.6 is not, however much comes at once.
    while controller.chances.delay_factor < 2:
        _thrifts(controller, 59, lambda _: 0.012)
        _thrifts(controller, 1, lambda _: 1.5)
    for _ in range(3):
        _thrifts(controller, 119, lambda _: 0.012)
        _thrifts(controller, 1, lambda _: 3)
    (said,) = controller.take_said()
    assert said.startswith("recording takes 3.")


def test_what_was_recorded_is_told_of_later_where_nothing_more_can_be_left() -> None:
    # GIVEN an agent that takes 4.5 % as it does as little as it may: 1.6 of it each time that it
    # sends what was recorded
    controller = CostController(2)
    before = Chances(1)
    for minute in range(60):
        for second in range(60):
            is_due = second == 0 and minute % before.delay_factor == 0
            own_cpu = 0.025 + 0.2 / before.thrift**2 + (0.96 if is_due else 0)
            last = controller.next(_agents_second(own_cpu))
            # THEN that is later only where all else is done as little as it may be,
            assert last.delay_factor == 1 or last.thrift == 16
            before = last
    # and for as long as it is needed.
    assert (last.thrift, last.delay_factor) == (16, 2)
    assert last.samples_one_in == 4
    assert [*map(controller.sent_at_once_s, (5, 60, 100, 600))] == [10, 120, 120, 600]
    _thrifts(controller, 1_200, lambda _: 0.004)
    assert (controller.chances.thrift, controller.chances.delay_factor) == (1, 1)
    assert [*map(controller.sent_at_once_s, (5, 60, 600))] == [5, 60, 600]
    # What programs alone take changes nothing of that.
    assert not any(
        CostController(2, _PROGRAMS).next(_agents_second(0.5)).delay_factor > 1 for _ in range(9)
    )


def test_programs_alone_do_not_make_a_recorder_thrifty() -> None:
    controller = CostController(2, _PROGRAMS)
    assert {*_thrifts(controller, 30, lambda _: 0.5)} == {1}


def _joining(
    controller: CostController, seconds: int, own_cpu: Callable[[Chances], float], ends: int
) -> list[Chances]:
    """What an agent takes where so many processes a second end early, joined or by themselves."""
    found = [controller.first()]
    for _ in range(seconds):
        joined = ends if found[-1].details_after_ns else 0
        load = replace(_agents_second(own_cpu(found[-1])), joined=joined)
        found.append(controller.next(load))
    return found


def test_short_lived_processes_are_joined_before_anything_else_is_left() -> None:
    # GIVEN a host of 200 new processes a second, of which each by itself takes 0.5 ms
    controller = CostController(2)
    chances = _joining(controller, 60, lambda c: 0.01 if c.details_after_ns else 0.11, 200)
    # THEN they are joined, which is enough, and stay so: by themselves they would be too much
    assert all(each.details_after_ns == _S for each in chances[10:])
    assert {each.thrift for each in chances} == {1}
    # WHEN most of them have gone
    chances = _joining(controller, 30, lambda c: 0.01 if c.details_after_ns else 0.012, 4)
    # THEN each has its details.
    assert chances[-1].details_after_ns == 0


def test_short_lived_processes_are_joined_until_it_is_known_what_there_is() -> None:
    # GIVEN an agent that begins, which takes more than what comes after
    controller = CostController(2, cgroups=(5, 6))
    first = controller.first()
    assert first.details_after_ns == _S
    assert {*first.by_cgroup} == {5, 6}  # those that it is known of where they are
    begun = _joining(controller, 4, lambda _: 0.5, 0)[-1]
    # THEN nothing else is left because of that,
    assert (begun.details_after_ns, begun.thrift) == (_S, 1)
    # and where few processes come, each has its details.
    assert _joining(controller, 10, lambda _: 0.01, 4)[-1].details_after_ns == 0
    # also where that takes nearly all of the budget,
    controller = CostController(2)
    chances = _joining(controller, 60, lambda c: 0.012 if c.details_after_ns else 0.022, 20)
    assert all(each.details_after_ns == 0 for each in chances[8:])
    # until they come again: from the first look on.
    chances = _joining(controller, 8, lambda c: 0.01 if c.details_after_ns else 0.11, 200)
    assert [each.thrift for each in chances] == [1] * 9
    assert chances[-1].details_after_ns == _S
    # What a recording's programs take is no reason to join any.
    assert CostController(2, _PROGRAMS, cgroups=(5, 6)).first().details_after_ns == 0


def test_less_is_done_of_all_else_where_joining_is_not_enough() -> None:
    controller = CostController(2)
    chances = _joining(controller, 60, lambda c: 0.004 + 0.1 / c.thrift, 0)
    assert next(each for each in chances if each.thrift > 1).details_after_ns == _S
    assert chances[-1].thrift > 1
    # Joined to the end: details are the last that comes back.
    chances = _joining(controller, 150, lambda c: 0.006, 0)
    assert all(each.details_after_ns or each.thrift == 1 for each in chances)
    assert (chances[-1].thrift, chances[-1].details_after_ns) == (1, 0)


def test_what_targets_pay_is_accounted_by_calibrated_prices() -> None:
    # GIVEN a kernel that has counted for some seconds, and counts no more
    controller = CostController(2)
    _run(controller, 20, lambda _: {1: 50_000, 2: 300})
    switches, calls = (
        {1: 50_000, 2: 300},
        HelperLoad(times=40, samples=3, read_outs=2, sampled_ns=1),
    )
    load = Load(5 * _S, switches, 600, 190, 70, own_cpu_ns=10**8, bpf_ns=None, helpers={1: calls})
    controller.next(load)
    # THEN programs and helpers have taken what they do on this machine, and processes not
    given = Prices()
    others = 190 * given.sample + 70 * (given.call + given.trap)
    others += 40 * given.kernel_time + 3 * given.stall + 2 * given.read_out
    wanted = 50_300 * _TRUE_SWITCH + 600 * _TRUE_STACK + others
    assert controller.accounted_ns() == pytest.approx(wanted, rel=0.05)
    assert controller.cost_ns_per_s * 5 == pytest.approx(controller.accounted_ns() + 10**8)
    # AND in no time nothing
    controller.next(replace(load, window_ns=0))
    assert controller.accounted_ns() == 0
