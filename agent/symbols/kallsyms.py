# SPDX-License-Identifier: Apache-2.0
"""Kernel addresses to function names, from /proc/kallsyms.

The list has no sizes, so a function reaches to the next one; but not over a gap that no code
fills, and never past the end marks that the linker leaves. Modules and BPF programs are in the
list while they are loaded: load it again after one came or went.
"""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from aiflame.agent import kernelfs
from aiflame.agent.errors import EnvironmentUnfit
from aiflame.agent.symbols.frames import clean_name
from aiflame.agent.symbols.intervals import Disjoint, find

U64 = npt.NDArray[np.uint64]

# nm(1): text, weak, and indirect functions; upper case is global. A global name wins an address.
_TYPE_SCORE = {b"T": 3, b"W": 2, b"t": 1, b"w": 1, b"i": 1}
# The longest kernel functions have some 100 KB; what follows a longer gap is another mapping.
_MAX_GAP_BYTES = 2 * 1024 * 1024
_MAX_LAST_BYTES = 1024 * 1024
# Linker marks, and their position-independent aliases (`__pi_`): no functions. The ends also close
# the function before them.
_MARKS = frozenset(
    b"_text _stext _etext _sinittext _einittext __init_begin __init_end _end".split()
)
_KERNEL = b"[kernel]"
_MAX_MODULES = 65_535


class KernelSymbolsHidden(EnvironmentUnfit):
    """The kernel shows every address as zero (kernel.kptr_restrict)."""


class KernelName(NamedTuple):
    """A kernel function and its module: "[kernel]", a module's name, or "bpf"."""

    name: str
    module: str


class KernelSymbols:
    """Functions of the kernel, its modules and its BPF programs, by address.

    Names stay in one block of bytes until they are asked for: 120,000 Python strings would be
    half of the recorder's memory.
    """

    def __init__(self, ranges: Disjoint, list_: _List) -> None:
        self._ranges = ranges
        self._list = list_

    def __len__(self) -> int:
        return len(self._ranges.starts)

    @classmethod
    def load(cls, path: str | Path = "/proc/kallsyms") -> KernelSymbols:
        """Read the kernel's symbol list.

        Raises:
            KernelSymbolsHidden: All addresses are zero.
            EnvironmentUnfit: The list cannot be read, or holds no function.
        """
        found = _List()
        try:
            for line in kernelfs.lines(path):
                found.add(line)
        except OSError as error:
            raise EnvironmentUnfit(f"cannot read {path}: {error.strerror}") from error
        if not found.addresses:
            raise EnvironmentUnfit(f"{path} holds no kernel function")
        if not any(found.addresses):
            raise KernelSymbolsHidden(
                "kernel function names are hidden: kernel.kptr_restrict",
                "sudo sysctl kernel.kptr_restrict=1",
            )
        return cls(_ranges(found), found)

    def lookup(self, addresses: U64) -> list[KernelName | None]:
        """Names for kernel addresses, shape (n,); None outside every function."""
        found = find(self._ranges, addresses)
        rows = self._ranges.rows[found].tolist() if len(self) else [0] * len(found)
        return [
            self._list.name(row) if hit >= 0 else None
            for hit, row in zip(found.tolist(), rows, strict=True)
        ]


class _List:
    """The columns of the list, one entry per function or mark."""

    def __init__(self) -> None:
        self.addresses = array("Q")
        self.scores = array("b")
        self._name_ends = array("Q")
        self._names = bytearray()
        self._module_of = array("H")
        self._modules: dict[bytes, int] = {_KERNEL: 0}

    def add(self, line: bytes) -> None:
        """Take one line, `address type name`, then a tab and `[module]`; others are skipped."""
        fields = line.split()
        if len(fields) < 3 or fields[1] not in _TYPE_SCORE:
            return
        try:
            address = int(fields[0], 16)
        except ValueError:
            return
        if not 0 <= address < 1 << 64:
            return
        name = fields[2]
        module = fields[3].strip(b"[]") if len(fields) > 3 else _KERNEL
        self.addresses.append(address)
        mark = name.removeprefix(b"__pi_") in _MARKS
        self.scores.append(0 if mark else _TYPE_SCORE[fields[1]])
        self._names += name
        self._name_ends.append(len(self._names))
        # A kernel has a few hundred modules; more than 65,535 cannot be loaded.
        number = self._modules.setdefault(module, len(self._modules))
        self._module_of.append(min(number, _MAX_MODULES))

    def raw_name(self, row: int) -> bytes:
        return bytes(self._names[self._name_ends[row - 1] if row else 0 : self._name_ends[row]])

    def lengths(self) -> npt.NDArray[np.int64]:
        return np.diff(np.frombuffer(self._name_ends, dtype=np.uint64).astype(np.int64), prepend=0)

    def name(self, row: int) -> KernelName:
        module = list(self._modules)[self._module_of[row]]
        name = self.raw_name(row).decode("utf-8", "replace")
        return KernelName(clean_name(name), clean_name(module.decode("utf-8", "replace")))


def _ranges(found: _List) -> Disjoint:
    """Each address once, under its best name, reaching to the next."""
    addresses = np.frombuffer(found.addresses, dtype=np.uint64)
    scores = np.frombuffer(found.scores, dtype=np.int8).astype(np.int64)
    lengths = found.lengths()
    # Of several names at one address: global before local, then the shortest, then by alphabet.
    order = np.lexsort((lengths, -scores, addresses))
    starts, first, counts = np.unique(addresses[order], return_index=True, return_counts=True)
    rows = order[first]
    for group in np.flatnonzero(counts > 1).tolist():
        tied = order[first[group] : first[group] + counts[group]]
        best = (scores[tied] == scores[tied[0]]) & (lengths[tied] == lengths[tied[0]])
        rows[group] = min(tied[best].tolist(), key=found.raw_name)
    ends = np.empty_like(starts)
    room = np.uint64(2**64 - 1) - starts
    ends[:-1] = starts[1:]
    ends[-1] = starts[-1] + min(np.uint64(_MAX_LAST_BYTES), room[-1])
    far = np.flatnonzero(ends - starts > np.uint64(_MAX_GAP_BYTES))
    ends[far] = starts[far] + np.uint64(_MAX_LAST_BYTES)
    real = scores[rows] > 0
    return Disjoint(starts[real], ends[real], rows[real])
