# SPDX-License-Identifier: Apache-2.0
"""What is asked about files that may hold an interpreter, or the C library that it needs."""

from __future__ import annotations

from dataclasses import dataclass

from aiflame.agent.elf.image import ElfImage, NotElf
from aiflame.agent.file_questions import BadAnswer, Json, Question, flag, rows, text, whole
from aiflame.agent.python import debugoffsets
from aiflame.agent.python.evalcode import MAX_PARTS, AddressRange
from aiflame.agent.python.interpreter import Interpreter, find_interpreter, layout_of
from aiflame.agent.python.layouts import UnsupportedPython
from aiflame.agent.python.thread_state import MAX_BELOW_BYTES, StateKind, StatePlace
from aiflame.agent.python.threads import MAX_PTHREAD_BYTES, UnsupportedLibc, find_key_block
from aiflame.agent.target_files import TargetFile

_MAX_REASON_CHARACTERS = 200


@dataclass(frozen=True, slots=True)
class Unsupported:
    """Why what a file holds cannot be used."""

    why: str


def interpreter(file: TargetFile, name: str) -> Json:
    """Reads which interpreter a file holds; None for none.

    Args:
        file: The file.
        name: Its file name without folders.
    """
    try:
        image = ElfImage.read(file)
        found = find_interpreter(file, image, name)
    except NotElf:
        return None
    except UnsupportedPython as error:
        return {"unsupported": str(error)[:_MAX_REASON_CHARACTERS]}
    if found is None:
        return None
    head = image.read_at(file, found.runtime_address, debugoffsets.MAX_BYTES)
    return {
        "version": found.version,
        "head": head.hex() if debugoffsets.version_in(head) else "",
        "runtime": found.runtime_address,
        "state": (
            found.state_place.kind.name,
            found.state_place.address,
            found.state_place.below,
        ),
        "ranges": found.eval_ranges,
        "is_sure": found.is_cold_sure,
        "handlers": found.handlers,
    }


def _interpreter(answer: Json) -> Interpreter | Unsupported | None:
    if answer is None:
        return None
    if "unsupported" in answer:
        return Unsupported(text(answer["unsupported"], _MAX_REASON_CHARACTERS))
    major, minor = answer["version"]
    kind, address, below = answer["state"]
    if kind not in StateKind.__members__:
        raise BadAnswer("threads keep their state nowhere")
    head = bytes.fromhex(text(answer["head"], 2 * debugoffsets.MAX_BYTES))
    try:
        # Each offset is checked to lie in the structure that it is of.
        layout = layout_of((whole(major, 4), whole(minor, 256)), head)
    except UnsupportedPython as error:
        raise BadAnswer(str(error)) from error
    return Interpreter(
        layout.version,
        layout,
        whole(answer["runtime"]),
        StatePlace(StateKind[kind], whole(address), whole(below, MAX_BELOW_BYTES)),
        _ranges(answer["ranges"], 1 + MAX_PARTS),
        flag(answer["is_sure"]),
        None if answer["handlers"] is None else _ranges([answer["handlers"]], 1)[0],
    )


def _ranges(answer: Json, most: int) -> tuple[AddressRange, ...]:
    return tuple(
        AddressRange(whole(begin), whole(end, least=begin)) for begin, end in rows(answer, most)
    )


def interpreter_in(path: str) -> Question[Interpreter | Unsupported | None]:
    """Which interpreter a file holds, None for none.

    Args:
        path: What the file is called: that tells the version of those before 3.11.
    """
    return Question(interpreter, _interpreter, (path.rpartition("/")[2],))


def key_block(file: TargetFile) -> Json:
    """Reads where a C library keeps pthread keys; None for another library."""
    try:
        return find_key_block(file, ElfImage.read(file))
    except NotElf:
        return None
    except UnsupportedLibc as error:
        return str(error)[:_MAX_REASON_CHARACTERS]


def _key_block(answer: Json) -> int | Unsupported | None:
    if isinstance(answer, str):
        return Unsupported(text(answer, _MAX_REASON_CHARACTERS))
    return None if answer is None else whole(answer, MAX_PTHREAD_BYTES, 1)


KEY_BLOCK_OF_LIBRARY = Question(key_block, _key_block)
