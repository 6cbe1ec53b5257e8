# SPDX-License-Identifier: Apache-2.0
"""Record where a running program's time goes, then write a capture and a flame graph.

Needs root, or the capabilities that the help names. Everything is rendered from the capture, which
can be rendered again later with `aiflame report`.
"""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import replace
from pathlib import Path

from aiflame.agent.commands.durations import duration_ns
from aiflame.agent.commands.record_options import RecordOptions
from aiflame.agent.commands.record_output import OutputPlan, plan_output
from aiflame.agent.commands.record_progress import ProgressPrinter
from aiflame.agent.commands.record_start import record
from aiflame.agent.devices.choice import AUTO, CHOICES, NONE, ChooseFamilies, choose_families
from aiflame.agent.errors import UsageError
from aiflame.agent.limits import MAX_FREQUENCY_HZ
from aiflame.agent.processes.targets import (
    Target,
    target_of_all,
    target_of_cgroup,
    target_of_comm,
    target_of_command,
    target_of_container,
    target_of_pids,
    target_of_unit,
)
from aiflame.agent.reports import FORMATS

NAME = "record"

EPILOG = """\
Needs root, or CAP_BPF, CAP_PERFMON and CAP_SYS_PTRACE. What is missing without each other one:
  CAP_DAC_READ_SEARCH      names and frames of other users' processes
  CAP_SYSLOG               names of kernel functions
  CAP_CHECKPOINT_RESTORE   names of mapped files that were deleted or replaced
  CAP_SYS_NICE             keeping up on a busy machine
  CAP_SYS_ADMIN            kernel frames of threads asleep since before; on some kernels calls
                           of device APIs, and sampling (Debian and Ubuntu, by default)
`aiflame doctor` says which of them matter here. Root gives up all others before it begins.

EXAMPLES
  sudo aiflame record -p 1234                   # until Ctrl-C or until 1234 ends
  sudo aiflame record -p 1234 -d 30 -o run.aiflame
  sudo aiflame record -a -d 10 -F 199           # every process
  sudo aiflame record --container 4f2a9c -d 10  # or by its name; docker, podman, Kubernetes
  sudo aiflame record --unit nginx -d 10        # a systemd service
  sudo aiflame record --comm nginx -d 10        # all processes of that name
  sudo aiflame record -d 10 -- python3 -c 'while True: pass'
  sudo aiflame record -p 1234 -d 5 -o run.svg   # only the flame graph
  sudo aiflame record -a --keep 10m             # record first, ask later: the last ten minutes

EXIT CODES
  0 done   1 failed   2 not possible as asked   3 not on this machine   4 no samples
  130 a second Ctrl-C: what was not written yet is thrown away; or told to end before CMD began
  of -- CMD, if it ended before the recording was told to: CMD's, 128 + n if signal n killed it
"""

# 99 and not 100: it does not beat in step with work that is done every 10 ms.
_DEFAULT_FREQUENCY_HZ = 99

# Of --gpu-duty: all the time.
_ALWAYS_PERMILLE = 1000
# Of each 10 s helpers sample the first part, and measure from a tenth on, for 0.25 s.
_LEAST_DUTY_TO_CALIBRATE_PERMILLE = 200

# What children enter by themselves.
_WITH_ALL_CHILDREN = ("-a", "--cgroup", "--container", "--unit")


def _pids(text: str) -> list[int]:
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", text):
        raise argparse.ArgumentTypeError(f"not a list of process ids: {text}")
    return [int(pid) for pid in dict.fromkeys(text.split(","))]


def _name(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("a name is missing")
    return text


def _frequency_hz(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= MAX_FREQUENCY_HZ:
        raise argparse.ArgumentTypeError(f"not a frequency from 1 to {MAX_FREQUENCY_HZ}: {text}")
    return int(text)


def _entries(text: str) -> int:
    # 2^24 stacks would be 34 GB of kernel memory; what fits is the kernel's to say.
    if not text.isdecimal() or not 1 <= int(text) <= 1 << 24:
        raise argparse.ArgumentTypeError(f"not a number of entries from 1 to {1 << 24}: {text}")
    return int(text)


def _megabytes(text: str) -> int:
    # From nothing, for those who want frame pointers only, to what the kernel still can give.
    if not text.isdecimal() or int(text) > 1 << 20:
        raise argparse.ArgumentTypeError(f"not a number of megabytes up to {1 << 20}: {text}")
    return int(text) << 20


def _permille(text: str) -> int:
    value = float(text)  # argparse turns a ValueError into a usage error
    if not 0.1 <= value <= 100:
        raise argparse.ArgumentTypeError(f"not a percentage from 0.1 to 100: {text}")
    return round(10 * value)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what `aiflame record` takes."""
    target = parser.add_argument_group("Target (one of them)")
    target.add_argument("-p", "--pid", metavar="PID[,PID]", type=_pids, help="running processes")
    target.add_argument("-a", "--all", action="store_true", help="every process")
    target.add_argument("--cgroup", metavar="PATH", type=Path, help="a cgroup v2 directory")
    target.add_argument(
        "--container",
        metavar="ID|NAME",
        type=_name,
        help="a running container: its name, or the first 4 or more digits of its id",
    )
    target.add_argument(
        "--unit", metavar="NAME", type=_name, help="a running systemd service or scope"
    )
    target.add_argument(
        "--comm",
        metavar="NAME",
        type=_name,
        help="all running processes of exactly that name, or of an executable of that name",
    )
    target.add_argument(
        "command",
        metavar="-- CMD",
        nargs=argparse.REMAINDER,
        help="a command, as the sudo user",
    )
    target.add_argument(
        "-s",
        "--subprocesses",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="follow children of the target, also those that it has already (default: only for"
        " -- CMD and --comm)",
    )
    _add_sampling(parser.add_argument_group("Sampling"))
    output = parser.add_argument_group("Output")
    output.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help="NAME.aiflame: capture, with NAME.html beside it; another ending: only that format"
        " (default: aiflame-COMM-PID-TIME.aiflame)",
    )
    output.add_argument(
        "-f",
        "--format",
        choices=("aiflame", *FORMATS),
        help="write only this (default: aiflame and html)",
    )
    output.add_argument("--force", action="store_true", help="replace files (default: refuse)")
    output.add_argument("-q", "--quiet", action="store_true", help="print only errors")
    _add_advanced(parser.add_argument_group("Advanced"))


def _add_sampling(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "-F",
        "--frequency",
        "-r",
        "--rate",
        metavar="HZ",
        type=_frequency_hz,
        default=_DEFAULT_FREQUENCY_HZ,
        help="samples per second and CPU (default: %(default)s)",
    )
    group.add_argument(
        "-d",
        "--duration",
        metavar="TIME",
        type=duration_ns,
        help="30, 30s, 5m (default: until Ctrl-C or the target ends)",
    )
    group.add_argument(
        "--keep",
        metavar="TIME",
        type=duration_ns,
        help="flight recorder: keep only the newest part of the recording, this long; SIGUSR1"
        " writes a copy (default: keep all)",
    )
    group.add_argument(
        "--off-cpu",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="also record where threads wait (default: yes)",
    )
    group.add_argument(
        "--off-cpu-budget",
        metavar="PCT",
        type=_permille,
        help="take stacks of waits by chance, so that all programs at context switches together"
        " take no more than this share of one CPU; totals of threads and waits of a second and more"
        " stay exact (default: the stack of each wait)",
    )
    group.add_argument(
        "--trace",
        action="store_true",
        help="also list calls of device APIs one by one (default: count them)",
    )
    group.add_argument(
        "--gpu",
        choices=CHOICES,
        default=AUTO,
        help="devices to record: all that are found, none, or one family (default: %(default)s)",
    )
    group.add_argument(
        "--gpu-duty",
        metavar="PCT",
        type=_permille,
        default=_ALWAYS_PERMILLE,
        help="share of the time in which helpers sample stalls; kernel times are always taken"
        " (default: 100)",
    )
    group.add_argument(
        "--gpu-calibrate",
        action="store_true",
        help="correct the sharing of samples, and measure its error: for 0.25 s of each 10 s a"
        " program's kernels run one after the other, which slows it down, and samples name their"
        " launches (NVIDIA); from 12 s on. Not for kernels that wait for each other or for the"
        " program",
    )
    group.add_argument(
        "--no-inject",
        action="store_true",
        help="load nothing into processes: with --gpu FAMILY helpers tell only where they are"
        " there already",
    )
    group.add_argument("-U", dest="user_only", action="store_true", help="no kernel frames")
    group.add_argument("-K", dest="kernel_only", action="store_true", help="no user frames")


def _add_advanced(group: argparse._ArgumentGroup) -> None:
    for name, default, what in (
        ("--stack-storage-size", 16384, "distinct stacks kept between two reads, 2 KB each"),
        (
            "--hash-storage-size",
            65536,
            "aggregates by stack, thread and class kept between two reads",
        ),
        ("--thread-storage-size", 65536, "threads whose off-CPU time is followed"),
    ):
        group.add_argument(
            name, metavar="N", type=_entries, default=default, help=f"{what} (default: {default})"
        )
    group.add_argument(
        "--unwind-memory",
        metavar="MB",
        type=_megabytes,
        default=256 << 20,
        help="kernel memory for unwind tables; a PyTorch process needs 20 (default: 256)",
    )
    group.add_argument(
        "--min-wait",
        metavar="TIME",
        type=duration_ns,
        default=100 * 10**6,
        help="list off-CPU waits from this length one by one (default: 100ms)",
    )


def run(args: argparse.Namespace, choose: ChooseFamilies = choose_families) -> int:
    """Record, and write what was asked for; returns the exit code.

    Args:
        args: Of the command line.
        choose: Which device families `--gpu` means.
    """
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    _refuse_contradictions(args, command)
    plan_output(args.output, args.format, "check", args.force)  # before anything is started
    target = _target(args, command)
    if args.subprocesses is not None:
        target = replace(target, follows_children=args.subprocesses)
    try:
        plan: OutputPlan = plan_output(args.output, args.format, target.file_stem, args.force)
        options = RecordOptions(
            frequency_hz=args.frequency,
            duration_ns=args.duration,
            follow_children=target.follows_children,
            off_cpu=args.off_cpu,
            user_stacks=not args.kernel_only,
            kernel_stacks=not args.user_only,
            stacks_max=args.stack_storage_size,
            sums_max=args.hash_storage_size,
            threads_max=args.thread_storage_size,
            wait_event_ns=args.min_wait,
            unwind_bytes_max=args.unwind_memory,
            command_words=args.command_words,
            trace_calls=args.trace,
            gpu=args.gpu,
            gpu_duty_permille=args.gpu_duty,
            gpu_calibrate=args.gpu_calibrate,
            inject=not args.no_inject,
            keep_ns=args.keep,
            off_cpu_budget_permille=args.off_cpu_budget,
        )
        printer = ProgressPrinter(sys.stderr, args.quiet, args.verbose)
        if target.note:
            printer.say(target.note)
        if args.subprocesses is None:
            _say_who_is_left_out(target, printer)
        return record(target, options, plan, printer, choose)
    finally:
        if target.command is not None:
            target.command.end()


def _say_who_is_left_out(target: Target, printer: ProgressPrinter) -> None:
    # A server's first process only waits: the work is done by its children.
    count = len(target.left_out_children())
    if count:
        children, them = ("children", "them") if count > 1 else ("child", "it")
        printer.say(f"note: {count} {children} of {target.words} not recorded: -s includes {them}")


def _refuse_contradictions(args: argparse.Namespace, command: list[str]) -> None:
    named = [
        name
        for name, given in (
            ("-p", args.pid),
            ("-a", args.all),
            ("--cgroup", args.cgroup),
            ("--container", args.container),
            ("--unit", args.unit),
            ("--comm", args.comm),
            ("-- CMD", command),
        )
        if given
    ]
    if not named:
        raise UsageError(
            "record what?",
            "give one of -p PID, -a, --cgroup PATH, --container ID|NAME, --unit NAME, --comm NAME"
            " or -- CMD",
        )
    if len(named) > 1:
        raise UsageError(f"{' and '.join(named)} exclude each other", f"use only {named[0]}")
    if args.gpu == NONE and args.gpu_duty != _ALWAYS_PERMILLE:
        raise UsageError("--gpu-duty has no effect with --gpu none", "leave out --gpu-duty")
    if args.off_cpu_budget is not None and not args.off_cpu:
        raise UsageError(
            "--off-cpu-budget has no effect with --no-off-cpu", "leave out one of them"
        )
    if args.gpu_calibrate and args.gpu == NONE:
        raise UsageError("--gpu-calibrate has no effect with --gpu none", "leave it out")
    if args.gpu_calibrate and args.gpu_duty < _LEAST_DUTY_TO_CALIBRATE_PERMILLE:
        raise UsageError(
            "--gpu-calibrate has no time to measure in with so low a --gpu-duty",
            "give --gpu-duty 20 or more",
        )
    if args.user_only and args.kernel_only:
        raise UsageError("-U and -K exclude each other", "leave both off for whole stacks")
    if args.subprocesses is not None and named[0] in _WITH_ALL_CHILDREN:
        raise UsageError(
            f"-s has no effect with {named[0]}", "it is about the children of a process"
        )


def _target(args: argparse.Namespace, command: list[str]) -> Target:
    if args.pid:
        return target_of_pids(args.pid)
    if args.cgroup is not None:
        return target_of_cgroup(args.cgroup)
    if args.container is not None:
        return target_of_container(args.container)
    if args.unit is not None:
        return target_of_unit(args.unit)
    if args.comm is not None:
        return target_of_comm(args.comm)
    return target_of_command(command) if command else target_of_all()
