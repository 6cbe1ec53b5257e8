# SPDX-License-Identifier: Apache-2.0
"""Stacks of the kernel half between windows: known for as long as windows keep them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from aiflame.agent.devices.locations import DeviceLocations
from aiflame.agent.kernel import abi
from aiflame.agent.model.profile import SampleClass, StopReason
from aiflame.agent.model.window import COLUMNS, rows_of
from aiflame.agent.processes.table import Mapping, ProcessTable
from aiflame.agent.recording import stacks as stacks_module
from aiflame.agent.recording.cut_stacks import CutStacks
from aiflame.agent.recording.stacks import Stacks
from aiflame.agent.recording.window_builder import Bounds, WindowBuilder
from aiflame.gpu.base import CpuSample
from support import blind_inspector

_PID, _IMAGE = 7, 1


def test_a_stack_that_comes_again_after_it_was_dropped_is_not_lost() -> None:
    # GIVEN windows that keep two stacks, and three that come one after the other
    window = WindowBuilder(Bounds(kept_stacks=2))
    table = ProcessTable(1, lambda pid: _IMAGE, blind_inspector())
    image = table.image(_PID, _IMAGE)
    process = np.zeros(1, COLUMNS["processes"].dtype)
    process["process"], process["pid"] = image.index, _PID
    window.define("processes", process)
    window.define("threads", rows_of("threads", (0, image.index, _PID, 0)))
    pythons: Any = SimpleNamespace(is_starting=lambda image: False)
    stacks = Stacks(window, table, SimpleNamespace(), CutStacks(pythons), [])
    record = np.zeros(1, abi.STACK_DTYPE)
    record["image"], record["tgid"], record["end"] = _IMAGE, _PID, StopReason.ROOTED
    for stack in (10, 11, 12):
        stacks.add(np.array([stack], np.uint64), record)
    assert [stacks.has_come(stack) for stack in (10, 11, 12)] == [False, True, True]
    # WHEN the first comes again, with time spent in it
    stacks.add(np.array([10], np.uint64), record)
    window.add("samples", rows_of("samples", (10, 0, SampleClass.ON_CPU, 1, 5)))
    closed = window.close(1_000)
    # THEN it is in the window as it is
    assert closed.stacks[["stack", "stop_reason"]].tolist() == [(10, StopReason.ROOTED)]
    assert not len(closed.losses)


def test_samples_of_a_kernel_whose_file_could_not_be_read_at_first_are_there_later() -> None:
    # GIVEN a process that is in the kernel of a device, in whose file nobody could look for a
    # moment, and in a library
    kernel, library, period_ns = 3, 4, 1_000
    kernels: set[int] = set()
    table = ProcessTable(1, lambda pid: _IMAGE, blind_inspector())
    image = table.image(_PID, _IMAGE)
    image.replace_mappings([Mapping(4096, 8192, 0, kernel), Mapping(8192, 12288, 0, library)])
    images: Any = SimpleNamespace(bias=lambda mapping: mapping.start)
    locations = DeviceLocations(table, images, kernels.__contains__, lambda image: True, period_ns)
    window = WindowBuilder(Bounds())
    pythons: Any = SimpleNamespace(is_starting=lambda image: False)
    stacks = Stacks(window, table, SimpleNamespace(), CutStacks(pythons), [locations])
    record = np.zeros(2, abi.STACK_DTYPE)
    record["image"], record["tgid"], record["user_depth"] = _IMAGE, _PID, 1
    record["frames"][:, 0] = 4096 + 8, 8192 + 8
    stacks.add(np.array([10, 11], np.uint64), record)

    def sampled() -> list[CpuSample]:
        keys = np.zeros(2, abi.SUM_KEY_DTYPE)
        keys["stack"], keys["tid"], keys["sample_class"] = (10, 11), _PID, SampleClass.ON_CPU
        values = np.zeros(2, abi.SUM_VALUE_DTYPE)
        values["count"], values["ns"] = 1, period_ns
        locations.add_sums(keys, values, stacks.has_come)
        return locations.take(1 << 62)

    assert sampled() == []
    # WHEN it is known what is in the file, and its stacks come no more as they are known
    kernels.add(kernel)
    assert sampled() == []
    stacks.look_again({kernel})
    # THEN what they have is the device's
    assert sampled() == [CpuSample(image.index, _PID, kernel, 8, False, 1)]


def test_sets_of_files_that_no_stack_has_any_more_are_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # GIVEN stacks that are known four at a time, of programs of which each has new files
    monkeypatch.setattr(stacks_module, "_KNOWN_STACKS", 4)
    monkeypatch.setattr(stacks_module, "_MOST_NEW_SETS", 8)
    table = ProcessTable(1, lambda pid: _IMAGE, blind_inspector())
    pythons: Any = SimpleNamespace(is_starting=lambda image: False)
    window = WindowBuilder(Bounds())
    stacks = Stacks(window, table, SimpleNamespace(), CutStacks(pythons), [])
    # WHEN they come all day
    for number in range(1000):
        stacks._note(number, (number, number + 1))
    # THEN what is known of them has an end, and of the newest all is known
    assert len(stacks._binaries) <= 32
    assert [stacks._binaries_of(number) for number in (998, 999)] == [(998, 999), (999, 1000)]
