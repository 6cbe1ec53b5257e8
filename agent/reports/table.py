# SPDX-License-Identifier: Apache-2.0
"""One table of `aiflame stats`, and how its figures are written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from aiflame.agent.model.profile import Profile, SampleClass
from aiflame.agent.reports.base import View

_NS_PER_MS = 1_000_000

# Arrays of their frames stay in the processor's cache.
_STACKS_AT_ONCE = 2_048


@dataclass(frozen=True, slots=True)
class Table:
    """One table.

    Attributes:
        title: Its heading.
        whole: What its percentages are of, or what its rows are; one sentence.
        columns: Headings; one that begins with ">" is of numbers, set flush right, one that begins
            with "/" of paths, which may lose their first folders.
        rows: Cells, already fit to be shown on one line.
        left_out: Rows there were beyond these.
    """

    title: str
    whole: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    left_out: int = 0


def text_columns(table: Table) -> Sequence[int]:
    """Return the numbers of the columns that hold text, which may be narrower than it."""
    return [i for i, heading in enumerate(table.columns) if not heading.startswith(">")]


def path_columns(table: Table) -> Sequence[int]:
    """Return the numbers of the columns that hold paths."""
    return [i for i, heading in enumerate(table.columns) if heading.startswith("/")]


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


def functions_by_stack(
    profile: Profile, is_wanted: npt.NDArray[np.bool_]
) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
    """Yield pairs of stack and function, some stacks at a time.

    A function that calls itself is once in a stack.

    Args:
        profile: What was recorded.
        is_wanted: Of which stacks, shape (stacks,).
    """
    stacks = profile.stacks
    offsets = stacks.offsets.astype(np.int64)
    function_of = profile.frames["function"].astype(np.int64)
    radix = max(1, len(profile.functions))
    # Some at a time: what has an entry for each frame of each stack is larger than all the rest.
    for first in range(0, len(stacks), _STACKS_AT_ONCE):
        ends = offsets[first : first + _STACKS_AT_ONCE + 1]
        owner = np.repeat(np.arange(first, first + len(ends) - 1), np.diff(ends))
        function = function_of[stacks.frames[ends[0] : ends[-1]]]
        wanted = is_wanted[owner]
        pairs = np.unique(owner[wanted] * radix + function[wanted])
        yield pairs // radix, pairs % radix


def self_by_row(
    profile: Profile,
    view: View,
    innermost: npt.NDArray[np.int64],
    charged: npt.NDArray[np.int64],
    rows: int,
) -> npt.NDArray[np.int64]:
    """Return the self time of each row of a table.

    Args:
        profile: What was recorded.
        view: Which time counts.
        innermost: The row that has the time of each stack on the CPU, -1 for none.
        charged: The same of time off the CPU.
        rows: How many rows there are.
    """
    samples = profile.samples[view.selects(profile.samples["klass"])]
    row = row_by_sample(samples, innermost, charged)
    ns = np.zeros(rows, np.int64)
    np.add.at(ns, row[row >= 0], samples["ns"][row >= 0].astype(np.int64))
    return ns


def row_by_sample(
    samples: npt.NDArray[np.void],
    innermost: npt.NDArray[np.int64],
    charged: npt.NDArray[np.int64],
) -> npt.NDArray[np.int64]:
    """Return the row that has the self time of each sample; for the others see `self_by_row`."""
    is_on_cpu = samples["klass"] == SampleClass.ON_CPU
    stack = samples["stack"]
    return np.where(is_on_cpu, innermost[stack], charged[stack])
