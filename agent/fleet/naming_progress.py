# SPDX-License-Identifier: Apache-2.0
"""Whether the naming process gets on, seen from outside: it need not say so, and costs nothing.

It takes messages one after the other, and does what one says before it takes the next. So one that
lives and takes none of those that wait is at something long, or hangs: what tells these apart is
whether its main thread ever runs.
"""

from __future__ import annotations

import array
import fcntl
import socket
import termios
import time
from contextlib import suppress

from aiflame.agent.processes import procfs

# A stretch takes seconds to name, on a host with a load of 20 minutes: what takes longer is told
# and left alone. As long as one that does not stay is waited for (vitals.py).
UNHEARD_S = 300.0
# Longer than anything that its main thread waits for in one sleep: a copy of itself has 900 s
# (fork.py), one that reads a file 65 s, a kubelet less. A thread that waits for a processor runs.
HUNG_S = 1000.0
# It is looked once a second. What lies between two looks beyond this is time in which nobody
# looked: the host was suspended, or all of a cgroup frozen.
_MOST_BETWEEN_LOOKS_S = 10.0


class NamingProgress:
    """For how long a process takes none of the messages that wait for it.

    Args:
        channel: Where messages go.

    Attributes:
        unheard_s: How long.
        still_s: For how much of that its main thread has not run.
    """

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._unread_bytes = 0
        self._switches: int | None = None
        self._looked_s = time.monotonic()
        self.unheard_s = self.still_s = 0.0

    def note_taken(self) -> None:
        """Looks whether it has taken any since `note_sent`; to be called before others are sent."""
        now_bytes = self._now_unread_bytes()
        if now_bytes < self._unread_bytes or not now_bytes:
            self.unheard_s = self.still_s = 0.0
            self._unread_bytes = now_bytes

    def note_sent(self) -> None:
        """Looks how much waits, once messages were sent."""
        self._unread_bytes = self._now_unread_bytes()

    def look(self, pid: int | None) -> None:
        """Takes note of the time that has passed since the last look.

        Args:
            pid: Of the process, None where it is not there yet.
        """
        now_s = time.monotonic()
        passed_s = min(now_s - self._looked_s, _MOST_BETWEEN_LOOKS_S)
        self._looked_s = now_s
        self.note_taken()
        if not self._unread_bytes:
            return
        self.unheard_s += passed_s
        stat = None if pid is None else procfs.thread_stat(pid, pid)
        before, self._switches = self._switches, None if stat is None else stat.switches
        runs = stat is not None and (stat.state == "R" or stat.switches != before)
        self.still_s = 0.0 if runs else self.still_s + passed_s

    def _now_unread_bytes(self) -> int:
        """Returns what the other side has not read yet (SIOCOUTQ: unix_ioctl of af_unix.c, v6.1).

        The kernel's own part of each message is in it.
        """
        found = array.array("i", [0])
        with suppress(OSError):
            fcntl.ioctl(self._channel, termios.TIOCOUTQ, found)  # the same number as SIOCOUTQ
        return found[0]
