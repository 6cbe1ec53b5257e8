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
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from aiflame.agent import __version__
from aiflame.agent.fleet.memory import MemoryUse
from aiflame.agent.model.profile import SampleClass
from aiflame.agent.model.window import Window

if TYPE_CHECKING:
    from prometheus_client.core import Metric

# Windows come each second. A host at a load of 20 keeps the collector waiting for some.
_ALIVE_S = 30.0
_NS_PER_S = 1e9


class Vitals:
    """What there is to be told: noted by the agent's thread, read by the server's."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._window_s: float | None = None
        self._windows = self._windows_lost = self._stretches = self._stretches_lost = 0
        self._samples: Counter[str] = Counter()
        self._lost: Counter[str] = Counter()
        self._cpu_ns = self._rss_bytes = 0
        self._sinks: Mapping[str, Mapping[str, Any]] = {}
        self._memory: MemoryUse | None = None
        self._memory_limit = 0

    def note_window(self, window: Window, *, is_kept: bool) -> None:
        """Counts a window."""
        kinds, counts = window.samples["kind"], window.samples["count"]
        with self._lock:
            self._window_s = time.monotonic()
            self._windows += 1
            self._windows_lost += not is_kept
            self._cpu_ns += window.cost.cpu_ns
            self._rss_bytes = window.cost.rss_bytes
            for kind in SampleClass:
                self._samples[kind.name.lower()] += int(counts[kinds == kind].sum())

    def note_memory(self, use: MemoryUse, limit_bytes: int) -> None:
        """Takes what processes and maps have, and what processes may."""
        with self._lock:
            self._memory, self._memory_limit = use, limit_bytes

    def note_report(self, report: Mapping[str, Any]) -> None:
        """Takes what the process that names and sends says of itself.

        Losses are those of whole stretches, as sinks are told: a window counts each stack that has
        not come yet, and the next one counts it again, and what names lose is in no window.
        """
        with self._lock:
            self._stretches += "done" in report
            self._stretches_lost += "lost" in report
            self._lost.update(report.get("losses", {}))
            self._sinks = report.get("sinks", self._sinks)

    @property
    def trouble(self) -> str:
        """Why the agent is not healthy, "" if it is."""
        with self._lock:
            if self._window_s is None:
                return "no window was recorded yet"
            silent_s = time.monotonic() - self._window_s
        return f"no window for {silent_s:.0f} s" if silent_s > _ALIVE_S else ""

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
                ("windows", "Windows that were recorded, of five seconds or less.", self._windows),
                ("windows_lost", "Those for which there was no room on disk.", self._windows_lost),
                ("stretches", "Stretches that were named and queued.", self._stretches),
                ("stretches_lost", "Those that could not be.", self._stretches_lost),
                ("collector_cpu_seconds", "CPU time of the collector.", self._cpu_ns / _NS_PER_S),
            ):
                yield CounterMetricFamily(f"aiflame_{name}", words, value)
            yield GaugeMetricFamily(
                "aiflame_collector_resident_bytes", "The most that it had.", self._rss_bytes
            )
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
                labels=["name"],
            )
            for name, count in self._lost.items():
                lost.add_metric([name], count)
            yield lost
            yield from self._of_sinks()

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
            "aiflame_memory_limit_bytes",
            "The budget of all but the kernel's part: with more for long, less is kept.",
            self._memory_limit,
        )

    def _of_sinks(self) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        counters = {
            "sent_requests": "Requests that a back-end took.",
            "sent_samples": "Samples in them.",
            "sent_bytes": "Bytes of them.",
            "retries": "How often one was sent again.",
        }
        gauges = {
            "waiting_requests": "Requests that wait on disk.",
            "waiting_bytes": "Bytes of them.",
            "last_sent_unix_s": "When the last one was taken, 0 for never.",
        }
        for names, family in ((counters, CounterMetricFamily), (gauges, GaugeMetricFamily)):
            for key, words in names.items():
                name = key.replace("last_sent_unix_s", "last_sent_timestamp_seconds")
                metric = family(f"aiflame_export_{name}", words, labels=["sink"])
                for sink, state in self._sinks.items():
                    metric.add_metric([sink], state[key])
                yield metric
        dropped = CounterMetricFamily(
            "aiflame_export_dropped_samples", "Never sent, or refused.", labels=["sink", "reason"]
        )
        for sink, state in self._sinks.items():
            for reason, count in state["dropped_samples"].items():
                dropped.add_metric([sink, reason], count)
        yield dropped
