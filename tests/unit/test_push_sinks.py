# SPDX-License-Identifier: Apache-2.0
"""Profiles pushed to Pyroscope and by OTLP, as stand-ins of the receivers take them in."""

from __future__ import annotations

import gzip
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from aiflame.agent.model.batch import Labels
from aiflame.agent.model.profile import (
    Binary,
    Loss,
    Profile,
    SampleClass,
    StopReason,
)
from aiflame.agent.sinks import otlp as otlp_sink
from aiflame.agent.sinks import pyroscope_limits
from aiflame.agent.sinks.clickhouse import ClickHouseSink
from aiflame.agent.sinks.otlp import OtlpSink
from aiflame.agent.sinks.otlp import Settings as OtlpSettings
from aiflame.agent.sinks.pyroscope import PyroscopeSink
from aiflame.agent.sinks.pyroscope import Settings as PyroscopeSettings
from aiflame.agent.sinks.requests import RequestSink
from aiflame.agent.store.address import Server, address_of
from breadth import cases
from busy_host import busy_host, busy_profile
from device_profiles import (
    hostile_device_profile,
    small_device_profile,
    small_timed_profile,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from profiles import (
    HOSTILE_NAMES,
    MS,
    RECORDING,
    Sample,
    deep_profile,
    empty_profile,
    hostile_profile,
    profile_of,
    python_profile,
    small_profile,
    timed_profile,
)
from pushes import (
    BEGIN_NS,
    CPU,
    LAUNCH,
    MINUTE_NS,
    OFF_CPU,
    RUN_DELAY,
    SAMPLES,
    TIMED_SAMPLES,
    all_ways,
    as_pyroscope,
    batch_of,
    exact,
    pushed_by_otlp,
    pushed_to_pyroscope,
    send_all,
    sums_of,
    totals_of,
)
from receivers import otlp, pyroscope
from receivers.server import serving

PROFILES: dict[str, Callable[[], Profile]] = {
    "small": small_profile,
    "python": python_profile,
    "timed": timed_profile,
    "hostile": hostile_profile,
    "deep": deep_profile,
    "device": small_device_profile,
    "device times": small_timed_profile,
    "hostile device": hostile_device_profile,
    "busy": lambda: busy_profile(0, 500, 40),
}


@pytest.mark.parametrize("name", PROFILES)
def test_every_sink_gets_the_sums_of_the_profile(name: str) -> None:
    # GIVEN a profile
    profile = exact(PROFILES[name]())
    # WHEN it is pushed by each way
    ways = all_ways([batch_of(profile)])
    # THEN each class adds up to what the profile has, and stacks are the same by all ways
    assert sums_of(ways[0]) == totals_of([profile])
    assert ways[1] == ways[0]
    assert ways[2] == ways[0]


@pytest.mark.parametrize("name", PROFILES)
def test_every_sink_counts_the_same_samples(name: str) -> None:
    # GIVEN two containers of a host, of which one's waits may be too short to weigh anything
    profile = exact(PROFILES[name]())
    samples = profile.samples.copy()
    for klass in SampleClass:
        samples["ns"][np.flatnonzero(samples["klass"] == klass)[1:2]] = 0
    profiles = [profile, replace(profile, samples=samples)]
    batches = [batch_of(one, Labels(str(i))) for i, one in enumerate(profiles)]
    # WHEN they are encoded THEN each sink has all samples of threads and of devices
    url = "http://localhost:1"
    address = address_of("clickhouse://localhost/aiflame", {})
    assert isinstance(address, Server)
    sinks: list[RequestSink] = [
        PyroscopeSink(PyroscopeSettings(url=url)),
        *(OtlpSink(OtlpSettings(url=url, flavour=each.value)) for each in otlp_sink.Flavour),
        ClickHouseSink(address),
    ]
    counts = [sum(request.samples for request in sink.encode(batches)) for sink in sinks]
    wanted = sum(
        int(one.samples["count"].sum()) + int(one.gpu.samples["count"].sum()) for one in profiles
    )
    assert counts == [wanted] * len(sinks)


def test_nothing_is_sent_of_nothing() -> None:
    batch = batch_of(empty_profile())
    assert list(PyroscopeSink(PyroscopeSettings(url="http://localhost:1")).encode([batch])) == []
    assert list(OtlpSink(OtlpSettings(url="http://localhost:1")).encode([batch])) == []


def test_stacks_are_those_that_reports_show() -> None:
    # GIVEN Python on native frames, a truncated stack, a lock and a thread without any frame
    profile = profile_of(
        Sample("_start;[i]_PyEval_EvalFrameDefault;[p]run@/app/t.py:7;work", 10 * MS),
        Sample("clone;worker;[k]futex_wait", 7 * MS, SampleClass.BLOCKED),
        Sample("inner", 10 * MS, end=StopReason.NO_FRAME_POINTER),
        Sample("", 3 * MS, SampleClass.WAITING_TO_RUN, end=StopReason.NOT_RUN_YET),
    )
    # WHEN they are pushed
    stacks = pushed_to_pyroscope([batch_of(profile)]).stacks()
    # THEN the interpreter's frames are left out, and what is missing is said
    assert stacks[CPU] == {
        ("work", "run", "_start"): 10 * MS,
        ("inner", "[truncated: no frame pointer]"): 10 * MS,
    }
    assert stacks[OFF_CPU] == {("[blocked: lock]", "futex_wait", "worker", "clone"): 7 * MS}
    assert stacks[RUN_DELAY] == {("[no frames: not run yet]",): 3 * MS}


def test_stall_reasons_stand_below_kernels_below_launches() -> None:
    stacks = pushed_to_pyroscope([batch_of(small_device_profile())]).stacks()
    fill = ("clEnqueueNDRangeKernel", "fill_all", "main")
    assert stacks[SAMPLES][("lg_throttle", "fill", *fill)] == 50
    assert stacks[SAMPLES]["unheard_of", "ghost", "[unknown launch]"] == 50
    assert stacks[LAUNCH][("fill", *fill)] == 8
    assert stacks[CPU].total() == 40 * MS


def test_a_collector_gets_types_periods_frame_types_and_build_ids() -> None:
    # GIVEN on-CPU, off-CPU and device work, with losses
    profile = replace(
        exact(small_timed_profile()),
        binaries=(Binary("/opt/server", "ab" * 20), Binary("[kernel]", "")),
        losses=(Loss("stack_lost", 7, "stacks"),),
    )
    # WHEN it is pushed to a Collector
    collector = otlp.Collector()
    pushed_by_otlp([batch_of(profile)], collector)
    # THEN each class is a profile of its own type, with its period
    assert {(one.sample_type, one.period_type, one.period) for one in collector.got} == {
        ("samples:count", "cpu:nanoseconds", RECORDING.period_ns),
        ("off_cpu:nanoseconds", "", 0),
        ("gpu_launch:count", "gpu_launch:count", 1),
        ("gpu_kernel_time:nanoseconds", "gpu_kernel_time:nanoseconds", 1),
        ("gpu_pcsample:count", "gpu_pcsample:count", 1),
    }
    types = frozenset[str]().union(*(one.types for one in collector.got))
    assert types == {"native", "kernel", "cpython", "off-cpu", "opencl", "gpu-stall", "unknown"}
    assert {one.scope for one in collector.got} == {"aiflame"}
    assert all("ab" * 20 in one.build_ids for one in collector.got[:2])
    # THEN losses are with all of them, and stall reasons with samples of devices
    assert all(one.attributes == {"aiflame.lost.stack_lost": 7} for one in collector.got)
    reasons = {
        attributes.get("gpu.stall.reason", "")
        for one in collector.got
        if one.sample_type == "gpu_pcsample:count"
        for _, attributes, _ in one.samples
    }
    assert {"barrier", "long_scoreboard", "selected"} <= reasons
    assert "" not in reasons


def test_samples_of_a_device_with_a_period_have_it() -> None:
    profile = small_device_profile()
    timed = tuple(replace(device, period_ns=1_500) for device in profile.gpu.devices)
    profile = replace(profile, gpu=replace(profile.gpu, devices=timed))
    ways = all_ways([batch_of(exact(profile))])
    assert [sums_of(way)[TIMED_SAMPLES] for way in ways] == [1_000] * 3


def test_devices_of_different_periods_add_up() -> None:
    # GIVEN samples of two devices, one of which counts longer for each
    profile = exact(small_device_profile())
    devices = tuple(replace(profile.gpu.devices[0], period_ns=ns) for ns in (1_500, 9_000))
    samples = profile.gpu.samples.copy()
    samples["device"] = np.arange(len(samples)) % 2
    profile = replace(profile, gpu=replace(profile.gpu, devices=devices, samples=samples))
    # WHEN they are pushed THEN neither is taken for a repetition of the other
    ways = all_ways([batch_of(profile)])
    assert [sums_of(way)[TIMED_SAMPLES] for way in ways] == [1_000] * 3


def test_weights_that_no_format_holds_cost_nobody_else_anything() -> None:
    # GIVEN two containers, one of which tells of more than there can be
    honest, forged = exact(small_device_profile()), small_timed_profile()
    most = np.iinfo(np.uint64).max
    times, samples = forged.gpu.times.copy(), forged.gpu.samples.copy()
    times["duration_ns"], samples["count"] = most, most
    gpu = replace(
        forged.gpu,
        times=times,
        samples=samples,
        devices=tuple(replace(device, period_ns=int(most)) for device in forged.gpu.devices),
    )
    forged = replace(forged, gpu=gpu, losses=(Loss("forged", int(most), ""),))
    # WHEN both are pushed
    batches = [batch_of(forged, Labels("forged")), batch_of(honest, Labels("honest"))]
    receiver = pushed_to_pyroscope(batches)
    pushed_by_otlp(batches, otlp.Collector())
    pushed_by_otlp(batches, otlp.Pyroscope(), "pyroscope")
    # THEN the other one has its own
    found: Counter[str] = Counter()
    for (type_id, labels), stored in receiver.series.items():
        if dict(labels)["service_name"] == "honest":
            found[type_id] += stored.stacks.total()
    assert found == totals_of([honest])


def test_inlined_functions_are_lines_of_one_location() -> None:
    # GIVEN a function into which another one was inlined
    profile = profile_of(Sample("main;outer:3;inner:9;leaf", 10 * MS))
    frames = profile.frames.copy()
    frames["inlined"][2] = True
    profile = replace(profile, frames=frames)
    # WHEN it is pushed
    receiver = pushed_to_pyroscope([batch_of(profile)])
    # THEN they are in one location, the innermost first
    (stored,) = receiver.series.values()
    (pprof,) = stored.profiles.values()
    text = {function.id: pprof.string_table[function.name] for function in pprof.function}
    lines = [
        [(text[line.function_id], line.line) for line in location.line]
        for location in pprof.location
    ]
    assert [("inner", 9), ("outer", 3)] in lines
    assert len(lines) == 3
    assert stored.stacks == {("leaf", "inner", "outer", "main"): 10 * MS}


# Series.

_POD = Labels(
    service="train",
    container_id="ab" * 32,
    container="main",
    engine="containerd",
    node="n1",
    namespace="ml",
    pod="train-7d4b9c-x2x",
    pod_uid="0b7a",
    workload="train",
    workload_kind="Deployment",
    version="1.2",
    extra=(("team", "vision"), ("app.kubernetes.io/name", "t")),
)


def test_series_have_the_labels_that_were_asked_for() -> None:
    receiver = pushed_to_pyroscope([batch_of(small_profile(), _POD)], labels=("node", "version"))
    assert {labels for _, labels in receiver.series} == {
        (
            ("app_kubernetes_io_name", "t"),
            ("node", "n1"),
            ("service_name", "train"),
            ("team", "vision"),
            ("version", "1.2"),
        )
    }


def test_one_container_makes_one_series_for_each_class() -> None:
    # GIVEN processes, threads and device work of a container
    profile = exact(small_timed_profile())
    # WHEN it is pushed by both ways to Pyroscope
    straight = pushed_to_pyroscope([batch_of(profile, _POD)])
    converted = otlp.Pyroscope()
    pushed_by_otlp([batch_of(profile, _POD)], converted, "pyroscope")
    # THEN neither thread, process nor stall reason makes a series, and both ways make the same, but
    # for labels of Pyroscope's own
    assert len(straight.series) == 5
    own = (("__delta__", "false"), ("__otel__", "true"), ("service.name", "train"))
    assert set(converted.series) == {
        (type_id, tuple(sorted([*labels, *own]))) for type_id, labels in straight.series
    }


def test_a_collector_is_told_all_that_is_known_of_a_container() -> None:
    collector = otlp.Collector()
    pushed_by_otlp([batch_of(small_profile(), _POD)], collector)
    assert collector.got[0].resource == {
        "service.name": "train",
        "service.version": "1.2",
        "host.name": "n1",
        "container.id": "ab" * 32,
        "container.name": "main",
        "container.runtime.name": "containerd",
        "k8s.namespace.name": "ml",
        "k8s.pod.name": "train-7d4b9c-x2x",
        "k8s.pod.uid": "0b7a",
        "k8s.container.name": "main",
        "k8s.node.name": "n1",
        "k8s.deployment.name": "train",
        "team": "vision",
        "app.kubernetes.io/name": "t",
    }


def test_parca_gets_the_names_that_its_users_know() -> None:
    parca = otlp.Parca()
    pushed_by_otlp([batch_of(exact(small_device_profile()), _POD)], parca, "parca")
    names = {name for name, _ in parca.series}
    assert names == {
        "parca_agent:samples:count:cpu:nanoseconds:delta",
        "parca_agent:wallclock:nanoseconds:samples:count:delta",
        "parca_agent:gpu_launch:count:gpu_launch:count:delta",
        "parca_agent:gpu_pcsample:count:gpu_pcsample:count:delta",
    }
    labels = [dict(labels) for name, labels in parca.series if "pcsample" in name]
    assert {one["cuda_stall_reason"] for one in labels} > {"barrier", "selected"}
    assert {(one["node"], one["namespace"], one["pod"]) for one in labels} == {
        ("n1", "ml", "train-7d4b9c-x2x")
    }


def test_containers_of_the_same_labels_add_up() -> None:
    # GIVEN two containers that the labels do not tell apart
    profiles = [exact(small_profile()), exact(python_profile())]
    batches = [
        batch_of(profile, replace(_POD, container=f"c{i}")) for i, profile in enumerate(profiles)
    ]
    # WHEN they are pushed with labels of pods alone
    receiver = pushed_to_pyroscope(batches, labels=("pod",))
    # THEN neither is taken for a repetition of the other
    assert sums_of(receiver.stacks()) == totals_of(profiles)
    assert len({labels for _, labels in receiver.series}) == 1


@pytest.mark.parametrize(
    "name", [*HOSTILE_NAMES, "\xe9" * 5_000, "\U0001f525" * 3_000, " ", "\x00"]
)
def test_no_label_breaks_a_request_or_splits_a_series(name: str) -> None:
    # GIVEN a container whose every label is hostile
    labels = Labels(
        **{field: name for field in Labels.__dataclass_fields__ if field != "extra"},
        extra=((name, name), ("__name__", "memory"), ("service_name", "other"), ("ok", name)),
    )
    batches = [batch_of(exact(small_profile()), labels) for _ in range(2)]
    # WHEN two of its stretches are pushed
    # THEN they are taken, as one series for each class, and nobody else's
    straight = pushed_to_pyroscope(batches)
    assert sums_of(straight.stacks()) == totals_of([batch.profile for batch in batches])
    assert len(straight.series) == len(straight.stacks())
    assert not any(type_id.startswith("memory") for type_id, _ in straight.series)
    for receiver, flavour in (
        (otlp.Collector(), "collector"),
        (otlp.Pyroscope(), "pyroscope"),
        (otlp.Parca(), "parca"),
    ):
        pushed_by_otlp(batches, receiver, flavour)
        assert len({tuple(one.resource.items()) for one in receiver.got}) == 1


def test_long_labels_and_names_that_differ_at_their_end_stay_two() -> None:
    batches = [
        batch_of(
            exact(profile_of(Sample("", 10 * MS, frames=("main", "x" * 9_000 + end)))),
            Labels("y" * 9_000 + end),
        )
        for end in "ab"
    ]
    receiver = pushed_to_pyroscope(batches)
    assert len(receiver.series) == 2
    assert len(receiver.stacks()[CPU]) == 2


def test_too_many_labels_are_left_out_and_the_service_stays() -> None:
    labels = replace(_POD, extra=tuple((f"label{i}", "x") for i in range(100)))
    receiver = pushed_to_pyroscope([batch_of(small_profile(), labels)])
    (found,) = {labels for _, labels in receiver.series}
    assert len(found) == 29
    assert dict(found).items() >= {"service_name": "train", "node": "n1", "label0": "x"}.items()


def test_labels_leave_room_for_those_of_pyroscope() -> None:
    labels = replace(_POD, extra=tuple((f"label{i}", "x") for i in range(100)))
    # GIVEN a Pyroscope that adds two by its limits, besides those that it always does
    receiver = otlp.Pyroscope(adds=("__order__", "__sampled__"))
    # WHEN a container has more labels than it takes THEN the first ones are there
    pushed_by_otlp([batch_of(small_profile(), labels)], receiver, "pyroscope")
    (found,) = {labels for _, labels in receiver.series}
    assert len(found) == 29
    wanted = {"service_name": "train", "service.name": "train", "node": "n1", "label0": "x"}
    assert dict(found).items() >= wanted.items()


# Limits.


def test_a_profile_of_too_many_samples_is_split() -> None:
    # GIVEN more stacks than a Pyroscope takes in one profile
    profile = exact(busy_profile(1, 40_000, 4))
    # WHEN it is pushed
    straight, converted, collector = all_ways([batch_of(profile)])
    # THEN sums are kept, in several profiles of one series
    assert sums_of(straight) == totals_of([profile])
    assert straight == converted == collector


def test_no_request_is_longer_than_a_collector_takes() -> None:
    # GIVEN a container's minute that is longer
    batch = batch_of(busy_profile(0, 18_000, 130))
    # WHEN it is encoded
    requests = list(OtlpSink(OtlpSettings(url="http://localhost:1")).encode([batch]))
    # THEN it takes several requests, none of which is
    assert len(requests) > 1
    assert max(len(gzip.decompress(request.body)) for request in requests) <= 4 << 20
    samples = int(batch.profile.samples["count"].sum())
    assert sum(request.samples for request in requests) == samples


def test_a_pyroscope_gets_few_profiles_at_once_by_otlp() -> None:
    # GIVEN some containers, each with several classes
    profile = exact(small_timed_profile())
    batches = [batch_of(profile, Labels(f"s{i}")) for i in range(9)]
    # WHEN they are pushed THEN no request has more profiles than it pushes within a time limit
    converted = otlp.Pyroscope()
    pushed_by_otlp(batches, converted, "pyroscope")
    assert sum(converted.at_once) == 9 * 5
    assert max(converted.at_once) == 8
    assert sums_of(converted.weights()) == totals_of([profile] * 9)
    # AND a Collector gets them together
    collector = otlp.Collector()
    pushed_by_otlp(batches, collector)
    assert len(collector.sizes) == 1


def test_a_dictionary_counts_for_each_profile_of_a_pyroscope(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # GIVEN several classes of a container whose one request a Pyroscope would just take, if it did
    # not count what they share for each of them
    batch = batch_of(exact(small_timed_profile()))
    (request,) = OtlpSink(OtlpSettings(url="http://localhost:1")).encode([batch])
    limit = len(gzip.decompress(request.body))
    monkeypatch.setattr(pyroscope_limits, "MAX_BYTES", limit)
    # WHEN it is pushed THEN it is taken, in parts
    converted = otlp.Pyroscope(burst_bytes=limit)
    pushed_by_otlp([batch], converted, "pyroscope")
    assert len(converted.at_once) > 1
    assert sums_of(converted.weights()) == totals_of([batch.profile])


@cases("containers", [7, 1])
def test_what_is_split_often_adds_up(monkeypatch: pytest.MonkeyPatch, containers: int) -> None:
    # GIVEN limits that a stretch of time exceeds by far
    limit = 60_000
    monkeypatch.setattr(otlp_sink, "_MAX_BYTES", limit)
    monkeypatch.setattr(pyroscope_limits, "MAX_BYTES", limit)
    batches = busy_host(containers, 1_400, 30)
    expected = totals_of([batch.profile for batch in batches])
    # WHEN it is pushed
    straight = pyroscope.Pyroscope(BEGIN_NS + MINUTE_NS, burst_bytes=limit)
    with serving(straight) as server:
        sent = send_all(PyroscopeSink(PyroscopeSettings(url=server.url)), batches)
    converted = otlp.Pyroscope(max_bytes=limit, burst_bytes=limit)
    collector = otlp.Collector(max_bytes=limit)
    pushed_by_otlp(batches, converted, "pyroscope")
    pushed_by_otlp(batches, collector)
    # THEN no request is longer, and sums are kept
    assert min(sent, len(collector.sizes), len(converted.sizes)) > 7
    assert sums_of(straight.stacks()) == expected
    assert straight.stacks() == converted.weights() == as_pyroscope(collector)


def test_samples_that_stand_for_several_are_as_much_time_everywhere() -> None:
    # GIVEN 3 samples of one stack, of which one in four was taken
    period_ns = RECORDING.period_ns
    profile = profile_of(Sample("", 12 * period_ns, count=3, frames=("main",)))
    # WHEN they are pushed
    for way in all_ways([batch_of(profile)]):
        # THEN they are the time that they stand for
        assert [*way[CPU].values()] == [12 * period_ns]


def test_one_sample_with_the_longest_names_fits_into_a_request() -> None:
    # GIVEN a stack of 1,500 frames with names of megabytes
    frames = tuple(f"{i}" + "\U0001f525" * 2_000 for i in range(1_500))
    profile = exact(profile_of(Sample("", 10 * MS, frames=frames)))
    # WHEN it is pushed
    for way in all_ways([batch_of(profile)]):
        # THEN its leaf is there, and its cut root is marked
        ((stack, weight),) = way[CPU].items()
        assert weight == 10 * MS
        assert stack[-1] == "[truncated: too deep]"
        assert stack[0].startswith("1499")


# What hypothesis makes.

_NAMES = st.text(max_size=12) | st.sampled_from(HOSTILE_NAMES)
_SAMPLE = st.builds(
    lambda frames, kinds, klass, end, count, thread: Sample(
        "",
        count * RECORDING.period_ns,
        klass,
        thread,
        end,
        count,
        tuple(kind + name for kind, name in zip(kinds, frames, strict=False)),
    ),
    st.lists(_NAMES, max_size=6),
    st.lists(st.sampled_from(["", "[k]", "[p]", "[i]", "[m]"]), min_size=6, max_size=6),
    st.sampled_from(SampleClass),
    st.sampled_from(StopReason),
    st.integers(0, 1 << 29),  # more of one row is no time that a recording can have
    st.integers(0, 2),
)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(_SAMPLE, max_size=8), min_size=1, max_size=3), _NAMES)
def test_any_profiles_add_up(profiles: list[list[Sample]], label: str) -> None:
    found = [profile_of(*samples) for samples in profiles]
    labels = Labels("s", pod=label)
    straight, converted, collector = all_ways([batch_of(profile, labels) for profile in found])
    assert sums_of(straight) == totals_of(found)
    assert straight == converted == collector
