# SPDX-License-Identifier: Apache-2.0
"""Code objects of a capture: what reports list kernels from that the recording has not listed."""

from __future__ import annotations

import hashlib
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from aiflame.agent.losses import LossKind

# Of a capture, and of what one process brought to it, compressed: a page of it shows some kernels,
# of cubins with some KB each, or large ones of which little is kept. And of one when it is not
# compressed, as readers have it: as much as of a helper's is read.
MAX_STORED_BYTES, MAX_STORED_BYTES_OF_PROCESS = 64_000_000, 32_000_000
MAX_CODE_BYTES = 64 << 20
# zlib's: a cubin takes 20 ms a MB, and is a third or less then; more would be 5 % less.
_COMPRESSION = 1


class StoredCode:
    """The code objects of a capture that is being written.

    Args:
        put: Puts rows into a table of it, as `CaptureWriter.put` does.
    """

    def __init__(self, put: Callable[[str, Iterable[Sequence[Any]]], None]) -> None:
        self._put_rows = put
        self._numbers: dict[tuple[str, bytes], int | None] = {}  # by family, and digest
        self._left = MAX_STORED_BYTES
        self._stored: Counter[int] = Counter()  # bytes, by process

    def put(
        self, family: str, process: int, data: bytes, lose: Callable[[LossKind], None]
    ) -> int | None:
        """Stores what a kernel can be listed from; returns its number, None where it is not.

        Args:
            family: Of devices; its `Lists` reads it.
            process: Who has brought it.
            data: It; b"" for nothing.
            lose: Counts what finds no room.
        """
        if not data:
            return None
        of = (family, hashlib.sha256(data).digest())
        if of not in self._numbers:
            self._numbers[of] = self._put(family, process, data)
            if self._numbers[of] is None:
                lose(LossKind.DEVICE_CODE_NOT_STORED)
        return self._numbers[of]

    def _put(self, family: str, process: int, data: bytes) -> int | None:
        room = min(self._left, MAX_STORED_BYTES_OF_PROCESS - self._stored[process])
        content = zlib.compress(data, _COMPRESSION) if len(data) <= MAX_CODE_BYTES else b""
        if not content or len(content) > room:
            return None
        self._left -= len(content)
        self._stored[process] += len(content)
        number = len(self._numbers)
        self._put_rows("code_objects", [(number, family, len(data), content)])
        return number
