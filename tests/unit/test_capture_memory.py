# SPDX-License-Identifier: Apache-2.0
"""The process that writes a capture stays as large as it is, whatever comes and goes."""

from __future__ import annotations

import multiprocessing
import re
import statistics
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from aiflame.agent.inspector.fork_server import ForkServer
from aiflame.agent.model.profile import SampleClass, StopReason
from aiflame.agent.model.window import COLUMNS, NO_TIME, NONE, Window, check
from aiflame.agent.sinks.written import Naming, WrittenCapture
from aiflame.agent.symbolize.files import GivenFiles
from aiflame.agent.symbolize.recent import Recent
from aiflame.agent.symbols.file_facts import FileFacts
from aiflame.agent.symbols.service import SymbolService
from aiflame.agent.target_files import FileGuard

_S = 1_000_000_000
# Of one window, which are those of no other.
_PROCESSES, _MAPPINGS, _STACKS, _DEPTH, _FUNCTIONS = 20, 10, 100, 16, 15


def _churn(number: int) -> Window:
    """Returns a window in which all is new: processes, stacks, addresses and functions."""
    processes = np.zeros(_PROCESSES, COLUMNS["processes"].dtype)
    processes["process"] = number * _PROCESSES + np.arange(_PROCESSES)
    processes["pid"] = processes["process"] % 30_000 + 1
    processes["exited_ns"], processes["cgroup"] = NO_TIME, NONE
    threads = np.zeros(_PROCESSES, COLUMNS["threads"].dtype)
    threads["thread"] = threads["process"] = processes["process"]
    mappings = np.zeros(_PROCESSES * _MAPPINGS, COLUMNS["mappings"].dtype)
    mappings["process"] = np.repeat(processes["process"], _MAPPINGS)
    mappings["binary"] = NONE
    mappings["start"] = np.tile(np.arange(1, _MAPPINGS + 1) << 40, _PROCESSES)
    mappings["end"] = mappings["start"] + (1 << 39)
    stacks = np.zeros(_STACKS, COLUMNS["stacks"].dtype)
    stacks["stack"] = number * _STACKS + np.arange(_STACKS) + 1
    stacks["process"] = processes["process"][np.arange(_STACKS) % _PROCESSES]
    stacks["first"], stacks["user_depth"] = np.arange(_STACKS) * _DEPTH, _DEPTH
    stacks["stop_reason"], stacks["call"] = StopReason.ROOTED, NONE
    addresses = np.zeros(_STACKS * _DEPTH, COLUMNS["addresses"].dtype)
    dice = np.random.default_rng(number)
    addresses["address"] = (1 << 40) + dice.integers(0, 40, len(addresses)) * 64
    addresses["address"][::_DEPTH] += dice.integers(0, 1 << 32, _STACKS, np.uint64)
    jit_symbols = np.zeros(_FUNCTIONS, COLUMNS["jit_symbols"].dtype)
    jit_symbols["process"] = stacks["process"][:_FUNCTIONS]
    jit_symbols["address"] = addresses["address"][::_DEPTH][:_FUNCTIONS]
    jit_symbols["name"] = np.arange(1, _FUNCTIONS + 1)
    samples = np.zeros(_STACKS, COLUMNS["samples"].dtype)
    samples["stack"], samples["thread"] = stacks["stack"], stacks["process"]
    samples["kind"], samples["count"], samples["weight_ns"] = SampleClass.ON_CPU, 1, 10_000_000
    columns = {
        "processes": processes,
        "threads": threads,
        "mappings": mappings,
        "stacks": stacks,
        "addresses": addresses,
        "jit_symbols": jit_symbols,
        "samples": samples,
    }
    texts = ("", *(f"function {number * _FUNCTIONS + i}" for i in range(_FUNCTIONS)))
    window = Window.of(number, number * _S, (number + 1) * _S, columns, texts=texts)
    check(window)
    return window


def _anonymous_mb() -> float:
    (kb,) = re.findall(r"^RssAnon:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.M)
    return int(kb) / 1024


def _sizes_mb(path: Path, windows: int) -> list[float]:
    """Returns how large this process is after each of so many windows."""
    found = []
    with (
        SymbolService(None) as service,
        closing(ForkServer()) as server,
        closing(FileFacts(server, FileGuard())) as file_facts,
    ):
        naming = Naming(GivenFiles(), service, file_facts)
        capture = WrittenCapture(path, 0, {}, naming)
        for number in range(windows):
            capture.put(_churn(number))
            found.append(_anonymous_mb())
        capture.finish()
    return found


@pytest.mark.breadth
def test_memory_is_flat_after_the_first_minutes(tmp_path: Path) -> None:
    # Of its own, since what other tests freed would be taken first.
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        found_mb = pool.submit(_sizes_mb, tmp_path / "capture", 1_000).result()
    # It goes up and down by the age of what is kept.
    assert statistics.mean(found_mb[-200:]) - statistics.mean(found_mb[300:500]) < 1


def test_what_is_used_stays_and_the_rest_leaves() -> None:
    left: dict[str, int] = {}
    recent: Recent[str, int] = Recent(turns=10, size=100, leaving=left.update)
    recent.keep("used", 1)
    recent.keep("forgotten", 2)
    for _ in range(20):
        recent.turn()
        assert recent.find("used") == 1
    assert "forgotten" not in recent
    assert left == {"forgotten": 2}


def test_what_comes_all_at_once_leaves_early() -> None:
    recent: Recent[int, int] = Recent(turns=10, size=100)
    for number in range(1_000):
        assert recent.get(number, lambda number=number: -number) == -number
        assert len(recent) <= 200
    assert recent.get(999, lambda: 1) == -999
    recent.keep(999, 2)
    assert recent.find(999) == 2
