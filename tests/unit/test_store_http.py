# SPDX-License-Identifier: Apache-2.0
"""A store's server that asks for a certificate."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from aiflame.agent.errors import UsageError
from aiflame.agent.store.address import Server, address_of
from aiflame.agent.store.http import Unreachable, post
from certificates import certificate


class _Handler(BaseHTTPRequestHandler):
    """Says by what the user is known: by a password, by the certificate, or not at all."""

    def log_message(self, *_: object) -> None:
        pass

    def do_POST(self) -> None:
        by_certificate = self.headers.get("X-ClickHouse-SSL-Certificate-Auth") == "on"
        by_password = "X-ClickHouse-Key" in self.headers
        # A server takes one of both.
        status = 400 if by_certificate and by_password else 200
        text = f"{self.headers.get('X-ClickHouse-User')} {by_certificate} {by_password}".encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


@pytest.fixture
def own(tmp_path: Path) -> tuple[Path, Path]:
    """The certificate that the server knows, and its key."""
    return certificate(tmp_path / "own")


@pytest.fixture
def url(tmp_path: Path, own: tuple[Path, Path]) -> Iterator[str]:
    """A server that lets nobody in without that certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate(tmp_path / "server"))
    context.load_verify_locations(own[0])
    context.verify_mode = ssl.CERT_REQUIRED
    with ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as server:
        server.socket = context.wrap_socket(
            server.socket, server_side=True, do_handshake_on_connect=False
        )
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        ca_file = tmp_path / "server/cert.pem"
        yield f"clickhouses://me@127.0.0.1:{server.server_address[1]}/db?ca_file={ca_file}"
        server.shutdown()
        thread.join()


def _asked(url: str) -> bytes:
    server = address_of(url, {})
    assert isinstance(server, Server)
    reply = post(server, {}, b"SELECT 1", timeout_s=5, max_bytes=100)
    assert not reply.is_error
    return reply.body


def test_a_certificate_tells_who_the_user_is(
    url: str, own: tuple[Path, Path], tmp_path: Path
) -> None:
    with pytest.raises(Unreachable):
        _asked(url)
    with_own = f"{url}&cert_file={own[0]}&key_file={own[1]}"
    assert _asked(with_own) == b"me True False"
    # WHEN there is a password, too THEN the certificate is for the connection alone
    password = tmp_path / "password"
    password.write_text("hunter2")
    assert _asked(f"{with_own}&password_file={password}") == b"me False True"
    # AND files that are just being replaced may be there the next time
    own[1].write_text("")
    with pytest.raises(Unreachable, match="no certificate and key"):
        _asked(with_own)


def test_users_and_passwords_go_as_utf_8(tmp_path: Path) -> None:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_POST(self) -> None:
            # The library reads headers as latin-1, which is each byte as it came.
            told = f"{self.headers['X-ClickHouse-User']}:{self.headers['X-ClickHouse-Key']}"
            self.send_response(200)
            self.end_headers()
            self.wfile.write(told.encode("latin-1"))

    password = tmp_path / "password"
    password.write_text("pa\u00df\u26a1")
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            place = f"127.0.0.1:{server.server_address[1]}/db?password_file={password}"
            assert _asked(f"clickhouse://%C3%BCser@{place}") == "\xfcser:pa\xdf\u26a1".encode()
        finally:
            server.shutdown()
            thread.join()


def test_a_certificate_is_shown_to_nobody_without_tls(own: tuple[Path, Path]) -> None:
    server = address_of(f"clickhouse://127.0.0.1/db?cert_file={own[0]}&key_file={own[1]}", {})
    assert isinstance(server, Server)
    with pytest.raises(UsageError, match="without TLS"):
        server.tls()
