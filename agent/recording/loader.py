# SPDX-License-Identifier: Apache-2.0
"""Gets the kernel programs into the kernel: asks the compiling child and takes its descriptors."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiflame.bpf
import numpy as np
from aiflame.agent.errors import EnvironmentUnfit
from aiflame.agent.recording import abi, sysbpf
from aiflame.agent.recording.compile import paste_includes
from aiflame.agent.recording.program_cache import (
    LatePrograms,
    Loaded,
    StaleBundle,
    bundle_name,
    load,
)
from aiflame.agent.recording.sysbpf import Map, ProgramCost, program_cost
from aiflame.agent.recording.syscalls import lift_memlock_limit
from aiflame.agent.symbols.store import Store

# Longer than the slowest compile seen (1 s) by an order of magnitude; a loaded host may crawl.
_COMPILE_TIMEOUT_S = 120
# The socket carries one short JSON line beside the descriptors.
_REPLY_BYTES = 65536
_MAX_FDS = 253

PROGRAMS = {
    "on_cpu_sample": "perf_event",
    "walk_sample": "perf_event",
    "walk_sample_python": "perf_event",
    "on_switch": "raw_tracepoint",
    "walk_switch": "raw_tracepoint",
    "walk_switch_python": "raw_tracepoint",
    "on_waking": "raw_tracepoint",
    "on_call": "uprobe",
    "walk_call": "uprobe",
    "walk_call_python": "uprobe",
    "on_naming": "uprobe",
    "on_named": "uprobe",
    "on_fork": "raw_tracepoint",
    "on_exec": "raw_tracepoint",
    "on_exit": "raw_tracepoint",
}
# Those that are loaded once a function of a device API is found: most targets have none.
CALL_PROGRAMS = ("on_call", "walk_call", "walk_call_python", "on_naming", "on_named")
# Those that a recording can do without, by the kernel function that stands for their kind.
_ITERATORS = {"bpf_iter__task": "bpf_iter_task"}
# The maps of maps, and what their inner maps are made like.
_TEMPLATES = {"unwind_tables": "unwind_table", "process_mappings": "mapping_table"}
_MAPS = (
    *(
        "settings",
        "counters",
        "processes",
        "threads",
        "running",
        "stacks",
        "sums0",
        "sums1",
        "ring",
    ),
    *("process_mappings", "unwind_tables", "unwind_rules", "sample_walkers", "switch_walkers"),
    *("pythons", "python_chains", "api_calls", "api_probes", "calls0", "calls1", "call_walkers"),
)
# Threads that call device APIs: each has some 6 KB in the kernel, taken at the start.
_CALLERS_MAX = 1024
BCC_HINT = "apt-get install python3-bpfcc  (Fedora: dnf install python3-bcc)"


@dataclass(frozen=True, slots=True)
class ProgramOptions:
    """What the programs are told, or made of; sizes are entries, times ns."""

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
    python_chains_max: int = 8192
    calls: bool = True
    calls_max: int = 16384
    call_events_per_s: int = 0  # a CPU
    wait_event_ns: int = 100_000_000
    unwind_bytes_max: int = 256 << 20  # not compiled in: the host half keeps to it


Dtype = np.dtype[Any]


class Programs:
    """Loaded programs and maps, by name. Closing them takes everything out of the kernel.

    Attributes:
        calls_link_many: Whether one link takes many probes of the programs for calls.
    """

    calls_link_many = False

    def __init__(self, loaded: Loaded, options: ProgramOptions) -> None:
        self.fds, map_fds, self._late = loaded
        self._loading: Future[dict[str, int]] | None = None
        self.ring_fd = map_fds["ring"]
        self.ring_bytes = options.ring_pages * os.sysconf("SC_PAGE_SIZE")
        self.cgroups_fd = map_fds.get("cgroups")
        number, pid, processes = abi.PID_DTYPE, abi.PID_DTYPE, options.processes_max

        def known(name: str, key: Dtype, value: Dtype, entries: int) -> Map:
            return Map(map_fds[name], key, value, entries)

        self.settings = known("settings", number, abi.SETTINGS_DTYPE, len(abi.Setting))
        self.counters = known("counters", number, abi.COUNTERS_DTYPE, len(abi.Counter))
        self.running = known("running", number, abi.RUNNING_DTYPE, 1)
        self.processes = known("processes", pid, abi.PROCESS_STATE_DTYPE, processes)
        self.threads = known("threads", pid, abi.THREAD_STATE_DTYPE, options.threads_max)
        self.stacks = known("stacks", abi.STACK_ID_DTYPE, abi.STACK_DTYPE, options.stacks_max)
        self.process_mappings = known("process_mappings", pid, number, processes)
        self.unwind_tables = known("unwind_tables", number, number, abi.TABLES_MAX)
        self.unwind_rules = known("unwind_rules", number, abi.UNWIND_RULE_DTYPE, abi.RULES_MAX)
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
        self._set_options(options)
        self.sums = tuple(
            Map(map_fds[name], abi.SUM_KEY_DTYPE, abi.SUM_VALUE_DTYPE, options.sums_max)
            for name in ("sums0", "sums1")
        )
        self.calls = tuple(
            Map(map_fds[name], abi.CALL_KEY_DTYPE, abi.CALL_VALUE_DTYPE, options.calls_max)
            for name in ("calls0", "calls1")
        )
        self._map_fds = map_fds

    def _set_options(self, options: ProgramOptions) -> None:
        """Writes what is no part of the compiled programs: other values need no other programs."""
        for kind in ("sample", "switch"):
            self._chain(kind)
        self.set(abi.Setting.PERIOD_NS, options.period_ns)
        self.set(abi.Setting.FOLLOW_CHILDREN, int(options.follow_children))
        self.set(abi.Setting.WAIT_EVENT_NS, options.wait_event_ns)
        self.set(abi.Setting.CALL_EVENTS, options.call_events_per_s)

    def _chain(self, kind: str) -> None:
        """Lets the programs that walk call themselves and each other."""
        for slot, name in enumerate((f"walk_{kind}", f"walk_{kind}_python")):
            program = self.fds[name].to_bytes(4, "little")
            self._walkers[kind].update(slot.to_bytes(4, "little"), program)

    def expect_calls(self) -> None:
        """Begins to load the programs for calls of device APIs, beside all else that is to be done.

        The kernel's verifier takes 0.3 s for them.
        """
        if self._late is not None and self._loading is None:
            pool = ThreadPoolExecutor(1)
            self._loading = pool.submit(self._load_late, self._late)
            pool.shutdown(wait=False)

    def _load_late(self, late: LatePrograms) -> dict[str, int]:
        # They are the main thread's, and would make the verifier give up.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        self.calls_link_many = sysbpf.has_many_uprobes()
        return late.load(sysbpf.TRACE_UPROBE_MULTI if self.calls_link_many else 0)

    def need_calls(self) -> None:
        """Loads the programs for calls of device APIs, if they are not.

        Raises:
            EnvironmentUnfit: The kernel refuses them.
        """
        self.expect_calls()
        if self._loading is not None:
            try:
                self.fds.update(self._loading.result())
            except StaleBundle as error:
                raise EnvironmentUnfit(f"the kernel refuses a program: {error}") from error
        self._chain("call")

    @property
    def thread_iterator_fd(self) -> int | None:
        """The program that `thread_registers` reads by, None where the kernel has no such kind."""
        return self.fds.get("bpf_iter__task")

    def set(self, setting: abi.Setting, value: int) -> None:
        """Writes one run-time setting."""
        self.settings.update(setting.to_bytes(4, "little"), value.to_bytes(8, "little"))

    def costs(self) -> dict[str, ProgramCost]:
        """Returns the kernel's account of each program."""
        return {name: program_cost(fd) for name, fd in self.fds.items()}

    def close(self) -> None:
        """Closes every descriptor."""
        if self._loading is not None:
            with contextlib.suppress(StaleBundle):
                self.fds.update(self._loading.result())
        for fd in (*self.fds.values(), *self._map_fds.values()):
            os.close(fd)
        self.fds, self._map_fds = {}, {}


def load_programs(options: ProgramOptions, cache: Path | None = None) -> Programs:
    """Gets the programs into the kernel; nothing is attached yet.

    Args:
        options: What is compiled into them.
        cache: Directory that keeps what was compiled; without one they are compiled anew.

    Raises:
        EnvironmentUnfit: BCC is missing or foreign, the compile failed, or the kernel refused; the
            compiler's or the verifier's own words are part of the message.
    """
    request: dict[str, Any] = {
        "unit": "record.bpf.c",
        "programs": PROGRAMS,
        "iterators": _ITERATORS if options.user_stacks and options.off_cpu else {},
        "maps": [*_MAPS, *(["cgroups"] if options.filter is abi.Filter.CGROUP else [])],
        "templates": _TEMPLATES,
    }
    return Programs(load_unit(request, _macros(options), cache, CALL_PROGRAMS), options)


def load_unit(
    request: dict[str, Any],
    macros: dict[str, int | str],
    cache: Path | None,
    late: Collection[str] = (),
) -> Loaded:
    """Loads a unit of bpf/ from what was kept of it, else compiles it.

    Args:
        request: What compile.py is asked for: unit, programs, iterators, maps, templates.
        macros: Of the unit.
        cache: As above.
        late: Programs that need not be loaded yet.

    Raises:
        EnvironmentUnfit: As above.
    """
    folder = Path(next(iter(aiflame.bpf.__path__))).resolve()
    # bpf_task_pt_regs is missing before v5.15: the registers are found without it.
    variants = [{**macros, "HAVE_TASK_PT_REGS": have} for have in (1, 0)]
    store = Store(cache)
    bundles: list[str | None] = [None, None]
    if store.usable:
        source = paste_includes(folder, request["unit"])
        bundles = [bundle_name(source, variant) for variant in variants]
        lift_memlock_limit()
        for bundle in bundles:
            kept = _load_kept(store, str(bundle), late)
            if kept is not None:
                return kept
    place = {"bpf_folder": str(folder), "cache": str(cache)}
    asked = [
        {**request, **place, "macros": variant, "bundle": bundle}
        for variant, bundle in zip(variants, bundles, strict=True)
    ]
    try:
        return Loaded(*ask_child(asked[0]), None)
    except LoadFailed:
        return Loaded(*ask_child(asked[1]), None)


def _macros(options: ProgramOptions) -> dict[str, int | str]:
    return {
        "FILTER": int(options.filter),
        "WITH_OFF_CPU": int(options.off_cpu),
        "WITH_USER_STACKS": int(options.user_stacks),
        "WITH_KERNEL_STACKS": int(options.kernel_stacks),
        "STACKS_MAX": options.stacks_max,
        "SUMS_MAX": options.sums_max,
        "THREADS_MAX": options.threads_max,
        "PROCESSES_MAX": options.processes_max,
        "RING_PAGES": options.ring_pages,
        "PYTHON_CHAINS_MAX": options.python_chains_max,
        "WITH_CALLS": int(options.calls),
        "CALLS_MAX": options.calls_max if options.calls else 1,
        "CALLERS_MAX": _CALLERS_MAX if options.calls else 1,
    }


def _load_kept(store: Store, name: str, late: Collection[str]) -> Loaded | None:
    """Loads a kept bundle; None where there is none that this kernel takes."""
    mapping = store.open(name)
    if mapping is None:
        return None
    with mapping:
        try:
            return load(mapping[:], late)
        except StaleBundle:
            store.remove(name)
            return None


class LoadFailed(EnvironmentUnfit):
    """The compile or the verifier said no."""


def ask_child(request: dict[str, Any]) -> tuple[dict[str, int], dict[str, int]]:
    """Has a child compile and load; returns descriptors of programs and maps by name.

    Raises:
        EnvironmentUnfit: It did not come about.
    """
    ours, theirs = socket.socketpair()
    with ours, theirs:
        child = subprocess.Popen(  # noqa: S603 - a module of our own
            [sys.executable, "-m", "aiflame.agent.recording.compile", str(theirs.fileno())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            pass_fds=[theirs.fileno()],
            cwd="/",  # python -m would import from the working directory first
        )
        theirs.close()
        try:
            _, complaint = child.communicate(json.dumps(request).encode(), _COMPILE_TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            child.kill()
            child.communicate()
            raise EnvironmentUnfit(
                f"the kernel programs were not compiled within {_COMPILE_TIMEOUT_S} s"
            ) from error
        if child.returncode != 0:
            raise explain_failure(complaint.decode(errors="replace"))
        reply, fds, _, _ = socket.recv_fds(ours, _REPLY_BYTES, _MAX_FDS)
    names = json.loads(reply)
    count = len(names["programs"])
    return (
        dict(zip(names["programs"], fds[:count], strict=True)),
        dict(zip(names["maps"], fds[count:], strict=True)),
    )


def explain_failure(complaint: str) -> EnvironmentUnfit:
    if complaint.startswith("unfit: "):
        message, _, hint = complaint.removeprefix("unfit: ").strip().partition("\n")
        return EnvironmentUnfit(message, hint or None)
    if "bcc-missing" in complaint:
        return EnvironmentUnfit("the BPF compiler is not installed (python3-bpfcc)", BCC_HINT)
    if "bcc-foreign" in complaint:
        return EnvironmentUnfit(complaint.partition("bcc-foreign: ")[2].strip(), BCC_HINT)
    if "Operation not permitted" in complaint:
        return EnvironmentUnfit(
            "the kernel does not let this process load BPF programs",
            "run as root, or with CAP_BPF, CAP_PERFMON and CAP_SYS_PTRACE",
        )
    # What BCC and the kernel say stands before Python's own trace of where that was noticed.
    words = complaint.partition("Traceback (most recent call last)")[0].strip() or complaint
    return LoadFailed(f"the kernel programs were not accepted:\n{words.strip()}")
