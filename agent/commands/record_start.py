# SPDX-License-Identifier: Apache-2.0
"""The start of `record`: what takes long is begun before most of the program is imported."""

from __future__ import annotations

import contextlib

from aiflame.agent import priority
from aiflame.agent.allocator import map_large_blocks
from aiflame.agent.commands.record_options import RecordOptions
from aiflame.agent.commands.record_output import OutputPlan
from aiflame.agent.commands.record_progress import ProgressPrinter
from aiflame.agent.devices.choice import ChooseFamilies
from aiflame.agent.kernel import checks, descriptors
from aiflame.agent.kernel.least import give_up_rights
from aiflame.agent.processes.targets import Target
from aiflame.agent.processes.taskstats import TaskStats, are_readable
from aiflame.agent.recording.foundation import Foundation
from aiflame.agent.recording.kernel_accounts import KernelAccounts


def record(
    target: Target,
    options: RecordOptions,
    plan: OutputPlan,
    printer: ProgressPrinter,
    choose: ChooseFamilies,
) -> int:
    """Records, writes what is planned, and prints the summary; returns the exit code.

    Raises:
        EnvironmentUnfit: This machine cannot record.
        Aborted: A second Ctrl-C.
        EndedAtOnce: Another second signal; what was recorded is kept.
        Exception: Anything else, after what was recorded has been written.
    """
    map_large_blocks()
    descriptors.raise_limit()
    checks.require_all()
    with contextlib.ExitStack() as parts:
        # With the rights that are given up next. A flight recorder's capture begins when nobody
        # reads them.
        is_told = options.keep_ns is None and are_readable()
        stats = parts.enter_context(TaskStats()) if is_told else None
        give_up_rights()
        return _record(target, options, plan, printer, choose, KernelAccounts(stats))


def _record(
    target: Target,
    options: RecordOptions,
    plan: OutputPlan,
    printer: ProgressPrinter,
    choose: ChooseFamilies,
    accounts: KernelAccounts,
) -> int:
    printer.say(f"preparing to record {target.words}: kernel programs, unwind tables, devices ...")
    if not priority.hurry():
        printer.say(
            "note: no CAP_SYS_NICE, so this runs at normal priority: on a busy machine it may be"
            " late, and samples may find no room"
        )
    with Foundation(options.for_programs(target)) as foundation:
        from aiflame.agent.commands import record_session  # the kernel is at work meanwhile

        return record_session.record(target, options, plan, printer, foundation, choose, accounts)
