# SPDX-License-Identifier: Apache-2.0
"""The records of .eh_frame and .debug_frame: which code each FDE is about, and its program.

The chain of lengths can only be followed one by one (0.05 s for 335,120 records); all else is done
for all FDEs at once. Each damaged record costs itself and is counted; a length that leads out of
the section ends the chain, since nothing says where the next record starts.

Formats: LSB Core 5.0 chapter 10.6 (.eh_frame), DWARF 5 chapter 6.4 (.debug_frame). It does not run
programs (`interpret`, `lockstep`).
"""

from __future__ import annotations

import struct
from array import array
from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from aiflame.agent.errors import AiflameError
from aiflame.agent.unwind import x86_64 as arch

# libtorch_cpu, among the largest libraries that exist, has 18 MB and 335,120 FDEs.
MAX_SECTION_BYTES = 128 * 1024 * 1024
MAX_RECORDS = 2_000_000
# It has 33; linkers merge equal ones.
MAX_CIES = 16_384
# Its longest program has 7,319 bytes.
MAX_PROGRAM_BYTES = 32 * 1024
# 32 MB in the kernel, and 1 GB while it is made; libtorch_cpu has 2.6 million.
MAX_ROWS = 8_000_000
# Zero words in the chain: the terminator of crtend.o, and what `ld -r` leaves between inputs.
_MAX_TERMINATORS = 64
# Operands are read before they are checked: at most 16 augmentation letters of 9 bytes each.
PADDING = bytes(256)

# DW_EH_PE_*, LSB Core 5.0 table 10-4 and 10-5
_ENCODED_BYTES = {0x0: 8, 0x2: 2, 0x3: 4, 0x4: 8, 0xA: 2, 0xB: 4, 0xC: 8}
_SIGNED = 0x8
_ABSOLUTE, _PC_RELATIVE = 0x00, 0x10
_PE_OMIT = 0xFF
_ESCAPE_64, _FIRST_RESERVED = 0xFFFF_FFFF, 0xFFFF_FFF0

U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]
_WORDS = struct.Struct("<II").unpack_from
_QUADS = struct.Struct("<QQ").unpack_from


class BadUnwindInfo(AiflameError):
    """No unwind table can be made from this file."""


class Cie(NamedTuple):
    """What FDEs share. `begin` and `end` bound the program that makes the initial state."""

    code_align: int
    data_align: int
    return_register: int
    encoding: int
    has_augmentation: bool
    is_signal_frame: bool
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Fdes:
    """Sound FDEs of one section, in file order; columns have shape (n,).

    Attributes:
        data: The section and PADDING.
        address: Virtual address of the section.
        starts: First virtual address that the FDE is about.
        sizes: How many bytes from there.
        begins: Offset of its program in `data`.
        ends: Offset after it.
        cie_rows: Its CIE, an index into `cies`.
        cies: The CIEs in use.
    """

    data: bytes
    address: int
    starts: U64
    sizes: U64
    begins: I64
    ends: I64
    cie_rows: I64
    cies: list[Cie]

    def __len__(self) -> int:
        return len(self.starts)


_RECORD_WORDS = 5


class _Chain(NamedTuple):
    """Records by their start, their id field, the byte after that field, and their end."""

    starts: I64
    id_offsets: I64
    bodies: I64
    ends: I64
    ids: U64


def parse_section(section: bytes, address: int, is_eh: bool, drops: Counter[str]) -> Fdes:
    """Find and decode the FDEs of a section.

    Args:
        section: Its bytes.
        address: Its virtual address.
        is_eh: .eh_frame; else .debug_frame.
        drops: Counts what was left out, by reason.

    Raises:
        BadUnwindInfo: It is too large.
    """
    if len(section) > MAX_SECTION_BYTES:
        raise BadUnwindInfo(f"{len(section)} bytes of unwind information, over the limit")
    data = section + PADDING
    chain = _follow(data, len(section), is_eh, drops)
    is_cie = chain.ids == np.uint64(0 if is_eh else arch.ALL_BITS)
    if is_eh:
        parents = chain.id_offsets - chain.ids.astype(np.uint32).view(np.int32)
    else:
        parents = np.minimum(chain.ids, np.uint64(len(data))).astype(np.int64)
    fdes = np.flatnonzero(~is_cie)
    cie_at = {int(chain.starts[row]): row for row in np.flatnonzero(is_cie).tolist()}
    used, which = np.unique(parents[fdes], return_inverse=True)
    cies: list[Cie] = []
    known = np.full(len(used), -1, np.int64)
    for index, start in enumerate(used.tolist()[:MAX_CIES]):
        row = cie_at.get(start)
        cie = None if row is None else _cie(data, int(chain.bodies[row]), int(chain.ends[row]))
        if cie is not None:
            known[index] = len(cies)
            cies.append(cie)
    cie_rows = known[which] if len(used) else np.zeros(0, np.int64)
    drops["bad CIE"] += int((cie_rows < 0).sum())
    kept = cie_rows >= 0
    return _decode(data, address, chain, (fdes[kept], cie_rows[kept], cies), drops)


def _follow(data: bytes, size: int, is_eh: bool, drops: Counter[str]) -> _Chain:
    """Walk the chain of lengths."""
    # Not a list: so many tuples would take half a gigabyte.
    found = array("Q")
    limit = MAX_RECORDS * _RECORD_WORDS
    position, terminators = 0, 0
    while position + 4 <= size and len(found) < limit:
        length, identity = _WORDS(data, position)
        id_at = position + 4
        if length == 0:
            terminators += 1
            position += 4
            if terminators > _MAX_TERMINATORS:
                break
            continue
        body = id_at + 4
        if length >= _FIRST_RESERVED:
            if length != _ESCAPE_64:
                break
            (length, identity), id_at = _QUADS(data, id_at), position + 12
            # In .eh_frame the id stays 4 bytes wide.
            body = id_at + (4 if is_eh else 8)
            identity = identity & 0xFFFF_FFFF if is_eh else identity
        elif not is_eh and identity == 0xFFFF_FFFF:
            identity = arch.ALL_BITS
        end = id_at + length
        if end > size:
            break
        if body <= end:
            found.extend((position, id_at, body, end, identity))
        else:
            drops["bad record"] += 1
        position = end
    if position + 4 <= size:
        drops["records not reached"] += 1
    words = np.frombuffer(found, np.uint64).reshape(-1, _RECORD_WORDS)
    offsets = words.astype(np.int64)
    return _Chain(offsets[:, 0], offsets[:, 1], offsets[:, 2], offsets[:, 3], words[:, 4])


def read_uleb(data: bytes, position: int) -> tuple[int, int]:
    """One unsigned LEB128 of up to ten bytes, and the offset after it."""
    value = shift = 0
    while True:
        byte = data[position]
        value |= (byte & 0x7F) << shift
        position += 1
        shift += 7
        if byte < 0x80 or shift >= 70:
            return value, position


def read_sleb(data: bytes, position: int) -> tuple[int, int]:
    """One signed LEB128, and the offset after it."""
    value, end = read_uleb(data, position)
    bits = 7 * (end - position)
    return (value - (1 << bits) if data[end - 1] & 0x40 else value), end


def _cie(data: bytes, position: int, end: int) -> Cie | None:
    """One CIE, or None when it is cut or of a form that is not understood."""
    version = data[position]
    text_end = data.find(b"\0", position + 1, end)
    if version not in (1, 3, 4) or not 0 <= text_end - position - 1 <= 16:
        return None
    augmentation = data[position + 1 : text_end]
    position = text_end + 1
    if version == 4:
        # address_size, segment_selector_size
        if data[position : position + 2] != b"\x08\x00":
            return None
        position += 2
    code_align, position = read_uleb(data, position)
    data_align, position = read_sleb(data, position)
    register, position = (
        (data[position], position + 1) if version == 1 else read_uleb(data, position)
    )
    encoding, begin = _ABSOLUTE, position
    if augmentation.startswith(b"z"):
        length, position = read_uleb(data, position)
        begin = position + length
        encoding = _fde_encoding(data, position, augmentation)
    elif augmentation:
        return None
    # Nothing real is aligned more coarsely, and products stay far inside 64 bits.
    sane = 0 < code_align <= 16 and -256 <= data_align <= 256
    if not sane or begin > end or end - begin > MAX_PROGRAM_BYTES or encoding == _PE_OMIT:
        return None
    flags = (augmentation.startswith(b"z"), b"S" in augmentation)
    return Cie(code_align, data_align, register, encoding, *flags, begin, end)


def _fde_encoding(data: bytes, position: int, augmentation: bytes) -> int:
    """How FDEs of this CIE write addresses; DW_EH_PE_omit when that cannot be told."""
    encoding = _ABSOLUTE
    for letter in augmentation[1:]:
        if letter == ord("R"):
            encoding = data[position]
            position += 1
        elif letter == ord("L"):
            position += 1
        elif letter == ord("P"):
            size = _ENCODED_BYTES.get(data[position] & 0xF)
            if size is None:
                return _PE_OMIT
            position += 1 + size
        elif letter not in b"SB":
            return _PE_OMIT
    return encoding


def _decode(
    data: bytes,
    address: int,
    chain: _Chain,
    chosen: tuple[I64, I64, list[Cie]],
    drops: Counter[str],
) -> Fdes:
    """Address, size and program of the FDEs, for each encoding of addresses in turn."""
    rows, cie_rows, cies = chosen
    view = np.frombuffer(data, np.uint8)
    offsets, limits = chain.bodies[rows], chain.ends[rows]
    starts, sizes = np.zeros(len(rows), np.uint64), np.zeros(len(rows), np.uint64)
    begins = offsets.copy()
    sound, unknown = np.zeros(len(rows), bool), np.zeros(len(rows), bool)
    encodings = np.array([cie.encoding for cie in cies], np.int64)[cie_rows]
    for encoding in np.unique(encodings).tolist():
        width = _ENCODED_BYTES.get(encoding & 0xF)
        if width is None or encoding & 0xF0 not in (_ABSOLUTE, _PC_RELATIVE):
            unknown |= encodings == encoding
            continue
        at = np.flatnonzero((encodings == encoding) & (offsets + 2 * width <= limits))
        value = _fixed(view, offsets[at], width, bool(encoding & _SIGNED))
        if encoding & 0xF0 == _PC_RELATIVE:
            value += offsets[at].astype(np.uint64) + np.uint64(address)
        starts[at] = value
        sizes[at] = _fixed(view, offsets[at] + width, width, False)
        begins[at] += 2 * width
        sound[at] = True
    has_augmentation = np.array([cie.has_augmentation for cie in cies], bool)[cie_rows]
    at = np.flatnonzero(has_augmentation & sound)
    length, after = read_ulebs(view, begins[at])
    begins[at] = np.where(length >= 0, length + after, len(data))
    long = sound & (limits - begins > MAX_PROGRAM_BYTES)
    drops["long program"] += int(long.sum())
    kept = sound & (begins <= limits) & ~long
    drops["unknown pointer encoding"] += int(unknown.sum())
    drops["bad record"] += int((~kept & ~long & ~unknown).sum())
    columns = (starts[kept], sizes[kept], begins[kept], limits[kept], cie_rows[kept])
    return Fdes(data, address, *columns, cies)


def _fixed(view: Bytes, offsets: I64, width: int, is_signed: bool) -> U64:
    """Little-endian numbers of one width at any offsets, sign-extended to 64 bits if asked."""
    raw = np.empty((len(offsets), width), np.uint8)
    for byte in range(width):
        raw[:, byte] = view[offsets + byte]
    values = raw.view(f"<{'i' if is_signed else 'u'}{width}").reshape(-1)
    return values.astype(np.int64).view(np.uint64) if is_signed else values.astype(np.uint64)


def read_ulebs(view: Bytes, offsets: I64) -> tuple[I64, I64]:
    """Unsigned LEB128 numbers at any offsets, and the offsets after them.

    Returns:
        Values (-1 where longer than five bytes) and offsets, both of shape (n,).
    """
    byte = view[offsets]
    values = (byte & 0x7F).astype(np.int64)
    after = offsets + 1
    more = np.flatnonzero(byte >= 0x80)
    for shift in (7, 14, 21, 28):
        if not len(more):
            return values, after
        byte = view[after[more]]
        values[more] |= (byte & 0x7F).astype(np.int64) << shift
        after[more] += 1
        more = more[byte >= 0x80]
    values[more] = -1
    return values, after
