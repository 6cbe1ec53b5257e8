# SPDX-License-Identifier: Apache-2.0
"""One `record` from start to summary: record, resolve, publish the capture, render the picture.

Each step leaves a readable capture under its temporary name; whatever goes wrong later, what was
recorded is published. Only a second Ctrl-C throws it away.
"""

from __future__ import annotations

import platform
import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from aiflame.agent import __version__
from aiflame.agent.capture.reader import read_capture
from aiflame.agent.capture.schema import FACT_PREFIX
from aiflame.agent.capture.writer import CaptureWriter, DiskFull
from aiflame.agent.commands.record_devices import device_lines
from aiflame.agent.commands.record_losses import loss_rows
from aiflame.agent.commands.record_output import OutputPlan
from aiflame.agent.commands.record_progress import ProgressPrinter
from aiflame.agent.model import Profile
from aiflame.agent.outfile import publish, temporary_name, write_output
from aiflame.agent.recording import abi, checks
from aiflame.agent.recording.device_choice import AUTO, NONE, choose_families
from aiflame.agent.recording.loader import ProgramOptions
from aiflame.agent.recording.probes import online_cpus
from aiflame.agent.recording.recorder import Outcome, Recorder
from aiflame.agent.recording.resolve import CaptureResolver
from aiflame.agent.recording.signals import StopSignals
from aiflame.agent.recording.sleepers import store_sleepers
from aiflame.agent.recording.targets import Target
from aiflame.agent.recording.warm import Warmer
from aiflame.agent.reports import FORMATS, ReportOptions
from aiflame.agent.reports.facts import complete_share, cut_short, duration, percent
from aiflame.agent.symbols.service import SymbolService
from aiflame.agent.symbols.store import cache_dir
from aiflame.gpu.base import Family

_NO_SAMPLES_EXIT = 4


@dataclass(frozen=True, slots=True)
class RecordOptions:
    """What the command line says about a recording; sizes are entries, times ns."""

    frequency_hz: int
    duration_ns: int | None
    follow_children: bool
    off_cpu: bool
    user_stacks: bool
    kernel_stacks: bool
    stacks_max: int
    sums_max: int
    threads_max: int
    wait_event_ns: int
    unwind_bytes_max: int
    command_words: str
    gpu: str = AUTO
    trace_calls: bool = False

    @property
    def period_ns(self) -> int:
        """Weight of one on-CPU sample."""
        return 1_000_000_000 // self.frequency_hz

    def for_programs(self, target: Target) -> ProgramOptions:
        """Returns what is compiled into the kernel half."""
        return ProgramOptions(
            filter=target.filter,
            period_ns=self.period_ns,
            follow_children=self.follow_children or target.filter is not abi.Filter.PIDS,
            off_cpu=self.off_cpu,
            user_stacks=self.user_stacks,
            kernel_stacks=self.kernel_stacks,
            stacks_max=self.stacks_max,
            # Chains of Python frames differ less than whole stacks do.
            python_chains_max=max(self.stacks_max // 2, 1),
            sums_max=self.sums_max,
            threads_max=self.threads_max,
            wait_event_ns=self.wait_event_ns,
            unwind_bytes_max=self.unwind_bytes_max,
            calls=self.gpu != NONE,
            call_events_per_s=(
                max(abi.CALL_EVENTS_PER_S // len(online_cpus()), 1) if self.trace_calls else 0
            ),
        )


def record(
    target: Target, options: RecordOptions, plan: OutputPlan, printer: ProgressPrinter
) -> int:
    """Records, writes what is planned, and prints the summary; returns the exit code.

    Raises:
        EnvironmentUnfit: This machine cannot record.
        Aborted: A second Ctrl-C.
        DiskFull: After publishing what was recorded before the disk was full.
    """
    checks.require_all()
    families = choose_families(options.gpu)
    temporary = temporary_name(plan.any_path.with_suffix(".aiflame"))
    temporary.unlink(missing_ok=True)
    temporary.touch(mode=0o600, exist_ok=False)
    try:
        with StopSignals() as signals, SymbolService(cache_dir()) as service:
            session = _Session(target, options, temporary, printer, signals)
            failure = session.record(service, families)
            profile = read_capture(temporary)
            session.publish(plan, profile)
            session.summarise(plan, profile)
    finally:
        for leftover in (temporary, Path(f"{temporary}-journal")):
            leftover.unlink(missing_ok=True)
    if failure is not None:
        raise failure
    return 0 if len(profile.samples) else _NO_SAMPLES_EXIT


class _Session:
    def __init__(
        self,
        target: Target,
        options: RecordOptions,
        temporary: Path,
        printer: ProgressPrinter,
        signals: StopSignals,
    ) -> None:
        self._target = target
        self._options = options
        self._temporary = temporary
        self._printer = printer
        self._signals = signals
        self._writer = CaptureWriter(temporary)

    def record(self, service: SymbolService, families: Sequence[Family]) -> DiskFull | None:
        """Records and resolves; returns the error if the disk became full on the way."""
        programs = self._options.for_programs(self._target)
        recorder = Recorder(self._target, programs, self._writer, self._signals, families)
        failure = None
        try:
            self._run(recorder, service)
            self._printer.detail("Stopping: resolving symbols (Ctrl-C again to abort).")
            self._finish(recorder, recorder.stop(), service)
        except DiskFull as error:
            failure = error
            self._writer.rollback()
        finally:
            recorder.close()
            self._writer.close()
            if hasattr(recorder, "table"):
                recorder.table.binaries.close()
        return failure

    def _run(self, recorder: Recorder, service: SymbolService) -> None:
        options = self._options
        recorder.start()
        self._writer.put_meta(self._first_facts(recorder))
        self._writer.commit()
        what = "on and off CPU" if options.off_cpu else "on CPU only"
        until = "Ctrl-C to stop" if options.duration_ns is None else "Ctrl-C to stop early"
        self._printer.say(
            f"attached: recording {self._target.words} at {options.frequency_hz} Hz, {what}."
            f" {until}."
        )
        if self._target.command is not None:
            self._target.command.release()
        warmer = Warmer(service, recorder.table.binaries, self._target.filter)
        self._begun_cpu_ns, self._begun_ns = _own_cpu_ns(), time.monotonic_ns()

        def every_interval(progress: object) -> None:
            warmer.warm_new()
            self._printer.progress(progress)  # type: ignore[arg-type]

        recorder.run(options.duration_ns, every_interval)
        self._running_cpu_ns = _own_cpu_ns() - self._begun_cpu_ns
        self._running_ns = time.monotonic_ns() - self._begun_ns
        self._running_rss_bytes = _peak_rss_bytes()

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
        }

    def _finish(self, recorder: Recorder, outcome: Outcome, service: SymbolService) -> None:
        store_sleepers(recorder.sleepers, recorder.stacks, recorder.table)
        lost_stacks = recorder.stacks.lost()
        resolver = CaptureResolver(
            self._writer, recorder.table, recorder.images, service, recorder.python_of_stacks()
        )
        resolver.write_mappings()
        self._writer.put_meta({"duration_ns": outcome.duration_ns})
        self._writer.commit()
        resolver.resolve()
        recorder.devices.resolve(service, resolver.binary_id)
        recorder.calls.finish(recorder.devices.kernel_names(), self._writer)
        problems = {**resolver.problems, **recorder.problems()}
        for problem in service.problems:
            problems[problem.reason] = problems.get(problem.reason, 0) + 1
            self._printer.detail(f"{problem.reason}: {problem.detail}")
        outcome.counters[abi.Counter.USER_FRAMES] += recorder.sleepers.frames_cut
        problems["stack_lost"] = lost_stacks
        problems["sampling_skipped"] = sum(c.recursion_misses for c in outcome.costs.values())
        problems["python_misfit"] = resolver.splicer.misfits
        files = recorder.problem_files()
        self._writer.put("losses", loss_rows(outcome, problems, files))
        service.close()
        running_share = percent(self._running_cpu_ns, self._running_ns)
        self._writer.put_meta(
            {
                "recorder_cpu_ns": _own_cpu_ns() + _children_cpu_ns(),
                "recorder_peak_rss_bytes": self._running_rss_bytes,
                f"{FACT_PREFIX}recorder while recording": f"{running_share} of one CPU",
                f"{FACT_PREFIX}stacks walked before their tables came": outcome.counters[
                    abi.Counter.WITHOUT_TABLES
                ],
                f"{FACT_PREFIX}context switches seen": outcome.counters[abi.Counter.SWITCHES],
                "complete": 1,
            }
        )
        self._writer.commit()

    def publish(self, plan: OutputPlan, profile: Profile) -> None:
        """Gives the capture its name, and renders the picture."""
        data = None
        if plan.report is not None:
            data = FORMATS[plan.report].render(profile, ReportOptions())
        if plan.capture is not None:
            size_bytes = self._temporary.stat().st_size
            self._temporary.chmod(0o644)
            publish(self._temporary, plan.capture, plan.force)
            self._printer.say(f"Wrote {plan.capture} ({size_bytes / 1e6:.1f} MB)")
        if data is not None and plan.report_path is not None:
            write_output(plan.report_path, data, plan.force)
            self._printer.say(f"Wrote {plan.report_path} ({len(data) / 1e6:.1f} MB)")

    def summarise(self, plan: OutputPlan, profile: Profile) -> None:
        """Prints what was recorded, what was lost, what it cost, and what to run next."""
        say, recording = self._printer.say, profile.recording
        on_cpu = profile.samples["klass"] == 0
        ns = profile.samples["ns"]
        samples = int(profile.samples["count"][on_cpu].sum())
        complete_ns, whole_ns = complete_share(profile)
        say(
            f"{duration(recording.duration_ns)}: {samples:,} CPU samples,"
            f" {duration(int(ns[on_cpu].sum()))} on CPU,"
            f" {duration(int(ns[~on_cpu].sum()))} off CPU,"
            f" {len(profile.threads):,} threads, {len(profile.stacks):,} distinct stacks."
        )
        cut = cut_short(profile)
        say(
            f"{percent(complete_ns, whole_ns)} of the recorded time has complete stacks"
            + (f"; cut short in: {cut}." if cut else ".")
        )
        for loss in profile.losses:
            say(f"lost: {loss.name} {loss.count:,}: {loss.meaning}")
        if not profile.losses:
            say("0 lost.")
        for line in device_lines(profile.gpu):
            say(line)
        if not len(profile.samples):
            say("No samples were captured: was the target idle, or gone?")
        cpu_s = recording.recorder_cpu_ns / 1e9
        rss_mb = recording.recorder_peak_rss_bytes / 1e6
        say(f"aiflame used {cpu_s:.2f} CPU seconds in all, and {rss_mb:.0f} MB while recording.")
        if plan.capture is not None:
            say(f"Next: aiflame stats {plan.capture}")


def _own_cpu_ns() -> int:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return round((usage.ru_utime + usage.ru_stime) * 1e9)


def _children_cpu_ns() -> int:
    # The compiler and the symbol worker, both collected by now.
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return round((usage.ru_utime + usage.ru_stime) * 1e9)


def _peak_rss_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
