# SPDX-License-Identifier: Apache-2.0
"""The kernels of a recording, each stored once: launches and device samples meet in these rows."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Collection, Set
from typing import NamedTuple

from aiflame.agent.model.window import OpenWindow, rows_of
from aiflame.agent.symbols.frames import clean_name

# Names of one process: PyTorch's libraries have some thousand kernels, of which a model runs a few
# hundred. One that compiles kernels all day has ever new ones: past half as many, those that were
# not mentioned for longest make room (`forget_unused`).
_MOST_NAMES = 1 << 14
_TOO_MANY = f"beyond {_MOST_NAMES:,} kernels of its process"


class _Known(NamedTuple):
    """A kernel's id, and how many windows there were before the one that mentioned it last."""

    number: int
    window: int


class KernelTable:
    """Gives out ids, and writes a row for each.

    Args:
        window: Where rows go.
    """

    def __init__(self, window: OpenWindow) -> None:
        self._window = window
        # By process image; then by API, name and why there is none, mentioned last at the end.
        self._known: defaultdict[int, dict[tuple[str, str, str], _Known]] = defaultdict(dict)
        self._counts: Counter[int] = Counter()  # of each image, with those that have no name
        self._next = self._windows = 0

    def id_of(self, image: int, api: str, name: str, unnamed: str = "") -> int:
        """Returns the id of a kernel, entered now if it was not known.

        Args:
            image: Index of the process image.
            api: As in gpu/apis/.
            name: Linkage name as the target gives it, "" where it is unknown.
            unnamed: Why it is unknown.
        """
        all_known, key = self._known[image], (api, clean_name(name), unnamed)
        if key not in all_known and self._counts[image] >= _MOST_NAMES:
            key = (api, "", _TOO_MANY)
        known = all_known.get(key)
        if known is not None and known.window == self._windows:  # as of most: 0.3 us
            return known.number
        number = self._new(image, *key) if known is None else known.number
        all_known.pop(key, None)
        all_known[key] = _Known(number, self._windows)
        return number

    def unnamed(self, image: int, api: str, why: str) -> int | None:
        """Returns the id of a kernel of its own that may be named later; `why` it is not yet.

        None where its process has too many.
        """
        if self._counts[image] >= _MOST_NAMES:
            return None
        # Kernels without names are not each other: nothing else gets this id.
        return self._new(image, api, "", why)

    def _new(self, image: int, api: str, name: str, unnamed: str) -> int:
        self._counts[image] += 1
        number = self._next
        self._next += 1
        self._tell(number, image, api, name, unnamed)
        return number

    def name(self, kernel: int, image: int, api: str, name: str) -> None:
        """Names a kernel that was entered without."""
        self._tell(kernel, image, api, clean_name(name), "")

    def forget_unused(self, used: Set[int]) -> set[int]:
        """Forgets kernels of processes that have many: those that no window mentioned for longest.

        To be called when a window was closed, before anything is added to the next. A kernel that
        is mentioned again gets another id; one without a name, that may be named later, stays.

        Args:
            used: Kernels that the window mentions by what else is known of them.

        Returns:
            Their ids, which nothing may mention any more.
        """
        gone: set[int] = set()
        for image, all_known in self._known.items():
            excess = self._counts[image] - _MOST_NAMES // 2
            unused = (
                key
                for key, known in all_known.items()
                if known.window < self._windows and known.number not in used
            )
            forgotten = [*itertools.islice(unused, max(excess, 0))]
            gone.update(all_known.pop(key).number for key in forgotten)
            self._counts[image] -= len(forgotten)
        if gone:
            self._window.drop("kernels", gone)
        self._windows += 1
        return gone

    def forget_images(self, images: Collection[int]) -> None:
        """Forgets the kernels of process images that have ended."""
        for image in images:
            self._known.pop(image, None)
            del self._counts[image]

    def _tell(self, kernel: int, image: int, api: str, name: str, unnamed: str) -> None:
        text = self._window.text
        row = (kernel, image, text(api), text(name), text(unnamed))
        self._window.define("kernels", rows_of("kernels", row))
