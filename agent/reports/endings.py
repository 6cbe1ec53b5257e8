# SPDX-License-Identifier: Apache-2.0
"""Which format a file name's ending means."""

from __future__ import annotations

from aiflame.agent.errors import UsageError

# Several names are in use for some formats.
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
}


def format_of_name(name: str) -> str:
    """Returns the format that a file name asks for.

    Raises:
        UsageError: The ending means no format.
    """
    for ending, format_name in ENDINGS.items():
        if name.lower().endswith(ending):
            return format_name
    raise UsageError(
        f"no format has the ending of {name}", f"use -f, or one of {' '.join(ENDINGS)}"
    )
