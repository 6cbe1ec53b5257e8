# SPDX-License-Identifier: Apache-2.0
"""Which CPUs are sampled."""

from __future__ import annotations

import errno
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


class _Clocks:
    """Clocks of CPUs as the kernel gives them, which count while they are read.

    Attributes:
        listing: Has the CPUs that are online.
        enabled: CPUs whose clock was begun, in order.
        standing: Those whose clock counts no more; it is taken out with the next one.
        refused: Those that get none.
        slept_ns: For how long the machine has slept.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.listing = folder / "online"
        self.cpus: dict[int, int] = {}  # by descriptor
        self.enabled: list[int] = []
        self.standing: set[int] = set()
        self.refused: set[int] = set()
        self.slept_ns = 7
        monkeypatch.setattr(probes, "_ONLINE_CPUS", self.listing)
        monkeypatch.setattr(probes, "_slept_ns", lambda: self.slept_ns)
        calls = {
            "open_cpu_clock": self._open,
            "open_raw_tracepoint": lambda *_: os.memfd_create("point"),
            "set_event_program": lambda fd, program: None,
            "enable_event": lambda fd: self.enabled.append(self.cpus[fd]),
        }
        for name, call in calls.items():
            monkeypatch.setattr(probes.sysbpf, name, call)

    def _open(self, cpu: int, period_ns: int) -> int:
        assert period_ns == 10_000_000
        if cpu in self.refused:
            raise OSError(errno.ENFILE, "no room")
        fd = os.memfd_create(f"clock {cpu}")
        self.cpus[fd] = cpu
        if cpu not in self.standing:
            os.pwrite(fd, bytes(range(240)), 0)  # each count is another one
        self.standing.discard(cpu)
        return fd

    def attach(self) -> probes.Probes:
        names = ("on_fork", "on_exec", "on_exit", "on_cpu_sample")
        programs: Any = SimpleNamespace(fds=dict.fromkeys(names, -1))
        attached = probes.Probes(programs, off_cpu=False)
        attached.start_clocks(10_000_000)
        return attached


@pytest.fixture
def clocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> _Clocks:
    return _Clocks(tmp_path, monkeypatch)


def test_cpus_that_come_online_are_sampled_and_counted(clocks: _Clocks) -> None:
    # GIVEN a recording with two CPUs, WHEN nothing changes
    clocks.listing.write_text("0-1\n")
    attached = clocks.attach()
    assert attached.follow_cpus() == set()
    # AND WHEN one goes, and two come
    clocks.listing.write_text("0,2-3\n")
    assert attached.follow_cpus() == {2, 3}
    assert attached.follow_cpus() == set()
    # AND the one that went comes again, whose clock has stopped for good
    clocks.listing.write_text("0-3\n")
    assert attached.follow_cpus() == {1}
    # THEN each was sampled from when it was there
    assert sorted(clocks.enabled) == [0, 1, 1, 2, 3]
    attached.close()
    assert not any(Path(f"/proc/self/fd/{fd}").exists() for fd in clocks.cpus)


def test_cpus_that_slept_with_the_machine_are_sampled_anew(clocks: _Clocks) -> None:
    # GIVEN CPUs that were all there whenever it was looked
    clocks.listing.write_text("0-2\n")
    attached = clocks.attach()
    assert attached.follow_cpus() == set()
    # WHEN the machine has slept meanwhile
    clocks.slept_ns += 3_000_000_000
    # THEN they have new clocks, once
    assert attached.follow_cpus() == {0, 1, 2}
    assert attached.follow_cpus() == set()
    attached.close()
    assert not any(Path(f"/proc/self/fd/{fd}").exists() for fd in clocks.cpus)


def test_a_clock_that_stands_is_replaced(clocks: _Clocks) -> None:
    # GIVEN a CPU that went and came between two looks
    clocks.listing.write_text("0-2\n")
    clocks.standing = {1}
    attached = clocks.attach()
    # THEN it is found in some turns, and only once
    came = [attached.follow_cpus() for _ in range(12)]
    assert [*filter(None, came)] == [{1}]
    attached.close()


def test_a_cpu_whose_clock_was_refused_is_tried_again(clocks: _Clocks) -> None:
    clocks.listing.write_text("0\n")
    attached = clocks.attach()
    # GIVEN a CPU that came when there was no room
    clocks.refused = {1}
    clocks.listing.write_text("0-1\n")
    assert not any(attached.follow_cpus() for _ in range(4))
    # WHEN there is THEN it is sampled
    clocks.refused = set()
    assert {1} in [attached.follow_cpus() for _ in range(4)]
    attached.close()
