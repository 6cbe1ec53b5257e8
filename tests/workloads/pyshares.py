# SPDX-License-Identifier: Apache-2.0
"""Spends CPU time in known functions and lines, and measures how much in each.

The time is known of lines with an `# at:` remark, all lines of the same remark together.
It has to run on CPython 3.8.
"""

import random
import sys
import time

import pytruth

now = time.thread_time_ns
spent = {}
NUMBERS = [*range(2000)]
DEPTH = 12


def note(name, since):
    spent[name] = spent.get(name, 0) + now() - since


def a(rounds):
    begin = now()
    for i in range(rounds * 30):  # at: first
        _ = i * i % 7  # at: first
    note("first", begin)
    begin = now()
    for i in range(rounds * 20):  # at: second
        _ = i * i % 7  # at: second
    note("second", begin)


def b(rounds):
    begin = now()
    for _ in range(rounds):
        sum(NUMBERS)  # at: in_c
    note("in_c", begin)


class Class:
    def c(self, rounds):
        for part in (self.generates, self.calls_lambda, self.sorts, self.recurses):
            part(rounds)

    def generates(self, rounds):
        begin = now()
        for _ in self.numbers(rounds):  # at: generates
            pass  # at: generates
        note("generates", begin)

    def numbers(self, rounds):
        for i in range(rounds):
            for k in range(60):  # at: numbers
                _ = i * k % 7  # at: numbers
            yield i

    def calls_lambda(self, rounds):
        begin = now()
        spin = lambda i: [i * k % 7 for k in range(50)]  # at: lambda  # noqa: E731
        for i in range(rounds):  # at: calls_lambda
            spin(i)  # at: calls_lambda
        note("calls_lambda", begin)

    def sorts(self, rounds):
        begin = now()
        sorted(range(rounds * 3), key=self.key)  # at: sorts
        note("sorts", begin)

    @staticmethod
    def key(i):
        for k in range(18):  # at: key
            _ = i * k % 7  # at: key
        return -i

    def recurses(self, rounds, depth=DEPTH):
        if depth > 1:
            return self.recurses(rounds, depth - 1)  # at: recurses
        begin = now()
        for i in range(rounds * 40):  # at: deepest
            _ = i * i % 7  # at: deepest
        return note("deepest", begin)


def work(cpu_ms):
    # Of uneven lengths, so that they cannot keep step with the clock that samples.
    choose = random.Random(1)
    one = Class()
    begin = now()
    while now() - begin < cpu_ms * 1_000_000:
        a(choose.randint(300, 1100))
        b(choose.randint(35, 120))
        one.c(choose.randint(30, 110))
    note("all", begin)


def main():
    pytruth.begin()
    work(int(sys.argv[1]))
    pytruth.end(spent)


if __name__ == "__main__":
    main()
