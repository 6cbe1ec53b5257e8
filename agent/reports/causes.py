# SPDX-License-Identifier: Apache-2.0
"""Why a thread was off the CPU, read from the functions it slept in.

The kernel says that a thread sleeps, not what for; the function names nearest the leaf do. The
rules are one table of names. Each function is looked up once, then every stack is decided with
numpy, so that 100,000 stacks cost milliseconds.

The innermost frame with a rule decides: a mutex taken inside ext4 is a lock, not I/O. There is one
exception. A thread that waits under a page fault waits for memory, whatever the kernel does to
bring it (read a file, swap, take mmap_lock), so the fault is the cause. And whatever a runtime does
inside a call that waits for a device (take a lock, poll a file), the thread waits for the device.

Kernel names were read from /proc/PID/stack on Linux 6.18 for threads put to sleep in each of these
calls; the older names beside them come from Linux 4.18 to 6.12. A cause is a reading of names, not
a measurement: a function that no rule knows gives `OTHER`.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

import numpy as np
import numpy.typing as npt
from aiflame.agent.model.gpu import Operation
from aiflame.agent.model.profile import Binary, FrameKind, Function, GilState, Profile
from aiflame.agent.reports.selection import by_frame
from aiflame.gpu.apis import APIS


class Cause(enum.IntEnum):
    """What a thread waited for; the order is the order of tables and legends."""

    LOCK = 0  # futex, mutex, condition variable, semaphore, file lock
    GIL = 1  # Python's global interpreter lock
    IO = 2  # storage: block devices, file systems, network file systems
    POLL = 3  # until any one of several things is ready: epoll, poll, select, io_uring
    SLEEP = 4  # for a time
    PIPE_SOCKET = 5  # for a peer: pipe, socket, terminal, message queue, eventfd
    PAGE_FAULT = 6  # for memory to be brought in
    CHILD = 7  # for a child process to end, or to exec after vfork
    GPU_WAIT = 8  # for a device, in a call of its API that waits for it
    OTHER = 9

    @property
    def label(self) -> str:
        """The words used in every report, for instance "page fault"."""
        return _LABELS[self]


_LABELS = {
    Cause.LOCK: "lock",
    Cause.GIL: "GIL",
    Cause.IO: "I/O",
    Cause.POLL: "poll",
    Cause.SLEEP: "sleep",
    Cause.PIPE_SOCKET: "pipe/socket",
    Cause.PAGE_FAULT: "page fault",
    Cause.CHILD: "child process",
    Cause.GPU_WAIT: "GPU wait",
    Cause.OTHER: "other",
}

# In the order of their values: the label of cause `c` is CAUSES[c].
CAUSES: tuple[str, ...] = tuple(_LABELS[cause] for cause in Cause)


class _Scope(enum.Enum):
    """Which functions a rule may match."""

    KERNEL = enum.auto()
    USER = enum.auto()  # names that nothing but a thread library uses
    LIBC = enum.auto()  # common words, believed only of a C library's own file


@dataclass(frozen=True, slots=True)
class _Rule:
    """Names are compared after `_bare_name`; an exact name wins over every prefix."""

    cause: Cause
    scope: _Scope
    names: str = ""
    prefixes: str = ""


_RULES = (
    _Rule(
        Cause.LOCK,
        _Scope.KERNEL,
        names="do_futex __futex_wait mutex_lock mutex_lock_io mutex_lock_killable "
        "mutex_lock_interruptible down down_interruptible down_killable down_timeout down_read "
        "down_read_killable down_read_interruptible down_write down_write_killable "
        "percpu_down_write __percpu_down_read percpu_rwsem_wait lock_sock_nested __lock_sock "
        "do_semtimedop __do_semtimedop fcntl_setlk do_lock_file_wait posix_lock_inode_wait "
        "flock_lock_inode_wait locks_lock_inode_wait __do_sys_flock __break_lease",
        prefixes="futex_ __mutex_lock __ww_mutex_lock ww_mutex_lock rt_mutex_ __rt_mutex_ "
        "rtlock_ rwsem_ rwbase_ __down ldsem_down_ __ldsem_down_",
    ),
    _Rule(
        Cause.IO,
        _Scope.KERNEL,
        names="read_events request_wait_answer rpc_wait_bit_killable balance_dirty_pages "
        "__wait_on_buffer wait_on_buffer __lock_buffer __lock_page wait_on_page_bit "
        "wait_on_page_bit_common submit_bio_wait sync_inodes_sb writeback_inodes_sb "
        "wait_for_completion_io wait_for_completion_io_timeout lookup_slow vfs_fsync_range "
        "do_fsync do_sync_file_range ksys_sync_file_range generic_file_read_iter "
        "generic_file_buffered_read generic_perform_write wait_transaction_locked",
        prefixes="io_schedule folio_wait_ __folio_lock wait_on_page filemap_ __filemap_ blk_ "
        "blkdev_ __blk_ bio_ rq_qos_ wbt_ nvme_ scsi_ ext2_ ext4_ jbd2_ xfs_ xlog_ btrfs_ f2fs_ "
        "zfs_ zil_ txg_ nfs_ nfs3_ nfs4_ cifs_ smb2_ ceph_ fuse_ gfs2_ ocfs2_ v9fs_ p9_ erofs_ "
        "squashfs_ iomap_",
    ),
    _Rule(
        Cause.POLL,
        _Scope.KERNEL,
        names="do_epoll_wait do_epoll_pwait ep_poll poll_schedule_timeout do_poll do_sys_poll "
        "do_select core_sys_select do_pselect io_cqring_wait inotify_read fanotify_read",
    ),
    _Rule(
        Cause.SLEEP,
        _Scope.KERNEL,
        names="do_nanosleep common_nsleep common_nsleep_timens alarm_timer_nsleep "
        "do_cpu_nanosleep posix_cpu_nsleep msleep msleep_interruptible timerfd_read "
        "timerfd_read_iter",
        prefixes="hrtimer_nanosleep __x64_sys_nanosleep __x64_sys_clock_nanosleep "
        "__arm64_sys_nanosleep __arm64_sys_clock_nanosleep usleep_range",
    ),
    _Rule(
        Cause.PIPE_SOCKET,
        _Scope.KERNEL,
        names="pipe_read pipe_write anon_pipe_read anon_pipe_write fifo_pipe_read "
        "fifo_pipe_write pipe_wait pipe_wait_readable pipe_wait_writable wait_for_partner "
        "fifo_open sk_wait_data __skb_wait_for_more_packets skb_recv_datagram "
        "__skb_recv_datagram sock_alloc_send_pskb sock_recvmsg sock_sendmsg inet_accept "
        "inet_csk_accept inet_csk_wait_for_connect inet_stream_connect inet_wait_for_connect "
        "do_accept eventfd_read eventfd_write signalfd_read signalfd_read_iter do_msgrcv "
        "do_msgsnd wq_sleep n_tty_read n_tty_write tty_read fuse_dev_do_read fuse_dev_read",
        prefixes="splice_from_pipe sk_stream_wait_ unix_ __unix_ tcp_ udp_ udpv6_ sctp_ vsock_ "
        "netlink_ packet_ raw_recvmsg __sys_recv __sys_send __sys_accept __sys_connect "
        "do_mq_timed",
    ),
    _Rule(
        Cause.PAGE_FAULT,
        _Scope.KERNEL,
        # The C names of the fault handlers of x86 (by age) and arm64, and what they all call.
        names="asm_exc_page_fault exc_page_fault do_user_addr_fault async_page_fault "
        "do_async_page_fault do_page_fault __do_page_fault page_fault do_mem_abort el0_da el0_ia "
        "do_translation_fault handle_mm_fault __handle_mm_fault handle_userfault "
        "kvm_async_pf_task_wait_schedule",
    ),
    _Rule(
        Cause.CHILD,
        _Scope.KERNEL,
        # A parent that used vfork waits directly in kernel_clone (_do_fork up to Linux 5.9).
        names="do_wait kernel_wait4 kernel_waitid __do_sys_wait4 __do_sys_waitid "
        "wait_for_vfork_done kernel_clone _do_fork",
    ),
    _Rule(
        Cause.OTHER,
        _Scope.KERNEL,
        # Known to be none of the above; said so here, lest a frame further out decides: a job
        # control stop can be taken on the way out of a page fault.
        names="do_signal_stop do_freezer_trap ptrace_stop exit_to_user_mode_loop "
        "do_sigtimedwait sigsuspend __do_sys_pause",
    ),
    _Rule(
        Cause.LOCK,
        _Scope.USER,
        names="pthread_mutex_lock pthread_mutex_timedlock pthread_mutex_clocklock "
        "pthread_cond_wait pthread_cond_timedwait pthread_cond_clockwait pthread_rwlock_rdlock "
        "pthread_rwlock_wrlock pthread_barrier_wait sem_wait sem_timedwait sem_clockwait "
        "lll_lock_wait lll_lock_wait_private lll_timedlock_wait",
        prefixes="futex_abstimed_wait futex_lock_pi pthread_mutex_lock_ new_sem_wait "
        "pthread_mutex_cond_lock",
    ),
    _Rule(Cause.POLL, _Scope.LIBC, names="epoll_wait epoll_pwait poll ppoll select pselect"),
    _Rule(Cause.SLEEP, _Scope.LIBC, names="nanosleep clock_nanosleep usleep sleep"),
    _Rule(
        Cause.PIPE_SOCKET,
        _Scope.LIBC,
        names="recv recvfrom recvmsg send sendto sendmsg accept accept4 connect",
    ),
    _Rule(Cause.IO, _Scope.LIBC, names="fsync fdatasync sync syncfs msync"),
    _Rule(Cause.CHILD, _Scope.LIBC, names="wait wait4 waitpid waitid"),
)

# A lock call this many user frames from the kernel is where the thread sleeps; further out it may
# just have called back into the program (pthread_once, a signal handler). glibc needs four:
# pthread_cond_wait, its common part, futex_abstimed_wait_common, the cancellable variant.
_USER_FRAMES_NEAR_LEAF = 4

# File names of the C libraries and of what glibc before 2.34 split off.
LIBC_PREFIXES = ("libc.", "libc-", "libpthread", "ld-musl", "ld-linux")

I64 = npt.NDArray[np.int64]

_ROWS_AT_ONCE = 2_048

_NO_RULE = np.uint8(255)


def _exact_names(scope: _Scope) -> Mapping[str, Cause]:
    return {
        name: rule.cause for rule in _RULES if rule.scope is scope for name in rule.names.split()
    }


def _prefixes(scope: _Scope) -> tuple[tuple[str, Cause], ...]:
    return tuple(
        (prefix, rule.cause)
        for rule in _RULES
        if rule.scope is scope
        for prefix in rule.prefixes.split()
    )


_EXACT = {scope: _exact_names(scope) for scope in _Scope}
_PREFIXED = {scope: _prefixes(scope) for scope in _Scope}
_ANY_PREFIX = {scope: tuple(prefix for prefix, _ in _PREFIXED[scope]) for scope in _Scope}


# The calls of all device APIs that return when the device is done; a copy that waits, waits for it.
_DEVICE_WAITS = frozenset(
    call.symbol
    for api in APIS
    for call in api.calls
    if call.operation in (Operation.SYNCHRONIZE, Operation.COPY)
)


def _match(name: str, scope: _Scope) -> Cause | None:
    exact = _EXACT[scope].get(name)
    # Almost every name begins with none of them; str tries them all in one call.
    if exact is not None or not name.startswith(_ANY_PREFIX[scope]):
        return exact
    return next((cause for prefix, cause in _PREFIXED[scope] if name.startswith(prefix)), None)


def _bare_name(function: Function) -> str:
    """Drop what compilers and linkers add: `do_pselect.constprop.0`, `__GI___poll@@GLIBC_2.2.5`."""
    if function.kind is FrameKind.KERNEL:
        return function.name.partition(".")[0]
    return function.name.partition("@")[0].removeprefix("__GI_").lstrip("_")


def _is_libc(binary: Binary) -> bool:
    return PurePosixPath(binary.path).name.startswith(LIBC_PREFIXES)


def is_device_wait(function: Function) -> bool:
    """Whether a function is a device API's that waits for the device."""
    if function.kind is not FrameKind.NATIVE:
        return False
    # PoCL's own names of the functions that it exports begin with PO.
    return _bare_name(function).removeprefix("PO") in _DEVICE_WAITS


def _function_cause(function: Function, libc: frozenset[int]) -> np.uint8:
    cause = None
    if function.kind is FrameKind.KERNEL:
        cause = _match(_bare_name(function), _Scope.KERNEL)
    elif function.kind is FrameKind.NATIVE:
        name = _bare_name(function)
        cause = _match(name, _Scope.USER)
        if cause is None and function.binary in libc:
            cause = _match(name, _Scope.LIBC)
    return _NO_RULE if cause is None else np.uint8(cause)


def _last_by_row(positions: I64, rows: I64, n_rows: int) -> I64:
    """Return for each row the last of its positions, or -1 where it has none.

    `positions` ascend; of several values for one element numpy keeps the last.
    """
    last = np.full(n_rows, -1, dtype=np.int64)
    last[rows] = positions
    return last


def _count_by_row(is_counted: npt.NDArray[np.bool_], offsets: I64) -> I64:
    """Return how many elements of each row `offsets[i]:offsets[i + 1]` are true."""
    counts = np.zeros(len(offsets) - 1, dtype=np.int64)
    # Some at a time: numpy makes numbers of 64 bits of all that it adds up.
    for first in range(0, len(counts), _ROWS_AT_ONCE):
        ends = offsets[first : first + _ROWS_AT_ONCE + 1]
        rows = np.flatnonzero(np.diff(ends))
        if len(rows):
            part, starts = is_counted[ends[0] : ends[-1]], ends[rows] - ends[0]
            counts[first + rows] = np.add.reduceat(part, starts, dtype=np.int64)
    return counts


def classify(profile: Profile) -> npt.NDArray[np.uint8]:
    """Return the `Cause` of each stack, shape (stacks,).

    Every stack gets one, also those that were only ever seen on a CPU: whether a thread was
    blocked at all is the business of `SampleClass`.
    """
    libc = frozenset(i for i, binary in enumerate(profile.binaries) if _is_libc(binary))
    causes = np.array([_function_cause(f, libc) for f in profile.functions], dtype=np.uint8)
    kinds = np.array([f.kind for f in profile.functions], dtype=np.uint8)
    function_ids = profile.frames["function"]
    offsets = profile.stacks.offsets.astype(np.int64)
    frame_causes = by_frame(causes[function_ids], profile.stacks)
    is_kernel = by_frame(kinds[function_ids] == FrameKind.KERNEL, profile.stacks)

    # Few frames have a rule: all that follows is about these.
    at = np.flatnonzero(frame_causes != _NO_RULE)
    row = np.searchsorted(offsets, at, side="right") - 1
    user_ends = offsets[1:] - _count_by_row(is_kernel, offsets)
    believed = is_kernel[at] | (user_ends[row] - at <= _USER_FRAMES_NEAR_LEAF)
    is_fault = frame_causes[at] == Cause.PAGE_FAULT

    innermost = _last_by_row(at[believed], row[believed], len(profile.stacks))
    fault = _last_by_row(at[is_fault], row[is_fault], len(profile.stacks))
    result = np.full(len(profile.stacks), Cause.OTHER, dtype=np.uint8)
    found = innermost >= 0
    result[found] = frame_causes[innermost[found]]
    result[(fault >= 0) & (result != Cause.OTHER)] = Cause.PAGE_FAULT
    waits = np.array([is_device_wait(f) for f in profile.functions], np.bool_)
    if waits.any():
        waiting = np.flatnonzero(by_frame(waits[function_ids], profile.stacks))
        result[np.searchsorted(offsets, waiting, side="right") - 1] = Cause.GPU_WAIT
    # The recording saw who had it.
    result[profile.stacks.gil == GilState.WAITING] = Cause.GIL
    return result
