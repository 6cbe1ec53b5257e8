# SPDX-License-Identifier: Apache-2.0
"""Loads a library into processes, one after the other, and says what came of each.

Started as `python -m aiflame.agent.injection.load_worker LIBRARY CACHE CALLS PID:START...`: a
process of its own, since a thread of a target is held while its stack is looked at, which must not
wait for a recorder at work. CACHE is the directory of unwind tables, "" for none; CALLS are the
names of the system calls that the library makes, with commas; START is when the process began
(`procfs.start_ticks`): another one may have its number by now. It writes a line of JSON for each
process to its standard output: {"pid", "stopped_ns", "tries", "was_there", "why_held"}, or {"pid",
"why", "hint", "is_final"}: whether a later try would meet the same.

SIGTERM, which it also gets when its parent ends, ends it: what it is at goes on, or is undone.
"""

from __future__ import annotations

import ctypes
import json
import signal
import sys
from collections.abc import Collection
from pathlib import Path

from aiflame.agent import priority
from aiflame.agent.errors import AiflameError
from aiflame.agent.injection.inject import Injected, Injection
from aiflame.agent.injection.seccomp import Call
from aiflame.agent.injection.tracer import RefusedForGood
from aiflame.agent.processes import procfs

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def _load(
    pid: int, started: int, library: Path, cache: Path | None, calls: Collection[Call]
) -> Injected:
    with Injection(pid, cache, calls=calls) as injection:
        # It is held by a descriptor now: whoever has the number, has it to the end.
        if procfs.start_ticks(pid) != started:
            raise RefusedForGood(f"process {pid} has ended")
        return injection.load(library)


def main(library: Path, cache: Path | None, calls: Collection[Call], processes: list[str]) -> None:
    """Loads it into each of some processes."""
    # What it has put into a target's directory is removed then, as by any exception.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    priority.hurry()
    for process in processes:
        pid, started = map(int, process.split(":"))
        said: dict[str, int | str]
        try:
            injected = _load(pid, started, library, cache, calls)
            said = {
                "stopped_ns": injected.stopped_ns,
                "tries": injected.tries,
                "was_there": injected.was_there,
                "why_held": injected.why_held,
            }
        except AiflameError as error:
            is_final = isinstance(error, RefusedForGood)
            said = {"why": str(error), "hint": error.hint or "", "is_final": is_final}
        except Exception as error:  # of what one target is, the others know nothing
            why = f"{type(error).__name__}: {error}"
            said = {"why": why, "hint": "", "is_final": False}
        sys.stdout.write(json.dumps({"pid": pid, **said}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    _, path, directory, names, *rest = sys.argv
    main(
        Path(path),
        Path(directory) if directory else None,
        {Call[name.upper()] for name in names.split(",") if name},
        rest,
    )
