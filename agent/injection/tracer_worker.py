# SPDX-License-Identifier: Apache-2.0
"""The process that stops a thread of a target, and lends it to code of ours, for `tracer`.

One of its own, for two reasons. What it holds goes on when it dies (ptrace(2): a tracer's end
detaches its tracees, without PTRACE_O_EXITKILL), so that to kill it is a way out of everything, a
thread that waits for a disk and cannot be stopped included. And only the thread that has attached
may ask for anything else.

A thread that nobody tells what to do with is let go after `HOLD_S`. Imports little: it starts
quickly.

Questions and answers are messages: one byte that says which, then what `tracer` packs.
"""

from __future__ import annotations

import ctypes
import enum
import errno
import os
import select
import struct
import sys
import time

# linux/ptrace.h
_CONT, _GETREGS, _SETREGS, _DETACH, _PEEKDATA, _POKEDATA = 7, 12, 13, 17, 2, 5
_SEIZE, _INTERRUPT = 0x4206, 0x4207
_GETREGSET, _SETREGSET = 0x4204, 0x4205
_GETSIGMASK, _SETSIGMASK = 0x420A, 0x420B
_SECCOMP_GET_FILTER, _GET_RSEQ_CONFIGURATION = 0x420C, 0x420F
_EVENT_STOP = 128
_NT_X86_XSTATE = 0x202  # linux/elf.h
_WALL = 0x40000000  # linux/wait.h: children of any kind, without which threads are not waited for
_SIGTRAP, _SIGKILL = 5, 9
_PR_SET_PDEATHSIG = 1

REGISTERS = struct.Struct("<27Q")  # struct user_regs_struct of sys/user.h
_RAX, _ORIG_RAX, _RIP, _CS = 10, 15, 16, 17
USER_CODE_64 = 0x33  # asm/segment.h: __USER_CS
# Waits that end with EINTR when a tracer stops them, where others are begun again (signal(7)),
# asm/unistd_64.h. Nothing was done then, and to begin them again changes nothing but that one with
# a timeout may take longer, once. Not those that have an effect, such as close(2).
WAITS = {
    *(0, 19, 45, 47, 299),  # read, readv, recvfrom, recvmsg, recvmmsg: with SO_RCVTIMEO
    *(43, 288),  # accept, accept4: the same
    *(1, 20, 44, 46, 307, 42),  # write, writev, sendto, sendmsg, sendmmsg, connect: SO_SNDTIMEO
    *(232, 281, 441),  # epoll_wait, epoll_pwait, epoll_pwait2
    *(65, 220),  # semop, semtimedop
    128,  # rt_sigtimedwait
    *(208, 333, 426),  # io_getevents, io_pgetevents, io_uring_enter
    285,  # fallocate on tmpfs, before v6.9
}
# linux/errno.h: inside the kernel a call returns it that is to end with EINTR if a handler has run,
# and to be begun again else; and one that is to be continued, by restart_syscall(2).
ERESTARTNOHAND, ERESTART_RESTARTBLOCK = 514, 516
SYS_RESTART_SYSCALL = 219  # asm/unistd_64.h
_U64 = (1 << 64) - 1
_MASK = struct.Struct("<Q")
_WORD = struct.Struct("<Q")
_STATE = struct.Struct("<I")
# AVX-512 takes 2.7 KB, AMX 8 KB more.
_MAX_XSTATE_BYTES = 64 << 10
# struct ptrace_rseq_configuration, whose first word is the address of struct rseq; there rseq_cs is
# the second word, the address of a struct rseq_cs: version, flags, start_ip, post_commit_offset,
# abort_ip (linux/rseq.h).
_RSEQ_CONFIGURATION = struct.Struct("<QIIII")
_RSEQ_CS_AT = 8
_RSEQ_CS = struct.Struct("<IIQQQ")
_FILTER_INSTRUCTION_BYTES = 8  # struct sock_filter
_MAX_FILTER_INSTRUCTIONS = 4096  # BPF_MAXINSNS

# A thread that runs or sleeps stops at once; one that waits for a disk does when that has answered.
_STOPPING_S = 0.1
# To walk a stack takes 1 to 5 ms; a recorder that has no processor must not hold a target up.
HOLD_S = 0.03
# The lent thread makes a thread, and may have to wait for whoever has malloc's lock.
_LENT_S = 2.0
# Between two looks at a thread: what it does takes 50 us.
_LOOK_S = 0.00002

STOP = struct.Struct("<cI")  # thread
FILTER = struct.Struct("<cI")  # index
# Where the code is to be, where in it the wait begins and ends, where the request is to be, sizes
# of both; then these, and the registers to run it with.
LEND = struct.Struct("<cQIIQII")
READ = struct.Struct("<cIQI")  # thread, address, bytes
WRITE = struct.Struct("<cIQ")  # thread, address; then the bytes
RELEASE, CONTINUE = b"g", b"c"

HEAD = struct.Struct("<BI")  # of each answer: what came of it, and an error's or a signal's number
STOPPED = struct.Struct("<8s?")  # signal mask, critical section; then registers, then xstate
LENT = struct.Struct("<q")  # nanoseconds stopped; then the first words of the request
REQUEST_HEAD_BYTES = 64


class Outcome(enum.IntEnum):
    """What came of a question."""

    DONE = 0
    FAILED = 1  # with an error number
    ENDED = 2
    SIGNAL = 3  # one was just being delivered: it is, and the thread was let go
    STOPPED = 4  # all of the process is stopped (SIGSTOP)
    BUSY = 5  # it does not stop: this process has to end
    LATE = 6  # it was let go before
    ALONE = 7  # it has got its registers back by itself


_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.restype = ctypes.c_long
_libc.ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)
for _name in ("process_vm_readv", "process_vm_writev"):
    getattr(_libc, _name).restype = ctypes.c_ssize_t


class _Vector(ctypes.Structure):
    """struct iovec."""

    _fields_ = (("base", ctypes.c_void_p), ("size", ctypes.c_size_t))


class _Unexpected(Exception):
    """A thread did something else than was asked of it."""

    def __init__(self, outcome: Outcome, number: int = 0) -> None:
        super().__init__(outcome.name)
        self.outcome = outcome
        self.number = number


def _error() -> OSError:
    code = ctypes.get_errno()
    return OSError(code, os.strerror(code))


def _ptrace(request: int, tid: int, address: int = 0, data: object = None) -> int:
    ctypes.set_errno(0)
    result: int = _libc.ptrace(request, tid, address, data)
    if result < 0 and ctypes.get_errno():
        raise _error()
    return result


def _copy(call: str, tid: int, address: int, buffer: ctypes.Array[ctypes.c_char]) -> int:
    ours = _Vector(ctypes.addressof(buffer), len(buffer))
    theirs = _Vector(address, len(buffer))
    copied: int = getattr(_libc, call)(
        tid, ctypes.byref(ours), ctypes.c_ulong(1), ctypes.byref(theirs), ctypes.c_ulong(1), 0
    )
    if copied < 0:
        raise _error()
    return copied


def _read(tid: int, address: int, size: int) -> bytes:
    buffer = ctypes.create_string_buffer(size)
    copied = _copy("process_vm_readv", tid, address, buffer)
    return buffer.raw[:copied]


def _write(tid: int, address: int, data: bytes) -> None:
    buffer = ctypes.create_string_buffer(data, len(data))
    if _copy("process_vm_writev", tid, address, buffer) < len(data):
        raise OSError(errno.EFAULT, os.strerror(errno.EFAULT))


def _restarting(registers: bytes, begins_anew: bool) -> bytes:
    """Returns registers of a thread that was stopped, with which its wait goes on.

    Args:
        registers: As it stopped.
        begins_anew: Without restart_syscall(2), as if nothing of it was over.
    """
    words = [*REGISTERS.unpack(registers)]
    if words[_CS] != USER_CODE_64:
        return registers  # its calls have other numbers
    result, call = words[_RAX], words[_ORIG_RAX]
    is_ended = call in WAITS and result == -errno.EINTR & _U64
    # What is continued already, is so by its filter's leave.
    is_continued = result == -ERESTART_RESTARTBLOCK & _U64 and call != SYS_RESTART_SYSCALL
    if is_ended or (is_continued and begins_anew):
        words[_RAX] = -ERESTARTNOHAND & _U64
    return REGISTERS.pack(*words)


class Tracee:
    """A thread that is stopped, with all that has to be given back to it.

    From then on its wait goes on, whatever becomes of this process: it begins anew, since a seccomp
    filter may end a process that calls restart_syscall(2), until `continue_wait`.

    Args:
        tid: The thread.

    Raises:
        OSError: It cannot be traced.
        _Unexpected: It has ended, or did not stop as asked.
    """

    def __init__(self, tid: int) -> None:
        self.tid = tid
        self._begins_anew = True
        _ptrace(_SEIZE, tid)
        self.begun_ns = time.monotonic_ns()
        found = self._interrupt(_STOPPING_S)
        # As they are where the wait is continued; what it goes on with may be others.
        self.continued = _restarting(found, begins_anew=False)
        self.registers = _restarting(found, begins_anew=True)
        self.mask = ctypes.create_string_buffer(_MASK.size)
        _ptrace(_GETSIGMASK, tid, _MASK.size, self.mask)
        self.xstate = self._xstate()

    def continue_wait(self) -> None:
        """Has its wait continued, whoever lets it go: its filter allows that."""
        self._begins_anew = False
        self.registers = self.continued
        _ptrace(_SETREGS, self.tid, 0, self.registers)

    def _interrupt(self, patience_s: float) -> bytes:
        """Stops it; returns the registers that it had. It has those with which it goes on."""
        _ptrace(_INTERRUPT, self.tid)
        until_s = time.monotonic() + patience_s
        while (status := self.look()) is None:
            if time.monotonic() > until_s:
                raise _Unexpected(Outcome.BUSY)
            time.sleep(_LOOK_S)
        found = self._registers()
        going_on = _restarting(found, self._begins_anew)
        if going_on != found:
            _ptrace(_SETREGS, self.tid, 0, going_on)
        if status:
            self.release(0 if status >> 8 == _EVENT_STOP else status & 0xFF)
            outcome = Outcome.STOPPED if status >> 8 == _EVENT_STOP else Outcome.SIGNAL
            raise _Unexpected(outcome, status & 0xFF)
        return found

    def look(self) -> int | None:
        """Returns None while it runs, 0 when it has stopped as asked, else its signal and event.

        Raises:
            _Unexpected: It has ended.
        """
        try:
            found, status = os.waitpid(self.tid, os.WNOHANG | _WALL)
        except ChildProcessError:  # another thread has called exec, or it is waited for elsewhere
            raise _Unexpected(Outcome.ENDED) from None
        if not found:
            return None
        if not os.WIFSTOPPED(status):
            raise _Unexpected(Outcome.ENDED)
        signal, event = os.WSTOPSIG(status), status >> 16
        return 0 if (signal, event) == (_SIGTRAP, _EVENT_STOP) else signal | event << 8

    def _registers(self) -> bytes:
        buffer = ctypes.create_string_buffer(REGISTERS.size)
        _ptrace(_GETREGS, self.tid, 0, buffer)
        return buffer.raw

    def _xstate(self) -> ctypes.Array[ctypes.c_char]:
        buffer = ctypes.create_string_buffer(_MAX_XSTATE_BYTES)
        vector = _Vector(ctypes.addressof(buffer), len(buffer))
        _ptrace(_GETREGSET, self.tid, _NT_X86_XSTATE, ctypes.byref(vector))
        return ctypes.create_string_buffer(buffer.raw[: vector.size], vector.size)

    @property
    def is_in_critical_section(self) -> bool:
        """Whether it is in a restartable sequence, which a detour would break.

        The kernel restarts one only if it finds the thread inside when it goes back to user space;
        while it runs our code, it is not. Kernels before 5.13 do not tell where struct rseq is.
        """
        configuration = ctypes.create_string_buffer(_RSEQ_CONFIGURATION.size)
        try:
            _ptrace(_GET_RSEQ_CONFIGURATION, self.tid, len(configuration), configuration)
            address, *_ = _RSEQ_CONFIGURATION.unpack(configuration)
            if not address:
                return False
            (section,) = _WORD.unpack(_read(self.tid, address + _RSEQ_CS_AT, _WORD.size))
            if not section:
                return False
            _, _, start, size, _ = _RSEQ_CS.unpack(_read(self.tid, section, _RSEQ_CS.size))
        except (OSError, struct.error):
            return False
        rip = REGISTERS.unpack(self.registers)[_RIP]
        return bool(0 <= rip - start < size)

    def filter(self, index: int) -> bytes:
        """Returns one of its seccomp filters, the last that was installed first."""
        buffer = ctypes.create_string_buffer(_MAX_FILTER_INSTRUCTIONS * _FILTER_INSTRUCTION_BYTES)
        count = _ptrace(_SECCOMP_GET_FILTER, self.tid, index, buffer)
        return buffer.raw[: count * _FILTER_INSTRUCTION_BYTES]

    def _put_code(self, address: int, code: bytes) -> None:
        """Writes words of code that are not there yet, into this process's own copy of the page."""
        there = _read(self.tid, address, len(code))
        for at in range(0, len(code), _WORD.size):
            word = code[at : at + _WORD.size]
            if there[at : at + _WORD.size] != word:
                _ptrace(_POKEDATA, self.tid, address + at, _WORD.unpack(word)[0])

    def lend(
        self,
        code_at: int,
        wait: range,
        code: bytes,
        request_at: int,
        request: bytes,
        registers: bytes,
    ) -> tuple[Outcome, bytes]:
        """Has it run code, and gives it back its registers when that waits for it.

        Args:
            code_at: Where the code is to be, 8-byte words of it.
            wait: Where in the code it waits.
            code: Its bytes.
            request_at: Where the request is to be, of which the first word tells when it waits.
            request: Its bytes.
            registers: Those with which it runs the code.

        Returns:
            Who gave it its registers back, and the first words of the request.

        Raises:
            OSError: It cannot be.
            _Unexpected: It has ended, or got a signal before its first instruction.
        """
        self._put_code(code_at, code)
        _write(self.tid, request_at, request)
        _ptrace(_SETREGS, self.tid, 0, registers)
        _ptrace(_CONT, self.tid)
        until_s = time.monotonic() + _LENT_S
        while True:
            head = _read(self.tid, request_at, REQUEST_HEAD_BYTES)
            if _STATE.unpack_from(head)[0] or time.monotonic() > until_s:
                break
            status = self.look()
            if status is not None:
                self._surprised(status, code_at)
            time.sleep(_LOOK_S)
        try:
            found = self._interrupt(_LENT_S)
        except _Unexpected as unexpected:
            if unexpected.outcome in (Outcome.ENDED, Outcome.BUSY):
                raise
            return Outcome.ALONE, head
        if REGISTERS.unpack(found)[_RIP] - code_at not in wait:
            self.release()  # it will have its registers back, or has, by itself
            return Outcome.ALONE, head
        # In this order: up to the last step it would do the same by itself.
        vector = _Vector(ctypes.addressof(self.xstate), len(self.xstate))
        _ptrace(_SETREGSET, self.tid, _NT_X86_XSTATE, ctypes.byref(vector))
        _ptrace(_SETSIGMASK, self.tid, _MASK.size, self.mask)
        self.give_back()
        return Outcome.DONE, head

    def _surprised(self, status: int, code_at: int) -> None:
        """Lets go of a thread that was stopped by another than us while it runs our code.

        A signal that came before it has blocked them finds it as it was, so that the system call in
        which it slept ends as that signal would have it.
        """
        signal, event = status & 0xFF, status >> 8
        if REGISTERS.unpack(self._registers())[_RIP] == code_at:
            _ptrace(_SETREGS, self.tid, 0, self.registers)
        if event == _EVENT_STOP:  # of the whole process: it goes on, with our code, after SIGCONT
            self.release()
            raise _Unexpected(Outcome.STOPPED, signal)
        self.release(signal)
        raise _Unexpected(Outcome.SIGNAL, signal)

    def give_back(self) -> None:
        """Lets it go on where it was, in the midst of a system call as if it had not stopped.

        Its registers say so, and the kernel goes on as it would have: it begins a call that was
        interrupted again, or, if a signal has come, ends it with EINTR where its handler does not
        want it restarted (arch_do_signal_or_restart in arch/x86/kernel/signal.c).
        """
        _ptrace(_SETREGS, self.tid, 0, self.registers)
        self.release()

    def release(self, signal: int = 0) -> None:
        """Lets it go as it is, with the signal that was just being delivered."""
        _ptrace(_DETACH, self.tid, 0, signal)


_DONE, _LATE = HEAD.pack(Outcome.DONE, 0), HEAD.pack(Outcome.LATE, 0)


class _Worker:
    """Answers questions about one thread at a time."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._tracee: Tracee | None = None
        self._questions = {
            b"s": self._stop,
            RELEASE: self._release,
            CONTINUE: self._continue,
            b"f": self._filter,
            b"l": self._lend,
            b"r": self._read,
            b"w": self._write,
        }

    def serve(self) -> None:
        """Serves until the socket is closed."""
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        while True:
            if self._tracee is not None and not poll.poll(1000 * HOLD_S):
                try:
                    self._let_go()
                except OSError:  # it was killed
                    return
            message = os.read(self._fd, 1 << 18)
            if not message:
                return
            answer = self._answer(message)
            os.write(self._fd, answer)
            # Whatever is in hand then goes on when this process ends.
            if answer[0] in (Outcome.BUSY, Outcome.ENDED, Outcome.FAILED):
                return

    def _let_go(self) -> None:
        """Lets go of the thread that is held, if there is one.

        Raises:
            OSError: It was killed. It is not over, as its parent and an exec(2) of its process see
                it, until this process has ended.
        """
        tracee, self._tracee = self._tracee, None
        if tracee is not None:
            tracee.give_back()

    def _answer(self, message: bytes) -> bytes:
        try:
            return self._questions[message[:1]](message)
        except OSError as error:
            ended = error.errno == errno.ESRCH
            return HEAD.pack(Outcome.ENDED if ended else Outcome.FAILED, error.errno or 0)
        except _Unexpected as unexpected:
            return HEAD.pack(unexpected.outcome, unexpected.number)

    def _stop(self, message: bytes) -> bytes:
        _, tid = STOP.unpack(message)
        tracee = self._tracee = Tracee(tid)
        facts = STOPPED.pack(tracee.mask.raw, tracee.is_in_critical_section)
        return _DONE + facts + tracee.continued + tracee.xstate.raw

    def _continue(self, message: bytes) -> bytes:
        if self._tracee is None:
            return _LATE
        self._tracee.continue_wait()
        return _DONE

    def _release(self, message: bytes) -> bytes:
        is_late = self._tracee is None
        self._let_go()
        return _LATE if is_late else _DONE

    def _filter(self, message: bytes) -> bytes:
        _, index = FILTER.unpack(message)
        if self._tracee is None:
            return _LATE
        try:
            return _DONE + self._tracee.filter(index)
        except OSError as error:
            if error.errno != errno.ENOENT:  # there are no more
                raise
            return _DONE

    def _lend(self, message: bytes) -> bytes:
        if self._tracee is None:
            return _LATE
        tracee, self._tracee = self._tracee, None
        _, code_at, begin, end, request_at, code_bytes, request_bytes = LEND.unpack_from(message)
        at = LEND.size
        parts = []
        for size in (code_bytes, request_bytes, REGISTERS.size):
            parts.append(message[at : at + size])
            at += size
        code, request, registers = parts
        outcome, head = tracee.lend(
            code_at, range(begin, end), code, request_at, request, registers
        )
        stopped_ns = time.monotonic_ns() - tracee.begun_ns
        return HEAD.pack(outcome, 0) + LENT.pack(stopped_ns) + head

    def _read(self, message: bytes) -> bytes:
        _, tid, address, size = READ.unpack(message)
        return _DONE + _read(tid, address, size)

    def _write(self, message: bytes) -> bytes:
        _, tid, address = WRITE.unpack_from(message)
        _write(tid, address, message[WRITE.size :])
        return _DONE


def main() -> None:
    """Serves until the socket is closed; arguments as of `inspector.child`."""
    number, parent_pid = map(int, sys.argv[1:])
    if _libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(_SIGKILL)) or os.getppid() != parent_pid:
        return
    os.write(number, b"ready ")
    _Worker(number).serve()


if __name__ == "__main__":
    main()
