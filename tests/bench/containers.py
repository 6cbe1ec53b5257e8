#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""An agent beside eight containers, whose back-end goes away for a while: cost, and what is lost.

It records the whole host, 19 times a second, on and off the CPU, into captures and to the tests'
OTLP receiver. At the end what was pushed is compared with the captures, sum by sum. CPU time is
that of /proc/PID/stat with ended children; of a helper that ends it moves to its parent.

    sudo .venv/bin/python tests/bench/containers.py --minutes 60 --away 25 35 .venv/bin/aiflame
    .venv/bin/python tests/bench/containers.py --report FOLDER    # of one that was measured
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import Thread

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from aiflame.agent.capture.reader import read_capture
from aiflame.agent.fleet.stretches import folders_of, is_done
from aiflame.agent.model.profile import Profile, SampleClass, StopReason
from aiflame.agent.reports.rows import TRUNCATED_REASONS
from bench.agent import Agent, role_of
from bench.container_loads import NAMES, eight_containers, running_names
from bench.kernel import Window, bpf_stats, watch
from bench.machine import busy_share
from bench.receiver import GotProfile, GotRequest, read_requests
from bench.tools import HERE
from bench.usage import family
from pushes import totals_of

_NAMING = "naming"
# In the folder of a measurement: a line for each request, and what else was seen.
_RECEIVED, _RUN = "received.jsonl", "run.pickle"
_BUILD = HERE.parents[1] / "build/containers"
# As an agent in production has it, but for captures, of which none may be removed before they are
# compared: 669 MB were written in an hour.
_OPTIONS = (
    *("--frequency-hz", "19", "--off-cpu", "--stretch", "60s", "--health", ""),
    # Of the containers; agents in tests beside this one expect helpers of their own.
    *("--sinks-captures-max-size", "20GB", "--gpu", "opencl"),
)
# A row of the table, and how many there are at least.
_ROW_MINUTES, _ROWS_LEAST = 10.0, 4
# The kernel's counting costs each program two readings of a clock: it is on for two such spans.
_PROGRAMS_S, _PROGRAMS_AT = 60.0, (0.15, 0.75)
# Late naming on a busy machine: minutes were seen.
_DRAIN_S = 900.0
# Less of a container's time off the CPU is not worth a reason.
_TOLD_SHARE = 0.01


@dataclass(frozen=True)
class _Sample:
    """What there was at one time.

    Attributes:
        at_s: Since the measurement began.
        cpu_s: CPU time by role, so far.
        pss_bytes: Memory by role, what is shared among those that share it.
        ticks: Of all CPUs so far, as /proc/stat has them.
        switches: Of all CPUs so far.
        load: Of the last minute.
        waiting: Requests on disk.
    """

    at_s: float
    cpu_s: dict[str, float]
    pss_bytes: dict[str, int]
    ticks: list[int]
    switches: int
    load: float
    waiting: int


def _cpu_s(agent: Agent) -> dict[str, float]:
    """Returns CPU time by role. Unlike a sum over threads it has those that have ended."""
    found: defaultdict[str, float] = defaultdict(float)
    pid = agent.process.pid
    for each in family(pid):
        with suppress(FileNotFoundError, ProcessLookupError):  # its parent has its time
            # utime, stime, cutime, cstime (proc_pid_stat(5)), behind the name in brackets.
            fields = (each / "stat").read_text().rpartition(")")[2].split()[11:15]
            ticks = sum(map(int, fields))
            found[role_of(int(each.name), pid)] += ticks / os.sysconf("SC_CLK_TCK")
    return dict(found)


def _waiting(directory: Path) -> int:
    return len([*(directory / "spool").glob("otlp-*/*.request")])


def _sample(agent: Agent, directory: Path, began_s: float) -> _Sample:
    lines = Path("/proc/stat").read_text().splitlines()
    switches = next(int(line.split()[1]) for line in lines if line.startswith("ctxt"))
    return _Sample(
        time.monotonic() - began_s,
        _cpu_s(agent),
        dict(agent.memory()),
        [int(word) for word in lines[0].split()[1:]],
        switches,
        os.getloadavg()[0],
        _waiting(directory),
    )


class _Receiver:
    """The receiver's process, which goes away and comes again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.path.touch()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port: int = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}"
        self._process: subprocess.Popen[bytes] | None = None

    def set_away(self, is_away: bool) -> None:
        """Kills it, or starts it again."""
        if is_away and self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        elif not is_away and self._process is None:
            command = [sys.executable, str(HERE / "receiver.py"), str(self._port), str(self.path)]
            self._process = subprocess.Popen(command)


class _Programs(Thread):
    """Counts what an agent's programs in the kernel take, beside the samples."""

    def __init__(self, pid: int, seconds: float) -> None:
        super().__init__(daemon=True)
        self._pid, self._seconds = pid, seconds
        self.window: Window | None = None

    def run(self) -> None:
        with bpf_stats(True):
            self.window = watch(self._pid, self._seconds)


@dataclass
class _Run:
    """What was measured.

    Attributes:
        began_unix_s: When the first sample was taken.
        seconds: How long it was to take.
        away_s: From when to when the receiver was.
        samples: Of all.
        programs: What the programs in the kernel took, each time.
        end_s: How long it took to end.
        ended_unix_s: When it was told to.
        exit_status: Of the collector.
        containers: Which of them ran at the end.
        left_stretches, left_requests: What it left on disk, for its next start.
    """

    began_unix_s: float
    seconds: float
    away_s: tuple[float, float]
    samples: list[_Sample] = field(default_factory=list)
    programs: list[Window] = field(default_factory=list)
    end_s: float = 0.0
    ended_unix_s: float = 0.0
    exit_status: int | None = None
    containers: set[str] = field(default_factory=set)
    left_stretches: int = 0
    left_requests: int = 0


def _watch(run: _Run, agent: Agent, receiver: _Receiver, folder: Path, every_s: float) -> None:
    """Samples for as long as it is to take."""
    directory, began_s = folder / "data", time.monotonic()
    programs_s = min(_PROGRAMS_S, run.seconds / 10)
    counting = [_Programs(agent.process.pid, programs_s) for _ in _PROGRAMS_AT]
    due = {
        *(run.seconds * share for share in _PROGRAMS_AT),
        *run.away_s,
        *np.arange(0, run.seconds, every_s).tolist(),
        run.seconds,
    }
    with (folder / "samples.jsonl").open("w") as file:
        for at_s in sorted(x for x in due if x <= run.seconds):
            time.sleep(max(began_s + at_s - time.monotonic(), 0))
            if agent.process.poll() is not None:
                raise RuntimeError((folder / "log").read_text())
            receiver.set_away(run.away_s[0] <= at_s < run.away_s[1])
            for share, each in zip(_PROGRAMS_AT, counting, strict=True):
                if at_s >= run.seconds * share and each.ident is None:
                    each.start()
            run.samples.append(_sample(agent, directory, began_s))
            file.write(json.dumps(asdict(run.samples[-1])) + "\n")
            file.flush()
    for each in counting:
        each.join()
        if each.window is not None:
            run.programs.append(each.window)


def _end(run: _Run, agent: Agent) -> None:
    """Ends it, and lets another send what is left."""
    run.ended_unix_s, began_s = time.time(), time.monotonic()
    agent.end()
    run.end_s, run.exit_status = time.monotonic() - began_s, agent.process.returncode


def _send_rest(run: _Run, program: str, options: Sequence[str], folder: Path) -> None:
    """Starts an agent again until all that the first has left on disk is sent."""
    directory = folder / "data"
    left = [path for path in folders_of(directory) if not is_done(path)]
    run.left_stretches, run.left_requests = len(left), _waiting(directory)
    if not left and not run.left_requests:
        return
    # It is looked into for the words of the start.
    (folder / "log").rename(folder / "log.first")
    again = Agent(program, options, folder)
    try:
        until_s = time.monotonic() + _DRAIN_S
        while _waiting(directory) or not all(map(is_done, left)):
            if time.monotonic() > until_s:
                break
            time.sleep(1)
    finally:
        again.end()


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


def _row(name: str, samples: Sequence[_Sample], sent: Sequence[GotRequest]) -> str:
    """Returns a row of the table: of the time between the first and the last of some samples."""
    first, last = samples[0], samples[-1]
    took_s = last.at_s - first.at_s

    def cpu(roles: Sequence[str]) -> str:
        used_s = sum(last.cpu_s.get(role, 0) - first.cpu_s.get(role, 0) for role in roles)
        return _percent(used_s, took_s)

    def memory(role: str) -> str:
        return f"{np.mean([each.pss_bytes.get(role, 0) for each in samples]) / 1e6:.0f} MB"

    all_bytes = [sum(each.pss_bytes.values()) for each in samples]
    roles = [*{**first.cpu_s, **last.cpu_s}]
    others = [role for role in roles if role not in ("collector", _NAMING)]
    parts = (
        *(name, cpu(roles), cpu(["collector"]), cpu([_NAMING]), cpu(others)),
        f"{np.mean(all_bytes) / 1e6:.0f} MB, {max(all_bytes) / 1e6:.0f}",
        *(memory("collector"), memory(_NAMING)),
        f"{100 * busy_share(first.ticks, last.ticks):.0f} %,"
        f" {np.mean([each.load for each in samples]):.0f}",
        f"{(last.switches - first.switches) / took_s:,.0f}",
        f"{sum(each.size_bytes for each in sent) / 1e6:.1f} MB; {last.waiting}",
    )
    return f"| {' | '.join(parts)} |"


def _print_table(run: _Run, requests: Sequence[GotRequest]) -> None:
    minutes = run.seconds / 60
    rows = max(_ROWS_LEAST, math.ceil(minutes / _ROW_MINUTES))
    times_s = np.array([each.at_s for each in run.samples])
    print(
        "\n| minutes | CPU, all | collector | naming | others | PSS, all: mean, most | collector"
        " | naming | CPUs busy, load | switches/s | sent by OTLP; waiting at the end |"
    )
    print("|---" * 11 + "|")
    for begin, end in itertools.pairwise(np.linspace(0, minutes, rows + 1).tolist()):
        low_s, high_s = begin * 60, end * 60
        # Samples are taken late on a busy machine; one at a boundary belongs to both its sides.
        first, last = (int(np.abs(times_s - bound_s).argmin()) for bound_s in (low_s, high_s))
        samples = run.samples[first : last + 1]
        got = [x for x in requests if low_s <= x.at_unix_s - run.began_unix_s < high_s]
        if len(samples) > 1:
            print(_row(f"{begin:g}-{end:g}", samples, got))
    print(_row("all", run.samples, requests))
    away = " to ".join(f"{each / 60:g}" for each in run.away_s)
    print(f"\nThe back-end was away from minute {away}.\n")


@dataclass
class _OfContainer:
    """Time of one container's threads, in ns, over all captures."""

    on_cpu_ns: int = 0
    on_cpu_complete_ns: int = 0
    off_cpu_ns: int = 0
    off_cpu_complete_ns: int = 0
    off_cpu_reasons_ns: Counter[StopReason] = field(default_factory=Counter)


@dataclass
class _Captured:
    """What all captures have.

    Attributes:
        totals: Sums by type, by the stretch's begin.
        losses: By name.
        containers: By name, "" for what is in none.
        size_bytes: Of the files.
    """

    totals: dict[int, Counter[str]] = field(default_factory=dict)
    losses: Counter[str] = field(default_factory=Counter)
    containers: defaultdict[str, _OfContainer] = field(
        default_factory=lambda: defaultdict(_OfContainer)
    )
    size_bytes: int = 0

    def add(self, profile: Profile) -> None:
        """Adds a capture's."""
        self.totals[profile.recording.started_unix_ns] = totals_of([profile])
        for loss in profile.losses:
            self.losses[loss.name] += loss.count
        names = ["" if each is None else each.container for each in profile.labels]
        of_thread = np.array([names[each.process] for each in profile.threads], np.str_)
        samples = profile.samples
        of_sample = of_thread[samples["thread"]]
        ends = profile.stacks.ends[samples["stack"]]
        is_complete = ~np.isin(ends, TRUNCATED_REASONS)
        is_on = samples["klass"] == SampleClass.ON_CPU
        ns = samples["ns"]
        for name in np.unique(of_sample).tolist():
            found, is_its = self.containers[name], of_sample == name
            found.on_cpu_ns += int(ns[is_its & is_on].sum())
            found.on_cpu_complete_ns += int(ns[is_its & is_on & is_complete].sum())
            is_off = is_its & ~is_on
            found.off_cpu_ns += int(ns[is_off].sum())
            found.off_cpu_complete_ns += int(ns[is_off & is_complete].sum())
            for reason in np.unique(ends[is_off & ~is_complete]).tolist():
                is_so = is_off & (ends == reason)
                found.off_cpu_reasons_ns[StopReason(reason)] += int(ns[is_so].sum())


def _captured(folder: Path, until_unix_ns: int) -> _Captured:
    """Reads the captures that began before a time: later ones are of who sent the rest."""
    found = _Captured()
    for path in sorted(folder.glob("*.aiflame")):
        profile = read_capture(path)
        if profile.recording.started_unix_ns < until_unix_ns:
            found.size_bytes += path.stat().st_size
            found.add(profile)
    return found


def _print_stacks(captured: _Captured, seconds: float) -> None:
    print("\n| container | CPU | complete on the CPU | off it | not complete off it, why |")
    print("|---|---|---|---|---|")
    for name, each in sorted(captured.containers.items()):
        whole_ns = each.off_cpu_ns
        why = ", ".join(
            f"{reason.label} {_percent(ns, whole_ns)}"
            for reason, ns in each.off_cpu_reasons_ns.most_common()
            if ns >= _TOLD_SHARE * whole_ns
        )
        parts = (
            name or "none",
            _percent(each.on_cpu_ns / 1e9, seconds),
            _percent(each.on_cpu_complete_ns, each.on_cpu_ns),
            _percent(each.off_cpu_complete_ns, whole_ns),
            why,
        )
        print(f"| {' | '.join(parts)} |")
    print()


def _pushed_totals(profiles: Sequence[GotProfile]) -> dict[int, Counter[str]]:
    found: defaultdict[int, Counter[str]] = defaultdict(Counter)
    for one in profiles:
        found[one.begin_unix_ns][one.type_id] += one.total
    return dict(found)


def _gaps(profiles: Sequence[GotProfile]) -> list[str]:
    """Returns where one stretch does not begin as the one before it ends."""
    spans = sorted({(one.begin_unix_ns, one.duration_ns) for one in profiles})
    return [
        f"{(begin - before - lasted) / 1e6:.3f} ms at {begin}"
        for (before, lasted), (begin, _) in itertools.pairwise(spans)
        if before + lasted != begin
    ]


def _checks(
    run: _Run, requests: Sequence[GotRequest], captured: _Captured
) -> Iterator[tuple[bool, str]]:
    """Yields what has to hold, and whether it does."""
    # An agent that was started again to send the rest has stretches of its own.
    until_ns = int(run.ended_unix_s * 1e9)
    profiles = [one for x in requests for one in x.profiles if one.begin_unix_ns < until_ns]
    pushed = _pushed_totals(profiles)
    stored = {begin: sums for begin, sums in captured.totals.items() if begin < until_ns}
    yield run.exit_status == 0, f"ended {run.end_s:.1f} s after SIGTERM, status {run.exit_status}"
    missing = {*NAMES} - run.containers
    yield not missing, f"all containers ran to the end {sorted(missing) or ''}"
    refused = Counter(each.status for each in requests if each.status != 200)
    yield not refused, f"no request was refused {dict(refused) or ''}"
    gaps = _gaps(profiles)
    spans = {(one.begin_unix_ns, one.duration_ns) for one in profiles}
    lasted_s = sum(lasted for _, lasted in spans) / 1e9
    yield not gaps, f"{len(spans)} stretches join, {lasted_s:,.1f} s {gaps or ''}"
    only = {*pushed} ^ {*stored}
    yield not only, f"each stretch was pushed and is a capture {sorted(only) or ''}"
    types = sorted({type_id for sums in (*pushed.values(), *stored.values()) for type_id in sums})
    for type_id in types:
        sums = [sum(each[type_id] for each in of.values()) for of in (pushed, stored)]
        differ = [x for x in {*pushed} & {*stored} if pushed[x][type_id] != stored[x][type_id]]
        words = f"{type_id.partition(':')[0]}: pushed {sums[0]:,}, captures {sums[1]:,}"
        yield sums[0] == sums[1] and not differ, f"{words}, {len(differ)} stretches differ"
    for where, names in (
        ("pushed", {one.container for one in profiles}),
        ("captures", {*captured.containers}),
    ):
        unnamed = {*NAMES} - names
        yield not unnamed, f"{where}: each container has its name {sorted(unnamed) or ''}"


def _report(folder: Path) -> bool:
    """Prints what was measured; returns whether all is as it has to be."""
    run: _Run = pickle.loads((folder / _RUN).read_bytes())  # noqa: S301 - written by `main`
    requests = read_requests(folder / _RECEIVED)
    captured = _captured(folder / "captures", int(run.ended_unix_s * 1e9))
    _print_table(run, requests)
    for window in run.programs:
        runs = sum(each.run_count for each in window.runs) / window.seconds
        print(
            f"- programs in the kernel: {100 * window.cpu_share:.2f} % of one CPU besides,"
            f" {runs:,.0f} runs a second, in {window.seconds:.0f} s"
        )
    sent, held = (
        sum(getattr(each, name) for each in requests) / 1e6 for name in ("size_bytes", "held_bytes")
    )
    print(f"- left at the end: {run.left_stretches} stretches, {run.left_requests} requests")
    print(f"- sent: {len(requests)} requests, {sent:.1f} MB with gzip, {held:.1f} without")
    print(f"- captures: {len(captured.totals)}, {captured.size_bytes / 1e6:.0f} MB")
    print(f"- waiting at most: {max(each.waiting for each in run.samples)} requests")
    losses = ", ".join(f"{name} {count:,}" for name, count in captured.losses.most_common())
    print(f"- losses: {losses or 'none'}")
    _print_stacks(captured, run.ended_unix_s - run.began_unix_s)
    is_good = True
    for holds, words in _checks(run, requests, captured):
        print(f"- {'ok' if holds else '**FAILED**'}: {words.rstrip()}")
        is_good = is_good and holds
    return is_good


def main() -> int:
    """Runs the containers and the agent, and prints what it took and lost."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("program", nargs="?", help="`aiflame` of a checkout")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument(
        "--away", type=float, nargs=2, default=(25, 35), help="minutes from and to; equal: never"
    )
    parser.add_argument("--sample", type=float, default=30, help="seconds between two samples")
    parser.add_argument("--data", type=Path, default=_BUILD, help="what is measured goes there")
    parser.add_argument(
        "--image-root", type=Path, default=_BUILD / "image", help="the image is made there, once"
    )
    parser.add_argument("--options", default="", help="more of the agent")
    parser.add_argument("--report", type=Path, help="print what was measured into that folder")
    arguments = parser.parse_args()
    if arguments.report is not None:
        return 0 if _report(arguments.report) else 1
    if arguments.program is None:
        parser.error("which `aiflame`?")
    if arguments.away[0] < arguments.away[1] and arguments.away[1] >= arguments.minutes:
        parser.error("--away ends after --minutes")
    folder = arguments.data / time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    folder.mkdir(parents=True)
    print(f"data in {folder}", file=sys.stderr)
    # Containers and agents are ended then, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    receiver = _Receiver(folder / _RECEIVED)
    options = (
        *_OPTIONS,
        *("--sinks-captures-directory", str(folder / "captures")),
        *("--sinks-otlp-url", receiver.url),
        *arguments.options.split(),
    )
    with ExitStack() as parts:
        parts.callback(receiver.set_away, True)
        parts.enter_context(eight_containers(arguments.image_root, folder / "programs"))
        receiver.set_away(False)
        agent = Agent(arguments.program, options, folder)
        parts.callback(agent.end)
        away_s = (arguments.away[0] * 60, arguments.away[1] * 60)
        run = _Run(time.time(), arguments.minutes * 60, away_s)
        _watch(run, agent, receiver, folder, arguments.sample)
        run.containers = running_names()
        _end(run, agent)
        _send_rest(run, arguments.program, options, folder)
        (folder / _RUN).write_bytes(pickle.dumps(run))
    return 0 if _report(folder) else 1


if __name__ == "__main__":
    sys.exit(main())
