# SPDX-License-Identifier: Apache-2.0
"""Cgroups that a test makes, and programs that run in them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from recordings import Workload
from support import wait_until


@contextmanager
def made_groups(mount: Path, *names: str) -> Iterator[list[Path]]:
    """Makes cgroups below a mount of them, with those above; takes away what was not there.

    Args:
        mount: Of cgroup v2, or of a v1 hierarchy.
        names: Paths below it.
    """
    made: list[Path] = []
    groups = [mount / name for name in names]
    try:
        for group in groups:
            missing = [path for path in (group, *group.parents) if not path.exists()]
            for folder in reversed(missing):
                folder.mkdir()
                made.append(folder)
        yield groups
    finally:
        for folder in reversed(made):
            # The dead leave their cgroup a moment after they have been waited for.
            wait_until(lambda folder=folder: _removed(folder))


def _removed(folder: Path) -> bool:
    try:
        folder.rmdir()
    except OSError:
        return False
    return True


def in_cgroup(folder: Path, program: Path) -> Workload:
    """Starts a workload that is in a cgroup from its first instruction on."""
    script = 'echo $$ > "$1/cgroup.procs" && exec "$2"'
    return Workload(["sh", "-c", script, "sh", folder, program])
