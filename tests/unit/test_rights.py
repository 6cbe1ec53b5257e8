# SPDX-License-Identifier: Apache-2.0
"""Capabilities: their numbers, what is missing, what is given up, and what is tried without one."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Collection
from types import SimpleNamespace

import pytest
from aiflame.agent import rights
from aiflame.agent.errors import EnvironmentUnfit
from aiflame.agent.kernel import least
from aiflame.agent.kernel.uprobe_tries import UprobeAnswers, UprobeTries
from aiflame.agent.rights import Capability


def test_numbers_are_the_kernels() -> None:
    names = " ".join(map(str, Capability))
    source = f"#include <linux/capability.h>\n{names}\n"
    done = subprocess.run(
        ["gcc", "-E", "-P", "-"], input=source, capture_output=True, text=True, check=True
    )
    assert done.stdout.split()[-len(Capability) :] == [str(int(one)) for one in Capability]


def _hold(monkeypatch: pytest.MonkeyPatch, held: Collection[Capability]) -> None:
    bits = sum(1 << capability for capability in held)
    monkeypatch.setattr(rights, "_sets", lambda: (bits, bits, 0))


def test_what_is_missing_is_named_with_what_it_is_for(monkeypatch: pytest.MonkeyPatch) -> None:
    _hold(monkeypatch, {Capability.SYS_PTRACE, Capability.PERFMON})
    with pytest.raises(EnvironmentUnfit, match="needs CAP_BPF to load programs") as refused:
        rights.require()
    assert "CAP_PERFMON" not in str(refused.value)
    assert "sudo" in str(refused.value.hint)


def test_admin_stands_for_the_rights_that_were_split_off_from_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _hold(monkeypatch, {Capability.SYS_ADMIN, Capability.SYS_PTRACE})
    rights.require()
    assert rights.missing(rights.USED - {Capability.CHECKPOINT_RESTORE}) == rights.missing(
        rights.USED
    )
    assert Capability.SYSLOG in rights.missing(rights.USED)


@pytest.mark.parametrize(
    ("held", "left"),
    [
        ({Capability.SYS_ADMIN, *rights.USED}, rights.USED),
        # It is all that there is of those.
        (
            {Capability.SYS_ADMIN, Capability.SYS_PTRACE},
            {Capability.SYS_ADMIN, Capability.SYS_PTRACE},
        ),
    ],
)
def test_admin_stays_where_it_stands_for_what_is_kept(
    held: set[Capability], left: set[Capability], monkeypatch: pytest.MonkeyPatch
) -> None:
    _hold(monkeypatch, held)
    kept: list[int] = []
    monkeypatch.setattr(rights, "_libc", SimpleNamespace(prctl=lambda *_: 0))
    monkeypatch.setattr(rights, "_set_all", kept.append)
    rights.keep_only(rights.USED)
    assert {capability for capability in held if kept[0] >> capability & 1} == left


def _tried(before: str = "") -> list[str]:
    """Runs a script in a process of its own; returns its effective and permitted set at the end."""
    script = f"""
from aiflame.agent import rights
from aiflame.agent.rights import Capability
{before}
for line in open("/proc/thread-self/status"):
    if line.startswith(("CapEff", "CapPrm")):
        print(line.split()[1])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_what_is_given_up_is_gone_from_both_sets() -> None:
    kept = {Capability.SYS_PTRACE, Capability.CHOWN}
    bits = sum(1 << capability for capability in kept)
    before = _tried()
    after = _tried("rights.keep_only({Capability.SYS_PTRACE, Capability.CHOWN})")
    assert [int(one, 16) for one in after] == [int(one, 16) & bits for one in before]


def test_program_that_is_started_later_has_no_more() -> None:
    script = "import os; from aiflame.agent import rights; rights.keep_only(());"
    script += "os.execvp('grep', ['grep', '-E', 'Cap(Eff|Prm)', '/proc/self/status'])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert {int(line.split()[1], 16) for line in done.stdout.splitlines()} == {0}


@pytest.mark.parametrize(
    ("answer", "is_permitted"),
    [(errno.EACCES, False), (errno.EPERM, False), (errno.EINVAL, True), (0, True)],
)
def test_trial_says_what_the_kernel_does(answer: int, is_permitted: bool) -> None:
    def attempt() -> None:
        if answer:
            raise OSError(answer, os.strerror(answer))

    assert rights.works_without(Capability.SYS_ADMIN, attempt) is is_permitted


def test_trial_is_without_the_capability_and_its_caller_keeps_it() -> None:
    seen: list[Collection[Capability]] = []
    before = rights.missing(Capability)
    rights.works_without(Capability.SYSLOG, lambda: seen.append(rights.missing(Capability)))
    assert Capability.SYSLOG in seen[0]
    assert rights.missing(Capability) == before


@pytest.mark.parametrize(
    ("refused", "links_many", "uses", "costs", "is_kept"),
    [
        (set(), False, {"calls"}, [], False),
        ({"_open_uprobe"}, False, {"calls"}, ["calls of device APIs are not recorded"], True),
        ({"_open_uprobe"}, True, {"calls"}, [], False),  # no event is needed
        ({"_open_uprobe"}, False, {}, ["calls of device APIs are not recorded"], False),
        ({"_open_clock"}, True, {"calls"}, ["CPUs are not sampled"], True),
        # Which is read at the start.
        ({"_read_kernel_stack"}, True, {"calls"}, ["threads that sleep since before"], False),
        # Which ask for seccomp filters at any time.
        (set(), True, {"calls", "helpers"}, [], True),
    ],
)
def test_admin_is_kept_for_what_this_kernel_asks_it_for(
    refused: set[str],
    links_many: bool,
    uses: Collection[str],
    costs: list[str],
    is_kept: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept: list[Collection[Capability]] = []
    uprobes = UprobeTries(None, lambda _: UprobeAnswers(links_many))
    monkeypatch.setattr(rights, "works_without", lambda _, attempt: attempt.__name__ not in refused)
    monkeypatch.setattr(rights, "keep_only", kept.append)
    found = least.costs_without_admin(uprobes)
    starts = [*costs, "processes with a seccomp filter"]
    assert all(cost.startswith(start) for cost, start in zip(found, starts, strict=True))
    least.give_up_admin(uprobes, "calls" in uses, "helpers" in uses)
    assert kept == ([] if is_kept else [rights.USED])
