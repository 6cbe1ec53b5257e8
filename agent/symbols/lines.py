# SPDX-License-Identifier: Apache-2.0
"""Source lines and inlined functions from DWARF, through `symbolic`.

`symbolic` turns DWARF into a SymCache, a flat file that answers an address in microseconds; the
cache on disk keeps that. Its ranges for plain symbols ignore their sizes, so only answers with a
line, which come from DWARF, are used here.

Split DWARF (.dwo) and supplementary files (dwz) are not followed.
"""

from __future__ import annotations

import mmap
import struct
import zlib
from typing import Any

from aiflame.agent.elf import records
from aiflame.agent.elf.image import ElfImage
from aiflame.agent.errors import AiflameError
from aiflame.agent.symbols.debugfiles import OpenElf
from aiflame.agent.symbols.frames import RawFrame
from symbolic._lowlevel import ffi
from symbolic.debuginfo import Archive
from symbolic.exceptions import SymbolicError
from symbolic.symcache import SYMCACHE_LATEST_VERSION, SymCache

# libtorch_cpu built with -g1 has some 600 MB; beyond, conversion takes tens of seconds and more
# memory than the worker may use.
DEFAULT_MAX_DWARF_BYTES = 1024 * 1024 * 1024
# A finished line table is a fraction of its DWARF.
_MAX_SYMCACHE_BYTES = 512 * 1024 * 1024
_CHUNK_BYTES = 1 << 20
# DWARF of one address that claims more inlined functions is damaged; compilers stop near 30.
_MAX_INLINED = 128

_MAGIC = b"AFLINE\0\x01"  # the last byte is the version of the layout
_HEADER = struct.Struct("<8sIIQ")  # magic, SymCache version, crc of the rest, load address


class BadDebugInfo(AiflameError):
    """The debug information is damaged."""


class DebugInfoTooLarge(BadDebugInfo):
    """The debug information is over the limit."""


class LineTable:
    """Lines and inlined functions of one binary, by its own virtual addresses."""

    def __init__(self, symcache: Any, load_address: int) -> None:
        self._symcache = symcache
        self._load_address = load_address

    @classmethod
    def build(cls, elf: OpenElf, max_dwarf_bytes: int) -> LineTable:
        """Convert the DWARF of a file.

        Raises:
            DebugInfoTooLarge: It is over the limit.
            BadDebugInfo: It is damaged.
        """
        size = dwarf_bytes(elf.image)
        if size > max_dwarf_bytes:
            raise DebugInfoTooLarge(f"{size} bytes of DWARF, over the limit of {max_dwarf_bytes}")
        try:
            mapped = mmap.mmap(elf.fd, 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise BadDebugInfo(f"cannot map: {error}") from error
        # What symbolic makes of bytes points into them, and does not keep them.
        data = ffi.from_buffer("uint8_t[]", mapped)
        made: list[Any] = []
        try:
            made.append(Archive.from_bytes(data))
            made.append(next(made[0].iter_objects()))
            symbols = made[1].make_symcache()
        except (SymbolicError, MemoryError, StopIteration, UnicodeDecodeError) as error:
            raise BadDebugInfo(f"{type(error).__name__}: {error}") from error
        finally:
            # Freed here and in this order, which a garbage collector would not keep.
            for one in reversed(made):
                one.__del__()
        return cls(symbols, elf.image.load_address)

    @classmethod
    def from_mapping(cls, mapping: mmap.mmap) -> LineTable:
        """Use a cache file.

        Raises:
            BadDebugInfo: It is cut, damaged, or of another version.
        """
        if len(mapping) < _HEADER.size:
            raise BadDebugInfo("cut inside the header")
        magic, version, crc, load_address = _HEADER.unpack_from(mapping)
        if magic != _MAGIC or version != SYMCACHE_LATEST_VERSION:
            raise BadDebugInfo("another version")
        data = mapping[_HEADER.size :]
        if zlib.crc32(data) != crc:
            raise BadDebugInfo("does not match its checksum")
        try:
            open_bytes: Any = SymCache.from_bytes
            return cls(open_bytes(data), load_address)
        except SymbolicError as error:
            raise BadDebugInfo(f"{type(error).__name__}: {error}") from error

    def to_chunks(self) -> list[bytes]:
        """The contents of a cache file, for `from_mapping`; [] when it is too large to keep."""
        stream = self._symcache.open_stream()
        chunks: list[bytes] = []
        size_bytes = crc = 0
        # Whoever reads more at once than there is takes memory for all that was asked for.
        while chunk := stream.read(_CHUNK_BYTES):
            size_bytes += len(chunk)
            if size_bytes > _MAX_SYMCACHE_BYTES:
                return []
            crc = zlib.crc32(chunk, crc)
            chunks.append(chunk)
        return [_HEADER.pack(_MAGIC, SYMCACHE_LATEST_VERSION, crc, self._load_address), *chunks]

    def lookup(self, address: int) -> tuple[RawFrame, ...]:
        """Functions at a virtual address, innermost inlined first; () without DWARF for it."""
        if address < self._load_address:
            return ()
        try:
            found = self._symcache.lookup(address - self._load_address)
        except (SymbolicError, UnicodeDecodeError, OverflowError):
            return ()
        if not any(location.line for location in found):
            return ()
        return tuple(
            RawFrame(
                "" if location.symbol in (None, "?") else location.symbol,
                location.full_path or "",
                location.line or 0,
            )
            for location in found[-_MAX_INLINED:]
        )


def dwarf_bytes(image: ElfImage) -> int:
    """Bytes of DWARF in the file, as stored (compressed sections count as they are)."""
    return sum(
        section.size
        for section in image.sections
        if section.name.startswith((".debug_", ".zdebug_")) and section.type != records.SHT_NOBITS
    )
