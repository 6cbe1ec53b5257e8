# SPDX-License-Identifier: Apache-2.0
"""Names of generated code, kept beside the segments of a recording.

Perf maps are read while a recording goes on, by the process that writes its capture. Where the
capture is made once more (of a recording that was killed), the targets and their maps may be gone:
so what was found is kept, as windows that have jit_symbols alone, under the numbers of the windows
that they belong to. One name for each address of a stack, never a whole map.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
from aiflame.agent.losses import LossKind
from aiflame.agent.model.window import COLUMNS, NONE, Window, added_up, rows_of, with_texts

# Of one window: a busy second of a large JVM brings some thousands. A name has at most 4 KB.
_MOST_SYMBOLS = 1 << 14


def jit_window(window: Window, symbols: Mapping[tuple[int, int], str]) -> Window:
    """Returns a window of names alone.

    Args:
        window: Whose stacks they are in.
        symbols: By process and address.
    """
    texts = {"": 0}
    kept = [*symbols.items()][:_MOST_SYMBOLS]
    rows = [
        (process, address, texts.setdefault(name, len(texts))) for (process, address), name in kept
    ]
    jit_symbols = rows_of("jit_symbols", *rows)
    processes = window.processes[np.isin(window.processes["process"], jit_symbols["process"])]
    processes["cgroup"] = NONE
    processes[[*COLUMNS["processes"].texts]] = 0
    columns = {"jit_symbols": jit_symbols, "processes": processes}
    if len(kept) < len(symbols):
        lost = texts.setdefault(LossKind.JIT_SYMBOLS_FULL.stored_name, len(texts))
        columns["losses"] = rows_of("losses", (lost, len(symbols) - len(kept), 0))
    bounds = (window.number, window.start_ns, window.end_ns)
    return Window.of(*bounds, columns, texts=tuple(texts))


def with_jit_symbols(windows: Iterator[Window], found: Iterator[Window]) -> Iterator[Window]:
    """Yields the windows of a recording with the names that were kept of each.

    Args:
        windows: Of the recording.
        found: What `jit_window` made of some of them.
    """
    names = next(found, None)
    for window in windows:
        while names is not None and names.number < window.number:
            names = next(found, None)
        if names is None or names.number != window.number:
            yield window
        else:
            yield _joined(window, names)


def _joined(window: Window, names: Window) -> Window:
    translation = np.arange(len(names.texts), dtype=np.uint32) + len(window.texts)
    found = names.jit_symbols[np.isin(names.jit_symbols["process"], window.processes["process"])]
    texts = (*window.texts, *names.texts)
    losses = with_texts(names.losses, COLUMNS["losses"], translation)
    return replace(
        window,
        texts=texts,
        jit_symbols=with_texts(found, COLUMNS["jit_symbols"], translation),
        losses=added_up(np.concatenate([window.losses, losses]), COLUMNS["losses"]),
    )
