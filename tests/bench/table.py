# SPDX-License-Identifier: Apache-2.0
"""What a part of the bench hands over: tables and aims, as Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Aim:
    """A figure that is to stay below a limit."""

    words: str
    value: float
    limit: float
    unit: str

    @property
    def verdict(self) -> str:
        """For people: met or missed."""
        return "met" if self.value < self.limit else "**missed**"


@dataclass(frozen=True, slots=True)
class Table:
    """One table: a title, what is measured and how, columns, rows."""

    title: str
    intro: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]
    aims: list[Aim] = field(default_factory=list)

    def markdown(self) -> str:
        """Returns the table with its title and introduction."""
        lines = [self.columns, tuple("---" for _ in self.columns), *self.rows]
        body = "\n".join("| " + " | ".join(line) + " |" for line in lines)
        return f"### {self.title}\n\n{self.intro}\n\n{body}\n"


def aims_table(aims: Sequence[Aim]) -> Table:
    """Returns all aims and whether they were met in this run."""
    rows = [
        (
            aim.words,
            f"{_short(aim.value)} {aim.unit}",
            f"{_short(aim.limit)} {aim.unit}",
            aim.verdict,
        )
        for aim in aims
    ]
    return Table("Aims", "In this run:", ("aim", "measured", "to stay below", ""), rows)


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 1_000 else f"{value:.3g}"


def spread(values: Sequence[float], digits: int = 3) -> str:
    """Returns "median (least-most)"."""
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"


def code(text: str) -> str:
    """Returns a command as Markdown."""
    return f"`{text}`"
