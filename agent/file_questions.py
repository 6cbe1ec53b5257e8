# SPDX-License-Identifier: Apache-2.0
"""What is asked about a file of a target, and how the answer is checked.

A file is parsed by a process without rights, which it may have taken over: so a question is a
function that is run there and answers in JSON, and one that is run here and makes of that what the
question is about, or refuses it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from aiflame.agent.errors import AiflameError

T = TypeVar("T")
Json = Any


class BadAnswer(AiflameError):
    """No sound parser answers so."""


class Question(Generic[T]):
    """What is asked about a file.

    Args:
        read: Reads it: a function of a module, which gets the file and the arguments and returns
            JSON. It raises BadTargetFile for a file that is damaged.
        check: Makes an answer of that; BadAnswer, or what it meets, where it is none.
        arguments: In JSON.
        is_kept: Whether the answer is worth keeping until the machine is booted.

    Attributes:
        read: The function.
        name: Of the function, with its module.
        key: Under which answers are kept.
    """

    def __init__(
        self,
        read: Callable[..., Json],
        check: Callable[[Json], T],
        arguments: tuple[Json, ...] = (),
        *,
        is_kept: bool = True,
    ) -> None:
        self.read = read
        self.arguments = arguments
        self.is_kept = is_kept
        self.name = f"{read.__module__}:{read.__name__}"
        self.key = self.name
        if arguments:
            text = json.dumps(arguments, separators=(",", ":"))
            self.key += f":{hashlib.sha256(text.encode()).hexdigest()[:16]}"
        self._check = check

    def checked(self, answer: Json) -> T:
        """Returns what an answer says.

        Raises:
            BadAnswer: No sound parser answers so.
        """
        try:
            return self._check(answer)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise BadAnswer(f"{self.name}: {type(error).__name__}: {error}") from error


def whole(value: Json, below: int = 1 << 64, least: int = 0) -> int:
    """Returns an answer that is an integer.

    Args:
        value: The answer.
        below: It is less than this.
        least: The least that it may be.

    Raises:
        BadAnswer: It is none, or another one.
    """
    if type(value) is int and least <= value < below:
        return value
    raise BadAnswer("no such number")


def text(value: Json, most: int) -> str:
    """Returns an answer that is text of so many characters at most.

    Raises:
        BadAnswer: It is none, or longer.
    """
    if isinstance(value, str) and len(value) <= most:
        return value
    raise BadAnswer("no such text")


def rows(value: Json, most: int) -> list[Json]:
    """Returns an answer that is a list of so many items at most.

    Raises:
        BadAnswer: It is none, or longer.
    """
    if isinstance(value, list) and len(value) <= most:
        return value
    raise BadAnswer("no such list")


def flag(value: Json) -> bool:
    """Returns an answer that is true or false.

    Raises:
        BadAnswer: It is neither.
    """
    if isinstance(value, bool):
        return value
    raise BadAnswer("neither true nor false")
