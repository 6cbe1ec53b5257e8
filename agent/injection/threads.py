# SPDX-License-Identifier: Apache-2.0
"""Which threads of a process may be lent: those that have no lock that pthread_create takes.

That is seen from their stacks. A stack that does not lead to its end may have anything in it, and
is refused as well; other threads are there, or the same one is elsewhere a moment later.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from aiflame.agent import kernelfs
from aiflame.agent.injection.fitness import Fitness
from aiflame.agent.injection.questions import LibraryFacts, Role
from aiflame.agent.injection.requests import Registers
from aiflame.agent.injection.tracer_worker import WAITS
from aiflame.agent.model.profile import StopReason
from aiflame.agent.processes import procfs
from aiflame.agent.processes.elf_images import ElfImages
from aiflame.agent.processes.table import NO_BINARY, ProcessImage
from aiflame.agent.processes.thread_walk import WalkedThread

# Calls of glibc with which it makes and ends threads and gets memory, asm/unistd_64.h: mmap,
# mprotect, munmap, brk, mremap, madvise, clone, fork, vfork, exit, clone3.
_BUSY_CALLS = {9, 10, 11, 12, 25, 28, 56, 57, 58, 60, 435}
_COMPLETE = {StopReason.ROOTED, StopReason.ROOTED_BY_TABLE, StopReason.ROOTED_BY_HEURISTIC}
# What an allocator does not wait in, asm/unistd_64.h: read, poll, recvfrom, recvmsg, accept,
# wait4, nanosleep, select, epoll_wait, clock_nanosleep, pselect6, ppoll, epoll_pwait, accept4.
_QUIET_CALLS = {0, 7, 45, 47, 43, 61, 35, 23, 232, 230, 270, 271, 281, 288}

# Waits that go on as if they had not been stopped, asm/unistd_64.h: poll, select, pause, nanosleep,
# wait4, rt_sigsuspend, futex, restart_syscall (one of these), clock_nanosleep, waitid, pselect6,
# ppoll, futex_waitv; -1 is none, in a page fault.
_CONTINUED = {7, 23, 34, 35, 61, 130, 202, 219, 230, 247, 270, 271, 449, -1}
# Calls of `WAITS` in which no thread is stopped, since a part may have been written by then: write,
# writev, connect, sendto, sendmsg, sendmmsg, fallocate.
_WITH_AN_EFFECT = {1, 20, 42, 44, 46, 307, 285}
# Which of the others return with a part of what they wait for, by one of their arguments: flags of
# linux/socket.h (MSG_WAITALL; without MSG_WAITFORONE), how many events, how many requests as well.
_WAITALL, _WAITFORONE = 0x100, 0x10000
_RETURNS_A_PART: Mapping[int, tuple[int, Callable[[int], bool]]] = {
    45: (3, lambda flags: bool(flags & _WAITALL)),
    47: (2, lambda flags: bool(flags & _WAITALL)),
    299: (3, lambda flags: bool(flags & _WAITALL) or not flags & _WAITFORONE),
    208: (1, lambda least: least > 1),
    333: (1, lambda least: least > 1),
    426: (1, lambda requests: requests > 0),
}


def why_not(
    image: ProcessImage,
    fitness: Fitness,
    images: ElfImages,
    registers: Registers,
    walked: WalkedThread,
) -> str:
    """Returns why a thread cannot be lent now, "" where it can.

    Args:
        image: Its process, with its mappings.
        fitness: What is mapped there.
        images: Headers of that.
        registers: The thread's.
        walked: Its stack.
    """
    if walked.crosses_signal:
        return "in a signal handler"
    leaf, *callers = walked.addresses
    addresses = np.array([leaf, *(caller - 1 for caller in callers)], np.uint64)
    found = image.find(addresses).tolist()
    is_leaf = is_all_libc = True
    for address, index in zip(addresses.tolist(), found, strict=True):
        mapping = image.mappings[index] if index >= 0 else None
        if mapping is None or mapping.binary == NO_BINARY:
            is_leaf = is_all_libc = False
            continue
        facts = fitness.libraries.get(mapping.binary)
        if facts is None:
            return "inside a library that was just loaded"
        is_all_libc = is_all_libc and facts.is_libc
        is_program = mapping.binary == fitness.program
        if why := _why_unsafe(facts, address - images.bias(mapping), registers, is_program):
            return f"inside {why}"
        # It may have the list of threads locked, in a function that is not exported (pthread_join
        # frees stacks in such), unless it waits: for that lock, if it is for one of those.
        if is_leaf and facts.is_libc and not _waits(registers):
            return "at work in libc"
        is_leaf = False
    if walked.end not in _COMPLETE:
        return f"its stack cannot be followed to its end ({walked.end.label})"
    # One that begins or ends has the list of threads locked for a moment, in functions of libc
    # that are not exported, and none of the program's own is on its stack.
    return "inside libc alone: it begins, or ends" if is_all_libc else ""


def _waits(registers: Registers) -> bool:
    return registers.is_in_call and registers.orig_rax not in _BUSY_CALLS


def _why_unsafe(facts: LibraryFacts, address: int, registers: Registers, is_program: bool) -> str:
    if facts.role is Role.LOADER:
        return "the dynamic loader"
    if facts.role is not Role.ALLOCATOR:
        return facts.why_unsafe(address)
    if not is_program:
        return "malloc"
    # Which of its functions allocate is not known: it has to wait for something that none does.
    is_quiet = registers.is_in_call and registers.orig_rax in _QUIET_CALLS
    return "" if is_quiet else "a program with a malloc of its own"


def candidates(pid: int) -> Sequence[int]:
    """Returns the threads of a process that may be stopped, those first that notice the least.

    Signals to the process go to its first thread if that wants them, so others come before.
    """
    found = {tid: _urgency(pid, tid) for tid in procfs.thread_ids(pid)}
    stoppable = {tid: how for tid, how in found.items() if how is not None}
    return sorted(stoppable, key=lambda tid: (stoppable[tid], tid == pid))


def may_be_stopped(pid: int, tid: int) -> bool:
    """Whether a thread is in no system call, as far as can be seen, on which a stop has an effect.

    A file server is told to interrupt an open(2), and a long write(2) returns with a part.
    """
    return _urgency(pid, tid) is not None


def _urgency(pid: int, tid: int) -> int | None:
    """Returns which threads come first, None for one that is not to be stopped now."""
    words = kernelfs.read_text(f"/proc/{pid}/task/{tid}/syscall").split()
    call = words[0] if words else ""
    if not call.lstrip("-").isdigit():  # "running", or it is gone
        return 1
    number, arguments = int(call), words[1:7]
    if number in _CONTINUED:
        return 0
    if number not in WAITS - _WITH_AN_EFFECT:
        return None
    at, returns_a_part = _RETURNS_A_PART.get(number, (0, lambda _: False))
    return None if returns_a_part(int(arguments[at], 16)) else 2
