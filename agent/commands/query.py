# SPDX-License-Identifier: Apache-2.0
"""Ask a store of many recordings: tables, flame graphs, comparisons.

Nothing in the store is changed by it. Times are UTC; without any, the last hour that the store
holds.
"""

from __future__ import annotations

import argparse
import difflib
import json
import re
import sys
from collections.abc import Callable, Collection
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any

from aiflame.agent.commands.durations import duration_ns
from aiflame.agent.commands.growth import add_growth_arguments, alarm, least_share
from aiflame.agent.commands.report_output import (
    DIFFERENCE_FORMATS,
    STDOUT,
    writable_format,
    write_report,
)
from aiflame.agent.commands.store_options import add_store_argument, named_store
from aiflame.agent.commands.tables import add_limit, positive, print_tables
from aiflame.agent.errors import UsageError
from aiflame.agent.model.profile import NS_PER_S
from aiflame.agent.reports import FORMATS, Frames, ReportOptions, View
from aiflame.agent.reports.base import Leaf
from aiflame.agent.reports.table import Table
from aiflame.agent.reports.words import duration, showable
from aiflame.agent.store import questions
from aiflame.agent.store.comparison import compare
from aiflame.agent.store.engine import Engine
from aiflame.agent.store.engines import open_store
from aiflame.agent.store.profiles import (
    DEFAULT_STACKS,
    MOST_STACKS,
    By,
    Found,
    difference_of,
    profile_of,
)
from aiflame.agent.store.schema import require
from aiflame.agent.store.selector import (
    AGENT_LABELS,
    CLASS_WORDS,
    LABELS,
    NothingThere,
    Selector,
    held_range,
    holds,
    moment_words,
    newest_begin,
    nothing_there,
)

NAME = "query"

EPILOG = """\
EXAMPLES
  aiflame query top --store fleet                            # functions that cost most
  aiflame query top --store fleet --service 'serv*' --class blocked
  aiflame query flame --store fleet -o fleet.html --by node  # a page, as report makes it
  aiflame query flame --store fleet -f folded -o - | head
  aiflame query kernels --store fleet --by pod               # how busy devices were
  aiflame query stalls --store fleet --by line               # whose kernels waited
  aiflame query agents --store fleet                         # hosts, and what they lost
  aiflame query sql --store fleet "SELECT service, sum(value) FROM samples GROUP BY service"
  aiflame query diff --help                                  # two versions, also in CI
"""

_DIFF_EPILOG = """\
EXAMPLES
  aiflame query diff --store fleet --service train --base version=1.4 --new version=1.5
  aiflame query diff --store fleet --base node=a1 --new node=b1 --fail-on +2%
  aiflame query diff --store fleet --base version=1.4 --new version=1.5 -o diff.html  # and a page
  aiflame query diff --store fleet --base version=1.4 --new version=1.5 --class blocked

EXIT CODES
  0 nothing grew by more   1 something did   5 too few samples to tell
"""

_DEFAULT_LIMIT = 20
_DEFAULT_LAST_NS = 3600 * NS_PER_S
_SIDE_KEYS = (*LABELS, "from", "to")
_ON_CPU, _ALL_CLASSES = "on_cpu", "all"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what `aiflame query` takes."""
    questions_ = parser.add_subparsers(dest="question", metavar="QUESTION", required=True)

    def add(name: str, text: str, run_it: Callable[..., int], **more: Any) -> Any:
        question = questions_.add_parser(name, help=text, description=text, **more)
        question.set_defaults(question_run=run_it)
        add_store_argument(question)
        return question

    top = add("top", "functions that cost most, by themselves and with what they call", _top)
    _add_selection(top)
    _add_class(top, has_all=True)
    add_limit(top, _DEFAULT_LIMIT)
    top.add_argument(
        "--raw",
        dest="is_raw",
        action="store_true",
        help="waits are of the innermost function, also the kernel's, libc's and Python's own",
    )
    flame = add("flame", "a flame graph, or another format of report", _flame)
    _add_selection(flame)
    _add_class(flame, has_all=True, default=_ALL_CLASSES)
    _add_flame(flame)
    kernels = add(
        "kernels", "GPU kernels, what they waited for, and how busy devices were", _kernels
    )
    _add_selection(kernels)
    add_limit(kernels, _DEFAULT_LIMIT)
    kernels.add_argument(
        "--by",
        choices=("kernel", *LABELS),
        default="kernel",
        help="one row for each of these (default: %(default)s)",
    )
    stalls = add("stalls", "what instructions of GPU kernels waited for", _stalls)
    _add_selection(stalls)
    add_limit(stalls, _DEFAULT_LIMIT)
    stalls.add_argument(
        "--by",
        choices=("kernel", "line"),
        default="kernel",
        help="by device and kernel, or by the Python line that launched it (default: %(default)s)",
    )
    stalls.add_argument(
        "--raw",
        dest="is_raw",
        action="store_true",
        help="with --by line: the innermost lines, also those of installed packages",
    )
    agents = add(
        "agents", "hosts: when last heard of, what recording costs them, what they lost", _agents
    )
    _add_selection(agents, AGENT_LABELS)
    add_limit(agents, _DEFAULT_LIMIT)
    _add_diff(
        add(
            "diff",
            "functions whose share differs between two parts of the store",
            _diff,
            epilog=_DIFF_EPILOG,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
    )
    sql = add("sql", "any question, which may read only", _sql)
    sql.add_argument("statement", metavar="SQL", help="tables: samples stacks stacks_1h gpu agents")
    sql.add_argument("--json", action="store_true", help="one object a line (default: a table)")
    sql.add_argument(
        "--parameter",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="value of {NAME:Type} in the statement; may be repeated",
    )
    add_limit(sql, None)


def _add_selection(parser: Any, labels: tuple[str, ...] = LABELS) -> None:
    group = parser.add_argument_group(
        "Which part",
        "May be repeated; * and ? stand for any characters. TIME is 2026-11-23, 2026-11-23T14:30\n"
        "or seconds of Unix, UTC.",
    )
    group.add_argument("--from", dest="from_s", metavar="TIME", type=moment_s, help="from then on")
    group.add_argument("--to", dest="to_s", metavar="TIME", type=moment_s, help="and before then")
    group.add_argument(
        "--last",
        dest="last_ns",
        metavar="TIME",
        type=duration_ns,
        help="the end of what the store holds, this long: 30s, 5m, 2h (default: 1h)",
    )
    for label in labels:
        group.add_argument(
            f"--{label.replace('_', '-')}",
            dest=f"label_{label}",
            metavar="NAME",
            action="append",
            help="only this one",
        )


def _add_class(parser: Any, *, has_all: bool = False, default: str = _ON_CPU) -> None:
    parser.add_argument(
        "--class",
        dest="classes",
        choices=(*questions.CLASSES, *([_ALL_CLASSES] if has_all else [])),
        default=default,
        help="which time is counted (default: %(default)s)",
    )


def _add_output(parser: Any, formats: tuple[str, ...], *, is_required: bool, what: str) -> None:
    parser.add_argument("-f", "--format", choices=formats, help="(default: from the ending of -o)")
    parser.add_argument("-o", "--output", metavar="FILE", required=is_required, help=what)
    parser.add_argument("--force", action="store_true", help="replace FILE (default: refuse)")
    parser.add_argument("--title", metavar="TEXT", help="title (default: what was asked for)")
    parser.add_argument(
        "--most-stacks",
        metavar="N",
        type=_most_stacks,
        default=DEFAULT_STACKS,
        help="the heaviest so many are drawn (default: %(default)s)",
    )


def _add_flame(parser: Any) -> None:
    _add_output(
        parser, tuple(FORMATS), is_required=True, what="file to write, - for standard output"
    )
    parser.add_argument(
        "--by",
        choices=[by.value for by in By],
        default=By.SERVICE.value,
        help="what the outermost frames are (default: %(default)s)",
    )
    parser.add_argument(
        "--view",
        choices=[view.value for view in View],
        help="what to count; the html page can switch (default: wall, with --class what it is of)",
    )
    parser.add_argument(
        "--inverted", action="store_true", help="merge from the leaf (default: from the root)"
    )
    parser.add_argument(
        "--frames",
        choices=[frames.value for frames in Frames],
        default=Frames.BOTH.value,
        help="which frames are shown, as report does it (default: %(default)s)",
    )


def _add_diff(parser: Any) -> None:
    _add_selection(parser)
    _add_class(parser)
    add_limit(parser, _DEFAULT_LIMIT)
    _add_output(
        parser,
        DIFFERENCE_FORMATS,
        is_required=False,
        what="write a differential flame graph too, with widths of --new; - for standard output"
        " in place of the table",
    )
    for side, which in (("base", "before"), ("new", "after")):
        parser.add_argument(
            f"--{side}",
            metavar="KEY=VALUE",
            action="append",
            required=True,
            help=f"what is of the side {which}: a label, from or to; may be repeated",
        )
    add_growth_arguments(parser, "by chance (at most 5 %% of such alarms are false)")


def run(args: argparse.Namespace) -> int:
    """Answer; returns the exit code."""
    engine = open_store(named_store(args), is_read_only=True)
    try:
        require(engine)
        code: int = args.question_run(engine, args)
    finally:
        engine.close()
    return code


def _top(engine: Engine, args: argparse.Namespace) -> int:
    selector = _selector(engine, args)
    return _print(engine, selector, questions.top(engine, selector, args.limit, is_raw=args.is_raw))


def _kernels(engine: Engine, args: argparse.Namespace) -> int:
    selector = _selector(engine, args)
    if args.by == "kernel":
        return _print(engine, selector, questions.kernels(engine, selector, args.limit))
    return _print(engine, selector, questions.busy_by(engine, selector, args.by, args.limit))


def _stalls(engine: Engine, args: argparse.Namespace) -> int:
    selector = _selector(engine, args)
    if args.by == "line":
        lines = questions.stalls_by_line(engine, selector, args.limit, is_raw=args.is_raw)
        return _print(engine, selector, lines)
    if args.is_raw:
        raise UsageError("--raw is of lines", "add --by line")
    return _print(engine, selector, questions.stalls(engine, selector, args.limit))


def _agents(engine: Engine, args: argparse.Namespace) -> int:
    selector = _selector(engine, args)
    return _print(engine, selector, questions.agents(engine, selector, args.limit))


def _print(engine: Engine, selector: Selector, table: Table) -> int:
    """Prints a table; raises NothingThere where the store has nothing of what is asked for."""
    if not table.rows and not holds(engine, selector):
        raise nothing_there(engine, replace(selector, classes=()))
    print_tables([table])
    return 0


def _flame(engine: Engine, args: argparse.Namespace) -> int:
    name, view = _format(args, FORMATS), _view(args)
    if view.is_of_devices and name == "pstats":
        raise UsageError(f"pstats has no {view.label}", "use another -f")
    found = profile_of(
        engine, _selector(engine, args), By(args.by), args.most_stacks, is_page=name == "html"
    )
    options = ReportOptions(
        view=view,
        title=args.title,
        inverted=args.inverted,
        frames=Frames(args.frames),
        leaf=Leaf.STALL,  # a store has no offsets
    )
    _write(found, name, options, args)
    return 0


def _view(args: argparse.Namespace) -> View:
    """Returns what a flame graph counts.

    Raises:
        UsageError: Nothing of the class that is asked for.
    """
    if args.classes == _ALL_CLASSES:
        return View.WALL if args.view is None else View(args.view)
    own = View.CPU if args.classes == _ON_CPU else View.OFFCPU
    view = own if args.view is None else View(args.view)
    if view not in (own, View.WALL):
        raise UsageError(f"{args.classes} is no class of {view.label}", "leave out --view")
    return view


def _write(found: Found, name: str, options: ReportOptions, args: argparse.Namespace) -> None:
    if found.left_out_ns:
        sys.stderr.write(
            f"aiflame: note: {found.left_out:,} lighter stacks are left out,"
            f" {duration(found.left_out_ns)} (--most-stacks)\n"
        )
    data = FORMATS[name].render(found.profile, options)
    write_report(data, args.output, is_forced=args.force)


def _format(args: argparse.Namespace, formats: Collection[str]) -> str:
    return writable_format(args.format, args.output, formats, is_forced=args.force)


def _diff(engine: Engine, args: argparse.Namespace) -> int:
    whole = _selector(engine, args, is_all=True)
    base, new = (_side(whole, side, getattr(args, side)) for side in ("base", "new"))
    if base == new:
        raise UsageError("--base and --new are the same", "--base version=1.4 --new version=1.5")
    if args.output is None and args.format is not None:
        raise UsageError("-f is of a file", "add -o FILE")
    form = None if args.output is None else _format(args, DIFFERENCE_FORMATS)
    least = least_share(args.fail_on)
    found = compare(engine, base, new, is_self=args.is_self, least_share=least)
    if args.output != STDOUT:
        sides = base.words, new.words
        time_words = CLASS_WORDS[args.classes]
        print_tables([found.table(args.limit, sides, time_words, args.is_self)])
    if form is not None:
        both = difference_of(engine, base, new, args.most_stacks)
        _write(both, form, ReportOptions(title=args.title), args)
    return alarm(found.functions, args.fail_on, found.lost)


def _side(whole: Selector, side: str, given: list[str]) -> Selector:
    labels: dict[str, tuple[str, ...]] = {**whole.labels}
    own: dict[str, tuple[str, ...]] = {}
    times: dict[str, int] = {}
    for text in given:
        key, equals, value = text.partition("=")
        known = f"KEY is one of {', '.join(_SIDE_KEYS)}"
        if not equals:
            raise UsageError(f"--{side}: not a KEY=VALUE: {text}", known)
        if key not in _SIDE_KEYS:
            near = difflib.get_close_matches(key, _SIDE_KEYS, 1)
            mean = f" (did you mean {near[0]}?)" if near else ""
            raise UsageError(f"--{side}: no such label: {key}{mean}", known)
        if key in ("from", "to"):
            try:
                times[key] = moment_s(value)
            except argparse.ArgumentTypeError as error:
                raise UsageError(str(error)) from error
        else:
            own[key] = (*own.get(key, ()), value)
    return replace(
        whole,
        labels={**labels, **own},
        begin_s=times.get("from", whole.begin_s),
        end_s=times.get("to", whole.end_s),
    )


def _sql(engine: Engine, args: argparse.Namespace) -> int:
    parameters = {}
    for text in args.parameter:
        name, equals, value = text.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z_]\w{0,60}", name):
            raise UsageError(f"not a NAME=VALUE: {text}", "--parameter service=train")
        parameters[name] = value
    found = engine.query(args.statement, parameters)
    if args.json:
        for row in found.rows[: args.limit]:
            sys.stdout.write(json.dumps(dict(zip(found.columns, row, strict=True))) + "\n")
        return 0
    most = args.limit or _DEFAULT_LIMIT
    numeric = [
        any(type(row[i]) in (int, float) for row in found.rows) for i in range(len(found.columns))
    ]
    print_tables(
        [
            Table(
                "Answer",
                "",
                tuple(
                    f"{'>' if is_number else ''}{showable(name)}"
                    for name, is_number in zip(found.columns, numeric, strict=True)
                ),
                tuple(tuple(_cell(value) for value in row) for row in found.rows[:most]),
                max(0, len(found.rows) - most),
            )
        ]
    )
    return 0


def _cell(value: object) -> str:
    if value is None or value == "":
        return ""
    return showable(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))


def _selector(engine: Engine, args: argparse.Namespace, *, is_all: bool = False) -> Selector:
    labels = {
        name.removeprefix("label_"): tuple(values)
        for name, values in vars(args).items()
        if name.startswith("label_") and values
    }
    chosen = getattr(args, "classes", _ALL_CLASSES)
    classes = () if chosen == _ALL_CLASSES else (chosen,)
    begin, end = _range(engine, args, is_all)
    return Selector(begin, end, labels, classes)


def _range(engine: Engine, args: argparse.Namespace, is_all: bool) -> tuple[int, int]:
    if args.last_ns is not None and (args.from_s is not None or args.to_s is not None):
        raise UsageError("--last excludes --from and --to", "leave out --last")
    if args.from_s is not None and args.to_s is not None:
        if args.to_s <= args.from_s:
            raise UsageError("--to is not after --from", "use a --to that is later than --from")
        return args.from_s, args.to_s
    first, last = held_range(engine)
    if args.from_s is not None or args.to_s is not None or (is_all and args.last_ns is None):
        begin = first if args.from_s is None else args.from_s
        end = last if args.to_s is None else args.to_s
        if end <= begin:
            raise NothingThere(
                "the store holds nothing of that time",
                f"it has what was between {moment_words(first)} and {moment_words(last)}",
            )
        return begin, end
    # What is shorter than a window is a whole one: it has all of its time where it begins.
    begin = min(last - (args.last_ns or _DEFAULT_LAST_NS) // NS_PER_S, newest_begin(engine))
    # A young store has less: rates and titles are of what it holds.
    return max(first, begin), last


def moment_s(text: str) -> int:
    """Return a time in seconds of Unix; for argparse.

    Eight digits are a day, as ISO 8601 has it: as seconds they were of 1970.
    """
    if re.fullmatch(r"\d{8}", text):
        text = f"{text[:4]}-{text[4:6]}-{text[6:]}"
    if re.fullmatch(r"\d{1,10}", text) and int(text) < 2**32:
        return int(text)
    try:
        found = datetime.fromisoformat(text.removesuffix("Z"))
    except ValueError:
        found = None
    if found is not None and found.tzinfo is None:
        found = found.replace(tzinfo=timezone.utc)
    if found is None or not 0 <= found.timestamp() < 2**32:
        raise argparse.ArgumentTypeError(
            f"not a time: {text} (2026-11-23, 20261123, 2026-11-23T14:30, seconds of Unix)"
        )
    return int(found.timestamp())


def _most_stacks(text: str) -> int:
    value = positive(text)
    if value > MOST_STACKS:
        raise argparse.ArgumentTypeError(f"more than a page can hold: {text} (up to {MOST_STACKS})")
    return value
