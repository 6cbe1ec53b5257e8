# SPDX-License-Identifier: Apache-2.0
"""The sink for ClickHouse: what a server gets, also when requests are lost, late or refused."""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from aiflame.agent.errors import UsageError
from aiflame.agent.fleet.config import load
from aiflame.agent.fleet.delivery import Delivery
from aiflame.agent.fleet.log import Log
from aiflame.agent.model.batch import Batch, Labels
from aiflame.agent.model.profile import NS_PER_S, Profile
from aiflame.agent.sinks import clickhouse as clickhouse_sink
from aiflame.agent.sinks.clickhouse import ClickHouseSink
from aiflame.agent.sinks.requests import Request, SinkAway, SinkRefused
from aiflame.agent.store.address import PASSWORD_VARIABLE, Server, address_of
from aiflame.agent.store.engine import StoreError
from aiflame.agent.store.engines import ServerEngine
from clickhouse_server import PASSWORD, USER, StandIn, clickhouse
from device_profiles import small_timed_profile
from profiles import RECORDING, hostile_profile, small_profile


@pytest.fixture(params=["chdb", "rows"])
def server(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[StandIn, Server]]:
    if request.param == "chdb" and importlib.util.find_spec("chdb") is None:
        pytest.skip("chDB is not installed")
    monkeypatch.setenv(PASSWORD_VARIABLE, PASSWORD)
    folder = tmp_path / "store" if request.param == "chdb" else None
    with clickhouse(folder) as (stand_in, url):
        found = address_of(url)
        assert isinstance(found, Server)
        yield stand_in, found


def _batch(profile: Profile, minute: int = 0, **labels: str) -> Batch:
    begin = RECORDING.started_unix_ns + minute * 60 * NS_PER_S
    return Batch(Labels(**{"service": "train", **labels}), profile, begin, 60 * NS_PER_S)


def _sum(stand_in: StandIn, table: str, column: str) -> int:
    if stand_in.engine is not None:
        return int(stand_in.engine.query(f"SELECT sum({column}) FROM {table}").rows[0][0])  # noqa: S608
    return sum(row[column] for row in stand_in.rows[table])


def _ids(stand_in: StandIn, table: str, column: str) -> set[int]:
    if stand_in.engine is not None:
        rows = stand_in.engine.query(f"SELECT DISTINCT {column} FROM {table}").rows  # noqa: S608
        return {int(row[0]) for row in rows}
    return {row[column] for row in stand_in.rows[table]}


def test_what_was_sent_adds_up_to_what_was_recorded(server: tuple[StandIn, Server]) -> None:
    # GIVEN three containers of a host
    stand_in, address = server
    sink = ClickHouseSink(address, cluster="prod")
    profiles = [small_profile(), hostile_profile(), small_timed_profile()]
    batches = [_batch(profile, pod=f"pod{i}") for i, profile in enumerate(profiles)]
    # WHEN they are sent
    requests = [*sink.encode(batches)]
    for request in requests:
        assert sink.send(request) == {}
    # THEN sums are those of the profiles, and each stack is there
    assert _sum(stand_in, "samples", "value") == sum(int(p.samples["ns"].sum()) for p in profiles)
    events = sum(int(p.samples["count"].sum()) for p in profiles)
    devices = sum(int(p.gpu.samples["count"].sum()) for p in profiles)
    assert _sum(stand_in, "samples", "events") == events
    assert _sum(stand_in, "gpu", "samples") == devices
    assert sum(request.samples for request in requests) == events + devices
    assert _ids(stand_in, "samples", "stack_id") <= _ids(stand_in, "stacks", "stack_id")
    assert _ids(stand_in, "gpu", "launch_stack") - {0} <= _ids(stand_in, "stacks", "stack_id")


def test_what_is_sent_again_is_there_once(server: tuple[StandIn, Server]) -> None:
    # GIVEN a server that takes requests, and whose answers are lost on the way
    stand_in, address = server
    sink = ClickHouseSink(address)
    requests = [*sink.encode([_batch(small_profile()), _batch(small_timed_profile(), pod="b")])]
    stand_in.loses_replies = len(requests)
    for request in requests:
        with pytest.raises(SinkAway):
            sink.send(request)
    # WHEN all are sent again, also by a sink that was started later
    later = ClickHouseSink(address)
    for request in requests:
        sink.send(request)
        later.send(Request(bytes(request.body), request.begin_unix_ns, request.samples))
    # THEN nothing is doubled
    whole = sum(int(p.samples["ns"].sum()) for p in (small_profile(), small_timed_profile()))
    assert _sum(stand_in, "samples", "value") == whole
    if stand_in.engine is not None:
        assert _sum(stand_in, "stacks_1h", "value") == whole


def test_stacks_are_sent_once_and_again_when_they_have_to_be(
    server: tuple[StandIn, Server],
) -> None:
    _, address = server
    now = [0.0]
    sink = ClickHouseSink(address, now_s=lambda: now[0])

    def tables(minute: int) -> list[str]:
        requests = [*sink.encode([_batch(small_profile(), minute)])]
        if is_sent:
            for request in requests:
                sink.send(request)
        return [request.body.split(b" ", 1)[0].decode() for request in requests]

    # GIVEN stacks that wait to be sent, and may be dropped: they are sent with the next, too
    is_sent = False
    assert "stacks" in tables(0)
    assert "stacks" in tables(0)
    # GIVEN stacks that were sent: they are not sent again
    is_sent = True
    assert "stacks" in tables(0)
    assert "stacks" not in tables(1)
    # WHEN a day has passed, or a week has begun: they are
    now[0] = 86_401.0
    assert "stacks" in tables(2)
    assert "stacks" not in tables(3)
    assert "stacks" in tables(7 * 24 * 60)


def test_what_an_agent_sends_that_another_has_encoded_is_known(
    server: tuple[StandIn, Server],
) -> None:
    # GIVEN requests that wait since an agent ended, the second of a version that told no ids
    _, address = server
    first, second = ([*ClickHouseSink(address).encode([_batch(small_profile())])] for _ in "12")
    later = ClickHouseSink(address)
    for request in second:
        head, _, rows = request.body.partition(b"\n")
        body = b" ".join(head.split(b" ")[:2]) + b"\n" + rows
        later.send(Request(body, request.begin_unix_ns, request.samples))
    # THEN what that has sent is not known to be there,
    assert next(later.encode([_batch(small_profile(), 1)])).body.startswith(b"stacks ")
    # WHEN the first are sent THEN it is.
    for request in first:
        later.send(request)
    assert not next(later.encode([_batch(small_profile(), 1)])).body.startswith(b"stacks ")


@pytest.mark.parametrize(
    ("status", "headers", "retry_after_s"),
    [
        (503, {}, None),
        (429, {"Retry-After": "7"}, 7.0),
        (429, {"Retry-After": "1e9"}, 3600.0),
        (429, {"Retry-After": "-1"}, 0.0),
        (429, {"Retry-After": "nan"}, None),
        (500, {"X-ClickHouse-Exception-Code": "241"}, None),  # memory limit
        (404, {"X-ClickHouse-Exception-Code": "60"}, None),  # the tables are yet to be made
        (403, {"X-ClickHouse-Exception-Code": "516"}, None),  # the password changes
        (502, {}, None),
        (200, {"X-ClickHouse-Exception-Code": "159"}, None),  # an error after the status
    ],
)
def test_what_may_go_away_is_sent_again(
    server: tuple[StandIn, Server],
    status: int,
    headers: dict[str, str],
    retry_after_s: float | None,
) -> None:
    stand_in, address = server
    sink = ClickHouseSink(address)
    request = next(sink.encode([_batch(small_profile())]))
    stand_in.answers = [(status, headers, b"Code: 1. DB::Exception: \x1b[31mno\n" * 1_000)]
    with pytest.raises(SinkAway) as caught:
        sink.send(request)
    assert caught.value.retry_after_s == retry_after_s
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 600
    assert sink.send(request) == {}


@pytest.mark.parametrize(
    ("status", "headers"),
    [
        (400, {}),
        (413, {}),
        (400, {"X-ClickHouse-Exception-Code": "117"}),
        (500, {"X-ClickHouse-Exception-Code": "27"}),
        (404, {"X-ClickHouse-Exception-Code": "16"}),
    ],
)
def test_what_no_server_takes_is_not_sent_again(
    server: tuple[StandIn, Server], status: int, headers: dict[str, str]
) -> None:
    stand_in, address = server
    sink = ClickHouseSink(address)
    request = next(sink.encode([_batch(small_profile())]))
    stand_in.answers = [(status, headers, b"no")]
    with pytest.raises(SinkRefused):
        sink.send(request)
    # Its stacks are not taken for known.
    again = next(sink.encode([_batch(small_profile(), 1)]))
    assert again.body.startswith(b"stacks ")


@pytest.mark.parametrize(
    "answer",
    [
        (302, {"Location": "http://169.254.169.254/"}, b""),
        (200, {"X-ClickHouse-Exception-Code": "x" * 50}, b""),
        (200, {}, b"x" * 1_000_000),
    ],
)
def test_a_server_that_is_none(
    server: tuple[StandIn, Server], answer: tuple[int, dict[str, str], bytes]
) -> None:
    stand_in, address = server
    sink = ClickHouseSink(address)
    stand_in.answers = [answer]
    with pytest.raises((SinkAway, SinkRefused)):
        sink.send(next(sink.encode([_batch(small_profile())])))
    assert len(stand_in.requests) == 1, "no redirection is followed"


@pytest.mark.parametrize("text", [b"<html>welcome to nginx</html>", b"Ok.\n", b"\xff" * 9_000])
def test_a_page_of_something_else_is_no_success(
    server: tuple[StandIn, Server], text: bytes
) -> None:
    # GIVEN what is no ClickHouse, and answers each request well
    stand_in, address = server
    sink = ClickHouseSink(address)
    request = next(sink.encode([_batch(small_profile())]))
    stand_in.answers = [(200, {}, text)]
    # WHEN a request is sent THEN it is not taken for sent, and neither are its stacks
    with pytest.raises(SinkRefused, match="no ClickHouse at this URL") as refused:
        sink.send(request)
    assert refused.value.reason == "no ClickHouse at this URL"
    assert str(refused.value).isprintable()
    assert next(sink.encode([_batch(small_profile(), 1)])).body.startswith(b"stacks ")


@pytest.mark.parametrize(
    "changes",
    [
        lambda engine: engine.create_database(),
        lambda engine: engine.execute("OPTIMIZE TABLE samples"),
        lambda engine: engine.insert("samples", b"{}\n", "token"),
    ],
)
def test_a_store_is_not_changed_by_a_page_of_something_else(
    changes: Callable[[ServerEngine], None],
) -> None:
    with clickhouse() as (stand_in, url):
        address = address_of(url)
        assert isinstance(address, Server)
        stand_in.answers = [(200, {}, b"<html>welcome to nginx</html>")]
        with pytest.raises(StoreError, match=r"no ClickHouse at 127\.0\.0\.1:.*welcome"):
            changes(ServerEngine(address))


@pytest.mark.parametrize("host", ["no..host", f"{'x' * 64}.invalid"])
def test_a_name_that_no_host_can_have_is_a_server_that_is_away(host: str) -> None:
    address = address_of(f"clickhouse://{host}/aiflame")
    assert isinstance(address, Server)
    sink = ClickHouseSink(address)
    with pytest.raises(SinkAway, match="cannot be the name of a host"):
        sink.send(next(sink.encode([_batch(small_profile())])))
    with pytest.raises(StoreError, match="cannot be the name of a host"):
        ServerEngine(address).query("SELECT 1")


def test_nobody_is_there_and_a_body_that_is_none() -> None:
    address = address_of("clickhouse://127.0.0.1:1/aiflame")
    assert isinstance(address, Server)
    sink = ClickHouseSink(address)
    with pytest.raises(SinkAway, match="does not answer"):
        sink.send(next(sink.encode([_batch(small_profile())])))
    for body in (b"", b"samples", b"users x\nrows", b"\xff\n"):
        with pytest.raises(SinkRefused):
            sink.send(Request(body, 0, 0))
    assert [*sink.encode([])] == []


def test_a_server_that_answers_a_byte_at_a_time_costs_the_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(clickhouse_sink, "_TIMEOUT_S", 0.4)
    with clickhouse() as (stand_in, url):
        stand_in.drips = True
        address = address_of(url)
        assert isinstance(address, Server)
        sink = ClickHouseSink(address)
        request = next(sink.encode([_batch(small_profile())]))
        began_s = time.monotonic()
        with pytest.raises(SinkAway, match="no answer in time"):
            sink.send(request)
        assert time.monotonic() - began_s < 5


def test_rows_that_would_vanish_are_too_old() -> None:
    address = address_of("clickhouse://127.0.0.1:1/aiflame")
    assert isinstance(address, Server)
    assert ClickHouseSink(address, keep_days=14).max_age_s == 14 * 86_400
    assert ClickHouseSink(address, keep_days=0).max_age_s is None


def test_what_is_dropped_of_a_full_spool_costs_no_other_its_frames(
    server: tuple[StandIn, Server], tmp_path: Path
) -> None:
    # GIVEN a server that is away, a spool that has room for two stretches, and five of them
    stand_in, address = server
    sink = ClickHouseSink(address)
    stretches = [
        [*sink.encode([_batch(small_profile(), n), _batch(small_timed_profile(), n, pod="b")])]
        for n in range(2)
    ]
    size = sum(len(request.body) for request in stretches[0])
    descriptor = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT)
    delivery = Delivery(sink, tmp_path / "spool", int(2.5 * size), Log(descriptor))
    try:
        for minute in range(5):
            profiles = (small_profile(), small_timed_profile())
            batches = [_batch(p, minute, pod=pod) for p, pod in zip(profiles, "ab", strict=True)]
            delivery.put(sink.encode(batches))
        assert delivery.state().dropped_samples.keys() == {"the spool is full"}
        # WHEN it is back
        delivery.start()
        assert delivery.flush(time.monotonic() + 20)
        delivery.put(sink.encode([_batch(small_profile(), 6)]))
        assert delivery.flush(time.monotonic() + 20)
    finally:
        delivery.close(10)
        os.close(descriptor)
    # THEN each sample that it has has its stack, and what it has is not sent again
    assert _sum(stand_in, "samples", "value") > 0
    assert _ids(stand_in, "samples", "stack_id") <= _ids(stand_in, "stacks", "stack_id")
    assert _ids(stand_in, "gpu", "launch_stack") - {0} <= _ids(stand_in, "stacks", "stack_id")
    assert b"stacks " not in [r.body[:7] for r in sink.encode([_batch(small_profile(), 7)])]


def _settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **settings: object
) -> clickhouse_sink.Settings:
    """Returns those of a configuration, in whose environment a store's password is."""
    monkeypatch.setenv(PASSWORD_VARIABLE, PASSWORD)
    given = {f"sinks.clickhouse.{key}": str(value) for key, value in settings.items()}
    config = load(None, given, {"AIFLAME_DIRECTORY": str(tmp_path / "agent")})
    found: clickhouse_sink.Settings = config.sinks["clickhouse"]
    return found


def _made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **settings: object) -> ClickHouseSink:
    found = _settings(tmp_path, monkeypatch, **settings)
    clickhouse_sink.check(found)
    return clickhouse_sink.make(found, "n")


def test_the_environment_s_password_is_not_an_agent_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with clickhouse() as (stand_in, url):
        port = urlsplit(url).port
        sink = _made(tmp_path, monkeypatch, url=f"http://127.0.0.1:{port}", user=USER)
        with pytest.raises(SinkAway, match="Authentication failed"):
            sink.send(next(sink.encode([_batch(small_profile())])))
        assert len(stand_in.requests) == 1


@pytest.mark.parametrize("path", ["", "/", "/ch", "/ops/ch/"])
def test_a_path_is_of_a_proxy_in_between(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    password = tmp_path / "password"
    password.write_text(PASSWORD)
    password.chmod(0o600)
    with clickhouse(prefix=path.rstrip("/")) as (stand_in, url):
        sink = _made(
            tmp_path,
            monkeypatch,
            url=f"http://127.0.0.1:{urlsplit(url).port}{path}",
            user=USER,
            password_file=password,
        )
        for request in sink.encode([_batch(small_profile())]):
            assert sink.send(request) == {}
        assert _sum(stand_in, "samples", "value") == int(small_profile().samples["ns"].sum())


@pytest.mark.parametrize(
    ("settings", "said", "cure"),
    [
        ({"url": "http://h:8123/?database=x"}, "more than host, port and path", "database"),
        ({"url": "http://h:8123/#x"}, "more than host, port and path", "database"),
        ({"url": "https://h", "keep_days": "-1"}, "keep_days: not a whole number, from 0 to", ""),
        ({"url": "https://h", "keep_days": "3651"}, "not a whole number, from 0 to 3,650", ""),
        ({"url": "http://h", "cert_file": "/c", "key_file": "/k"}, "without TLS", "use https://"),
    ],
)
def test_settings_that_make_no_sense(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, str],
    said: str,
    cure: str,
) -> None:
    with pytest.raises(UsageError) as caught:
        clickhouse_sink.check(_settings(tmp_path, monkeypatch, **settings))
    assert said in str(caught.value)
    assert cure in (caught.value.hint or "")


def test_an_agent_is_told_how_to_send_its_password(tmp_path: Path) -> None:
    password = tmp_path / "password"
    password.write_text(PASSWORD)
    settings = clickhouse_sink.Settings(url="http://h", password_file=password)
    with pytest.raises(UsageError, match="plain text") as caught:
        clickhouse_sink.check(settings)
    assert caught.value.hint == "use https://"
