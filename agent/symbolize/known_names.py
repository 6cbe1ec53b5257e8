# SPDX-License-Identifier: Apache-2.0
"""Names that stay what they are from one capture to the next: of the kernel, and in files."""

from __future__ import annotations

import contextlib
import math
import time
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from aiflame.agent import kernelfs
from aiflame.agent.symbolize.recent import Recent
from aiflame.agent.symbols.frames import Range, SourceFrame
from aiflame.agent.symbols.kallsyms import KernelSymbols, KernelSymbolsHidden

# Windows for which what is not asked for is kept, and of how many functions or lines: as the namer
# keeps what it makes of addresses.
_RANGES = (300, 1 << 14)

# The list takes 0.1 s to read. Modules tell that they came or went; BPF programs do not.
_LIST_S = 600.0
# An address that nothing in the list covers may be of a program that is new; one that the next list
# does not have either is of one that has gone.
_WITH_GAPS_S = 120.0
_MOST_GAPS = 1 << 14
# A file may be written over where it is, and what could not be read be there later.
_NAMES_S = 600.0
# Of 300 modules it has 20 KB.
_MODULES_BYTES = 1 << 20


def _loaded(modules: str) -> frozenset[tuple[str, ...]]:
    """Returns names, sizes, states and addresses; how often they are used changes all the time.

    A line is `name size references users state address` (kernel/module/procfs.c m_show, v6.1).
    """
    rows = map(str.split, modules.splitlines())
    return frozenset((*row[:2], *row[4:6]) for row in rows)


class NamedRange(NamedTuple):
    """What is at some addresses of a file, which is the same at all of them.

    Attributes:
        addresses: Which; those of a function that no symbol names begin where it does.
        frames: The functions, innermost first; () for such a one.
    """

    addresses: Range
    frames: tuple[SourceFrame, ...]


# Of a file's number, and where the addresses begin.
RangeKey = tuple[int, int]


class _NamedRanges:
    """What is known of files, found by any address; what nobody asks for goes."""

    def __init__(self) -> None:
        self._recent: Recent[RangeKey, NamedRange] = Recent(*_RANGES, leaving=self._forget)
        self._begins: dict[int, list[int]] = {}  # those of each file, sorted

    def find(self, file: int, address: int) -> NamedRange | None:
        begins = self._begins.get(file, ())
        at = bisect_right(begins, address)
        found = self._recent.find((file, begins[at - 1])) if at else None
        return found if found is not None and address < found.addresses.end else None

    def keep(self, file: int, named: NamedRange) -> None:
        key = file, named.addresses.begin
        if key not in self._recent:
            insort(self._begins.setdefault(file, []), named.addresses.begin)
        self._recent.keep(key, named)

    def at(self, key: RangeKey) -> NamedRange | None:
        return self._recent.find(key)

    def turn(self) -> None:
        self._recent.turn()

    def _forget(self, leaving: Mapping[RangeKey, NamedRange]) -> None:
        for file, begin in leaving:
            begins = self._begins[file]
            del begins[bisect_left(begins, begin)]
            if not begins:
                del self._begins[file]


@dataclass(frozen=True, slots=True)
class NameNotes:
    """What was done with known names, for the process that this one is a copy of.

    Attributes:
        turns: How often one was told.
        used: What was known before and asked for.
        new: What was not.
        gaps: Addresses that are in none of the kernel's functions.
    """

    turns: int
    used: Collection[RangeKey]
    new: Mapping[RangeKey, NamedRange]
    gaps: Collection[int]


@dataclass(slots=True)
class _Journal:
    """What a copy does, from its beginning on."""

    turns: int = 0
    used: set[RangeKey] = field(default_factory=set)
    new: set[RangeKey] = field(default_factory=set)
    gaps: set[int] = field(default_factory=set)


class KnownNames:
    """What was asked of others once, for all captures that one process makes after another.

    Files are told by their numbers, which are those of one recorder: it gives none of them twice.

    Args:
        load: Reads the kernel's list.
        modules: Returns /proc/modules.
    """

    def __init__(
        self,
        load: Callable[[], KernelSymbols] = KernelSymbols.load,
        modules: Callable[[], str] = lambda: kernelfs.read_text("/proc/modules", _MODULES_BYTES),
    ) -> None:
        self._journal: _Journal | None = None
        self._of_files = _NamedRanges()
        self._began_s = time.monotonic()
        self._load = load
        self._modules = modules
        self._symbols: KernelSymbols | None = None
        self._loaded_s = -math.inf
        self._loaded_modules: frozenset[tuple[str, ...]] = frozenset()
        self._gaps: set[int] = set()
        self._has_gaps = False

    def find(self, file: int, address: int) -> NamedRange | None:
        """Returns what is at an address of a file, None where that is not known."""
        found = self._of_files.find(file, address)
        if found is not None and self._journal is not None:
            self._journal.used.add((file, found.addresses.begin))
        return found

    def keep(self, file: int, named: NamedRange) -> None:
        """Takes note of what is at addresses of a file."""
        self._of_files.keep(file, named)
        if self._journal is not None:
            self._journal.new.add((file, named.addresses.begin))

    def turn(self) -> None:
        """Tells that a window is over, or a part of one."""
        self._of_files.turn()
        if self._journal is not None:
            self._journal.turns += 1
        if time.monotonic() - self._began_s > _NAMES_S:
            self._of_files = _NamedRanges()
            self._began_s = time.monotonic()

    def begin_notes(self) -> None:
        """From now on it is the copy's of a process that has the same, and reads no list."""
        self._journal = _Journal()

    def notes(self) -> NameNotes:
        """Returns what was done since `begin_notes`, as far as it is still known."""
        journal = self._journal or _Journal()
        found = {key: self._of_files.at(key) for key in journal.new}
        new = {key: named for key, named in found.items() if named is not None}
        return NameNotes(journal.turns, journal.used - journal.new, new, journal.gaps)

    def learn(self, notes: NameNotes) -> None:
        """Takes in what a copy of this process has done."""
        for _ in range(notes.turns):
            self.turn()
        for key in notes.used:
            self.find(*key)
        for (file, _), named in notes.new.items():
            self.keep(file, named)
        for gap in notes.gaps:
            self.tell_gap(gap)

    def kernel(self) -> KernelSymbols | None:
        """Returns the kernel's functions, None where it hides their addresses."""
        if self._journal is not None:
            return self._symbols
        modules = _loaded(self._modules())
        age_s = time.monotonic() - self._loaded_s
        is_old = modules != self._loaded_modules or age_s > _LIST_S
        if is_old:
            self._gaps.clear()
        if is_old or (self._has_gaps and age_s > _WITH_GAPS_S):
            self._loaded_s, self._loaded_modules, self._has_gaps = time.monotonic(), modules, False
            self._symbols = None  # never two at once: each has some MB
            with contextlib.suppress(KernelSymbolsHidden):
                self._symbols = self._load()
        return self._symbols

    def tell_gap(self, address: int) -> None:
        """Tells that an address is in none of the kernel's functions."""
        if address not in self._gaps and len(self._gaps) < _MOST_GAPS:
            self._gaps.add(address)
            self._has_gaps = True
            if self._journal is not None:
                self._journal.gaps.add(address)
