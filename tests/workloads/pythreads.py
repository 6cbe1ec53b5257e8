# SPDX-License-Identifier: Apache-2.0
"""Many sleeping threads, a thread that Python knows nothing of, and children of two kinds.

It has to run on CPython 3.8.
"""

import faulthandler
import multiprocessing
import sys
import threading
import time

import pytruth

THREADS = 500
LONG_S = 90


class Sleeper:
    def outer(self, entered):
        return [self.inner(entered) for _ in range(1)]  # at: outer

    def inner(self, entered):
        entered.release()
        time.sleep(LONG_S)  # at: inner


def compute(queue, cpu_ms):
    spin(cpu_ms)
    queue.put(time.thread_time_ns())
    # Until it is recorded what it was called.
    queue.cancel_join_thread()
    time.sleep(LONG_S)


def spin(cpu_ms):
    end_ns = time.thread_time_ns() + cpu_ms * 1_000_000
    while time.thread_time_ns() < end_ns:
        sum(range(300))  # at: spin


def forked(queue, cpu_ms):
    compute(queue, cpu_ms)


def spawned(queue, cpu_ms):
    compute(queue, cpu_ms)


def sleep_all():
    threading.stack_size(256 * 1024)
    entered = threading.Semaphore(0)
    for _ in range(THREADS):
        threading.Thread(target=Sleeper().outer, args=(entered,), daemon=True).start()
    for _ in range(THREADS):
        entered.acquire()


def have_children(cpu_ms):
    measured = {}
    for method, function in (("fork", forked), ("spawn", spawned)):
        context = multiprocessing.get_context(method)
        queue = context.Queue()
        child = context.Process(target=function, args=(queue, cpu_ms), daemon=True)
        child.start()
        measured[method + ".cpu_ns"] = queue.get()
        measured[method + ".pid"] = child.pid
    return measured


def main():
    if sys.argv[1] == "asleep":
        sleep_all()
    pytruth.begin()
    measured = {}
    if sys.argv[1] == "children":
        measured = have_children(int(sys.argv[2]))
    elif sys.argv[1] == "sleepers":
        sleep_all()
    # A thread in C, without a thread state.
    faulthandler.dump_traceback_later(LONG_S)
    time.sleep(0.1)
    pytruth.end(measured)


if __name__ == "__main__":
    main()
