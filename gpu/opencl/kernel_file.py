# SPDX-License-Identifier: Apache-2.0
"""The files in which PoCL keeps machine code: one shared object for each kernel and local size.

PoCL 3.1 (lib/CL/pocl_cache.c) writes <cache>/XX/<hash>/<kernel>/<sizes>/<kernel>.so, and with
POCL_KERNEL_CACHE=0 <cache>/_UNCACHED_xxxxxx/<kernel>/..., which it deletes when the program is
released and the code still mapped. Each exports _pocl_kernel_<kernel>_workgroup, which worker
threads call once for each work group, and the kernel as it was written as _pocl_kernel_<kernel>,
which is called from the former only where nothing was optimised.

The file is the target's, and may hold anything.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from aiflame.agent.elf.functions import read_functions, resolve_sizes
from aiflame.agent.elf.image import ElfImage, NotElf
from aiflame.agent.elf.symbols import read_names
from aiflame.agent.file_questions import Json, Question, rows, text, whole
from aiflame.agent.target_files import TargetFile

# A kernel of some lines makes 14 KB; one that is unrolled without measure, some MB.
_MAX_FILE_BYTES = 32 << 20
# What is read of each file of a target whose path says nothing.
_MAX_SEARCHED_BYTES = 1 << 20
# Where packages put libraries, and nobody kernels: not searched, as there are hundreds.
_PACKAGED = ("/usr/", "/lib/", "/lib64/", "/bin/", "/sbin/")
# Names that C++ makes may be long, but no kernel of OpenCL is of C++; "X86_64".
_MAX_NAME_CHARACTERS, _MAX_MACHINE_CHARACTERS = 4096, 20
# A kernel brings along those built-in functions that it calls, at most some hundred.
_MAX_FUNCTIONS = 10_000

_KERNEL_PATH = re.compile(r"/pocl/kcache/.*\.so$|/\d+-\d+-\d+[^/]*/[^/]+\.so$")
_MARKS = (b"_pocl_kernel_", b"_workgroup\0")
_ENTRY = re.compile(r"_pocl_kernel_(.+)_workgroup")


@dataclass(frozen=True, slots=True)
class Function:
    """One function; addresses as the file counts them."""

    start: int
    end: int
    name: str


@dataclass(frozen=True, slots=True)
class KernelFile:
    """What one file says.

    Attributes:
        name: The kernel's.
        machine: As ELF has it, without its prefix: "X86_64".
        entry: Address of the work group's function, where offsets begin.
        start: Address of the first byte of its code.
        code_bytes: Of all that is executable.
        functions: In address order, without overlaps.
    """

    name: str
    machine: str
    entry: int
    start: int
    code_bytes: int
    functions: tuple[Function, ...]

    def offset_of(self, address: int) -> int | None:
        """Returns the distance from the entry, None for an address outside the code.

        Functions that stand before the entry follow after the end of the code: all offsets are
        below its size.
        """
        if not self.start <= address < self.start + self.code_bytes:
            return None
        return (address - self.entry) % self.code_bytes

    def address_of(self, offset: int) -> int:
        """Returns the address at an offset."""
        return self.start + (self.entry - self.start + offset) % self.code_bytes

    def function_at(self, address: int) -> Function | None:
        """Returns the function that an address is in."""
        at = bisect_right(self.functions, address, key=lambda function: function.start) - 1
        found = self.functions[at] if at >= 0 else None
        return found if found is not None and address < found.end else None

    def function_named(self, name: str) -> Function | None:
        """Returns the function of a name."""
        return next((function for function in self.functions if function.name == name), None)

    @property
    def body_name(self) -> str:
        """Name of the kernel as it was written: the function that DWARF describes."""
        return f"_pocl_kernel_{self.name}"


def looks_like_kernel(path: str) -> bool:
    """Whether the path alone says so."""
    return _KERNEL_PATH.search(path) is not None


def may_be_kernel(path: str) -> bool:
    """Whether it is worth while to read a file."""
    return looks_like_kernel(path) or not path.startswith(_PACKAGED)


def kernel(file: TargetFile, is_likely: bool) -> Json:
    """Reads what a file says; None if it is no kernel of PoCL's.

    Args:
        file: The file.
        is_likely: Its path says that it is one; any other is read if it is small and its bytes do.
    """
    try:
        found = read_kernel_file(file) if is_likely or _has_marks(file) else None
    except NotElf:
        return None
    if found is None:
        return None
    functions = [(one.start, one.end, one.name[:_MAX_NAME_CHARACTERS]) for one in found.functions]
    return [found.name, found.machine, found.entry, found.start, found.code_bytes, functions]


def _has_marks(file: TargetFile) -> bool:
    if file.size_bytes > _MAX_SEARCHED_BYTES:
        return False
    data = file.read(file.size_bytes, 0)
    return all(mark in data for mark in _MARKS)


def _kernel(answer: Json) -> KernelFile | None:
    if answer is None:
        return None
    name, machine, entry, start, code_bytes, functions = answer
    end = whole(start) + whole(code_bytes, _MAX_FILE_BYTES + 1, 1)
    return KernelFile(
        text(name, _MAX_NAME_CHARACTERS),
        text(machine, _MAX_MACHINE_CHARACTERS),
        whole(entry, end, start),
        start,
        code_bytes,
        tuple(_checked_functions(rows(functions, _MAX_FUNCTIONS), start, end)),
    )


def _checked_functions(answers: list[Json], start: int, end: int) -> Iterator[Function]:
    least = start
    for begin, stop, name in answers:
        found = Function(whole(begin, end, least), whole(stop, end + 1, begin + 1), name)
        text(name, _MAX_NAME_CHARACTERS)
        yield found
        least = found.end


def kernel_of(path: str) -> Question[KernelFile | None]:
    """What a file says that may be a kernel; None if it is none."""
    return _question(looks_like_kernel(path))


def kept_kernel() -> Question[KernelFile | None]:
    """What a file says of which a capture says that it is a kernel; None if it is none."""
    return _question(is_likely=True)


def _question(is_likely: bool) -> Question[KernelFile | None]:
    return Question(kernel, _kernel, (is_likely,))


def read_kernel_file(file: TargetFile) -> KernelFile | None:
    """Returns what a file says, None if it is no kernel of PoCL's.

    Raises:
        BadTargetFile: It is damaged, or costs more to read than any real one.
    """
    if file.size_bytes > _MAX_FILE_BYTES:
        return None
    image = ElfImage.read(file)
    segment = next((load for load in image.loads if load.executable), None)
    if segment is None:
        return None
    start, code_bytes = segment.virtual_address, segment.file_size
    functions, strings = read_functions(file, image)
    if strings is None or not code_bytes:
        return None
    found = resolve_sizes(functions.chosen(np.arange(min(len(functions.starts), _MAX_FUNCTIONS))))
    names = [name.decode(errors="replace") for name in read_names(file, strings, found.names)]
    ranges = sorted(zip(found.starts.tolist(), found.ends.tolist(), names, strict=True))
    # Only the longest that ends so: a kernel itself may be called x_workgroup.
    entries = [(len(name), begin, name) for begin, _, name in ranges if _ENTRY.fullmatch(name)]
    if not entries:
        return None
    _, entry, entry_name = max(entries)
    if not start <= entry < start + code_bytes:
        return None
    match = _ENTRY.fullmatch(entry_name)
    name = match[1] if match is not None else ""
    inside = [row for row in ranges if start <= row[0] < start + code_bytes]
    functions_in_order = tuple(_functions(inside, start + code_bytes))
    return KernelFile(name, image.machine, entry, start, code_bytes, functions_in_order)


def _functions(ranges: list[tuple[int, int, str]], limit: int) -> Iterator[Function]:
    """Yields functions in the order of their addresses, each cut where the next begins."""
    followings = [*(begin for begin, _, _ in ranges[1:]), limit]
    for (begin, end, name), following in zip(ranges, followings, strict=True):
        stop = min(end, following)
        if stop > begin:
            yield Function(begin, stop, name)
