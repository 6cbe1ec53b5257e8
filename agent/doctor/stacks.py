# SPDX-License-Identifier: Apache-2.0
"""Whether stacks are walked to their root, by unwind tables: tried on this very process.

Debian's and Ubuntu's interpreter, which this runs in, has no frame pointers.
"""

from __future__ import annotations

import os
import time

import numpy as np
from aiflame.agent.doctor.base import Context, Finding, ok, skip, warn
from aiflame.agent.doctor.bpf import PATIENCE_NS, recording_itself, spin
from aiflame.agent.inspector.inspector import Inspector
from aiflame.agent.kernel.loader import Programs
from aiflame.agent.model.profile import COMPLETE_REASONS, StopReason
from aiflame.agent.processes.table import NO_BINARY, ProcessTable
from aiflame.agent.processes.unwind_tables import UnwindTables
from aiflame.agent.symbols.store import cache_dir

# The interpreter and its libraries take a second to build, on a busy machine ten.
_BUILD_PATIENCE_NS = 20_000_000_000
_LIMIT_BYTES = 64 << 20
# Fewer would say little, more would take long where ticks are rare.
_SAMPLES = 50
_ENOUGH = 0.95


def stacks(context: Context) -> Finding:
    """Are the stacks of a loop in this process complete?"""
    if context.programs is None or context.probes is None:
        return skip("nothing is attached")
    programs = context.programs
    with recording_itself(programs) as image, Inspector() as inspector:
        table = ProcessTable(time.monotonic_ns(), lambda _: image, inspector)
        tables = UnwindTables(programs, table, cache_dir(), _LIMIT_BYTES, lambda _: None)
        try:
            process = table.seen(os.getpid(), image, 0, "", 0)
            tables.push(process)
            binaries = {mapping.binary for mapping in process.mappings} - {NO_BINARY}
            tables.poll()
            tables.wait(binaries, time.monotonic_ns() + _BUILD_PATIENCE_NS)
            tables.poll()
            ends = _ends_of_samples(programs)
        finally:
            tables.close()
            table.binaries.close()
            programs.process_mappings.delete(os.getpid().to_bytes(4, "little"))
    if not ends:
        return skip("no sample of a busy loop arrived")
    complete = int(np.isin(ends, COMPLETE_REASONS).sum())
    text = f"{complete} of {len(ends)} stacks of this process are complete"
    if complete < _ENOUGH * len(ends):
        reasons = sorted(
            {StopReason(end).label for end in ends} - {end.label for end in COMPLETE_REASONS}
        )
        return warn(f"{text}; the others end with: {', '.join(reasons)}", None)
    return ok(text)


def _ends_of_samples(programs: Programs) -> list[int]:
    """Collects stacks until there are enough, or for a moment."""
    ends: list[int] = []
    for _ in programs.stacks.chunks(take=True):
        pass  # from before the tables came
    until_ns = time.monotonic_ns() + PATIENCE_NS
    while len(ends) < _SAMPLES and time.monotonic_ns() < until_ns:
        spin()
        for _, records in programs.stacks.chunks(take=True):
            mine = (records["tgid"] == os.getpid()) & (records["user_depth"] > 0)
            ends += records["end"][mine].tolist()
    return ends
