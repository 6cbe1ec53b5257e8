# SPDX-License-Identifier: Apache-2.0
"""`make fleet-demo` in short form: what its pages show, and that nothing is left of it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import support
from aiflame.agent import kernelfs
from aiflame.agent.processes.targets import cgroup2_mounts

pytestmark = [
    pytest.mark.bpf,
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("chdb") is None, reason="chDB is not installed"),
]

_DEMO = Path(__file__).parents[1] / "fleet_demo.py"
# What each is called, and a function of its own.
_SERVICES = {
    "demo-inference": "Model.forward",
    "demo-ranking": "Ranker.score",
    "demo-ranking-canary": "Ranker.remove_duplicates",
    "demo-serving": "matrix_multiply",
}


def _is_nothing_left(folder: Path) -> bool:
    """Whether no process of a demo is there, no cgroup, and no private file."""
    commands = [kernelfs.read_text(path) for path in Path("/proc").glob("[0-9]*/cmdline")]
    groups = [*cgroup2_mounts()[0].glob("system.slice/demo-*")]
    ours = (str(_DEMO), str(folder), "aiflame-demo-")
    return not groups and not any(one in command for one in ours for command in commands)


def _folded(store: Path, *options: str) -> dict[str, int]:
    """Returns what a store holds, by stack."""
    words = ("query", "flame", "-f", "folded", "-o", "-", "--store", store, *options)
    command = [*support.AIFLAME, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    lines = (line.rpartition(" ") for line in done.stdout.splitlines())
    return {stack: int(count) for stack, _, count in lines}


def test_pages_show_each_service_with_its_own_code(tmp_path: Path) -> None:
    out = tmp_path / "demo"
    command = [sys.executable, _DEMO, out, "--seconds", "12"]
    # Without the width that readline sets (see `run_aiflame`), by which tables would be narrower.
    environment = {**os.environ}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    said = done.stdout
    assert all(f"{name}.html" in said for name in ("index", "fleet", "gpu"))
    assert {"fleet.html", "gpu.html"} <= {path.name for path in out.iterdir()}
    # Each service has a page, which is named after it.
    for name in _SERVICES:
        page = (out / f"{name}.html").read_text()
        assert f"service {name}" in page
    stacks = _folded(out / "store")
    for name, function in _SERVICES.items():
        assert any(one.startswith(f"{name};") and function in one for one in stacks), name
    # What the device did is under the code that launched it, whatever else there was to name.
    sampled = _folded(out / "store", "--view", "gpu")
    below = {stack: count for stack, count in sampled.items() if "Model.forward" in stack}
    assert sum(below.values()) > 0.7 * sum(sampled.values()) > 0
    tables = (out / "index.html").read_text()
    assert re.search(r"\bmatmul +PoCL", tables)
    # A short demo has too few samples to compare, and says so.
    assert "points" in tables or "too few" in tables
    assert _is_nothing_left(out)


def test_nothing_is_left_after_ctrl_c(tmp_path: Path) -> None:
    command = [sys.executable, _DEMO, tmp_path / "demo"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        assert "recording demo-inference" in process.stdout.readline()
        # As a terminal does: to all of its foreground.
        os.killpg(process.pid, signal.SIGINT)
        _, complaints = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in complaints
    assert _is_nothing_left(tmp_path)
