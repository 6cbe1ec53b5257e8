# SPDX-License-Identifier: Apache-2.0
"""What windows say of some of their processes."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import numpy.typing as npt
from aiflame.agent.model.window import COLUMNS, NO_CHAIN, NO_STACK, NONE, Rows, Window, packed

# Whose rows belong to one process each; all that refers to one of them does, too.
_OWNED = ("processes", "threads", "kernels", "codes", "chains", "stacks")
# What a reference holds where there is nothing to refer to.
_NOTHING = {"chains": NO_CHAIN, "stacks": NO_STACK}
# Of several processes: what is left of them is what rows that are left refer to.
_SHARED = ("cgroups", "binaries")


def of_processes(window: Window, wanted: Collection[int]) -> Window:
    """Returns what a window says of processes, and nothing that others are called.

    What is of no process stays: devices, their readings, and losses, of which nobody knows whose
    they are. Texts stay as well, whether a row has them or not: captures have those of rows.

    Args:
        window: Any.
        wanted: Their numbers.
    """
    numbers = np.fromiter(wanted, np.uint32, len(wanted))
    known: dict[str, npt.NDArray[Any]] = {}
    columns: dict[str, Rows] = {}
    # Those that others refer to come first.
    for name in (*_OWNED, *(name for name in COLUMNS if name not in _OWNED)):
        column, rows = COLUMNS[name], window.rows(name)
        key = column.key[0] if column.key else ""
        is_left = np.isin(rows[key], numbers) if name == "processes" else np.ones(len(rows), bool)
        owners = [field for field, other in column.refers.items() if other in _OWNED]
        for field in owners:
            # A launch of a kernel that nobody could name is its thread's.
            other = column.refers[field]
            is_of_none = rows[field] == _NOTHING.get(other, NONE)
            is_left &= np.isin(rows[field], known[other]) | is_of_none
        if owners:
            is_left &= rows[owners[0]] != NONE
        columns[name] = rows[is_left]
        if name in _OWNED:
            known[name] = columns[name][key]
    for name in _SHARED:
        used = [
            columns[other][field]
            for other, column in COLUMNS.items()
            for field, refers_to in column.refers.items()
            if refers_to == name
        ]
        number = columns[name][COLUMNS[name].key[0]]
        columns[name] = columns[name][np.isin(number, np.concatenate(used))]
    for name, column in COLUMNS.items():
        if column.parts:
            owned = window.rows(column.parts)
            columns[name], columns[column.parts] = packed(name, columns[name], owned)
    return Window.of(
        window.number,
        window.start_ns,
        window.end_ns,
        columns,
        texts=window.texts,
        is_last=window.is_last,
        cost=window.cost,
    )
