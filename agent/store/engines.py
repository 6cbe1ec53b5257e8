# SPDX-License-Identifier: Apache-2.0
"""Opens a store: a server over HTTP, or a directory with the same engine inside this process."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gzip
import http
import json
import os
import re
import signal
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from aiflame.agent.errors import EnvironmentUnfit, UsageError
from aiflame.agent.store.address import Server, address_of
from aiflame.agent.store.engine import (
    DATABASE,
    MAX_ANSWER_BYTES,
    MAX_ROWS,
    MAX_SECONDS,
    Answer,
    Parameter,
    StoreError,
    parameter_text,
)
from aiflame.agent.store.http import Reply, Unreachable, post

# What a query may do: read, and choose settings but this one (ClickHouse's documentation,
# "Permissions for queries": readonly).
_READ_ONLY = "2"

_LIMITS = {
    "max_execution_time": str(MAX_SECONDS),
    "max_result_rows": str(MAX_ROWS),
    "max_result_bytes": str(MAX_ANSWER_BYTES),
    "result_overflow_mode": "throw",
}
_FORMAT = {
    "output_format_json_quote_64bit_integers": "0",
    "output_format_json_quote_denormals": "0",
}

# Inserts are told from their repetitions, and so is what the view makes of them; a server that
# gathers inserts by itself cannot do that.
INSERT_SETTINGS = {
    "async_insert": "0",
    "insert_deduplicate": "1",
    "deduplicate_blocks_in_dependent_materialized_views": "1",
    # One block for each insert: a token is of a block.
    "max_insert_block_size": "1048576",
    # An agent may be newer than the tables.
    "input_format_skip_unknown_fields": "1",
}

# A database that is replicated between servers tells of each what it did, unless it is told not to;
# an error is one all the same (ClickHouse's documentation, "distributed_ddl_output_mode").
_NO_ROWS_OF_HOSTS = {"distributed_ddl_output_mode": "none"}

# As long as a server may take to find an answer, and as long again for its way here.
_ANSWER_S = 2.0 * MAX_SECONDS

_INSTALL = f"{sys.executable} -m pip install chdb  (181 MB), or use clickhouse://host/db"


class ServerEngine:
    """A ClickHouse server."""

    def __init__(self, server: Server) -> None:
        self.name = server.name
        self._server = server

    def create_database(self) -> None:
        """Makes the database, if there is none."""
        statement = f"CREATE DATABASE IF NOT EXISTS {self._server.database}"
        self._refuse_answer(self._ask(statement, _NO_ROWS_OF_HOSTS, has_database=False))

    def execute(self, statement: str) -> None:
        """Runs a statement that has no answer."""
        self._refuse_answer(self._ask(statement, _NO_ROWS_OF_HOSTS))

    def query(self, statement: str, parameters: Mapping[str, Parameter] | None = None) -> Answer:
        """Asks."""
        settings = {**_LIMITS, **_FORMAT, "readonly": _READ_ONLY, "default_format": "JSONCompact"}
        values = {f"param_{k}": parameter_text(v) for k, v in (parameters or {}).items()}
        return _answer(self._ask(statement, {**settings, **values}))

    def insert(self, table: str, rows: bytes, token: str) -> None:
        """Inserts rows."""
        settings = {
            **INSERT_SETTINGS,
            "insert_deduplication_token": token,
            "query": f"INSERT INTO {table} FORMAT JSONEachRow",
        }
        self._refuse_answer(self._ask(gzip.compress(rows, mtime=0), settings, is_gzip=True))

    def close(self) -> None:
        """Closes it."""

    def _refuse_answer(self, body: bytes) -> None:
        """Refuses what says something where a server says nothing: it has taken nothing."""
        if body:
            said = Reply(http.HTTPStatus.OK, 0, body).words
            raise StoreError(
                f"no ClickHouse at {self._server.host}:{self._server.port}: it answers {said}",
                "name the port of its HTTP interface: 8123, or 8443 with TLS",
            )

    def _ask(
        self,
        body: str | bytes,
        parameters: Mapping[str, str],
        *,
        is_gzip: bool = False,
        has_database: bool = True,
    ) -> bytes:
        data = body.encode("utf-8", "replace") if isinstance(body, str) else body
        database = {"database": self._server.database} if has_database else {}
        try:
            reply = post(
                self._server,
                {**database, "wait_end_of_query": "1", **parameters},
                data,
                timeout_s=_ANSWER_S,
                max_bytes=MAX_ANSWER_BYTES,
                is_gzip=is_gzip,
            )
        except Unreachable as error:
            raise StoreError(f"the store does not answer: {error}") from error
        if reply.is_error:
            raise StoreError(f"the store says: {reply.words}", _hint(reply.words, self.name))
        return reply.body


class DirectoryEngine:
    """A directory, opened by the engine inside this process; by one process at a time."""

    def __init__(self, folder: Path, *, is_read_only: bool) -> None:
        """Opens it.

        Args:
            folder: The directory.
            is_read_only: Nothing can be changed any more.

        Raises:
            AiflameError: It cannot be opened: there is no such engine here, or somebody has it.
        """
        try:
            from chdb.session import Session
        except ImportError as error:
            raise EnvironmentUnfit(
                f"a store in a directory needs chDB, which is not installed: {error}", _INSTALL
            ) from error
        self.name = str(folder)
        path = os.path.abspath(folder)  # noqa: PTH100, links are followed by whoever opens it
        if "?" in path or ":" in path:
            raise UsageError(f"chDB takes no path with ? or :, as in {folder}", "another --store")
        _refuse_not_writable(folder)
        if _is_taken(folder):
            raise StoreError(
                f"the store {folder} is open in another process; chDB lets one at a time",
                "wait until it has ended; a ClickHouse server serves many",
            )
        try:
            self._session = Session(path)
        except Exception as error:  # it raises RuntimeError for all
            raise _not_opened(folder, error) from error
        _OPEN[path] += 1
        self._path = path
        settings = {**_FORMAT, **_LIMITS}
        if is_read_only:
            settings["readonly"] = _READ_ONLY
        self._settings = settings
        self._is_read_only = is_read_only
        self._is_chosen = False

    def create_database(self) -> None:
        """Makes the database, if there is none."""
        self._run(f"CREATE DATABASE IF NOT EXISTS {DATABASE}")

    def execute(self, statement: str) -> None:
        """Runs a statement that has no answer."""
        self._choose()
        self._run(statement)

    def query(self, statement: str, parameters: Mapping[str, Parameter] | None = None) -> Answer:
        """Asks."""
        _refuse_what_writes(statement)
        self._choose()
        values = {k: parameter_text(v) for k, v in (parameters or {}).items()}
        return _answer(self._run(statement, values))

    def insert(self, table: str, rows: bytes, token: str) -> None:
        """Inserts rows."""
        self._choose()
        settings = {**INSERT_SETTINGS, "insert_deduplication_token": token}
        if not all(_PLAIN_VALUE.fullmatch(value) for value in settings.values()):
            raise StoreError(f"not a token: {token!r}")
        chosen = ", ".join(f"{name} = '{value}'" for name, value in settings.items())
        text = rows.decode("utf-8")
        self._run(f"INSERT INTO {table} SETTINGS {chosen} FORMAT JSONEachRow\n{text}")

    def close(self) -> None:
        """Closes it."""
        self._session.close()
        _OPEN[self._path] -= 1
        if not _OPEN[self._path]:
            del _OPEN[self._path]

    def _choose(self) -> None:
        if not self._is_chosen:
            self._run(f"USE {DATABASE}")
            chosen = ", ".join(f"{name} = '{value}'" for name, value in self._settings.items())
            self._run(f"SET {chosen}")
            self._is_chosen = True

    def _run(self, statement: str, values: Mapping[str, str] | None = None) -> bytes:
        try:
            with _interruptible() if self._is_read_only else contextlib.nullcontext():
                found = self._session.query(statement, "JSONCompact", params=dict(values or {}))
        except Exception as error:  # it raises RuntimeError for all
            text = " ".join(str(error).split())
            raise StoreError(f"the store says: {text[:400]}", _hint(text, self.name)) from error
        return bytes(found.bytes()) if found is not None else b""


def open_store(
    text: str, *, is_read_only: bool, is_new: bool = False
) -> DirectoryEngine | ServerEngine:
    """Opens a store.

    Args:
        text: Its URL or directory, as its user typed it.
        is_read_only: Nothing is to be changed in it.
        is_new: It may not be there yet.

    Raises:
        AiflameError: There is none, or it cannot be opened.
    """
    address = address_of(text)
    if isinstance(address, Server):
        return ServerEngine(address)
    if not is_new and not _is_store(address):
        raise UsageError(f"no store here: {address}", f"aiflame store init --store {address}")
    if is_new:
        _make_folder(address)
    return DirectoryEngine(address, is_read_only=is_read_only)


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Lets Ctrl-C end this process at once, of which nothing is lost where nothing is changed.

    Python hears of a signal when the engine comes back to it, which may take minutes.
    """
    handler = signal.getsignal(signal.SIGINT)
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or handler is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


# Of a setting: it stands in a statement.
_PLAIN_VALUE = re.compile(r"[A-Za-z0-9_./:-]{1,200}")

# What no keyword and no end of a statement stands in: strings, names and comments.
_QUOTED = re.compile(
    r"'(?:[^'\\]|\\.)*'|`(?:[^`\\]|\\.)*`|\"(?:[^\"\\]|\\.)*\"|\$(\w*)\$.*?\$\1\$"
    r"|--[^\n]*|#[ !][^\n]*|/\*.*?\*/",
    re.DOTALL,
)

# Both write files of whoever asks, which the engine's read-only mode lets through.
_WRITES = re.compile(r"\bINTO\s+OUTFILE\b|\bINSERT\b", re.IGNORECASE)


def _refuse_what_writes(statement: str) -> None:
    """Raises StoreError for what a server refuses, and the engine here would do."""
    words = _QUOTED.sub(" ", statement)
    if ";" in words.rstrip().rstrip(";"):
        raise StoreError("several statements in one question", "ask one after the other")
    if _WRITES.search(words):
        raise StoreError(
            "a question may only read: no INSERT, no INTO OUTFILE",
            "aiflame query sql --json ... > FILE",
        )


# What the engine makes in each directory of its own.
_MARKS = ("data", "metadata", "store")


def _is_store(folder: Path) -> bool:
    try:
        return all((folder / mark).is_dir() for mark in _MARKS)
    except PermissionError as error:
        raise _not_writable(folder, error) from error


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        is_foreign = not _is_store(folder) and any(folder.iterdir())
    except OSError as error:
        raise UsageError(f"no store can be made here: {error}") from error
    if is_foreign:
        raise UsageError(f"not empty, and no store: {folder}", "--store NEW-DIRECTORY")


def _is_taken(folder: Path) -> bool:
    """Tells whether another process has it: who does holds a lock on its file "status".

    Source: ClickHouse's src/Common/StatusFile.cpp (flock). The engine itself says why it cannot
    open a directory on standard error only.
    """
    try:
        fd = os.open(folder / "status", os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        # Within one process the engine shares what is open.
        return not _is_own(folder)
    finally:
        os.close(fd)
    return False


def _is_own(folder: Path) -> bool:
    return os.path.abspath(folder) in _OPEN  # noqa: PTH100


# Directories that this process has open, each as often as it stands here.
_OPEN: Counter[str] = Counter()


def _refuse_not_writable(folder: Path) -> None:
    """The engine writes into a store that it only reads, and says why it cannot on stderr only."""
    for path in (folder, folder / "status"):
        if path.exists() and not os.access(path, os.R_OK | os.W_OK):
            # A file system that is read-only says so in its own words.
            code = errno.EROFS if os.access(path, os.R_OK) and not os.geteuid() else errno.EACCES
            raise _not_writable(folder, OSError(code, os.strerror(code), str(path)))


def _not_writable(folder: Path, error: OSError) -> EnvironmentUnfit:
    return EnvironmentUnfit(
        f"the store {folder} cannot be opened: {error}; chDB writes also where it is only asked",
        "run it as the owner of the store, or copy the store to where you may write",
    )


def _not_opened(folder: Path, error: Exception) -> StoreError:
    text = " ".join(str(error).split())
    return StoreError(f"the store {folder} cannot be opened: {text[:400]}")


def _hint(text: str, name: str) -> str | None:
    if "UNKNOWN_TABLE" in text or "UNKNOWN_DATABASE" in text:
        return f"aiflame store init --store {name}"
    if "AUTHENTICATION_FAILED" in text or "REQUIRED_PASSWORD" in text:
        return "AIFLAME_STORE_USER, and AIFLAME_STORE_PASSWORD or ?password_file=PATH"
    if "TIMEOUT_EXCEEDED" in text or "Limit for result exceeded" in text:
        return "ask for less: a shorter time range, or one service"
    return None


def _answer(body: bytes) -> Answer:
    try:
        found: dict[str, Any] = json.loads(body.decode("utf-8", "replace"))
        columns = tuple(str(column["name"]) for column in found["meta"])
        rows = found["data"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise StoreError(
            f"what the store answered is no table: {type(error).__name__}",
            "a query needs no FORMAT of its own",
        ) from error
    if not isinstance(rows, list) or not all(
        isinstance(row, list) and len(row) == len(columns) for row in rows
    ):
        raise StoreError("what the store answered is no table")
    return Answer(columns, rows)
