# SPDX-License-Identifier: Apache-2.0
"""Stacks of greenlets: each begins with the greenlet, whoever started it or runs on from it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from aiflame.agent.model.profile import COMPLETE_REASONS, SampleClass
from recordings import Workload, frames_of, python_frames_of, record_workload, rows_of_process
from support import WORKLOADS

pytestmark = [pytest.mark.bpf, pytest.mark.breadth]

_START = "greenlet::UserGreenlet::inner_bootstrap("
_MAIN = ("<module>", "main", "work")
_SECOND = ("second_greenlet", "second_greenlet.<locals>.<lambda>", "in_second")


def test_stacks_of_greenlets_begin_with_them(tmp_path: Path) -> None:
    workload = Workload([sys.executable, WORKLOADS / "pygreenlets.py"])
    profile, _ = record_workload(tmp_path, workload, "-F", 999)
    chains = set()
    rows = rows_of_process(profile, workload.pid, SampleClass.ON_CPU, SampleClass.BLOCKED)
    for stack in rows["stack"].tolist():
        chain = tuple(frame.name for frame in python_frames_of(profile, stack))
        if chain[-1:] in (("burn",), ("wait",)):
            chains.add(chain)
            root = frames_of(profile, stack)[0]
            assert root == "_start" if chain[0] == "<module>" else root.startswith(_START)
            assert profile.stacks.ends[stack] in COMPLETE_REASONS
    assert chains == {
        (*_MAIN, "burn"),
        ("first", "burn"),
        (*_SECOND, "burn"),
        (*_SECOND, "wait"),
    }
