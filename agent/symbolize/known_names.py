# SPDX-License-Identifier: Apache-2.0
"""Names that stay what they are from one capture to the next: of the kernel, and in files."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from aiflame.agent import kernelfs
from aiflame.agent.symbolize.recent import Recent
from aiflame.agent.symbols.frames import SourceFrame
from aiflame.agent.symbols.kallsyms import KernelSymbols, KernelSymbolsHidden

# Windows for which what is not asked for is kept, and of how many addresses: as the namer keeps
# what it makes of them.
_ADDRESSES = (300, 1 << 14)

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


class NamedAddress(NamedTuple):
    """What is at an address of a file.

    Attributes:
        frames: The functions, innermost first; () outside every symbol.
        nameless_start: Where the function begins that no symbol names, None where nobody tells.
    """

    frames: tuple[SourceFrame, ...]
    nameless_start: int | None


@dataclass(frozen=True, slots=True)
class NameNotes:
    """What was done with known names, for the process that this one is a copy of.

    Attributes:
        turns: How often one was told.
        used: What was known before and asked for, by file and address.
        new: What was not.
        gaps: Addresses that are in none of the kernel's functions.
    """

    turns: int
    used: Collection[tuple[int, int]]
    new: Mapping[tuple[int, int], NamedAddress]
    gaps: Collection[int]


@dataclass(slots=True)
class _Journal:
    """What a copy does, from its beginning on."""

    turns: int = 0
    used: set[tuple[int, int]] = field(default_factory=set)
    new: set[tuple[int, int]] = field(default_factory=set)
    gaps: set[int] = field(default_factory=set)


class KnownNames:
    """What was asked of others once, for all captures that one process makes after another.

    Names in files are told by number of the file and address. Numbers are those of one recorder,
    which gives none of them twice.

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
        self._of_files: Recent[tuple[int, int], NamedAddress] = Recent(*_ADDRESSES)
        self._began_s = time.monotonic()
        self._load = load
        self._modules = modules
        self._symbols: KernelSymbols | None = None
        self._loaded_s = -math.inf
        self._loaded_modules: frozenset[tuple[str, ...]] = frozenset()
        self._gaps: set[int] = set()
        self._has_gaps = False

    def __contains__(self, address: tuple[int, int]) -> bool:
        return address in self._of_files

    def find(self, address: tuple[int, int]) -> NamedAddress | None:
        """Returns what is at an address of a file, None where that is not known."""
        found = self._of_files.find(address)
        if found is not None and self._journal is not None:
            self._journal.used.add(address)
        return found

    def keep(self, address: tuple[int, int], named: NamedAddress) -> None:
        """Takes note of what is at an address of a file."""
        self._of_files.keep(address, named)
        if self._journal is not None:
            self._journal.new.add(address)

    def turn(self) -> None:
        """Tells that a window is over, or a part of one."""
        self._of_files.turn()
        if self._journal is not None:
            self._journal.turns += 1
        if time.monotonic() - self._began_s > _NAMES_S:
            self._of_files = Recent(*_ADDRESSES)
            self._began_s = time.monotonic()

    def begin_notes(self) -> None:
        """From now on it is the copy's of a process that has the same, and reads no list."""
        self._journal = _Journal()

    def notes(self) -> NameNotes:
        """Returns what was done since `begin_notes`, as far as it is still known."""
        journal = self._journal or _Journal()
        found = {address: self._of_files.find(address) for address in journal.new}
        new = {address: named for address, named in found.items() if named is not None}
        return NameNotes(journal.turns, journal.used - journal.new, new, journal.gaps)

    def learn(self, notes: NameNotes) -> None:
        """Takes in what a copy of this process has done."""
        for _ in range(notes.turns):
            self.turn()
        for address in notes.used:
            self.find(address)
        for address, named in notes.new.items():
            self.keep(address, named)
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
