# SPDX-License-Identifier: Apache-2.0
"""Rows for code of which CFI says nothing: linkage stubs, and functions by what they do.

Linkers leave CFI out where no input has any, but their stubs are of a few known forms. What
functions do with their frame is followed in all of their code where that is little, see
`flow_x86_64`; else, and where that does not know, it is told by the prologues of those that symbols
delimit, see `prologue_x86_64`. Both are heuristic. All must lie wholly in a gap between the rows of
the CFI: what the compiler said is never overruled.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import numpy.typing as npt
from aiflame.agent.elf.functions import function_ranges
from aiflame.agent.elf.image import BadElf, ElfImage
from aiflame.agent.target_files import TargetFile
from aiflame.agent.unwind import x86_64 as arch
from aiflame.agent.unwind.flow_x86_64 import Followed, Range, follow
from aiflame.agent.unwind.prologue_x86_64 import rows_of_function
from aiflame.agent.unwind.records import U64

# libtorch_cpu has 8,000 such functions with 38 MB; reading them takes half a second.
_MAX_FUNCTIONS = 50_000
# The largest of MKL's has 300 KB.
_MAX_FUNCTION_BYTES = 1 << 20
# Following code takes 0.7 s for 400 KB, which is all of musl's libc.so.
_MAX_FOLLOWED_BYTES = 1 << 20
# As a function has it where it begins.
_ENTERED_STATE = arch.with_ra(arch.with_cfa(0, arch.RSP, 8), arch.RA_AT_CFA_8)


def with_functions_without_cfi(
    file: TargetFile, image: ElfImage, addresses: U64, states: U64, drops: Counter[str]
) -> tuple[U64, U64]:
    """Adds rows of functions without CFI.

    Args:
        file: The file.
        image: Its headers.
        addresses: Where each state of the CFI begins, ascending and distinct, shape (n,).
        states: See `x86_64`, shape (n,).
        drops: Counts functions over the limit.

    Returns:
        The same with more rows.

    Raises:
        BadTargetFile: As `TargetFile.read`.
    """
    try:
        starts, ends = function_ranges(file, image)
    except BadElf:
        return addresses, states  # unwinding does without symbols
    found, bounds = _stubs(file, image, addresses, states)
    followed = _followed(file, image, starts, addresses, states)
    is_bare = in_gap(starts, ends, addresses, states)
    is_bare &= _is_lost(starts, ends, followed)
    starts, ends = starts[is_bare], ends[is_bare]
    for address, state in _outside(followed.rows, starts, ends):
        if state == arch.NO_CFI_STATE:
            bounds.append(address)
        else:
            found.append((address, state))
    bounds += starts.tolist()
    if len(starts) > _MAX_FUNCTIONS:
        drops["function without CFI"] += len(starts) - _MAX_FUNCTIONS
    for start, end in zip(starts[:_MAX_FUNCTIONS].tolist(), ends.tolist(), strict=False):
        code = image.read_at(file, start, min(end - start, _MAX_FUNCTION_BYTES))
        if len(code) < end - start:
            continue
        rows = rows_of_function(code)
        found += [(start + row.offset, row.state) for row in rows]
        bounds.append(end)
    if not found:
        return addresses, states
    more = np.array(found, np.uint64)
    return inserted(addresses, states, more[:, 0], more[:, 1], np.array(bounds, np.uint64))


def _followed(
    file: TargetFile, image: ElfImage, starts: U64, addresses: U64, states: U64
) -> Followed:
    """Follows the code of gaps in which functions begin, if that is not too much."""
    gaps = _gaps(image, addresses, states)
    if not len(starts):
        return _followed_from_entry(file, image, gaps, addresses, states)
    is_begun = np.searchsorted(starts, gaps[:, 0]) < np.searchsorted(starts, gaps[:, 1])
    return _follow(file, image, gaps[is_begun], starts)


def _followed_from_entry(
    file: TargetFile, image: ElfImage, gaps: U64, addresses: U64, states: U64
) -> Followed:
    """The same of a stripped static program with little CFI, as musl makes them.

    It is known where it begins; code with CFI, like the user's own, tells of functions as well.
    """
    every = _gaps(image, addresses[:0], states[:0])
    if not image.entry or _bytes(gaps) <= _bytes(every) // 2:
        return Followed([], [])
    entered = addresses[states == np.uint64(_ENTERED_STATE)]
    # Each for itself: code with CFI does not run into what comes after it.
    begins = np.sort(np.concatenate([every[:, 0], gaps[:, 1]]))
    ends = np.sort(np.concatenate([every[:, 1], gaps[:, 0]]))
    others = np.stack([begins, ends], axis=1)[begins < ends]
    code = np.concatenate([gaps, others])
    code = code[np.argsort(code[:, 0])]
    found = _follow(file, image, code, entered, image.entry)
    at = np.array([address for address, _ in found.rows], np.uint64)
    gap = np.searchsorted(gaps[:, 0], at, "right").astype(np.int64) - 1
    is_in = (gap >= 0) & (at < gaps[np.maximum(gap, 0), 1])
    rows = [row for row, one_is_in in zip(found.rows, is_in.tolist(), strict=True) if one_is_in]
    return Followed(sorted(rows + [(end, arch.NO_CFI_STATE) for end in gaps[:, 1].tolist()]), [])


def _follow(file: TargetFile, image: ElfImage, code: U64, starts: U64, entry: int = 0) -> Followed:
    """Follows all of some code; none of it where it is too much."""
    if not len(code) or _bytes(code) > _MAX_FOLLOWED_BYTES:
        return Followed([], [])
    ranges = [Range(begin, image.read_at(file, begin, end - begin)) for begin, end in code.tolist()]
    return follow(ranges, starts.tolist(), entry, has_fixed_addresses=image.kind == "exec")


def _bytes(ranges: U64) -> int:
    return sum((ranges[:, 1] - ranges[:, 0]).tolist())


def _gaps(image: ElfImage, addresses: U64, states: U64) -> U64:
    """Code without CFI, but for stubs, ascending; shape (n, 2)."""
    found, after = [np.zeros((0, 2), np.uint64)], 0
    sections = (one for one in image.sections if one.executable and one.size)
    for section in sorted(sections, key=lambda one: one.virtual_address):
        begin, end = section.virtual_address, section.end_address
        # A section may be said to end beyond all addresses.
        if section.name in arch.STUB_SECTIONS or begin < after or end >= 1 << 64:
            continue
        after = end
        first, last = np.searchsorted(addresses, np.array([begin, end], np.uint64))
        # Code with CFI in a section has a row where it begins.
        edges = np.concatenate([[begin], addresses[first:last], [end]]).astype(np.uint64)
        is_gap = np.concatenate([[True], states[first:last] == np.uint64(arch.NO_CFI_STATE)])
        found.append(np.stack([edges[:-1], edges[1:]], axis=1)[is_gap])
    return np.concatenate(found)


def _is_lost(starts: U64, ends: U64, followed: Followed) -> npt.NDArray[np.bool_]:
    """Which functions were not followed, or not to their end."""
    none = (0, arch.NO_CFI_STATE)
    rows = np.array([none, *followed.rows], np.uint64)
    lost = np.array(followed.lost, np.uint64)
    before = rows[np.searchsorted(rows[1:, 0], starts, "right"), 1]
    result: npt.NDArray[np.bool_] = before == np.uint64(arch.NO_CFI_STATE)
    return result | (np.searchsorted(lost, starts) < np.searchsorted(lost, ends))


def _outside(rows: list[tuple[int, int]], starts: U64, ends: U64) -> list[tuple[int, int]]:
    """Rows that are in none of some functions, ascending and disjoint."""
    if not rows or not len(starts):
        return rows
    at = np.array([row for row, _ in rows], np.uint64)
    function = np.searchsorted(starts, at, "right").astype(np.int64) - 1
    is_in = (function >= 0) & (at < ends[np.maximum(function, 0)])
    return [row for row, one_is_in in zip(rows, is_in.tolist(), strict=True) if not one_is_in]


def _stubs(
    file: TargetFile, image: ElfImage, addresses: U64, states: U64
) -> tuple[list[tuple[int, int]], list[int]]:
    """Rows of linkage stubs, and where their sections end."""
    found: list[tuple[int, int]] = []
    bounds: list[int] = []
    for name in arch.STUB_SECTIONS:
        section = image.section(name)
        if section is None or not section.executable or not section.size:
            continue
        starts = np.array([section.virtual_address], np.uint64)
        ends = np.array([section.end_address], np.uint64)
        if in_gap(starts, ends, addresses, states)[0]:
            code = file.read(arch.STUB_SAMPLE_BYTES, section.file_offset)
            rows = arch.stub_states(code)
            found += [(section.virtual_address + offset, state) for offset, state in rows]
            bounds.append(section.end_address)
    return found, bounds


def in_gap(starts: U64, ends: U64, addresses: U64, states: U64) -> npt.NDArray[np.bool_]:
    """Which functions begin in a gap and end before the next row, and overlap no other function."""
    if not len(starts):
        return np.zeros(0, bool)
    if not len(addresses):
        in_gap = np.ones(len(starts), bool)
    else:
        at = np.searchsorted(addresses, starts, "right").astype(np.int64) - 1
        is_unknown = (at < 0) | (states[np.maximum(at, 0)] == np.uint64(arch.NO_CFI_STATE))
        following = np.append(addresses, np.uint64(arch.ALL_BITS))[at + 1]
        in_gap = is_unknown & (ends <= following)
    in_gap[1:] &= starts[1:] >= np.maximum.accumulate(ends)[:-1]
    return in_gap


def inserted(
    addresses: U64, states: U64, more: U64, more_states: U64, bounds: U64
) -> tuple[U64, U64]:
    """Lays more rows over the gaps; where a function ends the gap goes on, unless a row begins."""
    every = np.concatenate([bounds, addresses, more])
    gaps = np.full(len(bounds), arch.NO_CFI_STATE, np.uint64)
    all_states = np.concatenate([gaps, states, more_states])
    order = np.argsort(every, kind="stable")
    every, all_states = every[order], all_states[order]
    is_last = np.ones(len(every), bool)
    is_last[:-1] = every[1:] != every[:-1]
    return every[is_last], all_states[is_last]
