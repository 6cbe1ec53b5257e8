# SPDX-License-Identifier: Apache-2.0
"""What a host must have so that nobody is mislabelled, and what its cgroups do not allow."""

from __future__ import annotations

import contextlib
import ctypes
import enum
import os
from collections.abc import Iterable
from pathlib import Path

from aiflame.agent.errors import EnvironmentUnfit
from aiflame.agent.kernel.checks import is_host_pid_namespace
from aiflame.agent.processes import procfs

# PROC_CGROUP_INIT_INO (include/linux/proc_ns.h): the initial cgroup namespace has this inode.
_INITIAL_CGROUP_NAMESPACE = 0xEFFFFFFB
# Of kthreadd, which has the kernel's own namespaces (rest_init in init/main.c).
_HOST_CGROUP_NAMESPACE = Path("/proc/2/ns/cgroup")
_CLONE_NEWCGROUP = 0x02000000  # linux/sched.h

_MOUNT_ROOT = 3  # which field of mountinfo is the directory of a file system that is mounted

_libc = ctypes.CDLL(None)


class CgroupLayout(enum.Enum):
    """Which versions of cgroups a host has.

    Attributes:
        note: What does not work there; "" if all does.
    """

    UNIFIED = ""
    # systemd's "hybrid" mode: v2 is there, and engines group by v1.
    HYBRID = (
        "this host has cgroup v1 beside v2: containers that are grouped by v1 alone are labelled by"
        " /proc, and excluded process by process: who moves there without an exec is recorded"
    )
    LEGACY = (
        "this host has cgroup v1 only: the kernel tells programs no id of a cgroup, so containers"
        " are labelled by /proc, and excluded process by process: who moves there without an exec"
        " is recorded"
    )

    @property
    def note(self) -> str:
        """What does not work there."""
        return self.value


def cgroup_layout(mounts: Iterable[str] | None = None) -> CgroupLayout:
    """Returns what is mounted here.

    Args:
        mounts: Lines of /proc/self/mounts, which is read if there are none.
    """
    lines = procfs.read_lines("/proc/self/mounts", 1 << 20) if mounts is None else mounts
    kinds = {fields[2] for fields in (line.split(" ") for line in lines) if len(fields) > 2}
    if "cgroup2" not in kinds:
        return CgroupLayout.LEGACY
    return CgroupLayout.HYBRID if "cgroup" in kinds else CgroupLayout.UNIFIED


def require_host_pids() -> None:
    """Refuses to label processes from inside a pid namespace.

    The kernel half speaks of the host's pids: looked up in a /proc of other pids, they would get
    the names of other processes.

    Raises:
        EnvironmentUnfit: This process runs in a pid namespace of its own.
    """
    if not is_host_pid_namespace():
        raise EnvironmentUnfit(
            "the agent is in a pid namespace of its own: it would take other processes for those"
            " that the kernel reports",
            "set hostPID: true, or run with --pid=host; inside kind, minikube or docker in docker,"
            " run it on the machine below",
        )


def enter_host_cgroup_namespace() -> None:
    """Has this thread, and what it starts from now on, see cgroups by the paths of the host.

    Containers have a namespace of their own where there is v2 alone, and in Kubernetes no setting
    changes that. It takes CAP_SYS_ADMIN; where it does not work, `cgroup_namespace_note` tells.
    """
    if not cgroup_namespace_note():
        return
    with contextlib.suppress(OSError):
        descriptor = os.open(_HOST_CGROUP_NAMESPACE, os.O_RDONLY | os.O_CLOEXEC)
        _libc.setns(descriptor, _CLONE_NEWCGROUP)
        os.close(descriptor)


def cgroup_namespace_note(namespace: Path = Path("/proc/thread-self/ns/cgroup")) -> str:
    """Returns what does not work in a cgroup namespace of our own, "" outside of one."""
    try:
        inode = namespace.stat().st_ino
    except OSError:
        return ""  # a kernel without them (before v4.6)
    if inode == _INITIAL_CGROUP_NAMESPACE:
        return ""
    return (
        "the agent is in a cgroup namespace of its own, and may not enter the host's without"
        " CAP_SYS_ADMIN: paths of cgroups lack what they share with its own, and groups are"
        " excluded in the kernel only if the host's /sys/fs/cgroup is mounted; run with"
        " --cgroupns=host, or add SYS_ADMIN"
    )


def cgroup_mount_note(mounts: Iterable[str] | None = None) -> str:
    """Returns what does not work where no v2 mount shows all cgroups of the host, "" elsewhere.

    Args:
        mounts: Lines of /proc/self/mountinfo, which is read if there are none.
    """
    lines = procfs.read_lines("/proc/self/mountinfo", 1 << 20) if mounts is None else mounts
    roots = set()
    for line in lines:
        before, _, after = line.partition(" - ")  # proc_pid_mountinfo(5)
        fields = before.split(" ")
        if after.startswith("cgroup2 ") and len(fields) > _MOUNT_ROOT:
            roots.add(fields[_MOUNT_ROOT])
    if not roots or "/" in roots:
        return ""
    return (
        "the cgroups that are mounted here are those of a container: no cgroup of the host can be"
        " named by its path, and groups are left out only when they are named; mount the host's"
        " /sys/fs/cgroup, read-only"
    )
