# SPDX-License-Identifier: Apache-2.0
"""Finish recordings that were killed: what they had stored becomes a capture.

Needs the user that recorded, which mostly is root. The capture holds all but the last second or
two. Names are there for programs and libraries that are still where they were.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from aiflame.agent.capture.reader import read_capture
from aiflame.agent.capture.segment import BadSegment
from aiflame.agent.capture.workspace import Unfinished, Workspace, held, running, unfinished
from aiflame.agent.commands.messages import tell
from aiflame.agent.errors import AiflameError, UsageError
from aiflame.agent.outfile import sudo_ids
from aiflame.agent.reports.words import showable
from aiflame.agent.sinks.segments import RecordedWindows

NAME = "recover"

EPILOG = """\
EXAMPLES
  sudo aiflame recover                                # list them
  sudo aiflame recover run.aiflame                    # finish the one that was to be run.aiflame
  sudo aiflame recover run.aiflame -o saved.aiflame   # under another name
  sudo aiflame recover run.aiflame --discard          # throw it away
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what `aiflame recover` takes."""
    parser.add_argument(
        "recording",
        metavar="PATH",
        nargs="?",
        help="where the recording was to go, or its name in the list (default: list all)",
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("-o", "--output", metavar="FILE", type=Path, help="write it there instead")
    what.add_argument("--discard", action="store_true", help="remove it (default: write it)")
    parser.add_argument("--force", action="store_true", help="replace FILE (default: refuse)")


def run(args: argparse.Namespace) -> int:
    """List unfinished recordings, or finish one; returns the exit code."""
    found = unfinished()
    if args.recording is None:
        if args.output or args.discard:
            raise UsageError("recover which recording?", "aiflame recover lists them")
        _list(found)
        return 0
    with _chosen(found, args.recording).take() as workspace:
        if args.discard:
            workspace.is_kept = False
            tell(sys.stderr, f"Removed {workspace.name}\n")
        else:
            _finish(workspace, args.output, args.force)
    return 0


def finish_if_killed(path: Path) -> None:
    """Finishes the recording that was to be at a path where nothing is, if it was killed.

    Where one runs that is to be there, that one is left its path.

    Raises:
        UsageError: There are several.
        AiflameError: It cannot be finished.
    """
    if os.path.lexists(path):
        return
    matching = [left for left in unfinished() if left.destination.path == path.absolute()]
    if not matching or running(path.absolute()) is not None:
        return
    killed = _only(matching, str(path))
    try:
        workspace = killed.take()
    except AiflameError:
        return  # somebody else is at it, as with one that runs
    with workspace:
        _finish(workspace, None, force=False)


def _list(found: Sequence[Unfinished]) -> None:
    if not found:
        print("no unfinished recording")
    for left in found:
        size_mb = left.size_bytes / 1e6
        command = showable(left.destination.command)
        print(f"{left.name}  {size_mb:.1f} MB  {showable(str(left.destination.path))}")
        print(f"    {command}")


def _chosen(found: Sequence[Unfinished], wanted: str) -> Unfinished:
    matching = _matching(found, wanted)
    if matching:
        return _only(matching, wanted)
    for one in _matching(held(), wanted):
        path = showable(str(one.destination.path))
        raise AiflameError(
            f"{wanted} is still being recorded, or another command is finishing it",
            f"to look at it as far as it has come: aiflame report {path}",
        )
    raise AiflameError(
        f"no unfinished recording of {wanted}", "aiflame recover lists all of this user"
    )


def _matching(found: Sequence[Unfinished], wanted: str) -> list[Unfinished]:
    path = Path(wanted).absolute()
    return [left for left in found if left.name == wanted or left.destination.path == path]


def _only(matching: Sequence[Unfinished], wanted: str) -> Unfinished:
    if len(matching) > 1:
        raise UsageError(
            f"{len(matching)} unfinished recordings of {wanted}",
            f"name one, for instance: aiflame recover {matching[-1].name}",
        )
    return matching[0]


def _finish(workspace: Workspace, output: Path | None, force: bool) -> None:
    if not _is_whole(workspace):
        _rebuild(workspace)
    to = workspace.destination
    to = replace(to, force=to.force or force)
    if output is not None:
        to = replace(to, path=output.absolute(), owner=sudo_ids(), force=force, published=None)
    workspace.destination = to
    size_bytes = workspace.publish(is_named=output is not None)
    path = showable(str(output or to.path))
    tell(
        sys.stderr,
        f"Wrote {path} ({size_bytes / 1e6:.1f} MB), of a recording that was killed\n"
        f"Next: aiflame report {path}\n",
    )


def _rebuild(workspace: Workspace) -> None:
    """Makes the capture of a recording that was killed from its segments."""
    # All else that this verb does needs nobody who names.
    from aiflame.agent.sinks.rebuilt import capture_of_windows

    workspace.database.unlink(missing_ok=True)
    try:
        windows = RecordedWindows(workspace.directory)
        capture_of_windows(workspace.database, windows, windows.facts)
    except BadSegment as error:
        workspace.is_kept = False
        raise AiflameError(
            f"it was killed before anything was recorded: {workspace.name}; removed"
        ) from error
    for damage in windows.damage:
        tell(sys.stderr, f"aiflame: note: {damage}\n")


def _is_whole(workspace: Workspace) -> bool:
    """Whether the capture was written to its end, and only its publication failed."""
    if not workspace.database.exists():
        return False
    with contextlib.suppress(AiflameError, OSError):
        return "incomplete" not in dict(read_capture(workspace.database).recording.facts)
    return False
