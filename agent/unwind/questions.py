# SPDX-License-Identifier: Apache-2.0
"""What is asked about a tiny file: its unwind table.

Programs that make code make many such files: PoCL one for each kernel that it compiles. Two
processes are forked to build and store a table, which takes ten times what it takes to make that of
a tiny file. The parser of its owner's files is there already, and makes it in between.
"""

from __future__ import annotations

import base64

from aiflame.agent.elf.go_table import go_table
from aiflame.agent.elf.image import ElfImage, NotElf
from aiflame.agent.file_questions import BadAnswer, Json, Question, text
from aiflame.agent.target_files import BadTargetFile, TargetFile
from aiflame.agent.unwind.build import SUFFIX, build
from aiflame.agent.unwind.records import BadUnwindInfo
from aiflame.agent.unwind.sections import code_ranges
from aiflame.agent.unwind.table import CorruptTable, UnwindTable

# Whoever asks waits for the answer: 1 to 2 ms for a kernel of PoCL's, of 15 KB, and 0.1 s for the
# costliest code of this size.
TINY_FILE_BYTES = 32 << 10
# Of a kernel of PoCL's it has 300 bytes, of an extension module of Python's 2 KB.
_MAX_TABLE_BYTES = 32 << 10
_MAX_CHARACTERS = (_MAX_TABLE_BYTES + 2) // 3 * 4
# Answers are kept by the file that they belong to, and have no name.
_IDENTITY = bytes(32)


def tiny_table(file: TargetFile, _: str) -> Json:
    """Makes the unwind table of a file; None where a builder has to, or has to say why not."""
    if file.size_bytes > TINY_FILE_BYTES:
        return None
    try:
        image = ElfImage.read(file)
        if _may_take_long(file, image):
            return None
        data = b"".join(build(file, image).to_chunks(_IDENTITY))
    except (BadTargetFile, BadUnwindInfo, NotElf):
        return None
    return base64.b64encode(data).decode() if len(data) <= _MAX_TABLE_BYTES else None


def _may_take_long(file: TargetFile, image: ElfImage) -> bool:
    """Whether a file has more for a table than it has bytes: the same ones again and again."""
    ranges = code_ranges(image)
    code_bytes = sum((ranges[:, 1] - ranges[:, 0]).tolist())
    # Functions of Go's may share lists; the smallest program of its has a megabyte.
    return code_bytes > file.size_bytes or go_table(file, image) is not None


def _checked(answer: Json) -> UnwindTable | None:
    if answer is None:
        return None
    data = base64.b64decode(text(answer, _MAX_CHARACTERS), validate=True)
    try:
        return UnwindTable.from_mapping(data, _IDENTITY)
    except CorruptTable as error:
        raise BadAnswer(str(error)) from error


# Tables of another version are asked for anew.
TINY_TABLE = Question(tiny_table, _checked, (SUFFIX,))
