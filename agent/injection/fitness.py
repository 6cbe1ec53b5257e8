# SPDX-License-Identifier: Apache-2.0
"""Whether a library can be loaded into a process at all, and what of it that takes.

What no thread of it can change is refused here, before any is stopped.
"""

from __future__ import annotations

import ctypes
import os
import platform
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from aiflame.agent.injection.code import CODE
from aiflame.agent.injection.questions import LIBRARY, LibraryFacts, Role
from aiflame.agent.injection.requests import Functions
from aiflame.agent.injection.tracer import InjectionRefused, RefusedForGood
from aiflame.agent.inspector.memory import RemoteMemory, Span
from aiflame.agent.processes import procfs
from aiflame.agent.processes.binaries import VDSO_PATH, BinaryTable
from aiflame.agent.processes.elf_images import ElfImages
from aiflame.agent.processes.table import NO_BINARY, ProcessImage
from aiflame.agent.processes.table import Mapping as CodeMapping

_CODE_ALIGNMENT = 16
# asm/unistd_64.h, linux/kcmp.h
_SYS_KCMP, _KCMP_VM = 312, 1

# Another recorder that loads a library holds a thread for some milliseconds, again and again.
_TRACED_S, _LOOK_S = 1.0, 0.005

_RESTART = "restart it as: aiflame record -- COMMAND"
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class Fitness:
    """What of a process an injection takes.

    Attributes:
        libraries: What its files are, by binary.
        program: The binary that it began with.
        functions: What is called in it.
        code_at: Where code.S goes: unused bytes after the code of one of its files.
    """

    libraries: Mapping[int, LibraryFacts]
    program: int
    functions: Functions
    code_at: int


def require_fit_process(pid: int) -> None:
    """Raises for a process that cannot be asked, by what the kernel says of it.

    Raises:
        InjectionRefused: With the reason.
    """
    if platform.machine() != "x86_64":
        raise RefusedForGood(f"cannot load a library on {platform.machine()}: only on x86-64")
    state = (procfs.status_field(pid, "State") or ["gone"])[0]
    if state in ("gone", "Z", "X"):
        raise RefusedForGood(f"process {pid} has ended")
    until_s = time.monotonic() + _TRACED_S
    while (tracer := tracer_of(pid)) and time.monotonic() < until_s:
        time.sleep(_LOOK_S)
    if tracer:
        name = procfs.comm(tracer) or "a process of another namespace"
        raise InjectionRefused(
            f"process {pid} is being traced by {name} (process {tracer})",
            "end that debugger or tracer, then try again",
        )
    if state == "T":
        raise InjectionRefused(
            f"process {pid} is stopped by a signal", f"let it go on: kill -CONT {pid}"
        )
    if _shares_memory(pid, procfs.parent_pid(pid)):
        raise InjectionRefused(
            f"process {pid} uses the memory of its parent (vfork)", "try again after its exec"
        )


def tracer_of(tid: int) -> int:
    """Returns who traces a thread, 0 for nobody."""
    return int((procfs.status_field(tid, "TracerPid") or ["0"])[0])


def require_fit_thread(pid: int, tid: int) -> None:
    """Raises for a thread whose rt_sigreturn(2) wants a token that nobody can make for it.

    Raises:
        InjectionRefused: It has a shadow stack (Documentation/arch/x86/shstk.rst), Linux 6.6.
    """
    if "shstk" in procfs.status_field(tid, "x86_Thread_features"):
        raise RefusedForGood(
            f"process {pid} has shadow stacks, which no borrowed thread gets past",
            "restart it with GLIBC_TUNABLES=glibc.cpu.x86_shstk=off",
        )


def _shares_memory(pid: int, parent: int) -> bool:
    """Whether two processes have one memory; False where the kernel does not tell."""
    if not parent or parent == os.getpid():
        return False
    result = _libc.syscall(
        ctypes.c_long(_SYS_KCMP), ctypes.c_int(pid), ctypes.c_int(parent), _KCMP_VM, 0, 0
    )
    return bool(result == 0)


def fitness_of(
    image: ProcessImage, binaries: BinaryTable, images: ElfImages, memory: RemoteMemory
) -> Fitness:
    """Finds out what an injection takes.

    Raises:
        InjectionRefused: The process has not got it.
    """
    pid = image.pid
    mapped = [mapping for mapping in image.mappings if mapping.binary != NO_BINARY]
    if not mapped:
        raise InjectionRefused(f"process {pid} has no code that could be read")
    paths = {mapping.binary: binaries.files[mapping.binary].path for mapping in mapped}
    named = (binary for binary, path in paths.items() if path == image.executable)
    program = next(named, mapped[0].binary)
    headers = images.of(program)
    if headers is not None and headers.bits != 64:
        raise RefusedForGood(f"process {pid} is a 32-bit program", _RESTART)
    answers = {binary: binaries.ask(binary, LIBRARY) for binary in paths}
    unknown = LibraryFacts(Role.OTHER, {}, ())
    libraries = {binary: answer or unknown for binary, answer in answers.items()}
    roles = {facts.role for facts in libraries.values()}
    if Role.MUSL in roles:
        raise RefusedForGood(f"process {pid} uses musl: only glibc's loader is known")
    if Role.GLIBC not in roles or Role.LOADER not in roles:
        # What is not known of a file may be the next time: its parser wanted for memory.
        refused = InjectionRefused if None in answers.values() else RefusedForGood
        raise refused(
            f"process {pid} is statically linked: it has no dynamic loader",
            "link it dynamically, or record its launches only",
        )
    functions = _functions(image, mapped, libraries, images)
    for address in _unused(mapped, libraries, binaries, images):
        (answer,) = memory.read([Span(pid, pid, address, len(CODE))])
        if answer.data in (bytes(len(CODE)), CODE):
            return Fitness(libraries, program, functions, address)
    raise InjectionRefused(f"process {pid} has no unused bytes after the code of any library")


def _functions(
    image: ProcessImage,
    mapped: list[CodeMapping],
    libraries: Mapping[int, LibraryFacts],
    images: ElfImages,
) -> Functions:
    found: dict[str, int] = {}
    # libc's come first: a sanitizer's or profiler's of the same name does more than is asked.
    for mapping in sorted(mapped, key=lambda m: libraries[m.binary].role is not Role.GLIBC):
        bias = images.bias(mapping)
        for name, address in libraries[mapping.binary].called.items():
            found.setdefault(name, address + bias)
    is_internal = "dlopen" not in found
    names = ("__libc_dlopen_mode", "__libc_dlsym") if is_internal else ("dlopen", "dlsym")
    threads = ("pthread_create", "pthread_detach", "__errno_location")
    if missing := [name for name in (*threads, *names) if name not in found]:
        raise InjectionRefused(
            f"process {image.pid} has no {missing[0]}: its glibc is older than 2.34, and it is not "
            "linked with libpthread",
            "link it with -pthread, or start it with LD_PRELOAD=libpthread.so.0",
        )
    return Functions(
        pthread_create=found["pthread_create"],
        pthread_detach=found["pthread_detach"],
        dlopen=found[names[0]],
        dlsym=found[names[1]],
        dlerror=0 if is_internal else found.get("dlerror", 0),
        errno_location=found["__errno_location"],
        is_internal=is_internal,
    )


def _unused(
    mapped: list[CodeMapping],
    libraries: Mapping[int, LibraryFacts],
    binaries: BinaryTable,
    images: ElfImages,
) -> Iterator[int]:
    """Yields where there is room for code.S between the end of a file's code and of its last page.

    Linkers give code pages of its own, so that the rest of the last one is zeros which nothing uses
    (ld's -z separate-code, since binutils 2.31). Those first that are never unmapped.
    """

    def is_late(mapping: CodeMapping) -> bool:
        return libraries[mapping.binary].role not in (Role.GLIBC, Role.LOADER)

    for mapping in sorted(mapped, key=is_late):
        headers = images.of(mapping.binary)
        if headers is None or binaries.files[mapping.binary].path == VDSO_PATH:
            continue
        for load in headers.loads:
            end = load.virtual_address + load.file_size + images.bias(mapping)
            at = -(-end // _CODE_ALIGNMENT) * _CODE_ALIGNMENT
            if load.executable and mapping.start < end and at + len(CODE) <= mapping.end:
                yield at
