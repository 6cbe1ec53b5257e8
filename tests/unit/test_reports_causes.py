# SPDX-License-Identifier: Apache-2.0
"""What a thread waited for, from the functions it slept in."""

from __future__ import annotations

from dataclasses import replace

import pytest
from aiflame.agent.model.gpu import Operation
from aiflame.agent.model.profile import Binary, Profile
from aiflame.agent.reports.causes import CAUSES, Cause, classify
from aiflame.gpu.apis import APIS
from profiles import MS, Sample, deep_profile, empty_profile, hostile_profile, profile_of

_ENTRY = "main;[k]entry_SYSCALL_64_after_hwframe;[k]do_syscall_64"

# Stacks read from /proc/PID/stack of a thread put to sleep in each call on Linux 6.18, and the
# names that Linux 4.18 to 6.6 have in their place.
_KERNEL_STACKS = [
    ("__x64_sys_futex do_futex futex_wait __futex_wait futex_do_wait", Cause.LOCK),
    ("__x64_sys_futex do_futex futex_wait futex_wait_queue_me", Cause.LOCK),
    ("__x64_sys_futex do_futex futex_wait futex_wait_queue", Cause.LOCK),
    ("do_semtimedop __do_semtimedop", Cause.LOCK),
    ("__do_sys_flock locks_lock_inode_wait", Cause.LOCK),
    ("__x64_sys_fcntl do_fcntl fcntl_setlk", Cause.LOCK),
    ("__x64_sys_mmap vm_mmap_pgoff down_write_killable rwsem_down_write_slowpath", Cause.LOCK),
    (
        "ksys_read vfs_read ext4_file_read_iter filemap_read folio_wait_bit_common io_schedule",
        Cause.IO,
    ),
    ("ksys_read generic_file_read_iter __lock_page_killable wait_on_page_bit_common", Cause.IO),
    ("__x64_sys_fsync do_fsync ext4_sync_file jbd2_log_wait_commit", Cause.IO),
    (
        "ksys_write xfs_file_write_iter balance_dirty_pages_ratelimited balance_dirty_pages",
        Cause.IO,
    ),
    ("ksys_read nfs_file_read rpc_wait_bit_killable", Cause.IO),
    ("ksys_read fuse_file_read_iter request_wait_answer", Cause.IO),
    ("__x64_sys_io_getevents read_events", Cause.IO),
    ("__x64_sys_epoll_wait do_epoll_wait", Cause.POLL),
    ("__x64_sys_epoll_wait do_epoll_wait ep_poll schedule_hrtimeout_range", Cause.POLL),
    ("__x64_sys_poll do_sys_poll poll_schedule_timeout.constprop.0", Cause.POLL),
    ("__x64_sys_pselect6 do_pselect.constprop.0 core_sys_select do_select", Cause.POLL),
    ("__do_sys_io_uring_enter io_cqring_wait", Cause.POLL),
    ("ksys_read vfs_read inotify_read wait_woken", Cause.POLL),
    ("__x64_sys_clock_nanosleep common_nsleep_timens hrtimer_nanosleep", Cause.SLEEP),
    ("__x64_sys_nanosleep hrtimer_nanosleep do_nanosleep", Cause.SLEEP),
    ("ksys_read vfs_read timerfd_read_iter", Cause.SLEEP),
    ("ksys_read vfs_read anon_pipe_read", Cause.PIPE_SOCKET),
    ("ksys_read vfs_read pipe_read pipe_wait", Cause.PIPE_SOCKET),
    ("ksys_write vfs_write anon_pipe_write", Cause.PIPE_SOCKET),
    ("__sys_recvfrom sock_recvmsg unix_stream_recvmsg unix_stream_read_generic", Cause.PIPE_SOCKET),
    ("__sys_sendto unix_stream_sendmsg sock_alloc_send_pskb", Cause.PIPE_SOCKET),
    ("__sys_recvfrom tcp_recvmsg tcp_recvmsg_locked sk_wait_data wait_woken", Cause.PIPE_SOCKET),
    ("__sys_sendto tcp_sendmsg_locked sk_stream_wait_memory wait_woken", Cause.PIPE_SOCKET),
    ("__sys_recvfrom udp_recvmsg __skb_recv_udp __skb_wait_for_more_packets", Cause.PIPE_SOCKET),
    ("__sys_accept4 do_accept inet_accept inet_csk_accept", Cause.PIPE_SOCKET),
    ("ksys_read vfs_read eventfd_read do_wait_intr_irq", Cause.PIPE_SOCKET),
    ("ksys_read vfs_read tty_read n_tty_read wait_woken", Cause.PIPE_SOCKET),
    ("ksys_read fuse_dev_read fuse_dev_do_read", Cause.PIPE_SOCKET),
    ("do_msgrcv", Cause.PIPE_SOCKET),
    ("kernel_wait4 do_wait", Cause.CHILD),
    ("__do_sys_waitid kernel_waitid do_wait", Cause.CHILD),
    ("__do_sys_vfork kernel_clone", Cause.CHILD),
    ("__do_sys_pause", Cause.OTHER),
    ("__x64_sys_rt_sigtimedwait do_sigtimedwait.isra.0", Cause.OTHER),
    ("exit_to_user_mode_loop arch_do_signal_or_restart get_signal do_signal_stop", Cause.OTHER),
    ("a_function_nobody_knows", Cause.OTHER),
]


def _stack(kernel: str) -> str:
    return ";".join([_ENTRY, *(f"[k]{name}" for name in kernel.split()), "[k]schedule"])


def _only_cause(profile: Profile) -> Cause:
    (cause,) = classify(profile)
    return Cause(int(cause))


@pytest.mark.parametrize(("kernel", "expected"), _KERNEL_STACKS)
def test_kernel_stacks(kernel: str, expected: Cause) -> None:
    assert _only_cause(profile_of(Sample(_stack(kernel), MS))) is expected


def test_every_stack_gets_its_own_cause_also_between_empty_ones() -> None:
    samples = [Sample("", MS)]
    for kernel, _ in _KERNEL_STACKS:
        samples.append(Sample(_stack(kernel), MS))
    found = classify(profile_of(*samples))
    assert [Cause(int(c)) for c in found] == [Cause.OTHER, *(cause for _, cause in _KERNEL_STACKS)]


@pytest.mark.parametrize(
    "under_the_fault",
    [
        "filemap_fault folio_wait_bit_common io_schedule",
        "do_swap_page folio_wait_bit io_schedule",
        "lock_mm_and_find_vma down_read_killable rwsem_down_read_slowpath",
        "handle_userfault",
        "",
    ],
)
def test_a_page_fault_is_the_cause_whatever_serves_it(under_the_fault: str) -> None:
    fault = "[k]asm_exc_page_fault;[k]exc_page_fault;[k]handle_mm_fault"
    rest = "".join(f";[k]{name}" for name in under_the_fault.split())
    assert _only_cause(profile_of(Sample(f"main;{fault}{rest};[k]schedule", MS))) is (
        Cause.PAGE_FAULT
    )


def test_a_fault_inside_a_system_call_is_a_page_fault() -> None:
    kernel = "ksys_read anon_pipe_read copy_page_to_iter asm_exc_page_fault exc_page_fault"
    assert _only_cause(profile_of(Sample(_stack(kernel), MS))) is Cause.PAGE_FAULT


def test_a_stop_on_the_way_out_of_a_fault_is_no_page_fault() -> None:
    kernel = "asm_exc_page_fault exc_page_fault exit_to_user_mode_loop get_signal do_signal_stop"
    assert _only_cause(profile_of(Sample(_stack(kernel), MS))) is Cause.OTHER


def test_the_innermost_rule_decides() -> None:
    kernel = "ksys_write ext4_file_write_iter down_write rwsem_down_write_slowpath"
    assert _only_cause(profile_of(Sample(_stack(kernel), MS))) is Cause.LOCK


@pytest.mark.parametrize(
    "name",
    [
        "pthread_mutex_lock",
        "___pthread_mutex_lock",
        "__GI___pthread_mutex_lock",
        "pthread_cond_wait@@GLIBC_2.3.2",
        "__futex_abstimed_wait_common64",
        "__lll_lock_wait",
    ],
)
def test_thread_library_names_serve_where_kernel_frames_are_missing(name: str) -> None:
    assert _only_cause(profile_of(Sample(f"main;{name}", MS))) is Cause.LOCK


def test_a_lock_call_far_from_the_leaf_decides_nothing() -> None:
    assert _only_cause(profile_of(Sample("pthread_mutex_lock;a;b;c;d;e", MS))) is Cause.OTHER


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/usr/lib/x86_64-linux-gnu/libc.so.6", Cause.POLL),
        ("/lib/libc-2.31.so", Cause.POLL),
        ("/opt/server", Cause.OTHER),
        ("", Cause.OTHER),
    ],
)
def test_common_words_are_believed_of_libc_only(path: str, expected: Cause) -> None:
    profile = profile_of(Sample("main;poll", MS))
    profile = replace(profile, binaries=(Binary(path, ""), Binary("[kernel.kallsyms]", "")))
    assert _only_cause(profile) is expected


def test_user_functions_named_like_the_kernels_are_not_taken_for_them() -> None:
    assert _only_cause(profile_of(Sample("main;ext4_read;do_nanosleep", MS))) is Cause.OTHER


def test_profiles_without_anything_and_with_anything() -> None:
    assert len(classify(empty_profile())) == 0
    assert set(classify(hostile_profile()).tolist()) == {Cause.OTHER}
    assert classify(deep_profile()).tolist() == [Cause.OTHER]


def test_labels_are_in_the_order_of_values() -> None:
    assert [cause.label for cause in Cause] == list(CAUSES)
    assert CAUSES == (
        "lock",
        "GIL",
        "I/O",
        "poll",
        "sleep",
        "pipe/socket",
        "page fault",
        "child process",
        "GPU wait",
        "other",
    )


_WAITS = [
    call.symbol
    for api in APIS
    for call in api.calls
    if call.operation in (Operation.SYNCHRONIZE, Operation.COPY)
]


@pytest.mark.parametrize("name", [*_WAITS, "POclFinish", "__GI_clFinish"])
def test_a_call_that_waits_for_a_device_is_the_cause_whatever_it_does(name: str) -> None:
    waits = (
        f"main;{name};pocl_wait;pthread_cond_wait;[k]futex_wait",
        f"main;{name};[k]do_sys_poll;[k]poll_schedule_timeout",
        f"main;{name}",
        f"main;[p]step;{name};ioctl;[k]asm_exc_page_fault;[k]rwsem_down_read_slowpath",
    )
    profile = profile_of(*(Sample(stack, MS) for stack in waits))
    assert classify(profile).tolist() == [Cause.GPU_WAIT] * len(waits)


def test_names_that_only_look_like_device_waits_are_none() -> None:
    stacks = ("main;[p]clFinish;[k]futex_wait", "main;clFinishing;[k]futex_wait")
    profile = profile_of(*(Sample(stack, MS) for stack in stacks))
    assert classify(profile).tolist() == [Cause.LOCK] * 2
