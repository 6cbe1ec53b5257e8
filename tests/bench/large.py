# SPDX-License-Identifier: Apache-2.0
"""How long a large capture takes to become a flame graph, and in how much memory."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

# Also when started as a program, as it is below.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import profiles
from aiflame.agent.capture.writer import CaptureWriter
from aiflame.agent.model.profile import Profile
from aiflame.agent.reports import FORMATS
from bench.table import Aim, Table, code, spread
from bench.tools import AIFLAME

_STACKS, _DEPTH, _SAMPLES = 100_000, 40, 1_000_000
_ROUNDS = 3
_AIM_S, _AIM_MB = 1.0, 200.0

# Those with aims, and those without.
_PICTURES, _FILES = ("html", "svg"), ("folded", "pprof", "speedscope")

_INTRO = f"""\
A capture of {_SAMPLES:,} samples in {_STACKS:,} distinct stacks of {_DEPTH} frames, over an hour.
Wall-clock seconds of the whole command, start of the interpreter included: median (least-most) of
{_ROUNDS}; memory is its peak RSS."""


def write_capture(profile: Profile, path: Path) -> None:
    """Writes a profile as the capture that a recording of it would have left."""
    recording = profile.recording
    writer = CaptureWriter(path)
    writer.put_meta(
        {
            "aiflame_version": recording.aiflame_version,
            "started_unix_ns": recording.started_unix_ns,
            "duration_ns": recording.duration_ns,
            "period_ns": recording.period_ns,
            "command": recording.command,
            "target": recording.target,
            "recorder_cpu_ns": recording.recorder_cpu_ns,
            "recorder_peak_rss_bytes": recording.recorder_peak_rss_bytes,
            "complete": 1,
        }
    )
    _write_names(writer, profile)
    stacks = profile.stacks
    offsets, frames = stacks.offsets.tolist(), stacks.frames.astype("<u4")
    owners = dict(profile.samples[["stack", "thread"]].tolist())
    rows = (
        (
            index,
            profile.threads[owners[index]].process,
            0,
            int(stacks.ends[index]),
            frames[offsets[index] : offsets[index + 1]].astype("<u8").tobytes(),
            frames[offsets[index] : offsets[index + 1]].tobytes(),
            0,
        )
        for index in range(len(stacks))
    )
    writer.put("stacks", rows)
    spans = profile.spans
    rows = profile.samples[spans["sample"]]
    rows["count"], rows["ns"] = spans["count"], spans["ns"]
    columns = zip(spans["first_s"].tolist(), rows.tolist(), strict=True)
    writer.put("samples", ((second, *row) for second, row in columns))
    writer.commit()
    writer.close()


def _write_names(writer: CaptureWriter, profile: Profile) -> None:
    writer.put(
        "processes",
        (
            (
                index,
                process.pid,
                process.parent_pid,
                process.name,
                process.executable,
                process.command_line,
                process.cgroup,
                process.container_id,
                process.started_ns,
                process.exited_ns,
            )
            for index, process in enumerate(profile.processes)
        ),
    )
    writer.put(
        "threads",
        (
            (index, thread.process, thread.tid, thread.name, thread.on_cpu_ns, thread.observed_ns)
            for index, thread in enumerate(profile.threads)
        ),
    )
    writer.put("binaries", ((i, b.path, b.build_id) for i, b in enumerate(profile.binaries)))
    writer.put(
        "functions",
        ((i, int(f.kind), f.name, f.binary, f.file) for i, f in enumerate(profile.functions)),
    )
    writer.put("frames", ((i, *map(int, row)) for i, row in enumerate(profile.frames.tolist())))


def _run(command: Sequence[str]) -> tuple[float, float]:
    """Returns wall-clock seconds and MB at the peak."""
    start_s = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.monotonic() - start_s
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)}: exit code {process.returncode}")
    return seconds, usage.ru_maxrss * 1024 / 1e6


def measure(busy: Path, folder: Path) -> list[Table]:
    """Measures formats, each after one run that is not counted."""
    del busy
    capture = folder / "large.aiflame"
    # In a child: its memory would otherwise count as the reports' (ru_maxrss is inherited by fork).
    subprocess.run([sys.executable, __file__, str(capture)], check=True, timeout=120)
    rows, aims = [], []
    for name in (*_PICTURES, *_FILES):
        output = folder / f"large{FORMATS[name].extension}"
        command = (AIFLAME, "report", str(capture), "--force", "-f", name, "-o", str(output))
        runs = [_run(command) for _ in range(1 + _ROUNDS)][1:]
        seconds, memory_mb = [run[0] for run in runs], max(run[1] for run in runs)
        rows.append(
            (
                code(f"aiflame report large.aiflame -f {name}"),
                spread(seconds, 2),
                f"{memory_mb:.0f}",
                f"{output.stat().st_size / 1e6:.1f}",
            )
        )
        if name in _PICTURES:
            aims.append(Aim(f"large report as {name}", statistics.median(seconds), _AIM_S, "s"))
            aims.append(Aim(f"large report as {name}, memory", memory_mb, _AIM_MB, "MB"))
    size = f"The capture has {capture.stat().st_size / 1e6:.0f} MB."
    columns = ("command", "seconds", "memory, MB", "written, MB")
    return [Table("A large capture", f"{_INTRO} {size}", columns, rows, aims)]


if __name__ == "__main__":
    write_capture(profiles.large_profile(_STACKS, _DEPTH, _SAMPLES), Path(sys.argv[1]))
