# SPDX-License-Identifier: Apache-2.0
"""Check whether this machine can record, and say how to cure what stands in the way.

It does what `record` does at its start, with the same functions, and records itself for a moment.
Exits 3 when a check fails, else 0, also when there are warnings.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from pathlib import Path

from aiflame.agent import __version__
from aiflame.agent.doctor.base import Context, run_checks
from aiflame.agent.doctor.checks import AGENT_CHECKS, CHECKS, TARGET_CHECKS
from aiflame.agent.doctor.text import as_json, exit_code, lines, summary
from aiflame.agent.errors import UsageError

NAME = "doctor"

EPILOG = """\
EXAMPLES
  sudo aiflame doctor
  sudo aiflame doctor --pid 1234                      # and can that process be recorded?
  sudo aiflame doctor --agent --config agent.toml     # and can the fleet agent run here?
  sudo aiflame doctor --json
  sudo aiflame doctor --skip-checks os.cgroup2,out.cache
"""


def _ids(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def _pid(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"not a process id: {text}")
    return int(text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what `aiflame doctor` takes."""
    parser.add_argument(
        "-p", "--pid", metavar="PID", type=_pid, help="also check this process (default: none)"
    )
    parser.add_argument(
        "--agent", action="store_true", help="check what `aiflame agent` needs (default: `record`)"
    )
    parser.add_argument(
        "--config", metavar="FILE", type=Path, help="with --agent: its configuration"
    )
    parser.add_argument(
        "--skip-checks",
        metavar="ID[,ID]",
        type=_ids,
        default=[],
        help="leave out checks, by the ids that are printed (default: none)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON (default: lines of text)")


def run(args: argparse.Namespace) -> int:
    """Run the checks and print what they found; returns the exit code."""
    if args.config is not None and not args.agent:
        raise UsageError(
            "--config is of the agent", f"aiflame doctor --agent --config {args.config}"
        )
    known = list(dict.fromkeys(c.id for c in (*CHECKS, *AGENT_CHECKS, *TARGET_CHECKS)))
    unknown = [name for name in args.skip_checks if name not in known]
    if unknown:
        raise UsageError(f"no such check: {', '.join(unknown)}", f"they are: {' '.join(known)}")
    checks = AGENT_CHECKS if args.agent else CHECKS
    if args.pid is not None:
        checks = (*checks, *TARGET_CHECKS)
    id_columns = max(len(check.id) for check in checks)
    is_coloured = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    context = Context(pid=args.pid, config_path=args.config)
    results = []
    with context.cleanup:
        for result in run_checks(checks, context, args.skip_checks):
            results.append(result)
            if not args.json:
                shown = lines(result, id_columns, is_coloured, args.verbose > 0)
                print("\n".join(shown), flush=True)
    if args.json:
        facts = {
            "aiflame": __version__,
            "kernel": platform.release(),
            "architecture": platform.machine(),
        }
        print(json.dumps(as_json(results, facts), indent=2))
    else:
        print(summary(results))
    return exit_code(results)
