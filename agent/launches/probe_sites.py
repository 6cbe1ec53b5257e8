# SPDX-License-Identifier: Apache-2.0
"""Where in a function's first instructions a uprobe costs least and sees all arguments.

The kernel runs a probed instruction in one of two ways. It emulates a few (`push`, no-operations,
relative jumps and calls), which costs one trap; any other it copies elsewhere and steps, which
costs two (0.9 against 11.7 us in one virtual machine). So the probe is put on the first instruction
that is emulated, if all the arguments are still where the caller put them by then: nothing before
it writes an argument register or the caller's part of the stack, moves the stack pointer by an
unknown amount, or goes elsewhere; and if nothing jumps to between the entry and it, since a call
would be counted twice.

What may stand before the probe is a list of harmless instructions; one that is not on it ends the
search, as does any write to memory that is not known to be below the caller's frame. Jumps to the
prologue are looked for in the code that is given; a jump through a table, or from a part of the
function that lies elsewhere, would not be seen. Compilers have no cause for either.

Only x86-64 is known. What is emulated: arch/x86/kernel/uprobes.c (branch_setup_xol_ops,
push_setup_xol_ops). Kernels differ in what they do with no-operations of more than one byte, which
is found out by trying (see uprobe_tries.py).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from aiflame.agent.kernel.uprobe_tries import NopTreatment, Treatment

# capstone is imported where it is used: it takes 6 MB, and recordings without a device API need it
# not.

# How far into a function the probe may be; prologues that save all registers take 20 bytes.
MAX_OFFSET_BYTES = 32
# From farther away a jump with one byte of distance cannot reach it; the longest has 3 bytes.
_NEAR_BYTES = MAX_OFFSET_BYTES + 128 + 3
_MAX_INSTRUCTION_BYTES = 15
# What a prologue may add to the stack; more is no prologue.
MAX_STACK_BYTES = 1 << 20

# Long no-operations that kernels emulate, or step, all alike: x86_nops of asm/nops.h (its 64-bit
# table). Those of 9 bytes and more are not in that table.
_LONG_NOPS = frozenset(
    bytes.fromhex(text)
    for text in (
        "0f1f00",
        "0f1f4000",
        "0f1f440000",
        "660f1f440000",
        "0f1f8000000000",
        "0f1f840000000000",
    )
)
_PREFIXED_NOP = bytes.fromhex("6690")
# System V ABI for x86-64 1.0, section 3.2.3.
_ARGUMENT_REGISTERS = frozenset(
    name
    for names in (
        "rdi edi di dil",
        "rsi esi si sil",
        "rdx edx dx dl dh",
        "rcx ecx cx cl ch",
        "r8 r8d r8w r8b",
        "r9 r9d r9w r9b",
    )
    for name in names.split()
)
_STACK_POINTER = frozenset(("rsp", "esp", "sp", "spl"))
# They write nothing but their operands and flags.
_HARMLESS = frozenset(
    name
    for names in (
        "add and bt cmova cmovae cmovb cmovbe cmove cmovg cmovge cmovl cmovle cmovne cmovns cmovs",
        "cmp dec endbr64 inc lea mov movabs movaps movapd movd movdqa movdqu movq movsd movss",
        "movsx movsxd movups movzx neg nop not or pxor sar sete setne shl shr sub test vmovaps",
        "vmovdqa vmovdqu vmovups vpxor vxorps xor xorps",
    )
    for name in names.split()
)


@dataclass(frozen=True, slots=True)
class ProbeSite:
    """Where to put a probe.

    Attributes:
        offset_bytes: From the function's first byte.
        stack_bytes: How much the function has put on the stack by then: the return address is this
            far above the stack pointer.
        is_emulated: The kernel needs no second trap for it.
    """

    offset_bytes: int
    stack_bytes: int
    is_emulated: bool


class Emulation(enum.IntEnum):
    """Whether a kernel emulates an instruction."""

    ALWAYS = 0
    NEVER = 1
    AS_LONG_NOP = 2
    AS_PREFIXED_NOP = 3

    def treatment(self, nops: NopTreatment) -> Treatment:
        """Returns what this kernel does with a probe on it."""
        if self is Emulation.AS_LONG_NOP:
            return nops.long
        if self is Emulation.AS_PREFIXED_NOP:
            return nops.prefixed
        return Treatment.EMULATED if self is Emulation.ALWAYS else Treatment.STEPPED


class Step(NamedTuple):
    """An instruction that may be probed; fields as those of `ProbeSite`."""

    offset_bytes: int
    stack_bytes: int
    emulation: Emulation


class Prologue(NamedTuple):
    """The first instructions of a function, up to one that does harm or is always emulated.

    Attributes:
        steps: In their order.
        jumped_to_bytes: The first offset past the entry that is jumped to, or that may be.
    """

    steps: tuple[Step, ...]
    jumped_to_bytes: int


def read_prologue(code: bytes, address: int) -> Prologue:
    """Decodes a function's first instructions.

    Args:
        code: Its bytes from the entry, as many as are known.
        address: Of the entry. Any will do: sites are relative.
    """
    near = _instructions(code, address)
    steps: list[Step] = []
    stack_bytes = 0
    for instruction in near:
        offset = instruction.address - address
        if offset >= MAX_OFFSET_BYTES:
            break
        steps.append(Step(offset, stack_bytes, _emulation(bytes(instruction.bytes))))
        growth = _growth(instruction, stack_bytes)
        is_sure = steps[-1].emulation is Emulation.ALWAYS
        if is_sure or growth is None or stack_bytes + growth > MAX_STACK_BYTES:
            break
        stack_bytes += growth
    needed = len(steps) > 1
    return Prologue(tuple(steps), _first_jumped_to(code, near) if needed else 1)


def choose_site(prologue: Prologue, nops: NopTreatment, *, for_return: bool = False) -> ProbeSite:
    """Chooses where to put a probe that is to see a function's arguments.

    Args:
        prologue: Of the function.
        nops: What this kernel does with no-operations.
        for_return: The probe is to fire at the function's return as well. The kernel takes the
            word at the stack pointer for the return address, so nothing may be above it yet.

    Returns:
        The first instruction that is emulated; where none may be taken, the first that the kernel
        does not refuse; the entry where the code cannot be read.
    """
    accepted: ProbeSite | None = None
    for offset, stack_bytes, emulation in prologue.steps:
        treatment = emulation.treatment(nops)
        is_emulated = treatment is Treatment.EMULATED
        if is_emulated or (accepted is None and treatment is Treatment.STEPPED):
            if (for_return and stack_bytes) or offset >= prologue.jumped_to_bytes:
                break
            accepted = ProbeSite(offset, stack_bytes, is_emulated)
            if is_emulated:
                return accepted
    return accepted or ProbeSite(0, 0, False)


def _instructions(code: bytes, address: int) -> list[Any]:
    """Returns the first instructions, as far as they can be decoded."""
    import capstone

    decoder = capstone.Cs(capstone.CS_ARCH_X86, capstone.CS_MODE_64)
    decoder.detail = True
    return list(decoder.disasm(code[: _NEAR_BYTES + _MAX_INSTRUCTION_BYTES], address))


def _emulation(data: bytes) -> Emulation:
    if data in _LONG_NOPS:
        return Emulation.AS_LONG_NOP
    if data == _PREFIXED_NOP:
        return Emulation.AS_PREFIXED_NOP
    return Emulation.ALWAYS if _is_always_emulated(data) else Emulation.NEVER


def _is_always_emulated(data: bytes) -> bool:
    if data == b"\x90":
        return True
    first = data[0]
    if 0x50 <= first <= 0x57 or (first == 0x41 and len(data) == 2 and 0x50 <= data[1] <= 0x57):
        return True
    if first in (0xEB, 0xE9, 0xE8) or 0x70 <= first <= 0x7F:
        return True
    return first == 0x0F and 0x80 <= data[1] <= 0x8F


def _growth(instruction: Any, stack_bytes: int) -> int | None:
    """Returns by how much an instruction grows the stack, None where it may do harm."""
    from capstone import CS_AC_WRITE, x86_const

    if instruction.prefix[0] or instruction.mnemonic not in ("push", *_HARMLESS):
        return None  # a lock or a repetition; or unknown
    operands = instruction.operands
    if instruction.mnemonic == "push":
        return 8 if operands[0].size == 8 else None
    if instruction.mnemonic in ("sub", "add") and _is_stack_pointer(instruction, operands[0]):
        if operands[1].type != x86_const.X86_OP_IMM or operands[0].size != 8:
            return None
        immediate = operands[1].imm if instruction.mnemonic == "sub" else -operands[1].imm
        return int(immediate) if immediate >= 0 else None
    _, written = instruction.regs_access()
    names = {instruction.reg_name(register) for register in written}
    if names & (_ARGUMENT_REGISTERS | _STACK_POINTER):
        return None
    for operand in operands:
        is_memory = operand.type == x86_const.X86_OP_MEM
        is_written = is_memory and operand.access & CS_AC_WRITE
        if is_written and not _is_own_frame(instruction, operand, stack_bytes):
            return None
    return 0


def _is_stack_pointer(instruction: Any, operand: Any) -> bool:
    from capstone.x86_const import X86_OP_REG

    return operand.type == X86_OP_REG and instruction.reg_name(operand.reg) in _STACK_POINTER


def _is_own_frame(instruction: Any, operand: Any, stack_bytes: int) -> bool:
    """Whether a write is below the return address: to the function's own part of the stack."""
    memory = operand.mem
    if memory.index or memory.segment or not memory.base:
        return False
    if instruction.reg_name(memory.base) != "rsp":
        return False
    return bool(memory.disp + operand.size <= stack_bytes)


def _first_jumped_to(code: bytes, near: list[Any]) -> int:
    """Returns the first offset past the entry that anything jumps to; past the prologue if none."""
    from capstone import CS_GRP_BRANCH_RELATIVE

    entry = near[0].address
    decoded = near[-1].address + near[-1].size - entry
    if decoded < min(len(code), _NEAR_BYTES):
        return 1  # what could not be decoded may be anything
    first = MAX_OFFSET_BYTES
    for instruction in near:
        if instruction.group(CS_GRP_BRANCH_RELATIVE):
            target = instruction.operands[0].imm - entry
            if target > 0:
                first = min(first, target)
    return min(first, _first_jumped_to_from_afar(code))


def _first_jumped_to_from_afar(code: bytes) -> int:
    """The same for jumps with four bytes of distance, wherever they may begin."""
    letters = np.frombuffer(code, np.uint8)
    count = len(letters) - 5
    if count <= 0:
        return MAX_OFFSET_BYTES
    distance = np.zeros(count, np.uint32)
    for byte in range(4):
        distance |= letters[2 + byte : 2 + byte + count].astype(np.uint32) << np.uint32(8 * byte)
    targets = np.arange(6, 6 + count) + distance.view(np.int32)
    opcode = letters[1 : 1 + count]
    is_jump = (opcode == 0xE9) | ((opcode & 0xF0 == 0x80) & (letters[:count] == 0x0F))
    found = targets[is_jump & (targets > 0)]
    return min(int(found.min()), MAX_OFFSET_BYTES) if len(found) else MAX_OFFSET_BYTES
