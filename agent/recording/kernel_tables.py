# SPDX-License-Identifier: Apache-2.0
"""Unwind tables and mappings as they lie in the kernel, within a bound.

Each table is an array map of its own, and each process's mappings another; two outer maps hold
them. After a change of an outer map the kernel waits until no program can see what was there before
(15 ms on a small machine), so changes come in batches, and a slot whose mappings were taken out
first can be given to another table at once.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from aiflame.agent.recording import abi
from aiflame.agent.recording.descriptors import is_last_array
from aiflame.agent.recording.loader import Programs
from aiflame.agent.recording.sysbpf import Map, create_array
from aiflame.agent.unwind.table import UnwindTable

# libtorch_cpu has 2.6 million rows: in slices they take no memory to speak of.
_ROWS_AT_A_TIME = 1 << 16

# Each table begins with the rules NO_CFI and UNSUPPORTED, so these are their numbers everywhere.
_UNSUPPORTED_RULE_NUMBER = 1


class TablePlace(NamedTuple):
    """Where a binary's table is; addresses count from its first page."""

    slot: int
    base_page: int
    pages: int


def table_bytes(table: UnwindTable) -> int:
    """Returns what a table takes in the kernel."""
    return 8 * (_index_words(table) + (len(table) + 1) // 2)


def _index_words(table: UnwindTable) -> int:
    return (len(table.page_first_row) + 1) // 2


class KernelTables:
    """What of unwind tables and mappings is in the kernel.

    Args:
        programs: Loaded programs.
        limit_bytes: Bound of all arrays together.
        problems: Counts what found no room, by name.
    """

    def __init__(self, programs: Programs, limit_bytes: int, problems: Counter[str]) -> None:
        self._programs = programs
        self.free_bytes = limit_bytes
        self._problems = problems
        self.places: dict[int, TablePlace] = {}
        self._bytes: dict[int, int] = {}
        self._free_slots = list(range(abi.TABLES_MAX - 1, -1, -1))
        self._mapping_bytes: dict[int, int] = {}
        self._rules: dict[bytes, int] = {}

    def has_room(self, size_bytes: int) -> bool:
        """Whether a table of that size could be entered now."""
        return size_bytes <= self.free_bytes and bool(self._free_slots)

    def size_bytes(self, binary: int) -> int:
        """Returns what an entered table takes."""
        return self._bytes[binary]

    def enter(self, tables: Mapping[int, UnwindTable]) -> None:
        """Puts tables into the kernel, by binary; those for which there is no room are left out."""
        left = iter(tables.items())
        while self._enter_some(left):
            pass

    def _enter_some(self, left: Iterator[tuple[int, UnwindTable]]) -> bool:
        """Puts in as many as there are descriptors for; returns whether there may be more."""
        with contextlib.ExitStack() as arrays:
            slots: dict[int, int] = {}
            is_cut = False
            for binary, table in left:
                if not self.has_room(table_bytes(table)):
                    continue
                try:
                    array = arrays.enter_context(self._new_array(8, table_bytes(table) // 8))
                    self._fill(table, array.memory.view(np.uint32))
                    array.write()
                except OSError:  # the kernel has no memory for it
                    continue
                slot = self._free_slots.pop()
                slots[slot] = array.fd
                pages = len(table.page_first_row) - 1
                self.places[binary] = TablePlace(slot, table.base_page, pages)
                self._bytes[binary] = table_bytes(table)
                self.free_bytes -= table_bytes(table)
                is_cut = is_last_array(array.fd)
                if is_cut:
                    break
            self._programs.unwind_tables.update_many(slots)
        return is_cut

    def _fill(self, table: UnwindTable, halves: npt.NDArray[np.uint32]) -> None:
        halves[: len(table.page_first_row)] = table.page_first_row
        rows_at = 2 * _index_words(table)
        numbers = np.array([self._rule(rule.tobytes()) for rule in table.rules], np.uint32)
        for begin in range(0, len(table), _ROWS_AT_A_TIME):
            rows = table.rows[begin : begin + _ROWS_AT_A_TIME]
            rules = numbers[rows["rule"]] << np.uint32(16)
            at = rows_at + begin
            halves[at : at + len(rows)] = rules | rows["offset"]

    def _rule(self, rule: bytes) -> int:
        """Returns the number of a rule, entering it if it is new; UNSUPPORTED's past the last."""
        number = self._rules.get(rule)
        if number is None:
            number = len(self._rules)
            if number >= abi.RULES_MAX:
                self._problems["unwind_rules_full"] += 1
                return _UNSUPPORTED_RULE_NUMBER
            self._rules[rule] = number
            self._programs.unwind_rules.update(number.to_bytes(4, "little"), rule)
        return number

    def remove(self, binaries: Collection[int]) -> None:
        """Takes tables out. No process may have mappings with them any more."""
        slots = [self.places.pop(binary).slot for binary in binaries]
        self._programs.unwind_tables.delete_many(slots)
        self._free_slots[:0] = slots
        self.free_bytes += sum(self._bytes.pop(binary) for binary in binaries)

    def set_mappings(self, slots_by_pid: Mapping[int, npt.NDArray[Any]]) -> None:
        """Enters the mappings of processes, each with its head, as MAPPING_SLOT_DTYPE."""
        left = iter(slots_by_pid.items())
        while self._set_some(left):
            pass

    def _set_some(self, left: Iterator[tuple[int, npt.NDArray[Any]]]) -> bool:
        """Enters as many as there are descriptors for; returns whether there may be more."""
        with contextlib.ExitStack() as arrays:
            fds: dict[int, int] = {}
            is_cut = False
            for pid, slots in left:
                self._return_mappings(pid)
                try:
                    size_bytes = slots.dtype.itemsize
                    array = arrays.enter_context(self._new_array(size_bytes, len(slots)))
                    array.memory[:] = slots.view(np.uint8)
                    array.write()
                except OSError:
                    self._problems["mappings_not_kept"] += 1
                    continue
                fds[pid] = array.fd
                self._mapping_bytes[pid] = slots.nbytes
                self.free_bytes -= slots.nbytes
                is_cut = is_last_array(array.fd)
                if is_cut:
                    break
            entered = self._programs.process_mappings.update_many(fds)
            self._problems["mappings_not_kept"] += len(fds) - entered
        return is_cut

    def drop_mappings(self, pids: Collection[int]) -> None:
        """Takes the mappings of processes out, if they are there."""
        known = [pid for pid in pids if pid in self._mapping_bytes]
        self._programs.process_mappings.delete_many(known)
        for pid in known:
            self._return_mappings(pid)

    def _new_array(self, value_bytes: int, entries: int) -> _Array:
        return _Array(value_bytes, entries, self._programs.inner_flags)

    def _return_mappings(self, pid: int) -> None:
        self.free_bytes += self._mapping_bytes.pop(pid, 0)


class _Array:
    """A new array map, to be filled without a system call for each entry.

    The kernel keeps it as long as another map holds it.

    Args:
        value_bytes: Of each entry.
        entries: How many.
        flags: BPF_F_*.

    Attributes:
        fd: Of the map.
        memory: What is to be in it, as bytes: `write` brings there what is not there already.
    """

    def __init__(self, value_bytes: int, entries: int, flags: int) -> None:
        self.fd = create_array(value_bytes, entries, flags)
        self._shape = entries, value_bytes
        size_bytes = value_bytes * entries
        self.memory: npt.NDArray[np.uint8]
        try:
            self._mapped: mmap.mmap | None = mmap.mmap(self.fd, _whole_pages(size_bytes))
        except OSError:
            self._mapped = None
            self.memory = np.zeros(size_bytes, np.uint8)
        else:
            self.memory = np.frombuffer(self._mapped, np.uint8, size_bytes)

    def write(self) -> None:
        """Raises OSError where the kernel does not take it."""
        if self._mapped is None:
            entries, value_bytes = self._shape
            value = np.dtype((np.void, value_bytes))
            array = Map(self.fd, np.dtype(np.uint32), value, entries)
            array.write(self.memory.view(value))

    def __enter__(self) -> _Array:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self.fd)


def _whole_pages(size_bytes: int) -> int:
    return -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
