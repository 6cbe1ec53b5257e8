# SPDX-License-Identifier: Apache-2.0
"""What is carried to a machine with an NVIDIA device works on one that has nothing else."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.bpf

_ROOT = Path(__file__).parents[2]
_SCRIPT = "tests/device/nvidia.sh"
_CARRIED = "build/device"
# Those that record, load and end; each of the others is a variant of one of them.
_ASKED = {"machine", "late", "plain", "overhead_of_training", "beside_first", "ending"}


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plain copy of this tree, with what is carried."""
    if not (_ROOT / _CARRIED / "wheels/.wanted").exists():
        pytest.skip("no packages to carry")
    version = "import sys; print('%d.%d' % sys.version_info[:2])"
    python = subprocess.run(
        ["/usr/bin/python3", "-c", version], capture_output=True, text=True, check=True
    ).stdout.strip()
    subprocess.run([_SCRIPT, "carry", python], cwd=_ROOT, check=True)
    copy = tmp_path_factory.mktemp("bare") / "tree"
    (copy / _CARRIED).parent.mkdir(parents=True)
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(listed, cwd=_ROOT, capture_output=True, check=True).stdout
    there = b"\0".join(name for name in names.split(b"\0") if (_ROOT / name.decode()).is_file())
    archive = subprocess.run(
        ["tar", "--null", "-T", "-", "-c"],
        cwd=_ROOT,
        input=there,
        stdout=subprocess.PIPE,
        check=True,
    ).stdout
    subprocess.run(["tar", "-x", "-C", copy], input=archive, check=True)
    subprocess.run(["cp", "-a", _ROOT / _CARRIED, copy / _CARRIED], check=True)
    return copy


def _on_a_bare_machine(tree: Path, folder: Path, *words: str) -> tuple[str, dict[str, Any]]:
    """Runs the script there; returns its table, and its answers by name."""
    command = [tree / "tests/device/bare.sh", folder, tree, _SCRIPT, words[0], "out", *words[1:]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=480, check=False)
    assert done.returncode == 0, done.stderr
    answers = json.loads((tree / "out/answers.json").read_text())
    assert done.stdout == (tree / "out/answers.txt").read_text()
    return done.stdout, {answer["name"]: answer for answer in answers}


def test_the_script_answers_with_the_stand_in(tree: Path, tmp_path: Path) -> None:
    table, answers = _on_a_bare_machine(tree, tmp_path, "rehearse", *_ASKED)
    # THEN each question has a row, and an answer
    assert {name: answer["outcome"] for name, answer in answers.items()} == dict.fromkeys(
        _ASKED, "answered"
    ), table
    rows = [line.split() for line in table.splitlines() if not line.startswith(" ")]
    assert {row[0]: row[1] for row in rows[1:]} == dict.fromkeys(_ASKED, "answered")
    # AND they are those of recordings
    late = answers["late"]["values"]
    assert late["times"] > 0 and late["samples"] > 0
    assert (late["kernels"], late["exact"]) == (1, 1.0)
    plain = answers["plain"]["values"]
    assert plain["kernels"] == 3
    # Its kernels were loaded before it was recorded.
    assert plain["codes_found_by_name"] == plain["codes"] == 3
    assert plain["runs of often"] == pytest.approx(plain["runs of replay"] / 2, rel=0.2)
    assert answers["beside_first"]["values"] == {"times": 0, "samples": 0}


def test_without_pytorch_and_device_the_script_says_so(tree: Path, tmp_path: Path) -> None:
    table, answers = _on_a_bare_machine(tree, tmp_path, "run")
    assert answers.pop("machine")["outcome"] == "answered"
    assert {answer["outcome"] for answer in answers.values()} == {"not here"}, table
    assert "no device" in answers.pop("plain")["words"]
    assert "no driver" in answers.pop("command")["words"]
    assert {answer["words"] for answer in answers.values()} == {"torch is not installed"}


def test_packages_for_another_python_are_refused(tmp_path: Path) -> None:
    # GIVEN packages for a Python that no machine has
    script = tmp_path / _SCRIPT
    script.parent.mkdir(parents=True)
    script.write_bytes((_ROOT / _SCRIPT).read_bytes())
    wanted = tmp_path / _CARRIED / "wheels/.wanted"
    wanted.parent.mkdir(parents=True)
    wanted.write_text("3.0 numpy==1\n")
    done = subprocess.run(["bash", script, "run"], capture_output=True, text=True, check=False)
    # THEN it is said which ones to carry
    assert done.returncode == 2 and done.stdout == ""
    assert "packages for Python 3.0 are carried, and here is 3." in done.stderr
