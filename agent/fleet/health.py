# SPDX-License-Identifier: Apache-2.0
"""Whether an agent works, told over HTTP: /healthz, /readyz, and /metrics for Prometheus.

None of them depends on a back-end: an agent whose back-end is away is healthy. They name losses and
sinks, and nothing of what is recorded. The server listens on this host, unless it has TLS and a
token. It serves one request after the other, each for two seconds at most.
"""

from __future__ import annotations

import hmac
import http
import http.server
import platform
import socket
import socketserver
import ssl
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from aiflame.agent import __version__
from aiflame.agent.errors import AiflameError, UsageError
from aiflame.agent.fleet.config import AgentSettings
from aiflame.agent.fleet.memory import MemoryUse
from aiflame.agent.model.profile import SampleClass
from aiflame.agent.model.window import Window

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric

# Windows come each second. A host at a load of 20 keeps the collector waiting for some.
_ALIVE_S = 30.0
_REQUEST_S = 2.0
_NS_PER_S = 1e9


class Vitals:
    """What there is to be told: noted by the agent's thread, read by the server's."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._window_s: float | None = None
        self._windows = self._windows_lost = self._stretches = self._stretches_lost = 0
        self._samples: Counter[str] = Counter()
        self._lost: Counter[str] = Counter()
        self._cpu_ns = self._rss_bytes = 0
        self._sinks: Mapping[str, Mapping[str, Any]] = {}
        self._memory: MemoryUse | None = None
        self._memory_limit = 0

    def note_window(self, window: Window, *, is_kept: bool) -> None:
        """Counts a window."""
        kinds, counts = window.samples["kind"], window.samples["count"]
        with self._lock:
            self._window_s = time.monotonic()
            self._windows += 1
            self._windows_lost += not is_kept
            self._cpu_ns += window.cost.cpu_ns
            self._rss_bytes = window.cost.rss_bytes
            for kind in SampleClass:
                self._samples[kind.name.lower()] += int(counts[kinds == kind].sum())

    def note_memory(self, use: MemoryUse, limit_bytes: int) -> None:
        """Takes what processes and maps have, and what processes may."""
        with self._lock:
            self._memory, self._memory_limit = use, limit_bytes

    def note_report(self, report: Mapping[str, Any]) -> None:
        """Takes what the process that names and sends says of itself.

        Losses are those of whole stretches, as sinks are told: a window counts each stack that has
        not come yet, and the next one counts it again, and what names lose is in no window.
        """
        with self._lock:
            self._stretches += "done" in report
            self._stretches_lost += "lost" in report
            self._lost.update(report.get("losses", {}))
            self._sinks = report.get("sinks", self._sinks)

    @property
    def trouble(self) -> str:
        """Why the agent is not healthy, "" if it is."""
        with self._lock:
            if self._window_s is None:
                return "no window was recorded yet"
            silent_s = time.monotonic() - self._window_s
        return f"no window for {silent_s:.0f} s" if silent_s > _ALIVE_S else ""

    def collect(self) -> Iterator[Metric]:
        """Yields all metrics: a collector of prometheus_client."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        with self._lock:
            build = GaugeMetricFamily(
                "aiflame_build_info", "What runs.", labels=["version", "kernel"]
            )
            build.add_metric([__version__, platform.release()], 1)
            yield build
            for name, words, value in (
                ("windows", "Windows that were recorded, of five seconds or less.", self._windows),
                ("windows_lost", "Those for which there was no room on disk.", self._windows_lost),
                ("stretches", "Stretches that were named and queued.", self._stretches),
                ("stretches_lost", "Those that could not be.", self._stretches_lost),
                ("collector_cpu_seconds", "CPU time of the collector.", self._cpu_ns / _NS_PER_S),
            ):
                yield CounterMetricFamily(f"aiflame_{name}", words, value)
            yield GaugeMetricFamily(
                "aiflame_collector_resident_bytes", "The most that it had.", self._rss_bytes
            )
            yield from self._of_memory()
            samples = CounterMetricFamily(
                "aiflame_samples", "On CPU samples, off CPU intervals.", labels=["class"]
            )
            for kind, count in self._samples.items():
                samples.add_metric([kind], count)
            yield samples
            lost = CounterMetricFamily(
                "aiflame_lost",
                "What was seen and not kept in stretches that were named, by its name.",
                labels=["name"],
            )
            for name, count in self._lost.items():
                lost.add_metric([name], count)
            yield lost
            yield from self._of_sinks()

    def _of_memory(self) -> Iterator[Metric]:
        from prometheus_client.core import GaugeMetricFamily

        if self._memory is None:
            return
        memory = GaugeMetricFamily(
            "aiflame_memory_bytes", "What the agent has, looked at once a minute.", labels=["part"]
        )
        for part, size in self._memory.parts().items():
            memory.add_metric([part], size)
        yield memory
        yield GaugeMetricFamily(
            "aiflame_memory_limit_bytes",
            "The budget of all but the kernel's part: with more for long, less is kept.",
            self._memory_limit,
        )

    def _of_sinks(self) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        counters = {
            "sent_requests": "Requests that a back-end took.",
            "sent_samples": "Samples in them.",
            "sent_bytes": "Bytes of them.",
            "retries": "How often one was sent again.",
        }
        gauges = {
            "waiting_requests": "Requests that wait on disk.",
            "waiting_bytes": "Bytes of them.",
            "last_sent_unix_s": "When the last one was taken, 0 for never.",
        }
        for names, family in ((counters, CounterMetricFamily), (gauges, GaugeMetricFamily)):
            for key, words in names.items():
                name = key.replace("last_sent_unix_s", "last_sent_timestamp_seconds")
                metric = family(f"aiflame_export_{name}", words, labels=["sink"])
                for sink, state in self._sinks.items():
                    metric.add_metric([sink], state[key])
                yield metric
        dropped = CounterMetricFamily(
            "aiflame_export_dropped_samples", "Never sent, or refused.", labels=["sink", "reason"]
        )
        for sink, state in self._sinks.items():
            for reason, count in state["dropped_samples"].items():
                dropped.add_metric([sink, reason], count)
        yield dropped


class HealthServer:
    """Answers until it is closed.

    Args:
        settings: Of the agent; `health` is not "".
        vitals: What it tells.

    Attributes:
        url: Of the server.

    Raises:
        AiflameError: The address is taken, or a file of TLS cannot be read.
    """

    def __init__(self, settings: AgentSettings, vitals: Vitals) -> None:
        from prometheus_client import CollectorRegistry

        registry = CollectorRegistry(auto_describe=False)
        registry.register(vitals)
        host, port = settings.health_address
        token = "" if settings.health_token is None else settings.health_token.read()

        class Handler(_Handler):
            """A request to this agent."""

        Handler.vitals, Handler.registry, Handler.token = vitals, registry, token
        try:
            self._server = _Server((host, port), Handler)
        except OSError as error:
            raise AiflameError(
                f"no health endpoint at {settings.health}: {error.strerror}",
                "set another address as `health`",
            ) from error
        scheme = "http"
        if settings.health_cert_file is not None:
            scheme = "https"
            try:
                self._server.use(_tls(settings))
            except (OSError, ssl.SSLError) as error:
                self._server.server_close()
                raise UsageError(f"health_cert_file: {error}") from error
        shown = f"[{host}]" if ":" in host else host
        self.url = f"{scheme}://{shown}:{self._server.server_address[1]}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.5,), name="health", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Ends it."""
        self._server.shutdown()
        self._server.server_close()


def _tls(settings: AgentSettings) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    assert settings.health_cert_file is not None  # noqa: S101 - asked before
    context.load_cert_chain(settings.health_cert_file, settings.health_key_file)
    return context


class _Server(socketserver.TCPServer):
    """One request after the other: nobody who asks a lot takes more than a thread."""

    allow_reuse_address = True
    _context: ssl.SSLContext | None = None

    def __init__(
        self, address: tuple[str, int], handler: type[socketserver.BaseRequestHandler]
    ) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, handler)

    def use(self, context: ssl.SSLContext) -> None:
        self._context = context

    def get_request(self) -> tuple[socket.socket, Any]:
        connection, address = super().get_request()
        connection.settimeout(_REQUEST_S)
        if self._context is not None:
            try:
                connection = self._context.wrap_socket(connection, server_side=True)
            except OSError:
                connection.close()
                raise
        return connection, address

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Says nothing: whoever connects could fill the log."""


class _Handler(http.server.BaseHTTPRequestHandler):
    vitals: Vitals
    registry: CollectorRegistry
    token: str
    timeout = _REQUEST_S

    def do_GET(self) -> None:
        if self.token and not self._is_let_in():
            self._answer(http.HTTPStatus.UNAUTHORIZED, b"a token is needed\n")
            return
        path = self.path.partition("?")[0]
        if path in ("/healthz", "/readyz"):
            trouble = self.vitals.trouble
            status = http.HTTPStatus.SERVICE_UNAVAILABLE if trouble else http.HTTPStatus.OK
            self._answer(status, f"{trouble or 'ok'}\n".encode())
        elif path == "/metrics":
            from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

            self._answer(http.HTTPStatus.OK, generate_latest(self.registry), CONTENT_TYPE_LATEST)
        else:
            self._answer(http.HTTPStatus.NOT_FOUND, b"/healthz, /readyz, /metrics\n")

    def _is_let_in(self) -> bool:
        given = self.headers.get("Authorization", "")
        return hmac.compare_digest(given.encode(), f"Bearer {self.token}".encode())

    def _answer(
        self, status: http.HTTPStatus, body: bytes, content: str = "text/plain; charset=utf-8"
    ) -> None:
        self.close_connection = True
        with suppress(OSError):
            self.send_response(status)
            self.send_header("Content-Type", content)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Keeps requests out of the log."""
