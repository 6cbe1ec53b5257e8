# SPDX-License-Identifier: Apache-2.0
"""`aiflame dump` on every interpreter: each waiting thread's Python frames, as it recorded them."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.bpf

Start = Callable[..., Any]
Run = Callable[..., subprocess.CompletedProcess[str]]


def _threads(run_aiflame: Run, pid: int) -> dict[int, dict[str, Any]]:
    done = run_aiflame("dump", "-p", pid, "--json")
    assert done.returncode == 0, done.stderr
    (process,) = json.loads(done.stdout)["processes"]
    assert process["notes"] == []
    return {thread["tid"]: thread for thread in process["threads"]}


def test_every_thread_has_the_lines_that_it_said(start: Start, run_aiflame: Run) -> None:
    # GIVEN threads that wait with the GIL released, at the end of known stacks
    target = start()
    # WHEN they are dumped
    threads = _threads(run_aiflame, target.pid)
    for who, said in target.truth.items():
        thread = threads[said["tid"]]
        found = [
            [frame["file"], frame["name"], frame["line"]]
            for frame in thread["frames"]
            if frame["kind"] == "python"
        ]
        # THEN each has all of its frames, below at most the callers of what it waits in
        truth = [[file, qualname, line] for file, _, qualname, line in said["frames"]]
        assert found[-len(truth) :] == truth, who
        assert len(found) - len(truth) <= 2
        # AND they stand in a whole native stack, between the wait and the thread's start
        free_threaded = target.interpreter.layout.free_threaded
        assert thread["gil"] == ("unknown" if free_threaded else "released")
        assert (thread["doubt"], thread["cut"], thread["python_cut"]) == (None, None, None)
        kinds = [frame["kind"] for frame in thread["frames"]]
        assert kinds[0] in ("kernel", "native")
        assert kinds[-1] == "native"


def test_a_busy_thread_shows_where_it_runs(start: Start, run_aiflame: Run) -> None:
    target = start("--busy")
    thread = _threads(run_aiflame, target.pid)[target.truth["busy"]["tid"]]
    names = [frame["name"] for frame in thread["frames"] if frame["kind"] == "python"]
    assert "run_forever" in names, thread
    assert thread["state"] in ("running", "runnable")
    assert (thread["doubt"] == "running") == (thread["state"] == "running")
