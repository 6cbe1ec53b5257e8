# SPDX-License-Identifier: Apache-2.0
"""What the kernel half's counters of losses mean to a user."""

from __future__ import annotations

from aiflame.agent.recording.abi import Counter

# Counters that mean a loss: the name in the capture, and what it means with its cure.
LOSS_MEANINGS: dict[Counter, tuple[str, str]] = {
    Counter.STACKS_FULL: (
        "stack_store_full",
        "samples whose stack found no room: their time is kept, their frames are not; "
        "raise --stack-storage-size",
    ),
    Counter.SUMS_FULL: (
        "sums_full",
        "samples and waits that found no room at all: their time is missing; "
        "raise --hash-storage-size",
    ),
    Counter.RING_FULL: (
        "ring_full",
        "events (process starts, exits, long waits) that came faster than they were read; "
        "the sums are complete, names of short-lived threads may be missing",
    ),
    Counter.THREADS_FULL: (
        "threads_full",
        "context switches of threads beyond the thread table: their off-CPU time is missing; "
        "raise --thread-storage-size",
    ),
    Counter.PROCESSES_FULL: (
        "processes_full",
        "samples of processes beyond the process table; record fewer processes at once",
    ),
    Counter.KERNEL_STACK: (
        "no_kernel_stack",
        "samples in kernel code without kernel frames: the kernel could not walk its own stack",
    ),
    Counter.KERNEL_FRAMES: (
        "kernel_frames_cut",
        "samples with more kernel frames than are kept; those nearest to the leaf are there",
    ),
    Counter.USER_FRAMES: (
        "user_frames_cut",
        "samples with more than 127 user frames; those nearest to the leaf are there",
    ),
    Counter.WAIT_EVENTS: (
        "waits_not_listed",
        "long waits beyond 1,000 a second and CPU: their time is in every sum, but they are not "
        "listed one by one; raise --min-wait",
    ),
    Counter.PYTHON_FULL: (
        "python_store_full",
        "samples whose Python frames found no room: their native frames are there; "
        "raise --stack-storage-size",
    ),
    Counter.CALLS_FULL: (
        "calls_full",
        "calls of device APIs that found no room: they are missing; raise --hash-storage-size",
    ),
    Counter.CALL_EVENTS: (
        "calls_not_listed",
        "calls of device APIs beyond 100,000 a second: they are in every sum, but they are not "
        "listed one by one",
    ),
    Counter.CALLERS_FULL: (
        "callers_full",
        "calls of device APIs by more than 1,024 threads: those of further ones are missing",
    ),
    Counter.CALL_ARGUMENTS: (
        "call_arguments_unreadable",
        "arguments of device API calls that could not be read: the calls count, without their size",
    ),
    Counter.KERNEL_NAMES: (
        "kernel_names_lost",
        "names of kernels that came faster than they were taken, or were told by calls inside of"
        " four others",
    ),
    Counter.SCRATCH: ("no_scratch", "samples without room to walk a stack; please report this"),
}
