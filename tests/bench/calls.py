# SPDX-License-Identifier: Apache-2.0
"""What bench records where Python is asked for: calls and little else.

    calls.py ROUNDS

Waits for a line, computes, and prints the seconds that took.
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
    start_s = time.monotonic()
    for _ in range(int(sys.argv[1])):
        fibonacci(20)
    print(f"{time.monotonic() - start_s:.6f}", flush=True)


if __name__ == "__main__":
    main()
