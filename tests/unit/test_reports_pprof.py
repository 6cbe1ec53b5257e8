# SPDX-License-Identifier: Apache-2.0
"""pprof files, read back by a decoder of their own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from aiflame.agent.model.profile import FRAME_DTYPE, Binary, Profile, SampleClass, StopReason
from aiflame.agent.reports import FORMATS, ReportOptions, View
from aiflame.agent.reports.protowire import packed, varint, varint_field
from goldens import assert_golden
from pprof_decoder import Decoded, decode
from profiles import (
    HOSTILE_NAMES,
    MS,
    PROCESSES,
    Sample,
    deep_profile,
    empty_profile,
    hostile_profile,
    profile_of,
    small_profile,
)


def _decoded(profile: Profile, **options: Any) -> Decoded:
    return decode(FORMATS["pprof"].render(profile, ReportOptions(**options)))


def test_golden() -> None:
    assert_golden("small.pprof.txt", _decoded(small_profile()).text().encode())


def test_the_gzip_header_holds_neither_time_nor_name() -> None:
    data = FORMATS["pprof"].render(small_profile(), ReportOptions())
    # RFC 1952, 2.3: magic, deflate, no flags, MTIME of four zero bytes.
    assert data[:8] == b"\x1f\x8b\x08\x00\x00\x00\x00\x00"
    assert data == FORMATS["pprof"].render(small_profile(), ReportOptions())


@pytest.mark.parametrize(
    ("view", "default"), [(View.WALL, "wall"), (View.CPU, "on_cpu"), (View.OFFCPU, "off_cpu")]
)
def test_a_view_restricts_the_samples_and_chooses_the_default(view: View, default: str) -> None:
    profile = small_profile()
    decoded = _decoded(profile, view=view)
    counted = profile.samples[view.selects(profile.samples["klass"])]
    assert decoded.default_type == default
    assert sum(s.values["wall/nanoseconds"] for s in decoded.samples) == int(counted["ns"].sum())
    assert len(decoded.samples) == len(counted)


def test_values_of_samples_and_waits_stand_in_their_own_columns() -> None:
    stack = "main;[k]futex_wait"
    decoded = _decoded(
        profile_of(Sample(stack, 20, count=2), Sample(stack, 9, SampleClass.BLOCKED, count=3))
    )
    assert decoded.sample_types == [
        "samples/count",
        "on_cpu/nanoseconds",
        "waits/count",
        "off_cpu/nanoseconds",
        "wall/nanoseconds",
    ]
    assert [list(s.values.values()) for s in decoded.samples] == [
        [2, 20, 0, 0, 20],
        [0, 0, 3, 9, 9],
    ]


def test_labels() -> None:
    inside = replace(PROCESSES[0], container_id="c" * 64)
    decoded = _decoded(
        profile_of(
            Sample("main;[k]futex_wait", 1, SampleClass.BLOCKED, thread=1),
            Sample("main", 1, SampleClass.PREEMPTED, thread=2),
            processes=(inside, PROCESSES[1]),
        )
    )
    assert [s.labels for s in decoded.samples] == [
        {
            "thread": "worker",
            "tid": 101,
            "process": "server",
            "pid": 100,
            "container": "c" * 64,
            "off_cpu_class": "blocked",
            "off_cpu_cause": "lock",
        },
        {
            "thread": "client",
            "tid": 200,
            "process": "client",
            "pid": 200,
            "off_cpu_class": "preempted",
        },
    ]


def test_inlined_functions_share_their_location() -> None:
    # GIVEN outer() with middle() and inner() inlined into it, called by main() at another address
    profile = profile_of(Sample("main:1;outer:2;middle:3;inner:4", 10))
    frames = np.array(
        [(0, 1, 0x10, False), (1, 2, 0x20, False), (2, 3, 0x20, True), (3, 4, 0x20, True)],
        dtype=FRAME_DTYPE,
    )
    # WHEN written
    (sample,) = _decoded(replace(profile, frames=frames)).samples
    # THEN there are two locations, leaf first, and the function that holds the code comes last
    assert sample.addresses == [0x20, 0x10]
    assert sample.lines == [
        "inner src/inner.c:4 <- middle src/middle.c:3 <- outer src/outer.c:2",
        "main src/main.c:1",
    ]


def test_a_function_called_and_inlined_has_two_locations() -> None:
    profile = profile_of(Sample("main;work", 1), Sample("main;outer;work", 1))
    frames = profile.frames.copy()
    numbers = {f.name: i for i, f in enumerate(profile.functions)}
    frames = np.append(frames, frames[frames["function"] == numbers["work"]])
    frames[-1]["inlined"] = True
    stacks = profile.stacks.frames.copy()
    stacks[-1] = len(frames) - 1
    changed = replace(profile, frames=frames, stacks=replace(profile.stacks, frames=stacks))
    assert [s.lines for s in _decoded(changed).samples] == [
        ["work", "main"],
        ["work <- outer", "main"],
    ]


def test_a_cut_stack_says_so_at_its_root() -> None:
    (sample,) = _decoded(profile_of(Sample("work", 1, end=StopReason.TOO_DEEP))).samples
    assert sample.lines == ["work", "[truncated: too deep]"]


def test_a_stack_without_frames_keeps_its_time() -> None:
    (sample,) = _decoded(profile_of(Sample("", 5, end=StopReason.LOST))).samples
    assert sample.lines == ["[truncated: lost]"]
    assert sample.values["wall/nanoseconds"] == 5


def test_mappings_carry_build_ids_and_python_says_so() -> None:
    decoded = _decoded(profile_of(Sample("main;[p]train;[k]do_syscall_64", 1)))
    assert decoded.samples[0].mappings == ["[kernel.kallsyms]", "[python]", "/opt/server"]
    assert decoded.build_ids == {
        "/opt/server": "ab" * 20,
        "[kernel.kallsyms]": "",
        "[python]": "",
    }


def test_the_highest_addresses() -> None:
    profile = profile_of(Sample("main;work", 1))
    profile.frames["address"] = [2**64 - 2, 0xFFFF_FFFF_8100_0000]
    assert _decoded(profile).samples[0].addresses == [0xFFFF_FFFF_8100_0000, 2**64 - 2]


def test_comments_hold_title_facts_and_losses() -> None:
    decoded = _decoded(small_profile(), title="Nightly")
    assert decoded.comments[0] == "Nightly"
    assert "host: testhost" in decoded.comments
    assert decoded.comments[-1].startswith("lost: stacks_full 3: ")


def test_nothing_recorded() -> None:
    decoded = _decoded(empty_profile())
    assert decoded.samples == []
    assert decoded.period == ("on_cpu/nanoseconds", 10 * MS)


def test_hostile_names() -> None:
    profile = hostile_profile()
    hostile = (Binary("\ud800/x\ny", "\udcff"), Binary("", ""))
    decoded = _decoded(replace(profile, binaries=hostile))
    assert len(decoded.samples) == len(HOSTILE_NAMES)
    names = [sample.lines[1] for sample in decoded.samples]
    assert "<script>alert(1)</script>" in names
    assert not any(char in name for name in names for char in "\n\r\x00\u202e")
    assert decoded.build_ids == {"\ufffd/x\ufffdy": "\ufffd"}


def test_deep_stack() -> None:
    (sample,) = _decoded(deep_profile()).samples
    assert (len(sample.lines), sample.lines[0], sample.lines[-1]) == (10_000, "f9999", "f0")


@pytest.mark.parametrize(
    ("value", "expected"),
    # The first two are the examples of protobuf's encoding guide.
    [(1, "01"), (150, "9601"), (0, "00"), (2**64 - 1, "ff" * 9 + "01"), (-1, "ff" * 9 + "01")],
)
def test_varint(value: int, expected: str) -> None:
    assert varint(value).hex() == expected


def test_fields() -> None:
    # From the same guide: field 1 = 150, and packed field 6 = 3, 270, 86942.
    assert varint_field(1, 150).hex() == "089601"
    assert packed(6, [3, 270, 86942]).hex() == "3206038e029ea705"
    assert varint_field(1, 0) == b""
    assert varint_field(1, 0, keep_zero=True).hex() == "0800"
