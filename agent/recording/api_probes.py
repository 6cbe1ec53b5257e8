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
from typing import NamedTuple

import numpy as np
from aiflame.agent.errors import EnvironmentUnfit
from aiflame.agent.recording import abi, sysbpf
from aiflame.agent.recording.api_symbols import FunctionPlace, find_functions
from aiflame.agent.recording.loader import Programs
from aiflame.agent.recording.probe_places import ProbePlace, probe_place
from aiflame.agent.symbols.elf import BadElf
from aiflame.gpu.apis import APIS
from aiflame.gpu.apis.base import Api, Argument, Call, HandleFrom, Naming

# Device and inode.
FileIdentity = tuple[int, int]


def file_identity(descriptor: int) -> FileIdentity:
    """Returns which file an open descriptor is of, whatever its path."""
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


class _Probe(NamedTuple):
    """A probe to be put on: program, offset in the file, and number in the kernel half's table."""

    program: str
    offset: int
    number: int


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
        self._described = 0
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
        probes: list[_Probe] = []
        for place in places.values():
            for api, function in self._wanted[place.name]:
                if not (api.skip_files and re.search(api.skip_files, name)):
                    probes += self._probes(identity, path, place, api, function)
        self._attach(f"/proc/self/fd/{descriptor}", path, probes)
        return identity

    def _probes(
        self, file: FileIdentity, path: str, place: FunctionPlace, api: Api, function: Call | Naming
    ) -> list[_Probe]:
        """Describes the probes of a function to the kernel half."""
        try:
            slot = self._slot(api, function)
            chosen = probe_place(place.code, place.file_offset)
            number = self._number(place, chosen, slot)
        except TooManyFunctions:
            self._failed(path)
            return []
        self.places[file, slot] = (place.file_offset, place.size_bytes)
        program = "on_naming" if isinstance(function, Naming) else "on_call"
        probes = [_Probe(program, place.file_offset + chosen.offset_bytes, number)]
        if isinstance(function, Naming) and function.handle_from is not HandleFrom.ARGUMENT:
            back = probe_place(place.code, place.file_offset, for_return=True)
            probes.append(_Probe("on_named", place.file_offset + back.offset_bytes, number))
        return probes

    def _failed(self, path: str, count: int = 1) -> None:
        self.problems["calls_not_probed"] += count
        self.problem_files.setdefault("calls_not_probed", set()).add(path)

    def _attach(self, link: str, path: str, probes: list[_Probe]) -> None:
        """Puts all probes of a file on."""
        if not probes:
            return
        try:
            self._programs.need_calls()
        except EnvironmentUnfit:
            self._failed(path, len(probes))
            return
        for program in ("on_call", "on_naming", "on_named"):
            own = [probe for probe in probes if probe.program == program]
            if not (own and self._attach_together(link, own)):
                for probe in own:
                    try:
                        self._attach_one(link, probe)
                    except OSError:  # noqa: PERF203 - the others are to be tried
                        self._failed(path)

    def _attach_together(self, link: str, probes: list[_Probe]) -> bool:
        """Puts probes of one program on, if the kernel takes them all at once."""
        if not self._programs.calls_link_many:
            return False
        places = [(probe.offset, probe.number) for probe in probes]
        program = probes[0].program
        fd = self._programs.fds[program]
        try:
            self._descriptors.append(
                sysbpf.link_uprobes(link, places, fd, is_return=program == "on_named")
            )
        except OSError:
            return False
        return True

    def _attach_one(self, link: str, probe: _Probe) -> None:
        is_return = probe.program == "on_named"
        program = self._programs.fds[probe.program]
        if self._programs.calls_link_many:
            places = [(probe.offset, probe.number)]
            self._descriptors.append(sysbpf.link_uprobes(link, places, program, is_return))
            return
        if self._event_type is None:
            self._event_type = sysbpf.uprobe_event_type()
        event = sysbpf.open_uprobe(link, probe.offset, self._event_type, is_return)
        self._descriptors.append(event)
        self._descriptors.append(sysbpf.link_event(event, program, probe.number))

    def _number(self, place: FunctionPlace, chosen: ProbePlace, slot: int) -> int:
        """Describes a probe to the kernel half; returns its number there."""
        if self._described == abi.API_PROBES_MAX:
            raise TooManyFunctions
        number, offset = self._described, chosen.offset_bytes
        self._described += 1
        row = np.zeros(1, abi.API_PROBE_DTYPE)
        row["call"], row["stack_bytes"] = slot, chosen.stack_bytes
        row["before_bytes"] = place.before_bytes + offset
        row["after_bytes"] = max(place.after_bytes - offset, 0)
        self._programs.api_probes.update(number.to_bytes(4, "little"), row.tobytes())
        return number

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
            row["api"] = APIS.index(api)
            self._programs.api_calls.update(slot.to_bytes(4, "little"), row.tobytes())
        return slot

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
        row["operation"] = int(function.operation)
    for field, argument in arguments:
        if argument is not None:
            row[field] = (
                *(1, argument.number, argument.offset is not None, argument.size_bytes),
                argument.offset or 0,
            )
