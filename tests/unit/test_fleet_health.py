# SPDX-License-Identifier: Apache-2.0
"""What an agent says of its health."""

from __future__ import annotations

import socket
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiflame.agent.errors import AiflameError, UsageError
from aiflame.agent.fleet import health
from aiflame.agent.fleet.config import AgentSettings, load
from aiflame.agent.fleet.health import HealthServer, Vitals
from prometheus_client.parser import text_string_to_metric_families
from windows import RandomRecording

_ANYWHERE = "0.0.0.0"  # noqa: S104 - it is refused
_SINKS = {
    "otlp": {
        **{"sent_requests": 3, "sent_samples": 90, "sent_bytes": 700, "retries": 2},
        **{"waiting_requests": 1, "waiting_bytes": 50, "last_sent_unix_s": 1.5e9},
        **{"dropped_samples": {"too old": 7}, "why_away": ""},
    }
}


def _settings(**given: object) -> AgentSettings:
    return load(None, {"health": "127.0.0.1:0", **given}, {}).agent


@pytest.fixture
def vitals() -> Vitals:
    return Vitals()


@pytest.fixture
def server(vitals: Vitals) -> Iterator[HealthServer]:
    found = HealthServer(_settings(), vitals)
    yield found
    found.close()


def _get(url: str, token: str = "", context: ssl.SSLContext | None = None) -> tuple[int, str]:
    request = urllib.request.Request(  # noqa: S310 - http or https
        url, headers={"Authorization": f"Bearer {token}"}
    )
    try:
        with urllib.request.urlopen(  # noqa: S310 - its own
            request, timeout=10, context=context
        ) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_an_agent_is_healthy_while_windows_come(
    server: HealthServer, vitals: Vitals, monkeypatch: pytest.MonkeyPatch
) -> None:
    # GIVEN an agent that has recorded nothing yet THEN it is not ready
    for path in ("/healthz", "/readyz"):
        assert _get(server.url + path) == (503, "no window was recorded yet\n")
    # WHEN a window has come THEN it is
    vitals.note_window(RandomRecording(1).windows(1)[0], is_kept=True)
    for path in ("/healthz", "/readyz"):
        assert _get(server.url + path) == (200, "ok\n")
    # AND WHEN none comes for long THEN it is not
    later_s = time.monotonic() + 31
    monkeypatch.setattr(health.time, "monotonic", lambda: later_s)
    code, words = _get(server.url + "/healthz")
    assert code == 503 and words.startswith("no window for 3")


def test_metrics_are_what_prometheus_reads(server: HealthServer, vitals: Vitals) -> None:
    # GIVEN three windows, of which one found no room, two stretches of them, and a sink
    windows = RandomRecording(3).windows(3)
    for number, window in enumerate(windows):
        vitals.note_window(window, is_kept=number > 0)
    vitals.note_report({"done": "x", "sinks": _SINKS, "losses": {"stack_lost": 2}})
    vitals.note_report({"done": "y", "losses": {"stack_lost": 1, "naming_behind": 40}})
    vitals.note_report({"lost": "z"})
    # WHEN they are asked for
    code, text = _get(server.url + "/metrics")
    found = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    # THEN they are what there was
    assert code == 200
    assert found["aiflame_windows_total",] == 3
    assert found["aiflame_windows_lost_total",] == found["aiflame_stretches_lost_total",] == 1
    assert found["aiflame_stretches_total",] == 2
    on_cpu = sum(int(w.samples["count"][w.samples["kind"] == 0].sum()) for w in windows)
    assert found["aiflame_samples_total", "on_cpu"] == on_cpu
    # AND losses are those of stretches: what a window misses may come with a later one
    assert found["aiflame_lost_total", "stack_lost"] == 3
    assert found["aiflame_lost_total", "naming_behind"] == 40
    assert sum(metric == "aiflame_lost_total" for metric, *_ in found) == 2
    assert found["aiflame_export_sent_samples_total", "otlp"] == 90
    assert found["aiflame_export_dropped_samples_total", "too old", "otlp"] == 7
    assert found["aiflame_export_last_sent_timestamp_seconds", "otlp"] == 1.5e9


def test_who_says_nothing_keeps_nobody_waiting(server: HealthServer) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))):
        begun_s = time.monotonic()
        assert _get(server.url + "/nothing")[0] == 404
        assert time.monotonic() - begun_s < 8


def test_a_taken_address_is_said(server: HealthServer, vitals: Vitals) -> None:
    address = server.url.removeprefix("http://")
    with pytest.raises(AiflameError, match=f"no health endpoint at {address}: Address already"):
        HealthServer(_settings(health=address), vitals)


@pytest.mark.parametrize("address", ["7575", "localhost:7575", "127.0.0.1:70000", "127.0.0.1:x"])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(UsageError, match="health: not an address"):
        _settings(health=address)


def test_it_is_open_to_others_with_tls_and_a_token_only(tmp_path: Path, vitals: Vitals) -> None:
    with pytest.raises(UsageError, match="open to others"):
        _settings(health=f"{_ANYWHERE}:0")
    # GIVEN a certificate and a token
    key, certificate, token = (tmp_path / name for name in ("key", "cert", "token"))
    made = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2"
    words = ("-subj", "/CN=test", "-addext", "subjectAltName=IP:127.0.0.1")
    subprocess.run(
        [*made.split(), "-keyout", key, "-out", certificate, *words],
        check=True,
        capture_output=True,
    )
    token.write_text("secret\n")
    settings = _settings(
        health=f"{_ANYWHERE}:0",
        health_token_file=str(token),
        health_cert_file=str(certificate),
        health_key_file=str(key),
    )
    # WHEN it listens THEN who has the token is answered, by TLS, and nobody else
    server = HealthServer(settings, vitals)
    try:
        url = server.url.replace(_ANYWHERE, "127.0.0.1")
        context = ssl.create_default_context(cafile=str(certificate))
        assert _get(f"{url}/metrics", "secret", context)[0] == 200
        assert _get(f"{url}/metrics", "Secret", context)[0] == 401
    finally:
        server.close()
