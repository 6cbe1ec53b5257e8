# SPDX-License-Identifier: Apache-2.0
"""What symbolization answers: source frames and the problems met, as plain data.

Kept apart from the resolver, so that the recorder can hold answers without loading the DWARF
and demangling libraries into its own memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from aiflame.agent.losses import LossKind

# Names are shown to people and stored in every capture; the longest names of real C++ libraries
# (torch) are under 8,000 characters and unreadable far before that.
MAX_NAME_CHARS = 4096

# What a terminal, a folded file or an XML file would take for itself. Semicolons and markup stay:
# they occur in real names, and each renderer escapes for its own format.
_UNPRINTABLE = dict.fromkeys((*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029), "\ufffd")
# Characters that reorder the text around them (Unicode UAX #9).
_UNPRINTABLE |= dict.fromkeys((0x200E, 0x200F, *range(0x202A, 0x202F)), "\ufffd")
_UNPRINTABLE |= dict.fromkeys((*range(0x2066, 0x206A), *range(0xD800, 0xE000)), "\ufffd")


def clean_name(name: str) -> str:
    """A name that is safe to store and show: no control characters, bounded length.

    Control, text-direction and surrogate characters become U+FFFD; what is longer than
    `MAX_NAME_CHARS` is cut and ends in an ellipsis.
    """
    if len(name) > MAX_NAME_CHARS:
        name = name[: MAX_NAME_CHARS - 1] + "…"
    if name.isascii() and name.isprintable():
        return name
    return name.translate(_UNPRINTABLE)


class RawFrame(NamedTuple):
    """One function at an address, with its linker name ("" where DWARF has none)."""

    name: str
    file: str
    line: int


class Range(NamedTuple):
    """Addresses of a binary, from `begin` up to and without `end`."""

    begin: int
    end: int


class Resolved(NamedTuple):
    """What is known of addresses of one binary, in their order.

    Attributes:
        chains: Frames, the innermost inlined function first; () outside every symbol.
        ranges: Addresses around each of which the same is known: all of its function where there
            are no lines. A function that is known and has no symbol begins where its range does.
            None where nothing is known.
    """

    chains: list[tuple[RawFrame, ...]]
    ranges: list[Range | None]

    @classmethod
    def nothing(cls, count: int) -> Resolved:
        """Nothing is known of some addresses."""
        return cls([()] * count, [None] * count)


@dataclass(frozen=True, slots=True)
class SourceFrame:
    """One function at one address.

    Attributes:
        name: Demangled and cleaned.
        file: Source file as the compiler recorded it, "" where unknown.
        line: Executing line, 0 where unknown.
        inlined: The compiler put it inside the frame that follows.
    """

    name: str
    file: str
    line: int
    inlined: bool


@dataclass(frozen=True, slots=True)
class Problem:
    """Why a binary has fewer names than it could have.

    Attributes:
        reason: How it is counted.
        detail: One line for a person, with the path.
    """

    reason: LossKind
    detail: str
