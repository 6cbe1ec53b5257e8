# SPDX-License-Identifier: Apache-2.0
"""What `make fleet-demo` runs: an agent, a store, and services that are recorded.

The agent sends to a stand-in of ClickHouse's HTTP interface, which keeps rows in a store in a
directory (chDB). Services are programs in cgroups that are called as systemd calls those of its
units; the agent takes their names from there. What `aiflame query` says of the store is put into
pages. Nothing is left running, however it ends.
"""

from __future__ import annotations

import argparse
import contextlib
import html
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import clickhouse_server
from aiflame.agent.fleet.stretches import is_done
from aiflame.agent.outfile import sudo_ids
from aiflame.agent.processes.targets import cgroup2_mounts
from cgroups import made_groups
from support import AIFLAME, WORKLOADS, wait_until

# Where Debian's pyopencl is.
_SYSTEM_PYTHON = "/usr/bin/python3"
# The agent ends within 10 s of SIGTERM, and a bit later on a crowded machine.
_END_S = 20.0
# All programs are compiled, attached and fed with unwind tables in a few seconds.
_START_S = 120.0
# On a machine whose binaries it meets for the first time, it is half a minute late at first.
_NAMING_S = 90.0
# Comparisons take eight windows of time; these are the shortest that there are.
_STRETCH = "5s"
# More samples than an agent takes all day, since it is for a minute.
_FREQUENCY_HZ = 199
# Programs end by themselves if all else fails: no time that somebody waits for a demo.
_LONGEST_S = 900

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 68em; margin: 2em auto; padding: 0 1em;
       color: #1f2328; background: #fff }
pre { overflow-x: auto; padding: .8em 1em; border-radius: 6px; background: #f4f5f7;
      font: 13px/1.45 ui-monospace, monospace }
code { font: 13px ui-monospace, monospace }
a { color: #0b5cad }
h2 { font-size: 1.1em; margin: 2em 0 .3em }
@media (prefers-color-scheme: dark) {
  body { color: #e6e6e6; background: #16181c } pre { background: #22252b } a { color: #7db7f0 }
}
"""


@dataclass(frozen=True)
class Question:
    """A question to the store.

    Attributes:
        heading: What it is about.
        words: After `aiflame query`.
        page: The file that it writes, "" where its answer is a table.
    """

    heading: str
    words: tuple[str, ...]
    page: str = ""


_OURS = ("--service", "demo-*")
SERVICES = ("demo-inference", "demo-ranking", "demo-ranking-canary", "demo-serving")
QUESTIONS = (
    Question(
        "All services: on the CPU, waiting, and on the device",
        ("flame", *_OURS, "--title", "All services of the demo"),
        "fleet.html",
    ),
    *(
        Question(f"Of {name} alone", ("flame", "--service", name), f"{name}.html")
        for name in SERVICES
    ),
    Question(
        "The device: which code launched what it did",
        (
            *("flame", "--service", "demo-inference", "--view", "gpu"),
            *("--title", "The device of demo-inference"),
        ),
        "gpu.html",
    ),
    Question("Functions that cost most", ("top", *_OURS, "-n", "15")),
    Question("What they wait for", ("top", *_OURS, "--class", "blocked", "-n", "10")),
    Question(
        "What the canary does more than the stable version",
        (
            "diff",
            "--base",
            "service=demo-ranking",
            "--new",
            "service=demo-ranking-canary",
            "-n",
            "10",
        ),
    ),
    Question("Kernels of the device", ("kernels",)),
    Question("What their instructions did: this device computes all the time", ("stalls",)),
    Question("Hosts, what recording them cost, and what was lost", ("agents",)),
)


def serve(store: Path) -> None:
    """Keeps what is sent until standard input ends; prints the port."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with clickhouse_server.clickhouse(store) as (_, url):
        print(url.rpartition(":")[2].partition("/")[0], flush=True)
        sys.stdin.read()


@contextlib.contextmanager
def _serving(store: Path) -> Iterator[str]:
    """Runs `serve`; yields the URL of the server."""
    command = [sys.executable, __file__, "serve", str(store)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            port = process.stdout.readline().strip()
            if not port:
                raise SystemExit("the store did not start")
            yield f"http://127.0.0.1:{port}"
        finally:
            process.stdin.close()
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()


@contextlib.contextmanager
def _running(
    command: Sequence[str], end_s: float, **keywords: object
) -> Iterator[subprocess.Popen[bytes]]:
    """Runs a program that ends with this one, also where this one is killed."""
    with subprocess.Popen(
        ["setpriv", "--pdeathsig", "TERM", *command], start_new_session=True, **keywords
    ) as process:
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(end_s)
            except subprocess.TimeoutExpired:
                process.kill()


def _workloads(folder: Path) -> dict[str, list[str]]:
    """Returns commands by the names of services."""
    serving = folder / "serving"
    flags = ["-g", "-O2", "-pthread"]
    subprocess.run(["gcc", *flags, "-o", serving, WORKLOADS / "serving.c", "-lm"], check=True)
    python, seconds = _SYSTEM_PYTHON, str(_LONGEST_S)
    commands = (
        [python, str(WORKLOADS / "inference.py"), seconds],
        [python, str(WORKLOADS / "ranking.py"), seconds],
        [python, str(WORKLOADS / "ranking.py"), seconds, "canary"],
        [str(serving), seconds],
    )
    return dict(zip(SERVICES, commands, strict=True))


@contextlib.contextmanager
def _services(folder: Path, logs: Path) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """Runs the workloads, each in a cgroup of its own where there is v2; yields them by name."""
    commands = _workloads(folder)
    mounts = cgroup2_mounts()
    user = sudo_ids()
    drop = ["--reuid", str(user.uid), "--regid", str(user.gid), "--clear-groups"] if user else []
    # pyopencl keeps what it makes in the caller's home, which is not that user's under sudo.
    home = folder / "home"
    home.mkdir()
    if user:
        os.chown(home, user.uid, user.gid)
    environment = {**os.environ, "HOME": str(home), "XDG_CACHE_HOME": str(home / ".cache")}
    with contextlib.ExitStack() as parts:
        entering: dict[str, list[str]] = {}
        if mounts:
            names = [f"system.slice/{name}.service" for name in commands]
            groups = parts.enter_context(made_groups(mounts[0], *names))
            script = 'echo $$ > "$1/cgroup.procs"; shift; exec "$@"'
            entering = {
                name: ["sh", "-c", script, "sh", str(group)]
                for name, group in zip(commands, groups, strict=True)
            }
        else:
            print("no cgroup v2 here: services are called by their executables")
        started = {}
        for name, command in commands.items():
            with (logs / f"{name}.log").open("wb") as log:
                whole = [*entering.get(name, []), "setpriv", *drop, "--pdeathsig", "TERM", *command]
                keywords = {"stdout": log, "stderr": log, "cwd": home, "env": environment}
                started[name] = parts.enter_context(_running(whole, 5, **keywords))
        yield started


def record(out: Path, seconds: float) -> None:
    """Records for so long; leaves the store and the agent's log in a folder."""
    with tempfile.TemporaryDirectory(prefix="aiflame-demo-") as private:
        folder = Path(private)
        # Programs may run as another user, who has to get to them.
        folder.chmod(0o755)
        log = out / "agent.log"
        with _serving(out / "store") as url, log.open("wb") as log_file:
            (folder / "password").touch(0o600)
            (folder / "password").write_text(clickhouse_server.PASSWORD)
            # What else runs on this machine is left out, where it can be told from services.
            include = 'include = ["service=demo-*"]\n' if cgroup2_mounts() else ""
            config = folder / "agent.toml"
            config.write_text(
                f'directory = "{folder}/agent"\nfrequency_hz = {_FREQUENCY_HZ}\n'
                f'stretch = "{_STRETCH}"\nhealth = ""\n'
                f'{include}[sinks.clickhouse]\nurl = "{url}"\n'
                f'user = "{clickhouse_server.USER}"\npassword_file = "{folder}/password"\n'
            )
            agent = [*AIFLAME, "agent", "--config", str(config)]
            with _running(agent, _END_S, stderr=log_file) as recorder:
                wait_until(
                    lambda: "recording all" in log.read_text() or recorder.poll() is not None,
                    _START_S,
                )
                _require_running("the agent", recorder, log)
                with _services(folder, out) as services:
                    print(f"recording {', '.join(services)} for {seconds:g} s", flush=True)
                    time.sleep(seconds)
                    for name, process in services.items():
                        _require_running(name, process, out / f"{name}.log")
                print("ending: what is recorded is named and stored", flush=True)
                # What is not named when it is told to end would be sent after its next start.
                with contextlib.suppress(AssertionError):
                    wait_until(lambda: _is_named(folder / "agent" / "stretches"), _NAMING_S)


def _require_running(name: str, process: subprocess.Popen[bytes], log: Path) -> None:
    if process.poll() is not None:
        raise SystemExit(f"{name} has ended:\n{log.read_text(errors='replace')}")


def _is_named(stretches: Path) -> bool:
    """Whether all but the open stretch are in the queue."""
    *closed, _ = sorted(stretches.iterdir())
    return all(is_done(one) for one in closed)


def ask(out: Path) -> Iterator[str]:
    """Asks all questions; yields the parts of a page."""
    for question in QUESTIONS:
        words = [*question.words, *(("-o", question.page) if question.page else ())]
        shown = shlex.join(["aiflame", "query", *words, "--store", "store"])
        command = [*AIFLAME, "query", *words, "--store", "store"]
        done = subprocess.run(command, cwd=out, capture_output=True, text=True, check=False)
        heading = html.escape(question.heading)
        yield f"<h2>{heading}</h2>\n<p><code>{html.escape(shown)}</code></p>"
        if question.page and not done.returncode:
            yield f'<p><a href="{question.page}">{question.page}</a></p>'
        else:
            yield f"<pre>{html.escape((done.stdout or done.stderr).strip())}</pre>"


def main() -> None:
    """Records, asks, and says where the pages are."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="a folder, which is replaced")
    parser.add_argument("--seconds", type=float, default=60, help="how long to record")
    args = parser.parse_args()
    out = args.out.absolute()
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(1))
    record(out, args.seconds)
    body = "\n".join(ask(out))
    (out / "index.html").write_text(
        '<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>aiflame: a small fleet'
        f"</title><style>{_STYLE}</style>\n<h1>A small fleet</h1>\n{body}\n</html>\n"
    )
    shown = Path(os.path.relpath(out))
    print(f"""
Open in a browser:
  {shown}/index.html  tables: functions, waits, kernels, and what a canary does more
  {shown}/fleet.html  the flame graph of all services
  {shown}/{SERVICES[-1]}.html  of one service, as of each
  {shown}/gpu.html    what the device did, and which code launched it
Ask the store, which is a directory:
  .venv/bin/aiflame query top --store {shown}/store --service demo-serving""")


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        serve(Path(sys.argv[2]))
    else:
        try:
            main()
        except KeyboardInterrupt:
            sys.exit(130)
