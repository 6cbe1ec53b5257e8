# SPDX-License-Identifier: Apache-2.0
"""What bench records to compare whole profiles: Python, and native code called from it.

    mixed.py LIBRARY

Goes on until it is ended. All parts run in every turn, in some hundredths of a second, so that each
of several recordings sees the same program; each part has some percent of the time.
"""

import ctypes
import json
import random
import re
import sys
import zlib

_WORDS = [f"word{number % 97} {number}" for number in range(4_000)]
_TEXT = " ".join(_WORDS)
_BYTES = _TEXT.encode()
_TABLE = {word: list(range(10)) for word in _WORDS[:400]}
_PATTERN = re.compile(r"w(or)d(\d+) (?:1|2)+\b")


class Shapes:
    """Methods, and callbacks that C calls."""

    def __init__(self) -> None:
        self.total = 0

    def add(self, count: int) -> None:
        """A loop in one line."""
        for number in range(count): self.total += number * number % 7  # fmt: skip  # noqa: E701

    def key(self, word: str) -> tuple[str, int]:
        """For sorted."""
        return (word[::-1], len(word))

    def sort(self) -> list[str]:
        """Calls key from C."""
        return sorted(_WORDS, key=self.key)


def descend(depth: int) -> int:
    """A deep stack; at its end, a loop in one line."""
    return descend(depth - 1) if depth else len([number & 3 for number in range(40_000)])


def squares(count: int) -> int:
    """A generator that C drives."""
    return sum(number * number for number in range(count))


def press() -> int:
    """zlib, a library of the distribution without a symbol table."""
    return len(zlib.compress(_BYTES, 6))


def encode() -> int:
    """json's C part below its Python part."""
    return len(json.dumps(_TABLE))


def match() -> int:
    """re's C part, which calls back."""
    return len(_PATTERN.sub(lambda found: found[2], _TEXT))


def churn(library: ctypes.PyDLL, rounds: int) -> int:
    """Native functions of known names; the GIL is kept."""
    return int(library.churn(rounds))


def main() -> None:
    """Turns until it is ended."""
    library = ctypes.PyDLL(sys.argv[1])
    library.churn.argtypes = (ctypes.c_long,)
    shapes = Shapes()
    parts = [
        lambda: shapes.add(40_000),
        lambda: shapes.sort(),
        lambda: descend(20),
        lambda: squares(40_000),
        lambda: press(),
        lambda: encode(),
        lambda: match(),
        lambda: churn(library, 1_000_000),
    ]
    chance = random.Random(1)
    print("ready", flush=True)
    sys.stdin.readline()
    while True:
        # In one order, turns would be as regular as samples are, and some parts be missed.
        chance.shuffle(parts)
        for part in parts:
            part()


if __name__ == "__main__":
    main()
