# SPDX-License-Identifier: Apache-2.0
"""How CPython is asked to load a library by itself, on memory of interpreters that never were."""

from __future__ import annotations

import os
import random
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from aiflame.agent.errors import AiflameError
from aiflame.agent.injection import remote_exec
from aiflame.agent.injection.remote_exec import RemoteExec
from aiflame.agent.injection.tracer import TryAgain
from aiflame.agent.processes import procfs
from aiflame.agent.python.debugoffsets import read_debugger_support, read_layout
from aiflame.agent.python.interpreter import LoadedInterpreter
from aiflame.agent.python.layouts import UnsupportedPython
from aiflame.agent.python.thread_state import StateKind, StatePlace
from pymemory import BASE, ConstructedMemory, debug_offsets

_DEBUGGER = {
    "debugger__eval_breaker": 24,
    "debugger__support": 200,
    "debugger__enabled": 4000,
    "debugger__pending_call": 0,
    "debugger__script_path": 4,
    "debugger__script_path_size": 96,
    "interpreter__id": 8,
    "interpreter__threads_main": 72,
    "thread__size": 304,
    "runtime__interpreters_head": 1200,
}
_OFFSETS = debug_offsets((3, 14), **_DEBUGGER)
_LIBRARY = "library.so"


class Target:
    """An interpreter that may come by, in this process: its files are ours."""

    def __init__(self, acts: Callable[[Target], object] = lambda _: None) -> None:
        self.memory = ConstructedMemory()
        self.runtime = self.memory.allocate(4096)
        self.interpreter = self.memory.allocate(8192)
        self.thread = self.memory.allocate(304)
        self._acts = acts
        self.has_ended = False
        self.memory.write(self.runtime, _OFFSETS)
        self.memory.word(self.runtime + 1200, self.interpreter)
        self.memory.word(self.interpreter + 72, self.thread)
        self.int(self.interpreter + 4000, 1)
        self.memory.word(self.thread + 24, 0x0507)  # a version, and flags

    def int(self, address: int, value: int) -> None:
        self.memory.write(address, struct.pack("<i", value))

    def read(self, pid: int, address: int, size: int) -> bytes:
        if self.has_ended:
            raise TryAgain("the thread has ended")
        if self.is_asked:
            self._acts(self)
        return self.memory.read(address, size) or b""

    def write(self, pid: int, address: int, data: bytes) -> None:
        self.memory.write(address, data)

    @property
    def is_asked(self) -> bool:
        return bool(self.memory.data[self.thread + 200 - BASE])

    @property
    def script(self) -> Path:
        path = self.memory.read(self.thread + 204, 96)
        assert path is not None
        return Path(path.split(b"\0")[0].decode())

    def load(self) -> str:
        layout = read_layout(_OFFSETS)
        loaded = LoadedInterpreter(layout, self.runtime, StatePlace(StateKind.BELOW), ())
        asked = RemoteExec(os.getpid(), loaded, self)  # type: ignore[arg-type]
        return asked.load(_LIBRARY, b"\x7fELF")


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_exec, "_ASKED_S", 0.005)
    monkeypatch.setattr(remote_exec, "_LOADING_S", 0.005)
    known = procfs.status_field
    fields = {"Seccomp": ["0"]}  # whatever runs the tests
    monkeypatch.setattr(procfs, "status_field", lambda p, name: fields.get(name) or known(p, name))


def _runs_the_script(target: Target) -> None:
    """What _PyRunRemoteDebugger does (v3.14.8 Python/ceval_gil.c), with what load() does."""
    target.int(target.thread + 200, 0)
    script = target.script
    assert (script.stat().st_mode & 0o777, script.parent.stat().st_mode & 0o777) == (0o400, 0o700)
    text = script.read_text()
    compile(text, str(script), "exec")
    assert f"{script.parent}/asked" in text
    assert f"{script.parent}/{_LIBRARY}" in text
    (script.parent / "asked").rename(script.parent / _LIBRARY)
    assert (script.parent / _LIBRARY).read_bytes() == b"\x7fELF"
    (script.parent / _LIBRARY).unlink()


def test_a_thread_that_comes_by_loads_it_and_nothing_is_left() -> None:
    target = Target(_runs_the_script)
    assert target.load() == ""
    assert not target.script.parent.exists()
    # Its version is as it was, and so are the other flags.
    assert target.memory.read(target.thread + 24, 8) == struct.pack("<Q", 0x0507 | 1 << 5)


def test_a_request_that_nobody_takes_is_taken_back() -> None:
    target = Target()
    assert target.load().startswith("its main thread did not run the script within")
    assert not target.is_asked
    assert not target.script.parent.exists()


def test_one_that_takes_it_is_waited_for() -> None:
    def begins(target: Target) -> None:
        (target.script.parent / "asked").rename(target.script.parent / _LIBRARY)
        target.int(target.thread + 200, 0)

    target = Target(begins)
    with pytest.raises(AiflameError, match="has not loaded it within"):
        target.load()
    assert not target.script.parent.exists()


def test_one_that_cannot_says_so_at_once() -> None:
    def removes(target: Target) -> None:
        target.int(target.thread + 200, 0)
        (target.script.parent / "asked").unlink()

    assert Target(removes).load() == ""  # its mappings tell that it was in vain


def test_one_that_ends_meanwhile() -> None:
    def ends(target: Target) -> None:
        target.has_ended = True

    target = Target(ends)
    with pytest.raises(TryAgain):
        target.load()
    assert not target.script.parent.exists()


def test_one_that_may_not_be_asked_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target()
    target.int(target.interpreter + 4000, 0)
    assert "PYTHON_DISABLE_REMOTE_DEBUG" in target.load()
    target = Target()
    target.int(target.thread + 200, 1)
    assert target.load() == "a script of another debugger waits there"
    target = Target()
    target.memory.word(target.interpreter + 8, 1)  # a sub-interpreter, and no other
    assert target.load() == "its main thread was not found"
    monkeypatch.setattr(procfs, "status_field", lambda *_: ["2"])
    assert Target().load() == "the process has a seccomp filter"


@pytest.mark.parametrize(
    "changes",
    [
        {"debugger__support": 1 << 40},
        {"debugger__script_path_size": 512},
        {"debugger__eval_breaker": 1 << 63},
        {"debugger__enabled": 1 << 30},
    ],
)
def test_offsets_outside_their_structures_are_refused(changes: dict[str, int]) -> None:
    with pytest.raises(UnsupportedPython, match="debugger's lie outside"):
        read_debugger_support(debug_offsets((3, 14), **(_DEBUGGER | changes)))
    assert read_debugger_support(debug_offsets((3, 13))) is None


def test_damaged_memory_is_survived() -> None:
    chance = random.Random(14)
    for _ in range(300):
        target = Target()
        for _ in range(chance.randint(1, 4)):
            at = chance.choice((target.runtime, target.interpreter, target.thread))
            begin = at - BASE + 8 * chance.randrange(96)
            word = chance.choice((0, 1, 1 << 63, BASE + chance.randrange(1 << 20)))
            target.memory.data[begin : begin + 8] = struct.pack("<Q", word)
        try:
            why = target.load()
        except AiflameError as error:
            why = str(error)
        assert why
