# SPDX-License-Identifier: Apache-2.0
"""A program that uses an NVIDIA device and says how long its steps take.

Arguments: what it does (a function below, by its name), a file to which it appends a line for each
step: when it ended (monotonic ns), how long it took (ns), and launches since the beginning where
it counts them; and the device of PyTorch, "cuda" if not said: with "cpu", what needs no device can
be tried anywhere, on a small model. It runs until it gets a signal. Where something is not
installed, it says so and ends with the status ABSENT.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

ABSENT = 77  # as automake's tests say it
NEEDS = "is not installed"

# Of a model: large enough that a step is a few milliseconds on a device of 2024.
_WIDTH, _BATCH, _LAYERS = 4096, 1024, 8
# Without a device: the code runs.
_SMALL_WIDTH, _SMALL_BATCH = 64, 8
# Of `launches`: in a step.
_LAUNCHES = 2000
_SIZE = 256

device = "cuda"


class AbsentError(Exception):
    """Something that is not here."""


def _synchronize() -> None:
    import torch

    if device == "cuda":
        torch.cuda.synchronize()


def _model() -> tuple[object, object, object]:
    import torch

    width, batch = (_WIDTH, _BATCH) if device == "cuda" else (_SMALL_WIDTH, _SMALL_BATCH)
    layers = []
    for _ in range(_LAYERS):
        layers += [torch.nn.Linear(width, width), torch.nn.GELU(), torch.nn.LayerNorm(width)]
    model = torch.nn.Sequential(*layers).to(device).bfloat16()
    data = torch.randn(batch, width, device=device, dtype=torch.bfloat16)
    return model, torch.optim.SGD(model.parameters(), lr=1e-4), data


def train() -> Iterator[int]:
    """Steps of training, eager."""
    model, optimizer, data = _model()
    while True:
        optimizer.zero_grad()
        model(data).float().pow(2).mean().backward()
        optimizer.step()
        _synchronize()
        yield 0


def infer() -> Iterator[int]:
    """Inference, eager."""
    import torch

    model, _, data = _model()
    with torch.no_grad():
        while True:
            model(data)
            _synchronize()
            yield 0


def compiled() -> Iterator[int]:
    """Inference by torch.compile: kernels of Triton."""
    import torch

    model, _, data = _model()
    fast = torch.compile(model)
    with torch.no_grad():
        while True:
            fast(data)
            _synchronize()
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
            _synchronize()
            yield 0


def triton() -> Iterator[int]:
    """A kernel in Triton's language."""
    import torch
    import triton_kernel

    data, other = (torch.randn(1 << 22, device=device) for _ in range(2))
    while True:
        for _ in range(10):
            triton_kernel.launch(data, other)
        _synchronize()
        yield 0


def captures() -> Iterator[int]:
    """Captures a graph in each step: what asks the driver to wait meanwhile breaks it."""
    import torch

    data = torch.randn(_SIZE, _SIZE, device=device)
    while True:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            (data @ data).sin_()
        graph.replay()
        _synchronize()
        yield 0


def launches() -> Iterator[int]:
    """Launches of a tiny kernel, as fast as they go; it counts them."""
    import torch

    data = torch.zeros(_SIZE, device=device)
    count = 0
    while True:
        for _ in range(_LAUNCHES):
            data.add_(1.0)
        _synchronize()
        count += _LAUNCHES
        yield count


def forks() -> Iterator[int]:
    """Steps of training, with a child of each that ends at once."""
    for _ in train():
        child = os.fork()
        if not child:
            os._exit(0)
        os.waitpid(child, 0)
        yield 0


def profiled() -> Iterator[int]:
    """Steps under PyTorch's own profiler, which has CUPTI first."""
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]):
        yield from train()


def subscribed() -> Iterator[int]:
    """Steps beside a subscriber of CUPTI by its first interface, which lets in nobody else."""
    yield from _subscribed(lambda cupti, handle: cupti.cuptiSubscribe(handle, _ignore, None))


def subscribed_v2() -> Iterator[int]:
    """Steps beside one by the second, which lets others in."""

    def subscribe(cupti: ctypes.CDLL, handle: object) -> int:
        if not hasattr(cupti, "cuptiSubscribe_v2"):
            raise AbsentError("this CUPTI has no cuptiSubscribe_v2")
        wanted = _SubscriberParams(ctypes.sizeof(_SubscriberParams), b"a test", None, 0, 1)
        return int(cupti.cuptiSubscribe_v2(handle, _ignore, None, ctypes.byref(wanted)))

    yield from _subscribed(subscribe)


class _SubscriberParams(ctypes.Structure):
    """CUpti_SubscriberParams of cupti_callbacks.h, 13.5."""

    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("name", ctypes.c_char_p),
        ("old_name", ctypes.c_char_p),
        ("old_size", ctypes.c_size_t),
        ("allow_multiple", ctypes.c_uint8),
    )


# void (void *userdata, CUpti_CallbackDomain, CUpti_CallbackId, const void *): nothing is enabled.
_ignore = ctypes.CFUNCTYPE(
    None, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint32, ctypes.c_void_p
)(lambda *_: None)


def _subscribed(subscribe: Callable[[ctypes.CDLL, object], int]) -> Iterator[int]:
    import torch  # noqa: F401 - it brings CUPTI

    maps = Path("/proc/self/maps").read_text().splitlines()
    found = {line.split()[-1] for line in maps if "/libcupti.so" in line}
    if not found:
        raise AbsentError("this PyTorch brings no CUPTI")
    handle = ctypes.c_void_p()
    if error := subscribe(ctypes.CDLL(found.pop()), ctypes.byref(handle)):
        raise RuntimeError(f"CUPTI lets nobody subscribe: {error}")
    yield from train()


MODES: dict[str, Callable[[], Iterator[int]]] = {
    one.__name__: one
    for one in (
        *(train, infer, compiled, graphs, triton, captures, launches, forks),
        *(profiled, subscribed, subscribed_v2),
    )
}


def main(mode: str, steps: Path) -> None:
    """Runs until it gets a signal."""
    with steps.open("a", buffering=1) as file:
        before_ns = time.monotonic_ns()
        for count in MODES[mode]():
            now_ns = time.monotonic_ns()
            file.write(f"{now_ns} {now_ns - before_ns} {count}\n")
            before_ns = time.monotonic_ns()


if __name__ == "__main__":
    # The interpreter's own end, with all that libraries do then.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    device = sys.argv[3] if len(sys.argv) > 3 else device
    try:
        main(sys.argv[1], Path(sys.argv[2]))
    except ModuleNotFoundError as error:
        sys.stderr.write(f"{error.name} {NEEDS}\n")
        sys.exit(ABSENT)
    except AbsentError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(ABSENT)
