# SPDX-License-Identifier: Apache-2.0
"""Captures made of the windows of segments: of recordings that were killed, or that still run."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path

from aiflame.agent.capture.segment import BadSegment
from aiflame.agent.inspector.fork_server import ForkServer
from aiflame.agent.inspector.opener import Opener
from aiflame.agent.model.window import Window
from aiflame.agent.sinks.written import Naming, WrittenCapture
from aiflame.agent.symbolize.files import FoundFiles
from aiflame.agent.symbols.file_facts import facts_for_names
from aiflame.agent.symbols.service import SymbolService
from aiflame.agent.symbols.store import cache_dir


def capture_of_windows(
    path: Path,
    windows: Iterable[Window],
    facts: Mapping[str, str | int],
    *,
    with_names: bool = True,
    roots: Callable[[int], Iterable[str]] = lambda _: (),
    kept: Callable[[int], int | None] = lambda _: None,
) -> None:
    """Makes a capture of what a recording left that was killed, or has written so far.

    Args:
        path: Of the capture, where nothing is; in a folder that nobody else may write to.
        windows: Of the recording, or the newest of these.
        facts: Of the recording.
        with_names: Else stacks show modules and addresses.
        roots: As of `FoundFiles`.
        kept: As of `FoundFiles`.

    Raises:
        BadSegment: There is no window, or one that says what none can.
        AiflameError: The capture cannot be written.
    """
    if not with_names:
        _write(path, windows, facts)
        return
    with (
        SymbolService(cache_dir()) as service,
        closing(ForkServer()) as server,
        closing(facts_for_names(server)) as file_facts,
        closing(Opener()) as opener,
        closing(FoundFiles(file_facts, opener, roots, kept)) as files,
    ):
        _write(path, windows, facts, Naming(files, service, file_facts))


def _write(
    path: Path,
    windows: Iterable[Window],
    facts: Mapping[str, str | int],
    naming: Naming | None = None,
) -> None:
    if not isinstance(facts.get("started_unix_ns", 0), int):
        raise BadSegment("its header is damaged")
    left = iter(windows)
    first = next(left, None)
    if first is None:
        raise BadSegment("there is no window in it")
    with _damage(), closing(WrittenCapture(path, first.start_ns, facts, naming)) as capture:
        for window in itertools.chain((first,), left):
            capture.put(window)
        capture.finish()


@contextmanager
def _damage() -> Iterator[None]:
    """Says of what SQLite cannot store that it is damage: its integers have a sign."""
    try:
        yield
    except OverflowError as error:
        raise BadSegment(f"a window in it is damaged ({error})") from error
