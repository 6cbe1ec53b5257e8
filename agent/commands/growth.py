# SPDX-License-Identifier: Apache-2.0
"""What comparisons share: which functions they are of, and --fail-on."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from typing import Any

from aiflame.agent.reports.change import Compared, TooFewSamples, grown, lost_words
from aiflame.agent.reports.words import showable

# A difference of a comparison without --fail-on: below it a table is noise.
_LEAST_SHARE = 0.002
# Functions that have less of both sides cannot have grown by what is asked for; a quarter leaves
# room for chance, and their number is what error is divided by.
_PART_OF_GROWTH = 4

_GREW = 1


def add_growth_arguments(parser: Any, otherwise: str) -> None:
    """Adds --self and --fail-on.

    Args:
        parser: To these.
        otherwise: How a share may grow without an alarm, as argparse takes it.
    """
    parser.add_argument(
        "--self",
        dest="is_self",
        action="store_true",
        help="time of a function by itself (default: with what it calls)",
    )
    parser.add_argument(
        "--fail-on",
        metavar="+N%",
        type=_growth,
        help="exit code 1 if the share of a function grew by more than N percentage points of its"
        f" side's time, and not {otherwise}",
    )


def least_share(growth: float | None) -> float:
    """Returns which share of a side functions have that are compared, 0 to 1.

    Args:
        growth: That is an alarm, 0 to 1; None for no alarm.
    """
    return _LEAST_SHARE if growth is None else max(growth / _PART_OF_GROWTH, 1e-6)


def alarm(functions: Sequence[Compared], growth: float | None, lost: tuple[float, float]) -> int:
    """Says which functions have grown by more than that; returns the exit code.

    Args:
        functions: As they were compared.
        growth: How much is too much, 0 to 1; None for no alarm.
        lost: Part of each side's time whose stack was lost, 0 to 1.

    Raises:
        TooFewSamples: None is known to have, and so much was lost that none could be.
    """
    if growth is None:
        return 0
    found = grown(functions, growth)
    for function in found:
        sys.stderr.write(
            f"aiflame: {showable(function.name)} grew by {100 * function.change.difference:+.2f}"
            f" points, at least by {100 * function.change.low:+.2f}\n"
        )
    if not found and sum(lost) > growth:
        raise TooFewSamples(
            f"too much time whose stack was lost to tell: {lost_words(lost)}",
            "give the agents more (cost_cpu_percent, cost_host_percent), or allow more growth",
        )
    return _GREW if found else 0


def _growth(text: str) -> float:
    match = re.fullmatch(r"\+?(\d+(?:\.\d+)?)%?", text)
    value = float(match[1]) if match else -1.0
    if not 0 <= value < 100:
        raise argparse.ArgumentTypeError(f"not a growth in percent: {text} (+2%)")
    return value / 100
