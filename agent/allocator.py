# SPDX-License-Identifier: Apache-2.0
"""Memory that was freed goes back to the kernel; garbage is not looked for where there is none.

glibc learns from the first large block that is freed to keep those like it, up to 32 MB
(mallopt(3)). That is cheaper than to map each anew; but what a recording needs for a moment at its
start would stay resident to its end. Other C libraries keep less, and have none of this.

So would pages of libraries that nobody looks at any more.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections.abc import Iterable, Iterator

from aiflame.agent import kernelfs

# malloc.h, glibc 2.36.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4

# What maps are read into mostly stays untouched: the kernel gives out zeroed pages, while a block
# that was used before must be zeroed as a whole. The arrays of a window of thousands of threads
# would be scattered among what stays, and keep as much memory resident between two windows as all
# of them have within one. Copies of the stacks of threads that sleep are the smallest of what is
# meant, 16 KB each, and thousands at first: once the heap has had room for them, glibc takes larger
# blocks from there as well.
_LARGE_BYTES = 1 << 14
# Of such blocks; others come from the heap. The kernel lets a process have 65,530 mappings
# (vm.max_map_count), and whoever has reached that gets no memory at all.
_MOST_LARGE = 1 << 14
# At the end of the heap, as glibc begins with.
_KEPT_BYTES = 1 << 17

_SMAPS = "/proc/self/smaps"
_DONTNEED = 4  # MADV_DONTNEED of asm-generic/mman-common.h
_madvise = ctypes.CDLL(None).madvise


def map_large_blocks() -> None:
    """Has each large block mapped for itself, and unmapped when it is freed."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
        mallopt(_M_MMAP_MAX, _MOST_LARGE)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


def give_back_freed_memory() -> None:
    """Returns what is kept of freed memory; takes a few milliseconds."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)


class PagesOfFiles:
    """Unmaps clean pages of libraries; the kernel maps those that are used again, 64 KB at a time.

    To load a library reads most of it, numpy's and OpenSSL's 12 MB, of which a recording needs 3.
    """

    def __init__(self) -> None:
        self._seen = {*_clean_mappings(kernelfs.lines(_SMAPS))}

    def give_back(self) -> None:
        """Unmaps the pages of all libraries; takes 5 ms.

        A mapping that was not there at the last call stays: another thread may be loading that
        library, and the loader writes to it in a moment.
        """
        found = {*_clean_mappings(kernelfs.lines(_SMAPS))}
        for begin, end in self._seen & found:
            # Where it is refused, they stay.
            _madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _DONTNEED)
        self._seen = found


def _clean_mappings(lines: Iterable[bytes]) -> list[tuple[int, int]]:
    """Returns mappings of files that cannot be written to, and have nothing that ever was.

    Args:
        lines: Of smaps (proc_pid_smaps(5)). What the loader has written before it took the right
            to, and a breakpoint that somebody has set, are anonymous pages, or swapped out ones.
    """
    found: dict[tuple[int, int], bool] = {}
    span = 0, 0
    for line in lines:
        match line.split():
            case [addresses, permissions, _, _, _, path, *_] if not addresses.endswith(b":"):
                begin, _, end = addresses.partition(b"-")
                span = int(begin, 16), int(end, 16)
                # Not of devices: what they map is no file's.
                is_file = path.startswith(b"/") and not path.startswith(b"/dev/")
                found[span] = is_file and b"w" not in permissions
            case [addresses, _, _, _, _] if not addresses.endswith(b":"):
                span = 0, 0
            case [b"Anonymous:" | b"Swap:", size, _] if size != b"0":
                found[span] = False
    return [span for span, is_clean in found.items() if is_clean]


@contextlib.contextmanager
def without_garbage_collection() -> Iterator[None]:
    """While objects are made by the hundred thousand, and none of them is garbage.

    The collector would look through all of them again and again, which is up to half of the time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
