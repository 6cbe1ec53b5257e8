# SPDX-License-Identifier: Apache-2.0
"""How much memory an agent has, and when that is more than its budget.

There are three budgets. `memory` is for all of the agent's processes but those that make captures,
for long: where they have more, less is kept, until there is room again. `helper_memory` is a limit
of the kernel's for each process that reads files, for a moment: what needs more is refused, and
counted. `unwind_memory` is for tables in the kernel: what has no room there is counted.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Protocol

from aiflame.agent.fleet.capture_processes import CaptureProcesses
from aiflame.agent.fleet.log import Log
from aiflame.agent.processes import procfs

# A start, or a table that is made just now, is no news: looks are a minute apart.
_LOOKS_UNTIL_OVER = 3
# What is kept is given up sooner than it is kept again, or it would come and go with each burst.
_LOOKS_UNTIL_MORE = 5
# 32,768 stacks of 32 frames have 19 MB, half of them 9: the last step takes less than what is free
# then, a quarter of half of the default budget.
_ROOM = 0.75
# Of a process that has a thousand mappings.
_MAX_MAPPINGS_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """What there is at a moment, in bytes: of processes, each page shared among those that have it.

    Attributes:
        collector: Of the process that records, without maps that it has mapped.
        naming: Of the one that names and sends.
        helpers: Of all that these have started.
        kernel: Of maps, and of the tables in them.
        captures: Of processes that make captures on request, which the budget is not for.
    """

    collector: int
    naming: int
    helpers: int
    kernel: int
    captures: int = 0

    @property
    def processes(self) -> int:
        """Of all processes that the budget is for."""
        return self.collector + self.naming + self.helpers

    def parts(self) -> dict[str, int]:
        """Returns it by part."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def measure(naming: int | None, table_bytes: int, captures: CaptureProcesses) -> MemoryUse:
    """Returns what this process, the one that names, their children and maps have.

    Takes some milliseconds.

    Args:
        naming: Pid of the process that names, None where there is none.
        table_bytes: Of tables in the kernel, whose maps have no descriptors.
        captures: Which of the children are none of the agent's own.
    """
    children = [pid for pid in captures.others() if pid != naming]
    return MemoryUse(
        _resident_bytes(os.getpid())
        - mapped_maps_bytes(procfs.read_lines("/proc/self/smaps", _MAX_MAPPINGS_BYTES)),
        0 if naming is None else _resident_bytes(naming),
        sum(map(_resident_bytes, children)),
        _map_bytes() + table_bytes,
        sum(map(_resident_bytes, captures.begun())),
    )


def _resident_bytes(pid: int) -> int:
    """Returns the share of a process in what is resident (Pss of proc_pid_smaps(5)).

    Where that may not be read, all that is resident and of no file (proc_pid_statm(5)). 0 for one
    that is gone.
    """
    rollup = f"/proc/{pid}/smaps_rollup"
    for line in procfs.read_lines(rollup):
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    for line in procfs.read_lines(f"/proc/{pid}/statm"):
        resident, shared = map(int, line.split()[1:3])
        return (resident - shared) * os.sysconf("SC_PAGESIZE")
    return 0


def mapped_maps_bytes(mappings: Iterable[str]) -> int:
    """Returns what of a process's resident memory is the kernel's: rings and tables of its maps.

    They are in its share, but are counted with all maps. The kernel names such a mapping after the
    descriptor (bpf_map_new_fd of kernel/bpf/syscall.c, v4.4).

    Args:
        mappings: The lines of its /proc/PID/smaps.
    """
    size, is_map = 0, False
    for line in mappings:
        match line.split():
            case ["Pss:", kilobytes, "kB"]:
                size += int(kilobytes) * 1024 if is_map else 0
            case [field, *_] if not field.endswith(":"):  # the addresses of the next mapping
                is_map = line.rstrip().endswith("anon_inode:bpf-map")
    return size


def _map_bytes() -> int:
    """Returns what the kernel charged this process's maps with (bpf_map_show_fdinfo, v4.10)."""
    by_map: dict[str, int] = {}  # some have several descriptors
    for entry in Path("/proc/self/fdinfo").iterdir():
        facts = dict(line.split(":", 1) for line in procfs.read_lines(entry) if ":" in line)
        if "map_type" in facts:
            by_map[facts.get("map_id", entry.name)] = int(facts.get("memlock", 0))
    return sum(by_map.values())


class Keeper(Protocol):
    """What keeps less where memory is short."""

    def keep_less(self) -> None:
        """Keeps half as much from now on, down to a least."""
        ...

    def keep_more(self) -> bool:
        """Undoes one `keep_less`; False if there is none to undo."""
        ...


class MemoryBudget:
    """Has less kept where there is more than the budget for long, and more where there is room.

    Args:
        keeper: Of what the collector keeps.
        log: Where it says so.
    """

    def __init__(self, keeper: Keeper, log: Log) -> None:
        self._keeper = keeper
        self._log = log
        self._looks_over = 0
        self._looks_with_room = 0
        self._is_growing = False

    def look(self, use: MemoryUse, limit_bytes: int) -> bool:
        """Does what has to be done; returns whether others are to give back what is free."""
        # Stacks are dear to lose, and giving them up is of no use where others have the memory: it
        # is the collector's only where that has more than half of the budget, too.
        over = min(use.processes / limit_bytes, use.collector / (limit_bytes // 2))
        self._looks_over = self._looks_over + 1 if use.processes > limit_bytes else 0
        self._looks_with_room = self._looks_with_room + 1 if over <= _ROOM else 0
        if self._looks_with_room >= _LOOKS_UNTIL_MORE:
            self._looks_with_room = 0
            self._keep_more(use, limit_bytes)
        if self._looks_over < _LOOKS_UNTIL_OVER:
            return False
        self._log.say_seldom(
            "memory",
            f"{use.processes / 1e6:,.0f} MB are more than its budget of {limit_bytes / 1e6:,.0f} MB"
            " (memory): fewer stacks are kept if it is the collector that has them",
        )
        if over > 1:
            self._is_growing = False
            self._keeper.keep_less()
        return True

    def _keep_more(self, use: MemoryUse, limit_bytes: int) -> None:
        if self._keeper.keep_more() and not self._is_growing:
            self._is_growing = True
            self._log.say(
                f"the collector's {use.collector / 1e6:,.0f} MB of {use.processes / 1e6:,.0f} leave"
                f" room in a budget of {limit_bytes / 1e6:,.0f} MB (memory): step by step, as many"
                " stacks are kept as before"
            )
