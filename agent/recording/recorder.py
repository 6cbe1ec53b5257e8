# SPDX-License-Identifier: Apache-2.0
"""The recording itself: attach, close a window once an interval, stop in order.

The recorder pays per distinct stack, not per sample: the kernel half sums, this half empties its
maps once a second into a window. It knows nothing of what becomes of windows, resolves no symbols,
and holds no compiler.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import resource
import select
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from aiflame.agent import priority
from aiflame.agent.devices.devices import Devices
from aiflame.agent.devices.timed import TimedProcesses
from aiflame.agent.kernel import abi
from aiflame.agent.kernel.descriptors import keep
from aiflame.agent.kernel.least import give_up_admin
from aiflame.agent.kernel.life_events import LifeEvents
from aiflame.agent.kernel.loader import ProgramOptions
from aiflame.agent.kernel.probes import Probes, online_cpus, possible_cpus
from aiflame.agent.kernel.ringbuf import RingBuffer
from aiflame.agent.kernel.sysbpf import BPF_ANY, Map, ProgramCost, count_run_times
from aiflame.agent.launches.calls import ApiCalls
from aiflame.agent.launches.gpu_kernels import KernelTable
from aiflame.agent.launches.opening import opened_at
from aiflame.agent.launches.runtimes import expected_files
from aiflame.agent.losses import LossKind
from aiflame.agent.model.profile import SampleClass
from aiflame.agent.model.window import Cost, Window
from aiflame.agent.processes import procfs
from aiflame.agent.processes.binaries import VDSO_PATH
from aiflame.agent.processes.facts import ProcessFacts
from aiflame.agent.processes.lives import Lives
from aiflame.agent.processes.table import ProcessImage, ProcessTable
from aiflame.agent.processes.targets import Target
from aiflame.agent.processes.thread_walk import StackWalker
from aiflame.agent.processes.unwind_tables import UnwindTables
from aiflame.agent.recording.chance import (
    Chances,
    EarlierStacks,
    Load,
    Steers,
    as_chosen,
    fill_in,
    share_out,
    write_chances,
)
from aiflame.agent.recording.cut_sleeps import CutSleeps, LateWaits
from aiflame.agent.recording.cut_stacks import CutStacks
from aiflame.agent.recording.ended import Ended
from aiflame.agent.recording.events import Events
from aiflame.agent.recording.excluded import ExcludedCgroups, LeftOutProcesses
from aiflame.agent.recording.fill import Fill
from aiflame.agent.recording.foundation import Foundation
from aiflame.agent.recording.kernel_accounts import NO_THREAD, Growth, KernelAccounts
from aiflame.agent.recording.late_walks import COPIES_PER_S, LateWalks
from aiflame.agent.recording.long_waits import LongWaits
from aiflame.agent.recording.python_thread_names import PythonThreadNames
from aiflame.agent.recording.pythons import PythonProcesses
from aiflame.agent.recording.samples import (
    Samples,
    open_parts,
    read_counter,
    read_counters,
    read_losses,
)
from aiflame.agent.recording.signals import StopSignals
from aiflame.agent.recording.sleep_walks import SleepWalks
from aiflame.agent.recording.sleepers import Sleepers, give_all_sleepers, give_sleepers
from aiflame.agent.recording.stacks import Stacks
from aiflame.agent.recording.switch_cost import SwitchCost
from aiflame.agent.recording.thread_times import (
    Charged,
    Part,
    ThreadTimes,
    concatenated,
    name_of,
)
from aiflame.agent.recording.window_builder import Bounds, WindowBuilder
from aiflame.agent.rows import take_rows
from aiflame.agent.symbols.store import cache_dir
from aiflame.gpu.base import ALWAYS, Family, Loading, Wanted

# Samples are kept by the second: fine enough for a heat map, coarse enough to sum in the kernel.
INTERVAL_NS = 1_000_000_000

# How far ahead a boundary is set: every program has to know of it before it is over. Twice as far
# each time that it was too late, up to the longest.
_AHEAD_NS, _MOST_AHEAD_NS = 500_000, 64_000_000
# And how long after it a program may still run that read the clock before.
_SETTLE_S = 0.0002
# What a program takes on a CPU of a machine that shares it with others: 4 ms. The end of a
# recording waits for longer, 40 ms: no window comes after it.
_TRIES_FOR_ENDS, _TRIES_AT_END = 20, 200

# How soon it is looked again whether programs for calls are loaded, which takes 0.3 s.
_LOADING_NS = 10_000_000

# How many times longer windows become: each thread takes some time in each. An agent's are of a
# minute then, which is what its end may lose, and how fine a time strip is; while devices are used
# they are of so many seconds as less is done and told later, 32 at most.
_LONGEST_WINDOW = 12

# The kernel has room for half a second of what it tells of processes (processes/lives.py).
_MOST_ROUND_NS = 250_000_000

# A process of 10,000 threads takes a second to enter: draining goes on in between.
_ENTERING_SLICE_NS = 100_000_000
# Of whom it is looked up in each window whether they have moved: 1 ms, where more run in turn.
_CGROUPS_TO_FOLLOW = 64


@dataclass(frozen=True, slots=True)
class Progress:
    """What the live line shows."""

    elapsed_ns: int
    samples: int
    off_cpu_ns: int
    lost: int
    said: tuple[str, ...] = ()  # a line each


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a finished recording knows besides its windows. Times in ns.

    Attributes:
        duration_ns: From start to end, as the programs have seen it.
        overrun_ns: How long after the end the recorder came to stop.
        counters: What the kernel half counted besides losses.
        losses: What it lost.
        costs: The kernel's account of each program.
        said: What is to be said since the last progress.
    """

    duration_ns: int
    overrun_ns: int
    counters: dict[abi.Counter, int]
    losses: Counter[LossKind]
    costs: dict[str, ProgramCost]
    said: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Sums:
    """What the kernel half has of intervals that have ended.

    Attributes:
        exact: Of those that count as they are, and on-CPU samples.
        chosen: Of those by chance that were chosen.
        bare: Of exact ones without a stack.
    """

    exact: Part
    chosen: Part
    bare: Part


@dataclass(frozen=True, slots=True)
class _Threads:
    """All threads at one moment.

    Attributes:
        tids: Of all, shape (n,).
        states: Of these, THREAD_STATE_DTYPE.
        running: Those that CPUs run, as far as their switches were seen.
    """

    tids: npt.NDArray[np.uint32]
    states: npt.NDArray[np.void]
    running: set[int]


class Recorder:
    """One recording, in a `with` block that detaches it and takes its programs out of the kernel.

    Args:
        target: Whom to record.
        foundation: What was begun before, and ends after this.
        signals: Ends the recording.
        families: Devices to record, as far as targets use them.
        are_families_named: The user wants them in any case.
        wanted: What the user asks of helpers.
        steers: Decides which switch-outs take a stack, where options say that chance does; without
            one all do.
        accounts: Reads at the start and the end what the kernel accounts itself; without one nobody
            does.
        least_round_ns: From one look at what the kernel tells to the next at least: each process
            that is new wakes the recorder up, and several share a round. `steers` may have it
            longer.
        helpers_cpu_ns: Tells what CPU time was taken so far by processes that this one has begun.
        resident_bytes: Tells what memory there is to be stated with a window.
        with_thread_names: Reads what Python calls threads, where the kernel does not know.
        libraries: Files with functions of device APIs that processes are about to map.
        window_ns: How long windows are while no device is used: a multiple of INTERVAL_NS, and
            longer where `steers` says so. What devices tell is by the second, and so are windows
            then, unless `steers` has these longer as well.

    Attributes:
        start_ns: When it began, monotonic; 0 before `start`.
        started_unix_ns: The same by the wall clock.
        late_waits: What became of waits whose stacks had been cut; known once it is finished.
    """

    def __init__(
        self,
        target: Target,
        foundation: Foundation,
        signals: StopSignals,
        families: Sequence[Family] = (),
        *,
        are_families_named: bool = False,
        wanted: Wanted = ALWAYS,
        steers: Steers | None = None,
        accounts: KernelAccounts | None = None,
        least_round_ns: int = 0,
        helpers_cpu_ns: Callable[[], int] = lambda: 0,
        resident_bytes: Callable[[], int] = lambda: _peak_rss_bytes(),
        with_thread_names: bool = False,
        window_ns: int = INTERVAL_NS,
        libraries: Sequence[Path] = (),
    ) -> None:
        self._target = target
        self._libraries = libraries
        self._least_window_ns = self._window_ns = window_ns
        self._device_window_ns = INTERVAL_NS
        self._devices_drained_ns = 0  # since the start
        self._least_round_ns = self._round_ns = least_round_ns
        self._helpers_cpu_ns = helpers_cpu_ns
        self._resident_bytes = resident_bytes
        self._with_thread_names = with_thread_names
        self._wanted = wanted
        self._steers = steers
        self._accounts = accounts
        self._chances: Chances | None = None
        self._chances_number = 0
        self._ends_wanted = self._ends_made = 0
        self._waits_not_sampled = 0
        self._earlier = EarlierStacks(self._is_kept)
        self._earlier_long = EarlierStacks(self._is_kept, are_long=True)
        self._told_counters: Counter[abi.Counter] = Counter()
        self._are_families_named = are_families_named
        self._options = options = foundation.options
        self._signals = signals
        self.start_ns = self.started_unix_ns = 0
        self.late_waits = LateWaits(0, 0)
        self.cpu_count = len(online_cpus())
        self._possible_cpus = possible_cpus()
        self._boundary_ns = 0
        self._late_boundaries = 0
        self._followed = np.uint64(0)  # whose cgroup was looked at last
        self._ahead_ns = _AHEAD_NS
        self._window = WindowBuilder(_bounds(target, options))
        self._told_losses: Counter[LossKind] = Counter()
        self._told_cpu_ns, self._told_helpers_ns = time.process_time_ns(), helpers_cpu_ns()
        self._took_ns: tuple[int, int] | None = None  # of processes, and in threads of targets
        self._switches_unseen = 0
        self._cpus_came = self._processes_refused = 0
        self._entering: Iterator[None] = iter(())
        self._has_entered = False
        self._end_ns = abi.NEVER_NS
        self._real_time = priority.RealTime()
        self._guard = foundation.guard
        self._inspector = foundation.inspector
        self._file_facts = foundation.file_facts
        self._programs = foundation.programs
        self._fill = Fill(self._counter, options, self.cpu_count)
        self._switch_cost = SwitchCost(foundation.programs, count_run_times)
        self._excluded = ExcludedCgroups(self._programs)
        self._left_out = LeftOutProcesses(self._programs)
        with contextlib.ExitStack() as parts:
            self._ring = RingBuffer(self._programs.ring_fd, self._programs.ring_bytes)
            parts.callback(self._ring.close)
            self._life_events = LifeEvents(self._ring.watch)
            parts.callback(self._life_events.close)
            self._lives = Lives(self._life_events.read)
            self._build_host_half(parts, families)
            self._parts = parts.pop_all()

    def _build_host_half(self, parts: contextlib.ExitStack, families: Sequence[Family]) -> None:
        """Makes what turns what comes from the kernel into windows."""
        options, programs, window = self._options, self._programs, self._window
        table = self.table = ProcessTable(
            time.monotonic_ns(),
            self._current_image,
            self._inspector,
            self._file_facts,
            self._lives,
        )
        parts.callback(table.binaries.close)
        self.thread_times = ThreadTimes(window, table)
        self.tables = UnwindTables(
            programs,
            table,
            cache_dir(),
            options.unwind_bytes_max,
            self._ring.watch,
            options.builder_bytes_max,
        )
        parts.callback(self.tables.close)
        self.images = self.tables.images
        self.facts = ProcessFacts(window, table, self.images)
        self.pythons = PythonProcesses(programs, table, self.images, window)
        self._thread_names = PythonThreadNames(table)
        self.kernels = KernelTable(window)
        helpers = [api for family in families for api in family.probes]
        self.calls = ApiCalls(programs, table, self.images, self.kernels, window, helpers)
        parts.callback(self.calls.close)
        self._timed = TimedProcesses(programs)
        self.devices = Devices(
            families,
            table,
            self.images,
            window,
            self.kernels,
            options.period_ns,
            self.facts.tell_binary,
            self._ring.watch,
            self._timed.add,
            self._wanted,
        )
        parts.callback(self.devices.close)
        self.stacks = Stacks(window, table, self.calls, CutStacks(self.pythons), [self.devices])
        copies = RingBuffer(programs.copies_fd, programs.copies_bytes)
        parts.callback(copies.close)
        self._ring.watch(programs.copies_fd)
        self.late_walks = LateWalks(copies, table, self.tables, self.images, self.stacks)
        walker = StackWalker(self.tables, self.images) if options.user_stacks else None
        walks = SleepWalks(
            table, self.tables, walker, self.pythons, lambda: programs.thread_iterator_fd
        )
        self.sleepers = Sleepers(programs, table, walks, self.pythons, options.kernel_stacks)
        self._cut_sleeps = CutSleeps(programs, table, self.tables, walks, self.pythons, self.stacks)
        self._long_waits = LongWaits(programs, table, walks, self.pythons, self.stacks)
        self.samples = Samples(window, table, self.thread_times, self._cut_sleeps)
        self._ended = Ended(
            programs,
            table,
            window,
            self.thread_times,
            (
                *(self.tables, self._cut_sleeps, self.pythons, self.calls),
                *(self.kernels, self.devices, self.facts),
            ),
            (self.tables, self.pythons, self.calls, self.devices, self.facts),
            self.devices.used_binaries,
            self._used_images,
        )
        self.events = Events(
            self._ring,
            table,
            self.samples,
            self.thread_times,
            (self.tables, self.pythons, self._timed),
            self.calls,
            self._follow_mappings,
            self._take_sample,
            self._take_bell,
            self._take_left_out_exec,
        )

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        self._parts.close()

    def exclude(self, cgroup_ids: Collection[int]) -> int:
        """Leaves out what is in cgroups of v2, before the start or later; all others are recorded.

        Threads that sleep meanwhile are left out once they have run again.

        Args:
            cgroup_ids: As for `ExcludedCgroups.set`.

        Returns:
            How many found no room.
        """
        return self._excluded.set(cgroup_ids)

    def leave_out(self, paths: Collection[str]) -> None:
        """Leaves out what is in cgroups that programs have no id of, as `exclude` does by ids.

        A process that is seen there, and its children, until an exec outside of them.

        Args:
            paths: As for `LeftOutProcesses.set`.
        """
        recorded = [image for image in self.table.images.values() if not image.is_over]
        self._left_out.set(paths, recorded)

    def keep_less(self) -> None:
        """Keeps half as many stacks between windows from now on, down to a least number."""
        self._window.keep_less()

    def keep_more(self) -> bool:
        """Undoes one `keep_less`; False if there is none to undo."""
        return self._window.keep_more()

    def start(self, duration_ns: int | None, say: Callable[[str], None]) -> None:
        """Goes live: from here on nothing of the target is missed.

        Args:
            duration_ns: When it is to end, None where that is not known.
            say: Takes a line about what takes long.
        """
        programs = self._programs
        if programs.cgroups_fd is not None:
            self._enter_cgroup(programs.cgroups_fd)
        self._set_shares()
        # Those that are told apart each take an entry: no more in a window than half of the map
        # holds, and where that is near, windows are of a second (Fill.are_calls_many).
        programs.set(abi.Setting.LAUNCH_RUNS, self._options.calls_max // 2)
        command = self._target.command
        if self._target.filter is not abi.Filter.PIDS or self._options.follow_children:
            self._life_events.start()
        if self._options.user_stacks:
            programs.set(abi.Setting.STACK_COPIES, COPIES_PER_S)
        if self._are_families_named:
            self.devices.start()
        if self._options.by_chance:
            self._set_chances(Chances(1) if self._steers is None else self._steers.first())
        if self._steers is not None:
            self._parts.callback(self._switch_cost.end)
            self._switch_cost.begin()
        self._prepare_early()
        self._attach()
        pids = self._enter_targets()
        if self._target.filter is abi.Filter.PIDS:
            self._lives.follow_only(pids if command is None else [command.pid])
        self._prepare(say)
        if command is not None:
            self._enter_process(command.pid, self.table.first_image, abi.ProcessFlag.AT_EXEC)
        if self._accounts is not None:
            self._accounts.begin(pids, None if command is None else command.pid)
        self.started_unix_ns = time.time_ns()
        self.start_ns = self._boundary_ns = self.table.start_ns = time.monotonic_ns()
        programs.set(abi.Setting.BOUNDARY_BEFORE_NS, self.start_ns)
        programs.set(abi.Setting.BOUNDARY_NS, self.start_ns)
        self.thread_times.start(self.start_ns)
        if duration_ns is not None:
            self._end_ns = self.start_ns + duration_ns
        programs.set(abi.Setting.END_NS, self._end_ns)
        self._probes.start_clocks(self._options.period_ns)
        existing = self.sleepers.enter(pids) if self._options.off_cpu else ()
        self._entering = itertools.chain(existing, self._entered())
        self._enter_sleepers()

    def _prepare_early(self) -> None:
        """Does what needs no programs, while the kernel verifies them."""
        target = self._target
        if target.command is not None or target.filter is not abi.Filter.PIDS:
            self._prepare_files()
        if target.filter is abi.Filter.ALL:
            return
        own = self._own_pids()
        for pid in target.existing_pids():
            if pid in own or self._excluded.has(pid):
                continue
            if self._enter_process(pid, self.table.first_image, abi.ProcessFlag.TARGET):
                self.table.seen(pid, self.table.first_image, 0, "", 0)
        self._follow_mappings()
        self.tables.poll()  # children build those that there are not

    def _attach(self) -> None:
        """Attaches the programs: from here on no fork, exec or end is missed."""
        programs, options = self._programs, self._options
        programs.ready()
        self._probes = Probes(programs, options.off_cpu)
        self._parts.callback(self._probes.close)

    def _own_pids(self) -> set[int]:
        """Returns this process and those that it has started, which are not recorded."""
        own = {os.getpid(), *self._inspector.pids, *self._file_facts.pids}
        own.update(() if self._accounts is None else self._accounts.pids)
        if self._target.filter is abi.Filter.CGROUP:  # which may be its own; others are no targets
            own.update(procfs.descendants([os.getpid()]))
        return own

    def _enter_targets(self) -> list[int]:
        """Enters the processes that there are, also those forked before anything was attached."""
        own = self._own_pids()
        for pid in own:  # what they start is excluded as well; first, as there may be no room
            self._enter_process(pid, 0, abi.ProcessFlag.EXCLUDED)
        existing = self._target.existing_pids()
        pids = [pid for pid in existing if pid not in own and not self._excluded.has(pid)]
        first_image = self.table.first_image
        left_out = {*filter(self._left_out.has, pids)}
        for pid in left_out:
            self._enter_process(pid, first_image, abi.ProcessFlag.LEFT_OUT)
        entered = []
        for pid in pids:
            if pid in left_out:
                continue
            image = self.table.known(pid, first_image)
            if image is not None and image.executable != procfs.executable(pid):
                self.table.forget([image], ())  # it has called exec meanwhile
            if image is None and not self._enter_process(pid, first_image, abi.ProcessFlag.TARGET):
                continue
            if self._target.filter is not abi.Filter.ALL:
                self.table.seen(pid, first_image, 0, "", 0)
            entered.append(pid)
        return entered

    def _prepare(self, say: Callable[[str], None]) -> None:
        """Brings what targets have mapped to all who work by it, before the first sample."""
        self._follow_mappings()
        self.tables.poll()
        self.calls.poll(is_waiting=True)
        self.tables.wait_before_start(say, lambda: self._signals.requested)
        self.pythons.poll()
        self._lives.keep_up()  # what others did meanwhile is not to be gone through after an exec

    def _used_images(self) -> set[int]:
        """Returns the process images, by index, whose stacks are still to be walked."""
        return self.late_walks.used_images() | self._cut_sleeps.used_images()

    def _prepare_files(self) -> None:
        """Prepares what targets may yet map: tables, and probes for which programs are loaded."""
        command, opener = self._target.command, self._inspector.opener
        words = () if command is None else command.words
        expected = expected_files(words, opener, self._file_facts)
        if self._options.user_stacks:
            for path in expected.command:
                with (
                    contextlib.suppress(OSError),
                    opened_at(str(path), opener, self._file_facts) as fd,
                ):
                    if fd not in self._guard.remote:
                        self.tables.expect(fd)
                        # As mappings will have it, without symbolic links.
                        self.pythons.expect(fd, Path(f"/proc/self/fd/{fd}").readlink())
            if command is not None:
                self._expect_vdso(command.pid)
        if self._options.calls:
            runtimes = [*expected.runtimes, *expected.command, *self._libraries]
            if runtimes:
                self._programs.expect_calls()
            self.calls.prepare(runtimes, opener)

    def _expect_vdso(self, pid: int) -> None:
        """Has the table of the vDSO made, which all processes share, as a process has it."""
        for line in procfs.executable_mappings(self._inspector.opener, pid):
            if line.path == VDSO_PATH:
                vdso = self.table.binaries.of_mapping(pid, "", line)
                if vdso is not None:
                    self.tables.is_being_built(vdso.index)

    def _follow_mappings(self) -> None:
        """Brings what was newly mapped to all who work by it.

        Where there are new files, walks of stacks come first, which go on meanwhile: the others ask
        about these, and wait for the answers. What maps known files is brought with others.
        """
        self._renew_files()
        remapped = self.table.take_remapped()
        images = [image for image in remapped if not self._left_out.leave_out(image)]
        if self._options.user_stacks:
            are_files_new = any(map(self.tables.maps_new_files, images))
            for image in images:
                self.tables.push(image)
            if are_files_new and self._has_entered:  # before, each change is waited for
                self.tables.poll()
        for image in images:
            if self.table.is_current(image):
                self._look(image)

    def _renew_files(self) -> None:
        """Has forgotten what was said of files while they, or those who read them, were not there.

        Who maps them is looked at again.
        """
        unopened = self.table.binaries.take_unopened()
        if unopened:
            self.table.open_again(unopened)
        renewed = self.table.binaries.take_renewed()
        if renewed:
            self.tables.renew(renewed)
            for keeper in (self.pythons, self.devices, self.facts):
                keeper.forget_binaries(renewed)
            self.stacks.look_again(renewed)
            self.table.look_again(renewed)

    def _look(self, image: ProcessImage) -> None:
        self.devices.look(image)
        if self._options.calls:
            self.calls.look(image)
        if self._options.user_stacks:
            self.pythons.look(image)

    def _take_sample(self, stack: int, tid: int, ns: int) -> None:
        self.devices.take_sample(stack, tid, ns, self.stacks.has_come)

    def _take_bell(self, pid: int, image: int, kernel_times_gone: int) -> None:
        self._follow_mappings()
        self.devices.ring(self.table.image(pid, image), kernel_times_gone)

    def _take_left_out_exec(self, pid: int, image: int, ns: int) -> None:
        self.table.exited(pid, image, ns)
        self._left_out.look_again(pid)

    def _enter_sleepers(self) -> bool:
        """Goes on entering existing threads for a moment; returns whether all are entered."""
        until_ns = time.monotonic_ns() + _ENTERING_SLICE_NS
        return all(time.monotonic_ns() <= until_ns for _ in self._entering)

    def _entered(self) -> Iterator[None]:
        """Gives up what is needed no more once existing threads are entered."""
        with_helpers = self._wanted.loading is Loading.DONE
        give_up_admin(self._programs.uprobes, self._options.calls, with_helpers)
        self.tables.go_beside()
        self._has_entered = True
        yield
        target = self._target
        if target.command is None and target.filter is abi.Filter.PIDS and target.follows_children:
            self._prepare_files()  # for children to come
        yield

    def _enter_process(self, pid: int, image: int, flags: abi.ProcessFlag) -> bool:
        """Returns whether there was room for it."""
        state = np.zeros(1, abi.PROCESS_STATE_DTYPE)
        state["image"], state["flags"] = image, int(flags)
        try:
            # The programs are attached already, and may have been first.
            self._programs.processes.update(pid.to_bytes(4, "little"), state.tobytes(), BPF_ANY)
        except OSError as error:
            if error.errno != errno.E2BIG:
                raise
            self._processes_refused += 1
            return False
        return True

    def _follow_cpus(self) -> None:
        """Samples CPUs that have come, and lets all CPUs together fill stores as far as before."""
        came = self._probes.follow_cpus()
        self._life_events.follow_cpus(came)
        self._cpus_came += len(came)
        if came and len(online_cpus()) > self._fill.cpus:
            self._fill.cpus = len(online_cpus())
            self._set_shares()

    def _set_shares(self) -> None:
        for setting, share in self._fill.shares().items():
            self._programs.set(setting, share)

    def _enter_cgroup(self, map_fd: int) -> None:
        directory = os.open(str(self._target.cgroup), os.O_RDONLY | os.O_DIRECTORY)
        try:
            slot = Map(map_fd, abi.PID_DTYPE, abi.PID_DTYPE, 1)
            slot.update(bytes(4), directory.to_bytes(4, "little"))
        finally:
            os.close(directory)

    def _current_image(self, pid: int) -> int | None:
        state = self._programs.processes.lookup(pid.to_bytes(4, "little"))
        return None if state is None else int(state[0]["image"])

    def run(self, give: Callable[[Window], None], report: Callable[[Progress], None]) -> None:
        """Records until told to stop, the time is over, or the target has ended.

        Args:
            give: Takes each window.
            report: Is told how it goes on after each.
        """
        with self._real_time:
            self._run(give, report)
        if self._accounts is not None:
            self._accounts.end(self._pids_now(), self._queued_ns())

    def _pids_now(self) -> list[int]:
        """Returns the targets that are there, as far as anything was seen of them."""
        command = self._target.command  # it is there until it is waited for
        found = {image.pid for image in self.table.images.values() if not image.is_over}
        return [*found, *([] if command is None else [command.pid])]

    def _queued_ns(self) -> dict[int, int]:
        """Returns for how long threads have waited for a CPU, by tid."""
        tids, states = self._programs.threads.read_all()
        is_preempted = states["off_class"] == SampleClass.PREEMPTED
        since_ns = np.where(is_preempted, states["switched_ns"], states["waking_ns"])
        is_woken = states["waking_ns"] >= states["switched_ns"]
        is_queued = is_preempted | ((states["off_class"] == SampleClass.BLOCKED) & is_woken)
        waited_ns = time.monotonic_ns() - since_ns[is_queued].astype(np.int64)
        return dict(zip(tids[is_queued].tolist(), waited_ns.tolist(), strict=True))

    def growth(self) -> Growth | None:
        """Returns by how much the kernel's own accounts grew, None if nobody has read them.

        To be asked once the recording has ended.
        """
        if self._accounts is None:
            return None
        return self._accounts.growth(self.start_ns, self._end_ns, self._numbers_of)

    def _numbers_of(self, pid: int, tid: int) -> tuple[int, int] | None:
        """Tells the accounts who had a pid and a tid that were given up just now."""
        image = self.table.latest(pid)
        if image is None:
            return None
        thread = self.table.known_thread(image, tid)
        return image.index, NO_THREAD if thread is None else thread.index

    def _run(self, give: Callable[[Window], None], report: Callable[[Progress], None]) -> None:
        self._ring.watch(self._signals.fd)
        waiting = {pid: _process_fd(pid) for pid in self._living_pids()}
        for fd in waiting.values():
            if fd is not None:
                self._ring.watch(fd)
        next_ns = self.start_ns + INTERVAL_NS
        window_begin_ns = next_ns - self._window_ns  # the first is of one interval
        round_ns = self.start_ns
        try:
            while not self._signals.requested and (waiting or not self._target.pids):
                now_ns = time.monotonic_ns()
                is_entering = not self._enter_sleepers()
                # A thread that is not entered would be missing, however long it slept.
                if now_ns >= self._end_ns and not is_entering:
                    break
                until_ns = min(next_ns, self._end_ns, now_ns + self.pythons.interval_ns)
                until_ns = max(min(until_ns, self._cut_sleeps.due_ns), now_ns)
                if self._chances is not None:
                    until_ns = max(min(until_ns, self._long_waits.due_ns), now_ns)
                if self.calls.is_waiting:
                    until_ns = min(until_ns, now_ns + _LOADING_NS)
                if is_entering:
                    until_ns = 0
                self._real_time.check()
                self._ring.wait((until_ns - now_ns) / 1e9)
                left_ns = round_ns + self._round_ns - time.monotonic_ns()
                if left_ns > 0:
                    time.sleep(left_ns / 1e9)
                round_ns = time.monotonic_ns()
                is_asked = self.events.take()
                is_wanted = self._ends_wanted != self._ends_made
                self._ends_made = self._ends_wanted
                parts = (self._window, self.thread_times, self.table)
                is_full = any(part.is_filling for part in parts)
                is_full |= is_asked and self._fill.are_sums_many
                if is_wanted or is_full:
                    give(self._next_window())
                    window_begin_ns = next_ns - INTERVAL_NS
                elif is_asked and self._fill.are_stacks_many:
                    self._drain_stacks()
                if self._accounts is not None:
                    self._accounts.take(self._numbers_of)
                self._lives.keep_up()
                self.late_walks.take()
                self.tables.poll()
                self.pythons.poll()
                if self._with_thread_names:
                    self._thread_names.poll(self.pythons.by_image.values())
                self.calls.poll()
                self.devices.poll()
                self.late_walks.poll()
                if self._options.off_cpu:
                    self._cut_sleeps.poll()
                if self._chances is not None:
                    self._long_waits.poll()
                if time.monotonic_ns() >= next_ns:
                    are_devices_used = self.devices.are_used
                    window_ns = self._device_window_ns if are_devices_used else self._window_ns
                    is_due = next_ns - window_begin_ns >= window_ns
                    if is_due or (are_devices_used and self._fill.are_calls_many):
                        give(self._next_window())
                        window_begin_ns = next_ns
                    else:
                        if self._has_entered:
                            self.sleepers.walk_again()
                        if self.devices.are_running:
                            now_ns = self._since_start(time.monotonic_ns())
                            self._drain_devices(now_ns, is_within=True)
                            if self._window.is_filling:  # it has no room for another second
                                give(self._next_window())
                                window_begin_ns = next_ns
                    self._follow_cpus()
                    report(self._progress())
                    next_ns = max(next_ns + INTERVAL_NS, time.monotonic_ns())
                for pid in [pid for pid, fd in waiting.items() if _has_ended(pid, fd)]:
                    _close(waiting.pop(pid))
        finally:
            for fd in waiting.values():
                _close(fd)

    def end_window(self) -> None:
        """Has the open window end at the next look, for one other thread that waits for it."""
        self._ends_wanted += 1

    def _living_pids(self) -> list[int]:
        return [pid for pid in self._target.pids if Path(f"/proc/{pid}").is_dir()]

    def _take_said(self) -> tuple[str, ...]:
        of_steers = [] if self._steers is None else self._steers.take_said()
        return (*self.devices.take_said(), *of_steers)

    def _progress(self) -> Progress:
        losses = read_losses(self._programs.counters, self._possible_cpus)
        return Progress(
            elapsed_ns=min(time.monotonic_ns(), self._end_ns) - self.start_ns,
            samples=self.samples.count,
            off_cpu_ns=sum(self.samples.ns_by_class[1:]),
            lost=losses.total(),
            said=self._take_said(),
        )

    def _drain_stacks(self) -> None:
        """Takes in the stacks that the kernel half has, at the end of a window or within it."""
        self.devices.before_stacks()
        self._follow_mappings()
        self.late_walks.take()
        self._fill.note_stacks_taken()
        for keys, records in self._programs.stacks.chunks(take=True):
            self.stacks.add(keys, records)
            self._follow_mappings()
            self._real_time.check()
        self.pythons.take_chains()

    def _next_window(self) -> Window:
        """Closes the open window at a boundary that is now, and begins the next."""
        boundary_ns = self._set_boundary()
        self.events.take()  # a process is announced before its first sum
        window = self._filled(boundary_ns, 1 - (boundary_ns & 1))
        self._boundary_ns = boundary_ns
        return window

    def _set_boundary(self) -> int:
        """Tells programs of a new boundary, and waits until it is over; returns it."""
        set_ns = self._programs.set
        set_ns(abi.Setting.BOUNDARY_BEFORE_NS, self._boundary_ns)
        self._fill.note_sums_taken()  # what takes time comes before the boundary is chosen
        # Its lowest bit says which of the two maps of sums is written from then on.
        parity = 1 - (self._boundary_ns & 1)
        boundary_ns = (time.monotonic_ns() + self._ahead_ns) & ~1 | parity
        set_ns(abi.Setting.BOUNDARY_NS, boundary_ns)
        now_ns = time.monotonic_ns()
        if now_ns >= boundary_ns:
            self._late_boundaries += 1
            self._ahead_ns = min(2 * self._ahead_ns, _MOST_AHEAD_NS)
        time.sleep(max(boundary_ns - now_ns, 0) / 1e9 + _SETTLE_S)
        return boundary_ns

    def _filled(self, boundary_ns: int, written: int, *, is_last: bool = False) -> Window:
        """Empties the kernel's stores into the open window, and closes it at a boundary.

        Args:
            boundary_ns: Monotonic.
            written: Which of the two maps of sums programs wrote until then.
            is_last: No program writes any more; waits that are open end here.
        """
        self._drain_stacks()
        end_ns = self._since_start(boundary_ns)
        keys, values = self._programs.sums[written].take_all()
        if self._chances is not None:
            self._long_waits.sweep()
        threads = self._threads_past(keys, is_last) if self._options.off_cpu else None
        if threads is not None:
            self._long_waits.close(threads.tids, threads.states)
            for which in (0, 1) if is_last else (written,):
                joined = self._programs.short_lived[which].take_all()
                self.thread_times.join(boundary_ns, *joined)
            keys, values = self._cut_sleeps.close(
                boundary_ns, threads.tids, threads.states, keys, values, is_last=is_last
            )
        exact, chosen = _by_weight(keys, values)
        (keys, values), bare = _by_stack(exact)
        self.samples.add(keys, values)
        if self._options.calls:
            self.calls.drain(self._window.start_ns, end_ns, written)
        if is_last:
            chosen = concatenated([chosen, self._take_stragglers(end_ns, 1 - written)])
        self.devices.add_sums(keys, values, self.stacks.has_come)
        self._drain_devices(end_ns)
        if is_last:
            self.devices.stop(end_ns)
        if threads is not None:
            sums = _Sums((keys, values), chosen, bare)
            charged = self._charge(boundary_ns, threads, sums, written, is_last)
            keys, values = concatenated([(keys, values), charged])
            self._cut_sleeps.note(keys, values)
        self._follow_cgroups(keys)
        self.tables.note_used(self.stacks.binaries_of(keys["stack"]))
        if self._has_entered and not is_last:
            self.sleepers.walk_again()
            give_sleepers(self.sleepers, self.samples.made, self.stacks, self.table)
        return self._close_window(boundary_ns)

    def _follow_cgroups(self, keys: npt.NDArray[np.void]) -> None:
        """Looks whether processes with on-CPU samples have moved to another cgroup.

        Args:
            keys: Of all sums of a window.
        """
        keys = keys[keys["sample_class"] == SampleClass.ON_CPU]
        names, first = np.unique(name_of(keys["tgid"], keys["image"]), return_index=True)
        # Those that come after the last one that was looked at, all around.
        turn = int(np.searchsorted(names, self._followed, side="right"))
        chosen = np.roll(np.arange(len(names)), -turn)[:_CGROUPS_TO_FOLLOW]
        if not len(chosen):
            return
        self._followed = names[chosen[-1]]
        rows = keys[first[chosen]]
        pids = zip(rows["tgid"].tolist(), rows["image"].tolist(), strict=True)
        for image in self.table.follow_cgroups(pids):
            self._left_out.leave_out(image)

    def _drain_devices(self, end_ns: int, *, is_within: bool = False) -> None:
        """Takes what device families have, each second: what they have it in is small."""
        second = self._devices_drained_ns // INTERVAL_NS
        self.devices.drain(second, end_ns, is_within=is_within)
        self._devices_drained_ns = end_ns

    def _take_stragglers(self, end_ns: int, other: int) -> Part:
        """Takes what was written to the other maps after they had been emptied.

        By programs that were kept from their CPU between reading the clock and writing; while the
        recording goes on, it is taken with the next window but one.

        Returns:
            What of it is by chance.
        """
        exact, chosen = _by_weight(*self._programs.sums[other].take_all())
        self.samples.add(*exact)
        if self._options.calls:
            self.calls.drain(self._window.start_ns, end_ns, other)
        return chosen

    def _threads_past(self, keys: npt.NDArray[np.void], is_last: bool) -> _Threads:
        """Returns what all threads do, a boundary being over.

        Args:
            keys: Of all sums before it.
            is_last: The recording ends there.
        """
        tids, states = self._programs.threads.read_all()
        for tries_left in reversed(range(_TRIES_AT_END if is_last else _TRIES_FOR_ENDS)):
            # A program that reports a thread's end may have been kept from its CPU meanwhile.
            missing = self.thread_times.unaccounted(keys, tids, states)
            if not missing:
                break
            if not tries_left:
                self._late_boundaries += missing
                break
            time.sleep(_SETTLE_S)
            self.events.take()
        return _Threads(tids, states, self._running())

    def _charge(
        self, boundary_ns: int, threads: _Threads, sums: _Sums, written: int, is_last: bool
    ) -> Part:
        """Charges what threads did up to a boundary, and is not over, and what was by chance.

        Args:
            boundary_ns: Monotonic.
            threads: As they were a moment after.
            sums: Of intervals that have ended.
            written: Which of the two totals by chance programs wrote until then.
            is_last: The recording ends there.

        Returns:
            Keys and values of what was charged, as sums.
        """
        boundary_ns = min(boundary_ns, self._end_ns)  # past the end nothing was recorded
        tids, states = threads.tids, threads.states
        charged = self.thread_times.close(
            boundary_ns, tids, states, threads.running, written=written, is_last=is_last
        )
        self._switches_unseen += charged.unseen if is_last else 0
        if is_last:
            # Nobody will see them end.
            charged.values["count"] = np.maximum(charged.values["count"], 1)
            for tid, state in zip(tids.tolist(), states, strict=True):
                self._end_wait(tid, state, boundary_ns)
            for pid, tid in self.sleepers.missed():
                thread = self.table.thread(self.table.image(pid, self.table.first_image), tid)
                self.samples.add_thread_time(thread, 0, boundary_ns - self.start_ns)
        found = charged.keys, charged.values
        if self._chances is not None:
            found = self._share_out(boundary_ns, sums, charged)
        self.samples.add(*found)
        return found

    def _share_out(self, boundary_ns: int, sums: _Sums, charged: Charged) -> Part:
        """Returns what a window has of intervals by chance, of bare ones, and of those charged."""
        exact, still = _by_weight(charged.keys, charged.values)
        exact, bare = _by_stack(exact)
        rows = concatenated([sums.chosen, still])
        shared = share_out(rows, concatenated([charged.totals, still]), self._earlier.of)
        self._earlier.add(rows, boundary_ns)
        known = as_chosen(concatenated([sums.exact, exact]))
        filled = fill_in(concatenated([sums.bare, bare]), known, self._earlier_long.of)
        self._earlier_long.add(known, boundary_ns)
        self._waits_not_sampled += shared.unsampled + filled.unsampled
        if self._steers is not None and boundary_ns < self._end_ns:
            window_ns = boundary_ns - self._boundary_ns
            load = self._load(window_ns, sums, charged.totals)
            self._set_chances(self._steers.next(load))
            self._took_ns = load.own_cpu_ns, self._steers.accounted_ns()
            self.devices.steer(self._steers.duties(), window_ns)
        found = [(each.keys, each.values) for each in (shared, filled)]
        return concatenated([exact, *found])

    def _is_kept(self, stack: int) -> bool:
        return self._window.is_kept("stacks", stack)

    def _load(self, window_ns: int, sums: _Sums, totals: Part) -> Load:
        """Returns what the window that closes has cost."""
        keys, values = concatenated([sums.exact, sums.bare, totals])
        # Of a wait, being asleep and waiting to run are one switch-out.
        is_one = np.isin(keys["sample_class"], (SampleClass.BLOCKED, SampleClass.PREEMPTED))
        keys, counts = keys[is_one], values["count"][is_one]
        names = name_of(keys["tgid"], keys["image"])
        _, first, which = np.unique(names, return_index=True, return_inverse=True)
        switches = Counter[int]()
        for tgid, number, count in zip(
            keys["tgid"][first].tolist(),
            keys["image"][first].tolist(),
            np.bincount(which, counts).astype(np.int64).tolist(),
            strict=True,
        ):
            image = self.table.known(tgid, number)
            switches[0 if image is None else image.cgroup_id] += count
        counted = Counter(self._counters())
        new, self._told_counters = counted - self._told_counters, counted
        joined = self.table.joined - self._told_losses[LossKind.SHORT_LIVED_JOINED]
        return Load(
            window_ns,
            switches,
            stacks=new[abi.Counter.WAITS_CHOSEN],
            samples=new[abi.Counter.SAMPLES],
            calls=new[abi.Counter.CALLS],
            own_cpu_ns=self._take_cpu_ns(),
            bpf_ns=self._switch_cost.take(window_ns),
            helpers=self.devices.take_loads(),
            joined=joined,
        )

    def _take_cpu_ns(self) -> int:
        """Returns what this process, and those that it has begun, took since the last call."""
        cpu_ns, helpers_ns = time.process_time_ns(), self._helpers_cpu_ns()
        took_ns = cpu_ns - self._told_cpu_ns
        # What the orphan of a helper took is in no sum any more.
        took_ns += max(helpers_ns - self._told_helpers_ns, 0)
        self._told_cpu_ns, self._told_helpers_ns = cpu_ns, helpers_ns
        return took_ns

    def _set_chances(self, chances: Chances) -> None:
        write_chances(self._programs, chances, self._chances)
        self._chances = chances
        self._round_ns = min(self._least_round_ns * chances.thrift, _MOST_ROUND_NS)
        self._long_waits.thrift = self._cut_sleeps.thrift = chances.thrift
        self.pythons.thrift = chances.thrift
        self.events.details_after_ns = chances.details_after_ns
        self._window_ns = self._least_window_ns * min(chances.thrift, _LONGEST_WINDOW)
        self._device_window_ns = INTERVAL_NS * chances.thrift * chances.delay_factor
        # Also where they are as before: a process may have moved to another cgroup.
        self._chances_number += 1
        self._programs.set(abi.Setting.CHANCES_NUMBER, self._chances_number)

    def _end_wait(self, tid: int, state: np.void, end_ns: int) -> None:
        """Lists a long wait that goes on when the recording ends."""
        switched_ns = int(state["switched_ns"])
        is_wait = int(state["off_class"]) == SampleClass.BLOCKED
        if is_wait and switched_ns and end_ns - switched_ns >= self._options.wait_event_ns:
            self._open_wait(tid, state, end_ns)

    def _since_start(self, monotonic_ns: int) -> int:
        """Returns a time of the recording; what comes after its end is at its end."""
        return max(min(monotonic_ns, self._end_ns) - self.start_ns, self._window.start_ns)

    def _close_window(self, boundary_ns: int, *, is_last: bool = False) -> Window:
        """Closes the open window at a monotonic time."""
        self.calls.finish(self.devices.kernel_names(), self.table.ended_images())
        self.facts.tell(self._end_ns)
        self.pythons.tell()  # before texts get other numbers
        losses = read_losses(self._programs.counters, self._possible_cpus) + self.losses()
        for kind, count in (losses - self._told_losses).items():
            is_sample = kind is LossKind.EXCLUDED
            self._window.lose(kind, count, count * self._options.period_ns if is_sample else 0)
        self._told_losses = losses
        cpu_ns, bpf_ns = self._took_ns or (self._take_cpu_ns(), 0)
        self._took_ns = None
        cost = Cost(cpu_ns, bpf_ns, self._resident_bytes())
        end_ns = self._since_start(boundary_ns)
        window = self._window.close(end_ns, is_last=is_last, cost=cost)
        if not is_last:
            self._ended.forget()
            self.devices.forget_unused_kernels()
        return window

    def stop(self, give: Callable[[Window], None]) -> Outcome:
        """Ends sampling, and gives what is left."""
        self._probes.stop_clocks()
        # In this order: what is not seen after the stop goes on as it was, so that on and off add
        # up; the other way round, both would go on past the end.
        self._programs.set(abi.Setting.END_NS, 0)
        stopped_ns = time.monotonic_ns()
        self.calls.take_probes_off()
        end_ns = self._end_ns = min(stopped_ns, self._end_ns)
        self.events.take()
        if self._with_thread_names:
            self._thread_names.read_all(self.pythons.by_image.values())
        give(self._filled(max(end_ns, self._boundary_ns), self._boundary_ns & 1, is_last=True))
        counters = self._programs.counters
        return Outcome(
            duration_ns=end_ns - self.start_ns,
            overrun_ns=stopped_ns - end_ns,
            counters=self._counters(),
            losses=read_losses(counters, self._possible_cpus),
            costs=self._programs.costs(),
            said=self._take_said(),
        )

    def finish(self, give: Callable[[Window], None], tables_until_ns: int = abi.NEVER_NS) -> None:
        """Gives the last window: what takes longer to find out, of what windows before mention.

        Args:
            give: Takes it.
            tables_until_ns: Until when unwind tables may be waited for, monotonic.
        """
        self.tables.end_by(tables_until_ns)
        self.late_walks.finish()
        give_all_sleepers(self.sleepers, self.samples.made, self.stacks, self.table)
        self.late_waits = self._cut_sleeps.finish()
        self.calls.finish(self.devices.kernel_names())
        give(self._close_window(self._end_ns, is_last=True))

    def _counters(self) -> dict[abi.Counter, int]:
        return read_counters(self._programs.counters, self._possible_cpus)

    def _counter(self, counter: abi.Counter) -> int:
        return read_counter(self._programs.counters, counter, self._possible_cpus)

    def losses(self) -> Counter[LossKind]:
        """Returns what the host half lost."""
        found = Counter(
            {
                LossKind.BINARY_NOT_OPENED: self.table.binaries.unopened,
                LossKind.BINARY_NOT_READ: self._guard.bad_count,
                LossKind.SWITCH_NOT_SEEN: self._switches_unseen,
                LossKind.CPUS_CAME_ONLINE: self._cpus_came,
                LossKind.PROCESSES_FULL: self._processes_refused,
                LossKind.BOUNDARY_LATE: self._late_boundaries,
                LossKind.WAITS_NOT_SAMPLED: self._waits_not_sampled,
                LossKind.SHORT_LIVED_JOINED: self.table.joined,
                LossKind.LIFE_EVENTS_LOST: self._lives.lost + self._life_events.refused,
            }
        )
        parts = (
            *(self.tables, self.late_walks, self.sleepers, self._cut_sleeps, self.pythons),
            *(self._thread_names, self.calls, self.devices),
            *(() if self._accounts is None else (self._accounts,)),
        )
        for part in (*parts, self._timed, self._inspector):
            found.update(part.losses)
        return found

    def untold_losses(self) -> Counter[LossKind]:
        """Returns what was lost that no window has told."""
        lost = read_losses(self._programs.counters, self._possible_cpus) + self.losses()
        return lost - self._told_losses

    def loss_files(self) -> dict[LossKind, set[str]]:
        """Returns the files to blame."""
        parts = (self.tables, self.pythons, self.calls.probes, self._inspector)
        files = {kind: found for part in parts for kind, found in part.loss_files.items()}
        files[LossKind.BINARY_NOT_READ] = {
            f"{path} ({why})" for path, why in self._guard.bad.items()
        }
        return files

    def _running(self) -> set[int]:
        """Returns the targets' threads that the CPUs run, as far as their switches were seen."""
        tids = self._programs.running.lookup(bytes(4), self._possible_cpus)
        return set() if tids is None else set(tids.tolist())

    def _open_wait(self, tid: int, state: np.void, end_ns: int) -> None:
        parts = dict(open_parts(state, end_ns))
        event = np.zeros(1, abi.WAIT_EVENT_DTYPE)
        event["tid"] = tid
        for field in ("tgid", "image", "stack"):
            event[field] = state[field]
        event["start_ns"] = state["switched_ns"]
        event["blocked_ns"] = parts.get(SampleClass.BLOCKED, 0)
        event["runnable_ns"] = parts.get(SampleClass.WAITING_TO_RUN, 0)
        self.samples.add_waits(event, is_open=True)


def _bounds(target: Target, options: ProgramOptions) -> Bounds:
    """Returns what a window may hold: what the kernel half brings in a busy second, and no more."""
    stacks = max(options.stacks_max, Bounds().stacks)
    # Whoever is named alone may have all.
    of_process = stacks if target.filter is abi.Filter.PIDS else stacks // 2
    return Bounds(
        stacks=stacks,
        stacks_of_process=of_process,
        rows=options.sums_max,
        stacks_at_once=options.stacks_max // 2,
    )


def _by_weight(keys: npt.NDArray[np.void], values: npt.NDArray[np.void]) -> tuple[Part, Part]:
    """Returns sums of what counts as it is, and of what was chosen by chance."""
    is_exact = keys["weight"] == abi.WEIGHT_EXACT
    return _part(keys, values, is_exact), _part(keys, values, ~is_exact)


def _by_stack(exact: Part) -> tuple[Part, Part]:
    """Returns exact sums, and apart from them those of long waits that nobody has walked."""
    keys, values = exact
    is_bare = keys["stack"] == abi.NOT_SAMPLED_STACK
    return _part(keys, values, ~is_bare), _part(keys, values, is_bare)


def _part(
    keys: npt.NDArray[np.void], values: npt.NDArray[np.void], which: npt.NDArray[np.bool_]
) -> Part:
    return take_rows(keys, which), take_rows(values, which)


def _process_fd(pid: int) -> int | None:
    """Opens what tells at once when a process ends; None where it has, or too many are open."""
    try:
        return keep(os.pidfd_open(pid))
    except OSError:
        return None


def _has_ended(pid: int, process_fd: int | None) -> bool:
    if process_fd is None:
        return not Path(f"/proc/{pid}").is_dir()
    # A pidfd is readable once its process has ended (v5.3).
    poll = select.poll()
    poll.register(process_fd, select.POLLIN)
    return bool(poll.poll(0))


def _peak_rss_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _close(fd: int | None) -> None:
    if fd is not None:
        os.close(fd)
