# SPDX-License-Identifier: Apache-2.0
"""Captures kernels from Python functions into a CUDA graph, which it replays; follows truth.h.

norm() and attention() capture the same kernel, mlp() leaves it to C. Arguments: cudagraph.cu as a
library, how often the graph is launched, microseconds of each of the three.
"""

from __future__ import annotations

import ctypes
import signal
import sys

library = ctypes.CDLL(sys.argv[1])
rounds, norm_us, attention_us, mlp_us = map(int, sys.argv[2:])


def norm() -> None:
    library.run_scale(norm_us)


def attention() -> None:
    library.run_scale(attention_us)


def mlp() -> None:
    library.mlp_forward(mlp_us)


def build() -> None:
    if library.begin_capture():
        sys.exit("capture")
    norm()
    attention()
    mlp()
    if library.end_capture():
        sys.exit("graph")


def replay() -> None:
    library.launch_graph()


def main() -> None:
    signal.alarm(100)  # a test that fails must not leave this behind
    if library.prepare():
        sys.exit("stream")
    print("ready", flush=True)
    sys.stdin.readline()
    build()
    for number in range(rounds):
        replay()
        if number % 10 == 9:
            library.wait()
    library.wait()
    print(f"graph.ns {rounds * (norm_us + attention_us + mlp_us) * 1000}")
    print("done", flush=True)
    sys.stdin.read()


main()
