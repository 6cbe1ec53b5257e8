# SPDX-License-Identifier: Apache-2.0
"""What an agent keeps where others fill its disk."""

from __future__ import annotations

import errno
import inspect
import os
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiflame.agent.capture.segment import SegmentWriter
from aiflame.agent.fleet.agent import _Agent
from aiflame.agent.fleet.config import AgentConfig, AgentSettings
from aiflame.agent.fleet.log import Log
from aiflame.agent.fleet.naming_messages import Lost, NoRoom, StretchDone, ToNaming
from aiflame.agent.fleet.stretches import Stretches, mark_done
from aiflame.agent.fleet.vitals import Vitals
from aiflame.agent.model.window import Window
from aiflame.agent.sinks.segments import RecordedWindows
from windows import RandomRecording

_NS_PER_S = 1_000_000_000


class _Signals:
    requested = False


@dataclass
class _Disk:
    """The disk that stretches are on: more than `room_bytes` of segments fail, as ENOSPC does."""

    stretches: Stretches
    room_bytes: int = 1 << 40

    def used_bytes(self) -> int:
        return sum(
            path.stat().st_size for folder in self.stretches.all() for path in folder.iterdir()
        )


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> _Disk:
    made = _Disk(Stretches(tmp_path / "agent", Log(os.open(os.devnull, os.O_WRONLY))))
    append = SegmentWriter._append

    def limited(writer: SegmentWriter, data: bytes) -> None:
        if made.used_bytes() + len(data) > made.room_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        append(writer, data)

    monkeypatch.setattr(SegmentWriter, "_append", limited)
    return made


@pytest.fixture
def agent(disk: _Disk, tmp_path: Path) -> _Agent:
    settings = AgentSettings(directory=tmp_path / "agent", stretch=1.0)
    parts: dict[str, Any] = dict.fromkeys(inspect.signature(_Agent).parameters)
    parts |= {
        "config": AgentConfig(settings, {}),
        "signals": _Signals(),
        "stretches": disk.stretches,
        "facts": {"started_unix_ns": time.time_ns() - 3600 * _NS_PER_S},
        "log": Log(os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT)),
        "vitals": Vitals(),
        "recorder": SimpleNamespace(table=None, leave_out=lambda _: None),
        "health": SimpleNamespace(unready=""),
    }
    made = _Agent(**parts)
    # Clocks are those of the test: windows came in the last minutes.
    made._follow_clock = lambda: None  # type: ignore[method-assign]
    return made


def _minutes(count: int) -> list[Window]:
    """Returns windows of ten seconds each, which are stretches of their own."""
    first = RandomRecording(3).windows(1)[0]
    begins = [(3600 - 10 * (count - at)) * _NS_PER_S for at in range(count)]
    return [replace(first, start_ns=ns, end_ns=ns + 10 * _NS_PER_S) for ns in begins]


def _kept(disk: _Disk) -> list[int]:
    """Returns where the windows begin that are on disk."""
    return [w.start_ns for folder in disk.stretches.all() for w in RecordedWindows(folder)]


def _sent(disk: _Disk) -> None:
    for folder in disk.stretches.undone():
        mark_done(folder)


def test_a_full_disk_costs_the_oldest_and_no_more_than_it_takes(disk: _Disk, agent: _Agent) -> None:
    # GIVEN ten stretches that were sent, of the last minutes, and no room for another one
    windows = _minutes(12)
    for window in windows[:10]:
        agent._give(window)
        _sent(disk)
    disk.room_bytes = disk.used_bytes()
    # WHEN two more come
    agent._give(windows[10])
    agent._give(windows[11])
    # THEN they are there in place of the two oldest, and nothing else is gone.
    assert _kept(disk) == [window.start_ns for window in windows[2:]]
    assert agent._vitals.windows == 12


def test_a_window_without_room_leaves_no_stretch(
    disk: _Disk, agent: _Agent, tmp_path: Path
) -> None:
    # GIVEN a disk without room, and nothing that may go
    windows = _minutes(3)
    agent._give(windows[0])
    disk.room_bytes = disk.used_bytes()
    # WHEN a window comes THEN it is lost, is told of, and what was not sent stays
    agent._give(windows[1])
    assert "1 windows are lost" in (tmp_path / "log").read_text()
    assert len(disk.stretches.all()) == 1
    # AND the next one has its place once there is room.
    disk.room_bytes *= 3
    agent._give(windows[2])
    assert _kept(disk) == [windows[0].start_ns, windows[2].start_ns]


def test_where_there_is_no_room_to_name_half_of_what_was_sent_goes(
    disk: _Disk, agent: _Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    windows = _minutes(6)
    for window in windows:
        agent._give(window)
        _sent(disk)
    now_s, free = time.monotonic(), SimpleNamespace(f_bavail=10**6, f_frsize=4096, f_favail=9)

    def statvfs(_: Path) -> SimpleNamespace:
        if free.f_bavail < 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return free

    monkeypatch.setattr(os, "statvfs", statvfs)
    # GIVEN an error that may have another reason, and room, or a disk that tells nothing
    for free.f_bavail in (10**6, -1):
        agent._take_report(NoRoom({}, is_disk_full=False))
        # THEN nothing goes.
        assert len(_kept(disk)) == 6
    # GIVEN a disk that is full, without inodes, or said to be THEN half goes each minute.
    cases = ((False, 10, 9), (False, 10**6, 0), (True, 10**6, 9))
    for left, (is_known, free.f_bavail, free.f_favail) in zip((3, 1, 0), cases, strict=True):
        now_s += 60
        monkeypatch.setattr(time, "monotonic", lambda now_s=now_s: now_s)
        for _ in range(3):  # each sink tells of it
            agent._take_report(NoRoom({}, is_disk_full=is_known))
        assert _kept(disk) == [window.start_ns for window in windows[6 - left :]]


class _Naming:
    """What the process that names and sends is told; it does nothing."""

    def __init__(self, *_: object) -> None:
        self.lost: Counter[str] = Counter()

    def tell(self, message: ToNaming) -> None:
        if isinstance(message, Lost):
            self.lost.update(message.counts)

    def give(self, windows: int) -> None:
        pass


def test_what_is_lost_while_nobody_sends_is_told_until_a_stretch_has_it(
    disk: _Disk, agent: _Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[_Naming] = []

    def naming(*_: object) -> _Naming:
        made.append(_Naming())
        return made[-1]

    monkeypatch.setattr("aiflame.agent.fleet.agent.NamingProcess", naming)
    # GIVEN two stretches that go unsent, and a window without room, while no process sends
    windows = _minutes(6)
    for window in windows[:3]:
        agent._give(window)
    settings = agent._config.agent
    agent._config = AgentConfig(replace(settings, keep_size=disk.used_bytes() // 2), {})
    agent._tidy(room_only=True)
    agent._config = AgentConfig(settings, {})
    disk.room_bytes = disk.used_bytes()
    agent._give(windows[3])
    wanted = {"windows_lost": 1, "stretches_lost": 2}
    # WHEN one is started THEN it is told of both, and so is the next one if that does not last.
    for number in range(2):
        agent._start_naming()
        assert made[number].lost == wanted
    # AND another window that is lost is told of once.
    agent._give(windows[4])
    wanted["windows_lost"] = 2
    assert made[-1].lost == wanted
    # WHEN a stretch tells of others, as it was sent before these were heard of
    losses = {**wanted, "stack_lost": 7}
    agent._take_report(StretchDone({}, "1", 0, 0, losses, {}, 0, 0))
    # THEN whoever comes next is told of them all the same.
    agent._start_naming()
    assert made[-1].lost == wanted
    # WHEN some have been told of THEN the next is told of the others, and in the end of none.
    told = {"windows_lost": 1, "stretches_lost": 2}
    agent._take_report(StretchDone({}, "2", 0, 0, losses, told, 0, 0))
    agent._start_naming()
    assert made[-1].lost == {"windows_lost": 1}
    agent._take_report(StretchDone({}, "3", 0, 0, losses, {"windows_lost": 1}, 0, 0))
    agent._start_naming()
    assert not made[-1].lost
    # AND metrics have them.
    metrics = {x.name: x.value for family in agent._vitals.collect() for x in family.samples}
    assert metrics["aiflame_stretches_lost_total"] == metrics["aiflame_windows_lost_total"] == 2


@pytest.mark.parametrize("number", [errno.EIO, errno.EROFS, errno.EMFILE])
def test_what_was_kept_stays_where_it_would_make_no_room(
    disk: _Disk, agent: _Agent, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    windows = _minutes(3)
    for window in windows[:2]:
        agent._give(window)
        _sent(disk)

    def fails(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(SegmentWriter, "_append", fails)
    agent._give(windows[2])
    monkeypatch.undo()
    assert _kept(disk) == [window.start_ns for window in windows[:2]]
