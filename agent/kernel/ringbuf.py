# SPDX-License-Identifier: Apache-2.0
"""Reads a BPF ring buffer through its memory mapping.

Layout: kernel/bpf/ringbuf.c and tools/lib/bpf/ringbuf.c (v6.1): one page with the consumer
position, one with the producer position, then the data, mapped twice in a row so that a record
never wraps. A record is a u32 length (bit 31: still being written, bit 30: discarded), a u32 page
offset and the payload, padded to 8 bytes.

The positions are read and written as aligned 64-bit words. x86 orders them as the kernel's
acquire and release do; a processor with weaker ordering needs a barrier here.
"""

from __future__ import annotations

import mmap
import os
import select
import struct
from collections.abc import Iterator

_BUSY, _DISCARDED = 1 << 31, 1 << 30
_HEADER = struct.Struct("<II")
_POSITION = struct.Struct("=Q")


class RingBuffer:
    """The consuming side of one ring buffer.

    Args:
        fd: The map's descriptor; stays the caller's.
        data_bytes: Size of the data area, a power of two.
    """

    def __init__(self, fd: int, data_bytes: int) -> None:
        page = os.sysconf("SC_PAGE_SIZE")
        self._mask = data_bytes - 1
        self._data_at = page
        self._consumer = mmap.mmap(fd, page, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        self._producer = mmap.mmap(
            fd, page + 2 * data_bytes, mmap.MAP_SHARED, mmap.PROT_READ, offset=page
        )
        self._poll = select.epoll()
        self._poll.register(fd, select.EPOLLIN)

    def wait(self, timeout_s: float) -> None:
        """Sleeps until the kernel asks to be read, at most `timeout_s`."""
        self._poll.poll(max(timeout_s, 0))

    def watch(self, fd: int) -> None:
        """Lets `wait` return when this descriptor becomes readable, too."""
        self._poll.register(fd, select.EPOLLIN)

    def records(self) -> Iterator[bytes]:
        """Yields the payloads that are complete now, and gives their room back."""
        position = int(_POSITION.unpack_from(self._consumer)[0])
        end = int(_POSITION.unpack_from(self._producer)[0])
        while position < end:
            at = self._data_at + (position & self._mask)
            length, _ = _HEADER.unpack_from(self._producer, at)
            if length & _BUSY:
                break
            payload = length & ~(_BUSY | _DISCARDED)
            if not length & _DISCARDED:
                yield self._producer[at + _HEADER.size : at + _HEADER.size + payload]
            position += (payload + _HEADER.size + 7) & ~7
            _POSITION.pack_into(self._consumer, 0, position)

    def close(self) -> None:
        """Unmaps the buffer."""
        self._poll.close()
        self._producer.close()
        self._consumer.close()
