# SPDX-License-Identifier: Apache-2.0
"""The frame walk on constructed memory: run ends of each version, and hostile chains."""

from __future__ import annotations

import random

import pytest
from aiflame.agent.python.debugoffsets import read_layout
from aiflame.agent.python.layouts import Layout, RunEnd, table_layout
from aiflame.agent.python.walk import MAX_FRAMES, NO_POSITION, PythonFrame, WalkEnd, walk
from pymemory import BASE, ConstructedMemory, debug_offsets

LAYOUTS = [
    *(table_layout((3, minor)) for minor in range(8, 13)),
    read_layout(debug_offsets((3, 13))),
    read_layout(debug_offsets((3, 14))),
    read_layout(debug_offsets((3, 13), free_threaded=True)),
    read_layout(debug_offsets((3, 14), free_threaded=True)),
]
IDS = [f"{x.version[0]}.{x.version[1]}{'t' * x.free_threaded}" for x in LAYOUTS]
each_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=IDS)
SHIMS = [layout for layout in LAYOUTS if layout.run_end is RunEnd.SHIM]


@each_layout
def test_frames_come_leaf_first_with_their_positions(layout: Layout) -> None:
    memory = ConstructedMemory()
    codes = [memory.code(layout, name) for name in "abc"]
    frames = [memory.frame(layout, code, 7 + i) for i, code in enumerate(codes)]
    walked = walk(memory, layout, memory.chain(layout, frames))
    assert walked.end is WalkEnd.COMPLETE
    assert [f.code_address for f in walked.frames] == codes
    assert [f.position for f in walked.frames] == [14, 16, 18]


@each_layout
def test_runs_end_by_the_rule_of_the_version(layout: Layout) -> None:
    # GIVEN two calls of the eval loop: the leaf's has two frames, the root's has one
    memory = ConstructedMemory()
    code = memory.code(layout, "f")
    mark = int(layout.run_end is RunEnd.ENTRY_BYTE)
    shim = [memory.frame(layout, code, 0, 3)] if layout.run_end is RunEnd.SHIM else []
    frames = [memory.frame(layout, code), memory.frame(layout, code, 0, mark), *shim]
    if layout.run_end is RunEnd.SHIM:
        shim = [memory.frame(layout, code, 0, 4)]
    frames += [memory.frame(layout, code, 0, mark), *shim]
    # WHEN it is walked, THEN shims do not show, and each run's last frame says so
    walked = walk(memory, layout, memory.chain(layout, frames))
    expected = [layout.run_end is RunEnd.EVERY_FRAME, True, True]
    assert [frame.ends_run for frame in walked.frames] == expected


@pytest.mark.parametrize("layout", SHIMS)
def test_an_eval_loop_without_frames_is_an_empty_run(layout: Layout) -> None:
    memory = ConstructedMemory()
    code = memory.code(layout, "f")
    frames = [
        memory.frame(layout, 0, 0, 3),
        memory.frame(layout, code),
        memory.frame(layout, 0, 0, 3),
    ]
    walked = walk(memory, layout, memory.chain(layout, frames))
    assert walked.frames[0] == PythonFrame(0, NO_POSITION, True)
    assert [frame.code_address for frame in walked.frames[1:]] == [code]


def test_tags_are_cleared_from_code_pointers() -> None:
    layout = read_layout(debug_offsets((3, 14)))
    memory = ConstructedMemory()
    code = memory.code(layout, "f")
    frame = memory.frame(layout, code, 5)
    memory.word(frame + layout.frame_code, code | 1)
    (found,) = walk(memory, layout, memory.chain(layout, [frame])).frames
    assert (found.code_address, found.position) == (code, 10)


def test_positions_are_those_in_the_copy_that_a_thread_runs() -> None:
    # GIVEN frames of a free-threaded build: one runs the code object's own instructions, one
    # another thread's copy of them, and one a copy that is not there
    layout = read_layout(debug_offsets((3, 14), free_threaded=True))
    memory = ConstructedMemory()
    code = memory.code(layout, "f")
    own, other, none = (memory.frame(layout, code, 5) for _ in range(3))
    memory.word(other + layout.frame_position, memory.copy(layout, code, 1) + 12)
    memory.write(other + layout.frame_copy, bytes([1]))
    memory.write(none + layout.frame_copy, b"\xff\xff\xff\xff")
    # WHEN they are walked, THEN each position counts from where its own instructions begin
    walked = walk(memory, layout, memory.chain(layout, [own, other, none]))
    assert [frame.position for frame in walked.frames] == [10, 12, NO_POSITION]


@each_layout
def test_a_thread_without_frames_is_normal(layout: Layout) -> None:
    memory = ConstructedMemory()
    walked = walk(memory, layout, memory.chain(layout, []))
    assert (walked.frames, walked.end) == ((), WalkEnd.COMPLETE)


@each_layout
@pytest.mark.parametrize("length", [1, 2, 3, 7, 40])
def test_a_loop_ends_and_says_so(layout: Layout, length: int) -> None:
    memory = ConstructedMemory()
    code = memory.code(layout, "f")
    frames = [memory.frame(layout, code) for _ in range(length)]
    state = memory.chain(layout, [*frames, frames[length // 2]])
    walked = walk(memory, layout, state)
    assert walked.end is WalkEnd.LOOP
    assert len(walked.frames) <= MAX_FRAMES


@each_layout
def test_a_deep_stack_keeps_its_leaf(layout: Layout) -> None:
    memory = ConstructedMemory()
    codes = [memory.code(layout, "f") for _ in range(MAX_FRAMES + 5)]
    state = memory.chain(layout, [memory.frame(layout, code) for code in codes])
    walked = walk(memory, layout, state)
    assert walked.end is WalkEnd.TOO_DEEP
    assert [frame.code_address for frame in walked.frames] == codes[:MAX_FRAMES]


@each_layout
@pytest.mark.parametrize("end", [WalkEnd.UNREADABLE, WalkEnd.BAD_POINTER])
def test_what_was_sound_before_a_bad_link_is_kept(layout: Layout, end: WalkEnd) -> None:
    memory = ConstructedMemory()
    code = memory.code(layout, "f")
    frame = memory.frame(layout, code)
    state = memory.chain(layout, [frame])
    link = BASE - 4096 if end is WalkEnd.UNREADABLE else BASE + 1
    memory.word(frame + layout.frame_previous, link)
    walked = walk(memory, layout, state)
    assert walked.end is end
    assert [f.code_address for f in walked.frames] == [code]


@each_layout
def test_a_thread_state_that_cannot_be_read(layout: Layout) -> None:
    assert walk(ConstructedMemory(), layout, 64).end is WalkEnd.UNREADABLE


@each_layout
def test_garbage_ends_within_bounds(layout: Layout) -> None:
    chance = random.Random(7)
    for _ in range(50):
        memory = ConstructedMemory(1 << 16)
        # Words that are mostly pointers into the garbage itself.
        for at in range(0, 1 << 16, 8):
            inside = BASE + 8 * chance.randrange(1 << 13)
            memory.word(BASE + at, inside if chance.random() < 0.9 else chance.randrange(1 << 64))
        walked = walk(memory, layout, BASE + 8 * chance.randrange(1 << 12))
        assert len(walked.frames) <= MAX_FRAMES
        assert memory.reads <= 2 * MAX_FRAMES + 2


@pytest.mark.parametrize("layout", [x for x in LAYOUTS if x.version >= (3, 11)])
def test_an_instruction_outside_the_code_is_no_position(layout: Layout) -> None:
    memory = ConstructedMemory()
    frame = memory.frame(layout, memory.code(layout, "f"))
    memory.word(frame + layout.frame_position, 8)
    (found,) = walk(memory, layout, memory.chain(layout, [frame])).frames
    assert found.position == NO_POSITION
