# SPDX-License-Identifier: Apache-2.0
"""The process table: which file an address meant when a sample had it.

A literal /proc/PID/maps and a literal answer of the kernel half stand for the machine.
"""

from __future__ import annotations

import dataclasses
import os
import random
from collections.abc import Iterator

import numpy as np
import pytest
from aiflame.agent import kernelfs
from aiflame.agent.inspector.inspector import Inspector
from aiflame.agent.kernel.life_events import (
    Ended,
    Forked,
    LifeEvent,
    LifeRecords,
    Lost,
    Mapped,
    Named,
)
from aiflame.agent.processes import procfs
from aiflame.agent.processes.identity import CgroupPaths
from aiflame.agent.processes.lives import Lives
from aiflame.agent.processes.procfs import MapsLine
from aiflame.agent.processes.table import (
    NO_BINARY,
    Mapping,
    ProcessImage,
    ProcessTable,
    ThreadInfo,
)
from life_records import records
from support import blind_inspector

_LIB, _OTHER = 1, 2


def _image(*mappings: Mapping) -> ProcessImage:
    image = ProcessImage(0, 41, 5, 0)
    image.replace_mappings(list(mappings))
    return image


def _at(image: ProcessImage, *addresses: int) -> list[tuple[int, int] | None]:
    """The binary and the file offset at each address, None in no mapping."""
    found = image.find(np.array(addresses, np.uint64)).tolist()
    mappings = [None if at < 0 else image.mappings[at] for at in found]
    return [
        None if m is None else (m.binary, m.file_offset + address - m.start)
        for m, address in zip(mappings, addresses, strict=True)
    ]


def test_an_address_belongs_to_the_mapping_around_it() -> None:
    image = _image(Mapping(0x1000, 0x3000, 0x400, _LIB), Mapping(0x3000, 0x4000, 0, _OTHER))
    assert _at(image, 0xFFF, 0x1000, 0x2FFF, 0x3000, 0x3FFF, 0x4000) == [
        None,
        (_LIB, 0x400),
        (_LIB, 0x23FF),
        (_OTHER, 0),
        (_OTHER, 0xFFF),
        None,
    ]


def test_addresses_at_both_ends_of_the_address_space() -> None:
    top = 0xFFFF_FFFF_FF60_0000
    image = _image(Mapping(top, top + 0x1000, 0, _LIB))
    assert _at(image, 0, top, top + 0xFFF, top + 0x1000, 2**64 - 1) == [
        None,
        (_LIB, 0),
        (_LIB, 0xFFF),
        None,
        None,
    ]


def test_no_mappings_and_no_addresses() -> None:
    assert _at(_image(), 0, 0x1000) == [None, None]
    assert _image(Mapping(0x1000, 0x2000, 0, _LIB)).find(np.zeros(0, np.uint64)).tolist() == []


_KNOWN = (Mapping(0x1000, 0x5000, 0, _LIB), Mapping(0x8000, 0x9000, 0, _LIB))


@pytest.mark.parametrize("found", [[], [*_KNOWN], [*reversed(_KNOWN)], [_KNOWN[1]]])
def test_what_is_known_is_nothing_new(found: list[Mapping]) -> None:
    image = _image(*_KNOWN)
    assert not image.replace_mappings(found)
    assert image.mappings == _KNOWN


@pytest.mark.parametrize(
    ("found", "mappings"),
    [
        (  # beside
            Mapping(0x5000, 0x6000, 0, _OTHER),
            [_KNOWN[0], Mapping(0x5000, 0x6000, 0, _OTHER), _KNOWN[1]],
        ),
        (  # over the end
            Mapping(0x4000, 0x6000, 0, _OTHER),
            [Mapping(0x1000, 0x4000, 0, _LIB), Mapping(0x4000, 0x6000, 0, _OTHER), _KNOWN[1]],
        ),
        (  # over the beginning: what is left begins later in the file
            Mapping(0x0800, 0x2000, 0, _OTHER),
            [Mapping(0x0800, 0x2000, 0, _OTHER), Mapping(0x2000, 0x5000, 0x1000, _LIB), _KNOWN[1]],
        ),
        (  # in the middle
            Mapping(0x2000, 0x3000, 0, _OTHER),
            [
                Mapping(0x1000, 0x2000, 0, _LIB),
                Mapping(0x2000, 0x3000, 0, _OTHER),
                Mapping(0x3000, 0x5000, 0x2000, _LIB),
                _KNOWN[1],
            ],
        ),
        (  # over both
            Mapping(0x1000, 0x9000, 0, NO_BINARY),
            [Mapping(0x1000, 0x9000, 0, NO_BINARY)],
        ),
        (  # the same addresses with another file: dlclose, then dlopen
            Mapping(0x1000, 0x5000, 0, _OTHER),
            [Mapping(0x1000, 0x5000, 0, _OTHER), _KNOWN[1]],
        ),
        (  # the same addresses of the same file, but another part of it
            Mapping(0x1000, 0x5000, 0x7000, _LIB),
            [Mapping(0x1000, 0x5000, 0x7000, _LIB), _KNOWN[1]],
        ),
        (  # grown
            Mapping(0x1000, 0x6000, 0, _LIB),
            [Mapping(0x1000, 0x6000, 0, _LIB), _KNOWN[1]],
        ),
    ],
)
def test_new_mappings_lie_over_old_ones_which_stay_elsewhere(
    found: Mapping, mappings: list[Mapping]
) -> None:
    image = _image(*_KNOWN)
    assert image.replace_mappings([found])
    assert image.mappings == tuple(mappings)
    # and what is there now is found, which a second look does not change
    assert _at(image, found.start) == [(found.binary, found.file_offset)]
    assert not image.replace_mappings([found])


def test_a_library_that_comes_back_to_where_another_was() -> None:
    first, second = Mapping(0x1000, 0x2000, 0, _LIB), Mapping(0x1000, 0x2000, 0, _OTHER)
    image = _image(first)
    for mapping in (second, first):
        assert image.replace_mappings([mapping])
        assert image.mappings == (mapping,)


@pytest.mark.parametrize("seed", range(10))
def test_against_one_byte_at_a_time(seed: int) -> None:
    # GIVEN an address space of 64 bytes in which things are mapped over each other
    dice = random.Random(seed)
    image, truth = _image(), [None] * 64
    for binary in range(20):
        start = dice.randrange(63)
        found = Mapping(start, dice.randint(start + 1, 64), dice.randrange(1000), binary)
        image.replace_mappings([found])
        for address in range(found.start, found.end):
            truth[address] = (binary, found.file_offset + address - start)
    # THEN each byte shows what was mapped there last, and no two mappings overlap
    assert _at(image, *range(64)) == truth
    ends = [mapping.end for mapping in image.mappings]
    assert all(end <= m.start for end, m in zip(ends, image.mappings[1:], strict=False))


class _Machine:
    """What /proc shows of pid 41, and which image of it the kernel half knows."""

    def __init__(self) -> None:
        self.maps: list[MapsLine] = []
        self.image: int | None = 5
        self.reads = self.asked = 0

    def current_image(self, pid: int) -> int | None:
        self.asked += 1
        return self.image

    def executable_mappings(self, _: object, pid: int) -> list[MapsLine]:
        self.reads += 1
        return list(self.maps) if pid == 41 else []


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> _Machine:
    fake = _Machine()
    monkeypatch.setattr(procfs, "executable_mappings", fake.executable_mappings)
    monkeypatch.setattr(kernelfs, "read_text", lambda path, limit=0: "")
    return fake


@pytest.fixture
def table(machine: _Machine) -> Iterator[ProcessTable]:
    made = ProcessTable(1_000, lambda pid: machine.image, blind_inspector())
    yield made
    made.binaries.close()


def _jit(start: int) -> MapsLine:
    return MapsLine(start, start + 0x1000, 0, "00:00", 0, "")


def _mapped(start: int) -> Mapping:
    return Mapping(start, start + 0x1000, 0, NO_BINARY)


def test_a_process_is_read_when_it_is_first_seen(machine: _Machine, table: ProcessTable) -> None:
    machine.maps = [_jit(0x1000)]
    image = table.seen(41, 5, 1, "server", 1_500)
    assert image.mappings == (_mapped(0x1000),)
    assert (image.pid, image.name, image.parent_pid, image.started_ns) == (41, "server", 1, 1_500)
    assert image.was_read
    assert table.image(41, 5) is image
    assert table.images == {0: image}


def test_a_process_older_than_the_recording_starts_with_it(table: ProcessTable) -> None:
    assert table.seen(41, 5, 1, "server", 3).started_ns == 1_000


def test_mappings_of_another_image_are_not_taken(machine: _Machine, table: ProcessTable) -> None:
    # GIVEN a process that called exec while its maps were being read, or is gone
    for known in (6, None):
        machine.image = known
        machine.maps = [_jit(0x1000)]
        image = table.seen(41, 5, 1, "server", 1_500)
        # THEN what was read is not believed
        assert image.mappings == ()
        assert not image.was_read
    # but it is for the image that is there now
    machine.image = 6
    assert table.seen(41, 6, 1, "server", 1_500).mappings == (_mapped(0x1000),)


def test_exec_makes_a_new_image_and_keeps_the_old_one(
    machine: _Machine, table: ProcessTable
) -> None:
    machine.maps = [_jit(0x1000)]
    before = table.seen(41, 5, 1, "sh", 1_500)
    machine.image, machine.maps = 6, [_jit(0x2000)]
    table.seen(41, 6, 1, "python3", 1_600)
    assert [image.mappings for image in table.images.values()] == [
        (_mapped(0x1000),),
        (_mapped(0x2000),),
    ]
    assert table.image(41, 5) is before
    # The old one is gone, although its pid is not.
    assert not table.read_mappings(before)


def test_a_short_lived_child_has_its_parents_mappings(
    machine: _Machine, table: ProcessTable
) -> None:
    machine.maps = [_jit(0x1000)]
    table.seen(41, 5, 1, "server", 1_500)
    machine.image = None
    child = table.seen(42, 7, 41, "server", 1_600)
    assert child.mappings == (_mapped(0x1000),)
    assert child.pid == 42
    # unless it called exec: then it has another name
    assert table.seen(43, 8, 41, "ls", 1_700).mappings == ()


def _close_window(table: ProcessTable) -> tuple[list[ProcessImage], list[ThreadInfo]]:
    changed = table.take_changed()
    table.take_ended()
    return changed


def test_short_lived_processes_are_one_by_cgroup_and_name(table: ProcessTable) -> None:
    # GIVEN processes of two names and their threads, which are over when they are told of
    for pid in range(100, 110):
        table.join(pid, 2_000 + pid, 1, "cc", 0)
        table.join(pid, 3_000 + pid, 1, "ld", 0)
    # THEN whoever asks for one of them gets what stands for all, and for all of their threads
    cc, ld = table.image(100, 2_100), table.image(100, 3_100)
    assert (cc.name, ld.name) == ("cc", "ld")
    assert table.image(109, 2_109) is cc
    assert table.thread(cc, 100) is table.thread(cc, 109)
    # AND that is all that a window is told.
    images, threads = _close_window(table)
    assert images == [cc, ld]
    assert [(thread.image, thread.shown_name) for thread in threads] == [(cc, "cc"), (ld, "ld")]
    assert table.joined == 20
    assert table.images == {0: cc, 1: ld}


def test_those_that_were_joined_before_anybody_heard_of_them_are_one_with_others(
    table: ProcessTable,
) -> None:
    table.join(100, 2_100, 1, "cc", 0)
    thread = table.join_all(30, 3_000, 1, "cc", 0)
    # THEN they are known as others are, by numbers that nobody else has,
    assert thread.image is table.image(100, 2_100)
    stands = thread.image
    assert table.known(stands.pid, stands.image) is stands
    assert table.thread(stands, 0) is thread
    assert table.joined == 31
    # until there are none of them any more.
    for _ in range(2):
        ended, _ = table.take_ended()
    assert ended == [stands]
    table.forget(ended, ())
    assert table.known(stands.pid, stands.image) is None


def test_who_stands_for_others_is_forgotten_when_there_are_none(table: ProcessTable) -> None:
    table.join(100, 2_000, 1, "cc", 0)
    first = table.image(100, 2_000)
    assert table.take_ended()[0] == []
    # Sums of it may come in the window after its end.
    assert table.image(100, 2_000) is first
    table.join(101, 2_001, 1, "cc", 0)
    assert table.image(101, 2_001) is first
    assert table.take_ended()[0] == []
    assert table.known(100, 2_000) is None
    assert table.take_ended()[0] == [first]
    table.forget([first], ())
    assert table.images == {}
    # One that comes later has another to stand for it.
    table.join(102, 2_002, 1, "cc", 0)
    assert table.image(102, 2_002) is not first


def test_names_of_short_lived_processes_are_bounded(table: ProcessTable) -> None:
    for pid in range(100, 1_100):
        table.join(pid, 2_000, 1, f"name-{pid}", 0)
    assert len(table.images) == 65
    assert table.image(1_099, 2_000).name == "[short-lived]"


def test_one_of_which_a_sample_comes_after_a_thread_has_ended_is_told_of(
    machine: _Machine, table: ProcessTable
) -> None:
    table.join(41, 5, 1, "worker", 0)
    machine.maps = [_jit(0x1000)]
    image = table.seen(41, 5, 1, "server", 1_500)
    assert (image.pid, image.name, image.mappings) == (41, "server", (_mapped(0x1000),))
    _close_window(table)
    _close_window(table)
    assert table.image(41, 5) is image


def _lines(*paths: str) -> list[MapsLine]:
    return [
        MapsLine(at << 12, (at + 1) << 12, 0, "fe:00", at, path) for at, path in enumerate(paths, 1)
    ]


class _Told:
    """What the kernel has told of lives.

    Attributes:
        read_ns: Until when it is all that was read.
    """

    def __init__(self) -> None:
        self.events: list[LifeEvent] = []
        self.read_ns = 0

    def tell(self, *events: LifeEvent) -> None:
        self.events += events

    def map(self, ns: int, pid: int, *paths: str) -> None:
        for line in _lines(*paths):
            fields = (line.start, line.end, line.offset, line.device, line.inode, line.path)
            self.events.append(Mapped(ns, pid, *fields))

    def read(self) -> tuple[LifeRecords, int]:
        events, self.events = self.events, []
        return records(events), self.read_ns


@pytest.fixture
def told() -> _Told:
    return _Told()


@pytest.fixture
def told_table(
    machine: _Machine, told: _Told, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ProcessTable]:
    shown = CgroupPaths("/user", {})
    monkeypatch.setattr(procfs, "cgroups", lambda pid: shown if pid == 41 else CgroupPaths("", {}))
    made = ProcessTable(1, machine.current_image, blind_inspector(), None, Lives(told.read))
    yield made
    made.binaries.close()


def _files(table: ProcessTable, image: ProcessImage) -> list[str]:
    return [table.binaries.files[mapping.binary].path for mapping in image.mappings]


def test_who_moves_to_another_cgroup_is_there(
    machine: _Machine, table: ProcessTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = ["/a"]
    monkeypatch.setattr(procfs, "cgroups", lambda _: CgroupPaths(paths[-1], {}))
    image = table.seen(41, 5, 1, "worker", 5, 101)
    assert image.cgroup == "/a"
    table.take_changed()
    # WHEN it is looked at and has not moved THEN nothing is new
    assert table.follow_cgroups([(41, 5), (99, 1)]) == []
    assert table.take_changed()[0] == []
    # WHEN it has THEN that is told
    paths.append("/b")
    assert table.follow_cgroups([(41, 5)]) == [image]
    assert (image.cgroup, table.take_changed()[0]) == ("/b", [image])
    # AND so it is at once where the kernel tells of another cgroup
    paths.append("/c")
    table.seen(41, 5, 1, "worker", 6, 101)
    assert image.cgroup == "/b"
    table.seen(41, 5, 1, "worker", 6, 102)
    assert image.cgroup == "/c"


@pytest.mark.parametrize("path", ["", "/a (deleted)"])
@pytest.mark.parametrize("image_now", [5, 6, None])
def test_what_is_no_cgroup_of_a_process_is_not_taken(
    machine: _Machine,
    table: ProcessTable,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    image_now: int | None,
) -> None:
    paths = ["/a"]
    monkeypatch.setattr(procfs, "cgroups", lambda _: CgroupPaths(paths[-1], {}))
    table.seen(41, 5, 1, "worker", 5)
    # WHEN it has ended, or another has its pid
    paths.append(path if image_now == 5 else "/of/another")
    machine.image = image_now
    assert table.follow_cgroups([(41, 5)]) == []
    image = table.known(41, 5)
    assert image is not None and image.cgroup == "/a"


def test_a_program_that_is_gone_is_what_the_kernel_told(
    machine: _Machine, told_table: ProcessTable, told: _Told
) -> None:
    # GIVEN a shell, and a child that calls exec and is gone before anybody looks
    machine.maps = [_jit(0x7000)]
    shell = told_table.seen(41, 5, 1, "bash", 5)
    shell.cgroup, shell.owner_uid, shell.root = "/user", 1000, "/proc/self/fd/9"
    machine.image = None
    told.tell(Forked(10, 42, 41), Named(20, 42, "ls", is_exec=True))
    told.map(21, 42, "/bin/ls", "/lib/libc.so.6")
    told.tell(Ended(30, 42))
    # WHEN samples of it come, in whatever order
    called = told_table.image(42, 25)
    forked = told_table.image(42, 11)
    # THEN it is itself, and was the shell before
    assert (called.name, called.parent_pid, called.executable) == ("ls", 41, "/bin/ls")
    assert _files(told_table, called) == ["/bin/ls", "/lib/libc.so.6"]
    assert (forked.name, forked.mappings) == ("bash", shell.mappings)
    assert called.is_over and forked.is_over
    for image in (called, forked):
        assert (image.cgroup, image.owner_uid, image.root) == ("/user", 1000, "/proc/self/fd/9")
        thread = told_table.thread(image, 42)
        assert thread.name == image.name


def test_a_program_that_is_gone_has_the_arguments_that_it_was_given(
    machine: _Machine, table: ProcessTable
) -> None:
    # GIVEN a program that nobody could ask, as the kernel half has seen it begin
    machine.image = None
    table.has_become(42, 25, b"ls\0-l\0/usr/bin\0")
    # THEN its command line is known, and not that of another that has the same pid
    assert table.image(42, 25).command_line == "ls -l /usr/bin"
    assert table.image(42, 26).command_line == ""
    # AND so it is where its end came first
    late = table.image(43, 30)
    table.take_changed()
    table.has_become(43, 30, b"date\0")
    assert late.command_line == "date"
    assert late in table.take_changed()[0]


def test_arguments_that_were_told_whole_are_not_asked_for(
    machine: _Machine, table: ProcessTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(procfs, "command_line", lambda _, pid: asked.append(pid) or f"pid {pid}")
    monkeypatch.setattr(procfs, "cgroups", lambda _: CgroupPaths("/x", {}))
    # GIVEN three programs that run: of one all arguments were told, of one the first, of one none
    machine.image = 25
    table.has_become(42, 25, b"mysql\0--password=secret\0", is_whole=True)
    table.has_become(43, 25, b"cc1\0" + 250 * b"x")
    # THEN /proc is asked for what is not known
    lines = [table.image(pid, 25).command_line for pid in (42, 43, 44)]
    assert lines == ["mysql --password=***", "pid 43", "pid 44"]
    assert asked == [43, 44]


def test_arguments_of_programs_that_nobody_asks_for_are_bounded(
    machine: _Machine, table: ProcessTable
) -> None:
    machine.image = None
    for image in range(3000):
        table.has_become(42, image, b"ls\0")
    assert table.image(42, 0).command_line == ""
    assert table.image(42, 2999).command_line == "ls"


def test_what_was_told_is_there_without_a_read_while_it_is_all(
    machine: _Machine, told_table: ProcessTable, told: _Told
) -> None:
    told.tell(Named(2, 41, "ls", is_exec=True))
    told.tell(Mapped(3, 41, 0x1000, 0x2000, 0, "00:00", 0, "//anon"))
    image = told_table.seen(41, 5, 1, "ls", 6)
    assert image.mappings == (_mapped(0x1000),)
    # The second time, once it has begun, it is all there.
    told.tell(Mapped(6, 41, 0x3000, 0x4000, 0, "00:00", 0, "//anon"))
    assert told_table.seen(41, 5, 1, "ls", 7) is image
    assert image.mappings == (_mapped(0x1000), _mapped(0x3000))
    assert machine.reads == 0
    # After that there is an address that nobody has told of: /proc shows what is mapped.
    machine.maps = [_jit(0x1000), _jit(0x5000)]
    told_table.seen(41, 5, 1, "ls", 8)
    assert image.mappings == (_mapped(0x1000), _mapped(0x3000), _mapped(0x5000))
    assert machine.reads == 1


def test_what_was_mapped_since_it_was_last_seen_is_there_without_a_read(
    machine: _Machine, told_table: ProcessTable, told: _Told
) -> None:
    # GIVEN a program that was seen before its library was mapped
    told.tell(Named(2, 41, "ls", is_exec=True))
    told.tell(Mapped(3, 41, 0x1000, 0x2000, 0, "00:00", 0, "//anon"))
    told.read_ns = 6
    image = told_table.seen(41, 5, 1, "ls", 6)
    # WHEN it is seen again
    told.tell(Mapped(7, 41, 0x3000, 0x4000, 0, "00:00", 0, "//anon"))
    told_table.seen(41, 5, 1, "ls", 8)
    # THEN what the kernel has told meanwhile is asked for
    assert image.mappings == (_mapped(0x1000), _mapped(0x3000))
    assert machine.reads == 0


def test_mappings_of_what_is_over_are_looked_at_when_a_stack_has_come(
    machine: _Machine, told_table: ProcessTable, told: _Told
) -> None:
    # GIVEN a process that is over when its first event is read, as a later event says
    told.tell(Named(2, 41, "ls", is_exec=True))
    told.tell(Mapped(3, 41, 0x1000, 0x2000, 0, "00:00", 0, "//anon"))
    asked = machine.asked
    told_table.expect_ends({41: 6})
    image = told_table.seen(41, 5, 1, "ls", 6)
    # THEN nobody is asked whether it lives, and nothing is to be told of its mappings
    assert image.is_over
    assert machine.asked == asked
    assert not told_table.take_remapped()
    # AND a stack of it finds them.
    assert image.find(np.array([0x1800, 0x5000], np.uint64)).tolist() == [0, -1]
    assert image.mappings == (_mapped(0x1000),)
    assert told_table.take_remapped() == [image]


def test_mappings_of_an_image_that_is_forgotten_are_told_to_nobody(
    machine: _Machine, told_table: ProcessTable, told: _Told
) -> None:
    # GIVEN a process that is over, whose mappings nobody has asked for
    told.tell(Named(2, 41, "ls", is_exec=True))
    told.tell(Mapped(3, 41, 0x1000, 0x2000, 0, "00:00", 0, "//anon"))
    told_table.expect_ends({41: 6})
    image = told_table.seen(41, 5, 1, "ls", 6)
    told_table.take_changed()
    # WHEN it is forgotten, and somebody who still has it asks
    told_table.forget([image], [])
    assert image.mappings == (_mapped(0x1000),)
    # THEN no window has it, and no table is made: what it maps may be closed.
    assert told_table.take_remapped() == []
    assert told_table.take_changed() == ([], [])


def test_a_file_that_is_told_of_by_other_numbers_is_the_one_that_was_read(
    machine: _Machine, told_table: ProcessTable, told: _Told
) -> None:
    # GIVEN a kernel that tells of a file on overlayfs by the numbers of its layer
    told.tell(Named(2, 41, "ls", is_exec=True))
    told.map(3, 41, "/of-layer")
    machine.maps = [dataclasses.replace(_lines("/usr/bin/ls")[0], inode=77)]
    # THEN /proc is read, and that stands to the end
    image = told_table.seen(41, 5, 1, "ls", 6)
    assert machine.reads == 1
    assert _files(told_table, image) == ["/usr/bin/ls"]
    machine.image = None
    told_table.exited(41, 5, 9)
    assert _files(told_table, image) == ["/usr/bin/ls"]


def test_what_is_mapped_before_the_end_is_known_at_the_end(
    machine: _Machine, told_table: ProcessTable, told: _Told
) -> None:
    told.tell(Named(2, 41, "ls", is_exec=True))
    told.map(3, 41, "/bin/ls")
    image = told_table.seen(41, 5, 1, "ls", 6)
    told.map(7, 41, "/bin/ls", "/lib/late.so")
    machine.image = None
    told_table.exited(41, 5, 9)
    assert _files(told_table, image) == ["/bin/ls", "/lib/late.so"]
    assert image in told_table.take_remapped()


def test_what_was_read_stands_where_events_were_lost(
    machine: _Machine, told_table: ProcessTable, told: _Told
) -> None:
    told.tell(Named(2, 41, "ls", is_exec=True))
    told.map(3, 41, "/old")
    told.tell(Lost(4, 1))
    machine.maps = _lines("/new")
    machine.maps[0] = dataclasses.replace(machine.maps[0], inode=99)
    image = told_table.seen(41, 5, 1, "ls", 6)
    machine.image = None
    told_table.exited(41, 5, 9)
    assert _files(told_table, image) == ["/new"]


def test_proc_shows_the_next_program_before_the_kernel_half_hears_of_it(
    machine: _Machine, told_table: ProcessTable, told: _Told
) -> None:
    # GIVEN a child in the middle of an exec: its mappings are those of the new program already
    told.tell(Forked(4, 41, 40))
    machine.maps = _lines("/bin/next")
    told.tell(Named(6, 41, "next", is_exec=True))
    image = told_table.seen(41, 5, 40, "bash", 5)
    assert (image.name, image.mappings) == ("bash", ())


def test_a_child_of_a_child_of_which_there_was_no_sample(
    machine: _Machine, told_table: ProcessTable, told: _Told
) -> None:
    shell = told_table.seen(41, 5, 1, "bash", 5)
    shell.cgroup = "/user"
    machine.image = None
    told.tell(Forked(10, 42, 41), Forked(20, 43, 42), Named(30, 43, "head", is_exec=True))
    assert told_table.image(43, 35).cgroup == "/user"


def _makers(table: ProcessTable, image: ProcessImage) -> list[ProcessImage]:
    return [*table.forked_from(image)]


def test_who_forked_a_process_is_known_after_its_parent_has_ended(
    machine: _Machine, told_table: ProcessTable, told: _Told
) -> None:
    # GIVEN a server, a child of which there is no sample, and what that has forked
    told.tell(Forked(3, 41, 1), Named(4, 41, "server", is_exec=True))
    server = told_table.seen(41, 5, 1, "server", 5)
    server.root = "/proc/self/fd/9"
    machine.image = None
    told.tell(Forked(10, 42, 41), Forked(20, 43, 42), Ended(30, 42), Forked(40, 44, 43))
    # WHEN these are seen, and init is their parent
    orphan = told_table.seen(43, 21, 1, "server", 50)
    child = told_table.seen(44, 41, 43, "server", 50)
    # THEN they are the server's
    assert _makers(told_table, orphan) == [server]
    assert _makers(told_table, child) == [orphan, server]
    assert (orphan.cgroup, orphan.root, orphan.parent_pid) == ("/user", "/proc/self/fd/9", 1)


def test_who_was_there_before_it_was_listened_to_is_of_its_parent(
    machine: _Machine, told_table: ProcessTable, told: _Told
) -> None:
    parent = told_table.seen(41, 5, 1, "server", 5)
    machine.image = None
    told.map(10, 42, "/lib/late.so")  # all that is told of it
    assert _makers(told_table, told_table.seen(42, 5, 41, "server", 50)) == [parent]


@pytest.mark.parametrize("pid", [42, 43])
def test_another_program_was_forked_from_nobody(
    machine: _Machine, told_table: ProcessTable, told: _Told, pid: int
) -> None:
    told.tell(Forked(3, 41, 1))
    told_table.seen(41, 5, 1, "server", 5)
    machine.image = None
    told.tell(Forked(10, 42, 41), Named(20, 42, "sh", is_exec=True), Forked(30, 43, 42))
    assert _makers(told_table, told_table.seen(pid, 31, 1, "sh", 50)) == []


def test_who_has_become_another_program_since_was_not_forked_from(
    machine: _Machine, told_table: ProcessTable, told: _Told
) -> None:
    told.tell(Forked(3, 41, 1), Forked(10, 42, 41), Named(20, 41, "sh", is_exec=True))
    machine.image = 21
    told_table.seen(41, 21, 1, "sh", 50)
    assert _makers(told_table, told_table.seen(42, 11, 41, "server", 50)) == []


def test_an_image_that_was_never_announced_still_has_a_name(table: ProcessTable) -> None:
    assert table.image(44, 9).name == "pid 44"


def test_an_executing_address_is_looked_for_every_time(
    machine: _Machine, table: ProcessTable
) -> None:
    image = table.image(41, 5)
    for _ in range(100):
        table.unknown_address(image, is_certain=True)
    assert machine.reads == 100


def test_a_doubtful_address_is_looked_for_ever_more_rarely(
    machine: _Machine, table: ProcessTable
) -> None:
    image = table.image(41, 5)
    looked = []
    for turn in range(300):
        before = machine.reads
        table.unknown_address(image, is_certain=False)
        if machine.reads > before:
            looked.append(turn)
    # 2, 4, 8 ... turns are left out, but never more than 64
    assert looked == [0, 3, 8, 17, 34, 67, 132, 197, 262]


def test_a_look_that_brings_something_ends_the_waiting(
    machine: _Machine, table: ProcessTable
) -> None:
    # GIVEN junk that made looks rare
    image = table.image(41, 5)
    for _ in range(150):
        table.unknown_address(image, is_certain=False)
    # WHEN code is really mapped, and seen executing
    machine.maps = [_jit(0x7000)]
    table.unknown_address(image, is_certain=True)
    assert image.mappings == (_mapped(0x7000),)
    # THEN the next doubtful addresses are looked for again at once
    before = machine.reads
    for _ in range(2):
        table.unknown_address(image, is_certain=False)
    assert machine.reads == before + 1


def test_threads_are_kept_apart_by_image(table: ProcessTable) -> None:
    old, new = table.image(41, 5), table.image(41, 6)
    threads = [table.thread(old, 41), table.thread(new, 41), table.thread(old, 42)]
    assert table.thread(old, 41) is threads[0]
    assert table.threads_of(old) == [threads[0], threads[2]]
    assert [thread.index for thread in threads] == [0, 1, 2]
    assert threads[0].name == "pid 41"


def test_the_end_of_a_process_is_noted_once_it_is_known(table: ProcessTable) -> None:
    image = table.image(41, 5)
    table.exited(41, 5, 9_000)
    table.exited(77, 1, 9_500)
    assert image.exited_ns == 9_000
    assert len(table.images) == 1


def test_this_process_maps_its_interpreter() -> None:
    inspector = Inspector()
    table = ProcessTable(0, lambda pid: 1, inspector)
    try:
        image = table.seen(os.getpid(), 1, 0, "", 0)
        files = {table.binaries.files[m.binary].path for m in image.mappings if m.binary >= 0}
        assert image.executable in files or any("libpython" in path for path in files)
        assert "[vdso]" in files
        assert image.namespaced_pid > 0
        assert image.parent_pid == os.getppid()
        assert table.binaries.unopened == 0
    finally:
        table.binaries.close()
        inspector.close()


def test_a_file_that_nobody_opened_is_tried_again_and_who_maps_it_looked_at_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inspector = Inspector()
    table = ProcessTable(0, lambda pid: 1, inspector)
    try:
        # GIVEN a process of which no file could be opened for a moment
        opened = table.binaries._open
        monkeypatch.setattr(table.binaries, "_open", lambda *_: None)
        image = table.seen(os.getpid(), 1, 0, "", 0)
        closed = {m.binary for m in image.mappings if m.binary >= 0 and m.binary in _closed(table)}
        assert len(closed) > 1
        assert table.take_remapped() == [image]
        # WHEN they are tried again
        monkeypatch.setattr(table.binaries, "_open", opened)
        table.open_again(closed)
        # THEN they are open, although no mapping is new,
        assert not _closed(table)
        assert table.take_remapped() == []
        # AND all is to be found out of them, and of who maps them.
        assert table.binaries.take_renewed() == closed
        table.look_again(closed)
        assert table.take_remapped() == [image]
        # What nobody maps changes nothing.
        table.look_again({max(table.binaries.files) + 1})
        assert table.take_remapped() == []
    finally:
        table.binaries.close()
        inspector.close()


def _closed(table: ProcessTable) -> set[int]:
    return {file.index for file in table.binaries.files.values() if file.fd is None}
