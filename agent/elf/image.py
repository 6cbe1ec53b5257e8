# SPDX-License-Identifier: Apache-2.0
"""The headers of an ELF file: segments, sections, build id, where its debug file is.

The file belongs to the target and may be cut, lie about its counts, or be a sparse 10 GB: counts
are bounded, and what lies outside the file is presented as empty.

Segments decide what the loader does, so a file without sound program headers is refused. Section
headers only help tools: when they are damaged the file counts as stripped, and `damage` says why.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from aiflame.agent.elf import records as elf
from aiflame.agent.target_files import BadTargetFile, TargetFile

# Real executables have under 100 sections and under 20 segments; objects compiled with
# -ffunction-sections have more, but are never mapped.
MAX_SECTIONS = 2048
MAX_SEGMENTS = 256
# A build id is 20 bytes (SHA-1), at times 8, 16 or 32; a file has two to ten notes.
_MAX_NOTES_BYTES = 64 * 1024
_MAX_NOTES = 1024
_MAX_BUILD_ID_BYTES = 64
_MAX_SECTION_NAMES_BYTES = 1024 * 1024
# The longest name that is asked for has 18 bytes.
_MAX_SECTION_NAME_BYTES = 256
_MAX_PATH_BYTES = 4096  # PATH_MAX
_DIGEST_BYTES = 4096  # of either end, for files without a build id
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class BadElf(BadTargetFile):
    """The file is not an ELF executable or library of this machine's kind, or it is damaged."""


class NotElf(BadElf):
    """The file does not begin as ELF files do: a script, or another system's program."""


class Segment(NamedTuple):
    """One program header; all in bytes.

    Attributes:
        type: PT_LOAD and so on.
        file_offset: Where it begins in the file.
        virtual_address: Where its first byte is mapped, before the load bias.
        file_size: How much of it lies in the file, whatever the header says.
        executable: Holds instructions.
    """

    type: int
    file_offset: int
    virtual_address: int
    file_size: int
    executable: bool

    def holds(self, address: int) -> bool:
        """Whether the byte at a virtual address comes from the file."""
        return 0 <= address - self.virtual_address < self.file_size

    def file_offset_of(self, address: int) -> int:
        """Where in the file a virtual address of the segment is."""
        return address - self.virtual_address + self.file_offset


class Section(NamedTuple):
    """One section header, without bytes where it claims some outside the file.

    Attributes:
        name: Without its zero byte.
        type: SHT_SYMTAB and so on.
        flags: SHF_*.
        virtual_address: Before the load bias, 0 for one that is not mapped.
        file_offset: Of the first byte.
        size: In bytes.
        link: Index of the section that this one refers to.
        entry_size: Of a record in bytes, as the header says it: nothing may rely on it.
    """

    name: str
    type: int
    flags: int
    virtual_address: int
    file_offset: int
    size: int
    link: int
    entry_size: int

    @property
    def executable(self) -> bool:
        """Holds instructions."""
        return bool(self.flags & elf.SHF_EXECINSTR)

    @property
    def end_address(self) -> int:
        """Virtual address after the last byte."""
        return self.virtual_address + self.size


class DebugLink(NamedTuple):
    """Contents of .gnu_debuglink: a file name without directory, and its CRC-32."""

    name: str
    crc: int


@dataclass(frozen=True, slots=True)
class ElfImage:
    """What the headers of one ELF file say.

    Attributes:
        build_id: GNU build id in lower-case hex, "" without one.
        cache_key: The build id, or else "x-" and a digest; then, for either, a digest of both
            ends and the length. A file that copies only another's build id shares no key with it.
        kind: "exec" (fixed addresses) or "dyn" (library or position-independent program).
        machine: The ELF name without its prefix ("X86_64", "AARCH64"), or its number.
        bits: 32 or 64.
        entry: Virtual address at which the program begins, 0 for most libraries.
        interp: The dynamic loader that the program asks for, "" for none.
        segments: Program headers in file order.
        loads: Those that are mapped.
        sections: Section headers with their indexes, () when stripped of them or damaged.
        debuglink: Where the separate debug file is, or None.
        size_bytes: Length of the file.
        damage: Why `sections` has less than the header promises, else "".
    """

    build_id: str
    cache_key: str
    kind: str
    machine: str
    bits: int
    entry: int
    interp: str
    segments: tuple[Segment, ...]
    loads: tuple[Segment, ...]
    sections: tuple[Section, ...]
    debuglink: DebugLink | None
    size_bytes: int
    damage: str

    @classmethod
    def from_fd(cls, fd: int) -> ElfImage:
        """Read the headers of an open file, in a process that nothing but its own work depends on.

        Raises:
            BadElf: As `read`.
        """
        return cls.read(TargetFile(fd))

    @classmethod
    def read(cls, file: TargetFile) -> ElfImage:
        """Read the headers of a file.

        Raises:
            BadElf: It is not ELF, is damaged, or cannot be read.
        """
        try:
            return _parse(file)
        except BadElf:
            raise
        except BadTargetFile as error:
            raise BadElf(str(error)) from error

    def section(self, name: str) -> Section | None:
        """The first section of that name whose bytes lie in the file, or None."""
        for section in self.sections:
            if section.name == name and section.type != elf.SHT_NOBITS:
                return section
        return None

    def section_of_type(self, kind: int) -> Section | None:
        """The first section of a type, or None."""
        return next((section for section in self.sections if section.type == kind), None)

    @property
    def load_address(self) -> int:
        """Virtual address of the first mapped segment: 0 for libraries, 0x400000 for programs."""
        return self.loads[0].virtual_address if self.loads else 0

    def load_at(self, address: int) -> Segment | None:
        """The mapped segment whose bytes in the file a virtual address is in, or None."""
        return next((load for load in self.loads if load.holds(address)), None)

    def file_offset_of(self, address: int) -> int | None:
        """Where in the file the byte at a virtual address is, or None."""
        load = self.load_at(address)
        return None if load is None else load.file_offset_of(address)

    def read_at(self, file: TargetFile, address: int, size: int) -> bytes:
        """Up to `size` bytes of the segment at a virtual address, b"" where the file has none.

        Raises:
            BadTargetFile: As `TargetFile.read`.
        """
        load = self.load_at(address)
        if load is None:
            return b""
        left = load.file_size - (address - load.virtual_address)
        return file.read(min(size, left), load.file_offset_of(address))

    def bias(self, start: int, file_offset: int) -> int:
        """What to subtract from an address in a mapping to get the file's own.

        Args:
            start: Where the mapping begins.
            file_offset: What it maps there.
        """
        return bias(self.loads, start, file_offset)


def bias(loads: Iterable[Segment], start: int, file_offset: int) -> int:
    """What to subtract from an address in a mapping to get the file's own.

    Args:
        loads: The segments of the file that are mapped.
        start: Where the mapping begins.
        file_offset: What it maps there.
    """
    for load in loads:
        # The loader maps whole pages, also what precedes the segment in its first one.
        first = load.file_offset & -_PAGE_BYTES
        is_inside = first <= file_offset < load.file_offset + load.file_size
        if load.executable and is_inside:
            return start - load.virtual_address - (file_offset - load.file_offset)
    return start - file_offset


def _parse(file: TargetFile) -> ElfImage:
    start = file.read(elf.FILE_HEADER[64].size, 0)
    if start[:4] != elf.MAGIC:
        raise NotElf("not an ELF file")
    if len(start) < elf.FILE_HEADER[32].size:
        raise BadElf("cut inside the file header")
    bits = elf.ELFCLASS.get(start[4])
    if bits is None or start[5] not in (elf.ELFDATA2LSB, elf.ELFDATA2MSB):
        raise BadElf("unknown class or byte order")
    if start[5] == elf.ELFDATA2MSB:
        raise BadElf("big-endian code cannot run here")
    if len(start) < elf.FILE_HEADER[bits].size:
        raise BadElf("cut inside the file header")
    header = elf.FileHeader(*elf.FILE_HEADER[bits].unpack_from(start))
    kind = {elf.ET_EXEC: "exec", elf.ET_DYN: "dyn"}.get(header.type)
    if kind is None:
        raise BadElf(f"neither a program nor a library: type {header.type}")
    segments = _segments(file, bits, header)
    sections, damage = _sections(file, bits, header)
    build_id = _build_id(file, segments, sections)
    return ElfImage(
        build_id=build_id,
        cache_key=_cache_key(file, build_id),
        kind=kind,
        machine=elf.MACHINES.get(header.machine, str(header.machine)),
        bits=bits,
        entry=header.entry,
        interp=_interp(file, segments),
        segments=segments,
        loads=tuple(segment for segment in segments if segment.type == elf.PT_LOAD),
        sections=sections,
        debuglink=_debuglink(file, sections),
        size_bytes=file.size_bytes,
        damage=damage,
    )


def _segments(file: TargetFile, bits: int, header: elf.FileHeader) -> tuple[Segment, ...]:
    layout = elf.PROGRAM_HEADER[bits]
    if not 0 < header.phnum <= MAX_SEGMENTS:
        raise BadElf(f"{header.phnum} program headers")
    # The kernel refuses any other size (v6.18 fs/binfmt_elf.c, load_elf_phdrs).
    if header.phentsize != layout.itemsize:
        raise BadElf(f"program headers of {header.phentsize} bytes")
    data = file.read(header.phnum * layout.itemsize, header.phoff)
    if len(data) < header.phnum * layout.itemsize:
        raise BadElf("program headers lie outside the file")
    found = []
    for kind, flags, offset, address, file_size, memory_size in _rows(
        data, layout, "type", "flags", "offset", "vaddr", "filesz", "memsz"
    ):
        if kind == elf.PT_LOAD and address + memory_size >= 1 << 64:
            raise BadElf("a segment wraps around the address space")
        in_file = max(0, min(file_size, file.size_bytes - offset))
        found.append(Segment(kind, offset, address, in_file, bool(flags & elf.PF_X)))
    return tuple(found)


def _rows(data: bytes, layout: np.dtype[np.void], *fields: str) -> list[tuple[int, ...]]:
    """The named fields of each record."""
    table = np.frombuffer(data, layout)
    return list(zip(*(table[field].tolist() for field in fields), strict=True))


def _sections(
    file: TargetFile, bits: int, header: elf.FileHeader
) -> tuple[tuple[Section, ...], str]:
    """Section headers, and what is wrong with them; () where they are of no use."""
    layout = elf.SECTION_HEADER[bits]
    if header.shoff == 0:
        return (), ""
    first = file.read(layout.itemsize, header.shoff)
    if len(first) < layout.itemsize or header.shentsize != layout.itemsize:
        return (), "section headers lie outside the file"
    # Counts that do not fit their fields are in the first header (gABI, chapter 4).
    ((size, link),) = _rows(first, layout, "size", "link")
    count = header.shnum or size
    names_index = link if header.shstrndx == elf.SHN_XINDEX else header.shstrndx
    if not 0 < count <= MAX_SECTIONS or names_index >= count:
        return (), f"{count} section headers do not fit the file"
    data = file.read(count * layout.itemsize, header.shoff)
    if len(data) < count * layout.itemsize:
        return (), f"{count} section headers do not fit the file"
    rows = _rows(data, layout, "name", "type", "flags", "addr", "offset", "size", "link", "entsize")
    names_offset, names_size = rows[names_index][4:6]
    names = file.read(min(names_size, _MAX_SECTION_NAMES_BYTES), names_offset)
    sections = tuple(_section(row, names, file.size_bytes) for row in rows)
    outside = [
        section.name or f"number {index}"
        for index, (section, row) in enumerate(zip(sections, rows, strict=True))
        if section.type != elf.SHT_NOBITS and section.size < row[5]
    ]
    return sections, f"section {outside[0]} lies outside the file" if outside else ""


def _section(row: tuple[int, ...], names: bytes, file_bytes: int) -> Section:
    """One header; a section that reaches outside the file is presented as empty."""
    name_at, kind, flags, address, offset, size, link, entry_size = row
    name = names[name_at : name_at + _MAX_SECTION_NAME_BYTES].split(b"\0", 1)[0]
    if kind == elf.SHT_NOBITS:
        offset = min(offset, file_bytes)
    elif offset + size > file_bytes:
        offset = size = 0
    size = min(size, (1 << 64) - 1 - address)
    text = name.decode("utf-8", "replace")
    return Section(text, kind, flags, address, offset, size, link, entry_size)


def _build_id(
    file: TargetFile, segments: tuple[Segment, ...], sections: tuple[Section, ...]
) -> str:
    """From the note segments, which strip keeps, then from the section of debug files."""
    ranges = [(s.file_offset, s.file_size) for s in segments if s.type == elf.PT_NOTE]
    ranges += [
        (s.file_offset, s.size)
        for s in sections
        if s.type == elf.SHT_NOTE and s.name == ".note.gnu.build-id"
    ]
    left = _MAX_NOTES
    for offset, size in ranges[:MAX_SEGMENTS]:
        found, count = _build_id_in(file.read(min(size, _MAX_NOTES_BYTES), offset), left)
        left -= count
        if found or left <= 0:
            return found
    return ""


def _build_id_in(notes: bytes, limit: int) -> tuple[str, int]:
    """The build id among some notes, "" for none, and how many were looked at."""
    position = count = 0
    while position + elf.NOTE_HEADER.size <= len(notes) and count < limit:
        count += 1
        name_bytes, value_bytes, kind = elf.NOTE_HEADER.unpack_from(notes, position)
        name_at = position + elf.NOTE_HEADER.size
        # Notes are padded to 4 bytes; .note.gnu.property, padded to 8, has a length that fits both.
        value_at = name_at + (name_bytes + 3) // 4 * 4
        position = value_at + (value_bytes + 3) // 4 * 4
        if notes[name_at : name_at + 4] == b"GNU\0" and kind == elf.NT_GNU_BUILD_ID:
            value = notes[value_at : value_at + value_bytes]
            is_complete = 0 < len(value) == value_bytes <= _MAX_BUILD_ID_BYTES
            return value.hex() if is_complete else "", count
    return "", count


def _interp(file: TargetFile, segments: tuple[Segment, ...]) -> str:
    for segment in segments:
        if segment.type == elf.PT_INTERP:
            data = file.read(min(segment.file_size, _MAX_PATH_BYTES), segment.file_offset)
            return os.fsdecode(data.split(b"\0", 1)[0])
    return ""


def _debuglink(file: TargetFile, sections: tuple[Section, ...]) -> DebugLink | None:
    """GDB manual, "Separate Debug Files": name, zero byte, padding to 4, CRC-32."""
    for section in sections:
        if section.name == ".gnu_debuglink" and section.type != elf.SHT_NOBITS:
            data = file.read(min(section.size, _MAX_PATH_BYTES), section.file_offset)
            name, found, _ = data.partition(b"\0")
            crc_at = (len(name) + 4) // 4 * 4
            # A name with a directory would be a path of the target's choosing.
            if not found or not name or b"/" in name or len(data) < crc_at + 4:
                return None
            return DebugLink(os.fsdecode(name), struct.unpack_from("<I", data, crc_at)[0])
    return None


def _cache_key(file: TargetFile, build_id: str) -> str:
    digest = hashlib.sha256(file.size_bytes.to_bytes(8, "little"))
    digest.update(file.read(_DIGEST_BYTES, 0))
    digest.update(file.read(_DIGEST_BYTES, max(0, file.size_bytes - _DIGEST_BYTES)))
    return f"{build_id}-{digest.hexdigest()[:16]}" if build_id else f"x-{digest.hexdigest()}"
