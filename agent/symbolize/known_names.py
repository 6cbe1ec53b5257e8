# SPDX-License-Identifier: Apache-2.0
"""Names that stay what they are from one capture to the next: of the kernel, and in files."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
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


class KnownNames:
    """What was asked of others once, for all captures that one process makes after another.

    Args:
        load: Reads the kernel's list.
        modules: Returns /proc/modules.

    Attributes:
        of_files: By number of the file and address. Numbers are those of one recorder, which gives
            none of them twice.
    """

    def __init__(
        self,
        load: Callable[[], KernelSymbols] = KernelSymbols.load,
        modules: Callable[[], str] = lambda: kernelfs.read_text("/proc/modules", _MODULES_BYTES),
    ) -> None:
        self.of_files: Recent[tuple[int, int], NamedAddress] = Recent(*_ADDRESSES)
        self._began_s = time.monotonic()
        self._load = load
        self._modules = modules
        self._symbols: KernelSymbols | None = None
        self._loaded_s = -math.inf
        self._loaded_modules: frozenset[tuple[str, ...]] = frozenset()
        self._gaps: set[int] = set()
        self._has_gaps = False

    def turn(self) -> None:
        """Tells that a window is over."""
        self.of_files.turn()
        if time.monotonic() - self._began_s > _NAMES_S:
            self.of_files = Recent(*_ADDRESSES)
            self._began_s = time.monotonic()

    def kernel(self) -> KernelSymbols | None:
        """Returns the kernel's functions, None where it hides their addresses."""
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
