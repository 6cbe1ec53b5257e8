# SPDX-License-Identifier: Apache-2.0
"""What CAP_SYS_ADMIN is good for on this kernel, found out by trying; and doing without the rest.

Linux lets holders of CAP_PERFMON sample and probe. But a distribution may ask for more
(kernel.perf_event_paranoid=4 of Ubuntu), and v6.18 asks for it to open a uprobe as an event, which
is how probes are put on where one link does not take many. Seccomp filters are told to its holders
alone (seccomp_get_filter of kernel/seccomp.c, since v4.4), who look whether a helper gets through.
And /proc/PID/task/TID/stack is for them alone (proc_pid_stack of fs/proc/base.c, since v4.20): that
is read at the start.
"""

from __future__ import annotations

import os

from aiflame.agent import kernelfs, rights
from aiflame.agent.kernel import sysbpf
from aiflame.agent.kernel.probes import online_cpus
from aiflame.agent.kernel.syscalls import lift_memlock_limit
from aiflame.agent.kernel.uprobe_tries import UprobeTries
from aiflame.agent.rights import Capability

_SAMPLING, _CALLS = "CPUs are not sampled", "calls of device APIs are not recorded"
_SLEEPERS = "threads that sleep since before have no more than one kernel frame"
_HELPERS = "processes with a seccomp filter, as those of containers, get no GPU helper"


def costs_without_admin(uprobes: UprobeTries) -> list[str]:
    """Returns what is missing from a recording without CAP_SYS_ADMIN, in words.

    Args:
        uprobes: What the kernel does with probes; asked only where it may matter.
    """
    costs = _lasting_costs(uprobes, with_calls=True)
    if not rights.works_without(Capability.SYS_ADMIN, _read_kernel_stack):
        costs.append(_SLEEPERS)
    return [*costs, _HELPERS]


def give_up_rights() -> None:
    """Raises the limits that take more rights, then keeps those that a recording or a dump uses."""
    lift_memlock_limit()
    rights.keep_only(rights.USED | {Capability.SYS_ADMIN})


def give_up_admin(uprobes: UprobeTries, with_calls: bool, with_helpers: bool) -> None:
    """Does without CAP_SYS_ADMIN, unless more takes it on this kernel than is over by now.

    Args:
        uprobes: As for costs_without_admin.
        with_calls: Whether calls of device APIs are recorded.
        with_helpers: Whether helpers are loaded into processes.
    """
    if not with_helpers and not _lasting_costs(uprobes, with_calls):
        rights.keep_only(rights.USED)


def _lasting_costs(uprobes: UprobeTries, with_calls: bool) -> list[str]:
    costs = []
    if not rights.works_without(Capability.SYS_ADMIN, _open_clock):
        costs.append(_SAMPLING)
    is_asked = with_calls and not rights.works_without(Capability.SYS_ADMIN, _open_uprobe)
    if is_asked and not uprobes.answers.links_many:
        costs.append(_CALLS)
    return costs


def _open_clock() -> None:
    os.close(sysbpf.open_cpu_clock(online_cpus()[0], 1_000_000_000))


def _open_uprobe() -> None:
    # A directory has no code: the kernel says so (EINVAL) only to those who may open events.
    os.close(sysbpf.open_uprobe("/", 0, sysbpf.uprobe_event_type()))


def _read_kernel_stack() -> None:
    kernelfs.read_bytes("/proc/thread-self/stack")
