# SPDX-License-Identifier: Apache-2.0
"""Instructions of a kernel file, by capstone."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any, NamedTuple

from aiflame.agent.elf.image import ElfImage
from aiflame.agent.file_questions import Json, Question, rows, text, whole
from aiflame.agent.target_files import TargetFile
from aiflame.gpu.opencl.kernel_file import Function, KernelFile

# Capstone does some 300,000 a second; functions of real kernels have at most some 10,000.
MAX_BYTES = 1 << 20
# Of a mnemonic, or of operands: data among code is listed by bytes.
_MAX_CHARACTERS = 256

# Operands of jumps and calls: an address alone, or after a register and a comma (AArch64).
_TARGET = re.compile(r"(?:^|(?<=[ #]))#?0x([0-9a-f]+)$")
_BRANCH = re.compile(r"j|call|b$|b\.|bl$|cbn?z|tbn?z|loop|xbegin")


class Decoded(NamedTuple):
    """One instruction."""

    address: int
    mnemonic: str
    operands: str


@lru_cache(maxsize=4)
def _decoder(machine: str) -> Any:
    import capstone  # 6 MB, which recordings without a device do without

    modes = {
        "X86_64": (capstone.CS_ARCH_X86, capstone.CS_MODE_64),
        "AARCH64": (capstone.CS_ARCH_ARM64, capstone.CS_MODE_ARM),
    }
    mode = modes.get(machine)
    if mode is None:
        return None
    decoder = capstone.Cs(*mode)
    decoder.skipdata = True  # data among code, as tables of jumps are
    return decoder


def decode(code: bytes, address: int, machine: str) -> list[Decoded]:
    """Returns instructions, [] for a machine that is not known here.

    Args:
        code: Machine code.
        address: Of its first byte.
        machine: As ELF has it, without its prefix.
    """
    decoder = _decoder(machine)
    if decoder is None:
        return []
    return [
        Decoded(at, mnemonic, operands)
        for at, _, mnemonic, operands in decoder.disasm_lite(code, address)
    ]


def instructions(file: TargetFile, begin: int, end: int) -> Json:
    """Reads the instructions at some virtual addresses."""
    image = ElfImage.read(file)
    return decode(image.read_at(file, begin, min(end - begin, MAX_BYTES)), begin, image.machine)


def instructions_of(function: Function) -> Question[list[Decoded]]:
    """The instructions of a function."""

    def check(answer: Json) -> list[Decoded]:
        found, least = [], function.start
        for at, mnemonic, operands in rows(answer, MAX_BYTES):
            words = text(mnemonic, _MAX_CHARACTERS), text(operands, _MAX_CHARACTERS)
            found.append(Decoded(whole(at, function.end, least), *words))
            least = at + 1
        return found

    return Question(instructions, check, (function.start, function.end))


def text_of(file: KernelFile, instruction: Decoded) -> str:
    """Returns an instruction as it is shown: targets of jumps are offsets, those of calls names."""
    operands = instruction.operands
    target = _TARGET.search(operands) if _BRANCH.match(instruction.mnemonic) else None
    if target is not None:
        address = int(target[1], 16)
        function, offset = file.function_at(address), file.offset_of(address)
        if function is not None and function.start == address:
            operands = operands[: target.start()] + function.name
        elif offset is not None:
            operands = f"{operands[: target.start()]}{offset:#x}"
    return f"{instruction.mnemonic} {operands}".rstrip()
