# SPDX-License-Identifier: Apache-2.0
"""Perf maps as hostile processes may write them."""

from __future__ import annotations

import io
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
from aiflame.agent.symbols.perfmap import DEFAULT_MAX_BYTES, BadPerfMap, PerfMap
from hostile.outcome import Outcome

_ADDRESSES = np.array([0, 1, 0x1000, 0x7F12_3456_7000, (1 << 63), (1 << 64) - 1], np.uint64)
# Of a process whose stacks are all different.
_MANY_ADDRESSES = np.arange(0, 1 << 23, 1 << 6, dtype=np.uint64)
_NUMBERS = (
    *(b"0", b"1", b"10", b"ffffffffffffffff", b"10000000000000000", b"-1", b"+5", b"0x", b"1_0"),
    *(b"7f1234567000", b"7f1234567040", b"f" * 5_000, b"\xff", "\u0661".encode(), b"nan", b""),
)
_NAMES = (
    *(b"f", b"LazyCompile:~f a.js:1", b"py::main:/a b.py", b"", b" ", b"\x00\x01", b"\xff\xfe"),
    *(b"n" * 20_000, b"_ZN3fooEv", "\u202egnp".encode(), b";", b"\r", b"[x]"),
)


def _some(dice: random.Random) -> bytes:
    """A short map, more or less of the format."""
    lines = []
    for _ in range(dice.choice((1, 5, 40, 300))):
        if dice.random() < 0.6:
            start, size = dice.randrange(1 << 20), dice.choice((1, 16, 4096, 1 << 19))
            fields = [b"%x" % start, b"%x" % size, dice.choice(_NAMES)]
        else:
            fields = [dice.choice(_NUMBERS), dice.choice(_NUMBERS), dice.choice(_NAMES)]
        del fields[dice.choice((3, 3, 3, 2, 1)) :]
        lines.append(dice.choice((b" ", b" ", b"\t", b"  ")).join(fields))
    text = bytearray(dice.choice((b"\n", b"\n", b"\r\n", b"\n\n")).join(lines) + b"\n")
    for _ in range(dice.choice((0, 0, 1, 10))):
        text[dice.randrange(len(text))] = dice.randrange(256)
    return bytes(text[: len(text) if dice.random() < 0.8 else dice.randrange(len(text) + 1)])


def _large() -> Iterator[bytes]:
    """Maps as large as any that is read, each the worst for one step of reading."""
    for line in (b"\n", b"x\n", b"0 1 a\n", b"0 ffffffff a\n", b"z" * 9_999 + b"\n"):
        yield line * (DEFAULT_MAX_BYTES // len(line))
    yield b"x" * DEFAULT_MAX_BYTES
    # Functions one after the other; each in the ones before; each begins in the one before.
    count = DEFAULT_MAX_BYTES // 16
    for line in (
        lambda at: b"%x 1 f\n" % (at + (1 << 24)),
        lambda at: b"%x %x f\n" % (at, 2 * (count - at)),
        lambda at: b"%x %x f\n" % (count - at, count),
    ):
        text = io.BytesIO()
        for at in range(count):
            text.write(line(at))
        yield text.getvalue()


def read_maps(count: int, random_seed: int, outcome: Outcome) -> None:
    """Reads short maps."""
    dice = random.Random(random_seed)
    for _ in range(count):
        _read(_some(dice), dice.choice((0, 0, 1)), _ADDRESSES, outcome)


def read_large_maps(outcome: Outcome) -> None:
    """Reads maps as large as can be."""
    for text in _large():
        _read(text[-DEFAULT_MAX_BYTES:], 1, _MANY_ADDRESSES, outcome)


def _read(
    text: bytes, skipped_bytes: int, addresses: npt.NDArray[np.uint64], outcome: Outcome
) -> None:
    outcome.cases += 1
    with outcome.reading("parse and lookup", BadPerfMap):
        names = PerfMap.parse(text, skipped_bytes).lookup(addresses)
        assert all(name is None or name.isprintable() for name in names), names


def read_all(count: int, _: Path, random_seed: int) -> Iterator[Outcome]:
    """Reads short maps, and some large ones."""
    outcome = Outcome("perf maps")
    read_maps(count, random_seed, outcome)
    yield outcome
    outcome = Outcome("large perf maps")
    read_large_maps(outcome)
    yield outcome
