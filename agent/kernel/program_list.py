# SPDX-License-Identifier: Apache-2.0
"""The programs and maps of bpf/record.bpf.c, by name.

Light enough for the compiling child, which takes each of them out of BCC's hands, and complete:
bytecode that mentions another map is refused when it is made.
"""

from __future__ import annotations

ITERATOR = "iterator"
THREAD_ITERATOR = "bpf_iter__task"
SWEEP_ITERATOR = "bpf_iter__task_sweep"

# Kinds: BPF_PROG_TYPE_* in syscalls.py. An iterator is loaded for a kernel function of the host's.
PROGRAMS = {
    "on_cpu_sample": "perf_event",
    "walk_sample": "perf_event",
    "walk_sample_python": "perf_event",
    "on_switch": "raw_tracepoint",
    "walk_switch": "raw_tracepoint",
    "walk_switch_python": "raw_tracepoint",
    "on_waking": "raw_tracepoint",
    "on_call": "uprobe",
    "walk_call": "uprobe",
    "walk_call_python": "uprobe",
    "on_naming": "uprobe",
    "on_named": "uprobe",
    "on_bell": "uprobe",
    "on_fork": "raw_tracepoint",
    "on_exec": "raw_tracepoint",
    "on_exit": "raw_tracepoint",
    THREAD_ITERATOR: ITERATOR,
    SWEEP_ITERATOR: ITERATOR,
}
# Those that are loaded once a function of a device API is found: most targets have none.
CALL_PROGRAMS = ("on_call", "walk_call", "walk_call_python", "on_naming", "on_named", "on_bell")

# The maps of maps, and what their inner maps are made like.
TEMPLATES = {"unwind_tables": "unwind_table", "process_mappings": "mapping_table"}

MAPS = (
    *TEMPLATES.values(),
    *TEMPLATES,
    "settings",
    "counters",
    "processes",
    "threads",
    "running",
    "stacks",
    "sums0",
    "sums1",
    "ring",
    "stack_copies",
    "cgroups",
    "excluded_cgroups",
    "scratch",
    "wait_budgets",
    "known_addresses",
    "pythons",
    "python_chains",
    "sample_walkers",
    "timed_processes",
    "sample_budgets",
    "switch_walkers",
    "api_calls",
    "api_probes",
    "callers",
    "new_caller",
    "calls0",
    "calls1",
    "queues",
    "call_budgets",
    "run_budget",
    "call_walkers",
    "kernel_names",
    "chances",
    "short_lived0",
    "short_lived1",
    "swept_stacks",
    "swept_threads",
)
