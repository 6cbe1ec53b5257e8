# SPDX-License-Identifier: Apache-2.0
"""What whoever opens and caches files has to know of one that a parser has read for it.

A process that has rights parses nothing of a target's: it copies the parts of a file that a parser
names, takes their digest, and looks for the debug files that a parser names. What a parser says may
be a lie: it is checked, and costs the files of that parser's user at most.
"""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from typing import Any

from aiflame.agent.elf.contents import MAX_BYTES, Contents, for_symbols, for_unwinding
from aiflame.agent.elf.image import ElfImage
from aiflame.agent.symbols.debugfiles import has_lines, has_symbols
from aiflame.agent.target_files import BadTargetFile, TargetFile

# Files have some dozen sections; what follows each other is one part. They fit into a message.
_MAX_PARTS = 1500
_BUILD_ID = re.compile(r"(?:[0-9a-f]{2}){0,64}")
# NAME_MAX of linux/limits.h, in UTF-8.
_MAX_LINK_CHARACTERS = 255
_MAX_REASON_CHARACTERS = 200


@dataclass(frozen=True, slots=True)
class Outline:
    """Of one file.

    Attributes:
        build_id: As of `ElfImage`.
        debuglink: Name of the separate debug file, "" for none.
        is_complete: It needs no debug file.
        contents: What its tables are made of; None where that is more than any real file has.
    """

    build_id: str
    debuglink: str
    is_complete: bool
    contents: Contents | None


def read_outline(fd: int, purpose: str) -> dict[str, Any]:
    """Reads the outline of a file, in a parser.

    Args:
        fd: Of the file, which stays the caller's.
        purpose: "symbols" or "unwinding".

    Returns:
        In JSON, for `checked`.
    """
    file = TargetFile(fd)
    try:
        image = ElfImage.read(file)
    except BadTargetFile as error:
        return {"bad": str(error)[:_MAX_REASON_CHARACTERS] or "damaged"}
    link = "" if image.debuglink is None else image.debuglink.name
    link = link if len(link) <= _MAX_LINK_CHARACTERS else ""
    select = for_symbols if purpose == "symbols" else for_unwinding
    parts: tuple[tuple[int, int], ...] | None = None
    with contextlib.suppress(BadTargetFile):
        parts = select(file, image).parts
    if parts is not None and len(parts) > _MAX_PARTS:
        parts = None
    return {"outline": [image.build_id, link, has_symbols(image) and has_lines(image), parts]}


def checked(answer: dict[str, Any], size_bytes: int) -> Outline:
    """Returns what a parser says of a file.

    Args:
        answer: Of `read_outline`.
        size_bytes: Length of the file.

    Raises:
        BadTargetFile: It says that the file is bad.
        ValueError, TypeError, KeyError: No sound parser says that.
    """
    if "bad" in answer:
        raise BadTargetFile(str(answer["bad"])[:_MAX_REASON_CHARACTERS])
    build_id, link, is_complete, parts = answer["outline"]
    if not _BUILD_ID.fullmatch(build_id) or len(link) > _MAX_LINK_CHARACTERS or "/" in link:
        raise ValueError("no outline of a file")
    if type(is_complete) is not bool:
        raise ValueError("neither complete nor incomplete")
    contents = None if parts is None else _checked_contents(parts, size_bytes)
    return Outline(build_id, link, is_complete, contents)


def _checked_contents(parts: Any, size_bytes: int) -> Contents:
    if len(parts) > _MAX_PARTS:
        raise ValueError("too many parts")
    end = total = 0
    for offset, size in parts:
        if type(offset) is not int or type(size) is not int or size <= 0:
            raise ValueError("no part of a file")
        if not end <= offset <= offset + size <= size_bytes:
            raise ValueError("parts of another file")
        end, total = offset + size, total + size
    if total > MAX_BYTES:
        raise ValueError("more than it may be")
    return Contents(size_bytes, tuple((offset, size) for offset, size in parts))
