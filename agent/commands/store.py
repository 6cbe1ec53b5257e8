# SPDX-License-Identifier: Apache-2.0
"""Make a store for the recordings of many hosts, and put captures into it.

The store is a ClickHouse server, or a directory with the same engine inside this program (the
package chdb): for one machine, and one program at a time.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from dataclasses import replace
from pathlib import Path

from aiflame.agent.commands.captures import read_recording
from aiflame.agent.commands.store_options import add_store_argument, named_store
from aiflame.agent.commands.tables import positive
from aiflame.agent.errors import UsageError
from aiflame.agent.fleet.batches import batches_of
from aiflame.agent.model.batch import Batch, Labels
from aiflame.agent.model.profile import NS_PER_S
from aiflame.agent.reports.words import showable
from aiflame.agent.store.address import Server, address_of
from aiflame.agent.store.engine import KEEP_DAYS, MOST_KEEP_DAYS
from aiflame.agent.store.engines import open_store
from aiflame.agent.store.inserts import insert_once, inserts_of
from aiflame.agent.store.schema import migrate, require
from aiflame.agent.store.selector import moment_words

NAME = "store"

EPILOG = """\
EXAMPLES
  aiflame store init --store fleet                     # a new directory
  aiflame store add run.aiflame --store fleet          # put a capture into it
  aiflame store add run.aiflame --store fleet --service train --version 1.4
"""

# Rows of a capture are of so many seconds: fine enough to compare parts of it, and coarse enough
# to sum. Of a long one, as an agent's windows are.
_STEP_S, _LONG_STEP_S = 10, 60
_LONG_S = 3_600

_S_PER_DAY = 86_400


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what `aiflame store` takes."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    init = actions.add_parser("init", help="make its tables, or bring them up to date")
    add_store_argument(init)
    init.add_argument(
        "--keep-days",
        metavar="N",
        type=_keep_days,
        help=f"of new tables: after so many days samples go (default: {KEEP_DAYS} on a"
        f" server, never in a directory; at most {MOST_KEEP_DAYS:,})",
    )
    init.set_defaults(action_run=_init)
    add = actions.add_parser("add", help="put a capture into it")
    add.add_argument("captures", metavar="CAPTURE", type=Path, nargs="+", help="written by record")
    add_store_argument(add)
    for name, what in _LABELS.items():
        add.add_argument(f"--{name}", metavar="NAME", default="", help=what)
    add.set_defaults(action_run=_add)


_LABELS = {
    "service": "whose it is (default: as an agent's capture says, else the name of each process)",
    "version": "of the service (default: as it says)",
    "node": "the host that was recorded (default: as it says, else this one's name)",
    "cluster": "which hosts it belongs to (default: none)",
    "namespace": "of a pod (default: as it says)",
    "pod": "of all its processes (default: as it says)",
    "container": "of all its processes (default: as it says)",
}


def run(args: argparse.Namespace) -> int:
    """Do it; returns the exit code."""
    code: int = args.action_run(args)
    return code


def _keep_days(text: str) -> int:
    value = positive(text)
    if value > MOST_KEEP_DAYS:
        raise argparse.ArgumentTypeError(f"more than {MOST_KEEP_DAYS:,} days: {text}")
    return value


def _init(args: argparse.Namespace) -> int:
    name = named_store(args)
    is_server = isinstance(address_of(name), Server)
    keep_days = args.keep_days or (KEEP_DAYS if is_server else 0)
    engine = open_store(name, is_read_only=False, is_new=True)
    try:
        before, after = migrate(engine, keep_days)
        kept = require(engine).keep_days
    finally:
        engine.close()
    said = "is up to date" if before == after else f"has its tables, version {after}"
    keeps = f"samples are kept for {kept} days" if kept else "samples are kept for ever"
    sys.stderr.write(f"The store {showable(name)} {said}; {keeps}\n")
    return 0


def _add(args: argparse.Namespace) -> int:
    name = named_store(args)
    recorded = {path: _batches(path, args) for path in args.captures}
    engine = open_store(name, is_read_only=False)
    try:
        keep_days = require(engine).keep_days
        for path, batches in recorded.items():
            batch = batches[0]
            _refuse_too_old(path, batch, keep_days)
            samples, there = 0, 0
            step_s = _STEP_S if batch.duration_ns <= _LONG_S * NS_PER_S else _LONG_STEP_S
            sent: set[int] = set()

            def is_new(stack_id: int, sent: set[int] = sent) -> bool:
                is_first = stack_id not in sent
                sent.add(stack_id)
                return is_first

            for piece in inserts_of(batches, args.cluster, is_new, step_s):
                if insert_once(engine, piece):
                    samples += piece.samples
                else:
                    there += piece.samples
            sys.stderr.write(
                f"Added {showable(str(path))}: {samples:,} samples of"
                f" {moment_words(batch.begin_unix_ns // NS_PER_S)}"
                + (f"; {there:,} were in the store already\n" if there else "\n")
            )
    finally:
        engine.close()
    return 0


def _batches(path: Path, args: argparse.Namespace) -> list[Batch]:
    """Returns a capture, divided by whose its processes were where an agent has said that."""
    profile = read_recording(path)
    given = {
        name: value
        for name in ("service", "container", "node", "namespace", "pod", "version")
        if (value := getattr(args, name))
    }
    nobodys = replace(Labels("", node=platform.node()), **given)
    if profile.labels:
        labels = [nobodys if one is None else replace(one, **given) for one in profile.labels]
        if found := [*batches_of(profile, labels)]:
            return found
    recording = profile.recording
    return [Batch(nobodys, profile, recording.started_unix_ns, recording.duration_ns)]


def _refuse_too_old(path: Path, batch: Batch, keep_days: int) -> None:
    """The engine takes rows that are past their time, and drops them without a word."""
    age_days = (time.time() - batch.begin_unix_ns / NS_PER_S) / _S_PER_DAY
    if keep_days and age_days >= keep_days:
        raise UsageError(
            f"{path} is {age_days:.0f} days old: this store keeps samples for {keep_days}",
            "a store with a longer --keep-days",
        )
