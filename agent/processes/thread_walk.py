# SPDX-License-Identifier: Apache-2.0
"""Walks stacks of sleeping threads, as the kernel half walks those of threads that it meets.

By the same tables, to the same ends, and in the form in which the kernel half stores frames.
Threads of a pool sleep in the same few functions, so what a table says of an address is kept: then
a frame costs a few microseconds.

Not here: where registers and memory come from, and whether they are of one moment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from aiflame.agent.inspector.memory_worker import PAGE_BYTES
from aiflame.agent.model.profile import StopReason
from aiflame.agent.processes.elf_images import ElfImages
from aiflame.agent.processes.table import NO_BINARY, Mapping, ProcessImage
from aiflame.agent.processes.threads import ThreadRegisters
from aiflame.agent.python.memory import MAX_ADDRESS
from aiflame.agent.unwind import walk
from aiflame.agent.unwind.table import UnwindTable
from aiflame.agent.unwind.x86_64 import NO_CFI_RULE, Rule

# Answers kept of one binary: what a target with odd stacks may make us hold, some 30 MB.
_MAX_KEPT_RULES = 1 << 16

# Answers of all binaries that are kept when tables are let go of, 4 MB: to load a table takes
# milliseconds, and threads of a host sleep in the same few functions again and again.
_MOST_ANSWERS = 1 << 13
# The same of files, most of which nobody maps any more by then.
_MOST_FILES = 1 << 12

# Code that heuristics look at, of one process: 1 MB.
_MAX_CODE_PAGES = 256

# The stop reasons that the kernel half gives the same stacks.
_ENDS = {
    walk.WalkEnd.ROOTED: StopReason.ROOTED_BY_TABLE,
    walk.WalkEnd.NO_TABLE: StopReason.NO_TABLE,
    walk.WalkEnd.UNREADABLE: StopReason.UNREADABLE,
    walk.WalkEnd.TOO_DEEP: StopReason.TOO_DEEP,
    walk.WalkEnd.UNSUPPORTED: StopReason.UNSUPPORTED_RULE,
    walk.WalkEnd.BAD_ADDRESS: StopReason.NO_FRAME_POINTER,
}


class TableSource(Protocol):
    """Where tables come from; UnwindTables is one."""

    def table_of(self, binary: int) -> UnwindTable | None:
        """Returns a binary's table, None where there is none now."""

    def is_being_built(self, binary: int) -> bool:
        """Whether a binary's table is on its way; asks for it if nobody has."""


class WalkMemory(Protocol):
    """Memory of a thread, as walks read it; StackMemory is one."""

    def read_u64(self, address: int) -> int | None:
        """Returns a word of its stack, None where there is none to be read."""

    def page_of_code(self, start: int) -> bytes:
        """Returns a page of code, or less of it where it ends."""


@dataclass(frozen=True, slots=True)
class WalkedThread:
    """The user half of a stack.

    Attributes:
        addresses: Leaf first; all but the leaf are looked up one byte before.
        end: Why there are no more.
        lacks: Binaries whose tables were asked for and are still being built.
        crosses_signal: A signal interrupted one of the frames, and its handler has not returned.
    """

    addresses: tuple[int, ...]
    end: StopReason
    lacks: frozenset[int]
    crosses_signal: bool = False


class WalkBegin(NamedTuple):
    """Where a walk begins.

    Attributes:
        registers: At its first frame.
        is_exact: That frame's instruction pointer is not a return address.
        depth: Frames up to that one, and with it; 1: it is the leaf.
    """

    registers: walk.Registers
    is_exact: bool
    depth: int


class _Rules:
    """What one binary's table says, asked once for each address."""

    def __init__(self, binary: int, tables: TableSource, lacking: set[int]) -> None:
        self._binary = binary
        self._tables = tables
        self._lacking = lacking
        self._table: UnwindTable | None = None
        self._is_final = False
        self._kept: dict[int, Rule] = {}

    def lookup(self, address: int) -> Rule:
        """The rule for an instruction at a virtual address of the binary."""
        rule = self._kept.get(address)
        return self._ask(address) if rule is None else rule

    def _ask(self, address: int) -> Rule:
        if not self._is_final:
            if self._tables.is_being_built(self._binary):
                self._lacking.add(self._binary)
                return NO_CFI_RULE
            self._table = self._tables.table_of(self._binary)
            self._is_final = True
        rule = NO_CFI_RULE if self._table is None else self._table.lookup(address)
        if len(self._kept) >= _MAX_KEPT_RULES:
            self._kept.clear()
        self._kept[address] = rule
        return rule

    def let_go(self) -> int:
        """Lets go of the table; returns how many of its answers are kept."""
        if self._table is None:  # another time there may be one
            self._kept.clear()
        self._table, self._is_final = None, False
        return len(self._kept)


class _ProcessWalker:
    """Walks stacks of one process while its mappings are these."""

    def __init__(
        self, known: Sequence[Mapping], mappings: list[walk.Mapping], max_frames: int
    ) -> None:
        self.known = known
        self._memory: WalkMemory | None = None
        self._code: dict[int, bytes] = {}  # pages
        self._walker = walk.ReplayWalker(mappings, self._read, max_frames, self._read_code)

    def _read(self, address: int) -> int | None:
        return None if self._memory is None else self._memory.read_u64(address)

    def _read_code(self, address: int) -> int | None:
        """Reads a word of code, which only heuristics look at."""
        if not 0 <= address < MAX_ADDRESS:  # words of a stack may be anything
            return None
        offset = address % PAGE_BYTES
        page = self._code.get(address - offset, b"")
        if not page and self._memory is not None:
            page = self._memory.page_of_code(address - offset)
            if len(self._code) >= _MAX_CODE_PAGES:
                self._code.clear()
            if page:
                self._code[address - offset] = page
        return int.from_bytes(page[offset : offset + 8], "little") if len(page) > offset else None

    def walk(self, begin: WalkBegin, memory: WalkMemory) -> walk.Walk:
        self._memory = memory
        try:
            return self._walker.resume(begin.registers, begin.is_exact, begin.depth)
        finally:
            self._memory = None


class StackWalker:
    """Walks stacks of any process.

    Args:
        tables: Unwind tables.
        images: ELF headers of the binaries.
        max_frames: Where a walk is given up.
    """

    def __init__(
        self, tables: TableSource, images: ElfImages, max_frames: int = walk.MAX_FRAMES
    ) -> None:
        self._tables = tables
        self._images = images
        self._max_frames = max_frames
        self._rules: dict[int, _Rules] = {}
        self._walkers: dict[int, _ProcessWalker] = {}
        self._lacking: set[int] = set()

    def walk_thread(
        self, image: ProcessImage, registers: ThreadRegisters, memory: WalkMemory
    ) -> WalkedThread:
        """Follows the stack of a thread with these registers to its end."""
        start = walk.Registers(
            registers.instruction_pointer,
            registers.stack_pointer,
            registers.frame_pointer,
            registers.base_pointer,
        )
        return self.walk_on(image, WalkBegin(start, is_exact=True, depth=1), memory)

    def walk_on(self, image: ProcessImage, begin: WalkBegin, memory: WalkMemory) -> WalkedThread:
        """Follows a stack to its end from the last frame on that is known, which is the first."""
        self._lacking.clear()
        found = self._walker_of(image).walk(begin, memory)
        leaf, *callers = found.frames
        # An exact caller is put where the look-up one byte before finds it (bpf/store.h).
        addresses = (
            leaf.address + (leaf.is_exact and begin.depth > 1),
            *(caller.address + caller.is_exact for caller in callers),
        )
        end = _ENDS[found.end]
        is_heuristic = any(frame.found_by is walk.FoundBy.HEURISTIC for frame in callers)
        if end is StopReason.ROOTED_BY_TABLE and is_heuristic:
            end = StopReason.ROOTED_BY_HEURISTIC
        interrupted = any(caller.is_exact for caller in callers)
        return WalkedThread(addresses, end, frozenset(self._lacking), interrupted)

    def _walker_of(self, image: ProcessImage) -> _ProcessWalker:
        walker = self._walkers.get(image.index)
        # They are never changed, only replaced by others.
        if walker is None or walker.known is not image.mappings:
            mappings = [self._mapping(mapping) for mapping in image.mappings]
            walker = _ProcessWalker(image.mappings, mappings, self._max_frames)
            self._walkers[image.index] = walker
        return walker

    def _mapping(self, mapping: Mapping) -> walk.Mapping:
        binary = mapping.binary
        if binary == NO_BINARY:
            return walk.Mapping(mapping.start, mapping.end, 0, None)
        rules = self._rules.get(binary)
        if rules is None:
            rules = self._rules[binary] = _Rules(binary, self._tables, self._lacking)
        return walk.Mapping(mapping.start, mapping.end, self._images.bias(mapping), rules)

    def forget(self) -> None:
        """Lets go of the tables; they are loaded again when they are needed."""
        self._walkers.clear()
        answers = sum(rules.let_go() for rules in self._rules.values())
        if answers > _MOST_ANSWERS or len(self._rules) > _MOST_FILES:
            self._rules.clear()
