# SPDX-License-Identifier: Apache-2.0
"""The records of the ELF format, and the constants that are used of it.

From elf.h (glibc 2.36) and the System V gABI, chapters 4 and 5; little-endian only.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np

MAGIC = b"\x7fELF"
ELFCLASS = {1: 32, 2: 64}  # e_ident[EI_CLASS] to bits
ELFDATA2LSB, ELFDATA2MSB = 1, 2

ET_EXEC, ET_DYN = 2, 3
# The machines that this program or its messages name.
MACHINES = {3: "386", 40: "ARM", 62: "X86_64", 183: "AARCH64", 243: "RISCV"}

PT_LOAD, PT_DYNAMIC, PT_INTERP, PT_NOTE = 1, 2, 3, 4
PT_GNU_EH_FRAME = 0x6474E550
PF_X = 1

SHT_PROGBITS, SHT_SYMTAB, SHT_STRTAB, SHT_NOTE, SHT_NOBITS, SHT_DYNSYM = 1, 2, 3, 7, 8, 11
SHF_ALLOC, SHF_EXECINSTR, SHF_COMPRESSED = 0x2, 0x4, 0x800
SHN_UNDEF, SHN_LORESERVE, SHN_XINDEX = 0, 0xFF00, 0xFFFF

STT_NOTYPE, STT_FUNC, STT_GNU_IFUNC = 0, 2, 10
STB_LOCAL, STB_GLOBAL, STB_WEAK, STB_GNU_UNIQUE = 0, 1, 2, 10

NT_GNU_BUILD_ID = 3

DT_NULL, DT_NEEDED, DT_STRTAB, DT_RPATH, DT_RUNPATH = 0, 1, 5, 15, 29


class FileHeader(NamedTuple):
    """Elf32_Ehdr or Elf64_Ehdr after e_ident, with the names of elf.h."""

    type: int
    machine: int
    version: int
    entry: int
    phoff: int
    shoff: int
    flags: int
    ehsize: int
    phentsize: int
    phnum: int
    shentsize: int
    shnum: int
    shstrndx: int


FILE_HEADER = {32: struct.Struct("<16x2H5I6H"), 64: struct.Struct("<16x2HI3QI6H")}
NOTE_HEADER = struct.Struct("<3I")  # of either class: namesz, descsz, type

# By class, in bits.
PROGRAM_HEADER = {
    32: np.dtype(
        [
            ("type", "<u4"),
            ("offset", "<u4"),
            ("vaddr", "<u4"),
            ("paddr", "<u4"),
            ("filesz", "<u4"),
            ("memsz", "<u4"),
            ("flags", "<u4"),
            ("align", "<u4"),
        ]
    ),
    64: np.dtype(
        [
            ("type", "<u4"),
            ("flags", "<u4"),
            ("offset", "<u8"),
            ("vaddr", "<u8"),
            ("paddr", "<u8"),
            ("filesz", "<u8"),
            ("memsz", "<u8"),
            ("align", "<u8"),
        ]
    ),
}


def _section_header(word: str) -> np.dtype[np.void]:
    return np.dtype(
        [
            ("name", "<u4"),
            ("type", "<u4"),
            ("flags", word),
            ("addr", word),
            ("offset", word),
            ("size", word),
            ("link", "<u4"),
            ("info", "<u4"),
            ("addralign", word),
            ("entsize", word),
        ]
    )


SECTION_HEADER = {32: _section_header("<u4"), 64: _section_header("<u8")}

SYMBOL = {
    32: np.dtype(
        [
            ("name", "<u4"),
            ("value", "<u4"),
            ("size", "<u4"),
            ("info", "u1"),
            ("other", "u1"),
            ("section", "<u2"),
        ]
    ),
    64: np.dtype(
        [
            ("name", "<u4"),
            ("info", "u1"),
            ("other", "u1"),
            ("section", "<u2"),
            ("value", "<u8"),
            ("size", "<u8"),
        ]
    ),
}

DYNAMIC = {
    32: np.dtype([("tag", "<i4"), ("value", "<u4")]),
    64: np.dtype([("tag", "<i8"), ("value", "<u8")]),
}

RELA_64 = np.dtype([("offset", "<u8"), ("info", "<u8"), ("addend", "<i8")])
