# SPDX-License-Identifier: Apache-2.0
"""Checks of the group `os`: the machine and what it lets this process do."""

from __future__ import annotations

import platform
from pathlib import Path

from aiflame.agent import kernelfs, rights
from aiflame.agent.doctor.base import Context, Finding, ok, skip, warn
from aiflame.agent.kernel import checks, descriptors
from aiflame.agent.kernel.arch import this_architecture
from aiflame.agent.processes.targets import cgroup2_mounts
from aiflame.agent.processes.taskstats import are_accounted
from aiflame.agent.rights import Capability

_PTRACE_SCOPE = "/proc/sys/kernel/yama/ptrace_scope"
_SECURITYFS = Path("/sys/kernel/security")


def linux(_: Context) -> Finding:
    """Is it Linux? The release is for the reader only."""
    checks.require_linux()
    return ok(f"Linux {platform.release()}")


def architecture(_: Context) -> Finding:
    """Is the processor known?"""
    this_architecture()
    return ok(f"{platform.machine()} is supported")


def pid_namespace(_: Context) -> Finding:
    """Are pids here those that the kernel half reports?"""
    checks.require_host_pid_namespace()
    return ok("pids are the host's")


def cgroup2(_: Context) -> Finding:
    """Is there a cgroup v2 tree for --cgroup?"""
    mounts = cgroup2_mounts()
    if mounts:
        return ok(f"cgroup v2 is mounted at {mounts[0]}")
    return warn(
        "cgroup v2 is not mounted",
        "sudo mkdir -p /run/cgroup2 && sudo mount -t cgroup2 none /run/cgroup2",
    )


def lockdown(_: Context) -> Finding:
    """Does kernel lockdown let programs read kernel memory?"""
    checks.require_no_lockdown()
    mode = checks.lockdown_mode()
    if mode is not None:
        return ok(f"kernel lockdown is {mode}")
    if any(_SECURITYFS.iterdir() if _SECURITYFS.is_dir() else ()):
        return ok("this kernel has no lockdown")
    return skip("not visible here: securityfs is not mounted")


def ptrace_scope(_: Context) -> Finding:
    """Does Yama let one process read the memory of another?"""
    level = kernelfs.read_text(_PTRACE_SCOPE).strip()
    # "No attach" binds CAP_SYS_PTRACE too, and process_vm_readv(2) asks for the same permission
    # (Documentation/admin-guide/LSM/Yama.rst; mm_access of kernel/fork.c, v6.1).
    if level == "3":
        return warn(
            "kernel.yama.ptrace_scope is 3: memory of others cannot be read, which is where Python"
            " keeps the names of its frames",
            "kernel.yama.ptrace_scope=2 in /etc/sysctl.d, and a reboot: 3 cannot be taken back",
        )
    return ok(f"kernel.yama.ptrace_scope is {level}" if level else "this kernel has no Yama")


def delay_accounting(_: Context) -> Finding:
    """Does the kernel account what tasks wait for, and may it be asked?"""
    if not are_accounted():
        return ok(
            "delay accounting is off: with kernel.task_delayacct=1, set before targets start,"
            " `stats` also has what the kernel says they waited for (block I/O, swap-in, reclaim)"
        )
    if rights.missing([Capability.NET_ADMIN]):
        words = f"delay accounting is on, and takes {Capability.NET_ADMIN} to be read"
        return warn(words, f"run as root, or with {Capability.NET_ADMIN}")
    return ok("delay accounting is on")


def seccomp(_: Context) -> Finding:
    """Do the system calls of a recording get through to the kernel?"""
    checks.require_system_calls()
    if checks.has_seccomp_filter():
        return ok("a seccomp filter is active, and lets bpf() and perf_event_open() through")
    return ok("no seccomp filter")


def open_files(_: Context) -> Finding:
    """May a recording hold as many files open as it needs?"""
    descriptors.raise_limit()  # as a recording does
    descriptors.require_enough()
    return ok(f"{descriptors.for_targets():,} files of targets may be held open")


def address_space(_: Context) -> Finding:
    """May a recording map as much as it needs?"""
    checks.require_address_space()
    return ok("a recording may map as much as it needs")
