# SPDX-License-Identifier: Apache-2.0
"""The part of the protobuf wire format that writing a profile needs.

Source: https://protobuf.dev/programming-guides/encoding/. A field is a tag, (number << 3) | wire
type, and its value: a varint (wire type 0) or a length and bytes (wire type 2). Nothing is read.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

I64 = npt.NDArray[np.int64]

_VARINT, _BYTES = 0, 2

# int64 and uint64 are both written as the 64 bits they are.
_U64_MASK = (1 << 64) - 1


# Ids and counts repeat by the hundred thousand; a hit costs a tenth of an encoding.
@lru_cache(maxsize=1 << 16)
def varint(value: int) -> bytes:
    """Encode the low 64 bits of a number, seven bits a byte, lowest first."""
    value &= _U64_MASK
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def varint_field(number: int, value: int, keep_zero: bool = False) -> bytes:
    """Encode a scalar field; a zero is left out, as proto3 does, except in a repeated field."""
    if value == 0 and not keep_zero:
        return b""
    return varint(number << 3 | _VARINT) + varint(value)


def message_field(number: int, body: bytes) -> bytes:
    """Encode a message, string or bytes field; an empty one is written too."""
    return message_opening(number, len(body)) + body


def message_opening(number: int, length: int) -> bytes:
    """Encode what stands before a message, string or bytes field of some length."""
    return varint(number << 3 | _BYTES) + varint(length)


def packed(number: int, values: Iterable[int]) -> bytes:
    """Encode a repeated scalar field in packed form."""
    return message_field(number, b"".join(map(varint, values)))


def varint_sizes(values: npt.NDArray[np.unsignedinteger[Any]]) -> I64:
    """Return how many bytes each number takes."""
    sizes = np.ones(len(values), dtype=np.int64)
    for bits in range(7, 64, 7):
        longer = values >> np.uint64(bits) > 0
        if not longer.any():
            break
        sizes += longer
    return sizes


def varints(values: npt.NDArray[np.unsignedinteger[Any]]) -> tuple[bytes, I64]:
    """Encode many numbers at once.

    Returns:
        All of them one after the other, and where each begins and the last ends.
    """
    values = values.astype(np.uint64)
    sizes = varint_sizes(values)
    starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
    out = np.empty(starts[-1], dtype=np.uint8)
    for place in range(int(sizes.max(initial=0))):
        chosen = np.flatnonzero(sizes > place)
        part = (values[chosen] >> np.uint64(7 * place)).astype(np.uint8) & 0x7F
        goes_on = sizes[chosen] > place + 1
        out[starts[chosen] + place] = part | goes_on.astype(np.uint8) << 7
    return out.tobytes(), starts


class StringTable:
    """Each string once, numbered as first asked for; number 0 is the empty string."""

    def __init__(self) -> None:
        self._ids = {"": 0}

    def id(self, text: str) -> int:
        """Return the number of a string, which must be encodable as UTF-8."""
        return self._ids.setdefault(text, len(self._ids))

    def encoded(self) -> list[bytes]:
        """Return all strings in UTF-8, in the order of their numbers."""
        return [text.encode() for text in self._ids]
