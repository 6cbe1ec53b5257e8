# SPDX-License-Identifier: Apache-2.0
"""Functions and stacks of two parts of a store, by how their shares differ."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from aiflame.agent.reports.change import (
    LEAST_GROUPS,
    Compared,
    Side,
    by_difference,
    change,
    changes_table,
    lost_note,
    refuse_too_few,
    whose_time,
    with_lost,
)
from aiflame.agent.reports.table import Table
from aiflame.agent.store.engine import Engine, Parameter
from aiflame.agent.store.selector import Selector, nothing_there
from aiflame.agent.store.shown_frames import LOST_STACKS, PARAMETERS, SHOWN, STACKS, WAITED_IN

# Variances are of so many groups of (host, window): enough for t to be near the normal
# distribution, few enough to be fetched for hundreds of functions.
_GROUPS = 64
# Groups are whole hosts where each side has enough of them; else windows of hosts, which tell
# nothing of how hosts differ.
_HOSTS_FOR_GROUPS = LEAST_GROUPS

# Functions of which intervals are made. Past these a table is longer than anybody reads, and with
# --fail-on a growth of 0.5 % of each would be more than all of the time.
_MOST_FUNCTIONS = 200

_SIDES = ("base", "new")


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two parts of a store.

    Attributes:
        functions: Largest difference first.
        samples: Of each side.
        hosts: Of each side.
        considered: How many functions could have been told apart.
        lost: Part of each side's time whose stack was lost, 0 to 1: it is in no share.
        is_by_host: Chance is that of hosts; else that of minutes only, whatever hosts are like.
    """

    functions: tuple[Compared, ...]
    samples: tuple[int, int]
    hosts: tuple[int, int]
    considered: int
    lost: tuple[float, float]
    is_by_host: bool

    def table(self, limit: int, words: tuple[str, str], time_words: str, is_self: bool) -> Table:
        """Returns it as a table."""
        sides = "; ".join(
            f"{name}: {count:,} samples of {hosts:,} hosts, {said}"
            for name, count, hosts, said in zip(
                _SIDES, self.samples, self.hosts, words, strict=True
            )
        )
        chance = "hosts" if self.is_by_host else "windows of time (hosts are too few)"
        return changes_table(
            self.functions,
            limit,
            f"shares of a side's {time_words}, {whose_time(is_self=is_self)}; 90 % sure: the"
            f" difference is between low and high, for all {self.considered:,} functions at once,"
            f" as far as {chance} differ by chance{lost_note(self.lost)}. {sides}",
        )


def compare(
    engine: Engine, base: Selector, new: Selector, *, is_self: bool, least_share: float
) -> Comparison:
    """Compares two parts of a store.

    Args:
        engine: The store.
        base: One side.
        new: The other.
        is_self: Time of a function by itself, not with what it calls.
        least_share: Functions that have less of both sides are left out, 0 to 1.

    Raises:
        TooFewSamples: It would say nothing.
        NothingThere: A side is empty.
    """
    sides = _Sides(engine, base, new)
    totals = sides.totals()
    if not all(total.whole for total in totals):
        raise nothing_there(engine, base if not totals[0].whole else new)
    by_host = min(total.hosts for total in totals) >= _HOSTS_FOR_GROUPS
    whole = sides.wholes(by_host)
    samples = (totals[0].events, totals[1].events)
    refuse_too_few(
        samples,
        # Groups may be fewer: some hosts share one, which costs degrees of freedom only.
        (totals[0].groups(by_host), totals[1].groups(by_host)),
        (base.words, new.words),
        group_words="hosts" if by_host else "windows of time",
        cure="a longer time range, or more hosts",
        sampling="a higher sampling rate",
    )
    rows = sides.functions(is_self, least_share, totals)
    own = sides.groups_of([row.key for row in rows], is_self, by_host)
    considered = rows[0].considered if rows else 0
    lost = (totals[0].lost, totals[1].lost)
    hosts = (totals[0].hosts, totals[1].hosts)
    is_on_cpu = base.classes == new.classes == ("on_cpu",)
    of_hosts = hosts if by_host and is_on_cpu else (0, 0)
    found = []
    for row in rows:
        values = own.get((row.name, row.kind), np.zeros((2, _GROUPS)))
        before, after = (Side(values[i], whole[i], samples[i], of_hosts[i]) for i in range(2))
        changed = change(before, after, considered)
        found.append(Compared(row.name, with_lost(changed, lost)))
    return Comparison(by_difference(found), samples, hosts, considered, lost, by_host)


class ComparedStack(NamedTuple):
    """A stack of two parts of a store: its time and samples in base and in new."""

    stack_id: int
    ns: tuple[int, int]
    samples: tuple[int, int]


@dataclass(frozen=True, slots=True)
class SidesOfStacks:
    """Stacks of two parts of a store.

    Attributes:
        stacks: Those with the largest shares.
        left_out: How many lighter stacks are not there.
        left_out_ns: Their time, of base and of new.
        left_out_samples: Their samples.
        lost: As in `Comparison`.
    """

    stacks: list[ComparedStack]
    left_out: int
    left_out_ns: tuple[int, int]
    left_out_samples: tuple[int, int]
    lost: tuple[float, float]


def sides_of_stacks(engine: Engine, base: Selector, new: Selector, most: int) -> SidesOfStacks:
    """Returns the stacks of two parts of a store, those with the largest shares of both."""
    sides = _Sides(engine, base, new)
    totals = sides.totals()
    found, count = sides.stacks(totals, most)
    base_ns, new_ns = (totals[side].value - sum(one.ns[side] for one in found) for side in (0, 1))
    base_n, new_n = (
        totals[side].events - sum(one.samples[side] for one in found) for side in (0, 1)
    )
    return SidesOfStacks(
        stacks=found,
        left_out=count - len(found),
        left_out_ns=(base_ns, new_ns),
        left_out_samples=(base_n, new_n),
        lost=(totals[0].lost, totals[1].lost),
    )


@dataclass(frozen=True, slots=True)
class _Total:
    value: int
    events: int
    hosts: int
    windows: int  # of hosts
    whole: int  # value, with that of stacks that were lost

    @property
    def lost(self) -> float:
        """Part of the time whose stack was lost, 0 to 1."""
        return 1 - self.value / self.whole if self.whole else 0.0

    def groups(self, by_host: bool) -> int:
        """Returns of how many variances are told."""
        return self.hosts if by_host else self.windows


class _FunctionRow(NamedTuple):
    """A function that differs.

    Attributes:
        considered: How many could have.
        key: Of name and kind.
    """

    name: str
    kind: str
    considered: int
    key: int


class _Sides:
    """Asks about both sides.

    An agent that is over its budget, or a full table, loses stacks for a while and keeps their
    time. That time is of unknown functions: counted in, all shares would fall by it, and rise
    once it is over, while the program does the same. So shares are of what has a stack.
    """

    def __init__(self, engine: Engine, base: Selector, new: Selector) -> None:
        self._engine = engine
        self._is_waits = new.classes != ("on_cpu",)
        self._whole = [s.where(name) for s, name in zip((base, new), _SIDES, strict=True)]
        lost: dict[str, Parameter] = {"lost": LOST_STACKS}
        self._wheres = [
            (f"{where} AND NOT ({_IS_LOST})", {**values, **lost}) for where, values in self._whole
        ]

    def totals(self) -> list[_Total]:
        found = []
        for where, values in self._whole:
            (row,) = self._engine.query(
                "SELECT sumIf(value, known), sumIf(events, known), uniqExactIf(node, known),"
                " uniqExactIf((node, t), known), sum(value)"
                f" FROM (SELECT value, events, node, t, NOT ({_IS_LOST}) AS known"
                f" FROM samples WHERE {where}) AS r",
                {**values, "lost": LOST_STACKS},
            ).rows
            found.append(_Total(*map(int, row)))
        return found

    def wholes(self, by_host: bool) -> list[np.ndarray[Any, np.dtype[np.float64]]]:
        """Returns all time of each side by group."""
        found = []
        for where, values in self._wheres:
            rows = self._engine.query(
                f"SELECT {_group(by_host)} AS g, sum(value) FROM samples WHERE {where} GROUP BY g",
                values,
            ).rows
            groups = np.zeros(_GROUPS)
            for group, value in rows:
                groups[int(group)] = float(value)
            found.append(groups)
        return found

    def functions(
        self, is_self: bool, least_share: float, totals: list[_Total]
    ) -> list[_FunctionRow]:
        """Returns the functions with the largest differences."""
        union, values = self._union("stack_id", "stack_id")
        rows = self._engine.query(
            f"WITH s AS (SELECT stack_id, sumIf(v, side = 0) AS v0, sumIf(v, side = 1) AS v1"
            f" FROM ({union}) AS u GROUP BY stack_id)"
            " SELECT fn.1 AS name, fn.2 AS kind, count() OVER () AS considered, "
            f"{_KEY} AS key, sum(v0) AS a, sum(v1) AS b"
            f" FROM ({self._by_function('v0, v1', is_self)}) AS j GROUP BY fn"
            " HAVING greatest(a / {t0:Float64}, b / {t1:Float64}) > {least:Float64}"
            " ORDER BY abs(b / {t1:Float64} - a / {t0:Float64}) DESC, name LIMIT {most:UInt64}",
            {
                **values,
                **PARAMETERS,
                "t0": float(totals[0].value),
                "t1": float(totals[1].value),
                "least": least_share,
                "most": _MOST_FUNCTIONS,
            },
        ).rows
        return [
            _FunctionRow(str(name), str(kind), int(considered), int(key))
            for name, kind, considered, key, *_ in rows
        ]

    def stacks(self, totals: list[_Total], most: int) -> tuple[list[ComparedStack], int]:
        """Returns the stacks with the largest shares, and how many there are."""
        union, values = self._union("stack_id, sum(events) AS n", "stack_id")
        rows = self._engine.query(
            "SELECT stack_id, sumIf(v, side = 0) AS a, sumIf(v, side = 1) AS b,"
            " sumIf(n, side = 0), sumIf(n, side = 1), count() OVER ()"
            f" FROM ({union}) AS u GROUP BY stack_id"
            " ORDER BY a / {t0:Float64} + b / {t1:Float64} DESC, stack_id LIMIT {most:UInt64}",
            {
                **values,
                "t0": float(totals[0].value),
                "t1": float(totals[1].value),
                "most": most,
            },
        ).rows
        found, count = [], 0
        for row in rows:
            stack_id, base_ns, new_ns, base_n, new_n, count = map(int, row)
            found.append(ComparedStack(stack_id, (base_ns, new_ns), (base_n, new_n)))
        return found, count

    def groups_of(
        self, keys: list[int], is_self: bool, by_host: bool
    ) -> dict[tuple[str, str], np.ndarray[Any, np.dtype[np.float64]]]:
        """Returns time of functions by side and group."""
        union, values = self._union(f"stack_id, {_group(by_host)} AS g", "stack_id, g")
        rows = self._engine.query(
            f"WITH s AS ({union})"
            " SELECT fn.1 AS name, fn.2 AS kind, side, g, sum(v) AS value FROM"
            f" ({self._by_function('side, g, v', is_self)}) AS j"
            f" WHERE {_KEY} IN {{keys:Array(UInt64)}} GROUP BY fn, side, g",
            {**values, **PARAMETERS, "keys": keys},
        ).rows
        found: dict[tuple[str, str], np.ndarray[Any, np.dtype[np.float64]]] = {}
        for name, kind, side, group, value in rows:
            key = (str(name), str(kind))
            found.setdefault(key, np.zeros((2, _GROUPS)))[int(side), int(group)] = float(value)
        return found

    def _by_function(self, columns: str, is_self: bool) -> str:
        """Returns the statement that has a row of `s` once for each function that it is of."""
        names = "arrayMap(p -> (p.1, p.2), shown)"
        innermost = WAITED_IN if self._is_waits else "1"
        found = f"arraySlice({names}, {innermost}, 1)" if is_self else f"arrayDistinct({names})"
        return (
            f"SELECT {columns}, arrayJoin({found}) AS fn FROM (SELECT {columns}, {SHOWN} AS shown"
            f" FROM s LEFT JOIN ({STACKS}) AS d USING stack_id) AS f"
        )

    def _union(self, columns: str, grouped: str) -> tuple[str, dict[str, Parameter]]:
        parts, values = [], {}
        for side, (where, own) in enumerate(self._wheres):
            parts.append(
                f"SELECT {side} AS side, {columns}, sum(value) AS v FROM samples"
                f" WHERE {where} GROUP BY {grouped}"
            )
            values.update(own)
        return " UNION ALL ".join(parts), values


_IS_LOST = "stack_id IN {lost:Array(UInt64)}"

# Names may be longer than what a server takes of parameters.
_KEY = "cityHash64(fn.1, fn.2)"


def _group(by_host: bool) -> str:
    of = "node" if by_host else "node, t"
    return f"toUInt8(cityHash64({of}) % {_GROUPS})"
