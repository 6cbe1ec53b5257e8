# SPDX-License-Identifier: Apache-2.0
"""What is inserted for batches: stacks before what mentions them, in pieces of bounded size."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from aiflame.agent.model.batch import Batch
from aiflame.agent.store.rows import Row, agent_rows, batch_rows, json_lines, monday
from aiflame.agent.store.schema import Rows

# A piece compresses to a tenth. Servers want few large inserts; a spool wants small ones, of which
# one that is refused costs little.
MAX_PIECE_BYTES = 4 << 20

_ROWS_AT_ONCE = 256


@dataclass(frozen=True, slots=True)
class Insert:
    """Rows for one table.

    Attributes:
        table: Which.
        rows: One JSON object a line.
        samples: How many they hold.
        stack_ids: Of stacks: which.
    """

    table: Rows
    rows: bytes
    samples: int
    stack_ids: tuple[int, ...] = ()

    @property
    def token(self) -> str:
        """The same for the same rows, whoever sends them again and whenever."""
        return hashlib.blake2b(
            self.table.value.encode() + b"\n" + self.rows, digest_size=16
        ).hexdigest()


def inserts_of(
    batches: Sequence[Batch],
    cluster: str,
    is_new: Callable[[int], bool],
    step_s: int | None = None,
) -> Iterator[Insert]:
    """Returns what is inserted for the batches of one stretch of time of one host.

    Args:
        batches: They.
        cluster: Whose hosts they are of.
        is_new: Tells whether the store is to be sent the stack of an id.
        step_s: See `batch_rows`.
    """
    for i, batch in enumerate(batches):
        found = batch_rows(batch, cluster, step_s)
        begin_s = found.begin_s
        seen = {"week": monday(begin_s), "last_seen": begin_s}
        # Lists of ids in no order would make another token each time.
        stacks = [{**row, **seen} for key, row in sorted(found.stacks.items()) if is_new(key)]
        yield from _pieces(Rows.STACKS, stacks)
        yield from _pieces(Rows.SAMPLES, found.samples)
        yield from _pieces(Rows.GPU, found.gpu)
        if not i:  # what they tell of the host is the same in all of them
            own = [*batch_samples(batches)]
            yield from _pieces(Rows.AGENTS, agent_rows(batch, sum(own), cluster))


def batch_samples(batches: Sequence[Batch]) -> Iterator[int]:
    """Returns how many samples of threads each batch has."""
    for batch in batches:
        yield int(batch.profile.samples["count"].sum())


def _pieces(table: Rows, rows: Sequence[Row]) -> Iterator[Insert]:
    lines: list[bytes] = []
    ids: list[int] = []
    size, samples = 0, 0
    for first in range(0, len(rows), _ROWS_AT_ONCE):
        some = rows[first : first + _ROWS_AT_ONCE]
        data = json_lines(some)
        if lines and size + len(data) > MAX_PIECE_BYTES:
            yield Insert(table, b"".join(lines), samples, tuple(ids))
            lines, ids, size, samples = [], [], 0, 0
        lines.append(data)
        size += len(data)
        samples += sum(_samples_of(table, row) for row in some)
        if table is Rows.STACKS:
            ids += [int(row["stack_id"]) for row in some]
    if lines:
        yield Insert(table, b"".join(lines), samples, tuple(ids))


def _samples_of(table: Rows, row: Row) -> int:
    if table is Rows.SAMPLES:
        return int(row["events"])
    return int(row["samples"]) if table is Rows.GPU else 0
