# SPDX-License-Identifier: Apache-2.0
"""Containers that are gone when somebody asks: what their engines told of them while they ran."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from aiflame.agent.fleet import engine_watch
from aiflame.agent.fleet.engine_watch import EngineWatch
from aiflame.agent.processes import container_names
from aiflame.agent.processes.container_names import EngineFacts
from bolt_files import BoltFile
from support import wait_until

_WEB, _DB = "a" * 64, "b" * 64


@contextmanager
def _watching(root: Path) -> Iterator[EngineWatch]:
    watch = EngineWatch(root)
    try:
        yield watch
    finally:
        watch.stop()


def _write(path: Path, content: Any) -> None:
    """Writes a file as engines do: beside it, then in its place."""
    new = path.with_name(f".tmp-{path.name}")
    new.write_text(json.dumps(content))
    new.rename(path)


def _known(watch: EngineWatch, *ids: str) -> dict[str, str]:
    return {key: facts.name for key, facts in watch.facts_of(ids).items()}


def test_a_container_that_podman_has_forgotten(tmp_path: Path) -> None:
    storage = tmp_path / "var/lib/containers/storage/overlay-containers"
    storage.mkdir(parents=True)
    with _watching(tmp_path) as watch:
        # WHEN containers come, are seen, and are removed
        for number in range(20):
            key = f"{number:064x}"
            _write(storage / "volatile-containers.json", [{"id": key, "names": [f"job-{number}"]}])
            wait_until(lambda key=key: key in watch._known, 10)
        _write(storage / "volatile-containers.json", [])
        # THEN they have their names
        ids = [f"{number:064x}" for number in range(20)]
        assert _known(watch, *ids) == {key: f"job-{n}" for n, key in enumerate(ids)}


def test_a_container_that_podman_renames(tmp_path: Path) -> None:
    storage = tmp_path / "var/lib/containers/storage/overlay-containers"
    storage.mkdir(parents=True)
    with _watching(tmp_path) as watch:
        for name in ("old", "new"):
            _write(storage / "containers.json", [{"id": _WEB, "names": [name]}])
            wait_until(lambda name=name: watch.names_of([_WEB]) == {_WEB: name}, 10)


def test_a_container_that_docker_renames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    containers = tmp_path / "var/lib/docker/containers"
    for key, name in ((_WEB, "web"), (_DB, "db")):  # they were there before
        (containers / key).mkdir(parents=True)
        _write(containers / key / "config.v2.json", {"Name": f"/{name}"})
    read: list[str] = []

    def facts_in(path: Path) -> dict[str, EngineFacts]:
        read.append(path.parent.name)
        return container_names.facts_in(path)

    monkeypatch.setattr(engine_watch, "facts_in", facts_in)
    with _watching(tmp_path) as watch:
        assert watch.names_of([_WEB, _DB, "c" * 64, "../x"]) == {_WEB: "web", _DB: "db"}
        # WHEN one of them is renamed THEN that one's file alone is read again, and once
        read.clear()
        _write(containers / _WEB / "config.v2.json", {"Name": "/new"})
        for _ in range(3):
            assert watch.names_of([_WEB, _DB]) == {_WEB: "new", _DB: "db"}
        assert read == [_WEB]
        # AND the name that it had last outlives it
        shutil.rmtree(containers)
        assert watch.names_of([_WEB]) == {_WEB: "new"}


def _podman_state(storage: Path, labels: dict[str, dict[str, str]]) -> None:
    """Writes what podman has of containers besides their names."""
    containers = {
        key.encode(): {b"config": json.dumps({"labels": each}).encode()}
        for key, each in labels.items()
    }
    path = storage / "libpod/bolt_state.db"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(BoltFile({b"ctr": containers}).content())


def test_labels_that_podman_writes_after_the_name(tmp_path: Path) -> None:
    storage = tmp_path / "var/lib/containers/storage"
    driver = storage / "overlay-containers"
    driver.mkdir(parents=True)
    _podman_state(storage, {})
    with _watching(tmp_path) as watch:
        # GIVEN a container whose name was read before its labels were there
        _write(driver / "containers.json", [{"id": _WEB, "names": ["web"]}])
        wait_until(lambda: watch._known, 10)
        assert watch.facts_of([_WEB]) == {_WEB: EngineFacts("web", may_have_labels=True)}
        # WHEN they come, and all is gone before anybody asks
        _podman_state(storage, {_WEB: {"team": "a"}})
        wait_until(lambda: watch._known[_WEB].labels, 10)
        _write(driver / "containers.json", [])
        _podman_state(storage, {})
        # THEN they are known
        assert watch.facts_of([_WEB]) == {_WEB: EngineFacts("web", labels=(("team", "a"),))}


def test_labels_that_never_come_are_looked_for_a_few_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_watch, "_AGAIN_S", (0.001,) * 5)
    looked: list[str] = []
    labelled = engine_watch.labelled

    def counted(found: dict[str, EngineFacts], root: Path) -> dict[str, EngineFacts]:
        looked.extend(found)
        return labelled(found, root)

    monkeypatch.setattr(engine_watch, "labelled", counted)
    storage = tmp_path / "var/lib/containers/storage"
    driver = storage / "overlay-containers"
    driver.mkdir(parents=True)
    _podman_state(storage, {_DB: {"team": "a"}})
    with _watching(tmp_path) as watch:
        _write(driver / "containers.json", [{"id": _WEB, "names": ["web"]}])
        wait_until(lambda: len(looked) == 6 and not watch._unlabelled, 10)
        # AND a list that changes has others looked for, but not what is known
        for name in ("db", "other"):
            both = [{"id": _WEB, "names": ["web"]}, {"id": _DB, "names": [name]}]
            _write(driver / "containers.json", both)
            wait_until(lambda name=name: watch._known.get(_DB, EngineFacts()).name == name, 10)
        assert watch._known[_DB] == EngineFacts("other", labels=(("team", "a"),))
    assert looked == [_WEB] * 6 + [_DB]


def test_a_container_that_docker_has_forgotten(tmp_path: Path) -> None:
    containers = tmp_path / "var/lib/docker/containers"
    containers.mkdir(parents=True)
    with _watching(tmp_path) as watch:
        # docker makes a directory, and a file in it a moment later.
        (containers / _WEB).mkdir()
        state = {"Name": "/web", "Config": {"Image": "nginx:1.25", "Labels": {"team": "a"}}}
        wait_until(lambda: containers / _WEB in watch._of_containers, 10)
        _write(containers / _WEB / "config.v2.json", state)
        wait_until(lambda: watch._known, 10)
        shutil.rmtree(containers / _WEB)
        found = watch.facts_of([_WEB, _DB])
        assert found == {_WEB: EngineFacts("web", "nginx:1.25", (("team", "a"),))}
        # AND nothing is watched for it any more
        wait_until(lambda: [*watch._watched.values()] == [containers], 10)
        assert not watch._of_containers


def test_an_engine_that_is_installed_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_watch, "_LOOK_S", 0.01)
    with _watching(tmp_path) as watch:
        storage = tmp_path / "run/containers/storage"
        storage.mkdir(parents=True)
        wait_until(lambda: storage in watch._watched.values(), 10)
        driver = storage / "vfs-containers"
        driver.mkdir()
        _write(driver / "containers.json", [{"id": _DB, "names": ["db"]}])
        wait_until(lambda: _DB in watch._known, 10)
        shutil.rmtree(storage)
        assert _known(watch, _WEB, _DB) == {_DB: "db"}


def test_a_storage_that_is_moved_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_watch, "_LOOK_S", 0.01)
    driver, settings = tmp_path / "srv/graph/overlay-containers", tmp_path / "etc/containers"
    for folder in (driver, settings):
        folder.mkdir(parents=True)
    with _watching(tmp_path) as watch:
        (settings / "storage.conf").write_text("[storage]\ngraphroot = '/srv/graph'\n")
        wait_until(lambda: driver in watch._watched.values(), 10)
        _write(driver / "volatile-containers.json", [{"id": _DB, "names": ["db"]}])
        wait_until(lambda: _DB in watch._known, 10)
        _write(driver / "volatile-containers.json", [])
        assert _known(watch, _WEB, _DB) == {_DB: "db"}


def test_events_that_were_lost_cost_no_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = tmp_path / "var/lib/containers/storage/overlay-containers"
    storage.mkdir(parents=True)
    _write(storage / "containers.json", [{"id": _WEB, "names": ["web"]}])
    told = [engine_watch._EVENT.pack(-1, engine_watch._OVERFLOW, 0, 0)]
    # WHEN the kernel tells that its queue was full
    monkeypatch.setattr(engine_watch, "_read", lambda *_: told.pop() if told else b"")
    with _watching(tmp_path) as watch:
        _write(storage / "other.json", [])
        # THEN all is read that there is
        wait_until(lambda: _WEB in watch._known, 10)


def test_what_is_kept_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_watch, "_MAX_KNOWN", 100)
    monkeypatch.setattr(engine_watch, "_MAX_WATCHED", 10)
    storage = tmp_path / "var/lib/containers/storage/overlay-containers"
    docker = tmp_path / "var/lib/docker/containers"
    for folder in (storage, docker):
        folder.mkdir(parents=True)
    with _watching(tmp_path) as watch:
        for number in range(50):  # none ever has a file
            (docker / f"{number:064x}").mkdir()
        listed = [{"id": f"{number:064x}", "names": ["x"]} for number in range(1000)]
        _write(storage / "containers.json", listed)
        wait_until(lambda: len(watch._known) == 100, 10)
        wait_until(lambda: len(watch._of_containers) == 10, 10)


def test_without_a_watch_files_are_read_when_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class _Libc:
        @staticmethod
        def inotify_init1(_flags: int) -> int:
            return -1

    monkeypatch.setattr(engine_watch, "_libc", _Libc)
    storage = tmp_path / "var/lib/containers/storage/overlay-containers"
    storage.mkdir(parents=True)
    with _watching(tmp_path) as watch:
        _write(storage / "containers.json", [{"id": _DB, "names": ["db"]}])
        assert _known(watch, _WEB, _DB) == {_DB: "db"}
