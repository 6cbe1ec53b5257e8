# SPDX-License-Identifier: Apache-2.0
"""Where a mapped file defines functions of a device API, as sites for uprobes.

Every file that any target maps is asked, and most define none of the names.

A file without section headers names nothing, nor do separate debug files. Of several functions of
one name (versions, or local ones of several sources) one is taken, a global one before others.
"""

from __future__ import annotations

from dataclasses import dataclass

from aiflame.agent.elf import records
from aiflame.agent.elf.image import ElfImage, Segment
from aiflame.agent.elf.symbols import Symbol, find_symbols
from aiflame.agent.target_files import TargetFile

# The code of a function is wanted for its first bytes and for jumps to them.
_MAX_CODE_BYTES = 64 * 1024
# A function without a size is assembly, seldom longer.
_SIZELESS_CODE_BYTES = 4096
# What there may be besides comes last.
_BINDING_ORDER = {records.STB_GLOBAL: 0, records.STB_WEAK: 1, records.STB_LOCAL: 2}


@dataclass(frozen=True, slots=True)
class ApiFunction:
    """A function in a file.

    Attributes:
        name: As the symbol table has it.
        file_offset: Of its first byte, in bytes.
        size_bytes: As the symbol says it; 0 where it does not.
        code: Its first bytes, at most 64 KiB.
        before_bytes: How much code of its library stands before it; 0 in a program that it was
            linked into, whose other code is not the library's.
        after_bytes: Likewise, from its first byte on; there, `size_bytes`.
    """

    name: str
    file_offset: int
    size_bytes: int
    code: bytes
    before_bytes: int = 0
    after_bytes: int = 0


def find_functions(file: TargetFile, names: frozenset[str]) -> dict[str, ApiFunction]:
    """Returns which of the functions a file defines, by name.

    Args:
        file: The file.
        names: The functions' names, without versions.

    Raises:
        BadTargetFile: The file is damaged, or costs more to read than any real one.
    """
    if not names:
        return {}
    elf = ElfImage.read(file)
    if elf.bits != 64:
        return {}
    chosen: dict[str, tuple[Symbol, Segment]] = {}
    for symbol in find_symbols(file, elf, (name.encode() for name in names)):
        load = elf.load_at(symbol.address)
        if symbol.kind == records.STT_FUNC and load is not None and load.executable:
            name = symbol.name.decode()
            known = chosen.get(name)
            if known is None or _preference(symbol) < _preference(known[0]):
                chosen[name] = symbol, load
    return {name: _located(file, name, *found) for name, found in chosen.items()}


def _preference(symbol: Symbol) -> tuple[int, bool]:
    return _BINDING_ORDER.get(symbol.binding, len(_BINDING_ORDER)), not symbol.is_dynamic


def _located(file: TargetFile, name: str, symbol: Symbol, load: Segment) -> ApiFunction:
    offset = load.file_offset_of(symbol.address)
    length = min(symbol.size or _SIZELESS_CODE_BYTES, _MAX_CODE_BYTES)
    code = file.read(length, offset)
    if not symbol.is_dynamic:
        return ApiFunction(name, offset, symbol.size, code, 0, symbol.size)
    before = symbol.address - load.virtual_address
    return ApiFunction(name, offset, symbol.size, code, before, load.file_size - before)
