# SPDX-License-Identifier: Apache-2.0
"""Where a report goes: which format it has, which file it may replace, and what is said of it."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable
from pathlib import Path

from aiflame.agent.errors import UsageError
from aiflame.agent.outfile import refuse_existing, write_output
from aiflame.agent.reports import FORMATS
from aiflame.agent.reports.endings import format_of_name, no_format_for, refuse_other_ending
from aiflame.agent.reports.words import showable

STDOUT = "-"

# Formats that can say how something differs.
DIFFERENCE_FORMATS = ("html", "svg", "folded")


def named_format(chosen: str | None, output: str) -> str:
    """Returns the format of an output.

    Args:
        chosen: By -f, None where it was not.
        output: Its name, or STDOUT.

    Raises:
        UsageError: Nothing says which, or both say different ones.
    """
    if output == STDOUT:
        if chosen is None:
            raise UsageError("no format for standard output", "add -f html|svg|folded|...")
        return chosen
    implied = format_of_name(Path(output).name)
    if chosen is not None:
        refuse_other_ending(chosen, output)
        return chosen
    if implied is None:
        raise no_format_for(Path(output).name)
    return implied


def writable_format(
    chosen: str | None, output: str, formats: Collection[str], *, is_forced: bool
) -> str:
    """Returns the format of an output; raises UsageError where it cannot be written there.

    Args:
        chosen: By -f, None where it was not.
        output: Its name, or STDOUT.
        formats: Those there are.
        is_forced: A file that exists is replaced.
    """
    name = named_format(chosen, output)
    if name not in formats:
        raise UsageError(f"no {name} of a difference", f"use -f {', '.join(formats)}")
    if output != STDOUT:
        refuse_existing(Path(output), is_forced, is_named=True)
    else:
        refuse_terminal(name)
    return name


def refuse_terminal(name: str) -> None:
    """Raises UsageError where standard output is a terminal, and a format is not for one."""
    if FORMATS[name].is_binary and sys.stdout.isatty():
        raise UsageError(f"{name} is binary: not written to a terminal", "use -o FILE")


def refuse_replacing(path: Path, captures: Iterable[Path]) -> None:
    """Raises UsageError where a report would take the place of what it is made of."""
    if path.exists() and any(c.exists() and path.samefile(c) for c in captures):
        raise UsageError(f"the report would replace its own capture: {path}", "use another -o FILE")


def write_report(data: bytes, output: str, *, is_forced: bool) -> None:
    """Writes a report that was asked for by name, and says how large it is."""
    if output == STDOUT:
        write_to_stdout(data)
        return
    path = Path(output)
    write_output(path, data, is_forced, is_named=True)
    sys.stderr.write(f"Wrote {showable(str(path))} ({size_words(len(data))})\n")


def write_to_stdout(data: bytes) -> None:
    """Writes a report to standard output."""
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def size_words(n_bytes: int) -> str:
    """Returns the size of a file: "1.2 kB"."""
    if n_bytes < 1_000_000:
        return f"{n_bytes / 1_000:.1f} kB"
    return f"{n_bytes / 1_000_000:.1f} MB"
