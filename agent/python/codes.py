# SPDX-License-Identifier: Apache-2.0
"""Code objects of a target: name, file, first line and line table, each read once.

A code object is immutable but not immortal: its address may be reused by another. So each answer
from the cache is checked against a fingerprint, the pointers and numbers in the object itself,
which costs one read of 200 bytes. Many are read together. Names are cut at a bound and cleaned
before anyone sees them.
"""

from __future__ import annotations

import functools
import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from aiflame.agent.python.layouts import ABSENT, Layout
from aiflame.agent.python.lines import NO_LINE, line_of
from aiflame.agent.python.memory import (
    MAX_READ_BYTES,
    BatchMemory,
    Reading,
    read_together,
    sound_address,
)
from aiflame.agent.python.strings import read_str
from aiflame.agent.python.walk import NO_POSITION
from aiflame.agent.symbols.frames import MAX_NAME_CHARS, SourceFrame, clean_name

# Stands for a frame of which no code object could be read.
UNREADABLE_FRAME = SourceFrame("[unreadable Python frame]", "", 0, False)

# A large program has some 50,000 code objects, of which a tenth is seen to run; 500 bytes each.
MAX_CACHED = 1 << 13
# Of all processes: those that were forked from one have the same, at the same addresses; 2 MB.
_MAX_SHARED = 1 << 12
# Of a string's characters, whatever it says its length is; one more, so that the cut shows.
_MAX_CHARS = MAX_NAME_CHARS + 1
# A table is walked from its start for each line; hot code asks for the same few lines again.
# Each keeps its table alive, of 100 bytes to some KB.
_line_of = functools.lru_cache(maxsize=1 << 12)(line_of)


@dataclass(frozen=True, slots=True)
class Code:
    """What one code object says about itself.

    Attributes:
        name: `co_name`, cleaned.
        qualname: `co_qualname`, the name where the version has none.
        filename: `co_filename`.
        first_line: `co_firstlineno`, 0 where it makes no sense.
        line_table: Undecoded, b"" where it was unreadable or too long.
    """

    name: str
    qualname: str
    filename: str
    first_line: int
    line_table: bytes


class _Known(NamedTuple):
    """What was read, and what the object itself held then."""

    fingerprint: bytes
    code: Code


# Of equal ones all processes have the same.
_shared_code = functools.lru_cache(maxsize=_MAX_SHARED)(Code)
_shared_known = functools.lru_cache(maxsize=_MAX_SHARED)(_Known)
# Those with longer tables are few, and made on purpose: they go with their process.
_MAX_SHARED_BYTES = 4096


@functools.lru_cache(maxsize=16)
def _pointers_of(layout: Layout) -> tuple[int, ...]:
    """Returns where in a code object the pointers are that tell it from others."""
    pointers = (
        layout.code_filename,
        layout.code_name,
        layout.code_qualname,
        layout.code_line_table,
        layout.code_instructions if layout.code_qualname == ABSENT else ABSENT,
    )
    return tuple(offset for offset in pointers if offset != ABSENT)


class CodeReader:
    """Reads the code objects of one process.

    Args:
        memory: The process.
        layout: Of its interpreter.

    Attributes:
        drops: How many were not read as they are, by reason: `unreadable_code`, `unreadable_name`,
            `name_cut`, `line_table_cut`, `unreadable_line_table`, `address_reused` (no loss: read
            anew) and `cache_full` (the oldest was forgotten).
    """

    __slots__ = ("_cache", "_head_bytes", "_layout", "_memory", "_pointers", "drops")

    def __init__(self, memory: BatchMemory, layout: Layout) -> None:
        self._memory = memory
        self._layout = layout
        self._cache: dict[int, _Known] = {}  # the oldest first
        self._pointers = _pointers_of(layout)
        self._head_bytes = max(*self._pointers, layout.code_first_line) + 8
        self.drops: Counter[str] = Counter()

    def read(self, address: int) -> Code | None:
        """The code object at an address, or None where there is none that can be read."""
        return self.read_many([address])[0]

    def read_many(self, addresses: Sequence[int]) -> list[Code | None]:
        """The same for many, in order."""
        return read_together(self._memory, map(self._reading, addresses))

    def _reading(self, address: int) -> Reading[Code | None]:
        head = (yield address, self._head_bytes) if sound_address(address) else None
        if head is None:
            self.drops["unreadable_code"] += 1
            return None
        fingerprint = self._fingerprint(head)
        cached = self._cache.get(address)
        if cached is not None:
            if cached.fingerprint == fingerprint:
                return cached.code
            self.drops["address_reused"] += 1
        code = yield from self._contents(head)
        if code is None:
            self._cache.pop(address, None)
            return None
        make = _shared_known if len(code.line_table) <= _MAX_SHARED_BYTES else _Known
        self._cache[address] = make(fingerprint, code)
        if len(self._cache) > MAX_CACHED:
            del self._cache[next(iter(self._cache))]
            self.drops["cache_full"] += 1
        return code

    def line(self, code: Code, position: int) -> int:
        """The line that executes at a position of a frame; the first line where that is unknown."""
        if position == NO_POSITION or not code.line_table:
            return code.first_line
        line = _line_of(self._layout.line_table, code.line_table, code.first_line, position)
        return code.first_line if line == NO_LINE else line

    def _fingerprint(self, head: bytes) -> bytes:
        first = head[self._layout.code_first_line : self._layout.code_first_line + 4]
        return first + b"".join(head[offset : offset + 8] for offset in self._pointers)

    def _contents(self, head: bytes) -> Reading[Code | None]:
        at = self._layout
        name = yield from self._string(_word(head, at.code_name))
        filename = yield from self._string(_word(head, at.code_filename))
        qualname = name
        if at.code_qualname != ABSENT:
            qualname = yield from self._string(_word(head, at.code_qualname))
        if name is None or filename is None or qualname is None:
            self.drops["unreadable_name"] += 1
            return None
        first_line = max(0, struct.unpack_from("<i", head, at.code_first_line)[0])
        table = yield from self._bytes(_word(head, at.code_line_table))
        make = _shared_code if len(table) <= _MAX_SHARED_BYTES else Code
        return make(name, qualname, filename, first_line, table)

    def _string(self, address: int) -> Reading[str | None]:
        """A str object, cut and cleaned; None where that is none."""
        found = yield from read_str(self._layout, address, _MAX_CHARS)
        if found is None:
            return None
        if found.is_cut:
            self.drops["name_cut"] += 1
        return clean_name(found.characters)

    def _bytes(self, address: int) -> Reading[bytes]:
        at = self._layout
        head = (yield address, at.bytes_data) if sound_address(address) else None
        length = -1 if head is None else struct.unpack_from("<q", head, at.bytes_length)[0]
        if length > MAX_READ_BYTES:
            self.drops["line_table_cut"] += 1
            return b""
        if length == 0:
            return b""
        data = (yield address + at.bytes_data, length) if length > 0 else None
        if data is None:
            self.drops["unreadable_line_table"] += 1
            return b""
        return data


def _word(data: bytes, offset: int) -> int:
    return int(struct.unpack_from("<Q", data, offset)[0])
