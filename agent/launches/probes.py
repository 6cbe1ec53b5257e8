# SPDX-License-Identifier: Apache-2.0
"""Puts probes on the device API functions of the files that targets map.

Found per file and not per well-known path: a runtime may be linked into the program itself. A
probe is on the file, for all processes, now and later; the kernel half lets those pass that are
not recorded. So files are also probed before anybody maps them, as far as it is known where the
system keeps them: a program that is started by the recorder loses no launch.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
from aiflame.agent.errors import EnvironmentUnfit
from aiflame.agent.file_questions import Question
from aiflame.agent.inspector.opener import Opener
from aiflame.agent.kernel import abi, sysbpf
from aiflame.agent.kernel.loader import CallsRefused, Programs
from aiflame.agent.launches.links import ApiLinks, Probe
from aiflame.agent.launches.opening import opened_at
from aiflame.agent.launches.probe_sites import choose_site
from aiflame.agent.launches.questions import Functions, ProbedFunction, functions_among
from aiflame.agent.losses import LossKind, blame
from aiflame.agent.processes.shares import Shares
from aiflame.agent.retries import Retries
from aiflame.agent.symbols.file_facts import FileFacts
from aiflame.gpu.apis import APIS
from aiflame.gpu.apis.base import Api, Argument, Bell, Call, HandleFrom, Naming, Probed

_UNPAID = "more functions than one process or user may have probed"
_NO_ROOM = "more functions than there is room for"

# Processes that are asked to pay for one file.
_MOST_ASKED = 256

# What is run where a function is called.
_PROGRAMS = {Call: "on_call", Naming: "on_naming", Bell: "on_bell"}

# Device and inode.
FileIdentity = tuple[int, int]


def file_identity(descriptor: int) -> FileIdentity:
    """Returns which file an open descriptor is of, whatever its path."""
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


def _reason(error: OSError | CallsRefused) -> str:
    if isinstance(error, CallsRefused):
        return str(error)
    if error.errno == sysbpf.ENOTSUPP:  # which the C library has no words for
        return "the kernel cannot probe its first instruction"
    if error.errno in (errno.EACCES, errno.EPERM):
        # Of perf_event_open, where one link does not take many probes (v6.18 asks for it, too).
        return "not permitted without CAP_SYS_ADMIN"
    return error.strerror or str(error)


@dataclass(slots=True)
class _File:
    """A file that was looked at.

    Attributes:
        links: What is attached to it.
        described: The slot and the number of each of its probed functions.
        paid: The process and the payer whose share the probes are of, and how many; None where
            nobody has mapped it, and where it has none.
        is_ours: It was looked at before anybody had mapped it, and may be mapped again any time.
    """

    links: ApiLinks
    is_ours: bool
    described: list[tuple[int, int]] = field(default_factory=list)
    paid: tuple[int, str, int] | None = None


@dataclass(slots=True)
class _Refused:
    """A file that has no probes, as there was no number or share left for them.

    Attributes:
        why: In words.
        asked: The processes for which that holds, since some were given back last.
    """

    why: str
    asked: set[int] = field(default_factory=set)


class _Later(NamedTuple):
    """Probes of a file that the kernel refused, maybe for a moment only, and why, in words."""

    path: str
    refused: list[tuple[Probe, str]]


class _Waiting(NamedTuple):
    """Probes that wait for their programs, and a descriptor of our own of their file."""

    identity: FileIdentity
    descriptor: int
    path: str
    probes: list[Probe]


def functions_of(apis: Sequence[Api]) -> Question[Functions]:
    """Which functions of some APIs a file defines."""
    return functions_among({function.symbol for api in apis for function in api.probed})


class ApiProbes:
    """All probes of a recording.

    Args:
        programs: Loaded programs.
        facts: Tells which functions are in a file.
        apis: Whose functions are probed.
        helpers: The same of device families' helpers, in libraries of their names alone.

    Raises:
        ValueError: The kernel half cannot tell so many APIs apart.

    Attributes:
        functions: What each slot of the kernel half's table stands for.
        losses: What could not be probed.
        loss_files: The files of each.
        ranges: File offset and size of each probed function, by file and slot.
        changes: How often these have changed.
    """

    def __init__(
        self,
        programs: Programs,
        facts: FileFacts,
        apis: Sequence[Api] = APIS,
        helpers: Sequence[Api] = (),
    ) -> None:
        # What a family adds to an API is of that API: calls inside each other are told by it.
        self._names = [*dict.fromkeys(api.name for api in (*apis, *helpers))]
        count = len(self._names)
        if count > abi.APIS_MAX:
            raise ValueError(f"{count} device APIs, and room for {abi.APIS_MAX} (APIS_MAX)")
        self._programs = programs
        self._facts = facts
        self._wanted: dict[str, list[tuple[Api, Probed]]] = {}
        for api in (*apis, *helpers):
            for function in api.probed:
                self._wanted.setdefault(function.symbol, []).append((api, function))
        self._question = functions_of(apis)
        self._helpers = [(helper.libraries, functions_of([helper])) for helper in helpers]
        self._seen: dict[FileIdentity, _File] = {}
        self.ranges: dict[tuple[FileIdentity, int], tuple[int, int]] = {}
        self._slots: dict[tuple[str, str], int] = {}
        self.functions: list[tuple[Api, Probed]] = []
        self.changes = 0
        self._is_off = False
        # Numbers of the kernel half that were given out, and those of them that are free again.
        self._numbers, self._free_numbers = 0, list[int]()
        # Threads that take probes off, and the numbers that are free when they are done.
        self._leaving: list[tuple[threading.Thread | None, list[int]]] = []
        self._waiting: list[_Waiting] = []
        self._shares = Shares(lambda: abi.API_PROBES_MAX)
        self._refused: dict[FileIdentity, _Refused] = {}
        self._has_room_again = False
        self._later: dict[FileIdentity, _Later] = {}
        self._retries = Retries[FileIdentity]()
        self._due: set[FileIdentity] = set()  # of those, what is tried once a process has the file
        self.losses: Counter[LossKind] = Counter()
        self.loss_files: dict[LossKind, set[str]] = {}

    def look_at_path(self, path: Path, opener: Opener) -> None:
        """Probes a file that may be mapped later; one that is not there is none."""
        with contextlib.suppress(OSError), opened_at(str(path), opener, self._facts) as descriptor:
            self.look(descriptor, str(path))

    def is_due(self, file: FileIdentity, pid: int) -> bool:
        """Whether a file that lacks probes is to be looked at again, as this process has it."""
        return file in self._due or self.may_pay(file, pid)

    def may_pay(self, file: FileIdentity, pid: int) -> bool:
        """Whether a file has no probes for want of room, and this process was not asked yet."""
        refused = self._refused.get(file)
        return refused is not None and pid not in refused.asked and len(refused.asked) < _MOST_ASKED

    def are_any_due(self) -> bool:
        """Whether files that lack probes may be looked at again; says so once."""
        if self._refused:
            self._take_back_numbers()
        due = self._retries.take_due()
        self._due |= due
        has_room, self._has_room_again = self._has_room_again, False
        return has_room or bool(due)

    def look(
        self, descriptor: int, path: str, pid: int = 0, payer: str = ""
    ) -> FileIdentity | None:
        """Probes what is found in an open file, once for each file.

        Args:
            descriptor: Of the file.
            path: What it is called, for messages.
            pid: Who has mapped it, 0 for nobody.
            payer: As of `payer_of`; "" for a file that the system or the command itself has.

        Returns:
            Which file it is; None where nobody could be asked about it for a moment.
        """
        remote = self._facts.guard.remote.get(descriptor)
        identity = file_identity(descriptor) if remote is None else remote.identity
        if identity in self._due:
            self._try_again(identity, descriptor)
            return identity
        if identity in self._seen and not self.may_pay(identity, pid):
            return identity
        new = _File(ApiLinks(self._programs), is_ours=not payer)
        seen = self._seen.setdefault(identity, new)
        name = path.rpartition("/")[2]
        probes: list[Probe] = []
        own = (question for names, question in self._helpers if name.startswith(names))
        wanted = [
            (located, api, function)
            for question in (self._question, *own)
            for located in (self._facts.ask(path, descriptor, question) or {}).values()
            for api, function in self._wanted[located.name]
            if not (api.skip_files and re.search(api.skip_files, name))
        ]
        if descriptor in self._facts.unanswered and not seen.described:
            del self._seen[identity]
            return None
        why = self._refusal(pid, payer, len(wanted)) if wanted else ""
        if why:
            # Another one may pay for a library that many map.
            if identity not in self._refused:
                self._failed(path, why, len(wanted))
            self._refused.setdefault(identity, _Refused(why)).asked.add(pid)
            return identity
        if wanted and payer:
            seen.paid = pid, payer, len(wanted)
        refused = self._refused.pop(identity, None)
        if refused is not None:
            self.losses[LossKind.CALLS_NOT_PROBED] -= len(wanted)
            self.loss_files[LossKind.CALLS_NOT_PROBED].discard(f"{path} ({refused.why})")
        if wanted:
            self._programs.expect_calls()  # which takes longer than what follows
        try:
            for located, api, function in wanted:
                probes += self._probes(identity, seen, located, api, function)
        except TooManyFunctions:
            self._failed(path, _NO_ROOM)
        if probes and remote is not None:
            # The kernel reads the file to put them on, and no signal gets through to that.
            self._failed(path, "its file system may not answer", len(probes))
        elif probes:
            self._attach_soon(_Waiting(identity, descriptor, path, probes))
        return identity

    def forget(self, identity: FileIdentity) -> None:
        """Takes the probes off a file that nobody maps any more.

        Each container has files of its own: what is left of those that are gone would stay mounted,
        and take all the room that there is for probes.
        """
        seen = self._seen.get(identity)
        if seen is None or seen.is_ours or self._is_off:
            return
        del self._seen[identity]
        self._refused.pop(identity, None)
        self._later.pop(identity, None)
        self._retries.forget([identity])
        self._due.discard(identity)
        for one in [one for one in self._waiting if one.identity == identity]:
            os.close(one.descriptor)
            self._waiting.remove(one)
        if seen.described:
            for slot, _ in seen.described:
                self.ranges.pop((identity, slot), None)
            self.changes += 1
            numbers = [number for _, number in seen.described]
            self._leaving.append((_beside(seen.links.close), numbers))
        if seen.paid is not None:
            self._shares.give_back(*seen.paid)

    @property
    def is_waiting(self) -> bool:
        """Whether there are probes that wait for their programs."""
        return bool(self._waiting)

    def poll(self, *, is_waiting: bool = False) -> None:
        """Puts on the probes that wait for their programs, once these are loaded.

        Args:
            is_waiting: Wait for that here.
        """
        if self._waiting and (is_waiting or not self._programs.calls_are_loading):
            waiting, self._waiting = self._waiting, []
            for one in waiting:
                self._attach(one)
                os.close(one.descriptor)

    def _attach_soon(self, one: _Waiting) -> None:
        """Puts probes on, without waiting for the programs."""
        if self._programs.calls_are_loading:
            with contextlib.suppress(OSError):
                self._waiting.append(one._replace(descriptor=os.dup(one.descriptor)))
                return
        self._attach(one)

    def _attach(self, one: _Waiting) -> None:
        links = self._seen[one.identity].links
        try:
            refused = links.attach(f"/proc/self/fd/{one.descriptor}", one.probes)
        except EnvironmentUnfit as error:
            self._failed(one.path, str(error), len(one.probes))
            return
        self._take_back(one.identity)
        for each in refused:
            self._failed(one.path, _reason(each.error))
        later = [(each.probe, _reason(each.error)) for each in refused if each.may_pass]
        if later:
            self._later[one.identity] = _Later(one.path, later)
            self._retries.note(one.identity)
        else:
            self._retries.forget([one.identity])

    def _try_again(self, identity: FileIdentity, descriptor: int) -> None:
        """Puts on the probes of a file that the kernel refused before."""
        self._due.discard(identity)
        path, refused = self._later[identity]
        self._programs.expect_calls()
        probes = [probe for probe, _ in refused]
        self._attach_soon(_Waiting(identity, descriptor, path, probes))

    def _take_back(self, identity: FileIdentity) -> None:
        """Takes back what was counted of probes that have been tried again."""
        path, refused = self._later.pop(identity, ("", []))
        for _, why in refused:
            self.losses[LossKind.CALLS_NOT_PROBED] -= 1
            self.loss_files[LossKind.CALLS_NOT_PROBED].discard(f"{path} ({why})")

    def _probes(
        self,
        identity: FileIdentity,
        seen: _File,
        located: ProbedFunction,
        api: Api,
        function: Probed,
    ) -> list[Probe]:
        """Describes the probes of a function to the kernel half."""
        slot = self._slot(api, function)
        number = self._number()
        seen.described.append((slot, number))
        nops = self._programs.uprobes.answers.nops
        chosen = choose_site(located.prologue, nops)
        self.ranges[identity, slot] = (located.file_offset, located.size_bytes)
        self.changes += 1
        probes = [Probe(_PROGRAMS[type(function)], located, chosen, slot, number)]
        seen.links.describe(probes[0])
        if isinstance(function, Naming) and function.handle_from is not HandleFrom.ARGUMENT:
            back = choose_site(located.prologue, nops, for_return=True)
            probes.append(Probe("on_named", located, back, slot, number))
        return probes

    def _refusal(self, pid: int, payer: str, count: int) -> str:
        """Returns why a file gets no probes now; "" where it does: its share is taken then."""
        self._take_back_numbers()
        if count > len(self._free_numbers) + abi.API_PROBES_MAX - self._numbers:
            return _NO_ROOM
        return _UNPAID if payer and not self._shares.take(pid, payer, count) else ""

    def _take_back_numbers(self) -> None:
        """Takes back what files had that are gone, once their probes are off."""
        for thread, numbers in [*self._leaving]:
            if thread is None or not thread.is_alive():
                self._free_numbers += numbers
                self._leaving.remove((thread, numbers))
                self._has_room_again = bool(self._refused)
                for refused in self._refused.values():
                    refused.asked.clear()

    def _number(self) -> int:
        """Returns what the kernel half knows a probe by; there is one (`_refusal`)."""
        if self._free_numbers:
            return self._free_numbers.pop()
        self._numbers += 1
        return self._numbers - 1

    def _failed(self, path: str, reason: str, count: int = 1) -> None:
        self.losses[LossKind.CALLS_NOT_PROBED] += count
        blame(self.loss_files, LossKind.CALLS_NOT_PROBED, f"{path} ({reason})")

    def _slot(self, api: Api, function: Probed) -> int:
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
            row["api"] = self._names.index(api.name)
            self._programs.api_calls.update(slot.to_bytes(4, "little"), row.tobytes())
        return slot

    def take_off(self) -> None:
        """Takes all probes off beside all else: the kernel takes 0.15 s for it."""
        self._is_off = True
        self._leaving.append((_beside(self._close_links), []))

    def _close_links(self) -> None:
        for seen in [*self._seen.values()]:
            seen.links.close()

    def close(self) -> None:
        """Takes all probes off."""
        for one in self._waiting:
            os.close(one.descriptor)
        self._waiting = []
        for thread, _ in self._leaving:
            if thread is not None:
                thread.join()
        self._close_links()


def _beside(take_off: Callable[[], None]) -> threading.Thread | None:
    """Has probes taken off beside all else, where a thread may be started.

    The kernel takes 30 ms for those of a file that are in one link, and 0.1 s for each that is an
    event of its own, as before v6.6.
    """

    def run() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # the main thread's
        take_off()

    thread = threading.Thread(target=run, daemon=True)
    try:
        thread.start()
    except RuntimeError:  # no more threads may be started
        take_off()
        return None
    return thread


class TooManyFunctions(Exception):
    """The kernel half's table of functions is full."""


def _describe(row: np.void, function: Probed) -> None:
    """Fills in a struct api_call."""
    arguments: Iterable[tuple[str, Argument | None]]
    if isinstance(function, Naming):
        arguments = (
            ("kernel", function.handle),
            ("name", function.name),
            ("alias", function.alias),
        )
        row["handle_from"] = int(function.handle_from)
    elif isinstance(function, Bell):
        arguments = (("bytes", function.gone),)
    else:
        arguments = (
            ("kernel", function.kernel),
            ("queue", function.queue),
            ("bytes", function.bytes),
            ("kind", function.kind),
            ("event", function.event),
            ("blocking", function.blocking),
            ("launch_id", function.launch_id),
        )
        row["grid"] = int(function.grid)
        row["operation"] = int(function.operation)
        row["waits_for"] = int(function.waits_for)
    for name, argument in arguments:
        if argument is not None:
            row[name] = (
                *(1, argument.number, argument.offset is not None, argument.size_bytes),
                argument.offset or 0,
            )
