# SPDX-License-Identifier: Apache-2.0
"""Device families in a recording: which stacks are theirs, which rows come of it, who is chosen."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiflame.agent.capture.reader import read_capture
from aiflame.agent.capture.writer import CaptureWriter
from aiflame.agent.devices import choice as device_choice
from aiflame.agent.devices.devices import Devices
from aiflame.agent.devices.locations import DeviceLocations
from aiflame.agent.errors import EnvironmentUnfit
from aiflame.agent.kernel import abi
from aiflame.agent.launches.gpu_kernels import KernelTable
from aiflame.agent.losses import LossKind
from aiflame.agent.model.gpu import Device, Tier
from aiflame.agent.model.profile import SampleClass
from aiflame.agent.model.window import NONE, rows_of
from aiflame.agent.processes.elf_images import ElfImages
from aiflame.agent.processes.table import Mapping, ProcessImage, ProcessTable
from aiflame.agent.recording.window_builder import Bounds, WindowBuilder
from aiflame.agent.sinks.capture import CaptureSink
from aiflame.agent.symbols.service import SymbolService
from aiflame.gpu.base import (
    CodeKey,
    CpuSample,
    Files,
    Finding,
    Interval,
    KernelSample,
    Line,
    Listing,
)
from support import blind_inspector

# Binaries by index, and where they are: a library, a kernel, a kernel that replaces it.
_LIBRARY, _KERNEL, _SUCCESSOR = 0, 1, 2
_LIBRARY_AT, _KERNEL_AT, _SIZE = 0x10000, 0x40000, 0x1000


class _Biases(ElfImages):
    """Files whose addresses count from their start."""

    def __init__(self) -> None:
        pass

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
    locations.add_stack(stack, image, addresses, found, set(image.binaries_at(found)))


def _sums(*rows: tuple[int, int, SampleClass, int]) -> tuple[Any, Any]:
    """Sums of (stack, thread, class, count)."""
    keys = [(stack, 1, 77, tid, int(klass), 0) for stack, tid, klass, _ in rows]
    values = [(count, 1000 * count) for *_, count in rows]
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
        lambda binary: binary == _LIBRARY,
    )


def _all_came(stack: int) -> bool:
    return True


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
    assert locations.take() == [
        CpuSample(image.index, 5, _KERNEL, 8, False, 3),
        CpuSample(image.index, 6, _KERNEL, 8, False, 4),
        # A caller: the last byte of its call.
        CpuSample(image.index, 5, _KERNEL, 19, True, 2),
    ]
    assert locations.take() == []
    assert locations.losses == {}


def test_sum_that_comes_before_its_stack_waits_for_it(
    locations: DeviceLocations, image: ProcessImage
) -> None:
    _map(image, _KERNEL_AT, _KERNEL)
    came: set[int] = set()
    locations.add_sums(*_sums((1, 5, SampleClass.ON_CPU, 3)), came.__contains__)
    assert locations.take() == []
    _add_stack(locations, 1, image, _KERNEL_AT + 8)
    came.add(1)
    locations.add_sums(*_sums((1, 5, SampleClass.ON_CPU, 4)), came.__contains__)
    assert locations.take() == [CpuSample(image.index, 5, _KERNEL, 8, False, 7)]


def test_kernel_whose_mapping_is_read_after_its_stack_counts(
    locations: DeviceLocations, image: ProcessImage
) -> None:
    _add_stack(locations, 1, image, _KERNEL_AT + 8)
    _map(image, _KERNEL_AT, _KERNEL)
    locations.add_sums(*_sums((1, 5, SampleClass.ON_CPU, 3)), _all_came)
    assert locations.take() == [CpuSample(image.index, 5, _KERNEL, 8, False, 3)]
    assert locations.losses == {}


def test_kernel_that_went_unseen_is_counted_as_lost(
    locations: DeviceLocations, image: ProcessImage, table: ProcessTable
) -> None:
    other = table.image(78, 1)  # runs nothing on a device
    for stack, owner in ((1, image), (2, other)):
        _add_stack(locations, stack, owner, _KERNEL_AT + 8)
    on = SampleClass.ON_CPU
    locations.add_sums(*_sums((1, 5, on, 3), (2, 6, on, 4)), _all_came)
    assert locations.take() == []
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
        found += [sample.file for sample in locations.take()]
    assert found == [_KERNEL, _SUCCESSOR, _SUCCESSOR]
    # In the second of the change nobody knows.
    assert locations.losses == {LossKind.DEVICE_CODE_REPLACED: 3}


class _Family:
    """A family that says what it is told to."""

    name = "toy"
    api = "toys"

    def __init__(self, devices: tuple[Device, ...], samples: list[KernelSample]) -> None:
        self.devices, self.samples = devices, samples

    def detect(self, cpu_period_ns: int = 0) -> Finding:
        return Finding(self.devices, "" if self.devices else "no toys here")

    def start(self, files: Files) -> None:
        pass

    def owns(self, file: int) -> bool:
        return False

    def runs_by(self, path: str) -> bool:
        return False

    def drain(self, interval: Interval) -> Iterable[KernelSample]:
        return self.samples

    def stop(self) -> Iterable[KernelSample]:
        return ()

    def resolve(self, code: CodeKey, offsets: frozenset[int]) -> Listing | None:
        if code.name == "dark":
            return None
        return Listing(100, tuple(Line(o, f"nop {o}\n", "toy.c", 3) for o in sorted(offsets)))

    def losses(self) -> dict[LossKind, int]:
        return {LossKind.KERNEL_NOT_OPENED: 1}


_TOY = Device("toy", "Toy 1", Tier.STALLS, "", 7)


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[CaptureWriter]:
    writer = CaptureWriter(tmp_path / "run.aiflame")
    writer.put("processes", [(0, 77, 1, "toy", "", "", "", "", 0, None)])
    yield writer
    writer.close()


def test_samples_of_a_recording_are_a_readable_capture_at_any_moment(
    writer: CaptureWriter, table: ProcessTable
) -> None:
    # GIVEN a family that finds nothing, and one with two kernels
    bounce, dark = CodeKey(0, None, "bounce"), CodeKey(0, None, "dark")
    samples = [
        KernelSample(4, 0, bounce, 8, "asleep", 5),
        KernelSample(4, 0, dark, 0, "issuing", 2),
    ]
    absent = _Family((), [])
    window, sink = WindowBuilder(Bounds()), CaptureSink(writer)
    window.define("processes", rows_of("processes", (0, 77, 1, 77, 0, 0, -1, NONE, 0, 0, 0)))
    kernels = KernelTable(window)
    devices = Devices(
        [absent, _Family((_TOY,), samples)], table, _Biases(), window, kernels, 1000, lambda _: None
    )
    # WHEN it is drained
    devices.start()
    devices.drain(4, 4_500_000_000)
    sink.put(window.close(4_500_000_000))
    numbers = dict.fromkeys(("started_unix_ns", "recorder_cpu_ns", "recorder_peak_rss_bytes"), 0)
    writer.put_meta({"aiflame_version": "0", "command": "", "target": "", **numbers})
    writer.put_meta({"period_ns": 1000, "duration_ns": 5 * 10**9})
    writer.commit()
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
        devices.resolve(service, writer, lambda binary: binary)
    writer.commit()
    gpu = read_capture(writer.path).gpu
    assert [(line.offset, line.text) for line in gpu.instructions] == [(8, "nop 8\ufffd")]
    assert [code.size_bytes for code in gpu.codes] == [100, 0]
    assert devices.samples == 7
    assert devices.losses == {LossKind.KERNEL_NOT_OPENED: 2}


def test_auto_takes_what_there_is_and_a_name_insists(monkeypatch: pytest.MonkeyPatch) -> None:
    families = {"toy": lambda: _Family((_TOY,), []), "absent": lambda: _Family((), [])}
    monkeypatch.setattr(device_choice, "FAMILIES", families)
    assert len(device_choice.choose_families("auto")) == 2
    assert device_choice.choose_families("none") == ()
    (toy,) = device_choice.choose_families("toy")
    assert toy.name == "toy"
    with pytest.raises(EnvironmentUnfit, match="--gpu absent: no toys here") as caught:
        device_choice.choose_families("absent")
    assert caught.value.exit_code == 3
    assert "--gpu auto" in str(caught.value.hint)
