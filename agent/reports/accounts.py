# SPDX-License-Identifier: Apache-2.0
"""What the kernel accounts itself, beside what was counted at context switches.

The two are measured at other moments: the scheduler's account of a running thread is as old as the
last tick, it has a wait for a CPU when that is over, it goes on while a thread ends, and it was
read some time before and after the recording. Of a thread that ended within the recording it lacks
what that ran since the last tick. What all this may come to is no disagreement.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from aiflame.agent.model.accounts import DELAY_CAUSES, Delay
from aiflame.agent.model.profile import Profile, SampleClass
from aiflame.agent.reports.table import Table, ms
from aiflame.agent.reports.words import duration, percent, process_label, showable

I64 = npt.NDArray[np.int64]

# A capture may say anything.
_MOST_NS = (1 << 63) - 1

# More than this is said in a line.
_MOST_SHARE = 0.02

# The longest tick that kernels have (CONFIG_HZ=100): what is not yet accounted of who runs.
_TICK_NS = 10_000_000

# Between the scheduler's clock and the tracepoint at which it is counted here, at each context
# switch: the kernel chooses who is next. Measured as 2 to 3 us, with others' programs there more.
_SWITCH_NS = 5_000

# From the wake-up, where it is counted here, to the run queue, where the kernel counts: another CPU
# may have to be woken up for it, and of a virtual machine that may take as long.
_WAKING_NS = 100_000


# What the account of a thread that ended may lack besides a tick: it is closed before its memory is
# given back, which is counted here before v6.16, and takes as long for 1.5 GB.
_LEAVING_NS = 100_000_000


@dataclass(frozen=True, slots=True)
class Sums:
    """One time of all threads that have an account, in ns.

    Attributes:
        counted_ns: At context switches.
        accounted_ns: By the kernel.
        slack_ns: What they may differ by.
        lacking_ns: What the kernel may have less besides.
    """

    counted_ns: int
    accounted_ns: int
    slack_ns: int
    lacking_ns: int = 0

    @property
    def is_disagreement(self) -> bool:
        """Whether they differ by more than is said of nothing."""
        apart_ns = self.accounted_ns - self.counted_ns
        slack_ns = self.slack_ns + (self.lacking_ns if apart_ns < 0 else 0)
        return abs(apart_ns) - slack_ns > _MOST_SHARE * self.counted_ns


@dataclass(frozen=True, slots=True)
class Comparison:
    """Times of the threads that have an account, in ns; all of shape (accounts,).

    Attributes:
        thread: Index of each.
        on_cpu_ns: Counted.
        waited_ns: Counted, awake without a CPU: waiting to run, or preempted.
        on_cpu, waited: The sums of both sides.
    """

    thread: I64
    on_cpu_ns: I64
    waited_ns: I64
    on_cpu: Sums
    waited: Sums


def compared(profile: Profile) -> Comparison | None:
    """Return what is comparable; None where nothing was counted or nothing accounted."""
    accounts = profile.accounts.threads
    counted_ns = np.array([thread.on_cpu_ns for thread in profile.threads], np.int64)
    observed_ns = np.array([thread.observed_ns for thread in profile.threads], np.int64)
    accounts = accounts[observed_ns[accounts["thread"]] > 0]
    if not len(accounts):
        return None
    samples = profile.samples
    waits = samples[np.isin(samples["klass"], (SampleClass.WAITING_TO_RUN, SampleClass.PREEMPTED))]
    waited_ns, wake_ups = np.zeros((2, len(profile.threads)), np.int64)
    np.add.at(waited_ns, waits["thread"], waits["ns"].astype(np.int64))
    woken = waits[waits["klass"] == SampleClass.WAITING_TO_RUN]
    np.add.at(wake_ups, woken["thread"], woken["count"].astype(np.int64))
    thread = accounts["thread"].astype(np.int64)
    on_cpu_ns, in_queue_ns, wakes = (
        _with_programs_before(profile, thread, of_thread)
        for of_thread in (counted_ns, waited_ns, wake_ups)
    )
    accounted = {name: accounts[name].astype(np.int64) for name in accounts.dtype.names or ()}
    ending_ns = np.where(accounts["has_ended"], 0, _ending_ns(profile, thread))
    return Comparison(
        thread,
        on_cpu_ns,
        in_queue_ns,
        _on_cpu(profile, on_cpu_ns, accounted, ending_ns),
        _waited(in_queue_ns, wakes, accounted, ending_ns),
    )


def _ending_ns(profile: Profile, thread: I64) -> I64:
    """Return how long threads took at most to end: counted is until they began to."""
    exited_ns = (profile.processes[profile.threads[at].process].exited_ns for at in thread.tolist())
    end_ns = profile.recording.duration_ns
    found = (0 if ns is None else max(end_ns - ns, 0) for ns in exited_ns)
    return np.fromiter(found, np.int64, len(thread))


def _on_cpu(profile: Profile, counted_ns: I64, accounted: dict[str, I64], ending_ns: I64) -> Sums:
    has_ended = accounted["has_ended"] > 0
    # What begins and ends within the recording has no part outside of it.
    is_cut = ~has_ended | (accounted["misaligned_ns"] > 0)
    has_run = (counted_ns > 0) | (accounted["on_cpu_ns"] > 0)
    at_ends_ns = accounted["misaligned_ns"][has_run & is_cut] + 2 * _TICK_NS
    # No more threads run at once than there are CPUs.
    most_ns = int(at_ends_ns.max(initial=0)) * _cpus(profile)
    slack_ns = min(sum(at_ends_ns.tolist()), most_ns)
    slack_ns += profile.accounts.interrupted_ns + _SWITCH_NS * sum(accounted["timeslices"].tolist())
    slack_ns += sum(np.minimum(ending_ns, accounted["on_cpu_ns"]).tolist())
    lacking_ns = np.minimum(counted_ns[has_ended], _TICK_NS + _LEAVING_NS)
    accounted_ns = sum(accounted["on_cpu_ns"].tolist())
    return Sums(sum(counted_ns.tolist()), accounted_ns, slack_ns, sum(lacking_ns.tolist()))


def _waited(counted_ns: I64, wake_ups: I64, accounted: dict[str, I64], ending_ns: I64) -> Sums:
    in_queue_ns, slices = accounted["run_queue_ns"], accounted["timeslices"]
    # Who waited for a moment in all has waited no longer when it was read.
    most_ns = np.maximum(counted_ns, in_queue_ns)
    slack_ns = np.minimum(accounted["misaligned_ns"] + accounted["open_wait_ns"], most_ns)
    slack_ns += np.minimum(ending_ns, in_queue_ns)
    slack_ns += wake_ups * _WAKING_NS + slices * _SWITCH_NS
    slack = sum(slack_ns.tolist())
    return Sums(sum(counted_ns.tolist()), sum(in_queue_ns.tolist()), slack)


def _with_programs_before(profile: Profile, thread: I64, of_thread: I64) -> I64:
    """Return a time of threads, with what they had before exec: an account goes on past that."""
    main = [
        (profile.processes[one.process].started_ns, index)
        for index, one in enumerate(profile.threads)
        if one.tid == profile.processes[one.process].pid
    ]
    until_now: dict[int, int] = defaultdict(int)
    whole: dict[int, int] = {}
    for _, index in sorted(main):
        one = profile.threads[index]
        until_now[one.tid] += of_thread[index].item()
        whole[index] = min(until_now[one.tid], _MOST_NS)
        # Of a process that has exited, another one has the number from now on.
        if profile.processes[one.process].exited_ns is not None:
            del until_now[one.tid]
    found = of_thread[thread]
    for at, index in enumerate(thread.tolist()):
        found[at] = whole.get(index, found[at])
    return found


def _cpus(profile: Profile) -> int:
    """Return how many CPUs recorded, as far as the capture says it; else no bound."""
    words = dict(profile.recording.facts).get("CPUs", "")
    return int(words) if words.isascii() and words.isdigit() else len(profile.threads)


def disagreement(profile: Profile) -> str:
    """Return by how much the kernel's account is another than what was counted; "" if it agrees."""
    found = compared(profile)
    if found is None:
        return ""
    parts = []
    for sums, where in ((found.on_cpu, "on CPUs"), (found.waited, "waiting for one")):
        if sums.is_disagreement:
            apart_ns = sums.accounted_ns - sums.counted_ns
            share = f"{percent(abs(apart_ns), sums.counted_ns)} " if sums.counted_ns else ""
            than = f"{share}{'more' if apart_ns > 0 else 'less'}"
            parts.append(
                f"{duration(sums.accounted_ns)} {where}, {than} than the"
                f" {duration(sums.counted_ns)} counted at context switches"
            )
    if not parts:
        return ""
    return f"The kernel's own account differs: it has {' and '.join(parts)}"


def account_facts(profile: Profile) -> Iterator[tuple[str, str]]:
    """Yield the lines of a recording's facts."""
    found = compared(profile)
    if found is not None:
        threads = f"{len(found.thread):,} thread{'' if len(found.thread) == 1 else 's'}"
        ended = int(np.count_nonzero(profile.accounts.threads["has_ended"]))
        which = (
            f"of {threads}, {ended:,} of which ended before"
            if ended
            else (f"of the {threads} there at the end")
        )
        yield (
            "kernel's own account",
            f"{duration(found.on_cpu.accounted_ns)} on CPUs, counted here"
            f" {duration(found.on_cpu.counted_ns)}; {duration(found.waited.accounted_ns)} waiting"
            f" for one, counted here {duration(found.waited.counted_ns)}; {which}",
        )
    there_ns = _there_ns(profile)
    sums: dict[str, int] = defaultdict(int)
    for delay in profile.accounts.delays:
        sums[delay.cause] += delay.ns if _is_possible(profile, delay, there_ns) else 0
    if sums:
        words = (f"{DELAY_CAUSES[cause]} {duration(ns)}" for cause, ns in sums.items())
        wrong = sum(not _is_possible(profile, d, there_ns) for d in profile.accounts.delays)
        without = f"; without {wrong:,} that cannot be" if wrong else ""
        yield "kernel's delay accounting", ", ".join(words) + without


def _there_ns(profile: Profile) -> dict[int, int]:
    """Return how long the threads of processes were there, by pid; all programs of a process."""
    found: dict[int, int] = defaultdict(int)
    for thread in profile.threads:
        found[profile.processes[thread.process].pid] += thread.observed_ns
    return found


def _is_possible(profile: Profile, delay: Delay, there_ns: dict[int, int]) -> bool:
    """Whether threads were there for as long as they are said to have waited, where that is known.

    v6.18 was seen to take the time since boot for one wait: where another task completes a delayed
    dequeue (kernel/sched/fair.c), it is that task whose wait begins.
    """
    most_ns = there_ns[profile.processes[delay.process].pid]
    return not most_ns or delay.ns <= most_ns


def account_tables(profile: Profile, limit: int) -> Iterator[Table]:
    """Yield the tables of `aiflame stats`.

    Args:
        profile: What was recorded, no processes merged.
        limit: At most this many rows.
    """
    if len(profile.accounts.threads):
        yield _threads(profile, limit)
    if profile.accounts.delays:
        yield _delays(profile, limit)


def _threads(profile: Profile, limit: int) -> Table:
    found = compared(profile)
    accounts = profile.accounts.threads
    counted = {}
    if found is not None:
        counted = dict(
            zip(
                found.thread.tolist(),
                zip(found.on_cpu_ns.tolist(), found.waited_ns.tolist(), strict=True),
                strict=True,
            )
        )
    order = np.lexsort((accounts["thread"], -_busy_ns(accounts)))
    ended = ", and in taskstats, of those that ended before, up to their last tick"
    ended = ended if accounts["has_ended"].any() else ""
    rows = []
    for index, on_cpu_ns, in_queue_ns, slices, *_ in accounts[order[:limit]].tolist():
        thread = profile.threads[index]
        process = profile.processes[thread.process]
        here = [ms(ns) for ns in counted[index]] if index in counted else ["", ""]
        times = (here[0], ms(on_cpu_ns), here[1], ms(in_queue_ns), f"{slices:,}")
        name = f"{showable(thread.name)} ({thread.tid})"
        rows.append((*times, name, process_label(process.name, process.pid)))
    return Table(
        "The kernel's own account by thread, ms",
        f"counted: here, at context switches; kernel's: in /proc/PID/task/TID/schedstat, of threads"
        f" that were there at the end{ended}; runnable: awake without a CPU",
        (
            *(">counted CPU", ">kernel's CPU", ">counted runnable", ">kernel's runnable"),
            *(">time slices", "thread", "process"),
        ),
        tuple(rows),
        max(0, len(accounts) - limit),
    )


def _busy_ns(accounts: npt.NDArray[np.void]) -> I64:
    busy: I64 = (accounts["on_cpu_ns"] + accounts["run_queue_ns"]).astype(np.int64)
    return busy


def _delays(profile: Profile, limit: int) -> Table:
    order = sorted(profile.accounts.delays, key=lambda delay: (-delay.ns, delay.process))
    rows, there_ns = [], _there_ns(profile)
    for delay in order[:limit]:
        process = profile.processes[delay.process]
        time = ms(delay.ns) if _is_possible(profile, delay, there_ns) else "impossible"
        words = (DELAY_CAUSES[delay.cause], process_label(process.name, process.pid))
        rows.append((time, f"{delay.count:,}", *words))
    return Table(
        "What the kernel says was waited for, ms",
        "its delay accounting (taskstats), summed over threads, of processes made since"
        " kernel.task_delayacct was set; impossible: more than all they lasted",
        (">ms", ">waits", "cause", "process"),
        tuple(rows),
        max(0, len(order) - limit),
    )
