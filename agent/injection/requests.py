# SPDX-License-Identifier: Apache-2.0
"""What a thread that is lent is handed: registers to run code.S with, and a request on its stack.

All that it needs to be what it was again is in the request, in the form that rt_sigreturn(2) takes:
it does not depend on us.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import NamedTuple

from aiflame.agent.errors import AiflameError
from aiflame.agent.injection.tracer_worker import (
    ERESTART_RESTARTBLOCK,
    ERESTARTNOHAND,
    REGISTERS,
    SYS_RESTART_SYSCALL,
)

# x86-64 psABI 3.2.2: leaf functions use that much below RSP.
_RED_ZONE_BYTES = 128
# For pthread_create, and for the dynamic loader, which saves vector registers when it resolves a
# call; a signal that comes before all are blocked takes as much again.
_CALLS_BYTES = 24 << 10

# linux/errno.h: what a system call that was interrupted returns inside the kernel, ERESTARTSYS,
# ERESTARTNOINTR, ERESTARTNOHAND and ERESTART_RESTARTBLOCK. The kernel goes on with a call of the
# last kind, such as nanosleep(2), by another, for which it has kept how long is left.
_RESTARTED = {-512, -513, -ERESTARTNOHAND, -ERESTART_RESTARTBLOCK}
# mov $NUMBER, %eax; syscall
_CALL = struct.Struct("<BI2s")
_MOV_EAX, _SYSCALL = 0xB8, b"\x0f\x05"
CALL_BYTES = _CALL.size
_NO_SYSCALL = (1 << 64) - 1
_SYSCALL_BYTES = 2  # 0f 05
_SYS_RT_SIGPROCMASK = 14  # asm/unistd_64.h
_SIG_SETMASK, _SIGSET_BYTES = 2, 8
# asm/signal.h, signal(7). Not those that an instruction raises, which end the process where they
# are blocked: SIGILL, SIGTRAP, SIGBUS, SIGFPE, SIGSEGV, SIGSYS. A program may handle them, as one
# that protects its memory to see what is written.
SYNCHRONOUS = (4, 5, 7, 8, 11, 31)
# What glibc does in all threads at once, and waits for: to cancel them, and setuid(2) and the like
# (nptl's SIGCANCEL, SIGSETXID). The new thread and those that it makes have to let them through.
_OF_GLIBC = (32, 33)

# code.S
_TASK_AT, _CONTEXT_AT, _XSTATE_AT = 64, 576, 896
_ENTRY_AT, _NAME_AT, PATH_AT = 128, 256, 512
TASK_BYTES = 4096  # a page
MAX_PATH_BYTES = TASK_BYTES - PATH_AT
_MAX_ENTRY_BYTES, _MAX_NAME_BYTES = _NAME_AT - _ENTRY_AT, _CONTEXT_AT - _TASK_AT - _NAME_AT
_REQUEST = struct.Struct("<IiQQQQQ")
# state, result, thread, pthread_create, task, signals, __errno_location
_SIGNALS_AT = 32
_TASK = struct.Struct("<IIiiQQiiiiQQQQQQQQ")
# done, go, file, 0, handle, error, answer, 0, tid, 0, then functions, flags, a pause of 1 ms, and
# signals that are not blocked
_PAUSE_S, _PAUSE_NS = 0, 1_000_000
_TASK_STATE = struct.Struct("<I4xi4xQQi")
TASK_STATE_BYTES = _TASK_STATE.size
GO_AT, ERROR_AT = 4, 24


def _signals(numbers: Iterable[int]) -> int:
    return sum(1 << (number - 1) for number in numbers)


_BLOCKED = _signals({*range(1, 65)} - {*SYNCHRONOUS})
_UNBLOCKED = _signals(_OF_GLIBC)

_RTLD_NOW = 2  # bits/dlfcn.h; RTLD_LOCAL is 0
# What glibc before 2.34 wants to hear from who calls its __libc_dlopen_mode (include/dlfcn.h).
_RTLD_DLOPEN = 0x80000000

# asm/sigcontext.h: struct ucontext up to the mask; what the kernel writes about itself into the
# unused bytes of the FXSAVE area.
_CONTEXT = struct.Struct("<QQQiIQ 18Q HHHH QQQQ Q 64x Q")
_UC_FP_XSTATE, _UC_SIGCONTEXT_SS, _UC_STRICT_RESTORE_SS = 1, 2, 4
# No mode of sigaltstack(2): with it the thread keeps the one that it has (restore_altstack).
_KEEP_STACK = 4
_FX_SW_AT, _FX_SW = 464, struct.Struct("<IIQI28x")
_FP_XSTATE_MAGIC1, _FP_XSTATE_MAGIC2 = 0x46505853, struct.pack("<I", 0x46505845)
_XFEATURES_AT = 512
# Intel SDM 13.5.14: the tiles of AMX come last, and only a thread that asked for them has room.
_XFEATURE_TILES, _TILES_BYTES, _BEFORE_TILES_BYTES = 18, 8192, 2816
_XSTATE_ALIGNMENT = 64
_STACK_ALIGNMENT = 64

_FLAGS_CLEAR = 0x202  # interrupts on; direction forward, as calls want it (psABI 3.2.1)
# Of what a target says: MAX_ERRNO of linux/err.h, as the kernel returns it and as pthread_create;
# where memory ends that nobody gets unasked (Documentation/arch/x86/x86_64/5level-paging.rst).
_FIRST_ERROR, _LAST_ERROR = -4095, 4095
_USER_END = 1 << 47
_U64 = (1 << 64) - 1


class Overwritten(AiflameError):
    """A target has written over what it was handed."""


class Registers(NamedTuple):
    """struct user_regs_struct of sys/user.h."""

    r15: int
    r14: int
    r13: int
    r12: int
    rbp: int
    rbx: int
    r11: int
    r10: int
    r9: int
    r8: int
    rax: int
    rcx: int
    rdx: int
    rsi: int
    rdi: int
    orig_rax: int
    rip: int
    cs: int
    eflags: int
    rsp: int
    ss: int
    fs_base: int
    gs_base: int
    ds: int
    es: int
    fs: int
    gs: int

    @classmethod
    def unpack(cls, data: bytes) -> Registers:
        """Reads them."""
        return cls(*REGISTERS.unpack(data))

    def pack(self) -> bytes:
        """Writes them."""
        return REGISTERS.pack(*self)

    @property
    def result(self) -> int:
        """What the system call returned that it was in, a negative error number for a failure."""
        return self.rax - (1 << 64) if self.rax >> 63 else self.rax

    @property
    def is_in_call(self) -> bool:
        """Whether it is on its way out of a system call."""
        return self.orig_rax != _NO_SYSCALL


class Functions(NamedTuple):
    """Addresses in the target, 0 for one that it has not."""

    pthread_create: int
    pthread_detach: int
    dlopen: int
    dlsym: int
    dlerror: int
    errno_location: int
    is_internal: bool  # dlopen is glibc's own __libc_dlopen_mode


class TaskState(NamedTuple):
    """What the new thread says.

    Attributes:
        done: Its steps: 1 when it is ready, one more for each time that it was told to load.
        file: Descriptor of its memory file, or a negative error number.
        handle: What dlopen returned.
        error: Where its complaint is, 0 for none.
        answer: What the library's function returned.
    """

    done: int
    file: int
    handle: int
    error: int
    answer: int


class Loan(NamedTuple):
    """What a thread is handed.

    Attributes:
        registers: To run the code with.
        request_at: Where the request is to be.
        request: Its bytes.
        lowest: All of the stack from here on is used.
    """

    registers: Registers
    request_at: int
    request: bytes
    lowest: int


def is_continued(registers: Registers) -> bool:
    """Whether a thread is in restart_syscall(2), which was interrupted as what it goes on with."""
    is_again = registers.orig_rax == SYS_RESTART_SYSCALL
    return is_again and registers.result == -ERESTART_RESTARTBLOCK


def begun_call(registers: Registers, before: Registers | None, code: bytes) -> Registers | None:
    """Returns registers as a thread had them when the system call was first interrupted it is in.

    A thread cannot begin anew what the kernel goes on with by restart_syscall(2): that ends with
    EINTR once rt_sigreturn(2) was called (kernel/signal.c, do_no_restart_syscall).

    Args:
        registers: Now.
        before: Those with which it was stopped before, None for never.
        code: The `CALL_BYTES` before its instruction pointer.

    Returns:
        None where nobody knows which call it was: another than us has interrupted it.
    """
    if not is_continued(registers):
        return registers
    if before is not None and before._replace(orig_rax=SYS_RESTART_SYSCALL) == registers:
        return before
    if len(code) < CALL_BYTES:
        return None
    mov, number, syscall = _CALL.unpack(code)
    is_known = (mov, syscall) == (_MOV_EAX, _SYSCALL)
    return registers._replace(orig_rax=number) if is_known else None


def resumed(registers: Registers) -> Registers:
    """Returns the registers that a thread gives itself: it begins a system call again.

    Then signals that came meanwhile do not end that, and one with a timeout may take longer, once:
    rt_sigreturn(2) makes the kernel forget how long was left.
    """
    if registers.is_in_call and registers.result in _RESTARTED:
        return registers._replace(rip=registers.rip - _SYSCALL_BYTES, rax=registers.orig_rax)
    return registers


def loan(
    registers: Registers,
    mask: bytes,
    xstate: bytes,
    code_at: int,
    functions: Functions,
    name: str,
    entry: str,
) -> Loan:
    """Makes what a thread is handed.

    Args:
        registers: The thread's own, of a call that can be begun anew (`begun_call`).
        mask: Signals that it blocks.
        xstate: Its other registers, as XSAVE writes them.
        code_at: Where code.S is.
        functions: What it calls.
        name: Of the memory file that it makes for the library.
        entry: Function of the library to be called, "" for none.

    Raises:
        ValueError: A name is too long.
    """
    image = _signal_xstate(xstate)
    size = _XSTATE_AT + len(image)
    request_at = (registers.rsp - _RED_ZONE_BYTES - size) // _STACK_ALIGNMENT * _STACK_ALIGNMENT
    calls = functions.pthread_create, 0, _BLOCKED, functions.errno_location
    head = _REQUEST.pack(0, 0, 0, *calls)
    context = _context(resumed(registers), mask, request_at + _XSTATE_AT)
    request = bytearray(size)
    request[: len(head)] = head
    task = _task(functions, name, entry)
    request[_TASK_AT : _TASK_AT + len(task)] = task
    request[_CONTEXT_AT : _CONTEXT_AT + len(context)] = context
    request[_XSTATE_AT:] = image
    return Loan(
        registers._replace(
            rax=_SYS_RT_SIGPROCMASK,
            rdi=_SIG_SETMASK,
            rsi=request_at + _SIGNALS_AT,
            rdx=0,
            r10=_SIGSET_BYTES,
            rbx=request_at,
            rbp=0,
            rsp=request_at,
            rip=code_at,
            eflags=_FLAGS_CLEAR,
            orig_rax=_NO_SYSCALL,
        ),
        request_at,
        bytes(request),
        request_at - _CALLS_BYTES,
    )


def result_of(head: bytes) -> tuple[int, int, int]:
    """Returns what the first words of a request say: whether it is done, its result, the task.

    Raises:
        Overwritten: That is nothing that code.S writes.
    """
    try:
        state, result, _, _, task, *_ = _REQUEST.unpack_from(head)
    except struct.error as error:
        raise Overwritten(f"its request is cut off: {error}") from error
    if not (_FIRST_ERROR <= result <= _LAST_ERROR or not state):
        raise Overwritten(f"its request has result {result}")
    if task % TASK_BYTES or task >= _USER_END:
        raise Overwritten(f"its request has a task at {task:#x}")
    return state, result, task


def task_state(data: bytes) -> TaskState:
    """Returns what the first words of a task say.

    Raises:
        Overwritten: That is nothing that code.S writes.
    """
    try:
        state = TaskState(*_TASK_STATE.unpack(data))
    except struct.error as error:
        raise Overwritten(f"its task is cut off: {error}") from error
    if state.file < _FIRST_ERROR or state.error >= _USER_END:
        raise Overwritten(f"its task has file {state.file} and an error at {state.error:#x}")
    return state


def _task(functions: Functions, name: str, entry: str) -> bytes:
    flags = _RTLD_NOW | (_RTLD_DLOPEN if functions.is_internal else 0)
    calls = (functions.pthread_detach, functions.dlopen, functions.dlsym, functions.dlerror)
    task = bytearray(_CONTEXT_AT - _TASK_AT)
    _TASK.pack_into(task, 0, *([0] * 10), *calls, flags, _PAUSE_S, _PAUSE_NS, _UNBLOCKED)
    for text, at, most in (
        (entry, _ENTRY_AT, _MAX_ENTRY_BYTES),
        (name, _NAME_AT, _MAX_NAME_BYTES),
    ):
        data = text.encode()
        if len(data) >= most or b"\0" in data:
            raise ValueError(f"no name: {text}")
        task[at : at + len(data)] = data
    return bytes(task)


def _context(registers: Registers, mask: bytes, xstate_at: int) -> bytes:
    """Returns a struct ucontext."""
    r = registers
    return _CONTEXT.pack(
        *(_UC_FP_XSTATE | _UC_SIGCONTEXT_SS | _UC_STRICT_RESTORE_SS, 0, 0, _KEEP_STACK, 0, 0),
        *(r.r8, r.r9, r.r10, r.r11, r.r12, r.r13, r.r14, r.r15, r.rdi, r.rsi, r.rbp, r.rbx),
        *(r.rdx, r.rax, r.rcx, r.rsp, r.rip, r.eflags),
        *(r.cs, 0, 0, r.ss),
        *(0, 0, 0, 0),
        xstate_at,
        int.from_bytes(mask, "little"),
    )


def _signal_xstate(xstate: bytes) -> bytes:
    """Returns XSAVE's area as a signal frame has it (asm/sigcontext.h)."""
    (features,) = struct.unpack_from("<Q", xstate, _XFEATURES_AT)
    size = len(xstate)
    has_tiles = features >> _XFEATURE_TILES & 1
    if not has_tiles and size >= _BEFORE_TILES_BYTES + _TILES_BYTES:
        size -= _TILES_BYTES
    # All that there is room for: what the area does not have is reset.
    every_feature = _U64 if has_tiles else _U64 & ~(1 << _XFEATURE_TILES)
    image = bytearray(xstate[:size])
    whole = size + len(_FP_XSTATE_MAGIC2)
    _FX_SW.pack_into(image, _FX_SW_AT, _FP_XSTATE_MAGIC1, whole, every_feature, size)
    image += _FP_XSTATE_MAGIC2
    image += bytes(-len(image) % _XSTATE_ALIGNMENT)
    return bytes(image)
