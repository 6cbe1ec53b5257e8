# SPDX-License-Identifier: Apache-2.0
"""The cost controller: what is done, and what is left, so that the whole cost stays in a budget.

Pure logic: a window's load in, chances for those to come out. Cost is counted as events times
nanoseconds per event. What stacks at switch-outs may take is what all else leaves of the budget,
and it is divided among cgroups by max-min fairness: each gets what it asks for up to a level that
is the same for all, so that a busy one never takes from a quiet one. Chances follow from the load
itself and not from chances before: there is no loop that could swing.

Samples of why devices stall are taken in the same way: of what all else leaves of the budget, half
is for them, and it is divided among processes. One that asks for more is sampled for less
of the time, down to a least share, and below that not at all. Launches and kernel times are exact,
and paid before.

What the agent's own processes take follows from too much to be foreseen: new processes, distinct
stacks, names. Short-lived processes are joined, by cgroup and name, until it is known that there is
room for each by itself, and where all together is above the budget. Where that is not enough, less
is done of everything (`thrift`): twice as little each time that it was looked, up to a most, and
more again once there is ample room. On-CPU samples are the last of what is thinned out. Where even
that is too much, what was recorded is told of later, and more of it at once (`delay_factor`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import InitVar, dataclass, field

import numpy as np
import numpy.typing as npt
from aiflame.agent.kernel.abi import LONG_WAIT_NS, WEIGHT_MAX
from aiflame.agent.processes.owners import max_min_share
from aiflame.agent.recording.chance import Chances, Load
from aiflame.gpu.base import HelperLoad

_S = 1_000_000_000

# Of the budget, what is planned for: loads are of a second ago, and draws are by chance. With 0.8
# of what was left for stacks, and all else in full, a recording took 6.08 % of 6 (OVERHEAD.md).
_PLANNED_SHARE = 0.85
# What stacks, and stalls, get at least of the budget, however much all else takes: a recording
# without any stack of a wait would be of no use. Above the budget then, which `is_over` says.
_LEAST_SHARE = 0.1
# A load that has gone is remembered, each second this much of it: one that comes and goes is
# planned for as if it stayed, and one that has gone for good is forgotten in half a minute.
_REMEMBERED = 0.9
# But no more of it in one window than ten seconds' worth: they are long where there is much to do.
_MOST_FORGOTTEN_NS = 10 * _S
# Switches a second: below, a load is forgotten. One in a window of a minute is more than that,
# and whose switches are so few gets all of their stacks.
_LEAST_DEMAND = 0.015
# Chances are made better only if that is worth it: a load that trembles leaves them as they are.
_BETTER = 0.75
# Before anything is known of a host: 50,000 switches a second take 3 ms for stacks.
_FIRST_ONE_IN = 64
# 20 stacks a second of each thread that has so many waits: enough to scale by in a window.
_SPACING_NS = 50_000_000
# Of 10,000 threads that wait 20 times a second each, one stack in two minutes.
_MOST_SPACING_NS = 128 * _S
# For how long cost is added up before it is judged: a window closes in the midst of a burst.
_LOOK_NS = 4 * _S
# To do twice as much may take twice as long, and never more: it is not taken back at once.
_ROOM = 0.4
# A look each 250 ms (recording/recorder.py), 47 stacks of waits a second on two CPUs at least.
_MOST_THRIFT = 16
# Before anything else that is left: how short-lived processes were called, of which there is no
# sample. They are what makes busy hosts dear. None of their waits may be one that is told of by
# itself.
_SHORT_LIVED_NS = LONG_WAIT_NS
# Each by itself again where that would take less than this of the budget, once it was too much.
_ROOM_FOR_DETAILS = 0.75
# From here on fewer on-CPU samples: 19 Hz become 5. Few they are in any case, and worth the most.
_THRIFT_OF_SAMPLES = 4
# From here on windows wait for their names, for so long at most (fleet/stretch_naming.py): what
# reads files for these is started each time, for each container. Labels and what is to be left out
# do not wait. So cost comes in lumps, and what is judged is as long.
# Less than a minute by what windows of a minute vary.
THRIFT_OF_NAMES, NAMES_WAIT_NS = 8, 58 * _S
# What is left then is, for a third, names and requests of each minute: of two minutes at once they
# take little more than of one (OVERHEAD.md). Of four, in windows of a minute, there was no time for
# the names of a twentieth of all waits (sinks/bounded_naming.py), and it took as much.
_MOST_DELAY, _MOST_DELAYED_S = 2, 120.0
# For so long after it was too much: a burst is not held against a host for good.
_EXCEEDED_NS = 3_600 * _S
# A start, or a build that forks for a moment, is no news.
_OVER_NS_UNTIL_SAID = 10 * _S
# It is said again once there was room for so long.
_CALM_NS_UNTIL_SAID = 3_600 * _S
# Of what is left for stacks and stalls: a device that is sampled leaves room for stacks of waits.
_STALLS_SHARE = 0.5
# Of the time that is wanted. Half as much in each step, so that a load that trembles changes
# nothing. In the least one (of a cycle of ten seconds 0.6 s) a device is read out once.
_LEAST_DUTY = 1 / 16
# What a process has told per second of sampling is remembered, each second this much of it: long
# enough for a duty cycle, of which ten seconds are a turn. One that is not sampled at all is tried
# again when that is forgotten, in some minutes.
_STALLS_REMEMBERED = 0.98
# A helper reads out so often; where its duty changes, also what was sampled for a moment only.
_READ_OUT_NS = _S // 2
# CPU time in a second of sampling, in ns: below it is no cost.
_LEAST_STALLS_NS = 1_000
# Cgroups that are told apart, those with most switches: what the kernel half has room for.
_MOST_CGROUPS = 4096


@dataclass(frozen=True, slots=True)
class Prices:
    """What events take, in ns.

    What is given here was measured on one machine (OVERHEAD.md), and what helpers take with a
    stand-in for the driver: no device was met. A kernel that counts the time of programs corrects
    the first two. It does not count the trap of a uprobe, which is apart.

    Attributes:
        switch: A switch-out and the switch-in after it, with its wake-up, without a stack.
        stack: The stack of a switch-out.
        sample: An on-CPU sample, of 30 user frames.
        call: A call of a device API, with a stack.
        trap: What a probe on it takes before the program runs.
        kernel_time: One that a helper tells: by its thread, and where it is launched.
        stall: A row of stall samples that a helper tells.
        read_out: What a helper asks for them with: a call into the driver.
        process: To tell of a process that lives for some milliseconds by itself, in all processes
            of the agent, rather than together with others.
    """

    switch: float = 900
    stack: float = 4_000
    sample: float = 4_300
    call: float = 4_500
    trap: float = 700
    kernel_time: float = 1_500
    stall: float = 500
    read_out: float = 1_500_000
    process: float = 500_000

    def of_stalls(self, load: HelperLoad) -> float:
        """Returns what stall samples of a helper have taken."""
        return load.samples * self.stall + load.read_outs * self.read_out


@dataclass(frozen=True, slots=True)
class Budget:
    """What it may cost: the larger one of two.

    Attributes:
        host_share: Of all CPUs.
        cpu_share: Of one.
        with_own_cpu: Whether the recorder's own process, samples and calls are paid from it, or
            programs at context switches alone.
    """

    host_share: float = 0.01
    cpu_share: float = 0.03
    with_own_cpu: bool = True

    def ns_per_s(self, cpus: int) -> float:
        """Returns CPU time in a second of a host."""
        return max(self.host_share * cpus, self.cpu_share) * _S


def _vector(*values: float) -> npt.NDArray[np.float64]:
    return np.array(values, np.float64)


class _Measured:
    """Corrects two prices by what switches have cost in all: least squares, forgetting slowly."""

    # What the given prices count for, as if so many switches and so many stacks had been seen.
    _BELIEF = 5_000.0
    _FORGETTING = 0.8
    # Prices of another machine are not a hundredth or a hundredfold of those given.
    _MOST = 10.0

    def __init__(self, prices: Prices) -> None:
        self._given = _vector(prices.switch, prices.stack)
        self._squares = np.zeros((2, 2))
        self._products = _vector(0, 0)
        self.prices = [prices.switch, prices.stack]

    def see(self, switches: int, stacks: int, took_ns: int) -> None:
        seen = switches + stacks
        if not seen:
            return
        # By the root of the counts: a busy window tells more, but not as the square of that.
        counts = _vector(switches, stacks) / math.sqrt(seen)
        self._squares = self._FORGETTING * self._squares + np.outer(counts, counts)
        self._products = self._FORGETTING * self._products + counts * took_ns / math.sqrt(seen)
        belief = np.diag([self._BELIEF, self._BELIEF / 20])
        found = np.linalg.solve(self._squares + belief, self._products + belief @ self._given)
        self.prices = np.clip(found, self._given / self._MOST, self._given * self._MOST).tolist()


@dataclass(slots=True)
class CostController:
    """Keeps the cost of recording within a budget; a `recording.chance.Steers`.

    Args:
        cpus: Of the host.
        budget: What it may cost.
        prices: What events take before anything was measured.
        cgroups: Ids of those that are there already.

    Attributes:
        chances: What it said last.
        cost_ns_per_s: What the last window has cost, as far as it is paid from the budget.
        is_over: Whether that was more than the budget even with as little as may be done.
        limit_cpus: The budget, in CPU seconds a second.
    """

    cpus: int
    budget: Budget = field(default_factory=Budget)
    prices: Prices = field(default_factory=Prices)
    cgroups: InitVar[Collection[int]] = ()
    chances: Chances = field(init=False)
    cost_ns_per_s: float = field(default=0.0, init=False)
    is_over: bool = field(default=False, init=False)
    _accounted_ns: int = field(default=0, init=False)
    _told_ns: int = field(default=0, init=False)
    _told_cost_ns: float = field(default=0.0, init=False)
    _thrift: int = field(default=1, init=False)
    _delay: int = field(default=1, init=False)
    _joins: bool = field(default=True, init=False)
    _has_looked: bool = field(default=False, init=False)
    _exceeded_left_ns: int = field(default=0, init=False)
    _looked_joined: int = field(default=0, init=False)
    _looked_ns: int = field(default=0, init=False)
    _looked_cost_ns: float = field(default=0.0, init=False)
    _has_said: bool = field(default=False, init=False)
    _calm_ns: int = field(default=0, init=False)
    _untold: list[str] = field(default_factory=list, init=False)
    _measured: _Measured = field(init=False)
    _demand: dict[int, float] = field(default_factory=dict, init=False)
    _stalls: dict[int, float] = field(default_factory=dict, init=False)
    _duties: dict[int, float] = field(default_factory=dict, init=False)

    def __post_init__(self, cgroups: Collection[int]) -> None:
        self._measured = _Measured(self.prices)
        # Joined until it is known what there is. Each by itself, 500 a second of them would take a
        # quarter of a CPU while all that lives is entered, and holes of 10 MB would stay of it.
        self.chances = Chances(
            _FIRST_ONE_IN,
            # Those that came last: ids count up.
            dict.fromkeys(sorted(cgroups, reverse=True)[:_MOST_CGROUPS], _FIRST_ONE_IN),
            _SPACING_NS,
            details_after_ns=self._details_after_ns(),
        )

    @property
    def limit_cpus(self) -> float:
        return self.budget.ns_per_s(self.cpus) / _S

    def first(self) -> Chances:
        """Returns what a recording begins with."""
        return self.chances

    def next(self, load: Load) -> Chances:
        """Returns what is to hold after a window; one of no length changes nothing."""
        self._accounted_ns = 0
        if load.window_ns <= 0:
            return self.chances
        switches, stacks = sum(load.by_cgroup.values()), load.stacks
        if load.bpf_ns is not None:
            self._measured.see(switches, stacks, load.bpf_ns)
        switch_price, stack_price = self._measured.prices
        windows_per_s = _S / load.window_ns
        budget = self.budget.ns_per_s(self.cpus)
        demand = {c: count * windows_per_s for c, count in load.by_cgroup.items()}
        self._remember(demand, _REMEMBERED ** (min(load.window_ns, _MOST_FORGOTTEN_NS) / _S))
        taken = switches * switch_price * windows_per_s
        expected = sum(self._demand.values()) * switch_price
        others = 0.0
        if self.budget.with_own_cpu:
            of_calls = load.calls * (self.prices.call + self.prices.trap)
            of_times = sum(one.times for one in load.helpers.values()) * self.prices.kernel_time
            others = load.own_cpu_ns + load.samples * self.prices.sample + of_calls + of_times
            others *= windows_per_s
        stalls = sum(map(self.prices.of_stalls, load.helpers.values()))
        self.cost_ns_per_s = taken + others + (stacks * stack_price + stalls) * windows_per_s
        cost_ns = self.cost_ns_per_s / windows_per_s
        self._accounted_ns = round(cost_ns - load.own_cpu_ns * self.budget.with_own_cpu)
        left = _PLANNED_SHARE * budget - max(taken, expected) - others
        if self.budget.with_own_cpu:
            self._be_thrifty(load, _PLANNED_SHARE * budget)
        is_least = self._delay == _MOST_DELAY or not self.budget.with_own_cpu
        # Without the second, loads that are remembered would be said to cost what they did.
        self.is_over = is_least and left < _LEAST_SHARE * budget and self.cost_ns_per_s > budget
        is_told = is_least if self.budget.with_own_cpu else self.is_over
        self._note_cost(load.window_ns, budget, is_told)
        if self.budget.with_own_cpu:
            affordable = max(_STALLS_SHARE * left, _LEAST_SHARE * budget)
            left -= self._share_stalls(load, affordable)
        affordable = max(left, _LEAST_SHARE * budget) / stack_price / self._thrift
        spacing_ns = self._spacing(load, affordable / windows_per_s)
        one_in = self._divided(affordable)
        self.chances = Chances(
            max(one_in.values(), default=1),
            one_in,
            spacing_ns,
            max(self._thrift // _THRIFT_OF_SAMPLES, 1),
            self._thrift,
            self._details_after_ns(),
            self._delay,
        )
        return self.chances

    def _details_after_ns(self) -> int:
        return _SHORT_LIVED_NS if self._joins and self.budget.with_own_cpu else 0

    def duties(self) -> dict[int, float]:
        """Returns for how much of the time that is wanted stalls may be sampled, by process."""
        return self._duties

    def accounted_ns(self) -> int:
        """Returns what the last window has cost, without what the recorder's processes took."""
        return self._accounted_ns

    def sent_at_once_s(self, wanted_s: float) -> float:
        """Returns how much is to be sent at once where so much is wanted, in seconds."""
        return max(wanted_s, min(wanted_s * self._delay, _MOST_DELAYED_S))

    def _share_stalls(self, load: Load, affordable: float) -> float:
        """Divides what stalls may take among processes; returns what they are expected to take.

        Args:
            load: Of the window.
            affordable: CPU time in a second, in ns.
        """
        share = _STALLS_REMEMBERED ** (load.window_ns / _S)
        seen = {
            process: self.prices.of_stalls(one) * _S / max(one.sampled_ns, _READ_OUT_NS)
            for process, one in load.helpers.items()
            if one.sampled_ns
        }
        known = {process: share * demand for process, demand in self._stalls.items()}
        known |= {process: max(demand, known.get(process, 0)) for process, demand in seen.items()}
        self._stalls = {p: demand for p, demand in known.items() if demand >= _LEAST_STALLS_NS}
        level = max_min_share(self._stalls.values(), affordable)
        self._duties = {
            process: _duty(level / demand, self._duties.get(process, 1))
            for process, demand in self._stalls.items()
            if level < demand
        }
        return sum(demand * self._duties.get(p, 1) for p, demand in self._stalls.items())

    def take_said(self) -> list[str]:
        """Returns that the budget is exceeded, once until there was room for long."""
        said, self._untold = self._untold, []
        return said

    def _be_thrifty(self, load: Load, budget_ns_per_s: float) -> None:
        """Has less done where all was dearer than it may be, and more where there is room."""
        self._looked_ns += load.window_ns
        self._looked_cost_ns += self.cost_ns_per_s * load.window_ns / _S
        self._looked_joined += load.joined
        lumps_ns = NAMES_WAIT_NS * self._delay
        if self._looked_ns < (lumps_ns if self._thrift >= THRIFT_OF_NAMES else _LOOK_NS):
            return
        affordable_ns = budget_ns_per_s * self._looked_ns / _S
        share = self._looked_cost_ns / affordable_ns
        of_details = self._looked_joined * self.prices.process / affordable_ns
        self._exceeded_left_ns -= self._looked_ns
        self._looked_ns, self._looked_cost_ns, self._looked_joined = 0, 0.0, 0
        is_start, self._has_looked = not self._has_looked, True
        if share > 1 and is_start:
            return  # a start takes more than what comes after it
        if share > 1:
            self._exceeded_left_ns = _EXCEEDED_NS
        room_for_details = _ROOM_FOR_DETAILS if self._exceeded_left_ns > 0 else 1
        if share > 1 and not self._joins:
            self._joins = True
        elif share > 1 and self._thrift < _MOST_THRIFT:
            self._thrift *= 2
        elif share > 1:
            self._delay = min(2 * self._delay, _MOST_DELAY)
        elif share < _ROOM and self._delay > 1:
            self._delay //= 2
        elif share < _ROOM and self._thrift > 1:
            self._thrift //= 2
        elif self._thrift == 1 and share + of_details < room_for_details:
            self._joins = False

    def _note_cost(self, window_ns: int, budget_ns_per_s: float, is_told: bool) -> None:
        """Has it said that the budget is exceeded, if as little is done as there may be."""
        self._calm_ns = 0 if is_told else self._calm_ns + window_ns
        self._has_said &= self._calm_ns < _CALM_NS_UNTIL_SAID
        if not is_told or self._has_said:
            self._told_ns, self._told_cost_ns = 0, 0.0
            return
        self._told_ns += window_ns
        self._told_cost_ns += self.cost_ns_per_s * window_ns / _S
        lumps_ns = NAMES_WAIT_NS * self._delay
        if self._told_ns < (lumps_ns if self.budget.with_own_cpu else _OVER_NS_UNTIL_SAID):
            return
        cost_ns_per_s = self._told_cost_ns * _S / self._told_ns
        self._told_ns, self._told_cost_ns = 0, 0.0
        if cost_ns_per_s > budget_ns_per_s:
            self._has_said = True
            cost, budget = (100 * ns / _S for ns in (cost_ns_per_s, budget_ns_per_s))
            self._untold.append(
                f"recording takes {cost:.1f} % of one CPU, more than its budget of {budget:.1f} %,"
                " with as little done as there may be"
            )

    def _remember(self, switches: Mapping[int, float], share: float) -> None:
        for cgroup, before in [*self._demand.items()]:
            self._demand[cgroup] = max(share * before, switches.get(cgroup, 0))
            if self._demand[cgroup] < _LEAST_DEMAND:
                del self._demand[cgroup]
        for cgroup, now in switches.items():
            if now >= _LEAST_DEMAND:
                self._demand.setdefault(cgroup, now)
        if len(self._demand) > _MOST_CGROUPS:
            most = sorted(self._demand, key=self._demand.__getitem__)[-_MOST_CGROUPS:]
            self._demand = {cgroup: self._demand[cgroup] for cgroup in most}

    def _divided(self, affordable: float) -> dict[int, int]:
        """Divides stacks a second among cgroups; returns one in how many each takes."""
        level = max_min_share(self._demand.values(), affordable)
        found = {}
        for cgroup, demand in self._demand.items():
            wanted = min(max(math.ceil(demand / level), 1), WEIGHT_MAX) if level > 0 else WEIGHT_MAX
            before = self.chances.by_cgroup.get(cgroup, self.chances.one_in)
            is_near = _BETTER * before < wanted <= before
            found[cgroup] = before if is_near and cgroup in self.chances.by_cgroup else wanted
        return found

    def _spacing(self, load: Load, affordable: float) -> int:
        """Returns the spacing: more where threads that wait seldom take too many stacks."""
        before, spacing_ns = self.chances, self.chances.spacing_ns
        # Without them; if that is too much, it is for chances to follow the load.
        planned = sum(
            switches / before.by_cgroup.get(cgroup, before.one_in)
            for cgroup, switches in load.by_cgroup.items()
        )
        if load.stacks > affordable and (planned <= affordable or 2 * planned < load.stacks):
            # Twice for each second: after a longer window it would come too late.
            wanted = math.ceil(math.log2(load.stacks / affordable))
            doublings = min(max(load.window_ns // _S, 1), wanted)
            return min(spacing_ns << doublings, _MOST_SPACING_NS)
        # Half the spacing may be twice the stacks.
        if 2 * load.stacks < affordable:
            return max(spacing_ns // 2, _SPACING_NS)
        return spacing_ns


def _duty(affordable: float, before: float) -> float:
    """Returns for how much of the time stalls are sampled where so much of it is affordable."""
    duty = 1.0
    # More than before is worth it only if there is some room for it.
    while duty > affordable * (_BETTER if duty > before else 1):
        duty /= 2
        if duty < _LEAST_DUTY:
            return 0
    return duty
