# SPDX-License-Identifier: Apache-2.0
"""Labels of processes in a capture: whose they were, as the agent that recorded them knew it.

What tells names of containers and pods is on the host, and for as long as they run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields

from aiflame.agent.model.batch import Labels

# Before the names of labels and annotations that a configuration asks for.
_EXTRA = "extra:"
_NAMES = tuple(field.name for field in fields(Labels) if field.name != "extra")


def label_rows(
    ids: Sequence[int], labels: Sequence[Labels | None]
) -> Iterator[tuple[int, str, str]]:
    """Yields rows of process_labels: those labels that say something.

    Args:
        ids: Of processes.
        labels: Of each of them; None for one that has none.
    """
    for process, found in zip(ids, labels, strict=True):
        if found is not None:
            values = {name: getattr(found, name) for name in _NAMES}
            values |= {f"{_EXTRA}{name}": value for name, value in found.extra}
            yield from ((process, name, value) for name, value in values.items() if value)


def read_labels(
    rows: Iterable[tuple[int, str, str]], process_index: Mapping[int, int]
) -> tuple[Labels | None, ...]:
    """Returns the labels of each process, None for one that has none; () where nobody has any.

    Args:
        rows: Of process_labels. Names that are not known here are of a newer aiflame.
        process_index: Indexes of processes by their ids.

    Raises:
        KeyError: There is no such process.
    """
    values: list[dict[str, str]] = [{} for _ in process_index]
    for process, name, value in rows:
        values[process_index[process]][name] = value
    if not any(values):
        return ()
    return tuple(_labels(found) if found else None for found in values)


def _labels(values: Mapping[str, str]) -> Labels:
    known = {name: values[name] for name in _NAMES if name in values}
    extra = sorted(
        (name.removeprefix(_EXTRA), value)
        for name, value in values.items()
        if name.startswith(_EXTRA)
    )
    return Labels(**{"service": "", **known}, extra=tuple(extra))
