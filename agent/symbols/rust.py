# SPDX-License-Identifier: Apache-2.0
"""Rust symbol names to paths: the legacy scheme and v0 (Rust RFC 2603 and its later additions).

Written here because the scheme's back references let a short name ask for an endless one: output,
depth and steps are bounded, and a name that goes over a bound is not demangled. Hashes and crate
disambiguators are left out, as a flame graph merges by name; so are the instantiating crate and
the suffixes that LLVM adds.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from aiflame.agent.symbols.frames import MAX_NAME_CHARS

_MAX_DEPTH = 100  # rustc itself stops at 128 levels of types
_MAX_STEPS = 20_000

_LEGACY_HASH = re.compile(r"17h[0-9a-f]{16}E")
_LEGACY_ESCAPES = {
    "SP": "@",
    "BP": "*",
    "RF": "&",
    "LT": "<",
    "GT": ">",
    "LP": "(",
    "RP": ")",
    "C": ",",
}
_LEGACY_ESCAPE = re.compile(r"\$([A-Z]{1,2}|u[0-9a-f]{1,6})\$")

_BASIC_TYPES = {
    "a": "i8", "b": "bool", "c": "char", "d": "f64", "e": "str", "f": "f32", "h": "u8",
    "i": "isize", "j": "usize", "l": "i32", "m": "u32", "n": "i128", "o": "u128", "s": "i16",
    "t": "u16", "u": "()", "v": "...", "x": "i64", "y": "u64", "z": "!", "p": "_",
}  # fmt: skip
_SIGNED = frozenset("ailnsx")
_BASE62 = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


class _Undecodable(Exception):
    """Not a name of this scheme, or over a bound."""


def demangle_rust(name: str) -> str | None:
    """The Rust path in a linker name, or None when it is not a Rust name.

    Args:
        name: `_R...` or `_ZN...17h<16 hex digits>E`, with or without a suffix after a dot.
    """
    try:
        if name.startswith("_R"):
            return _V0(name[2:]).symbol()
        if name.startswith("_ZN"):
            return _legacy(name)
    except (_Undecodable, IndexError, UnicodeError):
        return None
    return None


def _legacy(name: str) -> str | None:
    end = _LEGACY_HASH.search(name)
    if end is None or not re.fullmatch(r"(\.[\w.]*)?", name[end.end() :]):
        return None
    rest = name[3 : end.start()]
    parts: list[str] = []
    while rest:
        digits = re.match(r"[0-9]{1,5}", rest)
        if digits is None:
            return None
        stop = digits.end() + int(digits[0])
        part = rest[digits.end() : stop]
        if len(part) != int(digits[0]):
            return None
        parts.append(_legacy_part(part))
        rest = rest[stop:]
    return "::".join(parts) or None


def _legacy_part(part: str) -> str:
    part = part[1:] if part.startswith("_$") else part
    return _LEGACY_ESCAPE.sub(_legacy_unescape, part.replace("..", "::"))


def _legacy_unescape(match: re.Match[str]) -> str:
    code = match[1]
    if code[0] == "u":
        value = int(code[1:], 16)
        return chr(value) if value < 0x110000 else match[0]
    return _LEGACY_ESCAPES.get(code, match[0])


class _V0:
    """A recursive-descent reader of one v0 name; each method reads one rule of the grammar."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._depth = 0
        self._steps = 0
        self._lifetimes = 0

    def symbol(self) -> str:
        if not self._text.isascii() or self._text[:1].isdigit():
            raise _Undecodable
        result = self._path(in_value=True)
        if self._peek() not in ("", ".", "$"):
            self._path(in_value=False)  # the crate that made this instance
        if self._peek() not in ("", ".", "$"):
            raise _Undecodable
        return result

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _next(self) -> str:
        self._steps += 1
        if self._steps > _MAX_STEPS:
            raise _Undecodable
        char = self._text[self._at]
        self._at += 1
        return char

    def _take(self, char: str) -> bool:
        if self._peek() == char:
            self._at += 1
            return True
        return False

    def _nested(self, read: Callable[[], str]) -> str:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise _Undecodable
        result = read()
        self._depth -= 1
        if len(result) > MAX_NAME_CHARS:
            raise _Undecodable
        return result

    def _list(self, read: Callable[[], str]) -> list[str]:
        items: list[str] = []
        total = 0
        while not self._take("E"):
            items.append(self._nested(read))
            total += len(items[-1])
            if total > MAX_NAME_CHARS:
                raise _Undecodable
        return items

    def _back(self, read: Callable[[], str]) -> str:
        """A back reference: read again at an earlier position."""
        start = self._at - 1
        target = self._base62()
        if target >= start:
            raise _Undecodable
        saved, self._at = self._at, target
        result = self._nested(read)
        self._at = saved
        return result

    def _base62(self) -> int:
        if self._take("_"):
            return 0
        value = 0
        while True:
            char = self._next()
            if char == "_":
                return value + 1
            value = value * 62 + _BASE62.index(char) if char in _BASE62 else -1
            if not 0 <= value < 1 << 64:
                raise _Undecodable

    def _optional_base62(self, tag: str) -> int:
        return self._base62() + 1 if self._take(tag) else 0

    def _decimal(self) -> int:
        if self._take("0"):
            return 0
        start = self._at
        while self._peek().isdigit() and self._at - start < 5:
            self._at += 1
        if start == self._at:
            raise _Undecodable
        return int(self._text[start : self._at])

    def _identifier(self) -> tuple[str, int]:
        """The name and its disambiguator."""
        number = self._optional_base62("s")
        return self._plain_identifier(), number

    def _plain_identifier(self) -> str:
        punycode = self._take("u")
        length = self._decimal()
        self._take("_")
        name = self._text[self._at : self._at + length]
        if len(name) != length:
            raise _Undecodable
        self._at += length
        if punycode:
            head, _, tail = name.rpartition("_")
            return (f"{head}-{tail}" if head else tail).encode("ascii").decode("punycode")
        return name

    def _path(self, in_value: bool) -> str:
        return self._nested(lambda: self._path_rule(in_value))

    def _path_rule(self, in_value: bool) -> str:
        tag = self._next()
        if tag == "C":
            return self._identifier()[0]
        if tag in ("M", "X"):
            self._optional_base62("s")
            self._path(in_value=False)  # where the impl block stands: not part of the name
            return self._self_type(tag == "X")
        if tag == "Y":
            return self._self_type(trait=True)
        if tag == "N":
            return self._named(in_value)
        if tag == "I":
            base = self._path(in_value)
            arguments = ", ".join(self._list(self._generic_argument))
            return f"{base}::<{arguments}>" if in_value else f"{base}<{arguments}>"
        if tag == "B":
            return self._back(lambda: self._path(in_value))
        raise _Undecodable

    def _self_type(self, trait: bool) -> str:
        own = self._type()
        return f"<{own} as {self._path(in_value=False)}>" if trait else f"<{own}>"

    def _named(self, in_value: bool) -> str:
        space = self._next()
        base = self._path(in_value)
        name, number = self._identifier()
        if space.isupper():
            kind = {"C": "closure", "S": "shim"}.get(space, space)
            label = f"{kind}:{name}" if name else kind
            return f"{base}::{{{label}#{number}}}"
        return f"{base}::{name}" if name else base

    def _generic_argument(self) -> str:
        if self._take("L"):
            return self._lifetime(self._base62())
        if self._take("K"):
            return self._const()
        return self._type()

    def _lifetime(self, index: int) -> str:
        if index == 0:
            return "'_"
        depth = self._lifetimes - index
        if depth < 0:
            raise _Undecodable
        return f"'{chr(ord('a') + depth)}" if depth < 26 else f"'_{depth}"

    def _bound(self, read: Callable[[], str]) -> str:
        """An optional `for<'a, ...>` and what stands behind it."""
        count = self._optional_base62("G")
        if count > 26:
            raise _Undecodable
        self._lifetimes += count
        names = ", ".join(self._lifetime(count - index) for index in range(count))
        result = read()
        self._lifetimes -= count
        return f"for<{names}> {result}" if count else result

    def _type(self) -> str:
        return self._nested(self._type_rule)

    def _type_rule(self) -> str:
        tag = self._next()
        if tag in _BASIC_TYPES:
            return _BASIC_TYPES[tag]
        if tag in ("R", "Q"):
            life = self._lifetime(self._base62()) if self._take("L") else "'_"
            life = "" if life == "'_" else f"{life} "
            return f"&{life}{'mut ' if tag == 'Q' else ''}{self._type()}"
        if tag in ("P", "O"):
            return f"*{'const' if tag == 'P' else 'mut'} {self._type()}"
        if tag in ("A", "S"):
            item = self._type()
            return f"[{item}; {self._const()}]" if tag == "A" else f"[{item}]"
        if tag == "T":
            items = self._list(self._type)
            return f"({items[0]},)" if len(items) == 1 else f"({', '.join(items)})"
        if tag == "F":
            return self._bound(self._function)
        if tag == "D":
            return self._dynamic()
        if tag == "B":
            return self._back(self._type)
        self._at -= 1
        return self._path(in_value=False)

    def _function(self) -> str:
        prefix = "unsafe " if self._take("U") else ""
        if self._take("K"):
            abi = "C" if self._take("C") else self._plain_identifier().replace("_", "-")
            prefix += f'extern "{abi}" '
        arguments = ", ".join(self._list(self._type))
        result = self._type()
        return f"{prefix}fn({arguments})" + ("" if result == "()" else f" -> {result}")

    def _dynamic(self) -> str:
        traits = self._bound(lambda: " + ".join(self._list(self._dynamic_trait)))
        if not self._take("L"):
            raise _Undecodable
        life = self._lifetime(self._base62())
        return f"dyn {traits}" + ("" if life == "'_" else f" + {life}")

    def _dynamic_trait(self) -> str:
        path = self._path(in_value=False)
        bindings = []
        while self._take("p"):
            name = self._plain_identifier()
            bindings.append(f"{name} = {self._type()}")
        if not bindings:
            return path
        joined = ", ".join(bindings)
        return f"{path[:-1]}, {joined}>" if path.endswith(">") else f"{path}<{joined}>"

    def _const(self) -> str:
        return self._nested(self._const_rule)

    def _const_rule(self) -> str:
        tag = self._next()
        if tag == "B":
            return self._back(self._const)
        if tag == "p":
            return "_"
        if tag not in _BASIC_TYPES:
            raise _Undecodable
        negative = tag in _SIGNED and self._take("n")
        stop = self._text.index("_", self._at) if "_" in self._text[self._at :] else -1
        digits = self._text[self._at : stop]
        if stop < 0 or len(digits) > 32 or not re.fullmatch(r"[0-9a-f]*", digits):
            raise _Undecodable
        self._at = stop + 1
        value = int(digits or "0", 16)
        if tag == "b":
            return "true" if value else "false"
        if tag == "c":
            return repr(chr(value)) if value < 0x110000 else digits
        return f"-{value}" if negative else str(value)
