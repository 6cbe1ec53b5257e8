# SPDX-License-Identifier: Apache-2.0
"""A program with known Python stacks, run by each interpreter: prints the truth, then waits.

Each thread records its own frames from the leaf on (file, name, line, and on what the version has
a qualified name), then blocks at the very end of the line that it recorded. It has to run on
CPython 3.8.
"""

import contextlib
import functools
import json
import sys
import threading
import time

TRUTH = {}
DONE = threading.Event()
READY = threading.Semaphore(0)


def snapshot(who, leaf_line):
    chain = []
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        name = getattr(code, "co_qualname", code.co_name)
        chain.append([code.co_filename, code.co_name, name, frame.f_lineno])
        frame = frame.f_back
    chain[0][3] = leaf_line
    TRUTH[who] = {"tid": threading.get_native_id(), "frames": chain}


def leaf(who, wait):
    line = sys._getframe().f_lineno + 2
    snapshot(who, line)
    READY.release() or wait()


class Outer:
    class Inner:
        def method(self, who, wait):
            return (lambda: leaf(who, wait))()

        @staticmethod
        def static(who, wait):
            for _ in Outer.Inner().generator(who, wait):
                pass

        def generator(self, who, wait):
            yield self.method(who, wait)

    def through_c(self, who, wait):
        sorted([1], key=lambda _: Outer.Inner.static(who, wait) or 0)


def comprehension(who, wait):
    return [Outer().through_c(who, wait) for _ in range(1)]


def deep(depth, who, wait):
    if depth == 0:
        return comprehension(who, wait)
    return deep(
        depth - 1,
        who,
        wait,
    )


async def awaited(who, wait):
    return functools.partial(deep, 3, who, wait)()


def as_coroutine(who, wait):
    with contextlib.suppress(StopIteration):
        awaited(who, wait).send(None)


def grüße(who, wait):
    leaf(who, wait)


def 名前(who, wait):
    leaf(who, wait)


def run_forever(who):
    TRUTH[who] = {"tid": threading.get_native_id(), "frames": []}
    READY.release()
    while not DONE.is_set():
        pass


def main():
    threads = {
        "sleeper": (deep, (5, "sleeper", functools.partial(time.sleep, 600))),
        "coroutine": (as_coroutine, ("coroutine", DONE.wait)),
        "latin": (grüße, ("latin", functools.partial(time.sleep, 600))),
        "ucs2": (名前, ("ucs2", functools.partial(time.sleep, 600))),
    }
    for who, (function, arguments) in threads.items():
        threading.Thread(target=function, args=arguments, daemon=True, name=who).start()
        READY.acquire()
    if "--busy" in sys.argv:
        threading.Thread(target=run_forever, args=("busy",), daemon=True).start()
        READY.acquire()
    snapshot("main", sys._getframe().f_lineno + 3)
    TRUTH["main"]["tid"] = threading.get_native_id()
    print(json.dumps(TRUTH), flush=True)
    sys.stdin.read(1)


if __name__ == "__main__":
    main()
