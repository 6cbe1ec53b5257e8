# SPDX-License-Identifier: Apache-2.0
"""What keeps signals from children: they are for the recorder, which ends its children.

Some come to all processes of a cgroup (systemd's KillMode=control-group) or of a name (pkill): who
is needed until the recorder's end ignores those.

A Ctrl-C at the terminal comes to its process group. One of their own keeps it from children, and so
would a session; but each session is also a scheduling group of its own (autogroups, sched(7)), and
on some kernels a new one starves. Beside two busy pairs of processes that wake each other, one pair
for each CPU, a child in a new session got its first time on a processor when the pairs ended, after
4.8 to 9.4 s, and one in a new process group at once (v6.18).
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

# Of subprocess.Popen. Python 3.10 has no such argument, and forks instead of vfork for this.
OWN_PROCESS_GROUP: dict[str, Any] = (
    {"process_group": 0} if sys.version_info >= (3, 11) else {"preexec_fn": os.setpgrp}
)

# They end a recording; the last makes a copy of it.
_FOR_RECORDER = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)


def leave_signals_to_recorder() -> None:
    """Ignores what is the recorder's to heed; for a process that ends with whoever started it."""
    for number in _FOR_RECORDER:
        signal.signal(number, signal.SIG_IGN)
