# SPDX-License-Identifier: Apache-2.0
"""What an agent knows of itself: whether it works, and its metrics for Prometheus.

Neither depends on a back-end: an agent whose back-end is away is healthy. They name losses and
sinks, and nothing of what is recorded.
"""

from __future__ import annotations

import platform
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING

from aiflame.agent import __version__
from aiflame.agent.fleet.memory import MemoryUse
from aiflame.agent.fleet.naming_messages import (
    NamingReport,
    SinkState,
    StretchDone,
    StretchLost,
)
from aiflame.agent.fleet.naming_progress import UNHEARD_S
from aiflame.agent.losses import KINDS_BY_NAME
from aiflame.agent.model.profile import SampleClass
from aiflame.agent.model.window import Window
from aiflame.agent.recording.chance import Chances

if TYPE_CHECKING:
    from prometheus_client.core import Metric

# Windows are of a minute at most. A host at a load of 20 keeps the collector waiting for some.
_ALIVE_S = 100.0
# Three of a minute that found no room on disk, with the same crowd: one alone is counted.
_KEPT_S = 220.0
# Longer than from one stretch to the next, of two minutes at most by default: a process that names
# and dies of each never gets so old.
_STEADY_S = 150.0
# Twice that: one that had run for months and was killed has another one that has named by then.
_NAMED_S = 300.0
# Reasons are texts of back-ends and of errors, and each is a time series.
_MOST_REASONS = 20
_OTHER_REASONS = "others"

# What a sink counts, by the name of the metric: what it is, and where a state has it.
_SINK_COUNTERS: Mapping[str, tuple[str, Callable[[SinkState], int]]] = {
    "sent": (
        "Samples that a back-end took: on-CPU samples, off-CPU intervals, samples of devices.",
        lambda state: state.sent_samples,
    ),
    "sent_requests": ("Requests that these were in.", lambda state: state.sent_requests),
    "sent_bytes": ("Bytes of these.", lambda state: state.sent_bytes),
    "retried": ("How often a request was sent again.", lambda state: state.retries),
}


class _Exports:
    """What became of samples for one sink since the agent was started.

    The process that sends begins at 0 when it is started, and at no other time.
    """

    def __init__(self) -> None:
        self.waiting_requests = self.waiting_bytes = 0
        self.last_sent_unix_s = 0.0
        self._state: SinkState | None = None  # of the process that there is
        self._counts: Counter[str] = Counter()
        self._dropped: Counter[str] = Counter()

    def begin(self) -> None:
        """Takes note that there is a new process."""
        self._state = None

    def take(self, state: SinkState) -> None:
        """Takes what is said of it."""
        before, self._state = self._state, state
        # Where it is not said what waits, it is what waited before.
        if state.waiting_requests is not None:
            self.waiting_requests = state.waiting_requests
        if state.waiting_bytes is not None:
            self.waiting_bytes = state.waiting_bytes
        self.last_sent_unix_s = max(self.last_sent_unix_s, state.last_sent_unix_s)
        for name, (_, count_of) in _SINK_COUNTERS.items():
            self._counts[name] += count_of(state) - (count_of(before) if before else 0)
        dropped_before = before.dropped_samples if before else {}
        for reason, count in state.dropped_samples.items():
            is_told = reason in self._dropped or len(self._dropped) < _MOST_REASONS
            label = reason if is_told else _OTHER_REASONS
            self._dropped[label] += count - dropped_before.get(reason, 0)

    def count(self, name: str) -> int:
        """Returns one of `_SINK_COUNTERS`."""
        return self._counts[name]

    @property
    def dropped(self) -> Mapping[str, int]:
        """Samples by reason."""
        return self._dropped


class Vitals:
    """What there is to be told: noted by the agent's thread, read by the server's."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._window_s: float | None = None
        self._kept_s: float | None = None
        self._named_s = time.monotonic()
        self._naming_since_s: float | None = None
        self._naming_unheard_s = 0.0
        self._namings_killed = 0
        self._windows = self._windows_lost = self._stretches = self._stretches_lost = 0
        self._samples = Counter({kind.name.lower(): 0 for kind in SampleClass})
        self._lost: Counter[str] = Counter()
        self._exports: dict[str, _Exports] = {}
        self._sinks: Collection[str] = ()
        self._containers = self._unresolved_containers = 0
        self._duty_ratio = self._device_duty_ratio = 0.0
        self._thrift, self._delay_factor, self._joins = 1, 1, False
        self._memory: MemoryUse | None = None
        self._memory_limit = 0
        self._cpu_s = self._seen_cpu_s = 0.0
        self._cost_ns = Counter({"processes": 0, "programs": 0})
        self._cost_limit_cpus: float | None = None
        self._is_cost_over = False

    @property
    def windows(self) -> int:
        """How many windows were recorded, those for which there was no room included."""
        with self._lock:
            return self._windows

    def note_window(self, window: Window, *, is_kept: bool) -> None:
        """Counts a window."""
        kinds, counts = window.samples["kind"], window.samples["count"]
        with self._lock:
            self._window_s = time.monotonic()
            if is_kept:
                self._kept_s = self._window_s
            self._windows += 1
            self._windows_lost += not is_kept
            self._cost_ns["processes"] += window.cost.cpu_ns
            self._cost_ns["programs"] += window.cost.bpf_ns
            for kind in SampleClass:
                self._samples[kind.name.lower()] += int(counts[kinds == kind].sum())

    def note_stretches_lost(self, count: int) -> None:
        """Counts stretches that were removed before they were sent."""
        with self._lock:
            self._stretches_lost += count

    def note_memory(self, use: MemoryUse, limit_bytes: int) -> None:
        """Takes what processes and maps have, and what processes may."""
        with self._lock:
            self._memory, self._memory_limit = use, limit_bytes

    def resident_bytes(self) -> int:
        """Returns what its processes had when it looked last, without those that make captures."""
        with self._lock:
            return 0 if self._memory is None else self._memory.processes

    def note_cpu(self, seconds: float) -> None:
        """Takes what all processes of the agent have used since it was started."""
        with self._lock:
            # What a child's orphan used is in no sum any more, and a counter never goes back.
            self._cpu_s += max(seconds - self._seen_cpu_s, 0)
            self._seen_cpu_s = seconds

    def note_chances(self, chances: Chances) -> None:
        """Takes what the cost controller leaves."""
        with self._lock:
            self._duty_ratio = 1 / chances.one_in
            self._thrift, self._delay_factor = chances.thrift, chances.delay_factor
            self._joins = chances.details_after_ns > 0

    def note_budget(self, limit_cpus: float, *, is_over: bool) -> None:
        """Takes what it may cost, and whether it costs more with as little as may be done."""
        with self._lock:
            self._cost_limit_cpus, self._is_cost_over = limit_cpus, is_over

    def note_device_duty(self, ratio: float) -> None:
        """Takes for which share of the time stalls of devices are sampled."""
        with self._lock:
            self._device_duty_ratio = ratio

    def note_naming_started(self) -> None:
        """Takes note that the process that names and sends is a new one."""
        with self._lock:
            self._naming_since_s = time.monotonic()
            self._naming_unheard_s = 0.0
            for export in self._exports.values():
                export.begin()

    def note_naming_ended(self) -> None:
        """Takes note that there is none."""
        with self._lock:
            if self._is_naming_steady():
                # One that hung has done nothing since.
                self._named_s = time.monotonic() - self._naming_unheard_s
            self._naming_since_s = None
            self._naming_unheard_s = 0.0

    def note_naming_unheard(self, seconds: float) -> None:
        """Takes for how long it takes none of the messages that wait for it."""
        with self._lock:
            self._naming_unheard_s = seconds

    def note_naming_killed(self) -> None:
        """Counts one that was killed, as it hung."""
        with self._lock:
            self._namings_killed += 1

    def _is_naming_steady(self) -> bool:
        since_s = self._naming_since_s
        steady_s = _STEADY_S + self._naming_unheard_s
        return since_s is not None and time.monotonic() - since_s >= steady_s

    def note_report(self, report: NamingReport) -> None:
        """Takes what the process that names and sends says of itself.

        Losses are those of whole stretches, as sinks are told: a window counts each stack that has
        not come yet, and the next one counts it again, and what names lose is in no window.
        """
        with self._lock:
            if isinstance(report, StretchDone):
                self._named_s = time.monotonic()
                self._stretches += 1
                # Others would be metrics without end.
                self._lost.update(
                    {name: n for name, n in report.losses.items() if name in KINDS_BY_NAME}
                )
                self._containers = report.containers
                self._unresolved_containers = report.unresolved_containers
            elif isinstance(report, StretchLost):
                self._stretches_lost += 1
            self._sinks = (*report.sinks,)
            for sink, state in report.sinks.items():
                self._exports.setdefault(sink, _Exports()).take(state)

    @property
    def trouble(self) -> str:
        """Why the agent is not healthy, "" if it is."""
        with self._lock:
            if self._window_s is None:
                return "no window was recorded yet"
            silent_s = time.monotonic() - self._window_s
        return f"no window for {silent_s:.0f} s" if silent_s > _ALIVE_S else ""

    @property
    def unready(self) -> str:
        """Why what is recorded does not get on, "" if it does.

        To start the agent anew would make no room, and lose what others still tell of: it is not
        unhealthy.
        """
        with self._lock:
            now_s = time.monotonic()
            if self._kept_s is None:
                return "no window was kept yet: the log says why"
            lost_s, unnamed_s = now_s - self._kept_s, now_s - self._named_s
            is_steady = self._is_naming_steady()
            unheard_s = self._naming_unheard_s
        if lost_s > _KEPT_S:
            return f"no window was kept for {lost_s:.0f} s: the log says why"
        if unheard_s >= UNHEARD_S:
            return f"the process that names and sends has taken nothing for {unheard_s:.0f} s"
        if unnamed_s > _NAMED_S and not is_steady:
            return (
                f"nothing was named and queued for {unnamed_s:.0f} s, as the process that does it"
                " does not stay: the log says why"
            )
        return ""

    def collect(self) -> Iterator[Metric]:
        """Yields all metrics: a collector of prometheus_client."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        with self._lock:
            build = GaugeMetricFamily(
                "aiflame_build_info", "What runs.", labels=["version", "kernel"]
            )
            build.add_metric([__version__, platform.release()], 1)
            yield build
            for name, words, value in (
                ("windows", "Windows that were recorded, of a minute or less.", self._windows),
                ("windows_lost", "Those for which there was no room on disk.", self._windows_lost),
                ("stretches", "Stretches that were named and queued.", self._stretches),
                (
                    "stretches_lost",
                    "Those that could not be, or were dropped before.",
                    self._stretches_lost,
                ),
                (
                    "naming_killed",
                    "Processes that name and send that were killed, as they hung.",
                    self._namings_killed,
                ),
                (
                    "self_cpu_seconds",
                    "CPU time of the agent's processes, those that make captures included, looked"
                    " at once a minute.",
                    self._cpu_s,
                ),
            ):
                yield CounterMetricFamily(f"aiflame_{name}", words, value)
            for name, words, number in (
                (
                    "duty_ratio",
                    "Share of switch-outs whose stack is taken, in the cgroup with the smallest.",
                    self._duty_ratio,
                ),
                (
                    "short_lived_joined",
                    "Whether short-lived processes are joined: at a start, or to keep the budget.",
                    int(self._joins),
                ),
                (
                    "thrift",
                    "How many times less is done of what can be left, so that the budget is kept.",
                    self._thrift,
                ),
                (
                    "delay_factor",
                    "How many times longer than configured is what is sent at once, likewise.",
                    self._delay_factor,
                ),
                (
                    "device_duty_ratio",
                    "Share of the time in which helpers sample stalls, in the process with the"
                    " smallest.",
                    self._device_duty_ratio,
                ),
                (
                    "naming_unheard_seconds",
                    "For how long the process that names and sends takes nothing of what waits.",
                    self._naming_unheard_s,
                ),
                ("containers", "Containers in the newest stretch.", self._containers),
                (
                    "unresolved_containers",
                    "Those whose name is not known.",
                    self._unresolved_containers,
                ),
            ):
                yield GaugeMetricFamily(f"aiflame_{name}", words, number)
            yield from self._of_cost()
            yield from self._of_memory()
            samples = CounterMetricFamily(
                "aiflame_samples", "On CPU samples, off CPU intervals.", labels=["class"]
            )
            for kind, count in self._samples.items():
                samples.add_metric([kind], count)
            yield samples
            lost = CounterMetricFamily(
                "aiflame_lost",
                "What was seen and not kept in stretches that were named, by its name.",
                labels=["where"],
            )
            for name, count in self._lost.items():
                lost.add_metric([name], count)
            yield lost
            yield from self._of_sinks()

    def _of_cost(self) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        if self._cost_limit_cpus is None:
            return
        cost = CounterMetricFamily(
            "aiflame_cost_cpu_seconds",
            "CPU time that the budget is for, counted with each window: of processes, and of"
            " programs and helpers in threads of targets.",
            labels=["part"],
        )
        for part, ns in self._cost_ns.items():
            cost.add_metric([part], ns / 1e9)
        yield cost
        yield GaugeMetricFamily(
            "aiflame_cost_limit_cpus",
            "The budget of both together, in CPU seconds a second.",
            self._cost_limit_cpus,
        )
        yield GaugeMetricFamily(
            "aiflame_cost_over_limit",
            "Whether the last window cost more, with as little done as there may be.",
            int(self._is_cost_over),
        )

    def _of_memory(self) -> Iterator[Metric]:
        from prometheus_client.core import GaugeMetricFamily

        if self._memory is None:
            return
        memory = GaugeMetricFamily(
            "aiflame_memory_bytes", "What the agent has, looked at once a minute.", labels=["part"]
        )
        for part, size in self._memory.parts().items():
            memory.add_metric([part], size)
        yield memory
        yield GaugeMetricFamily(
            "aiflame_resident_bytes",
            "What its processes have, those that make captures included.",
            self._memory.processes + self._memory.captures,
        )
        yield GaugeMetricFamily(
            "aiflame_map_bytes", "What its maps have in the kernel.", self._memory.kernel
        )
        yield GaugeMetricFamily(
            "aiflame_memory_limit_bytes",
            "The budget of all but the parts of the kernel and of captures: with more for long,"
            " less is kept.",
            self._memory_limit,
        )

    def _of_sinks(self) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        for name, (words, _) in _SINK_COUNTERS.items():
            counter = CounterMetricFamily(f"aiflame_export_{name}", words, labels=["sink"])
            for sink, export in self._exports.items():
                counter.add_metric([sink], export.count(name))
            yield counter
        dropped = CounterMetricFamily(
            "aiflame_export_dropped",
            "Samples that were never sent, or refused.",
            labels=["sink", "reason"],
        )
        for sink, export in self._exports.items():
            for reason, count in export.dropped.items():
                dropped.add_metric([sink, reason], count)
        yield dropped
        requests = GaugeMetricFamily(
            "aiflame_spool_requests", "Requests that wait on disk.", labels=["sink"]
        )
        size = GaugeMetricFamily("aiflame_spool_bytes", "Bytes of them.", labels=["sink"])
        for sink in self._sinks:
            requests.add_metric([sink], self._exports[sink].waiting_requests)
            size.add_metric([sink], self._exports[sink].waiting_bytes)
        yield requests
        yield size
        last = GaugeMetricFamily(
            "aiflame_last_export_timestamp_seconds",
            "When the last request was taken, 0 for never.",
            labels=["sink"],
        )
        for sink in self._sinks:
            last.add_metric([sink], self._exports[sink].last_sent_unix_s)
        yield last
