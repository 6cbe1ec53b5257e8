# SPDX-License-Identifier: Apache-2.0
"""All threads of some processes at one moment, as the kernel's task iterator tells them.

What a thread that sleeps does in user space is known from the registers with which it entered the
kernel, and nothing has to stop for them to be read. Whether it slept on between two readings is
known as well: one that ran has used time, so that its records differ.

bpf/threads.bpf.c writes the records. Nothing here walks (`thread_walk`).
"""

from __future__ import annotations

import errno
import os
from collections.abc import Collection
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from aiflame.agent.kernel import abi
from aiflame.agent.kernel.sysbpf import open_task_iterator

# Up to so many processes are asked for one by one; else all tasks of the host are read at once,
# at a microsecond each.
_MAX_NAMED_PIDS = 16

# The kernel hands out at most what its own buffer holds (kernel/bpf/bpf_iter.c: 8 pages).
_READ_BYTES = 1 << 15

# Bits of task_struct.__state (include/linux/sched.h, v5.10 to v6.18): interruptible,
# uninterruptible, stopped, traced, frozen. One that is being woken or that is dead has others.
_ASLEEP_STATES = 0x1 | 0x2 | 0x4 | 0x8 | 0x8000


class ThreadRegisters(NamedTuple):
    """One record; fields and order are those of struct thread_registers. Times in ns."""

    started_ns: int
    ran_ns: int
    voluntary_switches: int
    involuntary_switches: int
    instruction_pointer: int
    stack_pointer: int
    frame_pointer: int
    base_pointer: int
    thread_pointer: int
    stopped_ns: int
    pid: int
    tid: int
    state: int
    is_on_cpu: int
    comm: bytes

    @property
    def switches(self) -> int:
        """How often the thread was switched out so far, as /proc/PID/task/TID/status has it."""
        return self.voluntary_switches + self.involuntary_switches

    @property
    def is_asleep(self) -> bool:
        """Whether it waited for something, and was on no CPU."""
        return bool(self.state & _ASLEEP_STATES) and not self.is_on_cpu

    @property
    def has_user_half(self) -> bool:
        """Whether it is no kernel thread."""
        return self.instruction_pointer != 0


def thread_registers(
    program_fd: int, pids: Collection[int], tids: Collection[int] | None = None
) -> list[ThreadRegisters]:
    """Reads the threads of processes; of one that is gone there are none.

    Args:
        program_fd: The loaded iterator program, `Programs.thread_iterator_fd`.
        pids: The processes.
        tids: Only these of their threads; None for all.

    Raises:
        OSError: The kernel does not run the iterator.
    """
    records = _records_of(program_fd, pids)
    if tids is not None:
        records = records[np.isin(records["tid"], np.fromiter(tids, np.uint32))]
    return [ThreadRegisters(*record) for record in records.tolist()]


def swept_threads(program_fd: int) -> npt.NDArray[np.void]:
    """Reads the threads that have slept long and have no stack: SWEPT_THREAD_DTYPE.

    Args:
        program_fd: The loaded iterator program, `Programs.sweep_iterator_fd`.

    Raises:
        OSError: The kernel does not run the iterator.
    """
    return np.frombuffer(_read_tasks(program_fd, None), abi.SWEPT_THREAD_DTYPE)


def _records_of(program_fd: int, pids: Collection[int]) -> npt.NDArray[np.void]:
    wanted = np.fromiter(pids, np.uint32)
    if len(pids) <= _MAX_NAMED_PIDS:
        try:
            found = b"".join(_read_tasks(program_fd, pid) for pid in pids)
        except OSError as error:
            if error.errno != errno.E2BIG:
                raise
        else:
            records = np.frombuffer(found, abi.THREAD_REGISTERS_DTYPE)
            # v6.0 takes a process without a look at it, and shows all tasks each time.
            records = records[np.unique(records["tid"], return_index=True)[1]]
            return records[np.isin(records["tgid"], wanted)]
    records = np.frombuffer(_read_tasks(program_fd, None), abi.THREAD_REGISTERS_DTYPE)
    return records[np.isin(records["tgid"], wanted)]


def _read_tasks(program_fd: int, pid: int | None) -> bytes:
    fd = open_task_iterator(program_fd, pid)
    parts: list[bytes] = []
    try:
        while True:
            try:
                part = os.read(fd, _READ_BYTES)
            except BlockingIOError:
                continue  # a million tasks without a record: it goes on from there
            if not part:
                return b"".join(parts)
            parts.append(part)
    finally:
        os.close(fd)
