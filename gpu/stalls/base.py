# SPDX-License-Identifier: Apache-2.0
"""The nine common categories of stalls, and how a vendor's words for them are described.

Colours are those of Okabe and Ito with two greys: made to be told apart under the common colour
vision deficits. Never the only carrier: a category's label stands wherever its colour does.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass


class StallCategory(enum.IntEnum):
    """What a sampled instruction waited for; the order is the order of tables and legends."""

    ISSUING = 0  # it did not wait
    MEMORY = 1  # for memory outside the core
    LOCAL_MEMORY = 2  # for memory in the core that its threads share
    DEPENDENCY = 3  # for the result of an instruction before it
    PIPE_BUSY = 4  # for a pipe that others use
    SYNC = 5  # for other threads
    FETCH_CONTROL = 6  # for instructions: their fetch, a branch, a constant
    READY = 7  # for nothing: another one was chosen
    OTHER = 8

    @property
    def label(self) -> str:
        """The words used in every report, for instance "local memory"."""
        return _LABELS.get(self, self.name.lower().replace("_", " "))

    @property
    def color(self) -> str:
        """Fill colour, "#rrggbb"."""
        return _COLORS[self]


_LABELS = {StallCategory.FETCH_CONTROL: "fetch/control"}
_COLORS = {
    StallCategory.ISSUING: "#009E73",
    StallCategory.MEMORY: "#D55E00",
    StallCategory.LOCAL_MEMORY: "#E69F00",
    StallCategory.DEPENDENCY: "#F0E442",
    StallCategory.PIPE_BUSY: "#0072B2",
    StallCategory.SYNC: "#CC79A7",
    StallCategory.FETCH_CONTROL: "#56B4E9",
    StallCategory.READY: "#BBBBBB",
    StallCategory.OTHER: "#777777",
}


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The stall reasons of one vendor.

    Attributes:
        names: Category by reason, in small letters.
        prefixes: What may stand before a name; the first that fits is taken off.
        suffixes: What may follow it.
    """

    names: Mapping[str, StallCategory]
    prefixes: tuple[str, ...] = ()
    suffixes: tuple[str, ...] = ()

    def category(self, reason: str) -> StallCategory:
        """Returns the category of a reason in the vendor's words; OTHER where it is unknown."""
        name = reason.lower()
        name = name.removeprefix(next(filter(name.startswith, self.prefixes), ""))
        if name not in self.names:
            name = name.removesuffix(next(filter(name.endswith, self.suffixes), ""))
        return self.names.get(name, StallCategory.OTHER)
