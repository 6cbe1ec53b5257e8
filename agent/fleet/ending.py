# SPDX-License-Identifier: Apache-2.0
"""An agent that is told to end has ended in time, whatever it waits for.

What it recorded is on disk from window to window, so that an end by force costs what was not
written yet; children end with it, and the kernel takes its programs off.
"""

from __future__ import annotations

import os
import select
import threading
import time

from aiflame.agent import priority
from aiflame.agent.fleet.log import Log
from aiflame.agent.recording.signals import StopSignals

# From a signal to the end. Kubernetes kills after 30 s, systemd after 90 s.
END_S = 10.0
# What the kernel may take of it to end a process that is ended by force.
_FORCED_S = 0.5
_SAYING_S = 0.1
_EXIT_CODE = 1


def end_in_time(signals: StopSignals, log: Log, end_s: float = END_S) -> None:
    """Sees to it that this process has ended so long after a signal, by force if it has to be.

    Args:
        signals: Tell when it is to end.
        log: Takes a line when it is ended by force.
        end_s: How long it may take, in seconds.
    """
    # Of its own: the signals' are closed before all else has ended.
    fd = os.dup(signals.fd)
    arguments = (signals, log, end_s, fd)
    threading.Thread(target=_end, name="end in time", args=arguments, daemon=True).start()


def _end(signals: StopSignals, log: Log, end_s: float, fd: int) -> None:
    priority.begin_urgent_thread()
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    poll.poll()
    os.close(fd)
    if signals.requested_s is None:  # it ends by itself
        return
    time.sleep(max(signals.requested_s + end_s - _FORCED_S - time.monotonic(), 0))
    said = "it takes too long to end: what is on disk is sent after the next start"
    # Whoever takes the log may be what is waited for.
    saying = threading.Thread(target=log.say, args=(said,), daemon=True)
    saying.start()
    saying.join(_SAYING_S)
    os._exit(_EXIT_CODE)
