# SPDX-License-Identifier: Apache-2.0
"""The kernel's own account beside what was counted: when they agree, and what is said if not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from aiflame.agent.commands.record_summary import loss_lines
from aiflame.agent.commands.tables import print_tables
from aiflame.agent.model.accounts import THREAD_ACCOUNT_DTYPE, Accounts, Delay
from aiflame.agent.model.profile import Process, Profile, SampleClass, Thread, TimeRange
from aiflame.agent.reports import FORMATS
from aiflame.agent.reports.accounts import account_tables, compared, disagreement
from aiflame.agent.reports.base import ReportOptions, View
from aiflame.agent.reports.facts import recording_facts, warnings
from aiflame.agent.reports.stats import tables
from aiflame.agent.reports.time_range import in_range
from goldens import assert_golden
from profiles import MS, PROCESSES, RECORDING, THREADS, Sample, profile_of

_S = 1_000 * MS

# Of ten seconds on two CPUs, one thread computes and waits for a CPU, one sleeps.
_RECORDING = replace(RECORDING, duration_ns=10 * _S, facts=(*RECORDING.facts, ("CPUs", "2")))
_THREADS = (
    Thread(0, 100, "server", 6 * _S, 10 * _S),
    Thread(0, 101, "worker", 0, 10 * _S),
    Thread(1, 200, "client", 1 * _S, 2 * _S),
)


def _profile(
    *rows: tuple[int, int, int, int, int],
    open_wait_ns: int = 0,
    threads: tuple[Thread, ...] = _THREADS,
    processes: tuple[Process, ...] = PROCESSES,
    interrupted_ns: int = 0,
    delays: tuple[Delay, ...] = (),
    ended: tuple[int, ...] = (),
) -> Profile:
    """Returns a profile with accounts (thread, on CPU, in a run queue, time slices, misaligned)."""
    profile = profile_of(
        Sample("main", 6 * _S, count=600),
        Sample("main", 3 * _S, SampleClass.PREEMPTED, count=1_000),
        Sample("main", 1 * _S, SampleClass.WAITING_TO_RUN, count=100),
        Sample("main;poll", 10 * _S, SampleClass.BLOCKED, thread=1, count=1),
        recording=_RECORDING,
        threads=threads,
        processes=processes,
    )
    accounts = np.array(
        [(*row, open_wait_ns, row[0] in ended) for row in rows], THREAD_ACCOUNT_DTYPE
    )
    return replace(profile, accounts=Accounts(accounts, interrupted_ns, delays))


def test_what_agrees_is_not_worth_a_word() -> None:
    profile = _profile((0, 6 * _S + 50 * MS, 4 * _S - 40 * MS, 1_100, 0), (1, 0, 0, 0, 0))
    assert disagreement(profile) == ""
    assert not [line for line in warnings(profile) if "account" in line]
    assert dict(recording_facts(profile))["kernel's own account"] == (
        "6.050 s on CPUs, counted here 6.000 s; 3.960 s waiting for one, counted here 4.000 s; of"
        " the 2 threads there at the end"
    )


@pytest.mark.parametrize(
    ("on_cpu_ns", "in_queue_ns", "line"),
    [
        (
            5_400 * MS,
            4 * _S,
            "The kernel's own account differs: it has 5.400 s on CPUs, 10.00 % less than the"
            " 6.000 s counted at context switches",
        ),
        (
            6 * _S,
            5 * _S,
            "The kernel's own account differs: it has 5.000 s waiting for one, 25.00 % more than"
            " the 4.000 s counted at context switches",
        ),
        (
            9 * _S,
            1 * _S,
            "The kernel's own account differs: it has 9.000 s on CPUs, 50.00 % more than the"
            " 6.000 s counted at context switches and 1.000 s waiting for one, 75.00 % less than"
            " the 4.000 s counted at context switches",
        ),
    ],
)
def test_a_disagreement_is_one_line_everywhere(on_cpu_ns: int, in_queue_ns: int, line: str) -> None:
    profile = _profile((0, on_cpu_ns, in_queue_ns, 1_100, 0))
    assert disagreement(profile) == line
    assert f"{line}." in warnings(profile)
    assert f"{line}." in [*loss_lines(profile)]
    page = FORMATS["html"].render(profile, ReportOptions()).decode()
    assert line.replace("'", "&#x27;") in page


def test_more_than_two_percent_is_a_disagreement() -> None:
    # Besides, two ticks of 10 ms and 5 us for each of ten switches.
    slack_ns = 20 * MS + 50_000
    most_ns = 6 * _S + 120 * MS + slack_ns
    assert disagreement(_profile((0, most_ns, 4 * _S, 10, 0))) == ""
    assert "2.33 % more" in disagreement(_profile((0, most_ns + 1, 4 * _S, 10, 0)))


def test_what_was_read_at_another_moment_may_differ_by_that() -> None:
    apart = (0, 5 * _S, 4 * _S, 1_100)
    assert disagreement(_profile((*apart, 0)))
    assert disagreement(_profile((*apart, 900 * MS))) == ""
    # But no more than there are CPUs can have run meanwhile, however many threads there are.
    threads = (_THREADS[0], *(Thread(0, 300 + i, "idle", 1, 10 * _S) for i in range(500)))
    idle = [(i, 1, 0, 1, 30 * MS) for i in range(1, 501)]
    assert disagreement(_profile((*apart, 30 * MS), *idle, threads=threads))


def test_a_wait_that_is_open_when_it_is_read_is_no_disagreement() -> None:
    apart = (0, 6 * _S, 5 * _S, 1_100, 0)
    assert disagreement(_profile(apart))
    assert disagreement(_profile(apart, open_wait_ns=1 * _S)) == ""
    # Time on a CPU is another matter.
    assert disagreement(_profile((0, 7 * _S, 4 * _S, 1_100, 0), open_wait_ns=1 * _S))


def test_interrupts_and_the_hypervisor_are_no_disagreement() -> None:
    apart = (0, 5 * _S, 4 * _S, 1_100, 0)
    assert disagreement(_profile(apart, interrupted_ns=900 * MS)) == ""


def test_an_account_goes_on_past_exec() -> None:
    exec_ns = 4 * _S
    shell = replace(PROCESSES[0], name="sh")
    command = replace(PROCESSES[0], started_ns=exec_ns)
    threads = (
        replace(_THREADS[0], on_cpu_ns=6 * _S, observed_ns=exec_ns),
        Thread(1, 100, "server", 2 * _S, 6 * _S),
    )
    profile = _profile((1, 8 * _S, 4 * _S, 1_100, 0), threads=threads, processes=(shell, command))
    assert disagreement(profile) == ""
    # Another process that had the number, and is over, is another.
    ended = (replace(shell, exited_ns=3 * _S), command)
    profile = _profile((1, 2 * _S, 0, 1_100, 0), threads=threads, processes=ended)
    assert disagreement(profile) == ""


def test_an_account_is_of_one_process_of_several_with_its_number() -> None:
    shell = replace(PROCESSES[0], name="sh", exited_ns=3 * _S)
    threads = (
        replace(_THREADS[0], on_cpu_ns=2 * _S, observed_ns=3 * _S),
        Thread(1, 100, "server", 4 * _S, 6 * _S),
    )
    processes = (shell, replace(PROCESSES[0], started_ns=4 * _S))
    rows = ((0, 2 * _S, 4 * _S, 300, 0), (1, 4 * _S, 0, 800, 0))
    found = compared(_profile(*rows, threads=threads, processes=processes, ended=(0,)))
    assert found is not None
    assert found.on_cpu_ns.tolist() == [2 * _S, 4 * _S]
    assert found.waited_ns.tolist() == [4 * _S, 0]


def test_of_what_ended_the_kernel_may_have_less_and_not_more() -> None:
    # 100 children that ran for 5 ms each, which no tick has seen.
    threads = tuple(Thread(0, 300 + i, "child", 5 * MS, 6 * MS) for i in range(100))
    for each_ns, line in (
        (0, ""),
        (5 * MS, ""),
        (
            6 * MS,
            "The kernel's own account differs: it has 600.000 ms on CPUs, 20.00 % more than the"
            " 500.000 ms counted at context switches",
        ),
    ):
        rows = [(i, each_ns, 0, 1, 0) for i in range(1, 100)]
        waits = (0, each_ns, 4 * _S, 1, 0)  # of the samples that the profile has
        profile = _profile(waits, *rows, threads=threads, ended=tuple(range(100)))
        assert disagreement(profile) == line
    # Where they ran for longer than a tick and what it takes to end, that much is missing.
    threads = (Thread(0, 300, "child", 1 * _S, 2 * _S),)
    rows = (0, 800 * MS, 4 * _S, 1, 0)
    assert "20.00 % less" in disagreement(_profile(rows, threads=threads, ended=(0,)))
    assert disagreement(_profile((0, 900 * MS, *rows[2:]), threads=threads, ended=(0,))) == ""


def test_how_many_have_ended_is_said() -> None:
    profile = _profile((0, 6 * _S, 4 * _S, 1_100, 0), (1, 0, 0, 0, 0), ended=(1,))
    words = dict(recording_facts(profile))["kernel's own account"]
    assert words.endswith("of 2 threads, 1 of which ended before")
    table = next(account_tables(profile, 10))
    assert "in taskstats, of those that ended before" in table.whole


def test_times_that_cannot_be_are_shown_as_they_are() -> None:
    most_ns = (1 << 63) - 1
    threads = (
        replace(_THREADS[0], on_cpu_ns=most_ns, observed_ns=most_ns),
        Thread(1, 100, "server", most_ns, most_ns),
    )
    processes = (PROCESSES[0], PROCESSES[0])
    row = (1, most_ns // 2, most_ns // 2, 1 << 40, most_ns // 2)
    profile = _profile(row, threads=threads, processes=processes, open_wait_ns=most_ns // 2)
    assert compared(profile) is not None
    assert [*account_tables(profile, 10)]
    assert isinstance(disagreement(profile), str)


def test_a_thread_is_not_counted_while_it_ends() -> None:
    ends = replace(PROCESSES[0], exited_ns=9 * _S)
    apart = (0, 6_900 * MS, 4 * _S, 1_100, 0)
    assert disagreement(_profile(apart))
    assert disagreement(_profile(apart, processes=(ends, PROCESSES[1]))) == ""
    # And no longer than it was accounted at all.
    idle = _profile((0, 5 * _S, 4 * _S, 1_100, 0), (2, 1, 0, 1, 0))
    assert disagreement(idle)
    over = replace(PROCESSES[1], exited_ns=0)
    assert disagreement(replace(idle, processes=(PROCESSES[0], over))) == disagreement(idle)


def test_without_context_switches_there_is_nothing_to_compare_with() -> None:
    threads = tuple(replace(thread, on_cpu_ns=0, observed_ns=0) for thread in _THREADS)
    profile = _profile((0, 6 * _S, 4 * _S, 1_100, 0), threads=threads)
    assert compared(profile) is None
    assert disagreement(profile) == ""
    (table,) = account_tables(profile, 10)
    assert table.rows == (
        ("", "6,000.00", "", "4,000.00", "1,100", "server (100)", "server (100)"),
    )


def test_of_a_time_range_nothing_is_accounted() -> None:
    profile = in_range(_profile((0, 1, 1, 1, 0)), TimeRange(0, 5 * _S))
    assert [*account_tables(profile, 10)] == []
    assert disagreement(profile) == ""


_DELAYS = (
    Delay(0, "blkio", 40, 1_500 * MS),
    Delay(0, "freepages", 2, 30 * MS),
    Delay(1, "blkio", 3, 15_000 * _S),
)


def test_what_the_tables_say(capsys: pytest.CaptureFixture[str]) -> None:
    profile = _profile((0, 6 * _S, 4 * _S, 1_100, 0), (1, 0, 0, 0, 0), delays=_DELAYS)
    print_tables([*account_tables(profile, 10)])
    assert_golden("accounts.stats.txt", capsys.readouterr().out.encode())
    facts = dict(recording_facts(profile))
    assert facts["kernel's delay accounting"] == (
        "block I/O 1.500 s, memory reclaim 30.000 ms; without 1 that cannot be"
    )


def test_only_tables_of_threads_have_accounts() -> None:
    profile = _profile((0, 6 * _S, 4 * _S, 1_100, 0), delays=_DELAYS)
    ours = {table.title for table in account_tables(profile, 10)}
    for view in View:
        titles = {table.title for table in tables(profile, view, 10)}
        assert titles >= ours or view in (View.GPU, View.GPU_TIME)
        assert titles & ours == set() or view not in (View.GPU, View.GPU_TIME)


def test_the_busiest_threads_come_first() -> None:
    profile = _profile((0, 5, 0, 1, 0), (1, 0, 9, 1, 0), (2, 7, 0, 1, 0))
    (table,) = account_tables(profile, 2)
    assert [row[-2] for row in table.rows] == ["worker (101)", "client (200)"]
    assert table.left_out == 1


def test_the_default_profile_has_no_accounts() -> None:
    assert [*account_tables(profile_of(Sample("main", MS), threads=THREADS), 10)] == []
