# SPDX-License-Identifier: Apache-2.0
"""One `record` from start to summary: record, complete the capture, publish it, render the page.

What is recorded is on disk a second later, and stays readable whatever ends it (`record_sinks`).
Whatever goes wrong, what was stored by then is published, and what cannot be published is kept for
`aiflame recover`. Only a second Ctrl-C throws it away, and only before it is published. Any other
second signal leaves it as it is.
"""

from __future__ import annotations

import contextlib
import platform
import resource
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from aiflame.agent import __version__, priority
from aiflame.agent.allocator import give_back_freed_memory
from aiflame.agent.capture.schema import FACT_PREFIX, SYMBOLS_FACT
from aiflame.agent.capture.workspace import (
    RECORDING_KEPT,
    Destination,
    Workspace,
    unfinished,
)
from aiflame.agent.commands.record_accounts import put_accounts
from aiflame.agent.commands.record_copy import Copies
from aiflame.agent.commands.record_losses import loss_rows
from aiflame.agent.commands.record_options import RecordOptions
from aiflame.agent.commands.record_output import OutputPlan
from aiflame.agent.commands.record_progress import ProgressPrinter
from aiflame.agent.commands.record_sinks import NamesLost, RecordSinks
from aiflame.agent.devices.choice import AUTO, ChooseFamilies
from aiflame.agent.errors import NO_SAMPLES_EXIT, Aborted, AiflameError, DiskFull, EndedAtOnce
from aiflame.agent.fleet.cost import Budget, CostController
from aiflame.agent.kernel import abi
from aiflame.agent.kernel.probes import online_cpus
from aiflame.agent.losses import KINDS_BY_NAME, LossKind
from aiflame.agent.model.profile import Profile
from aiflame.agent.outfile import sudo_ids, write_output
from aiflame.agent.processes.targets import Target
from aiflame.agent.recording.cut_sleeps import LateWaits
from aiflame.agent.recording.foundation import Foundation
from aiflame.agent.recording.kernel_accounts import KernelAccounts
from aiflame.agent.recording.recorder import Outcome, Progress, Recorder
from aiflame.agent.recording.signals import StopSignals
from aiflame.agent.reports import FORMATS
from aiflame.agent.reports.words import duration, percent
from aiflame.agent.sinks.capture_report import Report
from aiflame.agent.symbols.service import SymbolService
from aiflame.agent.symbols.store import cache_dir
from aiflame.gpu.base import Family, Loading, Wanted

if TYPE_CHECKING:
    from aiflame.agent.capture.writer import CaptureWriter


# Being late by less is not worth a line: of what -d says, and in all.
_OVERRUN_SHARE, _OVERRUN_NS = 0.03, 200_000_000

# Of what windows leave out, which only they count.
_OF_WINDOWS = (
    LossKind.WINDOW_STACKS_FULL,
    LossKind.WINDOW_ROWS_FULL,
    LossKind.WINDOW_EVENTS_FULL,
    LossKind.WINDOW_TOO_LARGE,
    LossKind.PYTHON_CHAIN_LOST,
    LossKind.CALL_SIZES_CUT,
    LossKind.GRAPH_BUILDERS_FULL,
)


@dataclass(frozen=True, slots=True)
class _RunningCost:
    """What this process took from the start to the end of the recording."""

    cpu_ns: int
    wall_ns: int
    peak_rss_bytes: int


def record(
    target: Target,
    options: RecordOptions,
    plan: OutputPlan,
    printer: ProgressPrinter,
    foundation: Foundation,
    choose: ChooseFamilies,
    accounts: KernelAccounts,
) -> int:
    """As `record_start.record`, with what that has begun."""
    families = choose(options.gpu)
    _mention_unfinished(printer.say)
    destination = Destination(
        path=plan.kept_path.absolute(),
        command=options.command_words,
        force=plan.force,
        owner=sudo_ids(),
    )
    with (
        StopSignals() as signals,
        Workspace.create(destination) as workspace,
    ):
        session = _Session(target, options, plan, workspace, printer, signals)
        try:
            session.take(foundation, families, accounts)
            profile = session.report()
            session.summarise(profile)
        except EndedAtOnce as error:
            raise _with_what_is_kept(error, workspace) from None
    if session.command_exit_code is not None:
        return session.command_exit_code
    return 0 if len(profile.samples) else NO_SAMPLES_EXIT


def _with_what_is_kept(error: EndedAtOnce, workspace: Workspace) -> EndedAtOnce:
    if not workspace.is_kept:
        return error
    path = workspace.destination.path
    return EndedAtOnce(f"{error}{RECORDING_KEPT}", f"aiflame recover {path}")


def _mention_unfinished(say: Callable[[str], None]) -> None:
    """Says that there are unfinished recordings, if there are."""
    paths = [str(left.destination.path) for left in unfinished()]
    if paths:
        which = paths[0] if len(paths) == 1 else f"{len(paths)} recordings"
        say(f"killed earlier, and not finished: {which}; see: aiflame recover")


class _Session:
    def __init__(
        self,
        target: Target,
        options: RecordOptions,
        plan: OutputPlan,
        workspace: Workspace,
        printer: ProgressPrinter,
        signals: StopSignals,
    ) -> None:
        self._target = target
        self._options = options
        self._plan = plan
        self._workspace = workspace
        self._printer = printer
        self._signals = signals
        self._late_waits = LateWaits(0, 0)
        self._late = "0"
        self._late_tables = 0
        # Of a command that ended before it was told to, by Ctrl-C or at the end of the recording.
        self.command_exit_code: int | None = None

    def take(
        self, foundation: Foundation, families: Sequence[Family], accounts: KernelAccounts
    ) -> None:
        """Records, and publishes the capture."""
        with contextlib.ExitStack() as parts:
            try:
                recorder = parts.enter_context(
                    Recorder(
                        self._target,
                        foundation,
                        self._signals,
                        families,
                        are_families_named=self._options.gpu != AUTO,
                        wanted=self._wanted,
                        steers=self._steers(),
                        # A flight recorder's capture begins when nobody reads them.
                        accounts=accounts if self._options.keep_ns is None else None,
                        with_thread_names=True,
                    )
                )
                recorder.start(self._options.duration_ns, self._printer.say)
                sinks = parts.enter_context(
                    RecordSinks(
                        self._workspace,
                        self._first_facts(recorder),
                        recorder.table,
                        self._printer.say,
                        self._options.keep_ns,
                    )
                )
                self._say_attached()
                give_back_freed_memory()  # programs and tables are in the kernel
            except Aborted:
                raise Aborted("aborted: nothing was written") from None
            if self._target.command is not None and self._signals.requested:
                raise Aborted("told to end before the command began: nothing was written")
            try:
                outcome, cost = self._record(recorder, sinks, families)
                self._finish(recorder, sinks, outcome, cost)
            except Aborted:
                raise Aborted("aborted: nothing was written") from None
            # Whatever it is: what was stored by then is published.
            except BaseException as error:
                self._save(error, sinks)
                raise
            self._workspace.is_kept = True
            if self._plan.capture is not None:
                self._publish()

    @property
    def _since(self) -> str:
        """Says of what is counted of the whole recording that more was recorded than is kept."""
        return "" if self._options.keep_ns is None else ", since the recording began"

    def _steers(self) -> CostController | None:
        """Returns who decides which waits have a stack, None where all have one."""
        permille = self._options.off_cpu_budget_permille
        if permille is None or not self._options.off_cpu:
            return None
        budget = Budget(host_share=0, cpu_share=permille / 1000, with_own_cpu=False)
        return CostController(len(online_cpus()), budget)

    @property
    def _loading(self) -> Loading:
        """What becomes of processes without a helper: none is loaded that was not asked for."""
        if not self._options.inject:
            return Loading.LEFT
        return Loading.MENTIONED if self._options.gpu == AUTO else Loading.DONE

    @property
    def _wanted(self) -> Wanted:
        """What the user asks of helpers."""
        options = self._options
        return Wanted(options.gpu_duty_permille, self._loading, options.gpu_calibrate)

    def _variables(self, families: Sequence[Family]) -> dict[str, str]:
        """Returns what a command is started with, so that its driver loads helpers."""
        if self._loading is not Loading.DONE:
            return {}
        helpers = [family.helper for family in families if family.helper is not None]
        every = [helper.variables(self._wanted) for helper in helpers]
        return {name: value for variables in every for name, value in variables.items()}

    def _record(
        self, recorder: Recorder, sinks: RecordSinks, families: Sequence[Family]
    ) -> tuple[Outcome, _RunningCost]:
        """Records until the end: all that windows say."""
        if self._target.command is not None:
            self._target.command.release(self._variables(families))
        cost = self._run(recorder, sinks)
        if self._target.command is not None and not self._signals.requested:
            self.command_exit_code = self._target.command.exit_code()
        self._printer.detail("Stopping: resolving symbols (Ctrl-C again to abort).")
        outcome = recorder.stop(sinks.give)
        for words in outcome.said:
            self._printer.say(words)
        self._workspace.is_kept = True
        priority.as_started()
        self._say_overrun(outcome)
        recorder.finish(sinks.give)
        self._late_waits = recorder.late_waits
        self._late = _walked_late(recorder)
        self._late_tables = recorder.tables.late
        return outcome, cost

    def _finish(
        self, recorder: Recorder, sinks: RecordSinks, outcome: Outcome, cost: _RunningCost
    ) -> None:
        """Completes the capture by what windows do not say."""
        with contextlib.suppress(RuntimeError):  # no more threads may be started
            threading.Thread(target=_import_reports, args=(self._plan.report,), daemon=True).start()
        report = sinks.complete()
        for problem in report.problems:
            self._printer.detail(problem)
        writer = _opened(self._workspace.database)
        try:
            with SymbolService(cache_dir()) as service:
                recorder.devices.resolve(service, writer, recorder.images)
            growth = recorder.growth()
            if growth is not None:
                put_accounts(writer, growth)
            losses = self._losses(recorder, outcome, report)
            writer.set_losses(loss_rows(losses, recorder.loss_files()))
            writer.put_meta(self._last_facts(outcome, cost, report))
            writer.commit()
        finally:
            writer.close()

    def _publish(self) -> None:
        """Gives the capture its name, or what has that name its newer content.

        Raises:
            AiflameError: It is kept where `aiflame recover` finds it.
        """
        plan = self._plan
        is_named = plan.capture is not None and plan.capture == plan.named
        size_bytes = self._workspace.publish(is_named)
        path = plan.capture or self._workspace.destination.path
        self._printer.say(f"Wrote {path} ({size_bytes / 1e6:.1f} MB)")

    def _save(self, error: BaseException, sinks: RecordSinks | None = None) -> None:
        """Publishes what is nowhere else yet when something failed; says so if it cannot.

        Args:
            error: What failed.
            sinks: Of which the capture may be incomplete.
        """
        if self._workspace.is_kept and not isinstance(error, (Aborted, EndedAtOnce)):
            try:
                if sinks is not None:
                    with contextlib.suppress(DiskFull, NamesLost):
                        sinks.complete()
                self._publish()
            except (Aborted, EndedAtOnce):
                raise
            except AiflameError as another:
                self._printer.say(f"{another}: {another.hint}")
            except Exception as another:  # the first error is what is raised, whatever this is
                path = self._workspace.destination.path
                self._printer.say(f"{another}; the recording is kept: aiflame recover {path}")

    def _say_attached(self) -> None:
        options = self._options
        what = "on and off CPU" if options.off_cpu else "on CPU only"
        until = "Ctrl-C to stop" if options.duration_ns is None else "Ctrl-C to stop early"
        self._printer.say(
            f"attached: recording {self._target.words} at {options.frequency_hz} Hz, {what}."
            f" {until}."
        )

    def _run(self, recorder: Recorder, sinks: RecordSinks) -> _RunningCost:
        where = self._workspace
        copies = Copies(where.directory, where.destination.path, self._options.keep_ns)
        begun_cpu_ns, begun_ns = _own_cpu_ns(), time.monotonic_ns()
        # Where an ssh without a terminal is cut off there is no SIGHUP, and a recording that nobody
        # knows of would go on until the disk is full.
        is_endless = self._options.duration_ns is None and self._options.keep_ns is None

        def every_interval(progress: Progress) -> None:
            for words in progress.said:
                self._printer.say_soon(words)
            if self._signals.take_copy_request():
                self._printer.say_soon(copies.start())
            self._printer.progress(progress)
            if is_endless and self._printer.is_hung_up:
                self._signals.hang_up()

        recorder.run(sinks.give, every_interval)
        copies.wait()
        return _RunningCost(
            cpu_ns=_own_cpu_ns() - begun_cpu_ns,
            wall_ns=time.monotonic_ns() - begun_ns,
            peak_rss_bytes=_peak_rss_bytes(),
        )

    def _say_overrun(self, outcome: Outcome) -> None:
        if outcome.overrun_ns > max(_OVERRUN_SHARE * outcome.duration_ns, _OVERRUN_NS):
            self._printer.say(
                f"warning: it took {duration(outcome.overrun_ns)} longer to stop than -d says, as"
                " this machine is busy; nothing after the end was recorded"
            )

    def _first_facts(self, recorder: Recorder) -> dict[str, str | int]:
        uname = platform.uname()
        options = self._options
        return {
            "aiflame_version": __version__,
            "started_unix_ns": recorder.started_unix_ns,
            "period_ns": options.period_ns,
            "command": options.command_words,
            "target": self._target.words,
            f"{FACT_PREFIX}host": uname.node,
            f"{FACT_PREFIX}kernel": f"{uname.system} {uname.release} {uname.machine}",
            f"{FACT_PREFIX}CPUs": recorder.cpu_count,
            f"{FACT_PREFIX}sampling": f"cpu-clock at {options.frequency_hz} Hz on every CPU",
            f"{FACT_PREFIX}off-CPU": "every context switch" if options.off_cpu else "not recorded",
            SYMBOLS_FACT: "not resolved",
        }

    def _losses(self, recorder: Recorder, outcome: Outcome, report: Report) -> Counter[LossKind]:
        named = Counter({KINDS_BY_NAME[name]: n for name, n in report.naming_losses.items()})
        losses = outcome.losses + recorder.losses()
        if self._options.keep_ns is not None:  # what was lost before is of what is not kept
            kept = {KINDS_BY_NAME[name]: n for name, n in report.window_losses.items()}
            losses = recorder.untold_losses() + Counter(kept)
        losses += named
        losses[LossKind.SAMPLING_SKIPPED] = sum(c.recursion_misses for c in outcome.costs.values())
        losses[LossKind.STACK_LOST] = report.lost_stacks
        for kind in _OF_WINDOWS:
            losses[kind] = report.window_losses.get(kind.stored_name, 0)
        return losses

    def _last_facts(
        self, outcome: Outcome, cost: _RunningCost, report: Report
    ) -> dict[str, str | int]:
        running_share = percent(cost.cpu_ns, cost.wall_ns)
        counters = outcome.counters
        return {
            "recorder_cpu_ns": _own_cpu_ns() + _children_cpu_ns(),
            "recorder_peak_rss_bytes": cost.peak_rss_bytes + report.peak_rss_bytes,
            f"{FACT_PREFIX}recorder while recording": f"{running_share} of one CPU",
            f"{FACT_PREFIX}stacks walked late": f"{self._late}{self._since}",
            f"{FACT_PREFIX}waits walked late": f"{_late_words(self._late_waits)}{self._since}",
            f"{FACT_PREFIX}context switches seen": f"{counters[abi.Counter.SWITCHES]}{self._since}",
            "complete": 1,
        }

    def report(self) -> Profile:
        """Renders the page; where that fails, there is a capture that it can be made from."""
        from aiflame.agent.capture.reader import read_capture  # not while it records
        from aiflame.agent.reports.graph_nodes import with_graph_nodes
        from aiflame.agent.reports.merge import options_for

        plan = self._plan
        try:
            profile = with_graph_nodes(read_capture(self._workspace.database))
            if plan.report is not None and plan.report_path is not None:
                data = FORMATS[plan.report].render(profile, options_for(profile, plan.report))
                is_named = plan.report_path == plan.named
                write_output(plan.report_path, data, plan.force, is_named=is_named, is_private=True)
                self._printer.say(f"Wrote {plan.report_path} ({len(data) / 1e6:.1f} MB)")
        except BaseException as error:  # also a Ctrl-C: the capture is published all the same
            self._save(error)
            raise
        self._workspace.is_kept = False
        return profile

    def summarise(self, profile: Profile) -> None:
        """Prints what was recorded, what was lost, what it cost, and what to run next."""
        # Not while it records, as what makes reports takes 3 MB.
        from aiflame.agent.commands.record_summary import again_line, loss_lines, sample_lines

        say, recording = self._printer.say, profile.recording
        if self.command_exit_code and self._target.command is not None:
            say(f"{self._target.command.end_words()}.")
        for line in sample_lines(profile):
            say(line)
        if self._late != "0":
            say(f"Stacks walked late, as unwind tables had to be made: {self._late}{self._since}.")
        if self._late_waits.walked:
            words = _late_words(self._late_waits)
            say(f"Waits walked late, as unwind tables had to be made: {words}{self._since}.")
        if again := again_line(profile, were_tables_late=self._late_tables > 0):
            say(again)
        for line in loss_lines(profile):
            say(line)
        cpu_s = recording.recorder_cpu_ns / 1e9
        rss_mb = recording.recorder_peak_rss_bytes / 1e6
        say(f"aiflame used {cpu_s:.2f} CPU seconds in all, and {rss_mb:.0f} MB while recording.")
        if self._plan.capture is not None:
            say(f"Next: aiflame stats {self._plan.capture}")


def _opened(database: Path) -> CaptureWriter:
    """Opens a capture to add to it."""
    from aiflame.agent.capture.writer import CaptureWriter  # and SQLite: not while it records

    return CaptureWriter(database, is_new=False)


def _import_reports(form: str | None) -> None:
    """Imports what is needed next, while the capture is waited for."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # they are the main thread's
    with contextlib.suppress(Exception):  # where it is needed, this is raised again
        from aiflame.agent.capture import reader, writer  # noqa: F401
        from aiflame.agent.reports import facts  # noqa: F401

        if form is not None:
            FORMATS[form]


def _walked_late(recorder: Recorder) -> str:
    """Says how many stacks could only be walked when their unwind tables had come."""
    late = recorder.late_walks
    if not late.truncated:
        return f"{late.complete:,}"
    return f"{late.complete:,}, and {late.truncated:,} more stayed truncated"


def _late_words(late: LateWaits) -> str:
    """Says how much waiting time got its stacks when tables had come."""
    return f"{late.walked:,}, {duration(late.walked_ns)}" if late.walked else "0"


def _own_cpu_ns() -> int:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return round((usage.ru_utime + usage.ru_stime) * 1e9)


def _children_cpu_ns() -> int:
    # The compiler and the symbol worker, both collected by now.
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return round((usage.ru_utime + usage.ru_stime) * 1e9)


def _peak_rss_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
