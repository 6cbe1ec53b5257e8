# SPDX-License-Identifier: Apache-2.0
"""bpf(2) and other bare system calls, without numpy: the compiling child has no time for it."""

from __future__ import annotations

import ctypes
import os
import struct
from typing import Any

from aiflame.agent.recording.arch import this_architecture

_PROG_LOAD = 5
_PROG_TYPE_TRACING, _TRACE_ITER = 26, 28
_INSTRUCTION_BYTES = 8

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def syscall(number: int, *arguments: Any) -> int:
    """Makes a system call. Raises OSError when it fails."""
    result = int(_libc.syscall(ctypes.c_long(number), *arguments))
    if result < 0:
        raise last_error()
    return result


def last_error() -> OSError:
    """Returns what the last failed call through ctypes complained of."""
    code = ctypes.get_errno()
    return OSError(code, os.strerror(code))


def bpf(command: int, attributes: bytes | ctypes.Array[ctypes.c_char]) -> int:
    """Calls bpf(2) with a packed union bpf_attr. Raises OSError when it fails."""
    return syscall(
        this_architecture().syscall_bpf,
        ctypes.c_int(command),
        attributes,
        ctypes.c_uint(len(attributes)),
    )


def ioctl(fd: int, request: int, argument: int) -> None:
    """Calls ioctl(2). Raises OSError when it fails."""
    if _libc.ioctl(ctypes.c_int(fd), ctypes.c_ulong(request), ctypes.c_ulong(argument)) < 0:
        raise last_error()


def load_iterator(instructions: bytes, function_type: int) -> int:
    """Loads an iterator program that has no maps; returns its descriptor.

    Not by BCC, whose releases differ in whether they know this kind, and which answers a refusal
    with a bare Exception.

    Args:
        instructions: Its code, struct bpf_insn.
        function_type: BTF id of the kernel function that stands for the kind of iterator.

    Raises:
        OSError: The kernel refuses it.
    """
    code = ctypes.create_string_buffer(instructions, len(instructions))
    licence = ctypes.create_string_buffer(b"GPL")
    count = len(instructions) // _INSTRUCTION_BYTES
    attributes = bytearray(120)  # to attach_prog_fd, of v5.5 (include/uapi/linux/bpf.h)
    places = (ctypes.addressof(code), ctypes.addressof(licence))
    struct.pack_into("<IIQQ", attributes, 0, _PROG_TYPE_TRACING, count, *places)
    struct.pack_into("<I", attributes, 68, _TRACE_ITER)
    struct.pack_into("<I", attributes, 108, function_type)
    return bpf(_PROG_LOAD, bytes(attributes))
