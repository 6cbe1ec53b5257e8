# SPDX-License-Identifier: Apache-2.0
"""A wheel of these sources."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_CODE_FOLDERS = ("agent", "bpf", "gpu")


def source_files() -> set[str]:
    """Returns the paths of all that a wheel is to hold."""
    return {
        path.relative_to(ROOT).as_posix()
        for folder in _CODE_FOLDERS
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def build_wheel(folder: Path) -> Path:
    """Builds it in an empty folder; returns its path."""
    # From a copy: setuptools leaves its build folder beside the sources.
    for name in source_files() | {"pyproject.toml", "README.md", "LICENSE"}:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--no-index", "-w", str(folder / "dist"), str(folder)], check=True)
    (built,) = (folder / "dist").glob("aiflame-*.whl")
    return built
