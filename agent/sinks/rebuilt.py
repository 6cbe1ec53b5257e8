# SPDX-License-Identifier: Apache-2.0
"""Captures made of the windows of segments: of recordings that were killed, or that still run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Protocol

from aiflame.agent.capture.schema import SYMBOLS_FACT
from aiflame.agent.capture.segment import BadSegment
from aiflame.agent.capture.writer import CaptureWriter
from aiflame.agent.losses import LossKind
from aiflame.agent.model.window import Window
from aiflame.agent.sinks.capture import CaptureSink

_KINDS = {kind.stored_name: kind for kind in LossKind}


class Namer(Protocol):
    """Gives the stacks of a capture their names."""

    def put(self, window: Window) -> None:
        """Takes each window in, before the capture is named."""

    def name(self, writer: CaptureWriter, sink: CaptureSink) -> Counter[str]:
        """Names the stacks; returns what could not be named, by the name of the loss."""


def capture_of_windows(
    path: Path,
    windows: Iterable[Window],
    facts: Mapping[str, str | int],
    namer: Namer | None = None,
) -> None:
    """Makes a capture of what a recording left that was killed, or has written so far.

    Args:
        path: Of the capture, where nothing is; in a folder that nobody else may write to.
        windows: Of the recording, or the newest of these.
        facts: Of the recording.
        namer: Without one stacks show modules and addresses.

    Raises:
        BadSegment: There is no window.
        AiflameError: The capture cannot be written.
    """
    writer = CaptureWriter(path)
    try:
        sink = None
        for window in windows:
            if sink is None:
                sink = CaptureSink(writer, window.start_ns)
                began_ns = int(facts.get("started_unix_ns", 0)) + window.start_ns
                writer.put_meta({**facts, "started_unix_ns": began_ns})
            sink.put(window)
            if namer is not None:
                namer.put(window)
        if sink is None:
            raise BadSegment("there is no window in it")
        sink.finish()
        writer.put_meta({"duration_ns": sink.end_ns})
        writer.commit()
        losses = sink.losses
        if namer is not None:
            losses = losses + namer.name(writer, sink)
            writer.drop_meta(SYMBOLS_FACT)
        writer.put("losses", _loss_rows(losses))
        writer.commit()
    finally:
        writer.close()


def _loss_rows(losses: Mapping[str, int]) -> Iterator[tuple[str, int, str]]:
    for name, count in losses.items():
        kind = _KINDS.get(name)
        words = "" if kind is None else "; ".join(filter(None, (kind.meaning, kind.cure)))
        if count:
            yield name, count, words
