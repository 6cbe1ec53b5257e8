# SPDX-License-Identifier: Apache-2.0
"""Copies of the naming process that do one thing, and end.

What takes as much memory as all that the process keeps, for a moment, is done in one: Python gives
little of that back, since it lies between objects that stay.

Of the threads, only the one that forks is in a copy, but all locks are, as they were: it takes none
that another thread may have held, and writes no log.
"""

from __future__ import annotations

import gc
import os
import signal
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import IO, NoReturn

from aiflame.agent.errors import AiflameError
from aiflame.agent.inspector.forking import begin_fork

# Hundreds of times what a stretch takes where the processors have nothing else to do: whoever is
# not done by then waits for what never comes.
_MOST_S = 900.0


class ForkEnded(AiflameError):
    """A copy has ended before it was done, as by the kernel where memory is short."""


class Fork:
    """A copy of this process, which is killed where this is left; to be used in `with`.

    Args:
        name: How it is called in lists of processes, 15 characters.
        work: What it does; gets the pipe, to write to.

    Attributes:
        pipe: What it writes comes out here.

    Raises:
        OSError: It cannot be forked.
    """

    def __init__(self, name: str, work: Callable[[IO[bytes]], None]) -> None:
        reading, writing = os.pipe()
        parent = os.getpid()
        try:
            with warnings.catch_warnings():
                # Of locks that other threads hold (CPython 3.12): see above.
                warnings.simplefilter("ignore", DeprecationWarning)
                self._pid = os.fork()
        except OSError:
            os.close(reading)
            raise
        else:
            if self._pid == 0:
                os.close(reading)
                _run(name, work, writing, parent)
        finally:
            os.close(writing)
        self.pipe: IO[bytes] = os.fdopen(reading, "rb")

    def __enter__(self) -> Fork:
        return self

    def __exit__(self, *_: object) -> None:
        self.pipe.close()
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)


def _run(name: str, work: Callable[[IO[bytes]], None], writing: int, parent: int) -> NoReturn:
    with suppress(BaseException):  # whoever asked for it sees that it has ended
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, _MOST_S)
        begin_fork(name, parent)
        gc.freeze()  # a collection would write to all pages that are shared
        with os.fdopen(writing, "wb") as pipe:
            work(pipe)
    os._exit(0)
