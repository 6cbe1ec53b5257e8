# SPDX-License-Identifier: Apache-2.0
"""Cgroups that are not recorded: the kernel half looks for a process's own in a map of them.

What is excluded costs that look-up (bpf/store.h, is_excluded). Each cgroup stands for itself, not
for those below it, since a look-up for each ancestor would be paid by all that is recorded: whoever
excludes a tree lists what is in it. Needs cgroup v2: kernels tell programs no id of v1's groups.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from aiflame.agent.kernel.loader import Programs
from aiflame.agent.processes import procfs
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


def _id_of(mount: Path, path: str) -> int:
    """Returns the id of a cgroup, 0 if it is not there.

    cgroup_ino() of include/linux/cgroup.h (v5.5): on 64-bit hosts the inode is the id.
    """
    try:
        return (mount / path.lstrip("/")).stat().st_ino
    except OSError:
        return 0
