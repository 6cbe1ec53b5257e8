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
import numpy.typing as npt
from aiflame.agent.symbols.elf import ElfImage, Section

_STUB_SECTIONS = (".plt", ".plt.sec", ".plt.got")
_RELOCATION_SECTIONS = (".rela.plt", ".rela.dyn")
# A .plt section of libtorch is 0.7 MB and its .rela.dyn 8 MB.
_MAX_STUB_BYTES = 16 * 1024 * 1024
_MAX_RELOCATION_BYTES = 256 * 1024 * 1024
_MAX_STUB_NAME_BYTES = 10_000

# elf.h and the x86-64 psABI 1.0, table 4.9
_R_X86_64_GLOB_DAT, _R_X86_64_JUMP_SLOT, _R_X86_64_IRELATIVE = 6, 7, 37
_RELA = np.dtype([("offset", "<u8"), ("info", "<u8"), ("addend", "<i8")])
_SYMBOL_BYTES = 24
# The psABI's figure 5.2: .plt is an array of 16-byte entries, the first of which goes on to the
# dynamic linker, with IBT all of them.
_BINDING_BYTES = 16
_BINDING_NAME = b"_dl_runtime_resolve@plt\0"

U64 = npt.NDArray[np.uint64]


class Stubs(NamedTuple):
    """Stub ranges and the blob of their zero-terminated names."""

    starts: U64
    ends: U64
    name_offsets: U64
    names: bytes


def find_stubs(image: ElfImage, data: memoryview) -> Stubs:
    """Locate and name the linkage stubs of a binary.

    Args:
        image: Its headers.
        data: The whole file.

    Returns:
        The stubs in no particular order; none for machines other than x86-64.
    """
    slots, relocations = _slots(image, data)
    none = np.zeros(0, dtype=np.uint64)
    if image.machine != "X86_64" or image.bits != 64 or len(slots) == 0:
        return Stubs(none, none, none, b"")
    starts: list[U64] = [none]
    ends: list[U64] = [none]
    targets: list[U64] = [none]
    for name in _STUB_SECTIONS:
        section = image.section(name)
        if section is not None and 0 < section.size <= _MAX_STUB_BYTES:
            found = _jumps(section, data)
            starts.append(found[0])
            ends.append(found[1])
            targets.append(found[2])
    start, end, target = np.concatenate(starts), np.concatenate(ends), np.concatenate(targets)
    at = np.minimum(np.searchsorted(slots, target), len(slots) - 1)
    known = slots[at] == target
    named = _named(image, data, (start[known], end[known]), relocations[at[known]])
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


def _slots(image: ElfImage, data: memoryview) -> tuple[U64, npt.NDArray[np.void]]:
    """The relocations that fill function slots, sorted by slot address."""
    parts: list[npt.NDArray[np.void]] = [np.zeros(0, dtype=_RELA)]
    for name in _RELOCATION_SECTIONS:
        section = image.section(name)
        if section is None or section.size > _MAX_RELOCATION_BYTES:
            continue
        count = section.size // _RELA.itemsize
        part = np.frombuffer(data, _RELA, count, section.file_offset)
        kind = part["info"] & np.uint64(0xFFFFFFFF)
        wanted = (_R_X86_64_GLOB_DAT, _R_X86_64_JUMP_SLOT, _R_X86_64_IRELATIVE)
        parts.append(part[np.isin(kind, wanted)])
    relocations = np.concatenate(parts)
    order = np.argsort(relocations["offset"], kind="stable")
    return relocations["offset"][order], relocations[order]


def _jumps(section: Section, data: memoryview) -> tuple[U64, U64, U64]:
    """Start, end and slot address of each stub: the `jmp *disp32(%rip)` (ff 25) inside it."""
    width = np.uint64(section.entry_size if section.entry_size in (8, 16, 32) else 16)
    code = np.frombuffer(data, np.uint8, section.size, section.file_offset)
    places = np.flatnonzero((code[:-5] == 0xFF) & (code[1:-4] == 0x25))
    places = places[places + 6 <= len(code)]
    raw = np.zeros((len(places), 4), dtype=np.uint8)
    for byte in range(4):
        raw[:, byte] = code[places + 2 + byte]
    displacement = raw.view("<i4").reshape(-1).astype(np.int64)
    base = np.uint64(section.virtual_address)
    offsets = places.astype(np.uint64)
    starts = base + offsets // width * width
    target = base + offsets + np.uint64(6) + displacement.view(np.uint64)
    return starts, starts + width, target


def _named(
    image: ElfImage, data: memoryview, ranges: tuple[U64, U64], found: npt.NDArray[np.void]
) -> Stubs:
    symbols = image.section(".dynsym")
    strings = (
        image.sections[symbols.link]
        if symbols is not None and symbols.link < len(image.sections)
        else None
    )
    blob = bytearray()
    offsets = []
    for info, addend in zip(found["info"].tolist(), found["addend"].tolist(), strict=True):
        offsets.append(len(blob))
        name = b""
        if symbols is not None and strings is not None:
            name = _symbol_name(symbols, strings, data, info >> 32)
        # An indirect function has no symbol; objdump's spelling.
        blob += (name or b"*ABS*+0x%x" % max(addend, 0)) + b"@plt\0"
    return Stubs(*ranges, np.array(offsets, dtype=np.uint64), bytes(blob))


def _symbol_name(symbols: Section, strings: Section, data: memoryview, index: int) -> bytes:
    at = index * _SYMBOL_BYTES
    if index == 0 or at + _SYMBOL_BYTES > symbols.size:
        return b""
    place = symbols.file_offset + at
    name_at = int.from_bytes(data[place : place + 4], "little")
    if name_at >= strings.size:
        return b""
    begin = strings.file_offset + name_at
    stop = min(begin + _MAX_STUB_NAME_BYTES, strings.file_offset + strings.size)
    return bytes(data[begin:stop]).split(b"\0", 1)[0]
