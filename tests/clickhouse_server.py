# SPDX-License-Identifier: Apache-2.0
"""A stand-in for ClickHouse's HTTP interface, as strict as the server, and stricter where it can.

Written from ClickHouse's documentation ("HTTP interface", "Settings"). With chDB it is the real
engine behind a small HTTP server; without, it keeps rows by table, each token once.
"""

from __future__ import annotations

import gzip
import json
import re
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from aiflame.agent.store.engine import StoreError
from aiflame.agent.store.schema import Rows

USER, PASSWORD = "recorder", "s3cret"
# http_max_field_value_size.
_MAX_FIELD_BYTES = 131_072
_INSERT = re.compile(r"INSERT INTO (\w+) FORMAT JSONEachRow")
_DDL = re.compile(r"CREATE|ALTER|DROP|RENAME")
_ROWS_OF_HOSTS = b"s1\tr1\tOK\t1\t0\ns1\tr2\tOK\t0\t0\n"


class StandIn:
    """What the server got, and how it is to answer.

    Attributes:
        rows: By table, without an engine.
        requests: Of each, its parameters.
        answers: Statuses with headers and texts for the next requests; empty: as they deserve.
        prefix: Of paths, as behind a proxy.
        loses_replies: It takes so many requests and hangs up before it answers.
        drips: It answers with a header that has no end, a byte at a time.
    """

    def __init__(self, folder: Path | None, prefix: str) -> None:
        self.prefix = prefix
        self.rows: dict[str, list[dict[str, Any]]] = defaultdict(list)
        self.requests: list[dict[str, str]] = []
        self.answers: list[tuple[int, dict[str, str], bytes]] = []
        self.loses_replies = 0
        self.drips = False
        self.stop = threading.Event()
        self.lock = threading.Lock()
        self._tokens: set[tuple[str, str]] = set()
        self.engine: Any = None
        if folder is not None:
            from aiflame.agent.store.engines import open_store
            from aiflame.agent.store.schema import migrate

            self.engine = open_store(str(folder), is_read_only=False, is_new=True)
            migrate(self.engine, 0)

    def insert(self, table: str, rows: bytes, token: str) -> None:
        """Does as a server does; rows that are no objects, or of no table, are refused."""
        if self.engine is not None:
            self.engine.insert(table, rows, token)
            return
        found = [json.loads(line) for line in rows.splitlines()]
        assert found, "an insert without rows"
        assert all(isinstance(row, dict) for row in found)
        if (table, token) not in self._tokens:
            self._tokens.add((table, token))
            self.rows[table] += found


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, *_: object) -> None:
        pass

    def do_POST(self) -> None:
        stand_in = self.server.stand_in
        body = self.rfile.read(int(self.headers["Content-Length"]))
        parsed = urlsplit(self.path)
        query = {
            name: values[0]
            for name, values in parse_qs(parsed.query, keep_blank_values=True).items()
        }
        if stand_in.drips:
            self._drip(stand_in)
            return
        with stand_in.lock:
            stand_in.requests.append(query)
            if stand_in.answers:
                self._answer(*stand_in.answers.pop(0))
                return
            status, headers, text = self._deserved(stand_in, parsed.path, query, body)
            if stand_in.loses_replies:
                stand_in.loses_replies -= 1
                self.close_connection = True
                return
            self._answer(status, headers, text)

    def _drip(self, stand_in: StandIn) -> None:
        self.close_connection = True
        self.wfile.write(b"HTTP/1.1 200 OK\r\nX: ")
        with suppress(OSError):
            while not stand_in.stop.wait(0.02):
                self.wfile.write(b"x")

    def do_GET(self) -> None:
        self._answer(405, {}, b"only POST changes anything")

    def _deserved(
        self, stand_in: StandIn, path: str, query: dict[str, str], body: bytes
    ) -> tuple[int, dict[str, str], bytes]:
        if path != f"{stand_in.prefix}/":
            return 404, {}, b"There is no handle " + path.encode()
        key = self.headers.get("X-ClickHouse-Key")
        if (self.headers.get("X-ClickHouse-User"), key) != (USER, PASSWORD):
            return _error(403, 516, "Authentication failed")
        if "query" not in query:
            return self._asked(stand_in, query, body.decode("utf-8"))
        if query.get("database") != "aiflame":
            return _error(404, 81, "Database does not exist. (UNKNOWN_DATABASE)")
        insert = _INSERT.fullmatch(query.get("query", ""))
        if insert is None:
            return _error(400, 62, "Syntax error")
        if insert[1] not in {rows.value for rows in Rows}:
            return _error(404, 60, f"Table aiflame.{insert[1]} does not exist. (UNKNOWN_TABLE)")
        if not query.get("insert_deduplication_token") or query.get("async_insert") != "0":
            return _error(400, 36, "this insert cannot be told from its repetition")
        if self.headers.get("Content-Encoding") != "gzip":
            return _error(400, 117, "not compressed")
        try:
            stand_in.insert(insert[1], gzip.decompress(body), query["insert_deduplication_token"])
        except (StoreError, ValueError, EOFError, OSError) as error:
            return _error(400, 117, str(error))
        return 200, {}, b""

    def _asked(
        self, stand_in: StandIn, query: dict[str, str], statement: str
    ) -> tuple[int, dict[str, str], bytes]:
        """Runs what is no insert, as the engine does it."""
        assert stand_in.engine is not None
        if "database" not in query and not statement.startswith("CREATE DATABASE "):
            return _error(404, 60, "Table default.x does not exist. (UNKNOWN_TABLE)")
        if any(len(value) > _MAX_FIELD_BYTES for value in query.values()):
            return _error(400, 1000, "Field value too long")
        if query.get("readonly") == "2" and not statement.startswith(("SELECT", "WITH", "EXISTS")):
            return _error(500, 164, "Cannot execute query in readonly mode. (READONLY)")
        values = {
            name.removeprefix("param_"): value
            for name, value in query.items()
            if name.startswith("param_")
        }
        try:
            answer = stand_in.engine._run(statement, values)
        except StoreError as error:
            return _error(500, 47, str(error))
        # As one of two servers that replicate the database.
        if _DDL.match(statement) and query.get("distributed_ddl_output_mode") != "none":
            answer = _ROWS_OF_HOSTS
        return 200, {}, answer

    def _answer(self, status: int, headers: dict[str, str], text: bytes) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(text))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(text)


def _error(status: int, code: int, text: str) -> tuple[int, dict[str, str], bytes]:
    words = f"Code: {code}. DB::Exception: {text}".encode()
    return status, {"X-ClickHouse-Exception-Code": str(code)}, words


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    stand_in: StandIn


@contextmanager
def clickhouse(folder: Path | None = None, prefix: str = "") -> Iterator[tuple[StandIn, str]]:
    """Runs it, with chDB in a folder or without; its URL has no password, and no prefix."""
    stand_in = StandIn(folder, prefix)
    server = _Server(("127.0.0.1", 0), _Handler)
    server.stand_in = stand_in
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield stand_in, f"clickhouse://{USER}@127.0.0.1:{server.server_port}/aiflame"
    finally:
        stand_in.stop.set()
        server.shutdown()
        thread.join()
        server.server_close()
        if stand_in.engine is not None:
            stand_in.engine.close()
