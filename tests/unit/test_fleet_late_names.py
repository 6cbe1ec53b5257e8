# SPDX-License-Identifier: Apache-2.0
"""Windows of an agent that has to do less wait for their names, and lose nothing by it."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from aiflame.agent.capture.reader import read_capture
from aiflame.agent.fleet import worker as module
from aiflame.agent.fleet.labelling import Labelling
from aiflame.agent.fleet.log import Log
from aiflame.agent.fleet.stretches import Stretches
from aiflame.agent.fleet.worker import _Lateness, _Stretch
from aiflame.agent.inspector.fork_server import ForkServer
from aiflame.agent.losses import LossKind
from aiflame.agent.model.window import COLUMNS, Window
from aiflame.agent.sinks.bounded_naming import BoundedNamer
from aiflame.agent.sinks.written import Naming, WrittenCapture
from aiflame.agent.symbolize.files import GivenFiles, OpenFile
from aiflame.agent.symbols.file_facts import FileFacts
from aiflame.agent.symbols.frames import Problem, SourceFrame
from aiflame.agent.symbols.service import Request, Result, SymbolService
from aiflame.agent.target_files import FileGuard
from pushes import totals_of
from windows import RandomRecording

_FACTS: dict[str, str | int] = {
    "aiflame_version": "0",
    "started_unix_ns": 2_000_000_000_000_000_000,
    "period_ns": 1_000_000,
    "command": "agent",
    "target": "all",
}


class _Labels:
    """Looks for containers of windows."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def expect(self, window: Window) -> None:
        self.seen.append(window.number)


class _Agent:
    """One stretch, which the collector writes and another process names."""

    def __init__(self, folder: Path, naming: Naming, log: Log) -> None:
        self.windows = RandomRecording(3).windows(9)
        self.written = Stretches(folder, log).begin(_FACTS, self.windows[0])
        self.lateness, self.labels = _Lateness(), _Labels()
        files = cast(GivenFiles, naming.files)
        self.stretch = _Stretch(self.written.folder, naming, files, self.lateness, log)

    def take(self, windows: Sequence[Window]) -> None:
        for window in windows:
            self.written.put(window)
        self.stretch.take(len(windows), cast(Labelling, self.labels))

    def sums(self) -> Any:
        self.stretch.finish()
        return totals_of([read_capture(self.stretch.database)])


@pytest.fixture
def log(tmp_path: Path) -> Log:
    return Log(os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT))


@pytest.fixture
def naming() -> Iterator[Naming]:
    with (
        SymbolService(None) as service,
        closing(ForkServer()) as server,
        closing(FileFacts(server, FileGuard())) as file_facts,
    ):
        yield Naming(GivenFiles(), service, file_facts, lambda _: None)


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of windows, as they are named."""
    found: list[int] = []
    put = WrittenCapture.put

    def note(capture: WrittenCapture, window: Window) -> None:
        found.append(window.number)
        put(capture, window)

    monkeypatch.setattr(module.WrittenCapture, "put", note)
    return found


@pytest.mark.parametrize(("thrift", "at_once"), [(1, 6), (4, 6), (8, 0), (16, 0)])
def test_names_wait_for_the_end_of_a_stretch_where_less_is_done(
    tmp_path: Path, naming: Naming, log: Log, named: list[int], thrift: int, at_once: int
) -> None:
    # GIVEN windows that come in two parts, WHEN much less is to be done than usual
    agent = _Agent(tmp_path / "agent", naming, log)
    agent.lateness.thrift = thrift
    agent.take(agent.windows[:4])
    agent.take(agent.windows[4:6])
    # THEN they wait for their names, but not for who knows their containers,
    assert len(named) == at_once
    assert agent.labels.seen == [*range(6)]
    # and all are there in the end, as if they had not.
    agent.take(agent.windows[6:])
    sums = agent.sums()
    assert named == [*range(9)]
    other = _Agent(tmp_path / "other", naming, log)
    other.take(other.windows)
    assert other.sums() == sums


def test_names_wait_no_longer_once_there_is_room_or_for_a_minute(
    tmp_path: Path, naming: Naming, log: Log, named: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = _Agent(tmp_path / "agent", naming, log)
    agent.lateness.thrift = 16
    agent.take(agent.windows[:3])
    assert named == []
    agent.lateness.thrift = 4
    agent.take(agent.windows[3:4])
    assert named == [0, 1, 2, 3]
    agent.lateness.thrift = 16
    length_ns = agent.windows[5].end_ns - agent.windows[4].start_ns
    monkeypatch.setattr(module, "NAMES_WAIT_NS", length_ns)
    agent.take(agent.windows[4:5])
    assert named == [0, 1, 2, 3]
    agent.take(agent.windows[5:6])
    assert named == [0, 1, 2, 3, 4, 5]
    agent.stretch.finish()


def test_nothing_waits_once_names_came_from_a_list_of_the_process(
    tmp_path: Path, naming: Naming, log: Log, named: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    # GIVEN a program that makes code, and says what it is called
    agent = _Agent(tmp_path / "agent", naming, log)
    agent.take(agent.windows[:1])
    with monkeypatch.context() as patch:
        patch.setattr(module.WrittenCapture, "jit_symbols", {(0, 1): "fib"})
        agent.take(agent.windows[1:2])
    # WHEN much less is to be done THEN its list is read while it is there.
    agent.lateness.thrift = 16
    agent.take(agent.windows[2:4])
    assert named == [0, 1, 2, 3]
    agent.lateness.prompt_until_s = 0
    agent.take(agent.windows[4:])
    assert named == [0, 1, 2, 3]
    agent.stretch.finish()


def test_what_is_in_memory_at_once_is_bounded(
    tmp_path: Path, naming: Naming, log: Log, named: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    # GIVEN windows that wait, three of which are as much as may be
    agent = _Agent(tmp_path / "agent", naming, log)
    agent.lateness.thrift = 16
    sizes = [sum(window.rows(name).nbytes for name in COLUMNS) for window in agent.windows]
    monkeypatch.setattr(module, "_MOST_AT_ONCE_BYTES", sum(sizes[:3]))
    groups: list[int] = []
    expecting = WrittenCapture.expecting

    def note(capture: WrittenCapture, windows: Sequence[Window]) -> AbstractContextManager[None]:
        groups.append(len(windows))
        return expecting(capture, windows)

    monkeypatch.setattr(module.WrittenCapture, "expecting", note)
    agent.take(agent.windows)
    assert named == []
    # WHEN they are named THEN it is group by group.
    agent.stretch.name()
    assert named == [*range(9)]
    assert groups[0] == 4 and sum(groups) == 9 and len(groups) > 1
    agent.stretch.finish()


def test_windows_wait_after_others_that_did_not(
    tmp_path: Path, naming: Naming, log: Log, named: list[int]
) -> None:
    # GIVEN windows that are named at once, and others after them that wait
    agent = _Agent(tmp_path / "agent", naming, log)
    agent.take(agent.windows[:3])
    agent.lateness.thrift = 16
    agent.take(agent.windows[3:6])
    assert named == [0, 1, 2]
    agent.lateness.thrift = 1
    # WHEN there is room again, THEN each was seen once, and is named once.
    agent.take(agent.windows[6:])
    assert agent.labels.seen == [*range(9)]
    assert named == [*range(9)]
    agent.stretch.finish()


def test_a_stretch_that_cannot_be_named_late_stays_without_names(
    tmp_path: Path, naming: Naming, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    # GIVEN windows that wait, WHEN naming them fails
    agent = _Agent(tmp_path / "agent", naming, log)
    agent.lateness.thrift = 16
    agent.take(agent.windows)

    def fail(*_: object) -> None:
        raise ValueError("no sound window")

    with monkeypatch.context() as patch:
        patch.setattr(BoundedNamer, "name", fail)
        agent.stretch.finish()
    # THEN all that they hold is there all the same.
    found = totals_of([read_capture(agent.stretch.database)])
    other = _Agent(tmp_path / "other", naming, log)
    other.take(other.windows)
    assert found == other.sums()
    assert "stays without names" in (tmp_path / "log").read_text()
    cost = [window.cost for window in agent.windows]
    assert agent.stretch.cpu_ns == other.stretch.cpu_ns == sum(each.cpu_ns for each in cost)
    assert agent.stretch.rss_bytes == max(each.rss_bytes for each in cost)


class _Names:
    """Gives most addresses of a file a name."""

    problems: tuple[Problem, ...] = ()
    peak_rss_bytes = 0

    def __init__(self) -> None:
        self.losses: Counter[LossKind] = Counter()
        self.asked: list[tuple[str, int]] = []
        self.requests = 0

    def resolve_many(self, requests: Sequence[Request]) -> Iterator[Result]:
        for request in requests:
            self.requests += 1
            addresses = request.addresses.tolist()
            self.asked += [(request.file, address) for address in addresses]
            frames = [
                (SourceFrame(f"{request.file} {address}", "", 0, False),) * bool(address % 4)
                for address in addresses
            ]
            yield Result(request, frames, [None] * len(frames))

    def resolve_generated(self, *_: object) -> list[str | None]:
        return [None] * len(cast(Any, _[-1]))


def _with_all_mapped(window: Window) -> Window:
    mappings = window.mappings.copy()
    mappings["start"], mappings["end"] = 0, 1 << 47
    return replace(window, mappings=mappings)


def test_files_are_asked_about_once_for_all_windows_that_wait(tmp_path: Path, log: Log) -> None:
    # GIVEN nine windows, which are named as they come, or later together
    found, services = [], []
    with closing(ForkServer()) as server, closing(FileFacts(server, FileGuard())) as file_facts:
        for thrift in (1, 16):
            service = _Names()
            naming = Naming(GivenFiles(), cast(SymbolService, service), file_facts, lambda _: None)
            agent = _Agent(tmp_path / f"{thrift}", naming, log)
            agent.lateness.thrift = thrift
            agent.take([*map(_with_all_mapped, agent.windows)])
            agent.stretch.finish()
            profile = read_capture(agent.stretch.database)
            found.append((profile.functions, profile.frames.tolist(), profile.stacks))
            services.append(service)
    # THEN they have the same names,
    assert found[0][:2] == found[1][:2]
    assert found[0][2].frames.tolist() == found[1][2].frames.tolist()
    # for which each file is asked about once, and not once a window.
    prompt, late = services
    assert {*late.asked} == {*prompt.asked}
    assert any(address % 4 == 0 for _, address in late.asked)
    assert late.requests == len({file for file, _ in late.asked})
    assert prompt.requests > late.requests > 0


def test_files_that_nobody_maps_any_more_stay_for_windows_that_wait(
    tmp_path: Path, naming: Naming, log: Log, named: list[int]
) -> None:
    # GIVEN two files, one of which nobody maps any more while windows wait for their names
    files = cast(GivenFiles, naming.files)
    for binary in (0, 1):
        files.add(binary, OpenFile(os.open(os.devnull, os.O_RDONLY), ""))
    agent = _Agent(tmp_path, naming, log)
    agent.lateness.thrift = 16
    agent.take(agent.windows[:4])
    files.forget(0)
    # THEN it is open until they have them, also where that fails
    assert (named, files.open(0, "", "").fd is None) == ([], False)
    agent.stretch.name()
    assert (named, files.open(0, "", "").fd is None) == ([0, 1, 2, 3], True)
    assert files.open(1, "", "").fd is not None
    agent.take(agent.windows[4:])
    files.forget(1)
    assert files.open(1, "", "").fd is not None
    agent.stretch._leave_names(ValueError())
    assert files.open(1, "", "").fd is None
    agent.stretch.finish()
