# SPDX-License-Identifier: Apache-2.0
"""The facts about the running kernel that are compiled into the programs.

Apart from the recorder's other modules, since reading BTF costs 30 MB for a moment: it is done in
the compiling child.
"""

from __future__ import annotations

import os
from pathlib import Path

from aiflame.agent.errors import EnvironmentUnfit
from aiflame.agent.recording.arch import this_architecture
from aiflame.agent.recording.btf import Btf

# bpf/aiflame.h; abi.py has it too, but brings numpy along.
MAX_FRAMES = 127


def _perf_event_max_stack() -> int:
    try:
        return int(Path("/proc/sys/kernel/perf_event_max_stack").read_text())
    except (OSError, ValueError):
        return MAX_FRAMES


def _last_arrival(btf: Btf) -> int | None:
    """Offset of when a task last got a CPU; None without CONFIG_SCHED_INFO."""
    try:
        return btf.member_offset("task_struct", "sched_info") + btf.member_offset(
            "sched_info", "last_arrival"
        )
    except EnvironmentUnfit:
        return None


def kernel_macros(btf: Btf) -> dict[str, int]:
    """Returns the kernel facts that bpf/task.h asks for, from BTF.

    Raises:
        EnvironmentUnfit: A struct member that aiflame needs is missing.
    """
    arrived = _last_arrival(btf)
    return {
        "TASK_PID": btf.member_offset("task_struct", "pid"),
        "TASK_TGID": btf.member_offset("task_struct", "tgid"),
        "TASK_COMM": btf.member_offset("task_struct", "comm"),
        "TASK_GROUP_LEADER": btf.member_offset("task_struct", "group_leader"),
        "TASK_FLAGS": btf.member_offset("task_struct", "flags"),
        # Renamed in v5.14 (kernel commit 2f064a59a11f).
        "TASK_STATE": btf.member_offset("task_struct", "__state", "state"),
        "TASK_STACK": btf.member_offset("task_struct", "stack"),
        "TASK_SIGNAL": btf.member_offset("task_struct", "signal"),
        "TASK_REAL_PARENT": btf.member_offset("task_struct", "real_parent"),
        # Monotonic since v5.5 (kernel commit cf25e24db61c); before, the same under that name.
        "TASK_START_TIME": btf.member_offset("task_struct", "start_time"),
        "TASK_RAN": btf.member_offset("task_struct", "se")
        + btf.member_offset("sched_entity", "sum_exec_runtime"),
        "TASK_NVCSW": btf.member_offset("task_struct", "nvcsw"),
        "TASK_NIVCSW": btf.member_offset("task_struct", "nivcsw"),
        "TASK_STOPPED_KNOWN": int(arrived is not None),
        "TASK_LAST_ARRIVAL": arrived or 0,
        "TASK_RAN_BEFORE": btf.member_offset("task_struct", "se")
        + btf.member_offset("sched_entity", "prev_sum_exec_runtime"),
        "TASK_POLICY": btf.member_offset("task_struct", "policy"),
        "TASK_ON_CPU": btf.member_offset("task_struct", "on_cpu"),
        "TASK_THREAD_POINTER": btf.member_offset("task_struct", "thread")
        + btf.member_offset("thread_struct", "fsbase"),
        "SIGNAL_LIVE": btf.member_offset("signal_struct", "live"),
        "THREAD_SIZE": this_architecture().thread_size_bytes,
        # The fourth argument came in v5.18 (kernel commit fa2c3254d7cf).
        "SWITCH_HAS_STATE": int(btf.tracepoint_arguments("sched_switch") >= 4),
        "KERNEL_FRAMES_MAX": min(_perf_event_max_stack(), MAX_FRAMES),
        "PAGE_SIZE": os.sysconf("SC_PAGE_SIZE"),
    }
