# SPDX-License-Identifier: Apache-2.0
"""Results as lines for people and as JSON for programs; pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aiflame.agent.doctor.base import Result, Status
from aiflame.agent.errors import EnvironmentUnfit
from aiflame.agent.reports.words import showable

# Raised when a field changes its meaning or goes; new fields and new checks do not count.
SCHEMA = 1

# Terminal attributes (ECMA-48 8.3.117): green, yellow, bold red, faint.
_COLOURS = {Status.OK: "32", Status.WARN: "33", Status.FAIL: "1;31", Status.SKIP: "2"}
_STATUS_COLUMNS = max(len(status.value) for status in Status)
# The check that shows a recording at work, and the group that speaks of one process only.
_PROOF, _OFF_CPU_PROOF, _TARGET_GROUP = "bpf.sample", "bpf.off_cpu", "target."
_AGENT_GROUP = "agent."


def exit_code(results: Sequence[Result]) -> int:
    """Returns 0, or that of EnvironmentUnfit when a check failed."""
    failed = any(result.finding.status is Status.FAIL for result in results)
    return EnvironmentUnfit.exit_code if failed else 0


def lines(result: Result, id_columns: int, is_coloured: bool, is_verbose: bool) -> list[str]:
    """Returns the finding, then its cure, each as one line.

    Args:
        result: What to show.
        id_columns: Length of the longest id.
        is_coloured: Colour the status word; the word is there in any case.
        is_verbose: Show details as well.
    """
    finding = result.finding
    word = f"{finding.status.value:<{_STATUS_COLUMNS}}"
    if is_coloured:
        word = f"\033[{_COLOURS[finding.status]}m{word}\033[0m"
    shown = [f" {word}  {result.check.id:<{id_columns}}  {showable(finding.text)}"]
    indent = " " * (_STATUS_COLUMNS + 3)
    details = finding.details.splitlines()
    if is_verbose:
        shown += [f"{indent}| {showable(line) if line else ''}".rstrip() for line in details]
    elif details:
        shown.append(f"{indent}{len(details)} more lines: aiflame doctor -v")
    if finding.cure:
        shown.append(f"{indent}fix: {showable(finding.cure)}")
    return shown


def summary(results: Sequence[Result]) -> str:
    """Returns how many came out how, and what will work."""
    of_status = {status: [r for r in results if r.finding.status is status] for status in Status}
    counts = ", ".join(
        f"{len(found)} {status.value}"
        for status, found in of_status.items()
        if found or status is Status.OK
    )
    return f"{counts}: {_verdict(results, of_status)}."


def _verdict(results: Sequence[Result], of_status: dict[Status, list[Result]]) -> str:
    failed = [result.check.id for result in of_status[Status.FAIL]]
    if any(not check.startswith((_TARGET_GROUP, _AGENT_GROUP)) for check in failed):
        return "recording will not work here; report and stats will"
    if any(check.startswith(_AGENT_GROUP) for check in failed):
        return "the agent will not start; record will work"
    if failed:
        return "this process cannot be recorded; others can"
    proven = {result.check.id for result in of_status[Status.OK]}
    if _PROOF not in proven:
        works = "nothing found that prevents recording, but it was not tried"
    elif _OFF_CPU_PROOF not in proven:
        works = "recording on the CPU will work; off the CPU was not tried"
    else:
        works = "recording on and off the CPU will work"
    limits = [result.check.limit for result in of_status[Status.WARN] if result.check.limit]
    return f"{works}, with limits ({'; '.join(limits)})" if limits else works


def as_json(results: Sequence[Result], facts: dict[str, str]) -> dict[str, Any]:
    """Returns what --json prints.

    Args:
        results: All of them.
        facts: About the machine, by name.
    """
    return {
        "schema": SCHEMA,
        **facts,
        "exit_code": exit_code(results),
        "summary": summary(results),
        "checks": [
            {
                "id": result.check.id,
                "status": result.finding.status.value.lower(),
                "finding": result.finding.text,
                "cure": result.finding.cure,
                "details": result.finding.details,
            }
            for result in results
        ],
    }
