# SPDX-License-Identifier: Apache-2.0
"""What bench records where many threads call PyTorch: most of them wait, a few work.

    batons.py THREADS LAPS

Four batons go round the threads; one that holds a baton makes some steps and hands it on to the
fourth thread after it. So the amount of work is fixed, whoever runs when, and no more than four
threads fight for the GIL: with all of them at once the same work takes a quarter more or less from
run to run.

For each line that it reads, it lets every thread work LAPS times and prints the seconds that took,
by the wall clock and by the clock of the process's CPU time.
"""

import sys
import threading
import time

# Imported by the interpreter that AIFLAME_BENCH_TORCH names, never by the bench itself.
import torch

_BATONS = 4
# A hundred microseconds or less each, so that a turn is a few switches of the GIL.
_STEPS, _SIZE = 10, 128


class Ring:
    """The threads, each with what wakes it.

    Args:
        threads: How many; a multiple of the batons.
        laps: How often each works in a round.
    """

    def __init__(self, threads: int, laps: int) -> None:
        self._laps = laps
        self._turns = [threading.Semaphore(0) for _ in range(threads)]
        self._arrived = threading.Semaphore(0)
        for turn in range(threads):
            threading.Thread(target=self._work, args=(turn,), daemon=True).start()

    def _work(self, turn: int) -> None:
        left, right = torch.randn(_SIZE, _SIZE), torch.randn(_SIZE, _SIZE)
        following = turn + _BATONS
        lap = 0
        while True:
            self._turns[turn].acquire()
            for _ in range(_STEPS):
                (left @ right).relu().sum()
            lap += 1
            if following < len(self._turns):
                self._turns[following].release()
            elif lap % self._laps:
                self._turns[following - len(self._turns)].release()
            else:
                self._arrived.release()

    def round(self) -> tuple[float, float]:
        """Lets every thread work; returns seconds by the wall and of CPU time."""
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        for turn in range(_BATONS):
            self._turns[turn].release()
        for _ in range(_BATONS):
            self._arrived.acquire()
        return time.perf_counter() - wall_s, time.process_time() - cpu_s


def main() -> None:
    """Works a round for each line."""
    torch.set_num_threads(1)
    ring = Ring(int(sys.argv[1]), int(sys.argv[2]))
    ring.round()  # the first allocates
    print("ready", flush=True)
    for _ in sys.stdin:
        print(*(f"{seconds:.6f}" for seconds in ring.round()), flush=True)


if __name__ == "__main__":
    main()
