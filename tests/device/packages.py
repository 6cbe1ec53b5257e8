# SPDX-License-Identifier: Apache-2.0
"""Prints what a lock file wants for Linux and some version of Python: `packages.py 3.12 FILE`."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement

# What is needed to build others.
_FOR_BUILDING = {"setuptools"}


def wanted(lock: str, python: str) -> Iterator[str]:
    """Yields "NAME==VERSION" of each package that is for this Python."""
    here = {"python_version": python, "python_full_version": f"{python}.0"}
    for line in re.findall(r"^([a-z0-9].*?) \\$", lock, re.MULTILINE):
        found = Requirement(line)
        if found.name not in _FOR_BUILDING and (not found.marker or found.marker.evaluate(here)):
            yield f"{found.name}{found.specifier}"


if __name__ == "__main__":
    sys.stdout.write(" ".join(wanted(Path(sys.argv[2]).read_text(), sys.argv[1])) + "\n")
