# SPDX-License-Identifier: Apache-2.0
"""What is asked about a file's unwind information; see file_questions.py."""

from __future__ import annotations

import re

from aiflame.agent.elf.contents import for_unwinding
from aiflame.agent.elf.image import ElfImage, NotElf
from aiflame.agent.file_questions import BadAnswer, Json, Question
from aiflame.agent.target_files import TargetFile
from aiflame.agent.unwind.build import SUFFIX, table_name

# Of what the cache calls a table: it becomes the name of a file. An answer that another version of
# this program got and kept is none.
_NAME = re.compile(r"[0-9a-zA-Z]{1,40}-[0-9a-f]{48}" + re.escape(SUFFIX))


def name_of_table(file: TargetFile) -> Json:
    """Returns what the cache calls a file's table, None for what is no ELF file."""
    try:
        image = ElfImage.read(file)
    except NotElf:
        return None
    return table_name(image.build_id, for_unwinding(file, image).digest(file))


def _checked(answer: Json) -> str:
    if answer is None:
        return ""
    if not _NAME.fullmatch(answer):
        raise BadAnswer("no name of a table")
    return str(answer)


TABLE_NAME = Question(name_of_table, _checked)
