# SPDX-License-Identifier: Apache-2.0
"""Where each thread keeps its Python thread state, as PyGILState_GetThisThreadState reads it.

Up to 3.14 that is under a pthread key, whose number is in _PyRuntime. From 3.15 on it is a
thread-local variable, `_Py_tss_gilstate`, which stays set while the GIL is released as well; how
code gets at it depends on how it was linked (psABI of thread-local storage, U. Drepper, "ELF
Handling For Thread-Local Storage", 4.3 and 5): an interpreter inside a program has it at a fixed
distance below the thread pointer, libpython asks `__tls_get_addr` or has the distance in its GOT.
x86-64 only.
"""

from __future__ import annotations

import enum
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace

from aiflame.agent.python.evalcode import AddressRange, key_operand
from aiflame.agent.python.layouts import Layout
from aiflame.agent.python.memory import Memory, read_u64
from aiflame.agent.python.threads import (
    UnsupportedLibc,
    list_threads,
    read_tss_key,
    tss_slot_offset,
)

# Thread-local variables of programs and of libraries that are loaded at the start lie in one block
# below the thread pointer; glibc keeps some KB free in it for others, TensorFlow has 50 KB.
MAX_BELOW_BYTES = 1 << 20
# glibc's struct pthread begins with tcbhead_t: itself, then the vector of TLS blocks (dtv), of
# pairs {block, what is to be freed}; the first pair counts (sysdeps/x86_64/nptl/tls.h, v2.43).
_DTV_AT, _DTV_PAIR_BYTES = 8, 16
# Modules with thread-local variables; a Python program has a dozen.
_MAX_MODULES = 1 << 16

# What a function that returns a thread-local pointer in RAX consists of.
_LOAD = rb"(?:\x48\x8b\x80(?P<far>.{4})|\x48\x8b\x40(?P<near>.)|(?P<none>\x48\x8b\x00))"
# mov rax, fs:disp32
_DIRECT = re.compile(rb"\x64\x48\x8b\x04\x25(?P<at>.{4})", re.DOTALL)
# What the linker makes of a call where it knows better: mov rax, fs:0; lea rax, [rax + disp32]
_RELAXED = re.compile(
    rb"\x64\x48\x8b\x04\x25\0\0\0\0(?:\x48\x8d\x80(?P<block>.{4}))?" + _LOAD, re.DOTALL
)
# lea rdi, [rip + module]; call __tls_get_addr, by way of the PLT or of the GOT; then the load, with
# the frame left in between.
_CALL = re.compile(
    rb"\x48\x8d\x3d(?P<module>.{4})(?:\x66|\x67|\x48)*(?:\xe8.{4}|\xff\x15.{4})"
    rb"(?:\x5d|\xc9|\x48\x83\xc4.)*" + _LOAD,
    re.DOTALL,
)
# mov rax, [rip + distance]; mov rax, fs:[rax]
_INDIRECT = re.compile(rb"\x48\x8b\x05(?P<distance>.{4})\x64\x48\x8b\x00", re.DOTALL)


class StateKind(enum.Enum):
    """How the place of a thread's state is told."""

    KEY = 0  # `address`: the pthread key (int32), after `_is_initialized`
    BELOW = 1  # `below` bytes below the thread pointer
    MODULE = 2  # `address`: number of the module and offset in its block; `below`: further on
    DISTANCE = 3  # `address`: the distance from the thread pointer (int64)


@dataclass(frozen=True, slots=True)
class StatePlace:
    """Where threads keep their thread state. The address is of the file, or of a process.

    Attributes:
        kind: How it is told.
        address: See `StateKind`, 0 for none.
        below: Bytes, see `StateKind`; from the block's begin for MODULE.
    """

    kind: StateKind
    address: int = 0
    below: int = 0

    def moved(self, bias: int) -> StatePlace:
        """The same in a process that maps the file `bias` bytes above its addresses."""
        return replace(self, address=self.address + bias) if self.address else self


def place_of(code: bytes, address: int, runtime: AddressRange) -> StatePlace | None:
    """Where PyGILState_GetThisThreadState looks; None where its code is not understood.

    Args:
        code: Its bytes, and maybe some after it.
        address: Where they begin.
        runtime: _PyRuntime.
    """
    key = key_operand(code, address, runtime)
    if key is not None:
        return StatePlace(StateKind.KEY, key)
    if match := _RELAXED.search(code):
        return _below(_signed(match["block"] or bytes(4)) + _disp(match))
    if match := _DIRECT.search(code):
        return _below(_signed(match["at"]))
    if match := _CALL.search(code):
        if not 0 <= _disp(match) < MAX_BELOW_BYTES:
            return None
        after = address + match.end("module")
        return StatePlace(StateKind.MODULE, after + _signed(match["module"]), _disp(match))
    if match := _INDIRECT.search(code):
        after = address + match.end("distance")
        return StatePlace(StateKind.DISTANCE, after + _signed(match["distance"]))
    return None


def _below(distance: int) -> StatePlace | None:
    return StatePlace(StateKind.BELOW, below=-distance) if _is_below(distance) else None


def _is_below(distance: int) -> bool:
    return -MAX_BELOW_BYTES < distance < 0 and distance % 8 == 0


def _disp(match: re.Match[bytes]) -> int:
    return _signed(match["far"] or match["near"] or b"\0")


def _signed(data: bytes) -> int:
    return int.from_bytes(data, "little", signed=True)


def find_slot(
    memory: Memory,
    layout: Layout,
    runtime_address: int,
    place: StatePlace,
    key_block: Callable[[], int],
) -> int | None:
    """Bytes from any thread's FS base to its thread state, None before the interpreter has one.

    Args:
        memory: The process.
        layout: Of its interpreter.
        runtime_address: Its _PyRuntime.
        place: Where threads keep it, in the process.
        key_block: Returns where its C library has pthread keys (`threads.find_key_block`).

    Raises:
        UnsupportedLibc: Each thread keeps it elsewhere.
    """
    if place.kind is StateKind.KEY:
        key = read_tss_key(memory, place.address)
        return None if key is None else tss_slot_offset(key, key_block())
    if place.kind is StateKind.BELOW:
        return -place.below
    # The dynamic loader has filled in what is asked for now, once there is a thread state.
    threads = list_threads(memory, layout, runtime_address).threads
    thread = next((one for one in threads if one.pthread), None)
    if thread is None:
        return None
    if place.kind is StateKind.DISTANCE:
        slot = _word(memory, place.address)
    else:
        slot = _in_module(memory, place, thread.pthread)
    # Blocks of libraries that were loaded later lie anywhere.
    if slot is None or not _is_below(slot):
        raise UnsupportedLibc("an interpreter that was loaded late is not supported")
    # What is not so yet, as while a thread begins, is asked for again.
    return slot if read_u64(memory, thread.pthread + slot) == thread.address else None


def _in_module(memory: Memory, place: StatePlace, pthread: int) -> int | None:
    module, offset = read_u64(memory, place.address), read_u64(memory, place.address + 8)
    vector = read_u64(memory, pthread + _DTV_AT)
    if module is None or offset is None or not vector or not 0 < module < _MAX_MODULES:
        return None
    block = read_u64(memory, vector + module * _DTV_PAIR_BYTES)
    return None if block is None else block + offset + place.below - pthread


def _word(memory: Memory, address: int) -> int | None:
    data = memory.read(address, 8)
    return None if data is None else int(struct.unpack("<q", data)[0])
