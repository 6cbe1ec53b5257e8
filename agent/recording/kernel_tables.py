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
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from aiflame.agent.recording import abi
from aiflame.agent.recording.loader import Programs
from aiflame.agent.recording.sysbpf import create_array
from aiflame.agent.unwind.table import UnwindTable

# Flags of the inner maps' templates in bpf/unwind.h.
_F_MMAPABLE, _F_INNER_MAP = 1 << 10, 1 << 12

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
        with contextlib.ExitStack() as arrays:
            slots: dict[int, int] = {}
            for binary, table in tables.items():
                if not self.has_room(table_bytes(table)):
                    continue
                try:
                    fd, memory = arrays.enter_context(_new_array(8, table_bytes(table) // 8))
                except OSError:  # the kernel has no memory for it
                    continue
                self._fill(table, np.frombuffer(memory, np.uint32, table_bytes(table) // 4))
                slot = self._free_slots.pop()
                slots[slot] = fd
                pages = len(table.page_first_row) - 1
                self.places[binary] = TablePlace(slot, table.base_page, pages)
                self._bytes[binary] = table_bytes(table)
                self.free_bytes -= table_bytes(table)
            self._programs.unwind_tables.update_many(slots)

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
        with contextlib.ExitStack() as arrays:
            fds: dict[int, int] = {}
            for pid, slots in slots_by_pid.items():
                self._return_mappings(pid)
                try:
                    array = _new_array(slots.dtype.itemsize, len(slots))
                    fd, memory = arrays.enter_context(array)
                except OSError:
                    self._problems["mappings_not_kept"] += 1
                    continue
                memory[: slots.nbytes] = slots.tobytes()
                fds[pid] = fd
                self._mapping_bytes[pid] = slots.nbytes
                self.free_bytes -= slots.nbytes
            entered = self._programs.process_mappings.update_many(fds)
            self._problems["mappings_not_kept"] += len(fds) - entered

    def drop_mappings(self, pids: Collection[int]) -> None:
        """Takes the mappings of processes out, if they are there."""
        known = [pid for pid in pids if pid in self._mapping_bytes]
        self._programs.process_mappings.delete_many(known)
        for pid in known:
            self._return_mappings(pid)

    def _return_mappings(self, pid: int) -> None:
        self.free_bytes += self._mapping_bytes.pop(pid, 0)


@contextlib.contextmanager
def _new_array(value_bytes: int, entries: int) -> Iterator[tuple[int, mmap.mmap]]:
    """Yields a new array map and its memory, to be filled without a system call for each entry.

    The kernel keeps it as long as another map holds it.
    """
    page = mmap.PAGESIZE
    fd = create_array(value_bytes, entries, _F_MMAPABLE | _F_INNER_MAP)
    try:
        with mmap.mmap(fd, (value_bytes * entries + page - 1) // page * page) as memory:
            yield fd, memory
    finally:
        os.close(fd)
