# SPDX-License-Identifier: Apache-2.0
"""Whom to record: processes, a cgroup, a container, a unit, a command, or everything."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from aiflame.agent import kernelfs
from aiflame.agent.errors import AiflameError, UsageError
from aiflame.agent.kernel import abi
from aiflame.agent.kernel.checks import is_host_pid_namespace, require_host_pid_namespace
from aiflame.agent.model.profile import ALL_PROCESSES
from aiflame.agent.processes import procfs
from aiflame.agent.processes.command import HeldCommand
from aiflame.agent.processes.target_search import Found, find_comm, find_container, find_unit

_CGROUP2_MAGIC_FILE = "cgroup.procs"


@dataclass(frozen=True, slots=True)
class Target:
    """What to record. `pids` are those named on the command line, or the command's own."""

    filter: abi.Filter
    words: str  # as shown to the user
    file_stem: str  # "<comm>-<pid>" of file names
    pids: tuple[int, ...] = ()
    cgroup: Path | None = None
    command: HeldCommand | None = None
    follows_children: bool = False  # unless the user says otherwise
    note: str = ""  # what the user should know of how it was found

    def existing_pids(self) -> list[int]:
        """Returns the processes that are to be recorded from the start."""
        if self.filter is abi.Filter.PIDS:
            if self.command is not None:
                return []
            children = procfs.descendants(self.pids) if self.follows_children else []
            return [*self.pids, *children]
        if self.cgroup is not None:
            found = []
            for file in sorted(self.cgroup.rglob(_CGROUP2_MAGIC_FILE)):
                found += [int(pid) for pid in kernelfs.read_text(file, 1 << 20).split()]
            return found
        return procfs.process_ids()

    def left_out_children(self) -> list[int]:
        """Returns the processes below those that were named which are not recorded."""
        if self.filter is not abi.Filter.PIDS or self.follows_children:
            return []
        own = {os.getpid(), *procfs.ancestors(os.getpid())}  # sudo is a child of the user's shell
        return [pid for pid in procfs.descendants(self.pids) if pid not in own]


def target_of_pids(pids: list[int]) -> Target:
    """Makes a target of running processes.

    Raises:
        AiflameError: One of them does not exist.
    """
    for pid in pids:
        if not Path(f"/proc/{pid}").is_dir():
            raise _no_such_process(pid)
        if procfs.status_field(pid, "Tgid") != [str(pid)]:
            owner = (procfs.status_field(pid, "Tgid") or ["?"])[0]
            raise UsageError(f"{pid} is a thread, not a process", f"aiflame record -p {owner}")
    names = [procfs.comm(pid) for pid in pids]
    words = ", ".join(f"{name} (pid {pid})" for name, pid in zip(names, pids, strict=True))
    return Target(abi.Filter.PIDS, words, f"{names[0]}-{pids[0]}", tuple(pids))


def _no_such_process(pid: int) -> AiflameError:
    # Processes of the host are not visible in a container's own pid namespace.
    inside = not is_host_pid_namespace()
    hint = "run with --pid=host / hostPID: true" if inside else "pgrep -a NAME lists running ones"
    return AiflameError(f"no such process: {pid}" + (" is visible here" if inside else ""), hint)


def target_of_command(command: list[str]) -> Target:
    """Starts a command, held before its exec, as a target."""
    held = HeldCommand(command)
    name = Path(command[0]).name[:15]
    return Target(
        abi.Filter.PIDS,
        f"{name} (pid {held.pid})",
        f"{name}-{held.pid}",
        (held.pid,),
        command=held,
        follows_children=True,
    )


def target_of_cgroup(path: Path) -> Target:
    """Makes a target of a cgroup v2 directory and those below it.

    Raises:
        UsageError: It is no cgroup v2 directory.
    """
    directory = path if _is_cgroup2(path) else _below_mount(path)
    if directory is None:
        raise UsageError(
            f"not a cgroup v2 directory: {path}", "systemd-cgls shows the groups of this machine"
        )
    name = directory.name or "root"
    return Target(abi.Filter.CGROUP, f"cgroup {path}", f"cgroup-{name}", (), directory)


def target_of_container(wanted: str) -> Target:
    """Makes a target of a running container, by its name or the beginning of its id.

    Raises:
        UsageError: None is called so, or more than one is.
        EnvironmentUnfit: The host's processes are not visible here.
    """
    require_host_pid_namespace()
    return _target_of_group(find_container(wanted))


def target_of_unit(wanted: str) -> Target:
    """Makes a target of a running systemd service or scope, with or without its type.

    Raises:
        UsageError: None is called so, or more than one is.
        EnvironmentUnfit: The host's processes are not visible here.
    """
    require_host_pid_namespace()
    return _target_of_group(find_unit(wanted))


def target_of_comm(wanted: str) -> Target:
    """Makes a target of all running processes of a name, and the children that they start.

    Raises:
        UsageError: There are none.
        EnvironmentUnfit: The host's processes are not visible here.
    """
    require_host_pid_namespace()
    found = find_comm(wanted)
    return Target(abi.Filter.PIDS, found.words, found.stem, found.pids, follows_children=True)


def _target_of_group(found: Found) -> Target:
    directory = _below_mount(Path(found.group)) if found.group else None
    if directory is not None:
        return Target(abi.Filter.CGROUP, found.words, found.stem, (), directory)
    count = len(found.pids)
    return Target(
        abi.Filter.PIDS,
        f"{found.words}: {count} process{'es' if count > 1 else ''} and children",
        found.stem,
        found.pids,
        follows_children=True,
        note=f"note: {found.words} has no cgroup v2 directory here: the processes that are in it"
        " now, and their children, are recorded; others that enter it are not",
    )


def _below_mount(path: Path) -> Path | None:
    """Returns the cgroup v2 directory of that path, as /proc/PID/cgroup has it, if it is here."""
    below = (mount / str(path).lstrip("/") for mount in cgroup2_mounts())
    return next((directory for directory in below if _is_cgroup2(directory)), None)


def _is_cgroup2(directory: Path) -> bool:
    return (directory / "cgroup.controllers").is_file()


def cgroup2_mounts() -> list[Path]:
    """Returns where cgroup v2 is mounted."""
    return _mounts("cgroup2")


def cgroup1_mounts() -> list[Path]:
    """Returns where hierarchies of cgroup v1 are mounted."""
    return _mounts("cgroup")


def _mounts(kind: str) -> list[Path]:
    mounts = [line.split(" ") for line in procfs.read_lines("/proc/self/mounts", 1 << 20)]
    return [Path(fields[1]) for fields in mounts if fields[2:3] == [kind]]


def target_of_all() -> Target:
    """Makes a target of every process but the recorder's own."""
    return Target(abi.Filter.ALL, ALL_PROCESSES, "all-0")
