# SPDX-License-Identifier: Apache-2.0
"""The rows of `kernels`: one for each name in a process image, whoever met it first."""

from __future__ import annotations

from aiflame.agent.capture.writer import CaptureWriter


class KernelTable:
    """Gives out row ids; launches and device samples of one kernel share its row."""

    def __init__(self) -> None:
        self._rows: list[tuple[int, str, str, str] | None] = []
        self._by_key: dict[tuple[int, str, str, str], int] = {}

    def row(self, image: int, api: str, name: str, unnamed: str = "") -> int:
        """Returns the row of a kernel.

        Args:
            image: Index of the process image.
            api: As in gpu/apis.
            name: Linkage name, "" where it is unknown.
            unnamed: Why it is unknown.
        """
        key = (image, api, name, unnamed)
        if key not in self._by_key:
            self._by_key[key] = len(self._rows)
            self._rows.append(key)
        return self._by_key[key]

    def reserve(self) -> int:
        """Returns a row that is filled in later."""
        self._rows.append(None)
        return len(self._rows) - 1

    def fill(self, row: int, image: int, api: str, name: str, unnamed: str) -> None:
        """Fills in a reserved row."""
        self._rows[row] = (image, api, name, unnamed)

    def write(self, writer: CaptureWriter) -> None:
        """Writes all rows that are filled."""
        rows = ((row, *kernel) for row, kernel in enumerate(self._rows) if kernel is not None)
        writer.put("kernels", rows)
