# SPDX-License-Identifier: Apache-2.0
"""Names for the stubs through which a library calls another: `memcpy@plt`.

Stubs have no symbols. But each jumps through a slot of the global offset table, and the
relocation of that slot names the function; so the jump is decoded, which works for every stub
layout of x86-64 (.plt, .plt.sec, .plt.got; with and without IBT), whoever linked it. Other
machines' stubs stay unnamed.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from aiflame.agent.elf import records
from aiflame.agent.elf.image import ElfImage, Section
from aiflame.agent.elf.symbols import (
    U64,
    Records,
    read_names,
    read_records,
    read_symbols,
    symbol_sections,
)
from aiflame.agent.target_files import TargetFile

_STUB_SECTIONS = (".plt", ".plt.sec", ".plt.got")
_RELOCATION_SECTIONS = (".rela.plt", ".rela.dyn")
# A .plt section of libtorch is 0.7 MB and its .rela.dyn 8 MB.
_MAX_STUB_BYTES = 16 * 1024 * 1024
_MAX_RELOCATION_BYTES = 256 * 1024 * 1024

# elf.h and the x86-64 psABI 1.0, table 4.9
_R_X86_64_GLOB_DAT, _R_X86_64_JUMP_SLOT, _R_X86_64_IRELATIVE = 6, 7, 37
# The psABI's figure 5.2: .plt is an array of 16-byte entries, the first of which goes on to the
# dynamic linker, with IBT all of them.
_BINDING_BYTES = 16
_BINDING_NAME = b"_dl_runtime_resolve@plt\0"


class Stubs(NamedTuple):
    """Stub ranges and the blob of their zero-terminated names."""

    starts: U64
    ends: U64
    name_offsets: U64
    names: bytes


def find_stubs(file: TargetFile, image: ElfImage) -> Stubs:
    """Locate and name the linkage stubs of a binary.

    Args:
        file: The file.
        image: Its headers.

    Returns:
        The stubs in no particular order; none for machines other than x86-64.

    Raises:
        BadElf: They have longer names than those of any real file.
        BadTargetFile: As `TargetFile.read`.
    """
    none = np.zeros(0, dtype=np.uint64)
    nothing = Stubs(none, none, none, b"")
    if image.machine != "X86_64" or image.bits != 64:
        return nothing
    slots, relocations = _slots(file, image)
    if not len(slots):
        return nothing
    starts: list[U64] = [none]
    ends: list[U64] = [none]
    targets: list[U64] = [none]
    for name in _STUB_SECTIONS:
        section = image.section(name)
        if section is not None and 0 < section.size <= _MAX_STUB_BYTES:
            found = _jumps(file, section)
            starts.append(found[0])
            ends.append(found[1])
            targets.append(found[2])
    start, end, target = np.concatenate(starts), np.concatenate(ends), np.concatenate(targets)
    at = np.minimum(np.searchsorted(slots, target), len(slots) - 1)
    known = slots[at] == target
    distinct, rows = np.unique(at[known], return_inverse=True)
    names, offsets = _names(file, image, relocations[distinct])
    named = Stubs(start[known], end[known], offsets[rows], names)
    return _with_binding_code(image, named)


def _with_binding_code(image: ElfImage, stubs: Stubs) -> Stubs:
    """Adds the rest of .plt, which hands a function's first call on to the dynamic linker."""
    section = image.section(".plt")
    if section is None or not 0 < section.size <= _MAX_STUB_BYTES:
        return stubs
    first = section.virtual_address
    starts: U64 = np.arange(first, first + section.size, _BINDING_BYTES, dtype=np.uint64)
    starts = starts[~np.isin(starts, stubs.starts)]
    return Stubs(
        np.concatenate([stubs.starts, starts]),
        np.concatenate([stubs.ends, starts + np.uint64(_BINDING_BYTES)]),
        np.concatenate(
            [stubs.name_offsets, np.full(len(starts), len(stubs.names), dtype=np.uint64)]
        ),
        stubs.names + _BINDING_NAME,
    )


def _slots(file: TargetFile, image: ElfImage) -> tuple[U64, Records]:
    """The relocations that fill function slots, sorted by slot address."""
    parts: list[Records] = [np.zeros(0, dtype=records.RELA_64)]
    for name in _RELOCATION_SECTIONS:
        section = image.section(name)
        if section is None or section.size > _MAX_RELOCATION_BYTES:
            continue
        for part in read_records(file, section, records.RELA_64):
            kind = part["info"] & np.uint64(0xFFFFFFFF)
            wanted = (_R_X86_64_GLOB_DAT, _R_X86_64_JUMP_SLOT, _R_X86_64_IRELATIVE)
            parts.append(part[np.isin(kind, wanted)])
    relocations = np.concatenate(parts)
    order = np.argsort(relocations["offset"], kind="stable")
    return relocations["offset"][order], relocations[order]


def _jumps(file: TargetFile, section: Section) -> tuple[U64, U64, U64]:
    """Start, end and slot address of each stub: the `jmp *disp32(%rip)` (ff 25) inside it."""
    width = np.uint64(section.entry_size if section.entry_size in (8, 16, 32) else 16)
    code = np.frombuffer(file.read(section.size, section.file_offset), np.uint8)
    found = np.flatnonzero((code[:-5] == 0xFF) & (code[1:-4] == 0x25))
    found = found[found + 6 <= len(code)]
    raw = np.zeros((len(found), 4), dtype=np.uint8)
    for byte in range(4):
        raw[:, byte] = code[found + 2 + byte]
    displacement = raw.view("<i4").reshape(-1).astype(np.int64)
    base = np.uint64(section.virtual_address)
    offsets = found.astype(np.uint64)
    starts = base + offsets // width * width
    target = base + offsets + np.uint64(6) + displacement.view(np.uint64)
    return starts, starts + width, target


def _names(file: TargetFile, image: ElfImage, found: Records) -> tuple[bytes, U64]:
    """The names of the functions that relocations refer to, and where each begins."""
    blob = bytearray()
    offsets = []
    symbols = _symbol_names(file, image, found["info"] >> np.uint64(32))
    for name, addend in zip(symbols, found["addend"].tolist(), strict=True):
        offsets.append(len(blob))
        # An indirect function has no symbol; objdump's spelling.
        blob += (name or b"*ABS*+0x%x" % max(addend, 0)) + b"@plt\0"
    return bytes(blob), np.array(offsets, dtype=np.uint64)


def _symbol_names(file: TargetFile, image: ElfImage, indexes: U64) -> list[bytes]:
    """Names of symbols of .dynsym by index; b"" for none."""
    sections = next((s for s in symbol_sections(image) if s.is_dynamic), None)
    if sections is None:
        return [b""] * len(indexes)
    columns = [piece["name"] for piece in read_symbols(file, image, sections.symbols)]
    offsets = np.concatenate(columns).astype(np.uint64)
    is_known = (indexes != 0) & (indexes < len(offsets))
    known = iter(read_names(file, sections.strings, offsets[indexes[is_known].astype(np.int64)]))
    return [next(known) if is_named else b"" for is_named in is_known.tolist()]
