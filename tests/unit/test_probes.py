# SPDX-License-Identifier: Apache-2.0
"""Which CPUs are sampled."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiflame.agent.kernel import probes


@pytest.mark.parametrize(
    ("text", "cpus"),
    [("0\n", [0]), ("0-3\n", [0, 1, 2, 3]), ("0,2-3,8\n", [0, 2, 3, 8]), ("7-7\n", [7])],
)
def test_online_cpus(
    text: str, cpus: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listing = tmp_path / "online"
    listing.write_text(text)
    monkeypatch.setattr(probes, "_ONLINE_CPUS", listing)
    assert probes.online_cpus() == cpus


def test_possible_cpus_counts_those_that_are_not_online(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listing = tmp_path / "possible"
    listing.write_text("0-127\n")
    monkeypatch.setattr(probes, "_POSSIBLE_CPUS", listing)
    assert probes.possible_cpus() == 128


def test_cpus_that_come_online_are_sampled_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listing = tmp_path / "online"
    monkeypatch.setattr(probes, "_ONLINE_CPUS", listing)
    clocks: dict[int, int] = {}  # of CPUs, by descriptor
    enabled: list[int] = []

    def open_cpu_clock(cpu: int, period_ns: int) -> int:
        assert period_ns == 10_000_000
        fd = os.memfd_create(f"clock {cpu}")
        clocks[fd] = cpu
        return fd

    monkeypatch.setattr(probes.sysbpf, "open_cpu_clock", open_cpu_clock)
    monkeypatch.setattr(probes.sysbpf, "open_raw_tracepoint", lambda *_: os.memfd_create("point"))
    monkeypatch.setattr(probes.sysbpf, "set_event_program", lambda fd, program: None)
    monkeypatch.setattr(probes.sysbpf, "enable_event", lambda fd: enabled.append(clocks[fd]))
    names = ("on_fork", "on_exec", "on_exit", "on_cpu_sample")
    programs: Any = SimpleNamespace(fds=dict.fromkeys(names, -1))
    attached = probes.Probes(programs, off_cpu=False)
    # GIVEN a recording with two CPUs, WHEN nothing changes
    listing.write_text("0-1\n")
    attached.start_clocks(10_000_000)
    assert attached.follow_cpus() == 0
    # AND WHEN one goes, and two come
    listing.write_text("0,2-3\n")
    assert attached.follow_cpus() == 2
    assert attached.follow_cpus() == 0
    # AND the one that went comes again, whose clock has stopped for good
    listing.write_text("0-3\n")
    assert attached.follow_cpus() == 1
    # THEN each was sampled from when it was there
    assert sorted(enabled) == [0, 1, 1, 2, 3]
    attached.close()
    assert not any(Path(f"/proc/self/fd/{fd}").exists() for fd in clocks)
