# SPDX-License-Identifier: Apache-2.0
"""Which files a recording writes, and how a capture gets its final name."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from aiflame.agent.errors import UsageError
from aiflame.agent.outfile import own_descriptor, refuse_existing
from aiflame.agent.reports.endings import (
    ending_of,
    format_of_name,
    no_format_for,
    refuse_other_ending,
)

CAPTURE_ENDING = ".aiflame"
_CAPTURE_FORMAT = "aiflame"
_DEFAULT_FORMAT = "html"

# Of a capture that was not asked for, and is all there is of a recording that failed.
_PARTIAL_ENDING = f".partial{CAPTURE_ENDING}"

# Names of pods and cgroups may be as long as those of files, which are 255 bytes with all of ours.
_MAX_STEM_BYTES = 180


@dataclass(frozen=True, slots=True)
class OutputPlan:
    """What to write. A recording always makes a capture; it is kept only if it has a path.

    Attributes:
        capture: Where the capture goes, None to throw it away.
        report: Name in FORMATS, None for no flame graph.
        report_path: Where that goes.
        force: Replace what exists.
        named: The path that the user gave: that alone may be a device or a FIFO.
    """

    capture: Path | None
    report: str | None
    report_path: Path | None
    force: bool
    named: Path | None

    @property
    def kept_path(self) -> Path:
        """Where the capture goes if the recording fails, however it was to end."""
        if self.capture is not None:
            return self.capture
        assert self.report_path is not None  # noqa: S101 - plan_output makes no plan without either
        # Beside the report; a device is in a folder that nothing else belongs into.
        folder = Path() if is_special(self.report_path) else self.report_path.parent
        return folder / f"{self.report_path.stem}{_PARTIAL_ENDING}"


def is_special(path: Path) -> bool:
    """Whether a path is no file's as yet; what counts is what it is when it is opened."""
    return own_descriptor(path) is not None or (path.exists() and not path.is_file())


def plan_output(
    output: str | None,
    format_name: str | None,
    stem: str,
    force: bool,
    *,
    is_option_there: bool = True,
) -> OutputPlan:
    """Decides what is written where.

    Args:
        output: -o as given.
        format_name: -f as given.
        stem: "<comm>-<pid>" for default names, of which so much is taken as files can have.
        force: --force.
        is_option_there: Whether the command has -f.

    Raises:
        UsageError: A file exists, there is no such folder or format, or -o and -f contradict.
    """
    if output == "-":
        raise UsageError("a recording cannot go to standard output", "aiflame report can: -o -")
    now = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    safe_stem = "".join(c if c.isalnum() or c in "-_." else "_" for c in stem)
    safe_stem = safe_stem.encode(errors="replace")[:_MAX_STEM_BYTES].decode(errors="ignore")
    path = Path(output if output is not None else f"aiflame-{safe_stem}-{now}{CAPTURE_ENDING}")
    plan = _plan(path, output is not None, format_name, force, is_option_there)
    for file in (plan.capture, plan.report_path):
        if file is not None:
            refuse_existing(file, force, is_named=file == plan.named)
    return plan


def _plan(
    path: Path, is_named: bool, format_name: str | None, force: bool, is_option_there: bool
) -> OutputPlan:
    is_capture = path.suffix == CAPTURE_ENDING
    named = path if is_named else None
    if format_name is not None:
        refuse_other_ending(format_name, str(path))
    if format_name == _CAPTURE_FORMAT:
        return OutputPlan(path, None, None, force, named)
    if format_name is not None:
        beside = path.with_suffix(ending_of(format_name))
        return OutputPlan(
            None, format_name, path if is_named and not is_capture else beside, force, named
        )
    if is_capture:
        report_path = path.with_suffix(ending_of(_DEFAULT_FORMAT))
        return OutputPlan(path, _DEFAULT_FORMAT, report_path, force, named)
    implied = format_of_name(path.name)
    if implied is None:
        also = (CAPTURE_ENDING,)
        raise no_format_for(path.name, also=also, is_option_there=is_option_there)
    return OutputPlan(None, implied, path, force, named)
