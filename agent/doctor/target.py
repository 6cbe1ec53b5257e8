# SPDX-License-Identifier: Apache-2.0
"""Checks of the group `target`: the process of --pid."""

from __future__ import annotations

from aiflame.agent.doctor.base import Context, Finding, ok, skip, warn
from aiflame.agent.inspector.inspector import Inspector
from aiflame.agent.processes import procfs
from aiflame.agent.processes.targets import target_of_pids


def visible(context: Context) -> Finding:
    """Is there such a process here?"""
    if context.pid is None:
        return skip("no --pid")
    return ok(f"{target_of_pids([context.pid]).words} is visible here")


def mappings(context: Context) -> Finding:
    """Can its code be found, for the names of its functions?"""
    if context.pid is None:
        return skip("no --pid")
    with Inspector() as inspector:
        maps = procfs.executable_mappings(inspector.opener, context.pid)
        command_line = procfs.command_line(inspector.opener, context.pid)
    if maps:
        return ok("its mappings can be read")
    if not command_line:
        # No command line: a kernel thread, or a process that has ended and was not collected.
        return ok("it has no user code: only kernel frames can be recorded")
    return warn(f"/proc/{context.pid}/maps cannot be read", "run as root, or with CAP_SYS_PTRACE")
