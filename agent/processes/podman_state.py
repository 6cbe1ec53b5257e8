# SPDX-License-Identifier: Apache-2.0
"""What podman has configured for its containers, from the database in which it keeps its state.

podman is not asked, no lock is taken, and nothing is written beside its files.

* Up to 4.7, and where it began as that: a file of bbolt's (`bolt`), with a bucket `ctr`, in it one
  for each container, in it `config`: JSON (containers/podman, libpod/boltdb_state_internal.go,
  addContainer).
* From 4.8 on: SQLite's, with the same JSON in `ContainerConfig` (libpod/sqlite_state_internal.go,
  createSQLiteTables, addContainer and sqliteStatePath).

Since 4.6 the latter has a rollback journal (containers/podman#18519): a reader with a lock would
have podman's commands wait, or fail. So it is read as a file that does not change (`immutable`),
which takes no lock, and what was read counts if nobody wrote meanwhile: there was no journal before
and after, and the change counter is the same (sqlite.org/fileformat2.html, 1.3.8). A writer makes
the journal before it writes to the database, removes it after that, and counts.

4.4 and 4.5 had a write-ahead log, and what they made keeps it. A reader would take locks, and make
db.sql-shm and db.sql-wal, or leave them. So both files are copied into memory, and the copy is
opened. It is right if the log was not begun anew meanwhile: whatever a checkpoint changes in the
database is in the log.

What a container has there comes some 20 ms after its name is in the list of containers/storage, and
before its first process. Where podman was told another directory (`static_dir` of containers.conf)
is not known.
"""

from __future__ import annotations

import os
import sqlite3
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import closing
from pathlib import Path

from aiflame.agent.processes.bolt import BoltError, value
from aiflame.agent.processes.engine_files import opened, read_at

# Below the directories of storage.conf(5). The last one with `transient_store`, and up to 4.7.
_BOLT = "libpod/bolt_state.db"
_SQLITE = ("libpod/db.sql", "db.sql")
# Most have 10 to 30 KB: the options of each mount, the environment.
_MAX_CONFIG_BYTES = 1 << 20
# Looking for one takes 0.1 ms.
_MAX_LOOK_S = 0.5
# A file that is copied: of 2,000 containers.
_MAX_COPY_BYTES = 32 << 20
# Memory that containers have, too. Configurations hold passwords: none gets onto a disk from here.
_MEMORY = "/dev/shm"  # noqa: S108 - a directory of its own is made there

# sqlite.org/fileformat2.html, 1.3: versions for writing and reading, and the change counter.
_JOURNAL_MODES = slice(18, 20)
_WITH_LOG = b"\2\2"
_CHANGES = slice(24, 28)
_HEADER_BYTES = 100
# 4.1: what a log begins with is new each time that it is begun anew.
_LOG_HEADER_BYTES = 32
# A file's time is that of the last timer tick: 10 ms at most.
_TICKS_NS = 20_000_000
# Instructions of SQLite's machine, until it is asked whether there is time left: less than 1 ms.
_INSTRUCTIONS = 10_000
_QUERY = "SELECT JSON FROM ContainerConfig WHERE ID = ? AND length(JSON) <= ?"


def databases(roots: Iterable[Path]) -> list[Path]:
    """Returns the databases that there are.

    Args:
        roots: Directories of containers/storage.
    """
    names = (*_SQLITE, _BOLT)
    return [path for root in roots for path in (root / name for name in names) if _is_there(path)]


def configurations(paths: Iterable[Path], ids: Iterable[str]) -> dict[str, bytes]:
    """Returns the configurations of containers, as far as they can be told now.

    A container that is being made may have none yet, and where podman is writing none is told: it
    may be there a moment later.

    Args:
        paths: Of databases.
        ids: Of containers.

    Returns:
        JSON as podman wrote it, by ids.
    """
    end_s = time.monotonic() + _MAX_LOOK_S
    found: dict[str, bytes] = {}
    wanted = [*ids]
    for path in paths:
        left = [each for each in wanted if each not in found]
        if not left:
            break
        try:
            with opened(path) as fd:
                if path.name == Path(_BOLT).name:
                    found |= _of_bolt(fd, left, end_s)
                else:
                    found |= _of_sqlite(fd, path, left, end_s)
        # Of a length that there is no room for, and of a damaged name in the text of an error.
        except (OSError, sqlite3.Error, MemoryError, UnicodeDecodeError):
            continue  # it is gone, not readable, or damaged
    return found


def _of_bolt(fd: int, ids: Sequence[str], end_s: float) -> dict[str, bytes]:
    found = {}
    for each in ids:
        if time.monotonic() > end_s:
            break
        try:
            text = value(fd, (b"ctr", each.encode(), b"config"))
        except BoltError:
            continue  # others may be found
        if text is not None and len(text) <= _MAX_CONFIG_BYTES:
            found[each] = text
    return found


def _of_sqlite(fd: int, path: Path, ids: Sequence[str], end_s: float) -> dict[str, bytes]:
    header = read_at(fd, 0, _HEADER_BYTES)
    if header[_JOURNAL_MODES] == _WITH_LOG:
        return _of_log(fd, path, ids, end_s)
    journal = path.with_name(f"{path.name}-journal")
    if _is_there(journal):
        return {}
    found = _asked(f"{path.absolute().as_uri()}?mode=ro&immutable=1", ids, end_s)
    if _is_there(journal) or read_at(fd, 0, _HEADER_BYTES)[_CHANGES] != header[_CHANGES]:
        return {}
    return found if os.path.samestat(os.fstat(fd), path.stat()) else {}


def _of_log(fd: int, path: Path, ids: Sequence[str], end_s: float) -> dict[str, bytes]:
    log = path.with_name(f"{path.name}-wal")
    before = _state(fd, log)
    facts = os.fstat(fd)
    if not before[0] and abs(time.time_ns() - facts.st_mtime_ns) < _TICKS_NS:
        return {}  # whether it is written to once more would not show
    if facts.st_size > _MAX_COPY_BYTES:
        return {}
    with tempfile.TemporaryDirectory(prefix="aiflame-", dir=_MEMORY) as folder:
        copy = Path(folder) / "db.sql"
        copy.write_bytes(read_at(fd, 0, facts.st_size))
        if before[0]:
            with opened(log) as log_fd:
                text = read_at(log_fd, 0, _MAX_COPY_BYTES + 1)
            if len(text) > _MAX_COPY_BYTES:
                return {}
            Path(f"{copy}-wal").write_bytes(text)
        if _state(fd, log) != before:
            return {}
        return _asked(copy.as_uri(), ids, end_s)


def _state(fd: int, log: Path) -> tuple[bytes, int, int]:
    """Returns what changes where a copy may have parts of two states.

    Without a log, whoever wrote one and was done with it has written to the database.
    """
    try:
        with opened(log) as log_fd:
            header = read_at(log_fd, 0, _LOG_HEADER_BYTES)
    except FileNotFoundError:
        header = b""
    if header:
        return header, 0, 0
    facts = os.fstat(fd)
    return b"", facts.st_mtime_ns, facts.st_size


def _asked(uri: str, ids: Iterable[str], end_s: float) -> dict[str, bytes]:
    found = {}
    with closing(sqlite3.connect(uri, uri=True, isolation_level=None)) as database:
        # Whatever is in the file, it is over by then.
        database.set_progress_handler(lambda: time.monotonic() > end_s, _INSTRUCTIONS)
        database.text_factory = bytes
        for each in ids:
            if time.monotonic() > end_s:
                break
            row = database.execute(_QUERY, (each, _MAX_CONFIG_BYTES)).fetchone()
            text = row[0] if row else None
            if isinstance(text, bytes) and len(text) <= _MAX_CONFIG_BYTES:
                found[each] = text
    return found


def _is_there(path: Path) -> bool:
    """Whether it is; also a path of which that cannot be told is not."""
    return os.path.lexists(path)
