# SPDX-License-Identifier: Apache-2.0
"""Cgroups by their ids: what is left of a process that ended before anybody asked."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import support
from aiflame.agent.capture.reader import read_capture
from aiflame.agent.fleet.labels import Labeller, LabelOptions
from aiflame.agent.fleet.selection import Selection, have_containers, known_groups, left_out_paths
from aiflame.agent.inspector.inspector import Inspector
from aiflame.agent.processes import procfs
from aiflame.agent.processes.cgroup_ids import CgroupIds
from aiflame.agent.processes.container_names import EngineFacts
from aiflame.agent.processes.elf_images import ElfImages
from aiflame.agent.processes.facts import ProcessFacts
from aiflame.agent.processes.identity import CgroupPaths
from aiflame.agent.processes.table import ProcessTable
from aiflame.agent.processes.targets import cgroup2_mounts
from cgroups import made_groups

pytestmark = pytest.mark.bpf

_NAME = f"aiflame-ids-{os.getpid()}"
_SCOPE = f"libpod-{'0123456789abcdef' * 4}.scope"
# Computes, moves to another cgroup, and goes on.
_MOVES = """
import os, time
def compute(cpu_s):
    end = time.process_time() + cpu_s
    while time.process_time() < end:
        pass
print("ready", flush=True)
input()
compute(1)
with open({procs!r}, "w") as file:
    file.write(str(os.getpid()))
compute(4)  # several windows
"""
# No process has it: it is past the largest (PID_MAX_LIMIT).
_GONE = (1 << 22) + 1


def test_a_cgroup_has_its_path_when_it_was_there_to_be_asked_for() -> None:
    (mount, *_) = cgroup2_mounts()
    ids = CgroupIds()
    with made_groups(mount, f"{_NAME}/below") as (group,):
        number = group.stat().st_ino
        assert ids.path_of(number) == f"/{_NAME}/below"
    assert ids.path_of(number) == f"/{_NAME}/below"
    assert CgroupIds().path_of(number) == ""
    assert ids.path_of(mount.stat().st_ino) == "/"
    assert ids.path_of(0) == ids.path_of(2**63) == ""


def test_where_there_are_no_cgroups(tmp_path: Path) -> None:
    assert CgroupIds(tmp_path).path_of(1) == ""
    assert CgroupIds(tmp_path / "none").path_of(1) == ""


def test_a_cgroup_that_somebody_has_seen_keeps_its_path() -> None:
    (mount, *_) = cgroup2_mounts()
    with made_groups(mount, f"{_NAME}/seen") as (group,):
        number = group.stat().st_ino
        paths = {number: path for path, number in known_groups(mount).items()}
        assert paths[number] == f"/{_NAME}/seen"
        # By v2 alone nobody knows whose it is where processes are grouped by v1 as well.
        assert number not in known_groups(mount, is_v1_beside=True).values()
        assert not have_containers([mount / _NAME])
    with made_groups(mount, f"{_NAME}/{_SCOPE}"):
        assert have_containers([mount / "none", mount / _NAME])
    ids = CgroupIds()
    ids.know(paths)
    assert ids.path_of(number) == f"/{_NAME}/seen"


class _Taker:
    """Keeps what it is told of cgroups."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.cgroups: list[np.void] = []

    def text(self, text: str) -> int:
        self.texts.append(text)
        return len(self.texts) - 1

    def define(self, column: str, rows: npt.NDArray[np.void]) -> None:
        if column == "cgroups":
            self.cgroups += [*rows]


def test_a_process_that_is_gone_was_in_its_cgroup() -> None:
    (mount, *_) = cgroup2_mounts()
    with (
        Inspector() as inspector,
        made_groups(mount, f"{_NAME}/{_SCOPE}") as (group,),
    ):
        table = ProcessTable(1, lambda _: None, inspector)
        # WHEN the kernel told of a process which nobody can read any more
        image = table.seen(_GONE, 5, 0, "short", 6, group.stat().st_ino)
        other = table.seen(_GONE + 1, 5, 0, "short", 6)
        # THEN it is known where it ran, as it is told
        assert image.cgroup == f"/{_NAME}/{_SCOPE}"
        assert other.cgroup == ""
        # and windows are told by which id; of another path, as of a hierarchy of v1, there is none
        third = table.seen(_GONE + 2, 5, 0, "v1", 6, group.stat().st_ino)
        third.cgroup = "/docker/of-v1"
        taker = _Taker()
        ProcessFacts(taker, table, ElfImages(table.binaries)).tell(10)
        told = {taker.texts[row["path"]]: int(row["kernel_id"]) for row in taker.cgroups}
        assert told == {image.cgroup: group.stat().st_ino, third.cgroup: 0}
        table.binaries.close()


def test_windows_are_told_of_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    paths = {41: "/a", 42: "/a"}
    monkeypatch.setattr(procfs, "cgroups", lambda pid: CgroupPaths(paths.get(pid, ""), {}))
    with Inspector() as inspector:
        table, taker = ProcessTable(1, lambda _: 5, inspector), _Taker()
        facts = ProcessFacts(taker, table, ElfImages(table.binaries))

        def told() -> list[str]:
            taker.cgroups.clear()
            facts.tell(10)
            return [taker.texts[row["path"]] for row in taker.cgroups]

        # GIVEN two processes of one cgroup
        for pid in paths:
            table.seen(pid, 5, 1, "x", 6)
        assert told() == ["/a"]
        # WHEN one after the other moves THEN the new cgroup is told once
        for pid, new in ((41, ["/b"]), (42, [])):
            paths[pid] = "/b"
            table.follow_cgroups([(pid, 5)])
            assert told() == new
        # AND the old one anew: windows have it no more once nobody is in it
        paths[41] = "/a"
        table.follow_cgroups([(41, 5)])
        assert told() == ["/a"]
        facts.forget_images({image.index for image in table.images.values()})
        table.binaries.close()


def test_who_moves_while_it_is_recorded_is_where_it_went(tmp_path: Path) -> None:
    (mount, *_) = cgroup2_mounts()
    names = [f"{_NAME}/docker-{digit * 64}.scope" for digit in "ab"]
    script = _MOVES.format(procs=str(mount / names[1] / "cgroup.procs"))
    shell = 'echo $$ > "$1/cgroup.procs" && exec "$2" -c "$3"'
    with made_groups(mount, *names) as (first, _), (tmp_path / "log").open("wb") as log:
        command = ["sh", "-c", shell, "sh", str(first), sys.executable, script]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as moving:
            assert moving.stdin is not None and moving.stdout is not None
            moving.stdout.readline()
            capture = tmp_path / "moved.aiflame"
            words = [*support.AIFLAME, "record", "-p", str(moving.pid), "-o", str(capture)]
            with subprocess.Popen(words, stderr=log) as recorder:
                said = tmp_path / "log"
                support.wait_until(lambda: "recording" in said.read_text().lower(), 180)
                # WHEN it moves long after it was seen first
                moving.stdin.write(b"\n")
                moving.stdin.close()
                assert recorder.wait(180) == 0, said.read_text()
    found = [p.cgroup for p in read_capture(capture).processes if p.pid == moving.pid]
    assert found == [f"/{names[1]}"]


def test_rules_about_containers_become_ids_of_their_cgroups() -> None:
    (mount, *_) = cgroup2_mounts()
    web, job = (f"{_NAME}/docker-{digit * 64}.scope" for digit in "ab")
    # There may be containers here besides.
    known = {"a" * 64: EngineFacts("web"), "b" * 64: EngineFacts("job")}
    labeller = Labeller(
        LabelOptions("n"), None, lambda ids: {i: known[i] for i in ids if i in known}
    )
    with made_groups(mount, f"{web}/init", job) as (inner, other):
        # WHEN one container is excluded by its name
        rules = Selection.parse([], ["container=we?"])
        groups = known_groups(mount)
        found = {groups[path] for path in left_out_paths(groups, rules, labeller)}
        # THEN its cgroups are left out, and no other
        assert found == {inner.stat().st_ino, inner.parent.stat().st_ino}
        # AND where one is asked for, all others are
        rules = Selection.parse(["container=web"], [])
        found = {groups[path] for path in left_out_paths(groups, rules, labeller)}
        assert {other.stat().st_ino, mount.stat().st_ino} <= found
        assert inner.stat().st_ino not in found
