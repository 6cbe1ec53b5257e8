# SPDX-License-Identifier: Apache-2.0
"""Runs that share modules run each test once, and `make test` has all folders of tests."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

_TESTS = Path(__file__).parents[1]
_CONFTEST = f"""\
import sys
from pathlib import Path
sys.path.insert(0, {str(_TESTS)!r})
from shared_modules import SharedModules

def pytest_addoption(parser):
    parser.addoption("--share-modules", type=Path)

def pytest_configure(config):
    config.pluginmanager.register(SharedModules(config.getoption("--share-modules")))
"""
# Each test says that it ran, and that its module's fixture was made once for it and its neighbours.
_MODULE = """\
import pytest
made = []

@pytest.fixture(scope="module")
def one():
    made.append(1)
    yield
    print("put away", __name__)

@pytest.mark.parametrize("number", range(3))
def test(one, number):
    print("ran", __name__, number)
    assert made == [1]
    assert (__name__, number) != ("test_bad", 1)
"""


def _start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "pytest", "-s", "-p", "no:cacheprovider", *arguments]
    return subprocess.Popen(
        [*command, "--share-modules", "taken"], cwd=folder, stdout=subprocess.PIPE, text=True
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "conftest.py").write_text(_CONFTEST)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    for name in ("test_a", "sub/test_b", "sub/test_c"):
        path = tmp_path / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(_MODULE)
    return tmp_path


def test_each_test_runs_in_one_of_them(folder: Path) -> None:
    # WHEN two runs with other orders share the modules
    runs = [_start(folder, "test_a.py", "sub"), _start(folder, "sub", "test_a.py")]
    said = "".join(run.communicate(timeout=120)[0] for run in runs)
    # THEN both end well, and each test ran once, with its module's fixture
    assert [run.returncode for run in runs] == [0, 0], said
    words = Counter(re.findall(r"ran test_\w \d|put away \w+", said))
    names = ("test_a", "test_b", "test_c")
    wanted = [f"ran {name} {number}" for name in names for number in range(3)]
    assert words == Counter([*wanted, *(f"put away {name}" for name in names)])
    # AND one that comes later has nothing to do.
    late = _start(folder)
    said, _ = late.communicate(timeout=120)
    assert (late.returncode, said.count("ran test")) == (0, 0), said


def test_a_failure_fails_the_run_that_has_the_module(folder: Path) -> None:
    (folder / "test_bad.py").write_text(_MODULE)
    run = _start(folder)
    said, _ = run.communicate(timeout=120)
    assert run.returncode == 1
    assert "1 failed, 11 passed" in said


def test_make_runs_all_folders_of_tests() -> None:
    (line,) = re.findall(
        r"^COMPUTING := .* unit .*$", (_TESTS.parent / "Makefile").read_text(), re.M
    )
    named = line.rpartition("tests/,")[2].rstrip(")").split()
    assert {*named, "bpf"} == {path.parent.name for path in _TESTS.rglob("test_*.py")}
