# SPDX-License-Identifier: Apache-2.0
"""A Python program into which libraries are loaded, as injectee.c is; for Python 3.8 and later.

Arguments: how long each thread rests after each round, in seconds, none by default.
"""

import ctypes
import hashlib
import sys
import threading
import time

ending = threading.Event()
rest_s = float(sys.argv[1]) if sys.argv[1:] else 0
rounds = {"hash": 0, "recurse": 0, "nap": 0, "wait": 0, "load": 0}


def fail(what):
    print("BAD", what, flush=True)
    ending.set()


def hashes():
    digest = hashlib.sha256(b"".join(bytes([n]) * 1000 for n in range(256))).hexdigest()
    if digest != "110552caf70d9c7764ff1b6885bb0ef4a9d7464bdf702ad602d924bcb6250de4":
        fail(f"hash {digest}")


def depth(left):
    return 0 if not left else 1 + depth(left - 1)


def recurses():
    sums = sum(depth(n) / 7 for n in range(0, 200, 20))
    if round(sums, 6) != round(900 / 7, 6):
        fail(f"sum {sums}")


def naps():
    begun = time.monotonic()
    time.sleep(0.01)
    if time.monotonic() - begun < 0.01:
        fail("short nap")


def waits():
    if threading.Event().wait(0.01):
        fail("woken")


def loads():
    ctypes.CDLL("libutil.so.1")


def repeat(name, act):
    while not ending.is_set():
        act()
        rounds[name] += 1
        if rest_s:
            time.sleep(rest_s)


def await_end():
    sys.stdin.read()
    ending.set()


acts = {"hash": hashes, "recurse": recurses, "nap": naps, "wait": waits, "load": loads}
threads = [threading.Thread(target=repeat, args=pair) for pair in acts.items()]
for thread in threads:
    thread.start()
threading.Thread(target=await_end, daemon=True).start()
print("ready", flush=True)
for thread in threads:
    thread.join()
print("OK", *(f"{name}={count}" for name, count in rounds.items()), flush=True)
