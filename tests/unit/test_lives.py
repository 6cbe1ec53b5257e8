# SPDX-License-Identifier: Apache-2.0
"""What is known of processes that are gone, of what the kernel told of them."""

from __future__ import annotations

import random

import pytest
from aiflame.agent.kernel.life_events import (
    Ended,
    Forked,
    LifeEvent,
    LifeRecords,
    Lost,
    Mapped,
    Named,
)
from aiflame.agent.processes import lives as lives_module
from aiflame.agent.processes.lives import Life, Lives
from aiflame.agent.processes.procfs import MapsLine
from life_records import records


class _Told:
    """What the kernel tells, and until when."""

    def __init__(self, *events: LifeEvent) -> None:
        self.events = [*events]
        self.reads = 0

    def read(self) -> tuple[LifeRecords, int]:
        self.reads += 1
        events, self.events = self.events, []
        return records(events), max((event.ns for event in events), default=0) + 1


def _mapped(ns: int, pid: int, start: int, path: str, inode: int = 7, size: int = 0x1000) -> Mapped:
    return Mapped(ns, pid, start, start + size, 0, "fe:00", inode, path)


def _exec(ns: int, pid: int, name: str) -> Named:
    return Named(ns, pid, name, is_exec=True)


def _paths(life: Life | None) -> list[str]:
    return [] if life is None else [line.path for line in life.lines()]


def test_a_shell_starts_a_program() -> None:
    told = _Told(
        _exec(10, 40, "bash"),
        _mapped(11, 40, 0x1000, "/bin/bash"),
        Forked(20, 41, 40),
        _exec(30, 41, "ls"),
        _mapped(31, 41, 0x5000, "/bin/ls", 8),
        _mapped(32, 41, 0x9000, "/lib/libc.so.6", 9),
        Ended(40, 41),
    )
    lives = Lives(told.read)

    # THEN the child is the shell until it calls exec, also after it has ended
    forked = lives.find(41, 21)
    assert forked is not None
    assert (forked.name, forked.parent_pid, forked.is_exec) == ("bash", 40, False)
    assert (_paths(forked), forked.executable) == (["/bin/bash"], "/bin/bash")
    assert lives.find(41, 29) is forked

    called = lives.find(41, 35)
    assert called is not None
    assert (called.name, called.parent_pid, called.is_exec) == ("ls", 40, True)
    assert (_paths(called), called.executable) == (["/bin/ls", "/lib/libc.so.6"], "/bin/ls")
    assert called.is_whole
    assert lives.find(41, 19) is None
    assert lives.find(42, 50) is None
    assert lives.lost == 0


def test_what_a_child_maps_is_its_own() -> None:
    told = _Told(
        _exec(10, 40, "make"),
        _mapped(11, 40, 0x1000, "/bin/make"),
        Forked(20, 41, 40),
        _mapped(21, 41, 0x2000, "/lib/of-child.so"),
        _mapped(22, 40, 0x3000, "/lib/of-parent.so"),
    )
    lives = Lives(told.read)
    assert _paths(lives.find(41, 30)) == ["/bin/make", "/lib/of-child.so"]
    assert _paths(lives.find(40, 30)) == ["/bin/make", "/lib/of-parent.so"]


def test_of_a_process_from_before_not_all_is_known() -> None:
    told = _Told(_mapped(10, 40, 0x1000, "/lib/loaded.so"), Forked(20, 41, 40))
    lives = Lives(told.read)
    for pid in (40, 41):
        life = lives.find(pid, 30)
        assert life is not None
        assert not life.is_whole
        assert _paths(life) == ["/lib/loaded.so"]
        assert life.executable == ""


def test_a_pid_that_is_given_out_again() -> None:
    told = _Told(_exec(10, 41, "first"), Ended(20, 41), Forked(30, 41, 50), _exec(40, 41, "second"))
    lives = Lives(told.read)
    names = [life.name if (life := lives.find(41, ns)) else None for ns in (15, 25, 35, 45)]
    assert names == ["first", "first", "", "second"]


def test_an_exec_is_known_before_it_is_complete() -> None:
    told = _Told(Forked(10, 41, 40))
    lives = Lives(told.read)
    assert not lives.is_past(41, 11)
    told.events = [_exec(20, 41, "ls")]
    assert lives.is_past(41, 11)
    assert not lives.is_past(41, 21)
    assert not lives.is_past(99, 1)


def test_it_is_read_only_for_what_is_later_than_the_last_read() -> None:
    told = _Told(_exec(100, 41, "ls"))
    lives = Lives(told.read)
    lives.find(41, 50)
    lives.find(41, 60)
    assert told.reads == 1
    lives.find(41, 101)
    assert told.reads == 2


def test_it_keeps_up_a_few_times_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    now_ns = [10**9]
    monkeypatch.setattr(lives_module.time, "monotonic_ns", lambda: now_ns[0])
    reads = []

    def read() -> tuple[LifeRecords, int]:
        reads.append(now_ns[0])
        return records([]), now_ns[0]

    lives = Lives(read)
    for _ in range(1000):
        lives.keep_up()
        now_ns[0] += 1_000_000
    assert len(reads) == 10


def test_only_some_processes_and_who_descends_from_them() -> None:
    told = _Told(
        Forked(10, 41, 40),
        _exec(11, 41, "child"),
        Forked(12, 42, 41),
        _exec(13, 42, "grandchild"),
        Forked(14, 61, 60),
        _exec(15, 61, "other"),
        _mapped(16, 61, 0x1000, "/bin/other"),
    )
    lives = Lives(told.read)
    lives.follow_only([40])
    assert (found := lives.find(42, 20)) is not None
    assert found.name == "grandchild"
    assert lives.find(41, 20) is not None
    assert lives.find(61, 20) is None


def test_names_that_processes_give_themselves() -> None:
    told = _Told(_exec(10, 41, "python3"), Named(20, 41, "worker-3", is_exec=False))
    told.events.append(Named(21, 99, "unknown", is_exec=False))
    found = Lives(told.read).find(41, 30)
    assert found is not None
    assert found.name == "worker-3"


def test_after_a_loss_nothing_is_whole() -> None:
    told = _Told(_exec(10, 41, "ls"), _mapped(11, 41, 0x1000, "/bin/ls"), Lost(20, 3))
    told.events += [Forked(30, 42, 41), _exec(40, 43, "later")]
    lives = Lives(told.read)
    for pid in (41, 42):
        life = lives.find(pid, 50)
        assert life is not None
        assert (life.is_whole, life.has_gap) == (False, True)
        assert _paths(life) == ["/bin/ls"]
    assert (later := lives.find(43, 50)) is not None
    assert later.is_whole
    assert lives.lost == 3


def test_the_same_mapping_again_is_one() -> None:
    told = _Told(*(_mapped(ns, 41, 0x1000, "//anon", 0) for ns in range(100)))
    lives = Lives(told.read)
    assert _paths(lives.find(41, 200)) == ["//anon"]


@pytest.mark.parametrize("seed", range(10))
def test_what_is_mapped_later_lies_over_the_rest(seed: int) -> None:
    dice = random.Random(seed)
    life, truth = Life(0), [None] * 64
    for inode in range(1, 30):
        start = dice.randrange(63)
        line = MapsLine(start, dice.randint(start + 1, 64), dice.randrange(999), "0:1", inode, "")
        life.mapped.pop((start, line.end), None)
        life.mapped[start, line.end] = line
        for address in range(start, line.end):
            truth[address] = (inode, line.offset + address - start)
    found: list[tuple[int, int] | None] = [None] * 64
    for line in life.lines():
        for address in range(line.start, line.end):
            assert found[address] is None
            found[address] = (line.inode, line.offset + address - line.start)
    assert found == truth


def test_those_that_ended_first_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lives_module, "_MAX_ENDED", 2)
    told = _Told()
    for pid in (41, 42, 43):
        told.events += [_exec(pid, pid, "short"), Ended(pid + 1, pid)]
    lives = Lives(told.read)
    assert [lives.find(pid, 99) is not None for pid in (41, 42, 43)] == [False, True, True]
    assert lives.lost == 0


def test_a_pid_that_lives_again_is_not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lives_module, "_MAX_ENDED", 0)
    told = _Told(_exec(10, 41, "first"))
    lives = Lives(told.read)
    lives.update(20)
    told.events = [Forked(30, 41, 40), Ended(35, 41), _exec(40, 41, "second")]
    assert (found := lives.find(41, 50)) is not None
    assert found.name == "second"


@pytest.mark.parametrize("have_ended", [True, False])
def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch, have_ended: bool) -> None:
    monkeypatch.setattr(lives_module, "_MAX_MAPPED_BY_ALL", 100)
    monkeypatch.setattr(lives_module, "_MAX_MAPPED", 30)
    told = _Told()
    for pid in range(1000):
        told.events.append(_exec(pid * 100, pid, "many"))
        told.events += [_mapped(pid * 100, pid, n << 12, f"/lib/{n}") for n in range(40)]
        if have_ended:
            told.events.append(Ended(pid * 100 + 50, pid))
    lives = Lives(told.read)
    known = [life for pid in range(1000) if (life := lives.find(pid, 1 << 40))]
    assert sum(len(life.mapped) for life in known) <= 130
    assert 15 <= len(known[-1].mapped) <= 30
    assert not known[-1].is_whole
    # Who has ended was told of in time; who lives may be gone before it is read.
    assert (lives.lost == 0) == have_ended


def test_a_process_that_calls_exec_over_and_over() -> None:
    told = _Told(*(_exec(n, 41, f"n{n}") for n in range(1, 1000)))
    lives = Lives(told.read)
    assert (found := lives.find(41, 2000)) is not None
    assert found.name == "n999"
    assert lives.find(41, 900) is None


def test_a_pid_that_came_again_and_told_nothing_is_not_forgotten_with_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lives_module, "_MAX_ENDED", 2)
    told = _Told(Forked(10, 41, 40), _exec(11, 41, "first"), Ended(12, 41))
    lives = Lives(told.read)
    lives.update(20)
    told.events = [Forked(30, 41, 40), Ended(31, 41), _exec(32, 42, "other"), Ended(33, 42)]
    assert (found := lives.find(41, 50)) is not None
    assert found.begun_ns == 30


def test_what_children_inherit_is_bounded_before_they_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lives_module, "_MAX_MAPPED_BY_ALL", 100)
    told = _Told(_exec(1, 40, "parent"), *(_mapped(2, 40, n << 12, "//anon") for n in range(30)))
    lives = Lives(told.read)
    lives.update(5)
    # GIVEN children that are told of at once, each of which inherits other mappings
    for pid in range(100, 200):
        told.events += [_mapped(pid, 40, 1 << 12, "//anon"), Forked(pid, pid, 40)]
    told.events += [Ended(300, pid) for pid in range(100, 200)]
    lives.update(400)
    known = [life for pid in range(100, 200) if (life := lives.find(pid, 500)) is not None]
    assert sum(len(life.mapped) for life in known) <= 130


def _anything(dice: random.Random, pids: range, count: int) -> list[LifeEvent]:
    """Returns events of few pids, which come again, also in an order that makes no sense."""
    found: list[LifeEvent] = []
    for ns in range(10, 10 + count):
        pid, parent_pid = dice.sample(pids, 2)
        path = f"/lib/{dice.randrange(9)}"
        choices: tuple[LifeEvent, ...] = (
            Forked(ns, pid, parent_pid),
            _exec(ns, pid, f"name-{ns}"),
            Named(ns, pid, f"own-{ns}", is_exec=False),
            _mapped(ns, pid, dice.randrange(1, 9) << 12, path, size=dice.randrange(1, 4) << 12),
            _mapped(ns, pid, dice.randrange(1, 9) << 12, path),
            Ended(ns, pid),
            Lost(ns, 1),
        )
        found.append(dice.choices(choices, (3, 4, 1, 4, 4, 3, 0.1))[0])
    return found


def _check_sizes(lives: Lives) -> None:
    """What bounds memory is what there is."""
    of_lives = sum(len(life.mapped) for each in lives._lives.values() for life in each)
    assert lives._mapped == of_lives + sum(batch.size for batch in lives._batches)


@pytest.mark.parametrize("seed", range(100))
def test_what_is_read_together_is_what_is_read_one_by_one(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    dice = random.Random(seed)
    monkeypatch.setattr(lives_module, "_MAX_ENDED", dice.choice([0, 2, 50]))
    monkeypatch.setattr(lives_module, "_LEAST_TOGETHER", dice.choice([1, 3]))
    pids = range(40, 40 + dice.choice([4, 6, 12]))
    events = _anything(dice, pids, 300)
    told, told_singly = _Told(), _Told()
    together, singly = Lives(told.read), Lives(told_singly.read)
    if dice.random() < 0.3:
        together.follow_only([40, 41])
        singly.follow_only([40, 41])
    while events:
        some = dice.randrange(1, 60)
        now, events = events[:some], events[some:]
        for event in now:
            told_singly.events.append(event)
            singly.update(event.ns)
        told.events += now
        together.update(now[-1].ns)
        for pid in dice.sample(pids, 2):
            ns = dice.randrange(now[-1].ns + 1)
            assert together.find(pid, ns) == singly.find(pid, ns)
            _check_sizes(together)
    assert together.lost == singly.lost
    for pid in pids:
        assert together.find(pid, 1 << 40) == singly.find(pid, 1 << 40)
