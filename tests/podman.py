# SPDX-License-Identifier: Apache-2.0
"""podman, where it runs containers."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

# Engines raise these to what root may have, which is not allowed everywhere.
LIMITS = ("--ulimit", "nofile=1024:1024", "--ulimit", "nproc=4096:4096")


def interpreter() -> str:
    """Returns the path of the interpreter that this one's environment was made of."""
    base = Path(sys.base_prefix) / "bin" / f"python3.{sys.version_info.minor}"
    return str(base.resolve())


def require_podman() -> None:
    """Skips a test where there is none."""
    if shutil.which("podman") is None:
        pytest.skip("podman is not installed")


def working_podman(*image: object) -> tuple[str, ...]:
    """Returns podman with the first of its runtimes that works here; skips a test where none does.

    Args:
        image: Options, an image, and the path of an interpreter in it.
    """
    said = []
    for runtime in filter(shutil.which, ("crun", "runc")):
        command = ("podman", "--runtime", runtime)
        trial = [*command, "run", "--rm", "--network", "none", *LIMITS, *map(str, image)]
        done = subprocess.run(
            [*trial, "-c", "print('ok')"], capture_output=True, text=True, timeout=60
        )
        if done.stdout == "ok\n":
            return command
        said.append(done.stderr.strip())
    pytest.skip(f"podman runs no containers here: {said}")
