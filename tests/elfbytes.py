# SPDX-License-Identifier: Apache-2.0
"""Builds ELF files from a few Python values, so that tests need no binary files in git.

Each odd or damaged file is a line in the test that needs it. Only what symbolization reads is
written: file header, one executable segment, notes, section headers and symbol tables.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

FUNC, OBJECT, NOTYPE, IFUNC = 2, 1, 0, 10
LOCAL, GLOBAL, WEAK = 0, 1, 2
ALLOC_EXEC = 0x6
SHT = {"progbits": 1, "symtab": 2, "strtab": 3, "note": 7, "nobits": 8, "dynsym": 11}

HEADER_BYTES, SEGMENT_BYTES, SECTION_BYTES, SYMBOL_BYTES = 64, 56, 64, 24


@dataclass(frozen=True)
class Symbol:
    """One entry of a symbol table; `section` is the name of its home section."""

    name: str | bytes
    value: int
    size: int
    kind: int = FUNC
    bind: int = GLOBAL
    section: str = ".text"


@dataclass(frozen=True)
class Section:
    """One section. `size` overrides the length of `data` in the header, to lie."""

    name: str
    data: bytes = b""
    type: str = "progbits"
    flags: int = 0
    address: int = 0
    size: int | None = None
    link: str = ""
    entry_size: int = 0


@dataclass
class Elf:
    """A file under construction; `build()` gives its bytes.

    `text` lies at `text_address` both in memory and, as a segment, at its offset in the file.
    `header` overrides fields of the file header by name, to lie.
    """

    symbols: list[Symbol] = field(default_factory=list)
    dynamic_symbols: list[Symbol] = field(default_factory=list)
    sections: list[Section] = field(default_factory=list)
    text: bytes = b"\x90" * 0x1000
    text_address: int = 0x1000
    build_id: bytes = b""
    kind: int = 3  # ET_DYN
    header: dict[str, int] = field(default_factory=dict)

    def build(self) -> bytes:
        sections = [Section(".text", self.text, flags=ALLOC_EXEC, address=self.text_address)]
        if self.build_id:
            note = struct.pack("<III4s", 4, len(self.build_id), 3, b"GNU\0") + self.build_id
            sections.append(Section(".note.gnu.build-id", note, "note"))
        sections += self.sections
        homes = {section.name: index + 1 for index, section in enumerate(sections)}
        if self.symbols:
            sections += _symbol_table(".symtab", ".strtab", "symtab", self.symbols, homes)
        if self.dynamic_symbols:
            sections += _symbol_table(".dynsym", ".dynstr", "dynsym", self.dynamic_symbols, homes)
        return self._assemble(sections)

    def _assemble(self, sections: list[Section]) -> bytes:
        names = b"\0" + b"".join(s.name.encode() + b"\0" for s in sections) + b".shstrtab\0"
        sections = [*sections, Section(".shstrtab", names, "strtab")]
        segments = 1 + bool(self.build_id)
        body = bytearray(HEADER_BYTES + segments * SEGMENT_BYTES)
        offsets = []
        for section in sections:
            body += bytes(-len(body) % 16)
            offsets.append(len(body))
            body += section.data
        body += bytes(-len(body) % 16)
        section_offset = len(body)
        index_of = {section.name: index + 1 for index, section in enumerate(sections)}
        body += bytes(SECTION_BYTES)
        for section, offset in zip(sections, offsets, strict=True):
            body += struct.pack(
                "<IIQQQQIIQQ",
                names.index(b"\0" + section.name.encode() + b"\0") + 1,
                SHT[section.type],
                section.flags,
                section.address,
                offset,
                len(section.data) if section.size is None else section.size,
                index_of.get(section.link, 0),
                0,
                16,
                section.entry_size,
            )
        self._segments(body, sections, offsets)
        self._header(body, section_offset, len(sections) + 1, segments)
        return bytes(body)

    def _segments(self, body: bytearray, sections: list[Section], offsets: list[int]) -> None:
        length = len(self.text)
        address = self.text_address
        where = (offsets[0], address, address, length, length)
        struct.pack_into("<IIQQQQQQ", body, HEADER_BYTES, 1, 5, *where, 4096)
        if self.build_id:
            note = len(sections[1].data)
            at = HEADER_BYTES + SEGMENT_BYTES
            struct.pack_into("<IIQQQQQQ", body, at, 4, 4, offsets[1], 0, 0, note, note, 4)

    def _header(self, body: bytearray, section_offset: int, count: int, segments: int) -> None:
        fields = {
            "type": self.kind,
            "machine": 62,  # EM_X86_64
            "version": 1,
            "entry": self.text_address,
            "phoff": HEADER_BYTES,
            "shoff": section_offset,
            "flags": 0,
            "ehsize": HEADER_BYTES,
            "phentsize": SEGMENT_BYTES,
            "phnum": segments,
            "shentsize": SECTION_BYTES,
            "shnum": count,
            "shstrndx": count - 1,
        }
        fields.update(self.header)
        ident = b"\x7fELF\x02\x01\x01" + bytes(9)
        struct.pack_into("<16sHHIQQQIHHHHHH", body, 0, ident, *fields.values())


def _symbol_table(
    name: str, strings_name: str, kind: str, symbols: list[Symbol], homes: dict[str, int]
) -> list[Section]:
    strings = bytearray(b"\0")
    records = bytearray(SYMBOL_BYTES)
    for symbol in symbols:
        text = symbol.name if isinstance(symbol.name, bytes) else symbol.name.encode()
        info = symbol.bind << 4 | symbol.kind
        home = homes.get(symbol.section, 0)
        at = len(strings) if text else 0
        records += struct.pack("<IBBHQQ", at, info, 0, home, symbol.value, symbol.size)
        strings += text + b"\0" if text else b""
    return [
        Section(name, bytes(records), kind, link=strings_name, entry_size=SYMBOL_BYTES),
        Section(strings_name, bytes(strings), "strtab"),
    ]
