# SPDX-License-Identifier: Apache-2.0
"""The kernels of a recording, each stored once: launches and device samples meet in these rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from aiflame.agent.model.window import OpenWindow, rows_of
from aiflame.agent.symbols.frames import clean_name

# Names of one process: PyTorch's libraries have some thousand kernels, of which a model runs a few
# hundred.
_MOST_NAMES = 1 << 14
_TOO_MANY = f"beyond {_MOST_NAMES:,} kernels of its process"


class KernelTable:
    """Gives out ids, and writes a row for each.

    Args:
        window: Where rows go.
    """

    def __init__(self, window: OpenWindow) -> None:
        self._window = window
        self._ids: dict[tuple[int, str, str, str], int] = {}
        self._names: Counter[int] = Counter()  # of each process image
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
        if key not in self._ids and self._names[image] >= _MOST_NAMES:
            key = (image, api, "", _TOO_MANY)
        known = self._ids.get(key)
        if known is None:
            self._names[image] += 1
            known = self._ids[key] = self._next
            self._next += 1
            self._tell(known, *key)
        return known

    def unnamed(self, image: int, api: str, why: str) -> int | None:
        """Returns the id of a kernel of its own that may be named later; `why` it is not yet.

        None where its process has too many.
        """
        if self._names[image] >= _MOST_NAMES:
            return None
        self._names[image] += 1
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
        for image in images:
            del self._names[image]

    def _tell(self, kernel: int, image: int, api: str, name: str, unnamed: str) -> None:
        text = self._window.text
        row = (kernel, image, text(api), text(name), text(unnamed))
        self._window.define("kernels", rows_of("kernels", row))
