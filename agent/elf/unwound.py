# SPDX-License-Identifier: Apache-2.0
"""Where functions begin and end, as unwind information says it: all that a stripped file tells.

.eh_frame_hdr lists each FDE of .eh_frame in the order of their code, as every linker writes it for
the C++ runtime (LSB Core 5.0, 10.6.2), so that neither CIEs nor programs need to be read. An FDE
counts if it begins where the list says, in the one encoding that compilers use for it.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from aiflame.agent.elf.image import ElfImage, Section
from aiflame.agent.target_files import TargetFile

U64 = npt.NDArray[np.uint64]

# Version 1; .eh_frame's address as pcrel | sdata4, a count as udata4, and a list of pairs as
# datarel | sdata4 (DW_EH_PE_*, LSB Core 5.0 table 10-4 and 10-5): what all linkers write.
_HEAD = b"\x01\x1b\x03\x3b"
_COUNT = struct.Struct("<I")
_PAIRS_AT = 12
# libtorch_cpu, among the largest libraries that exist, has 335,120.
_MAX_FDES = 2_000_000
# Words of an FDE of the 32-bit format, with addresses as pcrel | sdata4: its length, its CIE, where
# its function begins, and how large that is. Assemblers align records to words.
_WORD_BYTES = 4
_BEGIN, _SIZE, _WORDS = 2, 3, 4
# What is read at a time.
_CHUNK_BYTES = 1 << 20


class Bounds(NamedTuple):
    """Functions, in order and disjoint: first addresses, and those after the last."""

    starts: U64
    ends: U64


def function_bounds(file: TargetFile, image: ElfImage) -> Bounds:
    """Where the functions of a file are that have unwind information in its usual form.

    Raises:
        BadTargetFile: As `TargetFile.read`.
    """
    header, frames = image.section(".eh_frame_hdr"), image.section(".eh_frame")
    none = np.zeros(0, np.uint64)
    if header is None or frames is None or image.bits != 64:
        return Bounds(none, none)
    starts, offsets = _listed(file, header, frames)
    sizes = _sizes(file, frames, starts, offsets)
    low, high = _code(image, starts)
    kept = (sizes > 0) & (starts >= low) & (starts < high)
    starts = starts[kept]
    ends = starts + np.minimum(sizes[kept], high[kept] - starts)
    starts, first = np.unique(starts, return_index=True)
    ends = ends[first]
    ends[:-1] = np.minimum(ends[:-1], starts[1:])
    return Bounds(starts, ends)


def _listed(file: TargetFile, header: Section, frames: Section) -> tuple[U64, U64]:
    """The functions' first addresses, and where in .eh_frame their FDEs are, ascending."""
    data = file.read(min(header.size, _PAIRS_AT + 8 * _MAX_FDES), header.file_offset)
    count = 0
    if data.startswith(_HEAD) and len(data) >= _PAIRS_AT:
        (claimed,) = _COUNT.unpack_from(data, len(_HEAD) + 4)
        count = min(claimed, (len(data) - _PAIRS_AT) // 8)
    pairs = np.frombuffer(data, "<i4", 2 * count, _PAIRS_AT if count else 0)
    relative = pairs.astype(np.int64).view(np.uint64).reshape(-1, 2)
    starts = relative[:, 0] + np.uint64(header.virtual_address)
    distance = (header.virtual_address - frames.virtual_address) % (1 << 64)
    offsets = relative[:, 1] + np.uint64(distance)
    offsets, first = np.unique(offsets, return_index=True)
    sound = offsets % np.uint64(_WORD_BYTES) == 0
    sound &= offsets < np.uint64(max(frames.size - _WORDS * _WORD_BYTES + 1, 0))
    return starts[first[sound]], offsets[sound]


def _sizes(file: TargetFile, frames: Section, starts: U64, offsets: U64) -> U64:
    """How large the functions are, 0 where the FDE is of another."""
    sizes = np.zeros(len(starts), np.uint64)
    positions = offsets.astype(np.int64)
    first = 0
    while first < len(positions):
        base = int(positions[first])
        after = int(np.searchsorted(positions, base + _CHUNK_BYTES, "right"))
        room = min(_CHUNK_BYTES + _WORDS * _WORD_BYTES, frames.size - base)
        data = file.read(room, frames.file_offset + base)
        words = np.frombuffer(data, "<u4", len(data) // _WORD_BYTES)
        rows = (positions[first:after] - base) // _WORD_BYTES
        rows = rows[rows + _WORDS <= len(words)]
        chosen = slice(first, first + len(rows))
        relative = words[rows + _BEGIN].view("<i4").astype(np.int64).view(np.uint64)
        distance = (frames.virtual_address + _BEGIN * _WORD_BYTES) % (1 << 64)
        begins = relative + offsets[chosen] + np.uint64(distance)
        sizes[chosen] = np.where(begins == starts[chosen], words[rows + _SIZE], 0)
        first = after
    return sizes


def _code(image: ElfImage, addresses: U64) -> tuple[U64, U64]:
    """Where the executable section begins and ends that an address may be in."""
    code: list[Any] = sorted(
        (section.virtual_address, section.end_address)
        for section in image.sections
        if section.executable and section.size
    )
    bounds = np.array(code or [(0, 0)], np.uint64)
    at = np.maximum(np.searchsorted(bounds[:, 0], addresses, "right") - 1, 0)
    return bounds[at, 0], bounds[at, 1]
