# SPDX-License-Identifier: Apache-2.0
"""Every instruction of the standard library: our line against the interpreter's own."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from aiflame.agent.python.layouts import LineTable
from aiflame.agent.python.lines import NO_LINE, line_of

_TRUTH = Path(__file__).parent / "line_truth.py"
_SCRIPT = "import sys; print(*sys.version_info[:2])"


def _kind(python: Path) -> LineTable:
    done = subprocess.run([python, "-I", "-c", _SCRIPT], check=True, capture_output=True, text=True)
    version = tuple(map(int, done.stdout.split()))
    if version >= (3, 11):
        return LineTable.LOCATIONS
    return LineTable.LINETABLE if version == (3, 10) else LineTable.LNOTAB


def test_lines_are_those_of_the_interpreter(python: Path) -> None:
    kind = _kind(python)
    done = subprocess.run([python, "-I", _TRUTH], check=True, capture_output=True, text=True)
    compared = 0
    for text in done.stdout.splitlines():
        said = json.loads(text)
        table = bytes.fromhex(said["table"])
        expected = [line or NO_LINE for line in said["lines"]]
        # Each index where the line changes, and its neighbours, and some between: a table is
        # walked from its start for each answer.
        indexes = {0, len(expected) - 1} | set(range(0, len(expected), 16))
        for index in range(1, len(expected)):
            if expected[index] != expected[index - 1]:
                indexes |= {index - 1, index}
        for index in sorted(indexes):
            line = line_of(kind, table, said["first"], 2 * index)
            assert line == expected[index], (said["first"], index)
            compared += 1
    assert compared > 10_000
