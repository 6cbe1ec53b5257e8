# SPDX-License-Identifier: Apache-2.0
"""What the kernel half tells of processes, and who is told of it."""

from __future__ import annotations

from unittest.mock import Mock

import numpy as np
from aiflame.agent.kernel import abi
from aiflame.agent.recording.events import Events


def test_what_is_kept_for_a_process_goes_when_it_is_left_out_and_calls_exec() -> None:
    """Nobody tells of its end later, and its pid may be another's by then."""
    event = np.zeros(1, abi.PROCESS_EVENT_DTYPE)
    event["type"], event["tgid"] = abi.EventType.LEFT_OUT_EXEC, 7
    event["image"], event["ns"] = 100, 200
    ring, keeper, left_out = Mock(), Mock(), Mock()
    ring.records.return_value = [event.tobytes()]
    others = (Mock(), Mock(), Mock())
    events = Events(ring, *others, [keeper], Mock(), Mock(), Mock(), Mock(), left_out)
    events.take()
    keeper.forget.assert_called_once_with(7)
    left_out.assert_called_once_with(7, 100, 200)
