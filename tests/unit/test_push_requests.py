# SPDX-License-Identifier: Apache-2.0
"""How requests to back-ends go over HTTP: secrets, certificates, refusals, servers that hang."""

from __future__ import annotations

import json
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from email.utils import formatdate
from pathlib import Path

import pytest
from aiflame.agent.errors import UsageError
from aiflame.agent.model.batch import Batch, Labels
from aiflame.agent.sinks import otlp as otlp_sink
from aiflame.agent.sinks import pyroscope as pyroscope_sink
from aiflame.agent.sinks.otlp import OtlpSink
from aiflame.agent.sinks.otlp import Settings as OtlpSettings
from aiflame.agent.sinks.pyroscope import PyroscopeSink
from aiflame.agent.sinks.pyroscope import Settings as PyroscopeSettings
from aiflame.agent.sinks.requests import Request, RequestSink, SinkAway, SinkRefused
from certificates import certificate, certificate_of_authority
from profiles import MS, RECORDING, small_profile
from receivers import otlp, pyroscope
from receivers.server import Reply, Server, serving

BEGIN_NS = RECORDING.started_unix_ns
NOW_NS = BEGIN_NS + 60_000 * MS

Make = Callable[..., RequestSink]


def _pyroscope(url: str, **settings: object) -> RequestSink:
    return PyroscopeSink(PyroscopeSettings(url=url, **settings))  # type: ignore[arg-type]


def _otlp(url: str, **settings: object) -> RequestSink:
    return OtlpSink(OtlpSettings(url=url, **settings))  # type: ignore[arg-type]


def _otlp_of_pyroscope(url: str, **settings: object) -> RequestSink:
    return _otlp(url, flavour="pyroscope", **settings)


def _checked_pyroscope(url: str, **settings: object) -> None:
    pyroscope_sink.check(PyroscopeSettings(url=url, **settings))  # type: ignore[arg-type]


def _checked_otlp(url: str, **settings: object) -> None:
    otlp_sink.check(OtlpSettings(url=url, **settings))  # type: ignore[arg-type]


both = pytest.mark.parametrize("make", [_pyroscope, _otlp])


def _request(sink: RequestSink, begin_ns: int = BEGIN_NS) -> Request:
    batch = Batch(Labels("train"), small_profile(), begin_ns, 60_000 * MS)
    (request,) = sink.encode([batch])
    return request


# What answers mean.


@pytest.mark.parametrize(
    ("make", "statuses"),
    [
        # The last two are of tokens, which are replaced while they are in use.
        (_pyroscope, (408, 429, 500, 503, 504, 401, 403)),
        (_otlp, (429, 502, 503, 504, 401, 403)),
        (_otlp_of_pyroscope, (408, 429, 500, 502, 503, 504, 507, 401, 403)),
    ],
)
def test_what_is_overloaded_gets_it_again(make: Make, statuses: tuple[int, ...]) -> None:
    with serving(otlp.Collector()) as server:
        sink = make(server.url)
        for status in statuses:
            # GIVEN a back-end that takes nothing for now
            server.answers = [Reply(status, b"busy", (("Retry-After", "17"),))]
            # WHEN a request is sent THEN it is to be kept, and sent when the back-end says
            with pytest.raises(SinkAway, match=f"{status} .*busy") as away:
                sink.send(_request(sink))
            assert away.value.retry_after_s == 17


@pytest.mark.parametrize(
    ("make", "statuses"),
    [
        (_pyroscope, (301, 400, 404, 413, 415)),
        (_otlp, (302, 400, 404, 408, 413, 500)),
        (_otlp_of_pyroscope, (302, 400, 404, 413)),
    ],
)
def test_what_is_refused_is_not_sent_again(make: Make, statuses: tuple[int, ...]) -> None:
    with serving(otlp.Collector()) as server:
        sink = make(server.url)
        for status in statuses:
            server.answers = [Reply(status, b"never\n\x1b[31m", (("Location", "/elsewhere"),))]
            with pytest.raises(SinkRefused, match=f"{status} ") as refused:
                sink.send(_request(sink))
            assert str(refused.value).isprintable()
            assert refused.value.reason.startswith(f"{status} ")
            assert "never" not in refused.value.reason
        assert len(server.requests) == len(statuses), "a redirect was followed"


@pytest.mark.parametrize(
    ("text", "low", "high"),
    [
        ("0", 0, 0),
        ("2.5", 2.5, 2.5),
        ("-3", 0, 0),
        ("1e999", None, None),
        ("nan", None, None),
        ("99999999", 3_600, 3_600),
        ("soon", None, None),
        ("9" * 60_000, None, None),
        ("in 100 s", 80, 100),
        ("in -100 s", 0, 0),
        ("Mon, 99 Foo 99999999 99:99:99", None, None),
    ],
)
def test_when_to_try_again(text: str, low: float | None, high: float | None) -> None:
    if text.startswith("in "):
        text = formatdate(time.time() + float(text.split()[1]), usegmt=True)
    with serving(otlp.Collector()) as server:
        server.answers = [Reply(429, b"", (("Retry-After", text),))]
        sink = _pyroscope(server.url)
        with pytest.raises(SinkAway) as away:
            sink.send(_request(sink))
    if low is None or high is None:
        assert away.value.retry_after_s is None
    else:
        assert away.value.retry_after_s is not None
        assert low <= away.value.retry_after_s <= high


@both
@pytest.mark.parametrize("body", [b"<html>welcome</html>", b"\xff" * 200_000])
def test_a_page_of_something_else_is_no_success(make: Make, body: bytes) -> None:
    with serving(otlp.Collector()) as server:
        server.answers = [Reply(200, body)]
        sink = make(server.url)
        with pytest.raises(SinkRefused, match="at this URL"):
            sink.send(_request(sink))


@pytest.mark.parametrize("status", [400, 422])
def test_what_is_too_old_is_refused_by_pyroscope(status: int) -> None:
    receiver = pyroscope.Pyroscope(NOW_NS, old_status=status)
    with serving(receiver) as server:
        sink = PyroscopeSink(PyroscopeSettings(url=server.url))
        # GIVEN what began before the sink's limit of age, and after it
        assert sink.max_age_s is not None
        young = _request(sink, NOW_NS - int(sink.max_age_s * 10**9))
        old = _request(sink, NOW_NS - pyroscope.HOUR_NS - 1)
        # WHEN they are sent THEN what is younger is taken, and the other one never will be
        assert sink.send(young) == Counter()
        with pytest.raises(SinkRefused, match="not_in_ingestion_window"):
            sink.send(old)
    assert young.begin_unix_ns == NOW_NS - int(sink.max_age_s * 10**9)


def test_the_age_limit_is_that_of_the_back_end() -> None:
    url = "http://localhost:1"
    assert _otlp(url).max_age_s is None
    assert _otlp(url, flavour="parca").max_age_s is None
    assert _otlp(url, flavour="pyroscope").max_age_s == _pyroscope(url).max_age_s


def test_partial_success_is_counted_and_done_with() -> None:
    # GIVEN a Collector that refuses two profiles of a request
    receiver = otlp.Collector(rejects=(2, "quota 17\nexceeded"))
    with serving(receiver) as server:
        sink = _otlp(server.url)
        request = _request(sink)
        refused = sink.send(request)
        # THEN as much is counted as the largest have of its stacks, and nothing is sent again
        sizes = sorted(len(one.samples) for one in receiver.got)
        share = -(-request.samples * (sizes[-1] + sizes[-2]) // sum(sizes))
        assert refused == {"quota N\ufffdexceeded": share}
        assert len(server.requests) == 1


@pytest.mark.parametrize("words", [100_000, 2_000_000])
def test_a_long_partial_success_is_no_page_of_something_else(words: int) -> None:
    # GIVEN a Collector that says a sentence of each profile that it refuses
    receiver = otlp.Collector(rejects=(1, "x" * words))
    with serving(receiver) as server:
        sink = _otlp(server.url)
        request = _request(sink)
        # WHEN a request is sent THEN it is done with, and what was refused is counted: where the
        # answer is too long to be read, at most all of it
        (refused,) = sink.send(request).items()
    sizes = [len(one.samples) for one in receiver.got]
    share = -(-request.samples * max(sizes) // sum(sizes))
    assert refused[1] == (share if words == 100_000 else request.samples)
    assert len(refused[0]) <= 100


@pytest.mark.parametrize(
    "body", [b"<html>", b"\n<html>", b"\n", b"\n\xff\xff\xff\xff\xff\xff\xff", b"\n\x80\x01", b""]
)
def test_a_long_page_is_no_partial_success(body: bytes) -> None:
    with serving(otlp.Collector()) as server:
        server.answers = [Reply(200, body + b"x" * 2_000_000)]
        sink = _otlp(server.url)
        with pytest.raises(SinkRefused, match="no OTLP at this URL"):
            sink.send(_request(sink))


def test_partial_success_of_more_than_was_sent_is_all_of_it() -> None:
    with serving(otlp.Collector(rejects=(1 << 62, ""))) as server:
        sink = _otlp(server.url)
        request = _request(sink)
        assert sink.send(request) == {"partial success without a reason": request.samples}


# Series of one request, each of which a Pyroscope takes or refuses by itself.

_FINAL, _LATER = (400, "invalid_argument"), (429, "resource_exhausted")


def _request_of(sink: RequestSink, *services: str) -> Request:
    batches = [Batch(Labels(name), small_profile(), BEGIN_NS, 60_000 * MS) for name in services]
    (request,) = sink.encode(batches)
    return request


def _weights(receiver: pyroscope.Pyroscope) -> dict[str, int]:
    """Returns what is stored of each service."""
    found: Counter[str] = Counter()
    for (_, labels), stored in receiver.series.items():
        found[dict(labels)["service_name"]] += stored.stacks.total()
    return dict(found)


@pytest.mark.parametrize("is_unknown", [False, True])
def test_series_that_were_refused_are_counted_alone(is_unknown: bool) -> None:
    # GIVEN a Pyroscope that refuses one series of a request, whatever it calls that as a whole
    receiver = pyroscope.Pyroscope(NOW_NS, faults={"b": _FINAL}, is_unknown=is_unknown)
    with serving(receiver) as server:
        sink = _pyroscope(server.url)
        request = _request_of(sink, "a", "b", "c")
        # WHEN it is sent THEN what is stored is not counted as refused, and nothing is sent again
        ((words, samples),) = sink.send(request).items()
    kinds = len(receiver.series)
    assert "invalid_argument: a fault" in words
    assert 0 < samples < request.samples // 3
    stored = _weights(receiver)
    assert stored["a"] == stored["c"] > stored["b"] > 0
    assert kinds > 3


@pytest.mark.parametrize("is_unknown", [False, True])
def test_series_that_were_not_taken_are_sent_again_alone(is_unknown: bool) -> None:
    # GIVEN a Pyroscope that has no room for one series of a request just now, and refuses another
    faults = {"b": _LATER, "c": _FINAL}
    receiver = pyroscope.Pyroscope(NOW_NS, faults=faults, is_unknown=is_unknown)
    with serving(receiver) as server:
        sink = _pyroscope(server.url)
        request = _request_of(sink, "a", "b", "c")
        with pytest.raises(SinkAway) as away:
            sink.send(request)
        rest = away.value.rest
        assert rest is not None
        sent = receiver.ids.copy()
        # WHEN what is left is sent THEN it is that series, and all but the refused one is stored
        assert sink.send(rest.request) == Counter()
    (again,) = receiver.ids[len(sent) :]
    assert sent.count(again) == 1
    stored = _weights(receiver)
    assert stored["a"] == stored["b"] > stored["c"]
    assert rest.request.begin_unix_ns == request.begin_unix_ns
    assert 0 < rest.request.samples < request.samples // 3
    assert 0 < rest.refused.total() <= rest.request.samples + 1


@pytest.mark.parametrize("is_unknown", [False, True])
def test_all_series_that_fail_are_the_request(is_unknown: bool) -> None:
    receiver = pyroscope.Pyroscope(NOW_NS + 2 * pyroscope.HOUR_NS, is_unknown=is_unknown)
    with serving(receiver) as server:
        sink = _pyroscope(server.url)
        with pytest.raises(SinkRefused, match="not_in_ingestion_window"):
            sink.send(_request_of(sink, "a", "b"))
        receiver.now_ns, receiver.burst_bytes = NOW_NS, 1
        with pytest.raises(SinkAway, match="rate limit") as away:
            sink.send(_request_of(sink, "a", "b"))
        assert away.value.rest is None


_ID = "{id}"


@pytest.mark.parametrize(
    "message",
    [
        "push series with index 1 and id 00000000-0000-0000-0000-000000000000 failed: unknown: x",
        f"push series with index 0 and id {_ID} failed: unknown: x",
        f"push series with index 99 and id {_ID} failed: unknown: x",
        f"push series with index {'9' * 4_000} and id {_ID} failed: unknown: x",
        f"push series with index -1 and id {_ID} failed: unknown: x",
        f"push series with index 1 and id {_ID}",
        f"2 errors: push series with index 1 and id {_ID} failed: unknown: x",
        f"3 errors: {f'push series with index 1 and id {_ID} failed: unknown: x; ' * 3}",
        f"{'9' * 4_000} errors: push series with index 1 and id {_ID} failed: unknown: x",
        "push series with index 1 and id " * 20_000,
        17,
        None,
        [],
        {"message": "x"},
    ],
)
@pytest.mark.parametrize("status", [400, 503])
def test_what_does_not_tell_series_apart_is_of_the_request(message: object, status: int) -> None:
    receiver = pyroscope.Pyroscope(NOW_NS)
    with serving(receiver) as server:
        sink = _pyroscope(server.url)
        request = _request_of(sink, "a", "b")
        sink.send(request)
        if isinstance(message, str):
            message = message.replace(_ID, receiver.ids[1])
        answer = json.dumps({"code": "unknown", "message": message}).encode()
        _is_of_the_whole(sink, request, server, Reply(status, answer))


@pytest.mark.parametrize("body", [b"", b"{", b"[" * 900_000, b"\xff" * 9, b"{}", b"7", b"null"])
@pytest.mark.parametrize("status", [400, 503])
def test_an_error_that_is_no_connect_is_of_the_request(body: bytes, status: int) -> None:
    with serving(pyroscope.Pyroscope(NOW_NS)) as server:
        sink = _pyroscope(server.url)
        _is_of_the_whole(sink, _request_of(sink, "a", "b"), server, Reply(status, body))


def test_an_error_that_is_cut_is_of_the_request() -> None:
    receiver = pyroscope.Pyroscope(NOW_NS)
    with serving(receiver) as server:
        sink = _pyroscope(server.url)
        request = _request_of(sink, "a", "b")
        sink.send(request)
        text = (
            f"push series with index 1 and id {receiver.ids[1]} failed: unknown: {'x' * (2 << 20)}"
        )
        answer = json.dumps({"code": "unknown", "message": text}).encode()
        _is_of_the_whole(sink, request, server, Reply(503, answer))


def _is_of_the_whole(sink: RequestSink, request: Request, server: Server, reply: Reply) -> None:
    server.answers = [reply]
    with pytest.raises((SinkRefused, SinkAway)) as failed:
        sink.send(request)
    if reply.status == 503:
        assert isinstance(failed.value, SinkAway)
        assert failed.value.rest is None
    else:
        assert isinstance(failed.value, SinkRefused)


def test_labels_forge_no_failure_of_another_series() -> None:
    # GIVEN an error that quotes what a target calls itself
    receiver = pyroscope.Pyroscope(NOW_NS)
    with serving(receiver) as server:
        sink = _pyroscope(server.url)
        request = _request_of(sink, "a", "b", "c")
        sink.send(request)
        forged = f"push series with index 0 and id {'0' * 36} failed: unknown: x; "
        text = f"push series with index 1 and id {receiver.ids[1]} failed: invalid_argument: "
        answer = json.dumps({"code": "unknown", "message": text + forged}).encode()
        server.answers = [Reply(400, answer)]
        # WHEN it is read THEN what has no id of the request's counts for nothing
        refused = sink.send(request)
    assert 0 < refused.total() < request.samples


@pytest.mark.parametrize("cut", [0, 1, 7, 100, -1])
def test_a_request_that_is_damaged_fails_as_a_whole(cut: int) -> None:
    receiver = pyroscope.Pyroscope(NOW_NS)
    with serving(receiver) as server:
        sink = _pyroscope(server.url)
        request = _request_of(sink, "a", "b")
        sink.send(request)
        text = f"push series with index 1 and id {receiver.ids[1]} failed: invalid_argument: x"
        answer = json.dumps({"code": "unknown", "message": text}).encode()
        _is_of_the_whole(
            sink, replace(request, body=request.body[:cut]), server, Reply(400, answer)
        )


# Servers that are not there, or hang.


@both
def test_nobody_at_the_address_is_away(make: Make) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    sink = make(f"http://127.0.0.1:{port}")
    with pytest.raises(SinkAway, match="refused"):
        sink.send(_request(sink))


@both
@pytest.mark.parametrize("host", ["no-such-host.invalid", "no..host", f"{'x' * 64}.invalid"])
def test_a_host_without_an_address_is_away(make: Make, host: str) -> None:
    sink = make(f"http://{host}")
    with pytest.raises(SinkAway):
        sink.send(_request(sink))


@both
def test_a_host_without_room_for_a_thread_sends_later(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    with serving(otlp.Collector()) as server:
        sink = make(server.url)
        request = _request(sink)
        monkeypatch.setattr(threading.Timer, "start", refuse)
        with pytest.raises(SinkAway, match="no thread"):
            sink.send(request)


@both
@pytest.mark.parametrize("answers", [[], [Reply(drips=True)]])
def test_a_server_that_hangs_costs_the_timeout(make: Make, answers: list[Reply]) -> None:
    # GIVEN a server that never answers, or a byte at a time for ever
    class Hangs:
        def take(self, *_: object) -> Reply:
            server.stop.wait(20)
            return Reply()

    with serving(Hangs()) as server:
        server.answers = answers
        sink = make(server.url, timeout_s=0.4)
        request = _request(sink)
        # WHEN a request is sent THEN it ends in time
        began = time.monotonic()
        with pytest.raises(SinkAway, match="time"):
            sink.send(request)
        assert time.monotonic() - began < 5


@both
def test_an_answer_that_is_none_is_away(make: Make) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        sink = make(f"http://127.0.0.1:{listening.getsockname()[1]}")
        request = _request(sink)

        def answer() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(1 << 20)
                connection.sendall(b"\x16\x03\x01 what?\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(SinkAway):
            sink.send(request)
        thread.join()


def test_a_refusal_is_read_though_the_request_was_not() -> None:
    # GIVEN a server that finds a request too long before it has read it
    with socket.create_server(("127.0.0.1", 0)) as listening:
        sink = _otlp(f"http://127.0.0.1:{listening.getsockname()[1]}")

        def answer() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(1_000)
                connection.sendall(b"HTTP/1.1 413 Too Large\r\nContent-Length: 0\r\n\r\n")
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(1 << 20):
                    pass

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(SinkRefused, match="413"):
            sink.send(Request(bytes(8 << 20), BEGIN_NS, 1))
        thread.join()


# Secrets.


def test_a_token_is_read_for_each_request(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("first\n")
    with serving(otlp.Collector()) as server:
        sink = _otlp(server.url, token_file=token, tenant="team-a")
        sink.send(_request(sink))
        token.write_text("second")
        sink.send(_request(sink))
        headers = [(h["Authorization"], h["X-Scope-OrgID"]) for h in server.requests]
        assert headers == [("Bearer first", "team-a"), ("Bearer second", "team-a")]
        # A token that is being replaced costs no request.
        token.unlink()
        with pytest.raises(SinkAway):
            sink.send(_request(sink))


def test_a_password_and_a_tenant_let_into_pyroscope(tmp_path: Path) -> None:
    password = tmp_path / "password"
    password.write_text("s3cret\n")
    receiver = pyroscope.Pyroscope(
        NOW_NS, is_multi_tenant=True, authorization="Basic MTIzNDU6czNjcmV0"
    )
    with serving(receiver) as server:
        known = {"user": "12345", "password_file": password}
        sink = _pyroscope(server.url, tenant="a", **known)
        assert sink.send(_request(sink)) == Counter()
        for settings in ({"tenant": "a"}, known):
            sink = _pyroscope(server.url, **settings)
            with pytest.raises(SinkAway, match="401"):
                sink.send(_request(sink))


@both
@pytest.mark.parametrize(
    "url", ["http://pyroscope:4040", "http://10.0.0.1", "http://localhost.evil"]
)
def test_a_secret_is_not_sent_in_the_clear(make: Make, url: str, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("x")
    with pytest.raises(UsageError, match="without TLS"):
        make(url, token_file=token)
    with pytest.raises(UsageError, match="without TLS"):
        make(url, user="u", password_file=token)
    make(url, token_file=token, insecure=True)
    make("https://pyroscope", token_file=token)
    make("http://localhost:1", token_file=token)
    make("http://[::1]:1", token_file=token)


@pytest.mark.parametrize("check", [_checked_pyroscope, _checked_otlp])
@pytest.mark.parametrize(
    "settings",
    [
        {"url": "localhost:4040"},
        {"url": "ftp://host"},
        {"url": "http://"},
        {"url": "http://host:99999"},
        {"url": "http://user:hunter2@host"},
        {"url": "http://host/?tenant=x"},
        {"url": "http://ho st\r\nX: y"},
        {"url": "http://h\xf6st"},
        {"url": "http://[::1"},
        {"tenant": "a\r\nAuthorization: x"},
        {"timeout_s": 0},
        {"timeout_s": float("nan")},
        {"user": "u"},
        {"password_file": Path("/dev/null")},
        {"token_file": Path("/no/such/file")},
        {"token_file": Path("/dev/null")},
        {"token_file": Path("/dev/zero")},
        {"url": "https://h", "ca_file": Path("/no/such/file")},
        {"url": "https://h", "ca_file": Path("/dev/null")},
        {"url": "https://h", "cert_file": Path("/dev/null"), "key_file": Path("/dev/null")},
        {"url": "https://h", "cert_file": Path("/dev/null")},
        {"url": "https://h", "key_file": Path("/dev/null")},
        {"cert_file": Path("/dev/null"), "key_file": Path("/dev/null")},
        {"labels": ("nonsense",)},
        {"labels": ("thread",)},
    ],
)
def test_settings_without_a_sense_are_refused(
    check: Callable[..., None], settings: dict[str, object]
) -> None:
    with pytest.raises(UsageError) as refused:
        check(**{"url": "http://localhost:1", **settings})
    assert "hunter2" not in str(refused.value)


@both
@pytest.mark.parametrize(
    "settings",
    [
        {"token_file": Path("/no/such/file")},
        {"user": "u", "password_file": Path("/no/such/file")},
        {"url": "https://h", "ca_file": Path("/no/such/file")},
        {"url": "https://h", "cert_file": Path("/no/such"), "key_file": Path("/no/such")},
    ],
)
def test_a_file_that_is_away_is_a_back_end_that_is_away(
    make: Make, settings: dict[str, object]
) -> None:
    sink = make(**{"url": "http://localhost:1", **settings})
    with pytest.raises(SinkAway, match="No such file"):
        sink.send(_request(sink))


def test_an_unknown_flavour_is_refused() -> None:
    with pytest.raises(UsageError, match="vanilla") as refused:
        _otlp("http://localhost:1", flavour="vanilla")
    assert "collector, parca, pyroscope" in str(refused.value.hint)


# TLS.


@contextmanager
def _tls_server(folder: Path, clients: Path | None = None) -> Iterator[tuple[str, Path]]:
    """Serves with a certificate of its own; whom it lets in is in a file, None for anybody."""
    own, key = certificate(folder)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(own, key)
    if clients is not None:
        context.load_verify_locations(clients)
        context.verify_mode = ssl.CERT_REQUIRED
    with serving(otlp.Collector(), context) as server:
        yield server.url, own


def test_certificates_are_checked(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("x")
    with _tls_server(tmp_path) as (url, ca_file):
        # GIVEN a server whose certificate the system does not know
        # WHEN requests are sent THEN it has to be named, or said that it does not matter
        sink = _otlp(url, token_file=token)
        with pytest.raises(SinkAway, match="certificate verify failed"):
            sink.send(_request(sink))
        for settings in ({"ca_file": ca_file}, {"insecure": True}):
            sink = _otlp(url, token_file=token, **settings)
            assert sink.send(_request(sink)) == Counter()
        # A certificate of another host is none.
        sink = _otlp(url.replace("127.0.0.1", "localhost"), ca_file=ca_file)
        with pytest.raises(SinkAway, match="certificate"):
            sink.send(_request(sink))


def test_an_authority_without_key_identifiers_is_trusted_where_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # GIVEN a Python that asks for key identifiers by itself, as from 3.13 on
    def strict(cafile: Path | None = None) -> ssl.SSLContext:
        context = default(cafile=cafile)
        context.verify_flags |= ssl.VERIFY_X509_STRICT
        return context

    default = ssl.create_default_context
    monkeypatch.setattr(ssl, "create_default_context", strict)
    own, key, authority = certificate_of_authority(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(own, key)
    # WHEN a configuration names an authority without them
    with serving(otlp.Collector(), context) as server:
        sink = _otlp(server.url, ca_file=authority)
        # THEN it is trusted, and nobody else is
        assert sink.send(_request(sink)) == Counter()
        sink = _otlp(server.url)
        with pytest.raises(SinkAway, match="certificate verify failed"):
            sink.send(_request(sink))


def test_whom_to_trust_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = [tmp_path / name for name in ("before", "now")]
    for folder in folders:
        folder.mkdir()
    trusted = tmp_path / "trusted"
    with _tls_server(folders[0]) as (_, before), _tls_server(folders[1]) as (url, now):
        # GIVEN a server whose certificate was replaced by one of another authority
        trusted.write_bytes(before.read_bytes())
        sink = _otlp(url, ca_file=trusted)
        monkeypatch.setattr("aiflame.agent.sinks.posting._TLS_S", 0.0)
        with pytest.raises(SinkAway, match="certificate verify failed"):
            sink.send(_request(sink))
        # WHEN that is trusted, in the same file THEN requests get there, without a new start
        trusted.write_text("")
        with pytest.raises(SinkAway, match="certificate verify failed"):
            sink.send(_request(sink))
        trusted.write_bytes(now.read_bytes())
        assert sink.send(_request(sink)) == Counter()


def test_a_host_shows_its_certificate_where_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aiflame.agent.sinks.posting._TLS_S", 0.0)
    known, key = certificate(tmp_path / "host")
    other, other_key = certificate(tmp_path / "other")
    with _tls_server(tmp_path, clients=known) as (url, ca_file):
        # GIVEN a back-end that lets in whom it knows
        for own in ({}, {"cert_file": other, "key_file": other_key}):
            sink = _otlp(url, ca_file=ca_file, **own)
            with pytest.raises(SinkAway):
                sink.send(_request(sink))
        # WHEN the certificate is replaced THEN requests get there, without a new start
        other.write_bytes(known.read_bytes())
        with pytest.raises(SinkAway):
            sink.send(_request(sink))
        other_key.write_bytes(key.read_bytes())
        assert sink.send(_request(sink)) == Counter()


def test_a_key_with_a_passphrase_is_refused_and_nobody_is_asked_for_it(tmp_path: Path) -> None:
    own, key = certificate(tmp_path, passphrase="hunter2")
    with pytest.raises(UsageError, match="no certificate and key"):
        _checked_otlp("https://localhost:1", cert_file=own, key_file=key)


@both
def test_a_handshake_that_hangs_costs_the_timeout(make: Make) -> None:
    # GIVEN a server that takes the beginning of TLS and says nothing
    with socket.create_server(("127.0.0.1", 0)) as listening:
        sink = make(f"https://127.0.0.1:{listening.getsockname()[1]}", timeout_s=0.3)
        request = _request(sink)
        began = time.monotonic()
        # WHEN a request is sent THEN it ends in time
        with pytest.raises(SinkAway):
            sink.send(request)
        assert time.monotonic() - began < 5
