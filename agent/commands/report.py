# SPDX-License-Identifier: Apache-2.0
"""Turn a capture into a flame graph or into another tool's format.

Needs neither root nor the machine that was recorded; the same capture always gives the same bytes.
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
from aiflame.agent.commands.report_output import (
    STDOUT,
    named_format,
    refuse_replacing,
    refuse_terminal,
    size_words,
    write_to_stdout,
)
from aiflame.agent.commands.time_range import (
    add_range_arguments,
    range_note,
    range_suffix,
    restricted,
)
from aiflame.agent.errors import UsageError
from aiflame.agent.model.profile import Profile
from aiflame.agent.outfile import make_folder, refuse_existing, write_output
from aiflame.agent.reports import FORMATS, Frames, Report, ReportOptions, View
from aiflame.agent.reports.base import ColorBy, Leaf, Merge
from aiflame.agent.reports.csv_tables import csv_files
from aiflame.agent.reports.device_facts import absence, times_absence
from aiflame.agent.reports.merge import options_for
from aiflame.agent.reports.words import showable
from aiflame.agent.sinks.segments import are_segments

NAME = "report"

EPILOG = """\
EXAMPLES
  aiflame report run.aiflame                       # run.html, for a browser
  aiflame report run.aiflame -f svg --view offcpu  # run.svg: where it waited
  aiflame report run.aiflame -f pprof              # for go tool pprof run.pb.gz
  aiflame report run.aiflame -f speedscope         # for www.speedscope.app
  aiflame report run.aiflame -f folded -o - | grep futex
  aiflame report run.aiflame --frames python       # Python code only
  aiflame report run.aiflame --merge container     # processes of one are one
  aiflame report run.aiflame -f pstats             # for python3 -m pstats
  aiflame report run.aiflame -f csv -o tables     # kernels.csv, stalls.csv, ...
  aiflame report run.aiflame -f svg --view gpu     # what devices waited for
  aiflame report run.aiflame --view gputime        # how long they ran kernels
  aiflame report run.aiflame --from 1s --to 2s     # only this part of the time
"""

_DEFAULT_FORMAT = "html"

# Not one file but a folder of tables.
_TABLES = "csv"
_TABLES_ENDING = "-csv"

_CAPTURE_ENDING = ".aiflame"

# What an option could do in a format, and why it does not: (option, format, reason).
_REFUSALS = (
    ("inverted", "folded", "its lines are whole stacks"),
    ("inverted", "speedscope", "its Sandwich view does that"),
    ("inverted", "pprof", "its peek and web views do that"),
    ("min_width", "folded", "it holds every stack"),
    ("min_width", "speedscope", "it holds every stack"),
    ("min_width", "pprof", "it holds every stack; use pprof's -nodefraction"),
    ("per_thread", "pprof", "threads are labels; use pprof's -tagroot=thread"),
    ("title", "folded", "it has no title"),
    ("plain", "html", "it shows kinds of frames by colour"),
    ("plain", "svg", "it shows kinds of frames by colour"),
    ("plain", "speedscope", "it has no suffixes"),
    ("plain", "pprof", "it has no suffixes"),
    ("inverted", "pstats", "its print_callers() does that"),
    ("min_width", "pstats", "it holds every function; use print_stats(0.1)"),
    ("per_thread", "pstats", "it has no threads"),
    ("title", "pstats", "it has no title"),
    ("plain", "pstats", "it has no suffixes"),
    ("frames", "pstats", "it holds Python frames only"),
    ("leaf", "pprof", "the stall reason is a label; use pprof's -tagleaf=stall_reason"),
    ("leaf", "pstats", "it holds Python frames only"),
    ("color_by", "folded", "it has no colours"),
    ("color_by", "speedscope", "it chooses colours itself"),
    ("color_by", "pprof", "it chooses colours itself"),
    ("color_by", "pstats", "it has no colours"),
    ("idle", "folded", "it holds every stack"),
    ("idle", "speedscope", "it holds every stack"),
    ("idle", "pprof", "it holds every stack"),
    ("idle", "pstats", "it holds Python frames only"),
    ("merge", "pprof", "processes are labels; use pprof's -tagroot=pid"),
    ("merge", "pstats", "it has no processes"),
)

# The same for views: (option, reason), of those of devices, and of all but --view gpu. The page
# holds every view.
_NOT_OF_DEVICES = (("per_thread", "what a device did has no thread"),)
_ONLY_OF_SAMPLES = (
    ("leaf", "only device samples have an instruction and a stall reason"),
    ("color_by", "only device samples have a stall reason"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what `aiflame report` takes."""
    parser.add_argument("capture", metavar="CAPTURE", type=Path, help="file written by record")
    output = parser.add_argument_group("Output")
    output.add_argument(
        "-f",
        "--format",
        metavar="NAME",
        choices=(*FORMATS, _TABLES),
        help=f"{', '.join(FORMATS)}, {_TABLES} (a folder with tables of device samples)"
        f" (default: from the ending of -o, else {_DEFAULT_FORMAT})",
    )
    output.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help="file to write, - for standard output (default: CAPTURE with the time range and the"
        " format's ending)",
    )
    output.add_argument("--force", action="store_true", help="replace FILE (default: refuse)")
    _add_content(parser.add_argument_group("Content"))
    add_range_arguments(parser)
    _add_devices(parser.add_argument_group("GPU"))


def _add_content(content: argparse._ArgumentGroup) -> None:
    content.add_argument(
        "--view",
        choices=[view.value for view in View],
        help="what to count: time of threads, samples of devices, or how long they ran kernels;"
        " the html page can switch (default: wall; of record -a the page opens with cpu)",
    )
    add_merge_argument(content)
    content.add_argument(
        "--per-thread", action="store_true", help="keep threads apart (default: merged)"
    )
    content.add_argument(
        "--inverted", action="store_true", help="merge from the leaf (default: from the root)"
    )
    content.add_argument(
        "--min-width",
        metavar="PCT",
        type=_percentage,
        help="leave out frames narrower than this share (default: the format's own)",
    )
    content.add_argument(
        "--idle",
        action="store_true",
        help="html, svg: wall time also of threads that slept at one location throughout"
        " (default: in a box beside the others)",
    )
    content.add_argument("--title", metavar="TEXT", help="title (default: what was recorded)")
    content.add_argument(
        "--plain", action="store_true", help="folded: no _[k] and _[p] suffixes (default: with)"
    )
    content.add_argument(
        "--frames",
        choices=[frames.value for frames in Frames],
        help="of Python programs: Python and native without the interpreter's own, one of them,"
        f" or everything (default: {Frames.BOTH.value})",
    )
    content.add_argument(
        "--hide-importlib",
        action="store_true",
        help="leave out Python frames that import modules or start the program (default: keep)",
    )


def _add_devices(devices: argparse._ArgumentGroup) -> None:
    add_graph_argument(devices)
    devices.add_argument(
        "--leaf",
        choices=[leaf.value for leaf in Leaf],
        help=f"last frame of device samples in --view gpu (default: {Leaf.OFFSET.value})",
    )
    devices.add_argument(
        "--color-by",
        choices=[color.value for color in ColorBy],
        help="colours of --view gpu: kind of frame, or stall category"
        f" (default: {ColorBy.STALL.value})",
    )


def run(args: argparse.Namespace) -> int:
    """Write the report; returns the exit code."""
    output: str | None = args.output
    if args.format == _TABLES:
        return _write_tables(args)
    report = FORMATS[_format(args.format, output)]
    _refuse_contradictions(args, report)
    if output == STDOUT:
        refuse_terminal(report.name)
        profile = _read(args, report)
        options = _options(args, report, profile)
        _note_if_empty(profile, options)
        write_to_stdout(report.render(profile, options))
        return 0
    path = Path(output) if output is not None else _default_path(args, report.extension)
    refuse_replacing(path, [args.capture])
    refuse_existing(path, args.force, is_named=output is not None)
    profile = _read(args, report)
    options = _options(args, report, profile)
    _note_if_empty(profile, options)
    data = report.render(profile, options)
    write_output(path, data, args.force, is_named=output is not None)
    sys.stderr.write(_wrote(path, data, profile))
    return 0


def _read(args: argparse.Namespace, report: Report) -> Profile:
    profile = restricted(with_graphs(read_recording(args.capture), args), args)
    # The page holds every view; others show instructions in one.
    return listed(profile) if report.name == "html" or args.view == View.GPU.value else profile


def _write_tables(args: argparse.Namespace) -> int:
    if args.output == STDOUT:
        raise UsageError("csv is several files: not written to standard output", "use -o FOLDER")
    for option in (
        "per_thread",
        "inverted",
        "min_width",
        "title",
        "plain",
        "leaf",
        "color_by",
        "merge",
        "idle",
    ):
        if getattr(args, option) not in (None, False):
            flag = "--" + option.replace("_", "-")
            raise UsageError(f"{flag} has no effect with -f csv", f"leave out {flag}")
    folder = Path(args.output) if args.output else _default_path(args, _TABLES_ENDING)
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"not a folder: {folder}", "csv is several files: use -o FOLDER")
    profile = listed(restricted(with_graphs(read_recording(args.capture), args), args))
    if why := absence(profile):
        sys.stderr.write(f"aiflame: note: {why}\n")
    contents = csv_files(profile, _options(args, None, profile))
    make_folder(folder)
    for name in contents:
        refuse_existing(folder / name, args.force, is_named=False)
    for name, data in contents.items():
        write_output(folder / name, data, args.force, is_named=False)
        sys.stderr.write(_wrote(folder / name, data, profile))
    return 0


def _percentage(text: str) -> float:
    value = float(text)  # argparse turns a ValueError into a usage error
    if not 0 <= value <= 100:
        raise argparse.ArgumentTypeError(f"not a percentage from 0 to 100: {text}")
    return value


def _format(chosen: str | None, output: str | None) -> str:
    return chosen or _DEFAULT_FORMAT if output is None else named_format(chosen, output)


def _refuse_contradictions(args: argparse.Namespace, report: Report) -> None:
    for option, name, reason in _REFUSALS:
        value = getattr(args, option)
        # Not "in (None, False)": --min-width 0 is given, and equals False.
        if name == report.name and value is not None and value is not False:
            flag = "--" + option.replace("_", "-")
            raise UsageError(f"{flag} has no effect with -f {name}: {reason}", f"leave out {flag}")
    view = View(args.view or View.WALL)
    if view.is_of_devices and report.name == "pstats":
        raise UsageError(f"pstats has no {view.label}", "use another -f")
    if report.name == "html":
        return
    refused = (
        *(_NOT_OF_DEVICES if view.is_of_devices else ()),
        *(_ONLY_OF_SAMPLES if view is not View.GPU else ()),
    )
    for option, reason in refused:
        if getattr(args, option):
            flag = "--" + option.replace("_", "-")
            raise UsageError(
                f"{flag} has no effect with --view {view.value}: {reason}", f"leave out {flag}"
            )


def _options(args: argparse.Namespace, report: Report | None, profile: Profile) -> ReportOptions:
    view = View.WALL if report is None else options_for(profile, report.name).view
    return ReportOptions(
        view=View(args.view or view),
        merge=Merge(args.merge) if args.merge else None,
        is_idle_shown=args.idle,
        per_thread=args.per_thread,
        inverted=args.inverted,
        min_width_pct=args.min_width,
        title=args.title,
        plain=args.plain,
        frames=Frames(args.frames or Frames.BOTH),
        hide_importlib=args.hide_importlib,
        leaf=Leaf(args.leaf or Leaf.OFFSET),
        color_by=ColorBy(args.color_by) if args.color_by else None,
    )


def _default_path(args: argparse.Namespace, ending: str) -> Path:
    stem = args.capture.name.removesuffix(_CAPTURE_ENDING)
    name = stem + range_suffix(args) + ending
    # Segments lie in a folder of the recorder's.
    path: Path = Path(name) if are_segments(args.capture) else args.capture.with_name(name)
    return path


def _note_if_empty(profile: Profile, options: ReportOptions) -> None:
    if options.view is View.GPU:
        if why := absence(profile):
            sys.stderr.write(f"aiflame: note: {why}\n")
    elif options.view is View.GPU_TIME:
        if why := times_absence(profile):
            sys.stderr.write(f"aiflame: note: {why}\n")
    elif not options.view.selects(profile.samples["klass"]).any():
        when = f" in {range_note(profile)}" if range_note(profile) else ""
        sys.stderr.write(f"aiflame: note: the capture holds no {options.view.label}{when}\n")


def _wrote(path: Path, data: bytes, profile: Profile) -> str:
    facts = ", ".join(filter(None, [size_words(len(data)), range_note(profile)]))
    return f"Wrote {showable(str(path))} ({facts})\n"
