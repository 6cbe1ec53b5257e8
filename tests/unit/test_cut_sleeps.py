# SPDX-License-Identifier: Apache-2.0
"""Waits whose stacks were cut: when they are read again, and what windows are told meanwhile.

The kernel is stood in for: thread states, sums and walks are what a test says; windows are real.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from aiflame.agent.kernel import abi
from aiflame.agent.losses import LossKind
from aiflame.agent.model.profile import SampleClass, StopReason
from aiflame.agent.model.window import COLUMNS, NO_CHAIN, Window
from aiflame.agent.processes.table import ProcessImage, ProcessTable
from aiflame.agent.processes.thread_walk import WalkedThread
from aiflame.agent.recording import cut_sleeps
from aiflame.agent.recording.cut_sleeps import CutSleeps
from aiflame.agent.recording.cut_stacks import CutStacks
from aiflame.agent.recording.samples import Samples
from aiflame.agent.recording.stacks import LATE_SLEEPS, Stacks
from aiflame.agent.recording.thread_times import ThreadTimes
from aiflame.agent.recording.window_builder import Bounds, WindowBuilder
from support import blind_inspector

_PID, _TID, _IMAGE, _CUT, _OTHER = 70, 71, 5, 0xC07, 0x07E4
_LEAF, _CALLER, _KERNEL = 0x4010, 0x4020, 0xFFFF_FFFF_8100_0000
_S = 1_000_000_000
_WHOLE = WalkedThread((_LEAF, _CALLER), StopReason.ROOTED_BY_TABLE, frozenset())
_TABLE = 3


class _Walks:
    """Walks what a test says, of threads that sleep on."""

    are_possible = True

    def __init__(self) -> None:
        self.ran_ns = {_TID: 9}
        self.found: WalkedThread | None = _WHOLE
        self.count = 0

    def take(self, threads: list[tuple[int, int]]) -> dict[int, Any]:
        return {
            tid: SimpleNamespace(
                registers=SimpleNamespace(pid=pid, started_ns=1, ran_ns=self.ran_ns[tid])
            )
            for pid, tid in threads
            if tid in self.ran_ns
        }

    def walk_python(self, sleepers: list[Any]) -> Any:
        return iter(())

    def walk(self, sleepers: list[Any]) -> Any:
        for sleeper in sleepers:
            if sleeper.snapshot is None:
                continue
            self.count += 1
            yield
            if self.found is not None:
                sleeper.lacks = self.found.lacks
                if not self.found.lacks:
                    sleeper.walked, sleeper.snapshot = self.found, None

    def finish(self, sleepers: list[Any]) -> None:
        for _ in self.walk(sleepers):
            pass

    def forget(self) -> None:
        """Keeps nothing."""


class _Recorder:
    """The part of the recorder that closes windows."""

    def __init__(self) -> None:
        self.window = WindowBuilder(Bounds())
        self.table = ProcessTable(1, lambda pid: _IMAGE, blind_inspector())
        self.image = self.table.image(_PID, _IMAGE)
        self.image.was_read = True
        self.walks = _Walks()
        self.building = {_TABLE}
        tables: Any = SimpleNamespace(
            take_pushed=set,
            is_being_built=lambda binary: binary in self.building,
        )
        pythons: Any = SimpleNamespace(is_starting=lambda image: False)
        calls: Any = SimpleNamespace(function_of=lambda slot: 0)
        self.stacks = Stacks(self.window, self.table, calls, CutStacks(pythons), [])
        walks: Any = self.walks
        self.sleeps = CutSleeps(
            SimpleNamespace(),  # type: ignore[arg-type]
            self.table,
            tables,
            walks,
            pythons,
            self.stacks,
        )
        times = ThreadTimes(self.window, self.table)
        self.samples = Samples(self.window, self.table, times, self.sleeps)
        self._tell_process(self.image)
        for stack in (_CUT, _OTHER):
            self.add_stack(stack)

    def _tell_process(self, image: ProcessImage) -> None:
        process = np.zeros(1, COLUMNS["processes"].dtype)
        process["process"], process["pid"] = image.index, image.pid
        self.window.define("processes", process)
        threads = np.zeros(1, COLUMNS["threads"].dtype)
        threads["thread"] = self.table.thread(image, _TID).index
        threads["process"], threads["tid"] = image.index, _TID
        self.window.define("threads", threads)

    def add_stack(self, stack: int) -> None:
        record = np.zeros(1, abi.STACK_DTYPE)
        record["image"], record["tgid"] = _IMAGE, _PID
        record["kernel_depth"], record["user_depth"] = 1, 1
        record["frames"][0, :2] = _KERNEL, _LEAF
        record["end"] = StopReason.NO_TABLE
        self.stacks.add(np.array([stack], np.uint64), record)

    def close(self, at_s: int, *sums: tuple[int, SampleClass, int, int], **state: int) -> Window:
        """Closes a window at a time, with sums (stack, class, count, ns), and a thread's state."""
        states = np.zeros(int(bool(state)), abi.THREAD_STATE_DTYPE)
        for name, value in {
            "tgid": _PID,
            "image": _IMAGE,
            "stack": _CUT,
            "started_ns": 1,
            "ran_ns": 9,
            "off_class": SampleClass.BLOCKED,
            **state,
        }.items():
            states[name] = value
        keys, values = (
            np.zeros(len(sums), abi.SUM_KEY_DTYPE),
            np.zeros(len(sums), abi.SUM_VALUE_DTYPE),
        )
        keys["tid"], keys["tgid"], keys["image"] = _TID, _PID, _IMAGE
        for at, (stack, kind, count, ns) in enumerate(sums):
            keys[at]["stack"], keys[at]["sample_class"] = stack, kind
            values[at] = (count, ns)
        tids = np.full(len(states), _TID, np.uint32)
        keys, values = self.sleeps.close(at_s * _S, tids, states, keys, values)
        # As the thread times do it: what lies before the boundary.
        open_keys = np.zeros(len(states), abi.SUM_KEY_DTYPE)
        open_keys["tid"], open_keys["tgid"], open_keys["image"] = _TID, _PID, _IMAGE
        open_keys["stack"], open_keys["sample_class"] = states["stack"], SampleClass.BLOCKED
        open_values = np.zeros(len(states), abi.SUM_VALUE_DTYPE)
        begin_ns = np.maximum(states["switched_ns"].astype(np.int64), (at_s - 1) * _S)
        open_values["ns"] = at_s * _S - begin_ns
        keys, values = np.concatenate([keys, open_keys]), np.concatenate([values, open_values])
        self.samples.add(keys, values)
        self.sleeps.note(keys, values)
        return self.window.close(at_s * _S)


def _rows(window: Window) -> list[tuple[int, int, int, int]]:
    """Returns (stack, class, count, ns) of a window's samples."""
    return sorted(window.samples[["stack", "kind", "count", "weight_ns"]].tolist())


def _stack(window: Window, stack: int) -> tuple[list[int], StopReason]:
    """Returns the addresses of a stack, and how it ends."""
    (row,) = window.stacks[window.stacks["stack"] == stack]
    first, depth = int(row["first"]), int(row["kernel_depth"]) + int(row["user_depth"])
    addresses = window.addresses["address"][first : first + depth].tolist()
    return addresses, StopReason(int(row["stop_reason"]))


_BLOCKED, _RUNNABLE = SampleClass.BLOCKED, SampleClass.WAITING_TO_RUN
_AS_CUT = ([_KERNEL, _LEAF], StopReason.NO_TABLE_YET)
_AS_WHOLE = ([_KERNEL, _LEAF, _CALLER], StopReason.ROOTED_BY_TABLE)
_MADE = LATE_SLEEPS + 1


def test_a_sleep_that_goes_on_is_whole_from_its_first_boundary_on() -> None:
    recorder = _Recorder()
    window = recorder.close(2, switched_ns=_S)
    # Kernel frames stay those of the switch.
    assert _rows(window) == [(_MADE, _BLOCKED, 0, _S)]
    assert _stack(window, _MADE) == _AS_WHOLE
    # WHEN it ends, what the kernel half summed since is of the same stack.
    window = recorder.close(3, (_CUT, _BLOCKED, 1, 600), (_CUT, _RUNNABLE, 1, 40))
    assert _rows(window) == [(_MADE, _BLOCKED, 1, 600), (_MADE, _RUNNABLE, 1, 40)]
    late = recorder.sleeps.finish()
    assert (late.walked, late.walked_ns) == (1, _S + 640)
    assert recorder.walks.count == 1


def test_windows_have_a_sleep_as_it_was_cut_until_its_table_comes() -> None:
    recorder = _Recorder()
    recorder.walks.found = WalkedThread((_LEAF,), StopReason.NO_TABLE, frozenset({_TABLE}))
    # WHEN a recording that is killed has these windows, it is truncated in them,
    assert _stack(recorder.close(2, switched_ns=_S), _MADE) == _AS_CUT
    assert _stack(recorder.close(3, switched_ns=_S), _MADE) == _AS_CUT
    # AND nobody walks as long as there is no table.
    assert recorder.walks.count == 1
    recorder.building.clear()
    recorder.walks.found = _WHOLE
    window = recorder.close(4, switched_ns=_S)
    assert _stack(window, _MADE) == _AS_WHOLE
    assert _rows(window) == [(_MADE, _BLOCKED, 0, _S)]


def test_a_thread_that_wakes_up_before_its_table_comes_is_walked_from_a_copy() -> None:
    recorder = _Recorder()
    recorder.walks.found = WalkedThread((_LEAF,), StopReason.NO_TABLE, frozenset({_TABLE}))
    recorder.close(2, switched_ns=_S)
    window = recorder.close(3, (_CUT, _BLOCKED, 1, 600))
    assert _rows(window) == [(_MADE, _BLOCKED, 1, 600)]
    assert recorder.sleeps.used_images() == {recorder.image.index}
    # WHEN the table comes after that, no window has its time, but one has its stack.
    recorder.building.clear()
    recorder.walks.found = _WHOLE
    window = recorder.close(4)
    assert (_rows(window), _stack(window, _MADE)) == ([], _AS_WHOLE)
    assert recorder.sleeps.finish().walked == 1


@pytest.mark.parametrize("registers", [{}, {_TID: 10}])
def test_a_thread_that_has_run_since_stays_truncated(registers: dict[int, int]) -> None:
    recorder = _Recorder()
    recorder.walks.ran_ns = registers
    window = recorder.close(2, switched_ns=_S)
    assert _rows(window) == [(_CUT, _BLOCKED, 0, _S)]
    assert recorder.close(3, (_CUT, _BLOCKED, 1, 600)).stacks["stack"].tolist() == [_CUT]
    assert recorder.walks.count == 0


def test_a_stack_that_another_walk_cuts_as_well_is_not_walked_again() -> None:
    recorder = _Recorder()
    recorder.walks.found = WalkedThread((_LEAF,), StopReason.NO_TABLE, frozenset())
    for at_s in (2, 3, 4):
        window = recorder.close(at_s, switched_ns=(at_s - 1) * _S)
        assert _rows(window) == [(_CUT, _BLOCKED, 0, _S)]
    assert recorder.walks.count == 1


def _wait(start_ns: int, blocked_ns: int, runnable_ns: int) -> npt.NDArray[np.void]:
    event = np.zeros(1, abi.WAIT_EVENT_DTYPE)
    event["tid"], event["tgid"], event["image"], event["stack"] = _TID, _PID, _IMAGE, _CUT
    event["start_ns"], event["blocked_ns"], event["runnable_ns"] = start_ns, blocked_ns, runnable_ns
    return event


def test_sums_of_several_sleeps_are_split_by_their_events() -> None:
    recorder = _Recorder()
    recorder.close(2, switched_ns=_S)
    # WHEN it ends, and the thread comes back to the same place: 900 ns are not of that sleep
    recorder.samples.add_waits(_wait(_S, _S + 600, 40))
    window = recorder.close(3, (_CUT, _BLOCKED, 2, 1500), (_CUT, _RUNNABLE, 2, 45))
    assert _rows(window) == [
        *((_CUT, _BLOCKED, 1, 900), (_CUT, _RUNNABLE, 1, 5)),
        *((_MADE, _BLOCKED, 1, 600), (_MADE, _RUNNABLE, 1, 40)),
    ]
    assert window.waits["stack"].tolist() == [_MADE]


def test_without_an_event_a_sum_of_several_sleeps_stays_as_it_is() -> None:
    recorder = _Recorder()
    recorder.close(2, switched_ns=_S)
    window = recorder.close(3, (_CUT, _BLOCKED, 2, 1500), (_OTHER, _BLOCKED, 1, 7))
    assert _rows(window) == [
        *((_OTHER, _BLOCKED, 1, 7), (_CUT, _BLOCKED, 2, 1500), (_MADE, _BLOCKED, 1, 0)),
    ]


def test_cut_stacks_of_a_process_are_forgotten_with_it() -> None:
    recorder = _Recorder()
    assert recorder.stacks.cut.by_id
    recorder.sleeps.forget_images({recorder.image.index})
    assert not recorder.stacks.cut.by_id


def test_a_sleep_that_ended_past_the_boundary_is_charged_before_it() -> None:
    recorder = _Recorder()
    recorder.close(2, switched_ns=_S)
    states = np.zeros(1, abi.THREAD_STATE_DTYPE)
    states["image"], states["switched_ns"] = _IMAGE, 3 * _S + 5
    states["crossing"]["boundary_ns"], states["crossing"]["switched_ns"] = 3 * _S, _S
    states["crossing"]["stack"] = _CUT
    nothing = np.zeros(0, abi.SUM_KEY_DTYPE), np.zeros(0, abi.SUM_VALUE_DTYPE)
    recorder.sleeps.close(3 * _S, np.array([_TID], np.uint32), states, *nothing)
    assert states["crossing"]["stack"].tolist() == [_MADE]


def test_those_beyond_what_may_wait_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cut_sleeps, "_MOST_WAITING", 0)
    recorder = _Recorder()
    assert _rows(recorder.close(2, switched_ns=_S)) == [(_CUT, _BLOCKED, 0, _S)]
    recorder.close(3, switched_ns=_S)
    assert recorder.sleeps.losses == {LossKind.CUT_SLEEPS_LEFT: 1}


def test_those_that_wake_up_before_their_turn_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cut_sleeps, "_MOST_READ", 0)
    recorder = _Recorder()
    assert _stack(recorder.close(2, switched_ns=_S), _MADE) == _AS_CUT
    recorder.close(3, (_CUT, _BLOCKED, 1, 600))
    assert recorder.sleeps.losses == {LossKind.CUT_SLEEPS_LEFT: 1}
    assert recorder.stacks.row(_MADE)["chain"] == NO_CHAIN  # type: ignore[index]
