# SPDX-License-Identifier: Apache-2.0
"""Children that do for the recorder what may never end, and that are killed where it does not.

What a target has, it can make others wait for: a page of its memory, a file on a file system that
it serves. So the recorder asks a child, one question after the other, and waits a moment for each
answer. A child that gets nowhere is killed, or left alone where not even that helps, and another
one takes over.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from aiflame.agent import priority
from aiflame.agent.process_group import OWN_PROCESS_GROUP

# A child that has begun answers at once; until then it waits for nothing but its own files.
_BEGINNING_S = 10.0
# A child that waits for a processor and not for an answer is waited for.
_STARVED_PATIENCE_S = 30.0
# A child that dies of something else: the out-of-memory killer may come twice.
MAX_DEATHS = 4
# Children that cannot be killed stay until their file system answers, or ends.
MAX_STUCK = 256
# Until the next try where none can be started, as where memory or processes are short for a moment:
# each one doubles it, up to a minute.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 60.0
# What has happened counts for so long: an agent lasts for months, servers come back, and pids are
# given out again.
_COUNTS_S = 3600.0
# A killed child of 1 GB takes a tenth of that; when the recorder ends, all of them together.
_KILLING_S = 1.0
# Among the fields of `_stat`.
_START_TIME = 19
# From one look at a killed child that waits for a processor to the next.
_LOOK_S = 0.1
_MAX_MESSAGE_BYTES = 1 << 18
_MAX_DESCRIPTORS = 4

# The child imports nothing but this package and the standard library: without site-packages it is
# ready after 20 ms and not 60.
_BOOT = (
    "import sys;"
    "package = type(sys)('aiflame');"
    "package.__path__ = [sys.argv.pop(1)];"
    "sys.modules['aiflame'] = package;"
    "from aiflame.agent.{} import main;"
    "main()"
)


def ends(pid: int) -> bool:
    """Waits for the end of a child that was killed; returns whether there was one in time.

    Where it waits for a file system that does not answer, no signal gets through to it: then it is
    left alone. One that would end if it had a processor is waited for.
    """
    try:
        process_fd = os.pidfd_open(pid)
    except OSError:
        return True  # it was waited for, or there is no descriptor left to find out
    poll = select.poll()
    poll.register(process_fd, select.POLLIN)
    starved_until_s = time.monotonic() + _STARVED_PATIENCE_S
    try:
        while not poll.poll(1000 * _KILLING_S):
            if not waits_for_a_processor(pid) or time.monotonic() >= starved_until_s:
                return False
        return True
    finally:
        os.close(process_fd)


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kills a child that is spoken to by pipes, and waits for it as `ends` does."""
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()
    process.kill()
    if ends(process.pid):
        process.wait()


def _ends_until(process: subprocess.Popen[bytes], until_s: float) -> bool:
    """Waits for the end of a child until then; returns whether it came."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(max(until_s - time.monotonic(), 0))
        return True
    return False


def _stat(pid: int) -> list[bytes]:
    """Returns the fields of /proc/PID/stat from the third on (proc_pid_stat(5)), none if gone.

    It waits for no lock of the process's memory (do_task_stat of fs/proc/array.c, v6.1).
    """
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2].split()
    return []


def waits_for_a_processor(pid: int) -> bool:
    """Whether a child would get on if it were let."""
    return _stat(pid)[:1] == [b"R"]


def began(pid: int) -> bytes:
    """Returns what no other process with that number has: when it began; nothing if it is gone."""
    return b"".join(_stat(pid)[_START_TIME : _START_TIME + 1])


class Message(NamedTuple):
    """What a child says, and descriptors that come with it: those are the receiver's."""

    data: bytes
    fds: Sequence[int] = ()


class Child:
    """A child, which runs `main` of a module.

    Its arguments are the number of its end of the socket, the parent's pid, and the numbers of
    further descriptors. Its first message is "ready " and what it could not give up, in words.

    Args:
        module: Name of the module.
        fds: Descriptors that it gets; they stay the caller's.
        room: Where the module is.

    Raises:
        OSError: There is no memory, or there are too many processes.
    """

    def __init__(self, module: str, fds: Sequence[int] = (), room: str = "inspector") -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            packages = str(Path(__file__).parents[2])
            boot = _BOOT.format(f"{room}.{module}")
            numbers = map(str, (theirs.fileno(), os.getpid(), *fds))
            self.process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
                [sys.executable, "-I", "-S", "-c", boot, packages, *numbers],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), *fds),
                cwd="/",
                **OWN_PROCESS_GROUP,
            )
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        self._socket = ours
        self.is_ready = False
        priority.hurry_child(self.process.pid)

    def send(self, data: bytes, fds: Sequence[int] = ()) -> None:
        """Sends a message, to a child that waits for one; descriptors stay the caller's.

        Raises:
            ConnectionError: It has ended.
        """
        socket.send_fds(self._socket, [data], fds)

    def receive(self, timeout_s: float) -> Message | None:
        """Returns what it says, no data if it has ended, None if it is silent for that long."""
        poll = select.poll()  # select() knows no descriptor above 1,023
        poll.register(self._socket, select.POLLIN)
        if not poll.poll(timeout_s * 1000):
            return None
        with contextlib.suppress(ConnectionError):
            flags = socket.MSG_CMSG_CLOEXEC
            data, fds, _, _ = socket.recv_fds(
                self._socket, _MAX_MESSAGE_BYTES, _MAX_DESCRIPTORS, flags
            )
            return Message(data, fds)
        return Message(b"")

    @property
    def waits_for_a_processor(self) -> bool:
        """Whether it would get on if it were let."""
        return waits_for_a_processor(self.process.pid)

    def end(self) -> None:
        """Ends it; it may go on to wait where no signal gets through (fs/fuse/dev.c, v6.1)."""
        self._socket.close()
        self.process.kill()


ChildT = TypeVar("ChildT", bound=Child)


class Children(Generic[ChildT]):
    """One child at a time, started on first use, and another in place of one that has ended.

    Args:
        make: Starts one.

    Attributes:
        child: The one that there is, None for none.
        stuck: How many got nowhere.
        deaths: How many ended otherwise, and how often none could be started for a while.
        era: Goes up when what has happened counts no more.
        failures: What they could not give up before they began, in words.
    """

    def __init__(self, make: Callable[[], ChildT]) -> None:
        self._make = make
        self.child: ChildT | None = None
        self._ended: list[ChildT] = []
        self.stuck = self.deaths = self.era = 0
        self._old_stuck = self._old_deaths = 0
        self._since_s = time.monotonic()
        self._not_before_s = 0.0
        self._pause_s = 0.0  # the last one; 0 where the last try was not in vain
        self.failures = ""

    @property
    def recently_stuck(self) -> int:
        """How many got nowhere in this era."""
        return self.stuck - self._old_stuck

    def look(self) -> None:
        """Begins another era, if it is time."""
        now_s = time.monotonic()
        if now_s - self._since_s >= _COUNTS_S:
            self._since_s = now_s
            self._old_stuck, self._old_deaths = self.stuck, self.deaths
            self.era += 1

    @property
    def pid(self) -> int | None:
        """Of the child, None where there is none."""
        return None if self.child is None else self.child.process.pid

    def start(self) -> ChildT | None:
        """Returns the child, started now if there is none; None where there can be none."""
        self._ended = [child for child in self._ended if child.process.poll() is None]
        self.look()
        are_few = self.deaths - self._old_deaths < MAX_DEATHS and self.recently_stuck < MAX_STUCK
        if self.child is None and are_few and len(self._ended) < MAX_STUCK:
            self._try()
        return self.child

    def _try(self) -> None:
        """Starts a child, unless none could be started a moment ago."""
        if time.monotonic() < self._not_before_s:
            return
        try:
            self.child = self._make()
        except OSError:  # no memory, no descriptor, or too many processes
            if not self._pause_s:  # it is told once, and is none of those that end tries
                self.deaths += 1
                self._old_deaths += 1
            self._pause_s = min(max(2 * self._pause_s, _FIRST_PAUSE_S), _LONGEST_PAUSE_S)
            self._not_before_s = time.monotonic() + self._pause_s
        else:
            self._pause_s = 0.0

    def wait(
        self, child: ChildT, patience_s: float, progress: Callable[[], int] = lambda: 0
    ) -> Message | None:
        """Waits for a message, as long as the child gets on; None where it has come to an end.

        It got nowhere if `stuck` counts one more after that.

        Args:
            child: What `start` returned.
            patience_s: How long it may take from one step to the next.
            progress: Tells at which step it is.
        """
        before = -1
        starved_until_s = time.monotonic() + _STARVED_PATIENCE_S
        while True:
            # Half of it: what it is at is looked at, then looked at again.
            message = child.receive((patience_s if child.is_ready else _BEGINNING_S) / 2)
            if message is None:
                now = progress()
                is_starved = child.waits_for_a_processor and time.monotonic() < starved_until_s
                if now == before and not is_starved:
                    self.lose(is_stuck=child.is_ready)
                    return None
                before = now
            elif not message.data:
                self.lose(is_stuck=False)
                return None
            elif child.is_ready:
                return message
            else:
                child.is_ready = True
                words = message.data.decode(errors="replace").removeprefix("ready ")
                self.failures = words or self.failures

    def lose(self, *, is_stuck: bool) -> None:
        """Ends the child, which got nowhere or is none that answers any more."""
        if is_stuck:
            self.stuck += 1
        else:
            self.deaths += 1
        self._leave()

    def _leave(self) -> None:
        if self.child is not None:
            self.child.end()
            self._ended.append(self.child)
            self.child = None

    def close(self) -> None:
        """Ends the child."""
        self._leave()
        until_s = time.monotonic() + _KILLING_S
        starved_until_s = time.monotonic() + _STARVED_PATIENCE_S
        for child in reversed(self._ended):  # the last one is not stuck
            while not _ends_until(child.process, until_s) and child.waits_for_a_processor:
                if time.monotonic() >= starved_until_s:
                    break
                until_s = time.monotonic() + _LOOK_S
        self._ended = []
