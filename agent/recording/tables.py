# SPDX-License-Identifier: Apache-2.0
"""Brings unwind tables and mappings to the kernel half, so that it can walk any code.

A binary's table is an array of its own in the kernel, shared by all processes that map the binary;
a process's mappings are another, entered under its pid with the identity of its image: after an
exec the kernel half uses none until the new ones are there. bpf/unwind.h has the layouts.

Tables come from the cache on disk at once; one that has to be built is built by a child process,
while the recorder goes on draining and stacks are walked by frame pointer.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
from aiflame.agent.recording import abi
from aiflame.agent.recording.binaries import BinaryTable
from aiflame.agent.recording.elf_images import ElfImages
from aiflame.agent.recording.loader import Programs
from aiflame.agent.recording.processes import NO_BINARY, Mapping, ProcessImage
from aiflame.agent.recording.sysbpf import create_array
from aiflame.agent.recording.table_builder import TableBuilder
from aiflame.agent.symbols.elf import BadElf
from aiflame.agent.symbols.store import Store
from aiflame.agent.unwind.build import load_cached
from aiflame.agent.unwind.records import BadUnwindInfo
from aiflame.agent.unwind.table import UnwindTable

# Flags of the inner maps' templates in bpf/unwind.h.
_F_MMAPABLE, _F_INNER_MAP = 1 << 10, 1 << 12

# A process may have 65,530 mappings; the kernel half halves 13 times.
_MAX_MAPPINGS = 1 << 12

# libtorch_cpu has 2.6 million rows: in slices they take no memory to speak of.
_ROWS_AT_A_TIME = 1 << 16

# All tables together: twenty PyTorch processes' worth of different libraries.
MAX_MEMORY_BYTES = 256 << 20

# Each table begins with the rules NO_CFI and UNSUPPORTED, so these are their numbers everywhere.
_UNSUPPORTED_RULE_NUMBER = 1


class UnwindTables:
    """The tables and mappings in the kernel.

    Args:
        programs: Loaded programs.
        binaries: The files that targets map.
        images: Their ELF headers.
        is_current: Whether a process image is what its pid runs now.
        cache: Directory of the cache on disk, None for none.
        watch: Told of a descriptor that becomes readable when `poll` has something to do.
    """

    def __init__(
        self,
        programs: Programs,
        binaries: BinaryTable,
        images: ElfImages,
        is_current: Callable[[ProcessImage], bool],
        cache: Path | None,
        watch: Callable[[int], None],
    ) -> None:
        self._programs = programs
        self._binaries = binaries
        self._images = images
        self._is_current = is_current
        self._store = Store(cache)
        self._own_cache: tempfile.TemporaryDirectory[str] | None = None
        if cache is None or not self._store.usable:
            self._own_cache = tempfile.TemporaryDirectory(prefix="aiflame-unwind-")
            self._store = Store(Path(self._own_cache.name))
            cache = Path(self._own_cache.name)
        self._memory_left = MAX_MEMORY_BYTES
        self._slots: dict[int, int | None] = {}  # binary -> slot; None: it has no table
        self._users: dict[int, list[ProcessImage]] = {}  # binary being built -> who waits
        self._builder = TableBuilder(cache, watch)
        self._rules: dict[bytes, int] = {}
        self.problems: Counter[str] = Counter()

    def push(self, image: ProcessImage) -> None:
        """Brings a process's mappings, and the tables of what it maps as far as they exist."""
        mappings = image.mappings
        if len(mappings) > _MAX_MAPPINGS - 1:
            self.problems["too_many_mappings"] += 1
            mappings = mappings[: _MAX_MAPPINGS - 1]
        slots = np.zeros(len(mappings) + 1, abi.MAPPING_SLOT_DTYPE)
        slots[0]["start"], slots[0]["end"] = image.image, len(mappings)
        for row, mapping in zip(slots[1:], mappings, strict=True):
            row["start"], row["end"] = mapping.start, mapping.end
            row["table"] = abi.TABLES_MAX
            slot = self._slot_of(mapping, image)
            if slot is not None:
                row["table"] = slot
                row["bias"] = self._images.bias(mapping) % (1 << 64)
        try:
            with _new_array(slots.dtype.itemsize, len(slots)) as (fd, memory):
                memory[: slots.nbytes] = slots.tobytes()
                key = image.pid.to_bytes(4, "little")
                self._programs.process_mappings.update(key, fd.to_bytes(4, "little"))
        except OSError:  # the kernel has no memory for it, or the process table is full
            self.problems["mappings_not_kept"] += 1

    def forget(self, pid: int) -> None:
        """Takes a process's mappings out."""
        self._programs.process_mappings.delete(pid.to_bytes(4, "little"))

    def _slot_of(self, mapping: Mapping, image: ProcessImage) -> int | None:
        binary = mapping.binary
        if binary == NO_BINARY:
            return None
        if self.is_being_built(binary) and image not in self._users[binary]:
            self._users[binary].append(image)
        return self._slots[binary]

    def _enter_from_cache(self, binary: int) -> bool:
        """Enters a binary's table; returns False where it would have to be built first."""
        fd, elf = self._binaries.files[binary].fd, self._images.of(binary)
        self._slots[binary] = None
        if fd is None or elf is None:
            return True
        try:
            table = load_cached(fd, elf, self._store)
        except (BadElf, BadUnwindInfo):
            self.problems["bad_unwind_info"] += 1
            return True
        if table is not None:
            self._slots[binary] = self._enter(table)
        return table is not None

    def _enter(self, table: UnwindTable) -> int | None:
        """Puts a table into the kernel; None where there is no room for it."""
        pages = len(table.page_first_row) - 1
        head_words = 1 + (pages + 2) // 2
        words = head_words + (len(table) + 1) // 2
        slot = sum(known is not None for known in self._slots.values())
        if 8 * words > self._memory_left or slot >= abi.TABLES_MAX:
            self.problems["unwind_memory_full"] += 1
            return None
        try:
            with _new_array(8, words) as (fd, memory):
                halves = np.frombuffer(memory, np.uint32, 2 * words)
                halves[:2] = table.base_page, pages
                halves[2 : 3 + pages] = table.page_first_row
                self._write_rows(table, halves[2 * head_words :])
                del halves  # else the memory could not be unmapped
                key = slot.to_bytes(4, "little")
                self._programs.unwind_tables.update(key, fd.to_bytes(4, "little"))
        except OSError:
            self.problems["unwind_memory_full"] += 1
            return None
        self._memory_left -= 8 * words
        return slot

    def _write_rows(self, table: UnwindTable, halves: npt.NDArray[np.uint32]) -> None:
        """Writes the rows with the numbers that their rules have in the kernel."""
        numbers = np.array([self._rule(rule.tobytes()) for rule in table.rules], np.uint32)
        for begin in range(0, len(table), _ROWS_AT_A_TIME):
            rows = table.rows[begin : begin + _ROWS_AT_A_TIME]
            rules = numbers[rows["rule"]] << np.uint32(16)
            halves[begin : begin + len(rows)] = rules | rows["offset"]

    def _rule(self, rule: bytes) -> int:
        """Returns the number of a rule, entering it if it is new; UNSUPPORTED's past the last."""
        number = self._rules.get(rule)
        if number is None:
            number = len(self._rules)
            if number >= abi.RULES_MAX:
                self.problems["unwind_rules_full"] += 1
                return _UNSUPPORTED_RULE_NUMBER
            self._rules[rule] = number
            self._programs.unwind_rules.update(number.to_bytes(4, "little"), rule)
        return number

    def poll(self) -> None:
        """Takes in tables that were built meanwhile; never waits."""
        again: dict[int, ProcessImage] = {}
        for binary in self._builder.finished():
            users = self._users.pop(binary, [])
            if not self._enter_from_cache(binary):
                self.problems["bad_unwind_info"] += 1
            again.update((image.index, image) for image in users)
        for image in again.values():
            # Gone, or another program by now: its mappings must not take the new ones' place.
            if self._is_current(image):
                self.push(image)

    def table_of(self, binary: int) -> UnwindTable | None:
        """Returns a binary's table for a walk in Python, None where there is none in the cache."""
        fd, elf = self._binaries.files[binary].fd, self._images.of(binary)
        if fd is None or elf is None:
            return None
        try:
            return load_cached(fd, elf, self._store)
        except (BadElf, BadUnwindInfo):
            return None  # counted when it was to be entered

    def is_being_built(self, binary: int) -> bool:
        """Whether a binary's table is on its way; it is asked for if it is not in the cache."""
        if binary not in self._slots and not self._enter_from_cache(binary):
            self._users[binary] = []
            fd = self._binaries.files[binary].fd
            self._builder.ask(binary, f"/proc/{os.getpid()}/fd/{fd}")
        return binary in self._users

    def wait(self, binaries: Collection[int], deadline_ns: int) -> bool:
        """Waits for tables that are being built, until a monotonic time; returns if all are done.

        One that cannot be built is done as well.
        """
        while any(binary in self._users for binary in binaries):
            left_ns = deadline_ns - time.monotonic_ns()
            if left_ns <= 0 or not self._builder.wait(left_ns / 1e9):
                return False
            self.poll()
        return True

    def close(self) -> None:
        """Ends the builder. The kernel frees the tables with the maps that hold them."""
        self._builder.close()
        if self._own_cache is not None:
            self._own_cache.cleanup()


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
