# SPDX-License-Identifier: Apache-2.0
"""Whom to record: processes, a cgroup, a command, or everything."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from aiflame.agent.errors import AiflameError, EnvironmentUnfit, UsageError
from aiflame.agent.recording import abi, procfs
from aiflame.agent.recording.launch import HeldCommand

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

    def existing_pids(self) -> list[int]:
        """Returns the processes that are to be recorded from the start."""
        if self.filter is abi.Filter.PIDS:
            return [] if self.command is not None else list(self.pids)
        if self.cgroup is not None:
            found = []
            for file in sorted(self.cgroup.rglob(_CGROUP2_MAGIC_FILE)):
                found += [int(pid) for pid in procfs.read_text(file, 1 << 20).split()]
            return found
        return procfs.process_ids()


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
    inside = Path("/proc/self/ns/pid").stat().st_ino != _INITIAL_PID_NAMESPACE
    hint = "run with --pid=host / hostPID: true" if inside else "pgrep -a NAME lists running ones"
    return AiflameError(f"no such process: {pid}" + (" is visible here" if inside else ""), hint)


# PROC_PID_INIT_INO (include/linux/proc_ns.h): the initial pid namespace has this inode.
_INITIAL_PID_NAMESPACE = 0xEFFFFFFC


def require_host_pid_namespace() -> None:
    """Refuses to record from inside a pid namespace: the kernel half speaks of the host's pids.

    Raises:
        EnvironmentUnfit: This process runs in a pid namespace of its own.
    """
    if Path("/proc/self/ns/pid").stat().st_ino != _INITIAL_PID_NAMESPACE:
        raise EnvironmentUnfit(
            "this is a pid namespace of its own: pids here are not those the kernel reports",
            "run with --pid=host / hostPID: true",
        )


def target_of_command(command: list[str]) -> Target:
    """Starts a command, held before its exec, as a target."""
    held = HeldCommand(command)
    name = Path(command[0]).name[:15]
    return Target(
        abi.Filter.PIDS, f"{name} (pid {held.pid})", f"{name}-{held.pid}", (held.pid,), command=held
    )


def target_of_cgroup(path: Path) -> Target:
    """Makes a target of a cgroup v2 directory and those below it.

    Raises:
        UsageError: It is no cgroup v2 directory.
    """
    for candidate in (path, *(mount / str(path).lstrip("/") for mount in cgroup2_mounts())):
        if (candidate / "cgroup.controllers").is_file():
            name = candidate.name or "root"
            return Target(abi.Filter.CGROUP, f"cgroup {path}", f"cgroup-{name}", (), candidate)
    raise UsageError(
        f"not a cgroup v2 directory: {path}", "systemd-cgls shows the groups of this machine"
    )


def cgroup2_mounts() -> list[Path]:
    """Returns where cgroup v2 is mounted."""
    mounts = [line.split(" ") for line in procfs.read_lines("/proc/self/mounts", 1 << 20)]
    return [Path(fields[1]) for fields in mounts if fields[2:3] == ["cgroup2"]]


def target_of_all() -> Target:
    """Makes a target of every process but the recorder's own."""
    return Target(abi.Filter.ALL, "all processes", "all-0")
