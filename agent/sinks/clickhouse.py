# SPDX-License-Identifier: Apache-2.0
"""Batches as rows of a fleet's store on a ClickHouse server."""

from __future__ import annotations

import gzip
import http
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

from aiflame.agent.errors import AiflameError, UsageError
from aiflame.agent.model.batch import Batch
from aiflame.agent.settings import Kind, setting
from aiflame.agent.sinks.posting import retry_after_s
from aiflame.agent.sinks.requests import Request, SinkAway, SinkRefused
from aiflame.agent.store.address import Server, address_of
from aiflame.agent.store.engine import DATABASE, KEEP_DAYS, MOST_KEEP_DAYS
from aiflame.agent.store.engines import INSERT_SETTINGS
from aiflame.agent.store.http import Reply, Unreachable, post
from aiflame.agent.store.inserts import Insert, inserts_of
from aiflame.agent.store.rows import monday
from aiflame.agent.store.schema import Rows

# Of ids that were sent: a busy host has some ten thousand stacks in a week. At 100 bytes each this
# is 20 MB.
_KNOWN_STACKS = 200_000

# A request for stacks may have been lost on its way: after a day all are sent again.
_S_PER_DAY = 86_400

# An insert of 4 MB takes a server less than a second; a request that hangs, or an answer that comes
# a byte at a time, must not hold the queue.
_TIMEOUT_S = 30.0

# What a server answers to an insert is empty.
_MAX_ANSWER_BYTES = 65_536

# Rows never get into the tables later either: numbers of ClickHouse's src/Common/ErrorCodes.cpp,
# those of malformed or unknown data. A table that is not there may still be made.
_BAD_DATA = frozenset(
    {
        *(6, 25, 26, 27, 33, 38, 41, 53, 69, 70, 72, 117, 130, 131),  # cannot parse, or be read as
        *(16, 36, 47, 62),  # no such column, bad arguments, unknown identifier, syntax
    }
)
_BAD_REQUEST = (
    http.HTTPStatus.BAD_REQUEST,
    http.HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    http.HTTPStatus.UNPROCESSABLE_ENTITY,
)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The keys of `[sinks.clickhouse]`.

    Attributes:
        url: Of the server's HTTP interface, "https://HOST:8443", with a path where a proxy wants
            one; "http" without TLS.
        database: Where `aiflame store init` has made the tables.
        user: Who may insert there.
        password_file: A file with the user's password.
        ca_file: Certificates to trust, instead of the system's.
        cert_file: This host's own certificate, for a server that asks for one. Without a password
            it tells who the user is.
        key_file: Its key.
        cluster: What all rows say of it.
        keep_days: As the store was made: what is older is not sent.
    """

    url: str
    database: str = DATABASE
    user: str = ""
    password_file: Path | None = None
    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None
    cluster: str = ""
    keep_days: int = setting(
        Kind.COUNT,
        "as the store was made: what is older is not sent, 0 for ever",
        KEEP_DAYS,
        least=0,
        most=MOST_KEEP_DAYS,
    )

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of the server; raises UsageError where the URL is none."""
        server = _server_of(self)
        return server.host, server.port


def check(settings: Settings) -> None:
    """Refuse settings that make no sense, or whose files cannot be read.

    Raises:
        UsageError: They are refused, or a password would be sent in the clear.
    """
    server = _server_of(settings)
    server.password({})
    server.tls()


def make(settings: Settings, node: str) -> ClickHouseSink:
    """Make the sink of a host. Its name is in the labels of what is inserted.

    Raises:
        UsageError: The settings make no sense.
    """
    return ClickHouseSink(
        _server_of(settings), cluster=settings.cluster, keep_days=settings.keep_days
    )


def _server_of(settings: Settings) -> Server:
    parts = urlsplit(settings.url)
    if parts.username or parts.password or parts.query or parts.fragment:
        raise UsageError(
            f"{parts.scheme}://{parts.hostname}: a URL with more than host, port and path",
            "`user`, `password_file`, `database` and the others have keys of their own",
        )
    scheme = "clickhouses" if parts.scheme == "https" else "clickhouse"
    place = address_of(f"{scheme}://{parts.netloc}/{settings.database}", {})
    assert isinstance(place, Server)  # noqa: S101 - it has a scheme
    return replace(
        place,
        name=settings.url,
        user=settings.user,
        password_file=settings.password_file,
        ca_file=settings.ca_file,
        cert_file=settings.cert_file,
        key_file=settings.key_file,
        path=parts.path.rstrip("/"),
        # Of the agent's environment only its own keys are read.
        password_variable="",
    )


def describe(settings: Settings) -> str:
    """Say where it sends."""
    return f"ClickHouse at {settings.url}, database {settings.database}"


class ClickHouseSink:
    """Sends batches to a ClickHouse server: a `RequestSink`.

    A request's body is a line "TABLE TOKEN IDS" and the rows after it, compressed. A server that
    knows the token leaves them out, so that one that was sent twice is there once. The ids, between
    commas, are those of stacks that it brings.
    """

    name = "clickhouse"
    sends_spans = True
    modules: tuple[str, ...] = ()

    def __init__(
        self,
        server: Server,
        *,
        cluster: str = "",
        keep_days: int = KEEP_DAYS,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """Makes it; nothing is sent.

        Args:
            server: Where; its tables are made by `aiflame store init`.
            cluster: What all rows say of it.
            keep_days: As the store was made: older rows would vanish there. 0: for ever.
            now_s: A clock.
        """
        self.max_age_s = float(keep_days * _S_PER_DAY) if keep_days else None
        self._server = server
        self._cluster = cluster
        self._now_s = now_s
        # Stacks that the server has been sent in a week: sending alone, which another thread does,
        # takes note of them.
        self._sent: OrderedDict[int, None] = OrderedDict()
        self._week = ""
        self._forget_at_s = now_s() + _S_PER_DAY

    def encode(self, batches: Sequence[Batch]) -> Iterator[Request]:
        """Encodes what one stretch of time has: stacks before what mentions them.

        Stacks that the server has are left out; those that wait to be sent are not, since what
        waits may be dropped.
        """
        if not batches:
            return
        begin_unix_ns = min(batch.begin_unix_ns for batch in batches)
        is_of_week = _week_of(begin_unix_ns) == self._week and self._now_s() < self._forget_at_s
        told: set[int] = set()

        def is_new(stack_id: int) -> bool:
            is_known = stack_id in told or (is_of_week and stack_id in self._sent)
            told.add(stack_id)
            return not is_known

        for piece in inserts_of(batches, self._cluster, is_new):
            yield Request(_body(piece), begin_unix_ns, piece.samples)

    def send(self, request: Request) -> Counter[str]:
        """Sends a request; a server takes all of it or nothing.

        Raises:
            SinkAway: It is to be sent again.
            SinkRefused: It is not.
        """
        table, token, stack_ids, rows = _parts(request.body)
        parameters = {
            **INSERT_SETTINGS,
            "database": self._server.database,
            "wait_end_of_query": "1",
            "insert_deduplication_token": token,
            "query": f"INSERT INTO {table.value} FORMAT JSONEachRow",
        }
        try:
            reply = post(
                self._server,
                parameters,
                rows,
                timeout_s=_TIMEOUT_S,
                max_bytes=_MAX_ANSWER_BYTES,
                is_gzip=True,
            )
        except Unreachable as error:
            raise SinkAway(f"ClickHouse does not answer: {error}") from error
        except AiflameError as error:
            raise SinkAway(f"ClickHouse cannot be asked: {error}") from error
        if not reply.is_error and reply.body:
            why = "no ClickHouse at this URL"
            raise SinkRefused(f"{self.name}: {why}: it answers {reply.words}", why)
        if not reply.is_error:
            self._note_sent(stack_ids, _week_of(request.begin_unix_ns))
            return Counter()
        if _is_refusal(reply):
            number = f"code {reply.code}" if reply.code else f"status {reply.status}"
            raise SinkRefused(f"ClickHouse refuses: {reply.words}", number)
        raise SinkAway(
            f"ClickHouse cannot take it now: {reply.words}", retry_after_s(reply.retry_after)
        )

    def _note_sent(self, stack_ids: Sequence[int], week: str) -> None:
        if week != self._week or self._now_s() >= self._forget_at_s:
            self._sent.clear()
            self._week = week
            self._forget_at_s = self._now_s() + _S_PER_DAY
        for stack_id in stack_ids:
            self._sent[stack_id] = None
            self._sent.move_to_end(stack_id)
        while len(self._sent) > _KNOWN_STACKS:
            self._sent.popitem(last=False)


def _week_of(unix_ns: int) -> str:
    return monday(max(0, unix_ns // 10**9))


def _body(piece: Insert) -> bytes:
    head = f"{piece.table.value} {piece.token} {','.join(map(str, piece.stack_ids))}".rstrip()
    # Without a time in it: the same rows are the same bytes.
    return head.encode() + b"\n" + gzip.compress(piece.rows, mtime=0)


def _parts(body: bytes) -> tuple[Rows, str, list[int], bytes]:
    head, newline, rows = body.partition(b"\n")
    table, token, ids = [*head.decode("ascii", "replace").split(" "), "", ""][:3]
    if not newline or table not in {rows.value for rows in Rows}:
        raise SinkRefused("not a request for ClickHouse", "no request")
    return Rows(table), token, [int(word) for word in ids.split(",") if word.isdigit()], rows


def _is_refusal(reply: Reply) -> bool:
    if reply.code:
        return reply.code in _BAD_DATA
    return reply.status in _BAD_REQUEST
