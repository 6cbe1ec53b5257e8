# SPDX-License-Identifier: Apache-2.0
"""Stacks read from real interpreters against what the programs say about themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import support
from aiflame.agent.python.codes import CodeReader
from aiflame.agent.python.gil import holds_gil
from aiflame.agent.python.memory import read_u64
from aiflame.agent.python.threads import list_threads
from aiflame.agent.python.walk import WalkEnd, walk

Start = Callable[..., Any]


def _stack(target: Any, codes: CodeReader, thread: Any) -> list[list[Any]]:
    """The walk of a thread in the form of the truth."""
    walked = walk(target.memory, target.interpreter.layout, thread.address)
    assert walked.end is WalkEnd.COMPLETE
    found = []
    for frame in walked.frames:
        code = codes.read(frame.code_address)
        assert code is not None
        line = codes.line(code, frame.position)
        found.append([code.filename, code.name, code.qualname, line])
    return found


def _threads(target: Any) -> dict[int, Any]:
    listed = list_threads(
        target.memory, target.interpreter.layout, target.interpreter.runtime_address
    )
    assert listed.complete
    return {thread.tid: thread for thread in listed.threads}


def test_waiting_threads_have_their_own_stacks(start: Start) -> None:
    # GIVEN threads that sleep with the GIL released, at the end of known stacks
    target = start()
    codes = CodeReader(target.memory, target.interpreter.layout)
    threads = _threads(target)
    for who, said in target.truth.items():
        # WHEN each is walked from outside, THEN it has every frame and line, and its waiting
        # C function's Python callers on top of what it recorded
        found = _stack(target, codes, threads[said["tid"]])
        assert found[-len(said["frames"]) :] == said["frames"], who
        above = [name for _, name, _, _ in found[: -len(said["frames"])]]
        assert all(name in ("wait", "__enter__", "decode") for name in above), above
    assert codes.drops == {}


def test_runs_end_where_c_code_calls_python(start: Start) -> None:
    target = start()
    layout = target.interpreter.layout
    codes = CodeReader(target.memory, layout)
    thread = _threads(target)[target.truth["sleeper"]["tid"]]
    walked = walk(target.memory, layout, thread.address)
    ends = []
    for frame in walked.frames:
        code = codes.read(frame.code_address)
        assert code is not None
        if frame.ends_run:
            ends.append(code.name)
    if layout.version < (3, 11):
        assert len(ends) == len(walked.frames)
    else:
        # From C are called: a thread's first function, what sorted() is given, and a generator
        # by a loop that has not specialized for it. All other calls stay in the eval loop.
        assert ends[-1] == "_bootstrap"
        assert {"<lambda>", "generator"} <= set(ends)
        assert "method" not in ends


def test_a_slot_of_each_thread_holds_its_state_while_the_gil_is_released(start: Start) -> None:
    target = start()
    assert target.slot is not None
    for who in ("main", "sleeper", "coroutine"):
        thread = _threads(target)[target.truth[who]["tid"]]
        # pthread_self() is the fs base, with glibc on x86-64.
        held = read_u64(target.memory, thread.pthread + target.slot)
        assert held == thread.address


def test_a_busy_thread_holds_the_gil_and_sleepers_do_not(start: Start) -> None:
    target = start("--busy")
    threads = _threads(target)
    runtime, layout = target.interpreter.runtime_address, target.interpreter.layout

    def holds(who: str) -> bool:
        thread = threads[target.truth[who]["tid"]]
        return holds_gil(target.memory, layout, runtime, thread) is True

    if layout.free_threaded:
        busy = threads[target.truth["busy"]["tid"]]
        assert holds_gil(target.memory, layout, runtime, busy) is None
        return
    support.wait_until(lambda: holds("busy"))
    assert not holds("sleeper")
    assert not holds("main")


def test_nobody_holds_the_gil_when_all_wait(start: Start) -> None:
    target = start()
    runtime, layout = target.interpreter.runtime_address, target.interpreter.layout
    expected = None if layout.free_threaded else False
    for thread in _threads(target).values():
        assert holds_gil(target.memory, layout, runtime, thread) is expected


def test_code_objects_are_read_once(start: Start) -> None:
    target = start()
    codes = CodeReader(target.memory, target.interpreter.layout)
    thread = _threads(target)[target.truth["sleeper"]["tid"]]
    first = _stack(target, codes, thread)
    known = {id(codes.read(f.code_address)) for f in _frames(target, thread)}
    assert _stack(target, codes, thread) == first
    assert {id(codes.read(f.code_address)) for f in _frames(target, thread)} == known


def _frames(target: Any, thread: Any) -> Any:
    return walk(target.memory, target.interpreter.layout, thread.address).frames
