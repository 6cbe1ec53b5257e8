# SPDX-License-Identifier: Apache-2.0
"""The fork server: forks processes that read files, from one interpreter that has all modules.

Started as `python -m aiflame.agent.inspector.forking SOCKET IDLE_S` by `fork_server.ForkServer`, or
forked from a process that has most of these modules itself (`begin_here`). Requests come over the
socket, which several processes may have: what is to run, and descriptors, the first of which
controls it. Over that it answers, with the pid and a pidfd, and in the end with how it has ended.
Where the other side of that closes, what it has forked is killed. It never sees a byte of a target.
It ends with whoever has forked it; one that was started also when nobody has asked for a while,
and nothing that it has forked is left.

A fork shares the interpreter's modules with it, as long as neither writes to them: it has 3 to 10
MB of its own, where a new interpreter has 20 to 28, and is there within 10 ms.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import importlib
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from aiflame.agent.allocator import PagesOfFiles, give_back_freed_memory
from aiflame.agent.closing import close_all_but
from aiflame.agent.inspector.parser import Channel
from aiflame.agent.process_group import leave_signals_to_recorder

_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15  # linux/prctl.h
_NAME = "fork_server"

_MAX_REASON_CHARACTERS = 200
# Descriptors of a fork are first moved out of the way of those that it is to have: a few.
_FIRST_MOVED = 32
# Whoever ends this process waits a second for it.
_ENDING_S = 0.5
_STANDARD = 3  # input, output, errors


@dataclass(frozen=True, slots=True)
class _Fork:
    """A process that was forked.

    Attributes:
        pid: Its pid.
        process_fd: Becomes readable when it has ended.
        control: To whoever asked for it.
    """

    pid: int
    process_fd: int
    control: Channel


class _Server:
    """Forks what it is asked for.

    Args:
        requests: Where that comes from.
    """

    def __init__(self, requests: Channel) -> None:
        self._requests = requests
        self._forks: dict[int, _Fork] = {}  # by their pidfd
        self._controls: dict[int, _Fork] = {}  # of those that somebody may still want to end
        self._poll = select.poll()  # select() knows no descriptor above 1,023
        self._poll.register(requests.fileno(), select.POLLIN)

    def serve(self, idle_s: float | None) -> None:
        """Forks until whoever asks has ended, or has not asked for so long; None for ever."""
        asked_s = time.monotonic()
        while True:
            timeout_s = None
            if idle_s is not None and not self._forks:
                timeout_s = max(asked_s + idle_s - time.monotonic(), 0)
            ready = self._poll.poll(None if timeout_s is None else 1000 * timeout_s)
            if not ready and timeout_s is not None:
                return
            for fd, _ in ready:
                if fd == self._requests.fileno():
                    self._answer(*self._requests.receive())
                elif fd in self._forks:
                    self._reap(self._forks[fd])
                elif fd in self._controls:
                    self._kill(self._controls[fd])
                asked_s = time.monotonic()

    def _answer(self, message: dict[str, Any], fds: list[int]) -> None:
        if fds:
            self._fork(message, fds)
            return
        with contextlib.suppress(Exception):  # whoever needs it is told
            _import(message["modules"])
        if not self._requests.is_readable(0):
            _become_ordinary()

    def _fork(self, message: dict[str, Any], fds: list[int]) -> None:
        control = Channel(socket.socket(fileno=fds[0]))
        try:
            _import(message["modules"])
            parent = os.getpid()
            pid = os.fork()
            if pid == 0:
                _run(message, fds[1:], parent)
        except Exception as error:  # no memory, or a module that cannot be imported: it goes on
            self._refuse(control, error)
            return
        finally:
            for fd in fds[1:]:
                os.close(fd)
        try:
            fork = _Fork(pid, os.pidfd_open(pid), control)
        except OSError as error:  # no descriptor left: the others go on
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            self._refuse(control, error)
            return
        self._forks[fork.process_fd] = self._controls[control.fileno()] = fork
        for fd in (fork.process_fd, control.fileno()):
            self._poll.register(fd, select.POLLIN)
        with contextlib.suppress(OSError):  # nobody wants it any more, which poll() tells
            control.send({"pid": pid}, [fork.process_fd])

    def _refuse(self, control: Channel, error: Exception) -> None:
        words = error.strerror if isinstance(error, OSError) else str(error)
        with contextlib.suppress(OSError):
            control.send({"error": (words or type(error).__name__)[:_MAX_REASON_CHARACTERS]})
        control.close()

    def _kill(self, fork: _Fork) -> None:
        """Ends one that nobody wants any more; where it reads a broken disk it stays for long."""
        self._poll.unregister(fork.control.fileno())
        del self._controls[fork.control.fileno()]
        signal.pidfd_send_signal(fork.process_fd, signal.SIGKILL)

    def _reap(self, fork: _Fork) -> None:
        _, status, usage = os.wait4(fork.pid, 0)
        cpu_ns = round((usage.ru_utime + usage.ru_stime) * 1e9)
        with contextlib.suppress(OSError):
            fork.control.send({"code": os.waitstatus_to_exitcode(status), "cpu_ns": cpu_ns})
        if self._controls.pop(fork.control.fileno(), None) is not None:
            self._poll.unregister(fork.control.fileno())
        self._poll.unregister(fork.process_fd)
        del self._forks[fork.process_fd]
        os.close(fork.process_fd)
        fork.control.close()

    def close(self) -> None:
        """Ends all forks; their CPU time is this process's own then."""
        for fork in self._forks.values():
            signal.pidfd_send_signal(fork.process_fd, signal.SIGKILL)
        until_s = time.monotonic() + _ENDING_S
        for fork in [*self._forks.values()]:
            # One that reads a broken disk stays, with nobody.
            poll = select.poll()
            poll.register(fork.process_fd, select.POLLIN)
            if poll.poll(1000 * max(until_s - time.monotonic(), 0)):
                self._reap(fork)


def _become_ordinary(*_: object) -> None:
    """Gives up being urgent, which whoever has started this process has made it.

    `priority` would take that for what the user has chosen: this process may have begun so.
    """
    flag = os.SCHED_RESET_ON_FORK
    with contextlib.suppress(OSError):
        if os.sched_getscheduler(0) & flag:
            os.sched_setscheduler(0, os.SCHED_OTHER | flag, os.sched_param(0))
            os.setpriority(os.PRIO_PROCESS, 0, 0)


def _import(modules: Sequence[str]) -> None:
    missing = [module for module in modules if module not in sys.modules]
    if not missing:
        return
    for module in missing:
        importlib.import_module(module)
    _freeze()


def _freeze() -> None:
    """Has as little as can be of what there is written to, which forks share until then."""
    gc.collect()
    give_back_freed_memory()
    PagesOfFiles().give_back()
    gc.freeze()


def begin_fork(name: str, parent: int) -> None:
    """Has a fork end with its parent, now if that has ended already, and gives it a name.

    Args:
        name: How it is called in lists of processes, 15 characters.
        parent: Pid of the process that was forked.
    """
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    libc.prctl(_PR_SET_NAME, name.encode())


def _keep(fds: Sequence[int], first: int) -> None:
    """Makes descriptors those from a number on, and closes all others but the standard ones."""
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD, _FIRST_MOVED) for fd in fds]
    for number, fd in enumerate(moved, first):
        os.dup2(fd, number)
    close_all_but(range(max(first + len(moved), _STANDARD)))


def _run(message: dict[str, Any], fds: Sequence[int], parent: int) -> NoReturn:
    """What a fork does."""
    code = 1
    try:
        begin_fork(str(message["name"]), parent)
        signal.signal(signal.SIGXCPU, signal.SIG_DFL)
        # What is not given of the standard ones stays what it is: /dev/null.
        _keep(fds, int(message["first_fd"]))
        module, _, function = str(message["main"]).partition(":")
        getattr(sys.modules[module], function)(message["arguments"])
        code = 0
    except SystemExit as end:  # as the interpreter does: of a number, or of words
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            _say(end.code)
    except BaseException:  # whatever it is, this process ends
        _say(traceback.format_exc())
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        os._exit(code)


def _say(words: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, f"{words.strip()}\n".encode(errors="replace"))


def begin_here(connection: int, first: Callable[[], None]) -> int:
    """Forks a server from this process, which has one thread; returns its pid.

    Args:
        connection: Descriptor of a socket, from which it takes requests.
        first: What the server does before all else.

    Raises:
        OSError: There are too many processes, or no memory.
    """
    _freeze()
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        begin_fork(_NAME, parent)
        os.setpgid(0, 0)
        os.chdir("/")  # nor does it keep a file system from being unmounted
        first()
        null = os.open(os.devnull, os.O_RDWR)
        _keep((null, null, null, connection), 0)
        _serve(_STANDARD, None)
        code = 0
    except BaseException:  # whatever it is: nothing that its parent was about to do is for it
        _say(traceback.format_exc())
    finally:
        os._exit(code)


def main() -> None:
    """Serves until nobody asks any more."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    connection, idle_s = sys.argv[1:]
    _serve(int(connection), float(idle_s))


def _serve(connection: int, idle_s: float | None) -> None:
    leave_signals_to_recorder()  # what it has forked is needed until whoever asks has ended
    # The limit on being real-time at a stretch: on a slow processor imports take longer.
    signal.signal(signal.SIGXCPU, _become_ordinary)
    server = _Server(Channel(socket.socket(fileno=connection)))
    try:
        with contextlib.suppress(EOFError):  # nobody asks any more
            server.serve(idle_s)
    finally:
        server.close()


if __name__ == "__main__":
    main()
