# SPDX-License-Identifier: Apache-2.0
"""Puts probes of device API functions on a file, in the cheapest way that the kernel takes.

One link takes all probes of a program at once, and off at once. Where the kernel refuses that, each
probe has a link of its own, and where it has no such links, an event. A kernel may refuse the
instruction that was chosen, too: then the function's first one is tried.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from aiflame.agent.kernel import abi, sysbpf
from aiflame.agent.kernel.loader import CallsRefused, Programs
from aiflame.agent.kernel.syscalls import SHORT
from aiflame.agent.launches.probe_sites import ProbeSite
from aiflame.agent.launches.questions import ProbedFunction

# As if nothing were known of the function's code.
_ENTRY = ProbeSite(0, 0, False)

_PROGRAMS = ("on_call", "on_naming", "on_named", "on_bell")


class Probe(NamedTuple):
    """A probe to be put on: program, function, where in it, and the kernel half's two numbers."""

    program: str
    function: ProbedFunction
    site: ProbeSite
    slot: int
    number: int

    @property
    def offset(self) -> int:
        """In the file, in bytes."""
        return self.function.file_offset + self.site.offset_bytes

    @property
    def is_return(self) -> bool:
        """Whether it is to fire when the function returns."""
        return self.program == "on_named"


class Refused(NamedTuple):
    """A probe that the kernel does not take, and what it says."""

    probe: Probe
    error: OSError | CallsRefused

    @property
    def may_pass(self) -> bool:
        """Whether the kernel may take it a little later."""
        return isinstance(self.error, CallsRefused) or self.error.errno in SHORT

    @property
    def is_of_instruction(self) -> bool:
        """Whether the kernel cannot probe the instruction, in whatever way."""
        return isinstance(self.error, OSError) and self.error.errno == sysbpf.ENOTSUPP


class ApiLinks:
    """What is attached to a file, as descriptors: closing them detaches.

    Args:
        programs: Loaded programs.
    """

    def __init__(self, programs: Programs) -> None:
        self._programs = programs
        self._descriptors: list[int] = []
        self._event_type: int | None = None

    def describe(self, probe: Probe) -> None:
        """Tells the kernel half of a probe; the return of a function needs no words of its own."""
        if probe.is_return:
            return
        row = np.zeros(1, abi.API_PROBE_DTYPE)
        row["call"], row["stack_bytes"] = probe.slot, probe.site.stack_bytes
        row["before_bytes"] = probe.function.before_bytes + probe.site.offset_bytes
        row["after_bytes"] = max(probe.function.after_bytes - probe.site.offset_bytes, 0)
        self._programs.api_probes.update(probe.number.to_bytes(4, "little"), row.tobytes())

    def attach(self, path: str, probes: Sequence[Probe]) -> list[Refused]:
        """Puts probes on the file; returns those that the kernel does not take in any way.

        Raises:
            EnvironmentUnfit: The kernel has nothing that programs could be attached to.
        """
        try:
            self._programs.need_calls()
        except CallsRefused as error:
            return [Refused(probe, error) for probe in probes]
        if not self._programs.calls_link_many:
            return self._attach_each(self._open_event, self._programs.fds, path, probes)
        left = self._attach_together(path, probes)
        refused = self._attach_each(self._link_one, self._programs.fds, path, left)
        # An event would be refused for the instruction as well, and where there is no room, but not
        # for being in a link.
        others = [one.probe for one in refused if not (one.may_pass or one.is_of_instruction)]
        if not others:
            return refused
        refused = [one for one in refused if one.may_pass or one.is_of_instruction]
        try:
            programs = self._programs.calls_for_events()
        except CallsRefused as error:
            return refused + [Refused(probe, error) for probe in others]
        return refused + self._attach_each(self._open_event, programs, path, others)

    def _attach_together(self, path: str, probes: Sequence[Probe]) -> list[Probe]:
        """Puts on each program's probes by one link; returns those of links that were refused."""
        left: list[Probe] = []
        for program in _PROGRAMS:
            own = [probe for probe in probes if probe.program == program]
            if not own:
                continue
            sites = [(probe.offset, probe.number) for probe in own]
            fd = self._programs.fds[program]
            try:
                self._descriptors.append(
                    sysbpf.link_uprobes(path, sites, fd, is_return=own[0].is_return)
                )
            except OSError:  # one of them is enough
                left += own
        return left

    def _attach_each(
        self,
        attach_one: Callable[[str, Probe, int], None],
        programs: Mapping[str, int],
        path: str,
        probes: Sequence[Probe],
    ) -> list[Refused]:
        refused = []
        for probe in probes:
            program = programs[probe.program]
            try:
                try:
                    attach_one(path, probe, program)
                except OSError:
                    if not probe.site.offset_bytes:
                        raise
                    at_entry = probe._replace(site=_ENTRY)
                    self.describe(at_entry)
                    attach_one(path, at_entry, program)
            except OSError as error:
                refused.append(Refused(probe, error))
        return refused

    def _link_one(self, path: str, probe: Probe, program: int) -> None:
        sites = [(probe.offset, probe.number)]
        self._descriptors.append(sysbpf.link_uprobes(path, sites, program, probe.is_return))

    def _open_event(self, path: str, probe: Probe, program: int) -> None:
        if self._event_type is None:
            self._event_type = sysbpf.uprobe_event_type()
        event = sysbpf.open_uprobe(path, probe.offset, self._event_type, probe.is_return)
        self._descriptors.append(event)
        self._descriptors.append(sysbpf.link_event(event, program, probe.number))

    def close(self) -> None:
        """Takes the probes off; a thread may be at it already."""
        with contextlib.suppress(IndexError):
            while True:
                os.close(self._descriptors.pop())
