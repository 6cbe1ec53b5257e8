# SPDX-License-Identifier: Apache-2.0
"""A device whose every sample's launch is known, to measure by how much attribution is off.

Callers launch kernels of some size now and then; each queue runs its kernels one after another, and
queues run side by side; a sampler looks at every queue once a period. What a recording would have
seen of that becomes a GpuProfile, sample by sample beside the caller that it came from.

`python tests/gpu_simulator.py` prints the table of errors that the documentation shows.
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass, field, replace

import numpy as np
from aiflame.agent.model.gpu import (
    CALL_DTYPE,
    DEVICE_SAMPLE_DTYPE,
    NONE,
    ApiFunction,
    Device,
    GpuProfile,
    Kernel,
    KernelCode,
    Operation,
    StallReason,
    Tier,
)
from aiflame.gpu.attribution import TIME_DTYPE, attribute

SECOND = 1_000_000_000
_INSTRUCTIONS = 32
_REASONS = 3


@dataclass(frozen=True)
class Caller:
    """Code that launches the kernel.

    It launches `rate_hz` times a second for `share` of each `period_s`, from `phase_s` on, with
    `size` work items that scatter by a factor of exp(+-`spread`).
    """

    rate_hz: float
    size: int
    period_s: float = 1.0
    share: float = 1.0
    phase_s: float = 0.0
    spread: float = 0.0
    queue: int = 0
    kernel: str = "k"
    unnamed: bool = False  # its kernel was made before the recording began


@dataclass(frozen=True)
class Scenario:
    """What is launched, and what a recording sees of it."""

    name: str
    callers: tuple[Caller, ...]
    duration_s: float = 60.0
    exponent: float = 1.0  # a kernel takes (size / 1,000) ** exponent * unit_ns
    unit_ns: int = 300_000
    overhead_ns: int = 0
    sample_ns: int = 1_000_000
    start_s: float = 0.0  # when the recording begins
    most_samples: int = 1 << 62  # in a second: others are dropped by the device
    lost: float = 0.0  # share of a second's launches that were not counted, of all callers alike
    says_work: bool = True


@dataclass(frozen=True)
class Simulated:
    """A recording, and the stack of every sample: `truth[sample][stack]` adds up to its count."""

    gpu: GpuProfile
    truth: tuple[Counter[int], ...]
    times: np.ndarray = field(repr=False)


@dataclass
class _Runs:
    """Launches of all callers, and when each of them ran, in order of launch."""

    caller: np.ndarray
    at_ns: np.ndarray
    size: np.ndarray
    begin_ns: np.ndarray
    end_ns: np.ndarray


def _launch(scenario: Scenario, random: np.random.Generator) -> _Runs:
    callers, times, sizes = [], [], []
    for i, caller in enumerate(scenario.callers):
        at = np.cumsum(
            random.exponential(1 / caller.rate_hz, int(caller.rate_hz * scenario.duration_s * 1.2))
        )
        at = at[at < scenario.duration_s]
        at = at[(at - caller.phase_s) % caller.period_s < caller.share * caller.period_s]
        callers.append(np.full(len(at), i))
        times.append((at * SECOND).astype(np.int64))
        spread = np.exp(random.uniform(-caller.spread, caller.spread, len(at)))
        sizes.append(np.maximum(caller.size * spread, 1).astype(np.int64))
    order = np.argsort(np.concatenate(times), kind="stable")
    caller, at, size = (np.concatenate(c)[order] for c in (callers, times, sizes))
    cost = (size / 1_000) ** scenario.exponent * scenario.unit_ns + scenario.overhead_ns
    begin = np.empty(len(at), np.int64)
    queues = np.array([caller.queue for caller in scenario.callers])[caller]
    for queue in set(queues.tolist()):
        mine = queues == queue
        # A kernel begins when it is launched and the one before it is over.
        done = np.cumsum(cost[mine])
        slack = np.maximum.accumulate(at[mine] - (done - cost[mine]))
        begin[mine] = slack + done - cost[mine]
    return _Runs(caller, at, size, begin, begin + cost.astype(np.int64))


def _sample(scenario: Scenario, runs: _Runs) -> tuple[np.ndarray, np.ndarray]:
    """Returns the time and the run of each sample."""
    first = int(scenario.start_s * SECOND)
    ticks = np.arange(first, int(scenario.duration_s * SECOND), scenario.sample_ns)
    times, found = [], []
    queues = np.array([caller.queue for caller in scenario.callers])[runs.caller]
    for queue in sorted(set(queues.tolist())):
        mine = np.flatnonzero(queues == queue)
        at = np.searchsorted(runs.begin_ns[mine], ticks, side="right") - 1
        busy = (at >= 0) & (runs.end_ns[mine][np.maximum(at, 0)] > ticks)
        times.append(ticks[busy])
        found.append(mine[at[busy]])
    return np.concatenate(times), np.concatenate(found)


def _drop(
    scenario: Scenario, at: np.ndarray, run: np.ndarray, random: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    mixed = random.permutation(len(at))
    at, run = at[mixed], run[mixed]
    order = np.argsort(at // SECOND, kind="stable")
    second = at[order] // SECOND
    kept = order[np.arange(len(at)) - np.searchsorted(second, second) < scenario.most_samples]
    return at[kept], run[kept]


def _calls(scenario: Scenario, runs: _Runs, kernels: list[int], random: np.random.Generator):
    seen = runs.at_ns >= scenario.start_s * SECOND
    second = ((runs.at_ns - int(scenario.start_s * SECOND)) // SECOND)[seen]
    caller, size = runs.caller[seen], runs.size[seen]
    kept = random.random(len(caller)) >= scenario.lost
    rows = Counter[tuple[int, int]]()
    work = Counter[tuple[int, int]]()
    for key, n in zip(zip(second[kept], caller[kept], strict=True), size[kept], strict=True):
        rows[key] += 1
        work[key] += int(n)
    return np.array(
        [
            (at, who, 0, 0, kernels[who], 0, n, work[at, who] * scenario.says_work, 0)
            for (at, who), n in rows.items()
        ],
        CALL_DTYPE,
    )


def simulate(scenario: Scenario, seed: int = 1) -> Simulated:
    """Runs a scenario; the stack of a caller is its position."""
    random = np.random.default_rng(seed)
    runs = _launch(scenario, random)
    names = [("" if caller.unnamed else caller.kernel) for caller in scenario.callers]
    code_names = sorted({caller.kernel for caller in scenario.callers})
    # As in a capture: what is launched and what is sampled are rows of their own.
    kernels = tuple(
        Kernel(0, "opencl", name, "" if name else "made before the recording")
        for name in [*names, *code_names]
    )
    calls = _calls(scenario, runs, list(range(len(names))), random)

    at, run = _drop(scenario, *_sample(scenario, runs), random)
    offset = random.integers(0, _INSTRUCTIONS, len(at)) * 4
    reason = random.integers(0, _REASONS, len(at))
    stack = runs.caller[run]
    code = np.array([code_names.index(c.kernel) for c in scenario.callers])[stack]
    second = (at - int(scenario.start_s * SECOND)) // SECOND
    columns = np.stack((second, code, offset, reason), axis=1)
    keys, row = np.unique(columns, axis=0, return_inverse=True)
    truth: list[Counter[int]] = [Counter() for _ in keys]
    for sample, who in zip(row.ravel().tolist(), stack.tolist(), strict=True):
        truth[sample][who] += 1
    samples = np.zeros(len(keys), DEVICE_SAMPLE_DTYPE)
    for i, column in enumerate(("interval", "code", "offset", "reason")):
        samples[column] = keys[:, i]
    samples["stack"] = NONE
    samples["begin_ns"] = samples["interval"].astype(np.uint64) * SECOND
    samples["end_ns"] = samples["begin_ns"] + SECOND
    samples["count"] = [sum(counts.values()) for counts in truth]
    times = np.zeros(len(names), TIME_DTYPE)
    times["stack"] = times["kernel"] = np.arange(len(names))
    times["launches"] = np.bincount(runs.caller, minlength=len(names))
    times["time_ns"] = np.bincount(runs.caller, runs.end_ns - runs.begin_ns, len(names))
    gpu = GpuProfile(
        devices=(Device("opencl", "simulated", Tier.STALLS, "", scenario.sample_ns),),
        functions=(ApiFunction("opencl", "clEnqueueNDRangeKernel", Operation.LAUNCH),),
        kernels=kernels,
        codes=tuple(KernelCode(len(names) + i, None, 0) for i in range(len(code_names))),
        reasons=tuple(StallReason("opencl", f"reason{i}") for i in range(_REASONS)),
        calls=calls,
        samples=samples,
    )
    return Simulated(gpu, tuple(truth), times)


def attributed_by_stack(simulated: Simulated, rows: np.ndarray) -> list[Counter[int]]:
    """Returns what attribution gave to each stack, by sample; NONE is a stack like others."""
    found: list[Counter[int]] = [Counter() for _ in simulated.truth]
    for sample, stack, _, count in rows.tolist():
        found[sample][stack] += count
    return found


def error(simulated: Simulated, rows: np.ndarray, of_second: bool = False) -> float:
    """Returns the share of samples that are with the wrong stack, in the sum of the recording.

    This is the distance in total variation between the true shares of stacks and the found ones,
    kernel by kernel; with `of_second`, second by second as well.
    """
    samples = simulated.gpu.samples
    off: Counter[tuple[int, int, int]] = Counter()
    for i, (true, found) in enumerate(
        zip(simulated.truth, attributed_by_stack(simulated, rows), strict=True)
    ):
        where = (int(samples["code"][i]), int(samples["interval"][i]) if of_second else 0)
        for stack, count in true.items():
            off[(*where, stack)] += count
        for stack, count in found.items():
            off[(*where, stack)] -= count
    return sum(abs(n) for n in off.values()) / 2 / int(samples["count"].sum())


def without_work(simulated: Simulated) -> Simulated:
    """Returns the same recording of an API that does not say how much is launched."""
    calls = simulated.gpu.calls.copy()
    calls["work"] = 0
    return replace(simulated, gpu=replace(simulated.gpu, calls=calls))


RULES = ("count", "work", "time")


def attribute_by(simulated: Simulated, rule: str) -> np.ndarray:
    """Attributes by one of RULES."""
    seen = without_work(simulated) if rule == "count" else simulated
    times = simulated.times if rule == "time" else None
    return attribute(seen.gpu, times)


_SITES = (Caller(200, 3_000), Caller(200, 1_000))
# The mixture of the two changes from second to second.
_TURNS = (
    Caller(250, 3_000, period_s=7, share=0.6),
    Caller(250, 1_000, period_s=5, share=0.7, phase_s=2),
)
_MANY = tuple(
    Caller(
        rate_hz=6 + 5 * i,
        size=300 * (1 + i * 7 % 10),
        period_s=3 + i % 4,
        share=0.4 + 0.06 * i,
        phase_s=i / 3,
    )
    for i in range(10)
)

SCENARIOS = (
    Scenario("two call sites, sizes 3:1", _SITES),
    Scenario("two call sites, 130 samples", _SITES, sample_ns=100_000_000),
    Scenario("cost not linear, steady mixture", _SITES, exponent=1.5, unit_ns=200_000),
    Scenario("cost not linear, mixture changes", _TURNS, exponent=1.5, unit_ns=200_000),
    Scenario("linear cost, mixture changes", _TURNS),
    Scenario("linear cost, mixture changes, 130 samples", _TURNS, sample_ns=80_000_000),
    Scenario("cost independent of size", _TURNS, unit_ns=0, overhead_ns=900_000),
    Scenario(
        "sizes scatter, cost not linear",
        tuple(replace(c, spread=0.8) for c in _TURNS),
        exponent=1.5,
        unit_ns=200_000,
    ),
    Scenario("ten call sites", _MANY, unit_ns=500_000),
    Scenario("ten call sites, cost not linear", _MANY, exponent=1.5, unit_ns=300_000),
    Scenario("two queues side by side", (_TURNS[0], replace(_TURNS[1], queue=1)), unit_ns=600_000),
    Scenario("queue behind by some seconds", _TURNS, unit_ns=1_400_000),
    Scenario("device drops samples of busy seconds", _TURNS, most_samples=150),
    Scenario("late attach, all named", _TURNS, start_s=20.3),
    Scenario(
        "late attach, a third caller unnamed",
        (*_SITES, Caller(100, 2_000, unnamed=True)),
        start_s=10,
        unit_ns=250_000,
    ),
    Scenario("20 % of launches not counted", _TURNS, lost=0.2),
)


def table() -> str:
    """Returns the errors of all scenarios by all rules, each the worst of ten runs, in Markdown."""
    lines = [f"| scenario | samples | {' | '.join(RULES)} |", "|---" * (len(RULES) + 2) + "|"]
    for scenario in SCENARIOS:
        seeds = [simulate(scenario, seed) for seed in range(1, 11)]
        cells = [f"{int(seeds[0].gpu.samples['count'].sum()):,}"]
        for rule in RULES:
            worst = max(error(simulated, attribute_by(simulated, rule)) for simulated in seeds)
            cells.append(f"{100 * worst:.1f} %")
        lines.append(f"| {scenario.name} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(f"{table()}\n")
