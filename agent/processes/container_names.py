# SPDX-License-Identifier: Apache-2.0
"""Names of containers, from the files in which their engines keep them.

No engine is asked: its socket has all rights of root's. docker writes the state of each container
into a file of its own (moby, daemon/container/container.go: config.v2.json, the name after a "/").
podman and CRI-O share a storage library with one list of containers for each storage driver
(containers/storage, containers.go); those of `podman run --rm` are in a second list.

No names have the containers of containerd, which keeps them in a database that it alone opens, and
those of rootless engines, whose files are their users', who could put anything there.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

# Debian's and docker's own packages; snap's.
_DOCKER_ROOTS = ("var/lib/docker", "var/snap/docker/common/var-lib-docker")
_DOCKER_SETTINGS = "etc/docker/daemon.json"
# Permanent storage, and what does not outlive the boot (storage.conf(5): graphroot, runroot).
_STORAGE_ROOTS = ("var/lib/containers/storage", "run/containers/storage")
_STORAGE_LISTS = ("containers.json", "volatile-containers.json")

# Some hundred bytes for each label and mount of a container, of which real ones have a few dozen.
_MAX_CONTAINER_BYTES = 1 << 20
# About 1 KB for each container.
_MAX_LIST_BYTES = 16 << 20


def names_of(ids: Iterable[str], root: Path = Path("/")) -> dict[str, str]:
    """Returns the names of the containers for which an engine left one.

    Args:
        ids: 64 hex digits each.
        root: Where the engines' files are; another one in tests.
    """
    wanted = frozenset(ids)
    names = _storage_names(root, wanted) if wanted else {}
    folders = [folder / "containers" for folder in _docker_roots(root)]
    for container_id in wanted:
        for folder in folders:
            state = _read_json(folder / container_id / "config.v2.json", _MAX_CONTAINER_BYTES)
            name = state.get("Name") if isinstance(state, dict) else None
            if isinstance(name, str) and name.lstrip("/"):
                names[container_id] = name.lstrip("/")
    return names


def _docker_roots(root: Path) -> Iterator[Path]:
    yield from (root / folder for folder in _DOCKER_ROOTS)
    settings = _read_json(root / _DOCKER_SETTINGS, _MAX_CONTAINER_BYTES)
    moved = settings.get("data-root") if isinstance(settings, dict) else None
    if isinstance(moved, str) and moved.startswith("/"):
        yield root / moved.lstrip("/")


def _storage_names(root: Path, wanted: frozenset[str]) -> dict[str, str]:
    drivers = [path for folder in _STORAGE_ROOTS for path in (root / folder).glob("*-containers")]
    lists = (
        _read_json(path / name, _MAX_LIST_BYTES) for path in drivers for name in _STORAGE_LISTS
    )
    return {key: name for found in lists for key, name in _listed(found) if key in wanted}


def _listed(containers: Any) -> Iterator[tuple[str, str]]:
    for entry in containers if isinstance(containers, list) else ():
        names = entry.get("names") if isinstance(entry, dict) else None
        if isinstance(names, list) and names and isinstance(names[0], str):
            container_id = entry.get("id")
            if isinstance(container_id, str):
                yield container_id, names[0]


def _read_json(path: Path, limit: int) -> Any:
    """Returns a file's content, None of one that is not root's or our own, or larger than that."""
    try:
        with open(path, "rb", opener=_open_without_waiting) as file:
            facts = os.fstat(file.fileno())
            if not stat.S_ISREG(facts.st_mode) or facts.st_uid not in (0, os.geteuid()):
                return None
            text = file.read(limit + 1)
        return json.loads(text) if len(text) <= limit else None
    except (OSError, ValueError, RecursionError):
        return None  # it is not there, not readable, or just being written


def _open_without_waiting(path: str, flags: int) -> int:
    # A FIFO would have us wait for its writer.
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)
