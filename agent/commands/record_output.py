# SPDX-License-Identifier: Apache-2.0
"""Which files a recording writes, and how a capture gets its final name."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from aiflame.agent.errors import UsageError
from aiflame.agent.outfile import refuse_existing
from aiflame.agent.reports import FORMATS
from aiflame.agent.reports.endings import format_of_name, no_format_for, refuse_other_ending

CAPTURE_ENDING = ".aiflame"
_CAPTURE_FORMAT = "aiflame"
_DEFAULT_FORMAT = "html"


@dataclass(frozen=True, slots=True)
class OutputPlan:
    """What to write. A recording always makes a capture; it is kept only if it has a path.

    Attributes:
        capture: Where the capture goes, None to throw it away.
        report: Name in FORMATS, None for no picture.
        report_path: Where that goes.
        force: Replace what exists.
    """

    capture: Path | None
    report: str | None
    report_path: Path | None
    force: bool

    @property
    def any_path(self) -> Path:
        """A path in the folder that is written to."""
        path = self.capture or self.report_path
        assert path is not None  # noqa: S101 - plan_output makes no plan without either
        return path


def plan_output(output: str | None, format_name: str | None, stem: str, force: bool) -> OutputPlan:
    """Decides what is written where.

    Args:
        output: -o as given.
        format_name: -f as given.
        stem: "<comm>-<pid>" for default names.
        force: --force.

    Raises:
        UsageError: A file exists, there is no such folder or format, or -o and -f contradict.
    """
    if output == "-":
        raise UsageError("a recording cannot go to standard output", "aiflame report can: -o -")
    now = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    safe_stem = "".join(c if c.isalnum() or c in "-_." else "_" for c in stem)
    path = Path(output if output is not None else f"aiflame-{safe_stem}-{now}{CAPTURE_ENDING}")
    plan = _plan(path, output is not None, format_name, force)
    for file in (plan.capture, plan.report_path):
        if file is not None:
            refuse_existing(file, force)
    return plan


def _plan(path: Path, is_named: bool, format_name: str | None, force: bool) -> OutputPlan:
    is_capture = path.suffix == CAPTURE_ENDING
    if format_name is not None:
        refuse_other_ending(format_name, str(path))
    if format_name == _CAPTURE_FORMAT:
        return OutputPlan(path, None, None, force)
    if format_name is not None:
        named = path if is_named and not is_capture else None
        report_path = named or path.with_suffix(FORMATS[format_name].extension)
        return OutputPlan(None, format_name, report_path, force)
    if is_capture:
        report_path = path.with_suffix(FORMATS[_DEFAULT_FORMAT].extension)
        return OutputPlan(path, _DEFAULT_FORMAT, report_path, force)
    implied = format_of_name(path.name)
    if implied is None:
        raise no_format_for(path.name)
    return OutputPlan(None, implied, path, force)
