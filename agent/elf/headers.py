# SPDX-License-Identifier: Apache-2.0
"""What a recorder needs of the headers of a file that a target maps."""

from __future__ import annotations

import re
from dataclasses import dataclass

from aiflame.agent.elf import records as elf
from aiflame.agent.elf.image import MAX_SEGMENTS, ElfImage, NotElf, Segment, bias
from aiflame.agent.file_questions import BadAnswer, Json, Question, flag, rows, text, whole
from aiflame.agent.target_files import TargetFile

_BUILD_ID = re.compile(r"(?:[0-9a-f]{2}){0,64}")
_MACHINE = re.compile(r"[0-9A-Z_]{1,20}")
_MAX_REASON_CHARACTERS = 400


@dataclass(frozen=True, slots=True)
class Headers:
    """Of one file; fields as those of `ElfImage`."""

    build_id: str
    machine: str
    bits: int
    entry: int
    size_bytes: int
    loads: tuple[Segment, ...]
    damage: str

    def file_offset_of(self, address: int) -> int | None:
        """As `ElfImage.file_offset_of`."""
        load = next((load for load in self.loads if load.holds(address)), None)
        return None if load is None else load.file_offset_of(address)

    def bias(self, start: int, file_offset: int) -> int:
        """As `ElfImage.bias`."""
        return bias(self.loads, start, file_offset)


def headers(file: TargetFile) -> Json:
    """Reads the headers; None for what is no ELF file: code that a runtime made, a script."""
    try:
        image = ElfImage.read(file)
    except NotElf:
        return None
    loads = [(*load[1:4], load.executable) for load in image.loads]
    facts = (image.build_id, image.machine, image.bits, image.entry, image.size_bytes)
    return [*facts, loads, image.damage[:_MAX_REASON_CHARACTERS]]


def _checked(answer: Json) -> Headers | None:
    if answer is None:
        return None
    build_id, machine, bits, entry, size_bytes, loads, damage = answer
    if not _BUILD_ID.fullmatch(build_id) or not _MACHINE.fullmatch(machine) or bits not in (32, 64):
        raise BadAnswer("no headers")
    return Headers(
        build_id=build_id,
        machine=machine,
        bits=bits,
        entry=whole(entry),
        size_bytes=whole(size_bytes),
        loads=tuple(
            Segment(elf.PT_LOAD, whole(offset), whole(address), whole(size), flag(executable))
            for offset, address, size, executable in rows(loads, MAX_SEGMENTS)
        ),
        damage=text(damage, _MAX_REASON_CHARACTERS),
    )


HEADERS = Question(headers, _checked)
