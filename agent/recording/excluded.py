# SPDX-License-Identifier: Apache-2.0
"""Cgroups that are not recorded: the kernel half looks for a process's own in a map of them.

What is excluded costs that look-up (bpf/store.h, is_excluded). Each cgroup stands for itself, not
for those below it, since a look-up for each ancestor would be paid by all that is recorded: whoever
excludes a tree lists what is in it.

Kernels tell programs no id of v1's groups: the processes in these are marked one by one, by what
/proc/PID/cgroup says when they are seen first, and again when they call exec.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable
from pathlib import Path

from aiflame.agent.kernel import abi
from aiflame.agent.kernel.loader import Programs
from aiflame.agent.kernel.sysbpf import BPF_EXIST
from aiflame.agent.processes import procfs
from aiflame.agent.processes.table import ProcessImage
from aiflame.agent.processes.targets import cgroup2_mounts


class ExcludedCgroups:
    """The cgroups that are excluded at a time.

    Args:
        programs: The kernel half; with room for as many as `ProgramOptions.excluded_max` says.
    """

    def __init__(self, programs: Programs) -> None:
        self._map = programs.excluded_cgroups
        self._ids: frozenset[int] = frozenset()
        self._mounts = cgroup2_mounts()

    def set(self, ids: Collection[int]) -> int:
        """Excludes these cgroups, and no others from now on.

        Args:
            ids: As bpf_get_current_cgroup_id() has them: inodes of directories of cgroup v2.

        Returns:
            How many found no room, and are recorded.
        """
        wanted = frozenset(ids)
        for cgroup_id in self._ids - wanted:
            self._map.delete(cgroup_id.to_bytes(8, "little"))
        kept = self._ids & wanted
        # Lowest first: the same ones are left out each time.
        fitting = sorted(wanted - kept)[: max(self._map.max_entries - len(kept), 0)]
        for cgroup_id in fitting:
            self._map.update(cgroup_id.to_bytes(8, "little"), (1).to_bytes(4, "little"))
        self._ids = kept.union(fitting)
        return len(wanted) - len(self._ids)

    def has(self, pid: int) -> bool:
        """Whether a process is in one of them."""
        if not self._ids:
            return False
        path = procfs.cgroups(pid).unified
        return any(_id_of(mount, path) in self._ids for mount in self._mounts)


class LeftOutProcesses:
    """The processes that are left out by themselves: they and their children, until an exec.

    Args:
        programs: The kernel half, with room for excluded cgroups.
    """

    def __init__(self, programs: Programs) -> None:
        self._processes = programs.processes
        self._paths: frozenset[str] = frozenset()

    def set(self, paths: Collection[str], images: Iterable[ProcessImage]) -> None:
        """Leaves out what is in cgroups of these paths, and nothing else from now on.

        Args:
            paths: As `CgroupPaths.telling` has them.
            images: Those that are recorded.
        """
        before, self._paths = self._paths, frozenset(paths)
        if before - self._paths:
            pids, states = self._processes.read_all()
            for pid in pids[states["flags"] & abi.ProcessFlag.LEFT_OUT != 0].tolist():
                self.look_again(pid)
        new = self._paths - before
        for image in images:
            if image.cgroup in new:
                self.leave_out(image)

    def has(self, pid: int) -> bool:
        """Whether a process is in one of the cgroups."""
        return bool(self._paths) and procfs.cgroups(pid).telling in self._paths

    def leave_out(self, image: ProcessImage) -> bool:
        """Leaves out a process that was recorded, if it is in one of the cgroups; whether it is."""
        if image.cgroup not in self._paths:
            return False
        key = image.pid.to_bytes(4, "little")
        state = self._processes.lookup(key)
        if state is None or int(state["image"][0]) != image.image:
            return False  # it has ended, or called exec, which is told
        state["flags"] = abi.ProcessFlag.LEFT_OUT | state["flags"] & abi.ProcessFlag.SEEN
        if not self._processes.update(key, state.tobytes(), BPF_EXIST):
            return False
        return not self.look_again(image.pid)  # it may have moved, and called exec just now

    def look_again(self, pid: int) -> bool:
        """Records a process that is left out, if it is in none of the cgroups; whether it is so."""
        path = procfs.cgroups(pid).telling
        if not path or path in self._paths:
            return False
        key = pid.to_bytes(4, "little")
        state = self._processes.lookup(key)
        if state is None or not state["flags"][0] & abi.ProcessFlag.LEFT_OUT:
            return False
        # As a new one: of what it was before, nothing is known any more.
        state["image"], state["flags"] = time.monotonic_ns(), abi.ProcessFlag.TARGET
        return self._processes.update(key, state.tobytes(), BPF_EXIST)


def _id_of(mount: Path, path: str) -> int:
    """Returns the id of a cgroup, 0 if it is not there.

    cgroup_ino() of include/linux/cgroup.h (v5.5): on 64-bit hosts the inode is the id.
    """
    try:
        return (mount / path.lstrip("/")).stat().st_ino
    except OSError:
        return 0
