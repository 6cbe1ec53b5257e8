# SPDX-License-Identifier: Apache-2.0
"""Overwrites the frame chain of its own thread while it runs, and has names nobody expects.

A frame's link to its caller is only used when the frame is left: until then it may hold anything.
Where that link is: struct _frame.f_back (Include/frameobject.h of 3.8, 3.9; 3.10's
Include/cpython/frameobject.h), and from 3.11 on _PyInterpreterFrame.previous after
PyFrameObject.f_frame (Include/internal/pycore_frame.h). It has to run on CPython 3.8.
"""

import ctypes
import sys
import time

import pytruth

CPU_MS = 150
LONG_NAME = "x" * 1_000_000
MARKUP = "</script><b>\x1b[31m;\n\x00\u202e&"
# Of a frame object, after its head: f_back before 3.11 (and ob_size), f_frame from then on. Heads
# are larger without the GIL.
LINK = object.__basicsize__ + 8
PREVIOUS = 48 if sys.version_info[:2] == (3, 11) else 8


def word(address):
    return ctypes.c_uint64.from_address(address)


def link_of(frame):
    link = id(frame) + LINK
    return link if sys.version_info < (3, 11) else word(link).value + PREVIOUS


def spin(cpu_ms=CPU_MS):
    end_ns = time.thread_time_ns() + cpu_ms * 1_000_000
    while time.thread_time_ns() < end_ns:
        pass


def overwrite(value_of):
    link = word(link_of(sys._getframe(1)))
    kept = link.value
    link.value = value_of(link, kept)
    spin()
    link.value = kept


def wild():
    overwrite(lambda link, kept: 0xDEAD000000000001)


def unmapped():
    overwrite(lambda link, kept: 0x10000)


def looping():
    # The frame after the leaf's again.
    own = sys._getframe()
    here = id(own) if sys.version_info < (3, 11) else word(id(own) + LINK).value
    overwrite(lambda link, kept: here)


def named(name):
    text = "def f(spin): spin()  # its name is replaced\n"
    names = {}
    exec(text, names)  # noqa: S102
    new = {"co_name": name, "co_filename": name}
    if sys.version_info >= (3, 11):
        new["co_qualname"] = name
    function = names["f"]
    function.__code__ = function.__code__.replace(**new)
    return function


def far():
    names = {}
    exec("def far(spin): spin()", names)  # noqa: S102
    function = names["far"]
    if sys.version_info >= (3, 11):
        # Entries of eight code units: the first is 2**35 - 1 lines further on, the others on its
        # line (Objects/locations.md).
        table = b"\xef\x7e\x7f\x7f\x7f\x7f\x3f" + 8 * b"\xd7\x00\x00"
        function.__code__ = function.__code__.replace(co_linetable=table)
    return function


def main():
    long, markup, beyond = named(LONG_NAME), named(MARKUP), far()
    pytruth.begin()
    for function in (wild, unmapped, looping):
        function()
    long(spin)
    markup(spin)
    beyond(spin)
    spin()
    pytruth.end({"length": len(LONG_NAME)})


if __name__ == "__main__":
    main()
