# SPDX-License-Identifier: Apache-2.0
"""The error that is told of shared samples, against the error that there is."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from aiflame.agent.model.gpu import GpuProfile, SharingError
from aiflame.gpu.attribution import attribution_of
from test_gpu_timeline import _A, _MS, _Q, Launch, profile

_STACKS = 3
_SAMPLE_NS = 2 * _MS


@dataclass(frozen=True)
class Queued:
    """A queue that takes launches of several stacks in a random order, some at a time.

    Attributes:
        took_ms: What a launch of each stack takes, in the mean.
        work: Its work items.
        depth: Launches that are awaited at once.
        stretches: How often.
        scatter: By which part of its time a launch's time scatters.
    """

    took_ms: tuple[float, ...] = (3.0, 1.0, 3.0)
    work: tuple[int, ...] = (300, 100, 300)
    depth: int = 8
    stretches: int = 60
    scatter: float = 0.1

    def run(self, seed: int) -> tuple[GpuProfile, list[int]]:
        """Returns a profile, and who launched each of its samples."""
        random = np.random.default_rng(seed)
        launches: list[Launch] = []
        truth, at_ns = [], 0.0
        samples, next_ns = [], 0.0
        for _ in range(self.stretches):
            stacks = random.integers(0, _STACKS, self.depth).tolist()
            took_ns = [
                self.took_ms[stack] * _MS * max(random.normal(1, self.scatter), 0.1)
                for stack in stacks
            ]
            end_ns = at_ns + sum(took_ns)
            for number, stack in enumerate(stacks):
                launches.append((int(at_ns) + number, int(end_ns), stack, _A, _Q))
            for stack, own_ns in zip(stacks, took_ns, strict=True):
                at_ns += own_ns
                while next_ns < at_ns:
                    samples.append((int(next_ns), _A))
                    truth.append(stack)
                    next_ns += _SAMPLE_NS * random.uniform(0.8, 1.2)
        return profile(launches, samples, dict(enumerate(self.work))), truth


def _off(gpu: GpuProfile, truth: list[int]) -> tuple[float, SharingError]:
    """Returns which part of samples is with the wrong stack in all, and what is told of it."""
    attribution = attribution_of(gpu)
    given = np.bincount(attribution.rows["stack"], attribution.rows["count"], _STACKS)
    right = np.bincount(truth, minlength=_STACKS)
    return float(abs(given - right).sum() / 2 / len(truth)), attribution.error


@pytest.mark.parametrize(
    "program",
    [
        Queued(),
        Queued(stretches=15),
        Queued(took_ms=(0.3, 0.1, 0.3), depth=32),
        Queued(took_ms=(60.0, 20.0, 60.0), stretches=20),
        Queued(scatter=0.4),
        Queued(work=(100, 100, 100)),
        Queued(work=(100, 100, 100), took_ms=(60.0, 20.0, 60.0), stretches=30),
    ],
    ids=["queued", "few stretches", "small", "long", "scattered", "unequal", "unequal, long"],
)
def test_error_is_told_within_a_factor_of_two(program: Queued) -> None:
    runs = [_off(*program.run(seed)) for seed in range(20)]
    # One run's error is by chance: they are compared in the mean.
    true = float(np.mean([off for off, _ in runs]))
    told = float(np.mean([error.expected for _, error in runs]))
    assert true / 2 < told < max(2 * true, 0.005), (true, told)


def test_what_is_exact_has_no_error() -> None:
    launches = [(i * 10 * _MS, (i + 1) * 10 * _MS, 1 + i % 2, _A, _Q) for i in range(6)]
    gpu = profile(launches, [(at * _MS, _A) for at in (15, 19, 21, 35, 45, 58)])
    assert attribution_of(gpu).error == SharingError(0.0, 0.0)


def test_costs_that_nothing_tells_have_an_error_of_their_own() -> None:
    # GIVEN stretches that are all alike, of launches with equal work, of which some take longer
    launches: list[Launch] = []
    samples, truth = [], []
    for i in range(50):
        at, end = i * 40 * _MS, (i + 1) * 40 * _MS
        launches += [(at, end, 0, _A, _Q), (at + 1, end, 1, _A, _Q)]
        samples += [(at + ms * _MS, _A) for ms in range(0, 40, 2)]
        truth += [0] * 15 + [1] * 5
    off, error = _off(profile(launches, samples, {0: 100, 1: 100}), truth)
    # THEN what is expected is little, and that it may be more is told
    assert error.expected < 0.02
    assert off / 2 < error.if_unequal < off * 2
