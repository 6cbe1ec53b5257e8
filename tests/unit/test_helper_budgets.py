# SPDX-License-Identifier: Apache-2.0
"""What a process with very many kernels takes of the recorder's time, and what becomes of them."""

from __future__ import annotations

import struct
import time
from typing import Any, cast

import numpy as np
import pytest
from aiflame.agent.losses import LossKind
from aiflame.gpu import protocol
from aiflame.gpu.base import Interval
from aiflame.gpu.helpers import Helper
from aiflame.gpu.nvidia import sampler as nvidia
from aiflame.gpu.nvidia.machine import Machine
from aiflame.gpu.nvidia.sampler import NvidiaSampler
from aiflame.gpu.protocol import Passing
from aiflame.gpu.ring import HEADER_BYTES
from helper_memory import Host, Memory

_ROWS = 18_724  # of a ring of a megabyte, which one record fills
_RING = 16 + 56 * _ROWS


def _memory(process: int = 3, ring: int = 1 << 16) -> Memory:
    memory = Memory(process, ring)
    memory.hello()
    memory.device()
    memory.context()
    memory.name(1, "scale")
    memory.name(2, "fill")
    return memory


def _helper(memory: Memory, host: Host) -> Helper:
    return Helper(memory, cast(Any, host), lambda device: 0, lambda word: False, 1_000)


def _sampler(*memories: Memory) -> tuple[NvidiaSampler, Host]:
    host = Host(*memories)
    return NvidiaSampler(cast(Any, host), Machine("", (), "", (), ())), host


def _row(number: int) -> tuple[int, ...]:
    """One of `scale` and `fill` in turn, of 100 and 300 ns."""
    begin_ns = 2_000 + 1_000 * number
    name = 1 + number % 2
    return (number + 1, begin_ns, begin_ns + 100 + 200 * (name - 1), 9, 0, name, 0, 1, 0)


def test_times_beyond_the_budget_are_added_up() -> None:
    # GIVEN a process with 500 kernels in a second, of which 100 may be taken one by one
    memory, host = _memory(), Host()
    helper = _helper(memory, host)
    memory.times(*map(_row, range(500)))
    helper.allow(1 << 20, times=100)
    helper.read(0)
    # THEN those are as they were told
    exact, sums = host.times[:100], host.times[100:]
    assert [one.launch_id for one in exact] == [*range(1, 101)]
    assert {one.count for one in exact} == {1}
    # AND of the others it is known how long each kernel ran
    assert [(one.kernel, one.count, one.duration_ns, one.launch_id) for one in sums] == [
        ("scale", 200, 200 * 100, 0),
        ("fill", 200, 200 * 300, 0),
    ]
    assert [(one.begin_ns, one.end_ns) for one in sums] == [
        (2_000 + 100_000, 2_100 + 498_000),
        (2_000 + 101_000, 2_300 + 499_000),
    ]
    assert host.lost == {LossKind.KERNEL_TIMES_ADDED_UP: 400}
    # AND after the next drain again
    helper.allow(1 << 20, times=100)
    memory.times(_row(500))
    helper.read(1)
    assert host.times[-1].launch_id == 501


def test_times_that_cannot_be_are_not_added_up() -> None:
    memory, host = _memory(), Host()
    helper = _helper(memory, host)
    helper.allow(1 << 20, times=0)
    later_ns = time.monotonic_ns() + 10**12
    of_none = ((5_000, 4_000), (0, 1 << 50), (later_ns, later_ns), (2, (1 << 64) - 1))
    for begin_ns, end_ns in of_none:
        memory.times((1, begin_ns, end_ns, 0, 0, 1, 0, 1, 0))
    memory.times((1, 5_000, 5_001, 0, 0, 1, 7, 1, 0))  # of a device that is none
    memory.times(_row(0))
    helper.read(0)
    assert [(one.kernel, one.count, one.duration_ns) for one in host.times] == [("scale", 1, 100)]
    assert host.lost == {LossKind.KERNEL_TIMES_REFUSED: 5, LossKind.KERNEL_TIMES_ADDED_UP: 1}


class _Flood(Memory):
    """A process that writes a megabyte of kernel times whenever it is asked to.

    That is half of its ring, so that what is read is not being overwritten.
    """

    def __init__(self, process: int) -> None:
        super().__init__(process, 2 * _RING)
        self.hello()
        self.device()
        self.context()
        self.name(1, "scale")
        rows = np.zeros(_ROWS, protocol.TIMES)
        rows["begin_ns"], rows["end_ns"], rows["name"] = 5_000, 5_010, 1
        rows["launch"] = np.arange(_ROWS) + 1
        for at in (HEADER_BYTES, HEADER_BYTES + _RING):
            self.bytes[at + 16 : at + _RING] = rows.tobytes()

    def write(self) -> None:
        at = HEADER_BYTES + self.heads[0] % (2 * _RING)
        struct.pack_into("<IIQ", self.bytes, at, _RING, Passing.TIMES, self.numbers[0])
        self.numbers[0] += 1
        self.heads[0] += _RING
        self.write_header()


def test_a_million_kernels_a_second_do_not_stall_the_recorder() -> None:
    # GIVEN a process that writes a megabyte and rings, a thousand times, and a quiet one
    flood, quiet = _Flood(5), _memory(6)
    sampler, host = _sampler(flood, quiet)
    sampler.drain(Interval(0))
    (hear,) = host.hears
    begun_s = time.thread_time()
    for _ in range(1000):
        flood.write()
        hear(5)
    # THEN that takes its part of the second, and what it writes when that is over
    took_s = time.thread_time() - begun_s
    assert took_s < 2.0
    # AND each kernel is taken, added up or counted
    records = host.lost[LossKind.DEVICE_RECORDS_OVERWRITTEN]
    assert records == 0, "what is in the ring is not read yet"
    taken = sum(one.count for one in host.times)
    assert taken % _ROWS == 0
    # A slow processor reads one ring in its part of the second, others two.
    exact = len([one for one in host.times if one.launch_id])
    assert exact == min(taken, 30_000) > 0
    assert host.lost[LossKind.KERNEL_TIMES_ADDED_UP] == taken - exact
    # AND the other one is read as ever
    quiet.times(_row(0))
    hear(6)
    assert host.times[-1].process == 6
    # AND WHEN the next drain comes THEN what was overwritten is counted, and reading goes on
    sampler.drain(Interval(1))
    flood.write()
    hear(5)
    taken_then = sum(one.count for one in host.times if one.process == 5)
    records = host.lost[LossKind.DEVICE_RECORDS_OVERWRITTEN]
    assert records > 500  # how many are read depends on how fast the machine is
    assert taken_then == (flood.numbers[0] - records) * _ROWS


def test_processes_share_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    # GIVEN that each look at a clock is 10 ms later, and ten processes that ring on and on
    now_s = [0.0]

    def later() -> float:
        now_s[0] += 0.01
        return now_s[0]

    monkeypatch.setattr("aiflame.gpu.helpers.time.thread_time", later)
    memories = [_memory(process) for process in range(10)]
    sampler, host = _sampler(*memories)
    sampler.drain(Interval(0))
    sampler.drain(Interval(1))
    (hear,) = host.hears
    for number in range(50):
        for memory in memories:
            memory.times(_row(number))
            hear(memory.process)
    # THEN each has a tenth of it: four looks of 10 ms, one of which was the drain's
    of_process = [sum(one.process == process for one in host.times) for process in range(10)]
    assert {*of_process} <= {3, 4}
    # AND what it wrote meanwhile is there after the next drain, and nothing is lost
    sampler.drain(Interval(2))
    assert len(host.times) == 10 * 50
    assert not host.lost


def test_the_end_is_read_however_much_was_read_before(monkeypatch: pytest.MonkeyPatch) -> None:
    # GIVEN a process that has used up what it may
    monkeypatch.setattr(nvidia, "_MAX_CPU_S", 1e-9)
    memory = _memory()
    sampler, host = _sampler(memory)
    sampler.drain(Interval(0))

    def end() -> None:
        memory.times(_row(1), _row(2))
        memory.state(time.monotonic_ns(), 0, 1)

    # WHEN the recording ends THEN what it tells at last is taken
    memory.on_leave = end
    begun_s = time.monotonic()
    sampler.stop()
    assert [one.launch_id for one in host.times] == [2, 3]
    assert time.monotonic() - begun_s < 1.5
