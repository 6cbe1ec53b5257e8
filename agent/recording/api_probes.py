# SPDX-License-Identifier: Apache-2.0
"""Puts probes on the device API functions of the files that targets map.

Found per file and not per well-known path: a runtime may be linked into the program itself. A
probe is on the file, for all processes, now and later; the kernel half lets those pass that are
not recorded. So files are also probed before anybody maps them, as far as it is known where the
system keeps them: a program that is started by the recorder loses no launch.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from aiflame.agent.errors import EnvironmentUnfit
from aiflame.agent.recording import abi, sysbpf
from aiflame.agent.recording.api_symbols import FunctionPlace, find_functions
from aiflame.agent.recording.loader import Programs
from aiflame.agent.recording.probe_places import probe_place
from aiflame.agent.symbols.elf import BadElf
from aiflame.gpu.apis import APIS
from aiflame.gpu.apis.base import Api, Argument, Call, HandleFrom, Naming

# Device and inode.
FileIdentity = tuple[int, int]


def file_identity(descriptor: int) -> FileIdentity:
    """Returns which file an open descriptor is of, whatever its path."""
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


class ApiProbes:
    """All probes of a recording.

    Args:
        programs: Loaded programs.

    Attributes:
        functions: What each slot of the kernel half's table stands for.
        problems: What could not be probed, by name of the loss.
        problem_files: The files of each.
        places: File offset and size of each probed function, by file and slot.
    """

    def __init__(self, programs: Programs) -> None:
        self._programs = programs
        self._wanted: dict[str, list[tuple[Api, Call | Naming]]] = {}
        for api in APIS:
            functions: tuple[Call | Naming, ...] = (*api.calls, *api.namings)
            for function in functions:
                self._wanted.setdefault(function.symbol, []).append((api, function))
        self._names = frozenset(self._wanted)
        self._seen: set[FileIdentity] = set()
        self.places: dict[tuple[FileIdentity, int], tuple[int, int]] = {}
        self._slots: dict[tuple[str, str], int] = {}
        self.functions: list[tuple[Api, Call | Naming]] = []
        self._event_type: int | None = None
        self._descriptors: list[int] = []
        self.problems: Counter[str] = Counter()
        self.problem_files: dict[str, set[str]] = {}

    def look_at_path(self, path: Path) -> None:
        """Probes a file that may be mapped later; one that is not there is none."""
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:
            return
        try:
            self.look(descriptor, str(path))
        finally:
            os.close(descriptor)

    def look(self, descriptor: int, path: str) -> FileIdentity:
        """Probes what is found in an open file, once for each file; returns which file it is.

        Args:
            descriptor: Of the file.
            path: What it is called, for messages.
        """
        identity = file_identity(descriptor)
        if identity in self._seen:
            return identity
        self._seen.add(identity)
        try:
            places = find_functions(descriptor, self._names)
        except (BadElf, OSError):
            return identity  # who resolves its symbols will say so
        name = path.rpartition("/")[2]
        for place in places.values():
            for api, function in self._wanted[place.name]:
                if not (api.skip_files and re.search(api.skip_files, name)):
                    self._probe(descriptor, path, place, api, function)
        return identity

    def _probe(
        self, descriptor: int, path: str, place: FunctionPlace, api: Api, function: Call | Naming
    ) -> None:
        link = f"/proc/self/fd/{descriptor}"
        try:
            if self._event_type is None:
                self._programs.need_calls()
                self._event_type = sysbpf.uprobe_event_type()
            slot = self._slot(api, function)
            where = (place.file_offset, place.size_bytes)
            self.places[file_identity(descriptor), slot] = where
            chosen = probe_place(place.code, place.file_offset)
            program = "on_naming" if isinstance(function, Naming) else "on_call"
            cookie = slot | chosen.stack_bytes << 32
            self._attach(link, place.file_offset + chosen.offset_bytes, program, cookie)
            if isinstance(function, Naming) and function.handle_from is not HandleFrom.ARGUMENT:
                back = probe_place(place.code, place.file_offset, for_return=True)
                self._attach(link, place.file_offset + back.offset_bytes, "on_named", slot)
        except (OSError, EnvironmentUnfit, TooManyFunctions):
            self.problems["calls_not_probed"] += 1
            self.problem_files.setdefault("calls_not_probed", set()).add(path)

    def _attach(self, path: str, offset: int, program: str, cookie: int) -> None:
        event = sysbpf.open_uprobe(
            path, offset, int(self._event_type or 0), is_return=program == "on_named"
        )
        self._descriptors.append(event)
        self._descriptors.append(sysbpf.link_event(event, self._programs.fds[program], cookie))

    def _slot(self, api: Api, function: Call | Naming) -> int:
        key = (api.name, function.symbol)
        slot = self._slots.get(key)
        if slot is None:
            slot = len(self.functions)
            if slot == abi.API_CALLS_MAX:
                raise TooManyFunctions
            self._slots[key] = slot
            self.functions.append((api, function))
            row = np.zeros(1, abi.API_CALL_DTYPE)[0]
            _describe(row, function)
            self._programs.api_calls.update(slot.to_bytes(4, "little"), row.tobytes())
        return slot

    @property
    def count(self) -> int:
        """How many functions are probed, in all files."""
        return len(self._descriptors) // 2

    def close(self) -> None:
        """Takes all probes off."""
        for descriptor in reversed(self._descriptors):
            os.close(descriptor)
        self._descriptors = []


class TooManyFunctions(Exception):
    """The kernel half's table of functions is full."""


def _describe(row: np.void, function: Call | Naming) -> None:
    """Fills in a struct api_call."""
    arguments: Iterable[tuple[str, Argument | None]]
    if isinstance(function, Naming):
        arguments = (
            ("kernel", function.handle),
            ("name", function.name),
            ("alias", function.alias),
        )
        row["handle_from"] = int(function.handle_from)
    else:
        arguments = (
            ("kernel", function.kernel),
            ("queue", function.queue),
            ("bytes", function.bytes),
            ("kind", function.kind),
        )
        row["grid"] = int(function.grid)
    for field, argument in arguments:
        if argument is not None:
            row[field] = (
                *(1, argument.number, argument.offset is not None, argument.size_bytes),
                argument.offset or 0,
            )
