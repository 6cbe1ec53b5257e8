# SPDX-License-Identifier: Apache-2.0
"""Takes pages of its own away from whoever reads them: a reader waits for ever.

What is missing is to be brought by the owner of a userfaultfd, and that is this program, which
never does (Documentation/admin-guide/mm/userfaultfd.rst). First argument: "code" for the lines
of a function that sleeps, "stack" for its stack, "sound" for nothing.
"""

import ctypes
import mmap
import struct
import sys
import threading
import time
from pathlib import Path

import pytruth

# asm/unistd_64.h
_SYS_USERFAULTFD = 323
_SLEEPING = ("23", "230")  # select(2), and from CPython 3.11 on clock_nanosleep(2)
# linux/userfaultfd.h
_API, _REGISTER, _MODE_MISSING = 0xC018AA3F, 0xC020AA00, 1
_UFFD_API = 0xAA
_MADV_DONTNEED = 4
_PAGE = mmap.PAGESIZE
# malloc gives a block of its own pages to what is larger than 128 KiB.
_TABLE_BYTES = 1 << 19
# What the C library keeps of a thread at the end of its stack, and walks when another is made.
_OWN_BYTES = 2 * _PAGE
_libc = ctypes.CDLL(None, use_errno=True)


def take_away(begin, end):
    """Has all reads of whole pages from `begin` to `end` wait."""
    begin, end = -(-begin // _PAGE) * _PAGE, end // _PAGE * _PAGE
    descriptor = _libc.syscall(_SYS_USERFAULTFD, 0)
    assert descriptor >= 0, ctypes.get_errno()
    question = ctypes.create_string_buffer(struct.pack("<QQQ", _UFFD_API, 0, 0), 24)
    assert _libc.ioctl(descriptor, ctypes.c_ulong(_API), question) == 0, ctypes.get_errno()
    address, size = ctypes.c_void_p(begin), ctypes.c_size_t(end - begin)
    question = ctypes.create_string_buffer(
        struct.pack("<QQQQ", begin, end - begin, _MODE_MISSING, 0), 32
    )
    assert _libc.ioctl(descriptor, ctypes.c_ulong(_REGISTER), question) == 0, ctypes.get_errno()
    assert _libc.madvise(address, size, _MADV_DONTNEED) == 0, ctypes.get_errno()


def spin(cpu_ms):
    end_ns = time.thread_time_ns() + cpu_ms * 1_000_000
    while time.thread_time_ns() < end_ns:
        pass


def nap():
    time.sleep(3600)


def through_c(depth):
    """Uses some pages of stack: sorted() calls back from C."""
    if depth:
        sorted([depth - 1], key=through_c)
    else:
        nap()


def sleeper():
    """Starts a thread that naps; returns its stack pointer."""
    thread = threading.Thread(target=through_c, args=(50,), daemon=True)
    thread.start()
    while True:
        state = Path(f"/proc/self/task/{thread.native_id}/syscall").read_text().split()
        # Number, six arguments, stack pointer, program counter; the number alone if it runs.
        if state[0] in _SLEEPING:
            return int(state[7], 16)


def stuck_code():
    """Has a thread sleep in a function whose line table never comes, but for its first page."""
    table = bytes(_TABLE_BYTES)
    name = "co_linetable" if sys.version_info >= (3, 10) else "co_lnotab"
    nap.__code__ = nap.__code__.replace(**{name: table})
    take_away(id(table) + _PAGE // 2, id(table) + _TABLE_BYTES)
    sleeper()


def stuck_stack():
    """Has a thread sleep whose stack never comes."""
    pointer = sleeper()
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(word, 16) for word in line.split()[0].split("-"))
        if begin <= pointer < end:
            take_away(pointer // _PAGE * _PAGE, end - _OWN_BYTES)


def main():
    {"code": stuck_code, "stack": stuck_stack, "sound": sleeper}[sys.argv[1]]()
    pytruth.begin()
    spin(500)
    pytruth.end({})


if __name__ == "__main__":
    main()
