# SPDX-License-Identifier: Apache-2.0
"""What is said of a capture goes into one message, whatever targets call their files."""

from __future__ import annotations

import pytest
from aiflame.agent.sinks.capture_report import MAX_REPORT_BYTES, Report
from aiflame.agent.typed_messages import encode


@pytest.mark.parametrize("letter", ["a", "é", "\U0001f525", "\0"])
def test_problems_with_files_of_any_name_fit_into_a_message(letter: str) -> None:
    report = Report(problems=(4096 * letter,) * 500, window_losses={"ring_full": 3})
    bounded = report.bounded()
    assert len(encode(bounded)) < MAX_REPORT_BYTES
    # As many as there is room for are told, and the rest of it is as it was.
    assert len(bounded.problems) >= 20 and bounded.window_losses == {"ring_full": 3}


def test_few_problems_stay() -> None:
    report = Report(problems=("no ELF: /a", "no ELF: /b"))
    assert report.bounded() == report
