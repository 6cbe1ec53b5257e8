# SPDX-License-Identifier: Apache-2.0
"""Where in an ELF file the unwind information and the code are.

By section headers; in a file without them, through the segment PT_GNU_EH_FRAME, which the C++
runtime itself uses, and its header .eh_frame_hdr (LSB Core 5.0, 10.6.2).
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np
from aiflame.agent.symbols.elf import MAX_SEGMENTS, ElfImage
from aiflame.agent.target_files import TargetFile
from aiflame.agent.unwind.records import U64

_SHF_COMPRESSED = 0x800  # elf.h
_PT_GNU_EH_FRAME = 0x6474E550
_PROGRAM_HEADER = struct.Struct("<IIQQQQQQ")
_PLACE_OF_PROGRAM_HEADERS = struct.Struct("<32xQ14xHH")
# version 1; eh_frame_ptr as pcrel | sdata4: what all linkers write
_HDR_HEAD = b"\x01\x1b"


class FrameSection(NamedTuple):
    """One .eh_frame or .debug_frame. All in bytes."""

    is_eh: bool
    address: int
    file_offset: int
    size: int
    is_compressed: bool


def frame_sections(file: TargetFile, image: ElfImage) -> list[FrameSection]:
    """The unwind sections of a file, .eh_frame first.

    Raises:
        BadTargetFile: As `TargetFile.read`.
    """
    if not image.sections:
        return _by_segment(file, image)
    found = []
    for name, is_eh in ((".eh_frame", True), (".debug_frame", False)):
        section = image.section(name)
        if section is not None and section.size:
            compressed = bool(section.flags & _SHF_COMPRESSED)
            place = (section.virtual_address, section.file_offset, section.size)
            found.append(FrameSection(is_eh, *place, compressed))
    return found


def _by_segment(file: TargetFile, image: ElfImage) -> list[FrameSection]:
    header = file.read(64, 0)
    if image.bits != 64 or len(header) < 64:
        return []
    offset, entry_bytes, count = _PLACE_OF_PROGRAM_HEADERS.unpack_from(header)
    if entry_bytes != _PROGRAM_HEADER.size or count > MAX_SEGMENTS:
        return []
    table = file.read(entry_bytes * count, offset)
    for at in range(0, len(table) - entry_bytes + 1, entry_bytes):
        kind, _, _, address, *_ = _PROGRAM_HEADER.unpack_from(table, at)
        if kind == _PT_GNU_EH_FRAME:
            return _behind_header(file, image, address)
    return []


def _behind_header(file: TargetFile, image: ElfImage, address: int) -> list[FrameSection]:
    """Follow .eh_frame_hdr; .eh_frame itself ends at its terminator, or with its segment."""
    place = in_file(image, address)
    if place is None:
        return []
    head = file.read(8, place[0])
    if len(head) < 8 or head[:2] != _HDR_HEAD:
        return []
    target = address + 4 + struct.unpack_from("<i", head, 4)[0]
    found = in_file(image, target)
    if found is None:
        return []
    return [FrameSection(True, target, *found, False)]


def in_file(image: ElfImage, address: int) -> tuple[int, int] | None:
    """File offset of a virtual address, and the bytes from there to the segment's end."""
    for load in image.loads:
        inside = address - load.virtual_address
        if 0 <= inside < load.file_size and load.file_offset + inside < image.size_bytes:
            offset = load.file_offset + inside
            return offset, min(load.file_size - inside, image.size_bytes - offset)
    return None


def code_ranges(image: ElfImage) -> U64:
    """Virtual addresses of code, ascending and disjoint, shape (n, 2).

    Of sections, where there are any: some linkers put all of a library into one executable
    segment that begins at 0, where the FDEs of discarded functions point to.
    """
    ranges = [
        (section.virtual_address, section.end_address)
        for section in image.sections
        if section.executable and section.size
    ] or [
        (
            load.virtual_address,
            load.virtual_address + max(0, min(load.file_size, image.size_bytes - load.file_offset)),
        )
        for load in image.loads
        if load.executable
    ]
    merged: list[list[int]] = []
    for begin, end in sorted(ranges):
        if merged and begin <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        elif begin < end:
            merged.append([begin, end])
    return np.array(merged, np.uint64).reshape(-1, 2)
