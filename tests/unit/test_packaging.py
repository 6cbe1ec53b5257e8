# SPDX-License-Identifier: Apache-2.0
"""What a wheel holds: everything under the package folders, found as aiflame.X, and no bcc."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from wheels import ROOT, build_wheel, source_files

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("source"))


def test_packages_of_pyproject_are_the_folders_with_code() -> None:
    folders = {Path(name).parent for name in source_files() if name.endswith(".py")}
    expected = {"aiflame." + folder.as_posix().replace("/", ".") for folder in folders}
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == expected


def test_wheel_holds_every_file_of_the_package_folders(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert held == {f"aiflame/{name}" for name in source_files()}


def test_wheel_does_not_ask_pypi_for_bcc(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        text = archive.read(metadata).decode()
    required = re.findall(r"^Requires-Dist: ([\w-]+)", text, re.M)
    assert "numpy" in required
    assert "bcc" not in required


def test_command_runs_from_an_unpacked_wheel(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "aiflame.agent", "--version"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, check=True, capture_output=True, text=True
    )
    assert done.stdout.strip() == f"aiflame {_version()}"
    where = [sys.executable, "-c", "import aiflame.agent as a, aiflame.bpf as b; print(a, b)"]
    imported = subprocess.run(
        where, cwd=tmp_path, env=environment, check=True, capture_output=True, text=True
    )
    assert imported.stdout.count(str(tmp_path)) == 2


def _version() -> str:
    (line,) = re.findall(r'^__version__ = "(.+)"$', (ROOT / "agent/__init__.py").read_text(), re.M)
    return line


@pytest.mark.parametrize("lock", ["requirements.lock", "requirements-test.lock"])
def test_lock_pins_every_dependency(lock: str) -> None:
    wanted = {re.split(r"[<>=]", name)[0] for name in PROJECT["project"]["dependencies"]}
    pinned = re.findall(r"^([\w-]+)==", (ROOT / lock).read_text(), re.M)
    assert wanted <= set(pinned)


def test_lock_files_agree() -> None:
    run, test = (
        set(re.findall(r"^([\w-]+==\S+)", (ROOT / name).read_text(), re.M))
        for name in ("requirements.lock", "requirements-test.lock")
    )
    assert run <= test
