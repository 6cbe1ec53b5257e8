# SPDX-License-Identifier: Apache-2.0
"""The family `opencl` without a device: files of kernels, their listings, and who is installed."""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest
from aiflame.agent.capture.code_objects import StoredCode
from aiflame.agent.capture.reader import read_capture
from aiflame.agent.capture.writer import CaptureWriter
from aiflame.agent.devices.listings import with_listings
from aiflame.agent.file_questions import BadAnswer, Question
from aiflame.agent.inspector.fork_server import ForkServer
from aiflame.agent.inspector.opener import Opener
from aiflame.agent.losses import LossKind
from aiflame.agent.model.gpu import GpuProfile, Tier
from aiflame.agent.model.window import NO_TIME, Timing, Window, rows_of
from aiflame.agent.recording.window_builder import Bounds, WindowBuilder
from aiflame.agent.sinks import kernel_files
from aiflame.agent.sinks.capture import CaptureSink
from aiflame.agent.sinks.kernel_files import KernelFiles
from aiflame.agent.symbolize.files import Files, FoundFiles, GivenFiles, OpenFile
from aiflame.agent.symbols.file_facts import FileFacts
from aiflame.agent.target_files import BadTargetFile, FileGuard, TargetFile
from aiflame.gpu.base import CodeKey, CpuSample, Interval, KernelSample, KernelTime
from aiflame.gpu.opencl import listing as listings
from aiflame.gpu.opencl.disassembly import Decoded, instructions_of
from aiflame.gpu.opencl.family import OpenClFamily, OpenClSampler
from aiflame.gpu.opencl.kernel_file import Function, KernelFile, kernel_of
from aiflame.gpu.opencl.listing import lay_over, make_listing

T = TypeVar("T")

# What PoCL makes of a kernel, in small: the body, and a copy of it in the work group's function.
_SOURCE = """
float outside(float);
__attribute__((noinline)) void _pocl_kernel_half_workgroup_one(float *data, int n)
{
    for (int i = 0; i < n; i++)
        data[i] = outside(data[i]) / 2;
}
void _pocl_kernel_half_workgroup_one_workgroup(float **data, int n)
{
    for (int i = 0; i < n; i++)
        (*data)[i] = (*data)[i] / 3;
    _pocl_kernel_half_workgroup_one(*data, n);
}
"""
_NAME = "half_workgroup_one"  # a name that looks like that of a work group's function
_PATH = f"cache/AB/CDEFGH/{_NAME}/64-1-1-goffs0-smallgrid/{_NAME}.so"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kernel")
    (folder / "kernel.c").write_text(_SOURCE)
    path = folder / _PATH
    path.parent.mkdir(parents=True)
    command = [
        "gcc",
        "-O1",
        "-shared",
        "-fPIC",
        "-nostdlib",
        "-Wl,-Bsymbolic",
        "-o",
        path,
        folder / "kernel.c",
    ]
    subprocess.run(command, check=True)
    return path


@pytest.fixture
def descriptor(built: Path) -> Iterator[int]:
    fd = os.open(built, os.O_RDONLY)
    yield fd
    os.close(fd)


@pytest.fixture
def kernel(descriptor: int) -> KernelFile:
    found = _asked(descriptor, kernel_of(_PATH))
    assert found is not None
    return found


def _asked(fd: int, question: Question[T]) -> T | None:
    """What a parser answers, None for a bad file."""
    with contextlib.suppress(BadTargetFile):
        answer = question.read(TargetFile(fd), *question.arguments)
        return question.checked(json.loads(json.dumps(answer)))
    return None


def _decode(fd: int) -> Callable[[Function], list[Decoded]]:
    return lambda function: _asked(fd, instructions_of(function)) or []


class _Host:
    """A recording with one file of a target."""

    def __init__(self, path: str, fd: int | None) -> None:
        self._path, self._fd = path, fd
        self.samples: list[KernelSample] = []
        self.losses: Counter[LossKind] = Counter()

    def path(self, file: int) -> str:
        return self._path

    def is_open(self, file: int) -> bool:
        return self._fd is not None

    def ask(self, file: int, question: Question[T]) -> T | None:
        return None if self._fd is None else _asked(self._fd, question)

    def watch(self, descriptor: int, take: Callable[[], None]) -> None:
        raise AssertionError("samples come with drains only")

    def add_samples(self, samples: Iterable[KernelSample]) -> None:
        self.samples += samples

    def add_times(self, times: Iterable[KernelTime]) -> None:
        raise AssertionError("no device tells times")

    def lose(self, kind: LossKind, count: int = 1) -> None:
        self.losses[kind] += count


def _owns(path: str, fd: int | None) -> bool:
    return OpenClSampler(_Host(path, fd)).owns(0)


def _lines(file: int, addresses: Sequence[int]) -> list[tuple[str, int]]:
    return [("half.cl", address) for address in addresses]


def _nowhere(addresses: Sequence[int]) -> list[tuple[str, int]]:
    return [("", 0)] * len(addresses)


def test_kernel_is_named_by_its_work_group_function(kernel: KernelFile) -> None:
    assert kernel.name == _NAME
    entry = kernel.function_at(kernel.entry)
    assert entry is not None
    assert entry.name == f"_pocl_kernel_{_NAME}_workgroup"


def test_offsets_begin_at_the_work_group_function_and_are_told_apart(kernel: KernelFile) -> None:
    assert kernel.offset_of(kernel.entry) == 0
    end = kernel.start + kernel.code_bytes
    offsets = {kernel.offset_of(address) for address in range(kernel.start, end)}
    assert offsets == set(range(kernel.code_bytes))
    assert kernel.offset_of(kernel.start - 1) is None
    assert kernel.offset_of(end) is None
    for offset in (0, 1, kernel.code_bytes - 1):
        assert kernel.offset_of(kernel.address_of(offset)) == offset


@pytest.mark.parametrize(
    "path",
    [
        "/home/me/.cache/pocl/kcache/AB/CDEF/scale/0-0-0/scale.so",
        "/home/me/.cache/pocl/kcache/tempfile_x.so",
        "/scratch/mine/AB/CDEF/scale/128-1-1-goffs0-smallgrid/scale.so",
        "/scratch/mine/_UNCACHED_GIfoOv/scale/4096-1-1/scale.so",
    ],
)
def test_paths_of_kernels(path: str) -> None:
    assert _owns(path, None)


def test_kernel_under_any_name_is_known_by_its_symbol(descriptor: int) -> None:
    assert _owns("/memfd:x", descriptor)


def test_other_files_are_no_kernels(built: Path, tmp_path: Path) -> None:
    words = tmp_path / "words.so"
    words.write_bytes(b"_pocl_kernel_%s_workgroup\0")
    for path in ("/bin/true", str(words)):
        fd = os.open(path, os.O_RDONLY)
        try:
            # Neither by itself nor under a path like those of kernels.
            assert not _owns(path, fd)
            assert not _owns(str(built), fd)
        finally:
            os.close(fd)
    assert not _owns("/usr/lib/libfoo.so", None)


def test_large_files_are_not_searched(tmp_path: Path) -> None:
    large = tmp_path / "large.so"
    large.write_bytes(b"_pocl_kernel_x_workgroup\0")
    os.truncate(large, 1 << 30)
    fd = os.open(large, os.O_RDONLY)
    try:
        for path in ("/home/me/large.so", "/home/me/pocl/kcache/large.so"):
            assert not _owns(path, fd)
    finally:
        os.close(fd)


def test_damaged_files_are_refused_or_read_and_nothing_else(built: Path, tmp_path: Path) -> None:
    whole = built.read_bytes()
    dice = random.Random(5)
    path = tmp_path / "damaged.so"
    read = 0
    for _ in range(300):
        data = bytearray(whole[: dice.choice([len(whole), dice.randrange(len(whole))])])
        for _ in range(dice.randrange(1, 20)):
            data[dice.randrange(len(data))] = dice.randrange(256)
        path.write_bytes(data)
        fd = os.open(path, os.O_RDONLY)
        found = _asked(fd, kernel_of(_PATH))
        if found is not None:
            read += 1
            offsets = frozenset({0, 1, found.code_bytes - 1})
            listing = make_listing(found, offsets, _nowhere, _decode(fd))
            assert listing is None or all(
                0 <= line.offset < found.code_bytes for line in listing.lines
            )
        os.close(fd)
    assert 0 < read < 300


def test_samples_are_told_by_offset_and_callers_by_their_call(
    built: Path, descriptor: int, kernel: KernelFile
) -> None:
    host = _Host(str(built), descriptor)
    sampler = OpenClFamily(Path("nowhere")).start(host)
    assert sampler.owns(0)
    listing = make_listing(kernel, frozenset({0}), _nowhere, _decode(descriptor))
    assert listing is not None
    call = next(line for line in listing.lines if line.text.startswith("call"))
    following = next(line for line in listing.lines if line.offset > call.offset)
    last_byte = kernel.address_of(following.offset) - 1
    samples = [
        CpuSample(3, 11, 0, kernel.entry, False, 5),
        CpuSample(3, 12, 0, kernel.entry, False, 2),
        CpuSample(3, 11, 0, last_byte, True, 1),
        CpuSample(3, 11, 0, kernel.start - 1, False, 4),
    ]
    sampler.drain(Interval(7, samples))
    code = CodeKey(3, 0, _NAME)
    assert [(s.interval, s.code, s.offset, s.reason, s.count) for s in host.samples] == [
        (7, code, 0, "issuing", 7),
        (7, code, call.offset, "issuing", 1),
    ]
    assert host.losses == {LossKind.SAMPLE_OUTSIDE_KERNEL: 4}


def test_callers_are_told_by_their_call_once_the_file_can_be_read(
    built: Path, descriptor: int, kernel: KernelFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = _Host(str(built), descriptor)
    sampler = OpenClSampler(host)
    assert sampler.owns(0)
    listing = make_listing(kernel, frozenset({0}), _nowhere, _decode(descriptor))
    assert listing is not None
    call = next(line for line in listing.lines if line.text.startswith("call"))
    following = next(line for line in listing.lines if line.offset > call.offset)
    last_byte = kernel.address_of(following.offset) - 1
    samples = [CpuSample(3, 11, 0, last_byte, True, 1)]
    # GIVEN that nobody could be asked for the instructions for a moment
    with monkeypatch.context() as patch:
        patch.setattr(host, "ask", lambda *_: None)
        sampler.drain(Interval(0, samples))
    assert [one.offset for one in host.samples] == [following.offset - 1]
    # WHEN it is looked at again
    assert sampler.owns(0)
    sampler.drain(Interval(1, samples))
    # THEN
    assert [one.offset for one in host.samples[1:]] == [call.offset]


def test_samples_of_a_file_that_could_not_be_opened_are_counted(built: Path) -> None:
    host = _Host(str(built), None)
    sampler = OpenClSampler(host)
    assert sampler.owns(0)
    sampler.drain(Interval(0, [CpuSample(0, 1, 0, 64, False, 9)]))
    assert host.samples == []
    assert host.losses == {LossKind.KERNEL_NOT_OPENED: 9}


def test_listing_has_the_functions_that_were_sampled(
    built: Path, descriptor: int, kernel: KernelFile
) -> None:
    sampler = OpenClSampler(_Host(str(built), descriptor))
    assert sampler.owns(0)
    found = sampler.resolve(CodeKey(0, 0, _NAME), frozenset({0}), _lines)
    assert found is not None
    assert found.size_bytes == kernel.code_bytes
    offsets = [line.offset for line in found.lines]
    entry = kernel.function_at(kernel.entry)
    assert entry is not None
    assert offsets == sorted(set(offsets))
    assert offsets[0] == 0
    assert offsets[-1] < entry.end - entry.start
    assert all(line.line == kernel.entry + line.offset for line in found.lines)
    # A jump leads to an offset, a call to a function.
    (jump, *_) = (line.text for line in found.lines if line.text.startswith("jl"))
    assert int(jump.split()[1], 16) in offsets
    assert any(line.text.endswith(f" _pocl_kernel_{_NAME}") for line in found.lines)


def _captured(
    path: Path, *windows: Window, files: Files, keep: Callable[[int, bytes], None] | None = None
) -> GpuProfile:
    """Returns what a report knows of devices that reads a capture of windows."""
    writer = CaptureWriter(path)
    with (
        contextlib.closing(ForkServer()) as server,
        contextlib.closing(FileFacts(server, FileGuard(), is_urgent=False)) as facts,
    ):
        kept = KernelFiles(StoredCode(writer.put), files, facts, keep or (lambda *_: None))
        sink = CaptureSink(writer, kernel_files=kept)
        for window in windows:
            sink.put(window)
    numbers = dict.fromkeys(("started_unix_ns", "recorder_cpu_ns", "recorder_peak_rss_bytes"), 0)
    writer.put_meta({"aiflame_version": "0", "command": "", "target": "", **numbers})
    writer.put_meta({"period_ns": 1000, "duration_ns": sink.end_ns})
    writer.commit()
    writer.close()
    return with_listings(read_capture(path)).gpu


def _sampled_windows() -> list[Window]:
    """Two windows of two kernels, each in a file of its own; both are sampled in the first."""
    builder = WindowBuilder(Bounds())
    text = builder.text
    builder.define("processes", rows_of("processes", (0, 9, 1, 0, 0, 0, NO_TIME, 0, 0, 0, 0)))
    builder.define("devices", rows_of("devices", (0, text("opencl"), text("PoCL"), 2, 0, 0, 10)))
    builder.define("reasons", rows_of("reasons", (0, text("opencl"), text("issuing"))))
    for number, name in enumerate((_NAME, "other")):
        file = (number, text(f"/{name}.so"), text("abc"))
        builder.define("binaries", rows_of("binaries", file))
        kernel = (number, 0, text("opencl"), text(name), 0)
        builder.define("kernels", rows_of("kernels", kernel))
        builder.define("codes", rows_of("codes", (number, number, number)))
    found = []
    for second, codes in ((1, (0, 1)), (2, (1,))):
        for code in codes:
            times = (NO_TIME, NO_TIME)
            row = (0, code, 0, 0, 0, Timing.NONE, *times, 1)
            builder.add("device_samples", rows_of("device_samples", row))
        found.append(builder.close(second * 10**9))
    return found


def test_a_capture_of_an_agent_keeps_the_file_and_a_report_lists_it(
    built: Path, tmp_path: Path
) -> None:
    # GIVEN windows of a kernel whose file is there, and of one whose file is not
    files = GivenFiles()
    files.add(0, OpenFile(os.open(built, os.O_RDONLY), ""))
    with contextlib.closing(files):
        kept: dict[int, bytes] = {}
        windows = _sampled_windows()
        gpu = _captured(tmp_path / "run.aiflame", *windows, files=files, keep=kept.__setitem__)
    # THEN the former has the instructions of its function, from where its offsets begin
    texts = {line.offset: line.text for line in gpu.instructions}
    assert {gpu.codes[line.code].kernel for line in gpu.instructions} == {0}
    assert 0 in texts
    assert f"call _pocl_kernel_{_NAME}" in texts.values()
    assert gpu.codes[0].size_bytes > 0
    assert (gpu.codes[1].size_bytes, gpu.codes[1].object) == (0, None)
    assert kept == {0: built.read_bytes()}
    # AND so has what is cut out later of the same windows, when nobody has the file but the agent
    copy = tmp_path / "kernel-0"
    copy.write_bytes(kept[0])
    with (
        contextlib.closing(ForkServer()) as server,
        contextlib.closing(FileFacts(server, FileGuard(), is_urgent=False)) as facts,
        contextlib.closing(Opener()) as opener,
        contextlib.closing(
            FoundFiles(facts, opener, kept=lambda n: None if n else os.open(copy, os.O_RDONLY))
        ) as found,
    ):
        again = _captured(tmp_path / "cut.aiflame", *windows, files=found)
    assert again.instructions == gpu.instructions


def test_a_file_that_is_none_or_another_kernel_s_lists_nothing(built: Path, tmp_path: Path) -> None:
    # GIVEN files that are not what they were taken for: a process may have changed them
    (tmp_path / "text").write_text("#!/bin/sh")
    files = GivenFiles()
    for binary, path in enumerate((tmp_path / "text", built)):
        files.add(binary, OpenFile(os.open(path, os.O_RDONLY), ""))
    with contextlib.closing(files):
        gpu = _captured(tmp_path / "run.aiflame", *_sampled_windows(), files=files)
    assert gpu.instructions == ()
    assert len(gpu.samples) == 3


def test_long_listing_keeps_what_is_near_the_samples(
    kernel: KernelFile, descriptor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = make_listing(kernel, frozenset({0}), _nowhere, _decode(descriptor))
    assert whole is not None
    sampled = whole.lines[7].offset
    monkeypatch.setattr(listings, "MAX_INSTRUCTIONS", 5)
    near = make_listing(kernel, frozenset({sampled}), _nowhere, _decode(descriptor))
    assert near is not None
    assert near.lines == whole.lines[5:10]


def test_lines_are_laid_over_a_copy_with_other_registers() -> None:
    original = [
        Decoded(0, "push", "rbp"),
        Decoded(1, "mov", "edx, esi"),
        Decoded(3, "vaddss", "xmm2, xmm2, xmm0"),
        Decoded(7, "vmovss", "xmm2, dword ptr [rdi + 4]"),
        Decoded(9, "dec", "edx"),
        Decoded(11, "jne", "0x3"),
        Decoded(13, "ret", ""),
    ]
    copy = [
        Decoded(100, "mov", "eax, r8d"),
        Decoded(103, "vaddss", "xmm1, xmm1, xmm0"),
        Decoded(107, "vmovss", "xmm1, dword ptr [rcx + 4]"),
        Decoded(109, "dec", "eax"),
        Decoded(111, "jne", "0x67"),
        Decoded(113, "ret", ""),
    ]
    sources = [("a.cl", line) for line in range(1, 8)]
    assert lay_over(original, sources, copy) == sources[1:]
    # Code that has little in common gets no lines at all.
    other = [Decoded(at, "imul", "eax, ecx") for at in range(7)]
    assert lay_over(original, sources, other) == [("", 0)] * 7


def test_pocl_is_found_and_comes_first(tmp_path: Path) -> None:
    library = tmp_path / "libpocl.so.2"
    library.write_bytes(b"\0OpenCL 3.0 PoCL 9.1~rc2+debian  Linux\0")
    (tmp_path / "a.icd").write_text("libnvidia-opencl.so.1\n")
    (tmp_path / "b.icd").write_text(f"{library}\n")
    (tmp_path / "c.icd").write_text("")
    pocl, other = OpenClFamily(tmp_path).detect(1000).devices
    assert pocl.name.startswith("PoCL 9.1~rc2+debian on ")
    assert (pocl.tier, pocl.limit, pocl.period_ns) == (Tier.STALLS, "", 1000)
    assert other.name == "libnvidia-opencl.so.1"
    assert other.tier is Tier.LAUNCHES
    assert "PoCL only" in other.limit


def test_nothing_installed_says_where_was_looked(tmp_path: Path) -> None:
    finding = OpenClFamily(tmp_path).detect()
    assert finding.devices == ()
    assert f"{tmp_path}/*.icd" in finding.why


def test_pocl_of_a_container_is_found_by_its_samples() -> None:
    family = OpenClFamily(Path("nowhere"))
    assert family.detect().devices == ()
    (device,) = family.detect(has_samples=True).devices
    assert device.name.startswith("PoCL on ")


_KERNEL: list[Any] = ["k", "X86_64", 0x1010, 0x1000, 0x100, [[0x1010, 0x1020, "f"]]]


@pytest.mark.parametrize(
    ("at", "value"),
    [
        (0, 1),
        (0, "k" * 5000),
        (1, None),
        (2, 0xFFF),
        (2, 0x1100),
        (3, -1),
        (3, 1 << 64),
        (4, 0),
        (4, 1 << 30),
        (5, [[0x1010, 0x1010, "f"]]),
        (5, [[0x1010, 0x1101, "f"]]),
        (5, [[0x1010, 0x1020, "f"], [0x1018, 0x1030, "g"]]),
        (5, [[0x1010, 0x1020]]),
        (5, [[0x1010, 0x1020, 7]]),
    ],
)
def test_kernels_that_no_parser_finds_are_refused(at: int, value: Any) -> None:
    question = kernel_of(_PATH)
    assert question.checked(_KERNEL) is not None
    with pytest.raises(BadAnswer):
        question.checked([*_KERNEL[:at], value, *_KERNEL[at + 1 :]])


@pytest.mark.parametrize(
    "answer",
    [None, [[4095, "a", ""]], [[4100, "a", ""], [4100, "b", ""]], [[4112, "a", ""]], [[1]]],
)
def test_instructions_that_no_parser_finds_are_refused(answer: Any) -> None:
    question = instructions_of(Function(4096, 4112, "f"))
    assert question.checked([[4096, "ret", ""]]) == [Decoded(4096, "ret", "")]
    with pytest.raises(BadAnswer):
        question.checked(answer)


def test_files_that_a_process_makes_large_are_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # GIVEN two files that are of the size that is kept of one, but not of both
    monkeypatch.setattr(kernel_files, "_MAX_BYTES_OF_PROCESS", 5_000)
    files = GivenFiles()
    for number in (0, 1):
        (tmp_path / str(number)).write_bytes(bytes([number]) * 4_000)
        files.add(number, OpenFile(os.open(tmp_path / str(number), os.O_RDONLY), ""))
    kept: dict[int, bytes] = {}
    with contextlib.closing(files):
        _captured(tmp_path / "a.aiflame", *_sampled_windows(), files=files, keep=kept.__setitem__)
        assert len(kept) == 1
        # AND one that has grown beyond any since it was mapped, which no disk has to hold
        monkeypatch.undo()
        os.truncate(tmp_path / "0", 1 << 40)
        kept.clear()
        _captured(tmp_path / "b.aiflame", *_sampled_windows(), files=files, keep=kept.__setitem__)
    assert {number: len(data) for number, data in kept.items()} == {1: 4_000}
