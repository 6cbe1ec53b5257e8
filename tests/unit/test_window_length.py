# SPDX-License-Identifier: Apache-2.0
"""When a recorder closes windows, and what it does each second whether one ends or not."""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from aiflame.agent.kernel import abi
from aiflame.agent.recording import recorder as module
from aiflame.agent.recording.chance import Chances
from aiflame.agent.recording.recorder import Recorder

_S = 1_000_000_000


class _Host:
    """A recorder whose surroundings are stood in for: nothing happens but that time goes by."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, window_s: int, seconds: float) -> None:
        self.now_ns = 100 * _S
        self.windows: list[float] = []
        self.walks: list[float] = []
        self.reports = 0
        self.are_used: Callable[[float], bool] = lambda second: False
        self.are_running = False
        self.is_filling: Callable[[float], bool] = lambda second: False
        self.are_sums_many: Callable[[float], bool] = lambda second: False
        self.are_calls_many: Callable[[float], bool] = lambda second: False
        self.are_stacks_many: Callable[[float], bool] = lambda second: False
        self.drains: list[float] = []
        self.device_drains: list[float] = []
        clock = SimpleNamespace(monotonic_ns=self._tick, sleep=lambda seconds: None)
        monkeypatch.setattr(module, "time", clock)
        host = self

        class Devices:
            poll = staticmethod(lambda: None)

            @property
            def are_used(self) -> bool:
                return host.are_used(host.second)

            @property
            def are_running(self) -> bool:
                return host.are_used(host.second) or host.are_running

        class Window:
            @property
            def is_filling(self) -> bool:
                return host.is_filling(host.second)

        class Fill:
            @property
            def are_sums_many(self) -> bool:
                return host.are_sums_many(host.second)

            @property
            def are_calls_many(self) -> bool:
                return host.are_calls_many(host.second)

            @property
            def are_stacks_many(self) -> bool:
                return host.are_stacks_many(host.second)

        poll = SimpleNamespace(poll=lambda: None, take=lambda: None, due_ns=1 << 62)
        self.recorder: Any = SimpleNamespace(
            start_ns=self.now_ns,
            _end_ns=self.now_ns + round(seconds * _S),
            _window_ns=window_s * _S,
            _device_window_ns=_S,
            _drain_devices=lambda ns, is_within: self.device_drains.append(ns),
            _since_start=lambda ns: round(ns / _S - 100, 1),
            _round_ns=0,
            _ends_wanted=0,
            _ends_made=0,
            _ring=SimpleNamespace(watch=lambda fd: None, wait=self._wait),
            _signals=SimpleNamespace(fd=0, requested=False),
            _target=SimpleNamespace(pids=()),
            _living_pids=list,
            _enter_sleepers=lambda: True,
            _has_entered=True,
            _chances=None,
            _accounts=None,
            _options=SimpleNamespace(off_cpu=True),
            _real_time=SimpleNamespace(check=lambda: None),
            events=SimpleNamespace(take=lambda: True),
            _fill=Fill(),
            _drain_stacks=lambda: self.drains.append(self.second),
            _window=Window(),
            thread_times=SimpleNamespace(is_filling=False),
            table=SimpleNamespace(is_filling=False),
            devices=Devices(),
            sleepers=SimpleNamespace(walk_again=lambda: self.walks.append(self.second)),
            calls=SimpleNamespace(poll=lambda: None, is_waiting=False),
            pythons=SimpleNamespace(poll=lambda: None, interval_ns=_S // 10),
            _lives=SimpleNamespace(keep_up=lambda: None),
            _follow_cpus=lambda: None,
            _with_thread_names=False,
            _progress=lambda: None,
            _next_window=lambda: self.second,
            late_walks=poll,
            tables=poll,
            _cut_sleeps=poll,
        )

    @property
    def second(self) -> float:
        return round(self.now_ns / _S - 100, 1)

    def _tick(self) -> int:
        self.now_ns += 1000
        return self.now_ns

    def _wait(self, seconds: float) -> None:
        self.now_ns += round(seconds * _S)

    def run(self) -> None:
        def report(_: object) -> None:
            self.reports += 1

        run: Any = Recorder._run
        run(self.recorder, self.windows.append, report)


def test_windows_are_of_a_second_unless_longer_ones_are_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host = _Host(monkeypatch, 1, 4.5)
    host.run()
    assert host.windows == [1, 2, 3, 4]
    assert host.walks == []  # each window does


def test_a_longer_window_ends_after_its_seconds_and_sleepers_are_walked_in_each_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host = _Host(monkeypatch, 5, 12.5)
    host.run()
    assert host.windows == [1, 6, 11]
    assert host.walks == [2, 3, 4, 5, 7, 8, 9, 10, 12]
    assert host.reports == 12


def test_windows_are_of_a_second_while_a_device_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    host = _Host(monkeypatch, 5, 15.5)
    host.are_used = lambda second: 3 <= second < 7
    host.run()
    assert host.windows == [1, 3, 4, 5, 6, 11]
    assert host.device_drains == []  # each window does


def test_devices_are_drained_each_second_also_where_windows_are_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host = _Host(monkeypatch, 20, 24.5)
    host.recorder._device_window_ns = 4 * _S
    host.are_used = lambda second: 3 <= second < 13
    host.run()
    assert host.windows == [1, 5, 9]
    assert host.device_drains == [3, 4, 6, 7, 8, 10, 11, 12]


def test_devices_that_nobody_can_sample_yet_are_drained_each_second_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # GIVEN a family whose helper may come any time, and which is told how busy devices are
    host = _Host(monkeypatch, 5, 8.5)
    host.are_running = True
    host.run()
    assert host.windows == [1, 6]
    assert host.device_drains == [2, 3, 4, 5, 7, 8]


def test_a_window_that_a_drain_of_devices_fills_ends_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host = _Host(monkeypatch, 5, 12.5)
    host.are_running = True
    host.is_filling = lambda second: host.device_drains[-1:] == [second] == [3]
    host.run()
    assert host.windows == [1, 3, 8]


def test_launches_that_come_fast_end_longer_windows_of_devices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host = _Host(monkeypatch, 20, 12.5)
    host.recorder._device_window_ns = 4 * _S
    host.are_used = lambda second: second < 9
    host.are_calls_many = lambda second: 2 <= second < 4 or second >= 9
    host.run()
    assert host.windows == [1, 2, 3, 7]  # and then there are no devices


def test_a_window_that_fills_ends_early(monkeypatch: pytest.MonkeyPatch) -> None:
    # THEN the next one is not short for it
    host = _Host(monkeypatch, 5, 8.5)
    host.is_filling = lambda second: second == 2.5
    host.run()
    assert host.windows == [1, 2.5, 7]


def test_a_window_whose_end_is_asked_for_ends_once(monkeypatch: pytest.MonkeyPatch) -> None:
    host = _Host(monkeypatch, 5, 8.5)

    def take() -> bool:
        if host.second == 2.5:
            Recorder.end_window(host.recorder)
        return False

    host.recorder.events.take = take
    host.run()
    assert host.windows == [1, 2.5, 7]


def test_many_sums_end_a_window_and_many_stacks_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    host = _Host(monkeypatch, 5, 8.5)
    host.are_stacks_many = lambda second: second in (1.5, 3.5, 4.5)
    host.are_sums_many = lambda second: second == 3.5  # which takes stacks as well
    host.run()
    assert host.windows == [1, 3.5, 8]
    assert host.drains == [1.5, 4.5]


def test_stacks_come_after_what_has_to_be_known_of_them() -> None:
    # Within a window as at its end.
    done: list[str] = []

    def does(name: str) -> Callable[..., None]:
        return lambda *_: done.append(name)

    stub = SimpleNamespace
    recorder: Any = stub(
        devices=stub(before_stacks=does("locations")),
        _follow_mappings=does("mappings"),
        late_walks=stub(take=does("copies")),
        _fill=stub(note_stacks_taken=does("counters")),
        _programs=stub(stacks=stub(chunks=lambda take: iter([((), ())]))),
        stacks=stub(add=does("stacks")),
        pythons=stub(take_chains=does("chains")),
        _real_time=stub(check=lambda: None),
    )
    Recorder._drain_stacks(recorder)
    before = done[: done.index("stacks")]
    assert sorted(before) == ["copies", "counters", "locations", "mappings"]
    assert done[-1] == "chains"


def test_windows_are_longer_where_less_is_done() -> None:
    stub = SimpleNamespace
    recorder: Any = stub(
        _programs=stub(set=lambda *_: None, chances=stub()),
        _chances=None,
        _chances_number=0,
        _least_round_ns=0,
        _least_window_ns=5 * _S,
        _long_waits=stub(),
        _cut_sleeps=stub(),
        pythons=stub(),
        events=stub(),
    )
    lengths = []
    for thrift, delay_factor in ((1, 1), (2, 1), (16, 1), (16, 2), (1, 1)):
        Recorder._set_chances(recorder, Chances(1, thrift=thrift, delay_factor=delay_factor))
        lengths.append((recorder._window_ns // _S, recorder._device_window_ns // _S))
    assert lengths == [(5, 1), (10, 2), (60, 16), (60, 32), (5, 1)]


def test_what_python_frames_are_called_is_told_before_a_window_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Texts get other numbers once it is.
    done: list[str] = []
    monkeypatch.setattr(module, "read_losses", lambda *_: Counter())
    stub = SimpleNamespace
    recorder: Any = stub(
        calls=stub(finish=lambda *_: None),
        devices=stub(kernel_names=dict, forget_unused_kernels=lambda: None),
        table=stub(ended_images=list),
        facts=stub(tell=lambda _: None),
        pythons=stub(tell=lambda: done.append("told")),
        losses=Counter,
        _programs=stub(counters=None),
        _possible_cpus=1,
        _end_ns=9,
        _told_losses=Counter(),
        _took_ns=(1, 1),
        _resident_bytes=lambda: 1,
        _since_start=lambda ns: ns,
        _window=stub(close=lambda *_, **__: done.append("closed")),
        _ended=stub(forget=lambda: done.append("forgotten")),
    )
    Recorder._close_window(recorder, 5)
    assert done == ["told", "closed", "forgotten"]


@pytest.mark.parametrize(("error", "is_raised"), [(errno.E2BIG, False), (errno.EPERM, True)])
def test_more_processes_than_there_is_room_for_are_counted(error: int, is_raised: bool) -> None:
    def update(*_: object) -> None:
        raise OSError(error, "no")

    programs = SimpleNamespace(processes=SimpleNamespace(update=update))
    recorder: Any = SimpleNamespace(_programs=programs, _processes_refused=0)
    enter = partial(Recorder._enter_process, recorder, 7, 1, abi.ProcessFlag.TARGET)
    if is_raised:
        with pytest.raises(OSError, match="no"):
            enter()
    else:
        assert not enter()
    assert recorder._processes_refused == (not is_raised)
