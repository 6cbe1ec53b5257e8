# SPDX-License-Identifier: Apache-2.0
"""Which processes a capture is of, by the labels that the agent gives them."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from aiflame.agent.errors import UsageError
from aiflame.agent.fleet.capture_request import CaptureRequest
from aiflame.agent.model.batch import Labels
from aiflame.agent.model.profile import Process
from aiflame.agent.processes import procfs
from aiflame.agent.processes.identity import identity_of
from aiflame.agent.processes.targets import cgroup2_mounts

# docker and podman show so much of an id; fewer than four digits are a slip of the hand more often.
_SHORT_ID_CHARACTERS, _LEAST_ID_CHARACTERS = 12, 4
# A screen; further ones are counted.
_MAX_LISTED = 20


@dataclass(frozen=True, slots=True)
class Choice:
    """What is captured.

    Attributes:
        numbers: Which of the processes that there are to choose from.
        words: What they are, for the user.
        stem: The same for names of files.
        group: Path of the cgroup that is theirs alone, "" where none is.
        labels: Of the pod or container, empty for others.
    """

    numbers: tuple[int, ...]
    words: str
    stem: str
    group: str = ""
    labels: Labels | None = None


def live_processes() -> list[Process]:
    """Returns the processes that there are, but for this one."""
    return [
        Process(
            pid=pid,
            parent_pid=procfs.parent_pid(pid),
            name=procfs.comm(pid),
            executable=procfs.executable(pid),
            command_line="",
            cgroup=procfs.cgroups(pid).telling,
            container_id="",
            started_ns=0,
            exited_ns=None,
        )
        for pid in procfs.process_ids()
        if pid != os.getpid()
    ]


def choose(
    request: CaptureRequest, processes: Sequence[Process], labels: Sequence[Labels]
) -> Choice:
    """Finds what is asked for.

    Args:
        request: What is asked for.
        processes: To choose from.
        labels: Of each.

    Raises:
        UsageError: Nothing is called so, or more than one: it names what there is.
    """
    if request.is_all:
        return Choice(tuple(range(len(processes))), "all processes", "all")
    if request.pid:
        return _of_pid(request.pid, processes)
    if request.cgroup:
        return _of_cgroup(request.cgroup, processes)
    return _of_container(request, processes, labels)


def _of_pid(pid: int, processes: Sequence[Process]) -> Choice:
    found = tuple(at for at, process in enumerate(processes) if process.pid == pid)
    if not found:
        raise UsageError(f"no such process: {pid}", "pids are the host's, also of containers")
    name = processes[found[-1]].name
    return Choice(found, f"{name} (pid {pid})", f"{name}-{pid}")


def _of_cgroup(wanted: str, processes: Sequence[Process]) -> Choice:
    group = wanted.rstrip("/") or "/"
    for mount in map(str, cgroup2_mounts()):
        if group == mount or group.startswith(f"{mount}/"):
            group = group[len(mount) :] or "/"
            break
    found = tuple(
        at
        for at, process in enumerate(processes)
        if group == "/" or process.cgroup == group or process.cgroup.startswith(f"{group}/")
    )
    if not found:
        known = sorted({process.cgroup for process in processes if process.cgroup})
        raise _unknown(f"no process in the cgroup {wanted}", known)
    return Choice(found, f"cgroup {group}", f"cgroup-{PurePosixPath(group).name or 'root'}", group)


def _of_container(
    request: CaptureRequest, processes: Sequence[Process], labels: Sequence[Labels]
) -> Choice:
    of_pod = [at for at, each in enumerate(labels) if not request.pod or _is_pod(each, request.pod)]
    if not request.container:
        found = _by_key((at, labels[at].pod_uid or _pod_name(labels[at])) for at in of_pod)
        words = {key: _pod_words(labels[each[0]]) for key, each in found.items()}
        # One that was made anew, as those of a StatefulSet are, has the name of the one before.
        told_apart = {key: _with_uid(words[key], labels[each[0]]) for key, each in found.items()}
        key = _only(found, told_apart, f"pod {request.pod}", _pods(labels))
        first = labels[found[key][0]]
        group = _group_of_pod(processes[found[key][0]].cgroup)
        stem = f"pod-{first.pod or first.pod_uid}"
        return Choice(tuple(found[key]), f"pod {words[key]}", stem, group, first)
    wanted = request.container
    ids = _by_key((at, labels[at].container_id or labels[at].container) for at in of_pod)
    named = {
        key: each
        for key, each in ids.items()
        if key
        and (
            labels[each[0]].container == wanted
            or (len(wanted) >= _LEAST_ID_CHARACTERS and key.startswith(wanted))
        )
    }
    words = {key: _container_words(labels[each[0]]) for key, each in ids.items() if key}
    where = f" in pod {request.pod}" if request.pod else ""
    key = _only(named, words, f"container {wanted}{where}", words.values())
    first = labels[named[key][0]]
    group = _group_of_container(processes[named[key][0]].cgroup, key)
    stem = f"container-{first.container or key[:_SHORT_ID_CHARACTERS]}"
    return Choice(tuple(named[key]), f"container {words[key]}", stem, group, first)


def _by_key(pairs: Iterable[tuple[int, str]]) -> dict[str, list[int]]:
    found: defaultdict[str, list[int]] = defaultdict(list)
    for at, key in pairs:
        found[key].append(at)
    return dict(found)


def _only(
    found: Mapping[str, object], words: Mapping[str, str], wanted: str, known: Iterable[str]
) -> str:
    """Returns the one key that there is.

    Raises:
        UsageError: There is none, or there are several.
    """
    if not found:
        raise _unknown(f"no {wanted} is known here", sorted({*known}))
    if len(found) > 1:
        raise UsageError(
            f"{len(found)} are called {wanted}", _listed(sorted(words[key] for key in found))
        )
    return next(iter(found))


def _unknown(what: str, known: Sequence[str]) -> UsageError:
    return UsageError(what, _listed(known) if known else "there is none at all")


def _listed(words: Sequence[str]) -> str:
    more = len(words) - _MAX_LISTED
    lines = [*words[:_MAX_LISTED], *([f"and {more} more"] if more > 0 else [])]
    return "\n    ".join(["one of:", *lines])


def _is_pod(labels: Labels, wanted: str) -> bool:
    return bool(labels.pod_uid or labels.pod) and wanted in (
        labels.pod,
        labels.pod_uid,
        _pod_name(labels),
    )


def _pods(labels: Sequence[Labels]) -> set[str]:
    return {_pod_words(each) for each in labels if each.pod_uid or each.pod}


def _pod_name(labels: Labels) -> str:
    return f"{labels.namespace}/{labels.pod}"


def _pod_words(labels: Labels) -> str:
    return _pod_name(labels) if labels.pod else labels.pod_uid


def _with_uid(words: str, labels: Labels) -> str:
    return f"{words} ({labels.pod_uid})" if labels.pod and labels.pod_uid else words


def _container_words(labels: Labels) -> str:
    short = labels.container_id[:_SHORT_ID_CHARACTERS]
    name = " ".join(filter(None, (labels.container, short and f"({short})")))
    return f"{name} in pod {_pod_words(labels)}" if labels.pod_uid or labels.pod else name


def _above(path: str) -> list[str]:
    """Returns the groups on a path, from the outermost on, with itself."""
    return [str(each) for each in reversed((PurePosixPath(path), *PurePosixPath(path).parents))]


def _group_of_pod(path: str) -> str:
    return next((group for group in _above(path) if identity_of(group).pod_uid), "")


def _group_of_container(path: str, key: str) -> str:
    containers = identity_of(path).containers
    return next((each.path for each in containers if key in (each.id, each.name)), "")


def directory_of(group: str) -> Path | None:
    """Returns where a cgroup of v2 is, None where there is none of that path."""
    if not group or ".." in group.split("/"):
        return None
    below = (mount / group.lstrip("/") for mount in cgroup2_mounts())
    return next((each for each in below if (each / "cgroup.procs").is_file()), None)
