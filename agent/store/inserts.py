# SPDX-License-Identifier: Apache-2.0
"""What is inserted for batches: stacks before what mentions them, in pieces of bounded size.

Each insert is a part of a table, which its server merges with others later and refuses once there
are too many. So all batches of a stretch share inserts, of one table each: a host of a hundred
containers makes no more of them than one without.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from aiflame.agent.model.batch import Batch
from aiflame.agent.store.engine import Engine
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
    pending = {table: _Pending(table) for table in Rows}

    def add(table: Rows, rows: Sequence[Row]) -> Iterator[Insert]:
        for first in range(0, len(rows), _ROWS_AT_ONCE):
            some = rows[first : first + _ROWS_AT_ONCE]
            data = json_lines(some)
            if pending[table].size + len(data) > MAX_PIECE_BYTES:
                yield from pending[Rows.STACKS].take()  # this may mention them
                yield from pending[table].take()
            pending[table].add(data, some)

    for i, batch in enumerate(batches):
        found = batch_rows(batch, cluster, step_s)
        begin_s = found.begin_s
        seen = {"week": monday(begin_s), "last_seen": begin_s}
        # Lists of ids in no order would make another token each time.
        stacks = [{**row, **seen} for key, row in sorted(found.stacks.items()) if is_new(key)]
        yield from add(Rows.STACKS, stacks)
        yield from add(Rows.SAMPLES, found.samples)
        yield from add(Rows.GPU, found.gpu)
        if not i:  # what they tell of the host is the same in all of them
            own = [*batch_samples(batches)]
            yield from add(Rows.AGENTS, agent_rows(batch, sum(own), cluster))
    for rest in pending.values():  # stacks are the first
        yield from rest.take()


def insert_once(engine: Engine, piece: Insert) -> bool:
    """Inserts rows, unless this did so before, however long ago.

    Returns:
        Whether they were not there yet.
    """
    token = piece.token
    known = "SELECT 1 FROM inserts WHERE token = {token:String} LIMIT 1"
    if engine.query(known, {"token": token}).rows:
        return False
    engine.insert(piece.table.value, piece.rows, token)
    # Last: if it ends in between, the engine itself tells the next try for a repetition.
    engine.execute(f"INSERT INTO inserts (token) VALUES ('{token}')")
    return True


def batch_samples(batches: Sequence[Batch]) -> Iterator[int]:
    """Returns how many samples of threads each batch has."""
    for batch in batches:
        yield int(batch.profile.samples["count"].sum())


@dataclass(slots=True)
class _Pending:
    """Rows of a table that are not inserted yet."""

    table: Rows
    size: int = 0
    _lines: list[bytes] = field(default_factory=list)
    _ids: list[int] = field(default_factory=list)
    _samples: int = 0

    def add(self, lines: bytes, rows: Sequence[Row]) -> None:
        self._lines.append(lines)
        self.size += len(lines)
        self._samples += sum(_samples_of(self.table, row) for row in rows)
        if self.table is Rows.STACKS:
            self._ids += [int(row["stack_id"]) for row in rows]

    def take(self) -> Iterator[Insert]:
        """Yields the insert of what there is, if there is any; it is gone from here then."""
        if self._lines:
            found = Insert(self.table, b"".join(self._lines), self._samples, tuple(self._ids))
            self._lines, self._ids, self.size, self._samples = [], [], 0, 0
            yield found


def _samples_of(table: Rows, row: Row) -> int:
    if table is Rows.SAMPLES:
        return int(row["events"])
    return int(row["samples"]) if table is Rows.GPU else 0
