# SPDX-License-Identifier: Apache-2.0
"""Threads that wait in known lines, then two that share the GIL; each measures itself.

It has to run on CPython 3.8.
"""

import queue
import socket
import threading
import time

import pytruth

TIMES = 12
PAUSE_S = 0.02
measured = {}


def note(name, wall_ns, cpu_ns):
    measured[name + ".wall_ns"] = time.monotonic_ns() - wall_ns
    measured[name + ".cpu_ns"] = time.thread_time_ns() - cpu_ns


def measure(function, *arguments):
    wall_ns, cpu_ns = time.monotonic_ns(), time.thread_time_ns()
    function(*arguments)
    note(function.__name__, wall_ns, cpu_ns)


def nap():
    for _ in range(TIMES):
        time.sleep(PAUSE_S)  # at: nap


def take_lock(lock):
    for _ in range(TIMES):
        lock.acquire()  # at: take_lock


def receive(end):
    for _ in range(TIMES):
        end.recv(1)  # at: receive


def take_item(items):
    for _ in range(TIMES):
        items.get()  # at: take_item


def wait_in_all_ways():
    lock, items = threading.Lock(), queue.Queue()
    lock.acquire()
    near, far = socket.socketpair()
    waits = [(nap,), (take_lock, lock), (receive, near), (take_item, items)]
    threads = [threading.Thread(target=measure, args=wait) for wait in waits]
    for thread in threads:
        thread.start()
    for _ in range(TIMES):
        time.sleep(PAUSE_S)
        while not lock.locked():  # who takes it has had no processor since
            time.sleep(PAUSE_S)
        lock.release()
        far.send(b"x")
        items.put(0)
    for thread in threads:
        thread.join()


def share_gil(name, end_ns):
    wall_ns, cpu_ns = time.monotonic_ns(), time.thread_time_ns()
    while time.monotonic_ns() < end_ns:
        sum(range(200))
    note(name, wall_ns, cpu_ns)


def one_of_two(end_ns):
    share_gil("one", end_ns)


def other_of_two(end_ns):
    share_gil("other", end_ns)


def contend(wall_ms):
    end_ns = time.monotonic_ns() + wall_ms * 1_000_000
    threads = [threading.Thread(target=f, args=(end_ns,)) for f in (one_of_two, other_of_two)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def main():
    pytruth.begin()
    wait_in_all_ways()
    contend(800)
    pytruth.end(measured)


if __name__ == "__main__":
    main()
