# SPDX-License-Identifier: Apache-2.0
"""bpf(2) and other bare system calls, without numpy: the compiling child has no time for it."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import resource
import struct
from typing import Any, NamedTuple, TypeAlias

from aiflame.agent.kernel.arch import this_architecture
from aiflame.agent.limits import OUT_OF_ROOM

# No memory, descriptor or thread is left: nothing is wrong with what was asked for, and the kernel
# may do it a little later.
SHORT = (*OUT_OF_ROOM, errno.EAGAIN)
_MAP_CREATE, _PROG_LOAD, _OBJ_GET_INFO_BY_FD = 0, 5, 15
_PROGRAM_TYPES = {"uprobe": 2, "perf_event": 7, "raw_tracepoint": 17}
_MAP_INFO_BYTES = 80  # struct bpf_map_info of v5.10; an older kernel fills less
_LICENCE = b"GPL"
# The verifier gives up, with EAGAIN, when a signal is pending (kernel/bpf/verifier.c, v6.1); libbpf
# tries as often.
_LOAD_TRIES = 5
_PROG_TYPE_TRACING, _TRACE_ITER = 26, 28
_INSTRUCTION_BYTES = 8

# Each instruction as it is followed. Programs of ours give some MB; a log that finds no room is an
# error of its own before v6.4.
_LOG_LEVEL, _LOG_BYTES = 1, 64 << 20
# What a person can read: the instruction, the state of its registers, the complaint.
_LOG_LINES = 12
Log: TypeAlias = "ctypes.Array[ctypes.c_char]"

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
# A function of its own: types that are known beforehand are the faster half of a call.
_bpf = ctypes.CDLL(None, use_errno=True).syscall
_bpf.restype = ctypes.c_long
_bpf.argtypes = (ctypes.c_long, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint)


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


def try_bpf(command: int, attributes: bytes | ctypes.Array[ctypes.c_char]) -> int:
    """Calls bpf(2); returns 0 or the error number: of what is asked often, and refused often."""
    number = this_architecture().syscall_bpf
    return ctypes.get_errno() if _bpf(number, command, attributes, len(attributes)) < 0 else 0


def ioctl(fd: int, request: int, argument: int) -> None:
    """Calls ioctl(2). Raises OSError when it fails."""
    if _libc.ioctl(ctypes.c_int(fd), ctypes.c_ulong(request), ctypes.c_ulong(argument)) < 0:
        raise last_error()


def lift_memlock_limit() -> None:
    """Lets maps be made where the kernel counts them as locked memory.

    Kernels before v5.11 do; later ones ignore the limit, and there being refused (no
    CAP_SYS_RESOURCE) does no harm.
    """
    infinity = resource.RLIM_INFINITY
    with contextlib.suppress(ValueError):
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (infinity, infinity))


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
    licence = ctypes.create_string_buffer(_LICENCE)
    count = len(instructions) // _INSTRUCTION_BYTES
    attributes = bytearray(120)  # to attach_prog_fd, of v5.5 (include/uapi/linux/bpf.h)
    addresses = (ctypes.addressof(code), ctypes.addressof(licence))
    struct.pack_into("<IIQQ", attributes, 0, _PROG_TYPE_TRACING, count, *addresses)
    struct.pack_into("<I", attributes, 68, _TRACE_ITER)
    struct.pack_into("<I", attributes, 108, function_type)
    return _load(bytes(attributes))


class MapShape(NamedTuple):
    """What a map is created with; `kind` is BPF_MAP_TYPE_*, `flags` BPF_F_*."""

    kind: int
    key_bytes: int
    value_bytes: int
    max_entries: int
    flags: int


class MapFacts(NamedTuple):
    """The kernel's number of a map, and its shape."""

    id: int
    kind: int
    key_bytes: int
    value_bytes: int
    max_entries: int
    flags: int


def create_map(shape: MapShape, inner_fd: int = 0) -> int:
    """Makes a map; returns its descriptor. A map of maps needs one like those that it will hold."""
    return bpf(_MAP_CREATE, struct.pack("<IIIIII", *shape, inner_fd) + bytes(40))


def map_facts(fd: int) -> MapFacts:
    """Reads struct bpf_map_info."""
    info = ctypes.create_string_buffer(_MAP_INFO_BYTES)
    bpf(_OBJ_GET_INFO_BY_FD, struct.pack("<IIQ", fd, len(info), ctypes.addressof(info)))
    kind, number, *rest = struct.unpack_from("<IIIIII", info)
    return MapFacts(number, kind, *rest)


def load_program(
    kind: str, name: str, instructions: bytes, attach_type: int = 0, log: Log | None = None
) -> int:
    """Loads a program; returns its descriptor.

    Args:
        kind: uprobe, perf_event or raw_tracepoint.
        name: For bpftool; the kernel keeps 15 bytes of it.
        instructions: struct bpf_insn, with descriptors of this process where maps are.
        attach_type: BPF_* of enum bpf_attach_type, for kinds of links that ask for it.
        log: Gets the verifier's words.

    Raises:
        OSError: The kernel refuses it.
    """
    body = ctypes.create_string_buffer(instructions, len(instructions))
    terms = ctypes.create_string_buffer(_LICENCE)
    attributes = struct.pack(
        "<IIQQIIQII16s",
        _PROGRAM_TYPES[kind],
        len(instructions) // 8,
        ctypes.addressof(body),
        ctypes.addressof(terms),
        *((0, 0, 0) if log is None else (_LOG_LEVEL, len(log), ctypes.addressof(log))),
        *(0, 0),
        name.encode()[:15],
    )
    # prog_ifindex, expected_attach_type
    return _load(attributes + struct.pack("<II", 0, attach_type) + bytes(56))


def verifier_log(kind: str, name: str, instructions: bytes, attach_type: int = 0) -> str:
    """Returns the last words of the verifier about a program that it refuses, "" for none."""
    log = ctypes.create_string_buffer(_LOG_BYTES)
    with contextlib.suppress(OSError):
        os.close(load_program(kind, name, instructions, attach_type, log))
    return "\n".join(log.value.decode(errors="replace").splitlines()[-_LOG_LINES:])


def _load(attributes: bytes) -> int:
    for _ in range(_LOAD_TRIES - 1):
        with contextlib.suppress(BlockingIOError):
            return bpf(_PROG_LOAD, attributes)
    return bpf(_PROG_LOAD, attributes)
