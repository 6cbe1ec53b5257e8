# SPDX-License-Identifier: Apache-2.0
"""What waits for one destination is sent to no other one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from aiflame.agent.fleet.delivery import Delivery
from aiflame.agent.fleet.log import Log
from aiflame.agent.fleet.spool import Spool
from aiflame.agent.sinks import clickhouse, otlp, pyroscope
from aiflame.agent.sinks.requests import Request
from toy_sink import ToySink

_DAY_S = 86_400


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    descriptor = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT)
    yield Log(descriptor)
    os.close(descriptor)


def _waits(folder: Path, log: Log, samples: int) -> None:
    """Leaves a request there, as an agent that was ended does."""
    delivery = Delivery(ToySink(folder), folder, 1 << 20, log)
    delivery.put([Request(b"of a tenant", 1, samples)])
    delivery.close()


def test_who_it_is_sent_to_says_where_it_waits(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    pushed = pyroscope.Settings(url="https://a", tenant="one")
    places = {
        spool.folder("pyroscope", pushed),
        spool.folder("otlp", otlp.Settings(url="https://a", tenant="one")),
        spool.folder("pyroscope", replace(pushed, url="https://b")),
        spool.folder("pyroscope", replace(pushed, tenant="two")),
        spool.folder("pyroscope", replace(pushed, token_file=Path("/token"))),
        spool.folder("clickhouse", clickhouse.Settings(url="https://a")),
        spool.folder("clickhouse", clickhouse.Settings(url="https://a", database="other")),
    }
    assert len(places) == 7
    assert all(place.parent == tmp_path and len(place.name) < 64 for place in places)
    # Not how long an answer may take.
    assert spool.folder("pyroscope", replace(pushed, timeout_s=1.0)) in places


def test_what_is_configured_no_more_waits_a_day(tmp_path: Path, log: Log) -> None:
    # GIVEN requests for a tenant that is configured no more
    now_s = [0.0]
    spool = Spool(tmp_path / "spool", lambda: now_s[0])
    settings = pyroscope.Settings(url="https://a", tenant="one")
    old, new = (
        spool.folder("pyroscope", each) for each in (settings, replace(settings, tenant="two"))
    )
    assert spool.drop_left([new], 1 << 20) == {}
    _waits(old, log, 7)
    _waits(new, log, 8)
    now_s[0] = max(path.stat().st_mtime for path in old.iterdir()) + _DAY_S - 60
    # THEN they stay for a day, in case it comes back
    assert spool.drop_left([new], 1 << 20) == {}
    assert [*old.iterdir()]
    # and what was dropped then is counted
    now_s[0] += 120
    assert spool.drop_left([new], 1 << 20) == {old.name: 7}
    assert not old.exists() and [*new.iterdir()]


def test_what_is_configured_no_more_has_a_limit(tmp_path: Path, log: Log) -> None:
    spool = Spool(tmp_path)
    folders = []
    for number in range(4):
        settings = pyroscope.Settings(url="https://a", tenant=str(number))
        folders.append(spool.folder("pyroscope", settings))
        _waits(folders[-1], log, 1)
        for path in folders[-1].iterdir():
            os.utime(path, (path.stat().st_mtime, path.stat().st_mtime + number - 10))
    room = 2 * len(b"of a tenant")
    assert {*spool.drop_left([], room)} == {folder.name for folder in folders[:2]}
    assert all(folder.exists() for folder in folders[2:])
