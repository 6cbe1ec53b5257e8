# SPDX-License-Identifier: Apache-2.0
"""What a container calls its functions floods no back-end, and costs no other its stacks."""

from __future__ import annotations

import gzip
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from aiflame.agent.fleet.batches import batches_of
from aiflame.agent.fleet.encoding import Encoder, NamedStretch
from aiflame.agent.model.batch import Labels
from aiflame.agent.model.profile import SPAN_DTYPE, Profile, SampleClass, StopReason
from aiflame.agent.reports.kernel_names import kernel_names
from aiflame.agent.sinks import clickhouse, otlp, pyroscope
from aiflame.agent.sinks.name_limits import MAX_NAME_BYTES, limited
from aiflame.agent.sinks.requests import RequestSink
from bench.large import write_capture
from device_profiles import Launch, Ran, device_profile_of, small_device_profile
from profiles import MS, Sample, profile_of, small_profile

_HOSTILE, _OTHER = Labels(service="hostile"), Labels(service="web")
_LABELS = [_HOSTILE, _OTHER]
_URL = "http://127.0.0.1:1"


def _flood(names: int, characters: int = 1000) -> Profile:
    """Returns a profile with one process that makes up names, and one that does not."""
    hostile = (
        Sample(f"main;{number:0{characters}x}", 10 * MS, thread=0) for number in range(names)
    )
    innocent = (Sample(f"main;work_{number}", 10 * MS, thread=2) for number in range(300))
    whole = profile_of(
        Sample("main;hot", 900 * MS, thread=0, count=90),
        *hostile,
        *innocent,
        Sample("main;poll", 700 * MS, SampleClass.BLOCKED, thread=2),
    )
    assert [thread.process for thread in whole.threads] == [0, 0, 1]
    return whole


def _shown(profile: Profile) -> Counter[tuple[str, ...]]:
    """Returns the time of each stack, by the names of its frames and how it ends."""
    found: Counter[tuple[str, ...]] = Counter()
    stacks, functions = profile.stacks, profile.frames["function"].tolist()
    for row in profile.samples:
        begin, end = stacks.offsets[row["stack"] : row["stack"] + 2].tolist()
        frames = stacks.frames[begin:end].tolist()
        names = [profile.functions[functions[frame]].name for frame in frames]
        end_name = StopReason(stacks.ends[row["stack"]]).name
        found[(*names, end_name)] += int(row["ns"])
    return found


def _sinks() -> dict[str, RequestSink]:
    return {
        "otlp": otlp.make(otlp.Settings(url=_URL), "n"),
        "pyroscope": pyroscope.make(pyroscope.Settings(url=_URL), "n"),
        "clickhouse": clickhouse.make(clickhouse.Settings(url=_URL), "n"),
    }


def test_who_makes_up_names_loses_stacks_and_nobody_else_does() -> None:
    whole = _flood(5000)
    before = [*batches_of(whole, _LABELS)]
    # WHEN names of one container take 5 MB
    after, lost = limited(before)
    # THEN another's stacks are all as they were
    assert [batch.labels for batch in after] == _LABELS
    assert _shown(after[1].profile) == _shown(before[1].profile)
    assert after[1].profile.stacks is before[1].profile.stacks
    # AND the first one's heaviest stack has its names, as have others up to the limit
    had, has = _shown(before[0].profile), _shown(after[0].profile)
    assert has["main", "hot", "ROOTED"] == 900 * MS
    named = {stack for stack in has if len(stack) > 1}
    assert 2000 < len(named) < 2200 and named < {*had}
    # AND the time of what is left is there, all in one stack without frames, and counted
    assert has.total() == had.total()
    assert {*has} - named == {("LOST",)}
    assert lost == 5001 - len(named)
    for batch in after:
        assert {loss.name: loss.count for loss in batch.profile.losses} == {"names_not_sent": lost}


@pytest.mark.parametrize("name", _sinks())
def test_what_is_sent_is_bounded_and_whole(name: str) -> None:
    whole = _flood(20_000)
    sink = _sinks()[name]
    requests = [*sink.encode(limited(batches_of(whole, _LABELS))[0])]
    assert sum(request.samples for request in requests) == whole.samples["count"].sum()
    sizes = [len(_content(request.body)) for request in requests]
    # Rows of a store have the names of a stack twice, in JSON.
    assert sum(sizes) < 5 * MAX_NAME_BYTES


def _content(body: bytes) -> bytes:
    at = body.find(b"\x1f\x8b")  # where what is compressed begins
    try:
        return gzip.decompress(body[at:])
    except (OSError, EOFError):  # several, each in a message
        return body


@pytest.mark.parametrize("profile", [small_profile(), small_device_profile()])
def test_names_below_the_limit_are_all_sent(profile: Profile) -> None:
    batches = [*batches_of(profile, [_OTHER] * len(profile.processes))]
    found, lost = limited(batches)
    assert lost == 0 and all(a is b for a, b in zip(found, batches, strict=True))


def test_equal_texts_count_once() -> None:
    file = "f" * 2000
    samples = (
        Sample(f"[p]main;[p]work_{number}@{file}:1", 10 * MS, thread=2) for number in range(3000)
    )
    batches = [*batches_of(profile_of(*samples), _LABELS)]
    assert limited(batches)[1] == 0


def test_kernels_count_as_programmers_write_them() -> None:
    # GIVEN short names that stand for long ones
    names = [f"_Z{len(f'k{n}')}k{n}{'Ss' * 40}" for n in range(2000)]
    profile = device_profile_of([Launch("main;launch", name, 1) for name in names], [], {})
    ((batch,), lost) = limited(batches_of(profile, [_HOSTILE] * len(profile.processes)))
    assert 0 < lost < 2000
    assert sum(len(one.whole) for one in kernel_names(batch.profile.gpu.kernels)) < MAX_NAME_BYTES


def test_texts_count_where_they_are_sent() -> None:
    # GIVEN light functions that are listed first, and heavy ones, each two with a file of their own
    names = [f"{number:04}" for number in range(1000)]
    light = [Sample(f"[p]a{n}@{n * 900}:1", MS, thread=2) for n in names]
    heavy = [Sample(f"[p]b{n}@{n * 900}:1", 10 * MS, thread=2) for n in names]
    ((batch,), lost) = limited(batches_of(profile_of(*light, *heavy), _LABELS))
    # THEN what is kept has files of 2 MB, and not of all 4
    kept = {batch.profile.functions[n].file for n in _used(batch.profile)}
    assert 400 < len(kept) < 600 and lost == 2000 - len(_used(batch.profile))


def _used(profile: Profile) -> list[int]:
    return np.unique(profile.frames["function"][profile.stacks.frames]).tolist()


def test_stacks_of_launches_keep_their_names_before_others() -> None:
    profile = small_device_profile()
    (batch,) = batches_of(profile, [_OTHER] * len(profile.processes))
    launched = {*profile.gpu.launches["stack"].tolist(), *profile.gpu.calls["stack"].tolist()}
    counts = set()
    for most in range(0, 2000, 10):
        ((some,), _) = limited([batch], most)
        depths = np.diff(some.profile.stacks.offsets.astype(np.int64)).tolist()
        is_named = {stack for stack, depth in enumerate(depths) if depth}
        assert is_named <= launched or is_named >= launched
        counts.add(len(is_named))
    assert len(counts) > 2
    # AND without any room all time is there
    ((bare,), lost) = limited([batch], 0)
    named = [kernel for kernel in batch.profile.gpu.kernels if kernel.name]
    assert not len(bare.profile.stacks.frames) and lost == len(profile.stacks) + len(named)
    assert bare.profile.samples is batch.profile.samples


def test_kernels_that_did_most_keep_their_names() -> None:
    # GIVEN a container that makes up names of GPU kernels, and uses one of them
    names = [f"{number:01000x}" for number in range(5000)]
    launches = [Launch("main;launch", name, 1000 if name == names[-1] else 1) for name in names]
    profile = device_profile_of(launches, [Ran(names[7], 0, 90, "selected")], {})
    batches = [*batches_of(profile, [_HOSTILE] * len(profile.processes))]
    ((batch,), lost) = limited(batches)
    # THEN half of the room is for these, those that are used most have it, and the stack its own
    kept = [kernel.name for kernel in batch.profile.gpu.kernels if kernel.name]
    assert 1000 < len(kept) < 1100 and {names[7], names[-1]} <= {*kept}
    assert lost == len(profile.gpu.kernels) - len(kept)
    assert np.diff(batch.profile.stacks.offsets.astype(np.int64)).tolist() == [2]
    # AND all launches and samples are sent.
    for sink in _sinks().values():
        assert sum(len(_content(one.body)) for one in sink.encode([batch])) < 5 * MAX_NAME_BYTES
    assert batch.profile.gpu.launches is batches[0].profile.gpu.launches


@pytest.mark.parametrize("text", ["\udc80", "\U0001f525", "\x1b[31m"])
def test_names_of_any_kind_are_bounded(text: str) -> None:
    samples = (Sample("", 10 * MS, frames=(f"{text * 300}{number}",)) for number in range(5000))
    ((batch,), lost) = limited(batches_of(profile_of(*samples), _LABELS))
    assert lost > 0
    (sink, *_) = _sinks().values()
    assert sum(len(_content(request.body)) for request in sink.encode([batch])) < 4 << 20


def test_a_flood_is_told_of_a_stretch(tmp_path: Path) -> None:
    whole = _flood(5000)
    spans = np.zeros(len(whole.samples), SPAN_DTYPE)
    spans["sample"], spans["seconds"] = np.arange(len(spans)), 1
    spans["count"], spans["ns"] = whole.samples["count"], whole.samples["ns"]
    write_capture(replace(whole, spans=spans), tmp_path / "stretch.aiflame")
    with Encoder(NamedStretch(tmp_path / "stretch.aiflame", _LABELS, "n"), _sinks()) as encoder:
        summary = encoder.summary()
        requests = [request for name in _sinks() for request in encoder.requests(name)]
    assert summary.losses == {"names_not_sent": limited(batches_of(whole, _LABELS))[1]}
    assert sum(request.samples for request in requests) == 3 * summary.to_send
