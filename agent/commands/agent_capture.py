# SPDX-License-Identifier: Apache-2.0
"""Have a running agent make a capture: of what it has on disk, or a recording beside it.

The agent hands over the capture as a descriptor; all files that are written are the caller's.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import BinaryIO, NamedTuple

from aiflame.agent.capture.workspace import temporary_captures
from aiflame.agent.commands.durations import duration_ns
from aiflame.agent.commands.record_output import OutputPlan, plan_output
from aiflame.agent.commands.record_progress import ProgressPrinter
from aiflame.agent.errors import NO_SAMPLES_EXIT, AiflameError, EnvironmentUnfit, UsageError
from aiflame.agent.fleet.capture_request import (
    MAX_ANSWER_BYTES,
    SOCKET,
    CaptureRequest,
    InDirectory,
)
from aiflame.agent.fleet.config import AgentSettings, variable_of
from aiflame.agent.limits import is_disk_full
from aiflame.agent.outfile import make_folder, write_output
from aiflame.agent.user_folders import temporary_folder

EPILOG = """\
Needs root, or the agent's own user. One capture is made at a time; the agent's `capture_length` and
`capture_size` limit it. It records on meanwhile. Ctrl-C ends a capture, and nothing is written.

EXAMPLES
  sudo aiflame agent capture --all --last 5m                         # what it has on disk
  sudo aiflame agent capture --pid 1234 -d 5s -F 499 -o x.aiflame    # a recording beside it
"""

_DEFAULT_FREQUENCY_HZ = 99
# The codes that an agent may answer with.
_ERRORS = {kind.exit_code: kind for kind in (AiflameError, UsageError, EnvironmentUnfit)}


class _Capture(NamedTuple):
    """What an agent hands over; the file is the caller's to close."""

    stem: str
    file: BinaryIO


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what `aiflame agent capture` takes."""
    what = parser.add_argument_group("What (one of them; --container may be in a --pod)")
    what.add_argument("--pid", metavar="PID", type=int, default=0, help="a process of the host")
    what.add_argument("--cgroup", metavar="PATH", default="", help="a cgroup, and those below it")
    what.add_argument(
        "--pod", metavar="NAME", default="", help="a pod: NAME, NAMESPACE/NAME or its uid"
    )
    what.add_argument(
        "--container",
        metavar="ID|NAME",
        default="",
        help="a container: its name, or the first 4 or more digits of its id",
    )
    what.add_argument("-a", "--all", action="store_true", help="every process")
    when = parser.add_argument_group("When (one of them)")
    when.add_argument(
        "-d", "--duration", metavar="TIME", type=duration_ns, default=0, help="record so long"
    )
    when.add_argument(
        "--last",
        metavar="TIME",
        type=duration_ns,
        default=0,
        help="the newest of what the agent has on disk, in windows of five seconds, or of up to a"
        " minute where there is much to do",
    )
    parser.add_argument(
        "-F",
        "--frequency",
        metavar="HZ",
        type=int,
        default=None,
        help=f"with -d: samples per second and CPU (default: {_DEFAULT_FREQUENCY_HZ})",
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help="NAME.aiflame: capture, with NAME.html beside it; another ending: only that format"
        " (default: aiflame-WHAT-TIME.aiflame)",
    )
    parser.add_argument("--force", action="store_true", help="replace files (default: refuse)")
    parser.add_argument("-q", "--quiet", action="store_true", help="print only errors")
    parser.add_argument(
        "--directory",
        metavar="PATH",
        type=Path,
        default=None,
        help="that of the agent (default: of `agent --config FILE capture`, or $AIFLAME_DIRECTORY,"
        " else /var/lib/aiflame/agent)",
    )


def run(args: argparse.Namespace) -> int:
    """Ask for a capture, and write it; returns the exit code."""
    if args.last and args.frequency is not None:
        raise UsageError(
            "-F is of recordings: what is on disk was sampled before", "leave out -F, or use -d"
        )
    request = CaptureRequest.parse(
        CaptureRequest(
            pid=args.pid,
            cgroup=args.cgroup,
            pod=args.pod,
            container=args.container,
            is_all=args.all,
            duration_ns=args.duration,
            frequency_hz=_DEFAULT_FREQUENCY_HZ if args.frequency is None else args.frequency,
            last_ns=args.last,
        ).message()
    )
    _planned(args, "check")  # before anything is recorded
    printer = ProgressPrinter(sys.stderr, args.quiet, args.verbose)
    directory = args.directory or Path(os.environ.get(variable_of("directory"), _default()))
    with closing(_connected(directory)) as agent:
        capture = _captured(agent, request, printer)
    with capture.file as file:
        plan = _planned(args, capture.stem)
        return _written(file, plan, args.force, printer)


def _planned(args: argparse.Namespace, stem: str) -> OutputPlan:
    return plan_output(args.output, None, stem, args.force, is_option_there=False)


def _default() -> str:
    return str(AgentSettings().directory)


def _connected(directory: Path) -> socket.socket:
    """Connects to an agent.

    Raises:
        EnvironmentUnfit: There is none, or it may not be asked.
    """
    agent = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        with InDirectory(directory) as path:
            agent.connect(str(path))
    except PermissionError as error:
        agent.close()
        raise EnvironmentUnfit(
            f"the agent of {directory} may not be asked by this user", "ask as root, with sudo"
        ) from error
    except OSError as error:
        agent.close()
        raise EnvironmentUnfit(
            f"no agent takes requests at {directory / SOCKET}: {(error.strerror or '').lower()}",
            "is `aiflame agent` running? --directory names its `directory`",
        ) from error
    return agent


def _captured(agent: socket.socket, request: CaptureRequest, printer: ProgressPrinter) -> _Capture:
    """Asks, shows what is said, and returns what comes.

    Raises:
        AiflameError: There is no capture, for the reason that the agent tells.
    """
    data = b""
    try:
        agent.send(request.message())
        while True:
            data, fds, _, _ = socket.recv_fds(agent, MAX_ANSWER_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
            if not data:
                break
            answer = json.loads(data)
            if "say" in answer:
                printer.say(answer["say"])
            elif "done" in answer and fds:
                return _Capture(answer["done"], os.fdopen(fds[0], "rb"))
            else:
                error = _ERRORS.get(answer["code"], AiflameError)
                raise error(answer["error"], answer["hint"])
    except OSError:
        pass  # it has ended
    except (ValueError, KeyError, TypeError) as error:
        raise AiflameError(
            "what came from the agent is no answer", "is it of another version? restart it"
        ) from error
    raise AiflameError("the agent has ended the capture", "its log may say why")


@contextmanager
def _kept_elsewhere(file: BinaryIO, name: str) -> Iterator[None]:
    """Puts a capture where there may be room, if a disk is full: what it is of has passed."""
    try:
        yield
    except AiflameError as error:
        if not is_disk_full(error):
            raise
        try:
            folder = temporary_folder() / f"aiflame-{secrets.token_hex(8)}"
        except EnvironmentUnfit:
            raise error from None
        file.seek(0)
        try:
            make_folder(folder)
            write_output(folder / name, file, force=False, is_private=True)
        except AiflameError:
            shutil.rmtree(folder, ignore_errors=True)
            raise error from None
        raise AiflameError(
            f"{error}; the capture is kept as {folder / name}", error.hint
        ) from error


def _written(file: BinaryIO, plan: OutputPlan, force: bool, printer: ProgressPrinter) -> int:
    from aiflame.agent.capture.reader import read_capture
    from aiflame.agent.commands.record_summary import loss_lines, sample_lines
    from aiflame.agent.reports import FORMATS
    from aiflame.agent.reports.graph_nodes import with_graph_nodes
    from aiflame.agent.reports.merge import options_for

    is_file = False
    if plan.capture is not None:
        is_named = plan.capture == plan.named
        with _kept_elsewhere(file, plan.capture.name):
            written = write_output(plan.capture, file, force, is_named=is_named, is_private=True)
        is_file = written is not None  # and no device
        printer.say(f"Wrote {plan.capture} ({file.tell() / 1e6:.1f} MB)")
    if plan.capture is not None and is_file:
        profile = read_capture(plan.capture)
    else:
        with tempfile.TemporaryDirectory(dir=temporary_captures()) as name:  # for this user only
            copy = Path(name) / "capture.aiflame"
            file.seek(0)
            write_output(copy, file, force=False, is_private=True)
            profile = read_capture(copy)
    profile = with_graph_nodes(profile)
    if plan.report is not None and plan.report_path is not None:
        page = FORMATS[plan.report].render(profile, options_for(profile, plan.report))
        is_named = plan.report_path == plan.named
        name = plan.report_path.with_suffix(".aiflame").name
        with nullcontext() if plan.capture is not None else _kept_elsewhere(file, name):
            write_output(plan.report_path, page, force, is_named=is_named, is_private=True)
        printer.say(f"Wrote {plan.report_path} ({len(page) / 1e6:.1f} MB)")
    for line in (*sample_lines(profile), *loss_lines(profile)):
        printer.say(line)
    if plan.capture is not None:
        printer.say(f"Next: aiflame stats {plan.capture}")
    return 0 if len(profile.samples) else NO_SAMPLES_EXIT
