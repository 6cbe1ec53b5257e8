# SPDX-License-Identifier: Apache-2.0
"""Messages between processes come as they were, and what is none is refused in words."""

from __future__ import annotations

import json
import random
import time
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from aiflame.agent.fleet.config import load
from aiflame.agent.fleet.naming_messages import (
    FROM_NAMING,
    TO_NAMING,
    CgroupPathsLeftOut,
    CgroupsLeftOut,
    Configure,
    DoLess,
    EndBy,
    LookAtCgroups,
    Lost,
    NamingReport,
    NoRoom,
    ReleaseMemory,
    SinkState,
    StretchBegun,
    StretchDone,
    StretchEnded,
    StretchLeft,
    StretchLost,
)
from aiflame.agent.sinks.naming_messages import (
    CodeMaker,
    CodeMakerGone,
    End,
    FileClosed,
    FileGiven,
    FilesMissing,
    Windows,
)
from aiflame.agent.typed_messages import BadMessage, encode

# As os.fsdecode gives a path that is no UTF-8.
_ODD = "/\udcff\x00é\U0001f525"
_STATE = SinkState(1, 2, 3, 4, 5, 6, {"too old": 7}, 1.5e9, "it says no")
_SINKS = {"otlp": _STATE, "toy": replace(_STATE, waiting_requests=None, waiting_bytes=None)}
_TO: list[Any] = [
    *(FileGiven(1 << 40, _ODD), FileClosed(1), CodeMaker(1, _ODD, 2), CodeMakerGone(1)),
    *(Windows(3), End(), StretchBegun(Path(_ODD)), StretchEnded(), StretchLeft(Path("a"))),
    *(LookAtCgroups(), DoLess(16, 2), Lost({"windows_lost": 1}), Lost({}), ReleaseMemory()),
    EndBy(12.25),
]
_FROM: list[Any] = [
    FilesMissing((1, 2)),
    NamingReport(_SINKS),
    StretchDone(_SINKS, "1", 2, 3, {"stack_lost": 4}, {"windows_lost": 1}, 5, 6),
    StretchLost({}, "1"),
    NoRoom({}, is_disk_full=True),
    CgroupsLeftOut({}, ((1 << 64) - 1, 0)),
    CgroupPathsLeftOut({}, (_ODD,), ()),
]


@pytest.mark.parametrize(
    ("kinds", "message"),
    [*((TO_NAMING, each) for each in _TO), *((FROM_NAMING, each) for each in _FROM)],
)
def test_a_message_comes_as_it_was(kinds: Any, message: Any) -> None:
    assert kinds.decode(encode(message)) == message


def test_a_configuration_comes_as_it_was() -> None:
    flags = {"sinks.otlp.url": "http://127.0.0.1:1", "include": "unit=a", "stretch": "7s"}
    config = load(None, flags, {})
    assert TO_NAMING.decode(encode(Configure(config))) == Configure(config)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "no JSON"),
        (b"\xff", "no JSON"),
        (b"[" * 60_000, "no JSON"),
        (b'{"message":"Windows","count":' + b"9" * 60_000, "no JSON"),
        (b'["Windows"]', "no message: ['Windows']"),
        (b"{}", "no such message: None"),
        (b'{"message":["Windows"]}', "no such message: ['Windows']"),
        (b'{"message":"NamingReport","sinks":{}}', "no such message: 'NamingReport'"),
        (b'{"message":"Windows"}', "Windows: missing, or not of it: count"),
        (b'{"message":"Windows","count":1,"x":2}', "Windows: missing, or not of it: x"),
        (b'{"message":"Windows","count":true}', "Windows: no int: True"),
        (b'{"message":"Windows","count":1.0}', "Windows: no int: 1.0"),
        (b'{"message":"Windows","count":18446744073709551616}', "Windows: no int of 64 bits"),
        (b'{"message":"Windows","count":-9223372036854775809}', "Windows: no int of 64 bits"),
        (b'{"message":"Windows","count":null}', "Windows: no int: None"),
        (b'{"message":"EndBy","until_s":"1"}', "EndBy: no float: '1'"),
        (b'{"message":"EndBy","until_s":1' + b"0" * 400 + b"}", "EndBy: "),
        (b'{"message":"StretchBegun","folder":1}', "StretchBegun: no str: 1"),
        (b'{"message":"Lost","counts":{"a":"b"}}', "Lost: no int: 'b'"),
        (b'{"message":"Lost","counts":[]}', "Lost: no dict: []"),
    ],
)
def test_what_is_no_message_is_refused_in_words(data: bytes, words: str) -> None:
    with pytest.raises(BadMessage) as caught:
        TO_NAMING.decode(data)
    assert str(caught.value).startswith(words)
    assert len(str(caught.value)) < 500


def test_a_state_that_is_wrong_deep_in_a_report_says_where() -> None:
    words = json.loads(encode(NamingReport(_SINKS)))
    del words["sinks"]["toy"]["retries"]
    with pytest.raises(BadMessage, match="NamingReport: SinkState: missing, or not of it: retries"):
        FROM_NAMING.decode(json.dumps(words).encode())


def test_reports_that_were_changed_are_reports_or_refused() -> None:
    # GIVEN what a process that was taken over may say: bytes of reports, changed by chance
    chance = random.Random(1)
    messages = [encode(each) for each in _FROM]
    began_s = time.process_time()
    taken = 0
    for _ in range(5_000):
        data = bytearray(chance.choice(messages))
        for _ in range(chance.randint(1, 3)):
            at = chance.randrange(len(data))
            data[at : at + chance.randint(0, 3)] = bytes(chance.choices(b'[]{}",:0e-.tn', k=2))
        # WHEN they are read THEN they are reports, of what reports have, or refused.
        try:
            found = FROM_NAMING.decode(bytes(data))
        except BadMessage:
            continue
        taken += 1
        assert FROM_NAMING.decode(encode(found)) == found
        for each in fields(found):
            assert getattr(found, each.name) is not None
    assert taken > 10
    assert time.process_time() - began_s < 20
