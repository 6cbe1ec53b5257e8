# SPDX-License-Identifier: Apache-2.0
"""Which format a file name's ending means."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from aiflame.agent.errors import UsageError
from aiflame.agent.reports.words import showable

# Several names are in use for some formats; the first of each is what its files are called.
ENDINGS = {
    ".html": "html",
    ".htm": "html",
    ".svg": "svg",
    ".folded": "folded",
    ".txt": "folded",
    ".speedscope.json": "speedscope",
    ".json": "speedscope",
    ".pb.gz": "pprof",
    ".pprof": "pprof",
    ".pstats": "pstats",
}


def format_of_name(name: str) -> str | None:
    """Returns the format that a file name's ending means, None for no format's."""
    lower = name.lower()
    return next((form for ending, form in ENDINGS.items() if lower.endswith(ending)), None)


def ending_of(form: str) -> str:
    """Returns how a file of a format is called, without importing what makes it."""
    return next(ending for ending, name in ENDINGS.items() if name == form)


def refuse_other_ending(chosen: str, output: str) -> None:
    """Raises UsageError where an output's ending means another format than the one chosen."""
    implied = format_of_name(Path(output).name)
    if implied not in (None, chosen):
        raise UsageError(
            f"-f {chosen} contradicts -o {showable(output)}, which ends like {implied}",
            "leave out -f, or change the ending",
        )


def no_format_for(
    name: str, *, also: Sequence[str] = (), is_option_there: bool = True
) -> UsageError:
    """Returns the error to raise where a file name has to mean a format and does not.

    Args:
        name: Of the file.
        also: Endings that the command takes besides.
        is_option_there: Whether the command has -f.
    """
    endings = ", ".join((*also, *ENDINGS))
    hint = f"add -f, or end in {endings}" if is_option_there else f"end in {endings}"
    return UsageError(f"no format ends like this: {showable(name)}", hint)
