# SPDX-License-Identifier: Apache-2.0
"""Kernels' names as they are read: demangled, and shortened where templates make them long.

A capture has linkage names. The whole readable name is kept beside the short one, and two kernels
that would get the same short name keep their whole ones, so that no picture takes them for one.

libstdc++ demangles in a child process with limits (demangle_child.py), since a hostile name of 300
bytes can ask for gigabytes. Names that are no C++ names start no process.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import as_file, files

from aiflame.agent.model.gpu import Kernel
from aiflame.agent.reports.rows import MAX_NAME_CHARS

# The longest of libtorch's kernels has near 4,000 characters.
_MAX_MANGLED_CHARS = 10_000

# C++ as the Itanium ABI mangles it (section 5.1). Other characters than these would be no symbol,
# and a line break would be a second name.
_MANGLED = re.compile(r"_Z[A-Za-z0-9_.$]+")

# A kernel's name without its templates fits into half a picture.
_SHORT_CHARS = 80

# Each takes the deepest brackets away; real names have some dozens.
_MAX_CUTS = 64

# A child that dies at a name is followed by another one for the rest; not for ever.
_MAX_CHILDREN = 3
# Of all names of a capture; a hundred thousand take 0.5 s.
_PATIENCE_S = 30

_QUALIFIERS = re.compile(r"(?:\b[A-Za-z_]\w*::|\(anonymous namespace\)::)+(?=[A-Za-z_])")


@dataclass(frozen=True, slots=True)
class KernelName:
    """How a kernel is called."""

    short: str  # in pictures
    whole: str  # demangled; the linkage name where it is no C++ name


def kernel_names(kernels: Sequence[Kernel]) -> list[KernelName]:
    """Return the names of kernels, in order; unknown ones say why in square brackets."""
    readable = demangled(kernel.name for kernel in kernels)
    wholes = [
        readable[kernel.name] if kernel.name else f"[unknown kernel: {kernel.unnamed or 'no name'}]"
        for kernel in kernels
    ]
    shorts = {whole: shortened(whole) for whole in dict.fromkeys(wholes)}
    uses = Counter(shorts.values())
    return [KernelName(shorts[w] if uses[shorts[w]] == 1 else w, w) for w in wholes]


def demangled(names: Iterable[str]) -> Mapping[str, str]:
    """Return the readable form of each distinct name; what is no C++ name stays as it is."""
    distinct = tuple(dict.fromkeys(names))
    found = {name: name for name in distinct}
    mangled = tuple(
        name for name in distinct if len(name) <= _MAX_MANGLED_CHARS and _MANGLED.fullmatch(name)
    )
    if mangled:
        found |= zip(mangled, _demangle(mangled), strict=True)
    return found


@lru_cache(maxsize=8)
def _demangle(names: tuple[str, ...]) -> tuple[str, ...]:
    done: list[str] = []
    for _ in range(_MAX_CHILDREN):
        lines = _in_child(names[len(done) :])
        done += lines
        if len(done) >= len(names):
            break
        done.append(names[len(done)])  # the one that it died at
    return (*done[: len(names)], *names[len(done) :])


def _in_child(names: Sequence[str]) -> list[str]:
    with as_file(files("aiflame.agent.reports") / "demangle_child.py") as script:
        try:
            # -I: nothing of the reader's folder and environment is imported.
            child = subprocess.run(  # noqa: S603 - our own interpreter and script
                [sys.executable, "-I", str(script)],
                input="".join(f"{name}\n" for name in names),
                capture_output=True,
                text=True,
                timeout=_PATIENCE_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            return []
    # A last line without its end may be half a name.
    return child.stdout.split("\n")[:-1]


def shortened(name: str) -> str:
    """Return a demangled name without return type, arguments, and most of its templates' text."""
    if len(name) > MAX_NAME_CHARS or ("<" not in name and "(" not in name):
        return name
    short = _without_arguments(name)
    head, arrow, rest = short.partition("<")
    if arrow:
        short = head + arrow + _QUALIFIERS.sub("", rest)
    for _ in range(_MAX_CUTS):
        if len(short) <= _SHORT_CHARS:
            break
        short = _without_deepest(short)
    return short


def _depths(name: str) -> list[int]:
    # How many brackets each character is in; an opening and a closing one are in their own.
    depths, depth = [], 0
    for i, char in enumerate(name):
        is_arrow = char == ">" and name[i - 1 : i] == "-"
        if char in "<({[":
            depth += 1
        depths.append(depth)
        if char in ">)}]" and not is_arrow:
            depth = max(0, depth - 1)
    return depths


def _without_arguments(name: str) -> str:
    # `void f<T>(int, T)` is `f<T>`; what stands in brackets before that stays.
    depths = _depths(name)
    if name.endswith(")"):
        start = max((i for i, d in enumerate(depths) if d == 1 and name[i] == "("), default=0)
        if start:
            name, depths = name[:start], depths[:start]
    space = max((i for i, d in enumerate(depths) if d == 0 and name[i] == " "), default=-1)
    return name[space + 1 :] or name


def _without_deepest(name: str) -> str:
    # Replaces what is in the deepest template brackets by "...".
    depths = _depths(name)
    inner = [
        (depths[i], i)
        for i, char in enumerate(name)
        if char == "<" and not name.startswith("<...>", i)
    ]
    if not inner:
        return name
    depth, start = max(inner, key=lambda pair: (pair[0], -pair[1]))
    end = next((i for i in range(start + 1, len(name)) if depths[i] < depth), len(name))
    return f"{name[:start]}<...>{name[end:]}"
