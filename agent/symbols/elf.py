# SPDX-License-Identifier: Apache-2.0
"""The headers of an ELF file: segments, sections, build id, where its debug file is.

pyelftools decodes the structures; this module bounds what it is asked to decode, since the file
belongs to the target and may be cut, lie about its counts, or be a sparse 10 GB. Everything is
read in small pieces: nothing is mapped, so a file that shrinks meanwhile cannot kill the recorder,
and a 434 MB library costs the same as a small one.

Segments decide what the loader does, so a file without sound program headers is refused. Section
headers only help tools: when they are damaged the file counts as stripped, and `damage` says why.

It does not read symbol tables (`table`), unwind tables or DWARF (`lines`).
"""

from __future__ import annotations

import hashlib
import io
import os
import struct
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from aiflame.agent.target_files import ELF_DAMAGE, BadTargetFile, TargetFile
from elftools.common.utils import struct_parse
from elftools.elf.elffile import ELFFile

# Real executables have under 100 sections and under 20 segments; objects compiled with
# -ffunction-sections have more, but are never mapped.
MAX_SECTIONS = 2048
MAX_SEGMENTS = 256
# A build id is 20 bytes (SHA-1), at times 8, 16 or 32; names of notes are shorter still.
MAX_NOTES_BYTES = 64 * 1024
MAX_BUILD_ID_BYTES = 64
MAX_SECTION_NAMES_BYTES = 1024 * 1024
MAX_PATH_BYTES = 4096  # PATH_MAX
_DIGEST_BYTES = 4096  # of either end, for files without a build id

# elf.h
SHF_EXECINSTR = 0x4
SHT_NOBITS = "SHT_NOBITS"
_PT_LOAD, _PT_INTERP, _PT_NOTE, _PF_X = "PT_LOAD", "PT_INTERP", "PT_NOTE", 0x1
_NT_GNU_BUILD_ID = 3

U64 = npt.NDArray[np.uint64]


class BadElf(BadTargetFile):
    """The file is not an ELF executable or library of this machine's kind, or it is damaged."""


class NotElf(BadElf):
    """The file does not begin as ELF files do: a script, or another system's program."""


class LoadSegment(NamedTuple):
    """A part of the file that the loader maps. All in bytes."""

    file_offset: int
    virtual_address: int
    file_size: int
    executable: bool


class Section(NamedTuple):
    """One section header; `type` is the ELF name (`SHT_SYMTAB`) or a number as text."""

    name: str
    type: str
    flags: int
    virtual_address: int
    file_offset: int
    size: int
    link: int
    entry_size: int

    @property
    def executable(self) -> bool:
        """Holds instructions."""
        return bool(self.flags & SHF_EXECINSTR)

    @property
    def end_address(self) -> int:
        """Virtual address behind the last byte."""
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
        machine: The ELF name without its prefix: "X86_64", "AARCH64".
        bits: 32 or 64.
        interp: The dynamic loader that the program asks for, "" for none.
        loads: Mapped segments in file order.
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
    interp: str
    loads: tuple[LoadSegment, ...]
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
        except ELF_DAMAGE as error:
            raise BadElf(f"damaged headers: {type(error).__name__}: {error}") from error

    def section(self, name: str) -> Section | None:
        """The first section of that name whose bytes lie in the file, or None."""
        for section in self.sections:
            if section.name == name and section.type != SHT_NOBITS:
                return section
        return None

    @property
    def load_address(self) -> int:
        """Virtual address of the first mapped segment: 0 for libraries, 0x400000 for programs."""
        return self.loads[0].virtual_address if self.loads else 0

    def address_of(self, file_offset: int) -> int | None:
        """Virtual address at which a byte of the file is mapped, or None."""
        addresses, mapped = self.addresses_of(np.array([file_offset], dtype=np.uint64))
        return int(addresses[0]) if mapped[0] else None

    def addresses_of(self, file_offsets: U64) -> tuple[U64, npt.NDArray[np.bool_]]:
        """Virtual addresses of file offsets, and which of them are mapped at all.

        Executable segments win where segments share bytes.

        Args:
            file_offsets: Shape (n,).

        Returns:
            Addresses and a mask, both of shape (n,); addresses outside the mask are 0.
        """
        addresses = np.zeros(len(file_offsets), dtype=np.uint64)
        mapped = np.zeros(len(file_offsets), dtype=bool)
        for load in sorted(self.loads, key=lambda load: load.executable):
            begin = np.uint64(load.file_offset)
            inside = (file_offsets >= begin) & (file_offsets - begin < np.uint64(load.file_size))
            shifted = file_offsets[inside] - begin + np.uint64(load.virtual_address)
            addresses[inside] = shifted
            mapped |= inside
        return addresses, mapped


def _parse(file: TargetFile) -> ElfImage:
    size = file.size_bytes
    if file.read(4, 0) != b"\x7fELF":
        raise NotElf("not an ELF file")
    _refuse_wild_section_table(file)
    elf = ELFFile(file.stream())
    if not elf.little_endian:
        raise BadElf("big-endian code cannot run here")
    kind = {"ET_EXEC": "exec", "ET_DYN": "dyn"}.get(str(elf["e_type"]))
    if kind is None:
        raise BadElf(f"neither a program nor a library: {elf['e_type']}")
    segments = _segments(elf, size)
    sections, damage = _sections(elf, file)
    build_id = _build_id(elf, file, segments, sections)
    return ElfImage(
        build_id=build_id,
        cache_key=_cache_key(file, build_id),
        kind=kind,
        machine=str(elf["e_machine"]).removeprefix("EM_"),
        bits=int(elf.elfclass),
        interp=_interp(file, segments),
        loads=tuple(
            LoadSegment(s["p_offset"], s["p_vaddr"], s["p_filesz"], bool(s["p_flags"] & _PF_X))
            for s in segments
            if s["p_type"] == _PT_LOAD
        ),
        sections=sections,
        debuglink=_debuglink(file, sections),
        size_bytes=size,
        damage=damage,
    )


def _refuse_wild_section_table(file: TargetFile) -> None:
    """Check the file header before pyelftools follows its offsets.

    Its constructor reads the section header of the name table, wherever the header says it is.
    """
    header = file.read(64, 0)
    if len(header) < 52:
        raise BadElf("cut inside the file header")
    if header[4] not in (1, 2) or header[5] not in (1, 2):
        raise BadElf("unknown class or byte order")
    if header[4] == 2 and len(header) < 64:
        raise BadElf("cut inside the file header")


def _segments(elf: ELFFile, size: int) -> list[Any]:
    count, entry = elf["e_phnum"], elf["e_phentsize"]
    if not 0 < count <= MAX_SEGMENTS:
        raise BadElf(f"{count} program headers")
    if elf["e_phoff"] + count * entry > size:
        raise BadElf("program headers lie outside the file")
    found = [
        struct_parse(elf.structs.Elf_Phdr, elf.stream, elf["e_phoff"] + index * entry)
        for index in range(count)
    ]
    for segment in found:
        if segment["p_type"] == _PT_LOAD and segment["p_vaddr"] + segment["p_memsz"] >= 1 << 64:
            raise BadElf("a segment wraps around the address space")
    return found


def _sections(elf: ELFFile, file: TargetFile) -> tuple[tuple[Section, ...], str]:
    """Section headers, and what is wrong with them; () where they are of no use."""
    offset, entry, size = elf["e_shoff"], elf["e_shentsize"], file.size_bytes
    if offset == 0:
        return (), ""
    if offset + entry > size or entry < elf.structs.Elf_Shdr.sizeof():
        return (), "section headers lie outside the file"
    try:
        count = elf.num_sections()
        if not 0 < count <= MAX_SECTIONS or offset + count * entry > size:
            return (), f"{count} section headers do not fit the file"
        headers = [
            struct_parse(elf.structs.Elf_Shdr, elf.stream, offset + index * entry)
            for index in range(count)
        ]
        names_header = headers[elf.get_shstrndx()]
        names = file.read(
            min(names_header["sh_size"], MAX_SECTION_NAMES_BYTES), names_header["sh_offset"]
        )
    except ELF_DAMAGE as error:
        return (), f"damaged section headers: {type(error).__name__}"
    sections = tuple(_section(header, names, size) for header in headers)
    outside = [
        section.name or f"number {index}"
        for index, (section, header) in enumerate(zip(sections, headers, strict=True))
        if section.type != SHT_NOBITS and section.size < header["sh_size"]
    ]
    return sections, f"section {outside[0]} lies outside the file" if outside else ""


def _section(header: Any, names: bytes, size: int) -> Section:
    """One header; a section that reaches outside the file is presented as empty."""
    start = header["sh_name"]
    name = names[start : names.find(b"\0", start) if start < len(names) else start]
    offset, length = header["sh_offset"], header["sh_size"]
    kind = str(header["sh_type"])
    if kind == SHT_NOBITS:
        offset = min(offset, size)
    elif offset + length > size:
        offset = length = 0
    return Section(
        name=name.decode("utf-8", "replace"),
        type=kind,
        flags=header["sh_flags"],
        virtual_address=header["sh_addr"],
        file_offset=offset,
        size=min(length, (1 << 64) - 1 - header["sh_addr"]),
        link=header["sh_link"],
        entry_size=header["sh_entsize"],
    )


def _build_id(
    elf: ELFFile, file: TargetFile, segments: list[Any], sections: tuple[Section, ...]
) -> str:
    """From the note segments, which strip keeps, then from the section of debug files."""
    places = [(s["p_offset"], s["p_filesz"]) for s in segments if s["p_type"] == _PT_NOTE]
    places += [
        (s.file_offset, s.size)
        for s in sections
        if s.type == "SHT_NOTE" and s.name == ".note.gnu.build-id"
    ]
    for offset, length in places[:MAX_SEGMENTS]:
        found = _build_id_in(elf, file.read(min(length, MAX_NOTES_BYTES), offset))
        if found:
            return found
    return ""


def _build_id_in(elf: ELFFile, notes: bytes) -> str:
    header_size = elf.structs.Elf_Nhdr.sizeof()
    position = 0
    while position + header_size <= len(notes):
        note = struct_parse(elf.structs.Elf_Nhdr, io.BytesIO(notes), position)
        name_at = position + header_size
        # Notes are padded to 4 bytes; .note.gnu.property, padded to 8, has a length that fits both.
        value_at = name_at + (note["n_namesz"] + 3) // 4 * 4
        position = value_at + (note["n_descsz"] + 3) // 4 * 4
        value = notes[value_at : value_at + note["n_descsz"]]
        if notes[name_at : name_at + 4] == b"GNU\0" and note["n_type"] in (
            "NT_GNU_BUILD_ID",
            _NT_GNU_BUILD_ID,
        ):
            complete = 0 < len(value) == note["n_descsz"] <= MAX_BUILD_ID_BYTES
            return value.hex() if complete else ""
    return ""


def _interp(file: TargetFile, segments: list[Any]) -> str:
    for segment in segments:
        if segment["p_type"] == _PT_INTERP:
            data = file.read(min(segment["p_filesz"], MAX_PATH_BYTES), segment["p_offset"])
            return os.fsdecode(data.split(b"\0", 1)[0])
    return ""


def _debuglink(file: TargetFile, sections: tuple[Section, ...]) -> DebugLink | None:
    """GDB manual, "Separate Debug Files": name, zero byte, padding to 4, CRC-32."""
    for section in sections:
        if section.name == ".gnu_debuglink" and section.type != SHT_NOBITS:
            data = file.read(min(section.size, MAX_PATH_BYTES), section.file_offset)
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
