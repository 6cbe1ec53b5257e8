# SPDX-License-Identifier: Apache-2.0
"""What is asked about each file: which functions of device APIs it defines, and how they begin."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from aiflame.agent.elf.image import NotElf
from aiflame.agent.file_questions import BadAnswer, Json, Question, rows, whole
from aiflame.agent.launches.probe_sites import (
    MAX_OFFSET_BYTES,
    MAX_STACK_BYTES,
    Emulation,
    Prologue,
    Step,
    read_prologue,
)
from aiflame.agent.launches.symbols import ApiFunction, find_functions
from aiflame.agent.target_files import TargetFile

# What a symbol says of sizes may be anything; offsets are added to them, in 64 bits.
_MOST_BYTES = 1 << 62


@dataclass(frozen=True, slots=True)
class ProbedFunction:
    """A function in a file; fields as those of `ApiFunction`, but for its code.

    Attributes:
        prologue: Its first instructions.
    """

    name: str
    file_offset: int
    size_bytes: int
    before_bytes: int
    after_bytes: int
    prologue: Prologue


Functions = Mapping[str, ProbedFunction]


def functions(file: TargetFile, *names: str) -> Json:
    """Reads which of some functions a file defines."""
    try:
        found = find_functions(file, frozenset(names))
    except NotElf:  # a script, or code that a runtime made
        return []
    return [(one.name, *_numbers(one), *read_prologue(one.code, 0)) for one in found.values()]


def _numbers(function: ApiFunction) -> Iterator[int]:
    sizes = (function.size_bytes, function.before_bytes, function.after_bytes)
    return (min(number, _MOST_BYTES) for number in (function.file_offset, *sizes))


def functions_among(names: Collection[str]) -> Question[Functions]:
    """Which of some functions a file defines, by name."""
    wanted = frozenset(names)

    def check(answer: Json) -> Functions:
        found = {row[0]: _function(*row) for row in rows(answer, len(wanted))}
        if not found.keys() <= wanted:
            raise BadAnswer("functions that were not asked for")
        return found

    return Question(functions, check, tuple(sorted(wanted)))


def _function(
    name: Json, offset: Json, size: Json, before: Json, after: Json, steps: Json, jumped_to: Json
) -> ProbedFunction:
    found = [
        Step(whole(at, MAX_OFFSET_BYTES), whole(stack, MAX_STACK_BYTES + 1), Emulation(emulation))
        for at, stack, emulation in rows(steps, MAX_OFFSET_BYTES)
    ]
    offset, size, before, after = (
        whole(one, _MOST_BYTES + 1) for one in (offset, size, before, after)
    )
    prologue = Prologue(tuple(found), whole(jumped_to, MAX_OFFSET_BYTES + 1, 1))
    return ProbedFunction(name, offset, size, before, after, prologue)
