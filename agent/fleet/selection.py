# SPDX-License-Identifier: Apache-2.0
"""What is recorded and what is left out: rules of the configuration, and the cgroups they mean.

A rule is one or more conditions, joined by commas, all of which must hold: `namespace=kube-*`,
`unit=cron.service`, `container=web,process=nginx`, `label:team=ml-*`, `annotation:aiflame=off`.
Values have wildcards (`*`, `?`, `[...]`); none matches what a process does not have. A process is
recorded if a rule of `include` holds, or there is none, and no rule of `exclude` does.

What holds for a whole cgroup is left out in the kernel: by the cgroup's id, or process by process
where v1 groups them (`left_out_paths`). What depends on the process is left out when
labels are made.

A rule that asks about what the kubelet has not told yet is open. What it decides about is recorded
for a minute, so that nothing is missing of what turns out to be wanted, and none of it is sent
before it is known.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import translate
from itertools import islice
from pathlib import Path
from typing import Protocol

from aiflame.agent.errors import UsageError
from aiflame.agent.fleet.labels import TOLD_OF_POD, Subject
from aiflame.agent.processes.identity import ENGINE_UNITS, identity_of

_UNIT = "unit"
_FIELDS = (
    *("namespace", "pod", "container", "container_id", _UNIT, "service", "workload"),
    *("workload_kind", "engine", "version"),
)
_PROCESS, _LABEL, _ANNOTATION = "process", "label", "annotation"
_KNOWN = ", ".join((*_FIELDS, _PROCESS, f"{_LABEL}:NAME", f"{_ANNOTATION}:NAME"))
# A pattern of many wildcards takes long on a long text; nobody needs more.
_MAX_WILDCARDS = 8
# A host of 500 pods has some 5,000.
_MAX_GROUPS = 65536
# Of one user, container or service, to whom cgroups may be delegated: systemd in a container has
# some hundred, and pods are below slices. Past it, what is left out is so where labels are made.
_MAX_GROUPS_OF_ONE = 2048
_OWNED = re.compile(r"user-\d{1,10}\.slice|.+\.(?:service|scope)|.*[0-9a-f]{64}", re.DOTALL)
_MAX_DEPTH = 32
# Of a directory with none in it (kernfs_refresh_inode, fs/kernfs/inode.c: 2 and one for each). Most
# cgroups are, and reading the names of their fifty files takes most of the time.
_LINKS_OF_LEAF = 2


@dataclass(frozen=True, slots=True)
class _Condition:
    """One condition: what is asked, of which label or annotation, and what it has to be."""

    what: str
    name: str
    pattern: re.Pattern[str]

    @classmethod
    def parse(cls, text: str) -> _Condition:
        """Raises UsageError for what is none."""
        key, equals, value = text.strip().partition("=")
        what, _, name = key.partition(":")
        is_tag = what in (_LABEL, _ANNOTATION)
        if not equals or not value or is_tag != bool(name):
            raise UsageError(f"not a rule: {text!r}", "for example namespace=kube-*")
        if not is_tag and what not in (*_FIELDS, _PROCESS):
            raise UsageError(f"a rule about {what!r}, which is not known", f"known: {_KNOWN}")
        if value.count("*") > _MAX_WILDCARDS:
            raise UsageError(f"more than {_MAX_WILDCARDS} wildcards: {text!r}")
        return cls(what, name, re.compile(translate(value)))

    def holds(self, subject: Subject, process: str) -> bool | None:
        if self.what in subject.unknown:
            return None
        if self.what in (_LABEL, _ANNOTATION):
            tags = subject.tags if self.what == _LABEL else subject.annotations
            return any(n == self.name and self.pattern.match(v) is not None for n, v in tags)
        if self.what == _PROCESS:
            return self.pattern.match(process) is not None
        own_unit = subject.unit if self.what == _UNIT else ""
        value = own_unit or getattr(subject.labels, self.what)
        # "*" would match what is not there, too: `container=*` is about containers.
        return bool(value) and self.pattern.match(value) is not None


@dataclass(frozen=True, slots=True)
class Rule:
    """Conditions that must all hold."""

    conditions: tuple[_Condition, ...]

    @classmethod
    def parse(cls, text: str) -> Rule:
        """Reads a rule.

        Raises:
            UsageError: Names what is wrong.
        """
        return cls(tuple(map(_Condition.parse, text.split(","))))

    @property
    def asks_process(self) -> bool:
        """Whether processes of one cgroup may differ in it."""
        return any(each.what == _PROCESS for each in self.conditions)

    @property
    def asks_pods(self) -> bool:
        """Whether the kubelet tells what it asks about."""
        return any(each.what in TOLD_OF_POD for each in self.conditions)

    def holds(self, subject: Subject, process: str) -> bool | None:
        """Whether it holds for a process of that name, None where that is not known yet."""
        return _all(each.holds(subject, process) for each in self.conditions)

    def may_hold(self, subject: Subject) -> bool | None:
        """Whether it holds for some name of a process, None where that is not known yet."""
        return _all(e.holds(subject, "") for e in self.conditions if e.what != _PROCESS)


@dataclass(frozen=True, slots=True)
class Selection:
    """Which processes are recorded.

    Attributes:
        include: If there are any, one of them must hold.
        exclude: None of them may hold.
    """

    include: tuple[Rule, ...] = ()
    exclude: tuple[Rule, ...] = ()

    @classmethod
    def parse(cls, include: Sequence[str], exclude: Sequence[str]) -> Selection:
        """Reads rules.

        Raises:
            UsageError: Names what is wrong.
        """
        return cls(tuple(map(Rule.parse, include)), tuple(map(Rule.parse, exclude)))

    @property
    def has_rules(self) -> bool:
        """Whether anything can be left out."""
        return bool(self.include or self.exclude)

    @property
    def asks_pods(self) -> bool:
        """Whether a rule asks about what the kubelet tells."""
        return any(rule.asks_pods for rule in (*self.include, *self.exclude))

    def takes(self, subject: Subject, process: str) -> bool | None:
        """Whether a process is recorded, None where that is not known yet.

        Args:
            subject: Who it is.
            process: Its name.
        """
        is_excluded = _any(rule.holds(subject, process) for rule in self.exclude)
        is_included = not self.include or _any(r.holds(subject, process) for r in self.include)
        if is_excluded or is_included is False:
            return False
        return None if is_excluded is None else is_included

    def leaves_out(self, subject: Subject) -> bool:
        """Whether no process of a cgroup is recorded, whatever its name is."""
        for rule in self.exclude:
            if not rule.asks_process and rule.holds(subject, ""):
                return True
        if not self.include:
            return False
        may_hold = _any(rule.may_hold(subject) for rule in self.include)
        return not (subject.is_awaited if may_hold is None else may_hold)


def _all(found: Iterable[bool | None]) -> bool | None:
    """Whether all hold: one that does not settles it, whatever is not known of others."""
    each = [*found]
    return False if False in each else None if None in each else True


def _any(found: Iterable[bool | None]) -> bool | None:
    """Whether one holds: that settles it, whatever is not known of others."""
    each = [*found]
    return True if True in each else None if None in each else False


class Owners(Protocol):
    """Who tells whom cgroups belong to: `labels.Labeller`."""

    def decided(
        self, cgroups: Collection[str], decide: Callable[[Subject], bool]
    ) -> Sequence[bool]:
        """Returns what is decided about whom each belongs to."""


def left_out_paths(paths: Collection[str], selection: Selection, owners: Owners) -> set[str]:
    """Returns the paths of cgroups of which nothing is recorded, each by itself.

    Cgroups come and go: it is to be asked again, and until then what is new is recorded, and left
    out where labels are made.

    Args:
        paths: All there are.
        selection: The rules.
        owners: Tells whom cgroups belong to.
    """
    if not selection.has_rules:
        return set()
    decided = owners.decided(paths, selection.leaves_out)
    return {path for path, is_out in zip(paths, decided, strict=True) if is_out}


def known_groups(mount: Path, *, is_v1_beside: bool = False) -> dict[str, int]:
    """Returns the ids of the cgroups that tell whose processes in them are, by path.

    Args:
        mount: Of cgroup v2, as the host has it.
        is_v1_beside: Whether processes are grouped by v1 as well, and by that belong to others:
            all may be in the root of v2. Then only containers that v2 has are told.
    """
    return {
        path: number
        for path, number in _groups(mount)
        if not is_v1_beside or identity_of(path).containers
    }


def ids_below(mount: Path, cgroup: str) -> set[int]:
    """Returns the ids of a container's cgroup and of those below it.

    Args:
        mount: Of cgroup v2, as the host has it.
        cgroup: Its path.
    """
    return {number for _, number in _groups(mount / cgroup.lstrip("/"), cgroup)}


def have_containers(mounts: Iterable[Path]) -> bool:
    """Returns whether a container is grouped there.

    Args:
        mounts: Of hierarchies of v1.
    """
    return any(identity_of(path).containers for mount in mounts for path, _ in _groups(mount))


def _groups(mount: Path, owner: str = "") -> Iterator[tuple[str, int]]:
    """Yields the path and the id of each cgroup that holds processes, or may.

    Args:
        mount: Where they are.
        owner: To whom all of them are delegated, if to anybody.
    """
    waiting = [("/", str(mount), 0, owner)]
    count = 0
    of_owners: Counter[str] = Counter()
    while waiting and count < _MAX_GROUPS:
        path, folder, depth, owner = waiting.pop()
        if not owner and _is_owned(path.rpartition("/")[2]):
            owner = path
        most = _MAX_GROUPS_OF_ONE - of_owners[owner] if owner else _MAX_GROUPS
        try:
            found = os.stat(folder)  # noqa: PTH116 - thousands of them
            below = [] if found.st_nlink == _LINKS_OF_LEAF else _names_below(folder, most)
        except OSError:
            continue  # removed meanwhile
        count += 1
        of_owners[owner] += len(below)
        yield path, found.st_ino
        if depth < _MAX_DEPTH:
            waiting += [
                (f"{path.rstrip('/')}/{n}", f"{folder}/{n}", depth + 1, owner) for n in below
            ]


def _is_owned(name: str) -> bool:
    """Whether others than root and engines may make the cgroups below one of that name."""
    return name not in ENGINE_UNITS and _OWNED.fullmatch(name) is not None


def _names_below(folder: str, most: int) -> list[str]:
    with os.scandir(folder) as entries:
        names = (entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
        return [*islice(names, most)]
