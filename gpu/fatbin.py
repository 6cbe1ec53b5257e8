# SPDX-License-Identifier: Apache-2.0
"""Names of the kernels in device code that nvcc put into a program (section .nv_fatbin).

A last resort: which names a file may launch, where neither a call nor a symbol told them. It tells
nothing of which launch is which.

NVIDIA documents no format. What is read here was seen in what nvcc 13.0 writes in each of its
compression modes: containers of members, each machine code (an ELF file) or text (PTX), as it is
or compressed by LZ4 or zstd. Of machine code only the beginning is read, where its section names
are: each kernel has a section .nv.constant0.NAME for its parameters. PTX is left out.
"""

from __future__ import annotations

import ctypes
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

# Container: magic, version, size of this header, size of the members.
_CONTAINER = struct.Struct("<4sHHQ")
_MAGIC = bytes.fromhex("50ed55ba")
# Member: kind, version, size of this header, padded size of the data, size if compressed, 20 bytes
# of other things, flags, 8 bytes, decompressed size.
_MEMBER = struct.Struct("<HHIQI20xQ8xQ")
_KIND_MACHINE_CODE = 2
_FLAG_LZ4, _FLAG_ZSTD = 0x2000, 0x8000

# Section names of a library with thousands of kernels.
_MAX_BEGINNING_BYTES = 1 << 20
# Machine code of the largest libraries is built in pieces of some MB.
_MAX_DECOMPRESSED_BYTES = 64 << 20
# cuBLAS has some 1,000 members. All together may cost a few seconds.
_MAX_MEMBERS = 10_000
_MAX_TOTAL_BYTES = 256 << 20
# LZ4 is decompressed here, at some 4 MB/s.
_LZ4_COST = 8
_MAX_NAMES = 100_000
_MAX_NAME_BYTES = 10_000

_KERNEL = re.compile(rb"\0\.nv\.constant0\.([^\0]{1,%d})\0" % _MAX_NAME_BYTES)


@dataclass(frozen=True, slots=True)
class FatbinNames:
    """What was found.

    Attributes:
        names: Linkage names of kernels, without repetition, sorted.
        unread: Members that could not be read: damaged, too many, or compressed by zstd on a
            machine without its library.
    """

    names: tuple[str, ...]
    unread: int


def names_in_fatbin(data: bytes) -> FatbinNames:
    """Returns the kernels whose machine code is in a .nv_fatbin section.

    Args:
        data: The section, or as much of it as the caller wants to have read.
    """
    names: set[str] = set()
    unread = 0
    left = _MAX_TOTAL_BYTES
    for number, member in enumerate(_members(data)):
        beginning = None
        if member is not None and number < _MAX_MEMBERS and member.cost_bytes <= left:
            left -= member.cost_bytes
            beginning = _beginning(member)
        if beginning is None:
            unread += 1
            continue
        found = {match[1].decode("utf-8", "replace") for match in _KERNEL.finditer(beginning)}
        if len(names) + len(found) > _MAX_NAMES:
            unread += 1
        else:
            names |= found
    return FatbinNames(tuple(sorted(names)), unread)


@dataclass(frozen=True, slots=True)
class _Member:
    data: bytes
    flags: int
    decompressed_bytes: int

    @property
    def cost_bytes(self) -> int:
        """How much is decompressed to see its beginning, in the time that zstd takes."""
        if self.flags & _FLAG_ZSTD:
            return self.decompressed_bytes
        beginning = min(self.decompressed_bytes, _MAX_BEGINNING_BYTES)
        return beginning * _LZ4_COST if self.flags & _FLAG_LZ4 else beginning


def _members(data: bytes) -> Iterator[_Member | None]:
    """Yields members with machine code, None for one that reaches out of the data."""
    at = data.find(_MAGIC)
    while 0 <= at <= len(data) - _CONTAINER.size:
        _, _, header_bytes, size = _CONTAINER.unpack_from(data, at)
        if header_bytes < _CONTAINER.size:
            at = data.find(_MAGIC, at + 1)
            continue
        end = min(at + header_bytes + size, len(data))
        at += header_bytes
        while at + _MEMBER.size <= end:
            kind, _, header, padded, packed, flags, size = _MEMBER.unpack_from(data, at)
            if header < _MEMBER.size or at + header + padded > end:
                yield None
                break
            if kind == _KIND_MACHINE_CODE:
                is_packed = flags & (_FLAG_LZ4 | _FLAG_ZSTD)
                begin = at + header
                stop = begin + min(padded, packed if is_packed else padded)
                yield _Member(data[begin:stop], flags, size if is_packed else padded)
            at += header + padded
        at = data.find(_MAGIC, end)


def _beginning(member: _Member) -> bytes | None:
    """Returns the first bytes of a member's code, None where they cannot be had."""
    if member.flags & _FLAG_ZSTD:
        return _decompress_zstd(member.data, member.decompressed_bytes)
    if member.flags & _FLAG_LZ4:
        return _decompress_lz4(member.data, _MAX_BEGINNING_BYTES)
    return member.data[:_MAX_BEGINNING_BYTES]


def _decompress_lz4(data: bytes, limit: int) -> bytes | None:
    """Decompresses the beginning of an LZ4 block (lz4_Block_format.md), None if it is damaged."""
    out = bytearray()
    at = 0
    try:
        while at < len(data) and len(out) < limit:
            token = data[at]
            length, at = _lz4_length(data, at + 1, token >> 4)
            out += data[at : at + length]
            at += length
            if at >= len(data):
                break  # the last sequence is literals alone
            distance = data[at] | data[at + 1] << 8
            length, at = _lz4_length(data, at + 2, token & 15)
            length = min(length + 4, limit)
            if not 0 < distance <= len(out):
                return None
            # A copy may overlap what it writes: then it repeats.
            start = len(out) - distance
            piece = out[start : start + length]
            out += (piece * (length // len(piece) + 1))[:length]
    except IndexError:
        return None
    return bytes(out[:limit])


def _lz4_length(data: bytes, at: int, length: int) -> tuple[int, int]:
    if length == 15:
        while data[at] == 255:
            length += 255
            at += 1
        length += data[at]
        at += 1
    return length, at


def _decompress_zstd(data: bytes, size: int) -> bytes | None:
    """Decompresses by the system's library, which distributions have for their packages."""
    library = _zstd()
    if library is None or not 0 < size <= _MAX_DECOMPRESSED_BYTES:
        return None
    out = ctypes.create_string_buffer(size)
    done = library.ZSTD_decompress(out, size, data, len(data))
    if library.ZSTD_isError(done) or done > size:
        return None
    return out.raw[: min(done, _MAX_BEGINNING_BYTES)]


@cache
def _zstd() -> ctypes.CDLL | None:
    """Returns libzstd (zstd.h of 1.x), None where there is none."""
    try:
        library = ctypes.CDLL("libzstd.so.1")
    except OSError:
        return None
    library.ZSTD_decompress.restype = ctypes.c_size_t
    library.ZSTD_decompress.argtypes = [
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_char_p,
        ctypes.c_size_t,
    ]
    library.ZSTD_isError.restype = ctypes.c_uint
    library.ZSTD_isError.argtypes = [ctypes.c_size_t]
    return library
