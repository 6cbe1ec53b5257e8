# SPDX-License-Identifier: Apache-2.0
"""What users' engines tell of their containers, and what users may put there instead."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from aiflame.agent.fleet import rootless
from aiflame.agent.fleet.rootless import RootlessEngines
from aiflame.agent.processes.container_names import EngineFacts
from support import wait_until

_WEB, _DB, _JOB = "a" * 64, "b" * 64, "c" * 64
_ME = os.getuid()
_STORAGE = ".local/share/containers/storage"
_DOCKER = ".local/share/docker/containers"


@contextmanager
def _engines(folder: Path) -> Iterator[RootlessEngines]:
    """Engines of users that all have their home in one directory."""
    engines = RootlessEngines(lambda uid: str(folder / "home"), folder / "run")
    try:
        yield engines
    finally:
        engines.stop()


@pytest.fixture
def storage(tmp_path: Path) -> Path:
    """Where podman keeps the containers of this user."""
    folder = tmp_path / "home" / _STORAGE / "overlay-containers"
    folder.mkdir(parents=True)
    return folder


def _write(path: Path, content: Any) -> Path:
    """Writes a file as engines do: beside it, then in its place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".tmp-{path.name}")
    new.write_text(content if isinstance(content, str) else json.dumps(content))
    return new.rename(path)


def _listed(container_id: str, name: str) -> dict[str, Any]:
    metadata = json.dumps({"image-name": "localhost/web:1.2"})
    return {"id": container_id, "names": [name], "metadata": metadata}


def _known(engines: RootlessEngines, *ids: str, uid: int = _ME) -> dict[str, str]:
    return {key: facts.name for key, facts in engines.facts_of(uid, ids).items()}


def _wait_for(engines: RootlessEngines, uid: int = _ME, **names: str) -> None:
    """Waits until containers have names, by the first digit of their ids."""
    wanted = {key * 64: name for key, name in names.items()}
    wait_until(lambda: _known(engines, *wanted, uid=uid) == wanted, 10)


def test_containers_of_podman_and_docker(tmp_path: Path, storage: Path) -> None:
    # GIVEN a list in each of the places that podman has, and a container of docker
    _write(storage / "containers.json", [_listed(_WEB, "web")])
    run = tmp_path / "run" / str(_ME) / "containers" / "vfs-containers"
    _write(run / "volatile-containers.json", [_listed(_DB, "db")])
    settings = {"Image": "job:3", "Labels": {"team": "a"}}
    _write(tmp_path / "home" / _DOCKER / _JOB / "config.v2.json",
           {"Name": "/job", "Config": settings})  # fmt: skip
    with _engines(tmp_path) as engines:
        _wait_for(engines, a="web", b="db", c="job")
        # THEN images are known, and labels are not taken
        found = engines.facts_of(_ME, [_WEB, _JOB])
        assert found == {
            _WEB: EngineFacts("web", "localhost/web:1.2"),
            _JOB: EngineFacts("job", "job:3"),
        }


def test_containers_that_are_gone_before_they_are_asked_for(tmp_path: Path, storage: Path) -> None:
    _write(storage / "containers.json", [_listed(_WEB, "web")])
    (tmp_path / "home" / _DOCKER).mkdir(parents=True)
    with _engines(tmp_path) as engines:
        # GIVEN a user of whom a container was seen
        _wait_for(engines, a="web")
        user = engines._users[_ME]
        # WHEN others come and go
        for number in range(20):
            key = f"{number:064x}"
            _write(storage / "volatile-containers.json", [_listed(key, f"job-{number}")])
            wait_until(lambda key=key: key in user.known, 10)
        _write(storage / "volatile-containers.json", [])
        # docker makes a directory, and a file in it a moment later.
        (tmp_path / "home" / _DOCKER / _JOB).mkdir()
        _write(tmp_path / "home" / _DOCKER / _JOB / "config.v2.json", {"Name": "/job"})
        wait_until(lambda: _JOB in user.known, 10)
        shutil.rmtree(tmp_path / "home" / _DOCKER / _JOB)
        # THEN they have names
        names = {f"{number:064x}": f"job-{number}" for number in range(20)}
        assert _known(engines, *names, _JOB) == names | {_JOB: "job"}


@pytest.mark.parametrize("kind", ["symbolic link", "link in the path", "fifo", "folder", "huge"])
def test_what_is_not_a_users_own_list_is_not_read(tmp_path: Path, storage: Path, kind: str) -> None:
    # GIVEN a list of the host's, and in place of one of the user's something else
    host = _write(tmp_path / "host" / "containers.json", [_listed(_WEB, "secret")])
    path = storage / "containers.json"
    match kind:
        case "symbolic link":
            path.symlink_to(host)
        case "link in the path":
            storage.rmdir()
            storage.symlink_to(host.parent)
        case "fifo":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case "huge":
            path.write_text(json.dumps([_listed(_WEB, "web")]) + " " * (512 << 10))
    _write(tmp_path / "run" / str(_ME) / "containers/vfs-containers/containers.json",
           [_listed(_DB, "db")])  # fmt: skip
    with _engines(tmp_path) as engines:
        # THEN what is in order has its name, and nothing else has
        _wait_for(engines, b="db")
        assert _known(engines, _WEB) == {}


def test_a_file_of_another_user_is_not_read(tmp_path: Path, storage: Path) -> None:
    _write(storage / "containers.json", [_listed(_WEB, "web")])
    with _engines(tmp_path) as engines:
        # WHEN another user has that directory for a home, as by a link
        assert _known(engines, _WEB, uid=_ME + 1) == {}
        _wait_for(engines, a="web")
        wait_until(lambda: not engines._users[_ME + 1].is_due, 10)
        # THEN what is of the one is not told of the other
        assert _known(engines, _WEB, uid=_ME + 1) == {}


@pytest.mark.parametrize("content", ["", "{", "[" * 100_000, "[1, null, {}]", "9" * 100_000])
def test_a_damaged_list_names_nothing(tmp_path: Path, storage: Path, content: str) -> None:
    _write(storage / "containers.json", content)
    _write(storage / "volatile-containers.json", [_listed(_DB, "db")])
    with _engines(tmp_path) as engines:
        _wait_for(engines, b="db")
        assert _known(engines, _WEB) == {}


def test_what_is_kept_of_a_user_is_bounded(tmp_path: Path, storage: Path) -> None:
    listed = [_listed(f"{number:064x}", "n" * 400) for number in range(700)]
    _write(storage / "containers.json", listed)
    with _engines(tmp_path) as engines:
        newest = f"{699:064x}"
        wait_until(lambda: _known(engines, newest), 10)
        assert len(_known(engines, newest)[newest]) == 253
        assert len(engines._users[_ME].known) == 256


def test_users_are_bounded_and_the_latest_are_kept(
    tmp_path: Path, storage: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rootless, "_MAX_USERS", 3)
    _write(storage / "containers.json", [_listed(_WEB, "web")])
    with _engines(tmp_path) as engines:
        for uid in range(_ME + 1, _ME + 50):
            engines.facts_of(uid, [_WEB])
        _wait_for(engines, a="web")
        wait_until(lambda: len(engines._users) == 3, 10)


@pytest.mark.parametrize("is_once", [True, False])
def test_a_user_whose_files_do_not_open_is_left_alone(
    tmp_path: Path, storage: Path, monkeypatch: pytest.MonkeyPatch, is_once: bool
) -> None:
    monkeypatch.setattr(rootless, "_PAUSE_S", 0.1)
    monkeypatch.setattr(rootless, "_MOST_MISSES", 2 if is_once else 1)
    _write(storage / "containers.json", [_listed(_WEB, "web")])
    with _engines(tmp_path) as engines:
        _wait_for(engines, a="web")
        # WHEN whoever opens files for the user gets nowhere, as on a file system of the user's
        pid = engines._opener.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        _write(storage / "containers.json", [_listed(_DB, "db")])
        wait_until(lambda: engines._users[_ME].misses, 30)
        # THEN what is known stays, and the rest is tried again some time later, but not for ever
        if is_once:
            _wait_for(engines, a="web", b="db")
        else:
            assert _known(engines, _WEB, _DB) == {_WEB: "web"}
            assert engines._users[_ME].inotify == -1
