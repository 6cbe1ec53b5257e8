# SPDX-License-Identifier: Apache-2.0
"""From a thread of the operating system to its Python thread state.

The kernel half takes the thread state from the slot of the pthread key `autoTSSkey`: it stays there
while the GIL is released, which the "current" thread state does not. `tss_slot_offset` says where
the slot is from the thread's fs base. User space cannot see another thread's registers without
stopping it, so here the interpreter's own lists are walked instead and matched by kernel thread id.

Of a thread with states in several interpreters the key holds the one bound last; the lists show
all of them. Only glibc on x86-64 is known; musl keeps its keys elsewhere and is refused.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass

from aiflame.agent.elf.image import ElfImage
from aiflame.agent.elf.symbols import first_symbols
from aiflame.agent.errors import AiflameError
from aiflame.agent.python.layouts import ABSENT, Layout
from aiflame.agent.python.memory import Memory, read_i32, read_u64, sound_address
from aiflame.agent.target_files import TargetFile

# glibc 2.36 nptl/descr.h, x86-64: struct pthread begins at the fs base; `tid`, then
# `specific_1stblock` of 32 pairs {seq, data}, then `specific` with pointers to further blocks.
_PTHREAD_TID = 0x2D0
KEY_BLOCK = 0x310
_KEYS_PER_BLOCK = 32
_KEY_PAIR_BYTES, _KEY_DATA = 16, 8

_GETTER = b"pthread_getspecific"
_MAX_GETTER_BYTES = 512
# mov r64, fs:[index * 8 + disp32]: prefix 64, REX.W 8B /r, SIB with scale 8 and no base
_FURTHER_BLOCKS = re.compile(
    rb"\x64[\x48-\x4f]\x8b[\x04\x0c\x14\x1c\x24\x2c\x34\x3c]"
    rb"[\xc5\xcd\xd5\xdd\xed\xf5\xfd](.{4})",
    re.DOTALL,
)
# struct pthread has 2304 bytes in glibc 2.36.
MAX_PTHREAD_BYTES = 4096

# A process with more is no Python program but garbage; sub-interpreters are rare.
MAX_INTERPRETERS = 64
MAX_THREADS = 65536


class UnsupportedLibc(AiflameError):
    """Where this C library keeps a thread's key data is not known here."""


@dataclass(frozen=True, slots=True)
class ThreadState:
    """One PyThreadState.

    Attributes:
        address: Where it is.
        interpreter: Address of its PyInterpreterState.
        pthread: pthread_self() of the thread, 0 before it has run.
        tid: Kernel thread id in the target's own pid namespace, 0 where unknown.
    """

    address: int
    interpreter: int
    pthread: int
    tid: int


@dataclass(frozen=True, slots=True)
class ThreadList:
    """All thread states that were found.

    Attributes:
        threads: In the order of the lists: newest first.
        complete: False where a list was cut, looped or could not be read to its end.
    """

    threads: tuple[ThreadState, ...]
    complete: bool


def find_key_block(file: TargetFile, image: ElfImage) -> int | None:
    """Bytes from the fs base to the first block of key data, as this C library's code has it.

    From pthread_getspecific, in libc.so.6, before glibc 2.34 in libpthread.so.0: it reads the
    pointers to further blocks by `mov reg, fs:[8 * reg + specific]`, and they follow the first
    block. musl has no such instruction.

    Args:
        file: The library.
        image: Its headers.

    Returns:
        None where the library is another one.

    Raises:
        UnsupportedLibc: It has the function, but not as glibc has it.
        BadTargetFile: As `TargetFile.read`.
    """
    symbol = first_symbols(file, image, (_GETTER,)).get(_GETTER)
    if symbol is None:
        return None
    code = image.read_at(file, symbol.address, min(symbol.size, _MAX_GETTER_BYTES) or 1)
    found = {struct.unpack("<i", match[1])[0] for match in _FURTHER_BLOCKS.finditer(code)}
    block = found.pop() - _KEYS_PER_BLOCK * _KEY_PAIR_BYTES if len(found) == 1 else -1
    if not 0 < block < MAX_PTHREAD_BYTES or block % 8:
        raise UnsupportedLibc("a C library that keeps pthread keys unlike glibc is not supported")
    return block


def tss_slot_offset(key: int, key_block: int = KEY_BLOCK) -> int:
    """Bytes from the fs base of a thread to what it keeps under a pthread key, on glibc.

    Args:
        key: The pthread key.
        key_block: From `find_key_block`.

    Raises:
        UnsupportedLibc: Keys from 32 on are in blocks that are allocated on demand.
    """
    if not 0 <= key < _KEYS_PER_BLOCK:
        raise UnsupportedLibc(f"pthread key {key} lies outside the first block of glibc")
    return key_block + _KEY_PAIR_BYTES * key + _KEY_DATA


def read_tss_key(memory: Memory, key_address: int) -> int | None:
    """The value of autoTSSkey, None before the interpreter has made it.

    Args:
        key_address: Of `_key`, which `_is_initialized` precedes (Include/cpython/pythread.h).
    """
    if not read_i32(memory, key_address - 4):
        return None
    return read_i32(memory, key_address)


def list_threads(memory: Memory, layout: Layout, runtime_address: int) -> ThreadList:
    """Walk the interpreters and their thread states.

    Args:
        memory: The process.
        layout: Of its interpreter.
        runtime_address: Of _PyRuntime in the process.
    """
    found: list[ThreadState] = []
    seen: set[int] = set()
    interpreter = read_u64(memory, runtime_address + layout.runtime_interpreters)
    while interpreter:
        if interpreter in seen or len(seen) >= MAX_INTERPRETERS:
            return ThreadList(tuple(found), False)
        seen.add(interpreter)
        if not _collect(memory, layout, interpreter, found):
            return ThreadList(tuple(found), False)
        interpreter = read_u64(memory, interpreter + layout.interpreter_next)
    return ThreadList(tuple(found), interpreter is not None)


def _collect(memory: Memory, layout: Layout, interpreter: int, found: list[ThreadState]) -> bool:
    """Add the thread states of one interpreter; False where the list is damaged."""
    seen: set[int] = set()
    address = read_u64(memory, interpreter + layout.interpreter_threads)
    while address:
        pthread = read_u64(memory, address + layout.thread_id)
        if address in seen or pthread is None or len(found) >= MAX_THREADS:
            return False
        seen.add(address)
        tid = _native_id(memory, layout, address, pthread)
        found.append(ThreadState(address, interpreter, pthread, tid))
        address = read_u64(memory, address + layout.thread_next)
    return address is not None


def _native_id(memory: Memory, layout: Layout, address: int, pthread: int) -> int:
    if layout.thread_native_id != ABSENT:
        return read_u64(memory, address + layout.thread_native_id) or 0
    if not sound_address(pthread):
        return 0
    return max(0, read_i32(memory, pthread + _PTHREAD_TID) or 0)
