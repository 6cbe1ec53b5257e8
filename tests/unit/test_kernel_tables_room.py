# SPDX-License-Identifier: Apache-2.0
"""What has room in the kernel: one file's or process's excess costs nobody else.

The kernel's maps are stood in for: an array is a file in memory, a map of maps a dictionary that
keeps what its arrays held.
"""

from __future__ import annotations

import errno
import os
import time
from collections import Counter
from collections.abc import Collection
from collections.abc import Mapping as AnyMapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from aiflame.agent.kernel import abi
from aiflame.agent.kernel import unwind_tables as kernel_tables
from aiflame.agent.kernel.unwind_tables import KernelTables, table_bytes
from aiflame.agent.losses import LossKind
from aiflame.agent.processes.table import Mapping, ProcessTable
from aiflame.agent.processes.unwind_tables import UnwindTables
from aiflame.agent.unwind.table import MAX_RULES, PAGE_SHIFT, UnwindTable
from aiflame.agent.unwind.x86_64 import (
    CFA_SHIFT,
    NO_CFI_STATE,
    RA_AT_CFA_8,
    RA_SHIFT,
    RSP,
    RULE,
    RbpKind,
    Rule,
    RuleKind,
)
from support import blind_inspector

_PAGE_BYTES = 4096
_MANY, _FEW = 1000, 10  # mappings: 9 pages with the head of their array, and 2


class _OuterMap:
    """A map of maps."""

    def __init__(self) -> None:
        self.content: dict[int, bytes] = {}
        self.refuses: set[int] = set()

    def update_many(self, entries: AnyMapping[int, int]) -> list[int]:
        refused = [key for key in entries if key in self.refuses]
        for key, fd in entries.items():
            if key not in refused:
                self.content[key] = os.pread(fd, os.fstat(fd).st_size, 0)
        return refused

    def delete_many(self, keys: Collection[int]) -> None:
        for key in keys:
            self.content.pop(key, None)


class _Kernel:
    """The maps of the programs, and how the kernel is off for memory."""

    def __init__(self) -> None:
        self.unwind_tables, self.process_mappings = _OuterMap(), _OuterMap()
        self.inner_flags = 0
        self.has_memory = True

    def create_array(self, value_bytes: int, entries: int, flags: int) -> int:
        if not self.has_memory:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        fd = os.memfd_create("array")
        os.ftruncate(fd, -(-value_bytes * entries // _PAGE_BYTES) * _PAGE_BYTES)
        return fd

    def rule_of(self, tables: KernelTables, binary: int, address: int) -> tuple[int, ...]:
        """Searches a table as bpf/unwind.h does."""
        loaded = tables.loaded[binary]
        words = np.frombuffer(self.unwind_tables.content[loaded.slot], "<u8")
        halves = words.view("<u4")
        page = (address >> PAGE_SHIFT) - loaded.base_page
        rows = halves[halves[page] : halves[page + 1]]
        row = rows[(rows & 0xFFFF) <= address % (1 << PAGE_SHIFT)][-1]
        rule = words[(loaded.pages + 2) // 2 + (int(row) >> 16)]
        found: tuple[int, ...] = np.array([rule]).view(RULE)[0].item()
        return found


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Any:
    made = _Kernel()
    monkeypatch.setattr(kernel_tables, "create_array", made.create_array)
    return made


def _table(rules: int) -> UnwindTable:
    """A table of 4-byte instructions with a rule each, whose CFA is ever farther away."""
    numbers = np.arange(rules, dtype=np.uint64)
    states = numbers << np.uint64(3) | np.uint64(RSP << CFA_SHIFT | RA_AT_CFA_8 << RA_SHIFT)
    end = np.array([4 * rules], np.uint64), np.array([NO_CFI_STATE], np.uint64)
    return UnwindTable.of_states(
        np.append(numbers * np.uint64(4), end[0]), np.append(states, end[1]), {}
    )


def _slots(count: int) -> Any:
    slots = np.zeros(count, abi.MAPPING_SLOT_DTYPE)
    slots["start"] = np.arange(count)
    return slots


def test_a_file_with_too_many_rules_costs_only_itself(kernel: Any) -> None:
    # GIVEN a file that needs more rules than a row has numbers for
    hostile, honest = _table(MAX_RULES + 100), _table(1000)
    tables = KernelTables(kernel, 64 << 20, Counter())
    tables.enter({1: hostile})
    # WHEN others come after it, THEN they have all of their rules
    for binary in range(2, 6):
        tables.enter({binary: honest})
        for row in (0, 500, 999):
            expected = Rule(RuleKind.RSP, RbpKind.SAME, 0, 8 * row)
            assert kernel.rule_of(tables, binary, 4 * row) == expected
    # AND it lost only what is over the limit
    assert hostile.drops == {"rule over the limit": 102}
    last = range(MAX_RULES - 10, MAX_RULES + 100)
    found = [kernel.rule_of(tables, 1, 4 * row)[0] for row in last]
    assert Counter(found) == {RuleKind.RSP: 8, RuleKind.UNSUPPORTED: 102}


def test_a_table_that_goes_gives_back_all_that_it_took(kernel: Any) -> None:
    tables = KernelTables(kernel, 4 << 20, Counter())
    table = _table(MAX_RULES)
    # GIVEN room for five such tables, WHEN many come one after another
    for binary in range(40):
        tables.enter({binary: table})
        assert kernel.rule_of(tables, binary, 4 * 500) == Rule(
            RuleKind.RSP, RbpKind.SAME, 0, 8 * 500
        )
        tables.remove([binary])
    assert tables.free_bytes == 4 << 20
    assert kernel.unwind_tables.content == {}


def test_a_table_that_the_kernel_refuses_is_not_there(kernel: Any) -> None:
    tables = KernelTables(kernel, 4 << 20, Counter())
    kernel.unwind_tables.refuses = {0}
    tables.enter({1: _table(10), 2: _table(10)})
    assert list(tables.loaded) == [2]
    assert tables.free_bytes == (4 << 20) - table_bytes(_table(10))
    # WHEN there is room again
    kernel.unwind_tables.refuses = set()
    tables.enter({1: _table(10)})
    assert len({loaded.slot for loaded in tables.loaded.values()}) == 2


@pytest.mark.parametrize("why", ["no memory", "refused"])
def test_mappings_that_find_no_room_leave_none(kernel: Any, why: str) -> None:
    losses: Counter[LossKind] = Counter()
    tables = KernelTables(kernel, 0, losses)
    free_bytes = tables.free_mapping_bytes
    tables.set_mappings({1: _slots(_FEW), 2: _slots(_FEW)})
    # WHEN a process's new mappings cannot be entered
    kernel.has_memory = why == "refused"
    kernel.process_mappings.refuses = {1}
    for _ in range(3):
        tables.set_mappings({1: _slots(_MANY)})
    # THEN those from before, which lead to tables that may go now, are not there either
    assert set(kernel.process_mappings.content) == {2}
    assert losses == {LossKind.MAPPINGS_NOT_KEPT: 1}
    tables.drop_mappings([1, 2])
    assert kernel.process_mappings.content == {}
    assert tables.free_mapping_bytes == free_bytes


def test_mappings_have_a_bound_of_their_own(kernel: Any) -> None:
    losses: Counter[LossKind] = Counter()
    tables = KernelTables(kernel, 0, losses, 20 * _PAGE_BYTES)
    # GIVEN two processes with many mappings, and room for them and no more
    tables.set_mappings({1: _slots(_MANY), 2: _slots(_MANY + 1)})
    tables.set_mappings({3: _slots(_MANY + 2)})
    assert set(kernel.process_mappings.content) == {1, 2}
    assert losses == {LossKind.MAPPINGS_NOT_KEPT: 1}
    # WHEN processes like most come, THEN those with many make room, one after the other
    tables.set_mappings({pid: _slots(_FEW) for pid in range(10, 20)})
    assert set(kernel.process_mappings.content) == set(range(10, 20))
    assert losses == {LossKind.MAPPINGS_NOT_KEPT: 3}
    # AND among their like, who came first stays
    tables.set_mappings({20: _slots(_FEW)})
    assert set(kernel.process_mappings.content) == set(range(10, 20))
    assert tables.free_mapping_bytes == 0


def test_new_mappings_of_a_process_take_the_room_of_its_old_ones(kernel: Any) -> None:
    losses: Counter[LossKind] = Counter()
    tables = KernelTables(kernel, 0, losses, 9 * _PAGE_BYTES)
    for count in (_MANY, _MANY + 1, _FEW, _MANY):
        tables.set_mappings({1: _slots(count)})
        (content,) = kernel.process_mappings.content.values()
        assert content.startswith(_slots(count).tobytes())
    assert losses.total() == 0


class _Files:
    """A process that maps one file after another, and the recorder's side of it."""

    def __init__(self, kernel: Any, table: UnwindTable) -> None:
        self._processes = ProcessTable(1, lambda pid: 1, blind_inspector())
        self.tables = UnwindTables(kernel, self._processes, None, 64 << 20, lambda fd: None)
        self.entered = self.tables._kernel.loaded
        self._table = table
        self.tables._cached = self._cached  # type: ignore[method-assign]
        self.tables.images = SimpleNamespace(  # type: ignore[assignment]
            bias=lambda mapping: 0, forget_binaries=lambda binaries: None
        )
        files: Any = {number: SimpleNamespace(path=str(number)) for number in range(20)}
        self._processes.binaries.files = files

    def _cached(self, binary: int) -> UnwindTable:
        self.tables._settled.add(binary)
        return self._table

    def map(self, *binaries: int, pid: int = 2, cgroup: str = "") -> None:
        image = self._processes.image(pid, 1, name="program")
        image.cgroup = cgroup
        image.laid = ()
        image.replace_mappings([Mapping(4096 * b, 4096 * b + 64, 0, b) for b in binaries])
        self.tables.push(image)
        self.tables.poll()


def test_tables_that_samples_need_take_the_slots_of_others(
    kernel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # GIVEN as many small files as there are slots, of which samples need one
    monkeypatch.setattr(abi, "TABLES_MAX", 3)
    files = _Files(kernel, _table(10))
    files.map(1, 2, 3)
    for _ in range(4):
        files.tables.note_used(Counter({1: 5}))
    # WHEN another file is mapped, and samples need it
    files.map(1, 2, 3, 4)
    assert set(files.entered) == {1, 2, 3}
    files.tables.note_used(Counter({1: 5, 4: 5}))
    files.tables.poll()
    # THEN it takes the place of one that nobody needs
    assert {1, 4} < set(files.entered)
    assert len(files.entered) == 3
    files.tables.close()


def test_mappings_of_a_process_whose_end_nobody_told_are_taken_out(kernel: Any) -> None:
    # GIVEN one that became another program, which ended before anybody heard of it
    files = _Files(kernel, _table(10))
    files.map(1, 2, pid=2)
    files.map(1, 3, pid=3)
    gone, stays = (files.tables._pushed[pid] for pid in (2, 3))
    free_bytes = files.tables._kernel.free_mapping_bytes
    # WHEN the first is forgotten
    files.tables.forget_images({gone.index})
    files.tables.poll()
    # THEN what it had is free
    assert files.tables._pushed == {3: stays}
    assert files.tables._kernel.free_mapping_bytes > free_bytes
    files.tables.close()


def test_a_table_that_could_not_be_made_is_tried_again_an_hour_later(
    kernel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = _Files(kernel, _table(10))
    for known in (files.tables._settled, files.tables._without, files.tables._noted):
        known.add(5)
    files.tables._failed_ns[5] = time.monotonic_ns()
    files.map(1, 5)
    files.tables.note_used(Counter({5: 3}))
    files.tables.poll()
    assert set(files.entered) == {1}
    monkeypatch.setattr("aiflame.agent.processes.unwind_tables._TRY_AGAIN_NS", 0)
    files.tables.note_used(Counter({5: 3}))
    files.tables.poll()
    assert set(files.entered) == {1, 5}
    assert not +files.tables.losses
    files.tables.close()


def test_tables_are_asked_for_anew_of_files_that_have_none(kernel: Any) -> None:
    # GIVEN a file about which nobody could be asked, and one with a table
    files = _Files(kernel, _table(10))
    for known in (files.tables._settled, files.tables._without):
        known.add(5)
    files.map(1, 5)
    assert set(files.entered) == {1}
    slot = files.entered[1].slot
    # WHEN they are asked about anew, and who maps them is looked at again
    files.tables.renew({1, 5})
    files.map(1, 5)
    # THEN both have one, and processes that go by the first go on
    assert set(files.entered) == {1, 5}
    assert files.entered[1].slot == slot
    files.tables.close()


def test_a_table_that_the_cache_has_let_go_of_is_built_again(
    kernel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = _Files(kernel, _table(10))
    tables = files.tables
    del tables._cached  # type: ignore[method-assign]
    built: list[int] = []
    cached: dict[int, UnwindTable] = {5: _table(10)}
    monkeypatch.setattr(tables._cache, "load", cached.get)
    monkeypatch.setattr(tables._cache, "build", lambda binary: built.append(binary) is None)
    # GIVEN a table that was there, and that nobody needed for weeks
    assert tables._cached(5) is cached[5]
    del cached[5]
    # WHEN samples need it again THEN it is built, and its file is not called a bad one
    assert tables._cached(5) is None
    assert built == [5]
    assert not tables.losses
    # AND where that was in vain the file is
    tables._building.discard(5)
    tables._settled.add(5)
    assert tables._cached(5) is None
    assert tables.losses == {LossKind.BAD_UNWIND_INFO: 1}
    tables.close()


def test_a_table_that_comes_after_its_process_has_ended_is_not_missed(kernel: Any) -> None:
    # GIVEN a table that was built while the only process that needs it came to its end
    files = _Files(kernel, _table(10))
    files.tables._settled.add(5)
    # WHEN samples of that process are still seen, and another process comes
    files.tables.note_used(Counter({5: 3}))
    files.map(1, pid=3)
    # THEN nothing is said to lack room
    assert files.tables.losses.total() == 0
    files.tables.close()


_HOSTILE, _HONEST = "/system.slice/hostile.service", "/system.slice/honest.service"


@pytest.mark.parametrize("hostile_pids", [(2, 2), (2, 3)])
@pytest.mark.parametrize("cgroup", [_HONEST, _HOSTILE])
def test_tables_in_use_of_one_leave_room_for_others(
    kernel: Any,
    monkeypatch: pytest.MonkeyPatch,
    hostile_pids: tuple[int, int],
    cgroup: str,
) -> None:
    # GIVEN one user whose processes need all tables that there may be, but for one that all map
    monkeypatch.setattr(abi, "TABLES_MAX", 8)
    files = _Files(kernel, _table(10))
    first, second = hostile_pids
    if first == second:
        files.map(*range(8), pid=first, cgroup=_HOSTILE)
    else:
        files.map(0, *range(1, 4), pid=first, cgroup=_HOSTILE)
        files.map(0, *range(4, 8), pid=second, cgroup=_HOSTILE)
    in_use = Counter({binary: 10 + binary for binary in range(8)})
    for _ in range(4):
        files.tables.note_used(in_use)
    assert set(files.entered) == set(range(8))
    # WHEN a process of another user, or another one of this user, needs one as well
    files.map(0, 9, pid=4, cgroup=cgroup)
    files.tables.note_used(in_use + Counter({9: 1}))
    files.tables.poll()
    # THEN it has it, and the one that samples need least is lost
    assert 9 in files.entered and 0 in files.entered
    assert len(files.entered) == 8
    # AND all get on with what they have: nothing goes in and out
    for _ in range(3):
        files.tables.note_used(in_use + Counter({9: 1}))
        files.tables.poll()
        assert {0, 9} < set(files.entered)
    settled = set(files.entered)
    for _ in range(3):
        files.tables.note_used(in_use + Counter({9: 1}))
        files.tables.poll()
    assert set(files.entered) == settled
    assert files.tables.losses[LossKind.UNWIND_MEMORY_FULL] >= 1
    files.tables.close()


def test_whoever_has_much_built_waits_for_others(
    kernel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # GIVEN one user whose files are as urgent as another's, and one that both map
    files = _Files(kernel, _table(10))
    monkeypatch.setattr(files.tables._cache, "size_bytes", lambda binary: 1000)
    files.map(1, 2, 3, pid=2, cgroup=_HOSTILE)
    files.map(3, 4, pid=3, cgroup=_HONEST)
    urgency = files.tables._urgency
    assert len({urgency(binary) for binary in (1, 2, 3, 4)}) == 1
    # WHEN one of the first one's takes a minute
    monkeypatch.setattr(files.tables._cache, "take_spent_s", lambda: {1: 60.0})
    files.tables.poll()
    # THEN what others map comes first, whoever maps it as well
    assert urgency(2) < urgency(3) == urgency(4)
    # AND samples still decide among one's own
    files.tables.note_used(Counter({2: 5}))
    assert urgency(1) < urgency(2)
    files.tables.close()


def test_a_file_that_was_closed_is_of_no_use_to_those_who_had_it_mapped(
    kernel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # GIVEN files that were closed since nobody who is known maps them
    files = _Files(kernel, _table(10))
    files.map(1, 2)
    binaries: Any = files.tables._table.binaries
    closed = {number: binaries.files.pop(number) for number in (1, 5)}
    files.tables.forget_binaries(closed)
    # WHEN the mappings of a program that is over, which had them, are told late
    monkeypatch.setattr(files.tables._table, "is_current", lambda image: image.pid != 7)
    files.map(1, 2, 5, 6, pid=7)
    # THEN tables of the others are there, and nobody waits for theirs.
    assert {*files.entered} == {2, 6}
    assert files.tables.are_settled({1, 2, 5, 6})
    assert not files.tables.is_being_built(5)
    assert files.tables.table_of(5) is None
    files.tables._cache.close()
