# SPDX-License-Identifier: Apache-2.0
"""Captures made of the windows of segments: of recordings that were killed, or that still run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import closing
from pathlib import Path

from aiflame.agent.capture.segment import BadSegment
from aiflame.agent.model.window import Window
from aiflame.agent.sinks.written import Naming, WrittenCapture
from aiflame.agent.symbolize.files import FoundFiles
from aiflame.agent.symbols.service import SymbolService
from aiflame.agent.symbols.store import cache_dir


def capture_of_windows(
    path: Path,
    windows: Iterable[Window],
    facts: Mapping[str, str | int],
    *,
    with_names: bool = True,
) -> None:
    """Makes a capture of what a recording left that was killed, or has written so far.

    Args:
        path: Of the capture, where nothing is; in a folder that nobody else may write to.
        windows: Of the recording, or the newest of these.
        facts: Of the recording.
        with_names: Else stacks show modules and addresses.

    Raises:
        BadSegment: There is no window, or one that says what none can.
        AiflameError: The capture cannot be written.
    """
    if not with_names:
        _write(WrittenCapture(path), windows, facts)
        return
    with SymbolService(cache_dir()) as service, closing(FoundFiles()) as files:
        _write(WrittenCapture(path, Naming(files, service)), windows, facts)


def _write(
    capture: WrittenCapture, windows: Iterable[Window], facts: Mapping[str, str | int]
) -> None:
    with closing(capture):
        if not isinstance(facts.get("started_unix_ns", 0), int):
            raise BadSegment("its header is damaged")
        count = 0
        for window in windows:
            try:
                capture.put(window, facts)
            except OverflowError as error:  # SQLite's integers have a sign
                raise BadSegment(f"a window in it is damaged ({error})") from error
            count += 1
        if not count:
            raise BadSegment("there is no window in it")
        capture.finish()
