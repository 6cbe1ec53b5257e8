# SPDX-License-Identifier: Apache-2.0
"""What a dump makes of what it read: states, waits, joined frames, text and JSON."""

from __future__ import annotations

import json

import pytest
from aiflame.agent.dumps.model import Doubt, Dump, DumpFrame, ProcessDump, ThreadDump, ThreadState
from aiflame.agent.dumps.render import Shown, as_json, duration_text, shown_frames, text
from aiflame.agent.dumps.waits import causes_of, state_of, waited_ns
from aiflame.agent.model.profile import FrameKind, GilState
from aiflame.agent.processes.threads import ThreadRegisters

_KERNEL = DumpFrame(FrameKind.KERNEL, "futex_wait_queue", "", 0, "[kernel]")
_LIBC = DumpFrame(FrameKind.NATIVE, "sem_wait", "", 0, "/lib/libc.so.6")
_GLUE = DumpFrame(FrameKind.NATIVE, "PyObject_Vectorcall", "", 0, "/usr/bin/python3.11", True)
_PYTHON = DumpFrame(FrameKind.PYTHON, "Class.method", "/app/main.py", 7, "")
_FRAMES = (_KERNEL, _LIBC, _GLUE, _PYTHON)


def _registers(state: int, is_on_cpu: int = 0, stopped_ns: int = 1000) -> ThreadRegisters:
    return ThreadRegisters(
        1, 2, 3, 4, 0x1000, 0x2000, 0, 0, 0x3000, stopped_ns, 41, 42, state, is_on_cpu, b"name"
    )


def _thread(
    frames: tuple[DumpFrame, ...] = _FRAMES,
    waited: int | None = 3_000_000_000,
    doubt: Doubt | None = None,
) -> ThreadDump:
    return ThreadDump(
        *(42, "worker", ThreadState.SLEEPING, "lock", "futex_wait_queue", waited),
        *(GilState.RELEASED, frames, "", "", doubt),
    )


def _dump(*threads: ThreadDump) -> Dump:
    process = ProcessDump(41, "python3", "python3 main.py", "3.11", (), threads)
    return Dump((process,), 200_000_000, 1_500_000, 2_500_000)


@pytest.mark.parametrize(
    ("bits", "is_on_cpu", "state"),
    [
        (0, 1, ThreadState.RUNNING),
        (0, 0, ThreadState.RUNNABLE),
        (0x200, 0, ThreadState.RUNNABLE),  # being woken up
        (1, 1, ThreadState.RUNNING),  # about to sleep
        (1, 0, ThreadState.SLEEPING),
        (0x2001, 0, ThreadState.SLEEPING),  # freezable
        (2, 0, ThreadState.UNINTERRUPTIBLE),
        (0x402, 0, ThreadState.UNINTERRUPTIBLE),
        (4, 0, ThreadState.STOPPED),
        (8, 0, ThreadState.TRACED),
        (0x8000, 0, ThreadState.FROZEN),
    ],
)
def test_states_are_those_of_the_kernel(bits: int, is_on_cpu: int, state: ThreadState) -> None:
    assert state_of(_registers(bits, is_on_cpu)) is state


def test_a_wait_is_as_long_as_both_clocks_say() -> None:
    # the scheduler's clock was 400 ns behind
    assert waited_ns(_registers(1), 5000, 400) == 3600
    assert waited_ns(_registers(1, stopped_ns=5000), 5000, 400) == 0  # the clocks' error


def test_no_wait_is_better_than_a_wrong_one() -> None:
    assert waited_ns(_registers(1), 5000, None) is None
    assert waited_ns(_registers(1, stopped_ns=0), 5000, 400) is None
    assert waited_ns(_registers(0), 5000, 400) is None
    assert waited_ns(_registers(0, 1), 5000, 400) is None
    assert waited_ns(_registers(1, stopped_ns=10**10), 5000, 400) is None


def test_causes_are_those_of_reports() -> None:
    sleeping = DumpFrame(FrameKind.KERNEL, "hrtimer_nanosleep", "", 0, "[kernel]")
    stacks = [[_KERNEL, _LIBC], [sleeping], [_PYTHON], []]
    released = [(stack, GilState.RELEASED) for stack in stacks]
    assert causes_of(released) == ["lock", "sleep", "", ""]
    assert causes_of([([_KERNEL, _LIBC], GilState.WAITING)]) == ["GIL"]


@pytest.mark.parametrize(
    ("shown", "frames"),
    [
        (Shown.PYTHON, [_PYTHON]),
        (Shown.MIXED, [_LIBC, _PYTHON]),
        (Shown.ALL, [_KERNEL, _LIBC, _GLUE, _PYTHON]),
    ],
)
def test_frames_shown_are_those_asked_for(shown: Shown, frames: list[DumpFrame]) -> None:
    assert shown_frames(_thread(), shown) == frames


def test_threads_without_python_or_user_half_are_not_left_empty() -> None:
    assert shown_frames(_thread((_KERNEL, _LIBC)), Shown.PYTHON) == [_LIBC]
    assert shown_frames(_thread((_KERNEL,)), Shown.MIXED) == [_KERNEL]


@pytest.mark.parametrize(
    ("ns", "words"),
    [
        (0, "0 ms"),
        (999_999_999, "999 ms"),
        (3_000_000_000, "3.0 s"),
        (61 * 10**9, "1 min 1 s"),
        (7322 * 10**9, "2 h 2 min"),
    ],
)
def test_durations_are_readable(ns: int, words: str) -> None:
    assert duration_text(ns) == words


def test_text_has_a_block_for_each_thread() -> None:
    moving = _thread((_PYTHON,), None, Doubt.MOVED)
    lines = text(_dump(_thread(), moving), Shown.MIXED).splitlines()
    heading = 'Thread 42 "worker": sleeping (lock in futex_wait_queue)'
    assert lines == [
        "python3 (pid 41, Python 3.11): python3 main.py",
        "",
        f"{heading} for 3.0 s, GIL released",
        "    sem_wait (libc.so.6)",
        "    Class.method (main.py:7)",
        "",
        f"{heading}, GIL released",
        f"    [{Doubt.MOVED.value}]",
        "    Class.method (main.py:7)",
        "",
        "2 threads read in 1.5 ms, named in 1.0 ms",
    ]


def test_json_has_every_frame_and_null_for_the_unknown() -> None:
    found = json.loads(as_json(_dump(_thread(waited=None))))
    assert (found["schema"], found["version"]) == ("aiflame-dump", 1)
    (thread,) = found["processes"][0]["threads"]
    assert (thread["state"], thread["gil"], thread["waited_ns"]) == ("sleeping", "released", None)
    assert [frame["kind"] for frame in thread["frames"]] == ["kernel", "native", "native", "python"]
    assert [frame["glue"] for frame in thread["frames"]] == [False, False, True, False]
    assert thread["frames"][-1] == {
        "kind": "python",
        "name": "Class.method",
        "file": "/app/main.py",
        "line": 7,
        "module": None,
        "glue": False,
    }
