# SPDX-License-Identifier: Apache-2.0
"""Profiles pushed to stand-ins of back-ends, and what these then have, by Pyroscope's type ids."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from aiflame.agent.model.batch import Batch, Labels
from aiflame.agent.model.gpu import Operation
from aiflame.agent.model.profile import Profile, SampleClass
from aiflame.agent.sinks.otlp import OtlpSink
from aiflame.agent.sinks.otlp import Settings as OtlpSettings
from aiflame.agent.sinks.pyroscope import PyroscopeSink
from aiflame.agent.sinks.pyroscope import Settings as PyroscopeSettings
from aiflame.agent.sinks.requests import RequestSink
from profiles import MS, RECORDING
from receivers import otlp, pyroscope
from receivers.server import serving

BEGIN_NS = RECORDING.started_unix_ns
MINUTE_NS = 60_000 * MS

# By type id of Pyroscope.
CPU = "process_cpu:cpu:nanoseconds:cpu:nanoseconds"
OFF_CPU = "off_cpu:off_cpu:nanoseconds::"
RUN_DELAY = "run_delay:run_delay:nanoseconds:run_delay:nanoseconds"
PREEMPTED = "preempted:preempted:nanoseconds:preempted:nanoseconds"
LAUNCH = "gpu_launch:gpu_launch:count:gpu_launch:count"
KERNEL_TIME = "gpu_kernel_time:gpu_kernel_time:nanoseconds:gpu_kernel_time:nanoseconds"
# Of devices whose samples are no time.
SAMPLES = "gpu_pcsample:gpu_pcsample:count:gpu_pcsample:count"
TIMED_SAMPLES = "gpu_pcsample:gpu_pcsample:count:gpu_pcsample:nanoseconds"

_CLASSES = {
    CPU: SampleClass.ON_CPU,
    OFF_CPU: SampleClass.BLOCKED,
    RUN_DELAY: SampleClass.WAITING_TO_RUN,
    PREEMPTED: SampleClass.PREEMPTED,
}

Stacks = dict[str, Counter[tuple[str, ...]]]


def totals_of(profiles: Sequence[Profile]) -> Counter[str]:
    """The sums of profiles by type id, straight from their columns."""
    found: Counter[str] = Counter()
    for profile in profiles:
        samples, gpu = profile.samples, profile.gpu
        for type_id, klass in _CLASSES.items():
            found[type_id] += int(samples["ns"][samples["klass"] == klass].sum())
        is_launch = [gpu.functions[i].operation is Operation.LAUNCH for i in gpu.calls["function"]]
        found[LAUNCH] += int(gpu.calls["count"][np.array(is_launch, np.bool_)].sum())
        found[KERNEL_TIME] += int(gpu.times["duration_ns"].sum())
        for device, one in enumerate(gpu.devices):
            count = int(gpu.samples["count"][gpu.samples["device"] == device].sum())
            found[TIMED_SAMPLES if one.period_ns else SAMPLES] += count
    return +found


def sums_of(stacks: Stacks) -> Counter[str]:
    return Counter({type_id: sum(found.values()) for type_id, found in stacks.items()})


def batch_of(profile: Profile, labels: Labels | None = None) -> Batch:
    return Batch(labels or Labels("train", node="n1"), profile, BEGIN_NS, MINUTE_NS)


def exact(profile: Profile) -> Profile:
    """As recordings have it: each on-CPU sample weighs a period."""
    samples = profile.samples.copy()
    is_on = samples["klass"] == SampleClass.ON_CPU
    samples["ns"][is_on] = samples["count"][is_on] * np.uint64(profile.recording.period_ns)
    return replace(profile, samples=samples)


def send_all(sink: RequestSink, batches: Sequence[Batch]) -> int:
    requests = list(sink.encode(batches))
    for request in requests:
        assert sink.send(request) == Counter()
    # One alone may have launches or times of kernels only.
    assert not requests or sum(request.samples for request in requests) > 0
    return len(requests)


def pushed_to_pyroscope(batches: Sequence[Batch], **more: object) -> pyroscope.Pyroscope:
    receiver = pyroscope.Pyroscope(BEGIN_NS + MINUTE_NS)
    with serving(receiver) as server:
        send_all(PyroscopeSink(PyroscopeSettings(url=server.url, **more)), batches)  # type: ignore[arg-type]
    return receiver


def pushed_by_otlp(
    batches: Sequence[Batch], receiver: otlp.Collector, flavour: str = "collector"
) -> None:
    with serving(receiver) as server:
        send_all(OtlpSink(OtlpSettings(url=server.url, flavour=flavour)), batches)


def all_ways(batches: Sequence[Batch]) -> list[Stacks]:
    """What is stored of the same batches by Pyroscope's way in, and by both of OTLP's."""
    straight = pushed_to_pyroscope(batches).stacks()
    converted = otlp.Pyroscope()
    pushed_by_otlp(batches, converted, "pyroscope")
    collector = otlp.Collector()
    pushed_by_otlp(batches, collector)
    return [straight, converted.weights(), as_pyroscope(collector)]


def as_pyroscope(collector: otlp.Collector) -> Stacks:
    """Names what a Collector got as Pyroscope does."""
    found: Stacks = {}
    for one in collector.got:
        if one.sample_type == "samples:count":
            type_id, factor = CPU, one.period
        elif one.sample_type == "off_cpu:nanoseconds":
            type_id, factor = OFF_CPU, 1
        else:
            name = one.period_type.partition(":")[0]
            type_id, factor = f"{name}:{one.sample_type}:{one.period_type}", 1
        for stack, _, value in one.samples:
            found.setdefault(type_id, Counter())[stack] += value * factor
    return found
