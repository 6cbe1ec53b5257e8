# SPDX-License-Identifier: Apache-2.0
"""Which frames are the reader's own: what tables lead with.

A thread that waits does so in the scheduler, called by libc, called by the interpreter. That is so
of every program, and says nothing of this one. Patterns are such as Python and RE2 read alike, so
that a store is asked with the same ones: https://github.com/google/re2/wiki/Syntax.
"""

from __future__ import annotations

import re

from aiflame.agent.reports.causes import LIBC_PREFIXES

_LIBC = "|".join(map(re.escape, LIBC_PREFIXES))
_INTERPRETER = r"libpython[0-9]|python[0-9.]*t?(-dbg)?$|pypy"

# Paths of binaries in which code of anybody waits: the C library, C++'s, the interpreter, and what
# comes with it.
WAITING_MODULE = rf"(^|/)({_LIBC}|libstdc\+\+|libc\+\+|{_INTERPRETER})|/lib-dynload/[^/]*$"

# Files of Python's own library, wherever it is installed: of packages in it nothing is said.
STANDARD_LIBRARY = r"^<frozen |/lib(64)?/python3\.[0-9]+t?/"
PACKAGES = r"/(site|dist)-packages/"

# Scripts that pip makes of a package's entry points call that package, and nothing else.
ENTRY_POINT = r"/bin/[^/]*$"

# Functions by which the kernel takes a CPU away from whoever called it, kernel/sched/core.c.
SCHEDULER = r"^_*(preempt_|io_)?schedule(_|$)|^_*cond_resched|^__switch_to"
