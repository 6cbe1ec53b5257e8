# SPDX-License-Identifier: Apache-2.0
"""What a recording lost, in words: every name has a meaning, and one without is no error."""

from __future__ import annotations

from aiflame.agent.commands.record_losses import loss_rows
from aiflame.agent.recording import abi
from aiflame.agent.recording.recorder import Outcome

_NOTHING = Outcome(duration_ns=1, counters=dict.fromkeys(abi.Counter, 0), costs={}, overrun_ns=0)


def test_a_name_that_nobody_knows_is_shown_as_it_is() -> None:
    problems = {"something_new": 3, "stack_lost": 0}
    files = {"something_new": {"/lib/b", "/lib/a"}}
    assert loss_rows(_NOTHING, problems, files) == [
        ("something_new", 3, "something new: /lib/a, /lib/b")
    ]
