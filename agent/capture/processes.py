# SPDX-License-Identifier: Apache-2.0
"""The processes of a capture, read without anything else of it."""

from __future__ import annotations

import sqlite3

from aiflame.agent.model.profile import Process


def processes_of(database: sqlite3.Connection) -> tuple[Process, ...]:
    """Returns the processes in the order of their ids."""
    rows = database.execute(
        "SELECT pid, parent_pid, name, executable, command_line, cgroup, container_id,"
        " started_ns, exited_ns FROM processes ORDER BY id"
    )
    return tuple(Process(*row) for row in rows)
