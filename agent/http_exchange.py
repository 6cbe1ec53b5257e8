# SPDX-License-Identifier: Apache-2.0
"""One request over HTTP, one answer, and one time limit for both.

A time limit of a socket begins anew with each byte: a server could spend hours in bytes. No proxy
of the environment is used, and no redirect is followed.
"""

from __future__ import annotations

import http.client
import socket
import ssl
import threading
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from email.message import Message

# At a time, so that an answer that is too long ends early.
_PIECE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Response:
    """What a server said.

    Attributes:
        status: Of HTTP.
        headers: They.
        body: The beginning, as much of it as was asked for.
        is_cut: There is more of it.
    """

    status: int
    headers: Message
    body: bytes
    is_cut: bool


def exchange(
    address: tuple[str, int],
    tls: ssl.SSLContext | None,
    path: str,
    headers: Mapping[str, str | bytes],
    body: bytes,
    *,
    timeout_s: float,
    max_bytes: int,
) -> Response:
    """Posts to a server, and returns its answer.

    Args:
        address: Its host and port.
        tls: What the connection is made with, None for one without TLS.
        path: Of the URL, with what follows.
        headers: Of the request; text of latin-1 goes as that.
        body: What is sent.
        timeout_s: For being connected, and then for all else together.
        max_bytes: How much of an answer is read.

    Raises:
        OSError: There was no answer; TimeoutError where it was not there in time.
        http.client.HTTPException: What came is no answer.
    """
    host, port = address
    try:
        plain = socket.create_connection(address, timeout_s)
    except UnicodeError as error:  # a part between dots is empty or too long
        raise OSError(f"{host!r} cannot be the name of a host: {error}") from error
    with plain, _limited(plain, timeout_s):
        connection = http.client.HTTPConnection(host, port)
        connection.sock = plain
        if tls is not None:
            connection.default_port = http.client.HTTPS_PORT
            connection.sock = tls.wrap_socket(plain, server_hostname=host)
        with closing(connection):
            # Who finds a request too long may say so and close, while it is still being sent.
            with suppress(BrokenPipeError, ConnectionResetError):
                connection.request("POST", path, body, dict(headers))
            answer = connection.getresponse()
            pieces = []
            left = max_bytes + 1
            while left > 0 and (piece := answer.read(min(left, _PIECE_BYTES))):
                pieces.append(piece)
                left -= len(piece)
    text = b"".join(pieces)
    return Response(answer.status, answer.headers, text[:max_bytes], len(text) > max_bytes)


@contextmanager
def _limited(plain: socket.socket, timeout_s: float) -> Iterator[None]:
    """Shuts a connection that is in use for so long.

    Raises:
        TimeoutError: It was.
    """
    is_late = threading.Event()
    try:
        with plain.dup() as watched:  # TLS takes the descriptor of the other
            end = threading.Timer(timeout_s, _shut, (watched, is_late))
            end.daemon = True
            try:
                end.start()
            except RuntimeError as error:  # as many threads run as the system allows
                raise OSError(f"no thread to limit its time: {error}") from error
            try:
                yield
            finally:
                end.cancel()
    except (OSError, http.client.HTTPException) as error:
        if is_late.is_set():
            raise TimeoutError("no answer in time") from error
        raise
    if is_late.is_set():
        raise TimeoutError("no answer in time")


def _shut(watched: socket.socket, is_late: threading.Event) -> None:
    is_late.set()
    with suppress(OSError):
        watched.shutdown(socket.SHUT_RDWR)
