# SPDX-License-Identifier: Apache-2.0
"""The end of an agent that waits for something that never comes."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

# Waits for nothing, where no signal wakes it up, once it is told to end; or ends by itself.
_AGENT = """
import sys, time
from aiflame.agent.fleet.agent import AgentSignals
from aiflame.agent.fleet.reloads import ReloadRequests
from aiflame.agent.fleet.ending import end_in_time
from aiflame.agent.fleet.log import Log
with AgentSignals(ReloadRequests()) as signals:
    end_in_time(signals, Log(), end_s=1.0)
    print("ready", flush=True)
    while not signals.requested:
        time.sleep(0.01)
    while sys.argv[1] == "hangs":
        time.sleep(1)
print("ended", flush=True)
"""


@pytest.mark.parametrize(("how", "code", "said"), [("hangs", 1, ""), ("ends", 0, "ended\n")])
def test_an_agent_has_ended_in_time(how: str, code: int, said: str) -> None:
    # GIVEN an agent
    with subprocess.Popen(
        [sys.executable, "-c", _AGENT, how],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        # WHEN it is told to end
        process.send_signal(signal.SIGTERM)
        out, error = process.communicate(timeout=60)
    # THEN it has, by force where it would not, and says so.
    assert (process.returncode, out) == (code, said)
    assert ("takes too long to end" in error) == (how == "hangs")
