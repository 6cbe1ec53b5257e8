# SPDX-License-Identifier: Apache-2.0
"""An HTTP server on this machine that hands each request to a receiver, or answers as told."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Protocol


@dataclass(frozen=True)
class Reply:
    """What a server answers."""

    status: int = 200
    body: bytes = b""
    headers: tuple[tuple[str, str], ...] = ()
    drips: bool = False  # sends its headers one byte after the other, without an end


class Receiver(Protocol):
    """What a back-end does with a request."""

    def take(self, path: str, headers: Message, body: bytes) -> Reply:
        """Returns the answer."""
        ...


@dataclass
class Server:
    """A running one. `answers` come first, each once; then the receiver's."""

    url: str
    answers: list[Reply] = field(default_factory=list)
    requests: list[Message] = field(default_factory=list)
    stop: threading.Event = field(default_factory=threading.Event)


@contextmanager
def serving(
    receiver: Receiver, tls: ssl.SSLContext | None = None, port: int = 0
) -> Iterator[Server]:
    """Runs a receiver; at a port that is free where none is said."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            server.requests.append(self.headers)
            if server.answers:
                reply = server.answers.pop(0)
            else:
                reply = receiver.take(self.path, self.headers, body)
            if reply.drips:
                self._drip()
                return
            self.send_response(reply.status)
            for name, value in reply.headers:
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(reply.body)))
            self.end_headers()
            self.wfile.write(reply.body)

        def _drip(self) -> None:
            self.wfile.write(b"HTTP/1.1 200 OK\r\nX: ")
            try:
                while not server.stop.wait(0.02):
                    self.wfile.write(b"x")
                    self.wfile.flush()
            except OSError:
                pass

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", port), Handler) as httpd:
        httpd.daemon_threads = True
        if tls is not None:
            httpd.socket = tls.wrap_socket(httpd.socket, server_side=True)
        scheme = "http" if tls is None else "https"
        server = Server(f"{scheme}://127.0.0.1:{httpd.server_address[1]}")
        thread = threading.Thread(target=httpd.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.stop.set()
            httpd.shutdown()
            thread.join()
