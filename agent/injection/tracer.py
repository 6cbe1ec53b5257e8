# SPDX-License-Identifier: Apache-2.0
"""Holds threads of targets, by way of a process that may be killed at any moment."""

from __future__ import annotations

import errno
import os
import struct
from dataclasses import dataclass

from aiflame.agent.errors import AiflameError, EnvironmentUnfit
from aiflame.agent.injection import tracer_worker as worker
from aiflame.agent.injection.requests import Loan, Registers
from aiflame.agent.injection.tracer_worker import Outcome
from aiflame.agent.inspector.child import Child, ends

# It waits 2 s for a thread that waits for others, twice; and may want for a processor.
_PATIENCE_S = 30.0
# ptrace(2): the user's, a namespace's, and to see filters CAP_SYS_ADMIN.
_NO_RIGHT = (errno.EPERM, errno.EACCES)


class InjectionRefused(EnvironmentUnfit):
    """A library cannot be loaded into a process; the message says why."""


class RefusedForGood(InjectionRefused):
    """It cannot be as long as that process runs, and we have the rights that we have."""


class TryAgain(AiflameError):
    """A thread cannot be lent at this moment: another may, or this one a little later."""


@dataclass(frozen=True, slots=True)
class Stopped:
    """A thread that is held, for `tracer_worker.HOLD_S` at most.

    Attributes:
        tid: The thread.
        registers: Those that it gets back.
        mask: Signals that it blocks.
        xstate: Its other registers.
        is_in_critical_section: It is in a restartable sequence.
    """

    tid: int
    registers: Registers
    mask: bytes
    xstate: bytes
    is_in_critical_section: bool


@dataclass(frozen=True, slots=True)
class Lent:
    """What came of a thread that was lent.

    Attributes:
        head: The first words of its request.
        stopped_ns: From the order to stop until it was let go.
        is_by_itself: It has given itself its registers back, since we were late.
    """

    head: bytes
    stopped_ns: int
    is_by_itself: bool


_WORDS = {
    Outcome.ENDED: "the thread has ended",
    Outcome.SIGNAL: "a signal came",
    Outcome.BUSY: "it does not stop: it waits for a disk, or in vfork",
    Outcome.LATE: "it took too long to look at its stack",
}


class Tracer:
    """One process that holds threads, started when it is needed. A context manager."""

    def __init__(self) -> None:
        self._child: Child | None = None

    def __enter__(self) -> Tracer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int | None:
        """Of the process that holds threads, None where there is none."""
        return None if self._child is None else self._child.process.pid

    def stop(self, tid: int) -> Stopped:
        """Stops a thread; it is let go by `release`, by `lend`, and in a while by itself.

        A wait such as nanosleep(2) begins anew then, with its whole timeout, and is not continued
        by restart_syscall(2), unless `continue_wait` says so.

        Raises:
            TryAgain: Not now.
            InjectionRefused: The kernel does not permit it, or all of the process is stopped.
        """
        answer = self._ask(worker.STOP.pack(b"s", tid))
        mask, is_critical = worker.STOPPED.unpack_from(answer)
        at = worker.STOPPED.size
        end = at + worker.REGISTERS.size
        return Stopped(tid, Registers.unpack(answer[at:end]), mask, answer[end:], is_critical)

    def release(self) -> None:
        """Lets the thread go that is held, if there is one still."""
        self._question(worker.RELEASE)

    def continue_wait(self) -> None:
        """Has the wait of the thread that is held continued after all."""
        self._question(worker.CONTINUE)

    def filters(self) -> list[bytes]:
        """Returns the seccomp filters of the thread that is held.

        Raises:
            TryAgain: It is held no longer.
            InjectionRefused: They cannot be read.
        """
        found: list[bytes] = []
        while code := self._ask(worker.FILTER.pack(b"f", len(found))):
            found.append(code)
        return found

    def lend(self, loan: Loan, code_at: int, code: bytes, wait: range) -> Lent:
        """Has the thread that is held run code, and gives it back its registers.

        Args:
            loan: What it is handed.
            code_at: Where the code is to be.
            code: Its bytes.
            wait: Where in the code it waits.

        Raises:
            TryAgain: It was not lent.
            InjectionRefused: The kernel does not permit it.
        """
        question = worker.LEND.pack(
            *(b"l", code_at, wait.start, wait.stop, loan.request_at, len(code), len(loan.request))
        )
        message = question + code + loan.request + loan.registers.pack()
        outcome, answer = self._checked(message)
        (stopped_ns,) = worker.LENT.unpack_from(answer)
        head = answer[worker.LENT.size :]
        return Lent(head, stopped_ns, outcome is Outcome.ALONE)

    def read(self, pid: int, address: int, size: int) -> bytes:
        """Returns memory of a process; fewer bytes than asked for where it ends.

        Raises:
            TryAgain: The process has ended.
            InjectionRefused: It cannot be read.
        """
        return self._ask(worker.READ.pack(b"r", pid, address, size))

    def write(self, pid: int, address: int, data: bytes) -> None:
        """Writes memory of a process.

        Raises:
            TryAgain: The process has ended.
            InjectionRefused: It cannot be written.
        """
        self._ask(worker.WRITE.pack(b"w", pid, address) + data)

    def _ask(self, question: bytes) -> bytes:
        return self._checked(question)[1]

    def _checked(self, question: bytes) -> tuple[Outcome, bytes]:
        outcome, number, answer = self._question(question)
        if outcome in (Outcome.DONE, Outcome.ALONE):
            return outcome, answer
        if outcome is Outcome.STOPPED:
            raise InjectionRefused("the process is stopped by a signal", "send it SIGCONT")
        if outcome is Outcome.FAILED:
            refused = RefusedForGood if number in _NO_RIGHT else InjectionRefused
            if question.startswith(b"f"):
                raise refused(
                    f"the kernel does not tell what its seccomp filter is: {os.strerror(number)}",
                    "record it as root or with CAP_SYS_ADMIN, and not below a seccomp filter",
                )
            raise refused(
                f"the kernel refuses to trace it: {os.strerror(number)}",
                "run it as root, with CAP_SYS_PTRACE and CAP_SYS_ADMIN, and see "
                "/proc/sys/kernel/yama/ptrace_scope",
            )
        raise TryAgain(_WORDS[outcome])

    def _question(self, question: bytes) -> tuple[Outcome, int, bytes]:
        child = self._started()
        try:
            child.send(question)
            message = child.receive(_PATIENCE_S)
            if message is None or not message.data:
                raise ConnectionError
            outcome, number = worker.HEAD.unpack_from(message.data)
        except (ConnectionError, struct.error):
            # Whatever it held goes on.
            self.close()
            raise TryAgain("the process that holds threads has ended") from None
        if Outcome(outcome) in (Outcome.BUSY, Outcome.ENDED, Outcome.FAILED):
            self.close()
        return Outcome(outcome), number, message.data[worker.HEAD.size :]

    def _started(self) -> Child:
        if self._child is None:
            try:
                self._child = Child("tracer_worker", room="injection")
            except OSError as error:
                raise InjectionRefused(f"no process can be started: {error.strerror}") from error
            if not (message := self._child.receive(_PATIENCE_S)) or not message.data:
                self.close()
                raise InjectionRefused("the process that holds threads does not start")
        return self._child

    def close(self) -> None:
        """Ends the process; whatever it holds goes on.

        One that waits for a disk, in the memory of its target, ends when that has answered.
        """
        if self._child is not None:
            child, self._child = self._child, None
            child.end()
            if ends(child.process.pid):
                child.process.wait()
