# SPDX-License-Identifier: Apache-2.0
"""From an open file to its unwind table, and from the cache on disk.

.eh_frame is what the program itself unwinds with, so it wins; .debug_frame only adds functions of
which .eh_frame says nothing, Go's own table those of Go, and prologues those of which none does.
Where FDEs overlap, the one that starts later rules from there on.
"""

from __future__ import annotations

import hashlib
import mmap
from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt
from aiflame.agent.elf.headers import Headers
from aiflame.agent.elf.image import ElfImage
from aiflame.agent.symbols.store import Cache
from aiflame.agent.target_files import TargetFile
from aiflame.agent.unwind import x86_64 as arch
from aiflame.agent.unwind.go_functions import with_go_functions
from aiflame.agent.unwind.heuristics import with_functions_without_cfi
from aiflame.agent.unwind.lockstep import Rows, run_programs
from aiflame.agent.unwind.records import (
    I64,
    MAX_ROWS,
    MAX_SECTION_BYTES,
    U64,
    BadUnwindInfo,
    parse_section,
)
from aiflame.agent.unwind.sections import code_ranges, frame_sections
from aiflame.agent.unwind.stack_starts import with_stack_starts
from aiflame.agent.unwind.table import CorruptTable, UnwindTable

# With the version of its layout, its rows and its name: two versions of aiflame may share a cache.
SUFFIX = ".unwind15"
_NO_BUILD_ID = "x"


def table_name(build_id: str, digest: bytes) -> str:
    """How the cache calls the table of a file: by its build id, for the reader, and its contents.

    Args:
        build_id: Of the file, "" for none.
        digest: Of what it is made of.
    """
    return f"{build_id[:40] or _NO_BUILD_ID}-{digest.hex()[:48]}{SUFFIX}"


def identity_of(name: str) -> bytes:
    """Returns what a table of that name holds, to be told from one that was renamed."""
    return hashlib.sha256(name.encode()).digest()


def load(name: str, store: Cache) -> UnwindTable | None:
    """Returns a table of the cache by its name, None where it has none.

    What is known of files since the boot (`symbols.known`) may name one of another version, which
    may know fewer rules.
    """
    mapping = store.open(name) if name.endswith(SUFFIX) else None
    if mapping is not None:
        try:
            table = UnwindTable.from_mapping(mapping, identity_of(name))
            # All of it was read for its checksum; a walk needs some pages, and finds them again.
            mapping.madvise(mmap.MADV_DONTNEED)
            return table
        except CorruptTable:
            store.remove(name)
    return None


def require_supported(image: ElfImage | Headers) -> None:
    """Refuses a file for another machine.

    Raises:
        BadUnwindInfo: It is for one.
    """
    if (image.machine, image.bits) != (arch.MACHINE, 64):
        raise BadUnwindInfo(f"no unwind rules for {image.machine}, {image.bits} bits")


def build(file: TargetFile, image: ElfImage) -> UnwindTable:
    """Make the table without the cache.

    Raises:
        BadUnwindInfo: The file is for another machine, or over a limit.
        BadTargetFile: As `TargetFile.read`.
    """
    require_supported(image)
    drops: Counter[str] = Counter()
    code = code_ranges(image)
    found: list[_Functions] = []
    for section in frame_sections(file, image):
        if section.is_compressed:
            drops["compressed section"] += 1
            continue
        if section.size > MAX_SECTION_BYTES:
            raise BadUnwindInfo(f"{section.size} bytes of unwind information, over the limit")
        data = file.read(section.size, section.file_offset)
        fdes = parse_section(data, section.address, section.is_eh, drops)
        # A thread inside sigreturn(2) is at the first byte after its trampoline.
        is_signal = np.array([cie.is_signal_frame for cie in fdes.cies], np.uint64)
        sizes = fdes.sizes + (is_signal[fdes.cie_rows] if len(is_signal) else np.uint64(0))
        found.append(_Functions(fdes.starts, sizes, run_programs(fdes, drops)))
    every = _merged(found)
    chosen = _chosen(every, found, code, drops)
    addresses, states = _states(every, chosen)
    addresses, states = with_go_functions(file, image, addresses, states, drops)
    addresses, states = with_functions_without_cfi(file, image, addresses, states, drops)
    states = with_stack_starts(file, image, addresses, states)
    return UnwindTable.of_states(addresses, states, drops)


class _Functions:
    """The FDEs of one or more sections with the rows of their programs."""

    def __init__(self, starts: U64, sizes: U64, rows: Rows) -> None:
        self.starts = starts
        self.sizes = sizes
        self.rows = rows


def _merged(found: list[_Functions]) -> _Functions:
    """All sections in one, their FDEs numbered one after the other."""
    if len(found) == 1:
        return found[0]
    none = np.zeros(0, np.int64)
    bases = np.cumsum([0, *(len(part.starts) for part in found)])
    parts = [
        (part.rows.fdes + np.int32(base), part.rows.ranks, part.rows.offsets, part.rows.states)
        for part, base in zip(found, bases.tolist(), strict=False)
    ]
    narrow = none.astype(np.int32)
    parts.append((narrow, narrow, none, none.astype(np.uint64)))
    columns: list[npt.NDArray[Any]] = [
        np.concatenate(column) for column in zip(*parts, strict=True)
    ]
    counts = np.concatenate([none, *(part.rows.counts for part in found)])
    empty = none.astype(np.uint64)
    starts = np.concatenate([empty, *(part.starts for part in found)])
    sizes = np.concatenate([empty, *(part.sizes for part in found)])
    return _Functions(starts, sizes, Rows(columns[0], columns[1], columns[2], columns[3], counts))


class _Chosen:
    """FDEs in the order of their code, each ending where the next begins or before."""

    def __init__(self, order: I64, starts: U64, ends: U64) -> None:
        self.order = order
        self.starts = starts
        self.ends = ends


def _chosen(every: _Functions, found: list[_Functions], code: U64, drops: Counter[str]) -> _Chosen:
    starts, sizes = every.starts, every.sizes
    inside = _inside(starts, sizes, code)
    drops["outside code"] += int((~inside).sum())
    usable = inside & (every.rows.counts > 0)
    if len(found) > 1:
        usable &= _unshadowed(starts, starts + sizes, usable, len(found[0].starts))
    order = np.flatnonzero(usable)
    if not (starts[order][1:] > starts[order][:-1]).all():
        # Of FDEs with one start the shortest is the last, and so the one that stays.
        order = order[np.lexsort((~sizes[order], starts[order]))]
    begins = starts[order]
    ends = begins + sizes[order]
    over = ends[:-1] > begins[1:]
    drops["overlapped"] += int(over.sum())
    ends[:-1] = np.minimum(ends[:-1], begins[1:])
    kept = ends > begins
    return _Chosen(order[kept], begins[kept], ends[kept])


def _inside(starts: U64, sizes: U64, code: U64) -> npt.NDArray[np.bool_]:
    """Which FDEs lie within one range of executable memory; `code` has shape (ranges, 2)."""
    if not len(code):
        return np.zeros(len(starts), bool)
    at = np.maximum(np.searchsorted(code[:, 0], starts, "right") - 1, 0)
    low, high = code[at, 0], code[at, 1]
    result: npt.NDArray[np.bool_] = (starts >= low) & (starts < high)
    room = np.where(result, high - starts, np.uint64(0))
    return result & (sizes > 0) & (sizes <= room)


def _unshadowed(
    starts: U64, ends: U64, usable: npt.NDArray[np.bool_], first: int
) -> npt.NDArray[np.bool_]:
    """Which FDEs are of the first section, or touch none of it."""
    result = np.ones(len(starts), bool)
    mine = np.flatnonzero(usable[:first])
    if len(mine):
        mine = mine[np.argsort(starts[mine], kind="stable")]
        reach = np.maximum.accumulate(ends[mine])
        # Of the functions that start before a candidate's end, the farthest must end before it.
        before = np.searchsorted(starts[mine], ends[first:], "left")
        farthest = np.where(before > 0, reach[np.maximum(before, 1) - 1], np.uint64(0))
        result[first:] = farthest <= starts[first:]
    return result


def _states(every: _Functions, chosen: _Chosen) -> tuple[U64, U64]:
    """Where each state begins: the rows of all chosen FDEs, and the gaps after them."""
    rows = every.rows
    counts = rows.counts[chosen.order]
    is_gap = np.ones(len(counts), bool)
    is_gap[:-1] = chosen.ends[:-1] != chosen.starts[1:]
    after = np.cumsum(counts + is_gap)
    total = int(after[-1]) if len(after) else 0
    if total > MAX_ROWS:
        raise BadUnwindInfo(f"{total} rows, over the limit of {MAX_ROWS}")
    # Where the first row of each FDE goes, by its number; those not chosen go nowhere.
    first = np.full(len(every.starts), -1, np.int64)
    first[chosen.order] = after - counts - is_gap
    row = first[rows.fdes]
    kept = row >= 0
    taken = slice(None) if kept.all() else kept
    target = row[taken] + rows.ranks[taken]
    addresses, states = np.zeros(total, np.uint64), np.zeros(total, np.uint64)
    addresses[target] = every.starts[rows.fdes[taken]] + rows.offsets[taken].view(np.uint64)
    states[target] = rows.states[taken]
    gaps = after[is_gap] - 1
    addresses[gaps] = chosen.ends[is_gap]
    states[gaps] = np.uint64(arch.NO_CFI_STATE)
    # Programs may run on past their function, or past where an overlap cut it.
    limits = np.repeat(chosen.ends, counts + is_gap)
    limits[gaps] = np.uint64(arch.ALL_BITS)
    within = addresses < limits
    return addresses[within], states[within]
