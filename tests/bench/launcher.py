# SPDX-License-Identifier: Apache-2.0
"""The same as launcher.c from Python: `launcher.py DEPTH CALLS`, DEPTH Python frames deep."""

from __future__ import annotations

import ctypes
import sys
import time

_opencl = ctypes.CDLL("libOpenCL.so.1")
_global = (ctypes.c_size_t * 1)(4096)
_local = (ctypes.c_size_t * 1)(64)


def _launch(calls: int) -> None:
    enqueue = _opencl.clEnqueueNDRangeKernel
    for _ in range(calls):
        enqueue(None, None, 1, None, _global, _local, 0, None, None)


def _descend(depth: int, calls: int) -> None:
    if depth > 1:
        _descend(depth - 1, calls)
    else:
        _launch(calls)


def main() -> None:
    """Serves rounds until its input ends."""
    # The module, main and _launch are frames as well.
    depth, calls = int(sys.argv[1]) - 3, int(sys.argv[2])
    print("ready", flush=True)
    for _ in sys.stdin:
        begin_s = time.perf_counter()
        _descend(depth, calls)
        print(f"{time.perf_counter() - begin_s:.6f}", flush=True)


if __name__ == "__main__":
    main()
