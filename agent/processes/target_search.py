# SPDX-License-Identifier: Apache-2.0
"""Which running processes a container, a systemd unit or a name of processes means.

One look at each process in /proc finds them, on cgroup v1 as on v2. Processes choose their names,
and users those of cgroups below their own: where more than one container or unit answers to a word,
it is refused with what there is, never decided by order.
"""

from __future__ import annotations

import difflib
import os
import re
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from aiflame.agent.errors import UsageError
from aiflame.agent.processes import procfs
from aiflame.agent.processes.container_names import names_of
from aiflame.agent.processes.identity import CgroupPaths, Container, Identity, Unit, identity_of

# docker and podman show so much of an id.
_SHORT_ID_CHARACTERS = 12
# Of 16^4 prefixes: less would be a slip of the hand more often than an id.
_ID_PREFIX = re.compile(r"[0-9a-f]{4,64}")
# A screen; further ones are counted.
_MAX_LISTED = 20
_MAX_NEAR_MISSES = 5
_UNIT_TYPES = ("service", "scope")


@dataclass(frozen=True, slots=True)
class Found:
    """Processes that are to be recorded together.

    Attributes:
        words: What they are, for the user.
        stem: The same for names of files.
        pids: At least one.
        group: Path of the cgroup v2 that holds them all, "" where none does.
    """

    words: str
    stem: str
    pids: tuple[int, ...]
    group: str = ""


@dataclass(slots=True)
class _Group:
    """Processes of one container or unit, and the cgroups of v2 that are named after it."""

    pids: list[int] = field(default_factory=list)
    paths: set[str] = field(default_factory=set)

    def add(self, pid: int, paths: CgroupPaths, path: str) -> None:
        self.pids.append(pid)
        # A path outside this cgroup namespace cannot be found below a mount of it.
        if paths.telling == paths.unified and ".." not in path.split("/"):
            self.paths.add(path)


def _memberships() -> Iterator[tuple[int, CgroupPaths, Identity]]:
    for pid in procfs.process_ids():
        if pid != os.getpid():
            paths = procfs.cgroups(pid)
            yield pid, paths, identity_of(paths.telling)


@dataclass(slots=True)
class _Seen:
    """A running container; `name` is the path's or the engine's, "" if neither tells."""

    container: Container
    group: _Group = field(default_factory=_Group)
    name: str = ""

    @property
    def short_id(self) -> str:
        return self.container.id[:_SHORT_ID_CHARACTERS]

    @property
    def engine(self) -> str:
        return "" if self.container.engine is None else self.container.engine.value

    def line(self) -> str:
        # The first process of a pid namespace is what the container was made for.
        first = min(self.group.pids, key=lambda pid: (procfs.namespaced_pid(pid) != 1, pid))
        words = filter(None, (self.short_id, self.engine, self.name))
        return _plain(f"{' '.join(words)} ({procfs.comm(first)})")


def find_container(wanted: str) -> Found:
    """Finds a running container as docker does: by its whole id, its name, or a part of its id.

    Args:
        wanted: A name, or the first digits of an id, at least four.

    Raises:
        UsageError: None is called so, or more than one is.
    """
    seen = _running_containers()
    chosen = _chosen_containers(seen, wanted)
    if len(chosen) != 1:
        what = "more than one container is" if chosen else "no running container is"
        hint = _listing(each.line() for each in chosen or seen)
        raise UsageError(f"{what} {_plain(wanted)}", hint or "none has a cgroup of its own here")
    (found,) = chosen
    paths = found.group.paths
    if len(paths) > 1:
        raise _several_groups(f"container {_plain(wanted)}", map(_by_cgroup, paths))
    name = found.name or found.short_id
    facts = ", ".join(filter(None, (found.engine, found.short_id if found.name else "")))
    return Found(
        f"container {_plain(name)}" + (f" ({facts})" if facts else ""),
        f"container-{name}",
        tuple(found.group.pids),
        next(iter(paths), ""),
    )


def _running_containers() -> list[_Seen]:
    seen: dict[str, _Seen] = {}
    for pid, paths, identity in _memberships():
        for container in identity.containers:
            key = container.id or f"{container.engine} {container.name}"
            seen.setdefault(key, _Seen(container)).group.add(pid, paths, container.path)
    names = names_of(each.container.id for each in seen.values() if each.container.id)
    for each in seen.values():
        each.name = each.container.name or names.get(each.container.id, "")
    return [*seen.values()]


def _chosen_containers(seen: list[_Seen], wanted: str) -> list[_Seen]:
    is_prefix = _ID_PREFIX.fullmatch(wanted) is not None
    return (
        [each for each in seen if each.container.id == wanted]
        or [each for each in seen if each.name == wanted]
        or [each for each in seen if is_prefix and each.container.id.startswith(wanted)]
    )


def find_unit(wanted: str) -> Found:
    """Finds a running systemd service or scope: the host's, else one of a user or container.

    Args:
        wanted: Its name, with or without its type.

    Raises:
        UsageError: None is called so, or more than one is.
    """
    stem, _, unit_type = wanted.rpartition(".")
    if unit_type not in _UNIT_TYPES:
        stem, unit_type = wanted, ""
    names = {f"{stem}.{each}" for each in _UNIT_TYPES if unit_type in ("", each)}
    hosts: dict[Unit, _Group] = {}
    others: dict[Unit, _Group] = {}
    running = set()
    for pid, paths, identity in _memberships():
        for unit in identity.units:
            running.add(unit.name.rpartition(".")[0])
            if unit.name in names:
                of_kind = hosts if _is_of_host(unit, identity) else others
                of_kind.setdefault(unit, _Group()).add(pid, paths, unit.path)
    # Any user may have a unit of their own that is called like the host's.
    chosen = hosts or others
    if not chosen:
        hint = _near_misses(stem, running) or (
            "systemctl list-units --type=service,scope shows what runs"
        )
        raise UsageError(f"no unit {_plain(wanted)} has a process here", hint)
    if len(chosen) > 1:
        ways = (_by_cgroup(u.path) if g.paths else _by_pids(g.pids) for u, g in chosen.items())
        raise _several_groups(f"unit {_plain(wanted)}", ways)
    ((unit, group),) = chosen.items()
    where = "" if chosen is hosts else f" ({unit.path})"
    return Found(
        f"unit {unit.name}{where}",
        f"unit-{unit.name}",
        tuple(group.pids),
        next(iter(group.paths), ""),
    )


def _is_of_host(unit: Unit, identity: Identity) -> bool:
    """Whether the host's systemd named a unit: it is in no other unit, and in no container."""
    is_inside = any(unit.path.startswith(f"{c.path}/") for c in identity.containers)
    return unit is identity.units[0] and not is_inside


def find_comm(wanted: str) -> Found:
    """Finds the running processes whose name, or whose executable's, is exactly that.

    Raises:
        UsageError: There is none.
    """
    found, running = [], set()
    for pid in procfs.process_ids():
        if pid == os.getpid():
            continue
        executable = procfs.executable(pid).removesuffix(" (deleted)")
        names = {procfs.comm(pid), executable.rpartition("/")[2]}
        running |= names
        # A zombie has a name, and never runs again.
        if wanted in names and procfs.status_field(pid, "State")[:1] != ["Z"]:
            found.append(pid)
    if not found:
        hint = _near_misses(wanted, running) or "ps -eo pid,comm shows what runs"
        raise UsageError(f"no process is called {_plain(wanted)}", hint)
    count = f"pid {found[0]}" if len(found) == 1 else f"{len(found)} processes"
    return Found(f"comm {_plain(wanted)} ({count})", f"{wanted}-{found[0]}", tuple(found))


def _several_groups(what: str, ways: Iterable[str]) -> UsageError:
    lines = (_plain(f"aiflame record {way}") for way in ways)
    return UsageError(f"more than one cgroup is named after {what}", _listing(lines))


def _by_cgroup(path: str) -> str:
    return f"--cgroup {shlex.quote(path)}"


def _by_pids(pids: Iterable[int]) -> str:
    return f"-p {','.join(map(str, pids))} -s"


def _near_misses(wanted: str, names: Iterable[str]) -> str:
    known = sorted(filter(None, names))
    parts = [name for name in known if wanted.lower() in name.lower()]
    like = difflib.get_close_matches(wanted, known, _MAX_NEAR_MISSES)
    listed = [_plain(name) for name in dict.fromkeys([*like, *parts])][:_MAX_NEAR_MISSES]
    return f"there is {', '.join(listed)}" if listed else ""


def _listing(lines: Iterable[str]) -> str:
    listed = sorted(lines)
    more = len(listed) - _MAX_LISTED
    return "\n  ".join([*listed[:_MAX_LISTED], *([f"and {more} more"] if more > 0 else [])])


def _plain(name: str) -> str:
    """Returns a name that cannot move a terminal's cursor, or look like more than one line."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in name)
