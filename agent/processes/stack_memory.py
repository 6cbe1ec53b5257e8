# SPDX-License-Identifier: Apache-2.0
"""The stack of a thread, of which a piece was read before, and the rest is read when asked for."""

from __future__ import annotations

import struct

from aiflame.agent.inspector.memory import RemoteMemory, Span
from aiflame.agent.inspector.memory_worker import PAGE_BYTES

# What a walk may read besides the first piece: 127 frames with 8 KiB of local variables each.
_MAX_LATE_PAGES = 256

_U64 = struct.Struct("<Q")


class StackMemory:
    """One thread's stack: a piece that was read before, and pages that are read when asked for.

    Args:
        span: Where the piece lies.
        piece: Its bytes.
        reader: Reads the pages; None for none but the piece.

    Attributes:
        late_pages: How many pages had to be read; they are of another moment than the piece.
    """

    def __init__(self, span: Span, piece: bytes, reader: RemoteMemory | None) -> None:
        self._span = span
        self._piece = piece
        self._reader = reader
        self._pages: dict[int, bytes] = {}

    @property
    def late_pages(self) -> int:
        return len(self._pages)

    def read_u64(self, address: int) -> int | None:
        """Returns a word of memory, None where there is none to be read."""
        offset = address - self._span.address
        if 0 <= offset <= len(self._piece) - _U64.size:
            return int(_U64.unpack_from(self._piece, offset)[0])
        offset = address % PAGE_BYTES
        page = self._page(address - offset)
        return int(_U64.unpack_from(page, offset)[0]) if offset + _U64.size <= len(page) else None

    def _page(self, start: int) -> bytes:
        page = self._pages.get(start)
        if page is None:
            if self._reader is None or len(self._pages) >= _MAX_LATE_PAGES:
                return b""
            page = self._pages[start] = self._read_page(start)
        return page

    def _read_page(self, start: int) -> bytes:
        if self._reader is None:
            return b""
        return self._reader.read([self._span._replace(address=start, size=PAGE_BYTES)])[0].data

    def page_of_code(self, start: int) -> bytes:
        """Returns a page of code, which is of any moment, and none of the `late_pages`."""
        return self._read_page(start)
