# SPDX-License-Identifier: Apache-2.0
"""Threads' time at the boundaries of windows, from states as the kernel half keeps them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from aiflame.agent.kernel import abi
from aiflame.agent.model.profile import SampleClass, StopReason
from aiflame.agent.model.window import NONE, Window, check, check_wall, rows_of
from aiflame.agent.processes.table import ProcessTable
from aiflame.agent.recording.chance import share_out
from aiflame.agent.recording.samples import Samples
from aiflame.agent.recording.thread_times import ThreadTimes
from aiflame.agent.recording.window_builder import Bounds, WindowBuilder
from support import blind_inspector

# Times count from the start of the recording here, in ns.
_START_NS = 1_000_000
_TID, _PID, _STACK, _OTHER = 8, 7, 55, 66
_SECOND_NS = 1_000_000_000


class _NoSleeps:
    """No wait was walked again."""

    def take_wait(self, event: np.void) -> int:
        return int(event["stack"])


class _Recorder:
    """The part of the recorder that closes windows, with states and sums that a test gives."""

    def __init__(self) -> None:
        self.window = WindowBuilder(Bounds())
        self.table = ProcessTable(_START_NS, lambda pid: _START_NS, blind_inspector())
        self.times = ThreadTimes(self.window, self.table)
        self.samples = Samples(self.window, self.table, self.times, _NoSleeps())
        self.times.start(_START_NS)
        image = self.table.image(_PID, _START_NS)
        self.thread = self.table.thread(image, _TID).index
        self.window.define(
            "processes", rows_of("processes", (0, _PID, 1, _PID, 0, 0, -1, NONE, 0, 0, 0))
        )
        self.window.define("threads", rows_of("threads", (self.thread, 0, _TID, 0)))

    def close(
        self,
        at_ns: int,
        *states: np.void,
        sums: tuple[tuple[int, SampleClass, int], ...] = (),
        running: bool = False,
        is_last: bool = False,
    ) -> Window:
        """Closes a window; sums are (stack, class, ns) that ended in it."""
        tids = np.full(len(states), _TID, np.uint32)
        rows = np.array(list(states), abi.THREAD_STATE_DTYPE)
        keys = [(stack, _START_NS, _PID, _TID, kind, 0) for stack, kind, _ in sums]
        self.samples.add(
            np.array(keys, abi.SUM_KEY_DTYPE),
            np.array([(1, ns) for *_, ns in sums], abi.SUM_VALUE_DTYPE),
        )
        on_cpus = {_TID} if running else set()
        charged = self.times.close(_START_NS + at_ns, tids, rows, on_cpus, is_last=is_last)
        self.samples.add(charged.keys, charged.values)
        window = self.window.close(at_ns)
        check(window)
        check_wall(window)
        return window

    def spent(self, window: Window) -> dict[str, int]:
        """Time of the thread in a window, by class; what is none is left out."""
        found = {
            SampleClass(int(row["kind"])).name: int(row["weight_ns"]) for row in window.samples
        }
        (times,) = window.thread_times[window.thread_times["thread"] == self.thread]
        found |= {"ON_CPU": int(times["on_cpu_ns"]), "observed": int(times["observed_ns"])}
        return {name: ns for name, ns in found.items() if ns}


def _state(**fields: Any) -> np.void:
    state = np.zeros(1, abi.THREAD_STATE_DTYPE)[0]
    state["tgid"], state["image"], state["stack"] = _PID, _START_NS, _STACK
    state["first_seen_ns"] = _START_NS
    for name, value in fields.items():
        if name == "crossing":
            for inner, inside in value.items():
                is_time = inner in ("boundary_ns", "switched_ns", "waking_ns")
                state["crossing"][inner] = inside + _START_NS * is_time
        else:
            is_time = name in ("switched_ns", "waking_ns")
            state[name] = value + _START_NS if is_time else value
    return state


def _end(at_ns: int, on_cpu_ns: int, state: np.void) -> np.void:
    event = np.zeros(1, abi.THREAD_EVENT_DTYPE)[0]
    for name in ("tgid", "image", "first_seen_ns", "crossing"):
        event[name] = state[name]
    event["tid"], event["ns"], event["on_cpu_ns"] = _TID, at_ns + _START_NS, on_cpu_ns
    return event


def test_a_wait_is_charged_to_each_window_that_it_lasts_through() -> None:
    recorder = _Recorder()
    asleep = _state(switched_ns=100, on_cpu_ns=100, off_class=SampleClass.BLOCKED)
    first = recorder.spent(recorder.close(1000, asleep))
    assert first == {"ON_CPU": 100, "BLOCKED": 900, "observed": 1000}
    assert recorder.spent(recorder.close(3000, asleep)) == {"BLOCKED": 2000, "observed": 2000}
    # WHEN it is woken up
    asleep["waking_ns"] = 3500 + _START_NS
    third = recorder.spent(recorder.close(4000, asleep))
    assert third == {"BLOCKED": 500, "WAITING_TO_RUN": 500, "observed": 1000}
    # AND ends, which programs charge past the boundary
    on = _state(switched_ns=4200, on_cpu_ns=100, off_class=SampleClass.ON_CPU)
    last = recorder.close(5000, on, sums=((_STACK, SampleClass.WAITING_TO_RUN, 200),), running=True)
    assert recorder.spent(last) == {"ON_CPU": 800, "WAITING_TO_RUN": 200, "observed": 1000}


@pytest.mark.parametrize("kind", [SampleClass.BLOCKED, SampleClass.PREEMPTED])
def test_what_ended_since_the_boundary_is_charged_as_it_was_there(kind: SampleClass) -> None:
    # GIVEN a thread off the CPU at the boundary, that has come back and gone again since
    recorder = _Recorder()
    crossing = {
        "boundary_ns": 1000,
        "on_cpu_ns": 300,
        "stack": _OTHER,
        "switched_ns": 300,
        "off_class": kind,
    }
    state = _state(
        switched_ns=1100, on_cpu_ns=350, off_class=SampleClass.BLOCKED, crossing=crossing
    )
    window = recorder.close(1000, state)
    assert recorder.spent(window) == {"ON_CPU": 300, kind.name: 700, "observed": 1000}
    assert window.samples["stack"].tolist() == [_OTHER]
    # THEN the next window has the rest: 50 ns in the old wait, as programs have charged it
    following = recorder.close(2000, state, sums=((_OTHER, kind, 50),))
    found = recorder.spent(following)
    assert found["ON_CPU"] == 50
    assert found["observed"] == 1000
    assert int(following.samples["weight_ns"].sum()) == 950


def test_a_thread_that_ends_is_charged_to_its_end() -> None:
    recorder = _Recorder()
    state = _state(switched_ns=400, on_cpu_ns=400, off_class=SampleClass.BLOCKED)
    recorder.close(1000, state)
    recorder.times.end(_end(1500, 700, state).tobytes())
    window = recorder.close(2000, sums=((_STACK, SampleClass.BLOCKED, 200),))
    assert recorder.spent(window) == {"ON_CPU": 300, "BLOCKED": 200, "observed": 500}
    # AND is in no window after.
    assert not len(recorder.close(3000).thread_times)


def test_a_thread_that_ended_after_the_boundary_is_in_both_windows() -> None:
    recorder = _Recorder()
    crossing = {"boundary_ns": 1000, "on_cpu_ns": 400, "switched_ns": 400, "stack": _STACK}
    state = _state(crossing={**crossing, "off_class": SampleClass.BLOCKED})
    recorder.times.end(_end(1300, 500, state).tobytes())
    first = recorder.spent(recorder.close(1000))
    assert first == {"ON_CPU": 400, "BLOCKED": 600, "observed": 1000}
    second = recorder.close(2000, sums=((_STACK, SampleClass.BLOCKED, 200),))
    assert recorder.spent(second) == {"ON_CPU": 100, "BLOCKED": 200, "observed": 300}


def test_a_thread_that_ends_after_its_state_was_read_is_counted_once() -> None:
    recorder = _Recorder()
    crossing = {"boundary_ns": 1000, "on_cpu_ns": 400, "switched_ns": 400, "stack": _STACK}
    crossing["off_class"] = SampleClass.BLOCKED
    recorder.times.end(_end(1300, 500, _state(crossing=crossing)).tobytes())
    asleep = _state(switched_ns=400, on_cpu_ns=400, off_class=SampleClass.BLOCKED)
    first = recorder.spent(recorder.close(1000, asleep))
    assert first == {"ON_CPU": 400, "BLOCKED": 600, "observed": 1000}
    second = recorder.close(2000, sums=((_STACK, SampleClass.BLOCKED, 200),))
    assert recorder.spent(second) == {"ON_CPU": 100, "BLOCKED": 200, "observed": 300}


def test_a_sleeper_that_is_entered_late_is_charged_from_the_start() -> None:
    # GIVEN windows that were closed before a thread was entered
    recorder = _Recorder()
    recorder.close(1000)
    recorder.close(2000)
    state = _state(
        switched_ns=0,
        off_class=SampleClass.BLOCKED,
        flags=abi.THREAD_SEEDED,
        first_seen_ns=_START_NS,
    )
    assert recorder.spent(recorder.close(3000, state)) == {"BLOCKED": 3000, "observed": 3000}
    assert recorder.spent(recorder.close(4000, state)) == {"BLOCKED": 1000, "observed": 1000}


def test_a_sleeper_that_is_entered_late_and_wakes_up_at_once() -> None:
    recorder = _Recorder()
    recorder.close(1000)
    crossing = {"boundary_ns": 1000, "switched_ns": 0, "stack": _STACK}
    crossing["off_class"] = SampleClass.BLOCKED
    state = _state(switched_ns=1400, off_class=SampleClass.ON_CPU, crossing=crossing)
    window = recorder.close(2000, state, sums=((_STACK, SampleClass.BLOCKED, 400),), running=True)
    assert recorder.spent(window) == {"ON_CPU": 600, "BLOCKED": 1400, "observed": 2000}


def test_a_thread_that_was_ready_to_run_is_charged_when_it_is_known_what_it_did() -> None:
    # GIVEN a thread that was entered as ready, and waited for a CPU until after the boundary
    recorder = _Recorder()
    ready = _state(switched_ns=0, off_class=SampleClass.ON_CPU, flags=abi.THREAD_SEEDED)
    assert not len(recorder.close(1000, ready).thread_times)
    crossing = {"boundary_ns": 1000, "switched_ns": 0, "stack": _STACK}
    crossing["off_class"] = SampleClass.PREEMPTED
    on = _state(switched_ns=1700, off_class=SampleClass.ON_CPU, crossing=crossing)
    window = recorder.close(2000, on, sums=((_STACK, SampleClass.PREEMPTED, 700),), running=True)
    assert recorder.spent(window) == {"ON_CPU": 300, "PREEMPTED": 1700, "observed": 2000}


def test_a_thread_that_was_ready_and_never_seen_has_waited_for_a_cpu() -> None:
    recorder = _Recorder()
    ready = _state(switched_ns=0, off_class=SampleClass.ON_CPU, flags=abi.THREAD_SEEDED)
    recorder.close(1000, ready)
    window = recorder.close(2000, ready, is_last=True)
    assert recorder.spent(window) == {"PREEMPTED": 2000, "observed": 2000}


def test_an_id_that_comes_again_is_another_thread() -> None:
    # GIVEN that the end of the first was lost
    recorder = _Recorder()
    first = _state(started_ns=1, switched_ns=900, on_cpu_ns=900, off_class=SampleClass.BLOCKED)
    recorder.close(1000, first)
    second = _state(
        started_ns=2,
        first_seen_ns=_START_NS + 1200,
        switched_ns=1300,
        on_cpu_ns=100,
        off_class=SampleClass.BLOCKED,
    )
    window = recorder.close(2000, second)
    assert recorder.spent(window) == {"ON_CPU": 100, "BLOCKED": 700, "observed": 800}


def test_a_state_that_was_made_anew_has_told_nothing() -> None:
    # GIVEN a thread with waits by chance, the end of which was lost,
    recorder = _Recorder()
    tids = np.full(1, _TID, np.uint32)
    rows = np.array([_state(switched_ns=500, on_cpu_ns=100)], abi.THREAD_STATE_DTYPE)
    rows["by_chance"]["ns"][0, 0, SampleClass.PREEMPTED] = 300
    rows["by_chance"]["count"][0, 0, SampleClass.PREEMPTED] = 6
    recorder.times.close(_START_NS + 1000, tids, rows, set())
    # WHEN its state comes again, entered as that of a thread that is there
    rows["by_chance"]["ns"][0, 0, SampleClass.PREEMPTED] = 20
    rows["by_chance"]["count"][0, 0, SampleClass.PREEMPTED] = 1
    keys, values = recorder.times.close(_START_NS + 2000, tids, rows, set()).totals
    # THEN its waits are those since, and not some that are less than none
    assert keys["sample_class"].tolist() == [SampleClass.PREEMPTED]
    assert (values["ns"].tolist(), values["count"].tolist()) == ([20], [1])


def test_waits_to_run_for_the_first_time_are_told_where_stacks_are_by_chance() -> None:
    # GIVEN a thread that waited for a CPU for 300 ns when it was made, and ran since
    recorder = _Recorder()
    state = _state(first_seen_ns=_START_NS + 200, switched_ns=500)
    state["by_chance"]["ns"][0, abi.TOTAL_NOT_RUN] = 300
    state["by_chance"]["count"][0, abi.TOTAL_NOT_RUN] = 1
    window = recorder.close(1000, state, running=True)
    # THEN that is a wait like others, and told once.
    assert recorder.spent(window) == {"WAITING_TO_RUN": 300, "ON_CPU": 500, "observed": 800}
    (row,) = window.samples
    (stack,) = window.stacks[window.stacks["stack"] == row["stack"]]
    assert (row["count"], stack["stop_reason"]) == (1, StopReason.NOT_RUN_YET)
    window = recorder.close(2000, state, running=True)
    assert recorder.spent(window) == {"ON_CPU": 1000, "observed": 1000}


def test_short_lived_processes_that_were_joined_have_all_of_their_time() -> None:
    recorder = _Recorder()
    # GIVEN twenty processes that ran for 30 ns each, waited to run for 10 and slept for 60
    keys = np.zeros(1, abi.SHORT_LIVED_KEY_DTYPE)
    keys["parent_tgid"], keys["comm"] = _PID, b"true"
    totals = np.zeros(1, abi.SHORT_LIVED_TOTAL_DTYPE)
    totals["images"], totals["on_cpu_ns"], totals["observed_ns"] = 20, 600, 2000
    by_chance = totals["by_chance"]
    by_chance["ns"][0, [abi.TOTAL_NOT_RUN, SampleClass.BLOCKED]] = 200, 1200
    by_chance["count"][0, [abi.TOTAL_NOT_RUN, SampleClass.BLOCKED]] = 20, 25
    recorder.times.join(_START_NS + 1000, keys, totals)
    nobody = np.zeros(0, np.uint32), np.zeros(0, abi.THREAD_STATE_DTYPE)
    charged = recorder.times.close(_START_NS + 1000, *nobody, set())
    # THEN their first waits are exact, and others by chance,
    assert charged.keys["sample_class"].tolist() == [SampleClass.WAITING_TO_RUN]
    assert charged.values.tolist() == [(20, 200)]
    kinds, values = charged.totals[0]["sample_class"], charged.totals[1]
    assert (kinds.tolist(), values.tolist()) == ([SampleClass.BLOCKED], [(25, 1200)])
    # of one process that has their name, and adds up.
    shared = share_out((charged.keys, charged.values), charged.totals)
    recorder.samples.add(shared.keys, shared.values)
    *_, image = recorder.table.take_changed()[0]
    assert (image.name, image.is_joined, recorder.table.joined) == ("true", True, 20)
    window = recorder.window.close(1000)
    assert {*window.samples["thread"].tolist()} == {recorder.table.thread(image, 0).index}
    (times,) = window.thread_times
    assert int(times["on_cpu_ns"]) + int(window.samples["weight_ns"].sum()) == 2000
    assert int(times["observed_ns"]) == 2000


def test_a_thread_that_left_unseen_has_no_time_after() -> None:
    recorder = _Recorder()
    state = _state(switched_ns=100, off_class=SampleClass.ON_CPU)
    tids = np.full(1, _TID, np.uint32)
    rows = np.array([state], abi.THREAD_STATE_DTYPE)
    charged = recorder.times.close(_START_NS + _SECOND_NS, tids, rows, set())
    assert charged.unseen == 1
    assert not len(charged.keys)


def test_ends_that_have_not_come_are_noticed() -> None:
    recorder = _Recorder()
    keys = np.zeros(1, abi.SUM_KEY_DTYPE)
    keys["tid"], keys["image"], keys["tgid"] = _TID, _START_NS, _PID
    nobody = np.zeros(0, np.uint32), np.zeros(0, abi.THREAD_STATE_DTYPE)
    assert recorder.times.unaccounted(keys, *nobody) == 1
    # An end of the same id before an exec is that of another image.
    other = _end(10, 1, _state())
    other["image"] += 1
    recorder.times.end(other.tobytes())
    assert recorder.times.unaccounted(keys, *nobody) == 1
    recorder.times.end(_end(10, 1, _state()).tobytes())
    assert recorder.times.unaccounted(keys, *nobody) == 0
