# SPDX-License-Identifier: Apache-2.0
"""The listing of a kernel: instructions of the functions that were sampled, with source lines.

With -g, PoCL 3.1 describes the kernel as it was written, and not the work group's function, into
which the optimiser copies it. Both are compiled from the same text by the same compiler and come
out nearly the same, so lines of the one are laid over the other where their instructions agree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from difflib import SequenceMatcher

import numpy as np
from aiflame.gpu.base import CodeTools, Line, Listing
from aiflame.gpu.opencl.disassembly import Decoded, instructions_of, text_of
from aiflame.gpu.opencl.kernel_file import Function, KernelFile, kept_kernel

# More than anyone reads; a kernel that is unrolled into more is shown around its samples.
MAX_INSTRUCTIONS = 20_000

# Of two copies that agree less, lines would be wrong ones. Those seen agree in 0.9 and more.
_LEAST_AGREEMENT = 0.8
# The comparison takes time by the square of the length: a second for this many.
_MAX_COMPARED = 4000

Lines = Sequence[tuple[str, int]]
_UNKNOWN = ("", 0)


def make_listing(
    file: KernelFile,
    offsets: frozenset[int],
    lines_at: Callable[[Sequence[int]], Lines],
    decode: Callable[[Function], Sequence[Decoded]],
) -> Listing | None:
    """Returns the functions that have samples, None where there is nothing to show.

    Args:
        file: The kernel.
        offsets: Of all samples.
        lines_at: DWARF's answer for addresses as the file counts them.
        decode: Has the instructions of a function.
    """
    addresses = {file.address_of(offset) for offset in offsets}
    sampled = {file.function_at(address) for address in addresses} - {None}
    found: list[tuple[Decoded, tuple[str, int]]] = []
    for function in sorted(sampled, key=lambda f: 0 if f is None else f.start):
        if function is not None:
            instructions = decode(function)
            sources = _lines(file, function, instructions, lines_at, decode)
            found += zip(instructions, sources, strict=True)
    lines = [
        Line(file.offset_of(instruction.address) or 0, text_of(file, instruction), *source)
        for instruction, source in _nearest(found, addresses)
    ]
    if not lines:
        return None
    return Listing(file.code_bytes, tuple(sorted(lines, key=lambda line: line.offset)))


def of_kernel_file(
    tools: CodeTools, code: bytes, sampled: Mapping[str, Mapping[int, int]]
) -> dict[str, Listing]:
    """Lists the kernel of a file that a capture has kept (`aiflame.gpu.base.Lists`).

    Without source lines: what reads them takes files, and not what captures hold.
    """
    name = next(iter(sampled))
    kernel = tools.about(name, code, kept_kernel())
    if kernel is None or kernel.name not in sampled:
        return {}

    def decode(function: Function) -> Sequence[Decoded]:
        return tools.about(kernel.name, code, instructions_of(function)) or []

    def lines_at(addresses: Sequence[int]) -> Lines:
        return [_UNKNOWN] * len(addresses)

    listing = make_listing(kernel, frozenset(sampled[kernel.name]), lines_at, decode)
    return {} if listing is None else {kernel.name: listing}


def _nearest(
    found: list[tuple[Decoded, tuple[str, int]]], sampled: set[int]
) -> list[tuple[Decoded, tuple[str, int]]]:
    """Returns those nearest to a sample if there are too many."""
    if len(found) <= MAX_INSTRUCTIONS:
        return found
    hits = [at for at, (instruction, _) in enumerate(found) if instruction.address in sampled]
    every = np.arange(len(found))
    bounds = np.array([-len(found), *hits, 2 * len(found)])
    after = np.searchsorted(bounds, every)
    distance = np.minimum(np.abs(bounds[after] - every), np.abs(every - bounds[after - 1]))
    chosen = np.sort(np.argsort(distance, kind="stable")[:MAX_INSTRUCTIONS])
    return [found[at] for at in chosen.tolist()]


def _lines(
    file: KernelFile,
    function: Function,
    instructions: Sequence[Decoded],
    lines_at: Callable[[Sequence[int]], Lines],
    decode: Callable[[Function], Sequence[Decoded]],
) -> Lines:
    sources = lines_at([instruction.address for instruction in instructions])
    if any(line for _, line in sources) or not function.name.startswith(f"{file.body_name}_work"):
        return sources
    body = file.function_named(file.body_name)
    if body is None:
        return sources
    original = decode(body)
    original_sources = lines_at([instruction.address for instruction in original])
    if not any(line for _, line in original_sources):
        return sources
    return lay_over(original, original_sources, instructions)


def lay_over(original: Sequence[Decoded], sources: Lines, copy: Sequence[Decoded]) -> Lines:
    """Returns the sources of a copy of some code, unknown where it differs from the original."""
    if max(len(original), len(copy)) > _MAX_COMPARED:
        return [_UNKNOWN] * len(copy)
    matcher = SequenceMatcher(
        None, [_shape(i) for i in original], [_shape(i) for i in copy], autojunk=False
    )
    found = [_UNKNOWN] * len(copy)
    if matcher.ratio() < _LEAST_AGREEMENT:
        return found
    for begin, at, length in matcher.get_matching_blocks():
        found[at : at + length] = sources[begin : begin + length]
    return found


def _shape(instruction: Decoded) -> tuple[str, int, bool]:
    """What two copies share: registers and addresses are their own."""
    operands = instruction.operands
    return instruction.mnemonic, operands.count(","), "[" in operands
