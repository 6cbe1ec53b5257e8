# SPDX-License-Identifier: Apache-2.0
"""The options that choose a time range of a capture: --from, --to and --last."""

from __future__ import annotations

import argparse

from aiflame.agent.commands.durations import duration_ns, moment_ns
from aiflame.agent.errors import UsageError
from aiflame.agent.model.profile import NS_PER_S, Profile, TimeRange
from aiflame.agent.reports.facts import moment, range_words
from aiflame.agent.reports.time_range import in_range, recorded_ns, whole_seconds


def add_range_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    group = parser.add_argument_group(
        "Time range",
        "Times since the start of the recording: 10, 10s, 250ms, 5m. A capture knows\n"
        "seconds: each one that the range touches is in it as a whole.",
    )
    group.add_argument(
        "--from",
        dest="from_ns",
        metavar="TIME",
        type=moment_ns,
        help="leave out what was before (default: the start)",
    )
    group.add_argument(
        "--to",
        dest="to_ns",
        metavar="TIME",
        type=duration_ns,
        help="leave out what came after (default: the end)",
    )
    group.add_argument(
        "--last",
        dest="last_ns",
        metavar="TIME",
        type=duration_ns,
        help="only the end of the recording, this long (default: all of it)",
    )


def restricted(profile: Profile, args: argparse.Namespace) -> Profile:
    """Return the part of a profile that was asked for: all of it without these options.

    Raises:
        UsageError: No recording has such a part, or this one has not.
    """
    chosen = _chosen(recorded_ns(profile), args.from_ns, args.to_ns, args.last_ns)
    return profile if chosen is None else in_range(profile, chosen)


def range_suffix(args: argparse.Namespace) -> str:
    """Return what tells a report's own name from that of another range: "-10s-25s", "-last-5s"."""
    if args.last_ns is not None:
        return f"-last-{_typed(args.last_ns)}"
    if args.from_ns is None and args.to_ns is None:
        return ""
    return f"-{_typed(args.from_ns or 0)}-{'end' if args.to_ns is None else _typed(args.to_ns)}"


def _typed(ns: int) -> str:
    return moment(ns).replace(" ", "")


def range_note(profile: Profile) -> str:
    """Return which part of the recording a profile is of, "" for all of it."""
    recording = profile.recording
    return "" if recording.time_range is None else range_words(recording)


def _chosen(
    end_ns: int, from_ns: int | None, to_ns: int | None, last_ns: int | None
) -> TimeRange | None:
    if last_ns is not None:
        if from_ns is not None or to_ns is not None:
            raise UsageError("--last excludes --from and --to", "leave out --last")
        if last_ns > end_ns:
            raise UsageError(
                f"--last {moment(last_ns)} is longer than the recording of {moment(end_ns)}",
                "leave out --last",
            )
        return whole_seconds(end_ns - last_ns, end_ns, end_ns)
    if from_ns is None and to_ns is None:
        return None
    start_ns, stop_ns = from_ns or 0, end_ns if to_ns is None else to_ns
    if start_ns >= end_ns:
        raise UsageError(
            f"--from {moment(start_ns)} is past the end of the recording, {moment(end_ns)}",
            "use an earlier one, or --last 5s",
        )
    if stop_ns <= start_ns:
        raise UsageError(
            f"--to {moment(stop_ns)} is not after --from {moment(start_ns)}",
            "use a --to that is later than --from",
        )
    found = whole_seconds(start_ns, stop_ns, end_ns)
    # A recording of 29.98 s may well be asked for until 30 s.
    if stop_ns > end_ns and stop_ns - end_ns >= NS_PER_S:
        raise UsageError(
            f"--to {moment(stop_ns)} is past the end of the recording, {moment(end_ns)}",
            "leave out --to for all of the rest",
        )
    return found
