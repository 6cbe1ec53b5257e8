# SPDX-License-Identifier: Apache-2.0
"""Rows of the capture, and the parts of an interval that is still open, from recorder state."""

from __future__ import annotations

from typing import Any

from aiflame.agent.model.profile import SampleClass
from aiflame.agent.processes.identity import identity_of
from aiflame.agent.processes.table import ProcessImage, ThreadInfo


def row_of_image(image: ProcessImage, start_ns: int, end_ns: int) -> tuple[Any, ...]:
    """Returns a row of `processes`; one that ended after the recording was there to its end."""
    exited_ns = image.exited_ns
    return (
        image.index,
        image.pid,
        image.parent_pid,
        image.name,
        image.executable,
        image.command_line,
        image.cgroup,
        identity_of(image.cgroup).container_id,
        max(image.started_ns - start_ns, 0),
        None if exited_ns is None or exited_ns >= end_ns else exited_ns - start_ns,
    )


def row_of_thread(thread: ThreadInfo) -> tuple[Any, ...]:
    """Returns a row of `threads`."""
    return (
        thread.index,
        thread.image.index,
        thread.tid,
        thread.name,
        thread.on_cpu_ns,
        thread.observed_ns,
    )


def open_parts(state: Any, end_ns: int) -> list[tuple[SampleClass, int]]:
    """Splits an interval that has not ended by class, as the kernel half would at its end.

    Args:
        state: A thread_state that is off the CPU.
        end_ns: When the recording ended, monotonic.
    """
    switched_ns, waking_ns = int(state["switched_ns"]), int(state["waking_ns"])
    if int(state["off_class"]) == SampleClass.PREEMPTED:
        return [(SampleClass.PREEMPTED, end_ns - switched_ns)]
    if not switched_ns <= waking_ns <= end_ns:
        waking_ns = end_ns
    parts = [
        (SampleClass.BLOCKED, waking_ns - switched_ns),
        (SampleClass.WAITING_TO_RUN, end_ns - waking_ns),
    ]
    return [(sample_class, ns) for sample_class, ns in parts if ns]
