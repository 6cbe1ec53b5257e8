# SPDX-License-Identifier: Apache-2.0
"""What batches become in a store: ids of stacks, rows that add up, names of any kind."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from aiflame.agent.model.batch import Batch, Labels
from aiflame.agent.model.profile import (
    NS_PER_S,
    Binary,
    GilState,
    Profile,
    SampleClass,
    StopReason,
)
from aiflame.agent.store import inserts
from aiflame.agent.store.inserts import inserts_of
from aiflame.agent.store.rows import BatchRows, agent_rows, batch_rows, json_lines, monday
from aiflame.agent.store.schema import Rows
from device_profiles import hostile_device_profile, small_device_profile, small_timed_profile
from profiles import (
    HOSTILE_NAMES,
    MS,
    Sample,
    deep_profile,
    hostile_profile,
    large_profile,
    profile_of,
    python_profile,
    small_profile,
    timed_profile,
)

_MONDAY_S = 1_795_392_000  # 2026-11-23T00:00:00Z


def _batch(profile: Profile, **labels: object) -> Batch:
    recording = profile.recording
    own = Labels(**{"service": "train", **labels})  # type: ignore[arg-type]
    return Batch(own, profile, recording.started_unix_ns, recording.duration_ns)


def _ids(profile: Profile) -> dict[str, int]:
    """The ids of stacks by their frames, root first."""
    found = batch_rows(_batch(profile))
    return {";".join(row["frames"][::-1]): key for key, row in found.stacks.items()}


def test_a_stack_has_the_same_id_on_every_host() -> None:
    # GIVEN the same stacks, in recordings that number them and their functions otherwise
    one = _ids(profile_of(Sample("main:1;work;leaf", MS), Sample("main:1;idle", MS)))
    other = _ids(
        profile_of(
            Sample("first", MS), Sample("main:1;idle", MS), Sample("main:1;work;leaf", 9 * MS)
        )
    )
    # THEN their ids are the same
    assert one.items() <= other.items()
    assert len(set(other.values())) == 3


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Sample("main;work", MS), Sample("main;[k]work", MS)),
        (Sample("main:1;work", MS), Sample("main:2;work", MS)),
        (Sample("[p]step@/a.py:1", MS), Sample("[p]step@/b.py:1", MS)),
        (Sample("main", MS), Sample("main", MS, end=StopReason.TOO_DEEP)),
        (Sample("main", MS), Sample("main", MS, gil=GilState.WAITING)),
        (Sample("", MS, frames=("ab", "c")), Sample("", MS, frames=("a", "bc"))),
        (Sample("", MS, frames=("a\0b",)), Sample("", MS, frames=("a", "b"))),
        (Sample("", MS, frames=("a", "a")), Sample("", MS, frames=("a",))),
    ],
)
def test_what_differs_has_another_id(one: Sample, other: Sample) -> None:
    keys = {key for sample in (one, other) for key in batch_rows(_batch(profile_of(sample))).stacks}
    assert len(keys) == 2


def test_a_build_is_the_same_wherever_it_lies() -> None:
    # GIVEN two hosts that have one build under two paths, and a third with another build there
    profile = profile_of(Sample("main;work", MS))

    def id_with(path: str, build_id: str) -> int:
        binaries = (Binary(path, build_id), *profile.binaries[1:])
        (key,) = batch_rows(_batch(replace(profile, binaries=binaries))).stacks
        return key

    assert id_with("/opt/a", "ab") == id_with("/usr/b", "ab")
    assert id_with("/opt/a", "ab") != id_with("/opt/a", "cd")
    assert id_with("/opt/a", "") != id_with("/usr/b", "")


_PROFILES = [
    small_profile,
    python_profile,
    timed_profile,
    hostile_profile,
    small_timed_profile,
    hostile_device_profile,
    lambda: large_profile(stacks=300, depth=8, samples=5_000),
]


def _of_class(rows: BatchRows, klass: SampleClass, column: str) -> int:
    return sum(row[column] for row in rows.samples if row["class"] == klass.name.lower())


@pytest.mark.parametrize("make", _PROFILES)
@pytest.mark.parametrize("step_s", [None, 1, 10, 7_000])
def test_rows_add_up_to_the_profile(make, step_s: int | None) -> None:
    # GIVEN a profile WHEN it is turned into rows, of parts of it or of all
    profile = make()
    rows = batch_rows(_batch(profile), step_s=step_s)
    # THEN nothing is lost and nothing added, in any class
    for klass in SampleClass:
        own = profile.samples[profile.samples["klass"] == klass]
        assert _of_class(rows, klass, "value") == int(own["ns"].sum())
        assert _of_class(rows, klass, "events") == int(own["count"].sum())
    assert sum(row["samples"] for row in rows.gpu) == int(profile.gpu.samples["count"].sum())
    assert sum(row["busy_ns"] for row in rows.gpu) == int(profile.gpu.times["duration_ns"].sum())
    assert sum(row["runs"] for row in rows.gpu) == int(profile.gpu.times["count"].sum())
    mentioned = {row["stack_id"] for row in rows.samples}
    mentioned |= {row["launch_stack"] for row in rows.gpu} - {0}
    assert mentioned == rows.stacks.keys()


def test_time_is_in_the_rows_of_when_it_was() -> None:
    # GIVEN 5.5 seconds: busy in the first, asleep in the next three, busy at the end
    rows = batch_rows(_batch(timed_profile()), step_s=2).samples
    begin = min(row["t"] for row in rows)
    sums: Counter[tuple[int, str]] = Counter()
    for row in rows:
        assert row["span_s"] == 2
        sums[row["t"] - begin, row["class"]] += row["value"]
    assert sums == {
        (0, "on_cpu"): 700 * MS,
        (0, "blocked"): 1_000 * MS,
        (2, "blocked"): 2_000 * MS,
        (4, "waiting_to_run"): 20 * MS,
        (4, "on_cpu"): 700 * MS,
    }


def test_device_rows_say_what_launched_it_and_why_it_waited() -> None:
    rows = batch_rows(_batch(small_device_profile()))
    # THEN launches and samples of the kernel of two lines are with each of them
    of_line = Counter()
    for row in rows.gpu:
        if row["kernel"] == "matmul":
            stack = rows.stacks[row["launch_stack"]]
            line = stack["lines"][stack["frames"].index("step")]
            of_line[line, row["reason"]] += row["samples"] + row["launches"]
    assert of_line[12, ""] == 30
    assert of_line[19, ""] == 10
    assert sum(n for (_, reason), n in of_line.items() if reason == "long_scoreboard") == 400
    # and an instruction that was issued did not stall
    stalled = {row["reason"]: row["stalled"] for row in rows.gpu if row["samples"]}
    assert stalled["selected"] == 0
    assert stalled["barrier"] > 0
    # and of a kernel that nobody launched the stack is unknown
    assert {row["launch_stack"] for row in rows.gpu if row["kernel"] == "ghost"} == {0}


def test_a_process_gives_its_name_where_no_service_is_known() -> None:
    unnamed = batch_rows(_batch(small_profile(), service=""))
    assert {row["service"] for row in unnamed.samples} == {"server", "client"}
    named = batch_rows(_batch(small_profile()))
    assert {row["service"] for row in named.samples} == {"train"}


def test_names_of_any_kind_are_one_line_of_json_each() -> None:
    # GIVEN names that break things, as functions, processes and labels, and very long ones
    huge = "x" * 100_000
    extra = tuple((name, huge) for name in HOSTILE_NAMES) * 10
    batch = _batch(hostile_profile(), pod=huge, container=HOSTILE_NAMES[6], extra=extra)
    rows = batch_rows(batch)
    # THEN each row is one line, which is JSON and UTF-8, and of bounded length
    data = json_lines([*rows.samples, *rows.stacks.values()])
    lines = data.decode("utf-8").split("\n")
    assert lines.pop() == ""
    assert len(lines) == len(rows.samples) + len(rows.stacks)
    assert max(len(json.dumps(json.loads(line))) for line in lines) < 40_000


def test_a_week_begins_on_monday() -> None:
    assert monday(_MONDAY_S) == monday(_MONDAY_S + 7 * 86_400 - 1) == "2026-11-23"
    assert monday(_MONDAY_S - 1) == "2026-11-16"


def test_inserts_are_the_same_for_the_same_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inserts, "MAX_PIECE_BYTES", 1 << 19)
    # GIVEN a batch that needs several inserts
    batches = [_batch(deep_profile()), _batch(large_profile(2_000, 40, 20_000), pod="b")]
    pieces = [[*inserts_of(batches, "", lambda _: True)] for _ in range(2)]
    # THEN they are bounded, have tokens of their own, the same each time, and stacks come first
    tokens = [piece.token for piece in pieces[0]]
    assert tokens == [piece.token for piece in pieces[1]]
    assert len(set(tokens)) == len(tokens) > 5
    assert max(len(piece.rows) for piece in pieces[0]) < 2 * inserts.MAX_PIECE_BYTES
    known: set[int] = set()
    for piece in pieces[0]:
        known.update(piece.stack_ids)
        if piece.table is Rows.SAMPLES:
            assert known >= {json.loads(line)["stack_id"] for line in piece.rows.splitlines()}
    events = sum(int(b.profile.samples["count"].sum()) for b in batches)
    assert sum(piece.samples for piece in pieces[0]) == events


def test_a_host_of_many_containers_makes_few_inserts() -> None:
    # GIVEN a stretch of 200 containers, each of which makes a part of a table where it is inserted
    batches = [_batch(small_profile(), pod=f"pod-{number}") for number in range(200)]
    pieces = [*inserts_of(batches, "", lambda _: True)]
    # THEN each table has one insert, with the rows of all
    assert [piece.table for piece in pieces] == [Rows.STACKS, Rows.SAMPLES, Rows.AGENTS]
    (samples,) = (piece for piece in pieces if piece.table is Rows.SAMPLES)
    assert len({json.loads(line)["pod"] for line in samples.rows.splitlines()}) == 200
    assert samples.samples == 200 * int(small_profile().samples["count"].sum())


def test_losses_of_a_host_are_told_once() -> None:
    # GIVEN two containers of a host, whose batches both tell what the host lost
    batches = [_batch(small_profile(), pod="a"), _batch(small_profile(), pod="b")]
    rows = [
        json.loads(line)
        for piece in inserts_of(batches, "prod", lambda _: True)
        if piece.table is Rows.AGENTS
        for line in piece.rows.splitlines()
    ]
    assert [(row["loss"], row["lost"]) for row in rows] == [("", 0), ("stacks_full", 3)]
    both = 2 * int(small_profile().samples["count"].sum())
    assert rows[0]["samples"] == both
    assert {row["cluster"] for row in rows} == {"prod"}


def test_spans_of_stretches_in_a_row_add_up() -> None:
    # GIVEN ten stretches of a bit more than five seconds, one after the other
    begin_ns, duration_ns = 1_795_000_000 * NS_PER_S + 300 * MS, 5_030 * MS
    batches = [
        replace(_batch(small_profile()), begin_unix_ns=begin_ns + i * duration_ns)
        for i in range(10)
    ]
    batches = [replace(batch, duration_ns=duration_ns) for batch in batches]
    rows = [agent_rows(batch, 0)[0] for batch in batches]
    # THEN each ends where the next one begins, and all of them have the time that it was
    assert [row["t"] + row["span_s"] for row in rows[:-1]] == [row["t"] for row in rows[1:]]
    assert sum(row["span_s"] for row in rows) == 50
    assert {row["span_s"] for row in batch_rows(batches[0]).samples} == {rows[0]["span_s"]}


def test_times_that_no_table_holds_are_its_ends() -> None:
    for begin in (-5, 10**30):
        batch = replace(_batch(small_profile()), begin_unix_ns=begin)
        rows = [*batch_rows(batch, step_s=1).samples, *agent_rows(batch, 0)]
        assert all(0 <= row["t"] < 2**32 for row in rows)
    assert np.iinfo(np.uint16).max >= max(row["span_s"] for row in rows)
