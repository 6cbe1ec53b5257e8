# SPDX-License-Identifier: Apache-2.0
"""What bench records where Python is asked for: calls and little else.

    calls.py ROUNDS

Waits for a line, computes, and prints the seconds that took, by the wall clock and of CPU time.
"""

import sys
import time


def fibonacci(n: int) -> int:
    """The slow way: a call for each addition."""
    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)


def main() -> None:
    """Computes ROUNDS times the same."""
    print("ready", flush=True)
    sys.stdin.readline()
    start_s, start_cpu_s = time.monotonic(), time.process_time()
    for _ in range(int(sys.argv[1])):
        fibonacci(20)
    took_s, took_cpu_s = time.monotonic() - start_s, time.process_time() - start_cpu_s
    print(f"{took_s:.6f} {took_cpu_s:.6f}", flush=True)


if __name__ == "__main__":
    main()
