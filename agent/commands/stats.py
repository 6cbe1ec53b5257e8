# SPDX-License-Identifier: Apache-2.0
"""Print a capture's figures as tables: functions, threads, waits, causes, losses.

As wide as COLUMNS or the terminal; in a pipe or a file as wide as what is in them, so that nothing
is missing where it is searched or kept.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from aiflame.agent.commands.captures import (
    add_graph_argument,
    add_merge_argument,
    listed,
    read_recording,
    with_graphs,
)
from aiflame.agent.commands.tables import add_limit, print_tables
from aiflame.agent.commands.time_range import add_range_arguments, restricted
from aiflame.agent.reports.base import Frames, Merge, View
from aiflame.agent.reports.facts import warnings
from aiflame.agent.reports.stats import tables

NAME = "stats"

EPILOG = """\
EXAMPLES
  aiflame stats run.aiflame
  aiflame stats run.aiflame --view offcpu -n 30    # what it waited for
  aiflame stats run.aiflame --last 2s              # only the last two seconds
  aiflame stats run.aiflame | less
"""

# Ten rows of each table are about a screen and a half in all.
_DEFAULT_LIMIT = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what `aiflame stats` takes."""
    parser.add_argument("capture", metavar="CAPTURE", type=Path, help="file written by record")
    parser.add_argument(
        "--view",
        choices=[view.value for view in View],
        default=View.WALL.value,
        help="which time to count, or devices only: their samples, or how long they ran kernels"
        " (default: %(default)s)",
    )
    add_limit(parser, _DEFAULT_LIMIT, "rows of functions, lines, threads, modules and waits")
    parser.add_argument(
        "--frames",
        choices=[frames.value for frames in Frames],
        default=Frames.BOTH.value,
        help="of Python programs, what counts as a top function: Python and native without the"
        " interpreter's own, one of them, or everything (default: %(default)s)",
    )
    parser.add_argument(
        "--hide-importlib",
        action="store_true",
        help="leave out Python frames that import modules or start the program (default: keep)",
    )
    add_merge_argument(parser)
    parser.add_argument(
        "--raw",
        dest="is_raw",
        action="store_true",
        help="charge waits to the innermost function, the scheduler's (default: to the innermost"
        " that is not the kernel's, libc's or the interpreter's)",
    )
    parser.add_argument(
        "--idle",
        dest="is_idle_shown",
        action="store_true",
        help="functions and lines of wall time also of threads that slept at one location"
        " throughout (default: leave them out)",
    )
    add_range_arguments(parser)
    add_graph_argument(parser.add_argument_group("GPU"))


def run(args: argparse.Namespace) -> int:
    """Print the tables; returns the exit code."""
    profile = listed(restricted(with_graphs(read_recording(args.capture), args), args))
    for warning in warnings(profile):
        sys.stderr.write(f"aiflame: note: {warning}\n")
    frames = Frames(args.frames)
    found = tables(
        profile,
        View(args.view),
        args.limit,
        frames,
        args.hide_importlib,
        is_raw=args.is_raw,
        is_idle_shown=args.is_idle_shown,
        merge=Merge(args.merge) if args.merge else None,
    )
    print_tables(found)
    return 0
