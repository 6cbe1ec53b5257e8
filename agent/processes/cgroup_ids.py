# SPDX-License-Identifier: Apache-2.0
"""Paths of cgroups by the ids that the kernel half tells, also of processes that are gone.

A cgroup's id is the handle of its directory (kernfs_encode_fh in fs/kernfs/mount.c, since v5.5), so
that it can be opened without looking for it, as long as it is there: engines remove a container's
some milliseconds after its last process. Takes CAP_DAC_READ_SEARCH.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path

from aiflame.agent.processes.targets import cgroup2_mounts

# FILEID_KERNFS of include/linux/exportfs.h: the handle is the id.
_FILEID_KERNFS = 0xFE

# Paths that are kept. A cgroup of v2 cannot be renamed (only cgroup1_kf_syscall_ops has .rename,
# v6.1), and ids are 64 bits that the kernel counts up, so that no other cgroup gets one.
_MOST_KNOWN = 1 << 12

_libc = ctypes.CDLL(None, use_errno=True)


class CgroupIds:
    """Paths of cgroups of v2.

    Args:
        mount: Where these are mounted; by default the first place.
    """

    def __init__(self, mount: Path | None = None) -> None:
        self._mount = mount or next(iter(cgroup2_mounts()), None)
        self._known: OrderedDict[int, str] = OrderedDict()

    def know(self, paths: Mapping[int, str]) -> None:
        """Takes note of paths that somebody has seen, by id."""
        self._known.update(islice(paths.items(), _MOST_KNOWN - len(self._known)))

    def path_of(self, cgroup_id: int) -> str:
        """Returns the path of a cgroup as /proc/PID/cgroup has it, "" where that is not known.

        Args:
            cgroup_id: As bpf_get_current_cgroup_id() has it.
        """
        if self._mount is None or not cgroup_id:
            return ""
        known = self._known.get(cgroup_id)
        if known is None:
            known = self._look_up(self._mount, cgroup_id)
            if known:
                self._known[cgroup_id] = known
                if len(self._known) > _MOST_KNOWN:
                    self._known.popitem(last=False)
        return known

    def id_of(self, path: str) -> int:
        """Returns the id of a cgroup that is there, 0 where it is of a hierarchy of v1.

        cgroup_ino() of include/linux/cgroup.h (v5.5): on 64-bit hosts the inode is the id.

        Args:
            path: As /proc/PID/cgroup has it.
        """
        if self._mount is None:
            return 0
        try:
            return (self._mount / path.lstrip("/")).stat().st_ino
        except OSError:  # it is gone, or outside of what is mounted here
            return 0

    def _look_up(self, mount: Path, cgroup_id: int) -> str:
        try:
            with _directory(mount) as mount_fd, _opened(mount_fd, cgroup_id) as fd:
                found = Path(f"/proc/self/fd/{fd}").readlink()
            return f"/{found.relative_to(mount)}" if found != mount else "/"
        except (OSError, ValueError):
            return ""  # it is gone, or outside of what is mounted here


@contextlib.contextmanager
def _directory(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def _opened(mount_fd: int, cgroup_id: int) -> Iterator[int]:
    # struct file_handle of include/linux/fs.h.
    handle = ctypes.create_string_buffer(struct.pack("<IiQ", 8, _FILEID_KERNFS, cgroup_id), 16)
    fd = int(_libc.open_by_handle_at(mount_fd, handle, os.O_PATH | os.O_CLOEXEC))
    if fd < 0:
        raise OSError(ctypes.get_errno(), "open_by_handle_at")
    try:
        yield fd
    finally:
        os.close(fd)
