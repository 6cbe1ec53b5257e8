# SPDX-License-Identifier: Apache-2.0
"""Windows of an agent that has to do less wait for their names, and lose nothing by it."""

from __future__ import annotations

import errno
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from aiflame.agent.capture.reader import read_capture
from aiflame.agent.errors import DiskFull
from aiflame.agent.fleet import stretch_naming as module
from aiflame.agent.fleet.labelling import Labelling
from aiflame.agent.fleet.log import Log
from aiflame.agent.fleet.stretch_naming import Lateness, StretchNaming
from aiflame.agent.fleet.stretches import Stretches
from aiflame.agent.inspector.fork_server import ForkServer
from aiflame.agent.losses import LossKind
from aiflame.agent.model.window import COLUMNS, Window
from aiflame.agent.sinks.bounded_naming import BoundedNamer
from aiflame.agent.sinks.written import Naming, WrittenCapture
from aiflame.agent.symbolize.files import GivenFiles, OpenFile
from aiflame.agent.symbolize.stacks import LEFT_OUT
from aiflame.agent.symbols.file_facts import FileFacts
from aiflame.agent.symbols.frames import Problem, Range, SourceFrame
from aiflame.agent.symbols.service import Request, Result, SymbolService
from aiflame.agent.target_files import FileGuard
from pushes import totals_of
from support import are_gone
from windows import RandomRecording

_FACTS: dict[str, str | int] = {
    "aiflame_version": "0",
    "started_unix_ns": 2_000_000_000_000_000_000,
    "period_ns": 1_000_000,
    "command": "agent",
    "target": "all",
}

# Tells which windows were named so far.
Named = Callable[[], list[int]]


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
        self.lateness, self.labels = Lateness(), _Labels()
        files = cast(GivenFiles, naming.files)
        self.stretch = StretchNaming(self.written.folder, naming, files, self.lateness, log)

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
def named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Named:
    """Tells the numbers of windows in the order in which they were named, by whatever process."""
    path = tmp_path / "named"
    path.touch()
    put = WrittenCapture.put

    def note(capture: WrittenCapture, window: Window) -> None:
        with path.open("a") as file:
            file.write(f"{window.number}\n")
        put(capture, window)

    monkeypatch.setattr(module.WrittenCapture, "put", note)
    return lambda: [*map(int, path.read_text().split())]


@pytest.mark.parametrize(("thrift", "at_once"), [(1, 6), (4, 6), (8, 0), (16, 0)])
def test_names_wait_for_the_end_of_a_stretch_where_less_is_done(
    tmp_path: Path,
    naming: Naming,
    log: Log,
    named: Named,
    thrift: int,
    at_once: int,
) -> None:
    # GIVEN windows that come in two parts, WHEN much less is to be done than usual
    agent = _Agent(tmp_path / "agent", naming, log)
    agent.lateness.thrift = thrift
    agent.take(agent.windows[:4])
    agent.take(agent.windows[4:6])
    # THEN they wait for their names, but not for who knows their containers,
    assert len(named()) == at_once
    assert agent.labels.seen == [*range(6)]
    # and all are there in the end, as if they had not.
    agent.take(agent.windows[6:])
    sums = agent.sums()
    assert named() == [*range(9)]
    other = _Agent(tmp_path / "other", naming, log)
    other.take(other.windows)
    assert other.sums() == sums


def test_names_wait_no_longer_once_there_is_room_or_for_a_minute(
    tmp_path: Path,
    naming: Naming,
    log: Log,
    named: Named,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    agent = _Agent(tmp_path / "agent", naming, log)
    agent.lateness.thrift = 16
    agent.take(agent.windows[:3])
    assert named() == []
    agent.lateness.thrift = 4
    agent.take(agent.windows[3:4])
    assert named() == [0, 1, 2, 3]
    agent.lateness.thrift = 16
    length_ns = agent.windows[5].end_ns - agent.windows[4].start_ns
    monkeypatch.setattr(module, "NAMES_WAIT_NS", length_ns)
    agent.take(agent.windows[4:5])
    agent.take(agent.windows[5:6])  # it may have been the last
    assert named() == [0, 1, 2, 3]
    agent.take(agent.windows[6:7])
    assert named() == [0, 1, 2, 3, 4, 5]
    agent.stretch.finish()
    assert named() == [*range(7)]


def test_a_large_window_and_those_after_it_wait_in_any_case(
    tmp_path: Path,
    naming: Naming,
    log: Log,
    named: Named,
    forked: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    agents = [_Agent(tmp_path / name, naming, log) for name in ("small", "large")]
    agents[0].take(agents[0].windows[:5])
    assert named() == [*range(5)]
    with monkeypatch.context() as patch:
        patch.setattr(module, "_LARGE_BYTES", 100)
        agents[1].take(agents[1].windows[:1])
    agents[1].take(agents[1].windows[1:5])
    assert named() == [*range(5)]
    assert agents[0].sums() == agents[1].sums()
    assert len(forked) == 1 and are_gone(forked)


def test_nothing_waits_once_names_came_from_a_list_of_the_process(
    tmp_path: Path,
    naming: Naming,
    log: Log,
    named: Named,
    monkeypatch: pytest.MonkeyPatch,
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
    assert named() == [0, 1, 2, 3]
    agent.lateness.prompt_until_s = 0
    agent.take(agent.windows[4:])
    assert named() == [0, 1, 2, 3]
    agent.stretch.finish()


def test_what_is_in_memory_at_once_is_bounded(
    tmp_path: Path,
    naming: Naming,
    log: Log,
    named: Named,
    monkeypatch: pytest.MonkeyPatch,
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
    assert named() == []
    # WHEN they are named THEN it is group by group.
    agent.stretch._put_waiting()
    assert named() == [*range(9)]
    assert groups[0] == 4 and sum(groups) == 9 and len(groups) > 1
    agent.stretch.finish()


def test_windows_wait_after_others_that_did_not(
    tmp_path: Path, naming: Naming, log: Log, named: Named
) -> None:
    # GIVEN windows that are named at once, and others after them that wait
    agent = _Agent(tmp_path / "agent", naming, log)
    agent.take(agent.windows[:3])
    agent.lateness.thrift = 16
    agent.take(agent.windows[3:6])
    assert named() == [0, 1, 2]
    agent.lateness.thrift = 1
    # WHEN there is room again, THEN each was seen once, and is named once.
    agent.take(agent.windows[6:])
    assert agent.labels.seen == [*range(9)]
    assert named() == [*range(9)]
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
    assert agent.stretch.cpu_ns == other.stretch.cpu_ns == sum(each.all_ns for each in cost)
    assert agent.stretch.rss_bytes == max(each.rss_bytes for each in cost)


class _Names:
    """Gives most addresses of a file a name."""

    problems: tuple[Problem, ...] = ()
    peak_rss_bytes = 0

    def __init__(self) -> None:
        self.losses: Counter[LossKind] = Counter()
        self.asked: list[tuple[str, int]] = []
        self.requests = 0

    def close(self) -> None:
        """It has no process."""

    def notes(self) -> tuple[list[tuple[str, int]], int]:
        return self.asked, self.requests

    def learn(self, notes: tuple[list[tuple[str, int]], int]) -> None:
        self.asked, self.requests = notes

    def resolve_many(self, requests: Sequence[Request]) -> Iterator[Result]:
        for request in requests:
            self.requests += 1
            addresses = request.addresses.tolist()
            self.asked += [(request.file, address) for address in addresses]
            frames = [
                (SourceFrame(f"{request.file} {address}", "", 0, False),) * bool(address % 4)
                for address in addresses
            ]
            ranges = [Range(a, a + 1) if a % 4 else None for a in addresses]
            yield Result(request, frames, ranges)

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
    tmp_path: Path, naming: Naming, log: Log, named: Named, monkeypatch: pytest.MonkeyPatch
) -> None:
    # GIVEN two files, one of which nobody maps any more while windows wait for their names
    files = cast(GivenFiles, naming.files)
    for name, forgotten in (("first", 0), ("second", 1)):
        files.add(forgotten, OpenFile(os.open(os.devnull, os.O_RDONLY), ""))
        agent = _Agent(tmp_path / name, naming, log)
        agent.lateness.thrift = 16
        agent.take(agent.windows[:4])
        files.forget(forgotten)
        # THEN it is open until they have them, also where that fails
        assert files.open(forgotten, "", "").fd is not None
        agent.stretch.finish()
        assert named()[:4] == [0, 1, 2, 3]
        assert files.open(forgotten, "", "").fd is None
        monkeypatch.setattr(BoundedNamer, "name", lambda *_: [][0])
    assert "without names" in (tmp_path / "log").read_text()


def test_what_a_copy_finds_out_is_known_to_later_stretches(
    tmp_path: Path, log: Log, forked: list[int]
) -> None:
    # GIVEN a stretch whose windows waited, so that another process has named it
    service = _Names()
    with closing(ForkServer()) as server, closing(FileFacts(server, FileGuard())) as file_facts:
        naming = Naming(GivenFiles(), cast(SymbolService, service), file_facts, lambda _: None)
        found = []
        for name in ("first", "second"):
            agent = _Agent(tmp_path / name, naming, log)
            agent.lateness.thrift = 16
            agent.take([*map(_with_all_mapped, agent.windows)])
            before = len(service.asked)
            agent.stretch.finish()
            found.append(({*service.asked[before:]}, read_capture(agent.stretch.database).frames))
    # WHEN another one has the same addresses THEN what had no name is asked for again, and no more.
    (first, frames), (second, frames_again) = found
    assert second == {(file, address) for file, address in first if address % 4 == 0}
    assert first > second > set()
    assert frames_again.tolist() == frames.tolist()
    assert len(forked) == 2 and are_gone(forked)


def test_bad_files_that_a_copy_meets_stay_known(
    tmp_path: Path,
    naming: Naming,
    log: Log,
    forked: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = BoundedNamer.name
    guard = naming.file_facts.guard

    def blame(namer: BoundedNamer, *args: Any) -> Any:
        guard.blame("/bad", "it lies")
        guard.charge(1000, 3)
        return name(namer, *args)

    monkeypatch.setattr(BoundedNamer, "name", blame)
    before_s = guard.allowance_s(1000)
    agent = _Agent(tmp_path / "agent", naming, log)
    agent.lateness.thrift = 16
    agent.take(agent.windows)
    agent.stretch.finish()
    # THEN a program whose files take long has no new budget in each stretch.
    assert are_gone(forked)
    assert guard.bad == {"/bad": "it lies"}
    assert guard.allowance_s(1000) < before_s


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_file_that_its_reader_dies_of_is_asked_for_no_more(
    tmp_path: Path,
    log: Log,
    forked: list[int],
    monkeypatch: pytest.MonkeyPatch,
    is_killed: bool,
) -> None:
    """Also where the copy does not come to its end, else it would cost each stretch the same."""
    bad = tmp_path / "crash"
    bad.write_bytes(b"no file that anything can be read of")

    def ask(_: BoundedNamer, window: Window, stacks: Sequence[object]) -> list[object]:
        request = Request(str(bad), "", np.array([1], np.uint64))
        (_,) = service.resolve_many([request])
        if is_killed and not window.number:
            os.kill(os.getpid(), signal.SIGKILL)
        return [LEFT_OUT] * len(stacks)

    with (
        SymbolService(None, command=("/bin/false",)) as service,
        closing(ForkServer()) as server,
        closing(FileFacts(server, FileGuard())) as file_facts,
    ):
        naming = Naming(GivenFiles(), service, file_facts, lambda _: None)
        agent = _Agent(tmp_path / "agent", naming, log)
        agent.lateness.thrift = 16
        agent.take(agent.windows)
        monkeypatch.setattr(BoundedNamer, "name", ask)
        agent.stretch.finish()
        assert len(forked) == (2 if is_killed else 1) and are_gone(forked)
        assert len(service.problems) == 2
        (found,) = service.resolve_many([Request(str(bad), "", np.array([1], np.uint64))])
        assert (found.frames, service.pid, len(service.problems)) == ([()], None, 2)


def test_a_list_of_code_that_a_copy_reads_is_read_at_once_from_then_on(
    tmp_path: Path, naming: Naming, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = _Agent(tmp_path / "agent", naming, log)
    agent.lateness.thrift = 16
    agent.take(agent.windows)
    assert agent.lateness.may_wait(0)
    with monkeypatch.context() as patch:
        patch.setattr(module.WrittenCapture, "jit_symbols", {(0, 1): "fib"})
        agent.stretch.finish()
    assert not agent.lateness.may_wait(0)


def test_a_stretch_whose_process_is_killed_stays_without_names(
    tmp_path: Path, naming: Naming, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    # GIVEN windows that wait, WHEN each process that names them is killed, as for lack of memory
    agent = _Agent(tmp_path / "agent", naming, log)
    agent.lateness.thrift = 16
    agent.take(agent.windows)

    def end(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with monkeypatch.context() as patch:
        patch.setattr(BoundedNamer, "name", end)
        sums = agent.sums()
    # THEN all that they hold is there all the same.
    other = _Agent(tmp_path / "other", naming, log)
    other.take(other.windows)
    assert sums == other.sums()
    assert "the process that names it has ended" in (tmp_path / "log").read_text()


def test_a_stretch_whose_process_is_killed_once_has_its_names(
    tmp_path: Path, log: Log, forked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    service = _Names()
    with closing(ForkServer()) as server, closing(FileFacts(server, FileGuard())) as file_facts:
        naming = Naming(GivenFiles(), cast(SymbolService, service), file_facts, lambda _: None)
        agent = _Agent(tmp_path / "agent", naming, log)
        agent.lateness.thrift = 16
        agent.take([*map(_with_all_mapped, agent.windows)])
        name = BoundedNamer.name

        def end(namer: BoundedNamer, window: Window, stacks: Any) -> Any:
            if window.number == 3 and len(forked) == 1:  # it is the first copy
                os.kill(os.getpid(), signal.SIGKILL)
            return name(namer, window, stacks)

        with monkeypatch.context() as patch:
            patch.setattr(BoundedNamer, "name", end)
            agent.stretch.finish()
    assert len(forked) == 2 and are_gone(forked)
    functions = [function.name for function in read_capture(agent.stretch.database).functions]
    assert any(name in functions for name in (f"{file} {at}" for file, at in service.asked))


def test_a_full_disk_is_no_reason_to_leave_names(
    tmp_path: Path, naming: Naming, log: Log, forked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = _Agent(tmp_path / "agent", naming, log)
    agent.lateness.thrift = 16
    agent.take(agent.windows)

    def refuse(*_: object) -> None:
        raise DiskFull("no space left")

    monkeypatch.setattr(module.WrittenCapture, "finish", refuse)
    with pytest.raises(DiskFull, match="no space left"):
        agent.stretch.finish()
    assert are_gone(forked)
    assert (tmp_path / "log").read_text() == ""


def test_where_no_process_can_be_had_a_stretch_is_named_all_the_same(
    tmp_path: Path, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = _Names()
    with closing(ForkServer()) as server, closing(FileFacts(server, FileGuard())) as file_facts:
        naming = Naming(GivenFiles(), cast(SymbolService, service), file_facts, lambda _: None)
        agent = _Agent(tmp_path / "agent", naming, log)
        agent.lateness.thrift = 16
        agent.take([*map(_with_all_mapped, agent.windows)])

        def refuse() -> int:
            raise BlockingIOError(errno.EAGAIN, "no more processes")

        with monkeypatch.context() as patch:
            patch.setattr(os, "fork", refuse)
            agent.stretch.finish()
    assert service.asked
    functions = [function.name for function in read_capture(agent.stretch.database).functions]
    assert any(name in functions for name in (f"{file} {at}" for file, at in service.asked))
    assert "without names" not in (tmp_path / "log").read_text()
