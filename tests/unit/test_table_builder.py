# SPDX-License-Identifier: Apache-2.0
"""The children that build unwind tables may die at any time, or not start at all."""

from __future__ import annotations

import os
import resource
import select
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from aiflame.agent.errors import UsageError
from aiflame.agent.fleet.config import AgentSettings
from aiflame.agent.inspector.fork_server import ForkServer
from aiflame.agent.processes import procfs
from aiflame.agent.settings import Given, made
from aiflame.agent.unwind import table_builder
from aiflame.agent.unwind.table_builder import TableBuilder
from aiflame.agent.unwind.worker import _Builder
from recordings import children_of
from support import wait_until

_FILE = "/bin/true"


@pytest.fixture
def watched() -> Iterator[select.epoll]:
    with select.epoll() as watched:
        yield watched


@pytest.fixture
def server() -> Iterator[ForkServer]:
    made = ForkServer()
    yield made
    made.close()


@pytest.fixture
def builder(server: ForkServer, tmp_path: Path, watched: select.epoll) -> Iterator[TableBuilder]:
    made = TableBuilder(
        server, tmp_path, lambda fd: watched.register(fd, select.EPOLLIN), lambda binary: 0.0
    )
    yield made
    made.close()


def _finish(builder: TableBuilder, count: int) -> list[int]:
    done: list[int] = []

    def has_all() -> bool:
        done.extend(builder.finished())
        return len(done) >= count

    wait_until(has_all, 60)
    return done


def _children() -> set[int]:
    """The builders that are there, which the fork server has forked; not their parsers."""
    builders = {pid for pid in procfs.begun() if procfs.comm(pid) == "unwind.worker"}
    return {pid for pid in builders if procfs.parent_pid(pid) not in builders}


def _kill() -> None:
    wait_until(_children)  # it has its name a moment after it was started
    (child,) = _children()
    os.kill(child, signal.SIGKILL)
    wait_until(lambda: not _children())


def _tables(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if ".unwind" in path.name]


def test_an_idle_child_that_dies_does_not_wake_its_watcher_for_ever(
    builder: TableBuilder, watched: select.epoll
) -> None:
    # GIVEN a child that has built a table and waits
    builder.ask(0, _FILE)
    assert _finish(builder, 1) == [0]
    # WHEN it is killed, and whoever watches it looks once
    _kill()
    assert watched.poll(60)
    assert builder.finished() == []
    # THEN there is nothing more to see, and the next table is built by another child
    assert watched.poll(0) == []
    builder.ask(1, _FILE)
    assert _finish(builder, 1) == [1]
    assert builder.given_up == set()


def test_a_child_that_is_killed_at_work_is_replaced(builder: TableBuilder, tmp_path: Path) -> None:
    builder.ask(0, _FILE)
    _kill()
    assert _finish(builder, 1) == [0]
    assert _tables(tmp_path)
    assert builder.given_up == set()


def test_files_that_nobody_needs_any_more_are_asked_about_no_more(
    server: ForkServer, tmp_path: Path, watched: select.epoll
) -> None:
    # GIVEN four files, one of which is at work; two of them are forgotten
    known = {0, 1, 2, 3}
    urgency = dict.fromkeys(known, 0.0)

    def urgency_of(binary: int) -> float:
        return urgency[binary]  # of those that are known

    builder = TableBuilder(
        server, tmp_path, lambda fd: watched.register(fd, select.EPOLLIN), urgency_of
    )
    try:
        for binary in known:
            builder.ask(binary, _FILE)
        for binary in (0, 2):
            del urgency[binary]
        builder.forget({0, 2})
        # THEN the others come, and nothing is said of these, also if the child dies at its work
        _kill()
        assert sorted(_finish(builder, 2)) == [1, 3]
        assert {*builder.names} == {1, 3}
        assert {*builder.take_spent_s()} == {1, 3}
        builder.forget({1, 3})
        assert builder.names == {}
    finally:
        builder.close()


def test_a_child_that_nobody_needs_ends_and_the_next_is_forked_at_once(
    builder: TableBuilder, server: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = time.monotonic()
    monkeypatch.setattr(table_builder, "time", SimpleNamespace(monotonic=lambda: now_s))
    for binary in range(3):
        # WHEN one is needed each quarter of a minute
        builder.ask(binary, _FILE)
        assert _finish(builder, 1) == [binary]
        (child,) = _children()
        now_s += 0.5
        builder.finished()
        assert _children() == {child}
        # THEN it ends with its parser when there is no more to do
        now_s += 14.5
        assert builder.finished() == []
        wait_until(lambda: not _children() and not children_of(server.pids[0]))
    # AND the interpreter that forks them is the same
    assert server.starts == 1


def test_a_file_that_kills_twice_is_given_up(builder: TableBuilder, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "file")  # to open it takes until somebody writes
    builder.ask(0, str(tmp_path / "file"))
    _kill()
    wait_until(lambda: not builder.finished() and _children(), 60)
    _kill()
    assert _finish(builder, 1) == [0]
    assert builder.given_up == {0}


def test_a_file_that_takes_more_memory_than_there_may_be_is_refused_at_once(
    server: ForkServer, tmp_path: Path
) -> None:
    # GIVEN so much that small files are read with it; LLVM, on which BCC stands, takes twice that
    libraries = [*Path("/usr/lib").glob("*/libLLVM*.so*"), *Path("/usr/lib64").glob("libLLVM*.so*")]
    large_library = max(libraries, key=lambda path: path.stat().st_size)
    builder = TableBuilder(
        server, tmp_path / "cache", lambda fd: None, lambda binary: 0.0, 90_000_000
    )
    try:
        # WHEN a large one is asked for between two small ones
        for binary, path in enumerate((_FILE, str(large_library), _FILE)):
            builder.ask(binary, path)
        # THEN it is refused without another try, and the others are not
        assert sorted(_finish(builder, 3)) == [0, 1, 2]
        assert builder.given_up == {1}
        assert sorted(builder.names) == [0, 2]
    finally:
        builder.close()


def test_without_descriptors_nothing_is_built_and_nothing_raised(builder: TableBuilder) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.open("/", os.O_RDONLY)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        builder.ask(0, _FILE)
        done = builder.finished()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert done == [0]
    assert builder.given_up == {0}


def test_the_least_that_an_agent_may_give_is_enough_for_an_interpreter(
    server: ForkServer, tmp_path: Path, watched: select.epoll
) -> None:
    with pytest.raises(UsageError, match="helper_memory"):
        made(AgentSettings, {"helper_memory": Given("127MB", "a.toml")})
    settings = made(AgentSettings, {"helper_memory": Given("128MB", "a.toml")})
    builder = TableBuilder(
        server,
        tmp_path,
        lambda fd: watched.register(fd, select.EPOLLIN),
        lambda binary: 0.0,
        settings.helper_memory,
    )
    builder.ask(1, str(Path(sys.executable).resolve()))
    _finish(builder, 1)
    builder.close()
    assert builder.names.keys() == {1}


def test_what_is_in_the_cache_is_not_made_for_a_copy_of_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # GIVEN the table of a small program, and another file with the same contents
    for name in ("one", "other"):
        (tmp_path / name).write_bytes(Path("/bin/true").read_bytes())
    builder = _Builder(tmp_path / "cache")
    name = builder.build(str(tmp_path / "one"))
    # WHEN that is asked for THEN nothing is made
    monkeypatch.setattr(builder, "_make", None)
    assert builder.build(str(tmp_path / "other")) == name
    builder._parsers.close()
