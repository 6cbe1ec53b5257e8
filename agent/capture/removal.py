# SPDX-License-Identifier: Apache-2.0
"""Takes processes out of a capture, and all that was known through them alone."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Collection

import numpy as np

_LISTED = "IN (SELECT value FROM json_each(?))"
_STACKS = f"IN (SELECT id FROM stacks WHERE process_id {_LISTED})"  # noqa: S608 - our own
_THREADS = f"IN (SELECT id FROM threads WHERE process_id {_LISTED})"  # noqa: S608
_KERNELS = f"IN (SELECT id FROM kernels WHERE process_id {_LISTED})"  # noqa: S608
_CODES = f"IN (SELECT id FROM kernel_codes WHERE kernel_id {_KERNELS})"  # noqa: S608
# What processes have, before what it is found by.
_OF_PROCESSES = (
    *(("samples", f"stack_id {_STACKS}"), ("waits", f"stack_id {_STACKS}")),
    *(("api_calls", f"stack_id {_STACKS}"), ("api_events", f"stack_id {_STACKS}")),
    ("launches", f"stack_id {_STACKS}"),
    ("kernel_times", f"kernel_id {_KERNELS}"),
    *(("device_samples", f"code_id {_CODES}"), ("instructions", f"code_id {_CODES}")),
    ("kernel_codes", f"kernel_id {_KERNELS}"),
    ("thread_accounts", f"thread_id {_THREADS}"),
    *(("stacks", f"process_id {_LISTED}"), ("kernels", f"process_id {_LISTED}")),
    *(("threads", f"process_id {_LISTED}"), ("mappings", f"process_id {_LISTED}")),
    *(("delays", f"process_id {_LISTED}"), ("process_labels", f"process_id {_LISTED}")),
    ("processes", f"id {_LISTED}"),
)
# What processes share, where nobody mentions it any more.
_UNUSED = (
    ("functions", "id NOT IN (SELECT function_id FROM frames)"),
    (
        "code_objects",
        "id NOT IN (SELECT object_id FROM kernel_codes WHERE object_id IS NOT NULL)",
    ),
    (
        "binaries",
        "id NOT IN (SELECT binary_id FROM mappings"
        " UNION SELECT binary_id FROM functions WHERE binary_id IS NOT NULL"
        " UNION SELECT binary_id FROM kernel_codes WHERE binary_id IS NOT NULL)",
    ),
)


def remove_processes(database: sqlite3.Connection, ids: Collection[int]) -> None:
    """Removes processes with their stacks, samples and names; their bytes do not stay in the file.

    Args:
        database: An open capture, in a transaction.
        ids: Of the processes.

    Raises:
        sqlite3.Error: As where the disk is full; the transaction is to be rolled back.
    """
    # Else what is deleted stays in pages that are free (https://sqlite.org/pragma.html).
    database.execute("PRAGMA secure_delete = ON")
    removed = json.dumps([*ids])
    for table, which in _OF_PROCESSES:
        database.execute(f"DELETE FROM {table} WHERE {which}", (removed,))  # noqa: S608 - our own
    used = json.dumps(_frames_of_stacks(database))
    database.execute(f"DELETE FROM frames WHERE NOT id {_LISTED}", (used,))  # noqa: S608
    for table, which in _UNUSED:
        database.execute(f"DELETE FROM {table} WHERE {which}")  # noqa: S608 - our own


def _frames_of_stacks(database: sqlite3.Connection) -> list[int]:
    rows = database.execute("SELECT frames FROM stacks WHERE frames IS NOT NULL")
    found: list[int] = np.unique(np.frombuffer(b"".join(f for (f,) in rows), "<u4")).tolist()
    return found
