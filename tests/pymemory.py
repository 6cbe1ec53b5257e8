# SPDX-License-Identifier: Apache-2.0
"""Memory of a Python process that never was: frames, code and strings at chosen addresses."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Sequence

from aiflame.agent.python import debugoffsets
from aiflame.agent.python.layouts import ABSENT, Layout, Position, RunEnd

BASE = 0x7F00_0000_0000


class ConstructedMemory:
    """Bytes from `BASE` on; whatever lies outside cannot be read."""

    def __init__(self, size: int = 1 << 20) -> None:
        self.data = bytearray(size)
        self._next = 4096
        self.reads = 0

    def read(self, address: int, size: int) -> bytes | None:
        self.reads += 1
        begin = address - BASE
        if begin < 0 or size <= 0 or begin + size > len(self.data):
            return None
        return bytes(self.data[begin : begin + size])

    def read_many(self, ranges: Sequence[tuple[int, int]]) -> list[bytes | None]:
        return [self.read(address, size) for address, size in ranges]

    def allocate(self, size: int) -> int:
        address = BASE + self._next
        self._next += (size + 15) // 16 * 16
        assert self._next <= len(self.data)
        return address

    def write(self, address: int, data: bytes) -> None:
        self.data[address - BASE : address - BASE + len(data)] = data

    def word(self, address: int, value: int) -> None:
        self.write(address, struct.pack("<Q", value & (1 << 64) - 1))

    def text(self, layout: Layout, text: str, length: int | None = None) -> int:
        """A compact str; `length` is what it claims to be long."""
        top = max(map(ord, text), default=0)
        width, codec = (1, "latin-1") if top < 256 else (2, "utf-16-le")
        if top > 0xFFFF:
            width, codec = 4, "utf-32-le"
        is_ascii = top < 128
        data = text.encode(codec, "surrogatepass")
        address = self.allocate(layout.str_compact_data + len(data))
        self.word(address + layout.str_length, len(text) if length is None else length)
        state = (width | 1 << 3 | is_ascii << 4) << layout.str_kind_shift
        self.write(address + layout.str_state, struct.pack("<I", state))
        at = layout.str_ascii_data if is_ascii else layout.str_compact_data
        self.write(address + at, data)
        return address

    def blob(self, layout: Layout, data: bytes, length: int | None = None) -> int:
        """A bytes object."""
        address = self.allocate(layout.bytes_data + len(data))
        self.word(address + layout.bytes_length, len(data) if length is None else length)
        self.write(address + layout.bytes_data, data)
        return address

    def code(self, layout: Layout, name: str, table: bytes = b"", first_line: int = 1) -> int:
        """A code object in file NAME.py with qualified name Q.NAME."""
        address = self.allocate(512)
        self.word(address + layout.code_name, self.text(layout, name))
        self.word(address + layout.code_filename, self.text(layout, f"{name}.py"))
        if layout.code_qualname != ABSENT:
            self.word(address + layout.code_qualname, self.text(layout, f"Q.{name}"))
        self.word(address + layout.code_line_table, self.blob(layout, table))
        self.write(address + layout.code_first_line, struct.pack("<i", first_line))
        if layout.code_copies != ABSENT:
            # Its own instructions, and what a second thread runs.
            copies = struct.pack("<3Q", 2, address + layout.code_instructions, self.allocate(64))
            at = self.allocate(len(copies))
            self.write(at, copies)
            self.word(address + layout.code_copies, at)
        return address

    def copy(self, layout: Layout, code: int, index: int) -> int:
        """Where the n-th copy of a code object's instructions begins."""
        (at,) = struct.unpack("<Q", self.read(code + layout.code_copies, 8) or b"")
        return int(struct.unpack("<Q", self.read(at + 8 + 8 * index, 8) or b"")[0])

    def frame(self, layout: Layout, code: int, instruction: int = 0, mark: int = 0) -> int:
        """A frame at the n-th instruction (two bytes each) of its code, linked to none."""
        address = self.allocate(max(128, layout.frame_bytes))
        self.word(address + layout.frame_code, code)
        if layout.position is Position.POINTER:
            instruction_address = code + layout.code_instructions + 2 * instruction
            self.word(address + layout.frame_position, instruction_address)
        else:
            value = instruction * (2 if layout.position is Position.LASTI_BYTES else 1)
            self.write(address + layout.frame_position, struct.pack("<i", value))
        if layout.run_end is not RunEnd.EVERY_FRAME:
            self.write(address + layout.frame_mark, bytes([mark]))
        return address

    def chain(self, layout: Layout, frames: Sequence[int]) -> int:
        """Link frames, leaf first, and make the thread state that they belong to."""
        for callee, caller in itertools.pairwise(frames):
            self.word(callee + layout.frame_previous, caller)
        state = self.allocate(1024)
        leaf = frames[0] if frames else 0
        if layout.cframe_frame == ABSENT:
            self.word(state + layout.thread_frame, leaf)
        else:
            cframe = self.allocate(64)
            self.word(cframe + layout.cframe_frame, leaf)
            self.word(state + layout.thread_frame, cframe)
        return state


# What _Py_DebugOffsets of running builds hold (free-threaded: should hold), by group and field;
# fields that are left out are of no interest here.
_SHARED = {
    "runtime": {"size": 283320, "finalizing": 608, "interpreters_head": 632},
    "thread": {"size": 304, "next": 8, "interp": 16, "current_frame": 72}
    | {"thread_id": 152, "native_thread_id": 160, "status": 24},
    "interpreter": {"size": 194968, "next": 7264, "threads_head": 7344, "ceval_gil": 16}
    | {"gil_runtime_state": 7752}
    | {"gil_runtime_state_locked": 7768, "gil_runtime_state_holder": 7760},
    "bytes": {"size": 40, "ob_size": 16, "ob_sval": 32},
    "unicode": {"size": 64, "state": 32, "length": 16, "asciiobject_size": 40},
}
_OBJECTS = {
    ((3, 13), False): {
        "frame": {"size": 80, "previous": 8, "instr_ptr": 56, "localsplus": 72, "owner": 70},
        "code": {"size": 208, "filename": 112, "name": 120, "qualname": 128}
        | {"linetable": 136, "firstlineno": 68, "co_code_adaptive": 200},
    },
    ((3, 14), False): {
        "frame": {"size": 88, "previous": 8, "instr_ptr": 56, "localsplus": 80, "owner": 74},
        "code": {"size": 216, "filename": 112, "name": 120, "qualname": 128}
        | {"linetable": 136, "firstlineno": 68, "co_code_adaptive": 208},
    },
    ((3, 15), False): {
        "frame": {"size": 88, "previous": 8, "instr_ptr": 56, "localsplus": 80, "owner": 74},
        "code": {"size": 216, "filename": 112, "name": 120, "qualname": 128}
        | {"linetable": 136, "firstlineno": 68, "co_code_adaptive": 208},
        "thread": {"size": 400, "next": 8, "interp": 16, "current_frame": 72}
        | {"thread_id": 176, "native_thread_id": 184, "status": 32},
    },
    ((3, 13), True): {
        "frame": {"size": 80, "previous": 8, "instr_ptr": 56, "localsplus": 72, "owner": 70},
        "code": {"size": 224, "filename": 128, "name": 136, "qualname": 144}
        | {"linetable": 152, "firstlineno": 84, "co_code_adaptive": 216},
        "bytes": {"size": 56, "ob_size": 32, "ob_sval": 48},
        "unicode": {"size": 80, "state": 48, "length": 32, "asciiobject_size": 56},
    },
    ((3, 14), True): {
        "frame": {"size": 88, "previous": 8, "instr_ptr": 56, "localsplus": 80, "owner": 78}
        | {"tlbc_index": 72},
        "code": {"size": 240, "filename": 128, "name": 136, "qualname": 144, "co_tlbc": 224}
        | {"linetable": 152, "firstlineno": 84, "co_code_adaptive": 232},
        "bytes": {"size": 56, "ob_size": 32, "ob_sval": 48},
        "unicode": {"size": 80, "state": 48, "length": 32, "asciiobject_size": 56},
    },
}


def debug_offsets(version: tuple[int, int], free_threaded: bool = False, **changes: int) -> bytes:
    """A _Py_DebugOffsets; `changes` are by group__field."""
    known = (version, free_threaded)
    groups = _SHARED | _OBJECTS.get(known, _OBJECTS[(3, 13), False])
    values = {
        f"{group}.{name}": at for group, fields in groups.items() for name, at in fields.items()
    }
    values |= {name.replace("__", "."): value for name, value in changes.items()}
    layout = debugoffsets._GROUPS.get(version, debugoffsets._GROUPS[3, 13])
    words = [values.get(f"{g}.{f}", 0) for g, fields in layout for f in fields.split(" ")]
    hex_version = version[0] << 24 | version[1] << 16 | 0xF0
    head = struct.pack("<8sQQ", debugoffsets.COOKIE, hex_version, free_threaded)
    return head + struct.pack(f"<{len(words)}Q", *words) + bytes(64)
