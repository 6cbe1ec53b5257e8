# SPDX-License-Identifier: Apache-2.0
"""Whatever an ELF file says of itself, reading it ends soon, in little memory, and foreseen."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from aiflame.agent.elf.functions import FunctionNames
from aiflame.agent.elf.image import ElfImage
from aiflame.agent.elf.records import SYMBOL
from aiflame.agent.target_files import MAX_CPU_S, FileGuard, TargetFile
from breadth import cases
from elfbytes import ALLOC_EXEC, FUNC, GLOBAL, HEADER_BYTES, Elf, Section, Symbol
from hostile import run
from hostile.elf import read_all, read_mutations
from hostile.outcome import Outcome

# What an interpreter, a C library, a device runtime and a kernel of PoCL's are known by.
_SEED = """
#define F(name) __attribute__((noinline, used)) int name(int x) { return x * 3 + 1; }
F(cudaLaunchKernel) F(clEnqueueNDRangeKernel) F(_PyEval_EvalFrameDefault) F(pthread_getspecific)
F(_pocl_kernel_scale_workgroup) F(PyGILState_GetThisThreadState)
unsigned long Py_Version = 0x030b02f0;
char _PyRuntime[4096];
"""


# What a file may take, one more step between two looks at the clock, and a crowded machine.
_MOST_CPU_S = 3 * MAX_CPU_S


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


@pytest.mark.breadth
def test_no_mutation_of_real_files_gets_out_of_hand(seeds: list[bytes], tmp_path: Path) -> None:
    """1,000 files: nothing is raised but what says that a file is bad, and each ends in time."""
    outcome = Outcome("seeds")
    read_mutations(seeds, 1000, tmp_path, 8, outcome)
    assert outcome.unforeseen == {}
    assert outcome.reads > 5000 and sum(outcome.refused.values()) > 100
    assert outcome.slowest_s < _MOST_CPU_S, outcome.slowest


def _table(name: str, data: bytes, kind: str = "symtab", size: int | None = None) -> Section:
    return Section(name, data, kind, link=".strtab", entry_size=24, size=size)


def _symbols(count: int, step: int = 1, size: int = 1 << 40) -> bytes:
    """Records of `count` functions, `step` bytes apart, whose names overlap."""
    records = np.zeros(count + 1, SYMBOL[64])
    records["name"][1:] = np.arange(1, count + 1)
    records["info"][1:] = GLOBAL << 4 | FUNC
    records["section"][1:] = 1
    records["value"][1:] = 0x1000 + np.arange(count) * step
    records["size"][1:] = size
    return records.tobytes()


def _sparse_strings() -> Elf:
    """400 symbol tables, one string table of 1 GB."""
    tables = [_table(f".symtab{n}", bytes(24)) for n in range(400)]
    return Elf(sections=[*tables, Section(".strtab", b"", "strtab", size=1 << 30)])


def _sparse_symbols() -> Elf:
    return Elf(
        sections=[Section(".strtab", b"\0f\0", "strtab"), _table(".symtab", b"", size=1 << 30)]
    )


def _shared_strings() -> Elf:
    """1,000 symbol tables that lie over each other and share 16 MB of names."""
    tables = [_table(f".symtab{n}", _symbols(10)) for n in range(1000)]
    return Elf(sections=[*tables, Section(".strtab", b"cudaLaunchKerne\0" * (1 << 20), "strtab")])


def _overlapping_names() -> Elf:
    """300,000 functions; each name is the rest of one that never ends."""
    text = Section(".strtab", b"n" * 8_000_000, "strtab")
    return Elf(text=bytes(400_000), sections=[text, _table(".symtab", _symbols(300_000, size=1))])


def _nested_functions() -> bytes:
    """2,000,000 functions, each of which holds all that follow."""
    strings = Section(".strtab", b"n" * 8_000_000, "strtab")
    table = _table(".symtab", _symbols(2_000_000))
    return _with_code_of(1 << 28, Elf(sections=[strings, table]))


def _with_code_of(size: int, elf: Elf) -> bytes:
    """A file whose text is that long, the end of it a hole."""
    data = bytearray(elf.build())
    sections = int.from_bytes(data[40:48], "little")
    for size_at in (HEADER_BYTES + 32, sections + 64 + 32):  # of the segment, of .text
        data[size_at : size_at + 8] = size.to_bytes(8, "little")
    return bytes(data)


def _one_address() -> Elf:
    """300,000 names for one function."""
    text = Section(".strtab", b"n" * 8_000_000, "strtab")
    return Elf(sections=[text, _table(".symtab", _symbols(300_000, step=0))])


def _huge_entry_size() -> Elf:
    strings = Section(".strtab", b"\0cuLaunch\0", "strtab")
    table = Section(".symtab", _symbols(3), "symtab", link=".strtab", entry_size=1 << 62)
    return Elf(sections=[strings, table])


def _link_to_itself() -> Elf:
    table = Section(".symtab", _symbols(3), "symtab", link=".symtab", entry_size=24)
    return Elf(sections=[table, Section(".strtab", b"", "strtab", link=".strtab")])


def _long_section_names() -> bytes:
    """2,000 sections, and each has all of a name of 1 MB."""
    names = Section("s" * (1 << 20))
    data = bytearray(Elf(sections=[names, *(Section("") for _ in range(2000))]).build())
    begin = int.from_bytes(data[40:48], "little")
    for header in range(begin, len(data), 64):
        data[header : header + 4] = (len("..text") + 1).to_bytes(4, "little")
    return bytes(data)


def _endless_notes() -> bytes:
    """250 note segments of 64 KB each, on the same bytes, all of empty notes."""
    data = bytearray(Elf(sections=[Section(".note", bytes(1 << 16), "note")]).build())
    offset, count = len(data), 250
    data += struct.pack("<IIQQQQQQ", 1, 5, 64, 0x1000, 0x1000, 64, 64, 4096)
    data += struct.pack("<IIQQQQQQ", 4, 4, 1 << 13, 0, 0, 1 << 16, 1 << 16, 4) * (count - 1)
    data[32:40] = offset.to_bytes(8, "little")
    data[56:58] = count.to_bytes(2, "little")
    return bytes(data)


def _stubs_with_long_names() -> Elf:
    """100,000 relocations, each of a symbol with a name of 10 KB, and a jump through each."""
    count, slots, code = 100_000, 0x900000, 0x2000000
    names = np.arange(count, dtype="<u8") + 1
    relocations = np.zeros((count, 3), "<u8")
    relocations[:, 0] = slots + 8 * np.arange(count)
    relocations[:, 1] = names << np.uint64(32) | np.uint64(7)
    jumps = np.zeros(count, np.dtype([("opcode", "<u2"), ("to", "<i4"), ("pad", "S10")]))
    jumps["opcode"] = 0x25FF
    jumps["to"] = slots + 8 * np.arange(count) - (code + 16 * np.arange(count) + 6)
    return Elf(
        sections=[
            Section(".rela.plt", relocations.tobytes()),
            Section(".plt", jumps.tobytes(), flags=ALLOC_EXEC, address=code, entry_size=16),
            _table(".dynsym", _symbols(count), "dynsym"),
            Section(".strtab", b"n" * 1_000_000, "strtab"),
        ]
    )


def _empty_functions() -> bytes:
    """Code of 1 GB, all of it one function after the other without unwind information."""
    table = _table(".symtab", _symbols(1024, step=1 << 20, size=1 << 20))
    strings = Section(".strtab", b"f" * 2000, "strtab")
    return _with_code_of(1 << 30, Elf(sections=[table, strings]))


_FILES: list[Callable[[], Elf | bytes]] = [
    _sparse_strings,
    _sparse_symbols,
    _shared_strings,
    _overlapping_names,
    _nested_functions,
    _one_address,
    _huge_entry_size,
    _link_to_itself,
    _long_section_names,
    _endless_notes,
    _stubs_with_long_names,
    _empty_functions,
]


@cases("made", _FILES, ids=lambda made: made.__name__.strip("_"))
def test_a_file_that_is_made_to_take_long_is_given_up(
    made: Callable[[], Elf | bytes], tmp_path: Path
) -> None:
    """Every reader ends in time, and the process needs less than 500 MB."""
    # GIVEN a file whose sparse part takes no disk
    elf = made()
    path = tmp_path / "file"
    path.write_bytes(elf if isinstance(elf, bytes) else elf.build())
    os.truncate(path, max(path.stat().st_size, (1 << 30) + (1 << 20)))
    # WHEN everything reads it, in a process whose memory is its own
    command = [sys.executable, run.__file__, "elf", "0", path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    facts = json.loads(done.stdout)
    # THEN
    assert facts["unforeseen"] == {}
    assert facts["slowest_s"] < _MOST_CPU_S, facts["slowest"]
    assert facts["peak_bytes"] < 500 << 20


def test_a_file_that_shrinks_while_it_is_read_is_short(tmp_path: Path) -> None:
    path = tmp_path / "shrinks"
    path.write_bytes(Elf(symbols=[Symbol("f", 0x1000, 16)]).build())
    with path.open("rb") as opened:
        file = TargetFile(opened.fileno())
        image = ElfImage.read(file)
        os.truncate(path, HEADER_BYTES)
        assert FunctionNames(file, image).at(file, 0x1000) == b""
        outcome = Outcome("shrinks")
        read_all(path, FileGuard(), outcome)
        assert outcome.refused and not outcome.unforeseen
