# SPDX-License-Identifier: Apache-2.0
"""What becomes of sinks and of what they count, while configurations and files come and go."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from email.message import Message
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from aiflame.agent.capture.reader import read_capture
from aiflame.agent.capture.writer import CaptureWriter
from aiflame.agent.errors import DiskFull
from aiflame.agent.fleet.config import load
from aiflame.agent.fleet.fork import ForkEnded
from aiflame.agent.fleet.labelling import Labelling
from aiflame.agent.fleet.log import Log
from aiflame.agent.fleet.naming_messages import (
    FROM_NAMING,
    Configure,
    Lost,
    NamingReport,
    StretchDone,
)
from aiflame.agent.fleet.naming_worker import _Worker
from aiflame.agent.fleet.stretch_naming import Lateness
from aiflame.agent.fleet.vitals import Vitals
from aiflame.agent.model.batch import Labels
from aiflame.agent.model.profile import SPAN_DTYPE, Process, Profile
from aiflame.agent.sinks.written import Naming
from aiflame.agent.symbolize.files import GivenFiles
from bench.large import write_capture
from profiles import small_profile
from receivers import otlp
from receivers.server import Reply, Server, serving
from support import wait_until


def _profile() -> Profile:
    """As captures have it: samples know in which second they were."""
    profile = small_profile()
    spans = np.zeros(len(profile.samples), SPAN_DTYPE)
    spans["sample"], spans["seconds"] = np.arange(len(spans)), 1
    spans["count"], spans["ns"] = profile.samples["count"], profile.samples["ns"]
    return replace(profile, spans=spans)


class _OneLabelling:
    losses = ()

    def of(self, processes: Sequence[Process]) -> list[Labels]:
        return [Labels(service="train")] * len(processes)

    def use(self, *_: object) -> None:
        pass


class _Sender:
    """The process that sends, without what names."""

    def __init__(self, folder: Path, log: Path) -> None:
        self._folder = folder
        self._log = log
        self._ours, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._stretches = 0
        self.vitals = Vitals()
        self.start()

    def start(self) -> None:
        """Starts it, or another one after the first was killed."""
        worker = _Worker(
            self._folder,
            self._theirs,
            cast(Naming, None),
            GivenFiles(),
            Lateness(),
            Log(self._descriptor),
        )
        worker._labelling = cast(Labelling, _OneLabelling())
        self.worker = worker
        self.vitals.note_naming_started()

    def end(self) -> None:
        for delivery in self.worker._deliveries.values():
            delivery.close(10)

    def close(self) -> None:
        self.end()
        self._ours.close()
        self._theirs.close()
        os.close(self._descriptor)

    def configure(self, flags: dict[str, Any]) -> None:
        """Gives it a configuration, as the agent does that has read it."""
        self.worker.take(Configure(load(None, flags, {})))

    def send(self) -> dict[str, int]:
        """Sends a stretch; returns what it says was lost of those before."""
        report = self._sent()
        assert isinstance(report, StretchDone)
        return report.losses

    def fail_to_send(self) -> None:
        """Has a stretch that cannot be sent."""
        assert not isinstance(self._sent(), StretchDone)

    def _sent(self) -> NamingReport:
        self._stretches += 1
        folder = self._folder / str(self._stretches)
        folder.mkdir(parents=True)
        database = folder / "capture.aiflame"
        write_capture(_profile(), database)
        self.worker._send(folder, database, 0, 0)
        return self._heard()

    def _heard(self) -> NamingReport:
        report = FROM_NAMING.decode(self._ours.recv(1 << 16))
        assert isinstance(report, NamingReport)
        return report

    def wait_until_sent(self) -> None:
        deliveries = self.worker._deliveries.values()
        wait_until(lambda: not any(each.state().waiting_requests for each in deliveries))

    def metrics(self) -> dict[tuple[str, ...], float]:
        """What the agent tells Prometheus, once it has heard."""
        self.worker._report(NamingReport(self.worker._states()))
        self.vitals.note_report(self._heard())
        return {
            (sample.name, *sample.labels.values()): sample.value
            for family in self.vitals.collect()
            for sample in family.samples
        }

    def said(self) -> str:
        return self._log.read_text()


@pytest.fixture
def sender(tmp_path: Path) -> Iterator[_Sender]:
    found = _Sender(tmp_path / "agent", tmp_path / "log")
    yield found
    found.close()


@pytest.fixture
def server() -> Iterator[Server]:
    with serving(otlp.Collector()) as found:
        yield found


def test_what_was_dropped_before_a_new_configuration_is_told_after_it(
    sender: _Sender, server: Server
) -> None:
    # GIVEN a back-end that refuses a stretch
    flags = {"sinks.otlp.url": server.url}
    sender.configure(flags)
    server.answers = [Reply(400, b"never")]
    sender.send()
    sender.wait_until_sent()
    # WHEN the configuration is read again, with another size of the spool
    sender.configure({**flags, "spool_size": "100MB"})
    # THEN the next stretch tells of it, once
    assert sender.send()["not_delivered"] > 0
    assert "not_delivered" not in sender.send()


@pytest.mark.parametrize(
    ("where", "what", "error"),
    [
        (CaptureWriter, "processes", DiskFull("no space left on device")),
        (_Worker, "_encode", ForkEnded("the process that encodes it has ended")),
    ],
)
def test_what_was_dropped_is_told_after_a_stretch_that_could_not_be_sent(
    sender: _Sender,
    server: Server,
    monkeypatch: pytest.MonkeyPatch,
    where: type,
    what: str,
    error: Exception,
) -> None:
    # GIVEN a back-end that refuses a stretch, and another stretch that was lost
    sender.configure({"sinks.otlp.url": server.url})
    server.answers = [Reply(400, b"never")]
    sender.send()
    sender.wait_until_sent()
    sender.worker.take(Lost({"stretches_lost": 2}))

    # WHEN the next one finds no room on the disk, or nobody comes to the end of encoding it
    def fails(*_: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(where, what, fails)
        sender.fail_to_send()
    # THEN the one after tells of both, once.
    after = sender._sent()
    assert isinstance(after, StretchDone) and after.told == {"stretches_lost": 2}
    told = after.losses
    assert told["not_delivered"] == int(_profile().samples["count"].sum())
    assert told["stretches_lost"] >= 2
    assert not {"not_delivered", "stretches_lost"} & sender.send().keys()


class _Slow(otlp.Collector):
    """Answers nobody before it is released."""

    def __init__(self) -> None:
        super().__init__()
        self.released = threading.Event()

    def take(self, path: str, headers: Message, body: bytes) -> Reply:
        assert self.released.wait(60)
        return super().take(path, headers, body)


def test_a_request_on_its_way_comes_once_however_often_settings_change(sender: _Sender) -> None:
    receiver = _Slow()
    with serving(receiver) as server:
        # GIVEN a request that a back-end is slow to answer
        flags = {"sinks.otlp.url": server.url, "sinks.otlp.timeout_s": 60}
        sender.configure(flags)
        sender.send()
        wait_until(lambda: len(server.requests) == 1)
        # WHEN the settings change, change again, and are gone for a moment
        for changed in ({**flags, "sinks.otlp.timeout_s": 61}, {}, flags):
            sender.configure(changed)
        # THEN what comes meanwhile waits, and each stretch is sent once.
        told = sender.send()
        receiver.released.set()
        sender.wait_until_sent()
        assert len(server.requests) == 2
        assert "not_delivered" not in told.keys() | sender.send().keys()
        assert "the new settings are used once" in sender.said()
        sender.end()


def test_what_is_not_a_sinks_does_not_begin_it_anew(sender: _Sender, server: Server) -> None:
    flags = {"sinks.otlp.url": server.url, "sinks.clickhouse.url": server.url}
    sender.configure(flags)
    otlp_before, clickhouse_before = (sender.worker._deliveries[n] for n in ("otlp", "clickhouse"))
    # WHEN settings of the agent change THEN its queues go on, with what back-ends have asked for.
    sender.configure({**flags, "stretch": "31s"})
    assert sender.worker._deliveries["otlp"] is otlp_before
    # WHEN one sink's do THEN the other's goes on.
    sender.configure({**flags, "sinks.clickhouse.cluster": "c"})
    assert sender.worker._deliveries["otlp"] is otlp_before
    assert sender.worker._deliveries["clickhouse"] is not clickhouse_before
    # WHEN the host's name does, which is in what is sent THEN all begin anew.
    sender.configure({**flags, "node": "other"})
    assert sender.worker._deliveries["otlp"] is not otlp_before


def test_no_count_goes_back_with_a_new_configuration(sender: _Sender, server: Server) -> None:
    # GIVEN a back-end that has taken two stretches
    flags = {"sinks.otlp.url": server.url}
    sender.configure(flags)
    for _ in range(2):
        sender.send()
    sender.wait_until_sent()
    before = sender.metrics()["aiflame_export_sent_total", "otlp"]
    # WHEN the configuration is read again, and five more are taken before it is told
    sender.configure({**flags, "spool_size": "100MB"})
    for _ in range(5):
        sender.send()
    sender.wait_until_sent()
    # THEN all of them are counted
    assert sender.metrics()["aiflame_export_sent_total", "otlp"] == before / 2 * 7


def test_a_secret_that_is_away_while_sending_begins_costs_nothing(
    sender: _Sender, server: Server, tmp_path: Path
) -> None:
    # GIVEN an agent that has sent with a token, and whose process that sends is killed
    token = tmp_path / "token"
    token.write_text("first")
    token.chmod(0o600)
    flags = {"sinks.otlp.url": server.url, "sinks.otlp.token_file": str(token)}
    sender.configure(flags)
    sender.send()
    sender.wait_until_sent()
    before = sender.metrics()["aiflame_export_sent_total", "otlp"]
    config = load(None, flags, {})
    sender.end()
    # WHEN the next one is started while the token is being replaced
    token.unlink()
    sender.start()
    sender.worker.take(Configure(config))
    sender.send()
    (delivery,) = sender.worker._deliveries.values()
    wait_until(lambda: delivery.state().retries)
    assert sender.metrics()["aiflame_spool_requests", "otlp"] == 1
    assert "No such file" in sender.said()
    token.write_text("second")
    # THEN what waited is sent, and nothing is lost
    sender.wait_until_sent()
    assert [each["Authorization"] for each in server.requests] == ["Bearer first", "Bearer second"]
    assert "not_delivered" not in sender.send()
    assert sender.metrics()["aiflame_export_sent_total", "otlp"] >= 2 * before


def test_a_stretch_says_which_losses_of_the_collector_it_has_told_of(sender: _Sender) -> None:
    # GIVEN a stretch that naming has lost itself, and two that the collector has
    sender.configure({})
    (sender.worker._spool._directory.parent / "9").mkdir(parents=True)
    sender.worker._give_up(sender.worker._spool._directory.parent / "9", ValueError("no window"))
    sender._heard()
    own = sender._sent()
    assert isinstance(own, StretchDone)
    # THEN one that was sent before the collector has told of them says that it has none of those,
    assert own.losses["stretches_lost"] == 1 and own.told == {}
    # the next one that it has, and the one after that nothing.
    sender.worker.take(Lost({"stretches_lost": 2}))
    for losses, told in ((2, {"stretches_lost": 2}), (0, {})):
        found = sender._sent()
        assert isinstance(found, StretchDone)
        assert (found.losses.get("stretches_lost", 0), found.told) == (losses, told)


def test_a_sink_that_cannot_be_made_is_counted_and_tried_again(
    sender: _Sender, server: Server, tmp_path: Path
) -> None:
    # GIVEN a spool that cannot be used for now
    spool = tmp_path / "agent" / "spool"
    spool.parent.mkdir()
    spool.touch()
    sender.configure({"sinks.otlp.url": server.url})
    # WHEN two stretches come
    sender.send()
    lost = sender.send()
    # THEN what the back-end misses is counted, told with the next, and logged
    reason = ("aiflame_export_dropped_total", "otlp", "the sink does not work")
    samples = int(_profile().samples["count"].sum())
    assert sender.metrics()[reason] == 2 * samples
    assert lost["not_delivered"] == samples
    assert sender.metrics()["aiflame_spool_requests", "otlp"] == 0
    assert sender.said().count("sink otlp does not work, and is tried again") == 1
    # AND once it can be used, the next stretch is sent, which tells of the one before
    spool.unlink()
    assert sender.send()["not_delivered"] == samples
    sender.wait_until_sent()
    assert len(server.requests) == 1
    assert sender.metrics()[reason] == 2 * samples
    assert "sink otlp works again" in sender.said()


def test_what_waits_is_not_forgotten_while_nobody_can_look(sender: _Sender) -> None:
    # GIVEN a request that waits for a back-end
    sender.configure({"sinks.otlp.url": "http://127.0.0.1:1"})
    sender.send()
    assert sender.metrics()["aiflame_spool_requests", "otlp"] == 1
    # WHEN the next process that sends cannot look into the spool
    sender.end()
    spool = sender.worker._spool._directory
    spool.rename(spool.with_name("elsewhere"))
    spool.touch()
    sender.start()
    sender.configure({"sinks.otlp.url": "http://127.0.0.1:1"})
    # THEN it is not said that nothing waits.
    assert sender.metrics()["aiflame_spool_requests", "otlp"] == 1


def test_a_file_of_the_agent_that_is_away_stops_no_sink(
    sender: _Sender, server: Server, tmp_path: Path
) -> None:
    # GIVEN a configuration with a token for who asks for metrics
    token = tmp_path / "token"
    token.write_text("x")
    token.chmod(0o600)
    flags = {"sinks.otlp.url": server.url, "health_token_file": str(token)}
    config = load(None, flags, {})
    # WHEN sending begins while it is being replaced THEN it begins.
    token.unlink()
    sender.worker.take(Configure(config))
    sender.send()
    sender.wait_until_sent()
    assert len(server.requests) == 1


class _OneLeftOut(_OneLabelling):
    """Leaves out all but the first process."""

    def of(self, processes: Sequence[Process]) -> list[Labels | None]:
        return [Labels(service="train"), *[None] * (len(processes) - 1)]


@pytest.mark.parametrize("command_lines", [False, True])
def test_captures_have_what_is_sent_and_no_more(
    sender: _Sender, server: Server, tmp_path: Path, command_lines: bool
) -> None:
    # GIVEN rules that leave out one of two processes, a back-end, and a directory for captures
    sender.worker._labelling = cast(Labelling, _OneLeftOut())
    directory = tmp_path / "captures"
    flags = {"sinks.otlp.url": server.url, "sinks.captures.directory": str(directory)}
    sender.configure({**flags, "sinks.captures.command_lines": str(command_lines).lower()})
    # WHEN a stretch is sent
    sender.send()
    sender.wait_until_sent()
    # THEN the capture is of that process alone, with as many samples as the back-end has
    (capture,) = directory.iterdir()
    kept, whole = read_capture(capture), _profile()
    assert [each.pid for each in kept.processes] == [whole.processes[0].pid]
    assert kept.labels == (Labels(service="train"),)
    sent = sender.metrics()["aiflame_export_sent_total", "otlp"]
    assert 0 < kept.samples["count"].sum() == sent < whole.samples["count"].sum()
    # AND has what it was called with where that is allowed
    line = whole.processes[0].command_line
    assert [each.command_line for each in kept.processes] == [line if command_lines else ""]
    assert line
    assert whole.processes[1].executable.encode() not in capture.read_bytes()
