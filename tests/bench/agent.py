#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What an agent takes: CPU time of each of its processes and of its programs, and memory.

Agents of several checkouts run beside each other in the same seconds, each on the same load; each
records the others as well. What they take differs with what else the machine does: compare them
within one run.

    sudo .venv/bin/python tests/bench/agent.py --load churn --seconds 60 .venv/bin/aiflame \
        ../other/.venv/bin/aiflame
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import loads
from bench.kernel import Runs, between, bpf_stats, programs
from bench.usage import cpu_ns, family

# A server that is asked twenty times a second, and threads that wait.
_SERVICE = """
import threading, time
def ask(seconds):
    while True:
        time.sleep(seconds)
        sum(i * i for i in range(2000))
for number in range(8):
    threading.Thread(target=ask, args=(0.05 * (number + 1),)).start()
"""
_SHORT = "while :; do /bin/true; sleep {pause}; done"
_PYTHON = "while :; do /usr/bin/python3 -c pass; sleep {pause}; done"
_FUNCTIONS = """
import time
number = 0
while True:
    number += 1
    space = {}
    exec(f"def work_{number}(n):\\n    return sum(i * i for i in range(n))", space)
    for _ in range(20):
        space[f"work_{number}"](5000)
    time.sleep(0.05)
"""
# Programs begun at a steady rate, each waited for.
_EXECS = """
import os, time
due_s = time.monotonic()
while True:
    os.waitpid(os.posix_spawn("/bin/true", ["true"], {}), 0)
    due_s = max(due_s + 1 / 500, time.monotonic() - 1)
    time.sleep(max(due_s - time.monotonic(), 0))
"""
# 2,000 processes of five threads each that look for work every ten seconds.
_CROWD = """
import os, random, threading, time
def look():
    time.sleep(10 * random.random())
    while True:
        time.sleep(10)
for number in range(2000):
    if os.fork() == 0:
        random.seed(number)
        for _ in range(4):
            threading.Thread(target=look).start()
        look()
time.sleep(1e6)
"""


def _shell(words: str, pause: float) -> tuple[str, ...]:
    return ("/bin/sh", "-c", words.format(pause=pause))


_SERVICES = ((loads.PYTHON, "-c", _SERVICE),) * 2
# Pauses: of a process and of the `sleep` beside it, both of which are new.
LOADS: dict[str, Sequence[Sequence[str]]] = {
    "none": (),
    "quiet": (*_SERVICES, _shell(_SHORT, 1)),
    "short": (*_SERVICES, *(_shell(_SHORT, 0.1),) * 4),
    "many": (*_SERVICES, *(_shell(_SHORT, 0.1),) * 12),
    "execs": (*_SERVICES, (loads.PYTHON, "-c", _EXECS)),
    "crowd": (*_SERVICES, (loads.PYTHON, "-c", _CROWD)),
    "crowd-execs": (*_SERVICES, (loads.PYTHON, "-c", _CROWD), (loads.PYTHON, "-c", _EXECS)),
    "crowd-churn": (
        *(*_SERVICES, (loads.PYTHON, "-c", _CROWD), (loads.PYTHON, "-c", _EXECS)),
        (loads.PYTHON, "-c", _FUNCTIONS),
    ),
    "churn": (*_SERVICES, _shell(_PYTHON, 0.5), (loads.PYTHON, "-c", _FUNCTIONS)),
    "all": (
        *(*_SERVICES, *(_shell(_SHORT, 0.1),) * 5),
        *(_shell(_PYTHON, 0.2), (loads.PYTHON, "-c", _FUNCTIONS)),
    ),
}

_PATIENCE_S = 120.0
_BETWEEN_S = 5.0


def role_of(pid: int, agent: int) -> str:
    """Returns what a process of an agent is there for, given the pid of its collector."""
    if pid == agent:
        return "collector"
    words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    module = next((word for word in words if word.startswith(b"aiflame.")), b"")
    if not module or module.endswith(b".forking"):  # a fork is called after what it runs
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return module.decode().removeprefix("aiflame.agent.")


class Agent:
    """An agent that runs until the block ends."""

    def __init__(self, program: str, options: Sequence[str], folder: Path) -> None:
        self.program = program
        log = (folder / "log").open("w")
        command = (program, "agent", "--directory", str(folder / "data"), *options)
        self.process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        until_s = time.monotonic() + _PATIENCE_S
        while "recording all" not in (folder / "log").read_text():
            if time.monotonic() > until_s or self.process.poll() is not None:
                raise TimeoutError((folder / "log").read_text())
            time.sleep(0.1)

    def times(self) -> dict[str, int]:
        """Returns CPU ns by role, those of children that have ended with their parents."""
        found: defaultdict[str, int] = defaultdict(int)
        for each in family(self.process.pid):
            with suppress(FileNotFoundError, ProcessLookupError):  # its parent has its time
                found[role_of(int(each.name), self.process.pid)] += cpu_ns(each)
        return found

    def memory(self) -> dict[str, int]:
        """Returns bytes by role, pages shared among those that have them."""
        found: defaultdict[str, int] = defaultdict(int)
        for each in family(self.process.pid):
            with suppress(FileNotFoundError, ProcessLookupError):
                lines = (each / "smaps_rollup").read_text().splitlines()
                role = role_of(int(each.name), self.process.pid)
                found[role] += sum(int(x.split()[1]) * 1024 for x in lines if x.startswith("Pss:"))
        return found

    def programs(self) -> dict[int, Runs]:
        """Returns what its programs have taken while the kernel counted that, by id."""
        return programs(self.process.pid)

    def end(self) -> None:
        """Ends it, as a service manager does."""
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)


def _idle_s() -> float:
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    return (int(fields[4]) + int(fields[5])) / os.sysconf("SC_CLK_TCK")


def _forks() -> int:
    lines = Path("/proc/stat").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("processes"))


def _watch(agents: Sequence[Agent], seconds: float) -> None:
    """Prints what they take for so long."""
    before = [(agent.times(), agent.programs()) for agent in agents]
    began_s, idle_s, forks = time.monotonic(), _idle_s(), _forks()
    memory: list[list[dict[str, int]]] = [[] for _ in agents]
    while time.monotonic() < began_s + seconds:
        time.sleep(min(_BETWEEN_S, max(began_s + seconds - time.monotonic(), 0)))
        for agent, seen in zip(agents, memory, strict=True):
            seen.append(agent.memory())
    took_s = time.monotonic() - began_s
    cpus = os.cpu_count() or 1
    busy = 1 - (_idle_s() - idle_s) / took_s / cpus
    print(
        f"{took_s:.0f} s, {cpus} CPUs {100 * busy:.0f} % busy,"
        f" {(_forks() - forks) / took_s:.0f} new processes and threads a second"
    )
    for agent, (times, earlier), seen in zip(agents, before, memory, strict=True):
        now = agent.times()
        runs = between(earlier, agent.programs())
        took = {role: (now[role] - times.get(role, 0)) / 1e7 / took_s for role in now}
        totals = [sum(each.values()) for each in seen]
        print(
            f"{agent.program}: {sum(took.values()):.2f} % of one CPU, programs"
            f" {sum(each.run_time_ns for each in runs) / 1e7 / took_s:.2f} % besides,"
            f" {sum(totals) / len(totals) / 1e6:.0f} MB, {max(totals) / 1e6:.0f} at most",
            flush=True,
        )
        for role in sorted(took, key=lambda role: -took[role]):
            of_role = [each.get(role, 0) for each in seen]
            print(f"    {role}: {took[role]:.2f} %, {sum(of_role) / len(of_role) / 1e6:.0f} MB")
        for each in sorted(runs, key=lambda each: -each.run_time_ns):
            if each.run_count:
                print(
                    f"    {each.name}: {each.run_time_ns / 1e7 / took_s:.2f} %,"
                    f" {each.run_count / took_s:.0f} a second of"
                    f" {each.run_time_ns / each.run_count:.0f} ns"
                )


def main() -> None:
    """Runs agents on a load, and prints what they take."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("programs", nargs="+", help="`aiflame` of each checkout")
    parser.add_argument("--load", choices=LOADS, default="quiet")
    parser.add_argument("--warm", type=float, default=40, help="seconds before it is measured")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--times", type=int, default=1, help="how often it is measured")
    parser.add_argument("--options", default="--gpu none", help="of all agents")
    arguments = parser.parse_args()
    with ExitStack() as parts:
        parts.enter_context(bpf_stats(True))
        parts.enter_context(loads.background(*LOADS[arguments.load]))
        agents = []
        for program in arguments.programs:
            folder = Path(parts.enter_context(tempfile.TemporaryDirectory()))
            agents.append(Agent(program, arguments.options.split(), folder))
            parts.callback(agents[-1].end)
        time.sleep(arguments.warm)
        for _ in range(arguments.times):
            _watch(agents, arguments.seconds)


if __name__ == "__main__":
    main()
