# SPDX-License-Identifier: Apache-2.0
"""Runs a program of this machine's on bytes of a target's, as a process without rights.

The program is one of a vendor's, made for sound input; what it gets may be made to take it over. So
it becomes nobody, in a network of its own, may not write a file, start a process or take more than
its share of time and memory, and all that comes of it is text of a bounded length.

Where who runs this is not root, as for a report, it stays that user: it changes no file all the
same, by Landlock, has no network where users may have namespaces, and does not run where the kernel
has no Landlock (before 5.13).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import select
import signal
import stat
import subprocess
import time
from collections.abc import Sequence

from aiflame.agent.inspector import sandbox
from aiflame.agent.limits import limit_self
from aiflame.agent.process_group import OWN_PROCESS_GROUP

# Stands among arguments for the bytes, as the path of a file.
INPUT = "{}"

# The disassembly of 50 MB of machine code takes nvdisasm some seconds; of one function of it, less.
# On damaged code it may never end, and whoever lists kernels has 10 s for that and all other code.
_MAX_CPU_S, _PATIENCE_S = 4, 30.0
_MAX_MEMORY_BYTES = 4 << 30
_MAX_OUTPUT_BYTES = 64 << 20
_MAX_DESCRIPTORS = 32
_CHUNK_BYTES = 1 << 20
# CLONE_NEWNET | CLONE_NEWIPC (sched.h): it speaks to nobody. CLONE_NEWUSER lets users do that.
_ALONE, _OWN_USERS = 0x40000000 | 0x08000000, 0x10000000

# asm-generic/unistd.h, linux/landlock.h: system calls, and what files may be done to. Of those in
# the first version: LANDLOCK_ACCESS_FS_WRITE_FILE, and from REMOVE_DIR to MAKE_SYM; REFER came with
# the second, and TRUNCATE with the third. What no rule allows is refused.
_SYS_CREATE_RULESET, _SYS_RESTRICT_SELF = 444, 446
_GET_VERSION = 1
_CHANGES = 1 << 1 | 0x1FF << 4
_CHANGES_SINCE = {2: 1 << 13, 3: 1 << 14}

_libc = ctypes.CDLL(None, use_errno=True)


def is_sound(path: str) -> bool:
    """Whether a program is one that only root, or who runs this, can have put there."""
    try:
        facts = os.stat(path)  # noqa: PTH116 - no more is imported than is needed
    except OSError:
        return False
    is_ours = facts.st_uid in (0, os.geteuid())
    of_others = stat.S_IWOTH | (stat.S_IWGRP if facts.st_gid else 0)
    return is_ours and stat.S_ISREG(facts.st_mode) and not facts.st_mode & of_others


def run_tool(path: str, arguments: Sequence[str], data: bytes) -> bytes | None:
    """Returns what a program writes to its standard output.

    Args:
        path: Of the program.
        arguments: INPUT among them stands for the path of a file with the data.
        data: Of a target.

    Returns:
        None where it cannot be run without rights, fails, or takes or says too much.
    """
    fd = os.memfd_create("input", os.MFD_CLOEXEC)
    try:
        os.write(fd, data)
        given = [f"/proc/self/fd/{fd}" if one == INPUT else one for one in arguments]
        parent = os.getpid()
        process = subprocess.Popen(  # noqa: S603 - a program of this machine's, without rights
            [path, *given],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            pass_fds=(fd,),
            env={"LC_ALL": "C", "PATH": ""},
            cwd="/",
            preexec_fn=lambda: _give_up_rights(parent),
            **{k: v for k, v in OWN_PROCESS_GROUP.items() if k != "preexec_fn"},
        )
    except (OSError, subprocess.SubprocessError):
        return None
    finally:
        os.close(fd)
    with process:
        try:
            found = _output(process)
        finally:
            process.kill()
        return found if process.wait() == 0 else None


def _output(process: subprocess.Popen[bytes]) -> bytes | None:
    """Returns all that it says, None where that is too much or takes too long."""
    if process.stdout is None:
        return None
    fd, size = process.stdout.fileno(), 0
    parts: list[bytes] = []
    deadline_s = time.monotonic() + _PATIENCE_S
    while size <= _MAX_OUTPUT_BYTES:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        if not poll.poll(1000 * max(deadline_s - time.monotonic(), 0)):
            return None
        part = os.read(fd, _CHUNK_BYTES)
        if not part:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(deadline_s - time.monotonic(), 0))
            return b"".join(parts)
        parts.append(part)
        size += len(part)
    return None


def _give_up_rights(parent: int) -> None:
    """What the child does before it becomes the program."""
    is_root = os.geteuid() == 0
    _libc.unshare(_ALONE if is_root else _ALONE | _OWN_USERS)
    limit_self(
        (resource.RLIMIT_CPU, _MAX_CPU_S),
        (resource.RLIMIT_AS, _MAX_MEMORY_BYTES),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    )
    failures = sandbox.enter(None, parent)
    changes_nothing = _forbid_changes()
    # After what opens descriptors: those of the caller are closed when the program begins only.
    limit_self((resource.RLIMIT_NOFILE, _MAX_DESCRIPTORS))
    has_rights = os.geteuid() == 0 or not (is_root or changes_nothing)
    if has_rights or any(failure.startswith("capabilities") for failure in failures):
        os.kill(os.getpid(), signal.SIGKILL)
    if os.geteuid() == sandbox.NOBODY:  # others have processes as who started this
        resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))


def _forbid_changes() -> bool:
    """Keeps this process from changing any file; returns whether the kernel can do that."""
    version = _libc.syscall(_SYS_CREATE_RULESET, None, ctypes.c_size_t(0), _GET_VERSION)
    if version < 1:
        return False
    changes = _CHANGES | sum(bits for since, bits in _CHANGES_SINCE.items() if version >= since)
    # struct landlock_ruleset_attr, as long as in the first version.
    attributes = ctypes.c_uint64(changes)
    size = ctypes.c_size_t(ctypes.sizeof(attributes))
    rules = _libc.syscall(_SYS_CREATE_RULESET, ctypes.byref(attributes), size, 0)
    if rules < 0:
        return False
    is_done: bool = _libc.syscall(_SYS_RESTRICT_SELF, rules, 0) == 0
    os.close(rules)
    return is_done
