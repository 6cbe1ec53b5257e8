# SPDX-License-Identifier: Apache-2.0
"""A program that uses an NVIDIA device and says how long its steps take.

Arguments: what it does (a function below, by its name), and a file to which it appends a line for
each step: when it ended (monotonic ns), how long it took (ns), and launches since the beginning
where it counts them. It runs until it is killed.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

# Of a model: large enough that a step is a few milliseconds on a device of 2024.
_WIDTH, _BATCH, _LAYERS = 4096, 1024, 8
# Of `launches`: in a step.
_LAUNCHES = 2000
_SIZE = 256


def _model() -> tuple[object, object, object]:
    import torch

    layers = []
    for _ in range(_LAYERS):
        layers += [torch.nn.Linear(_WIDTH, _WIDTH), torch.nn.GELU(), torch.nn.LayerNorm(_WIDTH)]
    model = torch.nn.Sequential(*layers).cuda().bfloat16()
    data = torch.randn(_BATCH, _WIDTH, device="cuda", dtype=torch.bfloat16)
    return model, torch.optim.SGD(model.parameters(), lr=1e-4), data


def train() -> Iterator[int]:
    """Steps of training, eager."""
    import torch

    model, optimizer, data = _model()
    while True:
        optimizer.zero_grad()
        model(data).float().pow(2).mean().backward()
        optimizer.step()
        torch.cuda.synchronize()
        yield 0


def compiled() -> Iterator[int]:
    """Inference by torch.compile: kernels of Triton."""
    import torch

    model, _, data = _model()
    fast = torch.compile(model)
    with torch.no_grad():
        while True:
            fast(data)
            torch.cuda.synchronize()
            yield 0


def graphs() -> Iterator[int]:
    """Inference by replays of a CUDA graph."""
    import torch

    model, _, data = _model()
    with torch.no_grad():
        for _ in range(3):
            model(data)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            model(data)
        while True:
            for _ in range(10):
                graph.replay()
            torch.cuda.synchronize()
            yield 0


def captures() -> Iterator[int]:
    """Captures a graph in each step: what asks the driver to wait meanwhile breaks it."""
    import torch

    data = torch.randn(_SIZE, _SIZE, device="cuda")
    while True:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            (data @ data).sin_()
        graph.replay()
        torch.cuda.synchronize()
        yield 0


def launches() -> Iterator[int]:
    """Launches of a tiny kernel, as fast as they go; it counts them."""
    import torch

    data = torch.zeros(_SIZE, device="cuda")
    count = 0
    while True:
        for _ in range(_LAUNCHES):
            data.add_(1.0)
        torch.cuda.synchronize()
        count += _LAUNCHES
        yield count


def profiled() -> Iterator[int]:
    """Steps under PyTorch's own profiler, which has CUPTI first."""
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]):
        yield from train()


_MODES: dict[str, Callable[[], Iterator[int]]] = {
    one.__name__: one for one in (train, compiled, graphs, captures, launches, profiled)
}


def main(mode: str, steps: Path) -> None:
    """Runs until it is killed."""
    with steps.open("a", buffering=1) as file:
        before_ns = time.monotonic_ns()
        for count in _MODES[mode]():
            now_ns = time.monotonic_ns()
            file.write(f"{now_ns} {now_ns - before_ns} {count}\n")
            before_ns = time.monotonic_ns()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
