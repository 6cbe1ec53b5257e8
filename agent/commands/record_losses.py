# SPDX-License-Identifier: Apache-2.0
"""What a recording lost, as a capture holds it and a reader sees it."""

from __future__ import annotations

from collections.abc import Mapping

from aiflame.agent.kernel.checks import kernel_names_cure
from aiflame.agent.losses import LossKind
from aiflame.agent.symbols.frames import clean_name

# Files named in a loss: a line is to be read.
_MAX_LISTED = 8


def loss_rows(
    losses: Mapping[LossKind, int], files: Mapping[LossKind, set[str]]
) -> list[tuple[str, int, str]]:
    """Returns losses as (name, count, meaning with cure), without those that are none.

    Args:
        losses: How many of each.
        files: Those to blame.
    """
    return [
        (kind.stored_name, count, _words(kind, files.get(kind, set())))
        for kind, count in losses.items()
        if count
    ]


def _words(kind: LossKind, files: set[str]) -> str:
    # Which cure helps against hidden symbols depends on who asks.
    cure = kernel_names_cure() if kind is LossKind.KERNEL_SYMBOLS_HIDDEN else kind.cure
    words = f"{kind.meaning}; {cure}" if cure else kind.meaning
    return f"{words}: {_listed(files)}" if files else words


def _listed(paths: set[str]) -> str:
    """Names files in a line; a path is the target's to choose, and may hold anything."""
    names = [clean_name(path) for path in sorted(paths)]
    more = len(names) - _MAX_LISTED
    return ", ".join(names[:_MAX_LISTED]) + (f" and {more} more" if more > 0 else "")
