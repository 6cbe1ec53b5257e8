# SPDX-License-Identifier: Apache-2.0
"""One table of `aiflame stats`, and how its figures are written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from aiflame.agent.model.profile import Profile
from aiflame.agent.reports.base import View

_NS_PER_MS = 1_000_000


@dataclass(frozen=True, slots=True)
class Table:
    """One table.

    Attributes:
        title: Its heading.
        whole: What its percentages are of, or what its rows are; one sentence.
        columns: Headings; one that begins with ">" is of numbers, set flush right.
        rows: Cells, already fit to be shown on one line.
        left_out: Rows there were beyond these.
        is_prose: The last column holds sentences, to be wrapped rather than cut.
    """

    title: str
    whole: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    left_out: int = 0
    is_prose: bool = False


def text_columns(table: Table) -> Sequence[int]:
    """Return the numbers of the columns that hold text and may be cut to fit a line."""
    return [i for i, heading in enumerate(table.columns) if not heading.startswith(">")]


def ms(ns: int) -> str:
    """Return a time in milliseconds."""
    return f"{ns / _NS_PER_MS:,.2f}"


def percent(part: int, whole: int) -> str:
    """Return a share with one decimal, "0.0 %" of nothing."""
    return f"{100 * part / whole if whole else 0:.1f} %"


def ns_by_stack(profile: Profile, view: View) -> npt.NDArray[np.uint64]:
    """Return the time of each stack that a view counts, shape (stacks,)."""
    samples = profile.samples[view.selects(profile.samples["klass"])]
    ns = np.zeros(len(profile.stacks), dtype=np.uint64)
    np.add.at(ns, samples["stack"], samples["ns"])
    return ns
