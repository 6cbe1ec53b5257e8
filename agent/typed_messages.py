# SPDX-License-Identifier: Apache-2.0
"""Messages between processes of this program: frozen dataclasses, each a JSON object.

JSON and not pickle, since some of these processes read what targets have: should one be taken over,
what it says must still be only data. A message is read as a whole: every field is there, of the
type that the dataclass declares, and there is no other one.

A field is a `bool`, `int` of 64 bits, `float`, `str`, `Path`, a tuple or a dict of one type, a
dataclass of such fields, or one of these or None. A dataclass with methods `plain` and `of_plain`
says itself how it is written and read.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Generic, TypeVar, Union, get_args, get_origin, get_type_hints

MessageT = TypeVar("MessageT")
_Reader = Callable[[Any], Any]

_KIND = "message"
_MAX_SHOWN = 200  # characters of a line of the log
# What is signed, and what is not: who takes a number need not ask whether it fits.
_LEAST_INT, _PAST_INTS = -(1 << 63), 1 << 64


class BadMessage(ValueError):
    """Something came that is none of the messages that may."""


class Messages(Generic[MessageT]):
    """The messages that may come one way.

    Args:
        kinds: Their classes, whose names tell them apart.
    """

    def __init__(self, *kinds: type[MessageT]) -> None:
        self._readers = {kind.__name__: _reader(kind) for kind in kinds}

    def decode(self, data: bytes) -> MessageT:
        """Returns a message.

        Raises:
            BadMessage: It is none of these.
        """
        try:
            given = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise BadMessage(f"no JSON: {str(error)[:_MAX_SHOWN]}") from error
        if not isinstance(given, dict):
            raise BadMessage(f"no message: {_shown(given)}")
        name = given.pop(_KIND, None)
        read = self._readers.get(name) if isinstance(name, str) else None
        if read is None:
            raise BadMessage(f"no such message: {_shown(name)}")
        message: MessageT = read(given)
        return message


def encode(message: object) -> bytes:
    """Returns a message as it is sent."""
    return _ENCODER.encode({_KIND: type(message).__name__, **_values(message)}).encode()


def _values(message: Any) -> dict[str, Any]:
    return {each.name: getattr(message, each.name) for each in fields(message)}


def _plain(value: Any) -> Any:
    """Returns what JSON has no form of in one that it has."""
    if isinstance(value, Path):
        return str(value)
    return value.plain() if hasattr(value, "plain") else _values(value)


_ENCODER = json.JSONEncoder(default=_plain, separators=(",", ":"))


def _reader(hint: Any) -> _Reader:
    """Returns what reads a value of a type: it raises BadMessage for another one."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        (some,) = (_reader(each) for each in arguments if each is not NoneType)
        return lambda given: None if given is None else some(given)
    if origin is tuple:
        one = _reader(arguments[0])
        return lambda given: tuple(map(one, _of(list, given)))
    if origin is dict:
        one = _reader(arguments[1])
        return lambda given: {key: one(value) for key, value in _of(dict, given).items()}
    if hasattr(hint, "of_plain"):
        return lambda given: hint.of_plain(_of(dict, given))
    if is_dataclass(hint):
        hints = get_type_hints(hint)
        readers = {each.name: _reader(hints[each.name]) for each in fields(hint)}
        return functools.partial(_made, hint, readers)
    if hint is Path:
        return lambda given: Path(_of(str, given))
    if hint is float:  # what has no fraction may come without a point
        return lambda given: float(given) if type(given) is int else _of(float, given)
    return functools.partial(_of, hint)


def _of(kind: type, given: Any) -> Any:
    if type(given) is not kind:  # a bool is no number
        raise BadMessage(f"no {kind.__name__}: {_shown(given)}")
    if isinstance(given, int) and not _LEAST_INT <= given < _PAST_INTS:
        raise BadMessage("no int of 64 bits")
    return given


def _made(kind: Any, readers: dict[str, _Reader], given: Any) -> Any:
    words = _of(dict, given)
    if words.keys() != readers.keys():
        odd = ", ".join(sorted(words.keys() ^ readers.keys()))
        raise BadMessage(f"{kind.__name__}: missing, or not of it: {odd[:_MAX_SHOWN]}")
    try:
        return kind(**{name: read(words[name]) for name, read in readers.items()})
    except (BadMessage, OverflowError) as error:
        raise BadMessage(f"{kind.__name__}: {error}") from error


def _shown(given: object) -> str:
    return repr(given)[:_MAX_SHOWN]
