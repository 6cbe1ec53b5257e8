# SPDX-License-Identifier: Apache-2.0
"""Runs one CFI program, with every instruction of DWARF 5 chapter 6.4.2 and GNU's extensions.

This is the plain form: for the initial state of CIEs, and for the few programs that `lockstep`
hands over. A register other than RBP, RSP and the return address is of no interest.

A program that cannot be followed to its end, for instance because an instruction is unknown,
yields nothing: a half-understood program would give wrong rows.
"""

from __future__ import annotations

from collections.abc import Callable

from aiflame.agent.unwind import x86_64 as arch
from aiflame.agent.unwind.records import Cie, Fdes, read_sleb, read_uleb

# Compilers nest one deep.
_MAX_REMEMBERED = 64
# Longer expressions are none of those that a rule can hold.
_MAX_EXPRESSION_BYTES = 64

# DW_CFA_*, DWARF 5 table 7.29
_ADVANCE, _OFFSET = 1, 2

Row = tuple[int, int]


class _Cut(Exception):
    """The program ends inside an instruction, or has one that nobody knows."""


class _Machine:
    def __init__(self, data: bytes, cie: Cie, initial: int, start: int) -> None:
        self._data = data
        self._cie = cie
        self._initial = initial
        self._start = start
        self._state = initial
        self._location = 0
        self._stack: list[int] = []
        self._at = 0
        self.rows: list[Row] = []

    def run(self, begin: int, end: int) -> int:
        """Execute a program and return the state after it.

        Raises:
            _Cut: It cannot be followed.
        """
        self._at = begin
        while self._at < end:
            opcode = self._data[self._at]
            self._at += 1
            high, low = opcode >> 6, opcode & 0x3F
            if high == _ADVANCE:
                self._advance(low)
            elif high == _OFFSET:
                self._saved(low, self._uleb() * self._cie.data_align)
            elif high:
                self._restore(low)
            else:
                handler = _HANDLERS.get(opcode)
                if handler is None:
                    raise _Cut
                handler(self)
        if self._at > end:
            raise _Cut
        self._emit()
        return self._state

    def _uleb(self) -> int:
        value, self._at = read_uleb(self._data, self._at)
        if self._at > len(self._data) - 32:
            raise _Cut
        return value

    def _sleb(self) -> int:
        value, self._at = read_sleb(self._data, self._at)
        return value

    def _fixed(self, width: int) -> int:
        self._at += width
        return int.from_bytes(self._data[self._at - width : self._at], "little")

    def _emit(self) -> None:
        if not self.rows or self.rows[-1][1] != self._state:
            self.rows.append((self._location, self._state))

    def _advance(self, delta: int) -> None:
        if delta:
            self._emit()
            self._location += delta * self._cie.code_align

    def _set_location(self) -> None:
        """Only with absolute addresses: assemblers have not written this for decades."""
        target = self._fixed(8) - self._start
        if self._cie.encoding != 0 or target < self._location:
            raise _Cut
        if target > self._location:
            self._emit()
            self._location = target

    def _saved(self, register: int, offset: int) -> None:
        if register == arch.RBP:
            self._state = arch.with_rbp(self._state, arch.RbpKind.AT_CFA, offset)
        elif register == arch.RIP:
            where = arch.RA_AT_CFA_8 if offset == -8 else arch.RA_UNSUPPORTED
            self._state = arch.with_ra(self._state, where)
        elif register == arch.RSP:
            # The caller's RSP would no longer be the CFA.
            self._cfa(arch.CFA_UNSUPPORTED, 0)

    def _restore(self, register: int) -> None:
        mask = {arch.RBP: arch.RBP_MASK, arch.RIP: arch.RA_MASK}.get(register, 0)
        self._state = self._state & ~mask | self._initial & mask

    def _lost(self, register: int, ra: int) -> None:
        if register == arch.RBP:
            self._state = arch.with_rbp(self._state, arch.RbpKind.UNKNOWN)
        elif register == arch.RIP:
            self._state = arch.with_ra(self._state, ra)
        elif register == arch.RSP:
            self._cfa(arch.CFA_UNSUPPORTED, 0)

    def _same(self) -> None:
        register = self._uleb()
        if register == arch.RBP:
            self._state = arch.with_rbp(self._state, arch.RbpKind.SAME)
        else:
            self._lost(register, arch.RA_UNSUPPORTED)

    def _in_register(self) -> None:
        self._lost(self._uleb(), arch.RA_UNSUPPORTED)
        self._uleb()

    def _value(self, skip: Callable[[_Machine], object]) -> None:
        self._lost(self._uleb(), arch.RA_UNSUPPORTED)
        skip(self)

    def _saved_at(self) -> None:
        register = self._uleb()
        expression = self._expression()
        if register == arch.RSP:
            # Signal frames: the CFA says the same, or else `rule_of` refuses the state.
            return
        self._state = arch.with_saved_at(self._state, register, expression)

    def _expression(self) -> bytes:
        length = self._uleb()
        begin = self._at
        self._at += length
        if self._at > len(self._data):
            raise _Cut
        return self._data[begin : min(self._at, begin + _MAX_EXPRESSION_BYTES + 1)]

    def _remember(self) -> None:
        if len(self._stack) >= _MAX_REMEMBERED:
            raise _Cut
        self._stack.append(self._state)

    def _recall(self) -> None:
        if not self._stack:
            raise _Cut
        self._state = self._stack.pop()

    def _cfa(self, form: int, offset: int) -> None:
        self._state = arch.with_cfa(self._state, form, offset)

    def _cfa_register_and(self, offset: Callable[[_Machine], int]) -> None:
        register = self._uleb()
        known = register <= arch.MAX_REGISTER
        self._cfa(register if known else arch.CFA_UNSUPPORTED, offset(self))

    def _cfa_register(self) -> None:
        register = self._uleb()
        old = self._state >> arch.CFA_SHIFT
        known = max(register, old) <= arch.MAX_REGISTER
        offset = self._state & arch.OFFSET_MASK
        self._state = arch.with_cfa(self._state, 0, 0) | offset
        self._state |= (register if known else arch.CFA_UNSUPPORTED) << arch.CFA_SHIFT

    def _cfa_offset(self, offset: int) -> None:
        old = self._state >> arch.CFA_SHIFT
        self._cfa(old if old <= arch.MAX_REGISTER else arch.CFA_UNSUPPORTED, offset)

    def _scaled_sleb(self) -> int:
        return self._sleb() * self._cie.data_align


_M = _Machine
_HANDLERS: dict[int, Callable[[_Machine], object]] = {
    0x00: lambda m: None,
    0x01: _M._set_location,
    0x02: lambda m: m._advance(m._fixed(1)),
    0x03: lambda m: m._advance(m._fixed(2)),
    0x04: lambda m: m._advance(m._fixed(4)),
    0x05: lambda m: m._saved(m._uleb(), m._uleb() * m._cie.data_align),
    0x06: lambda m: m._restore(m._uleb()),
    0x07: lambda m: m._lost(m._uleb(), arch.RA_UNDEFINED),
    0x08: _M._same,
    0x09: _M._in_register,
    0x0A: _M._remember,
    0x0B: _M._recall,
    0x0C: lambda m: m._cfa_register_and(_M._uleb),
    0x0D: _M._cfa_register,
    0x0E: lambda m: m._cfa_offset(m._uleb()),
    0x0F: lambda m: m._cfa(*arch.cfa_of_expression(m._expression())),
    0x10: _M._saved_at,
    0x11: lambda m: m._saved(m._uleb(), m._scaled_sleb()),
    0x12: lambda m: m._cfa_register_and(_M._scaled_sleb),
    0x13: lambda m: m._cfa_offset(m._scaled_sleb()),
    0x14: lambda m: m._value(_M._uleb),  # val_offset
    0x15: lambda m: m._value(_M._sleb),  # val_offset_sf
    0x16: lambda m: m._value(_M._expression),  # val_expression
    0x2E: _M._uleb,  # GNU_args_size
    0x2F: lambda m: m._saved(m._uleb(), -m._uleb() * m._cie.data_align),
}


def initial_state(data: bytes, cie: Cie) -> int:
    """The state in which programs of this CIE begin; a state without a rule if it is unusable."""
    machine = _Machine(data, cie, arch.EMPTY_STATE, 0)
    try:
        state = machine.run(cie.begin, cie.end)
    except _Cut:
        return arch.UNSUPPORTED_STATE
    one_row = len(machine.rows) == 1 and machine.rows[0][0] == 0
    usable = one_row and cie.return_register == arch.RIP
    return state if usable else arch.UNSUPPORTED_STATE


def run_program(fdes: Fdes, row: int, initial: int) -> list[Row] | None:
    """Rows (bytes from the start, state) of one FDE; None when it cannot be followed."""
    cie = fdes.cies[int(fdes.cie_rows[row])]
    machine = _Machine(fdes.data, cie, initial, int(fdes.starts[row]))
    try:
        machine.run(int(fdes.begins[row]), int(fdes.ends[row]))
    except _Cut:
        return None
    if not cie.is_signal_frame:
        return machine.rows
    # A walker takes the word above such a frame for an interrupted instruction, not for a return
    # address, only where the rule says so.
    return [
        (offset, state if _is_signal(state) else _no_rule(state)) for offset, state in machine.rows
    ]


def _is_signal(state: int) -> bool:
    return arch.rule_of(state).kind == arch.RuleKind.SIGNAL


def _no_rule(state: int) -> int:
    rooted = arch.rule_of(state).kind == arch.RuleKind.UNDEFINED_RA
    return state if rooted else arch.UNSUPPORTED_STATE
