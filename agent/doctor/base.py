# SPDX-License-Identifier: Apache-2.0
"""What a check is, and how a list of them is run.

A check tries a feature and says what it found; it compares no versions. One that finds something
a recording cannot do without raises, as the same function does when `record` starts; one that
finds a limit returns a warning. A failure never ends the run: checks that build on it are skipped.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from aiflame.agent.errors import AiflameError
from aiflame.agent.fleet.config import AgentConfig
from aiflame.agent.kernel.loader import Programs
from aiflame.agent.kernel.probes import Probes


class Status(enum.Enum):
    """How a check came out, as the word that is printed. Only FAIL keeps one from recording."""

    OK = "ok"
    WARN = "warn"
    FAIL = "FAIL"
    SKIP = "skip"


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check found.

    Attributes:
        status: How it came out.
        text: One line.
        cure: One command or sentence that helps, None where there is nothing to do or none known.
        details: More lines, for -v; "" for most.
    """

    status: Status
    text: str
    cure: str | None = None
    details: str = ""


def ok(text: str) -> Finding:
    """Nothing to complain of."""
    return Finding(Status.OK, text)


def warn(text: str, cure: str | None) -> Finding:
    """Recording works, with a limit."""
    return Finding(Status.WARN, text, cure)


def skip(text: str) -> Finding:
    """Not tried, and why."""
    return Finding(Status.SKIP, text)


@dataclass(slots=True)
class Context:
    """What checks hand on to those after them.

    Attributes:
        pid: Process of --pid, or None.
        programs: Loaded programs, once there are any.
        probes: Attached programs, once there are any.
        config_path: File of --config, or None.
        config: Of the agent, once it was read.
        cleanup: Takes everything out of the kernel again when it is closed.
    """

    pid: int | None = None
    programs: Programs | None = None
    probes: Probes | None = None
    config_path: Path | None = None
    config: AgentConfig | None = None
    cleanup: ExitStack = field(default_factory=ExitStack)


@dataclass(frozen=True, slots=True)
class Check:
    """One row of the table.

    Attributes:
        id: "<group>.<name>": scripts know it, so it stays.
        find: Raises AiflameError when recording is impossible.
        limit: What a warning takes away, for the summary.
        needs: Ids of checks that must not have failed for this one to make sense.
    """

    id: str
    find: Callable[[Context], Finding]
    limit: str = ""
    needs: tuple[str, ...] = ("os.linux",)


@dataclass(frozen=True, slots=True)
class Result:
    """A check and what it found."""

    check: Check
    finding: Finding


def run_checks(
    checks: Sequence[Check], context: Context, left_out: Collection[str]
) -> Iterator[Result]:
    """Runs checks in order and yields each result as it comes.

    Args:
        checks: Each after those it needs.
        context: Handed to every check; the caller closes its `cleanup`.
        left_out: Ids that are not run. What needs one of them is tried all the same.
    """
    unfit: dict[str, str] = {}  # id of each that failed or was blocked: id of what failed
    for check in checks:
        cause = next((unfit[need] for need in check.needs if need in unfit), None)
        if check.id in left_out:
            finding = skip("left out by --skip-checks")
        elif cause is not None:
            unfit[check.id] = cause
            finding = skip(f"not tried, because {cause} failed")
        else:
            finding = _find(check, context)
            if finding.status is Status.FAIL:
                unfit[check.id] = check.id
        yield Result(check, finding)


def _find(check: Check, context: Context) -> Finding:
    try:
        return check.find(context)
    except AiflameError as error:
        text, _, details = str(error).partition("\n")
        return Finding(Status.FAIL, text.rstrip(":"), error.hint, details)
    except OSError as error:
        return Finding(Status.FAIL, f"the system refused: {error.strerror or error}")
