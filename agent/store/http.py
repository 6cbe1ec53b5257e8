# SPDX-License-Identifier: Apache-2.0
"""ClickHouse's HTTP interface: one request, one answer.

Source: ClickHouse's documentation, "HTTP interface". An error has another status than 200 and the
number of the exception in X-ClickHouse-Exception-Code; `wait_end_of_query` makes the server hold
the status back until it knows it. What returns no table, as an insert, has an empty answer.
"""

from __future__ import annotations

import http.client
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlencode

from aiflame.agent.errors import UsageError
from aiflame.agent.http_exchange import exchange
from aiflame.agent.store.address import Server

# Of what a server says of an error; more is noise.
_MAX_ERROR_BYTES = 4_096


class Unreachable(Exception):
    """The server did not answer."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What a server said.

    Attributes:
        status: Of HTTP.
        code: Of ClickHouse's exception, 0 for none.
        body: Of an error, its beginning.
        retry_after: As the server wrote it, "" where it did not.
    """

    status: int
    code: int
    body: bytes
    retry_after: str = ""

    @property
    def is_error(self) -> bool:
        """Whether the server refused."""
        return self.status != http.HTTPStatus.OK or self.code != 0

    @property
    def words(self) -> str:
        """What it said of an error, on one line."""
        text = self.body[:_MAX_ERROR_BYTES].decode("utf-8", "replace")
        said = " ".join("".join(c if c.isprintable() else " " for c in text).split())
        return f"HTTP {self.status}: {said[:400]}" if said else f"HTTP {self.status}"


def post(
    server: Server,
    parameters: Mapping[str, str],
    body: bytes,
    *,
    timeout_s: float,
    max_bytes: int,
    is_gzip: bool = False,
) -> Reply:
    """Sends one request.

    Args:
        server: To whom.
        parameters: Of the URL: settings, and those of a query.
        body: What is sent.
        timeout_s: For being connected, and then for all else together.
        max_bytes: A longer answer is an error.
        is_gzip: The body is compressed.

    Raises:
        Unreachable: There was no answer, or too long a one.
        UsageError: The password cannot be read, or not be sent.
    """
    headers: dict[str, str | bytes] = {
        "Content-Type": "application/octet-stream",
        "User-Agent": "aiflame",
    }
    # A server takes what comes for UTF-8; as text it would go as latin-1. What the environment has
    # of other bytes goes as it is.
    if server.user:
        headers["X-ClickHouse-User"] = server.user.encode(errors="surrogateescape")
    if password := server.password():
        headers["X-ClickHouse-Key"] = password.encode(errors="surrogateescape")
    elif server.user and server.cert_file:
        # The certificate stands for the password (ClickHouse's guide to certificates of users).
        headers["X-ClickHouse-SSL-Certificate-Auth"] = "on"
    if is_gzip:
        headers["Content-Encoding"] = "gzip"
    try:
        tls = server.tls()
    except UsageError as error:  # of files that are being replaced
        raise Unreachable(f"certificates cannot be read: {error}") from error
    try:
        found = exchange(
            (server.host, server.port),
            tls,
            f"{server.path}/?{urlencode(parameters)}",
            headers,
            body,
            timeout_s=timeout_s,
            max_bytes=max_bytes,
        )
    except (OSError, http.client.HTTPException) as error:
        raise Unreachable(
            f"{server.host}:{server.port}: {error or type(error).__name__}"
        ) from error
    if found.is_cut and found.status == http.HTTPStatus.OK:
        raise Unreachable(
            f"{server.host}:{server.port}: the answer is longer than {max_bytes:,} bytes"
        )
    code = found.headers.get("X-ClickHouse-Exception-Code", "")
    return Reply(
        found.status,
        int(code) if code.isascii() and code.isdigit() and len(code) < 8 else int(bool(code)),
        found.body,
        found.headers.get("Retry-After", ""),
    )
