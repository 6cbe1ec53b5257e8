# SPDX-License-Identifier: Apache-2.0
"""Names of a process's Python threads, by the thread ids of this pid namespace."""

from __future__ import annotations

from aiflame.agent.processes import procfs
from aiflame.agent.processes.table import ProcessImage
from aiflame.agent.python.thread_names import MAX_THREADS, ThreadNameReader


def read_thread_names(image: ProcessImage, reader: ThreadNameReader) -> dict[int, str]:
    """Returns names by tid.

    Raises:
        NoMemoryAccess: The process is gone, or may not be read.
    """
    names = reader.read()
    if not names or image.namespaced_pid in (0, image.pid):
        return names
    tids = procfs.tids_by_namespaced(image.pid, MAX_THREADS)
    return {tids[tid]: name for tid, name in names.items() if tid in tids}
