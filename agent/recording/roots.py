# SPDX-License-Identifier: Apache-2.0
"""Where threads and processes start: the last frame that a complete stack has.

The functions there have well-known names, but the C library's are local and gone from stripped
builds, so they are also told by the code around the call that they make (glibc 2.31 to 2.41 on
x86-64, nptl/pthread_create.c and sysdeps/nptl/libc_start_call_main.h): `start_thread` stores the
thread's result in its descriptor right after the call, `__libc_start_call_main` passes main's
result to exit. A stripped program's `_start` is where its ELF header says that it begins.
"""

from __future__ import annotations

import os
import re

_START_NAMES = re.compile(
    r"""_start | _start_c | __libc_start_main(_impl|@.*)? | __libc_start_call_main
      | start_thread | __?clone3? | clone3? | start | thread_start
      | _dl_start_user | _dl_start
      | runtime\.(goexit|mstart|mstart0|mstart1|rt0_go|mcall|systemstack)(\.abi0)?
    """,
    re.VERBOSE,
)

# mov %rax,%fs:0x630: the `result` member of struct pthread.
_STORES_THREAD_RESULT = b"\x64\x48\x89\x04\x25\x30\x06\x00\x00"
# mov %eax,%edi; call ...
_PASSES_RESULT_TO_EXIT = b"\x89\xc7\xe8"

# `_start` of glibc and musl is shorter than this (sysdeps/x86_64/start.S: 38 bytes).
_MAX_START_BYTES = 64

_E_ENTRY_AT = 24  # offset of e_entry in a 64-bit ELF header (elf.h)


def is_start_name(name: str) -> bool:
    """Whether a function is where threads or processes start."""
    return _START_NAMES.fullmatch(name) is not None


def start_name_in_libc(fd: int, return_offset: int) -> str | None:
    """Names a start function of a stripped C library by the code after its call.

    Args:
        fd: The library.
        return_offset: File offset of the return address.
    """
    code = os.pread(fd, len(_STORES_THREAD_RESULT), return_offset)
    if code == _STORES_THREAD_RESULT:
        return "start_thread"
    if code.startswith(_PASSES_RESULT_TO_EXIT):
        return "__libc_start_call_main"
    return None


def entry_address(fd: int) -> int:
    """Returns the virtual address at which a program begins, 0 when it cannot be read."""
    header = os.pread(fd, _E_ENTRY_AT + 8, 0)
    if len(header) < _E_ENTRY_AT + 8 or header[:5] != b"\x7fELF\x02":
        return 0
    return int.from_bytes(header[_E_ENTRY_AT:], "little")


def is_at_entry(entry: int, address: int) -> bool:
    """Whether a virtual address lies in the code at the program's entry."""
    return entry != 0 and entry <= address < entry + _MAX_START_BYTES
