# SPDX-License-Identifier: Apache-2.0
"""A file that a target chose costs itself, whatever it holds: never the recording, nor its time."""

from __future__ import annotations

import os
import random
import re
import resource
import struct
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from aiflame.agent.errors import Aborted
from aiflame.agent.kernel.uprobe_tries import NopTreatment
from aiflame.agent.launches.probe_sites import probe_place
from aiflame.agent.launches.runtimes import needed_libraries
from aiflame.agent.launches.symbols import find_functions
from aiflame.agent.python.elfbytes import FunctionNames
from aiflame.agent.python.interpreter import find_interpreter
from aiflame.agent.python.layouts import UnsupportedPython
from aiflame.agent.python.threads import UnsupportedLibc, find_key_block
from aiflame.agent.symbols import roots
from aiflame.agent.symbols.elf import ElfImage
from aiflame.agent.symbols.store import Store
from aiflame.agent.target_files import (
    MAX_BYTES,
    MAX_CPU_S,
    BadTargetFile,
    FileGuard,
    TargetFile,
)
from aiflame.agent.unwind.build import load_cached
from aiflame.agent.unwind.records import BadUnwindInfo
from aiflame.gpu.opencl.kernel_file import read_kernel_file
from elfbytes import Elf, Section, Symbol

NAMES = frozenset(("cudaLaunchKernel", "clEnqueueNDRangeKernel"))


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[[bytes], int]]:
    """`opened(data)`: a descriptor of a file with these bytes."""
    descriptors = []

    def make(data: bytes) -> int:
        path = tmp_path / f"file-{len(descriptors)}"
        path.write_bytes(data)
        descriptors.append(os.open(path, os.O_RDONLY))
        return descriptors[-1]

    yield make
    for descriptor in descriptors:
        os.close(descriptor)


Opened = Callable[[bytes], int]


@pytest.mark.parametrize(
    ("size", "offset"),
    [(1, 1 << 63), (1, (1 << 64) - 256), (1, -1), (-1, 0), (0, 0), (1, 3), (1 << 70, 1 << 70)],
)
def test_what_is_not_in_a_file_is_nothing(opened: Opened, size: int, offset: int) -> None:
    assert TargetFile(opened(b"abc")).read(size, offset) == b""


def test_more_than_a_file_has_is_what_it_has(opened: Opened) -> None:
    assert TargetFile(opened(b"abc")).read(1 << 70, 1) == b"bc"


def test_bytes_are_read_and_scanned_within_a_budget(opened: Opened) -> None:
    file = TargetFile(opened(b"abc"))
    file.spend(MAX_BYTES - 3)
    assert file.read(3, 0) == b"abc"
    with pytest.raises(BadTargetFile, match="more to read"):
        file.read(1, 0)


def test_a_closed_descriptor_is_a_bad_file() -> None:
    assert TargetFile(-1).read(1, 0) == b""


def _spin(cpu_s: float) -> None:
    until_s = time.thread_time() + cpu_s
    while time.thread_time() < until_s:
        pass


def test_a_file_that_takes_too_long_is_given_up_and_named(opened: Opened) -> None:
    guard = FileGuard()
    with guard.each_file("/slow", opened(b"abc")) as file:
        while True:
            _spin(0.05)
            file.read(1, 0)
    assert "longer" in guard.bad["/slow"]


def test_a_thousand_files_of_one_owner_do_not_take_a_thousand_times_as_long() -> None:
    guard = FileGuard()
    used_s = 0.0
    for _ in range(1000):
        allowed_s = guard.allowance_s(owner=1000)
        guard.charge(1000, allowed_s)
        used_s += allowed_s
    assert used_s < 100
    assert guard.allowance_s(owner=0) == MAX_CPU_S, "others' files are not theirs to pay for"


@pytest.mark.parametrize(
    "error", [OverflowError("x"), struct.error("x"), AssertionError(), MemoryError(), OSError(5)]
)
def test_any_exception_costs_the_file_that_it_came_from(error: Exception) -> None:
    guard = FileGuard()
    with guard.each_file("/bad"):
        raise error
    assert guard.bad["/bad"].startswith(type(error).__name__)


@pytest.mark.parametrize("error", [Aborted("x"), UnsupportedPython("x"), KeyboardInterrupt()])
def test_answers_and_the_users_wishes_get_through(error: BaseException) -> None:
    guard = FileGuard()
    with pytest.raises(type(error)), guard.each_file("/good"):
        raise error
    assert guard.bad == {}


# What an interpreter, a C library, a device runtime and a kernel of PoCL's are known by.
_SEED = """
#define F(name) __attribute__((noinline, used)) int name(int x) { return x * 3 + 1; }
F(cudaLaunchKernel) F(clEnqueueNDRangeKernel) F(_PyEval_EvalFrameDefault) F(pthread_getspecific)
F(_pocl_kernel_scale_workgroup) F(PyGILState_GetThisThreadState)
unsigned long Py_Version = 0x030b02f0;
char _PyRuntime[4096];
"""


@pytest.fixture(scope="module")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    """Small real files: a library, a program, both without .symtab, one with a hash table only."""
    folder = tmp_path_factory.mktemp("seeds")
    (folder / "seed.c").write_text(_SEED + "int main(void) { return 0; }\n")
    variants = (
        ("-shared", "-fPIC"),
        ("-pie", "-fPIE", "-rdynamic"),
        ("-shared", "-fPIC", "-s"),
        ("-no-pie", "-g"),
    )
    found = []
    for number, flags in enumerate(variants):
        path = folder / f"seed-{number}"
        command = ["gcc", "-O2", "-w", "-nostartfiles", "-Wl,--build-id", *flags, "-o", path]
        subprocess.run([*command, folder / "seed.c"], check=True)
        found.append(path.read_bytes())
    return found


_UNFORESEEN = re.compile(r"\w*([Ee]rror|Exception|Exit|Iteration)\b")

_ODD = (0, 1, 2, 7, 8, 0x7F, 0xFF, 0xFFFF, 1 << 31, 1 << 32, 1 << 40, 1 << 63, (1 << 64) - 256)


def _spots(data: bytes) -> list[tuple[int, int]]:
    """Offsets and widths of the numbers that a parser follows."""
    phoff, shoff = struct.unpack_from("<QQ", data, 32)
    phentsize, phnum, shentsize, shnum = struct.unpack_from("<4H", data, 54)
    found = [(at, 2) for at in (16, 18, 52, 54, 56, 58, 60, 62)] + [(24, 8), (32, 8), (40, 8)]
    for at in range(phoff, phoff + phentsize * phnum, phentsize):
        found += [(at, 4), (at + 4, 4), *((at + place, 8) for place in range(8, 56, 8))]
    for at in range(shoff, shoff + shentsize * shnum, shentsize):
        kind, offset, size = (
            struct.unpack_from("<I", data, at + 4)[0],
            *struct.unpack_from("<QQ", data, at + 24),
        )
        found += [(at, 4), (at + 4, 4), (at + 40, 4), *((at + p, 8) for p in (8, 16, 24, 32, 56))]
        # Symbols, dynamic section, notes, relocations.
        if kind in (2, 11, 6, 7, 4):
            found += [(place, 8) for place in range(offset, offset + min(size, 960), 8)]
            found += [(place, 4) for place in range(offset, offset + min(size, 960), 24)]
    return found


def _mutated(data: bytes, spots: list[tuple[int, int]], dice: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(dice.choice((1, 1, 2, 5))):
        if dice.random() < 0.15:
            changed[dice.randrange(len(changed))] = dice.randrange(256)
            continue
        at, width = dice.choice(spots)
        value = dice.choice((*_ODD, len(data), dice.randrange(len(data)), dice.randrange(1 << 64)))
        changed[at : at + width] = (value % (1 << (8 * width))).to_bytes(width, "little")
    if dice.random() < 0.05:
        del changed[dice.randrange(len(changed)) :]
    return bytes(changed)


def _read_all(fd: int, guard: FileGuard) -> int:
    """Reads a file by all that reads files of targets in the recorder; returns how often."""

    def each(reader: Callable[[TargetFile], object]) -> object:
        with guard.each_file("/fuzzed", fd) as file:
            return reader(file)
        return None

    def interpreter(file: TargetFile, image: ElfImage) -> None:
        try:
            found = find_interpreter(file, image, "python3.11")
        except UnsupportedPython:
            return
        if found is not None:
            found.loaded_at(0x5555_5555_0000)

    def key_block(file: TargetFile, image: ElfImage) -> None:
        try:
            find_key_block(file, image)
        except UnsupportedLibc:
            return

    def table(file: TargetFile, image: ElfImage) -> None:
        try:
            load_cached(file, image, Store(None))
        except BadUnwindInfo:
            return

    def places(file: TargetFile, image: ElfImage) -> None:
        for found in find_functions(file, NAMES, image).values():
            probe_place(found.code, found.file_offset, NopTreatment())
            assert 0 <= found.before_bytes < 1 << 64 and 0 <= found.after_bytes < 1 << 64

    def by_code(file: TargetFile, image: ElfImage) -> None:
        roots.entry_address(file)
        for load in image.loads:
            for offset in (load.file_offset + 1, load.file_offset + load.file_size):
                roots.is_signal_return(file, offset)
                roots.start_name_in_libc(file, offset)

    each(read_kernel_file)
    each(lambda file: needed_libraries(file))
    image = each(ElfImage.read)
    if not isinstance(image, ElfImage):
        return 3
    readers = (interpreter, key_block, table, places, by_code)
    for reader in readers:
        each(lambda file, reader=reader: reader(file, image))

    def names(file: TargetFile) -> None:
        found = FunctionNames(file, image)
        for address in (0, 0x1000, image.load_address + 0x1010, (1 << 64) - 1):
            found.at(address)

    each(names)
    return 4 + len(readers)


def test_no_mutation_of_real_files_gets_out_of_hand(seeds: list[bytes], tmp_path: Path) -> None:
    """4,000 files: nothing is raised but the one exception, none takes 2 s, nor 500 MB."""
    dice = random.Random(8)
    path = tmp_path / "fuzzed"
    spots = [_spots(seed) for seed in seeds]
    reasons: Counter[str] = Counter()
    slowest_s, reads = 0.0, 0
    for number in range(4000):
        at = number % len(seeds)
        path.write_bytes(_mutated(seeds[at], spots[at], dice))
        guard = FileGuard()
        fd = os.open(path, os.O_RDONLY)
        begun_s = time.thread_time()
        reads += _read_all(fd, guard)
        slowest_s = max(slowest_s, time.thread_time() - begun_s)
        os.close(fd)
        reasons.update(guard.bad.values())
    # An exception that nobody thought of would be named by its type.
    unexpected = [
        reason
        for reason in reasons
        if reason.partition(":")[0].endswith(("Error", "error", "Exception"))
    ]
    assert unexpected == []
    assert reads > 20_000 and sum(reasons.values()) > 500
    assert slowest_s < 2
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 500 << 10


def test_many_tables_that_share_one_sparse_string_table_are_read_once(tmp_path: Path) -> None:
    # GIVEN a file of few KB on disk: 400 symbol tables, one string table of 1 GB
    tables = [
        Section(f".symtab{n}", bytes(24), "symtab", link=".strtab", entry_size=24)
        for n in range(400)
    ]
    elf = Elf(sections=[*tables, Section(".strtab", b"", "strtab", size=1 << 30)])
    path = tmp_path / "sparse"
    path.write_bytes(elf.build())
    os.truncate(path, (1 << 30) + (1 << 20))
    guard = FileGuard()
    fd = os.open(path, os.O_RDONLY)
    # WHEN everything reads it
    begun_s = time.thread_time()
    _read_all(fd, guard)
    os.close(fd)
    # THEN it is given up, and named
    assert time.thread_time() - begun_s < 10
    assert guard.bad["/fuzzed"]


def test_a_file_that_shrinks_while_it_is_read_is_short(tmp_path: Path) -> None:
    path = tmp_path / "shrinks"
    path.write_bytes(Elf(symbols=[Symbol("f", 0x1000, 16)]).build())
    fd = os.open(path, os.O_RDONLY)
    file = TargetFile(fd)
    image = ElfImage.read(file)
    os.truncate(path, 100)
    assert FunctionNames(file, image).at(0x1000) == b""
    os.close(fd)


def test_function_names_are_those_of_the_table(opened: Opened) -> None:
    fd = opened(
        Elf(
            symbols=[
                Symbol("local", 0x1100, 16, bind=0),
                Symbol("global", 0x1100, 16),
                Symbol("next", 0x1110, 8),
                Symbol("absent", 0, 0, section="undefined"),
            ]
        ).build()
    )
    file = TargetFile(fd)
    names = FunctionNames(file, ElfImage.read(file))
    expected = {0x10FF: b"", 0x1100: b"global", 0x110F: b"global", 0x1117: b"next", 0x1118: b""}
    assert {address: names.at(address) for address in expected} == expected
