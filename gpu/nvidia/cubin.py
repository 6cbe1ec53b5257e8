# SPDX-License-Identifier: Apache-2.0
"""Cubins, the code objects of NVIDIA's devices: functions, their sizes and their source lines.

A cubin is an ELF file of machine 190 (EM_CUDA). What NVIDIA's differ in, as seen in those of nvcc
11.8 to 13.0:

- The version word of the ELF header may hold the toolkit's number, 129 for 12.9.
- The number of the architecture is in bits 7..0 of e_flags, or from ABI version 8 on (CUDA 13) in
  bits 15..8.
- Each kernel is a section, `.text.` and its linkage name, in which offsets of samples count.
- `-lineinfo` makes a DWARF 2 line table in .debug_line, whose addresses are relocated by symbols of
  functions; with extended operations of NVIDIA's own, for inlined functions, which are passed over.

The file is a target's, and may hold anything: this is run by a process without rights.
"""

from __future__ import annotations

import hashlib
import itertools
import struct
from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

from aiflame.agent.file_questions import Json, Question, rows, text, whole
from aiflame.agent.target_files import BadTargetFile

_HEADER = struct.Struct("<4s5B7x2HI3QI6H")
_SECTION = struct.Struct("<2I4Q2I2Q")
_SYMBOL = struct.Struct("<I2BH2Q")
_REL, _RELA = struct.Struct("<2Q"), struct.Struct("<2QQ")
_MAGIC, _CLASS_64, _LITTLE_ENDIAN, _EM_CUDA = b"\x7fELF", 2, 1, 190
_ABI_WITH_HIGH_SM = 8
_SHT_SYMTAB, _SHT_RELA, _SHT_REL, _SHT_NOBITS = 2, 4, 9, 8
_STT_FUNCTION = 2
# In the header where there are more sections than it can tell.
_SHN_LOW_RESERVED = 0xFF00

# The largest of cuBLAS have some ten thousand kernels, of four sections each.
_MAX_SECTIONS, _MAX_SYMBOLS = 1 << 20, 1 << 20
_MAX_NAME_CHARACTERS = 4096
# Of all functions that are asked about at once. The longest that are known have some 100,000
# instructions; twice as many lines are 6 MB of an answer, of which 8 MiB are read.
_MAX_ROWS, _MAX_FILES = 200_000, 10_000
# That are asked about at once: as many digests are 40 KB of a question, which may have 64 KiB.
MAX_FUNCTIONS = 2048
_MAX_SIZE = 1 << 32
# Of what is not needed of a cubin: two for each of its kernels; as many are 2 MB of an answer.
_MAX_PARTS = 100_000
_MAX_SM = 256


class CodeLine(NamedTuple):
    """From an offset on, up to the next one: a source line, 0 for none."""

    offset: int
    file: str
    line: int


@dataclass(frozen=True, slots=True)
class Function:
    """A function of a cubin.

    Attributes:
        sm: Of the architecture, 90 for sm_90.
        symbol: Its number in the table of symbols.
        begin: Where in its section it begins.
        size: In bytes.
        lines: By offset, from `begin` on.
    """

    sm: int
    symbol: int
    begin: int
    size: int
    lines: tuple[CodeLine, ...]


class Readable(Protocol):
    """A cubin: a file, or a part of one."""

    def read(self, size: int, offset: int) -> bytes:
        """Returns up to `size` bytes, none where it has none."""
        ...


class Symbol(NamedTuple):
    """A function in the table of symbols, and where it is."""

    number: int
    section: int
    begin: int
    size: int


class _Section(NamedTuple):
    name: int
    kind: int
    offset: int
    size: int
    link: int
    info: int


class NoCubinError(Exception):
    """Code of another form, as PTX is."""


class Cubin:
    """A cubin's sections and symbols.

    Args:
        file: The cubin.

    Raises:
        NoCubinError: It is another thing.
        BadTargetFile: It is damaged.
    """

    def __init__(self, file: Readable) -> None:
        self._file = file
        head = file.read(_HEADER.size, 0)
        if len(head) < _HEADER.size:
            raise NoCubinError
        fields = _HEADER.unpack(head)
        magic, klass, order, _, _, abi, _, machine, _, _, _, sections_at, flags = fields[:13]
        _, _, _, entry_size, count, names = fields[13:]
        if (magic, klass, order, machine) != (_MAGIC, _CLASS_64, _LITTLE_ENDIAN, _EM_CUDA):
            raise NoCubinError
        if entry_size != _SECTION.size:
            raise BadTargetFile("a cubin with sections of another size")
        self.sm = (flags >> 8 if abi >= _ABI_WITH_HIGH_SM else flags) & 0xFF
        if count == 0 or names >= _SHN_LOW_RESERVED:
            first = self._sections(sections_at, 1)[0]
            count, names = count or first.size, first.link if names >= 0xFFFF else names
        if not 0 < count <= _MAX_SECTIONS or names >= count:
            raise BadTargetFile("a cubin without sections")
        self.sections = self._sections(sections_at, count)
        self._names = self.bytes_of(self.sections[names])

    def _sections(self, at: int, count: int) -> list[_Section]:
        data = self._file.read(count * _SECTION.size, at)
        if len(data) < count * _SECTION.size:
            raise BadTargetFile("a cubin that is cut")
        return [
            _Section(name, kind, offset, size, link, info)
            for name, kind, _, _, offset, size, link, info, _, _ in _SECTION.iter_unpack(data)
        ]

    def bytes_of(self, section: _Section) -> bytes:
        """Returns a section's content."""
        if section.kind == _SHT_NOBITS:
            return b""
        data = self._file.read(section.size, section.offset)
        if len(data) < section.size:
            raise BadTargetFile("a section that is cut")
        return data

    def name_of(self, section: _Section) -> bytes:
        """Returns a section's name."""
        return _string(self._names, section.name)

    def named(self, name: bytes) -> int | None:
        """Returns the number of the first section of a name."""
        return next((i for i, one in enumerate(self.sections) if self.name_of(one) == name), None)

    @cached_property
    def symbols(self) -> tuple[bytes, bytes]:
        """The tables of symbols and of their names; empty where there are none."""
        for section in self.sections:
            if section.kind == _SHT_SYMTAB and section.link < len(self.sections):
                table = self.bytes_of(section)[: _MAX_SYMBOLS * _SYMBOL.size]
                whole_bytes = len(table) - len(table) % _SYMBOL.size
                return table[:whole_bytes], self.bytes_of(self.sections[section.link])
        return b"", b""

    def functions(self, digests: Sequence[str]) -> dict[int, Symbol]:
        """Returns those of some names, by the place of a name's digest."""
        table, names = self.symbols
        wanted = {digest: place for place, digest in enumerate(digests)}
        found: dict[int, Symbol] = {}
        for number, symbol in enumerate(_SYMBOL.iter_unpack(table)):
            at, info, _, section, begin, size = symbol
            if info & 0xF != _STT_FUNCTION:
                continue
            place = wanted.pop(digest_of(_string(names, at)), None)
            if place is None:
                continue
            if section >= len(self.sections):
                raise BadTargetFile("a function in no section")
            size = size or max(self.sections[section].size - begin, 0)
            found[place] = Symbol(number, section, begin, size)
            if not wanted:
                break
        return found

    def code_of(self, symbol: Symbol) -> bytes:
        """Returns a function's instructions."""
        section = self.sections[symbol.section]
        size = min(symbol.size, max(section.size - symbol.begin, 0))
        return self._file.read(size, section.offset + symbol.begin)


def _string(table: bytes, at: int) -> bytes:
    end = table.find(b"\0", at)
    return table[at:end] if 0 <= at < len(table) and end >= 0 else b""


def functions(file: Readable, digests: Sequence[str]) -> Json:
    """Reads what a cubin says of functions, by `digest_of` of their names; None where it is none.

    The table of symbols, and that of lines, are gone through once for all of them.
    """
    try:
        cubin = Cubin(file)
    except NoCubinError:
        return None
    found = cubin.functions(digests)
    lines = _lines(cubin, {symbol.section for symbol in found.values()})
    files: dict[str, int] = {}
    rows_left = _MAX_ROWS
    answers = []
    for place, (number, section, begin, size) in sorted(found.items()):
        own = [
            (line.offset - begin, files.setdefault(line.file, len(files)), line.line)
            for line in itertools.islice(_part(lines[section], begin, begin + size), rows_left)
        ]
        rows_left -= len(own)
        answers.append((place, number, begin, size, own))
    return [cubin.sm, [*files], answers]


def digest_of(name: bytes) -> str:
    """Returns what stands for a name: a thousand of those do not fit into a message to a parser."""
    return hashlib.blake2b(name, digest_size=8).hexdigest()


def _checked(answer: Json, names: Sequence[str]) -> dict[str, Function]:
    if answer is None:
        return {}
    sm, files, functions = answer
    sm = whole(sm, _MAX_SM)
    files = [text(file, _MAX_NAME_CHARACTERS) for file in rows(files, _MAX_FILES)]
    found: dict[str, Function] = {}
    rows_left = _MAX_ROWS
    for place, symbol, begin, size, lines in rows(functions, len(names)):
        size = whole(size, _MAX_SIZE)
        own = tuple(
            CodeLine(whole(offset, size or 1), files[whole(file, len(files))], whole(line, 1 << 32))
            for offset, file, line in rows(lines, rows_left)
        )
        rows_left -= len(own)
        if any(a.offset > b.offset for a, b in itertools.pairwise(own)):
            raise ValueError("lines in no order")
        number, begin = whole(symbol, _MAX_SYMBOLS), whole(begin, _MAX_SIZE)
        found[names[whole(place, len(names))]] = Function(sm, number, begin, size, own)
    return found


def functions_of(names: Sequence[str]) -> Question[dict[str, Function]]:
    """Functions of a cubin, by linkage name; without those of which the cubin has none.

    Args:
        names: `MAX_FUNCTIONS` at most. Those that come first get source lines first.
    """
    digests = [digest_of(name.encode()) for name in names]
    return Question(functions, lambda answer: _checked(answer, names), (digests,), is_kept=False)


# What of a cubin nvdisasm needs for nothing that is listed: debugging information but for lines.
# Relocations stay: it refuses those that are zeros (13.0).
_UNLISTED, _LISTED = (b".debug_", b".nv_debug_"), b".debug_line"


def unneeded(file: Readable, digests: Sequence[str]) -> Json:
    """Returns the parts of a cubin, (offset, size), that listing functions takes nothing of.

    These are the code of other functions, and what debuggers need. None where it is no cubin.
    """
    try:
        cubin = Cubin(file)
    except NoCubinError:
        return None
    needed = {symbol.section for symbol in cubin.functions(digests).values()}
    found = []
    for number, section in enumerate(cubin.sections):
        name = cubin.name_of(section)
        is_code = name.startswith(b".text.") and number not in needed
        is_unlisted = name.startswith(_UNLISTED) and name != _LISTED
        if section.kind != _SHT_NOBITS and section.size and (is_code or is_unlisted):
            found.append((section.offset, section.size))
    return found[:_MAX_PARTS]


def without(data: bytes, parts: Collection[Sequence[int]]) -> bytes:
    """Returns code with zeros in place of some of it, (offset, size).

    They compress to nothing, and all else stays where it was.
    """
    found = bytearray(data)
    for offset, size in parts:
        end = min(offset + size, len(found))
        found[offset:end] = bytes(max(end - offset, 0))
    return bytes(found)


def unneeded_for(names: Sequence[str], size: int) -> Question[list[tuple[int, int]] | None]:
    """Parts of a cubin, (offset, size), that are not needed to list functions.

    Args:
        names: Their linkage names, `MAX_FUNCTIONS` at most.
        size: Of the cubin, in bytes.
    """

    def checked(answer: Json) -> list[tuple[int, int]] | None:
        if answer is None:
            return None
        found = []
        for offset, part in rows(answer, _MAX_PARTS):
            begin = whole(offset, size)
            found.append((begin, whole(part, size - begin + 1)))
        return found

    digests = [digest_of(name.encode()) for name in names]
    return Question(unneeded, checked, (digests,), is_kept=False)


# ---- lines -------------------------------------------------------------------------------------


class _Place(NamedTuple):
    """An address in a section."""

    section: int
    address: int


def _lines(cubin: Cubin, sections: Set[int]) -> dict[int, list[CodeLine]]:
    """Returns the lines of sections, by offset; none where they were built without."""
    found: dict[int, dict[int, CodeLine]] = {section: {} for section in sections}
    number = cubin.named(b".debug_line")
    if number is not None and sections:
        data = cubin.bytes_of(cubin.sections[number])
        for section, line in _rows(data, _relocated(cubin, number, sections)):
            found[section][line.offset] = line
    return {section: [own[at] for at in sorted(own)] for section, own in found.items()}


def _part(lines: Sequence[CodeLine], begin: int, end: int) -> Iterator[CodeLine]:
    """Yields the lines between two offsets: where another one begins."""
    before = ("", -1)
    for i in range(bisect_left(lines, begin, key=lambda line: line.offset), len(lines)):
        line = lines[i]
        if line.offset >= end:
            return
        if (line.file, line.line) != before:
            before = (line.file, line.line)
            yield line


def _relocated(cubin: Cubin, table: int, sections: Set[int]) -> dict[int, _Place]:
    """Returns where in the line table addresses in sections are, and which."""
    symbols, _ = cubin.symbols
    found: dict[int, _Place] = {}
    for one in cubin.sections:
        if one.kind not in (_SHT_REL, _SHT_RELA) or one.info != table:
            continue
        form = _RELA if one.kind == _SHT_RELA else _REL
        data = cubin.bytes_of(one)
        for place, info, *addend in form.iter_unpack(data[: len(data) - len(data) % form.size]):
            at = (info >> 32) * _SYMBOL.size
            if at + _SYMBOL.size > len(symbols):
                raise BadTargetFile("a relocation by no symbol")
            _, _, _, section, value, _ = _SYMBOL.unpack_from(symbols, at)
            if section in sections:
                found[place] = _Place(section, value + (addend[0] if addend else 0))
    return found


# DWARF 4, 6.2: standard and extended operations of line programs.
_COPY, _ADVANCE_PC, _ADVANCE_LINE, _SET_FILE = 1, 2, 3, 4
_CONST_ADD_PC, _FIXED_ADVANCE_PC = 8, 9
_END_SEQUENCE, _SET_ADDRESS = 1, 2
_LAST_VERSION_WITH_OLD_FILES = 4


class _CutError(Exception):
    """The table ends too early."""


class _Reader:
    """Reads numbers of a line program."""

    def __init__(self, data: bytes, at: int, end: int) -> None:
        self.data, self.at, self.end = data, at, min(end, len(data))

    def take(self, size: int) -> int:
        """Returns a number of so many bytes."""
        if self.at + size > self.end:
            raise _CutError
        self.at += size
        return int.from_bytes(self.data[self.at - size : self.at], "little")

    def leb(self, *, is_signed: bool = False) -> int:
        """Returns a number of a variable length, of 64 bits at most."""
        value = shift = 0
        while True:
            byte = self.take(1)
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                break
            if shift > 63:
                raise _CutError
        if is_signed and byte & 0x40:
            value -= 1 << shift
        return value

    def string(self) -> str:
        """Returns a text that ends with a zero."""
        end = self.data.find(b"\0", self.at, self.end)
        if end < 0:
            raise _CutError
        found = self.data[self.at : end]
        self.at = end + 1
        return found.decode(errors="replace")


def _rows(data: bytes, places: dict[int, _Place]) -> Iterator[tuple[int, CodeLine]]:
    """Yields the rows of those sequences whose address is at one of the places, with sections."""
    at = 0
    while at + 4 <= len(data):
        size = int.from_bytes(data[at : at + 4], "little")
        end = at + 4 + size
        if not size or end > len(data):
            return  # 64-bit DWARF starts with 0xffffffff, and is for files of 4 GB
        try:
            yield from _unit(_Reader(data, at + 4, end), places)
        except _CutError:
            return
        at = end


def _unit(reader: _Reader, places: dict[int, _Place]) -> Iterator[tuple[int, CodeLine]]:
    version = reader.take(2)
    if not 2 <= version <= _LAST_VERSION_WITH_OLD_FILES:
        return
    header_bytes = reader.take(4)
    program = reader.at + header_bytes
    least = reader.take(1)
    if version == _LAST_VERSION_WITH_OLD_FILES:
        reader.take(1)  # operations of an instruction
    reader.take(1)  # whether rows are statements
    line_base, line_range, opcode_base = reader.take(1), reader.take(1), reader.take(1)
    line_base -= 256 if line_base > 127 else 0
    if not line_range or not opcode_base:
        return
    lengths = [reader.take(1) for _ in range(opcode_base - 1)]
    folders, files = [""], [""]
    while folder := reader.string():
        folders.append(folder)
    while name := reader.string():
        number = reader.leb()
        reader.leb()  # when it was changed
        reader.leb()  # its length
        where = folders[number] if number < len(folders) else ""
        files.append(f"{where}/{name}" if where and not name.startswith("/") else name)
        if len(files) > _MAX_FILES:
            raise _CutError
    reader.at = program
    yield from _run(reader, places, (least, line_base, line_range, opcode_base), lengths, files)


def _run(
    reader: _Reader,
    places: dict[int, _Place],
    header: tuple[int, int, int, int],
    lengths: list[int],
    files: list[str],
) -> Iterator[tuple[int, CodeLine]]:
    least, line_base, line_range, opcode_base = header
    address, file, line, section = 0, 1, 1, -1
    while reader.at < reader.end:
        opcode = reader.take(1)
        is_row = False
        if opcode >= opcode_base:
            step = opcode - opcode_base
            address += step // line_range * least
            line += line_base + step % line_range
            is_row = True
        elif opcode == 0:
            size = reader.leb()
            following = reader.at + size
            kind = reader.take(1) if size else 0
            if kind == _SET_ADDRESS:
                section, address = places.get(reader.at, _Place(-1, 0))
                address += reader.take(max(size - 1, 0))
            elif kind == _END_SEQUENCE:
                address, file, line, section = 0, 1, 1, -1
            reader.at = following
        elif opcode == _COPY:
            is_row = True
        elif opcode == _ADVANCE_PC:
            address += reader.leb() * least
        elif opcode == _ADVANCE_LINE:
            line += reader.leb(is_signed=True)
        elif opcode == _SET_FILE:
            file = reader.leb()
        elif opcode == _CONST_ADD_PC:
            address += (255 - opcode_base) // line_range * least
        elif opcode == _FIXED_ADVANCE_PC:
            address += reader.take(2)
        else:
            for _ in range(lengths[opcode - 1]):
                reader.leb()
        if is_row and section >= 0 and 0 <= line < 1 << 32 and 0 <= address < _MAX_SIZE:
            name = files[file][:_MAX_NAME_CHARACTERS] if file < len(files) else ""
            yield section, CodeLine(address, name, line)
