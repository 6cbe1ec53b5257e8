# SPDX-License-Identifier: Apache-2.0
"""Tables of Go's functions (.gopclntab), of both layouts that there are."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

GO_1_18, GO_1_20 = 0xFFFFFFF0, 0xFFFFFFF1
BEGINS_STACK, CHANGES_STACK = 1, 2


@dataclass(frozen=True)
class GoFunction:
    """One function.

    Attributes:
        offset: Where it begins in the code.
        name: As Go has it.
        depths: Bytes on the stack, and for how many bytes of code; none: no list.
        flags: Any of BEGINS_STACK and CHANGES_STACK.
    """

    offset: int
    name: str
    depths: Sequence[tuple[int, int]] = ((0, 0x10),)
    flags: int = 0


def _varint(value: int) -> bytes:
    found = b""
    while value > 0x7F:
        found += bytes([value & 0x7F | 0x80])
        value >>= 7
    return found + bytes([value])


def go_table(
    functions: Sequence[GoFunction], end: int, magic: int = GO_1_20, code: int = 0
) -> bytes:
    """Builds a table.

    Args:
        functions: In the order of their code.
        end: Where the code ends, in bytes from its beginning.
        magic: Of the layout.
        code: Virtual address of the code; 0: a dynamic linker would write it.
    """
    names, lists, records = b"\0", b"\0", b""
    index = b""
    index_bytes = 8 * len(functions) + 4
    for function in functions:
        index += struct.pack("<II", function.offset, index_bytes + len(records))
        name_at, list_at = len(names), len(lists) if function.depths else 0
        names += function.name.encode() + b"\0"
        before = -1
        for depth, length in function.depths:
            change = depth - before
            lists += _varint(change << 1 if change >= 0 else (-change << 1) - 1) + _varint(length)
            before = depth
        lists += b"\0" if function.depths else b""
        head = struct.pack("<IiiIIIIII", function.offset, name_at, 0, 0, list_at, 0, 0, 0, 0)
        head += bytes(4) if magic == GO_1_20 else b""
        records += head + bytes([0, function.flags, 0, 0])
    index += struct.pack("<I", end)
    parts = (names, b"", b"", lists, index + records)
    offsets, at = [], 72
    for part in parts:
        offsets.append(at)
        at += len(part)
    head = struct.pack("<IHBBQQQ5Q", magic, 0, 1, 8, len(functions), 0, code, *offsets)
    return head + b"".join(parts)
