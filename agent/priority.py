# SPDX-License-Identifier: Apache-2.0
"""The recorder's share of the processors: who profiles a host often profiles one in trouble.

With a run queue of some hundred threads an ordinary process waits seconds for its turn, and what
the kernel half keeps for it overflows meanwhile. A nice level is not enough: it counts only among
processes of one session (autogroups, sched(7)) or cgroup. So the recorder prepares, and while it
records does its work, as a real-time thread of the lowest priority, within a budget: what it does
is short, but must be done soon. Naming and rendering are not urgent.

Nothing of it is inherited (SCHED_RESET_ON_FORK, sched(7)): children begin at nice 0, and threads as
well unless they are of an `urgent_pool`. A user who has chosen a priority, by nice(1) or chrt(1),
keeps it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import FrameType

_HIGHEST_NICE = -20
# The lowest of the real-time priorities: above all that is ordinary, below all that is not.
_LOWEST_REAL_TIME = 1

# Of each second of a recording it may be real-time for so long, which is also the longest that it
# keeps a target from a processor at a stretch.
_BUDGET_NS, _WINDOW_NS = 200_000_000, 1_000_000_000
# Preparing takes 0.5 s of CPU time. Past this, some file or process keeps the recorder busy that
# must not keep a processor from all others as well. The limit counts from when a thread last slept.
_LIMIT_US = 1_000_000

# As the user started us: this is imported before any of it is called.
_POLICY = os.sched_getscheduler(0)
_PARAMETERS = os.sched_getparam(0)
_NICE = os.getpriority(os.PRIO_PROCESS, 0)
_RTTIME = resource.getrlimit(resource.RLIMIT_RTTIME)
_IS_CHOSEN = _POLICY != os.SCHED_OTHER or _NICE > 0

# Threads that are real-time, by the kernel's number.
_real_time: set[int] = set()


def hurry() -> bool:
    """Makes the calling thread urgent, without a budget: for work that ends soon.

    Where there is one processor only, it is not real-time for that: nobody else would get on.

    Returns:
        Whether that is so, or the user wants it otherwise: it takes CAP_SYS_NICE, or RLIMIT_NICE or
        RLIMIT_RTPRIO.
    """
    if _IS_CHOSEN:
        return True
    is_urgent = False
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, _HIGHEST_NICE)
        is_urgent = True
    if len(os.sched_getaffinity(0)) > 1:
        is_urgent |= _become_real_time()
    elif is_urgent:
        _set_ordinary(0)
    return is_urgent


def hurry_child(pid: int) -> None:
    """Makes a child as urgent as `hurry` makes the calling thread, for work that ends soon.

    What it forks is not: it begins at nice 0.
    """
    if _IS_CHOSEN:
        return
    with contextlib.suppress(OSError):  # no right to, or it has ended
        os.setpriority(os.PRIO_PROCESS, pid, _HIGHEST_NICE)
        is_real_time = len(os.sched_getaffinity(0)) > 1
        policy = os.SCHED_RR if is_real_time else os.SCHED_OTHER
        priority = _LOWEST_REAL_TIME if is_real_time else 0
        os.sched_setscheduler(pid, policy | os.SCHED_RESET_ON_FORK, os.sched_param(priority))


def let_wait(pid: int) -> None:
    """Makes a child as ordinary as any other process: what it does takes longer than it should."""
    if _IS_CHOSEN:
        return
    with contextlib.suppress(OSError):  # it was not raised, or has ended
        # To take the flag away needs CAP_SYS_NICE.
        flag = os.sched_getscheduler(pid) & os.SCHED_RESET_ON_FORK
        os.sched_setscheduler(pid, os.SCHED_OTHER | flag, os.sched_param(0))
        os.setpriority(os.PRIO_PROCESS, pid, 0)


def as_started() -> None:
    """Gives the calling thread, or a child that was forked, what the user started us with."""
    with contextlib.suppress(PermissionError):  # then it was not raised either
        os.sched_setscheduler(0, _POLICY, _PARAMETERS)
        os.setpriority(os.PRIO_PROCESS, 0, _NICE)
        resource.setrlimit(resource.RLIMIT_RTTIME, _RTTIME)
    _real_time.discard(threading.get_native_id())


def urgent_pool(tasks: int) -> ThreadPoolExecutor:
    """Starts threads as urgent as `hurry` makes them, for work that the kernel does.

    Where the calling thread is real-time they are from their first moment: an ordinary thread would
    wait for a processor before it could say that it is in a hurry.

    Args:
        tasks: How many will be submitted: more threads than tasks or processors are of no use.

    Raises:
        BlockingIOError: The kernel starts no more threads.
    """
    threads = max(min(tasks, len(os.sched_getaffinity(0))), 1)
    pool = ThreadPoolExecutor(threads, initializer=begin_urgent_thread)
    started = threading.Barrier(threads + 1)
    hands_on = threading.get_native_id() in _real_time
    if hands_on:
        _set_inherited(True)
    try:
        for _ in range(threads):
            pool.submit(started.wait)
        started.wait()
    except RuntimeError as error:  # those that were started must not wait for the others
        started.abort()
        raise BlockingIOError(errno.EAGAIN, str(error)) from error
    finally:
        if hands_on:
            _set_inherited(False)
    return pool


def begin_urgent_thread() -> None:
    """Makes the calling thread one for urgent work that the kernel does.

    Signals are the main thread's; one that is pending makes the kernel's verifier give up.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    hurry()


def _set_inherited(is_inherited: bool) -> None:
    """Lets threads that the calling one starts be real-time as it is, or not."""
    policy = os.SCHED_RR if is_inherited else os.SCHED_RR | os.SCHED_RESET_ON_FORK
    with contextlib.suppress(PermissionError):  # to take the flag away needs CAP_SYS_NICE
        os.sched_setscheduler(0, policy, os.sched_param(_LOWEST_REAL_TIME))


def _become_real_time() -> bool:
    """Returns whether the calling thread is real-time now."""
    if threading.current_thread() is threading.main_thread():
        # Else its signal would end the recorder.
        signal.signal(signal.SIGXCPU, _limit_reached)
        limit_real_time()
    try:
        policy = os.SCHED_RR | os.SCHED_RESET_ON_FORK
        os.sched_setscheduler(0, policy, os.sched_param(_LOWEST_REAL_TIME))
    except PermissionError:
        return False
    _real_time.add(threading.get_native_id())
    return True


def limit_real_time() -> None:
    """Has the kernel send SIGXCPU to whoever is real-time for too long at a stretch.

    It is for this process, and for those that it begins.
    """
    hard = _RTTIME[1]
    soft = _LIMIT_US if hard == resource.RLIM_INFINITY else min(_LIMIT_US, hard)
    resource.setrlimit(resource.RLIMIT_RTTIME, (soft, hard))


def _set_ordinary(thread: int) -> None:
    # The nice level stays as it is.
    os.sched_setscheduler(thread, os.SCHED_OTHER | os.SCHED_RESET_ON_FORK, os.sched_param(0))


def _limit_reached(_number: int, _frame: FrameType | None) -> None:
    for thread in tuple(_real_time):
        with contextlib.suppress(ProcessLookupError):
            _set_ordinary(thread)
    _real_time.clear()


class RealTime:
    """While entered, the calling thread is real-time, as long as it keeps to its budget.

    Args:
        budget_ns: CPU time of each window.
        window_ns: After so long there is a new budget.
    """

    def __init__(self, budget_ns: int = _BUDGET_NS, window_ns: int = _WINDOW_NS) -> None:
        self._budget_ns, self._window_ns = budget_ns, window_ns
        self._is_allowed = self._is_over = False
        self._begun_ns = self._begun_cpu_ns = 0

    def __enter__(self) -> RealTime:
        self._is_allowed = not _IS_CHOSEN
        self._begin()
        return self

    def _begin(self) -> None:
        self._begun_ns, self._begun_cpu_ns = time.monotonic_ns(), time.thread_time_ns()
        self._is_over = False
        self._is_allowed = self._is_allowed and _become_real_time()

    def check(self) -> None:
        """Keeps to the budget; to be called between pieces of work."""
        if not self._is_allowed:
            return
        if time.monotonic_ns() - self._begun_ns >= self._window_ns:
            self._begin()
        elif not self._is_over and time.thread_time_ns() - self._begun_cpu_ns >= self._budget_ns:
            self._end()

    def _end(self) -> None:
        self._is_over = True
        _set_ordinary(0)
        _real_time.discard(threading.get_native_id())

    def __exit__(self, *_: object) -> None:
        if self._is_allowed:
            self._end()
        self._is_allowed = False
