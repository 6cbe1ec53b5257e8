# SPDX-License-Identifier: Apache-2.0
"""Labels out of podman's databases.

Those of SQLite's are made here, with tables as podman's source has them
(libpod/sqlite_state_internal.go, createSQLiteTables): no podman that writes them is part of Debian
12. Real ones of bbolt's are read in tests/bpf/test_containers.py.
"""

from __future__ import annotations

import json
import os
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from aiflame.agent.processes import podman_state
from aiflame.agent.processes.container_names import EngineFacts, facts_of
from aiflame.agent.processes.podman_state import configurations, databases
from bolt_files import BoltFile

_WEB, _DB, _JOB = "a" * 64, "b" * 64, "c" * 64
_STORAGE = "var/lib/containers/storage"
_TABLES = """
CREATE TABLE IDNamespace(ID TEXT PRIMARY KEY NOT NULL);
CREATE TABLE ContainerConfig(
    ID TEXT PRIMARY KEY NOT NULL, Name TEXT UNIQUE NOT NULL, PodID TEXT, JSON TEXT NOT NULL,
    FOREIGN KEY (ID) REFERENCES IDNamespace(ID) DEFERRABLE INITIALLY DEFERRED,
    FOREIGN KEY (ID) REFERENCES ContainerState(ID) DEFERRABLE INITIALLY DEFERRED,
    FOREIGN KEY (PodID) REFERENCES PodConfig(ID)
);
CREATE TABLE ContainerState(
    ID TEXT PRIMARY KEY NOT NULL, State INTEGER NOT NULL, ExitCode INTEGER, JSON TEXT NOT NULL,
    FOREIGN KEY (ID) REFERENCES ContainerConfig(ID) DEFERRABLE INITIALLY DEFERRED,
    CHECK (ExitCode BETWEEN -1 AND 255)
);
"""


def _listed(root: Path, names: Mapping[str, str], storage: str = _STORAGE) -> Path:
    """Writes the list that containers/storage has; returns its directory."""
    folder = root / storage / "overlay-containers"
    folder.mkdir(parents=True, exist_ok=True)
    listed = [{"id": key, "names": [name]} for key, name in names.items()]
    (folder / "containers.json").write_text(json.dumps(listed))
    return root / storage


def _config(labels: Any, size: int = 9000) -> bytes:
    return json.dumps({"id": _WEB, "spec": "x" * size, "labels": labels}).encode()


def _bolt(storage: Path, configs: Mapping[str, bytes]) -> Path:
    path = storage / "libpod/bolt_state.db"
    path.parent.mkdir(parents=True, exist_ok=True)
    containers = {key.encode(): {b"config": text} for key, text in configs.items()}
    path.write_bytes(BoltFile({b"ctr": containers}).content())
    return path


def _writer(path: Path, journal: str = "delete") -> sqlite3.Connection:
    path.parent.mkdir(parents=True, exist_ok=True)
    database = sqlite3.connect(path, isolation_level=None)
    database.execute(f"PRAGMA journal_mode={journal}")
    database.executescript(_TABLES)
    return database


def _add(database: sqlite3.Connection, configs: Mapping[str, bytes | str]) -> None:
    database.executemany(
        "INSERT INTO ContainerConfig VALUES (?, ?, NULL, ?)",
        [(key, f"name of {key}", text) for key, text in configs.items()],
    )


def _sqlite(path: Path, configs: Mapping[str, bytes | str], journal: str = "delete") -> Path:
    with closing(_writer(path, journal)) as database:
        _add(database, configs)
    return path


def _settled(path: Path) -> None:
    """Has a file look as if it was written a while ago."""
    an_hour_ago_s = time.time() - 3600
    os.utime(path, (an_hour_ago_s, an_hour_ago_s))


@contextmanager
def _unchanged(folder: Path) -> Iterator[None]:
    """Nothing is made, removed or written in a directory meanwhile."""

    def state() -> dict[str, tuple[int, bytes]]:
        return {each.name: (each.stat().st_mtime_ns, each.read_bytes()) for each in files()}

    def files() -> Iterable[Path]:
        return (each for each in folder.iterdir() if each.is_file())

    before = state()
    yield
    assert state() == before


@pytest.mark.parametrize("name", ["libpod/bolt_state.db", "libpod/db.sql", "db.sql"])
@pytest.mark.parametrize("storage", [_STORAGE, "run/containers/storage", "srv/graph"])
def test_labels_where_podman_has_them(tmp_path: Path, name: str, storage: str) -> None:
    settings = tmp_path / "etc/containers/storage.conf"
    settings.parent.mkdir(parents=True)
    settings.write_text('[storage]\ngraphroot = "/srv/graph"\n')
    root = _listed(tmp_path, {_WEB: "web", _DB: "db"}, storage)
    configs = {_WEB: _config({"team": "search", "odd": 5}), _DB: _config(None)}
    path = root / name
    if path.suffix == ".db":
        assert _bolt(root, configs) == path
    else:
        _sqlite(path, configs)
    with _unchanged(path.parent):
        assert facts_of([_WEB, _DB], tmp_path) == {
            _WEB: EngineFacts("web", labels=(("team", "search"),)),
            _DB: EngineFacts("db"),
        }


def test_labels_that_are_not_there_yet(tmp_path: Path) -> None:
    # GIVEN a container that is being made, whose name is known before all else
    storage = _listed(tmp_path, {_WEB: "web", _JOB: "job"})
    path = _bolt(storage, {_WEB: _config({"team": "a"})})
    found = facts_of([_WEB, _JOB], tmp_path)
    assert [found[key].may_have_labels for key in (_WEB, _JOB)] == [False, True]
    # THEN they are there as soon as podman has written them
    _bolt(storage, {_JOB: _config({"team": "b"})})
    assert facts_of([_JOB], tmp_path)[_JOB] == EngineFacts("job", labels=(("team", "b"),))
    # AND where no podman has ever been, as with CRI-O, there will be none
    path.unlink()
    assert facts_of([_JOB], tmp_path)[_JOB] == EngineFacts("job")


def test_a_database_that_was_taken_over_from_an_older_podman(tmp_path: Path) -> None:
    storage = _listed(tmp_path, {_WEB: "web", _DB: "db", _JOB: "job"})
    _bolt(storage, {_WEB: _config({"team": "bolt"}), _DB: _config({"team": "bolt"})})
    _sqlite(storage / "libpod/db.sql", {_DB: _config({"team": "sqlite"})})
    found = facts_of([_WEB, _DB, _JOB], tmp_path)
    assert [facts.labels for _, facts in sorted(found.items())] == [
        (("team", "bolt"),),
        (("team", "sqlite"),),
        (),
    ]


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"null", b"9" * 10_000, b"[" * 100_000,
                                  b'{"labels": 5}', b'{"labels": ["a"]}', b'{"labels": {"a": {}}}',
                                  b"\xff\xfe", b"\0"])  # fmt: skip
@pytest.mark.parametrize("kind", ["bolt", "sqlite"])
def test_a_configuration_that_is_none(tmp_path: Path, kind: str, text: bytes) -> None:
    storage = _listed(tmp_path, {_WEB: "web", _DB: "db"})
    configs = {_WEB: text, _DB: _config({"team": "a"})}
    if kind == "bolt":
        _bolt(storage, configs)
    else:
        _sqlite(storage / "db.sql", configs)
    assert facts_of([_WEB, _DB], tmp_path) == {
        _WEB: EngineFacts("web"),
        _DB: EngineFacts("db", labels=(("team", "a"),)),
    }


@pytest.mark.parametrize("kind", ["bolt", "sqlite", "text"])
def test_a_configuration_that_is_too_large(tmp_path: Path, kind: str) -> None:
    configs = {_WEB: _config({"team": "a"}, 1 << 20), _DB: _config({"team": "b"}, (1 << 20) - 999)}
    if kind == "bolt":
        path = _bolt(tmp_path, configs)
    elif kind == "sqlite":
        path = _sqlite(tmp_path / "db.sql", configs)
    else:
        path = _sqlite(tmp_path / "db.sql", {key: text.decode() for key, text in configs.items()})
    assert [*configurations([path], [_WEB, _DB])] == [_DB]


@pytest.mark.parametrize("kind", ["link", "fifo", "folder", "another user", "gone"])
@pytest.mark.parametrize("name", ["libpod/bolt_state.db", "db.sql", "db.sql-wal"])
def test_files_that_are_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, name: str
) -> None:
    storage = _listed(tmp_path, {_WEB: "web"})
    configs = {_WEB: _config({"team": "a"})}
    with closing(_writer(storage / "db.sql", "wal")) as database:
        if name == "libpod/bolt_state.db":
            path = _bolt(storage, configs)
        else:
            _add(database, configs)
            path = storage / name
        if name == "db.sql":
            database.execute("PRAGMA journal_mode=delete")
        if kind == "another user":
            if os.geteuid() == 0:
                os.chown(path, 65534, 65534)
            else:
                monkeypatch.setattr(os, "geteuid", lambda: 65534)
        else:
            elsewhere = path.rename(tmp_path / "elsewhere")
            match kind:
                case "link":
                    path.symlink_to(elsewhere)
                case "fifo":
                    os.mkfifo(path)
                case "folder":
                    path.mkdir()
        begun_s = time.monotonic()
        assert facts_of([_WEB], tmp_path).get(_WEB, EngineFacts()).labels == ()
        assert time.monotonic() - begun_s < 5


def test_what_another_process_is_writing_is_not_read(tmp_path: Path) -> None:
    path = _sqlite(tmp_path / "db.sql", {_WEB: _config({"team": "a"})})
    with closing(sqlite3.connect(path, isolation_level=None)) as database:
        # GIVEN a transaction that has written a part to the file
        database.execute("PRAGMA cache_size=1")
        database.execute("BEGIN EXCLUSIVE")
        _add(database, {f"{number:064x}": _config({}) for number in range(100)})
        database.execute("UPDATE ContainerConfig SET JSON = ?", (_config({"team": "b"}),))
        assert path.with_name("db.sql-journal").exists()
        with _unchanged(tmp_path):
            assert configurations([path], [_WEB]) == {}
        # THEN what it has changed is told once it is over
        database.execute("COMMIT")
        assert configurations([path], [_WEB]) == {_WEB: _config({"team": "b"})}


def test_what_was_written_to_while_it_was_read_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = _sqlite(tmp_path / "db.sql", {_WEB: _config({"team": "a"})})
    asked = podman_state._asked

    def written(*words: Any) -> dict[str, bytes]:
        found = asked(*words)
        with closing(sqlite3.connect(path, isolation_level=None)) as database:
            _add(database, {f"{time.monotonic_ns():064x}": b"{}"})
        return found

    monkeypatch.setattr(podman_state, "_asked", written)
    assert configurations([path], [_WEB]) == {}


def test_another_file_in_the_place_of_the_one_that_was_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = _sqlite(tmp_path / "db.sql", {_WEB: _config({"team": "a"})})
    asked = podman_state._asked

    def replaced(*words: Any) -> dict[str, bytes]:
        path.rename(tmp_path / "before")
        _sqlite(path, {_WEB: _config({"team": "b"})})
        return asked(*words)

    monkeypatch.setattr(podman_state, "_asked", replaced)
    assert configurations([path], [_WEB]) == {}


def test_a_writer_is_not_held_up(tmp_path: Path) -> None:
    path = _sqlite(tmp_path / "db.sql", {_WEB: _config({"team": "a"})})
    with closing(sqlite3.connect(path, timeout=0, isolation_level=None)) as database:
        asked: list[dict[str, bytes]] = []

        def ask(*_: object) -> int:
            asked.append(configurations([path], [_WEB]))
            return 0

        # WHEN it is read all the time while somebody writes who would not wait for any lock
        database.set_progress_handler(ask, 20)
        for number in range(20):
            _add(database, {f"{number:064x}": b"{}"})
        database.set_progress_handler(None, 0)
    assert len(asked) > 20


def test_rows_that_are_in_the_log_only(tmp_path: Path) -> None:
    path = tmp_path / "db.sql"
    with closing(_writer(path, "wal")) as database:
        # GIVEN a podman that is at work, whose log has what the database has not
        _add(database, {_WEB: _config({"team": "a"})})
        assert _WEB.encode() not in path.read_bytes()
        with _unchanged(tmp_path):
            assert configurations([path], [_WEB, _DB]) == {_WEB: _config({"team": "a"})}
        # AND one that began to write what is not over
        database.execute("BEGIN")
        _add(database, {_DB: _config({"team": "b"})})
        assert [*configurations([path], [_WEB, _DB])] == [_WEB]
        database.execute("COMMIT")
        # AND half of a log's last page
        log = tmp_path / "db.sql-wal"
        whole = log.read_bytes()
        log.write_bytes(whole[:-100])
        assert [*configurations([path], [_WEB, _DB])] == [_WEB]
        log.write_bytes(whole)
        assert [*configurations([path], [_WEB, _DB])] == [_WEB, _DB]
    # WHEN all are gone, and nobody makes the files of the log anew
    assert [each.name for each in tmp_path.iterdir()] == ["db.sql"]
    _settled(path)
    with _unchanged(tmp_path):
        assert [*configurations([path], [_WEB, _DB])] == [_WEB, _DB]
    assert [each.name for each in tmp_path.iterdir()] == ["db.sql"]


@pytest.mark.parametrize("change", ["log begun", "log removed", "database written"])
def test_a_log_that_is_begun_anew_while_it_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    path = tmp_path / "db.sql"
    database = _writer(path, "wal")
    _add(database, {_WEB: _config({"team": "a"})})
    if change == "database written":
        database.close()
        _settled(path)
    read_at = podman_state.read_at

    def changed(fd: int, offset: int, size: int) -> bytes:
        text = read_at(fd, offset, size)
        if size > 100 and Path(f"/proc/self/fd/{fd}").readlink() == path:  # the whole database
            if change == "database written":
                path.touch()
            elif change == "log removed":
                database.close()
            else:
                database.execute("PRAGMA wal_checkpoint(RESTART)")
                _add(database, {_DB: b"{}"})
        return text

    monkeypatch.setattr(podman_state, "read_at", changed)
    assert configurations([path], [_WEB]) == {}
    database.close()


def test_a_database_with_which_somebody_may_just_have_been_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = _sqlite(tmp_path / "db.sql", {_WEB: _config({"team": "a"})}, "wal")
    with monkeypatch.context() as patch:
        patch.setattr(podman_state, "_TICKS_NS", 60 * 10**9)
        assert configurations([path], [_WEB]) == {}
    _settled(path)
    assert [*configurations([path], [_WEB])] == [_WEB]


def test_a_copy_has_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "db.sql"
    with closing(_writer(path, "wal")) as database:
        _add(database, {_WEB: _config({"team": "a"})})
        size = (tmp_path / "db.sql-wal").stat().st_size
        monkeypatch.setattr(podman_state, "_MAX_COPY_BYTES", size - 1)
        assert configurations([path], [_WEB]) == {}
        monkeypatch.setattr(podman_state, "_MAX_COPY_BYTES", size)
        assert [*configurations([path], [_WEB])] == [_WEB]
    _settled(path)
    monkeypatch.setattr(podman_state, "_MAX_COPY_BYTES", path.stat().st_size - 1)
    assert configurations([path], [_WEB]) == {}


@pytest.mark.parametrize(
    "tables",
    [
        "",
        "CREATE TABLE ContainerConfig(ID, Name, PodID)",
        "CREATE TABLE ContainerConfig(ID, JSON); INSERT INTO ContainerConfig VALUES(X, 7)",
        "CREATE VIEW ContainerConfig AS SELECT X AS ID, zeroblob(900000000) AS JSON",
        "CREATE VIEW ContainerConfig AS WITH RECURSIVE t(i) AS (SELECT 1 UNION ALL SELECT i + 1"
        " FROM t) SELECT i AS ID, 'x' AS JSON FROM t",
    ],
)  # fmt: skip
def test_a_database_of_somebody_elses_making(tmp_path: Path, tables: str) -> None:
    path = tmp_path / "db.sql"
    with closing(sqlite3.connect(path)) as database:
        database.executescript(tables.replace("X", f"'{_WEB}'"))
    begun_s = time.monotonic()
    assert configurations([path], [_WEB, _DB]) == {}
    assert time.monotonic() - begun_s < 5


@pytest.mark.parametrize("content", [b"", b"x", b"SQLite format 3\0", b"\0" * 100_000])
@pytest.mark.parametrize("name", ["bolt_state.db", "db.sql"])
def test_a_file_that_is_no_database(tmp_path: Path, name: str, content: bytes) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    assert configurations([path, tmp_path / "none.sql"], [_WEB]) == {}
    assert databases([tmp_path / "none"]) == []
