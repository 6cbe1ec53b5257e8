# SPDX-License-Identifier: Apache-2.0
"""Kernel addresses to function names, from /proc/kallsyms.

The list has no sizes, so a function reaches to the next one; but not over a gap that no code
fills, and never past the end marks that the linker leaves. Modules and BPF programs are in the
list while they are loaded: load it again after one came or went.
"""

from __future__ import annotations

import mmap
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from aiflame.agent import kernelfs
from aiflame.agent.errors import EnvironmentUnfit
from aiflame.agent.symbols.frames import clean_name
from aiflame.agent.symbols.intervals import Disjoint, find

U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]

# nm(1): text, weak, and indirect functions; upper case is global. A global name wins an address.
_TYPE_SCORES = {ord("T"): 3, ord("W"): 2, ord("t"): 1, ord("w"): 1, ord("i"): 1}
# A line is `ffffffff81000000 T name`, of a module with a tab and `[module]` after it: "%px %c %s"
# (kernel/kallsyms.c s_show, v6.18), and %px has 16 digits.
_DIGITS, _TYPE_AT, _NAME_AT = 16, 17, 19
# The longest kernel functions have some 100 KB; what follows a longer gap is another mapping.
_MAX_GAP_BYTES = 2 * 1024 * 1024
_MAX_LAST_BYTES = 1024 * 1024
# Linker marks, and their position-independent aliases (`__pi_`): no functions. The ends also close
# the function before them.
_MARKS = frozenset(
    b"_text _stext _etext _sinittext _einittext __init_begin __init_end _end".split()
)
_LONGEST_MARK = len("__pi__sinittext")
_KERNEL = b"[kernel]"


class KernelSymbolsHidden(EnvironmentUnfit):
    """The kernel shows every address as zero (kernel.kptr_restrict)."""


class KernelName(NamedTuple):
    """A kernel function and its module: "[kernel]", a module's name, or "bpf"."""

    name: str
    module: str


class KernelSymbols:
    """Functions of the kernel, its modules and its BPF programs, by address.

    Names stay in the text of the list until they are asked for: 120,000 Python strings would be
    half of the memory of who names.

    Args:
        ranges: Of addresses; their rows are where in the text their names begin.
        text: Names, each to the end of its line.
    """

    def __init__(self, ranges: Disjoint, text: bytes | mmap.mmap) -> None:
        self._ranges = ranges
        self._text = text

    def __len__(self) -> int:
        return len(self._ranges.starts)

    @classmethod
    def load(cls, path: str | Path = "/proc/kallsyms") -> KernelSymbols:
        """Read the kernel's symbol list.

        Raises:
            KernelSymbolsHidden: All addresses are zero.
            EnvironmentUnfit: The list cannot be read, or holds no function.
        """
        try:
            text = kernelfs.read_bytes(path)
        except OSError as error:
            raise EnvironmentUnfit(f"cannot read {path}: {error.strerror}") from error
        found = _List(text)
        if not len(found.addresses):
            raise EnvironmentUnfit(f"{path} holds no kernel function")
        if not found.addresses.any():
            raise KernelSymbolsHidden(
                "kernel function names are hidden: kernel.kptr_restrict",
                "sudo sysctl kernel.kptr_restrict=1",
            )
        return cls(*_compact(_ranges(found), text))

    def on_disk(self, directory: Path) -> KernelSymbols:
        """Returns the same in a file without a name, of which memory has what was looked at.

        Args:
            directory: Where the file is; nobody else can write to it.

        Raises:
            OSError: It cannot be written.
        """
        starts, ends, rows = self._ranges
        text_at = starts.nbytes + ends.nbytes + rows.nbytes
        with tempfile.TemporaryFile(dir=directory) as file:
            for part in (starts, ends, rows + text_at):
                file.write(part.tobytes())
            file.write(self._text)
            file.flush()
            memory = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        count = len(starts)
        return KernelSymbols(
            Disjoint(
                np.frombuffer(memory, np.uint64, count),
                np.frombuffer(memory, np.uint64, count, starts.nbytes),
                np.frombuffer(memory, np.int64, count, starts.nbytes + ends.nbytes),
            ),
            memory,
        )

    def lookup(self, addresses: U64) -> list[KernelName | None]:
        """Names for kernel addresses, shape (n,); None outside every function."""
        found = find(self._ranges, addresses)
        rows = self._ranges.rows[found].tolist() if len(self) else [0] * len(found)
        return [
            self._name(row) if hit >= 0 else None
            for hit, row in zip(found.tolist(), rows, strict=True)
        ]

    def _name(self, begin: int) -> KernelName:
        line = self._text[begin : self._text.find(b"\n", begin)]
        name, _, module = line.partition(b"\t")
        module = module.strip(b"[]") or _KERNEL
        return KernelName(*(clean_name(part.decode("utf-8", "replace")) for part in (name, module)))


class _List:
    """The functions and marks of the list; lines of another form are skipped.

    Attributes:
        addresses: Of each.
        scores: How well it names its address, 0 for a mark.
        lengths: Of the names, in bytes.
        name_at: Where in the text they begin.
    """

    def __init__(self, text: bytes) -> None:
        self._text = text
        letters = np.frombuffer(text, np.uint8)
        ends = np.flatnonzero(letters == ord("\n"))
        starts = np.append(0, ends[:-1] + 1)[: len(ends)]
        has_name = ends - starts > _NAME_AT
        starts, ends = starts[has_name], ends[has_name]
        self.scores = _scores_by_type()[letters[starts + _TYPE_AT]]
        is_wanted = self.scores > 0
        for space in (_TYPE_AT - 1, _TYPE_AT + 1):
            is_wanted &= letters[starts + space] == ord(" ")
        self.addresses = np.zeros(len(starts), np.uint64)
        values = _values_by_digit()
        for digit in range(_DIGITS):
            value = values[letters[starts + digit]]
            is_wanted &= value < 16
            self.addresses = self.addresses << np.uint64(4) | value
        tabs = np.append(np.flatnonzero(letters == ord("\t")), len(text))
        self.name_at = starts + _NAME_AT
        name_ends = np.minimum(tabs[np.searchsorted(tabs, self.name_at)], ends)
        self.lengths = name_ends - self.name_at
        may_be_mark = (letters[self.name_at] == ord("_")) & (self.lengths <= _LONGEST_MARK)
        for row in np.flatnonzero(is_wanted & may_be_mark).tolist():
            if self.raw_name(row).removeprefix(b"__pi_") in _MARKS:
                self.scores[row] = 0
        self.addresses, self.scores = self.addresses[is_wanted], self.scores[is_wanted]
        self.name_at, self.lengths = self.name_at[is_wanted], self.lengths[is_wanted]

    def raw_name(self, row: int) -> bytes:
        begin = int(self.name_at[row])
        return self._text[begin : begin + int(self.lengths[row])]


def _scores_by_type() -> I64:
    scores = np.zeros(256, np.int64)
    for letter, score in _TYPE_SCORES.items():
        scores[letter] = score
    return scores


def _values_by_digit() -> U64:
    values = np.full(256, 16, np.uint64)
    for value, letter in enumerate(b"0123456789abcdef"):
        values[letter] = value
    return values


def _ranges(found: _List) -> Disjoint:
    """Each address once, under its best name, reaching to the next."""
    addresses, scores, lengths = found.addresses, found.scores, found.lengths
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
    return Disjoint(starts[real], ends[real], found.name_at[rows[real]])


def _compact(ranges: Disjoint, text: bytes) -> tuple[Disjoint, bytes]:
    """Leaves out of the text what is no function's name: addresses, and what is data's."""
    letters = np.frombuffer(text, np.uint8)
    line_ends = np.append(np.flatnonzero(letters == ord("\n")), len(text))
    begins = np.unique(ranges.rows)
    ends = np.minimum(line_ends[np.searchsorted(line_ends, begins)] + 1, len(text))
    steps = np.zeros(len(text) + 1, np.int8)
    steps[begins] += 1
    steps[ends] -= 1
    is_kept = np.cumsum(steps[:-1], dtype=np.int8).view(bool)
    at = np.append(0, np.cumsum(ends - begins))[:-1]
    rows = at[np.searchsorted(begins, ranges.rows)]
    return Disjoint(ranges.starts, ranges.ends, rows), letters[is_kept].tobytes() + b"\n"
