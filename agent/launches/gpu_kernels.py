# SPDX-License-Identifier: Apache-2.0
"""The kernels of a recording, each stored once: launches and device samples meet in these rows."""

from __future__ import annotations

from collections.abc import Collection

from aiflame.agent.model.window import OpenWindow, rows_of
from aiflame.agent.symbols.frames import clean_name


class KernelTable:
    """Gives out ids, and writes a row for each.

    Args:
        window: Where rows go.
    """

    def __init__(self, window: OpenWindow) -> None:
        self._window = window
        self._ids: dict[tuple[int, str, str, str], int] = {}
        self._next = 0

    def id_of(self, image: int, api: str, name: str, unnamed: str = "") -> int:
        """Returns the id of a kernel, entered now if it was not known.

        Args:
            image: Index of the process image.
            api: As in gpu/apis/.
            name: Linkage name as the target gives it, "" where it is unknown.
            unnamed: Why it is unknown.
        """
        key = (image, api, clean_name(name), unnamed)
        known = self._ids.get(key)
        if known is None:
            known = self._ids[key] = self._next
            self._next += 1
            self._tell(known, *key)
        return known

    def unnamed(self, image: int, api: str, why: str) -> int:
        """Returns the id of a kernel of its own that may be named later; `why` it is not yet."""
        key = (image, api, "", why)
        # Kernels without names are not each other: nothing else gets this id.
        at = self._next
        self._next += 1
        self._tell(at, *key)
        return at

    def name(self, kernel: int, image: int, api: str, name: str) -> None:
        """Names a kernel that was entered without."""
        self._tell(kernel, image, api, clean_name(name), "")

    def forget_images(self, images: Collection[int]) -> None:
        """Forgets the kernels of process images that have ended."""
        for key in [key for key in self._ids if key[0] in images]:
            del self._ids[key]

    def _tell(self, kernel: int, image: int, api: str, name: str, unnamed: str) -> None:
        text = self._window.text
        row = (kernel, image, text(api), text(name), text(unnamed))
        self._window.define("kernels", rows_of("kernels", row))
