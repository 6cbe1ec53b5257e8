# SPDX-License-Identifier: Apache-2.0
"""SASS, the instructions of NVIDIA's devices, by NVIDIA's own disassembler where it is installed.

nvdisasm comes with the CUDA toolkit, with PyPI's nvidia-cuda-nvdisasm, and with Triton. One that is
older than a cubin's architecture refuses it. What it prints (`-c`: code only) is

    //--------------------- .text.NAME --------------------------
    .L_x_1:
            /*0070*/               @P0 EXIT ;

with offsets of the section.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

PROGRAM = "nvdisasm"
# Beside what is found on the path: where the toolkit, and the wheels for our own Python, have it.
_TOOLKIT = "/usr/local/cuda/bin/nvdisasm"
_IN_PACKAGES = (
    ("nvidia", "cu13/bin/nvdisasm"),
    ("nvidia", "cuda_nvdisasm/bin/nvdisasm"),
    ("nvidia", "cuda_nvcc/bin/nvdisasm"),
    ("triton", "backends/nvidia/bin/nvdisasm"),
)

# Of one function, as gpu/opencl has it: more than anyone reads.
MAX_INSTRUCTIONS = 20_000
_MAX_CHARACTERS = 256
# Of a whole output: what is not looked at costs nothing but memory.
_MAX_LINES = 2_000_000

_SECTION = re.compile(r"^//-+ \.text\.(\S+)\s+-+$")
_LABEL = re.compile(r"^(\.L_x?_?\w+):$")
_INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,8})\*/\s+(.*?)\s*;?\s*$")
_TARGET = re.compile(r"`\((\.L_x?_?\w+)\)")


class Instruction(NamedTuple):
    """One instruction of a section, by its offset there."""

    offset: int
    text: str


def programs() -> Iterator[str]:
    """Yields where nvdisasm may be, the best first."""
    on_path = shutil.which(PROGRAM)
    if on_path is not None:
        yield on_path
    yield _TOOLKIT
    for package, name in _IN_PACKAGES:
        try:
            spec = importlib.util.find_spec(package)
        except (ImportError, ValueError):
            continue
        for folder in () if spec is None else spec.submodule_search_locations or ():
            yield str(Path(folder) / name)


def arguments(symbols: Sequence[int], file: str) -> list[str]:
    """Returns what it is called with, for functions by their numbers in the table of symbols."""
    return ["-c", "-fun", ",".join(map(str, symbols)), file]


def parsed(output: bytes) -> dict[str, list[Instruction]]:
    """Returns the instructions of each section, by the name after `.text.`.

    Targets of jumps within a section are offsets.
    """
    found: dict[str, list[Instruction]] = {}
    labels: dict[str, int] = {}
    waiting: list[str] = []
    own: list[Instruction] = []
    lines = output.decode(errors="replace").split("\n", _MAX_LINES)[:_MAX_LINES]
    for line in lines:
        if match := _SECTION.match(line):
            own = found.setdefault(match[1], [])
        elif match := _LABEL.match(line):
            waiting.append(match[1])
        elif (match := _INSTRUCTION.match(line)) and len(own) < MAX_INSTRUCTIONS:
            offset = int(match[1], 16)
            labels.update(dict.fromkeys(waiting, offset))
            waiting.clear()
            own.append(Instruction(offset, match[2][:_MAX_CHARACTERS]))

    def target(match: re.Match[str]) -> str:
        return hex(labels[match[1]]) if match[1] in labels else match[1]

    return {
        name: [Instruction(one.offset, _TARGET.sub(target, one.text)) for one in code]
        for name, code in found.items()
    }
