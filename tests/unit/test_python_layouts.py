# SPDX-License-Identifier: Apache-2.0
"""Layouts: what 3.13 and later say of themselves, and the refusal of all that is unknown."""

from __future__ import annotations

import random

import pytest
from aiflame.agent.python.debugoffsets import _GROUPS, COOKIE, read_layout
from aiflame.agent.python.layouts import (
    ABSENT,
    GilHolder,
    RunEnd,
    UnsupportedPython,
    table_layout,
)
from pymemory import debug_offsets


# Group starts as published for 3.13 (584 bytes), 3.14 (760) and 3.15 (888), with the head's 24.
@pytest.mark.parametrize(
    ("version", "starts"),
    [
        ((3, 13), {"runtime": 24, "interpreter": 48, "thread": 152, "frame": 224, "code": 272}),
        ((3, 14), {"runtime": 24, "interpreter": 48, "thread": 176, "frame": 248, "code": 312}),
        ((3, 15), {"runtime": 24, "interpreter": 48, "thread": 176, "frame": 312, "code": 376}),
    ],
)
def test_groups_begin_where_the_headers_put_them(
    version: tuple[int, int], starts: dict[str, int]
) -> None:
    starts["unicode"] = {(3, 13): 536, (3, 14): 616, (3, 15): 712}[version]
    at, found = 24, {}
    for group, fields in _GROUPS[version]:
        found[group] = at
        at += 8 * len(fields.split(" "))
    assert {group: found[group] for group in starts} == starts


def test_313_describes_itself() -> None:
    layout = read_layout(debug_offsets((3, 13)))
    assert (layout.thread_frame, layout.frame_code, layout.frame_mark) == (72, 0, 70)
    assert (layout.code_instructions, layout.code_tags) == (200, 0)
    assert (layout.gil_last_holder, layout.gil_locked) == (8, 16)
    assert layout.run_end is RunEnd.SHIM


def test_314_has_tagged_code_pointers() -> None:
    layout = read_layout(debug_offsets((3, 14)))
    assert (layout.frame_mark, layout.code_instructions, layout.code_tags) == (74, 208, 3)
    assert (layout.runtime_tss_key, layout.frame_copy, layout.code_copies) == (2340, ABSENT, ABSENT)


def test_free_threaded_314_has_larger_objects_and_no_gil() -> None:
    layout = read_layout(debug_offsets((3, 14), free_threaded=True))
    assert layout.free_threaded
    assert layout.gil_kind is GilHolder.NONE
    assert (layout.str_ascii_data, layout.str_compact_data, layout.bytes_data) == (56, 72, 48)
    assert (layout.str_kind_shift, layout.runtime_tss_key) == (8, 2340)
    assert (layout.frame_copy, layout.code_copies) == (72, 224)


def test_threads_of_free_threaded_313_run_the_same_instructions() -> None:
    layout = read_layout(debug_offsets((3, 13), free_threaded=True))
    assert layout.gil_kind is GilHolder.NONE
    assert (layout.code_instructions, layout.str_kind_shift) == (216, 2)
    assert (layout.frame_copy, layout.code_copies) == (ABSENT, ABSENT)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (debug_offsets((3, 16)), "CPython 3.16 is not supported yet"),
        (debug_offsets((3, 15), True), "CPython 3.15 without the GIL is not supported yet"),
        (bytes(600), "without its debug offsets"),
        (b"", "without its debug offsets"),
        (debug_offsets((3, 13))[:300], "cut short"),
        (COOKIE, "without its debug offsets"),
        (debug_offsets((3, 13), frame__owner=1 << 40), "frame.owner lies outside"),
        (debug_offsets((3, 13), frame__size=1 << 40), "a frame of"),
        (debug_offsets((3, 13), code__name=4096), "code.name lies outside"),
        (debug_offsets((3, 13), frame__instr_ptr=72), "among its locals"),
        (debug_offsets((3, 13), interpreter__gil_runtime_state_holder=8), "before the GIL"),
        # The kernel half would read less of a frame, or other words.
        (debug_offsets((3, 13), frame__localsplus=120, frame__size=128), "whole words"),
        (debug_offsets((3, 13), frame__previous=12), "whole words"),
        (debug_offsets((3, 14), True, frame__tlbc_index=80), "among its locals"),
        (debug_offsets((3, 14), True, frame__tlbc_index=79), "among its locals"),
    ],
)
def test_what_is_unknown_or_senseless_is_refused_by_name(data: bytes, message: str) -> None:
    with pytest.raises(UnsupportedPython, match=message):
        read_layout(data)


def test_random_offsets_are_refused_or_bounded() -> None:
    chance = random.Random(1)
    head = debug_offsets((3, 14))[:24]
    accepted = 0
    for _ in range(300):
        words = b"".join(
            chance.randrange(1 << chance.choice((4, 8, 64))).to_bytes(8, "little")
            for _ in range(95)
        )
        try:
            layout = read_layout(head + words)
        except UnsupportedPython:
            continue
        accepted += 1
        # All that the kernel half reads of a frame, in words.
        assert layout.frame_bytes <= 112
        offsets = (layout.frame_code, layout.frame_previous, layout.frame_position)
        assert all(place % 8 == 0 for place in offsets)
    assert accepted < 300


@pytest.mark.parametrize("version", [(3, 7), (2, 7), (3, 13), (3, 15), (4, 0)])
def test_versions_outside_the_table_are_refused(version: tuple[int, int]) -> None:
    with pytest.raises(UnsupportedPython, match=rf"CPython {version[0]}\.{version[1]} "):
        table_layout(version)
