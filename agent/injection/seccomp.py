# SPDX-License-Identifier: Apache-2.0
"""What seccomp filters of a thread would say to system calls of an injection, and of its library.

A filter may answer a call that it does not like with the end of the process, so they are asked
before: they are programs of classic BPF without side effects (Documentation/userspace-api/
seccomp_filter.rst), and the strictest answer of all of them holds.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Collection, Sequence

_INSTRUCTION = struct.Struct("<HBBI")  # struct sock_filter: code, jt, jf, k
# struct seccomp_data: number, architecture, instruction pointer, six arguments.
_DATA = struct.Struct("<iIQ6Q")
_AUDIT_ARCH_X86_64 = 0xC000003E
_SCRATCH_WORDS = 16  # BPF_MEMWORDS
_U32 = 0xFFFF_FFFF

# linux/seccomp.h: of actions, the upper half; the lower half is data.
_ACTION, _ALLOW, _LOG, _ERRNO = 0xFFFF_0000, 0x7FFF_0000, 0x7FFC_0000, 0x0005_0000

# linux/bpf_common.h: class, size or source, mode or operation
_CLASS, _MODE, _OPERATION, _X = 0x07, 0xE0, 0xF0, 0x08
_LD, _LDX, _ST, _STX, _ALU, _JMP, _RET, _MISC = range(8)
_IMM, _ABS, _MEM, _LEN = 0x00, 0x20, 0x60, 0x80
_TXA = 0x80


class Verdict(enum.Enum):
    """What becomes of a call."""

    ALLOWED = "allowed"
    REFUSED = "refused"  # it returns an error
    FATAL = "fatal"  # the process ends, gets a signal, or waits for somebody


class BadFilter(ValueError):
    """No program that the kernel takes."""


class Call(enum.Enum):
    """System calls that filters are asked about; numbers of asm/unistd_64.h."""

    READ = 0
    WRITE = 1
    CLOSE = 3
    MMAP = 9
    MPROTECT = 10
    MUNMAP = 11
    BRK = 12
    RT_SIGACTION = 13
    RT_SIGPROCMASK = 14
    RT_SIGRETURN = 15
    PREAD64 = 17
    MADVISE = 28
    NANOSLEEP = 35
    GETPID = 39
    CLONE = 56
    EXIT = 60
    FCNTL = 72
    FTRUNCATE = 77
    FCHMOD = 91
    PRCTL = 157
    GETTID = 186
    FUTEX = 202
    RESTART_SYSCALL = 219
    CLOCK_NANOSLEEP = 230
    EPOLL_WAIT = 232
    EPOLL_CTL = 233
    OPENAT = 257
    NEWFSTATAT = 262
    SET_ROBUST_LIST = 273
    FALLOCATE = 285
    EVENTFD2 = 290
    EPOLL_CREATE1 = 291
    PIPE2 = 293
    PRLIMIT64 = 302
    GETRANDOM = 318
    MEMFD_CREATE = 319
    RSEQ = 334
    CLONE3 = 435


# What an injection calls. Pthread_create and dlopen decide what they call: glibc 2.31 to 2.41 need
# no others that a filter could refuse, and go on without those that `MAY_BE_REFUSED` has.
INJECTION = (
    *(Call.READ, Call.CLOSE, Call.MMAP, Call.MPROTECT, Call.MUNMAP, Call.BRK, Call.RT_SIGACTION),
    *(Call.RT_SIGPROCMASK, Call.RT_SIGRETURN, Call.PREAD64, Call.MADVISE, Call.NANOSLEEP),
    *(Call.CLONE, Call.EXIT, Call.GETTID, Call.FUTEX, Call.OPENAT, Call.NEWFSTATAT),
    *(Call.SET_ROBUST_LIST, Call.GETRANDOM, Call.MEMFD_CREATE, Call.RSEQ, Call.CLONE3),
)
# Without a memory file there are other ways, without brk mmap, without random bytes the clock;
# clone3 falls back to clone where it returns ENOSYS.
MAY_BE_REFUSED = {
    *(Call.MEMFD_CREATE, Call.CLONE3, Call.RSEQ, Call.SET_ROBUST_LIST, Call.MADVISE),
    *(Call.PREAD64, Call.GETTID, Call.BRK, Call.GETRANDOM),
}
# Of those that a library calls: without fchmod, a recorder without rights to files of others leaves
# a helper alone.
_LIBRARY_MAY_MISS = {Call.FCHMOD}


def why_not(filters: Sequence[bytes], library: Collection[Call]) -> str:
    """Returns the name of a call that filters do not let through, "" where all may be made.

    Args:
        filters: Of the thread.
        library: What the library calls. It needs all of that but `_LIBRARY_MAY_MISS`.
    """
    needed = {*INJECTION} - MAY_BE_REFUSED | {*library} - _LIBRARY_MAY_MISS
    for call in {*INJECTION, *library}:
        try:
            said = verdict(filters, call)
        except BadFilter:
            said = Verdict.FATAL
        if said is Verdict.FATAL or (said is Verdict.REFUSED and call in needed):
            return call.name.lower()
    return ""


def lets_waits_continue(filters: Sequence[bytes]) -> bool:
    """Whether a wait that was interrupted may go on by restart_syscall(2)."""
    try:
        return verdict(filters, Call.RESTART_SYSCALL) is Verdict.ALLOWED
    except BadFilter:
        return False


def verdict(filters: Sequence[bytes], call: Call) -> Verdict:
    """Returns what filters make of a call, whatever its arguments.

    Of the arguments only those are known that are the same each time: a filter that looks at them
    is asked with zeros, as with which most mean the least.

    Raises:
        BadFilter: One of them is no program that the kernel takes.
    """
    worst = Verdict.ALLOWED
    for arguments in _ARGUMENTS.get(call, (_NOUGHTS,)):
        data = _DATA.pack(call.value, _AUDIT_ARCH_X86_64, 0, *arguments)
        for code in filters:
            action = run(code, data) & _ACTION
            if action == _ERRNO:
                worst = Verdict.REFUSED if worst is Verdict.ALLOWED else worst
            elif action not in (_ALLOW, _LOG):
                worst = Verdict.FATAL
    return worst


# clone(2) as pthread_create calls it (sysdeps/unix/sysv/linux/createthread.c of glibc 2.31):
# CLONE_VM, FS, FILES, SYSVSEM, SIGHAND, THREAD, SETTLS, PARENT_SETTID, CHILD_CLEARTID. Filters of
# containers look for CLONE_NEW* there. mmap(2) of code: PROT_READ and PROT_EXEC, MAP_PRIVATE and
# MAP_DENYWRITE, and of memory that is shared: PROT_READ and PROT_WRITE, MAP_SHARED; mprotect(2) of
# what is read only from then on; fstat(3): AT_EMPTY_PATH. Of libraries: fcntl(2) with F_ADD_SEALS
# (linux/fcntl.h), prctl(2) with PR_SET_NAME (linux/prctl.h).
_NOUGHTS = (0,) * 6
_ARGUMENTS = {
    Call.CLONE: ((0x3D0F00, 0, 0, 0, 0, 0),),
    Call.MMAP: ((0, 4096, 5, 0x802, 0, 0), (0, 4096, 3, 1, 0, 0)),
    Call.MPROTECT: ((0, 4096, 1, 0, 0, 0),),
    Call.NEWFSTATAT: ((0, 0, 0, 0x1000, 0, 0),),
    Call.FCNTL: ((0, 1033, 0, 0, 0, 0),),
    Call.PRCTL: ((15, 0, 0, 0, 0, 0),),
}


def run(code: bytes, data: bytes) -> int:
    """Runs a filter on a struct seccomp_data; returns its action and data.

    Raises:
        BadFilter: It is no program that the kernel takes.
    """
    program = list(_INSTRUCTION.iter_unpack(code))
    a = x = at = 0
    scratch = [0] * _SCRATCH_WORDS
    try:
        while True:  # jumps lead forward only
            op, if_so, if_not, k = program[at]
            at += 1
            kind = op & _CLASS
            if kind == _RET:
                return int(a if op & 0x18 == 0x10 else k)
            if kind in (_LD, _LDX):
                value = _load(op & _MODE, k, data, scratch)
                a, x = (value, x) if kind == _LD else (a, value)
            elif kind == _ST:
                scratch[k] = a
            elif kind == _STX:
                scratch[k] = x
            elif kind == _ALU:
                a = _compute(op & _OPERATION, a, x if op & _X else k)
            elif kind == _JMP:
                at += _jump(op & _OPERATION, a, x if op & _X else k, if_so, if_not, k)
            elif op & 0xF8 == _TXA:
                a = x
            else:
                x = a
    except (IndexError, KeyError, ZeroDivisionError, struct.error) as error:
        raise BadFilter(str(error)) from error


def _load(mode: int, k: int, data: bytes, scratch: Sequence[int]) -> int:
    if mode == _IMM:
        return k
    if mode == _MEM:
        return scratch[k]
    if mode == _LEN:
        return len(data)
    if mode == _ABS:
        return int(struct.unpack_from("<I", data, k)[0])
    raise BadFilter(f"mode {mode:#x}")


def _compute(operation: int, a: int, b: int) -> int:
    results = {
        0x00: lambda: a + b,
        0x10: lambda: a - b,
        0x20: lambda: a * b,
        0x30: lambda: a // b,
        0x40: lambda: a | b,
        0x50: lambda: a & b,
        0x60: lambda: a << (b & 31),
        0x70: lambda: a >> (b & 31),
        0x80: lambda: -a,
        0xA0: lambda: a ^ b,
    }
    return int(results[operation]()) & _U32


def _jump(operation: int, a: int, b: int, if_so: int, if_not: int, k: int) -> int:
    if operation == 0x00:
        return k
    holds = {0x10: a == b, 0x20: a > b, 0x30: a >= b, 0x40: bool(a & b)}[operation]
    return if_so if holds else if_not
