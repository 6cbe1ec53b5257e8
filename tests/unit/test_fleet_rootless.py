# SPDX-License-Identifier: Apache-2.0
"""What users' engines tell of their containers, and what users may put there instead."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import signal
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from aiflame.agent.fleet import rootless
from aiflame.agent.fleet.rootless import Account, RootlessEngines
from aiflame.agent.inspector.opener import OpenedFile, Opener
from aiflame.agent.processes.container_names import EngineFacts
from support import wait_until

_WEB, _DB, _JOB = "a" * 64, "b" * 64, "c" * 64
_ME = os.getuid()
_STORAGE = ".local/share/containers/storage"
_DOCKER = ".local/share/docker/containers"


@contextmanager
def _engines(folder: Path) -> Iterator[RootlessEngines]:
    """Engines of users that all have their home in one directory."""
    engines = RootlessEngines(lambda uid: Account("ann", str(folder / "home")), folder)
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
    run = tmp_path / "run/user" / str(_ME) / "containers" / "vfs-containers"
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


def test_a_user_that_the_machine_does_not_know_yet(
    tmp_path: Path, storage: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # GIVEN a user of a directory service that is not there at the boot
    asked: list[int] = []
    is_there = False

    def getpwuid(uid: int) -> pwd.struct_passwd:
        asked.append(uid)
        if not is_there:
            raise KeyError(uid)
        return pwd.struct_passwd(("ann", "x", uid, uid, "", str(tmp_path / "home"), ""))

    monkeypatch.setattr(pwd, "getpwuid", getpwuid)
    _write(storage / "containers.json", [_listed(_WEB, "web")])
    run = tmp_path / "run/user" / str(_ME) / "containers" / "vfs-containers"
    _write(run / "volatile-containers.json", [_listed(_DB, "db")])
    engines = RootlessEngines(root=tmp_path)
    try:
        _wait_for(engines, b="db")
        user = engines._users[_ME]
        for _ in range(3):
            assert _known(engines, _WEB) == {}
            wait_until(lambda: not user.is_due, 10)
        assert asked == [_ME]
        # WHEN it is there, and ten minutes have passed THEN so is what the user has at home.
        is_there = True
        user.ask_s -= 600
        _wait_for(engines, a="web")
        assert asked == [_ME, _ME]
    finally:
        engines.stop()


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
    _write(tmp_path / "run/user" / str(_ME) / "containers/vfs-containers/containers.json",
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
        # THEN what is known stays, and the rest is tried again later, but not all the time
        if is_once:
            _wait_for(engines, a="web", b="db")
            assert engines._users[_ME].misses == 0
        else:
            wait_until(lambda: engines._users[_ME].misses, 30)
            assert _known(engines, _WEB, _DB) == {_WEB: "web"}
            assert engines._users[_ME].inotify == -1


_CONF = "home/.config/containers/storage.conf"
_DAEMON = "home/.config/docker/daemon.json"


def _conf(**paths: str | Path) -> str:
    return "[storage]\n" + "".join(f'{name} = "{path}"\n' for name, path in paths.items())


def _storage_of(folder: Path, container_id: str, name: str) -> None:
    _write(folder / "overlay-containers/containers.json", [_listed(container_id, name)])


def test_storage_that_a_user_has_moved(tmp_path: Path, storage: Path) -> None:
    # GIVEN a storage where it was before, and others outside of the home directory and in it
    _write(storage / "containers.json", [_listed(_WEB, "web")])
    _write(tmp_path / _CONF,
           _conf(graphroot=f"{tmp_path}/data/$USER", runroot="${HOME}/run-$UID"))  # fmt: skip
    _storage_of(tmp_path / "data/ann", _DB, "db")
    _storage_of(tmp_path / f"home/run-{_ME}", _JOB, "job")
    # AND what was moved of docker
    _write(tmp_path / _DAEMON, {"data-root": f"{tmp_path}/data/docker"})
    key = "d" * 64
    _write(tmp_path / "data/docker/containers" / key / "config.v2.json", {"Name": "/moved"})
    with _engines(tmp_path) as engines:
        _wait_for(engines, a="web", b="db", c="job", d="moved")
        # WHEN others come and go where they are now
        _storage_of(tmp_path / "data/ann", "e" * 64, "new")
        wait_until(lambda: "e" * 64 in engines._users[_ME].known, 10)


@pytest.mark.parametrize("is_own", [True, False])
def test_where_the_machine_has_users_keep_containers(tmp_path: Path, is_own: bool) -> None:
    # GIVEN a place for all users, which one of them has not, or has in a file without a graphroot
    path = f"{tmp_path}/data/$UID"
    if is_own:
        _write(tmp_path / _CONF, _conf(driver="vfs", rootless_storage_path=path))
        path = "/nowhere"
    _write(tmp_path / "etc/containers/storage.conf",
           _conf(graphroot=f"{tmp_path}/roots", rootless_storage_path=path))  # fmt: skip
    _storage_of(tmp_path / f"data/{_ME}", _WEB, "web")
    _storage_of(tmp_path / "roots", _DB, "db")
    with _engines(tmp_path) as engines:
        _wait_for(engines, a="web")
        assert _known(engines, _DB) == {}


def test_settings_that_change(tmp_path: Path) -> None:
    _write(tmp_path / _CONF, _conf(graphroot=f"{tmp_path}/one"))
    _storage_of(tmp_path / "one", _WEB, "web")
    _storage_of(tmp_path / "two", _DB, "db")
    with _engines(tmp_path) as engines:
        _wait_for(engines, a="web")
        user = engines._users[_ME]
        wait_until(lambda: not user.is_due, 10)
        # WHEN storage is moved, and nobody asks for a container
        _write(tmp_path / _CONF, _conf(graphroot=f"{tmp_path}/two"))
        # THEN it is noticed, and what was there before is not watched any more
        wait_until(lambda: _DB in user.known, 10)
        _storage_of(tmp_path / "one", _JOB, "job")
        _storage_of(tmp_path / "two", "d" * 64, "new")
        wait_until(lambda: "d" * 64 in user.known, 10)
        assert _known(engines, _WEB, _JOB) == {_WEB: "web"}


def test_settings_that_say_what_is_so_anyway_cost_no_second_look(
    tmp_path: Path, storage: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[bytes] = []

    def listed(text: bytes) -> dict[str, EngineFacts]:
        read.append(text)
        return {}

    monkeypatch.setattr(rootless, "listed_facts", listed)
    content = _write(storage / "containers.json", [_listed(_WEB, "web")]).read_bytes()
    _write(tmp_path / _CONF, _conf(graphroot="$HOME/" + _STORAGE))
    with _engines(tmp_path) as engines:
        _known(engines, _WEB)
        wait_until(lambda: read and not engines._users[_ME].is_due, 10)
        assert read.count(content) == 1


@pytest.mark.parametrize(
    "kind",
    ["link", "link above", "closed above", "another's", "another's list", "no folder", "proc",
     "own root", "link out of it", "list that is a link", "deep", "unknown variable", "itself"],
)  # fmt: skip
def test_a_chosen_place_that_the_user_could_not_have_is_not_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    # GIVEN a list below a directory of the host's
    host = tmp_path / "host/storage"
    _storage_of(host, _WEB, "secret")
    path: str | Path = host
    inode = -1
    match kind:
        case "link":
            (tmp_path / "link").symlink_to(host)
            path = tmp_path / "link"
        case "link above":
            (tmp_path / "link").symlink_to(host.parent)
            path = tmp_path / "link/storage"
        case "closed above":
            inode = host.parent.stat().st_ino
        case "another's":
            inode = host.stat().st_ino
        case "another's list":
            inode = (host / "overlay-containers/containers.json").stat().st_ino
        case "no folder":
            path = host / "overlay-containers/containers.json"
        case "proc":
            path = f"/proc/{os.getpid()}/cwd"
            monkeypatch.chdir(host)
        case "own root":
            path = f"/proc/self/root{host}"
        case "link out of it":
            path = tmp_path / "chosen"
            path.mkdir()
            (path / "overlay-containers").symlink_to(host / "overlay-containers")
        case "list that is a link":
            path = tmp_path / "chosen"
            (path / "overlay-containers").mkdir(parents=True)
            (path / "overlay-containers/containers.json").symlink_to(
                host / "overlay-containers/containers.json"
            )
        case "deep":
            path = host.joinpath(*["a"] * 40)
            _storage_of(path, _WEB, "secret")
        case "unknown variable":
            path = f"{host}/$NONE"
        case "itself":
            path = "/"
    # Others may enter one that is wrong in nothing but its owner.
    _be_of_another_user(monkeypatch, inode, 0o700 if kind == "closed above" else 0o755)
    _write(tmp_path / _CONF, _conf(graphroot=path))
    _write(tmp_path / "run/user" / str(_ME) / "containers/vfs-containers/containers.json",
           [_listed(_DB, "db")])  # fmt: skip
    with _engines(tmp_path) as engines:
        # THEN what is in order has its name, and nothing else has
        _wait_for(engines, b="db")
        user = engines._users[_ME]
        wait_until(lambda: user.chosen is not None and not user.is_due, 10)
        engines.facts_of(_ME, [_WEB])
        wait_until(lambda: not user.is_due, 10)
        assert _known(engines, _WEB) == {}
        assert user.misses == 0


def _be_of_another_user(monkeypatch: pytest.MonkeyPatch, inode: int, mode: int = 0o700) -> None:
    """Has a file or directory seem to be another user's."""
    for name in ("directory", "beneath"):
        opens = getattr(Opener, name)

        def opened(*words: Any, opens: Any = opens, **options: Any) -> OpenedFile:
            file: OpenedFile = opens(*words, **options)
            return file._replace(owner_uid=_ME + 1) if file.inode == inode else file

        monkeypatch.setattr(Opener, name, opened)
    stat_of = os.fstat

    def facts(fd: int) -> os.stat_result:
        found = stat_of(fd)
        if found.st_ino != inode:
            return found
        return os.stat_result((stat.S_IFMT(found.st_mode) | mode, *found[1:]))

    monkeypatch.setattr(os, "fstat", facts)


@pytest.mark.parametrize("kind", ["link", "fifo", "folder", "huge", "damaged", "long", "another's"])
def test_settings_of_a_user_that_are_not_believed(
    tmp_path: Path, storage: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    # GIVEN settings that name a place that would be looked at
    path = _write(tmp_path / _CONF, _conf(graphroot=tmp_path / "data"))
    _storage_of(tmp_path / "data", _WEB, "web")
    match kind:
        case "link":
            path.symlink_to(path.rename(tmp_path / "elsewhere"))
        case "fifo":
            path.unlink()
            os.mkfifo(path)
        case "folder":
            path.unlink()
            path.mkdir()
        case "huge":
            path.write_text(path.read_text() + "#" * (64 << 10))
        case "damaged":
            path.write_text(path.read_text() + "[")
        case "long":
            path.write_text(path.read_text() + "a." * 30_000 + "a = 1")
        case "another's":
            _be_of_another_user(monkeypatch, path.stat().st_ino)
    _write(storage / "containers.json", [_listed(_DB, "db")])
    with _engines(tmp_path) as engines:
        _wait_for(engines, b="db")
        user = engines._users[_ME]
        wait_until(lambda: not user.is_due, 10)
        assert _known(engines, _WEB) == {}
        assert user.chosen == rootless._Chosen()


def _open_files() -> int:
    return len([*Path("/proc/self/fd").iterdir()])


def test_a_user_who_moves_storage_all_the_time_has_few_watches(tmp_path: Path) -> None:
    for number in range(30):
        _storage_of(tmp_path / f"data/{number}", f"{number:064x}", "x")
    with _engines(tmp_path) as engines:
        open_files = []
        for number in range(30):
            _write(tmp_path / _CONF, _conf(graphroot=tmp_path / f"data/{number}"))
            wait_until(lambda key=f"{number:064x}": _known(engines, key), 10)
            wait_until(lambda: not engines._users[_ME].is_due, 10)
            open_files.append(_open_files())
        # settings, and a storage with its driver: none of those that were left
        listed = Path(f"/proc/self/fdinfo/{engines._users[_ME].inotify}").read_text()
        assert listed.count("inotify wd") <= 4
        wait_until(lambda: _open_files() <= min(open_files) + 2, 10)


def test_nothing_stays_open(tmp_path: Path) -> None:
    _write(tmp_path / _CONF, _conf(graphroot=tmp_path / "data", runroot=tmp_path / "none/there"))
    with _engines(tmp_path) as engines:
        _storage_of(tmp_path / "data", _WEB, "web")
        _wait_for(engines, a="web")
        wait_until(lambda: not engines._users[_ME].is_due, 10)
        before = _open_files()
        for number in range(20):
            key = f"{number:064x}"
            _storage_of(tmp_path / "data", key, "x")
            wait_until(lambda key=key: _known(engines, key), 10)
        wait_until(lambda: _open_files() <= before, 10)
