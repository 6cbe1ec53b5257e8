# SPDX-License-Identifier: Apache-2.0
"""Runs all CFI programs of a section at once: in each step every program executes one instruction.

335,120 programs of some 15 instructions are 5 million steps of an interpreter, seconds in Python.
In lock-step they are about a hundred numpy steps over columns that shrink as programs end. Rare
instructions, and the last few long programs, go to the plain interpreter, which starts those
programs anew.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from aiflame.agent.unwind import x86_64 as arch
from aiflame.agent.unwind.interpret import initial_state, run_program
from aiflame.agent.unwind.records import (
    I64,
    MAX_ROWS,
    U64,
    BadUnwindInfo,
    Fdes,
    read_ulebs,
)

# Below this many programs a numpy step costs more than the plain interpreter.
_FEW = 48
# What the plain interpreter may be given of one binary: 2 s of work. libtorch_cpu needs 0.1 MB.
MAX_PLAIN_BYTES = 2_000_000
_MAX_REMEMBERED = 4
_NOT_EMITTED = np.uint64(arch.ALL_BITS)

_IMMEDIATE_ADVANCE, _ADVANCE_1, _ADVANCE_2, _ADVANCE_4 = range(1, 5)
_SAVED, _RESTORE, _REMEMBER, _RECALL, _CFA, _CFA_REGISTER, _CFA_OFFSET = range(5, 12)
_CFA_EXPRESSION, _SAVED_AT, _SKIP, _NOP, _PLAIN = range(12, 17)
_ADVANCES = (_IMMEDIATE_ADVANCE, _ADVANCE_1, _ADVANCE_2, _ADVANCE_4)

_U = np.uint64
I32 = npt.NDArray[np.int32]
_NOT_CFA = _U(arch.ALL_BITS & ~(arch.CFA_MASK | arch.OFFSET_MASK))
_NOT_CFA_FORM = _U(arch.ALL_BITS & ~arch.CFA_MASK)
_NOT_OFFSET = _U(arch.ALL_BITS & ~arch.OFFSET_MASK)
_NOT_RBP = _U(arch.ALL_BITS & ~arch.RBP_MASK)
_OFFSET_BITS = _U(arch.OFFSET_MASK)
_RBP_BITS = _U(arch.RBP_MASK)
_FORM = _U(arch.CFA_SHIFT)


def _classes() -> npt.NDArray[np.uint8]:
    table = np.full(256, _PLAIN, np.uint8)
    table[0x40:0x80] = _IMMEDIATE_ADVANCE
    table[0x80:0xC0] = _SAVED
    table[0x80 + arch.RIP] = table[0x80 + arch.RSP] = _PLAIN
    table[0xC0:] = _NOP
    table[0xC0 + arch.RBP] = _RESTORE
    table[0xC0 + arch.RIP] = _PLAIN
    table[[0x00, 0x02, 0x03, 0x04]] = [_NOP, _ADVANCE_1, _ADVANCE_2, _ADVANCE_4]
    table[[0x0A, 0x0B, 0x0C, 0x0D, 0x0E]] = [_REMEMBER, _RECALL, _CFA, _CFA_REGISTER, _CFA_OFFSET]
    table[[0x0F, 0x10, 0x2E]] = [_CFA_EXPRESSION, _SAVED_AT, _SKIP]
    return table


_CLASS = _classes()


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of all FDEs, in no order; columns have shape (n,).

    Attributes:
        fdes: The FDE of each row.
        ranks: Which of its FDE's rows it is.
        offsets: Bytes from the FDE's start.
        states: See `x86_64`.
        counts: Rows of each FDE, shape (FDEs,); 0 where a program cannot be followed.
    """

    fdes: I32
    ranks: I32
    offsets: I64
    states: U64
    counts: I64


class _Columns:
    """The state of all programs, one element for each."""

    def __init__(self, fdes: Fdes, initial: U64) -> None:
        count = len(fdes)
        self.view = np.frombuffer(fdes.data, np.uint8)
        self.at = fdes.begins.copy()
        self.limits = fdes.ends
        self.ends = _without_padding(self.view, fdes)
        self.initial = initial
        self.states = initial.copy()
        self.offsets = np.zeros(count, np.int64)
        self.emitted = np.full(count, _NOT_EMITTED)
        self.counts = np.zeros(count, np.int64)
        self.depths = np.zeros(count, np.int64)
        self.stack = np.zeros((_MAX_REMEMBERED, count), np.uint64)
        self.is_plain: npt.NDArray[np.bool_] = np.zeros(count, bool)
        self.emitted_rows = 0
        self.parts: list[tuple[I32, I32, I64, U64]] = []

    def emit(self, rows: I64) -> None:
        """Note the state of these programs where it differs from their last row."""
        states = self.states[rows]
        fresh = states != self.emitted[rows]
        rows, states = rows[fresh], states[fresh]
        self.emitted_rows += len(rows)
        if self.emitted_rows > MAX_ROWS:
            raise BadUnwindInfo(f"over the limit of {MAX_ROWS} rows")
        ranks = self.counts[rows]
        # Half as wide as indexes are: of millions of rows this is most of the memory.
        part = (rows.astype(np.int32), ranks.astype(np.int32), self.offsets[rows], states)
        self.parts.append(part)
        self.emitted[rows] = states
        self.counts[rows] = ranks + 1

    def ulebs(self, rows: I64) -> I64:
        """The next operand of these programs; those with a huge one are handed over."""
        values, after = read_ulebs(self.view, self.at[rows])
        self.at[rows] = after
        huge = (values < 0) | (values > np.iinfo(np.int32).max)
        if huge.any():
            self.is_plain[rows[huge]] = True
            values[huge] = 0
        return values

    def hand_over(self, rows: I64) -> None:
        """Let the plain interpreter run these."""
        self.is_plain[rows] = True


def run_programs(fdes: Fdes, drops: Counter[str]) -> Rows:
    """Run the program of every FDE.

    Args:
        fdes: From `records.parse_section`.
        drops: Counts programs that could not be followed.

    Raises:
        BadUnwindInfo: There would be more than MAX_ROWS.
    """
    initials = np.array([initial_state(fdes.data, cie) for cie in fdes.cies], np.uint64)
    usual = np.array([_is_usual(fdes, row) for row in range(len(fdes.cies))], bool)
    columns = _Columns(fdes, initials[fdes.cie_rows])
    columns.is_plain = ~usual[fdes.cie_rows]
    active: I64 = np.flatnonzero(~columns.is_plain)
    while len(active) >= _FEW:
        active = active[(columns.at[active] < columns.ends[active]) & ~columns.is_plain[active]]
        _step(columns, active)
    columns.is_plain[active] = True
    columns.is_plain |= columns.at > columns.limits
    columns.emit(np.flatnonzero(~columns.is_plain))
    return _with_plain(fdes, columns, drops)


def _is_usual(fdes: Fdes, row: int) -> bool:
    cie = fdes.cies[row]
    aligned = (cie.code_align, cie.data_align) == (arch.CODE_ALIGN, arch.DATA_ALIGN)
    return aligned and not cie.is_signal_frame


def _without_padding(view: npt.NDArray[np.uint8], fdes: Fdes) -> I64:
    """Ends of the programs without the zero bytes at the end, which are DW_CFA_nop or an operand.

    An operand that is cut off here is still read where it stands.
    """
    ends = fdes.ends.copy()
    rows: I64 = np.flatnonzero(ends > fdes.begins)
    for _ in range(8):
        rows = rows[view[ends[rows] - 1] == 0]
        ends[rows] -= 1
        rows = rows[ends[rows] > fdes.begins[rows]]
    return ends


def _step(columns: _Columns, active: I64) -> None:
    """One instruction of each active program."""
    opcodes = columns.view[columns.at[active]]
    columns.at[active] += 1
    classes = _CLASS[opcodes]
    by_class = np.bincount(classes, minlength=_PLAIN + 1)
    for kind in np.flatnonzero(by_class).tolist():
        if kind == _NOP:
            continue
        chosen = np.flatnonzero(classes == kind)
        rows = active[chosen]
        if kind in _ADVANCES:
            _advance(columns, rows, opcodes[chosen], kind)
        elif kind == _SAVED:
            _save(columns, rows, opcodes[chosen])
        else:
            _ACTIONS[kind](columns, rows)


def _advance(columns: _Columns, rows: I64, opcodes: npt.NDArray[np.uint8], kind: int) -> None:
    if kind == _IMMEDIATE_ADVANCE:
        deltas = (opcodes & 0x3F).astype(np.int64)
    else:
        at = columns.at[rows]
        deltas = np.zeros(len(rows), np.int64)
        width = {_ADVANCE_1: 1, _ADVANCE_2: 2, _ADVANCE_4: 4}[kind]
        for byte in range(width):
            deltas |= columns.view[at + byte].astype(np.int64) << (8 * byte)
        columns.at[rows] = at + width
    moves = deltas > 0
    if not moves.all():
        rows, deltas = rows[moves], deltas[moves]
    columns.emit(rows)
    columns.offsets[rows] += deltas


def _save(columns: _Columns, rows: I64, opcodes: npt.NDArray[np.uint8]) -> None:
    offsets = columns.ulebs(rows) * arch.DATA_ALIGN
    is_rbp = opcodes == 0x80 + arch.RBP
    rows, offsets = rows[is_rbp], offsets[is_rbp]
    columns.hand_over(rows[offsets < np.iinfo(np.int16).min])
    _set_rbp(columns, rows, arch.RbpKind.AT_CFA, offsets)


def _set_rbp(columns: _Columns, rows: I64, kind: arch.RbpKind, offsets: I64) -> None:
    bits = (offsets & 0xFFFF).astype(np.uint64) << _U(arch.RBP_OFFSET_SHIFT)
    bits |= _U(kind << arch.RBP_KIND_SHIFT)
    columns.states[rows] = columns.states[rows] & _NOT_RBP | bits


def _restore(columns: _Columns, rows: I64) -> None:
    kept = columns.states[rows] & _NOT_RBP
    columns.states[rows] = kept | columns.initial[rows] & _RBP_BITS


def _remember(columns: _Columns, rows: I64) -> None:
    full = columns.depths[rows] == _MAX_REMEMBERED
    columns.hand_over(rows[full])
    rows = rows[~full]
    columns.stack[columns.depths[rows], rows] = columns.states[rows]
    columns.depths[rows] += 1


def _recall(columns: _Columns, rows: I64) -> None:
    empty = columns.depths[rows] == 0
    columns.hand_over(rows[empty])
    rows = rows[~empty]
    columns.depths[rows] -= 1
    columns.states[rows] = columns.stack[columns.depths[rows], rows]


def _define_cfa(columns: _Columns, rows: I64) -> None:
    registers = columns.ulebs(rows)
    offsets = columns.ulebs(rows)
    columns.hand_over(rows[registers > arch.MAX_REGISTER])
    bits = (registers & arch.MAX_REGISTER).astype(np.uint64) << _FORM
    kept = columns.states[rows] & _NOT_CFA
    columns.states[rows] = kept | bits | offsets.astype(np.uint64)


def _define_cfa_register(columns: _Columns, rows: I64) -> None:
    registers = columns.ulebs(rows)
    states = columns.states[rows]
    columns.hand_over(rows[(registers > arch.MAX_REGISTER) | _is_expression(states)])
    bits = (registers & arch.MAX_REGISTER).astype(np.uint64) << _FORM
    columns.states[rows] = states & _NOT_CFA_FORM | bits


def _define_cfa_offset(columns: _Columns, rows: I64) -> None:
    offsets = columns.ulebs(rows)
    states = columns.states[rows]
    columns.hand_over(rows[_is_expression(states)])
    columns.states[rows] = states & _NOT_OFFSET | offsets.astype(np.uint64)


def _is_expression(states: U64) -> npt.NDArray[np.bool_]:
    result: npt.NDArray[np.bool_] = states >> _FORM > _U(arch.MAX_REGISTER)
    return result


def _define_cfa_expression(columns: _Columns, rows: I64) -> None:
    """Only `breg6 n, deref` with a short n, which is GCC's after realigning the stack."""
    lengths = columns.ulebs(rows)
    at = columns.at[rows]
    first, number, last = (columns.view[at + byte] for byte in range(3))
    usual = (lengths == 3) & (first == arch.OP_BREG_RBP) & (number < 0x80) & (last == arch.OP_DEREF)
    columns.hand_over(rows[~usual])
    columns.at[rows] = at + 3
    bits = _U(arch.CFA_RBP_DEREF << arch.CFA_SHIFT)
    offsets = _short_sleb(number).view(np.uint64) & _OFFSET_BITS
    columns.states[rows] = columns.states[rows] & _NOT_CFA | bits | offsets


def _saved_at(columns: _Columns, rows: I64) -> None:
    """Only `breg6 n` with a short n; that of other registers is skipped."""
    registers = columns.ulebs(rows)
    lengths = columns.ulebs(rows)
    at = columns.at[rows]
    first, number = columns.view[at], columns.view[at + 1]
    usual = (lengths == 2) & (first == arch.OP_BREG_RBP) & (number < 0x80)
    columns.hand_over(rows[~usual | (registers == arch.RIP) | (registers == arch.RSP)])
    columns.at[rows] = at + 2
    is_rbp = registers == arch.RBP
    _set_rbp(columns, rows[is_rbp], arch.RbpKind.AT_RBP, _short_sleb(number[is_rbp]))


def _short_sleb(number: npt.NDArray[np.uint8]) -> I64:
    value = number.astype(np.int64)
    return np.where(number & 0x40, value - 128, value)


_ACTIONS: dict[int, Callable[[_Columns, I64], object]] = {
    _RESTORE: _restore,
    _REMEMBER: _remember,
    _RECALL: _recall,
    _CFA: _define_cfa,
    _CFA_REGISTER: _define_cfa_register,
    _CFA_OFFSET: _define_cfa_offset,
    _CFA_EXPRESSION: _define_cfa_expression,
    _SAVED_AT: _saved_at,
    _SKIP: _Columns.ulebs,
    _PLAIN: _Columns.hand_over,
}


def _with_plain(fdes: Fdes, columns: _Columns, drops: Counter[str]) -> Rows:
    """Run what was handed over, and put all rows together."""
    handed = np.flatnonzero(columns.is_plain)
    columns.counts[handed] = 0
    parts: list[npt.NDArray[Any]] = [
        np.concatenate(column) for column in zip(*columns.parts, strict=True)
    ]
    columns.parts.clear()
    stale = columns.is_plain[parts[0]]
    if stale.any():
        parts = [part[~stale] for part in parts]
    budget = MAX_PLAIN_BYTES
    fresh: list[tuple[int, int, int, int]] = []
    for row in handed.tolist():
        budget -= int(fdes.ends[row] - fdes.begins[row])
        found = run_program(fdes, row, int(columns.initial[row])) if budget >= 0 else None
        if found is None:
            drops["bad program" if budget >= 0 else "costly program"] += 1
            continue
        columns.counts[row] = len(found)
        fresh += [(row, rank, *pair) for rank, pair in enumerate(found)]
    if fresh:
        added = zip(*fresh, strict=True)
        parts = [
            np.concatenate([old, np.array(new, old.dtype)])
            for old, new in zip(parts, added, strict=True)
        ]
    return Rows(parts[0], parts[1], parts[2], parts[3], columns.counts)
