# SPDX-License-Identifier: Apache-2.0
"""What the kernel half tells of processes, and who is told of it."""

from __future__ import annotations

from unittest.mock import Mock

import numpy as np
import pytest
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


@pytest.mark.parametrize(
    ("arguments", "is_whole"),
    [
        (b"cc\0-c\0a.c\0", True),
        (b"", False),  # in no memory
        (b"a" * (abi.ARGUMENTS_BYTES - 2) + b"\0", False),  # there may be more
        (b"postgres:", False),  # a title, of which the rest lies behind
    ],
)
def test_arguments_are_whole_if_they_end_as_an_exec_wrote_them(
    arguments: bytes, is_whole: bool
) -> None:
    event = np.zeros(1, abi.EXEC_EVENT_DTYPE)
    event["type"], event["tgid"], event["image"] = abi.EventType.EXEC, 7, 100
    event["size"] = len(arguments)
    event["arguments"][0, : len(arguments)] = np.frombuffer(arguments, np.uint8)
    ring, table = Mock(), Mock()
    ring.records.return_value = [event.tobytes()]
    others = (Mock(), Mock())
    Events(ring, table, *others, [], Mock(), Mock(), Mock(), Mock(), Mock()).take()
    table.has_become.assert_called_once_with(7, 100, arguments, is_whole=is_whole)
