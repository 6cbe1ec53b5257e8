# SPDX-License-Identifier: Apache-2.0
"""What an agent says of its health."""

from __future__ import annotations

import contextlib
import inspect
import os
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiflame.agent.errors import AiflameError, UsageError
from aiflame.agent.fleet import agent as fleet_agent
from aiflame.agent.fleet import vitals as vitals_module
from aiflame.agent.fleet.config import AgentSettings, load
from aiflame.agent.fleet.cost import CostController
from aiflame.agent.fleet.health import HealthEndpoint, HealthServer
from aiflame.agent.fleet.log import Log
from aiflame.agent.fleet.memory import MemoryUse
from aiflame.agent.fleet.naming import NamingProcess
from aiflame.agent.fleet.naming_messages import (
    CgroupsLeftOut,
    NamingReport,
    SinkState,
    StretchDone,
    StretchLost,
)
from aiflame.agent.fleet.probe import trouble
from aiflame.agent.fleet.stretches import Stretches
from aiflame.agent.fleet.vitals import Vitals
from aiflame.agent.recording.chance import Chances, Load
from aiflame.agent.recording.recorder import Progress
from aiflame.agent.typed_messages import encode
from deployment import container
from prometheus_client.parser import text_string_to_metric_families
from windows import RandomRecording

_ANYWHERE = "0.0.0.0"  # noqa: S104 - it is refused
_OTLP = SinkState(
    sent_requests=3,
    sent_samples=90,
    sent_bytes=700,
    retries=2,
    waiting_requests=1,
    waiting_bytes=50,
    dropped_samples={"too old": 7},
    last_sent_unix_s=1.5e9,
    why_away="",
)


def _done(
    sinks: dict[str, SinkState] | None = None,
    losses: dict[str, int] | None = None,
    containers: int = 0,
    unresolved: int = 0,
) -> StretchDone:
    return StretchDone(sinks or {}, "x", 0, 0, losses or {}, {}, containers, unresolved)


def _settings(**given: object) -> AgentSettings:
    return load(None, {"health": "127.0.0.1:0", **given}, {}).agent


@pytest.fixture
def vitals() -> Vitals:
    return Vitals()


@pytest.fixture
def server(vitals: Vitals) -> Iterator[HealthServer]:
    found = HealthServer(_settings(), vitals)
    yield found
    with contextlib.suppress(OSError):
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
    later_s = time.monotonic() + 101
    monkeypatch.setattr(vitals_module.time, "monotonic", lambda: later_s)
    code, words = _get(server.url + "/healthz")
    assert code == 503 and words.startswith("no window for 101 s")


class _Clock:
    """Of an agent, which goes on when it is told to."""

    def __init__(self) -> None:
        self.now_s = 1e6

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> _Clock:
    made = _Clock()
    monkeypatch.setattr(vitals_module, "time", made)
    return made


def test_an_agent_that_keeps_no_window_is_healthy_and_not_ready(clock: _Clock) -> None:
    vitals, window = Vitals(), RandomRecording(1).windows(1)[0]
    server = HealthServer(_settings(), vitals)

    def windows(count: int, *, is_kept: bool) -> None:
        for _ in range(count):  # of a minute each, as where the budget is exceeded
            clock.now_s += 60
            vitals.note_window(window, is_kept=is_kept)
            vitals.note_report(_done())

    try:
        # GIVEN windows for which there is no room from the first on
        windows(1, is_kept=False)
        assert _get(server.url + "/healthz") == (200, "ok\n")
        assert _get(server.url + "/readyz") == (503, "no window was kept yet: the log says why\n")
        # WHEN there is room THEN it is ready, and stays so where one or two are lost
        windows(1, is_kept=True)
        assert _get(server.url + "/readyz") == (200, "ok\n")
        windows(2, is_kept=False)
        clock.now_s += 60
        assert _get(server.url + "/readyz") == (200, "ok\n")
        # AND WHEN none is kept for long THEN it is not, and is not to be started anew
        windows(2, is_kept=False)
        code, words = _get(server.url + "/readyz")
        assert code == 503 and words.startswith("no window was kept for 300 s")
        assert _get(server.url + "/healthz") == (200, "ok\n")
        # AND with the next one that is, it is again
        windows(1, is_kept=True)
        assert _get(server.url + "/readyz") == (200, "ok\n")
    finally:
        server.close()


def test_an_agent_whose_naming_process_does_not_stay_is_healthy_and_not_ready(
    clock: _Clock,
) -> None:
    vitals, window = Vitals(), RandomRecording(1).windows(1)[0]
    server = HealthServer(_settings(), vitals)

    def passes(seconds: int, *, life_s: int = 0) -> None:
        """Lets time pass, in which a process lives so long each time, 0 for none."""
        for _ in range(0, seconds, 10):
            clock.now_s += 10
            vitals.note_window(window, is_kept=True)
            if life_s:
                vitals.note_naming_started()
                clock.now_s += life_s
                vitals.note_window(window, is_kept=True)
                vitals.note_naming_ended()

    try:
        # GIVEN an agent that has just begun, and whose naming process cannot be started
        passes(290)
        assert _get(server.url + "/readyz") == (200, "ok\n")
        # WHEN that goes on THEN it is not ready, and is not to be started anew
        passes(20)
        code, words = _get(server.url + "/readyz")
        assert code == 503 and words.startswith("nothing was named and queued for 310 s")
        assert _get(server.url + "/healthz") == (200, "ok\n")
        # AND WHEN it can be, and dies again and again, THEN it is not either
        passes(60, life_s=100)
        assert _get(server.url + "/readyz")[0] == 503
        # AND WHEN it names THEN it is, and so it is while one lives, whatever there is to name
        vitals.note_naming_started()
        vitals.note_report(_done())
        assert _get(server.url + "/readyz") == (200, "ok\n")
        passes(3600)
        assert _get(server.url + "/readyz") == (200, "ok\n")
        # AND that this one dies is no trouble until there is none for long
        vitals.note_naming_ended()
        passes(290)
        assert _get(server.url + "/readyz") == (200, "ok\n")
        passes(20)
        assert _get(server.url + "/readyz")[0] == 503
        # AND one that has lived for long is as good as one that has named
        vitals.note_naming_started()
        passes(150)
        assert _get(server.url + "/readyz") == (200, "ok\n")
    finally:
        server.close()


class _Naming:
    """A process that names, until it is killed."""

    def __init__(self, *_: object) -> None:
        self.ending = ""
        self.last_words: list[NamingReport] = []

    def tell(self, _: object) -> None: ...

    def pump(self) -> None: ...

    def look(self) -> float:
        return 0.0

    def kill_if_hung(self) -> bool:
        return False

    def close(self) -> None: ...

    def reports(self) -> list[NamingReport]:
        return self.last_words if self.ending else []

    def ended(self) -> str:
        """Ends here, where it is about to."""
        self.ending = self.ending or ("has ended: SIGKILL" if self.last_words else "")
        return self.ending


def _agent(
    tmp_path: Path, vitals: Vitals, steers: CostController | None = None
) -> fleet_agent._Agent:
    log = Log(os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT))
    parts: dict[str, Any] = dict.fromkeys(inspect.signature(fleet_agent._Agent).parameters)
    parts |= {"config": load(None, {"directory": str(tmp_path / "agent")}, {}), "log": log}
    parts |= {"vitals": vitals, "stretches": Stretches(tmp_path / "agent", log), "steers": steers}
    parts["recorder"] = SimpleNamespace(table=None, leave_out=lambda _: None)
    parts["signals"] = SimpleNamespace(take_copy_request=bool, take_reload_request=bool)
    return fleet_agent._Agent(**parts)


def test_an_agent_takes_note_that_its_naming_process_is_gone(
    clock: _Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_agent, "NamingProcess", _Naming)
    vitals = Vitals()
    agent = _agent(tmp_path, vitals)
    # GIVEN one that has run for long
    agent._start_naming()
    clock.now_s += 1000
    agent._every_interval(Progress(0, 0, 0, 0))
    vitals.note_window(RandomRecording(1).windows(1)[0], is_kept=True)
    assert vitals.unready == ""
    # WHEN it ends, and there is no other one for long
    naming: Any = agent._naming
    naming.ending = "has ended: SIGKILL"
    agent._every_interval(Progress(0, 0, 0, 0))
    clock.now_s += 301
    vitals.note_window(RandomRecording(1).windows(1)[0], is_kept=True)
    # THEN the agent is not ready
    assert vitals.unready.startswith("nothing was named and queued for 301 s")


def test_what_a_naming_process_has_said_last_is_heard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_agent, "NamingProcess", _Naming)
    vitals = Vitals()
    agent = _agent(tmp_path, vitals)
    agent._start_naming()
    naming: Any = agent._naming
    # WHEN it says that a stretch is lost, and ends before it is heard THEN it is heard once.
    naming.last_words = [StretchLost({}, "1")]
    for _ in range(2):
        agent._every_interval(Progress(0, 0, 0, 0))
    assert agent._naming is None
    metrics = {x.name: x.value for family in vitals.collect() for x in family.samples}
    assert metrics["aiflame_stretches_lost_total"] == 1


def test_what_it_has_said_last_is_read_though_it_has_not_read_all() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    naming: Any = object.__new__(NamingProcess)
    naming._channel = ours
    # WHEN it is killed after it has told of something, with messages that it has not taken
    ours.send(b"more windows")
    theirs.send(encode(StretchLost({}, "1")))
    theirs.close()
    assert [*naming.reports()] == [StretchLost({}, "1")]
    ours.close()


def test_an_agent_whose_naming_process_hung_is_not_ready_until_another_one_works(
    clock: _Clock,
) -> None:
    vitals, window = Vitals(), RandomRecording(1).windows(1)[0]

    def unready_after(seconds: float, unheard_s: float = 0.0) -> str:
        clock.now_s += seconds
        vitals.note_window(window, is_kept=True)
        vitals.note_naming_unheard(unheard_s)
        return vitals.unready

    # GIVEN one that has worked, and takes nothing any more
    vitals.note_naming_started()
    vitals.note_report(_done())
    assert unready_after(500) == ""
    assert unready_after(1100, unheard_s=1100).startswith("the process that names and sends has")
    # WHEN it is killed THEN that is no success
    vitals.note_naming_killed()
    vitals.note_naming_ended()
    assert unready_after(1).startswith("nothing was named and queued for 11")
    # AND the next one that hangs is none
    vitals.note_naming_started()
    assert unready_after(200, unheard_s=199).startswith("nothing was named and queued for 13")
    # AND one that takes what comes is
    assert unready_after(1) == ""


def test_a_report_without_sense_ends_no_recording(tmp_path: Path) -> None:
    vitals = Vitals()
    agent: Any = _agent(tmp_path, vitals)
    agent._health, excluded = SimpleNamespace(unready=""), []
    agent._recorder.exclude = excluded.append
    agent._untold = Counter({"windows_lost": 2})
    # GIVEN reports of a naming process that was taken over
    told = {"windows_lost": 1, "stretches_lost": -1, "no such": -7}
    agent._take_report(StretchDone({}, "1", 2, 3, {"no such": 4, "ring_full": 5}, told, 0, 0))
    agent._take_report(CgroupsLeftOut({}, (-1, 0, 7)))
    # THEN nobody is told of what is no loss, and what fits is taken
    assert agent._untold == Counter({"windows_lost": 1})
    assert excluded == [{0, 7}]
    lost = [x for family in vitals.collect() for x in family.samples if "lost_total" in x.name]
    assert {x.labels["where"] for x in lost if x.labels} == {"ring_full"}


def test_that_rules_cannot_be_followed_makes_an_agent_not_ready(vitals: Vitals) -> None:
    reasons = ["3 containers whose pods are not known"]
    server = HealthServer(_settings(), vitals, lambda: reasons[-1])
    try:
        vitals.note_window(RandomRecording(1).windows(1)[0], is_kept=True)
        # THEN it records all the same, and is not to be begun anew
        assert _get(server.url + "/readyz") == (503, f"{reasons[0]}\n")
        assert _get(server.url + "/healthz") == (200, "ok\n")
        reasons.append("")
        assert _get(server.url + "/readyz") == (200, "ok\n")
    finally:
        server.close()


def _metrics(server: HealthServer) -> dict[tuple[str, ...], float]:
    code, text = _get(server.url + "/metrics")
    assert code == 200
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_metrics_are_what_prometheus_reads(server: HealthServer, vitals: Vitals) -> None:
    # GIVEN three windows, of which one found no room, two stretches of them, and a sink
    windows = RandomRecording(3).windows(3)
    for number, window in enumerate(windows):
        vitals.note_window(window, is_kept=number > 0)
    vitals.note_report(_done({"otlp": _OTLP}, {"stack_lost": 2}))
    losses = {"stack_lost": 1, "naming_behind": 40}
    vitals.note_report(_done({"otlp": _OTLP}, losses, containers=9, unresolved=2))
    vitals.note_report(StretchLost({"otlp": _OTLP}, "z"))
    vitals.note_memory(MemoryUse(1, 2, 3, 4, 5), 150)
    vitals.note_cpu(2.5)
    vitals.note_cpu(0.25)  # what an orphan took is in no sum any more
    vitals.note_cpu(1.25)
    vitals.note_chances(Chances(8, thrift=16, details_after_ns=1_000_000_000, delay_factor=2))
    vitals.note_device_duty(0.25)
    vitals.note_budget(0.03, is_over=True)
    # WHEN they are asked for
    found = _metrics(server)
    # THEN they are what there was
    assert found["aiflame_windows_total",] == 3
    assert found["aiflame_windows_lost_total",] == found["aiflame_stretches_lost_total",] == 1
    assert found["aiflame_stretches_total",] == 2
    on_cpu = sum(int(w.samples["count"][w.samples["kind"] == 0].sum()) for w in windows)
    assert found["aiflame_samples_total", "on_cpu"] == on_cpu
    # AND losses are those of stretches: what a window misses may come with a later one
    assert found["aiflame_lost_total", "stack_lost"] == 3
    assert found["aiflame_lost_total", "naming_behind"] == 40
    assert sum(metric == "aiflame_lost_total" for metric, *_ in found) == 2
    assert found["aiflame_self_cpu_seconds_total",] == 3.5
    assert found["aiflame_resident_bytes",] == 11 and found["aiflame_map_bytes",] == 4
    of_processes, of_programs = (
        sum(getattr(window.cost, part) for window in windows) / 1e9 for part in ("cpu_ns", "bpf_ns")
    )
    assert found["aiflame_cost_cpu_seconds_total", "processes"] == of_processes
    assert found["aiflame_cost_cpu_seconds_total", "programs"] == of_programs
    assert found["aiflame_cost_limit_cpus",] == 0.03 and found["aiflame_cost_over_limit",] == 1
    assert found["aiflame_duty_ratio",] == 0.125
    assert found["aiflame_thrift",] == 16
    assert found["aiflame_delay_factor",] == 2
    assert found["aiflame_short_lived_joined",] == 1
    assert found["aiflame_device_duty_ratio",] == 0.25
    assert found["aiflame_containers",] == 9 and found["aiflame_unresolved_containers",] == 2
    assert found["aiflame_export_sent_total", "otlp"] == 90
    assert found["aiflame_export_retried_total", "otlp"] == 2
    assert found["aiflame_export_dropped_total", "too old", "otlp"] == 7
    assert found["aiflame_spool_bytes", "otlp"] == 50
    assert found["aiflame_last_export_timestamp_seconds", "otlp"] == 1.5e9


def test_an_agent_tells_of_its_budget_and_that_it_is_over_it(
    server: HealthServer, vitals: Vitals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steers = CostController(2)
    agent = _agent(tmp_path, vitals, steers)
    monkeypatch.setattr(agent, "_put_with_room", lambda _: None)
    window = RandomRecording(1).windows(1)[0]
    agent._give(window)
    found = _metrics(server)
    assert found["aiflame_cost_limit_cpus",] == 0.03 and found["aiflame_cost_over_limit",] == 0
    # WHEN it takes half of a CPU for long THEN it says so
    while not steers.is_over:
        steers.next(Load(60 * 10**9, {}, 0, 0, 0, own_cpu_ns=30 * 10**9, bpf_ns=None))
    agent._give(window)
    assert _metrics(server)["aiflame_cost_over_limit",] == 1


def test_an_agent_that_takes_no_stack_of_waits_tells_of_no_budget(
    server: HealthServer, vitals: Vitals
) -> None:
    vitals.note_window(RandomRecording(1).windows(1)[0], is_kept=True)
    assert not [metric for metric, *_ in _metrics(server) if metric.startswith("aiflame_cost_")]


def test_counters_go_on_where_the_process_that_sends_is_a_new_one(
    server: HealthServer, vitals: Vitals
) -> None:
    def told(samples: int, dropped: int, last_s: float = 0.0) -> None:
        counts = {"sent_samples": samples, "dropped_samples": {"too old": dropped}}
        state = replace(_OTLP, **counts, last_sent_unix_s=last_s)
        vitals.note_report(NamingReport({"otlp": state}))

    # GIVEN a process that has sent 90 samples, and another one that has sent more already
    told(90, 7, 1.5e9)
    vitals.note_naming_started()
    assert _metrics(server)["aiflame_spool_bytes", "otlp"] == 50  # as far as is known
    told(100, 8)
    told(106, 9)
    # THEN no sample is forgotten, nor when the last was taken
    found = _metrics(server)
    assert found["aiflame_export_sent_total", "otlp"] == 90 + 106
    assert found["aiflame_export_dropped_total", "too old", "otlp"] == 7 + 9
    assert found["aiflame_last_export_timestamp_seconds", "otlp"] == 1.5e9


def test_reasons_of_drops_are_no_flood_of_series(server: HealthServer, vitals: Vitals) -> None:
    reasons = {f"an error at {number}": 1 for number in range(1000)}
    vitals.note_report(NamingReport({"otlp": replace(_OTLP, dropped_samples=reasons)}))
    found = {k: v for k, v in _metrics(server).items() if k[0] == "aiflame_export_dropped_total"}
    assert sum(found.values()) == 1000
    assert len(found) == 21


def test_each_metric_is_described(server: HealthServer, vitals: Vitals) -> None:
    vitals.note_report(NamingReport({"otlp": _OTLP}))
    vitals.note_memory(MemoryUse(1, 2, 3, 4), 150)
    vitals.note_budget(0.03, is_over=False)
    described = (Path(__file__).parents[2] / "deploy/README.md").read_text()
    families = [*text_string_to_metric_families(_get(server.url + "/metrics")[1])]
    assert len(families) > 10
    for family in families:
        total = "_total" if family.type == "counter" else ""
        assert f"`{family.name}{total}" in described, family.name


def _connect(server: HealthServer) -> socket.socket:
    host, _, port = server.url.rpartition("/")[2].partition(":")
    return socket.create_connection((host.replace(_ANYWHERE, "127.0.0.1"), int(port)), timeout=10)


def _all_of(connection: socket.socket) -> bytes:
    """Returns what is sent until the end, which a reset is too."""
    found = b""
    with contextlib.suppress(ConnectionResetError):
        while more := connection.recv(1 << 16):
            found += more
    return found


def test_who_never_ends_a_request_is_ended_and_nobody_waits(server: HealthServer) -> None:
    # GIVEN one who sends a byte of a header each time that somebody else was answered
    with _connect(server) as slow:
        slow.sendall(b"GET /healthz HTTP/1.1\r\nX: ")
        slow.setblocking(False)
        answered = 0
        # WHEN that goes on THEN the server ends it, however recently it sent something
        is_open = True
        while is_open:
            assert _get(server.url + "/nothing")[0] == 404
            answered += 1
            try:
                slow.send(b"a")
                is_open = slow.recv(1) != b""
            except BlockingIOError:
                time.sleep(0.01)  # what the server's deadline is made of
            except OSError:
                is_open = False
        # AND others were answered all the time
        assert answered > 3


def test_many_who_say_nothing_keep_nobody_waiting(server: HealthServer) -> None:
    # GIVEN more connections than the server has, on which nothing is said
    with contextlib.ExitStack() as idle:
        connections = [idle.enter_context(_connect(server)) for _ in range(200)]
        # THEN others are answered, and the oldest had to go
        assert _get(server.url + "/nothing")[0] == 404
        assert _all_of(connections[0]) == b""


def test_who_never_reads_keeps_nobody_waiting(server: HealthServer) -> None:
    with _connect(server) as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        deaf.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        assert _get(server.url + "/metrics")[0] == 200


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET /nothing HTTP/1.1\r\nX: " + b"a" * 100_000, b"431"),
        (b"GET /nothing HTTP/1.1\r\n" + b"X: a\r\n" * 20_000, b"431"),
        (b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", b"400"),  # TLS, where there is none
        (b"\r\n\r\n", b"400"),
        (b"GET /nothing\r\n\r\n", b"400"),
        (b"GET \xff\xfe\x00 HTTP/1.1\r\n\r\n", b"404"),
        (b"POST /metrics HTTP/1.1\r\nContent-Length: 9\r\n\r\n", b"405"),
        (b"GET /nothing HTTP/1.1\r\n\r\n" + b"b" * 100_000, b"404"),
    ],
)
def test_odd_requests_are_refused(
    server: HealthServer, request_bytes: bytes, status: bytes
) -> None:
    with _connect(server) as odd:
        odd.sendall(request_bytes)
        odd.shutdown(socket.SHUT_WR)
        assert _all_of(odd).startswith(b"HTTP/1.1 " + status + b" ")
    assert _get(server.url + "/nothing")[0] == 404


def _probed(
    config: Path, environment: dict[str, str], probe: str = "livenessProbe"
) -> tuple[int, str]:
    """Returns how a probe of the manifest ends, and what it says."""
    command = container()[probe]["exec"]["command"]
    # The interpreter of the image is this one, and the agent's file is there.
    (file,) = container()["args"][2:]
    assert file in command
    words = [sys.executable, *(str(config) if word == file else word for word in command[1:])]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stderr


def test_a_probe_asks_as_the_kubelet_runs_it(
    server: HealthServer, vitals: Vitals, tmp_path: Path
) -> None:
    config = tmp_path / "agent.toml"
    config.write_text("stretch = 60\n")
    address = server.url.removeprefix("http://")

    def probed() -> tuple[int, str]:
        return _probed(config, {"AIFLAME_HEALTH": address})

    # GIVEN an agent that has not recorded anything THEN it is not healthy, and says why
    assert probed() == (1, "no window was recorded yet\n")
    # AND once it has, it is
    vitals.note_window(RandomRecording(1).windows(1)[0], is_kept=True)
    assert probed() == (0, "")
    # AND that of readiness asks for more
    lost = Vitals()
    lost.note_window(RandomRecording(1).windows(1)[0], is_kept=False)
    other = HealthServer(_settings(), lost)
    variables = {"AIFLAME_HEALTH": other.url.removeprefix("http://")}
    assert _probed(config, variables) == (0, "")
    unready = (1, "no window was kept yet: the log says why\n")
    assert _probed(config, variables, "readinessProbe") == unready
    other.close()
    # AND a file is as good as a variable
    config.write_text(f'health = "{address}"\n')
    assert _probed(config, {}) == (0, "")
    config.write_text("stretch = 60\n")
    # AND WHEN nobody listens THEN it is not
    server.close()
    code, words = probed()
    assert code == 1 and "Connection refused" in words


def test_a_probe_of_an_agent_without_an_address_says_so(tmp_path: Path) -> None:
    config = tmp_path / "agent.toml"
    config.write_text("health = ''\n")
    for environment, file in (({}, str(config)), ({"AIFLAME_HEALTH": ""}, "")):
        assert "`health` is empty" in trouble(file, environment, "/healthz")
    assert "refused" in trouble(str(config), {"AIFLAME_HEALTH": "127.0.0.1:1"}, "/healthz")


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1", b"\xff\r\n\r\n", b"SSH-2.0-x\r\n"])
def test_a_probe_takes_no_other_answer_for_health(answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        found: list[str] = []
        address = f"127.0.0.1:{other.getsockname()[1]}"
        asking = threading.Thread(
            target=lambda: found.append(trouble("", {"AIFLAME_HEALTH": address}, "/healthz"))
        )
        asking.start()
        connection, _ = other.accept()
        with connection:
            connection.recv(100)
            connection.sendall(answer)
        asking.join()
    assert found[0] != ""


def test_a_head_has_no_body(server: HealthServer) -> None:
    with _connect(server) as asking:
        asking.sendall(b"HEAD /healthz HTTP/1.0\r\n\r\n")
        head, _, body = _all_of(asking).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503 ") and body == b""


def test_an_end_does_not_wait_for_who_is_connected(vitals: Vitals) -> None:
    server = HealthServer(_settings(), vitals)
    with _connect(server) as idle:
        server.close()
        assert _all_of(idle) == b""
    with pytest.raises(ConnectionRefusedError):
        _connect(server)


def test_a_taken_address_is_said(server: HealthServer, vitals: Vitals) -> None:
    address = server.url.removeprefix("http://")
    with pytest.raises(AiflameError, match=f"no health endpoint at {address}: Address already"):
        HealthServer(_settings(health=address), vitals)


def test_a_taken_address_is_tried_again(
    server: HealthServer, vitals: Vitals, tmp_path: Path
) -> None:
    address = server.url.removeprefix("http://")
    with (tmp_path / "log").open("w") as file:
        log = Log(file.fileno())

        def said() -> list[str]:
            lines = (tmp_path / "log").read_text().splitlines()
            return [line.split("aiflame agent: ", 1)[1] for line in lines]

        # GIVEN that another agent has the address THEN that is said once
        endpoint = HealthEndpoint(_settings(health=address), vitals, log)
        endpoint.keep()
        (line,) = said()
        assert line.startswith(f"no health endpoint at {address}: Address already in use")
        assert line.endswith("; it is tried again each minute")
        # WHEN that one has ended THEN this one answers, which is said once
        server.close()
        for _ in range(2):
            endpoint.keep()
        assert said()[1:] == [f"health and metrics: {server.url}"]
        assert _get(server.url + "/healthz")[0] == 503
        endpoint.close()
        with pytest.raises(urllib.error.URLError):
            _get(server.url + "/healthz")


def test_where_none_is_wanted_there_is_none(vitals: Vitals, tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as file:
        endpoint = HealthEndpoint(_settings(health=""), vitals, Log(file.fileno()))
        endpoint.keep()
        endpoint.close()
    assert not (tmp_path / "log").read_text()


@pytest.mark.parametrize("address", ["7575", "localhost:7575", "127.0.0.1:70000", "127.0.0.1:x"])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(UsageError, match="health: not an address"):
        _settings(health=address)


def _certify(folder: Path) -> tuple[Path, Path]:
    """Makes a key and a certificate."""
    key, certificate = folder / "key", folder / "cert"
    made = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2"
    words = ("-subj", "/CN=test", "-addext", "subjectAltName=IP:127.0.0.1")
    subprocess.run(
        [*made.split(), "-keyout", key, "-out", certificate, *words],
        check=True,
        capture_output=True,
    )
    return key, certificate


@pytest.fixture
def guarded(tmp_path: Path, vitals: Vitals) -> Iterator[tuple[HealthServer, ssl.SSLContext]]:
    """A server that is open to others, whose token is "secret", and how to reach it."""
    key, certificate = _certify(tmp_path)
    token = tmp_path / "token"
    token.touch(0o600)
    token.write_text("secret\n")
    settings = _settings(
        health=f"{_ANYWHERE}:0",
        health_token_file=str(token),
        health_cert_file=str(certificate),
        health_key_file=str(key),
    )
    server = HealthServer(settings, vitals)
    yield server, ssl.create_default_context(cafile=str(certificate))
    server.close()


def test_it_is_open_to_others_with_tls_and_a_token_only(
    guarded: tuple[HealthServer, ssl.SSLContext],
) -> None:
    with pytest.raises(UsageError, match="open to others"):
        _settings(health=f"{_ANYWHERE}:0")
    # GIVEN a certificate and a token THEN who has the token is answered, by TLS, and nobody else
    server, context = guarded
    url = server.url.replace(_ANYWHERE, "127.0.0.1")
    assert _get(f"{url}/metrics", "secret", context)[0] == 200
    assert _get(f"{url}/metrics", "Secret", context)[0] == 401
    assert _get(f"{url}/metrics", "", context)[0] == 401
    with _connect(server) as plain:
        plain.sendall(b"GET /metrics HTTP/1.1\r\nAuthorization: Bearer secret\r\n\r\n")
        assert b"aiflame" not in _all_of(plain)


@pytest.mark.parametrize("host", [_ANYWHERE, "127.0.0.1"])
def test_a_probe_asks_with_tls_and_token_where_the_agent_wants_them(
    guarded: tuple[HealthServer, ssl.SSLContext], vitals: Vitals, tmp_path: Path, host: str
) -> None:
    # GIVEN an agent that is open to others, and what it was told, in its file or in variables
    server, _ = guarded
    given = {
        "health": server.url.removeprefix("https://").replace(_ANYWHERE, host),
        "health_token_file": str(tmp_path / "token"),
        "health_cert_file": str(tmp_path / "cert"),
        "health_key_file": str(tmp_path / "key"),
    }
    vitals.note_window(RandomRecording(1).windows(1)[0], is_kept=True)
    whole, empty = tmp_path / "agent.toml", tmp_path / "empty.toml"
    whole.write_text("".join(f"{key} = '{value}'\n" for key, value in given.items()))
    empty.write_text("")
    variables = {f"AIFLAME_{key.upper()}": value for key, value in given.items()}
    # THEN its probe is answered
    assert _probed(whole, {}) == (0, "")
    assert _probed(empty, variables) == (0, "")
    # AND a variable goes over the file, whichever way it says it
    assert _probed(whole, {"AIFLAME_HEALTH_TOKEN": "other"}) == (1, "a token is needed\n")
    # AND still is once certificate and token were replaced
    _certify(tmp_path)
    (tmp_path / "token").write_text("new\n")
    assert _probed(whole, {}) == (0, "")
    # AND who has another certificate is not sent the token
    (tmp_path / "other").mkdir()
    _, other = _certify(tmp_path / "other")
    code, words = _probed(whole, {"AIFLAME_HEALTH_CERT_FILE": str(other)})
    assert code == 1 and "another certificate" in words


def test_a_probe_says_what_it_cannot_read(
    guarded: tuple[HealthServer, ssl.SSLContext], tmp_path: Path
) -> None:
    server, _ = guarded
    config = tmp_path / "agent.toml"
    address = {"AIFLAME_HEALTH": server.url.removeprefix("https://")}
    for text, words in (
        ("health =", f"{config}: "),
        ("health_token_file = '/nowhere'", "No such file or directory: '/nowhere'"),
        (f"health_cert_file = '{config}'", "Invalid PEM"),
    ):
        config.write_text(text)
        code, said = _probed(config, address)
        assert code == 1 and words in said and "Traceback" not in said


def test_certificates_and_tokens_that_are_replaced_are_read_again(
    guarded: tuple[HealthServer, ssl.SSLContext], tmp_path: Path
) -> None:
    server, before = guarded
    url = server.url.replace(_ANYWHERE, "127.0.0.1")
    # GIVEN files that are being written THEN those before go on
    (tmp_path / "token").write_text("")
    (tmp_path / "new").mkdir()
    shutil.copy(_certify(tmp_path / "new")[1], tmp_path / "cert")  # and the key is to come
    assert _get(f"{url}/metrics", "secret", before)[0] == 200
    (tmp_path / "cert").write_text("")
    assert _get(f"{url}/metrics", "secret", before)[0] == 200
    # WHEN they are whole
    (tmp_path / "token").write_text("another\n")
    _, certificate = _certify(tmp_path)
    context = ssl.create_default_context(cafile=str(certificate))
    # THEN they hold, and the others do not
    assert _get(f"{url}/metrics", "another", context)[0] == 200
    assert _get(f"{url}/metrics", "secret", context)[0] == 401
    with pytest.raises(OSError, match="CERTIFICATE_VERIFY_FAILED"):
        _get(f"{url}/metrics", "another", before)


def test_who_never_ends_the_handshake_of_tls_keeps_nobody_waiting(
    guarded: tuple[HealthServer, ssl.SSLContext],
) -> None:
    server, context = guarded
    url = server.url.replace(_ANYWHERE, "127.0.0.1")
    # GIVEN many who say nothing, and one who begins a handshake
    with contextlib.ExitStack() as stuck:
        for _ in range(100):
            stuck.enter_context(_connect(server))
        begun = stuck.enter_context(_connect(server))
        begun.sendall(b"\x16\x03\x01\x02\x00\x01")
        # THEN others are answered
        assert _get(f"{url}/nothing", "secret", context)[0] == 404
        # AND it is ended
        assert _all_of(begun) == b""
