# SPDX-License-Identifier: Apache-2.0
"""How long a user waits: to be attached, and from the end of a recording to its flame graph."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench import loads, tools
from bench.loads import Load
from bench.table import Aim, Table, code, spread
from bench.tools import Running, Tool

_ROUNDS = 3
_RECORDED_S = 1.0
_PAGE = "bench.html"
_PAGE_AIM_S = 1.0

# An empty file system over the cache, in a mount namespace of its own: the user's stays as it is.
_COLD = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs bench /var/cache && exec "$@"', "sh")

_INTRO = f"""\
Seconds, median (least-most) of {_ROUNDS}. Cold: the symbol cache is empty; warm: as the run before
left it. The kernel's page cache is warm in both. The recording ends 1 s after "attached"."""


@dataclass(frozen=True, slots=True)
class _Run:
    attached_s: float  # from the start of the command
    flame_graph_s: float  # from the end of the recording
    whole_s: float  # from the start of the command to the flame graph


def _run(tool: Tool, folder: Path) -> _Run:
    with Running(tool, folder) as running:
        written_s = running.await_output(f"Wrote {_PAGE}")
        running.wait()
    return _Run(
        running.live_s - running.started_s,
        written_s - running.live_s - _RECORDED_S,
        written_s - running.started_s,
    )


def _tool(*target: object, cold: bool) -> Tool:
    plain = tools.aiflame(*target, "-d", 1)
    return Tool(plain.name, (*_COLD, *plain.command), plain.live) if cold else plain


def _row(what: str, runs: Sequence[_Run], tool: Tool) -> tuple[str, ...]:
    return (
        what,
        spread([run.attached_s for run in runs], 2),
        spread([run.flame_graph_s for run in runs], 2),
        spread([run.whole_s for run in runs], 2),
        code(tool.words),
    )


def measure(busy: Path, folder: Path) -> list[Table]:
    """Measures a Python program by its pid, and everything."""
    del busy
    rows, aims = [], []
    with Load((loads.PYTHON, str(tools.HERE / "calls.py"), str(10**9))) as load:
        load.go()
        for what, target in (("a Python program", ("-p", load.pid)), ("everything", ("-a",))):
            warm = _tool(*target, cold=False)
            _run(warm, folder)  # fills the cache
            for state in ("cold", "warm"):
                tool = _tool(*target, cold=state == "cold")
                runs = [_run(tool, folder) for _ in range(_ROUNDS)]
                rows.append(_row(f"{what}, {state}", runs, warm))
                seconds = statistics.median(run.flame_graph_s for run in runs)
                aims.append(Aim(f"flame graph of {what}, {state}", seconds, _PAGE_AIM_S, "s"))
    columns = (
        "target",
        "start to attached",
        "end to flame graph",
        "start to flame graph",
        "command",
    )
    return [Table("Waiting", _INTRO, columns, rows, aims)]
