# SPDX-License-Identifier: Apache-2.0
"""The script for NVIDIA's devices gets to its end whatever a step does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

_DEVICE = Path(__file__).parents[1] / "device"
_ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{_DEVICE.parent}:{_DEVICE}"}


def _python(*words: object) -> str:
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(
        command, env=_ENVIRONMENT, capture_output=True, text=True, check=True, timeout=120
    )
    return done.stdout


def _running(mark: str) -> list[str]:
    """Command lines of processes that have a word."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if mark in line:
            found.append(line)
    return found


def _step(shell: str, limit_s: float) -> str:
    call = f"steps.run_step(['sh', '-c', {shell!r}], {limit_s})"
    words = f"import steps; steps.adopt_orphans(); print({call})"
    return _python("-c", words).strip()


def test_a_step_that_hangs_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    # GIVEN one that is deaf, with a child in a session of its own
    mark = f"7000.{os.getpid()}"
    begun = tmp_path / "begun"
    shell = f"trap '' TERM INT; setsid sleep {mark} & sleep {mark} & touch {begun}; wait; wait"
    assert _step(shell, 5) == "(None, [])"
    assert begun.exists()
    assert _running(mark) == []


def test_what_a_step_leaves_is_ended() -> None:
    mark = f"7001.{os.getpid()}"
    assert _step(f"setsid sleep {mark} & exit 3", 60) == "(3, [])"
    assert _running(mark) == []


def _answers(out: Path, *words: object) -> dict[str, dict[str, str]]:
    _python(_DEVICE / "nvidia.py", "--out", out, *words)
    return {answer["name"]: answer for answer in json.loads((out / "answers.json").read_text())}


def test_a_program_that_hangs_is_named_and_the_others_are_asked(tmp_path: Path) -> None:
    # GIVEN a driver that makes each program wait for ever
    mark = f"7002.{os.getpid()}"
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\ntrap '' TERM\nsleep {mark} &\nwait\n")
    program.chmod(0o755)
    answers = _answers(
        tmp_path / "out", "--standin", tmp_path, "--limit-s", 8, "late", "command", "machine"
    )
    assert {name: answer["outcome"] for name, answer in answers.items()} == {
        "machine": "answered",
        "late": "ENDED",
        "command": "not here",
    }
    assert answers["late"]["words"] == "it was not over in 8 s"
    assert _running(mark) == []
    table = (tmp_path / "out/answers.txt").read_text()
    assert "late                     ENDED" in table


def test_what_is_not_reached_is_named(tmp_path: Path) -> None:
    answers = _answers(tmp_path / "out", "--budget-s", 0)
    assert len(answers) > 20
    assert {answer["outcome"] for answer in answers.values()} == {"not reached"}
