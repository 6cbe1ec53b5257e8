# SPDX-License-Identifier: Apache-2.0
"""Takes away from the calling process what it does not need to compute and to answer.

For children that handle what targets control: should a file take over its parser, the parser can
use the descriptors that it was handed, and nothing else. It becomes another user without
capabilities, and a seccomp filter refuses all system calls but a list: no file is opened, no
socket made, no program run, no process signalled or traced.

Whatever is imported, opened or started must be so before. Imports little: children start quickly.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Callable, Collection

# The user and group "nobody" of the overflow ids (Documentation/admin-guide/sysctl/kernel.rst).
NOBODY = 65534

# linux/capability.h
CAP_DAC_READ_SEARCH, CAP_KILL, CAP_SYS_PTRACE = 2, 5, 19
CAP_SYS_ADMIN, CAP_CHECKPOINT_RESTORE = 21, 40
_CAPABILITY_VERSION_3 = 0x20080522
_CAPABILITY_SETS = struct.Struct("<6I")

# linux/prctl.h
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_KEEPCAPS = 1, 4, 8
_PR_CAPBSET_READ, _PR_CAPBSET_DROP = 23, 24
_PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 38, 47, 4

# linux/seccomp.h; a filter on all threads of the process needs v3.17
_SECCOMP_SET_MODE_FILTER, _SECCOMP_FILTER_FLAG_TSYNC = 1, 1
_RET_KILL_PROCESS, _RET_ERRNO, _RET_ALLOW = 0x80000000, 0x00050000, 0x7FFF0000
_EPERM = 1
_SIGKILL = 9  # the module `signal` takes 5 ms to import
# struct seccomp_data: nr, arch, instruction_pointer, args; the low half of each first
_AT_NUMBER, _AT_ARCHITECTURE, _AT_ARGUMENTS = 0, 4, 16

# linux/bpf_common.h and filter.h: loads of a word at an offset, jumps on the accumulator, returns
_LOAD, _JUMP_IF_EQUAL, _JUMP_IF_AT_LEAST, _JUMP_IF_ANY, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_INSTRUCTION = struct.Struct("<HBBI")

_AUDIT_ARCH_X86_64 = 0xC000003E  # linux/audit.h
_X32_SYSCALLS = 0x40000000  # asm/unistd.h: the same calls under other numbers
_SYS_SECCOMP, _SYS_CAPGET, _SYS_CAPSET = 317, 125, 126

_PROT_EXEC = 4
_AT_EMPTY_PATH = 0x1000
_F_DUPFD_CLOEXEC = 1030
_WRITING = os.O_ACCMODE | os.O_CREAT | os.O_TRUNC

# asm/unistd_64.h. All that allocating, computing and answering take.
BASE_CALLS = {
    "read": 0,
    "write": 1,
    "close": 3,
    "mmap": 9,
    "mprotect": 10,
    "munmap": 11,
    "brk": 12,
    "rt_sigaction": 13,
    "rt_sigprocmask": 14,
    "rt_sigreturn": 15,
    "mremap": 25,
    "madvise": 28,
    "exit": 60,
    "futex": 202,
    "restart_syscall": 219,
    "clock_gettime": 228,
    "exit_group": 231,
}
# Reading files that are open, and messages that bring others.
FILE_CALLS = {
    "fstat": 5,
    "poll": 7,
    "lseek": 8,
    "pread64": 17,
    "setitimer": 38,
    "getpid": 39,
    "sendmsg": 46,
    "recvmsg": 47,
    "fcntl": 72,
    "ftruncate": 77,
    "getrusage": 98,
    "newfstatat": 262,
    "getrandom": 318,
    "memfd_create": 319,
}
MEMORY_CALLS = {"process_vm_readv": 310}
# Opening files for reading, asking what they are, and handing them over.
OPENING_CALLS = {
    "fstat": 5,
    "pread64": 17,
    "dup": 32,
    "sendmsg": 46,
    "recvmsg": 47,
    "fcntl": 72,
    "fstatfs": 138,
    "openat": 257,
    "newfstatat": 262,
    "openat2": 437,
}

# Of these calls, by number: which argument is looked at, how it is compared, with what, and whether
# the call is allowed if so, or if not. Nothing that was read is ever run; fstat(3) is newfstatat(2)
# in glibc, and mmap.mmap() makes a second descriptor.
_CONDITIONS = {
    BASE_CALLS["mmap"]: (2, _JUMP_IF_ANY, _PROT_EXEC, False),
    BASE_CALLS["mprotect"]: (2, _JUMP_IF_ANY, _PROT_EXEC, False),
    FILE_CALLS["newfstatat"]: (3, _JUMP_IF_ANY, _AT_EMPTY_PATH, True),
    FILE_CALLS["fcntl"]: (1, _JUMP_IF_EQUAL, _F_DUPFD_CLOEXEC, True),
    OPENING_CALLS["openat"]: (2, _JUMP_IF_ANY, _WRITING, False),
}

_libc = ctypes.CDLL(None, use_errno=True)


class _Program(ctypes.Structure):
    """`struct sock_fprog` of linux/filter.h."""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def enter(
    calls: Collection[int] | None,
    parent_pid: int,
    capabilities: Collection[int] = (),
    *,
    becomes_nobody: bool = True,
) -> list[str]:
    """Takes rights away from this process, for good; it must have one thread.

    Args:
        calls: Numbers of the system calls that it goes on making; None: all, for who becomes a
            program that is not ours.
        parent_pid: Of the process that it dies with.
        capabilities: Those that it keeps, where it has them.
        becomes_nobody: Whether it becomes another user, where it is root.

    Returns:
        What the kernel did not let it do, in words: all else is done.
    """
    failures: list[str] = []

    def attempt(what: str, step: Callable[[], None]) -> None:
        try:
            step()
        except OSError as error:
            failures.append(f"{what}: {error.strerror}")

    attempt("other threads", _expect_one_thread)
    if os.geteuid() == 0:
        attempt("bounding capabilities", _drop_bounding_set)
        if becomes_nobody:
            attempt("groups", lambda: os.setgroups([]))
            attempt("user", lambda: _become_nobody(bool(capabilities)))
    attempt("capabilities", lambda: _keep_only(capabilities))
    attempt("dumpable", lambda: _prctl(_PR_SET_DUMPABLE, 0))
    # After the change of user, which takes this setting back (commit_creds, kernel/cred.c).
    attempt("parent's death", lambda: _prctl(_PR_SET_PDEATHSIG, _SIGKILL))
    if os.getppid() != parent_pid:  # it was too late
        os._exit(1)
    attempt("no new privileges", lambda: _prctl(_PR_SET_NO_NEW_PRIVS, 1))
    if calls is None:
        return failures
    if os.uname().machine == "x86_64":
        attempt("seccomp", lambda: _install(filter_of(calls)))
    else:
        failures.append(f"seccomp: no filter for {os.uname().machine}")
    return failures


def _expect_one_thread() -> None:
    if len(os.listdir("/proc/self/task")) != 1:  # noqa: PTH208 - pathlib takes 10 ms to import
        raise OSError(_EPERM, "they keep their capabilities")


def _check(result: int) -> None:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def _prctl(option: int, *arguments: int) -> None:
    words = [*arguments, 0, 0, 0, 0][:4]
    _check(_libc.prctl(option, *map(ctypes.c_ulong, words)))


def _drop_bounding_set() -> None:
    _prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)
    capability = 0
    while _libc.prctl(_PR_CAPBSET_READ, ctypes.c_ulong(capability)) >= 0:
        _prctl(_PR_CAPBSET_DROP, capability)
        capability += 1


def _become_nobody(keeps_capabilities: bool) -> None:
    if not has(CAP_KILL):  # its parent has what it has, and ends it where it hangs
        raise OSError(_EPERM, "its parent could not end it, without CAP_KILL")
    _prctl(_PR_SET_KEEPCAPS, int(keeps_capabilities))
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)


def has(capability: int) -> bool:
    """Whether this process is permitted a capability."""
    return bool(_permitted() >> capability & 1)


def _permitted() -> int:
    data = ctypes.create_string_buffer(_CAPABILITY_SETS.size)
    _check(_libc.syscall(_SYS_CAPGET, struct.pack("<Ii", _CAPABILITY_VERSION_3, 0), data))
    # Effective, permitted and inheritable; the lower 32 capabilities, then the others.
    _, low, _, _, high, _ = _CAPABILITY_SETS.unpack(data.raw)
    return int(low | high << 32)


def _keep_only(capabilities: Collection[int]) -> None:
    """Gives up all capabilities but these, and those too that are not permitted."""
    bits = sum(1 << capability for capability in capabilities) & _permitted()
    low, high = bits & 0xFFFF_FFFF, bits >> 32
    header = struct.pack("<Ii", _CAPABILITY_VERSION_3, 0)
    _check(_libc.syscall(_SYS_CAPSET, header, _CAPABILITY_SETS.pack(low, low, 0, high, high, 0)))


def filter_of(calls: Collection[int]) -> bytes:
    """Returns a seccomp filter for x86-64 that refuses all other calls with EPERM."""
    refuse = _RET_ERRNO | _EPERM
    program = [
        (_LOAD, 0, 0, _AT_ARCHITECTURE),
        (_JUMP_IF_EQUAL, 1, 0, _AUDIT_ARCH_X86_64),
        (_RETURN, 0, 0, _RET_KILL_PROCESS),
        (_LOAD, 0, 0, _AT_NUMBER),
        (_JUMP_IF_AT_LEAST, 0, 1, _X32_SYSCALLS),
        (_RETURN, 0, 0, refuse),
    ]
    for number in calls:
        if number not in _CONDITIONS:
            program += [(_JUMP_IF_EQUAL, 0, 1, number), (_RETURN, 0, 0, _RET_ALLOW)]
            continue
        argument, comparison, value, is_allowed = _CONDITIONS[number]
        if_so, if_not = (_RET_ALLOW, refuse) if is_allowed else (refuse, _RET_ALLOW)
        program += [
            (_JUMP_IF_EQUAL, 0, 4, number),
            (_LOAD, 0, 0, _AT_ARGUMENTS + 8 * argument),
            (comparison, 0, 1, value),
            (_RETURN, 0, 0, if_so),
            (_RETURN, 0, 0, if_not),
        ]
    program.append((_RETURN, 0, 0, refuse))
    return b"".join(_INSTRUCTION.pack(*instruction) for instruction in program)


def _install(instructions: bytes) -> None:
    program = _Program(len(instructions) // _INSTRUCTION.size, instructions)
    # Not prctl(2): this one is for all threads.
    result = _libc.syscall(
        _SYS_SECCOMP,
        _SECCOMP_SET_MODE_FILTER,
        _SECCOMP_FILTER_FLAG_TSYNC,
        ctypes.byref(program),
    )
    if result > 0:
        raise OSError(_EPERM, "a thread cannot be filtered")
    _check(result)
