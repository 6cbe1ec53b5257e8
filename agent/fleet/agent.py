# SPDX-License-Identifier: Apache-2.0
"""The agent: records a whole host until it is told to end, and sends what it records.

The collector writes windows into stretches on disk, and nothing else; a process of its own names
and sends them (`naming_worker`). Whatever fails there, what was recorded is on disk, and is sent
later.
"""

from __future__ import annotations

import fcntl
import functools
import os
import platform
import time
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import FrameType

from aiflame.agent import __version__, priority, rights
from aiflame.agent.allocator import PagesOfFiles, give_back_freed_memory, map_large_blocks
from aiflame.agent.capture.schema import FACT_PREFIX, SYMBOLS_FACT
from aiflame.agent.devices.choice import AUTO, NONE, ChooseFamilies
from aiflame.agent.errors import AiflameError, DiskFull, EnvironmentUnfit
from aiflame.agent.fleet.capture_processes import CaptureProcesses
from aiflame.agent.fleet.capture_server import CaptureEndpoint
from aiflame.agent.fleet.config import (
    MOST_LEFT_OUT,
    NEEDS_RESTART,
    AgentConfig,
    AgentSettings,
)
from aiflame.agent.fleet.cost import CostController
from aiflame.agent.fleet.ending import END_S, end_in_time
from aiflame.agent.fleet.flight_recorder import MONOTONIC_START_FACT
from aiflame.agent.fleet.health import HealthEndpoint
from aiflame.agent.fleet.host_checks import (
    cgroup_layout,
    cgroup_mount_note,
    cgroup_namespace_note,
    require_host_pids,
)
from aiflame.agent.fleet.log import Log, words_of
from aiflame.agent.fleet.memory import MemoryBudget, measure
from aiflame.agent.fleet.naming import PROGRAM as NAMING
from aiflame.agent.fleet.naming import NamingProcess
from aiflame.agent.fleet.naming_messages import (
    CgroupPathsLeftOut,
    CgroupsLeftOut,
    Configure,
    DoLess,
    LookAtCgroups,
    Lost,
    NamingReport,
    NoRoom,
    ReleaseMemory,
    StretchBegun,
    StretchDone,
    StretchEnded,
    StretchLeft,
)
from aiflame.agent.fleet.naming_progress import HUNG_S, UNHEARD_S
from aiflame.agent.fleet.notify import ServiceManager
from aiflame.agent.fleet.prepared import PreparedHelpers
from aiflame.agent.fleet.reloads import ReloadRequests
from aiflame.agent.fleet.selection import have_containers, known_groups
from aiflame.agent.fleet.sinks import sink_module
from aiflame.agent.fleet.stretches import Stretch, Stretches
from aiflame.agent.fleet.vitals import Vitals
from aiflame.agent.inspector.fork_server import ForkServer
from aiflame.agent.kernel import abi, checks, descriptors
from aiflame.agent.kernel.least import give_up_rights
from aiflame.agent.kernel.loader import ProgramOptions
from aiflame.agent.kernel.probes import online_cpus
from aiflame.agent.limits import is_disk_full
from aiflame.agent.losses import LossKind
from aiflame.agent.model.gpu import Device, Tier
from aiflame.agent.model.profile import NS_PER_S
from aiflame.agent.model.window import Window
from aiflame.agent.processes import procfs
from aiflame.agent.processes.targets import Target, cgroup1_mounts, cgroup2_mounts, target_of_all
from aiflame.agent.recording.chance import Chances
from aiflame.agent.recording.foundation import Foundation
from aiflame.agent.recording.recorder import Progress, Recorder
from aiflame.agent.recording.signals import StopSignals
from aiflame.gpu.base import Family, Loading, Wanted

# Of all files of the agent and of its children nothing is for others: they hold names of processes
# of this host. What targets have to read has its mode set.
_PRIVATE = 0o077

# What stays of the time to end for taking programs off: 1 to 2 s where processors are crowded.
_DETACH_S = 2.5
# How long stacks of the last stretch may be waited for.
_TABLES_S = 2.0

# A look at what the kernel tells takes 1 to 2 ms, and a busy host begins 100 processes a second.
# Interpreters that are young are looked at as often (recording/pythons.py).
_ROUND_NS = 20_000_000

# Room in the kernel for stacks, of 2 KB each, and for Python frames, of 3 KB. At 19 Hz a CPU brings
# some hundred in a window, waits by chance a few thousand; where half is used, a window ends early.
_STACKS_OF_CPU, _CHAINS_OF_CPU = 1024, 512
_LEAST_CPUS, _MOST_CPUS = 4, 16

# To close a window takes 20 to 40 ms, whatever is in it. Waits of a second and more are known one
# by one, and nobody looks at a fleet by the second; what is lost if an agent dies is as long.
_WINDOW_NS = 5_000_000_000
# How often windows are told of to be named: those of a second, where devices are used, together.
# What reads files for names is started each time, and reads what it knew anew: 0.2 s. Where less is
# to be done so many times less often.
_TELL_NS, _MOST_SELDOM = _WINDOW_NS, 4

# Who asks for the newest that was recorded waits so long for the open window, which may be of a
# minute; to close one takes less, but for a crowded host.
_NEWEST_S, _NEWEST_LOOK_S = 5.0, 0.05

# How soon a naming process that ended is started again, so that one that cannot run is no flood.
_RESTART_S = 10.0
# How often all cgroups are looked at where there are rules, so that what is new is left out within
# ten seconds: to tell of it and to hear what was found take up to an interval of a second each.
_LOOK_S = 8.0
# How often what is old is removed, and what could not be begun is tried again.
_TIDY_S = 60.0
# Free on a disk on which a stretch can be named: an error of SQLite's may have another reason, as a
# disk that is damaged, and what is kept is not to go for that. Captures of stretches have some MB.
_ROOM_BYTES = 256_000_000
# As long as a stretch: what went is room for the next.
_FREE_DISK_S = 60.0
# How often what was freed goes back to the kernel, besides after windows: it is most once the
# stacks of all threads that there were at the start have been walked.
_GIVE_BACK_S = 10.0


# Slewing keeps a clock within milliseconds; stretches of one start join to the nanosecond.
_CLOCK_STEP_NS = NS_PER_S


class AgentSignals(StopSignals):
    """Signals to an agent: to end, as to a recording; SIGHUP to read its configuration again.

    Args:
        reloads: Takes SIGHUP.
    """

    def __init__(self, reloads: ReloadRequests) -> None:
        super().__init__()
        self._reloads = reloads

    def __enter__(self) -> AgentSignals:
        super().__enter__()
        return self

    def _hang_up(self, number: int, frame: FrameType | None) -> None:
        self._reloads.ask(number, frame)

    def take_reload_request(self) -> bool:
        """Returns whether a new configuration was asked for since the last call."""
        return self._reloads.take()


class _Lock:
    """Keeps two agents from one directory, for as long as this process lives."""

    def __init__(self, directory: Path) -> None:
        self._descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._descriptor)
            raise EnvironmentUnfit(
                f"another agent uses {directory}", "end it, or set another `directory`"
            ) from None

    def close(self) -> None:
        """Lets go."""
        os.close(self._descriptor)


def begin_fork_server() -> ForkServer:
    """Forks from this process what all others of the agent but its openers are forked from.

    They share its modules with it, as far as none of them writes to these: together they have 8
    to 17 MB less (OVERHEAD.md). To be called before a configuration is read, for that may have
    secrets.
    """
    server = ForkServer()
    server.begin_here(_begin_forking)
    if server.pids:  # else one is started once this process is what it has to be like
        server.expect(NAMING)
    return server


def _begin_forking() -> None:
    descriptors.raise_limit()
    os.umask(_PRIVATE)
    rights.keep_only(rights.USED)
    priority.limit_real_time()


def run_agent(
    server: ForkServer,
    config: AgentConfig,
    reload: Callable[[], AgentConfig],
    choose: ChooseFamilies,
    command_words: str,
    log: Log,
    reloads: ReloadRequests,
) -> int:
    """Records until a signal; returns the exit code.

    Args:
        server: Forks what reads files, and what names.
        config: What to do.
        reload: Reads the configuration again; it may raise UsageError.
        choose: Which device families `gpu` means.
        command_words: The command line.
        log: Takes a line for each event.
        reloads: When to read the configuration again.

    Raises:
        EnvironmentUnfit: This machine cannot record.
        UsageError: A sink cannot be made.
    """
    map_large_blocks()
    descriptors.raise_limit()
    os.umask(_PRIVATE)
    require_host_pids()
    checks.require_all()
    settings = config.agent
    for name, sink_settings in config.sinks.items():
        sink_module(name).check(sink_settings)
    notes = cgroup_layout().note, cgroup_namespace_note(), cgroup_mount_note()
    for warning in (*config.warnings, *notes):
        if warning:
            log.say(f"warning: {warning}")
    with ExitStack() as parts:
        stretches = Stretches(settings.directory, log)
        parts.callback(_Lock(settings.directory).close)
        families = choose(settings.gpu)
        prepared = _prepared(settings, families, log)
        give_up_rights()
        target = target_of_all()
        priority.hurry()
        foundation = parts.enter_context(Foundation(_for_programs(settings, target), server))
        signals = parts.enter_context(AgentSignals(reloads))
        end_in_time(signals, log)
        cgroups = _cgroups()
        steers = _steers(settings, cgroups)
        capture_processes = CaptureProcesses()
        vitals = Vitals()
        recorder = parts.enter_context(
            Recorder(
                target,
                foundation,
                signals,
                families,
                are_families_named=settings.gpu != AUTO,
                wanted=Wanted(
                    round(10 * settings.gpu_duty_percent), _loading(settings), lists=False
                ),
                steers=steers,
                least_round_ns=_ROUND_NS,
                helpers_cpu_ns=capture_processes.others_cpu_ns,
                resident_bytes=vitals.resident_bytes,
                window_ns=_WINDOW_NS,
                libraries=() if prepared is None else prepared.files,
            )
        )
        recorder.table.know_cgroups(cgroups)
        recorder.start(None, log.say)
        facts = _facts(recorder, settings, target, command_words)
        health = HealthEndpoint(settings, vitals, log)
        parts.callback(health.close)
        bring_newest = functools.partial(_bring_newest, recorder, vitals)
        captures = CaptureEndpoint(config, log, capture_processes, bring_newest)
        agent = _Agent(
            config=config,
            reload=reload,
            recorder=recorder,
            signals=signals,
            stretches=stretches,
            facts=facts,
            log=log,
            vitals=vitals,
            captures=captures,
            steers=steers,
            prepared=prepared,
            server=server,
            capture_processes=capture_processes,
            health=health,
        )
        parts.callback(agent.close)
        give_back_freed_memory()  # programs and tables are in the kernel
        return agent.run()


def _bring_newest(recorder: Recorder, vitals: Vitals) -> None:
    """Has the open window end, and waits until it is on disk."""
    before, until_s = vitals.windows, time.monotonic() + _NEWEST_S
    recorder.end_window()
    while vitals.windows == before and time.monotonic() < until_s:
        time.sleep(_NEWEST_LOOK_S)


def _prepared(
    settings: AgentSettings, families: Sequence[Family], log: Log
) -> PreparedHelpers | None:
    """Puts helpers where processes find them, if that is asked for."""
    if settings.gpu_helper_directory is None:
        return None
    helpers = [family.helper for family in families if family.helper is not None]
    return PreparedHelpers(settings.gpu_helper_directory, helpers, log)


def _for_programs(settings: AgentSettings, target: Target) -> ProgramOptions:
    cpus = min(max(len(online_cpus()), _LEAST_CPUS), _MOST_CPUS)
    return ProgramOptions(
        filter=target.filter,
        stacks_max=cpus * _STACKS_OF_CPU,
        python_chains_max=cpus * _CHAINS_OF_CPU,
        period_ns=settings.period_ns,
        off_cpu=settings.off_cpu,
        wait_event_ns=abi.LONG_WAIT_NS,  # those that are exact: others are chosen by chance
        unwind_bytes_max=settings.unwind_memory,
        builder_bytes_max=settings.helper_memory,
        calls=settings.gpu != NONE,
        by_chance=settings.off_cpu,
        # Rules may come when the configuration is read again.
        excluded_max=MOST_LEFT_OUT,
    )


def _steers(settings: AgentSettings, cgroups: Collection[int]) -> CostController | None:
    """Returns who decides which waits have a stack; their time is exact in any case."""
    if not settings.off_cpu:
        return None
    return CostController(len(online_cpus()), settings.budget, cgroups=cgroups)


def _cgroups() -> dict[int, str]:
    """Returns the paths of the cgroups that are there, and tell whose processes are, by id."""
    mount = next(iter(cgroup2_mounts()), None)
    if mount is None:
        return {}
    # Many hosts have v1 beside, by which nobody groups anything.
    groups = known_groups(mount, is_v1_beside=have_containers(cgroup1_mounts()))
    return {number: path for path, number in groups.items()}


def _loading(settings: AgentSettings) -> Loading:
    """What becomes of processes without a helper: none is loaded that was not asked for."""
    if not settings.inject:
        return Loading.LEFT
    return Loading.MENTIONED if settings.gpu == AUTO else Loading.DONE


def _facts(
    recorder: Recorder, settings: AgentSettings, target: Target, command_words: str
) -> dict[str, str | int]:
    uname = platform.uname()
    return {
        "aiflame_version": __version__,
        "started_unix_ns": recorder.started_unix_ns,
        MONOTONIC_START_FACT: recorder.start_ns,
        "period_ns": settings.period_ns,
        "command": command_words,
        "target": target.words,
        f"{FACT_PREFIX}host": settings.node_name,
        f"{FACT_PREFIX}kernel": f"{uname.system} {uname.release} {uname.machine}",
        f"{FACT_PREFIX}CPUs": recorder.cpu_count,
        f"{FACT_PREFIX}sampling": f"cpu-clock at {settings.frequency_hz} Hz on every CPU",
        f"{FACT_PREFIX}off-CPU": "every context switch" if settings.off_cpu else "not recorded",
        SYMBOLS_FACT: "not resolved",
    }


class _Agent:
    """What a recording agent does with windows."""

    def __init__(
        self,
        *,
        config: AgentConfig,
        reload: Callable[[], AgentConfig],
        recorder: Recorder,
        signals: AgentSignals,
        stretches: Stretches,
        facts: Mapping[str, str | int],
        log: Log,
        vitals: Vitals,
        captures: CaptureEndpoint,
        steers: CostController | None,
        prepared: PreparedHelpers | None,
        server: ForkServer,
        capture_processes: CaptureProcesses,
        health: HealthEndpoint,
    ) -> None:
        self._config = config
        self._health = health
        self._capture_processes = capture_processes
        self._server = server
        self._prepared = prepared
        self._steers = steers
        self._captures = captures
        self._vitals = vitals
        self._reload = reload
        self._recorder = recorder
        self._signals = signals
        self._stretches = stretches
        self._facts = facts
        self._log = log
        self._manager = ServiceManager()
        self._naming: NamingProcess | None = None
        self._restart_at_s = 0.0
        self._stretch: Stretch | None = None
        self._tidied_s = time.monotonic()
        self._freed_disk_s = -_FREE_DISK_S
        self._give_back_at_s = self._tidied_s + _GIVE_BACK_S
        self._untold_windows = 0
        self._told_ns = 0  # until when windows were told of, since the recording's start
        self._told_thrift = 1, 1  # and the factor of delays
        self._said_devices: set[tuple[str, ...]] = set()
        self._windows_lost = 0
        # Losses of which naming has not said that a stretch has told: one of the same kind in a
        # stretch may be another, and a naming process that dies takes what it was told along.
        self._untold: Counter[str] = Counter()
        self._left_out_paths: set[str] = set()
        self._look_at_s = 0.0
        self._memory = MemoryBudget(recorder, log)
        self._pages = PagesOfFiles()

    def run(self) -> int:
        """Records until a signal; returns the exit code."""
        self._say_start()
        self._start_naming()
        self._look_at_itself()
        self._manager.tell("READY=1", "STATUS=recording")
        try:
            self._recorder.run(self._give, self._every_interval)
            priority.hurry()  # up to the end: it is short, and there is a time for it
            self._log.say(f"ending: what is recorded is sent, for at most {END_S:g} s")
            self._manager.tell("STOPPING=1")
            self._recorder.stop(self._give)
            tables_until_s = self._stopped_s() + _TABLES_S
            self._recorder.finish(self._give, int(tables_until_s * NS_PER_S))
        except AiflameError:
            raise
        except Exception:  # nobody is there to run it again with -vv
            for line in traceback.format_exc().splitlines():
                self._log.say(line)
            raise
        finally:  # whatever it is: what was stored by then is sent, or stays on disk
            self._end()
        return 0

    def _stopped_s(self) -> float:
        """Returns since when it is to end, by `time.monotonic`."""
        asked_s = self._signals.requested_s
        return time.monotonic() if asked_s is None else asked_s

    def _say_start(self) -> None:
        settings, log = self._config.agent, self._log
        what = "on and off CPU" if settings.off_cpu else "on CPU only"
        calls = "no devices" if settings.gpu == NONE else f"launches (gpu = {settings.gpu})"
        log.say(
            f"recording all processes of {settings.node_name} at {settings.frequency_hz} Hz,"
            f" {what}, {calls}; {settings.stretch:g} s at once; the newest {settings.keep:g} s,"
            f" {settings.keep_size / 1e6:,.0f} MB at most, stay in {settings.directory}"
        )
        self._say_sinks()

    def _say_sinks(self) -> None:
        for name, settings in self._config.sinks.items():
            self._log.say(f"sink {name}: {sink_module(name).describe(settings)}")
        if not self._config.sinks:
            self._log.say("no sink is configured: nothing leaves the directory")

    def _start_naming(self) -> None:
        """Starts the process that names, and tells it all that is not done."""
        self._restart_at_s = time.monotonic() + _RESTART_S
        directory = self._config.agent.directory
        try:
            naming = NamingProcess(
                self._recorder.table,
                directory,
                self._config,
                self._server,
                self._log,
            )
        except AiflameError as error:
            self._log.say_seldom("no naming", f"nothing is sent: {error}")
            return
        self._naming = naming
        # It tells of them anew, once those in them have been seen.
        self._left_out_paths.clear()
        self._recorder.leave_out(())
        self._look_at_s = 0.0
        self._told_thrift = 1, 1
        self._vitals.note_naming_started()
        if self._untold:  # as far as one before it was told, it came to nothing
            naming.tell(Lost(dict(self._untold)))
        current = self._stretch
        for folder in self._stretches.undone():
            if current is None or folder != current.folder:
                naming.tell(StretchLeft(folder))
        if current is not None:
            naming.tell(StretchBegun(current.folder))
            naming.give(current.windows)
        self._untold_windows = 0

    def _give(self, window: Window) -> None:
        """Takes a window: it is on disk when this returns, unless there is no room there."""
        self._say_devices(window)
        duties = {} if self._steers is None else self._steers.duties()
        wanted = self._config.agent.gpu_duty_percent / 100
        self._vitals.note_device_duty(wanted * min(duties.values(), default=1.0))
        if self._steers is not None:
            self._vitals.note_chances(self._steers.chances)
            self._vitals.note_budget(self._steers.limit_cpus, is_over=self._steers.is_over)
            self._tell_thrift(self._steers.chances)
        try:
            self._put_with_room(window)
        except AiflameError as error:
            self._vitals.note_window(window, is_kept=False)
            self._windows_lost += 1
            self._lose(LossKind.WINDOWS_LOST, 1)
            self._log.say_seldom("window lost", f"{self._windows_lost:,} windows are lost: {error}")
            return
        self._vitals.note_window(window, is_kept=True)
        self._give_back_at_s = 0.0  # what it took is free by the next interval
        stretch = self._stretch
        if stretch is None:
            return
        self._untold_windows += 1
        seldom = 1 if self._steers is None else min(self._steers.chances.thrift, _MOST_SELDOM)
        if window.end_ns - self._told_ns >= _TELL_NS * seldom:
            self._told_ns = window.end_ns
            self._tell_windows()
        # With one more window it would be further from what is wanted.
        half_ns = (window.end_ns - window.start_ns) // 2
        wanted_s = self._config.agent.stretch
        if self._steers is not None:
            wanted_s = self._steers.sent_at_once_s(wanted_s)
        is_long = window.end_ns + half_ns - stretch.started_ns >= wanted_s * NS_PER_S
        if is_long and not self._signals.requested:  # what comes at the end has no length
            self._cut()

    def _lose(self, kind: LossKind, count: int) -> None:
        """Has the next stretch that is sent tell of a loss."""
        self._untold[kind.stored_name] += count
        if self._naming is not None:
            self._naming.tell(Lost({kind.stored_name: count}))

    def _tell_windows(self) -> None:
        """Tells the process that names of the windows that are there since."""
        if self._naming is not None and self._untold_windows:
            self._naming.give(self._untold_windows)
        self._untold_windows = 0

    def _tell_thrift(self, chances: Chances) -> None:
        """Has the process that names do less, too, and later."""
        told = chances.thrift, chances.delay_factor
        if self._naming is not None and told != self._told_thrift:
            self._naming.tell(DoLess(*told))
            self._told_thrift = told

    def _put_with_room(self, window: Window) -> None:
        """Puts a window on disk; where that is full, in place of the oldest that has been sent.

        No more of these goes than it takes: it is what was recorded before the disk was full.

        Raises:
            AiflameError: There is no room, whatever goes.
        """
        error = self._why_not_put(window)
        if error is not None and is_disk_full(error):
            self._tidy(room_only=True)
            error = self._why_not_put(window)
        while error is not None and is_disk_full(error) and self._drop_oldest(1):
            error = self._why_not_put(window)
        if error is not None:
            raise error

    def _why_not_put(self, window: Window) -> AiflameError | None:
        try:
            self._put(window)
        except AiflameError as error:
            return error
        return None

    def _free_disk(self, *, is_known: bool) -> None:
        """Removes half of what has been sent, as there is no room to name or to queue.

        Once for all that found none: sinks, and stretches that an earlier agent has left.

        Args:
            is_known: An error said that the disk is full, and no other one.
        """
        now_s = time.monotonic()
        if now_s < self._freed_disk_s + _FREE_DISK_S or not (is_known or self._is_disk_full()):
            return
        self._freed_disk_s = now_s
        self._drop_oldest((len(self._stretches.done(self._current)) + 1) // 2)

    def _is_disk_full(self) -> bool:
        try:
            disk = os.statvfs(self._config.agent.directory)
        except OSError:
            return False
        return disk.f_bavail * disk.f_frsize < _ROOM_BYTES or not disk.f_favail

    def _drop_oldest(self, most: int) -> int:
        dropped = self._stretches.drop_oldest(self._current, most)
        if dropped:
            self._log.say_seldom(
                "kept less", "the disk is full: less than `keep` stays on it, for what is new"
            )
        return dropped

    @property
    def _current(self) -> Path | None:
        """The folder that is written to."""
        return None if self._stretch is None else self._stretch.folder

    def _put(self, window: Window) -> None:
        stretch, is_new = self._stretch, self._stretch is None
        if stretch is None:
            self._follow_clock()
            stretch = self._stretches.begin(self._facts, window)
        try:
            stretch.put(window)
        except DiskFull:
            if is_new:  # its name is to be free for the next try
                stretch.remove()
            raise
        if is_new:
            self._stretch = stretch
            if self._naming is not None:
                self._naming.tell(StretchBegun(stretch.folder))

    def _follow_clock(self) -> None:
        """Takes the time of day anew where it was set, or the machine has slept."""
        since_start_ns = time.monotonic_ns() - self._recorder.start_ns
        started_unix_ns = time.time_ns() - since_start_ns
        step_ns = started_unix_ns - int(self._facts["started_unix_ns"])
        if abs(step_ns) > _CLOCK_STEP_NS:
            self._facts = {**self._facts, "started_unix_ns": started_unix_ns}
            self._log.say(f"the clock was set by {step_ns / NS_PER_S:+,.0f} s: it is followed")

    def _cut(self) -> None:
        """Ends the open stretch: the next window begins another."""
        self._tell_windows()
        stretch, self._stretch = self._stretch, None
        if stretch is not None:
            stretch.close()
            if self._naming is not None:
                self._naming.tell(StretchEnded())

    def _every_interval(self, progress: Progress) -> None:
        for words in progress.said:
            self._log.say_seldom(words, words)
        self._manager.tell("WATCHDOG=1")
        self._signals.take_copy_request()
        if self._signals.take_reload_request():
            self._take_new_config()
        if self._naming is not None:
            self._naming.pump()
            ending = self._naming.ended()
            self._hear(self._naming)  # also what it has said last
            self._tell_to_look(self._naming)
            self._watch(self._naming)
            if ending:
                self._log.say_seldom(ending, f"the process that names and sends {ending}")
                self._naming.close()
                self._naming = None
                self._vitals.note_naming_ended()
        elif time.monotonic() >= self._restart_at_s:
            self._start_naming()
        if time.monotonic() - self._tidied_s >= _TIDY_S:
            self._tidy()
        if time.monotonic() >= self._give_back_at_s:
            give_back_freed_memory()
            self._give_back_at_s = time.monotonic() + _GIVE_BACK_S

    def _tell_to_look(self, naming: NamingProcess) -> None:
        """Has cgroups looked at that rules may leave out: windows may be a minute apart."""
        settings = self._config.agent
        if (settings.include or settings.exclude) and time.monotonic() >= self._look_at_s:
            self._look_at_s = time.monotonic() + _LOOK_S
            naming.tell(LookAtCgroups())

    def _watch(self, naming: NamingProcess) -> None:
        """Tells of a naming process that lives and gets nowhere; kills it where it hangs."""
        unheard_s = naming.look()
        self._vitals.note_naming_unheard(unheard_s)
        if unheard_s >= UNHEARD_S:
            self._log.say_seldom(
                "naming unheard",
                f"the process that names and sends has taken nothing for {unheard_s:.0f} s:"
                " nothing is sent meanwhile, and what is recorded waits on disk",
            )
        if naming.kill_if_hung():
            self._log.say(
                f"the process that names and sends has not run for {HUNG_S:.0f} s: it is killed,"
                " for another one to take over"
            )
            self._vitals.note_naming_killed()

    def _hear(self, naming: NamingProcess) -> None:
        for report in naming.reports():
            self._take_report(report)

    def _take_report(self, report: NamingReport) -> None:
        self._vitals.note_report(report)
        if isinstance(report, CgroupsLeftOut):
            self._recorder.exclude({cgroup_id for cgroup_id in report.ids if cgroup_id >= 0})
        elif isinstance(report, CgroupPathsLeftOut):
            self._left_out_paths.difference_update(report.less)
            self._left_out_paths.update(report.more)
            self._recorder.leave_out(self._left_out_paths)
        elif isinstance(report, NoRoom):  # more is needed than here
            self._free_disk(is_known=report.is_disk_full)
        elif isinstance(report, StretchDone):
            self._untold -= +Counter(report.told)  # less than nothing would be a new one
            held_back = report.losses.get(LossKind.PODS_NOT_KNOWN.stored_name, 0)
            self._health.unready = words = _words_of_unknown(held_back)
            if words:
                self._log.say_seldom("pods not known", words)
            self._log.say_seldom(
                "stretch sent",
                f"{report.duration_ns / NS_PER_S:.0f} s named and queued:"
                f" {report.samples:,} CPU samples",
            )

    def _tidy(self, *, room_only: bool = False) -> None:
        """Removes what is old, and tries again what could not be before."""
        settings = self._config.agent
        unsent = self._stretches.trim(
            self._current, time.time_ns(), settings.keep, settings.keep_size
        )
        if unsent:
            self._vitals.note_stretches_lost(unsent)
            self._lose(LossKind.STRETCHES_LOST, unsent)
        if not room_only:
            self._tidied_s = time.monotonic()
            if self._prepared is not None:
                self._prepared.keep()
            self._health.keep()
            self._captures.keep()
            self._look_at_itself()

    def _look_at_itself(self) -> None:
        """Has less kept where all processes together have more than they may for long, or more."""
        self._vitals.note_cpu(sum(map(procfs.cpu_s, (os.getpid(), *procfs.begun()))))
        naming, limit = self._naming, self._config.agent.memory
        naming_pid = None if naming is None else naming.pid
        table_bytes = self._recorder.tables.kernel_bytes
        use = measure(naming_pid, table_bytes, self._capture_processes)
        self._vitals.note_memory(use, limit)
        if self._memory.look(use, limit) and naming is not None:
            naming.tell(ReleaseMemory())
        self._pages.give_back()

    def _take_new_config(self) -> None:
        self._manager.tell(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")
        try:
            new = self._reload()
            for name, settings in new.sinks.items():
                sink_module(name).check(settings)
        except Exception as error:  # whatever is wrong with a file, the recording goes on
            self._log.say(f"the configuration stays as it was: {words_of(error)}")
        else:
            old, self._config = self._config, new
            for key in NEEDS_RESTART:
                before, after = (getattr(each.agent, key) for each in (old, new))
                if str(before) != str(after):
                    self._log.say(f"{key} = {after} takes a restart; it stays {before}")
                elif before != after:  # a secret shows nothing of itself
                    self._log.say(f"{key} takes a restart; it stays as it was")
            self._config = AgentConfig(_with_fixed(new.agent, old.agent), new.sinks, new.warnings)
            self._log.say("the configuration was read again")
            for warning in new.warnings:
                self._log.say(f"warning: {warning}")
            self._say_sinks()
            self._captures.use(self._config)
            if self._naming is not None:
                self._naming.tell(Configure(self._config))
                self._naming.tell(LookAtCgroups())  # also where there are no rules any more
        self._manager.tell("READY=1")

    def _say_devices(self, window: Window) -> None:
        for row in window.devices[["family", "name", "tier", "limit"]].tolist():
            family, name, tier, limit = row
            words = (window.texts[family], window.texts[name], str(tier), window.texts[limit])
            if words in self._said_devices:
                continue
            self._said_devices.add(words)
            device = Device(words[0], words[1], Tier(tier), words[3], 0)
            reached = f"{device.name}: {device.reached}" if device.name else f"none: {device.limit}"
            self._log.say(f"device {device.family}: {reached}")

    def _end(self) -> None:
        """Ends the stretch, and sends what can be sent in time."""
        self._cut()
        self._captures.close()
        if self._naming is None:
            return
        for report in self._naming.finish(self._stopped_s() + END_S - _DETACH_S):
            self._take_report(report)
        left = len(self._stretches.undone())
        if left:
            self._log.say(f"{left} stretches are sent after the next start")

    def close(self) -> None:
        """Ends what it has started."""
        self._captures.close()
        if self._naming is not None:
            self._naming.close()
        if self._stretch is not None:
            self._stretch.close()


def _words_of_unknown(containers: int) -> str:
    """Returns why an agent does not do what its rules say, "" where it does."""
    if not containers:
        return ""
    return f"{containers:,} {LossKind.PODS_NOT_KNOWN.meaning}; {LossKind.PODS_NOT_KNOWN.cure}"


def _with_fixed(new: AgentSettings, old: AgentSettings) -> AgentSettings:
    """Returns new settings but for those that take a restart."""
    return replace(new, **{key: getattr(old, key) for key in NEEDS_RESTART})
