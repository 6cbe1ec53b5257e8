# SPDX-License-Identifier: Apache-2.0
"""From raw addresses to frame ids: what is looked up where, what is cut, and how a stack ends.

The stacks are literal: (id, process, kernel depth, end, addresses), leaf first.
"""

from __future__ import annotations

import itertools
import random
import struct

import numpy as np
import pytest
from aiflame.agent.model.profile import StopReason
from aiflame.agent.symbolize.raw_stacks import KERNEL_OWNER, RawStacks

_KERNEL = 0xFFFF_FFFF_8100_0000


def _row(
    row_id: int,
    process: int,
    kernel: list[int],
    user: list[int],
    end: StopReason = StopReason.ROOTED,
) -> tuple[int, int, int, int, bytes]:
    addresses = [*kernel, *user]
    return row_id, process, len(kernel), int(end), struct.pack(f"<{len(addresses)}Q", *addresses)


def _distinct(stacks: RawStacks) -> list[tuple[int, int]]:
    return list(zip(stacks.owners.tolist(), stacks.addresses.tolist(), strict=True))


def _flags(stacks: RawStacks, *addresses: int) -> np.ndarray:
    """True at the locations with these addresses."""
    return np.isin(stacks.addresses, np.array(addresses, np.uint64))


def _looked_up(stacks: RawStacks) -> list[list[tuple[int, int]]]:
    locations = _distinct(stacks)
    starts = stacks.starts.tolist()
    return [
        [locations[i] for i in stacks.location[begin:end]]
        for begin, end in itertools.pairwise(starts)
    ]


def test_callers_are_looked_up_one_byte_before_their_return_address() -> None:
    stacks = RawStacks.of_rows([_row(7, 3, [_KERNEL + 8, _KERNEL + 64], [0x1000, 0x2000, 0x3000])])
    assert _looked_up(stacks) == [
        [
            (KERNEL_OWNER, _KERNEL + 8),
            (KERNEL_OWNER, _KERNEL + 63),
            (3, 0x1000),  # where the system call was made: exact as well
            (3, 0x1FFF),
            (3, 0x2FFF),
        ]
    ]
    assert stacks.ids.tolist() == [7]
    assert stacks.positions.tolist() == [0, 1, 2, 3, 4]


def test_equal_addresses_are_kept_once_and_processes_apart() -> None:
    stacks = RawStacks.of_rows(
        [
            _row(0, 1, [], [0x1000, 0x2000]),
            _row(1, 1, [], [0x1000, 0x2000, 0x2000]),
            _row(2, 2, [], [0x1000]),
            _row(3, 2, [_KERNEL], []),
            _row(4, 1, [_KERNEL], []),
        ]
    )
    assert sorted(_distinct(stacks)) == [
        (1, 0x1000),
        (1, 0x1FFF),
        (2, 0x1000),
        (KERNEL_OWNER, _KERNEL),
    ]


def test_addresses_at_both_ends_of_the_address_space() -> None:
    top = 2**64 - 1
    stacks = RawStacks.of_rows([_row(0, 0xFFFF_FFFE, [], [top, 0, 1])])
    assert _looked_up(stacks) == [[(0xFFFF_FFFE, top), (0xFFFF_FFFE, top), (0xFFFF_FFFE, 0)]]


@pytest.mark.parametrize(
    "rows", [[], [_row(5, 1, [], [])], [_row(5, 1, [], []), _row(6, 1, [], [])]]
)
def test_nothing_but_empty_stacks(rows: list) -> None:
    stacks = RawStacks.of_rows(rows)
    none = np.zeros(0, bool)
    kept = stacks.kept_lengths(none)
    first = stacks.first_kept(none, np.ones(len(rows), bool))
    assert kept.tolist() == first.tolist() == [0] * len(rows)
    ends = stacks.final_stop_reasons(kept, none)
    assert ends.tolist() == [StopReason.NO_FRAME_POINTER] * len(rows)
    starts, frames = np.zeros(1, np.int64), np.zeros(0, np.int64)
    assert stacks.frame_ids(first, kept, starts, frames) == [b""] * len(rows)


def test_the_walk_is_cut_at_the_first_caller_that_is_no_code() -> None:
    stacks = RawStacks.of_rows(
        [
            _row(0, 1, [], [0x10, 0x20, 0x30]),  # all mapped
            _row(1, 1, [], []),
            _row(2, 1, [], [0x10, 0x666, 0x20]),  # junk in the middle takes what follows with it
            _row(3, 1, [], [0x666, 0x20]),  # a leaf in no mapping stays
            _row(4, 1, [_KERNEL, _KERNEL + 9], [0x666, 0x20, 0x666]),  # after a system call, too
            _row(5, 1, [_KERNEL, _KERNEL + 9], []),
            _row(6, 1, [], []),
        ]
    )
    kept = stacks.kept_lengths(_flags(stacks, 0x10, 0x1F, 0x2F))
    assert kept.tolist() == [3, 0, 1, 2, 4, 2, 0]


def test_the_profilers_own_frames_are_taken_off_stacks_from_a_switch() -> None:
    bpf_program, tracing, schedule = _KERNEL, _KERNEL + 0x11, _KERNEL + 0x21
    stacks = RawStacks.of_rows(
        [
            _row(0, 1, [bpf_program, tracing, schedule], [0x10]),
            _row(1, 1, [bpf_program, tracing, schedule], [0x10]),  # on the CPU: real time
            _row(2, 1, [], []),
            _row(3, 1, [schedule - 1, tracing, schedule], []),  # traced functions deeper down stay
            _row(4, 1, [bpf_program, tracing], []),  # nothing else: all of it goes
        ]
    )
    is_tracing = _flags(stacks, bpf_program, tracing - 1)
    is_from_switch = np.array([True, False, True, True, True])
    assert stacks.first_kept(is_tracing, is_from_switch).tolist() == [2, 0, 0, 0, 2]


_START = 0x9000


@pytest.mark.parametrize(
    ("end", "user", "judged"),
    [
        # The last frame decides, whichever way the frame pointers ended.
        (StopReason.ROOTED, [0x10, _START], StopReason.ROOTED),
        (StopReason.NO_FRAME_POINTER, [0x10, _START], StopReason.ROOTED),
        (StopReason.UNREADABLE, [0x10, _START], StopReason.ROOTED),
        (StopReason.ROOTED, [0x10, 0x20], StopReason.NO_FRAME_POINTER),
        (StopReason.NO_FRAME_POINTER, [0x10, 0x20], StopReason.NO_FRAME_POINTER),
        (StopReason.UNREADABLE, [0x10, 0x20], StopReason.UNREADABLE),
        (StopReason.ROOTED, [_START - 1], StopReason.ROOTED),  # the leaf itself
        # Junk after the start, and instead of it.
        (StopReason.ROOTED, [0x10, _START, 0x666], StopReason.ROOTED),
        (StopReason.UNREADABLE, [0x10, 0x666, _START], StopReason.NO_FRAME_POINTER),
        # What no frame can tell.
        (StopReason.TOO_DEEP, [0x10, 0x20], StopReason.TOO_DEEP),
        (StopReason.KERNEL_ONLY, [], StopReason.KERNEL_ONLY),
        (StopReason.NOT_WALKED, [], StopReason.NOT_WALKED),
        (StopReason.LOST, [], StopReason.LOST),
        (StopReason.EXCLUDED, [], StopReason.EXCLUDED),
        (StopReason.UNREADABLE, [], StopReason.UNREADABLE),
        (StopReason.ROOTED, [], StopReason.NO_FRAME_POINTER),
    ],
)
@pytest.mark.parametrize("kernel", [[], [_KERNEL, _START]])
def test_how_a_stack_really_ended(
    end: StopReason, user: list[int], judged: StopReason, kernel: list[int]
) -> None:
    # GIVEN the stack between two others, so that no array's edge helps
    other = _row(0, 1, [], [0x10, _START])
    stacks = RawStacks.of_rows([other, _row(1, 1, kernel, user, end), other])
    # WHEN its mappings and start functions are known
    is_code = _flags(stacks, 0x10, 0x0F, 0x1F, _START - 1)
    ends = stacks.final_stop_reasons(stacks.kept_lengths(is_code), _flags(stacks, _START - 1))
    # THEN
    assert [StopReason(value) for value in ends] == [StopReason.ROOTED, judged, StopReason.ROOTED]


_EXEC, _PAST, _OTHER = _KERNEL + 0x41, _KERNEL + 0x51, _KERNEL + 0x61


@pytest.mark.parametrize(
    ("end", "kernel", "user", "is_taken"),
    [
        (StopReason.UNREADABLE, [_OTHER, _EXEC], [0x10], True),
        (StopReason.NO_FRAME_POINTER, [_OTHER, _PAST, _EXEC], [0x10], True),
        (StopReason.NO_TABLE, [_PAST - 1, _EXEC], [0x10], True),
        # The caller's memory is still there, or is read.
        (StopReason.NO_TABLE, [_OTHER, _EXEC], [0x10], False),
        (StopReason.UNREADABLE, [_OTHER, _EXEC], [0x10, 0x20], False),
        (StopReason.ROOTED_BY_TABLE, [_PAST, _EXEC], [0x10], False),
        # No exec: a process that ends, and a page that is not there.
        (StopReason.NO_TABLE, [_PAST, _OTHER], [0x10], False),
        (StopReason.UNREADABLE, [_OTHER], [0x10], False),
        (StopReason.UNREADABLE, [], [_EXEC], False),
    ],
)
def test_exec_takes_the_stack_of_its_caller_away(
    end: StopReason, kernel: list[int], user: list[int], is_taken: bool
) -> None:
    other = _row(0, 1, [_PAST, _EXEC], [0x10, _START], StopReason.ROOTED)
    stacks = RawStacks.of_rows([other, _row(1, 1, kernel, user, end), other])
    kept = stacks.kept_lengths(np.ones(len(stacks.addresses), bool))
    is_exec, is_past = _flags(stacks, _EXEC - 1), _flags(stacks, _PAST - 1)
    assert stacks.taken_by_exec(kept, is_exec, is_past).tolist() == [False, is_taken, False]


@pytest.mark.parametrize(
    ("kernel", "user", "shown"),
    [
        ([_KERNEL], [0x10, 0x21, 0x31], 3),  # a function, start_thread, clone3
        ([_KERNEL], [0x10, 0x21], 3),  # a walk that ended before clone3
        ([], [0x20, 0x31], 1),
        ([], [0x30], 1),  # in clone3 itself
        ([_KERNEL, _KERNEL], [0x30], 3),
        ([], [0x10, 0x31], 2),  # another caller
        ([], [], 0),
    ],
)
def test_a_threads_root_is_the_same_with_clone_and_without(
    kernel: list[int], user: list[int], shown: int
) -> None:
    stacks = RawStacks.of_rows([_row(0, 1, kernel, user)])
    is_clone, is_start = _flags(stacks, 0x30), _flags(stacks, 0x20)
    assert stacks.without_clone(stacks.lengths, is_clone, is_start).tolist() == [shown]


def test_frames_are_root_first_with_inlined_functions_inside_their_callers() -> None:
    stacks = RawStacks.of_rows(
        [_row(0, 1, [_KERNEL], [0x10, 0x21, 0x31]), _row(1, 1, [], []), _row(2, 1, [], [0x30])]
    )
    # GIVEN the frames of each location: 0x20 is in 20, which is inlined in 21 and that in 22
    frames_of = {_KERNEL: [1], 0x10: [10], 0x20: [20, 21, 22], 0x30: [30, 31]}
    chains = [frames_of[address] for address in stacks.addresses.tolist()]
    starts = np.cumsum([0, *map(len, chains)])
    flat = np.array([frame for chain in chains for frame in chain], np.int64)

    def blobs(first: list[int], kept: list[int]) -> list[list[int]]:
        found = stacks.frame_ids(np.array(first), np.array(kept), starts, flat)
        return [list(struct.unpack(f"<{len(blob) // 4}I", blob)) for blob in found]

    assert blobs([0, 0, 0], [4, 0, 1]) == [[31, 30, 22, 21, 20, 10, 1], [], [31, 30]]
    assert blobs([1, 0, 0], [3, 0, 1]) == [[22, 21, 20, 10], [], [31, 30]]
    assert blobs([0, 0, 1], [0, 0, 1]) == [[], [], []]


def _random_row(dice: random.Random, row_id: int) -> tuple[int, int, int, int, bytes]:
    kernel = [_KERNEL + dice.randrange(40) for _ in range(dice.choice((0, 0, 1, 5)))]
    user = [0x1000 + dice.randrange(60) for _ in range(dice.choice((0, 1, 3, 127)))]
    return _row(row_id, dice.randrange(4), kernel, user, StopReason(dice.randrange(8)))


@pytest.mark.parametrize("seed", range(20))
def test_against_the_same_steps_one_stack_at_a_time(seed: int) -> None:
    dice = random.Random(seed)
    rows = [_random_row(dice, row_id) for row_id in range(dice.randrange(1, 60))]
    stacks = RawStacks.of_rows(rows)
    is_mapped = np.array([dice.random() < 0.95 for _ in stacks.owners])
    chains = [[dice.randrange(1 << 32) for _ in range(dice.randint(1, 4))] for _ in stacks.owners]

    # WHEN all stacks go through at once
    kept = stacks.kept_lengths(is_mapped)
    first = stacks.first_kept(_flags(stacks, *range(_KERNEL, _KERNEL + 20)), stacks.ids % 2 == 0)
    first = np.minimum(first, kept)
    flat = np.array([frame for chain in chains for frame in chain], np.int64)
    blobs = stacks.frame_ids(first, kept, np.cumsum([0, *map(len, chains)]), flat)

    # THEN each is what it is when it goes alone, and no frame is lost or made up
    locations = {key: i for i, key in enumerate(_distinct(stacks))}
    for i, (_, process, kernel_depth, _, raw) in enumerate(rows):
        expected: list[int] = []
        cut = False
        for position, (address,) in enumerate(struct.iter_unpack("<Q", raw)):
            owner = KERNEL_OWNER if position < kernel_depth else process
            exact = position in (0, kernel_depth)
            location = locations[(owner, address if exact else address - 1)]
            cut = cut or (position > kernel_depth and not is_mapped[location])
            if not cut and position >= first[i]:
                expected += chains[location]
        assert blobs[i] == struct.pack(f"<{len(expected)}I", *reversed(expected))
