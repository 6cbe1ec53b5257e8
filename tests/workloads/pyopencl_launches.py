# SPDX-License-Identifier: Apache-2.0
"""The OpenCL kernels of opencl.c, launched from Python functions; follows workloads/truth.h.

Needs pyopencl, which Debian has for its own interpreter. Argument: milliseconds to launch for.
"""

from __future__ import annotations

import signal
import sys
import time

import numpy as np
import pyopencl as cl

ITEMS, ROUNDS = 4096, 500

SOURCE = """
__kernel void scale(__global float *data, int rounds)
{
    float value = data[get_global_id(0)];
    for (int i = 0; i < rounds; i++)
        value = value * 0.999f + 0.5f;
    data[get_global_id(0)] = value;
}

__kernel void divide(__global float *data, int rounds)
{
    float value = data[get_global_id(0)];
    for (int i = 0; i < rounds; i++)
        value = 7.0f / (value + 1.0f);
    data[get_global_id(0)] = value;
}

__kernel void stir(__global float *data, int rounds)
{
    uint value = get_global_id(0);
    for (int i = 0; i < rounds; i++)
        value = value * 1664525u + 1013904223u;
    data[get_global_id(0)] = value;
}
"""


def scale_most() -> None:
    scale(queue, (3 * ITEMS,), None, data, rounds).wait()


def scale_rest() -> None:
    scale(queue, (ITEMS,), None, data, rounds).wait()


def divide_all() -> None:
    divide(queue, (ITEMS,), None, data, rounds).wait()


def stir_all() -> None:
    stir(queue, (ITEMS,), None, data, rounds).wait()


SITES = (scale_most, scale_rest, divide_all, stir_all)

signal.alarm(100)  # a test that fails must not leave this behind
context = cl.create_some_context(interactive=False)
queue = cl.CommandQueue(context)
data = cl.Buffer(context, cl.mem_flags.READ_WRITE, 3 * ITEMS * 4)
rounds = np.int32(ROUNDS)
program = cl.Program(context, SOURCE).build(cache_dir=False)
scale, divide, stir = program.scale, program.divide, program.stir
for site in SITES:
    site()
print("ready", flush=True)
if not sys.stdin.readline():
    sys.exit()
counts = dict.fromkeys(SITES, 0)
until = time.monotonic() + int(sys.argv[1]) / 1000
while time.monotonic() < until:
    for site in SITES:
        site()
        counts[site] += 1
for site, count in counts.items():
    print(f"{site.__name__}.launches {count}")
print("done", flush=True)
sys.stdin.read()
