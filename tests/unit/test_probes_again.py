# SPDX-License-Identifier: Apache-2.0
"""Probes that the kernel refused for a moment are put on later, those that it never takes not."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiflame.agent.kernel import sysbpf
from aiflame.agent.kernel.loader import CallsRefused
from aiflame.agent.kernel.uprobe_tries import NopTreatment
from aiflame.agent.launches.calls import ApiCalls
from aiflame.agent.launches.probe_sites import Prologue
from aiflame.agent.launches.probes import ApiProbes
from aiflame.agent.launches.questions import ProbedFunction
from aiflame.agent.losses import LossKind
from aiflame.agent.processes.binaries import BinaryFile
from aiflame.agent.processes.table import Mapping, ProcessImage, ProcessTable
from aiflame.agent.target_files import FileGuard
from support import blind_inspector

_MINUTE_NS = 60_000_000_000
_FUNCTIONS = ("clFinish", "clSVMAlloc", "clCreateBuffer")


class _Kernel:
    """Programs, and the links by which they are put on files.

    Attributes:
        answer: Raises what the kernel refuses, by the number of sites of a link.
        probed: The sites of all links.
        tries: How often it was asked.
    """

    calls_are_loading = False
    calls_link_many = True
    fds = dict.fromkeys(("on_call", "on_naming", "on_named", "on_bell"), 7)

    def __init__(self) -> None:
        self.api_calls = self.api_probes = SimpleNamespace(update=lambda *_: None)
        self.uprobes = SimpleNamespace(answers=SimpleNamespace(nops=NopTreatment()))
        self.why_refused = ""
        self.answer: Callable[[int], None] = lambda _: None
        self.probed: list[int] = []
        self.tries = 0

    def expect_calls(self) -> None:
        pass

    def need_calls(self) -> None:
        self.tries += 1
        if self.why_refused:
            raise CallsRefused(self.why_refused)

    def calls_for_events(self) -> dict[str, int]:
        raise CallsRefused("the kernel refuses a program")

    def link(self, path: str, sites: list[tuple[int, int]], *_: object, **__: object) -> int:
        self.tries += 1
        self.answer(len(sites))
        assert Path(path).read_bytes()  # the descriptor is of the file
        self.probed += [number for _, number in sites]
        return os.open(os.devnull, os.O_RDONLY)


class _Facts:
    guard = FileGuard()
    unanswered: frozenset[int] = frozenset()

    def ask(self, *_: object) -> dict[str, ProbedFunction]:
        prologue = Prologue((), 1)
        return {name: ProbedFunction(name, 64, 8, 0, 8, prologue) for name in _FUNCTIONS}


class _Recording:
    """One that has a library of a process's.

    Args:
        folder: Has the library.
        now_ns: The clock.
    """

    def __init__(self, folder: Path, now_ns: list[int]) -> None:
        self._now_ns = now_ns
        self.kernel = _Kernel()
        kernel: Any = self.kernel
        facts: Any = _Facts()
        self.probes = ApiProbes(kernel, facts)
        anything: Any = SimpleNamespace()
        self.table = ProcessTable(1, lambda pid: 1, blind_inspector())
        self.calls = ApiCalls(anything, self.table, anything, anything, anything)
        self.calls.probes = self.probes
        library = folder / "library"
        library.write_bytes(b"code")
        self.fd = os.open(library, os.O_RDONLY)
        self.table.binaries.files[0] = BinaryFile(0, str(library), self.fd, "")
        self.image = self.map_library()

    def map_library(self) -> ProcessImage:
        """Returns a process that maps the library."""
        image = self.table.image(100, 1)
        image.replace_mappings([Mapping(4096, 8192, 0, 0)])
        return image

    def look(self) -> None:
        self.calls.look(self.image)
        self.calls.poll()

    def pass_minutes(self, minutes: int) -> None:
        self._now_ns[0] += minutes * _MINUTE_NS

    def wait(self, minutes: int) -> None:
        self.pass_minutes(minutes)
        self.look()

    @property
    def lost(self) -> int:
        return self.calls.probes.losses[LossKind.CALLS_NOT_PROBED]


@pytest.fixture
def recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[_Recording]:
    now_ns = [1_000 * _MINUTE_NS]
    monkeypatch.setattr(time, "monotonic_ns", lambda: now_ns[0])
    made = _Recording(tmp_path, now_ns)
    monkeypatch.setattr(sysbpf, "link_uprobes", made.kernel.link)
    yield made
    made.probes.close()
    os.close(made.fd)


def _refuse(number: int) -> None:
    raise OSError(number, os.strerror(number))


def test_files_have_their_probes_once_the_programs_are_there(recording: _Recording) -> None:
    # GIVEN programs that are refused as a process maps a library
    kernel = recording.kernel
    kernel.why_refused = "the kernel refuses a program: on_call: Cannot allocate memory"
    recording.look()
    assert recording.lost == 3
    (culprit,) = recording.probes.loss_files[LossKind.CALLS_NOT_PROBED]
    assert culprit.endswith(f"/library ({kernel.why_refused})")
    # THEN they are asked for after 1 minute, 2 and 4, and what is lost is counted once
    pauses, last = [], kernel.tries
    for minute in range(1, 8):
        recording.wait(1)
        if kernel.tries > last:
            pauses.append(minute)
            last = kernel.tries
    assert pauses == [1, 3, 7]
    assert recording.lost == 3
    # WHEN they are there THEN the library is probed, and nothing is lost any more
    kernel.why_refused = ""
    recording.wait(8)
    assert sorted(kernel.probed) == [0, 1, 2]
    assert recording.lost == 0
    assert recording.probes.loss_files == {LossKind.CALLS_NOT_PROBED: set()}
    # AND once
    recording.wait(120)
    assert len(kernel.probed) == 3


@pytest.mark.parametrize("number", [errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EAGAIN])
def test_probes_that_are_refused_for_a_moment_are_put_on_later(
    recording: _Recording, number: int
) -> None:
    # GIVEN room for one of three probes
    kernel = recording.kernel

    def answer(sites: int) -> None:
        if sites > 1 or kernel.probed:
            _refuse(number)

    kernel.answer = answer
    recording.look()
    assert kernel.probed == [0]
    assert recording.lost == 2
    # WHEN there is some THEN the others are put on as well
    kernel.answer = lambda _: None
    recording.look()
    assert kernel.probed == [0]
    recording.wait(1)
    assert sorted(kernel.probed) == [0, 1, 2]
    assert recording.lost == 0


def test_probes_that_the_kernel_never_takes_are_not_tried_again(recording: _Recording) -> None:
    recording.kernel.answer = lambda _: _refuse(sysbpf.ENOTSUPP)
    recording.look()
    assert recording.lost == 3
    tries = recording.kernel.tries
    recording.wait(120)
    assert recording.kernel.tries == tries


def test_files_of_the_system_are_probed_later_for_who_maps_them_then(
    recording: _Recording,
) -> None:
    # GIVEN a library that was refused before anybody had mapped it
    kernel = recording.kernel
    kernel.why_refused = "the kernel refuses a program"
    recording.probes.look(recording.fd, "library")
    kernel.why_refused = ""
    recording.calls.poll()
    # WHEN a process maps it an hour later
    recording.wait(60)
    # THEN its calls are counted
    assert sorted(kernel.probed) == [0, 1, 2]
    assert recording.lost == 0


def test_a_file_that_nobody_maps_any_more_is_not_tried_again(recording: _Recording) -> None:
    recording.image.cgroup = f"/docker/{0:064x}"
    recording.kernel.why_refused = "the kernel refuses a program"
    recording.look()
    tries = recording.kernel.tries
    recording.table.forget([recording.image], ())
    recording.calls.forget_binaries([0])
    recording.pass_minutes(60)
    recording.calls.poll()
    assert recording.kernel.tries == tries
    # AND who maps it then is the first that does
    recording.kernel.why_refused = ""
    recording.image = recording.map_library()
    recording.look()
    assert len(recording.kernel.probed) == 3
