# SPDX-License-Identifier: Apache-2.0
"""Stretches are encoded in a process that ends, and whatever ends it, each request is sent once."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from aiflame.agent.capture.writer import CaptureWriter
from aiflame.agent.errors import AiflameError
from aiflame.agent.fleet.delivery import Delivery
from aiflame.agent.fleet.encoding import Encoder, EncoderEnded, NamedStretch, NotEncoded
from aiflame.agent.fleet.labelling import Labelling
from aiflame.agent.fleet.log import Log
from aiflame.agent.fleet.worker import _Lateness, _Worker
from aiflame.agent.model.batch import Batch, Labels
from aiflame.agent.model.profile import SPAN_DTYPE, Process
from aiflame.agent.sinks.requests import Request
from aiflame.agent.sinks.written import Naming
from bench.large import write_capture
from profiles import RECORDING, small_profile

_OURS = Labels(service="train")
# Larger than a pipe.
_BODY = b"x" * 1_000_000


class _Sink:
    name = "given"
    max_age_s = None
    sends_spans = False
    modules: tuple[str, ...] = ()

    def __init__(self, encode: Callable[[Sequence[Batch]], Iterator[Request]]) -> None:
        self._encode = encode

    def encode(self, batches: Sequence[Batch]) -> Iterator[Request]:
        return self._encode(batches)

    def send(self, request: Request) -> Counter[str]:
        return Counter()


class _OneLabelling:
    losses = ()

    def of(self, processes: Sequence[Process]) -> list[Labels]:
        return [_OURS] * len(processes)


def _two(batches: Sequence[Batch]) -> Iterator[Request]:
    for number, body in enumerate((b"first", _BODY)):
        yield Request(body, batches[0].begin_unix_ns, 7 + number)


def _labels_in_words(batches: Sequence[Batch]) -> Iterator[Request]:
    for batch in batches:
        yield Request(batch.labels.service.encode(), 0, 0)


def _fails(batches: Sequence[Batch]) -> Iterator[Request]:
    yield from _labels_in_words(batches)
    raise ValueError("no such series")


def _is_killed(_: Sequence[Batch]) -> Iterator[Request]:
    yield Request(b"one", 0, 1)
    yield Request(_BODY, 0, 1)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture
def stretch(tmp_path: Path) -> NamedStretch:
    profile = small_profile()
    spans = np.zeros(len(profile.samples), SPAN_DTYPE)
    spans["sample"], spans["seconds"] = np.arange(len(spans)), 1
    spans["count"], spans["ns"] = profile.samples["count"], profile.samples["ns"]
    write_capture(replace(profile, spans=spans), tmp_path / "stretch.aiflame")
    writer = CaptureWriter(tmp_path / "stretch.aiflame", is_new=False)
    writer.put("losses", [(loss.name, loss.count, loss.meaning) for loss in profile.losses])
    writer.commit()
    writer.close()
    return NamedStretch(tmp_path / "stretch.aiflame", [_OURS] * len(profile.processes))


def _children() -> str:
    return Path("/proc/thread-self/children").read_text()


def test_requests_come_as_sinks_made_them(stretch: NamedStretch) -> None:
    # GIVEN three sinks, one of which fails, and what another had is not asked for to its end
    sinks = {"two": _Sink(_two), "bad": _Sink(_fails), "labels": _Sink(_labels_in_words)}
    profile = small_profile()
    with Encoder(stretch, sinks) as encoder:
        # WHEN all are asked for
        summary = encoder.summary()
        assert next(encoder.requests("two")).body == b"first"
        with pytest.raises(NotEncoded, match=r"ValueError: no such series \(test_fleet") as caught:
            labels = [*encoder.requests("bad")]
        labels = [*encoder.requests("labels")]
    # THEN each has its own
    assert [request.body for request in labels] == [b"train"]
    assert caught.value.reason == "ValueError"
    with Encoder(stretch, sinks) as encoder:
        encoder.summary()
        assert [*encoder.requests("two")] == [
            Request(b"first", RECORDING.started_unix_ns, 7),
            Request(_BODY, RECORDING.started_unix_ns, 8),
        ]
    # and it is said what the stretch has; no process is left
    assert summary.weights == int(profile.samples["count"].sum())
    on_cpu = profile.samples[profile.samples["klass"] == 0]
    assert summary.samples == int(on_cpu["count"].sum())
    assert summary.duration_ns == profile.recording.duration_ns
    assert summary.started_unix_ns == profile.recording.started_unix_ns
    assert summary.losses == {loss.name: loss.count for loss in profile.losses}
    assert not _children()


def test_who_is_left_out_is_in_no_request(stretch: NamedStretch) -> None:
    nobody = NamedStretch(stretch.database, [None] * len(stretch.labels))
    with Encoder(nobody, {"labels": _Sink(_labels_in_words)}) as encoder:
        assert encoder.summary().weights
        assert [*encoder.requests("labels")] == []


def test_a_capture_that_cannot_be_read_is_told(stretch: NamedStretch) -> None:
    stretch.database.write_bytes(stretch.database.read_bytes()[:5000])
    with Encoder(stretch, {}) as encoder, pytest.raises(AiflameError, match="damaged capture"):
        encoder.summary()


def test_a_process_that_is_killed_is_noticed(stretch: NamedStretch) -> None:
    with Encoder(stretch, {"killed": _Sink(_is_killed)}) as encoder:
        encoder.summary()
        found = []
        with pytest.raises(EncoderEnded):
            found += encoder.requests("killed")
    assert not _children()


def test_locks_of_other_threads_hinder_nobody(stretch: NamedStretch) -> None:
    # GIVEN a thread that imports, writes to the log and frees memory all the time, as senders do
    is_over = threading.Event()

    def disturb() -> None:
        log = Log(os.open(os.devnull, os.O_WRONLY))
        while not is_over.is_set():
            log.say_seldom("event", "words")
            bytearray(1 << 20)
            exec("import json, sqlite3, gzip")  # noqa: S102

    thread = threading.Thread(target=disturb)
    thread.start()
    # WHEN stretches are encoded THEN they are
    try:
        for _ in range(20):
            with Encoder(stretch, {"two": _Sink(_two)}) as encoder:
                encoder.summary()
                assert len([*encoder.requests("two")]) == 2
    finally:
        is_over.set()
        thread.join()


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    descriptor = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT)
    yield Log(descriptor)
    os.close(descriptor)


@pytest.mark.parametrize("times", [1, 2, 3])
def test_what_is_killed_is_tried_again_and_nothing_is_queued_twice(
    stretch: NamedStretch, tmp_path: Path, log: Log, times: int
) -> None:
    # GIVEN two back-ends, the second of which is killed while it encodes, so often
    tries = tmp_path / "tries"

    def is_killed_at_first(batches: Sequence[Batch]) -> Iterator[Request]:
        yield from _two(batches)
        with tries.open("ab", buffering=0) as file:
            file.write(b".")
            if file.tell() <= times:
                os.kill(os.getpid(), signal.SIGKILL)

    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        worker = _Worker(tmp_path, theirs, cast(Naming, None), _Lateness(), log)
        worker._labelling = cast(Labelling, _OneLabelling())
        for name, sink in (("a", _Sink(_two)), ("b", _Sink(is_killed_at_first))):
            worker._sinks[name] = sink
            worker._deliveries[name] = Delivery(sink, tmp_path / name, 10**9, log)
        folder = tmp_path / "1"
        folder.mkdir()
        # WHEN a stretch is sent
        worker._send(folder, stretch.database, 0, 0)
        said = ours.recv(1 << 16)
    # THEN each has all of it once; after the third time it is given up, and the first has it
    waiting = [worker._deliveries[name].state().waiting_requests for name in ("a", "b")]
    assert waiting == ([2, 0] if times == 3 else [2, 2])
    assert (b'"lost"' if times == 3 else b'"done"') in said
    assert not stretch.database.exists()
    assert not _children()
