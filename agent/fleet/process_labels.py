# SPDX-License-Identifier: Apache-2.0
"""Labels of processes by what their cgroup and executable tell."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath

from aiflame.agent.model.batch import Labels
from aiflame.agent.model.profile import Process, Profile
from aiflame.agent.processes.container_names import names_of
from aiflame.agent.processes.identity import identity_of

# kthreadd, whose children all kernel threads are (rest_init in init/main.c).
_KTHREADD_PID = 2
_KERNEL_THREADS = "kernel threads"
_SHORT_ID_DIGITS = 12
_SERVICE = ".service"
# What is left where not even a name is known: of a process that ended at once.
_UNKNOWN = "unknown"


def labels_of(profile: Profile, node: str) -> Sequence[Labels]:
    """Returns the labels of each process of a profile.

    Args:
        profile: Of a stretch of time.
        node: This host's name.
    """
    identities = [identity_of(process.cgroup) for process in profile.processes]
    names = names_of({found.container_id for found in identities if found.container_id})
    labels = []
    for process, found in zip(profile.processes, identities, strict=True):
        innermost = found.containers[-1] if found.containers else None
        if innermost is None:
            services = [unit.name for unit in found.units if unit.name.endswith(_SERVICE)]
            unit = services[-1] if services else ""
            service = unit.removesuffix(_SERVICE) or _of_executable(process)
            labels.append(Labels(service=service, unit=unit, node=node))
            continue
        container_id = innermost.id or found.container_id
        name = innermost.name or names.get(container_id, "")
        labels.append(
            Labels(
                service=name or container_id[:_SHORT_ID_DIGITS],
                container_id=container_id,
                container=name,
                engine="" if innermost.engine is None else innermost.engine.value,
                node=node,
                pod_uid=found.pod_uid,
            )
        )
    return labels


def _of_executable(process: Process) -> str:
    if _KTHREADD_PID in (process.pid, process.parent_pid):
        return _KERNEL_THREADS
    return PurePath(process.executable).name or process.name or _UNKNOWN
