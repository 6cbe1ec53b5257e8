# SPDX-License-Identifier: Apache-2.0
"""Cubins of nvcc's: functions, source lines and SASS; and cubins that are damaged."""

from __future__ import annotations

import os
import struct
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar, cast

import asked_bytes
import pytest
from aiflame.agent.file_questions import BadAnswer, Question
from aiflame.agent.inspector import tools
from aiflame.agent.inspector.fork_server import ForkServer
from aiflame.agent.losses import LossKind
from aiflame.agent.symbols.file_facts import FileFacts
from aiflame.agent.target_files import BadTargetFile, FileGuard, TargetFile
from aiflame.gpu.base import CodeKey, KernelSample
from aiflame.gpu.nvidia import disassembly
from aiflame.gpu.nvidia.code import KeptCode
from aiflame.gpu.nvidia.cubin import MAX_FUNCTIONS, Function, functions_of, without
from fatbins import needs_nvcc, needs_nvdisasm
from helper_memory import Host
from hypothesis import given, settings
from hypothesis import strategies as st

T = TypeVar("T")

_SOURCE = """#include "inc.h"
extern "C" __global__ void scale(float *p, float f, int n)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n)
        p[i] = helper(p[i], f);
}
template <typename T> __global__ void fill(T *p, T v) {
    p[threadIdx.x] = v;
    __syncthreads();
    p[threadIdx.x + 1] += v;
}
template __global__ void fill<float>(float *, float);
template __global__ void fill<int>(int *, int);
"""
_INCLUDED = """static __device__ __forceinline__ float helper(float a, float f)
{
    float x = a * f;
    for (int i = 0; i < 4; i++)
        x = __sinf(x);
    return x;
}
"""
_FILL = "_Z4fillIfEvPT_S0_"
_ARCHITECTURES = (80, 90, 100)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cubins")
    (folder / "k.cu").write_text(_SOURCE)
    (folder / "inc.h").write_text(_INCLUDED)
    return folder


def _build(folder: Path, architecture: int, *flags: str) -> bytes:
    path = folder / f"k{architecture}{''.join(flags)}.cubin"
    if not path.exists():
        command = ["nvcc", "-cubin", f"-arch=sm_{architecture}", *flags, "-o", path, "k.cu"]
        subprocess.run(command, cwd=folder, check=True)
    return path.read_bytes()


@pytest.fixture(params=_ARCHITECTURES)
def built(request: pytest.FixtureRequest, folder: Path) -> tuple[int, bytes]:
    return request.param, _build(folder, request.param, "-lineinfo")


def _read(data: bytes, name: str) -> Function | None:
    return _read_all(data, [name]).get(name)


def _read_all(data: bytes, names: list[str]) -> dict[str, Function]:
    """As a parser reads it, and as its answer is checked."""
    fd = os.memfd_create("cubin")
    try:
        os.write(fd, data)
        question = functions_of(names)
        return question.checked(question.read(TargetFile(fd), *question.arguments))
    finally:
        os.close(fd)


@needs_nvcc
def test_functions_have_their_size_and_lines(built: tuple[int, bytes]) -> None:
    architecture, data = built
    found = _read(data, _FILL)
    assert found is not None
    assert (found.sm, found.begin) == (architecture, 0)
    assert found.size % 128 == 0
    assert [line.line for line in found.lines] == [8, 9, 10, 11, 12]
    assert found.lines[0].offset == 0
    assert {Path(line.file).name for line in found.lines} == {"k.cu"}
    # AND those of an inlined function are its own
    scale = _read(data, "scale")
    assert scale is not None
    assert scale.symbol != found.symbol
    lines = {(Path(line.file).name, line.line) for line in scale.lines}
    assert lines == {*(("k.cu", n) for n in (2, 4, 5, 6, 7)), ("inc.h", 3), ("inc.h", 5)}
    assert _read(data, "no_such") is None


@needs_nvcc
def test_a_cubin_without_lines_has_functions(folder: Path) -> None:
    found = _read(_build(folder, 90), "scale")
    assert found is not None
    assert found.size
    assert found.lines == ()


@needs_nvcc
@pytest.mark.parametrize(
    ("abi", "flags", "version", "expected"),
    [
        (7, 0x005A055A, 129, 90),  # CUDA 12.9
        (7, 0x00500550, 120, 80),
        (8, 0x0A006402, 1, 100),
    ],
)
def test_headers_of_other_toolkits_are_read(
    folder: Path, abi: int, flags: int, version: int, expected: int
) -> None:
    data = bytearray(_build(folder, 90, "-lineinfo"))
    data[8] = abi
    struct.pack_into("<I", data, 20, version)
    struct.pack_into("<I", data, 48, flags)
    found = _read(bytes(data), "scale")
    assert found is not None
    assert found.sm == expected


@pytest.mark.parametrize("data", [b"", b"\x7fELF", b".version 8.0\n" * 50, bytes(4096)])
def test_what_is_no_cubin_has_no_functions(data: bytes) -> None:
    assert _read(data, "scale") is None


@needs_nvcc
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_a_damaged_cubin_ends_in_bounded_time(folder: Path, data: st.DataObject) -> None:
    sound = _build(folder, 90, "-lineinfo")
    content = bytearray(sound)
    for _ in range(data.draw(st.integers(1, 8))):
        where = data.draw(st.integers(0, len(content) - 1))
        junk = data.draw(st.binary(min_size=1, max_size=8))
        content[where : where + len(junk)] = junk
    content = content[: data.draw(st.integers(0, len(content)) | st.just(len(content)))]
    begun_s = time.thread_time()
    try:
        found = _read(bytes(content), "scale")
    except (BadTargetFile, BadAnswer, ArithmeticError, LookupError, ValueError):
        found = None  # which costs this file its names
    assert time.thread_time() - begun_s < 2
    if found is not None:
        assert all(0 <= line.offset < found.size for line in found.lines)


class _CodeHost(Host):
    """A host that reads code as the recorder does."""

    def __init__(self, *, has_tool: bool = True) -> None:
        super().__init__()
        self.guard = FileGuard()
        self.server = ForkServer()
        self.facts = FileFacts(self.server, self.guard)
        self.has_tool = has_tool
        self.runs = self.asked = 0

    def close(self) -> None:
        self.facts.close()
        self.server.close()

    def about(self, name: str, data: bytes, question: Question[T]) -> T | None:
        self.asked += 1
        return asked_bytes.about(self.facts, name, data, question)

    def run(self, program: str, arguments: list[str], data: bytes) -> bytes | None:
        if not self.has_tool or not tools.is_sound(program):
            return None
        self.runs += 1
        return tools.run_tool(program, arguments, data)


@pytest.fixture
def host() -> Iterator[_CodeHost]:
    with closing(_CodeHost()) as host:
        yield host


def _sample(name: str, offset: int, code: int = 7) -> KernelSample:
    return KernelSample(0, 0, CodeKey(3, None, name, code), offset, "r", 5)


@needs_nvcc
@needs_nvdisasm
def test_the_listing_has_sass_beside_source(built: tuple[int, bytes], host: _CodeHost) -> None:
    _, data = built
    kept = KeptCode(cast(Any, host), lambda device: 90)
    kept.keep([_sample("scale", 0x50), _sample(_FILL, 0x60)], lambda code: data)
    for name, word, line in (
        ("scale", "MUFU.SIN", ("inc.h", 5)),
        (_FILL, "BAR.SYNC", ("k.cu", 10)),
    ):
        listing = kept.listing(CodeKey(3, None, name, 7), frozenset({0x50}))
        assert listing is not None
        assert [one.offset for one in listing.lines] == list(range(0, listing.size_bytes, 16))
        assert all(one.text for one in listing.lines)
        of_word = [one for one in listing.lines if word in one.text]
        assert of_word
        assert {(Path(one.file).name, one.line) for one in of_word} == {line}
        # Targets of jumps are offsets.
        jumps = [one for one in listing.lines if one.text.startswith("BRA")]
        assert jumps
        assert all(f"0x{one.offset:x}" in one.text for one in jumps[-1:])
    # AND one run of the disassembler was enough
    assert host.runs == 1
    assert not host.lost
    assert not host.guard.bad


@needs_nvcc
def test_without_a_disassembler_source_lines_are_left(folder: Path, host: _CodeHost) -> None:
    host.has_tool = False
    data = _build(folder, 90, "-lineinfo")
    kept = KeptCode(cast(Any, host), lambda device: 90)
    kept.keep([_sample(_FILL, 0x70)], lambda code: data)
    listing = kept.listing(CodeKey(3, None, _FILL, 7), frozenset({0x70, 0x10}))
    assert listing is not None
    assert [(one.offset, one.text, one.line) for one in listing.lines] == [
        (0x10, "", 9),
        (0x70, "", 10),
    ]
    assert host.lost == {LossKind.KERNEL_NOT_DISASSEMBLED: 1}


@needs_nvcc
def test_code_that_finds_no_room_is_a_loss(
    folder: Path, host: _CodeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = _build(folder, 90, "-lineinfo")
    monkeypatch.setattr("aiflame.gpu.nvidia.code._MAX_BYTES", len(data))
    kept = KeptCode(cast(Any, host), lambda device: 90)
    reads: list[int] = []

    def read(code: int) -> bytes:
        reads.append(code)
        return data + bytes(code - 7)

    for _ in range(3):
        kept.keep([_sample("scale", 0, 7), _sample("scale", 0, 8), _sample("scale", 0, 0)], read)
    assert reads == [7, 8]
    assert host.lost == {LossKind.DEVICE_CODE_NOT_KEPT: 1}
    assert kept.listing(CodeKey(3, None, "scale", 8), frozenset({0})) is None


def _hot(process: int, code: int, interval: int = 0) -> KernelSample:
    return KernelSample(interval, 0, CodeKey(process, None, "k", code), 0, "r", 1)


def test_code_that_is_too_much_is_not_read_on_and_on() -> None:
    # GIVEN a process that says that it has a thousand objects of a size that no room is left for
    host, reads = Host(), Counter[int]()
    kept = KeptCode(cast(Any, host), lambda device: 90)
    large = bytes(48 << 20)

    def read_of(process: int) -> Callable[[int], bytes]:
        def read(code: int) -> bytes:
            reads[process] += 1
            return b"%d %d" % (process, code) + large

        return read

    # WHEN all are sampled at once THEN a few are read, and the others are counted
    kept.keep([_hot(1, code) for code in range(1, 1001)], read_of(1))
    assert reads == {1: 2}
    assert host.lost == {LossKind.DEVICE_CODE_NOT_KEPT: 999}
    # AND WHEN many processes do so THEN it takes a part of each second, and no more
    for second in (0, 1):
        for process in range(2, 50):
            kept.keep([_hot(process, 1, second)], read_of(process))
        assert sum(reads.values()) == 6 * (second + 1)
    # AND those whose turn came later were read later
    assert (reads[2], reads[11], reads[12]) == (1, 1, 0)
    assert host.lost == {LossKind.DEVICE_CODE_NOT_KEPT: 999 + 10}


def test_objects_of_no_size_find_their_end() -> None:
    host = Host()
    kept = KeptCode(cast(Any, host), lambda device: 90)
    for process in range(3):
        hot = [
            _hot(process, code) for code in range(10_000 * process + 1, 10_000 * process + 10_001)
        ]
        kept.keep(hot, lambda code: b"%d" % code)
    assert host.lost == {LossKind.DEVICE_CODE_NOT_KEPT: 30_000 - 24_576}


@needs_nvcc
@needs_nvdisasm
@settings(max_examples=4, deadline=None)
@given(where=st.integers(0, 9_000), junk=st.binary(min_size=4, max_size=64))
def test_a_disassembler_that_fails_costs_the_text_alone(
    folder: Path, where: int, junk: bytes
) -> None:
    data = bytearray(_build(folder, 90, "-lineinfo"))
    data[where : where + len(junk)] = junk
    with closing(_CodeHost()) as host:
        kept = KeptCode(cast(Any, host), lambda device: 90)
        kept.keep([_sample("scale", 0)], lambda code: bytes(data))
        kept.listing(CodeKey(3, None, "scale", 7), frozenset({0}))


@needs_nvcc
def test_functions_that_are_asked_about_together_have_what_each_has_alone(
    built: tuple[int, bytes],
) -> None:
    names = ["scale", _FILL, "_Z4fillIiEvPT_S0_"]
    together = _read_all(built[1], [*names, "no_such"])
    assert together == {name: _read(built[1], name) for name in names}
    assert all(one.lines for one in together.values())


def _cubin_of(count: int) -> bytes:
    """A cubin with so many functions in one section, each of 16 bytes: f0, f1, ..."""
    names = b"\0" + b"".join(b"f%d\0" % i for i in range(count))
    at, symbols = 1, []
    for i in range(count):
        symbols.append(struct.pack("<I2BH2Q", at, 2, 0, 0, 16 * i, 16))
        at += len(b"f%d" % i) + 1
    table = b"".join(symbols)
    section = struct.Struct("<2I4Q2I2Q")
    begin = 64 + 3 * section.size
    ident = struct.pack(
        "<4s5B7x2HI3QI6H", b"\x7fELF", 2, 1, 1, 0, 7, 2, 190, 1, 0, 0, 64, 90, 64, 0, 0, 64, 3, 2
    )
    sections = (
        section.pack(*[0] * 10)
        + section.pack(0, 2, 0, 0, begin, len(table), 2, 0, 0, 0)
        + section.pack(0, 3, 0, 0, begin + len(table), len(names), 0, 0, 0, 0)
    )
    return ident + sections + table + names


def test_parts_that_reach_past_the_end_make_code_no_longer() -> None:
    assert without(b"12345678", [(2, 2), (6, 1 << 60), (1 << 50, 3)]) == b"12\0\x0056\0\0"


def test_a_code_object_is_read_once_for_all_kernels_and_processes(host: _CodeHost) -> None:
    # GIVEN eight processes of one program, and a library of which each runs many kernels
    host.has_tool = False
    data = _cubin_of(MAX_FUNCTIONS)
    kept = KeptCode(cast(Any, host), lambda device: 90)
    for process in range(8):
        samples = [
            KernelSample(0, 0, CodeKey(process, None, f"f{i}", 7), 0, "r", 1)
            for i in range(MAX_FUNCTIONS)
        ]
        kept.keep(samples, lambda code: bytes(bytearray(data)))
    # WHEN they are listed THEN one question is enough
    for process in range(8):
        for i in (0, 1, MAX_FUNCTIONS - 1):
            listing = kept.listing(CodeKey(process, None, f"f{i}", 7), frozenset({0}))
            assert listing is not None
            assert listing.size_bytes == 16
    assert host.asked == 1
    assert not host.guard.bad


def test_the_same_code_of_many_processes_takes_its_room_once() -> None:
    host = Host()
    kept = KeptCode(cast(Any, host), lambda device: 90)
    for process in range(8):
        kept.keep([_hot(process, 7)], lambda code: b"\x7fELF" * (4 << 20))
    assert not host.lost


class _SlowHost(Host):
    """Of which each answer takes a second."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s, self.asked, self.runs = 0.0, 0, 0

    def about(self, name: str, data: bytes, question: Question[T]) -> T | None:
        self.asked, self.now_s = self.asked + 1, self.now_s + 1
        return cast(T, {name: Function(90, 1, 0, 16, ())})

    def run(self, program: str, arguments: list[str], data: bytes) -> bytes | None:
        self.runs, self.now_s = self.runs + 1, self.now_s + 1
        return None


def test_the_end_of_a_recording_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    # GIVEN much code that takes long to read
    host = _SlowHost()
    monkeypatch.setattr("aiflame.gpu.nvidia.listings.time.monotonic", lambda: host.now_s)
    kept = KeptCode(cast(Any, host), lambda device: 90)
    kept.keep([_hot(1, code) for code in range(1, 101)], lambda code: b"%d" % code)
    # WHEN all is listed THEN that ends soon, and it is told how much is missing
    found = [kept.listing(CodeKey(1, None, "k", code), frozenset({0})) for code in range(1, 101)]
    assert 5 < host.now_s <= 12
    assert (host.asked, len([one for one in found if one is not None])) == (6, 6)
    assert host.runs
    assert host.lost == {LossKind.KERNEL_NOT_DISASSEMBLED: 100}


def test_output_that_is_none_is_no_code() -> None:
    for output in (b"", b"\xff" * 1000, b"/*0000*/ X ;\n" * 10, b".L_x_1:\n" * 1000):
        assert disassembly.parsed(output) == {}
