# SPDX-License-Identifier: Apache-2.0
"""Which part of a store is asked for. Values are always parameters, never part of a statement."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone

from aiflame.agent.errors import AiflameError
from aiflame.agent.reports.words import showable
from aiflame.agent.store.engine import Engine, Parameter

# What the time of each class is called, by what samples call the class.
CLASS_WORDS = {
    "on_cpu": "CPU time",
    "blocked": "blocked time",
    "waiting_to_run": "time waiting to run",
    "preempted": "preempted time",
}

# Columns of samples and of gpu that a user may choose by.
LABELS = (
    *("cluster", "node", "service", "version", "namespace", "pod", "workload", "container"),
    *("container_id", "comm"),
)
# What tells pods of one name apart, as a reader sees it; "" for what is in none.
_POD = (
    "if(pod = '', '', arrayStringConcat(arrayFilter(part -> part != '',"
    " [toString(cluster), toString(namespace), toString(pod)]), '/'))"
)
# Of agents, which are of hosts.
AGENT_LABELS = ("cluster", "node")

# The name of a stack whose frames have not arrived, or are no longer kept.
UNKNOWN_STACK = "[frames not in the store]"

# Of names that were mistyped: as many are told, as many are looked at, and so alike they are
# (difflib's own cutoff).
_MAX_NAMED, _MAX_COMPARED, _ALIKE = 8, 1000, 0.6

_LIKE = str.maketrans({"\\": "\\\\", "%": "\\%", "_": "\\_", "*": "%", "?": "_"})


class NothingThere(AiflameError):
    """A store that holds nothing of what was asked for."""

    exit_code = 4


@dataclass(frozen=True, slots=True)
class Selector:
    """What is asked for.

    Attributes:
        begin_s: Rows from this time on, in seconds of Unix.
        end_s: And before this one.
        labels: By column, values that it may have; those with * or ? are patterns.
        classes: Of samples; () for all.
    """

    begin_s: int
    end_s: int
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    classes: tuple[str, ...] = ()

    def where(
        self, prefix: str = "p", allowed: tuple[str, ...] = LABELS
    ) -> tuple[str, dict[str, Parameter]]:
        """Returns the condition, and its parameters.

        Args:
            prefix: Of the parameters' names.
            allowed: Columns that the table has; others may not be chosen by.

        Raises:
            AiflameError: The table has no such column.
        """
        begin, end = f"{prefix}_begin", f"{prefix}_end"
        terms = [f"t >= toDateTime({{{begin}:UInt32}})", f"t < toDateTime({{{end}:UInt32}})"]
        values: dict[str, Parameter] = {begin: self.begin_s, end: self.end_s}
        for column, wanted in self.labels.items():
            if column not in allowed:
                raise AiflameError(f"this question has no {column}", f"leave out --{column}")
            name = f"{prefix}_{column}"
            exact = [text for text in wanted if not _is_pattern(text)]
            either = []
            if exact:
                values[name] = exact
                either.append(f"{column} IN {{{name}:Array(String)}}")
            for i, text in enumerate(text for text in wanted if _is_pattern(text)):
                values[f"{name}_{i}"] = text.translate(_LIKE)
                either.append(f"{column} LIKE {{{name}_{i}:String}}")
            if either:
                terms.append(f"({' OR '.join(either)})")
        if self.classes:
            values[f"{prefix}_classes"] = list(self.classes)
            terms.append(f"class IN {{{prefix}_classes:Array(String)}}")
        return " AND ".join(terms), values

    @property
    def words(self) -> str:
        """What was asked for, as a reader sees it."""
        chosen = [f"{column} {' or '.join(values)}" for column, values in self.labels.items()]
        return ", ".join([f"{moment_words(self.begin_s)} to {moment_words(self.end_s)}", *chosen])

    @property
    def words_with_class(self) -> str:
        """The same with the class of time."""
        return ", ".join([self.words, *(CLASS_WORDS[klass] for klass in self.classes)])


def owner_column(label: str) -> str:
    """Returns the expression for whom a row is of, by one of LABELS, where it is told by name.

    A pod's name is its own in its namespace alone, and that in its cluster.
    """
    return _POD if label == "pod" else label


def holds(engine: Engine, selector: Selector) -> bool:
    """Whether a store has anything of what is asked for, of whatever kind."""
    where, values = replace(selector, classes=()).where()
    # Statements here are of names of columns and tables of ours, and parameters.
    return any(
        engine.query(f"SELECT 1 FROM {table} WHERE {where} LIMIT 1", values).rows
        for table in ("samples", "gpu")
    )


def nothing_there(engine: Engine, selector: Selector) -> NothingThere:
    """Returns the error of who asked for something that a store does not have.

    Its hint says which of the labels no row of that time has, and which there are.

    Args:
        engine: The store.
        selector: What was asked for.
    """
    hints = (_unmatched(engine, selector, label) for label in selector.labels)
    hint = next(filter(None, hints), "ask for another time, or for less")
    return NothingThere(f"the store has nothing of {selector.words_with_class}", hint)


def _unmatched(engine: Engine, selector: Selector, label: str) -> str:
    """Returns which values of a label there are where none of those asked for is, else ""."""
    every = Selector(selector.begin_s, selector.end_s)
    only = replace(every, labels={label: selector.labels[label]})
    if holds(engine, only) or not holds(engine, every):
        return ""
    where, values = every.where()
    found: dict[str, int] = {}
    for table in ("samples", "gpu"):
        rows = engine.query(
            f"SELECT {label}, count() AS n FROM {table} WHERE {where} AND {label} != ''"
            f" GROUP BY {label} ORDER BY n DESC LIMIT {_MAX_COMPARED}",
            values,
        ).rows
        found = {value: int(count) for value, count in rows} | found
    asked = " or ".join(map(showable, selector.labels[label]))
    said = f"no {label} is called {asked}"
    if not found:
        return f"{said}; none has a name"
    # The likeliest first: those that are written much alike, or contain it, then those with most.
    near = [
        value
        for value in found
        if any(
            text.strip("*?") in value or difflib.SequenceMatcher(a=text, b=value).ratio() >= _ALIKE
            for text in selector.labels[label]
        )
    ]
    first = [*dict.fromkeys((*near, *found))][:_MAX_NAMED]
    more = f" and {len(found) - len(first):,} more" if len(found) > len(first) else ""
    return f"{said}; there are {', '.join(map(showable, first))}{more}"


def _is_pattern(text: str) -> bool:
    return re.search(r"[*?]", text) is not None


def moment_words(unix_s: int) -> str:
    """Returns a time as it is shown: UTC, to the second."""
    return f"{moment_cell(unix_s)} UTC"


def moment_cell(unix_s: int) -> str:
    """Returns the same for a table that says of which zone its times are."""
    return datetime.fromtimestamp(unix_s, timezone.utc).strftime("%Y-%m-%d %H:%M:%S")


def held_range(engine: Engine) -> tuple[int, int]:
    """Returns from when to when a store has anything, in seconds of Unix.

    Raises:
        NothingThere: It is empty.
    """
    found = []
    for table in ("samples", "gpu"):
        # Parts know the ends of their times: only the last rows are read.
        (row,) = engine.query(
            f"SELECT count(), toUInt32(min(t)), toUInt32((SELECT max(t + span_s) FROM {table}"
            f" WHERE t = (SELECT max(t) FROM {table}))) FROM {table}"
        ).rows
        if row[0]:
            found.append((int(row[1]), int(row[2])))
    if not found:
        raise NothingThere(
            f"the store {engine.name} is empty",
            f"aiflame store add run.aiflame --store {engine.name}",
        )
    return min(x for x, _ in found), max(x for _, x in found)


def newest_begin(engine: Engine) -> int:
    """Returns when the newest window of a store that has some begins, in seconds of Unix."""
    ((begin,),) = engine.query(
        "SELECT toUInt32(greatest((SELECT max(t) FROM samples), (SELECT max(t) FROM gpu)))"
    ).rows
    return int(begin)
