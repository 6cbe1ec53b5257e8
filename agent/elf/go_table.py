# SPDX-License-Identifier: Apache-2.0
"""The table of functions that Go's linker leaves in each program, also in stripped ones.

Go's runtime unwinds with it, and names functions in traces. Layout of Go 1.18 to 1.27:
runtime/symtab.go (pcHeader, functab, moduledata), runtime/runtime2.go (_func),
internal/abi/symtab.go (FuncFlag). Earlier ones have another, and are not read.

Programs that call C are linked by C's linker. Until Go 1.25 it puts the table of one at any address
among other data; from Go 1.26 on the table does not say where code is, but another section does.
"""

from __future__ import annotations

import re
import struct
from itertools import islice
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from aiflame.agent.elf.contents import GO_MODULE, GO_TABLES, holds_go_table
from aiflame.agent.elf.image import ElfImage, Section
from aiflame.agent.target_files import TargetFile

U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

# Podman's has 9 MB, Terraform's 26. One of 186 MB (Terraform's provider for AWS) would take 770 MB
# of memory to make an unwind table of.
_MAX_BYTES = 128 << 20
# Kubernetes' largest programs have 150,000 functions.
_MAX_FUNCTIONS = 1 << 20

# pcHeader: magic, two bytes of padding, bytes of the shortest instruction, bytes of a pointer, then
# how many functions and files, where code begins, and where in the table its parts do.
_HEADER = struct.Struct("<IHBBQQQQQQQQ")
_POINTER_BYTES = 8
# How its header begins, and how often other data may look like that.
_LOOKS_LIKE_ONE, _MAX_LOOKS = re.compile(rb"[\xf0\xf1]\xff\xff\xff\0\0\x01\x08"), 16
# moduledata, up to where code begins: its first word is where the table is.
_MODULE = struct.Struct("<Q168xQ")
# Bytes from a function's record to its flags: Go 1.20 has put the line where it begins before them.
_FLAGS_AT = {0xFFFFFFF0: 37, 0xFFFFFFF1: 41}
_NAME_AT, _STEPS_AT, _NO_STEPS = 4, 16, 0  # _func.nameOff, _func.pcsp
# Where programs begin (runtime/rt0_linux_amd64.s and the like).
_ENTRY_PREFIX = b"_rt0_"


class BadGoTable(ValueError):
    """It is damaged, of another version, or larger than any real one."""


class GoFunctions(NamedTuple):
    """The functions of a program, in the order of their code; columns of shape (functions,).

    Attributes:
        data: The table.
        names_at: Where in it names begin, and where they end.
        shortest: Bytes of the shortest instruction.
        starts: Virtual addresses.
        ends: After the last byte, which is where the next function begins.
        names: Where in the table each name is, which a zero byte ends.
        flags: As FuncFlag has them.
        steps: Where in the table it is told how deep the stack is, 0 for nowhere.
    """

    data: bytes
    names_at: slice
    shortest: int
    starts: U64
    ends: U64
    names: I64
    flags: npt.NDArray[np.uint8]
    steps: I64

    def is_called(self, *names: str) -> Bools:
        """Which functions have one of some names; shape (functions,)."""
        found = (
            self.data.find(b"\0" + name.encode() + b"\0", self.names_at.start, self.names_at.stop)
            for name in names
        )
        return np.isin(self.names, [at + 1 for at in found if at >= 0])


def go_table(file: TargetFile, image: ElfImage) -> Section | None:
    """Returns where the table is, from its beginning on; None where there is none.

    Raises:
        BadTargetFile: As `TargetFile.read`.
    """
    among = next(filter(holds_go_table(image), image.sections), None)
    if among is None:
        return next((section for section in map(image.section, GO_TABLES) if section), None)
    if among.size > _MAX_BYTES:
        return None
    looks = islice(_LOOKS_LIKE_ONE.finditer(file.read(among.size, among.file_offset)), _MAX_LOOKS)
    at = next((look.start() for look in looks if look.start() % _POINTER_BYTES == 0), None)
    if at is None:
        return None
    return among._replace(
        virtual_address=among.virtual_address + at,
        file_offset=among.file_offset + at,
        size=among.size - at,
    )


def read_go_functions(file: TargetFile, image: ElfImage) -> GoFunctions | None:
    """Reads the table of a program, None where there is none.

    Raises:
        BadGoTable: It says nothing that can be relied on.
        BadTargetFile: As `TargetFile.read`.
    """
    section = go_table(file, image)
    if section is None:
        return None
    if section.size > _MAX_BYTES:
        raise BadGoTable("larger than any real one")
    try:
        data = file.read(section.size, section.file_offset)
        return _read(data, image, _code_of(file, image, section.virtual_address))
    except (struct.error, ValueError, IndexError, OverflowError) as error:
        raise BadGoTable(str(error)) from error


def _code_of(file: TargetFile, image: ElfImage, table_address: int) -> int:
    """Returns where code begins by what the runtime knows of a program, 0 where that is not told.

    Raises:
        BadTargetFile: As `TargetFile.read`.
    """
    module = image.section(GO_MODULE)
    if module is None or module.size < _MODULE.size:
        return 0
    table, code = _MODULE.unpack(file.read(_MODULE.size, module.file_offset))
    return int(code) if table == table_address else 0


def _read(data: bytes, image: ElfImage, code_by_module: int) -> GoFunctions:
    magic, _, shortest, pointer, count, _, code, *parts = _HEADER.unpack_from(data)
    names_at, names_end, _, steps_at, functions_at = parts
    text = image.section(".text")
    if magic not in _FLAGS_AT or pointer != _POINTER_BYTES or count > _MAX_FUNCTIONS or not text:
        raise BadGoTable("of another version")
    # Where a dynamic linker writes it, Go's own linker begins .text with it; another may not.
    code = code or code_by_module
    is_placed, code = code != 0, code or text.virtual_address
    table = np.frombuffer(data, "<u4", 2 * count + 1, functions_at)
    bounds = table[::2].astype(np.uint64) + np.uint64(code)
    starts, ends = bounds[:-1], bounds[1:]
    if not count or (starts >= ends).any() or starts[0] < text.virtual_address:
        raise BadGoTable("functions in no order")
    if ends[-1] > text.end_address:
        raise BadGoTable("functions outside of the code")
    content, records = np.frombuffer(data, np.uint8), table[1::2].astype(np.int64) + functions_at
    names = _words(content, records + _NAME_AT) + names_at
    if not is_placed:
        entry = names[starts == image.entry].tolist()
        if not entry or not data.startswith(_ENTRY_PREFIX, entry[0]):
            raise BadGoTable("code is elsewhere")
    steps = _words(content, records + _STEPS_AT)
    return GoFunctions(
        data=data,
        names_at=slice(names_at, names_end),
        shortest=shortest,
        starts=starts,
        ends=ends,
        names=names,
        flags=content[records + _FLAGS_AT[magic]],
        steps=np.where(steps == _NO_STEPS, 0, steps + steps_at),
    )


def _words(content: npt.NDArray[np.uint8], at: I64) -> I64:
    """Returns 32-bit numbers at any offsets."""
    parts = content[at[:, None] + np.arange(4)]
    return np.ascontiguousarray(parts).view("<u4")[:, 0].astype(np.int64)
