# SPDX-License-Identifier: Apache-2.0
"""Greenlets that work and wait in turns, each begun at another depth of the C stack."""

import time

import pytruth
from greenlet import getcurrent, greenlet

_MS = 1_000_000
ROUNDS = 40


def burn():
    end_ns = time.thread_time_ns() + 5 * _MS
    while time.thread_time_ns() < end_ns:
        pass


def wait():
    time.sleep(0.005)


def first(main):
    while True:
        burn()
        second.switch(main)


def second_greenlet(main):
    # Each switch goes through C: `max` calls it, and a second eval loop runs on the C stack.
    return max([0], key=lambda _: in_second(main))


def in_second(main):
    while True:
        burn()
        wait()
        main.switch()


def begin_deep_down(depth):
    """Lets the first greenlet begin where the C stack has frames that main() does not have."""
    if depth:
        return min([0], key=lambda _: begin_deep_down(depth - 1))
    return one.switch(getcurrent())


def work():
    begin_deep_down(4)
    for _ in range(ROUNDS):
        burn()
        one.switch()


one, second = greenlet(first), greenlet(second_greenlet)


def main():
    pytruth.begin()
    begin_ns = time.thread_time_ns()
    work()
    pytruth.end({"cpu_ns": time.thread_time_ns() - begin_ns})


if __name__ == "__main__":
    main()
