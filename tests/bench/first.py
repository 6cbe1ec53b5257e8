# SPDX-License-Identifier: Apache-2.0
"""How complete the first recording of a program is: with an empty cache, and then once more.

Both are made in a mount namespace where the folders that recordings keep between them are new ones
in memory, so that nothing that was recorded before helps, and nobody else's cache is emptied.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from aiflame.agent.capture.reader import read_capture
from aiflame.agent.model.profile import Profile, SampleClass
from aiflame.agent.reports.rows import TRUNCATED_REASONS
from bench import loads, tools
from bench.loads import Load
from bench.table import Table, code, spread
from bench.tools import Running, Tool

_ROUNDS = 3
_SECONDS = 4
_AIM_PCT = 98

# Of root: tables, symbols and kernel facts; answers about files.
_KEPT = ("/var/cache/aiflame", "/run/aiflame")
_CAPTURE = "bench.aiflame"

_INTRO = f"""\
Share of the time in stacks that are complete, of CPU time and of all time, in % (the aim is
{_AIM_PCT}), when nothing of the program was ever recorded and when it was recorded once just
before; and seconds until `record` says that it is attached. Median (least-most) of {_ROUNDS} runs
of {_SECONDS} s or of the command. numpy computes without BLAS here: `dgemm_kernel_HASWELL`, which
OpenBLAS takes on AMD's processors, has no unwind information and keeps its caller's stack pointer
in RBX, so that no recording of it is complete but for its Python frames."""

_NUMPY = """
import sys, numpy as np
numbers = np.random.default_rng(1).random((300, 300))
print("ready", flush=True)
sys.stdin.readline()
while True:
    np.fft.fft2(numbers)
    np.sort(numbers.ravel())
    np.convolve(numbers[0], numbers[1])
    np.sin(numbers)
    np.random.default_rng(1).normal(size=10000)
    sum(i * i for i in range(20000))
"""

_SERVER = """
import os, socket, sys, time, hashlib, json, re, zlib
listening = socket.create_server(("127.0.0.1", 0))
for _ in range(2):
    if not os.fork():
        while True:
            connection, _ = listening.accept()
            data = json.dumps({str(i): i for i in range(2000)}).encode()
            connection.recv(10)
            connection.sendall(hashlib.sha256(zlib.compress(data)).digest())
            connection.close()
print("ready", flush=True)
sys.stdin.readline()
while True:
    with socket.create_connection(listening.getsockname()) as connection:
        connection.sendall(b"0123456789")
        re.sub(b"[a-z]", b"", connection.recv(100) * 100)
"""

_POOL = """
import multiprocessing, time
def work(until):
    total = 0
    while time.monotonic() < until:
        total += sum(i * i for i in range(1000))
if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    with multiprocessing.Pool(2) as pool:
        pool.map(work, 4 * [time.monotonic() + 3])
"""

_TORCH = """
import sys, torch
torch.set_num_threads(2)
model = torch.nn.Sequential(
    torch.nn.Linear(512, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 512)
)
optimizer = torch.optim.Adam(model.parameters())
batch = torch.randn(256, 512)
print("ready", flush=True)
sys.stdin.readline()
while True:
    loss = ((model(batch) - batch) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""

_SHELL = "for i in $(seq 100); do seq $i | gzip -9 | gzip -d | wc; date; ls -l /usr/lib; done"

# As many files as keep two compilers at work for some seconds.
_C_FILES = 12


@dataclass(frozen=True, slots=True)
class _Shares:
    """Of one recording: shares in %, time in seconds."""

    cpu: float
    all: float
    live_s: float


@dataclass(frozen=True, slots=True)
class _Case:
    """What is recorded: a command, or a program that is running already."""

    what: str
    command: tuple[str, ...]
    is_running: bool = False
    options: tuple[str, ...] = ()


def _complete_pct(profile: Profile, classes: Sequence[SampleClass]) -> float:
    samples = profile.samples[np.isin(profile.samples["klass"], classes)]
    truncated = np.isin(profile.stacks.ends, TRUNCATED_REASONS)[samples["stack"]]
    ns = samples["ns"].astype(np.int64)
    return 100 * float(ns[~truncated].sum() / max(ns.sum(), 1))


def _recorded(arguments: Sequence[str], folder: Path) -> _Shares:
    """Records with what recordings keep in a folder."""
    script = []
    for place in map(Path, _KEPT):
        kept = folder / "kept" / place.name / place.parent.name
        kept.mkdir(mode=0o700, parents=True, exist_ok=True)
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        script.append(f"mount --bind {shlex.quote(str(kept))} {place}")
    record = (tools.AIFLAME, "record", "--force", "-o", _CAPTURE, *arguments)
    command = ("unshare", "-m", "sh", "-c", " && ".join([*script, f"exec {shlex.join(record)}"]))
    with Running(Tool("aiflame", command, "attached"), folder) as running:
        running.wait()
    profile = read_capture(folder / _CAPTURE)
    return _Shares(
        _complete_pct(profile, [SampleClass.ON_CPU]),
        _complete_pct(profile, list(SampleClass)),
        running.live_s - running.started_s,
    )


def _pair(case: _Case, folder: Path) -> tuple[_Shares, _Shares]:
    """Records with nothing kept, and then once more."""
    folder.mkdir()
    options = ("-d", str(_SECONDS), *case.options)
    if not case.is_running:
        arguments = (*case.options, "--", *case.command)
        return _recorded(arguments, folder), _recorded(arguments, folder)
    with Load(case.command) as load:
        load.go()
        arguments = (*options, "-p", str(load.pid), "-s")
        return _recorded(arguments, folder), _recorded(arguments, folder)


def _c_project(folder: Path) -> Path:
    """Writes what `make -j2` has some seconds to do with."""
    project = folder / "project"
    project.mkdir()
    for number in range(_C_FILES):
        functions = [
            f"int f{number}_{i}(int n) {{ int s = {i}; for (int k = 0; k < n; k++)"
            f' s += s * k ^ {i}; char t[99]; sprintf(t, "%d", s); return s + (int)strlen(t); }}'
            for i in range(300)
        ]
        text = "#include <stdio.h>\n#include <string.h>\n" + "\n".join(functions)
        (project / f"part{number}.c").write_text(text)
    objects = " ".join(f"part{number}.o" for number in range(_C_FILES))
    rules = f"{objects}: %.o: %.c\n\t@cc -O2 -c -o $@ $<\n"
    (project / "Makefile").write_text(f"all: {objects}\n.PHONY: all {objects}\n{rules}")
    return project


def _cases(folder: Path) -> list[_Case]:
    pool = folder / "pool.py"
    pool.write_text(_POOL)
    project = _c_project(folder)
    inference = tools.HERE.parent / "workloads" / "inference.py"
    cases = [
        _Case("numpy, running", (sys.executable, "-c", _NUMPY), is_running=True),
        _Case("a server of two forked processes", (loads.PYTHON, "-c", _SERVER), is_running=True),
        _Case("`make demo`", (loads.PYTHON, str(inference), "4"), options=("-F", "499")),
        _Case("`make -j2`, gcc", ("make", "-s", "-j2", "-C", str(project))),
        _Case("multiprocessing pool, spawn", (sys.executable, str(pool))),
        _Case("bash, 600 short processes", ("bash", "-c", f"({_SHELL}) >/dev/null")),
    ]
    torch = os.environ.get("AIFLAME_BENCH_TORCH")
    if torch is not None:
        cases.append(_Case("PyTorch, training", (torch, "-c", _TORCH), is_running=True))
    return cases


def _row(case: _Case, folder: Path) -> tuple[str, ...]:
    name = re.sub(r"\W+", "-", case.what)
    pairs = [_pair(case, folder / f"{name}-{number}") for number in range(_ROUNDS)]
    cells = [
        cell
        for recordings in zip(*pairs, strict=True)
        for cell in (
            spread([shares.cpu for shares in recordings], 1),
            spread([shares.all for shares in recordings], 1),
            spread([shares.live_s for shares in recordings], 2),
        )
    ]
    how = code("-s -p PID") if case.is_running else code("-- CMD")
    return (case.what, how, *cells)


def measure(busy: Path, folder: Path) -> list[Table]:
    """Measures all programs; PyTorch where AIFLAME_BENCH_TORCH says which Python has it."""
    del busy
    rows = [_row(case, folder) for case in _cases(folder)]
    figures = ("CPU time", "all time", "attached, s")
    columns = (
        "program",
        "",
        *(f"first: {figure}" for figure in figures),
        *(f"second: {figure}" for figure in figures),
    )
    return [Table("The first recording", _INTRO, columns, rows)]
