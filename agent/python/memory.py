# SPDX-License-Identifier: Apache-2.0
"""Reading another process's memory without stopping it.

process_vm_readv(2) through ctypes: no ptrace attach, so nothing in the target changes or waits.
What is read may be torn or stale; each reader bounds and checks it. Tests implement `Memory` over
bytes that they made.
"""

from __future__ import annotations

import ctypes
import os
import struct
from typing import Protocol

from aiflame.agent.errors import AiflameError

# The longest single read anywhere is a line table; no caller needs more.
MAX_READ_BYTES = 1024 * 1024
# User space of x86-64 with four-level page tables (Linux Documentation/arch/x86/x86_64/mm.rst);
# CPython asks for no address above it.
MAX_ADDRESS = (1 << 47) - 4096
_LOWEST_ADDRESS = 4096  # the first page is never mapped


class Memory(Protocol):
    """The address space of one process."""

    def read(self, address: int, size: int) -> bytes | None:
        """Exactly `size` bytes from `address`, or None."""


class NoMemoryAccess(AiflameError):
    """This process may not read the target's memory, or the target is gone."""


class _IoVec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


_libc = ctypes.CDLL(None, use_errno=True)
_libc.process_vm_readv.restype = ctypes.c_ssize_t
_libc.process_vm_readv.argtypes = (
    ctypes.c_int,
    ctypes.POINTER(_IoVec),
    ctypes.c_ulong,
    ctypes.POINTER(_IoVec),
    ctypes.c_ulong,
    ctypes.c_ulong,
)


class ProcessMemory:
    """Memory of a running process; `failed_reads` counts what could not be read.

    Args:
        pid: Process id in this pid namespace.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.failed_reads = 0

    def read(self, address: int, size: int) -> bytes | None:
        """Exactly `size` bytes, or None where they are not mapped or not to be asked for.

        Raises:
            NoMemoryAccess: Permission is missing, or the process has ended.
        """
        if not sound_address(address) or not 0 < size <= MAX_READ_BYTES:
            self.failed_reads += 1
            return None
        buffer = ctypes.create_string_buffer(size)
        here = _IoVec(ctypes.addressof(buffer), size)
        there = _IoVec(address, size)
        done = _libc.process_vm_readv(self.pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
        if done == size:
            return buffer.raw
        error = ctypes.get_errno()
        if done < 0 and isinstance(
            failure := OSError(error, os.strerror(error)), PermissionError | ProcessLookupError
        ):
            raise NoMemoryAccess(
                f"cannot read the memory of process {self.pid}: {failure.strerror}"
            )
        self.failed_reads += 1
        return None


def sound_address(address: int) -> bool:
    """Whether anything of user space can be there."""
    return _LOWEST_ADDRESS <= address < MAX_ADDRESS


def read_u64(memory: Memory, address: int) -> int | None:
    """A pointer-sized number, or None."""
    data = memory.read(address, 8)
    return None if data is None else int(struct.unpack("<Q", data)[0])


def read_i32(memory: Memory, address: int) -> int | None:
    """A C int, or None."""
    data = memory.read(address, 4)
    return None if data is None else int(struct.unpack("<i", data)[0])
