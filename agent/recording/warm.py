# SPDX-License-Identifier: Apache-2.0
"""Has symbol tables built while the recording runs, so that the picture is there soon after."""

from __future__ import annotations

import os

from aiflame.agent.kernel import abi
from aiflame.agent.processes.binaries import BinaryTable
from aiflame.agent.symbols.service import SymbolService

# A few large libraries take seconds; the files of a whole host would take longer than they save.
_MAX_WARMED = 200


class Warmer:
    """Announces each newly seen binary of a named target to the symbol service.

    Args:
        service: Builds tables at low priority.
        binaries: Grows while the recording runs.
        target_filter: With -a nothing is warmed: most binaries would never be asked for.
    """

    def __init__(
        self, service: SymbolService, binaries: BinaryTable, target_filter: abi.Filter
    ) -> None:
        self._service = service
        self._binaries = binaries
        self._limit = _MAX_WARMED if target_filter is abi.Filter.PIDS else 0
        self._done = 0

    def warm_new(self) -> None:
        """Announces what was seen since the last call; never waits."""
        files = self._binaries.files
        while self._done < min(len(files), self._limit):
            file = files[self._done]
            self._done += 1
            if file.fd is not None:
                self._service.warm(f"/proc/{os.getpid()}/fd/{file.fd}", file.root)
        self._service.poll()
