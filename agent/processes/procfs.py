# SPDX-License-Identifier: Apache-2.0
"""What /proc says about processes and threads.

All of it may vanish or change between two reads, and most of it is chosen by the process itself:
every reader returns an empty answer for a process that is gone and bounds what it reads. Formats:
Documentation/filesystems/proc.rst (v6.1).
"""

from __future__ import annotations

import functools
import itertools
import os
import resource
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from aiflame.agent import kernelfs
from aiflame.agent.inspector.opener import Opener
from aiflame.agent.processes.identity import CgroupPaths, cgroup_paths
from aiflame.agent.redaction import redacted

# The kernel caps a process at vm.max_map_count mappings, 65,530 by default; each line holds a path
# of at most 4,096 bytes, but 32 MiB covers 65,530 lines of 500.
_MAX_MAPS_BYTES = 32 << 20
# Lines of 8,192 CPUs and as many interrupts (proc_stat(5)).
_MAX_STAT_BYTES = 1 << 20
# What is kept of a command line: a subtitle and a table cell need no more.
_MAX_COMMAND_LINE_BYTES = 4096
# Of an environment: those of Kubernetes have some hundred variables of services.
_MAX_ENVIRONMENT_BYTES = 1 << 17
# Of those that are masked once: 128 KB in all.
_MAX_CACHED_BYTES, _MAX_CACHED = 256, 256


@dataclass(frozen=True, slots=True)
class MapsLine:
    """One mapping. Addresses and offset in bytes."""

    start: int
    end: int
    offset: int
    device: str  # major:minor in hex, as in the file
    inode: int
    path: str  # as the kernel wrote it: may end in " (deleted)", or be "[vdso]" or ""


@dataclass(frozen=True, slots=True)
class Status:
    """Of a process.

    Attributes:
        parent_pid: 0 when unknown.
        namespaced_pid: The pid by which it knows itself: the innermost of its NSpid line.
        owner_uid: Its real user id; -1, which nobody has, when unknown.
    """

    parent_pid: int
    namespaced_pid: int
    owner_uid: int


@dataclass(frozen=True, slots=True)
class ThreadStat:
    """A thread's state letter, and how often it was switched out so far."""

    state: str
    switches: int


# Of /proc/PID/stat (proc_pid_stat(5)): fields past the name, from 0; utime, stime, cutime, cstime.
_TIMES = slice(11, 15)
_START_TIME = 19


def read_lines(path: str | Path, limit: int = 65536) -> list[str]:
    """Returns the lines of up to `limit` bytes of a small file, none when it cannot be read.

    Only a newline ends a line, which the kernel escapes in names. str.splitlines() knows others,
    with which a process could write lines of its own into its name or its files'.
    """
    return _lines(kernelfs.read_text(path, limit))


def _lines(text: str) -> list[str]:
    lines = text.split("\n")
    return lines if lines[-1] else lines[:-1]


def executable_mappings(opener: Opener, pid: int) -> list[MapsLine]:
    """Returns what a process has mapped executable, in address order.

    The kernel waits for whoever is changing the mappings, and that may wait for a file system.
    """
    return _mappings(opener, pid, lambda fields: "x" in fields[1])


def shared_mappings(opener: Opener, pid: int, name: str) -> list[MapsLine]:
    """Returns the memory of a process that is shared and whose name begins so, as above."""

    def is_wanted(fields: list[str]) -> bool:
        return fields[1].endswith("s") and len(fields) > 5 and fields[5].startswith(name)

    return _mappings(opener, pid, is_wanted)


def writable_mappings(opener: Opener, pid: int) -> list[MapsLine]:
    """Returns the memory of a process that it alone writes to, as above."""
    return _mappings(opener, pid, lambda fields: fields[1].startswith("rw"))


def _mappings(opener: Opener, pid: int, is_wanted: Callable[[list[str]], bool]) -> list[MapsLine]:
    text = opener.proc(pid, "maps", _MAX_MAPS_BYTES).decode(errors="replace")
    lines = (line.split(None, 5) for line in _lines(text))
    found = (_mapping(fields) for fields in lines if len(fields) >= 5 and is_wanted(fields))
    return [mapping for mapping in found if mapping is not None]


def _mapping(fields: list[str]) -> MapsLine | None:
    """Makes a mapping of a line's fields, None of a line that the limit has cut."""
    start, _, end = fields[0].partition("-")
    # Newlines in file names are written as \012 (seq_file's mangling).
    path = fields[5].replace("\\012", "\n") if len(fields) > 5 else ""
    try:
        return MapsLine(
            int(start, 16), int(end, 16), int(fields[2], 16), fields[3], int(fields[4]), path
        )
    except ValueError:
        return None


def comm(pid: int, tid: int | None = None) -> str:
    """Returns the name of a process or thread, "" when it is gone."""
    path = f"/proc/{pid}/comm" if tid is None else f"/proc/{pid}/task/{tid}/comm"
    return kernelfs.read_text(path).rstrip("\n")


def command_line(opener: Opener, pid: int) -> str:
    """Returns the arguments joined by spaces, "" for a kernel thread.

    They are the process's own memory, which has to be waited for as the mappings have.
    """
    return joined_arguments(opener.proc(pid, "cmdline", _MAX_COMMAND_LINE_BYTES))


def environment(opener: Opener, pid: int) -> dict[str, str]:
    """Returns the variables that a process was started with, of as many as fit; as `command_line`.

    They have secrets: they are for a look, and are kept nowhere.
    """
    pairs = opener.proc(pid, "environ", _MAX_ENVIRONMENT_BYTES).decode(errors="replace")
    found = (pair.partition("=") for pair in pairs.split("\0"))
    return {name: value for name, is_one, value in found if is_one}


def joined_arguments(raw: bytes) -> str:
    """Returns the arguments of a program, of which each ends in a NUL, joined by spaces.

    Secrets in them are masked: whoever gets a capture or a dump sees them.
    """
    return _short_joined(raw) if len(raw) <= _MAX_CACHED_BYTES else _joined(raw)


def _joined(raw: bytes) -> str:
    return " ".join(redacted(raw.decode(errors="replace").rstrip("\0").split("\0")))


# Hosts that start hundreds of programs a second start the same few.
_short_joined = functools.lru_cache(_MAX_CACHED)(_joined)


def executable(pid: int) -> str:
    """Returns the executable's path as the process sees it."""
    try:
        path = Path(f"/proc/{pid}/exe").readlink()
    except OSError:
        return ""
    return os.fsencode(path).decode(errors="replace")


def cgroups(pid: int) -> CgroupPaths:
    """Returns the cgroups of a process, empty paths when it is gone."""
    return cgroup_paths(read_lines(f"/proc/{pid}/cgroup"))


def status_field(pid: int, field: str) -> list[str]:
    """Returns the words of one line of /proc/PID/status, none when it is not there."""
    for line in read_lines(f"/proc/{pid}/status"):
        name, _, words = line.partition(":")
        if name == field:
            return words.split()
    return []


def status(pid: int) -> Status:
    """Returns what /proc/PID/status says of a process."""
    fields = {}
    for line in read_lines(f"/proc/{pid}/status"):
        name, _, words = line.partition(":\t")
        fields[name] = words
    namespaced_pids = fields.get("NSpid", "").split()
    return Status(
        int((fields.get("PPid", "").split() or ["0"])[0]),
        int(namespaced_pids[-1] if namespaced_pids else pid),
        int((fields.get("Uid", "").split() or ["-1"])[0]),
    )


def namespaced_pid(pid: int) -> int:
    """Returns the pid by which the process knows itself."""
    return status(pid).namespaced_pid


def tids_by_namespaced(pid: int, most: int) -> dict[int, int]:
    """Returns the ids of up to so many threads by those by which the process knows them itself."""
    found: dict[int, int] = {}
    for tid in itertools.islice(thread_ids(pid), most):
        for line in read_lines(f"/proc/{pid}/task/{tid}/status"):
            name, _, words = line.partition(":")
            if name == "NSpid" and words.split():
                found[int(words.split()[-1])] = tid
    return found


def parent_pid(pid: int) -> int:
    """Returns the parent's pid, 0 when unknown."""
    return status(pid).parent_pid


def process_ids() -> list[int]:
    """Returns all pids visible here."""
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def descendants(pids: Collection[int], apart: Collection[int] = ()) -> list[int]:
    """Returns the living children of processes, and theirs, without this process and its own.

    Args:
        pids: Of the processes.
        apart: Those that are left out as well, with all that are below them.
    """
    children: dict[int, list[int]] = {}
    for pid in process_ids():
        children.setdefault(parent_pid(pid), []).append(pid)
    seen = {*pids, *apart, os.getpid()}
    found: list[int] = []
    parents = [*pids]
    while parents:
        new = [child for child in children.get(parents.pop(), ()) if child not in seen]
        seen.update(new)
        found += new
        parents += new
    return found


def ancestors(pid: int) -> list[int]:
    """Returns a process's parent, that one's, and so on."""
    found: list[int] = []
    while (pid := parent_pid(pid)) > 0 and pid not in found:
        found.append(pid)
    return found


def _stat(pid: int) -> list[str]:
    """Returns the fields of /proc/PID/stat from the third on; none when the process is gone."""
    # The name before them may hold anything, also line ends (proc_pid_stat(5)).
    return "".join(read_lines(f"/proc/{pid}/stat")).rpartition(")")[2].split()


def cpu_s(pid: int) -> float:
    """CPU time that a process and its children that have ended took, 0 for one that is gone."""
    return sum(map(int, _stat(pid)[_TIMES])) / os.sysconf("SC_CLK_TCK")


def begun(apart: Collection[int] = ()) -> list[int]:
    """Returns the processes that this one has begun, and those that they have.

    Args:
        apart: Those that are left out, with all that they have begun.
    """
    return begun_by([os.getpid()], apart)


def begun_by(parents: Collection[int], apart: Collection[int] = ()) -> list[int]:
    """Returns the processes that some have begun, and those that they have, as above.

    It is asked of those alone (/proc/PID/task/TID/children, v4.2, CONFIG_PROC_CHILDREN): to look
    through all processes of a host takes too long, and is for kernels without such files.
    """
    if not Path("/proc/thread-self/children").exists():
        return descendants(parents, apart)
    found = [*parents]
    for parent in found:
        for tid in thread_ids(parent):
            children = read_lines(f"/proc/{parent}/task/{tid}/children")
            pids = (int(pid) for line in children for pid in line.split())
            found += [pid for pid in pids if pid not in apart]
    return found[len(parents) :]


def helpers_cpu_ns(apart: Collection[int] = ()) -> int:
    """Returns the CPU time of all that this process has begun, also of what has ended.

    Args:
        apart: Those that are left out while they live, with all that they have begun.
    """
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return round((ended.ru_utime + ended.ru_stime + sum(map(cpu_s, begun(apart)))) * 1e9)


def host_switches() -> int:
    """Returns how often a CPU went from one thread to another since boot; 0 where that is unknown.

    The kernel adds up the interrupts of all CPUs for the same file: 0.06 ms on a host of 2 CPUs.
    """
    # The line is after that of interrupts, which has thousands of numbers on large hosts.
    _, _, after = kernelfs.read_text("/proc/stat", _MAX_STAT_BYTES).partition("\nctxt ")
    return int(after.partition("\n")[0] or 0)


def start_ticks(pid: int) -> int:
    """Returns when a process began, in clock ticks since boot; 0 when it is gone.

    With its number it tells one process from any other of this boot.
    """
    fields = _stat(pid)
    return int(fields[_START_TIME]) if len(fields) > _START_TIME else 0


def thread_ids(pid: int) -> list[int]:
    """Returns the threads of a process, none when it is gone."""
    try:
        return [int(entry.name) for entry in Path(f"/proc/{pid}/task").iterdir()]
    except OSError:
        return []


def thread_stat(pid: int, tid: int) -> ThreadStat | None:
    """Returns a thread's state and its count of context switches, None when it is gone."""
    state, switches = "", 0
    for line in read_lines(f"/proc/{pid}/task/{tid}/status"):
        field, _, value = line.partition(":")
        if field == "State":
            state = value.strip()[:1]
        elif field.endswith("ctxt_switches"):
            switches += int(value)
    return ThreadStat(state, switches) if state else None
