# SPDX-License-Identifier: Apache-2.0
"""pprof files in the program that they are for: `go tool pprof` reads them, with our totals."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from aiflame.agent.model.profile import Profile, SampleClass
from aiflame.agent.reports import FORMATS, ReportOptions, View
from profiles import deep_profile, empty_profile, hostile_profile, large_profile, small_profile

_GO = shutil.which("go")
pytestmark = pytest.mark.skipif(_GO is None, reason="Go is not installed")

# flat, flat%, sum%, cum, cum%, name: `      530ms 30.46% 30.46%      530ms 30.46%  matmul`.
_ROW = re.compile(r"\s*([\d.]+)(?:ns)?\s+\S+%?\s+\S+%\s+([\d.]+)(?:ns)?\s+\S+%\s+(.*)")
_TOTAL = re.compile(r"Total samples = ([\d.]+)ns")
_MS = 1_000_000


def _pprof(file: Path, *arguments: str) -> str:
    """What `go tool pprof` prints; it writes next to the home folder, and asks nobody."""
    command = [_GO or "", "tool", "pprof", "-symbolize=none", "-unit=ns", *arguments, str(file)]
    environment = {"HOME": str(file.parent), "PPROF_TMPDIR": str(file.parent)}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def _written(profile: Profile, folder: Path, view: View = View.WALL) -> Path:
    file = folder / "run.pb.gz"
    file.write_bytes(FORMATS["pprof"].render(profile, ReportOptions(view=view)))
    return file


def _tables(text: str) -> dict[str, tuple[float, float]]:
    """Own time and time with callees by function, in ns."""
    rows = map(_ROW.fullmatch, text.splitlines())
    return {row[3]: (float(row[1]), float(row[2])) for row in rows if row is not None}


def _total_ns(text: str) -> float:
    found = _TOTAL.search(text)
    assert found is not None, text
    return float(found[1])


def _many_stacks() -> Profile:
    return large_profile(stacks=2_000, samples=20_000)


@pytest.mark.parametrize("make", [small_profile, hostile_profile, deep_profile, _many_stacks])
def test_the_totals_are_ours(make, tmp_path: Path) -> None:
    profile = make()
    file = _written(profile, tmp_path)
    samples = profile.samples
    parts = {
        "wall": samples["ns"].sum(),
        "on_cpu": samples["ns"][samples["klass"] == SampleClass.ON_CPU].sum(),
        "off_cpu": samples["ns"][samples["klass"] != SampleClass.ON_CPU].sum(),
    }
    for column, expected_ns in parts.items():
        if not expected_ns:
            continue
        text = _pprof(file, "-top", "-nodecount=10", f"-sample_index={column}")
        # It prints four digits.
        assert _total_ns(text) == pytest.approx(float(expected_ns), rel=1e-3)


def test_each_function_has_its_time(tmp_path: Path) -> None:
    found = _tables(_pprof(_written(small_profile(), tmp_path), "-top", "-sample_index=wall"))
    assert found["matmul"] == (530 * _MS, 530 * _MS)
    assert found["parse"] == (400 * _MS, 400 * _MS)
    assert found["futex_wait"] == (270 * _MS, 270 * _MS)
    assert found["main"] == (0, 820 * _MS)
    assert found["train"] == found["start_thread"] == (0, 800 * _MS)


def test_lines_and_labels_are_there(tmp_path: Path) -> None:
    file = _written(small_profile(), tmp_path)
    assert "step src/step.py:31" in _pprof(file, "-top", "-lines")
    tags = _pprof(file, "-tags")
    assert "worker" in tags
    assert "off_cpu_cause" in tags


def test_a_view_is_what_it_opens_with(tmp_path: Path) -> None:
    text = _pprof(_written(small_profile(), tmp_path, View.CPU), "-top")
    assert "Type: on_cpu" in text
    assert _total_ns(text) == 1_040 * _MS


def test_nothing_recorded_is_no_error(tmp_path: Path) -> None:
    assert not np.any(empty_profile().samples["ns"])
    assert "nodes accounting for 0" in _pprof(_written(empty_profile(), tmp_path), "-top")
