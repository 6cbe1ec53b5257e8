# SPDX-License-Identifier: Apache-2.0
"""All that unwinding knows about x86-64: registers, rules, linkage stubs, signal frames.

While a CFI program runs, everything a rule needs is one 64-bit word, the state. So a whole column
of programs is a numpy array, DW_CFA_remember_state saves one word, and equal rules are equal words.

    bits  0-31  CFA offset, two's complement
    bits 32-47  RBP offset, two's complement
    bits 48-51  RbpKind
    bits 52-55  where the return address is (RA_*)
    bits 56-63  CFA: a DWARF register number, or one of the CFA_* forms below

Another architecture is another module with these names.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

import numpy as np

MACHINE = "X86_64"

# System V psABI for x86-64, figure 3.36 (DWARF register numbers)
RBX, RBP, RSP, RIP = 3, 6, 7, 16
CODE_ALIGN, DATA_ALIGN = 1, -8

RULE = np.dtype([("kind", "u1"), ("rbp_kind", "u1"), ("rbp_offset", "<i2"), ("cfa_offset", "<i4")])


class RuleKind(enum.IntEnum):
    """How the caller's stack pointer, the CFA, is found. Values are shared with bpf/."""

    NO_CFI = 0  # nothing is known: frame pointers, or the end
    RSP = 1  # CFA = RSP + cfa_offset
    RBP = 2  # CFA = RBP + cfa_offset
    RBP_DEREF = 3  # CFA = *(RBP + cfa_offset): functions that realign their stack
    PLT = 4  # CFA = RSP + 8, and 8 more once (RIP & 15) >= cfa_offset: lazy linkage stubs
    SIGNAL = 5  # RSP, RIP, RBP = *(RSP + cfa_offset), *(... + 8), *(RSP + rbp_offset)
    UNDEFINED_RA = 6  # the outermost frame
    UNSUPPORTED = 7  # there is CFI, but no rule expresses it
    RSP_HEURISTIC = 8  # as RSP, from a prologue; the return address must follow a call
    RBP_HEURISTIC = 9  # as RBP, likewise
    # CFA = RBX + cfa_offset, from CFI or a prologue; likewise. Only of a leaf: no rule tells where
    # a callee saved RBX.
    RBX = 10
    # CFA = *(RSP + high half of cfa_offset) + low half, from a prologue; likewise.
    RSP_SLOT = 11
    # As RBP_HEURISTIC, of code that changes to another stack: the caller's may be the lower one.
    OTHER_STACK = 12


HEURISTICS = (
    RuleKind.RSP_HEURISTIC,
    RuleKind.RBP_HEURISTIC,
    RuleKind.RBX,
    RuleKind.RSP_SLOT,
    RuleKind.OTHER_STACK,
)


class RbpKind(enum.IntEnum):
    """Where the caller's RBP is. Values are shared with bpf/."""

    SAME = 0
    AT_CFA = 1  # at CFA + rbp_offset
    AT_RBP = 2  # at RBP + rbp_offset
    AT_RSP = 3  # at RSP + rbp_offset; only with RuleKind.SIGNAL
    UNKNOWN = 4  # lost, or saved in a way that no rule expresses


class Rule(NamedTuple):
    """One rule, in the field order of RULE. Offsets in bytes."""

    kind: RuleKind
    rbp_kind: RbpKind
    rbp_offset: int
    cfa_offset: int


NO_CFI_RULE = Rule(RuleKind.NO_CFI, RbpKind.SAME, 0, 0)
UNSUPPORTED_RULE = Rule(RuleKind.UNSUPPORTED, RbpKind.SAME, 0, 0)
_ROOT_RULE = Rule(RuleKind.UNDEFINED_RA, RbpKind.SAME, 0, 0)

# Return address: RA_NONE is a CIE that never said, RA_UCONTEXT is the slot of a signal frame.
RA_NONE, RA_AT_CFA_8, RA_UNDEFINED, RA_UCONTEXT, RA_UNSUPPORTED = range(5)
# Forms of the CFA besides register + offset
MAX_REGISTER = 63
CFA_RBP_DEREF, CFA_RSP_DEREF, CFA_PLT, CFA_UNSUPPORTED, CFA_NO_CFI = range(64, 69)
CFA_RSP_HEURISTIC, CFA_RBP_HEURISTIC, CFA_RSP_SLOT, CFA_OTHER_STACK = 69, 70, 71, 72
# Of the slot: what fits beside the offset from what is in it, without a sign.
MAX_SLOT = 1 << 15

# struct rt_sigframe after its return address, Linux arch/x86/include/uapi/asm/{ucontext,
# sigcontext}.h: where the interrupted RSP, RIP and RBP are, as glibc's __restore_rt describes them.
_UCONTEXT_RSP, _UCONTEXT_RIP = 160, 168

CFA_SHIFT, RA_SHIFT, RBP_KIND_SHIFT, RBP_OFFSET_SHIFT = 56, 52, 48, 32
OFFSET_MASK = 0xFFFF_FFFF
RBP_MASK = 0xF_FFFF << RBP_OFFSET_SHIFT
RA_MASK = 0xF << RA_SHIFT
CFA_MASK = 0xFF << CFA_SHIFT
ALL_BITS = (1 << 64) - 1

NO_CFI_STATE = CFA_NO_CFI << CFA_SHIFT
UNSUPPORTED_STATE = CFA_UNSUPPORTED << CFA_SHIFT
# Before a CIE has said anything.
EMPTY_STATE = UNSUPPORTED_STATE

# DWARF 5, 7.7.1: DW_OP_breg7 8, breg16 0, lit15, and, litN, ge, lit3, shl, plus: what ld writes for
# lazy stubs, with N = 11 for the classic form, 9 and 10 with IBT and BND prefixes.
_PLT_HEAD, _PLT_TAIL = b"\x77\x08\x80\x00\x3f\x1a", b"\x2a\x33\x24\x22"
_OP_LIT0 = 0x30
OP_BREG_RBP, OP_BREG_RSP, OP_DEREF = 0x76, 0x77, 0x06
# A function without a caller, as those that say so of their return address.
ROOT_STATE = RA_UNDEFINED << RA_SHIFT

# What interrupted threads return through; RBP as in struct sigcontext, the third word before RSP's.
_UCONTEXT_RBP = 120
SIGNAL_STATE = (
    CFA_RSP_DEREF << CFA_SHIFT
    | RA_UCONTEXT << RA_SHIFT
    | RbpKind.AT_RSP << RBP_KIND_SHIFT
    | _UCONTEXT_RBP << RBP_OFFSET_SHIFT
    | _UCONTEXT_RSP
)


def with_cfa(state: int, form: int, offset: int) -> int:
    """The state with another CFA; one that does not fit becomes unsupported."""
    if not -(1 << 31) <= offset < 1 << 31 or not 0 <= form < 1 << 8:
        form, offset = CFA_UNSUPPORTED, 0
    return state & ~(CFA_MASK | OFFSET_MASK) | form << CFA_SHIFT | offset & OFFSET_MASK


def slot_and_offset(slot: int, offset: int) -> int:
    """What stands for the offset of CFA_RSP_SLOT; one that no state holds where they do not fit."""
    return slot << 16 | offset if 0 <= slot < MAX_SLOT and 0 <= offset < 1 << 16 else 1 << 32


def with_rbp(state: int, kind: RbpKind, offset: int = 0) -> int:
    """The state with RBP found elsewhere; an offset that does not fit loses RBP."""
    if not -(1 << 15) <= offset < 1 << 15:
        kind, offset = RbpKind.UNKNOWN, 0
    return state & ~RBP_MASK | kind << RBP_KIND_SHIFT | (offset & 0xFFFF) << RBP_OFFSET_SHIFT


def with_ra(state: int, where: int) -> int:
    """The state with the return address elsewhere."""
    return state & ~RA_MASK | where << RA_SHIFT


def cfa_of_expression(expression: bytes) -> tuple[int, int]:
    """Form and offset of the CFA that a DWARF expression computes."""
    plt = len(_PLT_HEAD) + 1 + len(_PLT_TAIL)
    if len(expression) == plt and expression[:6] == _PLT_HEAD and expression[7:] == _PLT_TAIL:
        threshold = expression[6] - _OP_LIT0
        return (CFA_PLT, threshold) if 0 < threshold < 16 else (CFA_UNSUPPORTED, 0)
    if expression[-1:] == bytes([OP_DEREF]):
        base, offset = base_of_expression(expression[:-1])
        form = {RBP: CFA_RBP_DEREF, RSP: CFA_RSP_DEREF}.get(base, CFA_UNSUPPORTED)
        return form, offset
    base, offset = base_of_expression(expression)
    return (base, offset) if base in (RBP, RSP) else (CFA_UNSUPPORTED, 0)


def base_of_expression(expression: bytes) -> tuple[int, int]:
    """Register and offset of an expression that is one DW_OP_breg of RBP or RSP, else (-1, 0)."""
    register = {OP_BREG_RBP: RBP, OP_BREG_RSP: RSP}.get(expression[0] if expression else 0, -1)
    value = 0
    for index, byte in enumerate(expression[1:6]):
        value |= (byte & 0x7F) << 7 * index
        if not byte & 0x80:
            whole = index + 2 == len(expression)
            if byte & 0x40:
                value -= 1 << 7 * (index + 1)
            return (register, value) if whole and register >= 0 else (-1, 0)
    return -1, 0


def with_saved_at(state: int, register: int, expression: bytes) -> int:
    """The state after DW_CFA_expression: the register is saved where the expression points."""
    base, offset = base_of_expression(expression)
    if register == RBP:
        kind = {RBP: RbpKind.AT_RBP, RSP: RbpKind.AT_RSP}.get(base, RbpKind.UNKNOWN)
        return with_rbp(state, kind, offset)
    if register == RIP:
        in_ucontext = (base, offset) == (RSP, _UCONTEXT_RIP)
        return with_ra(state, RA_UCONTEXT if in_ucontext else RA_UNSUPPORTED)
    return state


def rule_of(state: int) -> Rule:
    """What a walker does in that state."""
    form, ra = state >> CFA_SHIFT, state >> RA_SHIFT & 0xF
    offset = _signed(state & OFFSET_MASK, 32)
    rbp_kind = RbpKind(state >> RBP_KIND_SHIFT & 0xF)
    rbp_offset = _signed(state >> RBP_OFFSET_SHIFT & 0xFFFF, 16)
    if form == CFA_NO_CFI:
        return NO_CFI_RULE
    if ra == RA_UNDEFINED:
        return _ROOT_RULE
    if form == CFA_RSP_DEREF and ra == RA_UCONTEXT:
        if offset == _UCONTEXT_RSP and rbp_kind == RbpKind.AT_RSP:
            return Rule(RuleKind.SIGNAL, rbp_kind, rbp_offset, offset)
        return UNSUPPORTED_RULE
    kinds = {RSP: RuleKind.RSP, RBP: RuleKind.RBP, RBX: RuleKind.RBX}
    kinds |= {CFA_RSP_SLOT: RuleKind.RSP_SLOT, CFA_OTHER_STACK: RuleKind.OTHER_STACK}
    kinds |= {CFA_RBP_DEREF: RuleKind.RBP_DEREF, CFA_PLT: RuleKind.PLT}
    kinds |= {CFA_RSP_HEURISTIC: RuleKind.RSP_HEURISTIC, CFA_RBP_HEURISTIC: RuleKind.RBP_HEURISTIC}
    if ra != RA_AT_CFA_8 or form not in kinds:
        return UNSUPPORTED_RULE
    if rbp_kind in (RbpKind.AT_RSP, RbpKind.UNKNOWN):
        rbp_kind, rbp_offset = RbpKind.UNKNOWN, 0
    if (form, offset, rbp_kind) == (RSP, 8, RbpKind.AT_RBP):
        # GCC at the `ret` of a function that realigned its stack: RBP has been popped by then, and
        # no longer points at where it was saved.
        rbp_kind, rbp_offset = RbpKind.SAME, 0
    return Rule(kinds[form], rbp_kind, rbp_offset, offset)


def _signed(value: int, bits: int) -> int:
    return value - (1 << bits) if value >> (bits - 1) else value


def follows_call(code: bytes) -> bool:
    """Whether 8 bytes end in a call instruction, as those before a return address do.

    Intel SDM volume 2A, CALL: E8 rel32, or FF /2 with its addressing forms (tables 2-2 and 2-3).
    """
    if code[3] == 0xE8:
        return True
    if code[6] == 0xFF and code[7] & 0xF8 in (0xD0, 0x10):
        return True  # register, or memory at a register
    if code[5] == 0xFF and (code[6] == 0x14 or code[6] & 0xF8 == 0x50):
        return True  # scaled index, or an 8-bit displacement
    if code[4] == 0xFF and code[5] == 0x54:
        return True  # scaled index and an 8-bit displacement
    if code[2] == 0xFF and (code[3] == 0x15 or code[3] & 0xF8 == 0x90):
        return True  # relative to RIP, or a 32-bit displacement
    return code[1] == 0xFF and code[2] == 0x94  # scaled index and a 32-bit displacement


class ReturnSlot(NamedTuple):
    """Where code that has no frame yet, or takes its frame down, keeps its return address.

    Attributes:
        from_rbp: `offset` is from RBP, else from RSP.
        offset: Bytes.
        has_link: The caller's RBP is in the word below.
    """

    from_rbp: bool
    offset: int
    has_link: bool


_PUSH_RBP = b"\x55"
_MOVES_RSP_TO_RBP = (b"\x48\x89\xe5", b"\x48\x8b\xec")


def return_slot(code: bytes, is_exact: bool) -> ReturnSlot | None:
    """What a function's next instructions tell of its frame, None for code in the midst of one.

    They make it, or they undo what is left of it, and return. Stubs of JITs return right after
    their one call, as CPython's of -X perf do (v3.12.1, v3.13.0 Python/asm_trampoline.S).
    Intel SDM volume 2: ADD r/m64, imm8; PUSH; MOV r64, r/m64; POP; LEAVE; RET; CALL r64.

    Args:
        code: Eight bytes from the instruction pointer on.
        is_exact: That is no return address: the frame may not be made yet, and the first
            instruction may be a call through a register, of something that returns.
    """
    if is_exact and code[:1] == _PUSH_RBP and code[1:4] in _MOVES_RSP_TO_RBP:
        return ReturnSlot(False, 0, False)
    if is_exact and code[:3] in _MOVES_RSP_TO_RBP:
        return ReturnSlot(False, 8, True)  # after the push
    if is_exact and code[0] == 0xFF and code[1] & 0xF8 == 0xD0:
        code = code[2:]
    if code[:3] == b"\x48\x83\xc4" and code[4] == 0xC3 and not code[3] & 0x87:
        return ReturnSlot(False, code[3], False)  # add $n, %rsp; ret: n a few words
    if code[0] == 0xC3:
        return ReturnSlot(False, 0, False)
    if code[:2] == b"\x5d\xc3":
        return ReturnSlot(False, 8, True)  # pop %rbp; ret
    if code[:2] == b"\xc9\xc3":
        return ReturnSlot(True, 8, True)  # leave; ret
    return None


# System V psABI 5.2: where linkage stubs are; ld puts those of static programs in .iplt or .plt.
STUB_SECTIONS = (".plt", ".plt.got", ".plt.sec", ".iplt")
# The head of a lazy section and its first stub.
STUB_SAMPLE_BYTES = 32
_STUB_BYTES = 16
_PUSH_FROM_MEMORY, _PUSH_IMMEDIATE = b"\xff\x35", 0x68


def stub_states(code: bytes) -> list[tuple[int, int]]:
    """Where states begin in a section of linkage stubs, as (offset, state).

    Args:
        code: Its first STUB_SAMPLE_BYTES, or all of it.
    """
    bare = with_ra(with_cfa(0, RSP, 8), RA_AT_CFA_8)
    if not code.startswith(_PUSH_FROM_MEMORY):
        return [(0, bare)]  # stubs that only jump
    # The head is jumped to with the stub's number pushed, and pushes another word (6 bytes).
    head = [(0, with_cfa(bare, RSP, 16)), (6, with_cfa(bare, RSP, 24))]
    pushed_at = code.find(_PUSH_IMMEDIATE, _STUB_BYTES, 2 * _STUB_BYTES) - _STUB_BYTES
    # push imm32 has 5 bytes, and is not the stub's last instruction.
    if not 0 <= pushed_at <= _STUB_BYTES - 6:
        return head
    return [*head, (_STUB_BYTES, with_cfa(bare, CFA_PLT, pushed_at + 5))]
