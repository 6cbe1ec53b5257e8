# SPDX-License-Identifier: Apache-2.0
"""Compare two captures: functions whose share of time differs, and a differential flame graph.

Of one program or host before and after a change. Needs neither root nor the machine that was
recorded. Two versions that many hosts run are compared by `aiflame query diff`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from aiflame.agent.commands.captures import read_recording
from aiflame.agent.commands.growth import add_growth_arguments, alarm, least_share
from aiflame.agent.commands.messages import tell
from aiflame.agent.commands.report_output import (
    DIFFERENCE_FORMATS,
    STDOUT,
    refuse_replacing,
    writable_format,
    write_report,
)
from aiflame.agent.commands.tables import add_limit, print_tables
from aiflame.agent.commands.time_range import add_range_arguments, restricted
from aiflame.agent.errors import AiflameError, UsageError
from aiflame.agent.model.profile import Difference, Profile
from aiflame.agent.reports import FORMATS, ReportOptions, View
from aiflame.agent.reports.base import TIME_VIEWS
from aiflame.agent.reports.change import TooFewSamples, refuse_too_few
from aiflame.agent.reports.compared import Comparison, compare
from aiflame.agent.reports.difference import side_ns
from aiflame.agent.reports.joined import joined
from aiflame.agent.reports.merge import is_of_all
from aiflame.agent.reports.words import showable

NAME = "diff"

EPILOG = """\
EXAMPLES
  aiflame diff base.aiflame new.aiflame
  aiflame diff base.aiflame new.aiflame -o diff.html    # and a page
  aiflame diff base.aiflame new.aiflame --view cpu --self -n 30
  aiflame diff base.aiflame new.aiflame -f folded -o - | head
  aiflame diff base.aiflame new.aiflame --fail-on +2%   # in CI

EXIT CODES
  0 nothing grew by more   1 something did   5 too few samples to tell
"""

_DEFAULT_LIMIT = 20


class NothingToCompare(AiflameError):
    """A capture without any of the time that is compared."""

    exit_code = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what `aiflame diff` takes."""
    parser.add_argument("base", metavar="BASE", type=Path, help="capture to compare with")
    parser.add_argument("new", metavar="NEW", type=Path, help="capture to compare")
    output = parser.add_argument_group("Output")
    output.add_argument(
        "-f", "--format", choices=DIFFERENCE_FORMATS, help="(default: from the ending of -o)"
    )
    output.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help="write a differential flame graph too, with widths of NEW; - for standard output in"
        " place of the table",
    )
    output.add_argument("--force", action="store_true", help="replace FILE (default: refuse)")
    output.add_argument("--title", metavar="TEXT", help="title (default: both names)")
    content = parser.add_argument_group("Content")
    content.add_argument(
        "--view",
        choices=[view.value for view in TIME_VIEWS],
        help="which time of threads is compared (default: wall; of record -a cpu)",
    )
    content.add_argument(
        "--idle",
        action="store_true",
        help="wall time also of threads that slept at one location throughout (default: without)",
    )
    add_limit(content, _DEFAULT_LIMIT)
    add_growth_arguments(content, "by how its seconds differ")
    add_range_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Compare; returns the exit code."""
    form = _format(args)
    base, new = (restricted(read_recording(path), args) for path in (args.base, args.new))
    view = View.CPU if is_of_all(base) or is_of_all(new) else View.WALL
    view = View(args.view) if args.view else view
    names = _names(args.base, args.new)
    both, difference = joined(base, new, names, view, is_idle_shown=args.idle)
    _refuse_nothing(both, difference, view)
    least = least_share(args.fail_on)
    found = compare(both, difference, is_self=args.is_self, least_share=least)
    is_sure = _is_sure(found, is_alarm=args.fail_on is not None)
    if args.output != STDOUT:
        print_tables([found.table(args.limit, is_sure=is_sure)])
    if form is not None:
        data = FORMATS[form].render(both, ReportOptions(title=args.title))
        write_report(data, args.output, is_forced=args.force)
    return alarm(found.functions, args.fail_on, found.lost)


def _format(args: argparse.Namespace) -> str | None:
    if args.output is None:
        if args.format is not None:
            raise UsageError("-f is of a file", "add -o FILE")
        return None
    if args.output != STDOUT:
        refuse_replacing(Path(args.output), [args.base, args.new])
    return writable_format(args.format, args.output, DIFFERENCE_FORMATS, is_forced=args.force)


def _names(base: Path, new: Path) -> tuple[str, str]:
    """Return what tells the captures apart: folders only where files are called alike."""
    paths = (base.name, new.name) if base.name != new.name else (str(base), str(new))
    return showable(paths[0]), showable(paths[1])


def _refuse_nothing(both: Profile, difference: Difference, view: View) -> None:
    for name, ns in zip((difference.base, difference.new), side_ns(both, difference), strict=True):
        if not ns:
            raise NothingToCompare(f"{name} holds no {view.label}", "record it again, or --view")


def _is_sure(found: Comparison, *, is_alarm: bool) -> bool:
    """Return whether there is enough to tell a change from chance; an alarm needs that."""
    try:
        refuse_too_few(
            found.samples,
            found.groups,
            (found.of.base, found.of.new),
            group_words=found.group_words,
            cure="a longer recording",
            sampling="a higher -F",
        )
    except TooFewSamples as error:
        if is_alarm:
            raise
        tell(sys.stderr, f"aiflame: note: what chance leaves open is not known: {error}\n")
        return False
    return True
