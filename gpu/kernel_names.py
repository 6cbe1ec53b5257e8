# SPDX-License-Identifier: Apache-2.0
"""Kernel names as they are shown, and as they follow from symbols of host code.

A demangled kernel of PyTorch has some 200 characters, most of which say nothing: the return type,
which is always void, the parameters, the namespaces of template arguments. What is left out is
what names have in common; `short_names` puts back as much as it takes to tell apart the names that
it is given. Demangling is done elsewhere (agent/symbols/demangle.py).

Names come from targets. They are parsed in one pass without recursion over the text; what is no
C++ name, or too long, or nested too deep, is cut to length as it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

# PyTorch's elementwise kernels need 140 to show the function whose lambda they run, and those of
# FlashAttention 170 to show their tile sizes. What is longer still is cut in the middle.
_MAX_CHARACTERS = 200
# As much as the demangler returns at most.
_MAX_INPUT_CHARACTERS = 10_000
# How deep template arguments are shown, most first; the first whose result fits is taken.
_DEPTHS = (3, 2, 1)
# Real names nest some 20 levels.
_MAX_NESTING = 100

_CLOSING = {"(": ")", "[": "]", "{": "}", "<": ">"}
_TOKEN = re.compile(
    # An operator's name may hold brackets that open nothing.
    r"\boperator\s?(?:\(\)|\[\]|->\*?|<=>|<<=|>>=|<<|>>|<=|>=|<|>)"
    r"|->|[()\[\]{}<>]|::|,\s*|\s+|[^()\[\]{}<>:,\s-]+|."
)
# Namespaces and classes in front of a template argument.
_QUALIFIERS = re.compile(r"(?:\b[A-Za-z_]\w*::)+(?=[A-Za-z_~{])")
# The call operator between two lambdas says nothing: no other function of theirs has code.
_CALL_OPERATOR = re.compile(r"::operator\(\)\0(?:\s*const)?(?=::)")
# Arguments of containers that are nearly always the default.
_DEFAULTS = re.compile(
    r"std::(?:__\w+::)?(?:allocator|char_traits|default_delete|less|hash|equal_to)<"
)
_CAST_NUMBER = re.compile(r"^\((bool|int|unsigned int|long|unsigned long)\)(-?\d+)$")
_SUFFIX = re.compile(r"(?: \[clone [^\]]*\])+$|\.kd$")
# What may follow the parameters of a function.
_QUALIFIED = re.compile(r"^(?:\s|const|volatile|&|noexcept)*$")

# Host functions that stand for kernels are called __device_stub__NAME by clang (CUDA and HIP);
# nvcc's are __device_stub_ and the kernel's mangled name.
_STUB = "__device_stub_"
_STUB_PLACE = re.compile(r"\d{1,5}(?=__device_stub_)")
_MANGLED = re.compile(r"_Z[NLKS]*\d")
# GCC's and LLVM's copies of a function, and the versions of a symbol.
_COPY = re.compile(r"(?:\.(?:constprop|isra|part|cold|llvm|lto_priv)(?:\.\d+)*|@.*)$")
_OPENING = re.compile(r"_Z(?:N[rVK]*)?")
_PART = re.compile(r"(L?)([1-9]\d{0,3})")
_SYMBOL = re.compile(r"[A-Za-z_$][\w$.]*")


@dataclass(slots=True)
class _Group:
    """A bracket and what is in it: texts, and groups again."""

    bracket: str
    items: list[str | _Group] = field(default_factory=list)


def short_name(demangled: str) -> str:
    """Returns a kernel's name without what most kernels have in common.

    Args:
        demangled: The name as a demangler gives it, or as an API does where it is no C++ name.
    """
    root = _parse(_SUFFIX.sub("", demangled[:_MAX_INPUT_CHARACTERS]).strip())
    if root is None:
        return _cut(demangled)
    shown = ""
    for depth in _DEPTHS:
        shown = _function(root.items, depth)
        if len(shown) <= _MAX_CHARACTERS:
            break
    return _cut(shown or demangled)


def short_names(demangled: Iterable[str]) -> dict[str, str]:
    """Returns short names by the full ones, different wherever those are.

    Of names that would look alike, each gets its parameters and all template arguments back.
    """
    shown = {name: short_name(name) for name in demangled}
    owners: dict[str, list[str]] = {}
    for name, short in shown.items():
        owners.setdefault(short, []).append(name)
    for alike in owners.values():
        if len(alike) > 1:
            longer = {name: name.removeprefix("void ") for name in alike}
            is_enough = len(set(longer.values())) == len(alike)
            shown.update(longer if is_enough else {name: name for name in alike})
    is_enough = len(set(shown.values())) == len(shown)
    return shown if is_enough else {name: name for name in shown}


def is_stub(symbol: str) -> bool:
    """Whether a symbol of host code is the function that stands for a kernel there."""
    return _STUB in symbol


def name_from_host_symbol(symbol: str, api: str = "") -> str | None:
    """Returns the kernel that a host function stands for, by its linkage name.

    Args:
        symbol: Of the address that a launch was given; or of the function that called the launch,
            and then it is a kernel's only if `is_stub` says so.
        api: As in gpu/apis. With "cuda" a kernel that is local to its source file gets the name
            that nvcc gives its device code, which is that of a global one.

    Returns:
        None where it is no function's name. Of an `extern "C"` kernel built by nvcc the name comes
        back mangled, since its stub's does not tell that it was not.
    """
    plain = _COPY.sub("", symbol[:_MAX_INPUT_CHARACTERS])
    if _SYMBOL.fullmatch(plain) is None or "@plt" in symbol:
        return None
    if plain.startswith(_STUB):
        return _after_stub(plain)
    for match in _STUB_PLACE.finditer(plain):
        # A name before may end in digits as well, so the longest number that fits is the length.
        for start in range(match.start(), match.end()):
            end = match.end() + int(plain[start : match.end()])
            if end <= len(plain):
                kernel = _after_stub(plain[match.end() : end])
                is_mangled = kernel.startswith("_Z")
                return (
                    kernel if is_mangled else f"{plain[:start]}{len(kernel)}{kernel}{plain[end:]}"
                )
    return _without_locality(plain) if api == "cuda" else plain


def _without_locality(mangled: str) -> str:
    """Drops the L by which GCC and clang mark internal linkage.

    It stands before the length of a source name (Itanium C++ ABI, 5.1.2), be it a nested one.
    """
    opening = _OPENING.match(mangled)
    at = opening.end() if opening is not None else len(mangled)
    while at < len(mangled):
        part = _PART.match(mangled, at)
        if part is None:
            return mangled
        if part[1]:
            return mangled[:at] + mangled[at + 1 :]
        at = part.end() + int(part[2])
    return mangled


def _after_stub(name: str) -> str:
    kernel = name[len(_STUB) :]
    return kernel if _MANGLED.match(kernel) else kernel.removeprefix("_")


def _parse(text: str) -> _Group | None:
    """Returns brackets as a tree, None where they do not match."""
    stack = [_Group("")]
    for match in _TOKEN.finditer(text):
        piece = match[0]
        if piece in _CLOSING:
            group = _Group(piece)
            stack[-1].items.append(group)
            stack.append(group)
            if len(stack) > _MAX_NESTING:
                return None
        elif piece in _CLOSING.values() and len(piece) == 1:
            if piece == ">" and stack[-1].bracket != "<":
                stack[-1].items.append(piece)  # "greater" in an expression
            elif _CLOSING.get(stack[-1].bracket) == piece:
                stack.pop()
            else:
                return None
        else:
            stack[-1].items.append(piece)
    return stack[0] if len(stack) == 1 else None


def _function(items: list[str | _Group], depth: int) -> str:
    """Renders a function without its return type and parameters."""
    end = len(items)
    for index in range(len(items) - 1, 0, -1):
        item = items[index]
        if isinstance(item, str) and _QUALIFIED.match(item):
            continue
        if isinstance(item, _Group) and item.bracket == "(" and not _is_anonymous(item):
            end = index
        break
    begin = 0
    for index, item in enumerate(items[:end]):
        is_space = isinstance(item, str) and item.isspace()
        before = items[index - 1] if index else ""
        if is_space and not (isinstance(before, str) and before.startswith("operator")):
            begin = index + 1
    return _clean(_render(items[begin:end], depth, True)).strip()


def _render(items: list[str | _Group], depth: int, is_outermost: bool = False) -> str:
    """Renders a name: groups of template arguments to a depth, parameters not at all."""
    parts: list[str] = []
    last_scope = max((i for i, item in enumerate(items) if item == "::"), default=-1)
    for index, item in enumerate(items):
        if isinstance(item, str):
            parts.append(item)
        elif item.bracket == "<":
            parts.append(_arguments(item, depth))
        elif item.bracket == "{":
            parts.append(_lambda(item))
        elif item.bracket == "[":
            parts.append("[" + _render(item.items, depth) + "]")
        elif _is_anonymous(item):
            if is_outermost:
                parts.append("(anonymous namespace)")
            elif index + 1 < len(items) and items[index + 1] == "::":
                parts.append("\1")
        elif index < last_scope and parts and re.search(r"[\w>)}]\Z", parts[-1][-1:]):
            # Parameters of a function that encloses something; until qualifiers have been removed.
            parts.append("\0")
        else:
            parts.append("(" + _unqualified(_render(item.items, depth)) + ")")
    return "".join(parts)


def _arguments(group: _Group, depth: int) -> str:
    if depth == 0:
        return "<...>" if group.items else "<>"
    shown: list[str] = []
    for argument in _split(group.items):
        full = "".join(item if isinstance(item, str) else item.bracket for item in argument)
        if shown and _DEFAULTS.match(full.strip()):
            continue
        shown.append(_argument(argument, depth - 1))
    return "<" + ", ".join(shown) + ">"


def _argument(items: list[str | _Group], depth: int) -> str:
    text = _unqualified(_render(items, depth)).strip()
    number = _CAST_NUMBER.match(text)
    if number is None:
        return text
    if number[1] == "bool":
        return "false" if number[2] == "0" else "true"
    return number[2]


def _lambda(group: _Group) -> str:
    """{lambda(float)#1}, without the brackets where there is nothing in them."""
    parts: list[str] = []
    for item in group.items:
        if isinstance(item, str):
            parts.append(item)
        elif item.items:
            open_, close = item.bracket, _CLOSING[item.bracket]
            parts.append(open_ + _unqualified(_render(item.items, 0)) + close)
    return "{" + "".join(parts) + "}"


def _split(items: list[str | _Group]) -> list[list[str | _Group]]:
    """Splits at commas."""
    found: list[list[str | _Group]] = [[]]
    for item in items:
        if isinstance(item, str) and item.startswith(","):
            found.append([])
        else:
            found[-1].append(item)
    return found


def _is_anonymous(group: _Group) -> bool:
    return group.items == ["anonymous", " ", "namespace"]


def _unqualified(text: str) -> str:
    text = _CALL_OPERATOR.sub("", text.replace("\1::", ""))
    return _QUALIFIERS.sub("", text)


def _clean(text: str) -> str:
    return _CALL_OPERATOR.sub("", text).replace("\0", "").replace("\1", "")


def _cut(text: str) -> str:
    if len(text) <= _MAX_CHARACTERS:
        return text
    half = (_MAX_CHARACTERS - 3) // 2
    return f"{text[:half]}...{text[-half:]}"
