# SPDX-License-Identifier: Apache-2.0
"""Threads that were already there when the recording began.

A context switch shows a thread's stack when it goes to sleep. One that slept before the recording
and does not wake up in it would be missing, and with it most of the wall time of a server. So each
existing thread is entered in the kernel's thread table, and for those asleep the kernel frames are
read from /proc/PID/task/TID/stack (or one frame from wchan). Their user frames are not known: such
a stack ends in `[truncated: not walked]`.

A thread that moves while it is entered is taken out again: its switch count tells.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from aiflame.agent.model import SampleClass, StackEnd
from aiflame.agent.recording import abi, procfs
from aiflame.agent.recording.loader import Programs
from aiflame.agent.recording.processes import ProcessTable
from aiflame.agent.recording.sinks import StackSink
from aiflame.agent.recording.sysbpf import BPF_NOEXIST

# Ids of stacks that the host half makes, outside the kernel's hash in all likelihood: bits 63..32.
_MADE_STACK_BASE = 0x51EE_9E55 << 32

# `[<0>] hrtimer_nanosleep+0x74/0xf0 [module]` (fs/proc/base.c, proc_pid_stack, v6.1).
_STACK_LINE = re.compile(r"^\[<[0-9a-f]+>\] ([^\s+]+)\+0x([0-9a-f]+)/")

_ASLEEP, _RUNNING = "SDIT", "R"

# A kernel with many modules lists 250,000 symbols of some 60 bytes.
_MAX_KALLSYMS_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Sleeper:
    """What a thread slept in when the recording began: (kernel function, offset), leaf first."""

    pid: int
    kernel_frames: tuple[tuple[str, int], ...]


class Sleepers:
    """The threads entered at the start, by the id of their made-up stack.

    Args:
        kernel_stacks: Whether kernel frames are asked for.
    """

    def __init__(self, kernel_stacks: bool) -> None:
        self._kernel_stacks = kernel_stacks
        self.by_stack: dict[int, Sleeper] = {}

    def enter(self, programs: Programs, table: ProcessTable, pid: int) -> Iterator[None]:
        """Enters the threads of one process, one at each step.

        Args:
            programs: Loaded and running.
            table: Process table; knows when the recording began.
            pid: The process.
        """
        for tid in procfs.thread_ids(pid):
            yield
            before = procfs.thread_stat(pid, tid)
            if before is None or before.state not in _ASLEEP + _RUNNING:
                continue
            stack = _MADE_STACK_BASE + len(self.by_stack) + 1
            state = np.zeros(1, abi.THREAD_STATE_DTYPE)
            state["first_seen_ns"] = state["switched_ns"] = table.start_ns
            state["tgid"], state["image"], state["stack"] = pid, table.first_image, stack
            state["flags"] = abi.THREAD_SEEDED
            is_asleep = before.state in _ASLEEP
            state["off_class"] = SampleClass.BLOCKED if is_asleep else SampleClass.ON_CPU
            has_frames = is_asleep and self._kernel_stacks
            sleeper = Sleeper(pid, _kernel_frames(pid, tid) if has_frames else ())
            if not programs.threads.update(tid.to_bytes(4, "little"), state.tobytes(), BPF_NOEXIST):
                continue
            self.by_stack[stack] = sleeper
            if procfs.thread_stat(pid, tid) != before:
                _take_out(programs, tid)


def _take_out(programs: Programs, tid: int) -> None:
    key = tid.to_bytes(4, "little")
    state = programs.threads.lookup(key)
    if state is not None and int(state[0]["flags"]) & abi.THREAD_SEEDED:
        programs.threads.delete(key)


def _kernel_frames(pid: int, tid: int) -> tuple[tuple[str, int], ...]:
    found = []
    for line in procfs.read_text(f"/proc/{pid}/task/{tid}/stack").splitlines():
        match = _STACK_LINE.match(line)
        if match is not None:
            found.append((match[1], int(match[2], 16)))
    if found:
        return tuple(found)
    wait_channel = procfs.read_text(f"/proc/{pid}/task/{tid}/wchan").strip()
    return ((wait_channel, 0),) if wait_channel not in ("", "0") else ()


def kernel_addresses(names: set[str]) -> dict[str, int]:
    """Returns the addresses of kernel functions by name; the first of several of one name."""
    found: dict[str, int] = {}
    for line in procfs.read_text("/proc/kallsyms", _MAX_KALLSYMS_BYTES).splitlines():
        fields = line.split(None, 3)
        if len(fields) > 2 and fields[2] in names and fields[1] in "tTwW":
            found.setdefault(fields[2], int(fields[0], 16))
    return found


def store_sleepers(sleepers: Sleepers, stacks: StackSink, table: ProcessTable) -> None:
    """Stores the stacks of those sleepers that any sample or wait refers to."""
    wanted = {stack: s for stack, s in sleepers.by_stack.items() if stacks.mentions(stack)}
    frames = {name for sleeper in wanted.values() for name, _ in sleeper.kernel_frames}
    found = kernel_addresses(frames) if frames else {}
    for stack, sleeper in wanted.items():
        # The offset is that of a return address, or 0 where only a name was to be had.
        addresses = [found[n] + max(offset, 1) for n, offset in sleeper.kernel_frames if n in found]
        image = table.image(sleeper.pid, table.first_image)
        stacks.add_made(stack, image, addresses, StackEnd.NOT_WALKED)
