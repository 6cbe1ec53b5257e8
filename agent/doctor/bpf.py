# SPDX-License-Identifier: Apache-2.0
"""Checks of the group `bpf`: a recording of this very process, in small.

The programs are those of `record`, compiled, loaded and attached by the same functions; only the
maps are smaller. Each check that receives something ends with it, or after a second.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
from aiflame.agent.doctor.base import Context, Finding, ok, skip, warn
from aiflame.agent.errors import EnvironmentUnfit
from aiflame.agent.kernel import abi, checks, compile
from aiflame.agent.kernel.btf import Btf
from aiflame.agent.kernel.facts import facts_of_btf, is_helper_taken
from aiflame.agent.kernel.loader import ProgramOptions, Programs, load_programs
from aiflame.agent.kernel.probes import Probes
from aiflame.agent.kernel.ringbuf import RingBuffer
from aiflame.agent.model.profile import SampleClass

# A sample each millisecond: the answer comes at once, even when other programs want the CPU.
_PERIOD_NS = 1_000_000
PATIENCE_NS = 1_000_000_000
# Room for one process and its few threads.
_OPTIONS = ProgramOptions(
    filter=abi.Filter.PIDS,
    period_ns=_PERIOD_NS,
    follow_children=False,
    stacks_max=512,
    sums_max=512,
    threads_max=64,
    processes_max=16,
    ring_pages=16,
    copies_pages=32,
)


# What is missing from a recording without a helper, after "this kernel has no".
_HELPERS = {
    abi.HostConstant.HAS_ATTACH_COOKIE: "probes with cookies (v5.15): calls of device APIs are not"
    " recorded",
    abi.HostConstant.HAS_CGROUP_ID: "cgroup ids: processes are not told apart by cgroup",
}


def bcc(_: Context) -> Finding:
    """Are the programs compiled, or is the distribution's BPF compiler there?"""
    if compile.shipped() is not None:
        return ok("not needed: the package has its programs compiled")
    return ok(f"bcc {checks.require_compiler()}")


def btf(_: Context) -> Finding:
    """Does the kernel describe the structures that the programs read?"""
    checks.require_btf()
    facts_of_btf(Btf.of_kernel())
    return ok("the kernel describes all structures that are read")


def features(_: Context) -> Finding:
    """Which of what a recording can do without does this kernel lack?"""
    missing = [f"no {what}" for helper, what in _HELPERS.items() if not is_helper_taken(helper)]
    if missing:
        return warn(f"this kernel has {'; '.join(missing)}", None)
    return ok("all optional kernel features are there")


def load(context: Context) -> Finding:
    """Do compiler and verifier accept the programs?"""
    context.programs = load_programs(_OPTIONS)
    context.cleanup.callback(context.programs.close)
    if context.programs.thread_iterator_fd is None:
        return warn(
            "this kernel has no BPF iterator over tasks (v5.8): threads asleep since before a"
            " recording will show kernel frames only",
            None,
        )
    return ok(f"{len(context.programs.fds)} programs load")


def attach(context: Context) -> Finding:
    """Can they be attached to the scheduler and to the clock?"""
    if context.programs is None:
        return skip("nothing is loaded")
    probes = Probes(context.programs, off_cpu=True)
    context.cleanup.callback(probes.close)
    probes.start_clocks(_PERIOD_NS)
    context.probes = probes
    return ok("attached to the scheduler's tracepoints and to every CPU's clock")


def sample(context: Context) -> Finding:
    """Do samples of a loop in this process arrive, with their stacks?"""
    if context.programs is None or context.probes is None:
        return skip("nothing is attached")
    programs = context.programs
    with recording_itself(programs):
        if not _until(lambda: _received(programs, SampleClass.ON_CPU), spin):
            raise EnvironmentUnfit("no sample of a busy loop arrived within 1 s")
        if not any(len(keys) for keys, _ in programs.stacks.chunks(take=True)):
            raise EnvironmentUnfit("samples arrive, but without stacks")
    return ok("samples of a busy loop arrive, with stacks")


def off_cpu(context: Context) -> Finding:
    """Does the time arrive in which this process sleeps?"""
    if context.programs is None or context.probes is None:
        return skip("nothing is attached")
    programs = context.programs
    with recording_itself(programs):
        if not _until(lambda: _received(programs, SampleClass.BLOCKED), _doze):
            raise EnvironmentUnfit("no context switch of a sleeping process arrived within 1 s")
    return ok("the time of a short sleep arrives")


def ring_buffer(context: Context) -> Finding:
    """Do events come through the ring buffer?"""
    if context.programs is None or context.probes is None:
        return skip("nothing is attached")
    programs = context.programs
    with recording_itself(programs):
        ring = RingBuffer(programs.ring_fd, programs.ring_bytes)
        try:
            if not _until(lambda: _announced(ring), _doze):
                raise EnvironmentUnfit("no event came through the ring buffer within 1 s")
        finally:
            ring.close()
    return ok("events come through the ring buffer")


@contextmanager
def recording_itself(programs: Programs) -> Iterator[int]:
    """Makes this process the target; yields its image."""
    state = np.zeros(1, abi.PROCESS_STATE_DTYPE)
    image = time.monotonic_ns()
    state["image"], state["flags"] = image, int(abi.ProcessFlag.TARGET)
    programs.processes.update(os.getpid().to_bytes(4, "little"), state.tobytes())
    programs.set(abi.Setting.END_NS, abi.NEVER_NS)
    try:
        yield image
    finally:
        programs.set(abi.Setting.END_NS, 0)


def _until(received: Callable[[], bool], do: Callable[[], None]) -> bool:
    deadline_ns = time.monotonic_ns() + PATIENCE_NS
    while time.monotonic_ns() < deadline_ns:
        do()
        if received():
            return True
    return False


def spin() -> None:
    """Uses the CPU for a few ticks of the clock."""
    end_ns = time.thread_time_ns() + 5 * _PERIOD_NS
    while time.thread_time_ns() < end_ns:
        pass


def _doze() -> None:
    time.sleep(_PERIOD_NS / 1e9)


def _received(programs: Programs, sample_class: SampleClass) -> bool:
    keys, values = programs.sums[0].take_all()
    mine = (keys["tgid"] == os.getpid()) & (keys["sample_class"] == int(sample_class))
    return bool(values["ns"][mine].sum())


def _announced(ring: RingBuffer) -> bool:
    ring.wait(0)
    pid, seen = os.getpid(), int(abi.EventType.PROCESS_SEEN)
    # A list, so that what follows the event is read as well.
    found = [
        event
        for payload in ring.records()
        if int.from_bytes(payload[:4], "little") == seen
        for event in np.frombuffer(payload, abi.PROCESS_EVENT_DTYPE, 1)
        if event["tgid"] == pid
    ]
    return bool(found)
