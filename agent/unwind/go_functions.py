# SPDX-License-Identifier: Apache-2.0
"""Unwind rows of Go's functions, from the table that Go's own runtime unwinds with.

Go's compiler writes no .eh_frame. Its table tells for each function how far the stack pointer is
below the return address at each instruction, and which functions begin a stack (goexit, which each
goroutine returns to) or change stacks. It is in stripped files as well.

Layout of Go 1.18 to 1.25: runtime/symtab.go (pcHeader, functab, step), runtime/runtime2.go (_func),
internal/abi/symtab.go (FuncFlag). Earlier ones have another, and are not read.
"""

from __future__ import annotations

import struct
from collections import Counter

import numpy as np
import numpy.typing as npt
from aiflame.agent.elf.image import ElfImage, Section
from aiflame.agent.target_files import TargetFile
from aiflame.agent.unwind import x86_64 as arch
from aiflame.agent.unwind.heuristics import in_gap, inserted
from aiflame.agent.unwind.records import MAX_ROWS, MAX_SECTION_BYTES, U64
from aiflame.agent.unwind.sections import go_table

# Kubernetes' largest programs have 150,000 functions, and 400,000 rows in distinct lists.
_MAX_FUNCTIONS = 1 << 20
_MAX_STEPS = 1 << 21

# pcHeader: magic, two bytes of padding, bytes of the shortest instruction, bytes of a pointer, then
# how many functions and files, where code begins, and where in the table its parts do.
_HEADER = struct.Struct("<IHBBQQQQQQQQ")
# Bytes from a function's record to its flags: Go 1.20 has put the line where it begins before them.
_FLAGS_AT = {0xFFFFFFF0: 37, 0xFFFFFFF1: 41}
_STEPS_AT, _NO_STEPS = 16, 0  # _func.pcsp
_BEGINS_STACK, _CHANGES_STACK = 1, 2  # funcFlag_TOPFRAME, funcFlag_SPWRITE

_NAME_AT = 4  # _func.nameOff
# What signal handlers return to (runtime/sys_linux_amd64.s; the second one since Go 1.20): the
# kernel's frame is there as in C's programs.
_SIGNAL_RETURNS = ("runtime.sigreturn", "runtime.sigreturn__sigaction")
# They call the scheduler, which goes on with another goroutine: the one that called is no caller.
_LEAVES_GOROUTINE = ("runtime.mcall", "runtime.morestack")
# nop; call: where goroutines return to, past the nop (runtime/asm_amd64.s).
_FIRST, _FIRST_CODE = ("runtime.goexit",), b"\x90\xe8"
# A caller that is on another stack is found by RBP, which calls on the new one have saved.
_BY_FRAME = arch.with_ra(arch.with_cfa(0, arch.RBP, 16), arch.RA_AT_CFA_8)
_BY_FRAME = arch.with_rbp(_BY_FRAME, arch.RbpKind.AT_CFA, -16)

_Bytes = npt.NDArray[np.uint8]


def with_go_functions(
    file: TargetFile, image: ElfImage, addresses: U64, states: U64, drops: Counter[str]
) -> tuple[U64, U64]:
    """Adds rows of Go's functions, where the file has no CFI.

    Args:
        file: The file.
        image: Its headers.
        addresses: Where each state begins, ascending and distinct, shape (n,).
        states: See `x86_64`, shape (n,).
        drops: Counts a table that could not be read.

    Returns:
        The same with more rows.

    Raises:
        BadTargetFile: As `TargetFile.read`.
    """
    section = go_table(image)
    if section is None:
        return addresses, states
    try:
        begins, ends, rows, row_states = _rows(file, image, section)
    except (struct.error, ValueError, IndexError, OverflowError):
        drops["table of Go"] += 1
        return addresses, states
    is_bare = in_gap(begins, ends, addresses, states)
    kept = is_bare[np.searchsorted(begins, rows, "right") - 1]
    bounds = np.concatenate([begins[is_bare], ends[is_bare]])
    return inserted(addresses, states, rows[kept], row_states[kept], bounds)


def _rows(file: TargetFile, image: ElfImage, section: Section) -> tuple[U64, U64, U64, U64]:
    if section.size > MAX_SECTION_BYTES:
        raise ValueError("larger than any real one")
    data = file.read(section.size, section.file_offset)
    magic, _, shortest, pointer, count, _, code, *parts = _HEADER.unpack_from(data)
    text = image.section(".text")
    if magic not in _FLAGS_AT or pointer != 8 or count > _MAX_FUNCTIONS or text is None:
        raise ValueError("of another version")
    steps_at, functions_at = parts[3], parts[4]
    # Where a dynamic linker writes it, Go's own linker begins .text with it; another may not.
    is_placed, code = code != 0, code or text.virtual_address
    table = np.frombuffer(data, "<u4", 2 * count + 1, functions_at)
    bounds = table[::2].astype(np.uint64) + np.uint64(code)
    records = table[1::2].astype(np.int64) + functions_at
    begins, ends = bounds[:-1], bounds[1:]
    if not count or (begins >= ends).any() or begins[0] < text.virtual_address:
        raise ValueError("functions in no order")
    if ends[-1] > text.end_address:
        raise ValueError("functions outside of the code")
    content = np.frombuffer(data, np.uint8)
    names, flags = _words(content, records + _NAME_AT), content[records + _FLAGS_AT[magic]]
    is_signal = np.isin(names, _offsets_of(data, parts[0], _SIGNAL_RETURNS))
    is_root = flags & _BEGINS_STACK != 0
    is_root |= np.isin(names, _offsets_of(data, parts[0], _LEAVES_GOROUTINE))
    first = begins[np.isin(names, _offsets_of(data, parts[0], _FIRST))].tolist()
    if not is_placed and any(image.read_at(file, at, 2) != _FIRST_CODE for at in first or (0,)):
        raise ValueError("code is elsewhere")
    # A handler returns to its first byte, and callers are looked up one before.
    begins = begins - is_signal.astype(np.uint64)
    ends = np.minimum(ends, np.append(begins[1:], ends[-1]))
    depths = _words(content, records + _STEPS_AT)
    kept = np.flatnonzero(depths != _NO_STEPS)
    lists, which = np.unique(depths[kept], return_inverse=True)
    offsets, states, counts = _steps(data, (lists + steps_at).tolist(), shortest)
    if counts[which].sum() > MAX_ROWS:
        raise ValueError("more rows than any real one has")
    addresses, rows = _placed(begins[kept], which, offsets, states, counts)
    of_function = np.repeat(kept, counts[which])
    rows[(flags & _CHANGES_STACK != 0)[of_function]] = np.uint64(_BY_FRAME)
    rows[is_root[of_function]] = np.uint64(arch.ROOT_STATE)
    rows[is_signal[of_function]] = np.uint64(arch.SIGNAL_STATE)
    inside = addresses < ends[of_function]
    return begins[kept], ends[kept], addresses[inside], rows[inside]


def _offsets_of(data: bytes, at: int, names: tuple[str, ...]) -> list[int]:
    """Where names are, from the beginning of all; a negative number for one that is not there."""
    found = (data.find(b"\0" + name.encode() + b"\0", at) for name in names)
    return [where + 1 - at if where >= 0 else -1 for where in found]


def _words(content: _Bytes, at: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Returns 32-bit numbers at any offsets."""
    parts = content[at[:, None] + np.arange(4)]
    return np.ascontiguousarray(parts).view("<u4")[:, 0].astype(np.int64)


def _steps(
    data: bytes, lists: list[int], shortest: int
) -> tuple[npt.NDArray[np.int64], U64, npt.NDArray[np.int64]]:
    """Decodes lists of stack depths: offset in the function and state of each row, rows of each."""
    offsets: list[int] = []
    states: list[int] = []
    counts: list[int] = []
    known: dict[int, int] = {}
    for at in lists:
        depth, offset, before = -1, 0, len(offsets)
        while True:
            change, at = _varint(data, at)
            if change == 0 and offset:
                break
            depth += change >> 1 ^ -(change & 1)
            if depth not in known:
                known[depth] = _state(depth)
            offsets.append(offset)
            states.append(known[depth])
            length, at = _varint(data, at)
            offset += length * shortest
            if not length or len(offsets) > _MAX_STEPS:
                raise ValueError("a list without an end")
        counts.append(len(offsets) - before)
    return np.array(offsets, np.int64), np.array(states, np.uint64), np.array(counts, np.int64)


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Returns a LEB128 number of up to 32 bits, and where it ends."""
    value = shift = 0
    while shift < 35:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise ValueError("a number that is too large")


def _state(depth: int) -> int:
    """Where the caller is, from `depth` bytes below the return address.

    What has a frame saves RBP right below that (cmd/internal/obj/x86/obj6.go).
    """
    state = arch.with_ra(arch.with_cfa(0, arch.RSP, depth + 8), arch.RA_AT_CFA_8)
    return arch.with_rbp(state, arch.RbpKind.AT_CFA, -16) if depth > 0 else state


def _placed(
    begins: U64,
    which: npt.NDArray[np.int64],
    offsets: npt.NDArray[np.int64],
    states: U64,
    counts: npt.NDArray[np.int64],
) -> tuple[U64, U64]:
    """Returns the rows of all functions: of each those of its list."""
    first, own = np.cumsum(counts) - counts, counts[which]
    before = np.cumsum(own) - own
    rows = np.arange(own.sum()) + np.repeat(first[which] - before, own)
    addresses = np.repeat(begins, own) + offsets[rows].astype(np.uint64)
    return addresses, states[rows]
