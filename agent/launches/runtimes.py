# SPDX-License-Identifier: Apache-2.0
"""Files that a program may load, before it does: device runtimes, and what a command names.

Probed before they are mapped, runtimes lose no launch; with their tables made before, the first
stacks are complete. Runtimes are what the system's linker knows (ldconfig) and, as for tables, the
command's executable and the libraries that this names, by the rules of ld.so(8). What is elsewhere
is found when it is mapped.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from aiflame.agent.elf.dynamic import DEPENDENCIES
from aiflame.agent.inspector.opener import Opener
from aiflame.agent.launches.opening import opened_at
from aiflame.agent.symbols.file_facts import FileFacts
from aiflame.gpu.apis import APIS

_LDCONFIG = "/sbin/ldconfig"
# It reads one small file.
_LDCONFIG_TIMEOUT_S = 10
_STANDARD_FOLDERS = ("/lib64", "/usr/lib64", "/lib", "/usr/lib")
# What the kernel reads of a script (BINPRM_BUF_SIZE, since v5.1).
_INTERPRETER_BYTES = 256
# The largest programs name some 200 libraries in all.
_MOST_LIBRARIES = 512


class ExpectedFiles(NamedTuple):
    """Files that may be mapped.

    Attributes:
        runtimes: Those that may hold device runtimes.
        command: A command's executable, its interpreter, and all libraries that these name.
    """

    runtimes: list[Path]
    command: list[Path]


def expected_files(command: Sequence[str], opener: Opener, facts: FileFacts) -> ExpectedFiles:
    """Returns files that a recording's targets may yet map.

    Args:
        command: The command that is about to be run, empty for none.
        opener: Opens files.
        facts: Tells what is in them.
    """
    known = _linker_cache()
    wanted = tuple(name for api in APIS for name in api.libraries)
    runtimes = [Path(path) for name, path in known.items() if name.startswith(wanted)]
    program = shutil.which(command[0]) if command else None
    programs = [] if program is None else _with_interpreter(Path(program).absolute(), opener, facts)
    return ExpectedFiles(runtimes, _libraries_of(programs, known, opener, facts))


def _with_interpreter(program: Path, opener: Opener, facts: FileFacts) -> list[Path]:
    """Returns a program, and what the kernel runs for it if it is a script (execve(2))."""
    first = b""
    with contextlib.suppress(OSError), opened_at(str(program), opener, facts) as descriptor:
        if descriptor not in facts.guard.remote:
            first = os.pread(descriptor, _INTERPRETER_BYTES, 0).partition(b"\n")[0]
    words = os.fsdecode(first[2:]).split() if first.startswith(b"#!") else []
    if len(words) > 1 and Path(words[0]).name == "env":
        found = shutil.which(words[1])
        words += [] if found is None else [found]
    return [program, *(Path(word) for word in words if word.startswith("/"))]


def _linker_cache() -> dict[str, str]:
    """Returns the paths of libraries by name, as the dynamic linker would find them."""
    try:
        done = subprocess.run(  # noqa: S603 - the system's own, with fixed arguments
            [_LDCONFIG, "-p"], capture_output=True, timeout=_LDCONFIG_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return {}  # musl has none; libraries are found when they are mapped
    found: dict[str, str] = {}
    for line in done.stdout.decode(errors="replace").splitlines():
        # "	libOpenCL.so.1 (libc6,x86-64) => /lib/x86_64-linux-gnu/libOpenCL.so.1"
        name, _, path = line.strip().partition(" => ")
        if path and "x86-64" in name:
            found.setdefault(name.partition(" ")[0], path)
    return found


def _libraries_of(
    programs: list[Path], known: dict[str, str], opener: Opener, facts: FileFacts
) -> list[Path]:
    """Returns programs and all libraries that they name, and these name in turn."""
    found: dict[Path, None] = dict.fromkeys(programs)
    waiting = [*programs]
    while waiting and len(found) < _MOST_LIBRARIES:
        for library in _needed(waiting.pop(), known, opener, facts):
            if library not in found:
                found[library] = None
                waiting.append(library)
    return list(found)


def _needed(path: Path, known: dict[str, str], opener: Opener, facts: FileFacts) -> Iterator[Path]:
    needed = None
    with contextlib.suppress(OSError), opened_at(str(path), opener, facts) as descriptor:
        needed = facts.ask(str(path), descriptor, DEPENDENCIES)
    if needed is None:
        return
    origin = str(path.resolve().parent)
    folders = [
        folder.replace("$ORIGIN", origin).replace("${ORIGIN}", origin) for folder in needed.folders
    ]
    folders += os.environ.get("LD_LIBRARY_PATH", "").split(":")
    for name in needed.libraries:
        paths = [str(Path(folder, name).absolute()) for folder in folders if folder]
        paths += [known[name]] if name in known else []
        paths += [f"{folder}/{name}" for folder in _STANDARD_FOLDERS]
        found = next((one for one in paths if _opens(one, opener, facts)), None)
        if found is not None:
            yield Path(found)


def _opens(path: str, opener: Opener, facts: FileFacts) -> bool:
    with contextlib.suppress(OSError, ValueError), opened_at(path, opener, facts):
        return True
    return False
