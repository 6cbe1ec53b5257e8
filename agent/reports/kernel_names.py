# SPDX-License-Identifier: Apache-2.0
"""Kernels' names as they are read: demangled, and shortened where templates make them long.

A capture has linkage names. The whole readable name is kept beside the short one, and two kernels
that would get the same short name keep their whole ones, so that no flame graph takes them for one.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from aiflame.agent.demangle import Demangler
from aiflame.agent.model.gpu import Kernel
from aiflame.agent.reports.words import MAX_NAME_CHARS

# C++ and Rust.
_MANGLED = ("_Z", "_R")

# A kernel's name without its templates fits into half a flame graph.
_SHORT_CHARS = 80

# Each takes the deepest brackets away; real names have some dozens.
_MAX_CUTS = 64

_QUALIFIERS = re.compile(r"(?:\b[A-Za-z_]\w*::|\(anonymous namespace\)::)+(?=[A-Za-z_])")


@dataclass(frozen=True, slots=True)
class KernelName:
    """How a kernel is called."""

    short: str  # in flame graphs
    whole: str  # demangled; the linkage name where that is all there is


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
    """Return the readable form of each distinct name; what is not mangled stays as it is."""
    found = {name: name for name in names}
    mangled = tuple(name for name in found if name.startswith(_MANGLED) and name.isascii())
    return found | dict(zip(mangled, _demangle(mangled), strict=True))


@lru_cache(maxsize=8)
def _demangle(names: tuple[str, ...]) -> tuple[str, ...]:
    found = Demangler().names([name.encode("ascii") for name in names])
    return tuple(name.decode("utf-8", "replace") for name in found)


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
