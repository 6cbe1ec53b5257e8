# SPDX-License-Identifier: Apache-2.0
"""What a window says that recording it took."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from aiflame.agent.fleet.cost import CostController
from aiflame.agent.fleet.memory import MemoryUse
from aiflame.agent.fleet.vitals import Vitals
from aiflame.agent.kernel import abi
from aiflame.agent.model.window import Cost
from aiflame.agent.recording import recorder as module
from aiflame.agent.recording.recorder import Recorder
from aiflame.agent.recording.thread_times import Charged

_S = 1_000_000_000
_WINDOW_NS = 5 * _S


class _Agent:
    """A recorder that is an agent's; what it and its helpers take is as the test has it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, vitals: Vitals) -> None:
        self.own_ns = self.helpers_ns = 0
        self.counters: Counter[abi.Counter] = Counter()
        self.steers = CostController(2)
        clock = SimpleNamespace(process_time_ns=lambda: self.own_ns)
        monkeypatch.setattr(module, "time", clock)
        monkeypatch.setattr(module, "read_losses", lambda *_: Counter())
        monkeypatch.setattr(module, "write_chances", lambda *_: None)
        nothing = SimpleNamespace(add=lambda *_: None, of=None)
        self.costs: list[Cost] = []
        made = self.recorder = Recorder.__new__(Recorder)
        recorder: Any = made
        for name, value in {
            "_helpers_cpu_ns": lambda: self.helpers_ns,
            "_resident_bytes": vitals.resident_bytes,
            "_told_cpu_ns": 0,
            "_told_helpers_ns": 0,
            "_took_ns": None,
            "_steers": self.steers,
            "_earlier": nothing,
            "_earlier_long": nothing,
            "_waits_not_sampled": 0,
            "_boundary_ns": 0,
            "_end_ns": 1 << 62,
            "_told_counters": Counter(),
            "_told_losses": Counter(),
            "_counters": lambda: self.counters,
            "_switch_cost": SimpleNamespace(take=lambda _: None),
            "_set_chances": lambda _: None,
            "_since_start": int,
            "_possible_cpus": 2,
            "_programs": SimpleNamespace(counters=None),
            "_ended": SimpleNamespace(forget=int),
            "pythons": SimpleNamespace(tell=lambda: None),
            "losses": Counter,
            "table": SimpleNamespace(joined=0, ended_images=list),
            "calls": SimpleNamespace(finish=lambda *_: None),
            "facts": SimpleNamespace(tell=lambda _: None),
            "devices": SimpleNamespace(
                take_loads=dict,
                steer=lambda *_: None,
                kernel_names=dict,
                forget_unused_kernels=int,
            ),
            "_window": SimpleNamespace(close=self._close),
        }.items():
            setattr(recorder, name, value)

    def _close(self, end_ns: int, *, is_last: bool, cost: Cost) -> None:
        self.costs.append(cost)

    def window(self, own_ns: int, helpers_ns: int, closing_ns: int, samples: int) -> Cost:
        """Records one, and closes it, of which some comes after its load was looked at."""
        keys, values = np.zeros(0, abi.SUM_KEY_DTYPE), np.zeros(0, abi.SUM_VALUE_DTYPE)
        nothing = keys, values
        self.own_ns += own_ns
        self.helpers_ns += helpers_ns
        self.counters = self.counters + Counter({abi.Counter.SAMPLES: samples})
        recorder: Any = self.recorder
        charged = Charged(keys, values, 0, nothing)
        recorder._share_out(_WINDOW_NS, module._Sums(nothing, nothing, nothing), charged)
        self.own_ns += closing_ns
        recorder._close_window(_WINDOW_NS)
        return self.costs[-1]


def test_a_window_of_an_agent_says_what_all_of_it_took(monkeypatch: pytest.MonkeyPatch) -> None:
    vitals = Vitals()
    agent = _Agent(monkeypatch, vitals)
    vitals.note_memory(MemoryUse(40, 50, 6, 1000, 500), 150)
    # WHEN it takes 30 ms, its helpers 20, and closing the window 7, with 100 samples
    cost = agent.window(30, 20, 7, 100)
    # THEN the window says so, with what samples took in threads of targets, and the memory of all
    # its processes but those that make captures.
    assert cost == Cost(50, round(100 * agent.steers.prices.sample), 96)
    assert cost.all_ns == 50 + cost.bpf_ns
    # AND what closing one took is of the next, so that none of it is missing
    assert agent.window(30, 20, 7, 0) == Cost(57, 0, 96)
    assert agent.steers.cost_ns_per_s == pytest.approx(57 / 5)
    # AND what the orphan of a helper took was once counted.
    assert agent.window(30, -40, 7, 0).cpu_ns == 37


def test_a_window_that_nobody_steers_says_what_its_processes_took(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    agent = _Agent(monkeypatch, Vitals())
    agent.own_ns, agent.helpers_ns = 30, 20
    agent.recorder._close_window(_WINDOW_NS)
    agent.own_ns += 5
    agent.recorder._close_window(_WINDOW_NS, is_last=True)
    assert agent.costs == [Cost(50, 0, 0), Cost(5, 0, 0)]
