# SPDX-License-Identifier: Apache-2.0
"""Unwind tables for a walk in Python, waited for where the cache has none."""

from __future__ import annotations

import contextlib

from aiflame.agent.processes.cached_tables import CachedTables
from aiflame.agent.unwind.records import BadUnwindInfo
from aiflame.agent.unwind.table import UnwindTable

# How often it is asked whether the builder has given up.
_WAIT_S = 1.0


class WaitingTables:
    """A source of tables that waits for what is not there yet.

    Args:
        tables: Where they come from.
    """

    def __init__(self, tables: CachedTables) -> None:
        self._tables = tables

    def table_of(self, binary: int) -> UnwindTable | None:
        """Returns a binary's table, None where it cannot be had."""
        with contextlib.suppress(BadUnwindInfo):
            table = self._tables.load(binary)
            if table is None and self._tables.build(binary):
                while binary not in self._tables.finished():  # it gives up on a file in the end
                    self._tables.wait(_WAIT_S)
                table = self._tables.load(binary)
            return table
        return None

    def is_being_built(self, binary: int) -> bool:
        """Returns False: `table_of` waits."""
        return False
