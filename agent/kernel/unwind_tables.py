# SPDX-License-Identifier: Apache-2.0
"""Unwind tables and mappings as they lie in the kernel, within bounds.

Each table is an array map of its own, with all that it needs, and each process's mappings another;
two outer maps hold them (`outer_maps`). A slot of a table is given to another one only when no
program can see mappings any more that lead to it.
"""

from __future__ import annotations

import mmap
import os
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from aiflame.agent.kernel import abi
from aiflame.agent.kernel.descriptors import is_last_array
from aiflame.agent.kernel.loader import Programs
from aiflame.agent.kernel.outer_maps import OuterMap
from aiflame.agent.kernel.sysbpf import Map, create_array
from aiflame.agent.losses import LossKind
from aiflame.agent.unwind.table import UnwindTable

# Two pages, which most processes need, for each of a full process table.
_MAPPINGS_LIMIT_BYTES = 128 << 20
# Processes whose mappings found no room, which are counted once each as long as they are known.
_MOST_LOST = 1 << 16


class LoadedTable(NamedTuple):
    """Where a binary's table is; addresses count from its first page."""

    slot: int
    base_page: int
    pages: int


def table_bytes(table: UnwindTable) -> int:
    """Returns what a table takes in the kernel."""
    return 8 * (_page_words(table) + len(table.rules) + (len(table) + 1) // 2)


def _page_words(table: UnwindTable) -> int:
    return (len(table.page_first_row) + 1) // 2


def _mapping_bytes(slots: npt.NDArray[Any]) -> int:
    """What the mappings of a process take: whole pages, and one for the head of the array.

    (v5.5 kernel/bpf/arraymap.c, arrays that can be mapped.)
    """
    return mmap.PAGESIZE + _whole_pages(slots.nbytes)


class KernelTables:
    """What of unwind tables and mappings is in the kernel.

    Args:
        programs: Loaded programs.
        limit_bytes: Bound of all tables together.
        losses: Counts what found no room.
        mappings_limit_bytes: Bound of the mappings of all processes together.
    """

    def __init__(
        self,
        programs: Programs,
        limit_bytes: int,
        losses: Counter[LossKind],
        mappings_limit_bytes: int = _MAPPINGS_LIMIT_BYTES,
    ) -> None:
        self._inner_flags = programs.inner_flags
        self._tables = OuterMap(programs.unwind_tables)
        self._mappings = OuterMap(programs.process_mappings)
        self.free_bytes = limit_bytes
        self.free_mapping_bytes = mappings_limit_bytes
        self._losses = losses
        self.loaded: dict[int, LoadedTable] = {}
        self._bytes: dict[int, int] = {}
        self._free_slots = list(range(abi.TABLES_MAX - 1, -1, -1))
        self._mapping_bytes: dict[int, int] = {}  # by pid
        self._lost_mappings: set[int] = set()  # pids that found no room

    def go_beside(self) -> None:
        """As `OuterMap.go_beside`: from now on no change is waited for."""
        self._tables.go_beside()
        self._mappings.go_beside()

    @property
    def free_slots(self) -> int:
        """How many tables more there may be."""
        return len(self._free_slots)

    def has_room(self, size_bytes: int, tables: int = 1) -> bool:
        """Whether tables of that size together could be entered now."""
        return size_bytes <= self.free_bytes and tables <= self.free_slots

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
        fds: dict[int, int] = {}
        is_cut = False
        for binary, table in left:
            if not self.has_room(table_bytes(table)):
                continue
            try:
                array = self._new_array(8, table_bytes(table) // 8)
            except OSError:  # the kernel has no memory for it
                continue
            fill(table, array.memory.view(np.uint32))
            try:
                array.write()
            except OSError:
                os.close(array.fd)
                continue
            slot = self._free_slots.pop()
            fds[slot] = array.fd
            pages = len(table.page_first_row) - 1
            self.loaded[binary] = LoadedTable(slot, table.base_page, pages)
            self._bytes[binary] = table_bytes(table)
            self.free_bytes -= table_bytes(table)
            is_cut = is_last_array(array.fd)
            if is_cut:
                break
        self._tables.put(fds)
        if is_cut:
            self._tables.wait()
        self._settle()
        return is_cut

    def _settle(self) -> None:
        """Gives up what the kernel has refused meanwhile."""
        slots = set(self._tables.take_refused())
        if slots:
            self._return_tables([b for b, table in self.loaded.items() if table.slot in slots])
        while refused := self._mappings.take_refused():
            self._lose_mappings(refused)

    def remove(self, binaries: Collection[int]) -> None:
        """Takes tables out. No process may have mappings with them any more."""
        if not binaries:
            return
        self._mappings.wait()
        self._tables.take_out([self.loaded[binary].slot for binary in binaries])
        self._return_tables(binaries)

    def _return_tables(self, binaries: Collection[int]) -> None:
        """Gives back what tables that are not in the kernel take."""
        self._free_slots[:0] = [self.loaded.pop(binary).slot for binary in binaries]
        self.free_bytes += sum(self._bytes.pop(binary) for binary in binaries)

    def set_mappings(self, slots_by_pid: Mapping[int, npt.NDArray[Any]]) -> None:
        """Enters the mappings of processes, each with its head, as MAPPING_SLOT_DTYPE.

        A process whose mappings find no room has none, not those from before: they might lead to
        tables that are no longer there.
        """
        left = iter(slots_by_pid.items())
        while self._set_some(left):
            pass

    def _set_some(self, left: Iterator[tuple[int, npt.NDArray[Any]]]) -> bool:
        """Enters as many as there are descriptors for; returns whether there may be more."""
        fds: dict[int, int] = {}
        lost: list[int] = []
        is_cut = False
        for pid, slots in left:
            if not self._has_room_for_mappings(pid, _mapping_bytes(slots), fds):
                lost.append(pid)
                continue
            try:
                array = self._new_array(slots.dtype.itemsize, len(slots))
            except OSError:
                lost.append(pid)
                continue
            array.memory[:] = slots.view(np.uint8)
            try:
                array.write()
            except OSError:
                os.close(array.fd)
                lost.append(pid)
                continue
            fds[pid] = array.fd
            self._return_mappings(pid)
            self._mapping_bytes[pid] = _mapping_bytes(slots)
            self.free_mapping_bytes -= _mapping_bytes(slots)
            is_cut = is_last_array(array.fd)
            if is_cut:
                break
        self._mappings.put(fds)
        if is_cut:
            self._mappings.wait()
        self._lose_mappings(lost)
        self._settle()
        return is_cut

    def _has_room_for_mappings(self, pid: int, size_bytes: int, entering: Collection[int]) -> bool:
        """Whether a process's mappings find room; takes out larger ones for it, the largest first.

        Who maps the most code is the first to be walked by frame pointer.
        """
        needed_bytes = size_bytes - self._mapping_bytes.get(pid, 0) - self.free_mapping_bytes
        if needed_bytes <= 0:
            return True
        leaving = []
        for other, held_bytes in sorted(self._mapping_bytes.items(), key=lambda item: -item[1]):
            if needed_bytes <= 0 or held_bytes <= size_bytes:
                break
            if other != pid and other not in entering:
                leaving.append(other)
                needed_bytes -= held_bytes
        if needed_bytes > 0:
            return False
        self._lose_mappings(leaving)
        return True

    def _lose_mappings(self, pids: Collection[int]) -> None:
        """Takes out what finds no room, and counts each process once."""
        self._losses[LossKind.MAPPINGS_NOT_KEPT] += len(set(pids) - self._lost_mappings)
        if len(self._lost_mappings) > _MOST_LOST:
            self._lost_mappings.clear()
        self._lost_mappings.update(pids)
        self.drop_mappings(pids)

    def drop_mappings(self, pids: Collection[int]) -> None:
        """Takes the mappings of processes out, if they are there."""
        known = [pid for pid in pids if pid in self._mapping_bytes]
        self._mappings.take_out(known)
        for pid in known:
            self._return_mappings(pid)

    def _new_array(self, value_bytes: int, entries: int) -> _Array:
        return _Array(value_bytes, entries, self._inner_flags)

    def _return_mappings(self, pid: int) -> None:
        self.free_mapping_bytes += self._mapping_bytes.pop(pid, 0)

    def close(self) -> None:
        """Ends the threads. The kernel frees what the maps hold with them."""
        self._tables.close()
        self._mappings.close()


def fill(table: UnwindTable, halves: npt.NDArray[np.uint32]) -> None:
    """Writes a table as bpf/unwind.h reads it."""
    rules_at = 2 * _page_words(table)
    rows_at = rules_at + 2 * len(table.rules)
    halves[: len(table.page_first_row)] = table.page_first_row + np.uint32(rows_at)
    halves[rules_at:rows_at] = table.rules.view(np.uint32)
    halves[rows_at : rows_at + len(table)] = table.rows.view(np.uint32)


class _Array:
    """A new array map, to be filled without a system call for each entry.

    The kernel keeps it as long as another map holds it.

    Args:
        value_bytes: Of each entry.
        entries: How many.
        flags: BPF_F_*.

    Attributes:
        fd: Of the map; whoever made this closes it.
        memory: What is to be in it, as bytes, until `write` brings it there.
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
        """Ends the filling.

        Raises:
            OSError: The kernel does not take it.
        """
        if self._mapped is None:
            entries, value_bytes = self._shape
            value = np.dtype((np.void, value_bytes))
            array = Map(self.fd, np.dtype(np.uint32), value, entries)
            array.write(self.memory.view(value))
        # The tables of a process are entered together, and would all be resident here until then.
        del self.memory
        self._mapped = None


def _whole_pages(size_bytes: int) -> int:
    return -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
