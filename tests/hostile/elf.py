# SPDX-License-Identifier: Apache-2.0
"""Mutations of real ELF files, and all that reads such files."""

from __future__ import annotations

import json
import os
import random
import re
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from aiflame.agent.elf.dynamic import read_dependencies
from aiflame.agent.elf.functions import function_names
from aiflame.agent.elf.headers import HEADERS, Headers
from aiflame.agent.elf.image import ElfImage
from aiflame.agent.file_questions import Question
from aiflame.agent.launches.questions import functions_among
from aiflame.agent.python.interpreter import Interpreter
from aiflame.agent.python.questions import KEY_BLOCK_OF_LIBRARY, interpreter_in
from aiflame.agent.symbols import roots
from aiflame.agent.symbols.table import SymbolSource, SymbolTable
from aiflame.agent.target_files import FileGuard, TargetFile
from aiflame.agent.unwind.build import build
from aiflame.agent.unwind.records import BadUnwindInfo
from aiflame.gpu.nvidia import fatbin
from aiflame.gpu.opencl.disassembly import instructions_of
from aiflame.gpu.opencl.kernel_file import Function, kernel_of
from hostile.outcome import Outcome

_API_NAMES = frozenset(("cudaLaunchKernel", "clEnqueueNDRangeKernel"))
_ODD = (0, 1, 2, 7, 8, 0x7F, 0xFF, 0xFFFF, 1 << 31, 1 << 32, 1 << 40, 1 << 63, (1 << 64) - 256)
# Types of sections whose records are changed: symbols, dynamic section, notes, relocations.
_RECORDS = (2, 11, 6, 7, 4)
# What containers of device code begin with, and numbers in their header and in that of their first
# entry (gpu.nvidia.fatbin).
_DEVICE_CODE = re.escape(bytes.fromhex("50ed55ba"))
_DEVICE_CODE_NUMBERS = (
    *((6, 2), (8, 8)),
    *((16, 2), (20, 4), (24, 8), (32, 4), (44, 4), (56, 8), (72, 8)),
)


def number_fields(data: bytes) -> list[tuple[int, int]]:
    """Offsets and widths of the numbers of a 64-bit file that a parser follows."""
    phoff, shoff = struct.unpack_from("<QQ", data, 32)
    phentsize, phnum, shentsize, shnum = struct.unpack_from("<4H", data, 54)
    found = [(at, 2) for at in (16, 18, 52, 54, 56, 58, 60, 62)] + [(24, 8), (32, 8), (40, 8)]
    for at in range(phoff, phoff + phentsize * phnum, phentsize):
        found += [(at, 4), (at + 4, 4), *((at + offset, 8) for offset in range(8, 56, 8))]
    for at in range(shoff, shoff + shentsize * shnum, shentsize):
        kind = struct.unpack_from("<I", data, at + 4)[0]
        offset, size = struct.unpack_from("<QQ", data, at + 24)
        found += [(at, 4), (at + 4, 4), (at + 40, 4), *((at + o, 8) for o in (8, 16, 24, 32, 56))]
        if kind in _RECORDS:
            found += [(record, 8) for record in range(offset, offset + min(size, 960), 8)]
            found += [(record, 4) for record in range(offset, offset + min(size, 960), 24)]
    for container in re.finditer(_DEVICE_CODE, data):
        found += [(container.start() + at, width) for at, width in _DEVICE_CODE_NUMBERS]
    return found


def mutation(size: int, fields: Sequence[tuple[int, int]], dice: random.Random) -> Mutation:
    """A few changes of a file of `size` bytes."""
    changes = []
    for _ in range(dice.choice((1, 1, 2, 5))):
        if dice.random() < 0.15:
            changes.append((dice.randrange(size), bytes([dice.randrange(256)])))
            continue
        at, width = dice.choice(fields)
        value = dice.choice((*_ODD, size, dice.randrange(size), dice.randrange(1 << 64)))
        changes.append((at, (value % (1 << (8 * width))).to_bytes(width, "little")))
    return Mutation(changes, dice.randrange(size) if dice.random() < 0.05 else size)


@dataclass(frozen=True)
class Mutation:
    """What is written over the bytes at some offsets, and the length of the file."""

    changes: list[tuple[int, bytes]]
    length: int

    def apply(self, fd: int) -> None:
        """Changes an open file."""
        for offset, data in self.changes:
            os.pwrite(fd, data, offset)
        os.ftruncate(fd, self.length)

    def undo(self, fd: int, original: bytes) -> None:
        """Gives a file its bytes again."""
        for offset, data in self.changes:
            os.pwrite(fd, original[offset : offset + len(data)], offset)
        os.pwrite(fd, original[self.length :], self.length)
        os.ftruncate(fd, len(original))


def read_all(path: Path, guard: FileGuard, outcome: Outcome) -> None:
    """Reads a file by all that reads files of targets, in the recorder and in its workers."""
    fd = os.open(path, os.O_RDONLY)
    try:
        image: ElfImage | None = None

        def headers(file: TargetFile) -> None:
            nonlocal image
            image = ElfImage.read(file)
            if image.damage:
                guard.blame("/mutated", image.damage)

        _timed("headers", headers, fd, guard, outcome)
        for question in _questions(image):
            _timed(question.name, lambda file, q=question: _asked(q, file), fd, guard, outcome)
        if image is not None:
            for each in _READERS:
                _timed(each.__name__, lambda file, r=each: r(file, image), fd, guard, outcome)
    finally:
        os.close(fd)


_UNFORESEEN = re.compile(r"\w*(Error|error|Exception)(:|$)")


def _timed(
    name: str, reader: Callable[[TargetFile], object], fd: int, guard: FileGuard, outcome: Outcome
) -> None:
    guard.bad.clear()
    with outcome.reading(name), guard.each_file("/mutated", fd) as file:
        reader(file)
    for reason in guard.bad.values():
        # The guard names an exception that is not one of a bad file by its type.
        if _UNFORESEEN.match(reason):
            outcome.unforeseen[f"{name}: {reason}"] += 1
        else:
            outcome.refused[reason] += 1


def _unwind_table(file: TargetFile, image: ElfImage) -> None:
    try:
        build(file, image)
    except BadUnwindInfo:
        return


def _symbol_table(file: TargetFile, image: ElfImage) -> None:
    table = SymbolTable.build([SymbolSource(image, file)])
    ends = np.array([0, 0x1000, image.load_address + 0x1010, (1 << 64) - 1], np.uint64)
    table.raw_names(ends)
    table.ranges(ends)
    table.to_chunks()


def _questions(image: ElfImage | None) -> Iterator[Question[Any]]:
    """All that is asked about files."""
    yield HEADERS
    yield kernel_of("/pocl/kcache/kernel.so")
    yield interpreter_in("/usr/bin/python3.11")
    yield KEY_BLOCK_OF_LIBRARY
    yield functions_among(_API_NAMES)
    yield fatbin.SECTION
    if image is None:
        return
    code = image.section(".nv_fatbin")
    if code is not None:
        section = fatbin.Section(code.file_offset, code.size)
        yield fatbin.search_from(section, fatbin.Position(code.file_offset), 90, ["scale"])
    yield function_names([0, 0x1000, image.load_address + 0x1010, (1 << 64) - 1])
    for load in image.loads[:4]:
        begin, end = load.virtual_address, load.virtual_address + load.file_size
        yield instructions_of(Function(begin, min(end, begin + 4096), "f"))


def _asked(question: Question[Any], file: TargetFile) -> None:
    """Answers as a parser does, and checks as whoever asked it; no answer of a sound one is bad."""
    answer = question.checked(json.loads(json.dumps(question.read(file, *question.arguments))))
    if isinstance(answer, Interpreter):
        answer.loaded_at(0x5555_5555_0000)
    elif isinstance(answer, Headers):
        for load in answer.loads:
            answer.bias(0x7F00_0000_0000, load.file_offset)


def _by_code(file: TargetFile, image: ElfImage) -> None:
    for load in image.loads:
        for address in (load.virtual_address, load.virtual_address + load.file_size - 1):
            roots.name_by_code(file, image, address)


_READERS = (_by_code, _unwind_table, _symbol_table, read_dependencies)


def read_mutations(
    seeds: Sequence[bytes], count: int, folder: Path, random_seed: int, outcome: Outcome
) -> None:
    """Reads mutations of files, each of them in turn.

    Args:
        seeds: Sound files.
        count: Of mutations in all.
        folder: Where to write.
        random_seed: For the same ones again.
        outcome: Of them, to be added to.
    """
    dice = random.Random(random_seed)
    fields = [number_fields(seed) for seed in seeds]
    paths = [folder / f"seed-{number}" for number in range(len(seeds))]
    descriptors = []
    for path, seed in zip(paths, seeds, strict=True):
        path.write_bytes(seed)
        descriptors.append(os.open(path, os.O_RDWR))
    for number in range(count):
        at = number % len(seeds)
        change = mutation(len(seeds[at]), fields[at], dice)
        change.apply(descriptors[at])
        outcome.cases += 1
        read_all(paths[at], FileGuard(), outcome)
        change.undo(descriptors[at], seeds[at])
    for descriptor in descriptors:
        os.close(descriptor)


def shares(sizes: Sequence[int], count: int) -> list[int]:
    """How many of `count` mutations each file gets: a small one more, since it takes less time."""
    weights = [size**-0.5 for size in sizes]
    return [max(1, round(count * weight / sum(weights))) for weight in weights]


def read_files(
    paths: Sequence[Path], count: int, folder: Path, random_seed: int
) -> Iterator[Outcome]:
    """Reads mutations of files, one file after the other; the files themselves for a count of 0."""
    for path, share in zip(paths, shares([p.stat().st_size for p in paths], count), strict=True):
        outcome = Outcome(str(path))
        if count:
            read_mutations([path.read_bytes()], share, folder, random_seed, outcome)
        else:
            read_all(path, FileGuard(), outcome)
        yield outcome
