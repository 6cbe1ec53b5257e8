# SPDX-License-Identifier: Apache-2.0
"""The symbol worker: a process that reads hostile files so that the recorder need not.

Started by `service` as `python -m aiflame.agent.symbols.worker CACHE MEMORY_BYTES TIMEOUT_S`;
requests come on standard input, answers go to standard output (`protocol`). It limits itself: an
address-space limit, and a timer that ends it when one request takes too much CPU time, also while
the recorder is busy elsewhere. It ends when its standard input does, or when the recorder dies.
"""

from __future__ import annotations

import contextlib
import ctypes
import resource
import signal
import sys
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from aiflame.agent.symbols.protocol import (
    LENGTH,
    MAX_MESSAGE_BYTES,
    decode,
    encode,
    pack_frames,
    pack_problems,
)
from aiflame.agent.symbols.resolve import Resolver

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def _limit_self(memory_bytes: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Ctrl-C is the recorder's to handle; the timer must end the process wherever it hangs.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)


def _peak_rss_bytes() -> int:
    """Peak resident set of this program alone; rusage would include the forking parent's."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def _answer(resolver: Resolver, request: dict[str, Any]) -> dict[str, Any]:
    path, root, plain = request["path"], request["root"], request["plain"]
    if request["addresses"] is None:
        resolver.prepare(path, root, plain=plain)
        reply: dict[str, Any] = {}
    else:
        addresses = np.array(request["addresses"], dtype=np.uint64)
        reply = pack_frames(resolver.resolve(path, root, addresses, plain=plain))
    reply["id"] = request["id"]
    reply["problems"] = pack_problems(resolver.problems)
    reply["peak_rss_bytes"] = _peak_rss_bytes()
    resolver.problems.clear()
    return reply


def serve(resolver: Resolver, source: BinaryIO, sink: BinaryIO, timeout_s: float) -> None:
    """Answer requests until the source ends."""
    while True:
        header = source.read(LENGTH.size)
        if len(header) < LENGTH.size:
            return
        (length,) = LENGTH.unpack(header)
        if length > MAX_MESSAGE_BYTES:
            return
        request = decode(source.read(length))
        signal.setitimer(signal.ITIMER_PROF, timeout_s)
        reply = encode(_answer(resolver, request))
        signal.setitimer(signal.ITIMER_PROF, 0)
        sink.write(reply)
        sink.flush()


def main(arguments: list[str]) -> None:
    """Run with the arguments of the command line: cache, bytes of memory, seconds a request."""
    cache, memory_bytes, timeout_s = arguments
    _limit_self(int(memory_bytes))
    resolver = Resolver(Path(cache) if cache else None)
    with contextlib.suppress(BrokenPipeError):
        serve(resolver, sys.stdin.buffer, sys.stdout.buffer, float(timeout_s))


if __name__ == "__main__":
    main(sys.argv[1:])
