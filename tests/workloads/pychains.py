# SPDX-License-Identifier: Apache-2.0
"""Runs a program that tests/pychains.py wrote: file name, CPU milliseconds. CPython 3.8 on."""

import sys
import time
from pathlib import Path

import pytruth


def work(function, cpu_ms):
    end_ns = time.thread_time_ns() + cpu_ms * 1_000_000
    x = 1
    while time.thread_time_ns() < end_ns:
        x = function(x)


def main():
    names = {"__name__": "chains"}
    exec(compile(Path(sys.argv[1]).read_text(), "<chains>", "exec"), names)  # noqa: S102
    pytruth.begin()
    work(names["f_0000"], int(sys.argv[2]))
    pytruth.end({})


if __name__ == "__main__":
    main()
