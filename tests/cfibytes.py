# SPDX-License-Identifier: Apache-2.0
"""Builds .eh_frame and .debug_frame sections from a few Python values."""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass, field
from pathlib import Path

from aiflame.agent.elf.contents import for_unwinding
from aiflame.agent.elf.image import ElfImage
from aiflame.agent.symbols.store import Store
from aiflame.agent.target_files import TargetFile
from aiflame.agent.unwind.build import build, identity_of, load, table_name
from aiflame.agent.unwind.table import UnwindTable
from elfbytes import Elf, Section

TEXT = 0x10000
FRAMES = 0x80000
RBX, RBP, RSP, RIP = 3, 6, 7, 16
PCREL_SDATA4 = 0x1B


def uleb(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def sleb(value: int) -> bytes:
    out = bytearray()
    while not -64 <= value < 64:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value & 0x7F])


def advance(delta: int) -> bytes:
    if delta < 0x40:
        return bytes([0x40 | delta])
    if delta < 0x100:
        return bytes([0x02, delta])
    return b"\x04" + struct.pack("<I", delta)


def offset(register: int, words: int) -> bytes:
    return bytes([0x80 | register]) + uleb(words)


def def_cfa(register: int, value: int) -> bytes:
    return b"\x0c" + uleb(register) + uleb(value)


def def_cfa_offset(value: int) -> bytes:
    return b"\x0e" + uleb(value)


def def_cfa_register(register: int) -> bytes:
    return b"\x0d" + uleb(register)


def cfa_expression(expression: bytes) -> bytes:
    return b"\x0f" + uleb(len(expression)) + expression


def expression(register: int, body: bytes) -> bytes:
    return b"\x10" + uleb(register) + uleb(len(body)) + body


USUAL = def_cfa(RSP, 8) + offset(RIP, 1)
# push %rbp; mov %rsp, %rbp; ...; leave
PROLOGUE = advance(1) + def_cfa_offset(16) + offset(RBP, 2) + advance(3) + def_cfa_register(RBP)
EPILOGUE = advance(20) + def_cfa(RSP, 8)


@dataclass
class Frames:
    """A section under construction; records go to `body` one after the other."""

    is_eh: bool = True
    address: int = FRAMES
    body: bytearray = field(default_factory=bytearray)

    def record(self, identity: int, body: bytes, is_64: bool = False) -> int:
        offset = len(self.body)
        wide = is_64 and not self.is_eh
        content = struct.pack("<Q" if wide else "<I", identity) + body
        content += bytes(-len(content) % 8)
        head = struct.pack("<IQ", 0xFFFFFFFF, len(content)) if is_64 else b""
        self.body += (head or struct.pack("<I", len(content))) + content
        return offset

    def cie(
        self,
        program: bytes = USUAL,
        augmentation: bytes = b"zR",
        data: bytes = bytes([PCREL_SDATA4]),
        alignment: tuple[int, int] = (1, -8),
        is_64: bool = False,
    ) -> int:
        body = b"\1" + augmentation + b"\0" + uleb(alignment[0]) + sleb(alignment[1]) + b"\x10"
        if augmentation.startswith(b"z"):
            body += uleb(len(data)) + data
        every_bit = (1 << 64) - 1 if is_64 else 0xFFFFFFFF
        return self.record(0 if self.is_eh else every_bit, body + program, is_64)

    def fde(
        self, cie: int, start: int, size: int, program: bytes = b"", is_64: bool = False
    ) -> None:
        """An FDE with pcrel sdata4 addresses and an empty augmentation."""
        id_at = len(self.body) + (12 if is_64 else 4)
        value = start - (self.address + id_at + 4)
        body = struct.pack("<iI", value, size) + b"\0" + program
        self.record(id_at - cie, body, is_64)

    def absolute_fde(self, cie: int, start: int, size: int, program: bytes = b"") -> None:
        """An FDE with plain 8-byte addresses, of a CIE without augmentation."""
        identity = len(self.body) + 4 - cie if self.is_eh else cie
        self.record(identity, struct.pack("<QQ", start, size) + program)


def elf_with(eh: Frames | bytes | None = None, debug: Frames | None = None) -> bytes:
    sections = []
    if eh is not None:
        data = eh if isinstance(eh, bytes) else bytes(eh.body)
        sections.append(Section(".eh_frame", data, flags=2, address=FRAMES))
    if debug is not None:
        sections.append(Section(".debug_frame", bytes(debug.body)))
    return Elf(sections=sections, text=b"\x90" * 0x30000, text_address=TEXT).build()


def unwound(elf: Elf, *functions: tuple[int, int]) -> bytes:
    """A file with unwind information of functions, and the list of it for linkers."""
    frames, header = 0x8000, 0x7000
    body = Frames(address=frames)
    cie = body.cie()
    pairs = b""
    for start, size in functions:
        pairs += struct.pack("<ii", start - header, frames + len(body.body) - header)
        body.fde(cie, start, size)
    head = b"\x01\x1b\x03\x3b" + struct.pack("<iI", frames - header - 4, len(functions))
    elf.sections += [
        Section(".eh_frame_hdr", head + pairs, flags=2, address=header),
        Section(".eh_frame", bytes(body.body), flags=2, address=frames),
    ]
    return elf.build()


def table_of(data: bytes, directory: Path, store: Store | None = None) -> UnwindTable:
    path = directory / "image"
    path.write_bytes(data)
    return table_of_file(path, store)


def table_of_file(path: Path, store: Store | None = None) -> UnwindTable:
    fd = os.open(path, os.O_RDONLY)
    try:
        file = TargetFile(fd)
        image = ElfImage.read(file)
        if store is None:
            return build(file, image)
        name = table_name(image.build_id, for_unwinding(file, image).digest(file))
        table = load(name, store)
        if table is None:
            table = build(file, image)
            assert store.write(name, table.to_chunks(identity_of(name)))
        return table
    finally:
        os.close(fd)
