# SPDX-License-Identifier: Apache-2.0
"""Where threads and processes start: the last frame that a complete stack has.

The functions there have well-known names, but the C library's are local and gone from stripped
builds, so they are also told by the code around the call that they make (glibc 2.35 to 2.41 on
x86-64: nptl/pthread_create.c, sysdeps/nptl/libc_start_call_main.h, clone3.S). A stripped program's
`_start` is where its ELF header says that it begins.
"""

from __future__ import annotations

import re
import struct

from aiflame.agent.elf.headers import Headers
from aiflame.agent.elf.image import ElfImage
from aiflame.agent.target_files import TargetFile

_START_NAMES = re.compile(
    r"""_start | _start_c | __libc_start_main(_impl|@.*)? | __libc_start_call_main
      | libc_start_main_stage2 | start_thread | __?clone3? | clone3? | start | thread_start
      | _dl_start_user | _dl_start
      | runtime\.(goexit|mstart|mstart0|mstart1|rt0_go|mcall|systemstack)(\.abi0)?
    """,
    re.VERBOSE,
)

# mov %rax,%fs:disp32: start_thread stores the thread's result in its descriptor, struct pthread,
# at 0x628 or 0x630, and jumps there from the return address (glibc 2.35 to 2.41 as distributed).
_STORES_THREAD_RESULT = re.compile(rb"\x64\x48\x89\x04\x25.\x06\x00\x00", re.DOTALL)
# mov %eax,%edi; call ...: __libc_start_call_main passes main's result to exit.
_PASSES_RESULT_TO_EXIT = re.compile(rb"\x89\xc7\xe8")
# So does musl's (1.2.3, src/env/__libc_start_main.c), which calls constructors right before main,
# and so has main's address in a register that calls save: call *%rbx, *%rbp, *%r12 to *%r15. glibc
# calls setjmp there, and has it on the stack.
_CALLS_SAVED_REGISTER = re.compile(rb"[^\x41]\xff[\xd3\xd5]|\x41\xff[\xd4-\xd7]", re.DOTALL)
_CALLS_MAIN, _CALLS_MAIN_OF_MUSL = "__libc_start_call_main", "libc_start_main_stage2"
_CALL_BYTES = 3
# mov %rax,%rdi; mov $SYS_exit,%eax; syscall: clone3 ends the thread.
_EXITS_THREAD = re.compile(rb"\x48\x89\xc7\xb8\x3c\x00\x00\x00\x0f\x05")
# mov %eax,%edi; xor %eax,%eax; mov $SYS_exit,%al; syscall: so does musl's clone (1.2.3,
# src/thread/x86_64/clone.s).
_EXITS_THREAD_OF_MUSL = re.compile(rb"\x89\xc7\x31\xc0\xb0\x3c\x0f\x05")
_AFTER_CALL = {
    "start_thread": _STORES_THREAD_RESULT,
    _CALLS_MAIN: _PASSES_RESULT_TO_EXIT,
    "clone3": _EXITS_THREAD,
    "clone": _EXITS_THREAD_OF_MUSL,
}
_CALLS_SIGRETURN = b"\x48\xc7\xc0\x0f\x00\x00\x00\x0f\x05"
_CODE_BYTES = 10  # the longest of these

_JUMP = struct.Struct("<Bi")  # jmp rel32
_JUMP_OPCODE = 0xE9

# `_start` of glibc and musl is shorter than this (sysdeps/x86_64/start.S: 38 bytes).
_MAX_START_BYTES = 64


# What threads begin in (sysdeps/unix/sysv/linux/x86_64/clone.S and clone3.S), and what that calls.
_CLONE_NAMES = frozenset({"clone", "__clone", "clone3", "__clone3"})
_THREAD_START = "start_thread"


def is_clone(name: str) -> bool:
    """Whether a function is the system call that a new thread returns from."""
    return name in _CLONE_NAMES


def is_thread_start(name: str) -> bool:
    """Whether a function is the first of a thread in C."""
    return name == _THREAD_START


def is_start_name(name: str) -> bool:
    """Whether a function is where threads or processes start."""
    return _START_NAMES.fullmatch(name) is not None


def name_by_code(file: TargetFile, image: ElfImage | Headers, address: int) -> tuple[str, bool]:
    """Names code without a symbol that is known by its instructions.

    It compares ten bytes with a few that are known, and nothing else is made of them.

    Args:
        file: The file.
        image: Its headers.
        address: Virtual address; of a caller, that of its call's last byte.

    Returns:
        The name, "" if it is not known, and whether threads or processes start there.

    Raises:
        BadTargetFile: As `TargetFile.read`; so do the others here.
    """
    if is_at_entry(image.entry, address):
        return "_start", True
    offset = image.file_offset_of(address)
    if offset is None:
        return "", False
    if is_signal_return(file, offset + 1):
        return "__restore_rt", False
    start = start_name_in_libc(file, offset + 1)
    return start or "", start is not None


def start_name_in_libc(file: TargetFile, return_offset: int) -> str | None:
    """Names a start function of a stripped C library by the code around its call.

    Args:
        file: The library.
        return_offset: File offset of the return address.
    """
    code = file.read(_CODE_BYTES, return_offset)
    if len(code) >= _JUMP.size and code[0] == _JUMP_OPCODE:
        # Code and file lie alike within a segment: a relative jump is one in the file, too.
        target = return_offset + _JUMP.size + _JUMP.unpack_from(code)[1]
        code = file.read(_CODE_BYTES, target)
    name = next((name for name, pattern in _AFTER_CALL.items() if pattern.match(code)), None)
    if name == _CALLS_MAIN and return_offset >= _CALL_BYTES:
        call = file.read(_CALL_BYTES, return_offset - _CALL_BYTES)
        return _CALLS_MAIN_OF_MUSL if _CALLS_SAVED_REGISTER.fullmatch(call) else name
    return name


def is_signal_return(file: TargetFile, return_offset: int) -> bool:
    """Whether a handler returns to here: to the trampoline that calls sigreturn(2).

    Such a return address is the trampoline's first byte, and what lies before it is another
    function, or none (mov $15,%rax; syscall: glibc 2.35 to 2.41, musl 1.2).
    """
    return file.read(len(_CALLS_SIGRETURN), return_offset) == _CALLS_SIGRETURN


def is_at_entry(entry: int, address: int) -> bool:
    """Whether a virtual address lies in the code at the program's entry."""
    return entry != 0 and entry <= address < entry + _MAX_START_BYTES
