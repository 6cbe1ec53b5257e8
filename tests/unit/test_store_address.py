# SPDX-License-Identifier: Apache-2.0
"""Where a store is, and whom its password is told."""

from __future__ import annotations

from pathlib import Path

import pytest
from aiflame.agent.errors import UsageError
from aiflame.agent.store.address import Server, address_of


def _server(text: str, **environment: str) -> Server:
    found = address_of(text, environment)
    assert isinstance(found, Server)
    return found


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("clickhouse://ch/db", ("ch", 8123, "db", False, "")),
        ("clickhouse://ch", ("ch", 8123, "aiflame", False, "")),
        ("clickhouses://ch:9/db", ("ch", 9, "db", True, "")),
        ("clickhouses://me@ch.example/db", ("ch.example", 8443, "db", True, "me")),
        ("clickhouse://[::1]:1/x_1", ("::1", 1, "x_1", False, "")),
    ],
)
def test_urls(text: str, expected: tuple[object, ...]) -> None:
    found = _server(text)
    assert (found.host, found.port, found.database, found.is_tls, found.user) == expected


@pytest.mark.parametrize("text", ["fleet", "/var/lib/fleet", "../x"])
def test_paths(text: str) -> None:
    assert address_of(text) == Path(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "http://ch/db",
        "clickhouse://",
        "clickhouse:///db",
        "clickhouse://me:secret@ch/db",
        "clickhouse://ch:99999/db",
        "clickhouse://ch:x/db",
        "clickhouse://ch/db;drop",
        "clickhouse://ch/a/b",
        "clickhouse://ch/db?verify=0",
        "clickhouse://c h/db",
        "clickhouse://[::1/db",
        "clickhouse://h\nX: y/db",
    ],
)
def test_what_is_no_store(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        address_of(text)
    assert "secret" not in str(caught.value), "the password is not said again"


def test_a_password_comes_from_the_environment_or_a_file_that_is_read_anew(tmp_path: Path) -> None:
    secret = tmp_path / "password"
    secret.write_text("first\n")
    by_file = _server(f"clickhouses://ch/db?password_file={secret}")
    assert by_file.password({}) == "first"
    secret.write_text("second\n")
    assert by_file.password({"AIFLAME_STORE_PASSWORD": "other"}) == "second"
    by_environment = _server("clickhouses://ch/db", AIFLAME_STORE_USER="me")
    assert by_environment.user == "me"
    assert by_environment.password({"AIFLAME_STORE_PASSWORD": "third"}) == "third"


def test_a_password_never_goes_over_the_network_as_plain_text() -> None:
    secret = {"AIFLAME_STORE_PASSWORD": "s"}
    for host in ("ch", "10.0.0.1", "localhost.evil", "[2001:db8::1]"):
        with pytest.raises(UsageError, match="plain text") as caught:
            _server(f"clickhouse://{host}/db").password(secret)
        assert caught.value.hint == "use clickhouses:// (HTTPS)"
        assert _server(f"clickhouse://{host}/db").password({}) == ""
        assert _server(f"clickhouses://{host}/db").password(secret) == "s"
    for host in ("localhost", "127.0.0.1", "[::1]"):
        assert _server(f"clickhouse://{host}/db").password(secret) == "s"


def test_a_password_file_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read"):
        _server(f"clickhouses://ch/db?password_file={tmp_path}/none").password({})
    large = tmp_path / "large"
    large.write_bytes(b"x" * 5_000)
    with pytest.raises(UsageError, match="so long"):
        _server(f"clickhouses://ch/db?password_file={large}").password({})


@pytest.mark.parametrize("text", ["a\nb", "a\r\nX-Other: b", "a\x00", "\x7f", "a\x85b"])
def test_what_would_end_a_header_is_refused(tmp_path: Path, text: str) -> None:
    password = tmp_path / "password"
    password.write_bytes(f"x{text}x".encode())
    server = _server(f"clickhouse://127.0.0.1/db?password_file={password}")
    with pytest.raises(UsageError, match="characters that a header may not have") as refused:
        server.password({})
    assert text not in str(refused.value)
    with pytest.raises(UsageError, match="characters that a header may not have"):
        _server("clickhouse://127.0.0.1/db", AIFLAME_STORE_USER=text)
