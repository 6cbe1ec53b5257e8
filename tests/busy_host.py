# SPDX-License-Identifier: Apache-2.0
"""What a busy host has to push of a minute: batches of many containers, made by arithmetic."""

from __future__ import annotations

import numpy as np
from aiflame.agent.model.batch import Batch, Labels
from aiflame.agent.model.profile import (
    FRAME_DTYPE,
    SAMPLE_DTYPE,
    WAIT_DTYPE,
    Binary,
    FrameKind,
    Function,
    Profile,
    SampleClass,
    Stacks,
    StopReason,
)
from profiles import MS, RECORDING, process
from profiles import THREADS as _THREADS

BEGIN_NS = RECORDING.started_unix_ns
MINUTE_NS = 60_000 * MS

_FUNCTIONS = 800
_FRAMES = 4_000
_BINARIES = tuple(Binary(f"/usr/lib/x86_64-linux-gnu/lib{i}.so.1", f"{i:040x}") for i in range(40))


def _function(i: int) -> Function:
    if i % 4 == 0:
        return Function(FrameKind.PYTHON, f"Module{i}.forward", None, f"/app/model/layer_{i}.py")
    if i % 7 == 0:
        return Function(FrameKind.KERNEL, f"do_something_{i}", 0, "")
    name = f"at::native::(anonymous namespace)::kernel_{i}<float, {i}>(at::TensorIterator&)"
    return Function(FrameKind.NATIVE, name, i % len(_BINARIES), f"/src/aten/src/native_{i}.cpp")


def busy_profile(container: int, stacks: int, depth: int, inlined: bool = True) -> Profile:
    """A container's minute: half of its stacks ran, half were blocked, all of them distinct."""
    rng = np.random.default_rng(container)
    frames = np.zeros(_FRAMES, FRAME_DTYPE)
    frames["function"] = np.arange(_FRAMES) % _FUNCTIONS
    frames["line"] = np.arange(_FRAMES) % 997
    frames["address"] = 0x1000 + np.arange(_FRAMES, dtype=np.uint64) * 16
    frames["inlined"] = inlined & (np.arange(_FRAMES) % 10 == 9)
    # As in a program, few differ near the root.
    spread = np.linspace(2, _FRAMES, depth).astype(np.int64)
    of_stacks = (rng.random((stacks, depth)) * spread).astype(np.uint32)
    samples = np.zeros(2 * stacks, SAMPLE_DTYPE)
    samples["stack"] = np.arange(2 * stacks) % stacks
    samples["thread"] = np.arange(2 * stacks) % len(_THREADS)
    is_off = samples["stack"] % 2 == 1
    samples["klass"] = np.where(is_off, SampleClass.BLOCKED, SampleClass.ON_CPU)
    samples["count"] = 1 + np.arange(2 * stacks) % 50
    samples["ns"] = samples["count"] * np.uint64(RECORDING.period_ns)
    return Profile(
        recording=RECORDING,
        processes=(process(), process(200, "client")),
        threads=_THREADS,
        binaries=_BINARIES,
        functions=tuple(map(_function, range(_FUNCTIONS))),
        frames=frames,
        stacks=Stacks(
            np.arange(stacks + 1, dtype=np.uint64) * np.uint64(depth),
            of_stacks.ravel(),
            np.full(stacks, StopReason.ROOTED, np.uint8),
        ),
        samples=samples,
        waits=np.zeros(0, WAIT_DTYPE),
    )


def busy_host(containers: int = 10, stacks: int = 4_000, depth: int = 40) -> list[Batch]:
    """Batches of a minute of a host, with so many stacks in all."""
    return [
        Batch(
            Labels(
                service=f"service-{i}",
                container_id=f"{i:064x}",
                container="main",
                node="node-1",
                namespace="default",
                pod=f"service-{i}-7d4b9c",
            ),
            busy_profile(i, stacks // containers, depth),
            BEGIN_NS,
            MINUTE_NS,
        )
        for i in range(containers)
    ]
