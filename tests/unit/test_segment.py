# SPDX-License-Identifier: Apache-2.0
"""Segments give back what was written, and all that is whole of what was cut or damaged."""

from __future__ import annotations

import dataclasses
import io
import os
import resource
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
from aiflame.agent.capture import segment
from aiflame.agent.capture.segment import BadSegment, SegmentReader, SegmentWriter
from aiflame.agent.model.window import COLUMNS, NONE, Window, check
from hypothesis import given, settings
from hypothesis import strategies as st
from windows import RandomRecording, same_windows


def _written(folder: Path, windows: list[Window]) -> tuple[bytes, list[int]]:
    """Returns a segment, and where each of its windows ends."""
    path = folder / "segment"
    path.unlink(missing_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        writer = SegmentWriter(fd)
        ends = [writer.size_bytes]
        for window in windows:
            writer.write(window)
            ends.append(writer.size_bytes)
    finally:
        os.close(fd)
    return path.read_bytes(), ends


def _read(data: bytes) -> tuple[list[Window], str]:
    reader = SegmentReader(io.BytesIO(data))
    return list(reader), reader.damage


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), count=st.integers(0, 6))
def test_a_segment_gives_back_its_windows(
    seed: int, count: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    windows = RandomRecording(seed).windows(count)
    data, _ = _written(tmp_path_factory.mktemp("segment"), windows)
    found, damage = _read(data)
    assert not damage
    assert len(found) == count
    for window, written in zip(found, windows, strict=True):
        check(window)
        same_windows(window, written)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), data=st.data())
def test_a_segment_cut_at_any_byte_gives_the_windows_before(
    seed: int, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    windows = RandomRecording(seed).windows(4)
    whole, ends = _written(tmp_path_factory.mktemp("segment"), windows)
    size_bytes = data.draw(st.integers(0, len(whole)))
    found, damage = _read(whole[:size_bytes])
    assert len(found) == max(sum(end <= size_bytes for end in ends) - 1, 0)
    assert bool(damage) == (size_bytes not in ends)
    for window, written in zip(found, windows, strict=False):
        same_windows(window, written)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), data=st.data())
def test_a_damaged_byte_costs_nothing_before_it(
    seed: int, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    windows = RandomRecording(seed).windows(3)
    whole, ends = _written(tmp_path_factory.mktemp("segment"), windows)
    at = data.draw(st.integers(ends[0], len(whole) - 1))
    broken = bytearray(whole)
    broken[at] ^= data.draw(st.integers(1, 255))
    found, damage = _read(bytes(broken))
    assert len(found) == sum(end <= at for end in ends) - 1
    assert damage


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 20), data=st.data())
def test_a_forged_window_is_refused_or_sound(
    seed: int, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    # GIVEN a segment whose checksums were made to fit what was changed in it
    whole, ends = _written(tmp_path_factory.mktemp("segment"), RandomRecording(seed).windows(1))
    body = bytearray(zlib.decompress(whole[ends[0] + 8 :]))
    if data.draw(st.booleans()):
        del body[data.draw(st.integers(0, len(body))) :]
        body += b"[" * data.draw(st.sampled_from((1, 4, 100_000)))
    for _ in range(data.draw(st.integers(1, 8))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    payload = zlib.compress(bytes(body))
    forged = whole[: ends[0]] + segment._FRAME.pack(len(payload), zlib.crc32(payload)) + payload
    found, damage = _read(forged)
    assert len(found) == 1 or damage
    for window in found:
        check(window)


def test_a_forged_window_takes_no_more_memory_than_a_large_one() -> None:
    # GIVEN 100 MB of zeros as a window's content, and a frame that claims 4 GB
    bomb = zlib.compress(bytes(100_000_000), 9)
    header = segment._header() + segment._FRAME.pack(2, zlib.crc32(b"{}")) + b"{}"
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began_s = time.process_time()
    for data in (
        segment._FRAME.pack(len(bomb), zlib.crc32(bomb)) + bomb,
        segment._FRAME.pack(0xFFFF_FFFF, 0) + bytes(1000),
    ):
        found, damage = _read(header + data)
        assert not found
        assert damage
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000  # KB
    assert time.process_time() - began_s < 2


def test_a_segment_says_what_it_is_of(tmp_path: Path) -> None:
    path = tmp_path / "segment"
    with path.open("wb", buffering=0) as file:
        SegmentWriter(file.fileno(), {"command": "aiflame record \udcff", "period_ns": 7})
    reader = SegmentReader(io.BytesIO(path.read_bytes()))
    assert reader.facts == {"command": "aiflame record \udcff", "period_ns": 7}
    assert list(reader) == []
    assert not reader.damage


def test_what_is_no_segment_is_refused() -> None:
    with pytest.raises(BadSegment, match="no segment"):
        SegmentReader(io.BytesIO(b"SQLite format 3\0"))
    other = bytearray(segment._header())
    other[-1] ^= 1
    with pytest.raises(BadSegment, match="another version"):
        SegmentReader(io.BytesIO(bytes(other)))


def test_what_windows_share_is_written_once(tmp_path: Path) -> None:
    # GIVEN one recording in which nothing new comes after the first window
    windows = RandomRecording(7).repeated(50)
    _, ends = _written(tmp_path, windows)
    first, later = ends[1] - ends[0], (ends[-1] - ends[1]) / 49
    assert later < first / 2


def test_a_full_disk_leaves_whole_windows(tmp_path: Path) -> None:
    windows = RandomRecording(3).windows(30)
    whole, ends = _written(tmp_path, windows)
    path = tmp_path / "limited"
    child = os.fork()
    if child == 0:  # the limit holds for all files of a process
        limit = (ends[10] + ends[11]) // 2
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        import signal

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        writer = SegmentWriter(os.open(path, os.O_WRONLY | os.O_CREAT))
        try:
            for window in windows:
                writer.write(window)
        except OSError:
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert path.read_bytes() == whole[: ends[10]]


def test_every_column_is_in_the_random_recordings() -> None:
    seen = set()
    for seed in range(20):
        for window in RandomRecording(seed).windows(3):
            seen |= {name for name in COLUMNS if len(window.rows(name))}
    assert seen == set(COLUMNS)
    assert np.dtype("<u4") in {COLUMNS["threads"].dtype[name] for name in ("thread", "name")}


def _limit(monkeypatch: pytest.MonkeyPatch, size_bytes: int) -> None:
    monkeypatch.setattr(segment, "_MAX_WINDOW_BYTES", size_bytes + 4096)
    monkeypatch.setattr(segment, "_MOST_WRITTEN_BYTES", size_bytes)


def _losses(window: Window) -> dict[str, int]:
    rows = window.losses[["name", "count"]].tolist()
    return {window.texts[name]: count for name, count in rows}


def test_a_process_that_maps_too_much_costs_only_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # GIVEN windows that a reader takes, and in the second more mappings of one process than it does
    first, second, third = RandomRecording(7).windows(3)
    process = int(second.processes["process"][0])
    many = np.zeros(5000, COLUMNS["mappings"].dtype)
    many["process"], many["start"], many["binary"] = process, np.arange(5000), NONE
    others = second.mappings[second.mappings["process"] != process]
    grown = dataclasses.replace(second, mappings=np.concatenate([others, many]))
    check(grown)
    _limit(monkeypatch, 60_000)
    # WHEN they are written THEN all are read again
    data, _ = _written(tmp_path, [first, grown, third])
    found, damage = _read(data)
    assert not damage
    assert len(found) == 3
    same_windows(found[0], first)
    same_windows(found[2], third)
    # AND nothing but what is known of that process is missing, which is counted
    check(found[1])
    assert sorted(found[1].mappings["process"]) == sorted(others["process"])
    assert found[1].samples["weight_ns"].sum() == second.samples["weight_ns"].sum()
    assert len(found[1].stacks) == len(second.stacks)
    assert _losses(found[1])["window_too_large"] >= len(many)


def test_of_a_window_that_cannot_be_reduced_its_loss_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    windows = RandomRecording(7).windows(3)
    _limit(monkeypatch, 100)
    data, _ = _written(tmp_path, windows)
    found, damage = _read(data)
    assert not damage
    for window, written in zip(found, windows, strict=True):
        check(window)
        assert (window.number, window.end_ns) == (written.number, written.end_ns)
        assert _losses(window) == {**_losses(written), "window_too_large": 1}
        lost_ns = window.losses["thread_ns"].sum() - written.losses["thread_ns"].sum()
        assert lost_ns == written.samples["weight_ns"].sum()


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_columns_by_themselves_are_those_of_whole_windows(
    seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    windows = RandomRecording(seed).windows(4)
    data, _ = _written(tmp_path_factory.mktemp("segment"), windows)
    found = [*SegmentReader(io.BytesIO(data), ("cgroups",))]
    for window, written in zip(found, windows, strict=True):
        assert (window.number, window.end_ns) == (written.number, written.end_ns)
        paths = [[each.texts[at] for at in each.cgroups["path"]] for each in (window, written)]
        assert sorted(paths[0]) == sorted(paths[1])
        assert window.cgroups["kernel_id"].tolist() == written.cgroups["kernel_id"].tolist()
        assert not len(window.processes) and not len(window.stacks)
