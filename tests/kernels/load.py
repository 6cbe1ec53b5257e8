# SPDX-License-Identifier: Apache-2.0
"""What is recorded of Python in a guest: a thread that computes, and one that sleeps.

It follows the protocol of load.c.
"""

import random
import select
import sys
import threading
import time

CPU_NS = 2_000_000_000
NAPS, NAP_S = 29, 0.05

measured = {"spend_three": 0, "spend_one": 0}


def spend_three(rounds: int) -> None:
    measured["spend_three"] += rounds
    for _ in range(rounds):
        sum(range(2000))


def spend_one(rounds: int) -> None:
    measured["spend_one"] += rounds
    for _ in range(rounds):
        sum(range(2000))


def settle() -> None:
    while not select.select([sys.stdin], [], [], 0.02)[0]:
        sum(range(20000))
    sys.stdin.readline()


def compute() -> None:
    measured["shares.tid"] = threading.get_native_id()
    # Turns of random length: the sampling clock cannot fall in step.
    turns = random.Random(1)
    while time.thread_time_ns() < CPU_NS:
        rounds = turns.randint(5, 15)
        spend_three(3 * rounds)
        spend_one(rounds)


def take_naps() -> None:
    measured["naps.tid"] = threading.get_native_id()
    wall_ns, cpu_ns = time.monotonic_ns(), time.thread_time_ns()
    for _ in range(NAPS):
        time.sleep(NAP_S)
    measured["take_naps.wall_ns"] = time.monotonic_ns() - wall_ns
    measured["take_naps.cpu_ns"] = time.thread_time_ns() - cpu_ns


print("ready", flush=True)
sys.stdin.readline()
settle()
threads = [threading.Thread(target=target) for target in (compute, take_naps)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
for name, value in {**measured, "naps": NAPS}.items():
    print(name, value)
print("done", flush=True)
sys.stdin.read()
