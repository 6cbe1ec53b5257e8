# SPDX-License-Identifier: Apache-2.0
"""The processes of a capture, read without anything else of it."""

from __future__ import annotations

import sqlite3

from aiflame.agent.model.profile import Process


def processes_of(database: sqlite3.Connection) -> tuple[Process, ...]:
    """Returns the processes in the order of their ids; those of one program share its words."""
    known: dict[str, str] = {}
    rows = database.execute(
        "SELECT pid, parent_pid, name, executable, command_line, cgroup, container_id,"
        " started_ns, exited_ns FROM processes ORDER BY id"
    )
    share = known.setdefault
    return tuple(
        Process(
            pid,
            parent_pid,
            share(name, name),
            share(executable, executable),
            share(command_line, command_line),
            share(cgroup, cgroup),
            share(container_id, container_id),
            started_ns,
            exited_ns,
        )
        for (
            pid,
            parent_pid,
            name,
            executable,
            command_line,
            cgroup,
            container_id,
            started_ns,
            exited_ns,
        ) in rows
    )
