# SPDX-License-Identifier: Apache-2.0
"""Instructions of a kernel file, by capstone."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any, NamedTuple

from aiflame.gpu.opencl.kernel_file import Function, KernelFile

# Capstone does some 300,000 a second; functions of real kernels have at most some 10,000.
_MAX_BYTES = 1 << 20

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


def decode(file: KernelFile, function: Function) -> list[Decoded]:
    """Returns the instructions of a function, [] for a machine that is not known here."""
    decoder = _decoder(file.machine)
    if decoder is None:
        return []
    begin = function.start - file.start
    code = file.code[begin : min(function.end - file.start, begin + _MAX_BYTES)]
    return [
        Decoded(address, mnemonic, operands)
        for address, _, mnemonic, operands in decoder.disasm_lite(code, function.start)
    ]


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
