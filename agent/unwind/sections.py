# SPDX-License-Identifier: Apache-2.0
"""Where in an ELF file the unwind information and the code are.

By section headers; in a file without them, through the segment PT_GNU_EH_FRAME, which the C++
runtime itself uses, and its header .eh_frame_hdr (LSB Core 5.0, 10.6.2).
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np
from aiflame.agent.elf import records
from aiflame.agent.elf.go_table import go_table
from aiflame.agent.elf.image import ElfImage
from aiflame.agent.target_files import TargetFile
from aiflame.agent.unwind.records import U64

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

    Without Go's .debug_frame, which does not tell where stacks begin: its own table does.

    Raises:
        BadTargetFile: As `TargetFile.read`.
    """
    if not image.sections:
        return _by_segment(file, image)
    found = []
    for name, is_eh in ((".eh_frame", True), (".debug_frame", False)):
        section = image.section(name)
        if section is not None and section.size and (is_eh or go_table(file, image) is None):
            compressed = bool(section.flags & records.SHF_COMPRESSED)
            location = (section.virtual_address, section.file_offset, section.size)
            found.append(FrameSection(is_eh, *location, compressed))
    return found


def _by_segment(file: TargetFile, image: ElfImage) -> list[FrameSection]:
    """Follow .eh_frame_hdr; .eh_frame itself ends at its terminator, or with its segment."""
    header = next((s for s in image.segments if s.type == records.PT_GNU_EH_FRAME), None)
    if header is None:
        return []
    head = image.read_at(file, header.virtual_address, 8)
    if len(head) < 8 or head[:2] != _HDR_HEAD:
        return []
    address = header.virtual_address + 4 + struct.unpack_from("<i", head, 4)[0]
    load = image.load_at(address)
    if load is None:
        return []
    left = load.file_size - (address - load.virtual_address)
    return [FrameSection(True, address, load.file_offset_of(address), left, False)]


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
        (load.virtual_address, load.virtual_address + load.file_size)
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
