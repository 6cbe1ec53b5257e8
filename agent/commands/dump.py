# SPDX-License-Identifier: Apache-2.0
"""Print what every thread of a process does at this moment.

Each thread's stack with its Python lines, its state, what it waits for and since when, whether it
is on a CPU or off it. The process is not stopped and nothing in it is changed.
"""

from __future__ import annotations

import argparse
import io
import re
import sys

from aiflame.agent.dumps.render import Shown, as_json, text
from aiflame.agent.dumps.session import DumpSession
from aiflame.agent.kernel.checks import require_all
from aiflame.agent.kernel.descriptors import raise_limit
from aiflame.agent.kernel.least import give_up_rights
from aiflame.agent.processes.targets import target_of_pids
from aiflame.agent.symbols.frames import clean_name
from aiflame.agent.symbols.service import SymbolService
from aiflame.agent.symbols.store import cache_dir

NAME = "dump"

EPILOG = """\
Frames are printed leaf first. A wait is counted from when the thread last left a CPU, to about a
millisecond. Of a thread that is on a CPU only the Python frames can be read, and they may have
changed meanwhile; each such thread is marked.

EXAMPLES
  sudo aiflame dump -p 1234                  # Python and native frames of each thread
  sudo aiflame dump -p 1234 --frames python  # Python lines only
  sudo aiflame dump -p 1234 --frames all     # with kernel frames and the interpreter's own
  sudo aiflame dump -p 1234 --json | python3 -m json.tool
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what `aiflame dump` takes."""
    parser.add_argument(
        "-p",
        "--pid",
        metavar="PID[,PID]",
        type=_pids,
        required=True,
        help="running processes, separated by commas",
    )
    parser.add_argument(
        "--frames",
        choices=[shown.value for shown in Shown],
        default=Shown.MIXED.value,
        help="which frames to print (default: %(default)s)",
    )
    parser.add_argument(
        "--native",
        dest="frames",
        action="store_const",
        const=Shown.ALL.value,
        help="the same as --frames all",
    )
    parser.add_argument(
        "--json", action="store_true", help="print a JSON object with all frames instead of text"
    )


def run(args: argparse.Namespace) -> int:
    """Print the dump; returns the exit code."""
    raise_limit()
    require_all()
    target_of_pids(args.pid)  # each is there, and no thread
    cache = cache_dir()
    give_up_rights()
    with SymbolService(cache) as service, DumpSession(cache, service) as session:
        dump = session.take(args.pid)
        problems = [*service.problems, *session.problems]
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A function's name may hold what the terminal's encoding can't say.
        sys.stdout.reconfigure(errors="replace")
    sys.stdout.write(as_json(dump) if args.json else text(dump, Shown(args.frames)))
    sys.stdout.flush()
    for problem in problems:
        sys.stderr.write(
            f"aiflame: note: {problem.reason.stored_name}: {clean_name(problem.detail)}\n"
        )
    if args.verbose:
        sys.stderr.write(f"aiflame: ready after {dump.start_ns / 1e6:.0f} ms\n")
    return 0


def _pids(words: str) -> list[int]:
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", words):
        raise argparse.ArgumentTypeError(f"not a list of process ids: {words}")
    return [int(pid) for pid in dict.fromkeys(words.split(","))]
