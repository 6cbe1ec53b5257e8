# SPDX-License-Identifier: Apache-2.0
"""What the machine code of an interpreter tells: the eval loop's parts, and a thread key's address.

GCC moves the rare half of `_PyEval_EvalFrameDefault` elsewhere, with an FDE of its own.
Where .symtab is stripped it is told by its jumps: many from the function into the middle of that
FDE's code, and back. Instructions are not decoded; bytes that only look like a jump scatter over
the whole library, so a part counts only if the jumps into it and back are many. x86-64 only.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from aiflame.agent.elf.image import ElfImage
from aiflame.agent.elf.symbols import Symbol, find_symbols_beginning
from aiflame.agent.target_files import TargetFile
from aiflame.agent.unwind.records import BadUnwindInfo, parse_section
from aiflame.agent.unwind.sections import frame_sections

_COLD = b"_PyEval_EvalFrameDefault."
_HANDLER = b"_TAIL_CALL_"
# 3.8 has 31,000 bytes, Debian's 3.11 55,644; a symbol that says more is damaged.
_MAX_FUNCTION_BYTES = 1024 * 1024
# Of real cold parts the rarest direction has over 100 jumps; chance makes 0 or 1 to one FDE.
_MIN_JUMPS = 8
# Unwind information of libpython has 0.5 MB. A section made of the shortest records takes a second.
_MAX_SECTION_BYTES = 8 * 1024 * 1024
# Moved parts are few: GCC makes one, BOLT and Propeller a handful.
MAX_PARTS = 8

U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]


class AddressRange(NamedTuple):
    """Virtual addresses, the end after the last byte."""

    begin: int
    end: int


def eval_ranges(
    file: TargetFile, image: ElfImage, symbol: Symbol
) -> tuple[tuple[AddressRange, ...], bool]:
    """The parts of the eval function, and whether symbols name them.

    Raises:
        BadTargetFile: As `TargetFile.read`.
    """
    size = min(symbol.size, _MAX_FUNCTION_BYTES)
    main = AddressRange(symbol.address, symbol.address + size)
    if image.section(".symtab") is not None:
        named = find_symbols_beginning(file, image, _COLD)
        parts = sorted({AddressRange(s.address, s.address + s.size) for s in named if s.size})
        return (main, *parts[:MAX_PARTS]), True
    return (main, *_jumped_to(file, image, main)), False


def handler_range(file: TargetFile, image: ElfImage) -> AddressRange | None:
    """From the first to the last of the functions that are instructions of the eval loop.

    Others may lie between them. None where there are none, or no symbols of them: they are static.

    Raises:
        BadTargetFile: As `TargetFile.read`.
    """
    found = [s for s in find_symbols_beginning(file, image, _HANDLER) if s.size]
    if not found:
        return None
    return AddressRange(min(s.address for s in found), max(s.address + s.size for s in found))


def _jumped_to(file: TargetFile, image: ElfImage, main: AddressRange) -> list[AddressRange]:
    starts, ends = _functions(file, image)
    body = image.read_at(file, main.begin, main.end - main.begin)
    if not len(starts):
        return []
    targets = jump_targets(body, main.begin)
    targets = targets[(targets < main.begin) | (targets >= main.end)]
    rows = np.searchsorted(starts, targets, "right") - 1
    sound = rows >= 0
    rows, targets = rows[sound], targets[sound]
    # A jump to the first byte of a function is a tail call.
    inside = (targets > starts[rows]) & (targets < ends[rows])
    found = []
    for row, count in Counter(rows[inside].tolist()).most_common(MAX_PARTS):
        part = AddressRange(int(starts[row]), int(ends[row]))
        if count >= _MIN_JUMPS and _jumps_into(file, image, part, main) >= _MIN_JUMPS:
            found.append(part)
    return sorted(found)


def _jumps_into(file: TargetFile, image: ElfImage, part: AddressRange, main: AddressRange) -> int:
    body = image.read_at(file, part.begin, min(part.end - part.begin, _MAX_FUNCTION_BYTES))
    targets = jump_targets(body, part.begin)
    return int(((targets > main.begin) & (targets < main.end)).sum())


def jump_targets(code: bytes, address: int) -> I64:
    """Where each byte sequence that may be a near jump leads (Intel SDM 2, Jcc and JMP).

    `E9 rel32` and `0F 8x rel32`; sequences inside other instructions are among them.
    """
    view = np.frombuffer(code, np.uint8)
    if len(view) < 6:
        return np.empty(0, np.int64)
    last = len(view) - 5
    near = np.flatnonzero(view[:last] == 0xE9) + 1
    conditional = np.flatnonzero((view[: last - 1] == 0x0F) & (view[1:last] & 0xF0 == 0x80)) + 2
    at = np.concatenate((near, conditional))
    at = at[at + 4 <= len(view)]
    raw = np.stack([view[at + byte] for byte in range(4)], axis=1)
    displacement = np.ascontiguousarray(raw).view("<i4").reshape(-1).astype(np.int64)
    return address + at + 4 + displacement


def _functions(file: TargetFile, image: ElfImage) -> tuple[I64, I64]:
    """Begins and ends of all FDEs, ascending."""
    for section in frame_sections(file, image):
        if not section.is_eh or section.size > _MAX_SECTION_BYTES:
            continue
        data = file.read(section.size, section.file_offset)
        try:
            fdes = parse_section(data, section.address, True, Counter())
        except BadUnwindInfo:
            continue
        sound = fdes.starts < np.uint64(1 << 62)
        starts = fdes.starts[sound].astype(np.int64)
        ends = starts + np.minimum(fdes.sizes[sound], np.uint64(1 << 32)).astype(np.int64)
        order = np.argsort(starts, kind="stable")
        return starts[order], ends[order]
    return np.empty(0, np.int64), np.empty(0, np.int64)


def key_operand(code: bytes, address: int, runtime: AddressRange) -> int | None:
    """Address of the pthread key that PyGILState_GetThisThreadState hands on, or None.

    Its first argument load from there: `mov edi, [rip + x]` of the key itself, or
    `lea rdi, [rip + x]` of the Py_tss_t, whose key is 4 bytes on (Include/cpython/pythread.h).
    """
    for index in range(len(code) - 5):
        if code[index : index + 2] == b"\x8b\x3d":
            end, inside = index + 6, 0
        elif code[index : index + 3] == b"\x48\x8d\x3d" and index + 7 <= len(code):
            end, inside = index + 7, 4
        else:
            continue
        displacement = int.from_bytes(code[end - 4 : end], "little", signed=True)
        target = address + end + displacement + inside
        if runtime.begin < target < runtime.end and target % 4 == 0:
            return target
    return None
