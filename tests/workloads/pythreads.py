# SPDX-License-Identifier: Apache-2.0
"""Many sleeping threads, a thread that Python knows nothing of, and children of two kinds.

It has to run on CPython 3.8.
"""

import faulthandler
import multiprocessing
import pathlib
import sys
import threading
import time

import pytruth

THREADS = 500
# What time.sleep() calls in one version or another: select, pselect6, nanosleep, clock_nanosleep
# (arch/x86/entry/syscalls/syscall_64.tbl). Who waits for the GIL calls futex.
SLEEPING = {"23", "270", "35", "230"}
LONG_S = 90


class Sleeper:
    def outer(self, entered):
        return [self.inner(entered) for _ in range(1)]  # at: outer

    def inner(self, entered):
        entered.release()  # at: entering
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


def is_sleeping(task):
    return (task / "syscall").read_text().partition(" ")[0] in SLEEPING  # proc_pid_syscall(5)


def sleep_all():
    threading.stack_size(256 * 1024)
    entered = threading.Semaphore(0)
    for _ in range(THREADS):
        threading.Thread(target=Sleeper().outer, args=(entered,), daemon=True).start()
    for _ in range(THREADS):
        entered.acquire()
    # Beside much other work the last of them are still on their way.
    while sum(map(is_sleeping, pathlib.Path("/proc/self/task").iterdir())) < THREADS:
        time.sleep(0.05)


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
    # Long enough to enter all that sleep since before, beside much other work.
    time.sleep(2 if sys.argv[1] == "asleep" else 0.1)
    pytruth.end(measured)


if __name__ == "__main__":
    main()
