# SPDX-License-Identifier: Apache-2.0
"""What helpers tell, as times, samples and losses; and what targets may write instead."""

from __future__ import annotations

import struct
import time
from typing import Any, cast

import pytest
from aiflame.agent.losses import LossKind
from aiflame.agent.model.gpu import Tier
from aiflame.gpu.base import CodeKey, HelperLoad, KernelSample, KernelTime, Wanted
from aiflame.gpu.helpers import Helper, await_end
from aiflame.gpu.protocol import VERSION, Fact, HelperDevice, Passing
from aiflame.gpu.ring import HEADER_BYTES
from helper_memory import Host, Memory
from hypothesis import given, settings
from hypothesis import strategies as st

_PREFIX = "smsp__pcsamp_warps_issue_stalled_"
_SINCE_NS = 1_000


def _helper(memory: Memory, host: Host) -> Helper:
    def number_of(device: HelperDevice) -> int | None:
        return device.device if device.device < 4 else None

    return Helper(
        memory, cast(Any, host), number_of, lambda word: word.endswith("_not_issued"), _SINCE_NS
    )


def _sound(ring: int = 1 << 16) -> Memory:
    """A device, a context, two kernels and three reasons."""
    memory = Memory(process=3, ring=ring)
    memory.hello()
    memory.device()
    memory.context()
    memory.name(1, "scale")
    memory.name(2, "fill")
    for number, word in enumerate(("long_scoreboard", "long_scoreboard_not_issued", "selected")):
        memory.name(10 + number, _PREFIX + word)
    memory.reasons(1, {0: 10, 1: 11, 7: 12})
    return memory


def test_times_have_their_kernel_launch_and_queue() -> None:
    memory, host = _sound(), Host()
    helper = _helper(memory, host)
    memory.times((41, 2_000, 2_600, 9, 0, 1, 0, 1, 0), (44, 3_000, 3_001, 9, 0, 2, 0, 1, 0))
    memory.times((0, 4_000, 4_000, 0, 0, 99, 0, 1, 0))
    helper.read(0)
    assert host.times == [
        KernelTime(0, 3, "scale", 2_000, 2_600, 600, 1, 9, 41),
        KernelTime(0, 3, "fill", 3_000, 3_001, 1, 1, 9, 44),
        KernelTime(0, 3, "", 4_000, 4_000, 0, 1, 0, 0),
    ]
    assert not host.lost
    # AND once only
    helper.read(1)
    assert len(host.times) == 3


def test_samples_are_those_of_base_reasons_between_two_readings() -> None:
    memory, host = _sound(), Host()
    helper = _helper(memory, host)
    crc = 0xFEED_FACE_CAFE_BEEF
    memory.stalls(1_500, 2_000, (crc, 0x10, 0, 1, 4, 0, 30), (crc, 0x10, 0, 1, 4, 1, 12))
    memory.stalls(2_400, 2_500, (crc, 0x20, 0, 1, 4, 7, 5))
    helper.read(6)
    code = CodeKey(3, None, "scale", crc)
    assert host.samples == [
        KernelSample(6, 0, code, 0x10, f"{_PREFIX}long_scoreboard", 30, 0, 1_500, 2_000),
        # What the device held since the reading before came with this one.
        KernelSample(6, 0, code, 0x20, f"{_PREFIX}selected", 5, 0, 2_000, 2_500),
    ]
    # AND what is part of others is told apart
    assert (helper.told.samples[1], helper.told.twins[1]) == (35, 12)
    assert not host.lost


def test_samples_of_any_period_stand_for_the_same_cycles() -> None:
    # GIVEN the same kernel in contexts that are sampled at 2^19, 2^20, 2^21 and 2^22 cycles
    memory, host = _sound(), Host()
    helper = _helper(memory, host)
    counts = {19: 80, 20: 40, 21: 20, 22: 10}
    for context, (exponent, count) in enumerate(counts.items(), 1):
        memory.reasons(context, {0: 10, 1: 11})
        rows = (1, 16, 0, 1, 0, 0, count), (1, 16, 0, 1, 0, 1, count // 2)
        memory.stalls(1_500, 2_000, *rows, context=context, period=1 << exponent)
    helper.read(0)
    # THEN all of them count alike, and what is part of others likewise
    assert [sample.count for sample in host.samples] == [40] * 4
    assert [*helper.told.twins.values()] == [20] * 4
    assert not host.lost


def test_rare_samples_of_a_short_period_are_kept_in_their_share() -> None:
    # GIVEN a thousand instructions with one sample each, of which four stand for one
    memory, host = _sound(ring=1 << 18), Host()
    helper = _helper(memory, host)
    rows = [(1, 16 * at, 0, 1, 0, 0, 1) for at in range(1_000)]
    memory.stalls(1_500, 2_000, *rows, period=1 << 18)
    helper.read(0)
    # THEN a quarter of them is left, within six standard deviations, from all of the kernel
    offsets = [sample.offset for sample in host.samples]
    assert abs(len(offsets) - 250) < 6 * (1_000 * 0.25 * 0.75) ** 0.5
    assert min(offsets) < 16 * 100 and max(offsets) > 16 * 900


def test_samples_stand_for_the_time_that_is_wanted() -> None:
    # GIVEN one that samples for less of the time than is wanted, from a moment on
    memory, host = _sound(), Host()
    helper = _helper(memory, host)
    host.wanted = Wanted(duty_permille=500)
    row = (1, 16, 0, 1, 0, 0, 3)
    for duty, at_ns in ((500, 1_400), (125, 2_400), (None, 3_400), (0, 4_400)):
        memory.state(at_ns, 2, duty=duty)
        memory.stalls(at_ns + 100, at_ns + 600, row)
    helper.read(0)
    # THEN its samples stand for so many more; what does not tell is taken as it is
    assert [sample.count for sample in host.samples] == [3, 12, 3, 3]
    # AND what it costs is told as it came
    loads = [load for load in host.loads if load.samples]
    assert loads == [HelperLoad(0, 1, 1, 500)] * 4


def test_another_duty_cycle_is_asked_for_once() -> None:
    memory, host = _sound(), Host()
    helper = _helper(memory, host)
    helper.read(0)
    for duty in (1000, 1000, 125, 125, 0, 1000):
        helper.start(Tier.STALLS, duty)
    duties = [struct.unpack_from("<I", message, 16)[0] for message in memory.told]
    assert duties == [1000, 125, 0, 1000]


def test_a_duty_cycle_that_finds_a_full_pipe_is_asked_for_again() -> None:
    memory, host = _sound(), Host()
    helper = _helper(memory, host)
    helper.read(0)
    helper.start(Tier.STALLS, 1000)
    # GIVEN a process that is stopped for a while, and does not empty its pipe
    memory.is_full = True
    helper.start(Tier.STALLS, 125)
    assert len(memory.told) == 1
    # WHEN there is room again
    memory.is_full = False
    for _ in range(2):
        helper.start(Tier.STALLS, 125)
    # THEN it is told, once; it had begun, and nothing is missing
    duties = [struct.unpack_from("<I", message, 16)[0] for message in memory.told]
    assert duties == [1000, 125]
    assert not host.lost


def _asked(memory: Memory) -> list[tuple[int, int]]:
    """Returns duty and serialised windows of all messages, in permille."""
    found = [struct.unpack("<4s7I", message) for message in memory.told]
    return [(fields[4], fields[7]) for fields in found]


def test_what_is_wanted_is_said_again_each_minute() -> None:
    # GIVEN a recorder whose wish another one has changed, which was killed
    memory, host = _sound(), Host()
    helper = _helper(memory, host)
    helper.read(0)
    helper.start(Tier.STALLS, 125)
    memory.state(2_000, 2, duty=125)
    memory.state(3_000, 2, duty=1000)
    helper.read(0)
    # WHEN a minute has passed, THEN it is said again, once
    for seconds, messages in ((50, 1), (11, 2), (0, 2), (60, 3)):
        helper._asked_ns -= seconds * 10**9
        helper.start(Tier.STALLS, 125)
        assert _asked(memory) == [(125, 0)] * messages
    # AND where the pipe is full then, it is said a minute later
    memory.is_full = True
    helper._asked_ns -= 60 * 10**9
    helper.start(Tier.STALLS, 125)
    memory.is_full = False
    helper.start(Tier.STALLS, 125)
    assert len(memory.told) == 3
    assert not host.lost


def test_one_that_wants_more_says_it_again_soon() -> None:
    for duty, serialised in ((125, 0), (1000, 25)):
        memory, host = _sound(), Host()
        helper = _helper(memory, host)
        helper.read(0)
        helper.start(Tier.STALLS, 1000, serialised)
        # GIVEN another recorder that has asked for less, or for no serialised windows
        memory.state(2_000, 2, duty=duty)
        helper.read(0)
        for _ in range(3):
            helper.start(Tier.STALLS, 1000, serialised)
            assert len(memory.told) == 1
        helper._asked_ns -= 5 * 10**9
        for _ in range(3):
            helper.start(Tier.STALLS, 1000, serialised)
        assert _asked(memory) == [(1000, serialised)] * 2


@pytest.mark.parametrize("is_answered", [False, True])
def test_who_comes_second_leaves_what_it_has_found(is_answered: bool) -> None:
    # GIVEN a helper that another recorder has on, as it tells before this one begins or by answer
    memory, host = _sound(), Host()
    helper = _helper(memory, host)
    if not is_answered:
        memory.state(2_000, 2, duty=125)
    helper.read(0)
    helper.start(Tier.STALLS, 1000, 25)
    if is_answered:
        memory.state(2_000, 1, duty=125)
    memory.state(3_000, 2, duty=1000)
    helper.read(1)
    # WHEN it leaves, THEN that is asked for before the pipe is closed
    told: list[tuple[int, int]] = []
    memory.on_leave = lambda: told.extend(_asked(memory))
    helper.leave()
    assert told == [(1000, 25), (125, 0)]


@pytest.mark.parametrize("before", [None, 0, 1000])
def test_who_found_it_off_or_as_it_wanted_it_only_leaves(before: int | None) -> None:
    memory, host = _sound(), Host()
    helper = _helper(memory, host)
    if before is not None:
        memory.state(2_000, 2 if before else 0, duty=before)
    helper.read(0)
    helper.start(Tier.STALLS, 1000)
    memory.state(3_000, 2, duty=1000)
    helper.read(1)
    helper.leave()
    assert _asked(memory) == [(1000, 0)]


def test_who_came_first_leaves_nothing_of_its_own_behind() -> None:
    # GIVEN an agent that wants less after a while, as more would cost too much
    memory, host = _sound(), Host()
    helper = _helper(memory, host)
    helper.read(0)
    helper.start(Tier.STALLS, 1000)
    memory.state(2_000, 2, duty=1000)
    helper.read(1)
    helper.start(Tier.STALLS, 125)
    # WHEN it leaves, THEN what it wanted first is not asked for
    helper.leave()
    assert _asked(memory) == [(1000, 0), (125, 0)]


def test_a_period_that_is_none_is_refused() -> None:
    memory, host = _sound(), Host()
    memory.stalls(1_500, 2_000, (1, 16, 0, 1, 0, 0, 3), period=1 << 63)
    memory.stalls(1_500, 2_000, (1, 16, 0, 1, 0, 0, 5), period=0)
    _helper(memory, host).read(0)
    assert [sample.count for sample in host.samples] == [5]
    assert host.lost == {LossKind.DEVICE_SAMPLES_REFUSED: 3}


def test_all_records_of_one_read_out_have_its_time() -> None:
    # GIVEN two read-outs of more rows than a record has, and one that another reading finds
    memory, host = _sound(), Host()
    helper = _helper(memory, host)
    row = (1, 0, 0, 1, 0, 0, 3)
    memory.stalls(1_500, 2_000, row)
    memory.stalls(1_500, 2_000, row)
    memory.stalls(2_400, 2_500, row)
    helper.read(0)
    memory.stalls(2_400, 2_500, row)
    memory.stalls(2_400, 2_500, row, context=2)
    helper.read(0)
    # THEN none of them is a moment
    between = [(sample.begin_ns, sample.end_ns) for sample in host.samples]
    assert between == [(1_500, 2_000), (1_500, 2_000), (2_000, 2_500), (2_000, 2_500)]
    # AND a context of its own has times of its own
    memory.reasons(2, {0: 10})
    memory.stalls(2_400, 2_600, row, context=2)
    helper.read(0)
    assert (host.samples[-1].begin_ns, host.samples[-1].end_ns) == (2_500, 2_600)


def test_windows_are_added_up_and_end_the_read_outs_before_them() -> None:
    memory, host = _sound(), Host()
    helper = _helper(memory, host)
    row, numbered = (1, 0, 0, 1, 0, 0, 3), (1, 0, 41, 1, 0, 0, 3)
    memory.stalls(1_500, 2_000, row)
    memory.stalls(2_100, 2_200, numbered)
    memory.stalls(2_250, 2_300, numbered)
    # WHEN a window is over
    memory.serialised(2_050, 2_350)
    memory.stalls(2_400, 2_500, row)
    memory.serialised(2_600, 2_700)
    helper.read(0)
    # THEN what is sampled afterwards was not taken in it
    between = [(s.launch_id, s.begin_ns, s.end_ns) for s in host.samples]
    assert between == [
        *((0, 1_500, 2_000), (41, 2_000, 2_200), (41, 2_200, 2_300)),
        (0, 2_400, 2_500),
    ]
    assert (helper.told.windows, helper.told.serialised_ns) == ({1: 2}, {1: 300 + 100})
    assert not host.lost


def test_windows_that_cannot_be_count_for_nothing() -> None:
    memory, host = _sound(), Host()
    helper = _helper(memory, host)
    later_ns = time.monotonic_ns() + 10**12
    memory.serialised(5_000, 4_000)
    memory.serialised(500, 900)  # before the recording
    memory.serialised(2_000, 3_000, context=77)  # of a context that is none
    memory.serialised(900, 1_200)
    memory.serialised(1_000, 1_300)  # overlaps the one before
    for _ in range(1_000):
        memory.serialised(1_000, 1_300)
    memory.serialised(later_ns, later_ns + 10**18)
    helper.read(0)
    assert (helper.told.windows, helper.told.serialised_ns) == ({1: 2}, {1: 200 + 100})
    memory.serialised(2_000, 2**64 - 1)
    helper.read(1)
    assert helper.told.serialised_ns[1] <= time.monotonic_ns()


def test_it_is_told_for_how_much_of_the_time_launches_are_wanted() -> None:
    memory, host = _sound(), Host()
    helper = _helper(memory, host)
    helper.read(0)
    helper.start(Tier.STALLS, 1000, 25)
    assert memory.told == [struct.pack("<4s7I", b"aifc", VERSION, 1, 2, 1000, 0, 500, 25)]


def test_what_was_before_the_recording_is_another_ones() -> None:
    memory, host = _sound(), Host()
    memory.stalls(100, 900, (1, 0, 0, 1, 0, 0, 50))
    memory.losses({1: 7})
    memory.stalls(900, 1_900, (1, 0, 0, 1, 0, 0, 3))
    memory.losses({1: 2, 4: 5})
    _helper(memory, host).read(0)
    assert [(s.count, s.begin_ns, s.end_ns) for s in host.samples] == [(3, 1_000, 1_900)]
    assert host.lost == {LossKind.DEVICE_SAMPLES_DROPPED: 2, LossKind.KERNEL_TIMES_DROPPED: 5}


def test_times_and_errors_of_another_recording_are_not_this_ones() -> None:
    memory, host = _sound(), Host()
    memory.error(3, what="another's", at_ns=900)
    old, new = (7, 800, 990, 9, 0, 1, 0, 1, 0), (8, 900, 1_100, 9, 0, 1, 0, 1, 0)
    memory.times(old, new, old)
    memory.times(*[old] * 100)
    helper = _helper(memory, host)
    helper.read(0)
    assert [one.launch_id for one in host.times] == [8]
    assert not helper.told.errors
    # AND what fails now does
    memory.error(3, what="this one's", at_ns=1_200)
    helper.read(1)
    assert [failed.what for failed in helper.told.errors.values()] == ["this one's"]


def test_a_name_that_comes_after_the_ring_was_read_is_known() -> None:
    # GIVEN a helper that writes the fact, and then what speaks of it, between two reads
    memory, host = _sound(), Host()
    helper = _helper(memory, host)
    read = memory.read

    def late(size: int, offset: int) -> bytes:
        if offset == 0 and size > 40 and not memory.numbers[0]:
            memory.name(50, "late")
            memory.times((1, 2_000, 2_001, 0, 0, 50, 0, 1, 0))
        return read(size, offset)

    memory.read = late  # type: ignore[method-assign]
    helper.read(0)
    helper.read(1)
    assert [one.kernel for one in host.times] == ["late"]


def test_samples_without_names_are_lost_by_number() -> None:
    memory, host = _sound(), Host()
    memory.stalls(
        1_500,
        2_000,
        (1, 0, 0, 77, 0, 0, 4),  # no such function
        (1, 0, 0, 1, 0, 5, 3),  # no such reason
        (1, 1 << 50, 0, 1, 0, 0, 2),  # no such offset
        (1, 0, 1 << 63, 1, 0, 0, 1),  # no such launch
        (1, 0, 0, 1, 0, 0, 100),
    )
    memory.stalls(1_500, 2_000, (1, 0, 0, 1, 0, 0, 50), device=9)
    _helper(memory, host).read(0)
    assert [sample.count for sample in host.samples] == [100]
    assert host.lost == {LossKind.DEVICE_SAMPLES_REFUSED: 4 + 3 + 2 + 1 + 50}


def test_it_is_told_to_begin_once_and_left_at_the_end() -> None:
    memory, host = _sound(), Host()
    helper = _helper(memory, host)
    helper.start(Tier.STALLS, 100)
    assert memory.told == []  # it has said nothing yet
    for second in range(3):
        helper.read(second)
        helper.start(Tier.STALLS, 100)
    assert memory.told == [struct.pack("<4s7I", b"aifc", VERSION, 1, 2, 100, 0, 500, 0)]
    # WHEN it is left, THEN what it had left is taken until it says that it has ended
    memory.on_leave = lambda: (
        memory.times((9, 5_000, 5_500, 0, 0, 1, 0, 1, 0)),  # type: ignore[assignment,return-value]
        memory.state(time.monotonic_ns() + 1_000_000_000, 0, 1),
    )
    begun_s = time.monotonic()
    await_end([helper], lambda one: one.read(4), at_most_s=30)
    assert time.monotonic() - begun_s < 10
    assert memory.is_left
    assert [one.launch_id for one in host.times] == [9]


def test_one_that_never_ends_is_not_waited_for() -> None:
    memory, host = _sound(), Host()
    helper = _helper(memory, host)
    helper.read(0)
    helper.start(Tier.STALLS, 1000)
    await_end([helper], lambda one: one.read(0), at_most_s=0.05)
    assert memory.is_left


@pytest.mark.parametrize("end", ["killed", "off", "no library"])
def test_one_that_tells_no_more_is_not_waited_for(end: str) -> None:
    # GIVEN a process that has ended during the recording, and a ring that takes several readings
    memory, host = _sound(ring=1 << 18), Host()
    helper = _helper(memory, host)
    helper.read(0)
    helper.start(Tier.STALLS, 1000)
    for _ in range(10_000):
        memory.put(Passing.CODE_UNLOADED, b"")
    memory.times((9, 5_000, 5_500, 0, 0, 1, 0, 1, 0))
    if end == "killed":
        memory.has_ended = True
    elif end == "off":
        memory.state(time.monotonic_ns(), 0, 1)
    else:
        memory.hello(tier=0, why="there is no libcupti")
    helper.read(1)
    begun_s = time.monotonic()
    await_end([helper], lambda one: one.read(2), at_most_s=30)
    assert time.monotonic() - begun_s < 10
    assert [one.launch_id for one in host.times] == [9]


def test_why_it_came_no_further_is_not_that_it_was_left() -> None:
    memory, host = Memory(process=3), Host()
    memory.hello(0, "nobody has asked for it")
    helper = _helper(memory, host)
    helper.read(0)
    helper.start(Tier.STALLS, 1000)
    memory.hello(0, "another profiler uses CUPTI: nsys")
    helper.read(1)
    # GIVEN a recorder that leaves, which the helper then says
    memory.on_leave = lambda: memory.hello(0, "the recorder is gone")
    helper.leave()
    helper.read(2)
    assert helper.told.best is not None
    assert helper.told.best.why == "another profiler uses CUPTI: nsys"


@pytest.mark.parametrize("descriptor", [-1, 3])
def test_one_without_a_pipe_is_a_loss(descriptor: int) -> None:
    memory, host = _sound(), Host()
    memory.control_fd = -1 if descriptor < 0 else 7
    struct.pack_into("<i", memory.bytes, 48, descriptor)
    helper = _helper(memory, host)
    for second in range(2):
        helper.read(second)
        struct.pack_into("<i", memory.bytes, 48, descriptor)
        helper.start(Tier.STALLS, 1000)
    assert host.lost == {LossKind.DEVICE_CONTROL_REFUSED: 1}


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        (Passing.TIMES, b"x" * 8),
        (Passing.STALLS, b"x" * 8),
        (Passing.STALLS, bytes(32 + 8)),
        (Passing.LOSSES, struct.pack("<IIQ", 999, 0, 1)),
        (Passing.ERROR, struct.pack("<QIi", 1, 4, 0) + b"no end!!"),
        (Passing.STATE, b"x" * 8),
        # For more than all of the time.
        (Passing.STATE, struct.pack("<QIIII", 1, 2, 0, 1001, 0)),
        (Passing.SERIALISED, b"x" * 8),
        (77, b""),
        (Fact.HELLO, b"x" * 8),
        (Fact.NAME, struct.pack("<II", 3, 0) + b"y" * 8),
        (Fact.REASONS, struct.pack("<II", 1, 1 << 31)),
        (Fact.DEVICE, b"x" * 16),
        (Fact.CODE, b"x" * 16),
        (15, b""),
    ],
)
def test_what_no_helper_writes_ends_the_reading(kind: int, data: bytes) -> None:
    memory, host = _sound(), Host()
    memory.put(kind, data)
    helper = _helper(memory, host)
    for second in range(3):
        memory.times((1, 2_000, 2_001, 0, 0, 1, 0, 1, 0))
        helper.read(second)
    assert host.lost == {LossKind.DEVICE_MEMORY_DAMAGED: 1}
    if kind >= Passing.TIMES:
        assert not host.times


@pytest.mark.parametrize("head", [8, 1 << 62, (1 << 64) - 8])
def test_a_head_of_facts_that_cannot_be_ends_them(head: int) -> None:
    memory, host = _sound(), Host()
    struct.pack_into("<Q", memory.bytes, 40, head)
    helper = _helper(memory, host)
    for second in range(3):
        helper.read(second)
    assert host.lost[LossKind.DEVICE_MEMORY_DAMAGED] <= 1
    assert not host.times


def test_facts_whose_ring_is_as_long_as_a_number_cost_nothing_else() -> None:
    memory, host = _sound(), Host()
    struct.pack_into("<Q", memory.bytes, 16, (1 << 64) - 8)
    _helper(memory, host).read(0)
    assert host.lost


def test_a_process_has_no_more_of_anything_than_there_is_room_for() -> None:
    # GIVEN 70,000 names, of which the first fit, 3,000 contexts, and 100 devices
    memory, host = Memory(facts=8 << 20), Host()
    memory.hello()
    for number in range(70_000):
        memory.name(number + 1, "n")
    for number in range(3_000):
        memory.context(number)
    for number in range(100):
        memory.device(number)
    helper = _helper(memory, host)
    for second in range(20):
        helper.read(second)
    assert host.lost[LossKind.DEVICE_NAMES_FULL] == 70_000 - (1 << 16)
    assert [*helper.told.contexts] == [*range(3_000 - 256, 3_000)]
    assert [*helper.told.devices] == [*range(32)]
    assert host.lost[LossKind.DEVICE_CONTEXTS_FULL] == 100 - 32


def test_names_have_so_many_bytes_of_a_process() -> None:
    # GIVEN names of four bytes a character in Python, of which 1,019 have room
    memory, host = Memory(facts=20 << 20), Host()
    memory.hello()
    memory.device()
    text = b"\xf0\x9f\x98\x80" * 4096
    for number in range(1, 1_101):
        record = struct.pack("<IIQII", 24 + len(text) + 8, Fact.NAME, number + 1, number, 0)
        record += text + bytes(8)
        at = HEADER_BYTES + memory.ring + memory.heads[1]
        memory.bytes[at : at + len(record)] = record
        memory.heads[1] += len(record)
    memory.numbers[1] = 1_102
    memory.name(1, "again")
    memory.times((1, 2_000, 2_001, 0, 0, 1, 0, 1, 0), (1, 2_000, 2_001, 0, 0, 1_100, 0, 1, 0))
    _helper(memory, host).read(0)
    assert [one.kernel for one in host.times] == ["again", ""]
    assert host.lost == {LossKind.DEVICE_NAMES_FULL: 1_100 - 1_019}


def test_facts_take_turns_with_the_rest_of_the_recording() -> None:
    # GIVEN a process whose facts go on, and times that speak of the last of them
    memory, host = _sound(), Host()
    for number in range(1_000):
        memory.name(100 + number, "n" * (number % 300))
    memory.code(5, b"\x7fELF" * 50_000)
    memory.name(5_000, "last")
    memory.times((1, 2_000, 2_001, 0, 0, 5_000, 0, 1, 0))
    reads = 0
    read = memory.read

    def counted(size: int, offset: int) -> bytes:
        nonlocal reads
        reads += 1
        return read(size, offset)

    memory.read = counted  # type: ignore[method-assign]
    helper = _helper(memory, host)
    # WHEN it may tell 600 at a time, THEN it does, in few reads, and the times wait for the rest
    helper.allow(600)
    for _ in range(5):
        helper.read(0)
    assert not host.times
    helper.allow(600)
    helper.read(1)
    assert [one.kernel for one in host.times] == ["last"]
    assert helper.code(5) == b"\x7fELF" * 50_000
    assert reads < 50
    assert not host.lost


def test_what_waits_for_facts_at_the_end_is_counted() -> None:
    memory, host = _sound(), Host()
    memory.times((1, 2_000, 2_001, 0, 0, 1, 0, 1, 0))
    memory.times((2, 2_000, 2_001, 0, 0, 1, 0, 1, 0))
    helper = _helper(memory, host)
    helper.allow(3)
    await_end([helper], lambda one: one.read(0), at_most_s=0)
    assert not host.times
    assert host.lost == {LossKind.DEVICE_RECORDS_OVERWRITTEN: 2}


def test_kernels_and_instructions_that_are_told_apart_are_bounded() -> None:
    memory, host = _sound(), Host()
    helper = _helper(memory, host)
    for batch in range(20):
        rows = [(1 + batch * 1_000 + n, 0, 0, 1, 0, 0, 1) for n in range(1_000)]
        memory.stalls(1_500, 2_000, *rows)
        helper.read(batch)
    assert len(host.samples) == 1 << 14
    assert host.lost == {LossKind.DEVICE_SAMPLES_REFUSED: 20_000 - (1 << 14)}


def test_a_process_that_compiles_kernels_all_day_has_samples_of_the_last_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("aiflame.gpu.helpers._MAX_KERNELS", 4)
    monkeypatch.setattr("aiflame.gpu.helpers._MAX_SITES", 8)
    memory, host = _sound(), Host()
    host.wanted = Wanted(lists=False)
    helper = _helper(memory, host)
    # GIVEN an agent, and in each minute as many new kernels as there is room for, and one more
    for minute in range(10):
        codes = range(1 + 5 * minute, 6 + 5 * minute)
        memory.stalls(1_500, 2_000, *((code, 0, 0, 1, 0, 0, 1) for code in codes))
        helper.read(60 * minute)
    # THEN the last are told apart as the first were, and the others counted
    assert [sample.code.object for sample in host.samples] == [
        code for minute in range(10) for code in range(1 + 5 * minute, 5 + 5 * minute)
    ]
    assert host.lost == {LossKind.DEVICE_SAMPLES_REFUSED: 10}


def test_a_process_that_makes_contexts_all_day_has_samples_of_the_last_ones() -> None:
    # GIVEN a context that goes on, and 1,000 others one after the other
    memory, host = _sound(ring=1 << 18), Host()
    helper = _helper(memory, host)
    for context in range(2, 1_002):
        memory.context(context)
        memory.reasons(context, {0: 10, 1: 11})
        for one in (1, context):
            rows = (1, 0, 0, 1, 0, 0, 1), (1, 0, 0, 1, 0, 1, 1)
            memory.stalls(context * 1_000, context * 1_000 + 1, *rows, context=one)
        memory.serialised(context * 1_000, context * 1_000 + 1, context)
        helper.read(0)
    # THEN all have their samples,
    assert len(host.samples) == 2_000
    assert helper.told.samples[1] == 1_000
    assert not host.lost
    # AND of those that came last it is known how they were sampled
    told = helper.told
    for known in (told.contexts, told.samples, told.twins):
        assert sorted(known) == [1, *range(747, 1_002)]
    assert sorted(told.windows) == sorted(told.serialised_ns) == [*range(747, 1_002)]


def test_code_beyond_what_is_remembered_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aiflame.gpu.helpers._MAX_CODES", 2)
    memory, host = _sound(), Host()
    for code in (1, 2, 1, 3, 4):
        memory.code(code, b"c" * 8)
    memory.code(5, b"")
    helper = _helper(memory, host)
    helper.read(0)
    assert [bool(helper.code(code)) for code in range(1, 6)] == [True, True, False, False, False]
    assert host.lost == {LossKind.DEVICE_CODE_NOT_KEPT: 2}


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_bytes_end_in_bounded_time(data: st.DataObject) -> None:
    memory, host = _sound(), Host()
    memory.times((41, 2_000, 2_600, 9, 0, 1, 0, 1, 0))
    memory.stalls(1_500, 2_000, (1, 0x10, 0, 1, 4, 0, 30))
    memory.losses({1: 7})
    memory.error(4, 1, "x", "y")
    memory.state(3, 2)
    for _ in range(data.draw(st.integers(1, 12))):
        where = data.draw(
            st.one_of(
                st.integers(0, 64),
                st.integers(HEADER_BYTES, HEADER_BYTES + memory.heads[0]),
                st.integers(0, memory.heads[1]).map(lambda at: HEADER_BYTES + memory.ring + at),
            )
        )
        junk = data.draw(st.binary(min_size=1, max_size=8))
        memory.bytes[where : where + len(junk)] = junk
    helper = _helper(memory, host)
    begun_s = time.thread_time()
    for second in range(3):
        helper.read(second)
        helper.start(Tier.STALLS, 1000)
    assert time.thread_time() - begun_s < 1
    for one in host.times:
        assert (one.process, one.device) == (3, 0)
    for sample in host.samples:
        assert sample.begin_ns <= sample.end_ns
        assert 0 < sample.count < 1 << 29
