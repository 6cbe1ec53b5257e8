# SPDX-License-Identifier: Apache-2.0
"""All that the host half of a recording knows about the processor; bpf/arch.h is its twin."""

from __future__ import annotations

import functools
import platform
from dataclasses import dataclass

from aiflame.agent.errors import EnvironmentUnfit


@dataclass(frozen=True, slots=True)
class Architecture:
    """Numbers that differ between processors.

    Syscall numbers: arch/x86/entry/syscalls/syscall_64.tbl. `thread_size_bytes` is the kernel
    stack's size (THREAD_SIZE in asm/page_64_types.h), used only on kernels before v5.15, which
    lack a helper that knows it.
    """

    syscall_bpf: int
    syscall_perf_event_open: int
    thread_size_bytes: int


_ARCHITECTURES = {
    "x86_64": Architecture(syscall_bpf=321, syscall_perf_event_open=298, thread_size_bytes=16384),
}


@functools.cache
def this_architecture() -> Architecture:
    """Returns the facts about this machine.

    Raises:
        EnvironmentUnfit: The processor is not supported.
    """
    machine = platform.machine()
    if machine not in _ARCHITECTURES:
        supported = ", ".join(_ARCHITECTURES)
        raise EnvironmentUnfit(f"recording on {machine} is not supported (only {supported})")
    return _ARCHITECTURES[machine]
