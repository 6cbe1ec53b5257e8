# SPDX-License-Identifier: Apache-2.0
"""Which signals end a recording in order, and which at once."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Iterator

import pytest
from aiflame.agent.errors import Aborted, EndedAtOnce
from aiflame.agent.recording.signals import StopSignals


@pytest.fixture
def signals() -> Iterator[StopSignals]:
    with StopSignals() as found:
        yield found


def test_one_request_may_be_two_signals(signals: StopSignals) -> None:
    # WHEN it is told to end as by timeout(1), which tells a command and then the command's group
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGTERM)
    # THEN it ends in order
    assert signals.requested


def test_a_second_ctrl_c_aborts_it(signals: StopSignals, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = time.monotonic()
    os.kill(os.getpid(), signal.SIGINT)
    monkeypatch.setattr(time, "monotonic", lambda: now_s + 1)
    with pytest.raises(Aborted):
        os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("first, second", [("INT", "TERM"), ("TERM", "INT"), ("TERM", "QUIT")])
def test_another_signal_ends_it_at_once_and_keeps_it(
    signals: StopSignals, first: str, second: str
) -> None:
    os.kill(os.getpid(), signal.Signals[f"SIG{first}"])
    with pytest.raises(EndedAtOnce, match=f"ended at once by SIG{second}"):
        os.kill(os.getpid(), signal.Signals[f"SIG{second}"])


def test_an_impatient_service_manager_keeps_it(
    signals: StopSignals, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = time.monotonic()
    os.kill(os.getpid(), signal.SIGTERM)
    monkeypatch.setattr(time, "monotonic", lambda: now_s + 1)
    with pytest.raises(EndedAtOnce):
        os.kill(os.getpid(), signal.SIGTERM)


def test_a_terminal_that_goes_is_no_request_to_end_at_once(signals: StopSignals) -> None:
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGHUP):
        os.kill(os.getpid(), number)
    assert signals.requested


def test_a_reader_that_goes_ends_it_in_order(signals: StopSignals) -> None:
    for _ in range(2):
        signals.hang_up()
    assert signals.requested
    assert select.select([signals.fd], [], [], 0)[0]


def test_a_reader_that_goes_is_no_matter_to_nohup() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals() as signals:
            signals.hang_up()
            assert not signals.requested
    finally:
        signal.signal(signal.SIGHUP, before)
