# SPDX-License-Identifier: Apache-2.0
"""Which bytes of a file its tables are made of, their digest, and a copy of them that stays.

Tables are kept on disk for whoever maps the same file, and anybody can make a file with another's
build id. So a table's name there holds a digest of all that may be read to make it. It is made from
a copy that holds those bytes and zeros elsewhere, and that nobody can change any more: a file that
is written to meanwhile, or that has other bytes where nobody looked, cannot leave its table under
another's name.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Callable, Iterable
from typing import NamedTuple

from aiflame.agent.elf import records as elf
from aiflame.agent.elf.image import ElfImage, Section
from aiflame.agent.target_files import BadTargetFile, TargetFile

# The ends of a file are read for `ElfImage.cache_key`; the first has the program headers, too.
_END_BYTES = 4096
_CHUNK_BYTES = 1 << 20
_ZEROS = bytes(_CHUNK_BYTES)
# DWARF of 1 GB and what is beside it; more is not parsed.
MAX_BYTES = 3 << 29
# Copied in 2 ms, while a cache of 14,000 files takes 10 ms to list.
_SMALL_BYTES = 2 << 20
# Of a kernel that PoCL compiles these are 2 KB: tables of so little take as long to find as to
# make, and to make those that are kept takes a process more.
_TINY_BYTES = 16 << 10
_TABLES_OF_SYMBOLS = (elf.SHT_SYMTAB, elf.SHT_DYNSYM)
_FDES = (".eh_frame", ".eh_frame_hdr")
# Of Go's programs at a fixed address, and of those at any (cmd/link/internal/ld/data.go).
GO_TABLES = (".gopclntab", ".data.rel.ro.gopclntab")
# What Go's runtime knows of a program, from Go 1.26 on; what each of Go's programs has; and where
# the table is in one without a section for it, among other data.
GO_MODULE, _GO_BUILD, _GO_DATA = ".go.module", ".go.buildinfo", ".data.rel.ro"
_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Contents(NamedTuple):
    """Bytes of a file.

    Attributes:
        size_bytes: Length of the file.
        parts: Offset and size of each part, ascending and disjoint.
    """

    size_bytes: int
    parts: tuple[tuple[int, int], ...]

    @property
    def is_small(self) -> bool:
        """Whether a copy is cheaper than to look for what was made of them, by their build id."""
        return self._read_bytes <= _SMALL_BYTES

    @property
    def is_tiny(self) -> bool:
        """Whether what is made of them is not worth keeping."""
        return self._read_bytes <= _TINY_BYTES

    @property
    def _read_bytes(self) -> int:
        return sum(size for _, size in self.parts)

    def digest(self, file: TargetFile, copy: int | None = None) -> bytes:
        """Returns a digest of the bytes, and where they are.

        Args:
            file: Has them.
            copy: Descriptor of a file to which they are copied.

        Raises:
            BadTargetFile: As `TargetFile.read`, or the file has shrunk.
        """
        found = hashlib.sha256(repr(self).encode())
        for offset, size in self.parts:
            for at in range(offset, offset + size, _CHUNK_BYTES):
                asked = min(_CHUNK_BYTES, offset + size - at)
                data = file.read(asked, at)
                if len(data) < asked:
                    raise BadTargetFile("cut while it is read")
                found.update(data)
                # A sparse file stays one: a gigabyte of zeros takes no memory.
                if copy is not None and data != _ZEROS[:asked]:
                    os.pwrite(copy, data, at)
        return found.digest()

    def copied(self, file: TargetFile) -> tuple[int, bytes]:
        """Returns a descriptor of a copy that cannot be changed, which the caller closes.

        Raises:
            BadTargetFile: As `digest`.
            OSError: There is no memory.
        """
        copy = os.memfd_create("copy", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(copy, self.size_bytes)
            found = self.digest(file, copy)
            fcntl.fcntl(copy, fcntl.F_ADD_SEALS, _SEALS)
        except (OSError, BadTargetFile):
            os.close(copy)
            raise
        return copy, found


def whole_file(size_bytes: int) -> Contents:
    """Returns all of a file.

    Where that is small its digest takes less than a parser to tell what of it is needed.
    """
    return Contents(size_bytes, ((0, size_bytes),))


def holds_go_table(image: ElfImage) -> Callable[[Section], bool]:
    """Returns whether a section has Go's table in it among other data."""
    names = {section.name for section in image.sections}
    is_so = _GO_BUILD in names and names.isdisjoint(GO_TABLES)
    return lambda section: is_so and section.name == _GO_DATA and section.type == elf.SHT_PROGBITS


def for_unwinding(file: TargetFile, image: ElfImage) -> Contents:
    """What an unwind table is made of: unwind information, code, and where functions are.

    Raises:
        BadTargetFile: It is more than any real file has, or cannot be read.
    """
    if not image.sections:
        return _contents(file, image, [(s.file_offset, s.file_size) for s in image.segments])
    is_of_go = holds_go_table(image)
    return _of_sections(file, image, lambda s: _is_for_unwinding(s) or is_of_go(s))


def for_symbols(file: TargetFile, image: ElfImage) -> Contents:
    """What symbol tables and line tables are made of: all but code and data.

    What Go's own table calls functions, and where those without a name are, is found out only of
    stripped files (`elf.go_table`, `elf.unwound`).

    Raises:
        BadTargetFile: As `for_unwinding`.
    """
    is_stripped = image.section_of_type(elf.SHT_SYMTAB) is None
    is_of_go = holds_go_table(image)

    def is_wanted(section: Section) -> bool:
        is_of_stripped = section.name in (*_FDES, *GO_TABLES, GO_MODULE) or is_of_go(section)
        return _is_for_symbols(section) or (is_stripped and is_of_stripped)

    return _of_sections(file, image, is_wanted)


def _is_for_unwinding(section: Section) -> bool:
    return (
        section.executable
        or section.type in _TABLES_OF_SYMBOLS
        or section.name in (*_FDES, *GO_TABLES, GO_MODULE, ".debug_frame")
    )


def _is_for_symbols(section: Section) -> bool:
    is_loaded = bool(section.flags & elf.SHF_ALLOC)
    is_code_or_data = is_loaded and section.type == elf.SHT_PROGBITS
    return not is_code_or_data or section.name.startswith(".plt")


def _of_sections(
    file: TargetFile, image: ElfImage, is_wanted: Callable[[Section], bool]
) -> Contents:
    wanted = [s for s in image.sections if s.type != elf.SHT_NOBITS and is_wanted(s)]
    return _contents(file, image, [(s.file_offset, s.size) for s in wanted])


def _contents(file: TargetFile, image: ElfImage, wanted: Iterable[tuple[int, int]]) -> Contents:
    parts: list[tuple[int, int]] = []
    end = total = 0
    for offset, size in sorted([*wanted, *_headers(file, image)]):
        begin, stop = max(offset, end), min(offset + size, file.size_bytes)
        if begin >= stop:
            continue
        if parts and begin == end:
            parts[-1] = parts[-1][0], stop - parts[-1][0]
        else:
            parts.append((begin, stop - begin))
        total += stop - begin
        end = stop
    if total > MAX_BYTES:
        raise BadTargetFile("more to read than any real file has")
    return Contents(file.size_bytes, tuple(parts))


def _headers(file: TargetFile, image: ElfImage) -> list[tuple[int, int]]:
    """Where all is that `ElfImage.read` reads."""
    layout = elf.FILE_HEADER[image.bits]
    header = elf.FileHeader(*layout.unpack_from(file.read(layout.size, 0)))
    small = (elf.PT_NOTE, elf.PT_INTERP, elf.PT_GNU_EH_FRAME)
    names = [
        (section.file_offset, section.size)
        for index, section in enumerate(image.sections)
        # The strings of an unusual table of sections are in one that looks like any other.
        if section.type in (elf.SHT_STRTAB, elf.SHT_NOTE)
        or section.name == ".gnu_debuglink"
        or index == header.shstrndx
    ]
    return [
        (0, _END_BYTES),
        (file.size_bytes - min(_END_BYTES, file.size_bytes), _END_BYTES),
        (header.phoff, header.phnum * elf.PROGRAM_HEADER[image.bits].itemsize),
        (header.shoff, max(len(image.sections), 1) * elf.SECTION_HEADER[image.bits].itemsize),
        *((s.file_offset, s.file_size) for s in image.segments if s.type in small),
        *names,
    ]
