# SPDX-License-Identifier: Apache-2.0
"""Threads are shown by the names that Python has for them, where the kernel does not know these."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from interpreters import each, executable
from recordings import Recording, Workload, children_of
from support import WORKLOADS

pytestmark = [pytest.mark.bpf, pytest.mark.breadth]

_SCRIPT = WORKLOADS / "pynames.py"
_SHOWN = {
    "default": "Thread-1",
    "wide": "\u043b\u043e\u0434\u043a\u0430 \U0001f6a2",
    "hostile": "a\ufffd\ufffd[31m<b>&",
    "long": "x" * 127 + "…",
    "loader": "loader",
    "slotted": "slotted",
    "dict": "as dict",
    "comm": "in Python [set by C]",
}


def _expected(version: str, first: str) -> dict[str, str]:
    # bpo-41149: since 3.10 the name of the function is in it.
    has_target = tuple(map(int, version.split("."))) >= (3, 10)
    return {**_SHOWN, "default": "Thread-1 (work)" if has_target else "Thread-1", "named": first}


@pytest.mark.parametrize("version", each(("3.8", "3.9", "3.10", "3.11", "3.12", "3.13")))
def test_threads_have_the_names_that_python_has(
    version: str, tmp_path: Path, run_aiflame: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    # GIVEN threads with names of each kind
    python = executable(version)
    with Workload([python, _SCRIPT]) as load:
        # WHEN they are dumped
        done = run_aiflame("dump", "-p", load.pid, "--json")
        # AND recorded, while one is renamed and another comes and goes
        with Recording(tmp_path, "-p", load.pid, "-F", 99) as recording:
            load.go()
            truth = load.truth()
            profile = recording.stop().profile
    # THEN each is called what Python calls it, and the first one as it is in the kernel
    (process,) = json.loads(done.stdout)["processes"]
    dumped = {thread["tid"]: thread["name"] for thread in process["threads"]}
    for key, name in _expected(version, "named").items():
        assert dumped[truth[key]] == name
    assert dumped[load.pid] == process["name"]
    recorded = {thread.tid: thread.name for thread in profile.threads}
    for key, name in {**_expected(version, "renamed"), "short": "short-lived"}.items():
        assert recorded[truth[key]] == name
    assert recorded[load.pid] == process["name"]
    assert not profile.losses


def test_threads_beyond_those_that_are_named_are_counted(tmp_path: Path) -> None:
    # GIVEN a program with five threads more than are named
    script = """import threading, sys
ended = threading.Event()
threading.stack_size(1 << 16)
for number in range(4_100):
    threading.Thread(target=ended.wait, daemon=True, name=f"pool-{number}").start()
print("ready", flush=True)
sys.stdin.read()"""
    with (
        Workload([executable("3.12"), "-c", script]) as load,
        Recording(tmp_path, "-p", load.pid, "-F", 99) as recording,
    ):
        profile = recording.stop().profile
    named = sum(thread.name.startswith("pool-") for thread in profile.threads)
    assert named == 4_095  # and the first one
    losses = {loss.name: loss.count for loss in profile.losses}
    assert losses["python_names_not_read"] == 5


def test_threads_in_a_namespace_of_pids_are_named(tmp_path: Path) -> None:
    # GIVEN a program that knows its threads by other ids
    command = ["unshare", "-p", "-f", "--mount-proc", executable("3.12"), _SCRIPT]
    with Workload(command) as load:
        (pid,) = children_of(load.pid)
        with Recording(tmp_path, "-p", pid, "-F", 99) as recording:
            load.go()
            truth = load.truth()
            profile = recording.stop().profile
    assert truth["loader"] < pid
    names = {thread.name for thread in profile.threads}
    assert {"renamed", "loader", "as dict", "in Python [set by C]"} <= names


def test_nothing_of_a_name_is_taken_for_markup_or_control(
    tmp_path: Path, run_aiflame: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    with Workload([executable("3.12"), _SCRIPT]) as load:
        with Recording(tmp_path, "-p", load.pid, "-F", 99) as recording:
            load.go()
            load.truth()
            capture = recording.stop().capture
        dumped = run_aiflame("dump", "-p", load.pid).stdout
    stats = run_aiflame("stats", capture).stdout
    page = tmp_path / "page.html"
    assert run_aiflame("report", capture, "-o", page).returncode == 0
    assert '"a\ufffd\ufffd[31m<b>&"' in dumped
    assert "\x1b[31m" not in dumped + stats
    assert "[31m<b>&" not in page.read_text()
