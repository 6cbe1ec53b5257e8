# SPDX-License-Identifier: Apache-2.0
"""Threads with names of each kind; says the native id of each (protocol: truth.h)."""

import ctypes
import signal
import sys
import threading

_PR_SET_NAME = 15

ended = threading.Event()


def work():
    ended.wait()


class Loader(threading.Thread):
    """Sets attributes of its own before those of threading.Thread."""

    def __init__(self, name):
        self.batch = 1
        super().__init__(name=name, daemon=True)
        setattr(self, "not an identifier", 2)

    def run(self):
        work()


class Slotted(threading.Thread):
    __slots__ = ("first", "second")


def with_comm():
    ctypes.CDLL(None).prctl(_PR_SET_NAME, b"set by C", 0, 0, 0)
    work()


def short():
    ended.wait(0.6)


def started(cls=threading.Thread, **keywords):
    thread = cls(**keywords)
    thread.daemon = True
    thread.start()
    return thread


signal.alarm(120)
named = started(target=work, name="named")
threads = {
    "named": named,
    "default": started(target=work),
    "wide": started(target=work, name="\u043b\u043e\u0434\u043a\u0430 \U0001f6a2"),
    "hostile": started(target=work, name="a\n\x1b[31m<b>&"),
    "long": started(target=work, name="x" * 1000),
    "loader": Loader("loader"),
    "slotted": started(Slotted, target=work, name="slotted"),
    "comm": started(target=with_comm, name="in Python"),
}
threads["loader"].start()
as_dict = started(target=work, name="as dict")
assert as_dict.__dict__
threads["dict"] = as_dict
print("ready", flush=True)
sys.stdin.readline()
threads["short"] = started(target=short, name="short-lived")
named.name = "renamed"
threads["short"].join()
for key, thread in threads.items():
    print(key, thread.native_id)
print("done", flush=True)
sys.stdin.read()
