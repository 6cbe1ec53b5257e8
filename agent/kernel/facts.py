# SPDX-License-Identifier: Apache-2.0
"""What the programs have to know of the running kernel: offsets, and which helpers it has."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from aiflame.agent import kernelfs
from aiflame.agent.errors import EnvironmentUnfit
from aiflame.agent.kernel import syscalls
from aiflame.agent.kernel.abi import MAX_KERNEL_FRAMES, HostConstant
from aiflame.agent.kernel.arch import this_architecture
from aiflame.agent.kernel.btf import Btf
from aiflame.agent.symbols.store import Store

# The kernel's build id: another kernel, other offsets in its structures.
_KERNEL_NOTES = Path("/sys/kernel/notes")
_PERF_EVENT_MAX_STACK = Path("/proc/sys/kernel/perf_event_max_stack")

_ITERATED_FUNCTION = "bpf_iter_task"

# struct bpf_insn of the programs that try a helper (include/uapi/linux/bpf.h).
_PASS_RESULT_ON = struct.pack("<BBhi", 0xBF, 0x01, 0, 0)  # r1 = r0
_RETURN_0 = struct.pack("<BBhi", 0xB7, 0, 0, 0) + struct.pack("<BBhi", 0x95, 0, 0, 0)
# Numbers of helpers (enum bpf_func_id, same file).
_GET_CURRENT_CGROUP_ID, _GET_CURRENT_TASK_BTF, _GET_ATTACH_COOKIE, _TASK_PT_REGS = 80, 158, 174, 175


def _call(helper: int) -> bytes:
    return struct.pack("<BBhi", 0x85, 0, 0, helper)


# Kind of program and instructions that only a kernel with the helper takes.
_TRIES = {
    HostConstant.HAS_TASK_PT_REGS: (
        "raw_tracepoint",
        _call(_GET_CURRENT_TASK_BTF) + _PASS_RESULT_ON + _call(_TASK_PT_REGS),
    ),
    HostConstant.HAS_ATTACH_COOKIE: ("uprobe", _call(_GET_ATTACH_COOKIE)),
    HostConstant.HAS_CGROUP_ID: ("raw_tracepoint", _call(_GET_CURRENT_CGROUP_ID)),
}

# Members of structures whose offsets are constants; several names stand for renames, newest first.
_OFFSETS: dict[HostConstant, tuple[tuple[str, ...], ...]] = {
    HostConstant.TASK_PID: (("task_struct", "pid"),),
    HostConstant.TASK_TGID: (("task_struct", "tgid"),),
    HostConstant.TASK_COMM: (("task_struct", "comm"),),
    HostConstant.TASK_GROUP_LEADER: (("task_struct", "group_leader"),),
    HostConstant.TASK_FLAGS: (("task_struct", "flags"),),
    # Renamed in v5.14 (kernel commit 2f064a59a11f).
    HostConstant.TASK_STATE: (("task_struct", "__state", "state"),),
    HostConstant.TASK_STACK: (("task_struct", "stack"),),
    HostConstant.TASK_SIGNAL: (("task_struct", "signal"),),
    HostConstant.TASK_REAL_PARENT: (("task_struct", "real_parent"),),
    # Monotonic since v5.5 (kernel commit cf25e24db61c); before, the same under that name.
    HostConstant.TASK_START_TIME: (("task_struct", "start_time"),),
    HostConstant.TASK_RAN: (("task_struct", "se"), ("sched_entity", "sum_exec_runtime")),
    HostConstant.TASK_RAN_BEFORE: (
        ("task_struct", "se"),
        ("sched_entity", "prev_sum_exec_runtime"),
    ),
    HostConstant.TASK_NVCSW: (("task_struct", "nvcsw"),),
    HostConstant.TASK_NIVCSW: (("task_struct", "nivcsw"),),
    HostConstant.TASK_POLICY: (("task_struct", "policy"),),
    HostConstant.TASK_ON_CPU: (("task_struct", "on_cpu"),),
    HostConstant.TASK_THREAD_POINTER: (("task_struct", "thread"), ("thread_struct", "fsbase")),
    HostConstant.SIGNAL_LIVE: (("signal_struct", "live"),),
    HostConstant.TASK_MM: (("task_struct", "mm"),),
    HostConstant.MM_ARG_START: (("mm_struct", "arg_start"),),
    HostConstant.MM_ARG_END: (("mm_struct", "arg_end"),),
}
# Of when a task last got a CPU: only with CONFIG_SCHED_INFO.
_LAST_ARRIVAL = (("task_struct", "sched_info"), ("sched_info", "last_arrival"))


@dataclass(frozen=True, slots=True)
class KernelFacts:
    """Constants of the running kernel, and what an iterator over tasks is loaded for.

    Attributes:
        constants: Of the programs.
        iterated_function: BTF id of the kernel function that stands for iterators over tasks
            (v5.8); None where there is none.
    """

    constants: Mapping[HostConstant, int]
    iterated_function: int | None


def _offset(btf: Btf, path: tuple[tuple[str, ...], ...]) -> int:
    return sum(btf.member_offset(*step) for step in path)


def facts_of_btf(btf: Btf) -> KernelFacts:
    """Returns what the kernel's type information says.

    Raises:
        EnvironmentUnfit: A struct member that aiflame needs is missing.
    """
    constants = {constant: _offset(btf, path) for constant, path in _OFFSETS.items()}
    # The fourth argument came in v5.18 (kernel commit fa2c3254d7cf).
    has_state = btf.tracepoint_arguments("sched_switch") >= 4
    constants[HostConstant.SWITCH_HAS_STATE] = int(has_state)
    constants[HostConstant.HAS_LAST_ARRIVAL] = constants[HostConstant.TASK_LAST_ARRIVAL] = 0
    with contextlib.suppress(EnvironmentUnfit):
        constants[HostConstant.TASK_LAST_ARRIVAL] = _offset(btf, _LAST_ARRIVAL)
        constants[HostConstant.HAS_LAST_ARRIVAL] = 1
    iterated = None
    with contextlib.suppress(EnvironmentUnfit):
        iterated = btf.function_type(_ITERATED_FUNCTION)
    return KernelFacts(constants, iterated)


def kernel_facts(store: Store) -> KernelFacts:
    """Returns the facts about the running kernel.

    Args:
        store: Keeps what was read of the kernel's type information, which takes 0.1 s and 20 MB.

    Raises:
        EnvironmentUnfit: A struct member that aiflame needs is missing, or all type information.
    """
    facts = _kept(store) or _read_and_keep(store)
    constants = {
        **facts.constants,
        **{constant: int(is_helper_taken(constant)) for constant in _TRIES},
        HostConstant.THREAD_SIZE: this_architecture().thread_size_bytes,
        HostConstant.KERNEL_FRAMES_MAX: min(_perf_event_max_stack(), MAX_KERNEL_FRAMES),
    }
    return KernelFacts(constants, facts.iterated_function)


def _store_name() -> str | None:
    try:
        notes = kernelfs.read_bytes(_KERNEL_NOTES)
    except OSError:
        return None
    return f"kernel-{hashlib.sha256(notes).hexdigest()[:32]}.json"


def _kept(store: Store) -> KernelFacts | None:
    name = _store_name()
    mapping = None if name is None else store.open(name)
    if mapping is None:
        return None
    with mapping, contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
        kept = json.loads(mapping[:])
        constants = {HostConstant[name]: int(value) for name, value in kept["constants"].items()}
        if constants.keys() >= _OFFSETS.keys():
            return KernelFacts(constants, kept["iterated_function"])
    return None


def _read_and_keep(store: Store) -> KernelFacts:
    facts = facts_of_btf(Btf.of_kernel())
    name = _store_name()
    if name is not None:
        constants = {constant.name: value for constant, value in facts.constants.items()}
        kept = {"constants": constants, "iterated_function": facts.iterated_function}
        store.write(name, [json.dumps(kept).encode()])
    return facts


def is_helper_taken(helper: HostConstant) -> bool:
    """Whether the kernel takes a small program that calls a helper; tried, not read off a version.

    Args:
        helper: One of the constants that say whether there is one.
    """
    kind, instructions = _TRIES[helper]
    try:
        fd = syscalls.load_program(kind, "try", instructions + _RETURN_0)
    except OSError:
        return False
    os.close(fd)
    return True


def _perf_event_max_stack() -> int:
    try:
        return int(kernelfs.read_bytes(_PERF_EVENT_MAX_STACK))
    except (OSError, ValueError):
        return MAX_KERNEL_FRAMES
