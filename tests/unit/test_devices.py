# SPDX-License-Identifier: Apache-2.0
"""Device families in a recording: which stacks are theirs, which rows come of it, who is chosen."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import struct
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from aiflame.agent.capture.reader import read_capture
from aiflame.agent.capture.writer import CaptureWriter
from aiflame.agent.devices.choice import choose_families
from aiflame.agent.devices.devices import Devices
from aiflame.agent.devices.locations import DeviceLocations, LocatedStack
from aiflame.agent.devices.memories import Memories
from aiflame.agent.errors import EnvironmentUnfit
from aiflame.agent.kernel import abi
from aiflame.agent.launches.gpu_kernels import KernelTable
from aiflame.agent.losses import LossKind
from aiflame.agent.model.gpu import BUSY_UNKNOWN, NO_SIZE, Device, Tier
from aiflame.agent.model.profile import SampleClass
from aiflame.agent.model.window import COLUMNS, NONE, check, rows_of
from aiflame.agent.processes.binaries import BinaryFile
from aiflame.agent.processes.elf_images import ElfImages
from aiflame.agent.processes.table import NO_BINARY, Mapping, ProcessImage, ProcessTable
from aiflame.agent.recording.window_builder import Bounds, WindowBuilder
from aiflame.agent.reports.device_rows import device_samples
from aiflame.agent.reports.kernel_stats import kernel_stats
from aiflame.agent.sinks.capture import CaptureSink
from aiflame.agent.symbols.service import SymbolService
from aiflame.gpu.apis.base import Api
from aiflame.gpu.base import (
    ALWAYS,
    CodeKey,
    CpuSample,
    DeviceReading,
    Family,
    Finding,
    HelperLibrary,
    HelperLoad,
    Host,
    Interval,
    KernelSample,
    KernelTime,
    Line,
    Listing,
    Sampler,
    SourceLines,
    Wanted,
)
from support import blind_inspector

# Binaries by index, and where they are: a library, a kernel, a kernel that replaces it.
_LIBRARY, _KERNEL, _SUCCESSOR = 0, 1, 2
_LIBRARY_AT, _KERNEL_AT, _SIZE = 0x10000, 0x40000, 0x1000
_PERIOD_NS = 1000


class _Biases(ElfImages):
    """Files whose addresses count from their start."""

    def __init__(self) -> None:
        pass

    def of(self, binary: int) -> None:
        return None

    def bias(self, mapping: Mapping) -> int:
        return mapping.start


@pytest.fixture
def table() -> ProcessTable:
    return ProcessTable(0, lambda pid: None, blind_inspector())


def _map(image: ProcessImage, start: int, binary: int) -> None:
    image.replace_mappings([Mapping(start, start + _SIZE, 0, binary)])


def _add_stack(locations: DeviceLocations, stack: int, image: ProcessImage, *user: int) -> None:
    addresses = np.array(user, np.uint64)
    found = image.find(addresses)
    binaries = set(image.binaries_at(found))
    locations.add_stack(LocatedStack(stack, image, addresses, found, binaries))


def _sums(*rows: tuple[int, int, SampleClass, int], one_in: int = 1) -> tuple[Any, Any]:
    """Sums of (stack, thread, class, count), of samples that stand for so many each."""
    keys = [(stack, 1, 77, tid, int(klass), 0) for stack, tid, klass, _ in rows]
    values = [(count, one_in * _PERIOD_NS * count) for *_, count in rows]
    return np.array(keys, abi.SUM_KEY_DTYPE), np.array(values, abi.SUM_VALUE_DTYPE)


@pytest.fixture
def image(table: ProcessTable) -> ProcessImage:
    image = table.image(77, 1)
    _map(image, _LIBRARY_AT, _LIBRARY)
    return image


@pytest.fixture
def locations(table: ProcessTable, image: ProcessImage) -> DeviceLocations:
    return DeviceLocations(
        table,
        _Biases(),
        lambda binary: binary in (_KERNEL, _SUCCESSOR),
        lambda image: any(mapping.binary == _LIBRARY for mapping in image.mappings),
        _PERIOD_NS,
    )


# Later than any window ends.
_NEVER_NS = 1 << 62


def _all_came(stack: int) -> bool:
    return True


def test_samples_whose_times_were_told_have_them(
    locations: DeviceLocations, image: ProcessImage
) -> None:
    # GIVEN five samples of a kernel, of which four told their times, one past the window's end
    _map(image, _KERNEL_AT, _KERNEL)
    _add_stack(locations, 1, image, _KERNEL_AT + 8)
    _add_stack(locations, 2, image, _LIBRARY_AT + 8)
    for stack, tid, ns in ((1, 5, 100), (1, 6, 101), (2, 5, 150), (1, 5, 200), (1, 5, 301)):
        locations.add_time(stack, tid, ns, _all_came)
    on = SampleClass.ON_CPU
    locations.add_sums(*_sums((1, 5, on, 3), (1, 6, on, 1), (2, 5, on, 1)), _all_came)
    # WHEN the window ends, THEN each has its time, and the late one that of another
    at = (_KERNEL, 8, False)
    assert sorted(locations.take(300), key=lambda s: (s.thread, s.taken_ns)) == [
        CpuSample(image.index, 5, *at, 2, 100),
        CpuSample(image.index, 5, *at, 1, 200),
        CpuSample(image.index, 6, *at, 1, 101),
    ]
    # AND in the next it has its own
    locations.add_sums(*_sums((1, 5, on, 1)), _all_came)
    assert locations.take(_NEVER_NS) == [CpuSample(image.index, 5, *at, 1, 301)]


def test_samples_that_stand_for_several_count_as_these(
    locations: DeviceLocations, image: ProcessImage
) -> None:
    # GIVEN one in four samples, of two of which the times are known
    _map(image, _KERNEL_AT, _KERNEL)
    _add_stack(locations, 1, image, _KERNEL_AT + 8)
    for ns in (100, 200):
        locations.add_time(1, 5, ns, _all_came)
    rows = ((1, 5, SampleClass.ON_CPU, 2), (1, 6, SampleClass.ON_CPU, 1))
    locations.add_sums(*_sums(*rows, one_in=4), _all_came)
    # THEN the device was as busy as the CPU
    at = (_KERNEL, 8, False)
    assert sorted(locations.take(300), key=lambda s: (s.thread, s.taken_ns)) == [
        CpuSample(image.index, 5, *at, 4, 100),
        CpuSample(image.index, 5, *at, 4, 200),
        CpuSample(image.index, 6, *at, 4, 0),
    ]


def test_times_that_come_before_their_stack_wait_for_it(
    locations: DeviceLocations, image: ProcessImage
) -> None:
    _map(image, _KERNEL_AT, _KERNEL)
    locations.add_time(1, 5, 100, lambda stack: False)
    locations.add_sums(*_sums((1, 5, SampleClass.ON_CPU, 1)), lambda stack: False)
    assert locations.take(200) == []
    _add_stack(locations, 1, image, _KERNEL_AT + 8)
    assert locations.take(300) == [CpuSample(image.index, 5, _KERNEL, 8, False, 1, 100)]


def test_innermost_kernel_frame_of_samples_on_the_cpu_counts(
    locations: DeviceLocations, image: ProcessImage
) -> None:
    _map(image, _KERNEL_AT, _KERNEL)
    _add_stack(locations, 1, image, _KERNEL_AT + 8, _KERNEL_AT + 100, _LIBRARY_AT)
    _add_stack(locations, 2, image, _LIBRARY_AT + 4, _KERNEL_AT + 20, _LIBRARY_AT)
    _add_stack(locations, 3, image, _LIBRARY_AT + 4, _LIBRARY_AT)
    on, off = SampleClass.ON_CPU, SampleClass.BLOCKED
    keys, values = _sums((1, 5, on, 3), (1, 6, on, 4), (1, 5, off, 9), (2, 5, on, 2), (3, 5, on, 8))
    locations.add_sums(keys, values, _all_came)
    assert locations.take(_NEVER_NS) == [
        CpuSample(image.index, 5, _KERNEL, 8, False, 3),
        CpuSample(image.index, 6, _KERNEL, 8, False, 4),
        # A caller: the last byte of its call.
        CpuSample(image.index, 5, _KERNEL, 19, True, 2),
    ]
    assert locations.take(_NEVER_NS) == []
    assert locations.losses == {}


def test_sum_that_comes_before_its_stack_waits_for_it(
    locations: DeviceLocations, image: ProcessImage
) -> None:
    _map(image, _KERNEL_AT, _KERNEL)
    came: set[int] = set()
    locations.add_sums(*_sums((1, 5, SampleClass.ON_CPU, 3)), came.__contains__)
    assert locations.take(_NEVER_NS) == []
    _add_stack(locations, 1, image, _KERNEL_AT + 8)
    came.add(1)
    locations.add_sums(*_sums((1, 5, SampleClass.ON_CPU, 4)), came.__contains__)
    assert locations.take(_NEVER_NS) == [CpuSample(image.index, 5, _KERNEL, 8, False, 7)]


def test_sums_whose_stacks_are_lost_are_not_kept(
    locations: DeviceLocations, image: ProcessImage
) -> None:
    _map(image, _KERNEL_AT, _KERNEL)
    for stack in range(1, 50):
        locations.add_sums(*_sums((stack, 5, SampleClass.ON_CPU, 3)), lambda stack: False)
        locations.add_time(stack, 5, stack, lambda stack: False)
        assert locations.take(stack) == []
    assert len(locations._waiting) <= 2 and len(locations._times) <= 2


def test_kernel_whose_mapping_is_read_after_its_stack_counts(
    locations: DeviceLocations, image: ProcessImage
) -> None:
    _add_stack(locations, 1, image, _KERNEL_AT + 8)
    _map(image, _KERNEL_AT, _KERNEL)
    locations.add_sums(*_sums((1, 5, SampleClass.ON_CPU, 3)), _all_came)
    assert locations.take(_NEVER_NS) == [CpuSample(image.index, 5, _KERNEL, 8, False, 3)]
    assert locations.losses == {}


def test_kernel_that_went_unseen_is_counted_as_lost(
    locations: DeviceLocations, image: ProcessImage, table: ProcessTable
) -> None:
    other = table.image(78, 1)  # runs nothing on a device
    for stack, owner in ((1, image), (2, other)):
        _add_stack(locations, stack, owner, _KERNEL_AT + 8)
    on = SampleClass.ON_CPU
    locations.add_sums(*_sums((1, 5, on, 3), (2, 6, on, 4)), _all_came)
    assert locations.take(_NEVER_NS) == []
    assert locations.losses == {LossKind.DEVICE_CODE_NOT_MAPPED: 3}


def test_code_that_replaces_other_code_is_told_from_it(
    locations: DeviceLocations, image: ProcessImage
) -> None:
    _map(image, _KERNEL_AT, _KERNEL)
    _add_stack(locations, 1, image, _KERNEL_AT + 8)
    sums = _sums((1, 5, SampleClass.ON_CPU, 3))
    found = []
    for binary in (_KERNEL, _SUCCESSOR, _SUCCESSOR):
        _map(image, _KERNEL_AT, binary)
        locations.add_sums(*sums, _all_came)
        found += [sample.file for sample in locations.take(_NEVER_NS)]
    assert found == [_KERNEL, _SUCCESSOR, _SUCCESSOR]
    # In the second of the change nobody knows.
    assert locations.losses == {LossKind.DEVICE_CODE_REPLACED: 3}


# What the toy's driver writes into a pipe when a kernel has ended: begin and end, monotonic.
_EVENT = struct.Struct("<QQ")


class _Family:
    """A family that says what it is told to."""

    name = "toy"
    api = "toys"
    probes: tuple[Api, ...] = ()
    memory = ""
    helper: HelperLibrary | None = None

    def __init__(
        self, devices: tuple[Device, ...], samples: Sequence[KernelSample] = (), events: int = -1
    ) -> None:
        self.devices, self.samples, self.events = devices, samples, events
        self.codes: dict[str, bytes] = {}

    def runs_by(self, path: str) -> bool:
        return path.endswith("/libtoys.so")

    def detect(self, cpu_period_ns: int = 0, *, has_samples: bool = False) -> Finding:
        if self.devices:
            return Finding(self.devices)
        return Finding((), "no toys here", "apt-get install toys")

    def start(self, host: Host) -> Sampler:
        return _Sampler(self, host)


class _Sampler:
    def __init__(self, family: _Family, host: Host) -> None:
        self._family, self._host = family, host
        if family.events >= 0:
            host.watch(family.events, self._take)

    def _take(self) -> None:
        with contextlib.suppress(BlockingIOError):
            events = _EVENT.iter_unpack(os.read(self._family.events, 100 * _EVENT.size))
            self._host.add_times(
                KernelTime(0, 0, "bounce", begin_ns, end_ns, end_ns - begin_ns, queue=9)
                for begin_ns, end_ns in events
            )

    def owns(self, file: int) -> bool:
        return False

    def drain(self, interval: Interval) -> None:
        self._host.add_samples(self._family.samples)

    def stop(self) -> None:
        self._host.lose(LossKind.KERNEL_NOT_OPENED)

    def resolve(self, code: CodeKey, offsets: frozenset[int], lines: SourceLines) -> Listing | None:
        if code.name == "dark":
            return None
        return Listing(100, tuple(Line(o, f"nop {o}\n", "toy.c", 3) for o in sorted(offsets)))

    def code(self, code: CodeKey) -> bytes:
        return self._family.codes.get(code.name, b"")

    def file(self, code: CodeKey) -> int | None:
        return code.file


_TOY = Device("toy", "Toy 1", Tier.STALLS, "", 7)


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[CaptureWriter]:
    writer = CaptureWriter(tmp_path / "run.aiflame")
    writer.put("processes", [(0, 77, 1, "toy", "", "", "", "", 0, None)])
    yield writer
    writer.close()


def _window() -> WindowBuilder:
    window = WindowBuilder(Bounds())
    window.define("processes", rows_of("processes", (0, 77, 1, 77, 0, 0, -1, NONE, 0, 0, 0)))
    return window


def _devices(
    families: Sequence[Family],
    table: ProcessTable,
    window: WindowBuilder,
    kernels: KernelTable,
    watch: Callable[[int], None] = lambda descriptor: None,
    wanted: Wanted = ALWAYS,
) -> Devices:
    own = (1000, lambda _: None, watch, lambda _: None, wanted)
    return Devices(families, table, _Biases(), window, kernels, *own)


def _finish(writer: CaptureWriter) -> None:
    numbers = dict.fromkeys(("started_unix_ns", "recorder_cpu_ns", "recorder_peak_rss_bytes"), 0)
    writer.put_meta({"aiflame_version": "0", "command": "", "target": "", **numbers})
    writer.put_meta({"period_ns": 1000, "duration_ns": 5 * 10**9})
    writer.commit()


def test_samples_of_a_recording_are_a_readable_capture_at_any_moment(
    writer: CaptureWriter, table: ProcessTable
) -> None:
    # GIVEN a family that finds nothing, and one with two kernels
    bounce, dark = CodeKey(0, None, "bounce"), CodeKey(0, None, "dark")
    samples = [
        KernelSample(4, 0, bounce, 8, "asleep", 5),
        KernelSample(4, 0, dark, 0, "issuing", 2),
    ]
    families = [_Family(()), _Family((_TOY,), samples)]
    window, sink = _window(), CaptureSink(writer)
    kernels = KernelTable(window)
    devices = _devices(families, table, window, kernels)
    # WHEN it is drained
    devices.start()
    devices.drain(4, 4_500_000_000)
    sink.put(window.close(4_500_000_000))
    _finish(writer)
    # THEN all is there but the instructions
    gpu = read_capture(writer.path).gpu
    assert [device.name for device in gpu.devices] == ["", "Toy 1"]
    assert gpu.devices[0].limit == "no toys here"
    assert gpu.samples["count"].tolist() == [5, 2]
    assert gpu.samples["device"].tolist() == [1, 1]
    assert gpu.instructions == ()
    # AND a launch of the same kernel meets it in one row
    assert kernels.id_of(0, "toys", "bounce") == gpu.codes[0].kernel
    assert kernels.id_of(0, "toys", "bounce") != kernels.id_of(0, "other", "bounce")
    # WHEN the recording has ended, THEN they are as well, cleaned
    devices.stop(5_000_000_000)
    sink.put(window.close(5_000_000_000, is_last=True))
    with SymbolService(None) as service:
        devices.resolve(service, writer, _Biases())
    writer.commit()
    gpu = read_capture(writer.path).gpu
    assert [(line.offset, line.text) for line in gpu.instructions] == [(8, "nop 8\ufffd")]
    assert [code.size_bytes for code in gpu.codes] == [100, 0]
    assert devices.samples == 7
    assert devices.losses == {LossKind.KERNEL_NOT_OPENED: 2}


def test_devices_are_used_once_one_can_be_sampled(table: ProcessTable) -> None:
    window = _window()
    for family, are_used in ((_Family(()), False), (_Family((_TOY,)), True)):
        devices = _devices([family], table, window, KernelTable(window))
        assert not devices.are_used and not devices.are_running
        devices.start()
        assert devices.are_used is are_used and devices.are_running


def test_code_is_stored_once_and_of_a_process_no_more_than_its_part(
    writer: CaptureWriter, table: ProcessTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    # GIVEN kernels of two code objects, of which there is no room for the second
    monkeypatch.setattr("aiflame.agent.capture.code_objects.MAX_STORED_BYTES_OF_PROCESS", 100)
    names = ("one", "two", "large", "none", "other")
    samples = [KernelSample(0, 0, CodeKey(0, None, name, 1), 8, "waiting", 1) for name in names]
    samples[-1] = replace(samples[-1], code=CodeKey(1, None, "other", 1))
    family = _Family((_TOY,), samples)
    family.codes = {"one": b"same", "two": b"same", "large": os.urandom(200), "other": b"its own"}
    window = _window()
    window.define("processes", rows_of("processes", (1, 78, 1, 78, 0, 0, -1, NONE, 0, 0, 0)))
    devices = _devices([family], table, window, KernelTable(window))
    devices.start()
    devices.drain(0, 1_000_000_000)
    CaptureSink(writer).put(window.close(1_000_000_000, is_last=True))
    # WHEN the recording is over
    with SymbolService(None) as service:
        devices.resolve(service, writer, _Biases())
    writer.commit()
    # THEN what finds room is there once, and the rest is counted
    with contextlib.closing(sqlite3.connect(writer.path)) as database:
        stored = database.execute(
            "SELECT name, content FROM kernels JOIN kernel_codes ON kernel_id = kernels.id"
            " LEFT JOIN code_objects ON object_id = code_objects.id ORDER BY kernel_codes.id"
        ).fetchall()
        assert database.execute("SELECT count(*), max(family) FROM code_objects").fetchone() == (
            *(2, "toy"),
        )
    contents = [content and zlib.decompress(content) for _, content in stored]
    assert contents == [b"same", b"same", None, None, b"its own"]
    assert devices.losses == {LossKind.DEVICE_CODE_NOT_STORED: 1}


def test_files_that_a_family_may_read_later_are_kept(
    table: ProcessTable, image: ProcessImage
) -> None:
    _map(image, 0x1000, 3)
    _map(image, 0x2000, NO_BINARY)
    devices = _devices([_Family((_TOY,))], table, window := _window(), KernelTable(window))
    devices.start()
    (host,) = devices._running
    assert devices.used_binaries() == set()
    mapped = {mapping.binary for mapping in image.mappings} - {NO_BINARY}
    assert {*host.files(image.index)} == mapped
    assert host.files(99) == set()
    # WHEN its process is over THEN its files are still needed
    devices.forget_images([image.index])
    assert devices.used_binaries() == mapped


def test_auto_takes_what_there_is_and_a_name_insists() -> None:
    families = {"toy": lambda: _Family((_TOY,)), "absent": lambda: _Family(())}
    assert len(choose_families("auto", families)) == 2
    assert choose_families("none", families) == ()
    (toy,) = choose_families("toy", families)
    assert toy.name == "toy"
    with pytest.raises(EnvironmentUnfit, match="--gpu absent: no toys here") as caught:
        choose_families("absent", families)
    assert caught.value.exit_code == 3
    assert caught.value.hint == "apt-get install toys; or --gpu auto records without"


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """Where the toy's driver tells of kernels that have run: the end to read, the end to write."""
    reading, writing = os.pipe2(os.O_NONBLOCK)
    yield reading, writing
    os.close(reading)
    os.close(writing)


def test_kernel_times_and_samples_of_a_new_family_are_in_window_and_capture(
    writer: CaptureWriter,
    table: ProcessTable,
    pipe: tuple[int, int],
) -> None:
    # GIVEN a family that is one row in the list of families, with exact times of its kernels
    samples = [KernelSample(0, 0, CodeKey(0, None, "bounce"), 8, "asleep", 5)]
    toy = Device("toy", "Toy 1", Tier.STALLS, "", 7)
    known = {"toy": lambda: _Family((toy,), samples, pipe[0])}
    table.start_ns = 1_000
    watched: list[int] = []
    window, sink = _window(), CaptureSink(writer)
    kernels = KernelTable(window)
    families = choose_families("toy", known)
    devices = _devices(families, table, window, kernels, watched.append)
    devices.start()
    assert watched == [pipe[0]]
    # WHEN its driver tells of kernels: one began before the recording, one ends after the boundary
    os.write(pipe[1], _EVENT.pack(900, 1_400) + _EVENT.pack(1_500, 2_600))
    devices.poll()
    devices.drain(0, 1_000)
    first = window.close(1_000)
    os.write(pipe[1], _EVENT.pack(2_700, 2_900))
    devices.drain(0, 2_000)
    last = window.close(2_000, is_last=True)
    # THEN each is in the window in which it ended
    for closed in (first, last):
        check(closed)
        sink.put(closed)
    fields = ["queue", "begin_ns", "end_ns", "count", "duration_ns"]
    assert first.kernel_times[fields].tolist() == [(9, 0, 400, 1, 400)]
    assert last.kernel_times[fields].tolist() == [
        (9, 500, 1_600, 1, 1_100),
        (9, 1_700, 1_900, 1, 200),
    ]
    # AND in the capture, with its samples, for one kernel
    _finish(writer)
    profile = read_capture(writer.path)
    assert profile.gpu.samples["count"].sum() == 10
    assert profile.gpu.times[fields].tolist() == [
        *first.kernel_times[fields].tolist(),
        *last.kernel_times[fields].tolist(),
    ]
    (kernel,) = profile.gpu.kernels
    assert (kernel.api, kernel.name) == ("toys", "bounce")
    # AND in the statistics
    (stats,) = kernel_stats(device_samples(profile)).values()
    assert (stats.name.short, stats.total, stats.time_ns) == ("bounce", 10, 1_700)


@pytest.mark.parametrize(
    "wrong",
    [
        {"end_ns": 50},
        {"duration_ns": 101},
        {"duration_ns": -1},
        {"count": 0},
        {"count": 1 << 40},
        {"queue": 1 << 64},
        {"launch_id": -1},
        {"end_ns": 1 << 62},
    ],
)
def test_kernel_times_that_cannot_be_are_refused_and_counted(
    table: ProcessTable, wrong: dict[str, int]
) -> None:
    class Wrong(_Sampler):
        def drain(self, interval: Interval) -> None:
            sound = KernelTime(0, 0, "bounce", 100, 200, 100)
            self._host.add_times([sound, replace(sound, **wrong)])

    class WrongFamily(_Family):
        def start(self, host: Host) -> Sampler:
            return Wrong(self, host)

    window = _window()
    devices = _devices([WrongFamily((_TOY,))], table, window, KernelTable(window))
    devices.start()
    devices.drain(0, 1_000)
    assert len(window.close(1_000).kernel_times) == 1
    assert devices.losses == {LossKind.KERNEL_TIMES_REFUSED: 1}


def test_a_family_begins_when_a_process_may_use_its_devices(table: ProcessTable) -> None:
    # GIVEN two families that nobody insists on
    class Others(_Family):
        name = "others"

        def runs_by(self, path: str) -> bool:
            return False

    table.binaries.files = {
        index: BinaryFile(index, path, None, "")
        for index, path in enumerate(("/usr/bin/program", "/usr/lib/libtoys.so"))
    }
    window = _window()
    devices = _devices([Others((_TOY,)), _Family((_TOY,))], table, window, KernelTable(window))
    image = table.image(77, 1)
    # WHEN a process maps nothing of theirs, THEN none looks for devices
    image.replace_mappings([Mapping(4096, 8192, 0, 0)])
    devices.look(image)
    devices.drain(0, 1_000)
    assert len(window.close(1_000).devices) == 0
    # WHEN it maps a runtime, THEN the one that it is for does, once
    image.replace_mappings([Mapping(4096, 8192, 0, 0), Mapping(8192, 12288, 0, 1)])
    for _ in range(3):
        devices.look(image)
    devices.drain(0, 2_000)
    assert len(window.close(2_000).devices) == 1


class _Teller(_Sampler):
    """Gives the times and samples that it is told to."""

    times: Sequence[KernelTime] = ()
    samples: Sequence[KernelSample] = ()
    readings: Sequence[DeviceReading] = ()

    def drain(self, interval: Interval) -> None:
        self._host.add_times(self.times)
        self._host.add_samples(self.samples)
        self._host.add_readings(self.readings)
        self.times = self.samples = self.readings = ()

    def stop(self) -> None:
        self.drain(Interval(0))

    def replace(self, device: int) -> None:
        self._host.replaced(device)

    def tell_load(self, process: int, load: HelperLoad) -> None:
        self._host.add_load(process, load)


class _TellingFamily(_Family):
    sampler: _Teller

    def start(self, host: Host) -> Sampler:
        self.sampler = _Teller(self, host)
        return self.sampler


@pytest.fixture
def telling(table: ProcessTable) -> tuple[_TellingFamily, Devices, WindowBuilder]:
    family, window = _TellingFamily((_TOY,)), _window()
    window.define("processes", rows_of("processes", (1, 78, 1, 78, 0, 0, -1, NONE, 0, 0, 0)))
    devices = _devices([family], table, window, KernelTable(window))
    devices.start()
    return family, devices, window


def test_readings_are_in_the_window_in_which_they_end(
    table: ProcessTable, telling: tuple[_TellingFamily, Devices, WindowBuilder]
) -> None:
    family, devices, window = telling
    table.start_ns = 10_000
    # GIVEN one that began before the recording, one that tells little, and one of the next window
    family.sampler.readings = [
        DeviceReading(0, 9_000, 10_000, 900, (1, 8)),
        DeviceReading(0, 9_500, 10_400, 370, (5, 8)),
        DeviceReading(0, 10_400, 10_900, None, None),
        DeviceReading(0, 10_900, 11_900, 1000, (8, 8)),
    ]
    devices.drain(0, 1_000)
    first = window.close(1_000)
    # AND one that goes on past the end of the recording, and one that begins there
    family.sampler.readings = [
        DeviceReading(0, 11_900, 12_300, 10, (1, 8)),
        DeviceReading(0, 12_000, 12_400, 10, (1, 8)),
    ]
    devices.stop(2_000)
    last = window.close(2_000, is_last=True)
    check(first)
    check(last)
    assert first.device_readings.tolist() == [
        (0, 0, 400, 370, 5, 8),
        (0, 400, 900, BUSY_UNKNOWN, NO_SIZE, 0),
    ]
    assert last.device_readings.tolist() == [
        (0, 900, 1_900, 1000, 8, 8),
        (0, 1_900, 2_000, 10, 1, 8),
    ]
    assert devices.losses == {}


@pytest.mark.parametrize(
    "wrong",
    [
        {"begin_ns": 201},
        {"begin_ns": -(1 << 40)},
        {"busy_permille": 1001},
        {"busy_permille": -1},
        {"memory": (9, 8)},
        {"memory": (-1, 8)},
        {"memory": (1, 1 << 63)},
    ],
)
def test_readings_that_cannot_be_are_refused_and_counted(
    telling: tuple[_TellingFamily, Devices, WindowBuilder], wrong: dict[str, Any]
) -> None:
    family, devices, window = telling
    sound = DeviceReading(0, 100, 200, 370, (5, 8))
    family.sampler.readings = [sound, replace(sound, **wrong)]
    devices.drain(0, 1_000)
    assert len(window.close(1_000).device_readings) == 1
    assert devices.losses == {LossKind.DEVICE_READINGS_MISSED: 1}


def test_readings_are_bounded(telling: tuple[_TellingFamily, Devices, WindowBuilder]) -> None:
    family, devices, window = telling
    family.sampler.readings = [DeviceReading(0, 100, 200, 370, None)] * 5_000
    devices.drain(0, 1_000)
    assert len(window.close(1_000).device_readings) == 4_096
    assert devices.losses == {LossKind.WINDOW_EVENTS_FULL: 904}


def test_times_of_one_process_leave_room_for_those_of_others(
    telling: tuple[_TellingFamily, Devices, WindowBuilder],
) -> None:
    family, devices, window = telling
    time = KernelTime(0, 0, "bounce", 100, 200, 100)
    # GIVEN a process with more times than there is room for, and longer ones than there can be
    long_ns = (1 << 52) // (1 << 24)
    long = replace(time, end_ns=100 + long_ns, duration_ns=1 << 52, count=1 << 24)
    family.sampler.times = [long, *[time] * 100_000, *[replace(time, process=1)] * 10_000]
    devices.drain(0, 1 << 40)
    rows = window.close(1 << 40).kernel_times
    # THEN those of another one are there
    assert (rows["duration_ns"] == 100).sum() == 10_000
    assert devices.losses == {
        LossKind.WINDOW_EVENTS_FULL: 100_001 - (1 << 15),
        LossKind.KERNEL_TIMES_REFUSED: (1 << 15) - 1,
    }


def test_a_recording_has_so_many_codes_and_instructions(
    telling: tuple[_TellingFamily, Devices, WindowBuilder], monkeypatch: pytest.MonkeyPatch
) -> None:
    family, devices, window = telling
    monkeypatch.setattr("aiflame.agent.devices.devices._MAX_CODES", 3)
    monkeypatch.setattr("aiflame.agent.devices.devices._MAX_SITES", 5)
    family.sampler.samples = [
        KernelSample(0, 0, CodeKey(process % 2, None, f"k{kernel}"), 16 * offset, "busy", 7)
        for process in range(2)
        for kernel in range(4)
        for offset in range(2)
    ]
    # WHEN all come, and again after their processes were forgotten
    sent = family.sampler.samples
    devices.drain(0, 1_000)
    rows = window.close(1_000).device_samples
    devices.forget_images([0, 1])
    family.sampler.samples = sent
    devices.drain(1, 2_000)
    again = window.close(2_000).device_samples
    # THEN the first are told apart, and the others counted
    assert rows["count"].sum() == again["count"].sum() == 5 * 7
    assert rows["code"].tolist() == [0, 0, 1, 1, 2]
    assert devices.losses == {LossKind.DEVICE_SAMPLES_REFUSED: 2 * (16 - 5) * 7}


def test_processes_that_come_and_go_all_day_leave_room_for_the_next(
    table: ProcessTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing is listed in the end, as of an agent."""
    monkeypatch.setattr("aiflame.agent.devices.devices._MAX_CODES", 8)
    monkeypatch.setattr("aiflame.agent.devices.devices._MAX_SITES", 16)
    family, window = _TellingFamily((_TOY,)), _window()
    kernels = KernelTable(window)
    devices = _devices([family], table, window, kernels, wanted=Wanted(lists=False))
    devices.start()
    codes: set[int] = set()
    for number in range(50):
        process = 100 + number
        row = (process, 77, 1, 77, 0, 0, -1, NONE, 0, 0, 0)
        window.define("processes", rows_of("processes", row))
        file = number % 2 or None
        family.sampler.samples = [
            KernelSample(0, 0, CodeKey(process, file, f"k{kernel}"), 16 * offset, "busy", 7)
            for kernel in range(4)
            for offset in range(4)
        ]
        devices.drain(number, 1_000 * (number + 1))
        rows = window.close(1_000 * (number + 1)).device_samples
        assert rows["count"].sum() == 16 * 7
        # Windows that are named later still tell them apart.
        assert not codes & {*rows["code"].tolist()}
        codes |= {*rows["code"].tolist()}
        devices.forget_images([process])
        assert not devices.used_binaries()
    assert not +devices.losses


def test_a_process_that_runs_kernels_for_months_has_its_times(
    table: ProcessTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where what is read together is not all of it, as of an agent."""
    monkeypatch.setattr("aiflame.agent.devices.devices._MAX_KERNEL_NS_OF_PROCESS", 150)
    monkeypatch.setattr("aiflame.agent.devices.devices._MAX_KERNEL_NS", 200)

    class Months(_Sampler):
        def drain(self, interval: Interval) -> None:
            end_ns = 1_000 * interval.number + 200
            self._host.add_times([KernelTime(0, 0, "bounce", end_ns - 100, end_ns, 100)])

    class MonthsFamily(_Family):
        def start(self, host: Host) -> Sampler:
            return Months(self, host)

    window = _window()
    kernels = KernelTable(window)
    wanted = Wanted(lists=False)
    devices = _devices([MonthsFamily((_TOY,))], table, window, kernels, wanted=wanted)
    devices.start()
    for number in range(50):
        devices.drain(number, 1_000 * (number + 1))
        rows = window.close(1_000 * (number + 1)).kernel_times
        assert rows["duration_ns"].tolist() == [100]
    assert not +devices.losses


def test_a_process_that_compiles_kernels_all_day_has_samples_of_the_last_ones(
    table: ProcessTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing is listed in the end, as of an agent."""
    monkeypatch.setattr("aiflame.agent.devices.devices._MAX_CODES", 8)
    monkeypatch.setattr("aiflame.agent.devices.devices._MAX_SITES", 16)
    family, window = _TellingFamily((_TOY,)), _window()
    devices = _devices([family], table, window, KernelTable(window), wanted=Wanted(lists=False))
    devices.start()
    known = []
    for number in range(50):
        # GIVEN a kernel that goes on, and in each window another three, each compiled anew
        objects = [1, *range(2 + 3 * number, 5 + 3 * number)]
        family.sampler.samples = [
            KernelSample(0, 0, CodeKey(0, None, "k", code), 16 * offset, "busy", 7)
            for code in objects
            for offset in range(4)
        ]
        devices.drain(number, 1_000 * (number + 1))
        found = window.close(1_000 * (number + 1))
        check(found)
        assert found.device_samples["count"].sum() == 16 * 7
        # THEN they are told apart, and the first is what it was
        assert len({*found.device_samples["code"].tolist()}) == 4
        assert 0 in found.device_samples["code"]
        known.append(window.known_rows)
    assert not +devices.losses
    # AND what is known of those that are gone is forgotten
    assert max(known[25:]) == max(known[:25])


def test_a_process_that_compiles_kernels_for_weeks_has_names_of_the_last_ones(
    table: ProcessTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing is listed in the end, as of an agent."""
    monkeypatch.setattr("aiflame.agent.launches.gpu_kernels._MOST_NAMES", 20)
    family, window = _TellingFamily((_TOY,)), _window()
    window.define("threads", rows_of("threads", (0, 0, 77, 0)))
    kernels = KernelTable(window)
    devices = _devices([family], table, window, kernels, wanted=Wanted(lists=False))
    devices.start()
    name_of: dict[int, str] = {}
    known = []
    for number in range(60):
        # GIVEN kernels of which one is launched, one sampled and one timed in each window, another
        # one of each in this window alone, and one that comes again at long last
        again = ["again"] * (number in (0, 50))
        launched = ["launched", f"launched {number}", *again]
        sampled = ["sampled", f"sampled {number}"]
        timed = ["timed", f"timed {number}"]
        ids = [kernels.id_of(0, "toys", name) for name in launched]
        launches = np.zeros(len(ids), COLUMNS["launches"].dtype)
        launches["kernel"], launches["count"] = ids, 1
        launches["function"] = NONE
        launches["enqueued_ns"] = launches["last_enqueued_ns"] = 1_000 * number
        window.add("launches", launches)
        family.sampler.samples = [
            KernelSample(0, 0, CodeKey(0, None, name), 0, "busy", 7) for name in sampled
        ]
        end_ns = 1_000 * (number + 1)
        family.sampler.times = [KernelTime(0, 0, name, end_ns - 9, end_ns, 9) for name in timed]
        devices.drain(number, end_ns)
        found = window.close(end_ns)
        devices.forget_unused_kernels()
        check(found)
        # THEN each has its name in the window,
        code_of = dict(found.codes[["code", "kernel"]].tolist())
        mentioned = [
            *found.launches["kernel"].tolist(),
            *(code_of[code] for code in found.device_samples["code"].tolist()),
            *found.kernel_times["kernel"].tolist(),
        ]
        names = {row["kernel"]: found.texts[row["name"]] for row in found.kernels}
        assert [names[kernel] for kernel in mentioned] == [*launched, *sampled, *timed]
        # and none the number of another one of before
        for kernel in mentioned:
            assert name_of.setdefault(kernel, names[kernel]) == names[kernel]
        known.append(window.known_rows)
    # AND those that are used all the time keep theirs
    times = Counter(name_of.values())
    assert [times[name] for name in ("launched", "sampled", "timed", "again")] == [1, 1, 1, 2]
    # AND what is known of those that are gone is forgotten.
    assert max(known[30:]) <= max(known[:30])


def test_a_device_in_the_place_of_another_one_is_another_one(
    telling: tuple[_TellingFamily, Devices, WindowBuilder],
) -> None:
    family, devices, window = telling
    known = []
    for number in range(20):
        # GIVEN an instance of a device, of which there is nothing but equal ones
        family.sampler.times = [KernelTime(0, 0, "k", 100, 200, 100)]
        devices.drain(number, 1_000 * (number + 1))
        found = window.close(1_000 * (number + 1))
        check(found)
        # THEN each has a number of its own in windows
        assert found.kernel_times["device"].tolist() == [number]
        known.append(window.known_rows)
        # WHEN it gives way to the next one
        family.sampler.replace(0)
    assert known[-1] == known[1]


def test_reasons_are_bounded(
    telling: tuple[_TellingFamily, Devices, WindowBuilder], monkeypatch: pytest.MonkeyPatch
) -> None:
    family, devices, window = telling
    monkeypatch.setattr("aiflame.agent.devices.devices._MAX_REASONS", 3)
    key = CodeKey(0, None, "k")
    family.sampler.samples = [KernelSample(0, 0, key, 0, f"reason {n}", 7) for n in range(9)]
    devices.drain(0, 1_000)
    assert window.close(1_000).device_samples["count"].sum() == 3 * 7
    assert devices.losses == {LossKind.DEVICE_SAMPLES_REFUSED: 6 * 7}


def test_times_from_before_the_recording_are_left_out(
    telling: tuple[_TellingFamily, Devices, WindowBuilder], table: ProcessTable
) -> None:
    family, devices, window = telling
    table.start_ns = 150
    time = KernelTime(0, 0, "bounce", 100, 149, 10)
    # AND what is long in those that have not ended by then
    half, boot = replace(time, end_ns=200, duration_ns=80), replace(time, begin_ns=0)
    family.sampler.times = [time, half, *[replace(boot, end_ns=151, duration_ns=151)] * 3]
    devices.drain(0, 1_000)
    rows = window.close(1_000).kernel_times
    fields = ["begin_ns", "end_ns", "duration_ns"]
    assert rows[fields].tolist() == [(0, 50, 40), *[(0, 1, 1)] * 3]
    assert devices.losses == {}


def test_times_from_long_before_the_recording_take_no_room(
    telling: tuple[_TellingFamily, Devices, WindowBuilder],
    table: ProcessTable,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    family, devices, window = telling
    monkeypatch.setattr("aiflame.agent.devices.devices._MAX_KERNEL_NS_OF_PROCESS", 100)
    table.start_ns = 1_000
    time = KernelTime(0, 0, "bounce", 1, 1_010, 1_009)
    family.sampler.times = [time] * 3
    devices.drain(0, 1_000)
    assert window.close(1_000).kernel_times["duration_ns"].tolist() == [10] * 3
    assert devices.losses == {}


def test_a_process_has_so_many_kernels_and_no_more(table: ProcessTable) -> None:
    window = _window()
    kernels = KernelTable(window)
    found = [kernels.id_of(0, "toys", f"k{number}") for number in range(20_000)]
    assert len(set(found)) == (1 << 14) + 1
    assert kernels.id_of(0, "toys", "k5") == found[5]
    assert kernels.id_of(1, "toys", "k0") not in found
    # Of a process that has ended nothing counts any more.
    kernels.forget_images([0])
    assert kernels.id_of(0, "toys", "k19999") not in found


def test_a_process_has_so_many_kernels_without_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aiflame.agent.launches.gpu_kernels._MOST_NAMES", 4)
    kernels = KernelTable(_window())
    found = [kernels.unnamed(0, "cuda", "untold") for _ in range(10)]
    assert found == [0, 1, 2, 3, *[None] * 6]
    # Others have theirs, and a process that is gone takes none from the next.
    assert kernels.unnamed(1, "cuda", "untold") is not None
    kernels.forget_images([0])
    assert kernels.unnamed(0, "cuda", "untold") is not None


@pytest.fixture
def two_families(
    table: ProcessTable, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[_TellingFamily], Devices]:
    """Two families, each with a helper in both of two processes."""
    families = [_TellingFamily((_TOY,)), _TellingFamily((_TOY,))]
    shared = [SimpleNamespace(process=table.image(pid, 1).index) for pid in (77, 78)]
    monkeypatch.setattr(Memories, "all", lambda self: shared)
    window = _window()
    devices = _devices(families, table, window, KernelTable(window))
    devices.start()
    return families, devices


def test_what_helpers_of_two_families_cost_a_process_is_added_up(
    two_families: tuple[list[_TellingFamily], Devices],
) -> None:
    families, devices = two_families
    for family, load in zip(families, (HelperLoad(times=3), HelperLoad(samples=5)), strict=True):
        family.sampler.tell_load(0, load)
    families[1].sampler.tell_load(1, HelperLoad(read_outs=1))
    assert devices.take_loads() == {0: HelperLoad(times=3, samples=5), 1: HelperLoad(read_outs=1)}
    assert devices.take_loads() == {}


def test_time_without_samples_is_counted_by_family_in_whole_seconds(
    two_families: tuple[list[_TellingFamily], Devices],
) -> None:
    # GIVEN two families that are not sampled in one of two processes
    _, devices = two_families
    devices.steer({0: 0.0}, 0)
    # WHEN less than a second has passed for each, THEN none is over
    devices.steer({0: 0.0}, 600_000_000)
    assert devices.losses == {}
    devices.steer({0: 0.0}, 600_000_000)
    assert devices.losses == {LossKind.DEVICE_STALLS_LEFT_OUT: 2}
