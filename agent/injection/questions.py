# SPDX-License-Identifier: Apache-2.0
"""What is asked about a file that a target maps: what of it a thread must not be inside of.

The thread that is lent calls pthread_create, which takes locks: malloc's, the dynamic loader's for
thread-local storage, and those of the list of threads (nptl/allocatestack.c, elf/dl-tls.c of
glibc). A thread that has one of them would wait for itself.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np
from aiflame.agent.elf import records as elf
from aiflame.agent.elf.image import ElfImage, NotElf
from aiflame.agent.elf.symbols import (
    find_symbols,
    read_names,
    read_symbols,
    symbol_sections,
)
from aiflame.agent.file_questions import Json, Question, rows, text, whole
from aiflame.agent.target_files import TargetFile

# What is called in the target. `__libc_dlopen_mode` and `__libc_dlsym` are glibc's own, for
# programs without libdl; since 2.34 everybody has dlopen.
CALLED = (
    b"pthread_create",
    b"pthread_detach",
    b"dlopen",
    b"dlsym",
    b"dlerror",
    b"__errno_location",
    b"__libc_dlopen_mode",
    b"__libc_dlsym",
)
# By what a file defines it is told: libc, which musl's says less of, and the dynamic loader.
_LIBC, _GLIBC, _LOADER = b"__libc_start_main", b"gnu_get_libc_version", b"__tls_get_addr"
_MALLOC, _FREE = b"malloc", b"free"

# Names of functions of glibc that hold such a lock, run in between of two processes, or end one.
_UNSAFE_EXACTLY = {
    *(b"fork", b"_Fork", b"vfork", b"__libc_fork", b"__vfork", b"__fork", b"posix_spawn"),
    *(b"posix_spawnp",),
    *(b"exit", b"_exit", b"quick_exit", b"abort", b"__cxa_finalize", b"__libc_freeres"),
    *(b"pthread_create", b"pthread_exit", b"__pthread_unwind_next", b"thrd_create", b"thrd_exit"),
    *(b"pthread_getattr_np", b"pthread_setattr_default_np", b"pthread_getattr_default_np"),
    *(b"setuid", b"setgid", b"seteuid", b"setegid", b"setreuid", b"setregid", b"setresuid"),
    *(b"setresgid", b"setgroups", b"initgroups", b"timer_create", b"getaddrinfo_a", b"lio_listio"),
    *(b"__cxa_thread_atexit_impl", b"__register_atfork"),
}
_UNSAFE_BEGINNINGS = (b"dl", b"_dl", b"__libc_dl", b"__nptl")
# malloc.c's functions lie together, and those that it does not export between its first and last.
_ALLOCATOR = {
    *(b"malloc", b"free", b"calloc", b"realloc", b"cfree", b"valloc", b"pvalloc", b"memalign"),
    *(b"aligned_alloc", b"posix_memalign", b"malloc_trim", b"malloc_usable_size", b"mallinfo"),
    *(b"mallinfo2", b"malloc_stats", b"malloc_info", b"mallopt", b"reallocarray"),
    *(b"__libc_malloc", b"__libc_free", b"__libc_calloc", b"__libc_realloc", b"__libc_memalign"),
    *(b"__libc_valloc", b"__libc_pvalloc", b"__libc_mallopt", b"__libc_reallocarray"),
    *(b"__malloc_fork_lock_parent", b"__libc_mallinfo", b"__posix_memalign"),
}
# Not in the midst of them: they lie elsewhere in some builds (malloc/reallocarray.c).
_ALONE = {b"reallocarray", b"__libc_reallocarray"}
_MAX_RANGES = 256
_MAX_NAME = 64
_FUNCTIONS = (elf.STT_FUNC, elf.STT_GNU_IFUNC)


class Role(enum.Enum):
    """What a file is to the process."""

    OTHER = "other"
    GLIBC = "glibc"
    MUSL = "musl"
    LOADER = "loader"
    ALLOCATOR = "allocator"  # it defines malloc, in place of libc's


@dataclass(frozen=True, slots=True)
class LibraryFacts:
    """What a file is, and defines.

    Attributes:
        role: What it is.
        called: Addresses of functions of `CALLED` that it defines.
        unsafe: Begin, end and name of what a thread must not be inside of; where that is all of the
            file, `role` says so.
    """

    role: Role
    called: dict[str, int]
    unsafe: tuple[tuple[int, int, str], ...]

    @property
    def is_libc(self) -> bool:
        """Whether threads begin in it: libc, or glibc's libpthread before 2.34."""
        return self.role is Role.GLIBC or "pthread_create" in self.called

    def why_unsafe(self, address: int) -> str:
        """Returns what an address is in that a thread must not be inside of, "" for nothing."""
        return next((name for begin, end, name in self.unsafe if begin <= address < end), "")


def unsafe_parts(file: TargetFile) -> Json:
    """Reads what a file is, and what of it is unsafe."""
    try:
        image = ElfImage.read(file)
    except NotElf:
        return None
    wanted = {*CALLED, _LIBC, _GLIBC, _LOADER, _MALLOC, _FREE}
    found = {s.name: s.address for s in find_symbols(file, image, wanted) if s.is_dynamic}
    called = [[name.decode(), found[name]] for name in CALLED if name in found]
    if _LIBC in found:
        if _GLIBC not in found:
            return [Role.MUSL.value, called, []]
        return [Role.GLIBC.value, called, _unsafe(file, image)]
    if _LOADER in found:
        return [Role.LOADER.value, called, []]
    if _MALLOC in found and _FREE in found:
        return [Role.ALLOCATOR.value, called, _unsafe(file, image)]
    # libpthread and libdl of glibc before 2.34
    return [Role.OTHER.value, called, _unsafe(file, image) if called else []]


def _checked(answer: Json) -> LibraryFacts:
    if answer is None:
        return LibraryFacts(Role.OTHER, {}, ())
    role, called, unsafe = answer
    return LibraryFacts(
        Role(role),
        {text(name, _MAX_NAME): whole(address) for name, address in rows(called, len(CALLED))},
        tuple(
            (whole(begin), whole(end), text(name, _MAX_NAME))
            for begin, end, name in rows(unsafe, _MAX_RANGES)
        ),
    )


LIBRARY = Question(unsafe_parts, _checked)


def _unsafe(file: TargetFile, image: ElfImage) -> list[tuple[int, int, str]]:
    """Returns the ranges of a file's exported functions that are unsafe, and its allocator's."""
    functions = _exported(file, image)
    found = [
        (begin, end, name.decode(errors="replace")[:_MAX_NAME])
        for begin, end, name in functions
        if name in _UNSAFE_EXACTLY | _ALONE or name.startswith(_UNSAFE_BEGINNINGS)
    ]
    own = [f for f in functions if f[2] in _ALLOCATOR - _ALONE]
    if own:
        first, last = min(f[0] for f in own), max(f[1] for f in own)
        others = [f for f in functions if f[2] not in _ALLOCATOR]
        # From the last function before that is another's to the first one after.
        begin = max((end for _, end, _ in others if end <= first), default=first)
        end = min((begin for begin, _, _ in others if begin >= last), default=last)
        found.append((begin, end, "malloc"))
    return found[:_MAX_RANGES]


def _exported(file: TargetFile, image: ElfImage) -> list[tuple[int, int, bytes]]:
    """Returns begin, end and name of all functions of .dynsym."""
    for sections in symbol_sections(image):
        if not sections.is_dynamic:
            continue
        found = []
        for records in read_symbols(file, image, sections.symbols):
            kinds = records["info"] & 0xF
            records = records[np.isin(kinds, _FUNCTIONS) & (records["section"] != elf.SHN_UNDEF)]
            names = read_names(file, sections.strings, records["name"].astype(np.uint64))
            begins = records["value"].tolist()
            sizes = records["size"].tolist()
            found += [
                (begin, begin + size, name)
                for begin, size, name in zip(begins, sizes, names, strict=True)
            ]
        return found
    return []
