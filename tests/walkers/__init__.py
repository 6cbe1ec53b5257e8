# SPDX-License-Identifier: Apache-2.0
"""The stack walkers of bpf/, compiled for user space, and the memory that they walk in."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from aiflame.agent.kernel import abi
from aiflame.agent.kernel import unwind_tables as kernel_tables
from aiflame.agent.kernel.unwind_tables import table_bytes
from aiflame.agent.model.profile import StopReason
from aiflame.agent.unwind.table import PAGE_SHIFT, UnwindTable

_HERE = Path(__file__).parent
_BPF = _HERE.parents[1] / "bpf"
_IMAGE = 7  # as in walkers.c
_SEGMENT = np.dtype([("address", "<u8"), ("size", "<u8"), ("bytes", "<u8")])
_ALL_BITS = (1 << 64) - 1
_ODD_BITS = 0x9E3779B97F4A7C15  # of the golden ratio: multiples look random


class Code(NamedTuple):
    """Executable memory; `address - bias` is an address of the table's binary."""

    start: int
    end: int
    bias: int
    table: UnwindTable | None


class _UserRegs(ctypes.Structure):
    """struct user_regs of bpf/arch.h."""

    _fields_ = [(name, ctypes.c_uint64) for name in ("rip", "rsp", "rbp", "rbx", "return_address")]


class Stack(NamedTuple):
    """Addresses, leaf first, and why there are no more."""

    addresses: list[int]
    end: StopReason


class PythonFrames(NamedTuple):
    """Code object, position and end of a run of each frame, and why there are no more."""

    frames: list[tuple[int, int, bool]]
    end: abi.PythonEnd


class KernelWalkers:
    """The walkers.

    Args:
        folder: Where they are compiled.
    """

    def __init__(self, folder: Path) -> None:
        library = folder / "walkers.so"
        flags = ["-std=gnu11", "-O1", "-g", "-shared", "-fPIC", "-Wall", "-Werror"]
        # All of a header is compiled, and some of it called. What is declared by number is never.
        flags += ["-Wno-unused", "-Wno-unknown-pragmas", "-fno-strict-aliasing"]
        (folder / "losses.h").write_text(abi.losses_header())
        folders = (_HERE, _BPF, _BPF / "kernel" / "include", folder)
        include = [f"-I{path}" for path in folders]
        source = _HERE / "walkers.c"
        subprocess.run(["gcc", *flags, *include, "-o", library, source], check=True)
        self._library = ctypes.CDLL(str(library))
        self._library.known_address_of.restype = ctypes.POINTER(ctypes.c_uint64)
        self._kept: dict[str, Any] = {}  # what the library points to
        self._mappings_id = 0

    def set_memory(self, pieces: Mapping[int, bytes]) -> None:
        """Gives the target's memory, by address; the rest cannot be read."""
        segments = np.zeros(len(pieces), _SEGMENT)
        buffers = [np.frombuffer(data, np.uint8) for data in pieces.values()]
        for row, address, buffer in zip(segments, pieces, buffers, strict=True):
            row["address"], row["size"], row["bytes"] = address, len(buffer), buffer.ctypes.data
        self._kept["memory"] = segments, buffers
        self._library.set_memory(_pointer(segments), ctypes.c_uint64(len(segments)))

    def set_code(self, code: Sequence[Code], *, has_tables: bool = True) -> None:
        """Gives the process's mappings, as the host half brings them, with their tables or not."""
        slots = np.zeros(len(code) + 1, abi.MAPPING_SLOT_DTYPE)
        self._mappings_id += 1
        slots[0]["start"], slots[0]["end"] = _IMAGE, len(code)
        slots[0]["bias"] = self._mappings_id * _ODD_BITS & _ALL_BITS
        words = []
        for number, mapping in enumerate(sorted(code)):
            row = slots[number + 1]
            row["start"], row["end"] = mapping.start, mapping.end
            if mapping.table is None:
                row["table"] = abi.TABLE_IS_NONE
            elif not has_tables:
                row["table"] = abi.TABLE_IS_MISSING
            else:
                words.append((number, kernel_words(mapping.table)))
                bias = mapping.bias + (mapping.table.base_page << PAGE_SHIFT)
                row["bias"] = bias & _ALL_BITS
                row["table"], row["pages"] = number, len(mapping.table.page_first_row) - 1
        self._kept["code"] = slots, words
        self.put_tables_back()
        self._library.set_mappings(_pointer(slots), ctypes.c_uint64(len(slots)))

    def take_tables_out(self) -> None:
        """Takes the tables out of the kernel, and leaves the mappings that name them."""
        self._library.take_tables_out()

    def put_tables_back(self) -> None:
        """Puts the tables of `set_code` in again."""
        for number, words in self._kept["code"][1]:
            self._library.set_table(number, _pointer(words), ctypes.c_uint64(len(words)))

    def walk(self, rip: int, rsp: int, rbp: int, rbx: int) -> Stack:
        """Walks a stack from these registers on."""
        record = np.zeros(1, abi.STACK_DTYPE)
        self._library.walk_stack(_pointer(record), _UserRegs(rip, rsp, rbp, rbx))
        return Stack(abi.user_frames(record[0]).tolist(), StopReason(int(record[0]["end"])))

    def copy(self, rip: int, rsp: int, rbp: int, rbx: int) -> npt.NDArray[np.void] | None:
        """Walks a stack, and copies it if it met code without its table, as STACK_COPY_DTYPE."""
        copied = np.zeros(1, abi.STACK_COPY_DTYPE)
        is_copied = self._library.copy_stack(_pointer(copied), _UserRegs(rip, rsp, rbp, rbx))
        return copied if is_copied & 1 else None

    def known_address(self, address: int) -> npt.NDArray[np.uint64]:
        """Returns the two words in which the next walk finds what is known of an address."""
        words = self._library.known_address_of(ctypes.c_uint64(address))
        return np.ctypeslib.as_array(words, (2,))

    def walk_python(self, process: npt.NDArray[np.void], thread_pointer: int) -> PythonFrames:
        """Walks the Python frames of a thread; `process` is one of PYTHON_PROCESS_DTYPE."""
        chain = np.zeros(1, abi.PYTHON_CHAIN_DTYPE)
        self._library.walk_python_frames(
            _pointer(chain), _pointer(process), ctypes.c_uint64(thread_pointer)
        )
        depth = int(chain[0]["depth"])
        frames = [
            (code & ~abi.PYTHON_ENDS_RUN, position, bool(code & abi.PYTHON_ENDS_RUN))
            for code, position in zip(
                chain[0]["codes"][:depth].tolist(),
                chain[0]["positions"][:depth].tolist(),
                strict=True,
            )
        ]
        return PythonFrames(frames, abi.PythonEnd(int(chain[0]["end"])))


def _pointer(array: npt.NDArray[Any]) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def kernel_words(table: UnwindTable) -> npt.NDArray[np.uint64]:
    """Returns a table as it lies in the kernel."""
    words = np.zeros(table_bytes(table) // 8, np.uint64)
    kernel_tables.fill(table, words.view(np.uint32))
    return words
