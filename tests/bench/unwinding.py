# SPDX-License-Identifier: Apache-2.0
"""What walking by unwind tables costs: a sample, a table, and the time until a recording is live.

The rows about PyTorch need an interpreter that has it: name one in AIFLAME_BENCH_TORCH.
"""

from __future__ import annotations

import os
import select
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from aiflame.agent.elf.contents import for_unwinding
from aiflame.agent.elf.image import ElfImage
from aiflame.agent.kernel.unwind_tables import table_bytes
from aiflame.agent.symbols.known import KnownTables
from aiflame.agent.symbols.store import Store
from aiflame.agent.target_files import TargetFile
from aiflame.agent.unwind.build import build, identity_of, load, table_name
from bench import loads, tools
from bench.events import THEIR_PROGRAM, ns_of, windows
from bench.kernel import bpf_stats
from bench.table import Aim, Table, code, spread
from bench.tools import Running, Tool, kill_group
from support import wait_until

_DEPTHS = (12, 24, 60)
# main, libc's two and _start stand below the calls.
_OTHER_FRAMES = 4
_AIM_DEPTH, _AIM_NS, _TORCH_AIM_NS = 24, 5_000.0, 8_000.0
_COLD_AIM_S, _WARM_AIM_MS, _KERNEL_AIM_MB, _LIVE_AIM_S = 3.0, 50.0, 25.0, 1.0
_ROUNDS = 5
_PATIENCE_S = 120.0

_SAMPLE_INTRO = """\
Nanoseconds of a sample by the kernel's own count, walked by unwind tables and, with
`--unwind-memory 0`, by frame pointers; bpftrace's `ustack` walks by frame pointers. The program of
the first rows has both; PyTorch and what it stands on have no frame pointers: by those, and in
bpftrace, a walk of it ends after a frame or two."""

_TABLE_INTRO = """\
CPU seconds of one CPU to build a table from a file's unwind information, milliseconds to find it in
the cache on disk, and what it takes in the kernel."""

# One line each time it is ready to be watched.
_TRAINING = """
import torch
torch.set_num_threads(2)
model = torch.nn.Sequential(
    torch.nn.Linear(512, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 512)
)
optimizer = torch.optim.Adam(model.parameters())
batch = torch.randn(256, 512)
while True:
    loss = ((model(batch) - batch) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print("ready", flush=True)
"""


@contextmanager
def _training(python: str) -> Iterator[int]:
    """Runs a training loop; yields its pid once it is in the middle of it."""
    process = subprocess.Popen(
        [python, "-c", _TRAINING], stdout=subprocess.PIPE, start_new_session=True
    )
    try:
        assert process.stdout is not None
        if not select.select([process.stdout], [], [], _PATIENCE_S)[0]:
            raise TimeoutError("no step of the training loop was made")
        process.stdout.readline()
        # It goes on printing: somebody has to read.
        with subprocess.Popen(["cat"], stdin=process.stdout, stdout=subprocess.DEVNULL) as reader:
            yield process.pid
            kill_group(process)
            reader.wait()
    finally:
        kill_group(process)


def _sample_row(
    what: str, pids: list[int], aim_ns: float | None, folder: Path
) -> tuple[tuple[str, ...], list[Aim]]:
    ours = ("-p", ",".join(map(str, pids)), "--no-off-cpu", "-F", 499)
    by_tables: Tool = tools.aiflame(*ours)
    by_pointers = tools.aiflame(*ours, "--unwind-memory", 0)
    figures = [
        ns_of(windows(by_tables, folder), "on_cpu_sample"),
        ns_of(windows(by_pointers, folder), "on_cpu_sample"),
        ns_of(windows(tools.bpftrace("oncpu.bt"), folder), THEIR_PROGRAM),
    ]
    aims = [] if aim_ns is None else [Aim(f"sample, {what}", _middle(figures[0]), aim_ns, "ns")]
    return (what, *(spread(values, 0) for values in figures)), aims


def _middle(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def _samples(busy: Path, torch: str | None, folder: Path) -> Table:
    rows: list[tuple[str, ...]] = []
    aims: list[Aim] = []
    with bpf_stats(True):
        for depth in _DEPTHS:
            load = (str(busy), "loop", str(depth - _OTHER_FRAMES))
            # One a CPU: ticks of others, which cost next to nothing, would be counted as well.
            with loads.background(*[load] * (os.cpu_count() or 1)) as pids:
                aim_ns = _AIM_NS if depth == _AIM_DEPTH else None
                row, more = _sample_row(f"{depth} frames", pids, aim_ns, folder)
            rows.append(row)
            aims += more
        if torch is not None:
            with _training(torch) as pid:
                _warm(pid, folder)
                row, more = _sample_row("PyTorch training loop", [pid], _TORCH_AIM_NS, folder)
            rows.append(row)
            aims += more
    columns = ("stack", "by tables, ns", "by frame pointers, ns", "bpftrace, ns")
    return Table("A sample by unwind tables", _SAMPLE_INTRO, columns, rows, aims)


def _warm(pid: int, folder: Path) -> None:
    """Records until all tables are in the cache."""
    with Running(tools.aiflame("-p", pid, "-d", 10), folder) as running:
        running.wait()


def _table_row(path: Path, folder: Path) -> tuple[tuple[str, ...], float, float, int]:
    fd = os.open(path, os.O_RDONLY)
    image, store = ElfImage.from_fd(fd), Store(folder / "tables")
    begin_s = time.process_time()
    file = TargetFile(fd)
    name = table_name(image.build_id, for_unwinding(file, image).digest(file))
    table = build(file, image)
    store.write(name, table.to_chunks(identity_of(name)))
    cold_s = time.process_time() - begin_s
    known = KnownTables(folder / "known")
    known.keep(os.fstat(fd), fd, name)
    warm_ms = []
    for _ in range(_ROUNDS):
        begin_s = time.perf_counter()
        ElfImage.from_fd(fd)
        load(known.name(fd), store)
        warm_ms.append(1e3 * (time.perf_counter() - begin_s))
    os.close(fd)
    size_bytes = table_bytes(table)
    row = (
        code(path.name),
        f"{len(table):,}",
        f"{cold_s:.3f}",
        spread(warm_ms, 1),
        f"{size_bytes / 1e6:.2f}",
        f"{size_bytes / len(table):.1f}",
    )
    return row, cold_s, _middle(warm_ms), size_bytes


def _mapped_files(pid: int) -> list[Path]:
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    paths = {
        fields[5] for line in lines if len(fields := line.split(None, 5)) == 6 and "x" in fields[1]
    }
    return [Path(path) for path in sorted(paths) if path.startswith("/")]


def _tables(torch: str | None, folder: Path) -> Table:
    with loads.background((loads.PYTHON, "-c", "while True: pass")) as pids:
        wait_until(lambda: any("libc.so" in path.name for path in _mapped_files(pids[0])))
        paths = _mapped_files(pids[0])
    chosen = [path for path in paths if path.name.startswith(("libc.so", "python"))]
    rows, aims = [_table_row(path, folder)[0] for path in chosen], []
    if torch is not None:
        with _training(torch) as pid:
            every = _mapped_files(pid)
        total_bytes = 0
        for path in every:
            row, cold_s, warm_ms, size_bytes = _table_row(path, folder)
            total_bytes += size_bytes
            if path.name == "libtorch_cpu.so":
                rows.append(row)
                aims.append(Aim("libtorch_cpu.so's table, cold", cold_s, _COLD_AIM_S, "s of CPU"))
                aims.append(Aim("libtorch_cpu.so's table, warm", warm_ms, _WARM_AIM_MS, "ms"))
        whole = f"{total_bytes / 1e6:.2f}"
        rows.append((f"all {len(every)} files of a PyTorch process", "", "", "", whole, ""))
        aims.append(
            Aim(
                "tables of a PyTorch process", total_bytes / 1e6, _KERNEL_AIM_MB, "MB in the kernel"
            )
        )
    columns = ("file", "rows", "cold, s of CPU", "warm, ms", "kernel, MB", "bytes a row")
    return Table("Unwind tables", _TABLE_INTRO, columns, rows, aims)


def _start(torch: str, folder: Path) -> Table:
    with _training(torch) as pid:
        tool = tools.aiflame("-p", pid, "-d", 1)
        _warm(pid, folder)
        seconds = []
        for _ in range(_ROUNDS):
            with Running(tool, folder) as running:
                seconds.append(running.live_s - running.started_s)
                running.wait()
    rows = [(code(tool.words), spread(seconds, 2))]
    aims = [Aim("start to attached, PyTorch, warm", _middle(seconds), _LIVE_AIM_S, "s")]
    intro = 'Seconds from the command to "attached", on a training loop that uses both CPUs.'
    return Table("Until a recording is live", intro, ("command", "s"), rows, aims)


def measure(busy: Path, folder: Path) -> list[Table]:
    """Measures samples, tables and starts."""
    torch = os.environ.get("AIFLAME_BENCH_TORCH")
    found = [_samples(busy, torch, folder), _tables(torch, folder)]
    return found if torch is None else [*found, _start(torch, folder)]
