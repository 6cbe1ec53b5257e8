# SPDX-License-Identifier: Apache-2.0
"""What can be asked of a store, whichever engine holds it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from aiflame.agent.errors import AiflameError

# What a value of a parameter may be: `{name:String}`, `{name:Array(String)}`, and numbers.
Parameter = str | int | float | Sequence[str] | Sequence[int]

# Of one answer. A page holds no more stacks than fit a browser, and a table none that nobody reads.
MAX_ROWS = 2_000_000
MAX_ANSWER_BYTES = 1 << 30

# A question over all of a large fleet may take long; one that takes longer than this is a mistake.
MAX_SECONDS = 300

DATABASE = "aiflame"

# Of a server, whose disks everybody's samples share: days.
KEEP_DAYS = 14

# Sums by hour are kept six times as long, and ClickHouse's DateTime ends in 2106: a time after that
# is one long past, and rows would go as they come.
MOST_KEEP_DAYS = 3_650


class StoreError(AiflameError):
    """A store did not answer, or did not understand."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Rows of a query, in the order of its columns."""

    columns: tuple[str, ...]
    rows: list[list[Any]]


class Engine(Protocol):
    """A store that is open.

    Attributes:
        name: As its user typed it.
    """

    name: str

    def create_database(self) -> None:
        """Makes the database, if there is none."""
        ...

    def execute(self, statement: str) -> None:
        """Runs a statement that has no answer.

        Raises:
            StoreError: It failed.
        """
        ...

    def query(self, statement: str, parameters: Mapping[str, Parameter] | None = None) -> Answer:
        """Asks; nothing is changed by it.

        Args:
            statement: SQL, with parameters as `{name:Type}`.
            parameters: Their values, which never become part of the statement.

        Raises:
            StoreError: It failed, or took or gave more than the bounds here.
        """
        ...

    def insert(self, table: str, rows: bytes, token: str) -> None:
        """Inserts rows.

        Args:
            table: One of schema.Rows.
            rows: One JSON object a line.
            token: What is inserted again under the same one is left out.

        Raises:
            StoreError: It failed.
        """
        ...

    def close(self) -> None:
        """Closes it."""
        ...


_ESCAPES = str.maketrans(
    {"\\": "\\\\", "\t": "\\t", "\n": "\\n", "\r": "\\r", "\0": "\\0", "\b": "\\b", "\f": "\\f"}
)


def parameter_text(value: Parameter) -> str:
    """Returns a value as engines read it: escaped as in TSV, arrays as they stand in SQL.

    Source: ClickHouse's src/Interpreters/ReplaceQueryParameterVisitor.cpp, which reads parameters
    by deserializeTextEscaped.
    """
    if isinstance(value, str):
        return _clean(value).translate(_ESCAPES)
    if isinstance(value, (int, float)):
        return str(value)
    return f"[{','.join(_quoted(item) for item in value)}]"


def _quoted(item: str | int) -> str:
    if isinstance(item, int):
        return str(item)
    return "'" + _clean(item).translate(_ESCAPES).replace("'", "\\'") + "'"


def _clean(text: str) -> str:
    # A lone surrogate has no UTF-8.
    return text.encode("utf-8", "replace").decode()
