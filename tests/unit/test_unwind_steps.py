# SPDX-License-Identifier: Apache-2.0
"""Walks of a program's stack at each of its instructions, as a debugger steps through them."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from aiflame.agent.unwind.walk import Mapping, ReplayWalker, Walk, WalkEnd
from cfibytes import table_of_file

# Requests of ptrace(2), linux/ptrace.h and asm/ptrace-abi.h.
_TRACEME, _CONT, _SINGLESTEP, _GETREGS = 0, 7, 9, 12
# Of struct user_regs_struct (asm/user_64.h), 27 words.
_RBP, _RBX, _RIP, _RSP = 4, 5, 16, 19

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]


def _ptrace(request: int, pid: int, data: object = None) -> None:
    if _LIBC.ptrace(request, pid, None, data) < 0:
        raise OSError(ctypes.get_errno(), "ptrace")


class _Traced:
    """A program that is not linked to be moved, until its end.

    Args:
        program: The file.
        arguments: Its arguments.
    """

    def __init__(self, program: Path, *arguments: str) -> None:
        self._table = table_of_file(program)
        self._path = str(program)
        self._pid = os.fork()
        if not self._pid:
            _ptrace(_TRACEME, 0)
            os.execv(program, [program, *arguments])  # noqa: S606 - a workload
        os.waitpid(self._pid, 0)
        self._memory = os.open(f"/proc/{self._pid}/mem", os.O_RDONLY)

    def resume(self, request: int) -> bool:
        """Lets it go on; returns whether it has stopped once more."""
        _ptrace(request, self._pid)
        _, status = os.waitpid(self._pid, 0)
        return os.WIFSTOPPED(status) and os.WSTOPSIG(status) == signal.SIGTRAP

    def walk(self) -> Walk:
        """Walks the stack that it has now, as far as its own code goes."""
        words = (ctypes.c_uint64 * 27)()
        _ptrace(_GETREGS, self._pid, ctypes.byref(words))
        code = Mapping(*self._code(), 0, self._table)
        walker = ReplayWalker([code], self._read, read_code=self._read)
        return walker.walk(words[_RIP], words[_RSP], words[_RBP], words[_RBX])

    def _code(self) -> tuple[int, int]:
        lines = Path(f"/proc/{self._pid}/maps").read_text().splitlines()
        (area,) = (line.split()[0] for line in lines if " r-xp " in line and self._path in line)
        start, end = (int(edge, 16) for edge in area.split("-"))
        return start, end

    def _read(self, address: int) -> int | None:
        try:
            return int.from_bytes(os.pread(self._memory, 8, address), "little")
        except (OSError, OverflowError):
            return None

    def close(self) -> None:
        """Ends it."""
        os.close(self._memory)
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)


@pytest.fixture
def kernels(workload: Callable[..., Path]) -> Iterator[_Traced]:
    program = workload("kernels", "-fomit-frame-pointer", "-no-pie")
    traced = _Traced(program, "step")
    yield traced
    traced.close()


def _steps_of_a_kernel(traced: _Traced) -> tuple[list[int], list[Walk]]:
    """Returns a kernel's callers, without the innermost, and the walk at each instruction."""
    assert traced.resume(_CONT)
    caller, *outer = (frame.address for frame in traced.walk().frames)
    walks: list[Walk] = []
    while traced.resume(_SINGLESTEP):
        walk = traced.walk()
        leaf = walk.frames[0].address
        if caller <= leaf < caller + _CALLER_BYTES:
            if walks:
                break
        else:
            walks.append(walk)
    return outer, walks


# From its breakpoint on; kernels are farther.
_CALLER_BYTES = 64


def test_kernels_that_align_their_stack_are_walked_at_each_instruction(
    kernels: _Traced,
) -> None:
    for _ in ("aligned_kernel", "slot_kernel"):
        outer, walks = _steps_of_a_kernel(kernels)
        assert len(walks) > 80 and len(outer) == 2  # with_array, main
        for walk in walks:
            assert [frame.address for frame in walk.frames][2:] == outer
    # WHEN RBX is something else for a while, THEN no frame is a wrong one
    outer, walks = _steps_of_a_kernel(kernels)
    for walk in walks:
        frames = [frame.address for frame in walk.frames]
        assert frames[2:] == outer or (len(frames) == 1 and walk.end is not WalkEnd.ROOTED)
    borrowed = sum(len(walk.frames) == 1 for walk in walks)
    assert 50 < borrowed < len(walks) / 2
