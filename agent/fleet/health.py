# SPDX-License-Identifier: Apache-2.0
"""Whether an agent works, told over HTTP: /healthz, /readyz, and /metrics for Prometheus.

The server listens on this host, unless it has TLS and a token. Whoever asks has two seconds for the
whole of it, and connections are bounded: where there are too many, the oldest ends. So nobody who
is slow, or many, keeps the kubelet from its answer, which would end the agent.
"""

from __future__ import annotations

import contextlib
import hmac
import http
import selectors
import socket
import ssl
import threading
import time
from collections.abc import Callable, Generator
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple, ParamSpec, TypeVar

from aiflame.agent.errors import AiflameError, UsageError
from aiflame.agent.fleet.config import AgentSettings
from aiflame.agent.fleet.log import Log
from aiflame.agent.fleet.vitals import Vitals
from aiflame.agent.settings import Secret

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

P = ParamSpec("P")
T = TypeVar("T")

# From being connected to the last byte of the answer. Probes of the kubelet wait for one second,
# scrapes of Prometheus for ten; on one host, an answer takes milliseconds.
_EXCHANGE_S = 2.0
# A kubelet and some scrapers have one each. An agent has 65,536 descriptors, most for files.
_MOST_CONNECTIONS = 64
# A request of Prometheus has some 300 bytes, with a token of a service account 1.5 KB.
_MOST_REQUEST_BYTES = 8192
_READ_BYTES = 4096
# What is read and not looked at after an answer, or who is still sending would get a reset instead.
_MOST_UNREAD_BYTES = 1 << 18

# Until the next try where the process has no descriptor left.
_NO_DESCRIPTOR_S = 0.1

# What an exchange waits for: selectors.EVENT_READ or EVENT_WRITE.
_Exchange = Generator[int, None, None]


class _Answer(NamedTuple):
    status: http.HTTPStatus
    body: bytes
    content_type: str = "text/plain; charset=utf-8"

    def encode(self, *, with_body: bool) -> bytes:
        """Returns it as HTTP has it."""
        head = (
            f"HTTP/1.1 {self.status.value} {self.status.phrase}\r\n"
            f"Content-Type: {self.content_type}\r\n"
            f"Content-Length: {len(self.body)}\r\n"
            "Connection: close\r\n\r\n"
        )
        return head.encode() + (self.body if with_body else b"")


class HealthServer:
    """Answers until it is closed.

    Args:
        settings: Of the agent; `health` is not "".
        vitals: What it tells.
        unready: Returns why /readyz alone answers with an error, "" for no reason.

    Attributes:
        url: Of the server.

    Raises:
        AiflameError: The address is taken, or a file of TLS cannot be read.
    """

    def __init__(
        self, settings: AgentSettings, vitals: Vitals, unready: Callable[[], str] = str
    ) -> None:
        from prometheus_client import CollectorRegistry

        registry = CollectorRegistry(auto_describe=False)
        registry.register(vitals)
        host, port = settings.health_address
        certificate = None if settings.health_cert_file is None else _Certificate(settings)
        answers = _Answers(vitals, registry, settings.health_token, unready)
        with contextlib.ExitStack() as parts:
            try:
                listening = parts.enter_context(_listening(host, port))
                ours, theirs = map(parts.enter_context, socket.socketpair())
                loop = _Loop(listening, theirs, certificate, answers)
                self._thread = threading.Thread(target=loop.run, name="health", daemon=True)
                self._thread.start()
            except (OSError, RuntimeError) as error:  # no descriptor, or no thread, is left
                raise AiflameError(
                    f"no health endpoint at {settings.health}: {getattr(error, 'strerror', error)}",
                    "set another address as `health`",
                ) from error
            self._end = ours
            shown = f"[{host}]" if ":" in host else host
            scheme = "http" if certificate is None else "https"
            self.url = f"{scheme}://{shown}:{listening.getsockname()[1]}"
            parts.pop_all()

    def close(self) -> None:
        """Ends it."""
        self._end.close()
        self._thread.join()


class HealthEndpoint:
    """A health server, or none until there can be one: its address may be another agent's so far.

    Args:
        settings: Of the agent; with `health` "" there is none.
        vitals: What it tells.
        log: Takes a line once it is there, and one for each reason why it is not.

    Attributes:
        unready: Why /readyz alone answers with an error, "" for no reason.
    """

    def __init__(self, settings: AgentSettings, vitals: Vitals, log: Log) -> None:
        self._settings = settings
        self._vitals = vitals
        self._log = log
        self.unready = ""
        self._server: HealthServer | None = None
        self._said = ""
        self.keep()

    def keep(self) -> None:
        """Begins it, if it is not there; to be called now and then."""
        if self._server is not None or not self._settings.health:
            return
        try:
            self._server = HealthServer(self._settings, self._vitals, lambda: self.unready)
        except AiflameError as error:  # the agent records without it
            if str(error) != self._said:
                self._said = str(error)
                self._log.say(f"{error}; it is tried again each minute")
        else:
            self._log.say(f"health and metrics: {self._server.url}")

    def close(self) -> None:
        """Ends it."""
        if self._server is not None:
            self._server.close()


def _listening(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    found = socket.create_server((host, port), family=family, backlog=_MOST_CONNECTIONS)
    found.setblocking(False)
    return found


class _Certificate:
    """What the server shows who it is by, read again where it was replaced: it expires.

    Args:
        settings: Of the agent, with the file of one.

    Raises:
        UsageError: It cannot be read.
    """

    def __init__(self, settings: AgentSettings) -> None:
        assert settings.health_cert_file is not None  # noqa: S101 - asked before
        self._cert_file, self._key_file = settings.health_cert_file, settings.health_key_file
        try:
            self._load()
        except OSError as error:  # ssl.SSLError is one
            raise UsageError(f"health_cert_file: {error}") from error

    def _load(self) -> None:
        facts = self._facts()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        # A key and a certificate that do not belong together spoil what they are loaded into.
        context.load_cert_chain(self._cert_file, self._key_file)
        self._context, self._loaded = context, facts

    def _facts(self) -> list[tuple[int, int, int]]:
        """Returns what differs once a file was replaced, or written anew."""
        found = [path.stat() for path in (self._cert_file, self._key_file) if path is not None]
        return [(one.st_ino, one.st_mtime_ns, one.st_size) for one in found]

    def wrapped(self, peer: socket.socket) -> ssl.SSLSocket:
        """Returns a connection of which the handshake is still to come."""
        with suppress(OSError):  # it is just being replaced: that before goes on
            if self._facts() != self._loaded:
                self._load()
        return self._context.wrap_socket(peer, server_side=True, do_handshake_on_connect=False)


def check(settings: AgentSettings) -> None:
    """Refuses a certificate with which there would be no endpoint.

    Raises:
        UsageError: It, or its key, cannot be read.
    """
    if settings.health and settings.health_cert_file is not None:
        _Certificate(settings)


class _Answers:
    """What is said to a request."""

    def __init__(
        self,
        vitals: Vitals,
        registry: CollectorRegistry,
        token: Secret | None,
        unready: Callable[[], str],
    ) -> None:
        self._vitals = vitals
        self._unready = unready
        self._registry = registry
        self._secret = token
        self._token = "" if token is None else token.read()

    def to(self, request: bytes) -> bytes:
        """Returns the answer to a request's head."""
        line, *headers = request.split(b"\r\n")
        method, _, rest = line.partition(b" ")
        target, _, version = rest.partition(b" ")
        if not version.startswith(b"HTTP/1."):
            answer = _Answer(http.HTTPStatus.BAD_REQUEST, b"not HTTP\n")
        elif method not in (b"GET", b"HEAD"):
            answer = _Answer(http.HTTPStatus.METHOD_NOT_ALLOWED, b"GET or HEAD\n")
        elif self._secret is not None and not self._is_let_in(self._secret, headers):
            answer = _Answer(http.HTTPStatus.UNAUTHORIZED, b"a token is needed\n")
        else:
            answer = self._of(target.partition(b"?")[0])
        return answer.encode(with_body=method != b"HEAD")

    def _of(self, path: bytes) -> _Answer:
        if path in (b"/healthz", b"/readyz"):
            trouble = self._vitals.trouble
            if path == b"/readyz":  # a probe of /healthz would end what records all else
                trouble = trouble or self._vitals.unready or self._unready()
            status = http.HTTPStatus.SERVICE_UNAVAILABLE if trouble else http.HTTPStatus.OK
            return _Answer(status, f"{trouble or 'ok'}\n".encode())
        if path == b"/metrics":
            from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

            return _Answer(http.HTTPStatus.OK, generate_latest(self._registry), CONTENT_TYPE_LATEST)
        return _Answer(http.HTTPStatus.NOT_FOUND, b"/healthz, /readyz, /metrics\n")

    def _is_let_in(self, secret: Secret, headers: list[bytes]) -> bool:
        with suppress(UsageError):  # it is just being replaced: that before goes on
            self._token = secret.read()
        fields = (header.partition(b":") for header in headers)
        given = [value.strip() for name, _, value in fields if name.lower() == b"authorization"]
        return len(given) == 1 and hmac.compare_digest(given[0], f"Bearer {self._token}".encode())


class _Connection(NamedTuple):
    exchange: _Exchange
    until_s: float


class _Loop:
    """All connections, in one thread: none waits for another.

    Args:
        listening: Where they come from.
        end: Can be read once this is to end.
        certificate: For TLS, None for none.
        answers: To what they ask.
    """

    def __init__(
        self,
        listening: socket.socket,
        end: socket.socket,
        certificate: _Certificate | None,
        answers: _Answers,
    ) -> None:
        self._listening = listening
        self._end = end
        self._certificate = certificate
        self._answers = answers
        self._selector = selectors.DefaultSelector()
        # The oldest first.
        self._connections: dict[socket.socket, _Connection] = {}

    def run(self) -> None:
        """Serves until it is to end."""
        with self._selector, self._end, self._listening:
            self._selector.register(self._end, selectors.EVENT_READ)
            self._selector.register(self._listening, selectors.EVENT_READ)
            while self._serve_ready():
                self._end_late()
            for peer in [*self._connections]:
                self._close(peer)

    def _serve_ready(self) -> bool:
        """Waits for what can go on, and lets it; returns whether there is more to come."""
        first = next(iter(self._connections.values()), None)
        wait_s = None if first is None else max(first.until_s - time.monotonic(), 0)
        for key, _ in self._selector.select(wait_s):
            if key.fileobj is self._end:
                return False
            if key.fileobj is self._listening:
                self._accept()
            elif key.fileobj in self._connections:  # or it had to end for one that came just now
                assert isinstance(key.fileobj, socket.socket)  # noqa: S101 - for mypy
                self._go_on(key.fileobj)
        return True

    def _accept(self) -> None:
        if len(self._connections) >= _MOST_CONNECTIONS:
            self._close(next(iter(self._connections)))
        try:
            peer, _ = self._listening.accept()
        except (BlockingIOError, ConnectionAbortedError):  # it went away
            return
        except OSError:  # no descriptor, and it would be told of the connection without a pause
            time.sleep(_NO_DESCRIPTOR_S)
            return
        try:
            peer.setblocking(False)
            if self._certificate is not None:
                peer = self._certificate.wrapped(peer)
        except OSError:
            peer.close()
            return
        until_s = time.monotonic() + _EXCHANGE_S
        self._connections[peer] = _Connection(self._exchange(peer), until_s)
        self._selector.register(peer, selectors.EVENT_READ)
        self._go_on(peer)

    def _go_on(self, peer: socket.socket) -> None:
        """Lets an exchange go on until it has to wait again, or ends."""
        try:
            event = next(self._connections[peer].exchange)
        except Exception:  # the end of this one, whatever it is: others have their answers
            self._close(peer)
        else:
            self._selector.modify(peer, event)

    def _end_late(self) -> None:
        now_s = time.monotonic()
        for peer in [p for p, one in self._connections.items() if one.until_s <= now_s]:
            self._close(peer)

    def _close(self, peer: socket.socket) -> None:
        del self._connections[peer]
        self._selector.unregister(peer)
        peer.close()

    def _exchange(self, peer: socket.socket) -> _Exchange:
        """Takes a request and answers it; yields what it waits for."""
        if isinstance(peer, ssl.SSLSocket):
            yield from _once_ready(selectors.EVENT_READ, peer.do_handshake)
        request = b""
        while b"\r\n\r\n" not in request:
            if len(request) > _MOST_REQUEST_BYTES:
                too_large = http.HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
                answer = _Answer(too_large, b"a header is too large\n").encode(with_body=True)
                break
            more = yield from _once_ready(selectors.EVENT_READ, peer.recv, _READ_BYTES)
            if not more:
                return
            request += more
        else:
            answer = self._answers.to(request.partition(b"\r\n\r\n")[0])
        while answer:
            sent = yield from _once_ready(selectors.EVENT_WRITE, peer.send, answer)
            answer = answer[sent:]
        with suppress(OSError):
            peer.shutdown(socket.SHUT_WR)
        for _ in range(_MOST_UNREAD_BYTES // _READ_BYTES):
            if not (yield from _once_ready(selectors.EVENT_READ, peer.recv, _READ_BYTES)):
                return


def _once_ready(
    event: int, operation: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> Generator[int, None, T]:
    """Does something that does not wait, once it can be done; yields what it waits for.

    Args:
        event: What it needs; by TLS it may need the other.
        operation: Of a socket.
        args: Of that.
        kwargs: The same.
    """
    while True:
        try:
            return operation(*args, **kwargs)
        except ssl.SSLWantReadError:  # noqa: PERF203 - it is tried until it can be done
            yield selectors.EVENT_READ
        except ssl.SSLWantWriteError:
            yield selectors.EVENT_WRITE
        except BlockingIOError:
            yield event
