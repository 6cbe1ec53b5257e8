# SPDX-License-Identifier: Apache-2.0
"""Nobody takes what is there for all: not one process, and not one user or container with many."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiflame.agent.inspector.fork_server import ForkServer
from aiflame.agent.inspector.opener import OpenedFile
from aiflame.agent.kernel import abi
from aiflame.agent.kernel.uprobe_tries import NopTreatment
from aiflame.agent.launches.calls import ApiCalls
from aiflame.agent.launches.probe_sites import Prologue
from aiflame.agent.launches.probes import ApiProbes
from aiflame.agent.launches.questions import ProbedFunction
from aiflame.agent.losses import LossKind
from aiflame.agent.processes.binaries import BinaryFile, BinaryTable
from aiflame.agent.processes.procfs import MapsLine
from aiflame.agent.processes.shares import Shares, payer_of
from aiflame.agent.processes.table import Mapping, ProcessTable
from support import blind_inspector, wait_until

_ID = "0123456789abcdef" * 4


@pytest.mark.parametrize(
    ("cgroup", "payer"),
    [
        ("/user.slice/user-1000.slice/session-3.scope", "/user.slice/user-1000.slice"),
        # What a user calls a cgroup is the user's, and so is what runs there under other ids.
        (
            f"/user.slice/user-1000.slice/user@1000.service/docker-{_ID}.scope",
            "/user.slice/user-1000.slice",
        ),
        (f"/system.slice/docker-{_ID}.scope/a/b", f"/system.slice/docker-{_ID}.scope"),
        (f"/docker/{_ID}/docker/{_ID[::-1]}", f"/docker/{_ID}"),
        ("/system.slice/nginx.service/worker.service", "/system.slice/nginx.service"),
        # A service that may make cgroups calls them what it likes.
        (f"/system.slice/web.service/docker-{_ID}.scope", "/system.slice/web.service"),
        (
            f"/system.slice/docker.service/docker/{_ID}/a",
            f"/system.slice/docker.service/docker/{_ID}",
        ),
        ("/machine/build", "/machine/build"),
        ("/..", "user 7"),
        ("/", "user 7"),
        ("", "user 7"),
    ],
)
def test_who_pays(cgroup: str, payer: str) -> None:
    assert payer_of(cgroup, 7) == payer


def test_the_last_ones_are_for_those_that_have_few() -> None:
    shares = Shares(lambda: 320)
    # GIVEN a process that takes all that it can, and one that has taken little before
    assert shares.take(9, "b", 5)
    assert [shares.take(1, "a") for _ in range(300)] == 295 * [True] + 5 * [False]
    # WHEN others of its user come, which have little, and then too much together
    assert [shares.take(2, "a") for _ in range(11)] == 10 * [True] + [False]
    # THEN the very last are for users that have little
    assert not shares.take(3, "a")
    assert [shares.take(9, "b") for _ in range(6)] == 5 * [True] + [False]
    assert [shares.take(4, "c") for _ in range(6)] == 5 * [True] + [False]
    # AND what is given back may be taken again
    shares.give_back(1, "a", 50)
    assert shares.take(1, "a", 30) and not shares.take(1, "a", 30)


class _Opener:
    """Opens a file of its own for each mapping."""

    def mapped(self, pid: int, start: int, *_: object) -> OpenedFile:
        return OpenedFile(os.memfd_create("mapped"), True, 1, start, 0, 0, 1)

    def root(self, pid: int) -> None:
        raise FileNotFoundError


@pytest.fixture
def binaries(monkeypatch: pytest.MonkeyPatch) -> Iterator[BinaryTable]:
    monkeypatch.setattr("aiflame.agent.processes.binaries.for_targets", lambda: 320)
    inspector: Any = SimpleNamespace(opener=_Opener(), server=ForkServer())
    made = BinaryTable(inspector)
    yield made
    made.close()


def _map(binaries: BinaryTable, pid: int, payer: str, inodes: range) -> list[bool]:
    """Maps files; returns which could be opened."""
    found = []
    for inode in inodes:
        line = MapsLine(inode, inode + 1, 0, "08:01", inode, f"/file-{inode}")
        file = binaries.of_mapping(pid, payer, line)
        found.append(file is not None and file.fd is not None)
    return found


def test_files_of_one_process_leave_descriptors_to_others(binaries: BinaryTable) -> None:
    # GIVEN a process that maps more files than may be open
    assert _map(binaries, 1, "hostile", range(1, 401)) == 300 * [True] + 100 * [False]
    assert binaries.unopened == 100
    # AND others of the same user
    assert _map(binaries, 2, "hostile", range(501, 521)) == 10 * [True] + 10 * [False]
    assert not any(_map(binaries, 3, "hostile", range(521, 531)))
    # WHEN others map files, some of which the first could not have opened
    assert all(_map(binaries, 4, "honest", range(299, 309)))
    # THEN they are opened
    assert binaries.unopened == 100 + 20 - 8
    assert len(binaries.take_renewed()) == 8
    assert not binaries.take_renewed()
    # AND what nobody maps any more is there for all
    binaries.forget(range(60))
    assert all(_map(binaries, 3, "hostile", range(521, 531)))


def test_what_could_not_be_asked_about_a_file_is_asked_again(
    binaries: BinaryTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_ns = time.monotonic_ns()
    monkeypatch.setattr(time, "monotonic_ns", lambda: now_ns)
    _map(binaries, 1, "honest", range(1, 3))
    fd = binaries.files[1].fd
    assert fd is not None
    # GIVEN a file about which nobody could be asked, as no process could be forked
    binaries.facts.unanswered.add(fd)
    assert not binaries.take_renewed()
    # WHEN a minute is over, and it failed once more meanwhile
    binaries.facts.unanswered.add(fd)
    now_ns += 61_000_000_000
    # THEN it is asked about again
    assert binaries.take_renewed() == {1}
    assert not binaries.take_renewed()


def test_a_file_that_could_not_be_opened_is_tried_again(
    binaries: BinaryTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_ns = time.monotonic_ns()
    monkeypatch.setattr(time, "monotonic_ns", lambda: now_ns)
    opener: Any = binaries._inspector.opener

    def refuse(*_: object) -> None:
        raise FileNotFoundError

    with monkeypatch.context() as patched:
        patched.setattr(opener, "mapped", refuse)
        assert _map(binaries, 1, "honest", range(1, 2)) == [False]
    assert not binaries.take_unopened()
    now_ns += 61_000_000_000
    assert binaries.take_unopened() == {0}
    assert _map(binaries, 1, "honest", range(1, 2)) == [True]
    assert binaries.take_renewed() == {0}


class _Facts:
    """Files that define as many functions as they are long."""

    guard = SimpleNamespace(remote={})
    unanswered: frozenset[int] = frozenset()

    def __init__(self, names: list[str]) -> None:
        self._names = names

    def ask(self, path: str, fd: int, _: object) -> dict[str, ProbedFunction]:
        count = os.fstat(fd).st_size
        prologue = Prologue((), 1)
        return {n: ProbedFunction(n, 64, 8, 0, 8, prologue) for n in self._names[:count]}


class _Programs:
    """The kernel half, which takes each probe."""

    def __init__(self) -> None:
        table = SimpleNamespace(update=lambda *_: None)
        self.api_calls = self.api_probes = table
        self.uprobes = SimpleNamespace(answers=SimpleNamespace(nops=NopTreatment()))

    calls_are_loading = False

    def expect_calls(self) -> None:
        pass


def _few_probes(monkeypatch: pytest.MonkeyPatch) -> tuple[ApiProbes, list[str]]:
    """Returns where there is room for 320 probes, and which files got some, as they do."""
    monkeypatch.setattr(abi, "API_PROBES_MAX", 320)
    programs: Any = _Programs()
    facts: Any = _Facts([])
    probes = ApiProbes(programs, facts)
    facts._names = sorted({name for name, known in probes._wanted.items() if len(known) == 1})
    attached: list[str] = []
    monkeypatch.setattr(probes, "_attach", lambda one: attached.append(one.path))
    return probes, attached


def test_functions_of_one_process_leave_probes_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    probes, attached = _few_probes(monkeypatch)
    descriptors = []

    def look(name: str, pid: int, payer: str, functions: int = 5) -> tuple[int, int]:
        path = tmp_path / name
        path.touch()
        os.truncate(path, functions)
        descriptors.append(os.open(path, os.O_RDONLY))
        identity = probes.look(descriptors[-1], name, pid, payer)
        assert identity is not None
        return identity

    try:
        # GIVEN a process with more functions of APIs than may be probed, the last in a library
        for name in range(60):
            look(str(name), 1, "hostile")
        identity = look("library", 1, "hostile")
        assert attached == [str(name) for name in range(60)]
        assert probes.losses == {LossKind.CALLS_NOT_PROBED: 5}
        assert probes.may_pay(identity, 2) and not probes.may_pay(identity, 1)
        # WHEN another process maps the library THEN it is probed, and nothing is lost
        look("library", 2, "honest")
        assert attached[-1] == "library"
        assert probes.losses == {LossKind.CALLS_NOT_PROBED: 0}
        assert probes.loss_files == {LossKind.CALLS_NOT_PROBED: set()}
        assert not probes.may_pay(identity, 3)
        # AND others of the first one's user leave the last ones to other users
        for name in range(60, 70):
            look(str(name), name, "hostile")
        assert attached[-1] == "60"
        look("honest", 3, "honest")
        assert attached[-1] == "honest"
    finally:
        for fd in descriptors:
            os.close(fd)


def test_a_file_about_which_nobody_could_be_asked_is_looked_at_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    probes, attached = _few_probes(monkeypatch)
    facts: Any = probes._facts
    path = tmp_path / "library"
    path.write_bytes(bytes(5))
    with path.open("rb") as file:
        # GIVEN no parser for a moment
        answer, facts.ask = facts.ask, lambda *_: None
        facts.unanswered = {file.fileno()}
        assert probes.look(file.fileno(), "library") is None
        # WHEN there is one THEN it has its probes
        facts.ask, facts.unanswered = answer, frozenset()
        assert probes.look(file.fileno(), "library") is not None
    assert attached == ["library"]


def test_files_of_containers_that_are_gone_leave_probes_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    probes, attached = _few_probes(monkeypatch)
    # GIVEN a library of the system's, and containers with one of their own each
    names = ["system", *map(str, range(200))]
    threads = threading.active_count()
    for number, name in enumerate(names):
        (tmp_path / name).write_bytes(bytes(5))
        with (tmp_path / name).open("rb") as file:
            identity = probes.look(file.fileno(), name, number, f"container-{name}" * (number > 0))
        assert identity is not None
        # WHEN nobody maps it any more
        probes.forget(identity)
        wait_until(lambda: threading.active_count() == threads, 10)
    # THEN the next ones are probed all day long,
    assert attached == names
    assert not +probes.losses
    # what is left is the system's, which is mapped again any time,
    assert len(probes.ranges) == 5
    # AND one that is mapped again is probed again.
    with (tmp_path / "7").open("rb") as file:
        probes.look(file.fileno(), "7", 7, "container-7")
    assert attached[-1] == "7"


def test_a_file_that_found_no_number_is_probed_once_some_are_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    probes, attached = _few_probes(monkeypatch)
    anything: Any = SimpleNamespace()
    table = ProcessTable(1, lambda pid: 1, blind_inspector())
    calls = ApiCalls(anything, table, anything, anything, anything)
    calls.probes = probes

    def map_file(number: int, functions: int) -> None:
        path = tmp_path / str(number)
        path.write_bytes(bytes(functions))
        fd = os.open(path, os.O_RDONLY)
        table.binaries.files[number] = BinaryFile(number, str(number), fd, "")
        image = table.image(100 + number, 1)
        image.cgroup = f"/docker/{number:064x}"
        image.replace_mappings([Mapping(4096, 8192, 0, number)])
        calls.look(image)

    try:
        # GIVEN files of the system's and of two containers, which leave two of all numbers,
        for number in range(60):
            path = tmp_path / f"system{number}"
            path.write_bytes(bytes(5))
            with path.open("rb") as file:
                probes.look(file.fileno(), path.name)
        map_file(0, 9)
        map_file(1, 9)
        # AND a library that two processes have mapped in vain
        map_file(2, 5)
        table.image(200, 1).replace_mappings([Mapping(4096, 8192, 0, 2)])
        calls.look(table.image(200, 1))
        calls.poll()
        assert attached[60:] == ["0", "1"]
        assert probes.losses == {LossKind.CALLS_NOT_PROBED: 5}
        # WHEN one of the containers is gone, THEN the library is probed, and nothing is lost
        threads = threading.active_count()
        table.forget([table.image(100, 1)], ())
        calls.forget_binaries([0])
        wait_until(lambda: threading.active_count() == threads, 10)
        for _ in range(2):
            calls.poll()
        assert attached[60:] == ["0", "1", "2"]
        assert probes.losses == {LossKind.CALLS_NOT_PROBED: 0}
        assert probes.loss_files == {LossKind.CALLS_NOT_PROBED: set()}
    finally:
        for mapped in table.binaries.files.values():
            os.close(mapped.fd or 0)
