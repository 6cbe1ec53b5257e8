# SPDX-License-Identifier: Apache-2.0
"""Captures made of segments: of recordings that were killed, or that still run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from aiflame.agent.capture.segment import BadSegment
from aiflame.agent.capture.writer import CaptureWriter
from aiflame.agent.losses import LossKind
from aiflame.agent.model.window import Window
from aiflame.agent.sinks.capture import CaptureSink
from aiflame.agent.sinks.segments import RecordedWindows

_KINDS = {kind.stored_name: kind for kind in LossKind}


def capture_of_windows(path: Path, windows: RecordedWindows) -> None:
    """Makes a capture of what a recording left that was killed; without symbols.

    Args:
        path: Of the capture, where nothing is; in a folder that nobody else may write to.
        windows: Of the recording.

    Raises:
        BadSegment: There is no window.
        AiflameError: The capture cannot be written.
    """
    writer = CaptureWriter(path)
    try:
        sink = _filled(writer, windows)
        if sink is None:
            raise BadSegment("there is no window in it")
        writer.put("losses", _loss_rows(sink.losses))
        writer.commit()
    finally:
        writer.close()


def _filled(writer: CaptureWriter, windows: RecordedWindows) -> CaptureSink | None:
    iterator = iter(windows)
    first = next(iterator, None)
    if first is None:
        return None
    sink = CaptureSink(writer, first.start_ns)
    for window in _all(first, iterator):
        sink.put(window)
    sink.finish()
    facts = dict(windows.facts)
    facts["started_unix_ns"] = int(facts.get("started_unix_ns", 0)) + first.start_ns
    writer.put_meta({**facts, "duration_ns": sink.end_ns})
    return sink


def _all(first: Window, others: Iterator[Window]) -> Iterable[Window]:
    yield first
    yield from others


def _loss_rows(losses: Mapping[str, int]) -> Iterator[tuple[str, int, str]]:
    for name, count in losses.items():
        kind = _KINDS.get(name)
        words = "" if kind is None else "; ".join(filter(None, (kind.meaning, kind.cure)))
        if count:
            yield name, count, words
