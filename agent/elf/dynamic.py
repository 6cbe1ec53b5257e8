# SPDX-License-Identifier: Apache-2.0
"""What a file tells the dynamic linker: the libraries that it needs, and where to look for them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from aiflame.agent.elf import records as elf
from aiflame.agent.elf.image import BadElf, ElfImage, NotElf
from aiflame.agent.file_questions import Json, Question, rows, text
from aiflame.agent.target_files import TargetFile

# Real files have 20 to 60 entries, those with most libraries some 300.
_MAX_ENTRIES = 4096
# The largest programs name some 200 libraries in all.
_MAX_NAMES = 512
_MAX_PATH_BYTES = 4096  # PATH_MAX


class Dependencies(NamedTuple):
    """What a file needs: names of libraries, and folders in which they are looked for first."""

    libraries: tuple[str, ...]
    folders: tuple[str, ...]


def read_dependencies(file: TargetFile, image: ElfImage) -> Dependencies:
    """Returns the libraries and folders that a file names, none for a static program.

    Raises:
        BadElf: It names more than any real file does.
        BadTargetFile: As `TargetFile.read`.
    """
    entries = _entries(file, image)
    tables = entries["value"][entries["tag"] == elf.DT_STRTAB].tolist()
    libraries: list[str] = []
    folders: list[str] = []
    if tables:
        for tag, value in zip(entries["tag"].tolist(), entries["value"].tolist(), strict=True):
            if tag not in (elf.DT_NEEDED, elf.DT_RPATH, elf.DT_RUNPATH):
                continue
            name = image.read_at(file, tables[0] + value, _MAX_PATH_BYTES).split(b"\0", 1)[0]
            text = name.decode("utf-8", "replace")
            if tag == elf.DT_NEEDED:
                libraries.append(text)
            else:
                folders += text.split(":")
            if len(libraries) + len(folders) > _MAX_NAMES:
                raise BadElf("more libraries than any real file names")
    return Dependencies(tuple(libraries), tuple(folders))


def dependencies(file: TargetFile) -> Json:
    """Reads what a file needs; nothing for a script, of which nobody knows what it will run."""
    try:
        found = read_dependencies(file, ElfImage.read(file))
    except NotElf:
        return [[], []]
    return [[name[:_MAX_PATH_BYTES] for name in names] for names in found]


def _checked(answer: Json) -> Dependencies:
    libraries, folders = (
        tuple(text(name, _MAX_PATH_BYTES) for name in rows(names, _MAX_NAMES)) for names in answer
    )
    return Dependencies(libraries, folders)


DEPENDENCIES = Question(dependencies, _checked)


def _entries(file: TargetFile, image: ElfImage) -> npt.NDArray[np.void]:
    """The dynamic section, as the loader finds it, up to its end mark."""
    layout = elf.DYNAMIC[image.bits]
    segment = next((s for s in image.segments if s.type == elf.PT_DYNAMIC), None)
    if segment is None:
        return np.zeros(0, layout)
    size = min(segment.file_size, _MAX_ENTRIES * layout.itemsize)
    data = file.read(size, segment.file_offset)
    entries = np.frombuffer(data, layout, len(data) // layout.itemsize)
    ends = np.flatnonzero(entries["tag"] == elf.DT_NULL)
    return entries[: ends[0]] if len(ends) else entries
