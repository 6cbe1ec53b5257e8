# SPDX-License-Identifier: Apache-2.0
"""The CPython interpreters of this machine that tests run programs on."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

_PYENV = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
VERSIONS = ("3.8", "3.9", "3.10", "3.11", "3.12", "3.13", "system")


def find_executable(version: str) -> Path | None:
    """Returns the interpreter of a version, None where there is none."""
    if version == "system":
        return Path("/usr/bin/python3").resolve()
    found = sorted(_PYENV.glob(f"{version}.*/bin/python{version}"))
    return found[-1] if found else None


def executable(version: str) -> Path:
    """Returns the interpreter of a version; skips the test where there is none."""
    found = find_executable(version)
    if found is None:
        pytest.skip(f"no pyenv CPython {version} on this machine")
    return found
