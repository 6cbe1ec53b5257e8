# SPDX-License-Identifier: Apache-2.0
"""A Python program that is asked to run scripts, and counts what comes of it; for 3.14 and later.

Arguments are what its main thread does until standard input ends: "runs" Python, "naps" of 5 ms,
"sleeps" until the end, or "edges": comes by once in 1 s, the time for which it is asked. Others run
Python as well, of threads as many as the second argument says.
"""

import sys
import threading
import time

ending = threading.Event()
way, count = sys.argv[1], int(sys.argv[2])
rounds = [0] * (count + 1)


def compute(at):
    total = sum(n * n for n in range(100))
    assert total == 328350, total
    rounds[at] += 1


def repeat(at):
    while not ending.is_set():
        compute(at)
        time.sleep(0.001)


def await_end():
    sys.stdin.read()
    ending.set()


threading.Thread(target=await_end, daemon=True).start()
threads = [threading.Thread(target=repeat, args=(at,)) for at in range(1, count + 1)]
for thread in threads:
    thread.start()
print("ready", flush=True)
while not ending.is_set():
    if way == "sleeps":
        ending.wait()
    elif way == "naps":
        time.sleep(0.005)
    elif way == "edges":
        time.sleep(1)
    compute(0)
# Whatever was asked for and not taken back is run now.
for _ in range(1000):
    compute(0)
for thread in threads:
    thread.join()
print("OK", " ".join(f"thread{at}={found}" for at, found in enumerate(rounds)), flush=True)
