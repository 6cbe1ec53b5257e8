# SPDX-License-Identifier: Apache-2.0
"""The process that reads memory of targets, for `memory`.

It needs CAP_SYS_PTRACE and one system call, process_vm_readv(2), and has given up all else. That
call brings in what is not in memory, so it may wait for ever for whoever has that: a file system
that the target itself serves, or its userfaultfd. Then this process is killed.

Questions and answers lie in memory that both share: which spans are to be read, how much of each
was read, and the bytes one after the other. Messages on a socket tell how many there are, and when
they are answered. Imports little, since it is started before a recording, which waits for it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import sys

from aiflame.agent.inspector import sandbox

PAGE_BYTES = mmap.PAGESIZE

# The number of the span that is being read; then spans; then what came of each: how many bytes
# were read, or an error number below zero; then the bytes.
PROGRESS = struct.Struct("<Q")
SPAN = struct.Struct("<QQQ")  # thread id, address, bytes
RESULT = struct.Struct("<q")
COUNT = struct.Struct("<I")
# 2,048 sleeping threads are read at a time, and as many code objects.
MAX_SPANS = 4096
# Four line tables of the largest functions; 256 stacks.
MAX_DATA_BYTES = 4 << 20
SPANS_AT = 64
RESULTS_AT = SPANS_AT + MAX_SPANS * SPAN.size
DATA_AT = RESULTS_AT + MAX_SPANS * RESULT.size
SHARED_BYTES = DATA_AT + MAX_DATA_BYTES

# Pages read by one call: if none of them is there, a disk has them all after a tenth of a second.
_MAX_VECTORS = 64

_libc = ctypes.CDLL(None, use_errno=True)
_readv = _libc.process_vm_readv
_readv.restype = ctypes.c_ssize_t
_readv.argtypes = (ctypes.c_int, *(2 * (ctypes.c_void_p, ctypes.c_ulong)), ctypes.c_ulong)


class Shared:
    """The memory that both sides share.

    Args:
        fd: Of a file of SHARED_BYTES in memory.
    """

    def __init__(self, fd: int) -> None:
        self.memory = mmap.mmap(fd, SHARED_BYTES)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))


def answer(shared: Shared, count: int) -> None:
    """Reads so many spans; of each as much as can be read from its beginning on."""
    memory = shared.memory
    spans = [SPAN.unpack_from(memory, SPANS_AT + i * SPAN.size) for i in range(count)]
    begin, data_at = 0, DATA_AT
    while begin < count:
        PROGRESS.pack_into(memory, 0, begin)
        tid = spans[begin][0]
        vectors: list[int] = []
        end, size = begin, 0
        # Spans of one thread are read by one call, which ends at the first that it cannot read.
        while end < count and spans[end][0] == tid and len(vectors) < 2 * _MAX_VECTORS:
            _add_pages(vectors, *spans[end][1:])
            size += spans[end][2]
            end += 1
        copied = _copy(tid, vectors, shared.address + data_at, size)
        if copied in _NOT_ALLOWED:
            for index in range(begin, end):
                RESULT.pack_into(memory, RESULTS_AT + index * RESULT.size, copied)
            data_at += size
            begin = end
            continue
        left = max(copied, 0)
        while begin < end:
            size = spans[begin][2]
            found = min(left, size)
            RESULT.pack_into(memory, RESULTS_AT + begin * RESULT.size, found)
            begin += 1
            data_at += size
            left -= found
            if found < size:
                break


# No such process; not permitted.
_NOT_ALLOWED = (-3, -1)


def _add_pages(vectors: list[int], address: int, size: int) -> None:
    """Adds a vector for each page: a call reads whole vectors up to the first that it cannot."""
    end = address + size
    while address < end:
        page_end = min(end, (address // PAGE_BYTES + 1) * PAGE_BYTES)
        vectors += (address, page_end - address)
        address = page_end


def _copy(tid: int, vectors: list[int], to: int, size: int) -> int:
    """Returns how many bytes were copied, or an error number below zero."""
    local = struct.pack("<QQ", to, size)
    remote = struct.pack(f"<{len(vectors)}Q", *vectors)
    # By thread: a process whose first thread has ended is not found by its own id.
    copied: int = _readv(tid, local, 1, remote, len(vectors) // 2, 0)
    return copied if copied >= 0 else -ctypes.get_errno()


def main() -> None:
    """Serves until the socket is closed; arguments as of `child`, and the shared file."""
    questions, parent_pid, shared_fd = map(int, sys.argv[1:])
    shared = Shared(shared_fd)
    calls = {**sandbox.BASE_CALLS, **sandbox.MEMORY_CALLS}
    failures = sandbox.enter(calls.values(), parent_pid, [sandbox.CAP_SYS_PTRACE])
    os.write(questions, f"ready {'; '.join(failures)}".encode())
    while message := os.read(questions, COUNT.size):
        answer(shared, COUNT.unpack(message)[0])
        os.write(questions, message)


if __name__ == "__main__":
    main()
