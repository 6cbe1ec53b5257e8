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
from collections.abc import Iterator, Sequence
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
from short_processes import SCRIPT, busy_loops

_ROUNDS = 3
_SECONDS = 4
_AIM_PCT = 98

# Of root: tables, symbols and kernel facts; answers about files.
_KEPT = ("/var/cache/aiflame", "/run/aiflame")
_CAPTURE = "bench.aiflame"
_GONE = "[exited before it could be read]"

# Root folders with the user space of other distributions, as debootstrap makes them, by name:
# "Debian 13=/srv/trixie,Ubuntu 24.04=/srv/noble".
_ROOTS = "AIFLAME_BENCH_ROOTS"
# Where the programs are seen inside.
_INSIDE = Path("/mnt")
_PACKAGES = "bash, gcc, gzip, gunicorn, make, perl, python3-gunicorn, python3-numpy"

_INTRO_ROOTS = f"""\
The same when nothing was ever recorded, of commands in the user space of other distributions
({_PACKAGES}, as they come), on this kernel, once each: share of CPU time, of all time, and of the
CPU time that is shown as `[exited before it could be read]`. Busy: beside two loops, on each
processor one."""

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

_APPLICATION = """
import hashlib, json, zlib
def app(environ, start_response):
    data = json.dumps({str(i): i for i in range(2000)}).encode()
    body = hashlib.sha256(zlib.compress(data)).hexdigest().encode()
    start_response("200 OK", [("Content-Length", str(len(body)))])
    return [body]
"""

_CLIENT = """
import http.client, time
until = time.monotonic() + 5
while time.monotonic() < until:
    connection = http.client.HTTPConnection("127.0.0.1", 8123)
    try:
        connection.request("GET", "/")
        connection.getresponse().read()
    except OSError:
        time.sleep(0.1)  # it is not listening yet
    connection.close()
"""

_GUNICORN = f"""
cd {_INSIDE}
gunicorn -w 2 -b 127.0.0.1:8123 --log-level error application:app &
python3 client.py
kill $!
wait
"""

_PROGRAM = """
import hashlib, json, math, re, sqlite3, time, zlib
until = time.monotonic() + 4
while time.monotonic() < until:
    sum(math.gamma(1 + i % 20) for i in range(3000))
    re.sub("[a-z]+", lambda match: match.group(0).upper(), "some words to change " * 200)
    hashlib.sha256(zlib.compress(json.dumps(list(range(3000))).encode())).hexdigest()
    database = sqlite3.connect(":memory:")
    database.execute("create table numbers (number)")
    database.executemany("insert into numbers values (?)", [(i,) for i in range(500)])
    database.execute("select sum(number) from numbers").fetchall()
"""

_SHELL = "for i in $(seq 100); do seq $i | gzip -9 | gzip -d | wc; date; ls -l /usr/lib; done"

# As many files as keep two compilers at work for some seconds.
_C_FILES = 12


@dataclass(frozen=True, slots=True)
class _Shares:
    """Of one recording: shares in %, time in seconds.

    Attributes:
        cpu, all: What is complete, of CPU time and of all time.
        live_s: Until it was attached.
        gone: What has no names as its process was gone, of CPU time.
    """

    cpu: float
    all: float
    live_s: float
    gone: float = 0


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


def _gone_pct(profile: Profile) -> float:
    samples = profile.samples[profile.samples["klass"] == SampleClass.ON_CPU]
    nameless = [at for at, one in enumerate(profile.functions) if one.name == _GONE]
    is_nameless = np.isin(profile.frames["function"][profile.stacks.frames], nameless)
    found = np.concatenate([np.zeros(1, np.int64), np.cumsum(is_nameless)])
    of_stack = np.diff(found[profile.stacks.offsets]) > 0
    ns = samples["ns"].astype(np.int64)
    return 100 * float(ns[of_stack[samples["stack"]]].sum() / max(ns.sum(), 1))


def _recorded(
    arguments: Sequence[str], folder: Path, binds: Sequence[tuple[Path, Path]] = ()
) -> _Shares:
    """Records with what recordings keep in a folder.

    Args:
        arguments: Of `aiflame record`.
        folder: Where that is.
        binds: Folders, and where else they are seen.
    """
    script = [f"mount --bind {shlex.quote(str(one))} {at}" for one, at in binds]
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
        _gone_pct(profile),
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


def _roots() -> dict[str, Path]:
    """Returns the root folders of other distributions by name, the machine's own first."""
    named = filter(None, os.environ.get(_ROOTS, "").split(","))
    others = {name: Path(folder) for name, _, folder in (one.partition("=") for one in named)}
    return {"this one": Path("/"), **others} if others else {}


def _commands(folder: Path) -> dict[str, tuple[str, ...]]:
    """Writes programs into a folder that is seen at `_INSIDE`; returns commands by name."""
    texts = {
        "short.sh": SCRIPT,
        "pool.py": _POOL,
        "program.py": _PROGRAM,
        "numpy_load.py": _NUMPY.replace("sys.stdin.readline()", "import time").replace(
            "while True:", "until = time.monotonic() + 4\nwhile time.monotonic() < until:"
        ),
        "gunicorn.sh": _GUNICORN,
        "application.py": _APPLICATION,
        "client.py": _CLIENT,
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
    python = loads.PYTHON
    return {
        "bash, 300 short processes": ("bash", f"{_INSIDE}/short.sh"),
        "`make -j2`, gcc": ("make", "-s", "-j2", "-C", f"{_INSIDE}/{_c_project(folder).name}"),
        "multiprocessing pool, spawn": (python, f"{_INSIDE}/pool.py"),
        "Python: re, json, zlib, sqlite3": (python, f"{_INSIDE}/program.py"),
        "numpy": (python, f"{_INSIDE}/numpy_load.py"),
        "gunicorn, two workers": ("sh", f"{_INSIDE}/gunicorn.sh"),
    }


def _rows_of_roots(folder: Path) -> Iterator[tuple[str, ...]]:
    for number, (distribution, root) in enumerate(_roots().items()):
        programs = folder / f"root-{number}"
        programs.mkdir()
        inside = (programs, root / _INSIDE.relative_to("/"))
        is_own = root == Path("/")
        chroot = () if is_own else ("chroot", str(root))
        for at, (what, command) in enumerate(_commands(programs).items()):
            for loops in (0, 2) if at == 0 else (0,):
                kept = programs / f"{at}-{loops}"
                kept.mkdir()
                with busy_loops(loops):
                    shares = _recorded(("--", *chroot, *command), kept, [inside])
                figures = (f"{shares.cpu:.1f}", f"{shares.all:.1f}", f"{shares.gone:.1f}")
                yield (what + (", busy" if loops else ""), distribution, *figures)


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
    """Measures all programs; PyTorch where AIFLAME_BENCH_TORCH says which Python has it.

    Other distributions' programs where AIFLAME_BENCH_ROOTS says where they are.
    """
    del busy
    rows = [_row(case, folder) for case in _cases(folder)]
    figures = ("CPU time", "all time", "attached, s")
    columns = (
        "program",
        "",
        *(f"first: {figure}" for figure in figures),
        *(f"second: {figure}" for figure in figures),
    )
    tables = [Table("The first recording", _INTRO, columns, rows)]
    if others := [*_rows_of_roots(folder)]:
        columns = ("program", "distribution", "CPU time", "all time", "exited")
        tables.append(Table("The first recording elsewhere", _INTRO_ROOTS, columns, others))
    return tables
