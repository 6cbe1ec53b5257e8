# SPDX-License-Identifier: Apache-2.0
"""A graph that Python captured: its kernels under the code that launched it and that built it.

Driver, runtime and CUPTI are stand-ins (tests/standin): a block takes a microsecond.
"""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from aiflame.agent.reports.graph_nodes import MARKER
from nvidia_helper import Target, build
from recordings import Ended, Recording
from support import WORKLOADS

pytestmark = pytest.mark.bpf

_REPLAYS = 100
_SITES = {"norm": 800, "attention": 400, "mlp": 1200}  # microseconds
_KERNELS = {"norm": "scale", "attention": "scale", "mlp": "reduce"}


@pytest.fixture(scope="module")
def standin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("standin"))


@pytest.fixture(scope="module")
def library(cuda_workload: Callable[..., Path]) -> Path:
    flags = ("-shared", "-Xcompiler", "-fPIC", "-cudart", "shared", "-arch=sm_90", "-lineinfo")
    return cuda_workload("cudagraph", *flags, "--no-compress")


@pytest.fixture(scope="module")
def recorded(standin: Path, library: Path, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """A graph of three kernels, captured from three sites, and replayed."""
    folder = tmp_path_factory.mktemp("recorded")
    arguments = [WORKLOADS / "pygraph.py", library, _REPLAYS, *_SITES.values()]
    with (
        Target(
            standin, gpu="tier=2,read-out=100", program=Path(sys.executable), arguments=arguments
        ) as target,
        Recording(folder, "-p", target.pid) as recording,
    ):
        target.read_until(lambda told: told.tier)
        assert target.truth() == {"graph.ns": _REPLAYS * sum(_SITES.values()) * 1000}
        return recording.stop()


_Report = Callable[..., subprocess.CompletedProcess[str]]


def _folded(run_aiflame: _Report, ended: Ended, folder: Path, *more: str) -> Counter[str]:
    """Returns weights by the stack of the launch, and the kernel."""
    path = folder / "report.folded"
    run_aiflame("report", ended.capture, "--plain", "-f", "folded", "-o", path, "--force", *more)
    found: Counter[str] = Counter()
    for line in path.read_text().splitlines():
        stack, _, weight = line.rpartition(" ")
        launched, _, ran = stack.partition(";-;")
        found[f"{launched};-;{ran.partition(';')[0]}"] += int(weight)
    return found


def _site(stack: str) -> str:
    """Returns the function that has built the node of a kernel."""
    _, marker, built = stack.partition(MARKER)
    sites = [site for site in _SITES if f";{site} (pygraph.py:" in built]
    return sites[0] if marker and len(sites) == 1 else f"none of {stack}"


def test_time_of_a_graph_is_under_who_launched_and_who_built_it(
    recorded: Ended, tmp_path: Path, run_aiflame: _Report
) -> None:
    # THEN each nanosecond is under the launch, and after it under the code that built the node
    found = _folded(run_aiflame, recorded, tmp_path, "--view", "gputime")
    assert {_site(stack): ns for stack, ns in found.items()} == {
        site: us * 1000 * _REPLAYS for site, us in _SITES.items()
    }
    for stack in found:
        launch, _, built = stack.partition(f";{MARKER};")
        assert ";replay (pygraph.py:" in launch
        assert launch.endswith(";launch_graph;cudaGraphLaunch")
        # From where the two differ: another line of main().
        assert built.startswith("main (pygraph.py:")
        assert ";build (pygraph.py:" in built
        assert built.endswith(f"cudaLaunchKernel;-;{_KERNELS[_site(stack)]}")
    # AND each way to show it has the same sum
    for graph, marked in (("launched", False), ("built", False), ("both", True)):
        other = _folded(run_aiflame, recorded, tmp_path, "--view", "gputime", "--graph", graph)
        assert sum(other.values()) == sum(found.values())
        assert any(MARKER in stack for stack in other) == marked
        assert any("replay (" in stack for stack in other) == (graph != "built")
        assert any("attention (" in stack for stack in other) == (graph != "launched")


def test_samples_of_a_graph_are_under_both(
    recorded: Ended, tmp_path: Path, run_aiflame: _Report
) -> None:
    found = _folded(run_aiflame, recorded, tmp_path, "--view", "gpu")
    launched = _folded(run_aiflame, recorded, tmp_path, "--view", "gpu", "--graph", "launched")
    whole = sum(found.values())
    assert whole == sum(launched.values())
    shares = {_site(stack): count / whole for stack, count in found.items()}
    assert shares == {
        site: pytest.approx(us / sum(_SITES.values()), abs=0.02) for site, us in _SITES.items()
    }


def test_a_capture_has_the_code_of_what_was_sampled(
    recorded: Ended, tmp_path: Path, run_aiflame: _Report
) -> None:
    # GIVEN that nvdisasm was not there, and its instructions and lines are in no capture
    capture = tmp_path / "run.aiflame"
    capture.write_bytes(recorded.capture.read_bytes())
    with closing(sqlite3.connect(capture)) as database:
        assert database.execute("SELECT count(*) FROM code_objects").fetchone()[0] == 1
        database.execute("DELETE FROM instructions")
        database.commit()
    # WHEN a report is made on a machine that has it
    path = tmp_path / "report.folded"
    run_aiflame("report", capture, "--view", "gpu", "--plain", "-f", "folded", "-o", path)
    # THEN samples have their source lines
    assert {
        stack.partition(";-;")[2].split(";")[1].partition(":")[0]
        for stack in path.read_text().splitlines()
    } == {"cudagraph.cu"}
