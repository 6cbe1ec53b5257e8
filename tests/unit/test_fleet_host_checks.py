# SPDX-License-Identifier: Apache-2.0
"""What the agent refuses, and what it says about a host's cgroups."""

from __future__ import annotations

from pathlib import Path

import pytest
from aiflame.agent.errors import EnvironmentUnfit
from aiflame.agent.fleet import host_checks
from aiflame.agent.fleet.host_checks import (
    CgroupLayout,
    cgroup_layout,
    cgroup_mount_note,
    cgroup_namespace_note,
    require_host_pids,
)

_V2 = "cgroup2 /sys/fs/cgroup cgroup2 rw 0 0"
_V1 = "cgroup /sys/fs/cgroup/cpu cgroup rw,cpu 0 0"


@pytest.mark.parametrize(
    ("mounts", "layout", "words"),
    [
        ([_V2, "proc /proc proc rw 0 0"], CgroupLayout.UNIFIED, ""),
        ([_V1, _V2], CgroupLayout.HYBRID, "grouped by v1 alone"),
        ([_V1, "odd"], CgroupLayout.LEGACY, "no id of a cgroup"),
        ([], CgroupLayout.LEGACY, "process by process"),
    ],
)
def test_what_a_host_s_cgroups_allow(mounts: list[str], layout: CgroupLayout, words: str) -> None:
    assert cgroup_layout(mounts) is layout
    assert words in layout.note
    assert bool(words) == bool(layout.note)


def test_a_nested_pid_namespace_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_checks, "is_host_pid_namespace", lambda: False)
    with pytest.raises(EnvironmentUnfit, match="pid namespace of its own") as refusal:
        require_host_pids()
    assert "hostPID: true" in str(refusal.value.hint)
    monkeypatch.setattr(host_checks, "is_host_pid_namespace", lambda: True)
    require_host_pids()


def test_another_cgroup_namespace_is_told(tmp_path: Path) -> None:
    assert "--cgroupns=host" in cgroup_namespace_note(tmp_path)
    assert cgroup_namespace_note(tmp_path / "none") == ""


_HOSTS = "31 24 0:27 / /sys/fs/cgroup ro,nosuid shared:9 - cgroup2 cgroup2 rw"
_OWN = "30 24 0:27 /libpod-1 /sys/fs/cgroup ro,nosuid - cgroup2 cgroup rw"
_OTHER = "32 24 0:5 / /proc rw - proc proc rw"


@pytest.mark.parametrize(
    ("mounts", "is_told"),
    [
        ([_OTHER, _HOSTS], False),
        ([_OTHER, _OWN], True),
        ([_OWN, _HOSTS], False),
        ([_OTHER], False),  # v1 alone
        (["", "odd - cgroup2", "- cgroup2 x y"], False),
    ],
)
def test_cgroups_of_one_container_alone_are_told(mounts: list[str], is_told: bool) -> None:
    assert ("mount the host's /sys/fs/cgroup" in cgroup_mount_note(mounts)) == is_told
