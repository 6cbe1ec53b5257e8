# SPDX-License-Identifier: Apache-2.0
"""Which interpreter a process runs, and where in it that is."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import NamedTuple

from aiflame.agent.processes.elf_images import ElfImages
from aiflame.agent.processes.table import NO_BINARY, ProcessImage, ProcessTable
from aiflame.agent.python.interpreter import (
    Interpreter,
    LoadedInterpreter,
    may_hold_interpreter,
)
from aiflame.agent.python.questions import Unsupported, interpreter_in

# Processes that were forked from one have it at the same addresses.
_loaded_at = functools.lru_cache(maxsize=256)(Interpreter.loaded_at)


class FoundInterpreter(NamedTuple):
    """The interpreter of a process, and the index of its file."""

    binary: int
    loaded: LoadedInterpreter


class InterpreterFinder:
    """Looks for CPython in processes, and into each file once.

    Files that are called so are looked into, and the program itself, which may have one inside.

    Args:
        table: The processes.
        images: Headers of their files.
        refuse: Told of a file with an interpreter that is not known, and why.
    """

    def __init__(
        self, table: ProcessTable, images: ElfImages, refuse: Callable[[int, str], None]
    ) -> None:
        self._binaries = table.binaries
        self._images = images
        self._refuse = refuse
        self._by_binary: dict[int, Interpreter | None] = {}

    def find(self, image: ProcessImage) -> FoundInterpreter | None:
        """Returns the interpreter of a process whose mappings were read, None for none."""
        for mapping in image.mappings:
            interpreter = self._of_binary(mapping.binary, image)
            if interpreter is None:
                continue
            with self._binaries.guard.each_file(self._binaries.files[mapping.binary].path):
                loaded = _loaded_at(interpreter, self._images.bias(mapping))
                return FoundInterpreter(mapping.binary, loaded)
        return None

    def forget_binaries(self, binaries: Collection[int]) -> None:
        """Forgets files that nobody maps any more."""
        for binary in binaries:
            self._by_binary.pop(binary, None)

    def _of_binary(self, binary: int, image: ProcessImage) -> Interpreter | None:
        if binary == NO_BINARY:
            return None
        if binary not in self._by_binary:
            self._by_binary[binary] = self._look_into(binary, image)
        return self._by_binary[binary]

    def _look_into(self, binary: int, image: ProcessImage) -> Interpreter | None:
        file = self._binaries.files[binary]
        is_likely = may_hold_interpreter(file.path, image.executable)
        if not is_likely or self._images.of(binary) is None:
            return None
        found = self._binaries.ask(binary, interpreter_in(file.path))
        if isinstance(found, Unsupported):
            self._refuse(binary, found.why)
            return None
        return found
