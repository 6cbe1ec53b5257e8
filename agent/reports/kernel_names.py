# SPDX-License-Identifier: Apache-2.0
"""Kernels' names as they are read: demangled, and shortened where templates make them long.

A capture has linkage names. The whole readable name is kept beside the short one, and two kernels
that would get the same short name keep their whole ones, so that no flame graph takes them for one.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from aiflame.agent.demangle import Demangler
from aiflame.agent.model.gpu import Kernel
from aiflame.agent.reports.words import MAX_NAME_CHARS

# C++ and Rust.
_MANGLED = ("_Z", "_R")

# A kernel's name without its templates fits into half a flame graph.
_SHORT_CHARS = 80

# What stands for the text of a template's brackets.
_CUT = "..."
# The kernels of a large program; each report asks for them several times.
_MAX_CACHED = 4096

# Of CUTLASS (include/cutlass/device_kernel.h).
_WRAPPERS = ("cutlass::Kernel", "cutlass::Kernel2", "cutlass::device_kernel")

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


@lru_cache(maxsize=_MAX_CACHED)
def shortened(name: str) -> str:
    """Return a demangled name without return type, arguments, and most of its templates' text.

    It is never longer than the name.
    """
    if len(name) > MAX_NAME_CHARS or ("<" not in name and "(" not in name):
        return name
    short = _unwrapped(_without_arguments(name))
    head, arrow, rest = short.partition("<")
    if arrow:
        short = head + arrow + _QUALIFIERS.sub("", rest)
    return min(_fitted(short), name, key=len)


def _fitted(name: str) -> str:
    # The deepest templates lose their text first: those of a level together.
    if len(name) <= _SHORT_CHARS:
        return name
    templates = _templates(name)
    # By how many levels stay, the most first; what is left is the shorter the fewer do.
    levels = range(max((one.depth for one in templates), default=0), 0, -1)
    is_fit = bisect_left(
        levels, True, key=lambda depth: len(_cut(name, templates, depth)) <= _SHORT_CHARS
    )
    if is_fit < len(levels):
        return _cut(name, templates, levels[is_fit])
    # What stands first in the outermost brackets says more than nothing.
    first = _with_first(_cut(name, templates, 1))
    return first if len(first) <= _SHORT_CHARS else _cut(name, templates, 0)


def _unwrapped(name: str) -> str:
    # A kernel that does nothing but call another one is called by that: CUTLASS's are all
    # `cutlass::device_kernel<...>` or `cutlass::Kernel2<...>`.
    head, arrow, rest = name.partition("<")
    if not arrow or head not in _WRAPPERS or not rest.endswith(">"):
        return name
    return f"{head.partition('::')[0]} {_QUALIFIERS.sub('', rest[:-1].strip())}"


def _with_first(name: str) -> str:
    # As many of the outermost template arguments as fit, and "..." for the others.
    head = name.partition("<")[0]
    depths = _depths(name)
    end = next((i for i in range(len(head) + 1, len(name)) if depths[i] < 1), len(name)) - 1
    tail = name[end + 1 :]
    commas = [i for i in range(len(head) + 1, end) if depths[i] == 1 and name[i] == ","]
    for at in reversed(commas):
        found = f"{name[:at]}, {_CUT}>{tail}"
        if len(found) <= _SHORT_CHARS:
            return found
    return f"{head}<{_CUT}>{tail}"


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


class _Template(NamedTuple):
    # Where a template's brackets are, and in how many others, with them.
    start: int
    end: int
    depth: int


def _templates(name: str) -> list[_Template]:
    # In the order in which they begin; one that has no end ends with the name.
    found, opened = [], []
    for i, char in enumerate(name):
        if char in "<({[":
            opened.append(i)
        elif char in ">)}]" and name[i - 1 : i + 1] != "->" and opened:
            start = opened.pop()
            found.append(_Template(start, i, len(opened) + 1))
    found += [_Template(start, len(name), depth) for depth, start in enumerate(opened, 1)]
    return sorted(one for one in found if name[one.start] == "<")


def _cut(name: str, templates: Sequence[_Template], depth: int) -> str:
    # Takes the text of templates that are deeper, unless it is as short as what stands for it.
    parts, at = [], 0
    for one in templates:
        if one.depth > depth and one.start >= at and one.end - one.start - 1 > len(_CUT):
            parts += [name[at : one.start + 1], _CUT]
            at = one.end
    return "".join([*parts, name[at:]])
