# SPDX-License-Identifier: Apache-2.0
"""Gets the kernel programs into the kernel: finds their bytecode, and puts this host into it."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from aiflame.agent import priority
from aiflame.agent.errors import EnvironmentUnfit
from aiflame.agent.kernel import abi, compile
from aiflame.agent.kernel.abi import HostConstant
from aiflame.agent.kernel.bytecode import BadBytecode, Bytecode, Host, Loader, Refused, close_all
from aiflame.agent.kernel.facts import kernel_facts
from aiflame.agent.kernel.program_list import (
    CALL_PROGRAMS,
    PROGRAMS,
    SWEEP_ITERATOR,
    THREAD_ITERATOR,
)
from aiflame.agent.kernel.sysbpf import Map, ProgramCost, program_cost
from aiflame.agent.kernel.syscalls import MapShape, create_map, lift_memlock_limit, map_facts
from aiflame.agent.kernel.uprobe_tries import UprobeTries, load_for_links
from aiflame.agent.retries import Retries
from aiflame.agent.symbols.store import Store

# Longer than the slowest compile seen (1 s) by an order of magnitude; a loaded host may crawl.
_COMPILE_TIMEOUT_S = 120

# Threads that call device APIs: each has some 6 KB in the kernel, taken at the start.
_CALLERS_MAX = 1024
# Names of GPU kernels that are known at a time: past it, the least recently used are forgotten.
_KERNEL_NAMES_MAX = 16384
# Queues of devices whose launches are put in order: past it, the least recently used are forgotten.
_QUEUES_MAX = 4096
# Processes whose samples have a time: those that run a device's kernels on CPUs.
_TIMED_PROCESSES_MAX = 1024
# Cgroups with chances of their own: past it, the default is theirs. More than pods of a host.
_CGROUPS_MAX = 4096
# Cgroups, parents and names of short-lived processes in a window: where each has another parent,
# those that find no room are told of by themselves.
_SHORT_LIVED_MAX = 4096
# Threads in a long wait that chance did not choose: as many as threads are followed.
_SWEPT_MAX = 65536
# What a verifier says of helpers that are there, and that lockdown keeps from programs
# (bpf_tracing_func_proto of kernel/trace/bpf_trace.c, check_helper_call of kernel/bpf/verifier.c,
# v6.1; newer ones have the second wording). bpf_probe_read_user is not among them. Containers have
# no securityfs to ask.
_READS_REFUSED = re.compile(r"(unknown func|cannot use helper) bpf_probe_read(_kernel)?(_str)?#")
# Programs for calls: as all files are probed with, and those beside them of `calls_for_events`.
_PLAIN, _FOR_EVENTS = "calls", "calls for events"
BCC_HINT = "apt-get install python3-bpfcc  (Fedora: dnf install python3-bcc)"


class CallsRefused(EnvironmentUnfit):
    """The programs for calls of device APIs are not to be had, maybe for a moment only."""


@dataclass(frozen=True, slots=True)
class ProgramOptions:
    """What a recording asks of the programs; sizes are entries, times ns."""

    filter: abi.Filter
    period_ns: int
    follow_children: bool = True
    off_cpu: bool = True
    user_stacks: bool = True
    kernel_stacks: bool = True
    stacks_max: int = 16384
    sums_max: int = 65536
    threads_max: int = 65536
    processes_max: int = 16384
    ring_pages: int = 256
    copies_pages: int = 2048  # 120 stacks, between two looks of the host half
    python_chains_max: int = 8192
    calls: bool = True
    calls_max: int = 32768
    call_events_per_s: int = 0  # a CPU
    wait_event_ns: int = 100_000_000
    unwind_bytes_max: int = 256 << 20  # the host half keeps to it
    builder_bytes_max: int = 0  # likewise; 0 is as much as any file takes
    excluded_max: int = 0  # cgroups that may be left out at a time
    by_chance: bool = False  # switch-outs take stacks as chances say, else each does


Dtype = np.dtype[Any]


class Programs:
    """Loaded programs and maps, by name. Closing them takes everything out of the kernel.

    Args:
        loader: Has made the maps.
        first: Descriptors of the programs that it loads, by name: all but those for calls.
        options: What was asked for.
        uprobes: What the kernel does with probes.

    Attributes:
        calls_link_many: Whether the programs for calls are for links of many probes.
        uprobes: As given.
        inner_flags: BPF_F_* that arrays in maps of maps must have.
    """

    calls_link_many = False

    def __init__(
        self,
        loader: Loader,
        first: Future[dict[str, int]],
        options: ProgramOptions,
        uprobes: UprobeTries,
    ) -> None:
        self.uprobes = uprobes
        self.fds: dict[str, int] = {}
        self._first = first
        self._is_ready = False
        self._has_cookies = bool(loader.host.constants[HostConstant.HAS_ATTACH_COOKIE])
        self._loader = loader
        # Programs for calls, by how they are attached.
        self._loading: dict[str, Future[dict[str, int]]] = {}
        self._refused = Retries[str]()
        map_fds = loader.map_fds
        self.ring_fd = map_fds["ring"]
        self.ring_bytes = _ring_bytes(options)
        self.copies_fd, self.copies_bytes = map_fds["stack_copies"], _copies_bytes(options)
        self.inner_flags = map_facts(map_fds["unwind_table"]).flags
        self.cgroups_fd = map_fds["cgroups"] if options.filter is abi.Filter.CGROUP else None
        number, pid, processes = abi.PID_DTYPE, abi.PID_DTYPE, options.processes_max

        def known(name: str, key: Dtype, value: Dtype, entries: int) -> Map:
            return Map(map_fds[name], key, value, entries)

        self.settings = known("settings", number, abi.SETTINGS_DTYPE, len(abi.Setting))
        self.counters = known("counters", number, abi.COUNTERS_DTYPE, abi.COUNTERS_MAX)
        self.running = known("running", number, abi.RUNNING_DTYPE, 1)
        self.processes = known("processes", pid, abi.PROCESS_STATE_DTYPE, processes)
        self.threads = known("threads", pid, abi.THREAD_STATE_DTYPE, options.threads_max)
        self.stacks = known("stacks", abi.STACK_ID_DTYPE, abi.STACK_DTYPE, options.stacks_max)
        self.process_mappings = known("process_mappings", pid, number, processes)
        self.unwind_tables = known("unwind_tables", number, number, abi.TABLES_MAX)
        self.pythons = known("pythons", pid, abi.PYTHON_PROCESS_DTYPE, processes)
        self.python_chains = known(
            "python_chains", abi.STACK_ID_DTYPE, abi.PYTHON_CHAIN_DTYPE, options.python_chains_max
        )
        self.api_calls = known("api_calls", number, abi.API_CALL_DTYPE, abi.API_CALLS_MAX)
        self.api_probes = known("api_probes", number, abi.API_PROBE_DTYPE, abi.API_PROBES_MAX)
        self._walkers = {
            kind: known(f"{kind}_walkers", number, number, 2)
            for kind in ("sample", "switch", "call")
        }
        self.chances = known("chances", abi.STACK_ID_DTYPE, number, _CGROUPS_MAX)
        self.swept_stacks = known("swept_stacks", pid, abi.SWEPT_STACK_DTYPE, _SWEPT_MAX)
        self._set_options(options)
        self.sums = tuple(
            Map(map_fds[name], abi.SUM_KEY_DTYPE, abi.SUM_VALUE_DTYPE, options.sums_max)
            for name in ("sums0", "sums1")
        )
        self.short_lived = tuple(
            known(name, abi.SHORT_LIVED_KEY_DTYPE, abi.SHORT_LIVED_TOTAL_DTYPE, _SHORT_LIVED_MAX)
            for name in ("short_lived0", "short_lived1")
        )
        self.calls = tuple(
            Map(map_fds[name], abi.CALL_KEY_DTYPE, abi.CALL_VALUE_DTYPE, options.calls_max)
            for name in ("calls0", "calls1")
        )
        self.queues = Map(
            map_fds["queues"], abi.QUEUE_KEY_DTYPE, abi.QUEUE_STATE_DTYPE, _QUEUES_MAX
        )
        self.timed_processes = known("timed_processes", pid, number, _TIMED_PROCESSES_MAX)
        self.excluded_cgroups = known(
            "excluded_cgroups", abi.CGROUP_ID_DTYPE, number, max(options.excluded_max, 1)
        )

    def _set_options(self, options: ProgramOptions) -> None:
        """Writes what may change while the programs run."""
        self.set(abi.Setting.PERIOD_NS, options.period_ns)
        self.set(abi.Setting.FOLLOW_CHILDREN, int(options.follow_children))
        self.set(abi.Setting.WAIT_EVENT_NS, options.wait_event_ns)
        self.set(abi.Setting.CALL_EVENTS, options.call_events_per_s)
        self.set(abi.Setting.ONE_IN, 1)

    def ready(self) -> None:
        """Waits until the programs are loaded that every recording has.

        Raises:
            EnvironmentUnfit: As for load_programs.
        """
        if self._is_ready:
            return
        self.fds.update(self._first.result())
        for kind in ("sample", "switch"):
            _chain(kind, self.fds, self._walkers[kind])
        self._is_ready = True

    def expect_calls(self) -> None:
        """Begins to load the programs for calls of device APIs, beside all else that is to be done.

        The kernel's verifier takes 0.15 s for them.
        """
        if self._has_cookies:
            self._expect(_PLAIN, self._load_calls)

    def _expect(self, kind: str, load: Callable[[], dict[str, int]]) -> None:
        """Begins to load programs, unless they were, or were refused not long ago."""
        for refused in self._refused.take_due():
            del self._loading[refused]
        if kind not in self._loading:
            self._loading[kind] = _beside(load)

    def _loaded(self, kind: str) -> dict[str, int]:
        """Waits for expected programs; raises CallsRefused."""
        error = self._loading[kind].exception()
        if isinstance(error, (Refused, OSError)):
            self._refused.note(kind)
            raise _calls_refused(error) from error
        return self._loading[kind].result()

    @property
    def calls_are_loading(self) -> bool:
        """Whether the programs for calls are on their way: `need_calls` would wait for them."""
        return _PLAIN in self._loading and not self._loading[_PLAIN].done()

    def _load_calls(self) -> dict[str, int]:
        with contextlib.ExitStack() as on_failure:
            programs, self.calls_link_many = load_for_links(
                lambda attach_type: self._loader.load(CALL_PROGRAMS, attach_type),
                self.uprobes.answers.links_many,
            )
            on_failure.callback(close_all, tuple(programs.values()))
            _chain("call", programs, self._walkers["call"])
            on_failure.pop_all()
        return programs

    def need_calls(self) -> None:
        """Loads the programs for calls of device APIs, if they are not.

        Raises:
            CallsRefused: The kernel refuses them: now, or not long ago.
            EnvironmentUnfit: It has nothing that they could be attached to.
        """
        if not self._has_cookies:
            raise EnvironmentUnfit("this kernel has no probes with cookies, which came with v5.15")
        self.expect_calls()
        self.fds.update(self._loaded(_PLAIN))

    def calls_for_events(self) -> dict[str, int]:
        """Returns programs for calls that are no part of a link of many probes, by name.

        Where the others are, these are loaded beside them, once: the kernel gives a program of one
        kind no cookie of the other kind, and refuses tail calls between the two (v6.18).

        Raises:
            CallsRefused: The kernel refuses them.
        """
        self.need_calls()
        if not self.calls_link_many:
            return self.fds
        self._expect(_FOR_EVENTS, self._load_for_events)
        loaded = self._loaded(_FOR_EVENTS)
        self.fds.update({f"{name} for events": fd for name, fd in loaded.items()})
        return loaded

    def _load_for_events(self) -> dict[str, int]:
        map_fds = self._loader.map_fds
        with contextlib.ExitStack() as on_failure:
            walkers_fd = create_map(MapShape(*map_facts(map_fds["call_walkers"])[1:]))
            on_failure.callback(os.close, walkers_fd)
            loaded = self._loader.load(CALL_PROGRAMS, 0, {"call_walkers": walkers_fd})
            on_failure.callback(close_all, tuple(loaded.values()))
            _chain("call", loaded, Map(walkers_fd, abi.PID_DTYPE, abi.PID_DTYPE, 2))
            on_failure.pop_all()
        map_fds["call_walkers for events"] = walkers_fd
        return loaded

    @property
    def thread_iterator_fd(self) -> int | None:
        """The program that `thread_registers` reads by, None where the kernel has no such kind."""
        return self.fds.get(THREAD_ITERATOR)

    @property
    def sweep_iterator_fd(self) -> int | None:
        """Likewise, the program that tells of long waits without a stack."""
        return self.fds.get(SWEEP_ITERATOR)

    def set(self, setting: abi.Setting, value: int) -> None:
        """Writes one run-time setting."""
        self.settings.update(setting.to_bytes(4, "little"), value.to_bytes(8, "little"))

    def costs(self) -> dict[str, ProgramCost]:
        """Returns the kernel's account of each program."""
        return {name: program_cost(fd) for name, fd in self.fds.items()}

    def close(self) -> None:
        """Closes every descriptor."""
        with contextlib.suppress(EnvironmentUnfit):
            self.fds.update(self._first.result())
        if _PLAIN in self._loading:
            with contextlib.suppress(Refused, OSError):
                self.fds.update(self._loading[_PLAIN].result())
        self.uprobes.close()
        close_all((*self.fds.values(), *self._loader.map_fds.values()))
        self.fds, self._loader.map_fds = {}, {}


def _chain(kind: str, programs: Mapping[str, int], walkers: Map) -> None:
    """Lets the programs that walk call themselves and each other."""
    for slot, name in enumerate((f"walk_{kind}", f"walk_{kind}_python")):
        walkers.update(slot.to_bytes(4, "little"), programs[name].to_bytes(4, "little"))


def _beside(load: Callable[[], dict[str, int]]) -> Future[dict[str, int]]:
    """Has programs loaded beside all else; that no thread may be started is an answer as well."""
    try:
        pool = priority.urgent_pool(1)
    except OSError as error:
        failed = Future[dict[str, int]]()
        failed.set_exception(error)
        return failed
    loading = pool.submit(load)
    pool.shutdown(wait=False)
    return loading


def load_programs(
    options: ProgramOptions, cache: Path | None = None, uprobes: UprobeTries | None = None
) -> Programs:
    """Gets the programs into the kernel; nothing is attached yet.

    Args:
        options: What is put into them.
        cache: Directory that keeps what was compiled or read of the kernel; without one neither is.
        uprobes: What the kernel does with probes; without that it is tried.

    Raises:
        EnvironmentUnfit: The kernel refuses them, or the package has no bytecode and BCC is missing
            or foreign or fails; the compiler's or the verifier's own words are part of the message.
    """
    programs = begin_programs(options, cache, uprobes)
    try:
        programs.ready()
    except EnvironmentUnfit:
        programs.close()
        raise
    return programs


def begin_programs(
    options: ProgramOptions, cache: Path | None = None, uprobes: UprobeTries | None = None
) -> Programs:
    """Makes the maps, and begins to load the programs: as `load_programs`, which waits for them."""
    left_out = {*CALL_PROGRAMS}
    if not (options.user_stacks and options.off_cpu):
        left_out.add(THREAD_ITERATOR)
    if not (options.by_chance and options.off_cpu):
        left_out.add(SWEEP_ITERATOR)
    first = [name for name in PROGRAMS if name not in left_out]
    store = Store(cache)
    loader = _loader(PROGRAMS, options, store)
    pool = priority.urgent_pool(1)
    loading = pool.submit(_load, loader, first, store)
    pool.shutdown(wait=False)
    return Programs(loader, loading, options, uprobes or UprobeTries(cache))


def load_thread_iterator(cache: Path | None) -> int:
    """Loads the program that `threads.thread_registers` reads by; returns its descriptor.

    It alone needs no maps, and is loaded in a millisecond. Nothing is attached, so nothing of the
    target ever runs it.

    Args:
        cache: As for load_programs.

    Raises:
        EnvironmentUnfit: As for load_programs, or the kernel has no such programs (v5.8).
    """
    options = ProgramOptions(abi.Filter.ALL, period_ns=0, calls=False)
    store = Store(cache)
    loader = _loader([THREAD_ITERATOR], options, store)
    fds = _load(loader, [THREAD_ITERATOR], store)
    if THREAD_ITERATOR not in fds:
        raise EnvironmentUnfit(
            "this kernel does not tell the registers of threads (task iterators, v5.8)",
            "aiflame record -p PID shows what it does while it is recorded",
        )
    return fds[THREAD_ITERATOR]


def _loader(wanted: Collection[str], options: ProgramOptions, store: Store) -> Loader:
    """Makes the maps of the wanted programs.

    Raises:
        EnvironmentUnfit: As for load_programs.
    """
    lift_memlock_limit()
    try:
        return Loader(_bytecode(store), _host(options, store), wanted)
    except Refused as error:
        raise _explain_refusal(error) from error


def _load(loader: Loader, names: Collection[str], store: Store) -> dict[str, int]:
    """Loads programs, of this host's compiler where the kernel refuses those of the package.

    Raises:
        EnvironmentUnfit: As for load_programs.
    """
    try:
        return loader.load(names)
    except Refused as error:
        # Another compiler's code may please this kernel.
        here = compile.compiler_words()
        is_hopeless = error.errno == errno.EPERM or here in (None, loader.bytecode.compiler)
        is_hopeless = is_hopeless or _is_locked_down(error)
        if is_hopeless or not loader.replace(_compiled_here(store)):
            raise _explain_refusal(error) from error
    try:
        return loader.load(names)
    except Refused as error:
        raise _explain_refusal(error) from error


def _host(options: ProgramOptions, store: Store) -> Host:
    facts = kernel_facts(store)
    constants = {
        **facts.constants,
        HostConstant.FILTER: options.filter,
        HostConstant.WITH_OFF_CPU: options.off_cpu,
        HostConstant.WITH_USER_STACKS: options.user_stacks,
        HostConstant.WITH_KERNEL_STACKS: options.kernel_stacks,
        HostConstant.WITH_CALLS: options.calls,
        # Kernels without the helper have no id to look for: the host half leaves out what it can.
        HostConstant.WITH_EXCLUDED: options.excluded_max > 0
        and bool(facts.constants[HostConstant.HAS_CGROUP_ID]),
        HostConstant.BY_CHANCE: options.by_chance,
    }
    numbers = {int(constant): int(value) for constant, value in constants.items()}
    return Host(numbers, map_entries(options), facts.iterated_function)


def map_entries(options: ProgramOptions) -> dict[str, int]:
    """Returns the entries of the maps that are SIZED_BY_HOST in bpf/."""
    of_calls = {
        "api_probes": abi.API_PROBES_MAX,
        "calls0": options.calls_max,
        "calls1": options.calls_max,
        "callers": _CALLERS_MAX,
        "kernel_names": _KERNEL_NAMES_MAX,
        "queues": _QUEUES_MAX,
        "timed_processes": _TIMED_PROCESSES_MAX,
    }
    of_chances = {
        "chances": _CGROUPS_MAX,
        "short_lived0": _SHORT_LIVED_MAX,
        "short_lived1": _SHORT_LIVED_MAX,
        "swept_stacks": _SWEPT_MAX,
    }
    return {
        "stacks": options.stacks_max,
        "sums0": options.sums_max,
        "sums1": options.sums_max,
        "threads": options.threads_max,
        "processes": options.processes_max,
        "process_mappings": options.processes_max,
        "pythons": options.processes_max,
        "python_chains": options.python_chains_max,
        "excluded_cgroups": max(options.excluded_max, 1),
        "ring": _ring_bytes(options),
        "stack_copies": _copies_bytes(options),
        **{name: entries if options.calls else 1 for name, entries in of_calls.items()},
        **{name: entries if options.by_chance else 1 for name, entries in of_chances.items()},
    }


def _copies_bytes(options: ProgramOptions) -> int:
    pages = options.copies_pages if options.user_stacks else 1
    return pages * os.sysconf("SC_PAGE_SIZE")


def _ring_bytes(options: ProgramOptions) -> int:
    return options.ring_pages * os.sysconf("SC_PAGE_SIZE")


def _bytecode(store: Store) -> Bytecode:
    """Returns the package's own bytecode, else what was compiled here."""
    return compile.shipped() or _compiled_here(store)


def _compiled_here(store: Store) -> Bytecode:
    """Returns bytecode of this host's compiler, which is kept for the next recording."""
    version = compile.compiler_words() or "no compiler"
    name = f"programs-{compile.source_digest()[:32]}-{version.replace(' ', '-')}.bpf"
    kept = store.open(name)
    if kept is not None:
        with kept, contextlib.suppress(BadBytecode):
            return Bytecode.from_bytes(kept[:])
    data = compile_in_child()
    store.write(name, [data])
    return Bytecode.from_bytes(data)


def compile_in_child() -> bytes:
    """Has a child compile the programs; returns the bytecode as a file holds it.

    Raises:
        EnvironmentUnfit: It did not come about.
    """
    command = [sys.executable, "-m", "aiflame.agent.kernel.compile"]
    try:
        done = subprocess.run(  # noqa: S603 - a module of our own
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_COMPILE_TIMEOUT_S,
            check=False,
            cwd="/",  # python -m would import from the working directory first
        )
    except subprocess.TimeoutExpired as error:
        raise EnvironmentUnfit(
            f"the kernel programs were not compiled within {_COMPILE_TIMEOUT_S} s"
        ) from error
    if done.returncode != 0:
        raise explain_failure(done.stderr.decode(errors="replace"))
    return done.stdout


def explain_failure(complaint: str) -> EnvironmentUnfit:
    """Returns what to say of a compiling child that failed, from what it wrote."""
    if "bcc-missing" in complaint:
        return EnvironmentUnfit("the BPF compiler is not installed (python3-bpfcc)", BCC_HINT)
    if "bcc-foreign" in complaint:
        return EnvironmentUnfit(complaint.partition("bcc-foreign: ")[2].strip(), BCC_HINT)
    if "Operation not permitted" in complaint:
        return _not_permitted()
    # What BCC and the kernel say stands before Python's own trace of where that was noticed.
    words = complaint.partition("Traceback (most recent call last)")[0].strip() or complaint
    return EnvironmentUnfit(f"the kernel programs were not compiled:\n{words.strip()}")


def _explain_refusal(error: Refused) -> EnvironmentUnfit:
    if error.errno == errno.EPERM:
        return _not_permitted()
    if _is_locked_down(error):
        return locked_down()
    return EnvironmentUnfit(f"the kernel refuses a program: {error}")


def _is_locked_down(error: Refused) -> bool:
    return _READS_REFUSED.search(error.log) is not None


def locked_down() -> EnvironmentUnfit:
    """Returns what to say where programs may not read kernel memory."""
    return EnvironmentUnfit(
        "kernel lockdown is in confidentiality mode: nothing may read kernel memory",
        "boot with lockdown=integrity, or without lockdown=",
    )


def _calls_refused(error: Refused | OSError) -> CallsRefused:
    if isinstance(error, Refused):
        said = _explain_refusal(error)
        return CallsRefused(str(said), said.hint)
    return CallsRefused(f"the programs for calls cannot be loaded: {error.strerror}")


def _not_permitted() -> EnvironmentUnfit:
    return EnvironmentUnfit(
        "the kernel does not let this process load BPF programs",
        "run as root, or with CAP_BPF, CAP_PERFMON and CAP_SYS_PTRACE",
    )
