# SPDX-License-Identifier: Apache-2.0
"""Stretches are encoded in a process that ends, and whatever ends it, each request is sent once."""

from __future__ import annotations

import errno
import gzip
import importlib
import json.scanner
import os
import signal
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from aiflame.agent.capture.writer import CaptureWriter
from aiflame.agent.errors import AiflameError
from aiflame.agent.fleet import fork
from aiflame.agent.fleet import naming_worker as worker_module
from aiflame.agent.fleet.delivery import Delivery
from aiflame.agent.fleet.encoding import Encoder, NamedStretch, NotEncoded
from aiflame.agent.fleet.fork import ForkEnded
from aiflame.agent.fleet.labelling import Labelling
from aiflame.agent.fleet.log import Log
from aiflame.agent.fleet.naming_messages import SinkState
from aiflame.agent.fleet.naming_worker import _Worker
from aiflame.agent.fleet.stretch_naming import Lateness
from aiflame.agent.model.batch import Batch, Labels
from aiflame.agent.model.profile import SPAN_DTYPE, Process
from aiflame.agent.sinks.clickhouse import ClickHouseSink
from aiflame.agent.sinks.otlp import OtlpSink
from aiflame.agent.sinks.otlp import Settings as OtlpSettings
from aiflame.agent.sinks.pyroscope import PyroscopeSink
from aiflame.agent.sinks.pyroscope import Settings as PyroscopeSettings
from aiflame.agent.sinks.requests import Request, RequestSink
from aiflame.agent.sinks.written import Naming
from aiflame.agent.store.address import Server, address_of
from aiflame.agent.symbolize.files import GivenFiles
from bench.large import write_capture
from profiles import RECORDING, small_profile
from support import are_gone

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
    return NamedStretch(tmp_path / "stretch.aiflame", [_OURS] * len(profile.processes), "n1")


def test_requests_come_as_sinks_made_them(stretch: NamedStretch, forked: list[int]) -> None:
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
    assert summary.to_send == int(profile.samples["count"].sum())
    on_cpu = profile.samples[profile.samples["klass"] == 0]
    assert summary.samples == int(on_cpu["count"].sum())
    assert summary.duration_ns == profile.recording.duration_ns
    assert summary.losses == {loss.name: loss.count for loss in profile.losses}
    assert are_gone(forked)


def test_who_is_left_out_is_in_no_request(stretch: NamedStretch) -> None:
    # GIVEN a stretch all of whose processes are left out, or held back
    nobody = replace(stretch, labels=[None] * len(stretch.labels))
    address = address_of("clickhouse://localhost/aiflame", {})
    assert isinstance(address, Server)
    sinks: dict[str, RequestSink] = {
        "pyroscope": PyroscopeSink(PyroscopeSettings(url="http://localhost:1")),
        "otlp": OtlpSink(OtlpSettings(url="http://localhost:1")),
        "clickhouse": ClickHouseSink(address),
    }
    # WHEN it is encoded
    with Encoder(nobody, sinks) as encoder:
        summary = encoder.summary()
        assert summary.to_send == 0
        requests = {name: [*encoder.requests(name)] for name in sinks}
    # THEN back-ends of profiles get nothing, and the store what was lost, of this host.
    assert requests["pyroscope"] == requests["otlp"] == []
    (request,) = requests["clickhouse"]
    head, _, rows = request.body.partition(b"\n")
    assert head.startswith(b"agents ")
    assert (request.begin_unix_ns, request.samples) == (RECORDING.started_unix_ns, 0)
    told = [json.loads(row) for row in gzip.decompress(rows).splitlines()]
    assert {row["node"] for row in told} == {"n1"}
    assert {row["loss"]: row["lost"] for row in told} == {"": 0, **summary.losses}
    assert summary.losses


def test_a_capture_that_cannot_be_read_is_told(stretch: NamedStretch) -> None:
    stretch.database.write_bytes(stretch.database.read_bytes()[:5000])
    with Encoder(stretch, {}) as encoder, pytest.raises(AiflameError, match="damaged capture"):
        encoder.summary()


def test_a_process_that_is_killed_is_noticed(stretch: NamedStretch, forked: list[int]) -> None:
    with Encoder(stretch, {"killed": _Sink(_is_killed)}) as encoder:
        encoder.summary()
        found = []
        with pytest.raises(ForkEnded):
            found += encoder.requests("killed")
    assert are_gone(forked)


def test_locks_of_other_threads_hinder_nobody(
    stretch: NamedStretch, monkeypatch: pytest.MonkeyPatch
) -> None:
    # GIVEN a thread that imports, compresses and frees memory all the time, as senders do
    is_over = threading.Event()

    def disturb() -> None:
        while not is_over.is_set():
            importlib.reload(json.scanner)
            gzip.compress(bytes(1 << 16))

    thread = threading.Thread(target=disturb)
    thread.start()
    monkeypatch.setattr(fork, "_MOST_S", 20.0)  # whoever waits for a lock is killed
    # WHEN stretches are encoded THEN they are
    try:
        for _ in range(20):
            with Encoder(stretch, {"two": _Sink(_two)}) as encoder:
                encoder.summary()
                assert len([*encoder.requests("two")]) == 2
    finally:
        is_over.set()
        thread.join()


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "_ENCODE_AGAIN_S", (0.0, 0.0))


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    descriptor = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT)
    yield Log(descriptor)
    os.close(descriptor)


def _sent(
    stretch: NamedStretch, folder: Path, sinks: Mapping[str, _Sink], log: Log
) -> tuple[bytes, dict[str, SinkState]]:
    """Sends a stretch; returns what is told of it, and how its deliveries do."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        worker = _Worker(folder, theirs, cast(Naming, None), GivenFiles(), Lateness(), log)
        worker._labelling = cast(Labelling, _OneLabelling())
        for name, sink in sinks.items():
            worker._sinks[name] = sink
            worker._deliveries[name] = Delivery(sink, folder / name, 10**9, log)
        (folder / "1").mkdir()
        worker._send(folder / "1", stretch.database, 0, 0)
        said = ours.recv(1 << 16)
    return said, {name: delivery.state() for name, delivery in worker._deliveries.items()}


@pytest.mark.parametrize("times", [1, 2, 3])
def test_what_is_killed_is_tried_again_and_nothing_is_queued_twice(
    stretch: NamedStretch, tmp_path: Path, log: Log, forked: list[int], times: int
) -> None:
    # GIVEN three back-ends: one cannot encode it, and one is killed while it does, so often
    tries = tmp_path / "tries"

    def is_killed_at_first(batches: Sequence[Batch]) -> Iterator[Request]:
        yield from _two(batches)
        with tries.open("ab", buffering=0) as file:
            file.write(b".")
            if file.tell() <= times:
                os.kill(os.getpid(), signal.SIGKILL)

    sinks = {"a": _Sink(_two), "bad": _Sink(_fails), "b": _Sink(is_killed_at_first)}
    # WHEN a stretch is sent
    said, states = _sent(stretch, tmp_path, sinks, log)
    # THEN each has all of it once, and what is lost is counted once; after the third time it is
    # given up, and the first has it
    waiting = [states[name].waiting_requests for name in sinks]
    assert waiting == ([2, 0, 0] if times == 3 else [2, 0, 2])
    weights = int(small_profile().samples["count"].sum())
    assert states["bad"].dropped_samples == {"cannot be encoded: ValueError": weights}
    assert (b'"StretchLost"' if times == 3 else b'"StretchDone"') in said
    assert not stretch.database.exists()
    assert are_gone(forked)


def test_where_nothing_can_be_forked_it_is_tried_again(
    stretch: NamedStretch, tmp_path: Path, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    fork, failures = os.fork, [errno.ENOMEM, errno.EAGAIN]

    def fails_at_first() -> int:
        if failures:
            number = failures.pop()
            raise OSError(number, os.strerror(number))
        return fork()

    monkeypatch.setattr(os, "fork", fails_at_first)
    said, states = _sent(stretch, tmp_path, {"a": _Sink(_two)}, log)
    assert b'"StretchDone"' in said
    assert states["a"].waiting_requests == 2


def test_a_spool_that_fails_costs_no_other_back_end(
    stretch: NamedStretch, tmp_path: Path, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = Delivery.put

    def fails(delivery: Delivery, requests: Iterator[Request], stretch: str = "") -> bool:
        if delivery._folder.name == "a":
            next(requests)
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return put(delivery, requests, stretch)

    monkeypatch.setattr(Delivery, "put", fails)
    said, states = _sent(stretch, tmp_path, {"a": _Sink(_two), "b": _Sink(_two)}, log)
    assert b'"StretchDone"' in said
    assert states["a"].dropped_samples.keys() == {"cannot be encoded: OSError"}
    assert states["b"].waiting_requests == 2
