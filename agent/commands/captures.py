# SPDX-License-Identifier: Apache-2.0
"""Opens what a recording has left: a capture, or segments of one that was killed or still runs."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

from aiflame.agent.capture.reader import read_capture
from aiflame.agent.capture.segment import BadSegment
from aiflame.agent.capture.workspace import running, temporary_captures
from aiflame.agent.commands.messages import tell
from aiflame.agent.errors import CaptureError
from aiflame.agent.model.profile import Profile
from aiflame.agent.reports.base import Merge
from aiflame.agent.reports.graph_nodes import GraphStacks, with_graph_nodes
from aiflame.agent.reports.words import showable
from aiflame.agent.sinks.segments import RecordedWindows, are_segments


def read_recording(path: Path) -> Profile:
    """Reads a recording.

    Args:
        path: Of a capture, of a segment, or of a folder of segments. Where nothing is, a recording
            that was to go there: one that was killed is finished, one that runs is read as far as
            it has come.

    Raises:
        CaptureError: There is none, or it cannot be read.
        AiflameError: What was killed cannot be finished.
    """
    if not os.path.lexists(path):
        from aiflame.agent.commands.recover import finish_if_killed

        finish_if_killed(path)
        folder = running(path.absolute())
        if folder is not None:
            tell(
                sys.stderr,
                f"aiflame: note: {showable(str(path))} is still being recorded,"
                " or another command is finishing it\n",
            )
            return _read_so_far(folder, path)
    return _read_segments(path)[0] if are_segments(path) else read_capture(path)


def add_graph_argument(group: argparse._ArgumentGroup) -> None:
    """Adds the option that `with_graphs` looks at."""
    group.add_argument(
        "--graph",
        choices=[graph.value for graph in GraphStacks],
        default=GraphStacks.BOTH.value,
        help="kernels that CUDA graphs ran: under the call that launched the graph, the code that"
        " built (captured) their node, or both, one after the other (default: %(default)s)",
    )


def add_merge_argument(group: argparse._ActionsContainer) -> None:
    """Adds the option that says which processes are one."""
    group.add_argument(
        "--merge",
        choices=[merge.value for merge in Merge],
        help="which processes are one: those of a pid (before and after an exec), of a name, of a"
        " cgroup, of a container, or none (default: comm of record -a, else none)",
    )


def with_graphs(profile: Profile, args: argparse.Namespace) -> Profile:
    """Returns the profile of a recording with kernels of graphs under the stacks asked for."""
    return with_graph_nodes(profile, GraphStacks(args.graph))


def listed(profile: Profile) -> Profile:
    """Returns a profile with instructions of kernels, where the capture has their code alone."""
    if not profile.gpu.objects:
        return profile
    from aiflame.agent.devices.listings import with_listings  # few captures need it

    return with_listings(profile)


def _read_so_far(folder: Path, path: Path) -> Profile:
    """Reads a recording that runs; its capture, once it has ended meanwhile.

    Its segments are removed then, after the capture was written: what was read may be a part of it.
    """
    try:
        profile, is_whole = _read_segments(folder)
    except CaptureError:
        if not os.path.lexists(path):
            raise
    else:
        if is_whole and folder.exists():
            return profile
        if not os.path.lexists(path):
            if is_whole or folder.exists():  # it keeps the newest part alone, for instance
                return profile
            raise CaptureError(f"{path} is not recorded any more, and there is no capture of it")
    tell(sys.stderr, f"aiflame: note: {showable(str(path))} has ended meanwhile\n")
    return read_capture(path)


def _read_segments(path: Path) -> tuple[Profile, bool]:
    """Reads segments; returns as well whether all were there until they had been read.

    Raises:
        CaptureError: There are none, or they cannot be read.
    """
    # Captures that are whole need nobody who names.
    from aiflame.agent.sinks.rebuilt import capture_of_windows

    with tempfile.TemporaryDirectory(dir=temporary_captures()) as name:  # for this user only
        capture = Path(name) / "capture.aiflame"
        try:
            windows = RecordedWindows(path)
            capture_of_windows(capture, windows, windows.facts)
        except BadSegment as error:
            raise CaptureError(f"nothing can be read of {path}: {error}") from error
        for damage in windows.damage:
            tell(sys.stderr, f"aiflame: note: {showable(damage)}\n")
        return read_capture(capture), not windows.removed
