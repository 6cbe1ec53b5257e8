# SPDX-License-Identifier: Apache-2.0
"""Record this whole host until SIGTERM, and send what is recorded.

It runs in the foreground, and logs to standard error. SIGHUP reads the configuration again.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from aiflame.agent.commands import agent_capture
from aiflame.agent.devices.choice import ChooseFamilies, choose_families
from aiflame.agent.errors import AiflameError, UsageError
from aiflame.agent.fleet.config import AgentConfig, all_settings, flag_of, load
from aiflame.agent.fleet.reloads import ReloadRequests
from aiflame.agent.fleet.sinks import sink_module
from aiflame.agent.outfile import refuse_shared_directory, refuse_unfit_for_libraries
from aiflame.agent.settings import Kind, Refusals

NAME = "agent"

EPILOG = """\
Each flag is also a key of the file, and a variable: --sinks-captures-max-age is `max_age` in the
table [sinks.captures], and AIFLAME_SINKS_CAPTURES_MAX_AGE. Flags go over variables, and these over
the file. A sink is on once something is said of it. Needs the rights of `aiflame record -a`.
In rules a comma joins conditions that must all hold, and a semicolon separates rules, of which one
must; an item of a list in the file, and each further --exclude, is another rule. Secrets are given
by files (--health-token-file), never by flags, which all users of a host can read.

EXAMPLES
  sudo aiflame agent --config agent.toml
  sudo aiflame agent --sinks-captures-directory /var/lib/aiflame/captures
  aiflame agent --config agent.toml --check-config   # print what it would do
  sudo aiflame agent capture --all --last 5m         # what a running one has on disk, as a capture
  sudo aiflame agent capture --pid 1234 -d 5s -F 499 # a recording beside it
"""

# Of argparse's results: keys of settings have dots.
_PREFIX = "setting:"


class _RefuseSecret(argparse.Action):
    """Refuses a secret on the command line, which all users of the host can read."""

    def __call__(self, *_: object, **__: object) -> None:
        flag = self.option_strings[0]
        raise UsageError(
            f"{flag}: a secret is not taken from the command line, where all users can read it",
            f"put it into a file that only you can read: {flag}-file FILE",
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what `aiflame agent` takes."""
    actions = parser.add_subparsers(dest="action", metavar="[capture]")
    agent_capture.add_arguments(
        actions.add_parser(
            "capture",
            help="ask a running agent for a capture",
            description=(agent_capture.__doc__ or "").partition("\n")[0],
            epilog=agent_capture.EPILOG,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
    )
    parser.add_argument("--config", metavar="FILE", type=Path, help="a TOML file")
    parser.add_argument(
        "--check-config",
        action="store_true",
        help="print the effective configuration, and exit with 0, or 2 where it is wrong",
    )
    groups: dict[str, Any] = {}
    for key, one in all_settings():
        table = key.rpartition(".")[0]
        title = f"Table [{table}]" if table else "Settings"
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        arguments: dict[str, Any] = {
            "dest": _PREFIX + key,
            "help": one.words.replace("%", "%%"),
            "default": None,
        }
        if one.kind is Kind.FLAG:
            arguments["action"] = argparse.BooleanOptionalAction
        elif one.kind is Kind.SECRET:
            arguments.update(action=_RefuseSecret, help=argparse.SUPPRESS)
        elif one.kind is Kind.RULES:
            arguments.update(action="append", metavar=one.kind.name)
        else:
            arguments["metavar"] = one.kind.name
        groups[title].add_argument(flag_of(key), **arguments)


def run(args: argparse.Namespace, choose: ChooseFamilies = choose_families) -> int:
    """Record until a signal; returns the exit code.

    Args:
        args: Of the command line.
        choose: Which device families `--gpu` means.
    """
    flags = {
        name.removeprefix(_PREFIX): value
        for name, value in vars(args).items()
        if name.startswith(_PREFIX) and value is not None
    }
    if args.action is not None:
        if args.directory is None and (flags or args.config is not None):
            args.directory = load(args.config, flags, os.environ).agent.directory
        return agent_capture.run(args)
    if args.check_config:
        return _check(load(args.config, flags, os.environ))
    reloads = ReloadRequests()  # before all that takes time
    from aiflame.agent.fleet.agent import begin_fork_server, run_agent  # not to check
    from aiflame.agent.fleet.host_checks import enter_host_cgroup_namespace
    from aiflame.agent.fleet.log import Log

    enter_host_cgroup_namespace()  # before there are other threads and processes

    with closing(begin_fork_server()) as server:
        return run_agent(
            server,
            load(args.config, flags, os.environ),
            lambda: load(args.config, flags, os.environ),
            choose,
            args.command_words,
            Log(),
            reloads,
        )


def _check(config: AgentConfig) -> int:
    from aiflame.agent.fleet import health  # TLS, to check alone

    for warning in config.warnings:
        sys.stderr.write(f"warning: {warning}\n")
    refusals = Refusals()
    for name, settings in config.sinks.items():
        with refusals.taken():
            sink_module(name).check(settings)
    try:
        health.check(config.agent)
    except UsageError as error:  # an agent records without its endpoint, and tries again
        sys.stderr.write(f"warning: {error}: no health endpoint until it can be read\n")
    with refusals.taken():
        _refuse_unfit("directory", config.agent.directory, refuse_shared_directory)
    if config.agent.gpu_helper_directory is not None:
        with refusals.taken():
            helpers = config.agent.gpu_helper_directory
            _refuse_unfit("gpu_helper_directory", helpers, refuse_unfit_for_libraries)
    refusals.tell()
    sys.stdout.write(config.toml())
    return 0


def _refuse_unfit(key: str, directory: Path, refuse: Callable[[Path], None]) -> None:
    """Refuses a directory with which an agent would not start here."""
    try:
        refuse(directory)
    except AiflameError as error:
        raise UsageError(f"{key}: {error}", error.hint) from error
