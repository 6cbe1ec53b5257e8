# SPDX-License-Identifier: Apache-2.0
"""What a launch costs that is recorded with its whole stack, beside a plain BCC uprobe.

Three figures tell it: what a call takes longer, by the program's own clock; what of that is BPF, by
the kernel's count; the rest is the trap that any uprobe costs. Where a function's first instruction
has to be stepped over, that trap is dear: aiflame probes a later one where it can.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from aiflame.agent.capture.reader import read_capture
from aiflame.agent.inspector.inspector import Inspector
from aiflame.agent.kernel.uprobe_tries import UprobeTries
from aiflame.agent.launches.probe_sites import choose_site, read_prologue
from aiflame.agent.launches.runtimes import expected_files
from aiflame.agent.launches.symbols import find_functions
from aiflame.agent.symbols.file_facts import FileFacts
from aiflame.agent.symbols.store import cache_dir
from aiflame.agent.target_files import FileGuard, TargetFile
from bench import loads, tools
from bench.kernel import bpf_stats, watch
from bench.loads import Load
from bench.table import Aim, Table, spread
from bench.tools import Running, Tool

_SYMBOL = "clEnqueueNDRangeKernel"
_ROUNDS = 5
_CALLS, _PYTHON_CALLS = 100_000, 50_000
# With main, launch, the entry and libc's two that is 24 frames.
_DEPTH = 18
_PYTHON_FRAMES = 10
_AIM_NS = 3_000.0

_INTRO = f"""\
A refused `{_SYMBOL}` of the OpenCL loader, called in a loop from 24 native frames, and
from {_PYTHON_FRAMES} Python frames through ctypes, with the native ones between them. Median
(least-most) of {_ROUNDS} rounds of {_CALLS:,} calls ({_PYTHON_CALLS:,} in Python). "Longer" is
what a call takes more than without a probe; "in BPF" is the kernel's own count of a run; "trap" is
the rest. The plain probe is BCC's, with `get_stackid`: a walk by frame pointers, which the program
in C has and Python has not."""


@dataclass(frozen=True, slots=True)
class _Case:
    what: str
    command: tuple[str, ...]
    calls: int


def _site() -> tuple[Path, int]:
    """The loader, and where aiflame probes the function in it."""
    with Inspector() as inspector:
        facts = FileFacts(inspector.server, FileGuard())
        runtimes = expected_files((), inspector.opener, facts).runtimes
    for path in runtimes:
        if "libOpenCL" not in path.name:
            continue
        descriptor = os.open(path, os.O_RDONLY)
        try:
            found = find_functions(TargetFile(descriptor), frozenset({_SYMBOL}))
        finally:
            os.close(descriptor)
        if _SYMBOL in found:
            function = found[_SYMBOL]
            nops = UprobeTries(cache_dir()).answers.nops
            chosen = choose_site(read_prologue(function.code, function.file_offset), nops)
            return path.resolve(), chosen.offset_bytes
    raise RuntimeError("no OpenCL loader: apt-get install ocl-icd-libopencl1")


def _tools(pid: int) -> list[Tool]:
    library, offset = _site()
    plain = ("/usr/bin/python3", str(tools.HERE / "plain_uprobe.py"), str(library), _SYMBOL)
    return [
        tools.aiflame("-p", pid, "--no-off-cpu"),
        Tool(f"plain BCC uprobe, same site (+{offset})", (*plain, str(offset)), "live"),
        Tool("plain BCC uprobe at the entry", (*plain, "0"), "live"),
    ]


def _seconds(load: Load) -> list[float]:
    load.seconds()  # stacks are new, or the machine has slept
    return [load.seconds() for _ in range(_ROUNDS)]


def _rows(case: _Case, folder: Path) -> tuple[list[tuple[str, ...]], float]:
    rows, own_ns = [], 0.0
    with Load(case.command) as load:
        load.seconds()
        for tool in _tools(load.pid):
            alone = _middle(_seconds(load))
            with Running(tool, folder):
                recorded = _seconds(load)
            with bpf_stats(True), Running(tool, folder) as running:
                load.seconds()
                load.go()
                window = watch(running.pid, 0.2)
                load.finish()
            in_bpf = window.ns_per_run("on_call") or 0.0
            longer = [(seconds - alone) / case.calls * 1e9 for seconds in recorded]
            if tool.name == "aiflame":
                own_ns = in_bpf
            rows.append(
                (
                    case.what if not rows else "",
                    tool.name,
                    spread(longer, 0),
                    f"{in_bpf:,.0f}",
                    f"{_middle(longer) - in_bpf:,.0f}",
                    f"{case.calls / _middle(recorded):,.0f}",
                )
            )
    return rows, own_ns


def _middle(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


def _sustained(case: _Case, folder: Path) -> tuple[str, ...]:
    """Records a program that does nothing but launch; compares the count with what it did."""
    rounds = 2 * _ROUNDS
    with Load(case.command) as load:
        with Running(tools.aiflame("-p", load.pid), folder):
            seconds = sum(load.seconds() for _ in range(rounds))
        profile = read_capture(folder / "bench.aiflame")
    counted = int(profile.gpu.calls["count"].sum())
    lost = {loss.name: loss.count for loss in profile.losses if loss.name.startswith("call")}
    made = rounds * case.calls
    return case.what, f"{made / seconds:,.0f}", f"{made:,}", f"{counted:,}", str(lost or "none")


def _build(folder: Path) -> Path:
    program = folder / "launcher"
    source = tools.HERE / "launcher.c"
    command = ["gcc", *loads.FLAGS, "-o", str(program), str(source), "-lOpenCL"]
    subprocess.run(command, check=True, timeout=60)
    return program


def measure(_: Path, folder: Path) -> list[Table]:
    """Returns the tables of launches."""
    program = _build(folder)
    script = tools.HERE / "launcher.py"
    native = _Case("24 native frames", loads.pinned(program, _DEPTH, _CALLS), _CALLS)
    python = _Case(
        f"{_PYTHON_FRAMES} Python frames",
        loads.pinned(loads.PYTHON, script, _PYTHON_FRAMES, _PYTHON_CALLS),
        _PYTHON_CALLS,
    )
    rows, aims = [], []
    for case in (native, python):
        more, own_ns = _rows(case, folder)
        rows += more
        aims.append(Aim(f"launch, {case.what}, over the probe's floor", own_ns, _AIM_NS, "ns"))
    columns = ("stack", "probe", "longer, ns", "in BPF, ns", "trap, ns", "calls/s")
    sustained = [_sustained(case, folder) for case in (native, python)]
    return [
        Table("A launch", _INTRO, columns, rows, aims),
        Table(
            "Launches without a pause",
            "One thread that does nothing but launch, recorded on and off CPU.",
            ("stack", "calls/s", "calls made", "calls counted", "lost"),
            sustained,
        ),
    ]
