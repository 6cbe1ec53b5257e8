# SPDX-License-Identifier: Apache-2.0
"""Kernel addresses to function names, from /proc/kallsyms.

The list has no sizes, so a function reaches to the next one; but not over a gap that no code
fills, and never past the end marks that the linker leaves. Modules and BPF programs are in the
list while they are loaded: load it again after one came or went.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from aiflame.agent.errors import EnvironmentUnfit
from aiflame.agent.symbols.frames import clean_name
from aiflame.agent.symbols.intervals import Disjoint, find

U64 = npt.NDArray[np.uint64]

# A kernel with every module loaded has about 250,000 lines of 60 bytes.
_MAX_BYTES = 256 * 1024 * 1024
# nm(1): text, weak, and indirect functions; upper case is global. A global name wins an address.
_TYPE_SCORE = {"T": 3, "W": 2, "t": 1, "w": 1, "i": 1}
# The longest kernel functions have some 100 KB; what follows a longer gap is another mapping.
_MAX_GAP_BYTES = 2 * 1024 * 1024
_MAX_LAST_BYTES = 1024 * 1024
# Linker marks: no functions. The ends also close the function before them.
_MARKS = frozenset(
    ("_text", "_stext", "_etext", "_sinittext", "_einittext", "__init_begin", "__init_end", "_end")
)
_KERNEL = "[kernel]"


class KernelSymbolsHidden(EnvironmentUnfit):
    """The kernel shows every address as zero (kernel.kptr_restrict)."""


class KernelName(NamedTuple):
    """A kernel function and its module: "[kernel]", a module's name, or "bpf"."""

    name: str
    module: str


class KernelSymbols:
    """Functions of the kernel, its modules and its BPF programs, by address."""

    def __init__(self, ranges: Disjoint, names: list[KernelName]) -> None:
        self._ranges = ranges
        self._names = names

    def __len__(self) -> int:
        return len(self._names)

    @classmethod
    def load(cls, path: str | Path = "/proc/kallsyms") -> KernelSymbols:
        """Read the kernel's symbol list.

        Raises:
            KernelSymbolsHidden: All addresses are zero.
            EnvironmentUnfit: The list cannot be read, or holds no function.
        """
        try:
            with Path(path).open("rb") as file:
                text = file.read(_MAX_BYTES).decode("utf-8", "replace")
        except OSError as error:
            raise EnvironmentUnfit(f"cannot read {path}: {error.strerror}") from error
        addresses, scores, names = _functions(text)
        if not names:
            raise EnvironmentUnfit(f"{path} holds no kernel function")
        if not addresses.any():
            raise KernelSymbolsHidden(
                "kernel function names are hidden: kernel.kptr_restrict",
                "sudo sysctl kernel.kptr_restrict=1",
            )
        return cls(*_ranges(addresses, scores, names))

    def lookup(self, addresses: U64) -> list[KernelName | None]:
        """Names for kernel addresses, shape (n,); None outside every function."""
        names = self._names
        return [names[row] if row >= 0 else None for row in find(self._ranges, addresses).tolist()]


def _functions(text: str) -> tuple[U64, npt.NDArray[np.int64], list[KernelName]]:
    """Columns of the list: `address type name [module]`, a tab before the module."""
    addresses: list[int] = []
    scores: list[int] = []
    names: list[KernelName] = []
    for line in text.splitlines():
        fields = line.split()
        if len(fields) < 3 or fields[1] not in _TYPE_SCORE:
            continue
        try:
            address = int(fields[0], 16)
        except ValueError:
            continue
        if address >> 64:
            continue
        name = fields[2]
        addresses.append(address)
        scores.append(0 if name in _MARKS else _TYPE_SCORE[fields[1]])
        names.append(KernelName(name, fields[3].strip("[]") if len(fields) > 3 else _KERNEL))
    return np.array(addresses, dtype=np.uint64), np.array(scores, dtype=np.int64), names


def _ranges(
    addresses: U64, scores: npt.NDArray[np.int64], names: list[KernelName]
) -> tuple[Disjoint, list[KernelName]]:
    # Of several names at one address: global before local, then the shortest, then by alphabet.
    lengths = np.array([len(entry.name) for entry in names], dtype=np.int64)
    order = np.lexsort((lengths, -scores, addresses))
    starts, first, counts = np.unique(addresses[order], return_index=True, return_counts=True)
    rows = order[first]
    for group in np.flatnonzero(counts > 1).tolist():
        tied = order[first[group] : first[group] + counts[group]]
        best = (scores[tied] == scores[tied[0]]) & (lengths[tied] == lengths[tied[0]])
        rows[group] = min(tied[best].tolist(), key=lambda row: names[row].name)
    ends = np.empty_like(starts)
    room = np.uint64(2**64 - 1) - starts
    ends[:-1] = starts[1:]
    ends[-1] = starts[-1] + min(np.uint64(_MAX_LAST_BYTES), room[-1])
    far = np.flatnonzero(ends - starts > np.uint64(_MAX_GAP_BYTES))
    ends[far] = starts[far] + np.uint64(_MAX_LAST_BYTES)
    real = scores[rows] > 0
    chosen = [KernelName(clean_name(names[row].name), names[row].module) for row in rows[real]]
    return Disjoint(starts[real], ends[real], rows[real]), chosen
