# SPDX-License-Identifier: Apache-2.0
"""The command line: finds the verb, and turns every error into one message and an exit code.

A verb is a module of agent/commands with NAME, EPILOG, add_arguments() and run(); its docstring's
first line is its help. Adding one is a new module and a line in VERBS.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import importlib
import io
import os
import resource
import select
import shlex
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from aiflame.agent import __version__, priority
from aiflame.agent.commands.messages import lead_nowhere, open_standard_streams, tell
from aiflame.agent.errors import Aborted, AiflameError
from aiflame.agent.redaction import redacted

VERBS = (
    *("record", "report", "stats", "diff", "dump", "agent", "recover", "store", "query"),
    "doctor",
)

EXAMPLES = """\
EXAMPLES
  sudo aiflame record -p 1234                # until Ctrl-C; writes a capture and a page
  sudo aiflame record -a -d 10               # every process for 10 s
  sudo aiflame record -- python3 train.py    # from its first instruction
  aiflame report run.aiflame -f svg          # render a capture again, without root
  aiflame stats run.aiflame                  # tables in the terminal
  aiflame diff base.aiflame new.aiflame      # what two captures differ in
  sudo aiflame dump -p 1234                  # what each of its threads does right now
  sudo aiflame recover                       # what killed recordings have left
  sudo aiflame agent --config agent.toml     # the whole host, all day
  aiflame store init --store fleet           # a store of many recordings
  aiflame query top --store fleet            # which functions cost most in all of them
  aiflame doctor                             # can this machine record?
"""

# Of OpenBLAS, which numpy's wheels bring along.
_BLAS_THREADS = "OPENBLAS_NUM_THREADS"

# What glibc says of a library that finds no room (elf/dl-map-segments.h, 2.36), without the reason:
# that a file system forbids to run it is said so as well.
_NOT_MAPPED = "failed to map segment from shared object"

# Exit code of a program that a closed pipe or a Ctrl-C ends (128 + signal number).
_EXIT_SIGINT, _EXIT_SIGPIPE = 130, 141


def _import_numpy() -> None:
    """Imports numpy without threads.

    Its linear algebra, which nothing here uses, has one for each processor: they would keep the
    rights that a recording gives up later. The variable is read while it is imported; a command
    that is recorded finds it as it was.
    """
    before = os.environ.get(_BLAS_THREADS)
    os.environ[_BLAS_THREADS] = "1"
    importlib.import_module("numpy")
    if before is None:
        del os.environ[_BLAS_THREADS]
    else:
        os.environ[_BLAS_THREADS] = before


def _module(verb: str) -> ModuleType:
    return importlib.import_module(f"aiflame.agent.commands.{verb}")


def _parser(chosen: str | None) -> argparse.ArgumentParser:
    """Makes the parser; with a verb chosen, the other verbs' modules are not imported."""
    parser = argparse.ArgumentParser(
        prog="aiflame",
        description="Where an AI job's time goes, on the CPU and off it, in one flame graph.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"aiflame {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB")
    for name in VERBS:
        if chosen in VERBS and name != chosen:
            verbs.add_parser(name)
            continue
        module = _module(name)
        summary = (module.__doc__ or "").partition("\n")[0]
        verb = verbs.add_parser(
            name,
            help=summary,
            description=summary,
            epilog=module.EPILOG,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        verb.add_argument(
            "-v",
            "--verbose",
            action="count",
            default=0,
            help="say more; -vv shows where in the program an error arose",
        )
        module.add_arguments(verb)
    return parser


def _print_error(error: AiflameError) -> None:
    words = f"aiflame: {error}\n" + (f"\n  {error.hint}\n" if error.hint else "")
    # Lists of what there is have names in them, of cgroups for instance, that anybody may give.
    tell(sys.stderr, "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in words))


def _scarce_resource(error: Exception) -> AiflameError | None:
    """Returns what to say where the kernel has no more memory, processes or threads for us."""
    limit_bytes, _ = resource.getrlimit(resource.RLIMIT_AS)
    is_limited = limit_bytes != resource.RLIM_INFINITY
    # Of a thread or process that could not be started it is a BlockingIOError.
    is_memory = (
        isinstance(error, MemoryError)
        or getattr(error, "errno", 0) == errno.ENOMEM
        or (isinstance(error, ImportError) and is_limited and _NOT_MAPPED in str(error))
    )
    if not is_memory and not isinstance(error, BlockingIOError):
        return None
    if is_limited:  # a thread without room for its stack says EAGAIN
        return AiflameError(
            f"out of memory: the limit of this process is {limit_bytes / 1e6:,.0f} MB",
            "ulimit -v unlimited  (systemd: LimitAS=infinity)",
        )
    if is_memory:
        return AiflameError("out of memory", "free some, or record fewer processes at once")
    return AiflameError(
        f"no more threads or processes can be started: {error}",
        "ulimit -u unlimited  (systemd: TasksMax=infinity; containers: --pids-limit=-1)",
    )


def _is_output_closed() -> bool:
    """Whether standard output is a pipe or socket without a reader; others may break as well."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)  # POLLERR and POLLHUP are always told
    return bool(poll.poll(0))


def _give_up_output() -> None:
    with contextlib.suppress(io.UnsupportedOperation):  # it is in memory
        lead_nowhere(sys.stdout.fileno())


def _deleted_folder(error: Exception) -> AiflameError | None:
    """Returns what to say where a relative path has no folder any more (getcwd(3), ENOENT)."""
    if isinstance(error, FileNotFoundError):
        try:
            Path.cwd()
        except FileNotFoundError:
            return AiflameError(
                "the current folder was deleted", "change to another folder: cd FOLDER"
            )
    return None


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command line and returns its exit code.

    Args:
        arguments: Without the program's name; those of this process when None.
    """
    open_standard_streams()
    # Who ignores it has the kernel reap children before anyone can ask how they ended (wait(2)).
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["help"]:
        words = [*words[1:2], "--help"]
    verbose = 0
    if words[:1] == ["record"]:
        # It asks for a copy of what is recorded; until something is, it is to end nothing.
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        priority.hurry()  # on a busy machine the imports alone would take seconds
    try:
        _import_numpy()
        parser = _parser(words[0] if words else None)
        try:
            options = parser.parse_args(words)
        except SystemExit:
            sys.stdout.flush()  # of --help
            raise
        if options.verb is None:
            parser.print_help(sys.stderr)
            return 2
        verbose = options.verbose
        options.command_words = shlex.join(["aiflame", *redacted(words)])
        code = int(_module(options.verb).run(options))
        sys.stdout.flush()
        return code
    except AiflameError as error:
        if verbose > 1:
            tell(sys.stderr, traceback.format_exc())
        _print_error(error)
        return error.exit_code
    except KeyboardInterrupt:
        _give_up_output()  # else what is left would be written at exit, to whoever does not read
        _print_error(Aborted("interrupted"))
        return _EXIT_SIGINT
    except Exception as error:  # a user never sees a traceback but with -vv
        if isinstance(error, BrokenPipeError) and _is_output_closed():
            _give_up_output()  # else Python would complain once more when it flushes at exit
            return _EXIT_SIGPIPE
        if verbose > 1:
            tell(sys.stderr, traceback.format_exc())
        if (known := _scarce_resource(error) or _deleted_folder(error)) is not None:
            _print_error(known)
            return known.exit_code
        what = f"internal error: {type(error).__name__}: {error}"
        _print_error(AiflameError(what, "run again with -vv and report what it prints"))
        return 1
    finally:
        priority.as_started()
