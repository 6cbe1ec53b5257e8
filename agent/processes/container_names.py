# SPDX-License-Identifier: Apache-2.0
"""Names, images and labels of containers, from the files in which their engines keep them.

No engine is asked: its socket has all rights of root's. docker writes the state of each container
into a file of its own (moby, daemon/container/container.go: config.v2.json, the name after a "/").
podman and CRI-O share a storage library with one list of containers for each storage driver
(containers/storage, containers.go); those of `podman run --rm` are in a second list. Labels are not
in these: podman has them in a database (`podman_state`). Of CRI-O there are none.

Both keep them where they were told to, if they were (`engine_settings`), and what they had until
then stays where it was: all of these places are looked at.

No names have the containers of containerd, which keeps them in a database that it alone opens.
Those of rootless engines have files of their users', who could put anything there: these are read
otherwise (fleet/rootless.py), and read as what they are here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from aiflame.agent.processes.engine_files import content
from aiflame.agent.processes.engine_settings import (
    MAX_SETTINGS_BYTES,
    StorageConf,
    absolute,
    data_root,
    storage_conf,
)

_ID = re.compile(r"[0-9a-f]{64}")
# Debian's and docker's own packages; snap's.
_DOCKER_ROOTS = ("var/lib/docker", "var/snap/docker/common/var-lib-docker")
_DOCKER_SETTINGS = "etc/docker/daemon.json"
# Permanent storage, and what does not outlive the boot (storage.conf(5): graphroot, runroot).
_STORAGE_ROOTS = ("var/lib/containers/storage", "run/containers/storage")
# The administrator's, in place of the distribution's: of two, one is believed.
_STORAGE_SETTINGS = ("etc/containers/storage.conf", "usr/share/containers/storage.conf")
_DRIVERS = "*-containers"
STORAGE_LISTS = ("containers.json", "volatile-containers.json")
DOCKER_STATE = "config.v2.json"

# Some hundred bytes for each label and mount of a container, of which real ones have a few dozen.
_MAX_CONTAINER_BYTES = 1 << 20
# About 1 KB for each container.
_MAX_LIST_BYTES = 16 << 20
# Of a container: compose gives a dozen, of some hundred bytes. What is longer is left out, so that
# some thousand containers have 64 MB at most.
_MAX_LABELS, _MAX_LABEL_CHARACTERS = 128, 8192
# Names have 253 characters at most in most engines, those of images twice as many.
_MAX_TEXT = 1024


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What an engine tells of a container; "" and no labels where it does not.

    Attributes:
        name: As its users know it.
        image: As it was asked for, mostly a name with a tag.
        labels: Of image and container. Whoever made them chose all they say.
        may_have_labels: Whether they are somewhere else, and could not be read, or are not there
            yet: it helps to ask again.
    """

    name: str = ""
    image: str = ""
    labels: tuple[tuple[str, str], ...] = ()
    may_have_labels: bool = False


def names_of(ids: Iterable[str], root: Path = Path("/")) -> dict[str, str]:
    """Returns the names of the containers for which an engine left one.

    Args:
        ids: 64 hex digits each.
        root: Where the engines' files are; another one in tests.
    """
    return {key: facts.name for key, facts in _facts(ids, root).items()}


def facts_of(ids: Iterable[str], root: Path = Path("/")) -> dict[str, EngineFacts]:
    """Returns what engines left of the containers to which they gave names.

    Args:
        ids: As for names_of; others are not looked for.
        root: As for names_of.
    """
    return labelled(_facts(ids, root), root)


def labelled(found: Mapping[str, EngineFacts], root: Path = Path("/")) -> dict[str, EngineFacts]:
    """Returns facts with the labels that podman has of those who may have some.

    Args:
        found: By ids of containers.
        root: As for names_of.
    """
    # It needs SQLite, which a recording, where nobody asks for labels, starts without.
    from aiflame.agent.processes import podman_state

    missing = [key for key, facts in found.items() if facts.may_have_labels]
    paths = podman_state.databases(_storage_roots(root)) if missing else []
    told = podman_state.configurations(paths, missing)
    whole = {**found}
    for key in missing:
        # Of CRI-O, which has the same lists, nothing is anywhere else.
        labels = _labels(_member(_json(told.get(key, b"")), "labels"))
        may_have_labels = bool(paths) and key not in told
        whole[key] = replace(found[key], labels=labels, may_have_labels=may_have_labels)
    return whole


def _facts(ids: Iterable[str], root: Path) -> dict[str, EngineFacts]:
    wanted = frozenset(each for each in ids if _ID.fullmatch(each))
    found = _storage_facts(root, wanted) if wanted else {}
    folders = _docker_folders(root)
    for container_id in wanted:
        for folder in folders:
            found |= facts_in(folder / container_id / DOCKER_STATE)
    return found


def docker_files(ids: Iterable[str], root: Path = Path("/")) -> Iterator[str]:
    """Yields the paths of the files that docker has of containers, if it has one.

    Args:
        ids: 64 hex digits each.
        root: As for names_of.
    """
    wanted = [each for each in ids if _ID.fullmatch(each)]
    for folder in _docker_folders(root) if wanted else ():
        if _is_directory(folder):
            yield from (f"{folder}/{each}/{DOCKER_STATE}" for each in wanted)


def facts_in(path: Path) -> dict[str, EngineFacts]:
    """Returns what one file of an engine's tells, by ids of containers.

    Args:
        path: Of a file; one that engines keep under another name tells nothing. A list tells of
            no labels (`labelled`).
    """
    if path.name in STORAGE_LISTS:
        return listed_facts(content(path, _MAX_LIST_BYTES))
    if path.name != DOCKER_STATE or not is_container_id(path.parent.name):
        return {}
    facts = docker_facts(content(path, _MAX_CONTAINER_BYTES))
    return {} if facts is None else {path.parent.name: facts}


def is_container_id(text: str) -> bool:
    """Whether it is an id as docker and podman give them."""
    return _ID.fullmatch(text) is not None


def listed_facts(text: bytes) -> dict[str, EngineFacts]:
    """Returns what a list of containers tells, by their ids; nothing where it is damaged.

    Args:
        text: As podman and CRI-O write it.
    """
    return dict(_listed(_json(text)))


def docker_facts(text: bytes) -> EngineFacts | None:
    """Returns what docker tells of one container; None where it is damaged, or has no name.

    Args:
        text: As docker writes it.
    """
    state = _json(text)
    name = _text(state, "Name").lstrip("/")
    if not name:
        return None
    settings = state.get("Config")
    return EngineFacts(name, _text(settings, "Image"), _labels(_member(settings, "Labels")))


def _member(value: Any, key: str) -> Any:
    return value.get(key) if isinstance(value, dict) else None


def _text(value: Any, key: str) -> str:
    found = _member(value, key)
    return found[:_MAX_TEXT] if isinstance(found, str) else ""


def _labels(value: Any) -> tuple[tuple[str, str], ...]:
    found, left = [], _MAX_LABEL_CHARACTERS
    for name, text in islice(value.items() if isinstance(value, dict) else (), _MAX_LABELS):
        if isinstance(text, str) and len(name) + len(text) <= left:
            found.append((name, text))
            left -= len(name) + len(text)
    return tuple(found)


def engine_directories(root: Path) -> list[Path]:
    """Returns where engines keep what `facts_of` reads, whether it is there or not."""
    return [*_docker_folders(root), *_storage_roots(root)]


def state_directories(root: Path = Path("/")) -> list[Path]:
    """Returns the directories that there are in which something changes with each container.

    Of docker, a directory of its own in one of these is made for each.

    Args:
        root: As for names_of.
    """
    drivers = _storage_drivers(root)
    return [path for path in (*engine_directories(root), *drivers) if _is_directory(path)]


def is_state_directory(path: Path) -> bool:
    """Whether a new directory in one of these is one that `facts_in` may find a file in."""
    return path.match(_DRIVERS) or bool(
        path.parent.name == "containers" and _ID.fullmatch(path.name)
    )


def system_storage_conf(root: Path = Path("/")) -> StorageConf:
    """Returns what the machine's own storage.conf says.

    Args:
        root: As for names_of.
    """
    for name in _STORAGE_SETTINGS:
        if text := content(root / name, MAX_SETTINGS_BYTES):
            return storage_conf(text)
    return StorageConf()


def _docker_folders(root: Path) -> list[Path]:
    """Returns where docker has a directory for each container."""
    moved = absolute(data_root(content(root / _DOCKER_SETTINGS, MAX_SETTINGS_BYTES)))
    return [path / "containers" for path in _places(root, _DOCKER_ROOTS, moved)]


def _storage_roots(root: Path) -> list[Path]:
    settings = system_storage_conf(root)
    moved = (absolute(path) for path in (settings.graph_root, settings.run_root))
    return _places(root, _STORAGE_ROOTS, *moved)


def _places(root: Path, known: Iterable[str], *moved: str) -> list[Path]:
    """Returns each place once: most settings say what is so anyway."""
    inside = (*known, *(path.lstrip("/") for path in moved))
    return [*dict.fromkeys(root / path for path in inside if path)]


def _storage_drivers(root: Path) -> list[Path]:
    roots = [path for path in _storage_roots(root) if _is_directory(path)]
    return [path for folder in roots for path in folder.glob(_DRIVERS)]


def _is_directory(path: Path) -> bool:
    """Whether it is one; also a path that was mistyped, or whose file system is gone, is none."""
    try:
        return path.is_dir()
    except OSError:
        return False


def _storage_facts(root: Path, wanted: frozenset[str]) -> dict[str, EngineFacts]:
    drivers = _storage_drivers(root)
    lists = (facts_in(path / name) for path in drivers for name in STORAGE_LISTS)
    return {key: facts for found in lists for key, facts in found.items() if key in wanted}


def _listed(containers: Any) -> Iterator[tuple[str, EngineFacts]]:
    for entry in containers if isinstance(containers, list) else ():
        names = entry.get("names") if isinstance(entry, dict) else None
        if isinstance(names, list) and names and isinstance(names[0], str):
            container_id = entry.get("id")
            if isinstance(container_id, str) and _ID.fullmatch(container_id):
                image = _image_of(entry.get("metadata"))
                yield container_id, EngineFacts(names[0][:_MAX_TEXT], image, may_have_labels=True)


def _image_of(metadata: Any) -> str:
    """Returns the image's name out of what podman stores with a container: JSON in a text."""
    try:
        return _text(json.loads(metadata), "image-name") if isinstance(metadata, str) else ""
    except (ValueError, RecursionError):
        return ""


def _json(text: bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None  # it is damaged, or just being written
