# SPDX-License-Identifier: Apache-2.0
"""Unwind rows of Go's functions, from the table that Go's own runtime unwinds with.

Go's compiler writes no .eh_frame. Its table tells for each function how far the stack pointer is
below the return address at each instruction (runtime/symtab.go, step), and which functions begin a
stack (goexit, which each goroutine returns to) or change stacks.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import numpy.typing as npt
from aiflame.agent.elf.go_table import GoFunctions, read_go_functions
from aiflame.agent.elf.image import ElfImage
from aiflame.agent.target_files import TargetFile
from aiflame.agent.unwind import x86_64 as arch
from aiflame.agent.unwind.heuristics import in_gap, inserted
from aiflame.agent.unwind.records import MAX_ROWS, U64

# Kubernetes' largest programs have 400,000 rows in distinct lists.
_MAX_STEPS = 1 << 21

_BEGINS_STACK, _CHANGES_STACK = 1, 2  # funcFlag_TOPFRAME, funcFlag_SPWRITE
# What signal handlers return to (runtime/sys_linux_amd64.s; the second one since Go 1.20): the
# kernel's frame is there as in C's programs.
_SIGNAL_RETURNS = ("runtime.sigreturn", "runtime.sigreturn__sigaction")
# They call the scheduler, which goes on with another goroutine: the one that called is no caller.
_LEAVES_GOROUTINE = ("runtime.mcall", "runtime.morestack")
# A caller that is on another stack is found by RBP, which calls on the new one have saved: of C's
# code that runs on a thread's own stack, which is above those of goroutines, too.
_BY_FRAME = arch.with_ra(arch.with_cfa(0, arch.CFA_OTHER_STACK, 16), arch.RA_AT_CFA_8)
_BY_FRAME = arch.with_rbp(_BY_FRAME, arch.RbpKind.AT_CFA, -16)


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
    try:
        functions = read_go_functions(file, image)
        if functions is None:
            return addresses, states
        begins, ends, rows, row_states = _rows(functions)
    except (ValueError, IndexError):
        drops["table of Go"] += 1
        return addresses, states
    is_bare = in_gap(begins, ends, addresses, states)
    kept = is_bare[np.searchsorted(begins, rows, "right") - 1]
    bounds = np.concatenate([begins[is_bare], ends[is_bare]])
    return inserted(addresses, states, rows[kept], row_states[kept], bounds)


def _rows(functions: GoFunctions) -> tuple[U64, U64, U64, U64]:
    flags = functions.flags
    is_signal = functions.is_called(*_SIGNAL_RETURNS)
    is_root = (flags & _BEGINS_STACK != 0) | functions.is_called(*_LEAVES_GOROUTINE)
    # A handler returns to its first byte, and callers are looked up one before.
    begins = functions.starts - is_signal.astype(np.uint64)
    ends = np.minimum(functions.ends, np.append(begins[1:], functions.ends[-1]))
    kept = np.flatnonzero(functions.steps)
    lists, which = np.unique(functions.steps[kept], return_inverse=True)
    offsets, states, counts = _steps(functions.data, lists.tolist(), functions.shortest)
    if counts[which].sum() > MAX_ROWS:
        raise ValueError("more rows than any real one has")
    addresses, rows = _placed(begins[kept], which, offsets, states, counts)
    of_function = np.repeat(kept, counts[which])
    rows[(flags & _CHANGES_STACK != 0)[of_function]] = np.uint64(_BY_FRAME)
    rows[is_root[of_function]] = np.uint64(arch.ROOT_STATE)
    rows[is_signal[of_function]] = np.uint64(arch.SIGNAL_STATE)
    inside = addresses < ends[of_function]
    return begins[kept], ends[kept], addresses[inside], rows[inside]


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
