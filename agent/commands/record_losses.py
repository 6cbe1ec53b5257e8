# SPDX-License-Identifier: Apache-2.0
"""What a recording lost, in a reader's words."""

from __future__ import annotations

from aiflame.agent.recording.checks import kernel_names_cure
from aiflame.agent.recording.losses import LOSS_MEANINGS
from aiflame.agent.recording.recorder import Outcome
from aiflame.agent.symbols.frames import REASONS, clean_name

# Files named in a loss: a line is to be read.
_MAX_LISTED = 8

# Kept in a capture for the reader: reasons that resolve.py adds to those of the symbol readers.
_PROBLEM_MEANINGS = {
    **REASONS,
    "kernel_symbols_hidden": "kernel addresses without names",
    "perf_map_refused": "a perf-PID.map was a link, or not a regular file of the target; not used",
    "perf_map_cut": "a perf-PID.map was too large or malformed; a part of it was not used",
    "bad_unwind_info": "binaries whose unwind information is damaged; walked by frame pointer",
    "unwind_table_not_built": "binaries whose unwind table was not made, as the process that makes"
    " them died or could not be started; walked by frame pointer",
    "bad_unwind_records": "damaged records in unwind information; functions of theirs may be cut",
    "unwind_memory_full": "binaries whose unwind table found no room and that were walked by frame"
    " pointer for a while; raise --unwind-memory",
    "unwind_rules_cut": "unwind rules beyond 65,536 of one binary; stacks end in code of its own"
    " that needs them",
    "too_many_mappings": "executable mappings beyond 65,535 of a process; walked by frame pointer",
    "mappings_not_kept": "processes beyond the process table, or with so many executable mappings"
    " that those of all processes found no room; walked by frame pointer",
    "binary_not_read": "mapped files that are damaged, or that would take longer to read than any"
    " real one: names, Python frames or calls of theirs are missing",
    "binary_not_opened": "mapped files that could not be opened, or not be kept open (ulimit -n);"
    " their frames have no names",
    "sleepers_not_walked": "threads asleep since before the recording that show kernel frames only:"
    " this kernel does not tell their registers (BPF task iterators came with v5.8)",
    "threads_not_entered": "threads that slept or ran before the recording, which was too short to"
    " enter them all: their time is missing; record longer",
    "sleepers_kernel_frames_lost": "kernel frames of threads asleep since before the recording,"
    " whose addresses the kernel does not tell; the rest of their stacks is there",
    "cpus_came_online": "CPUs that came online during the recording: samples of up to a second on"
    " each are missing; waits and times are complete",
    "switch_not_seen": "threads that left a CPU in a way that the kernel shows to no tracepoint,"
    " and had not come back at the end: their time since then is missing",
    "thread_table_full": "threads that slept or ran before the recording, beyond the thread table:"
    " their off-CPU time is missing; raise --thread-storage-size",
    "stacks_stuck": "processes whose memory could not be read within a second; their threads asleep"
    " since before the recording show kernel frames only",
    "python_unsupported": "interpreters of unknown layout; their Python frames are missing",
    "python_threads_not_found": "interpreters whose Python frames are missing, as their threads'"
    " state is not where glibc keeps it",
    "python_exited": "Python frames of processes that ended before their names could be read",
    "python_too_deep": "Python stacks with over 127 frames; those nearest to the leaf are there",
    "python_unreadable_stack": "Python stacks that could not be read to their root",
    "python_bad_pointer": "Python stacks with a pointer that cannot be one; the rest is missing",
    "python_loop": "Python stacks that go round in circles; the rest is missing",
    "python_misfit": "stacks whose Python frames did not fit the eval loops of the native stack",
    "call_sizes_cut": "sums of work or bytes of device API calls that are larger than any device; "
    "the calls are counted",
    "kernel_names_unread": "names of kernels whose process ended before they could be read",
    "calls_not_probed": "functions of device APIs that could not be probed; their calls"
    " are missing",
    "stack_lost": "stacks that never left the kernel; their time is under [truncated: lost]",
    "kernel_not_opened": "samples in kernels of a device whose file could not be read",
    "sample_outside_kernel": "samples in a kernel's file beyond its code",
    "kernel_not_disassembled": "kernels of a device whose instructions are not known",
    "device_code_replaced": "samples of a second in which a kernel's code gave way to other code at"
    " the same address; some may be of the other",
    "device_code_not_mapped": "samples at unknown addresses of processes that run kernels on CPUs:"
    " most are in kernels that were built shortly before their process ended",
    "device_stacks_not_kept": "stacks with unknown addresses, too many at once to look for kernels"
    " of a device in them",
    "sampling_skipped": "clock ticks that hit another BPF program and were skipped by the kernel",
}


def loss_rows(
    outcome: Outcome, problems: dict[str, int], files: dict[str, set[str]]
) -> list[tuple[str, int, str]]:
    """Returns the losses of a recording as (name, count, meaning), without those that are none.

    Args:
        outcome: What the kernel half counted.
        problems: What the host half counted, by name.
        files: Those to blame, by the problem's name.
    """
    rows = [
        (name, outcome.counters[counter], meaning)
        for counter, (name, meaning) in LOSS_MEANINGS.items()
    ]
    for name, count in problems.items():
        culprits = _listed(files.get(name, set()))
        # A name that is not in the list must not cost the recording.
        meaning = _PROBLEM_MEANINGS.get(name, name.replace("_", " "))
        if name == "kernel_symbols_hidden":
            meaning += f"; {kernel_names_cure()}"  # which depends on who asks
        rows.append((name, count, meaning + (f": {culprits}" if culprits else "")))
    return [row for row in rows if row[1]]


def _listed(paths: set[str]) -> str:
    """Names files in a line; a path is the target's to choose, and may hold anything."""
    names = [clean_name(path) for path in sorted(paths)]
    more = len(names) - _MAX_LISTED
    return ", ".join(names[:_MAX_LISTED]) + (f" and {more} more" if more > 0 else "")
