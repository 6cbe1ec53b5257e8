# SPDX-License-Identifier: Apache-2.0
"""The stacks of a Python program as two profilers saw them, and how well they agree.

Compared are shares of samples. Those of one stack differ by chance; a difference counts as one only
if it is more than three standard deviations of it, as if samples fell where they like.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import NamedTuple, TypeVar

from aiflame.agent.model.profile import FrameKind, Profile, SampleClass

# Above this share a stack is hot.
HOT = 0.01
_DEVIATIONS = 3

_LINE = re.compile(r":\d+\)$")
# "name (file.py:12)", also "<module> (<string>:1)"; native frames have a binary or a C file there.
_PYTHON_FRAME = re.compile(r"(?P<name>.*) \((?P<file>[^()]*\.py|<[^()]*>):(?P<line>\d+)\)")
_NATIVE_FRAME = re.compile(r"(?P<name>.*) \((?P<binary>[^()]*)\)")

Key = TypeVar("Key", bound=Hashable)

# Frames "name (file:line)", root first.
Chain = tuple[str, ...]


class Leaf(NamedTuple):
    """The native function on top of a stack: the Python function below it, its binary, its name.

    `name` is "" where a tool has none, `binary` also where the interpreter itself is on top.
    """

    function: str
    binary: str
    name: str


@dataclass(slots=True)
class Seen:
    """Samples by Python frames, and by what is on top of these."""

    chains: Counter[Chain] = field(default_factory=Counter)
    leaves: Counter[Leaf] = field(default_factory=Counter)

    def __add__(self, other: Seen) -> Seen:
        return Seen(self.chains + other.chains, self.leaves + other.leaves)

    def add(self, chain: Chain, leaf: tuple[str, str], count: int) -> None:
        """Adds samples of one stack; `leaf` is its binary and name."""
        self.chains[chain] += count
        function = chain[-1].rpartition(" (")[0] if chain else ""
        self.leaves[Leaf(function, *leaf)] += count


def _is_interpreter(binary: str) -> bool:
    return binary.startswith(("python", "libpython"))


def of_capture(profile: Profile) -> Seen:
    """Returns the samples on CPU of a capture of one program."""
    seen = Seen()
    for row in profile.samples[profile.samples["klass"] == SampleClass.ON_CPU]:
        seen.add(*_frames_of(profile, int(row["stack"])), int(row["count"]))
    return seen


def _frames_of(profile: Profile, stack: int) -> tuple[Chain, tuple[str, str]]:
    begin, end = profile.stacks.offsets[stack : stack + 2]
    chain: list[str] = []
    leaf = ("", "")
    for frame in profile.frames[profile.stacks.frames[begin:end]]:
        function = profile.functions[frame["function"]]
        if function.kind is FrameKind.PYTHON:
            name = PurePosixPath(function.file).name
            chain.append(f"{function.name} ({name}:{frame['line']})")
            leaf = ("", "")
        elif function.kind is FrameKind.NATIVE and function.binary is not None:
            binary = PurePosixPath(profile.binaries[function.binary].path).name
            if not _is_interpreter(binary):
                leaf = (binary, "" if function.name.startswith("[") else function.name)
    return tuple(chain), leaf


def of_py_spy(text: str) -> Seen:
    """Returns the samples of py-spy's "raw" format, of one thread, with native frames or without.

    Raises:
        ValueError: A line is not in that format.
    """
    seen = Seen()
    for line in text.splitlines():
        stack, _, count = line.rpartition(" ")
        chain: list[str] = []
        leaf = ("", "")
        for frame in stack.split(";"):
            if found := _PYTHON_FRAME.fullmatch(frame):
                chain.append(
                    f"{found['name']} ({PurePosixPath(found['file']).name}:{found['line']})"
                )
                leaf = ("", "")
            elif found := _NATIVE_FRAME.fullmatch(frame):
                binary = PurePosixPath(found["binary"]).name
                leaf = (binary, "" if found["name"].startswith("0x") else found["name"])
            else:
                raise ValueError(f"not a frame of py-spy: {frame!r}")
        seen.add(tuple(chain), leaf, int(count))
    return seen


def by_function(chains: Counter[Chain]) -> Counter[Chain]:
    """Returns the same samples by the functions of their frames, whatever the lines."""
    found: Counter[Chain] = Counter()
    for chain, count in chains.items():
        found[tuple(_LINE.sub(")", frame) for frame in chain)] += count
    return found


def by_binary(leaves: Counter[Leaf]) -> Counter[Leaf]:
    """Returns the same samples without the native functions' names."""
    found: Counter[Leaf] = Counter()
    for leaf, count in leaves.items():
        found[leaf._replace(name="")] += count
    return found


def share(counts: Counter[Key], key: Key) -> float:
    """Returns the share of one key, 0 to 1."""
    return counts[key] / max(counts.total(), 1)


def hot(counts: Counter[Key]) -> set[Key]:
    """Returns the keys whose share is above HOT."""
    return {key for key in counts if share(counts, key) > HOT}


@dataclass(frozen=True, slots=True)
class Comparison:
    """What is hot in both of two, or in one of them; and the sum of the smaller shares, 0 to 1.

    `beyond_chance` are those hot in one whose shares also differ by more than chance explains.
    """

    both: set[Hashable]
    only_first: set[Hashable]
    only_second: set[Hashable]
    beyond_chance: set[Hashable]
    overlap: float


def compare(first: Counter[Key], second: Counter[Key]) -> Comparison:
    """Compares two counts of samples."""
    hot_first, hot_second = hot(first), hot(second)
    differing = {key for key in hot_first ^ hot_second if not is_chance(first, second, key)}
    return Comparison(
        set(hot_first & hot_second),
        set(hot_first - hot_second),
        set(hot_second - hot_first),
        set(differing),
        sum(min(share(first, key), share(second, key)) for key in first),
    )


def is_chance(first: Counter[Key], second: Counter[Key], key: Key) -> bool:
    """Whether two shares of one key may differ by chance: the test of two binomial proportions."""
    counts = (first.total(), second.total())
    if not all(counts):
        return False
    pooled = (first[key] + second[key]) / sum(counts)
    deviation = math.sqrt(pooled * (1 - pooled) * sum(1 / count for count in counts))
    return abs(share(first, key) - share(second, key)) <= _DEVIATIONS * deviation
