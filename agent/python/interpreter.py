# SPDX-License-Identifier: Apache-2.0
"""Finds the interpreter in a binary: its version, its layout, _PyRuntime and the eval loop's code.

All of it is in the file, so it is found once per binary and holds for each process that maps it:
`Interpreter` has virtual addresses of the file, `LoadedInterpreter` those of one process. A program
that links libpython has no _PyRuntime itself, and is no interpreter here.

The eval loop's address ranges decide which native frames stand for Python frames. GCC moves the
rare part of the function elsewhere, `_PyEval_EvalFrameDefault.cold`; `evalcode` finds it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from aiflame.agent.elf.image import ElfImage
from aiflame.agent.elf.symbols import Symbol, first_symbols
from aiflame.agent.python import debugoffsets
from aiflame.agent.python.evalcode import AddressRange, eval_ranges, handler_range
from aiflame.agent.python.layouts import (
    ABSENT,
    Layout,
    UnsupportedPython,
    Version,
    refusal,
    table_layout,
)
from aiflame.agent.python.memory import sound_address
from aiflame.agent.python.thread_state import StateKind, StatePlace, place_of
from aiflame.agent.target_files import BadTargetFile, TargetFile

_RUNTIME = b"_PyRuntime"
_VERSION = b"Py_Version"  # const unsigned long, since 3.11 (Include/pylifecycle.h)
_EVAL = b"_PyEval_EvalFrameDefault"
_GET_STATE = b"PyGILState_GetThisThreadState"
_RUNTIME_SECTION = ".PyRuntime"  # GENERATE_DEBUG_SECTION, since 3.11
_FIRST_WITH_DEBUG_OFFSETS = (3, 13)
_FIRST_WITH_HANDLERS = (3, 14)
_FILE_NAME = re.compile(r"(?:lib)?python(3)\.(\d{1,2})[a-z]*(?:\.so[.\d]*)?$")
# PyGILState_GetThisThreadState has 14 to 60 bytes.
_GET_STATE_BYTES = 96
# What is taken for the size of _PyRuntime where no symbol says it (3.12: 459,944 bytes).
_MAX_RUNTIME_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Interpreter:
    """One interpreter in one file. Addresses are virtual addresses of the file.

    Attributes:
        version: Major and minor.
        layout: Its offsets.
        runtime_address: _PyRuntime.
        state_place: Where threads keep their thread state.
        eval_ranges: Begin and end of the eval loop's code, the function's own first.
        is_cold_sure: The ranges come from symbols; else the moved parts were told by their jumps.
        handlers: Where functions that are instructions of the eval loop lie, None where it is one
            function.
    """

    version: Version
    layout: Layout
    runtime_address: int
    state_place: StatePlace
    eval_ranges: tuple[AddressRange, ...]
    is_cold_sure: bool
    handlers: AddressRange | None = None

    def loaded_at(self, bias: int) -> LoadedInterpreter:
        """The interpreter in a process that maps the file `bias` bytes above its addresses.

        Raises:
            BadTargetFile: The file says that it lies where no process has memory.
        """
        loaded = LoadedInterpreter(
            self.layout,
            self.runtime_address + bias,
            self.state_place.moved(bias),
            tuple(AddressRange(r.begin + bias, r.end + bias) for r in self.eval_ranges),
            self.handlers and AddressRange(self.handlers.begin + bias, self.handlers.end + bias),
        )
        addresses = [address for code in loaded.all_ranges for address in code]
        if loaded.state_place.address:
            addresses.append(loaded.state_place.address)
        if not all(map(sound_address, (loaded.runtime_address, *addresses))):
            raise BadTargetFile("an interpreter outside of user space")
        return loaded


@dataclass(frozen=True, slots=True)
class LoadedInterpreter:
    """An interpreter in a process. Addresses are those of the process.

    Attributes:
        layout: Its offsets.
        runtime_address: _PyRuntime.
        state_place: Where threads keep their thread state.
        eval_ranges: Begin and end of the eval loop's code.
        handlers: As in `Interpreter`.
    """

    layout: Layout
    runtime_address: int
    state_place: StatePlace
    eval_ranges: tuple[AddressRange, ...]
    handlers: AddressRange | None = None

    @property
    def all_ranges(self) -> tuple[AddressRange, ...]:
        """Where a thread is that runs Python: the eval function's own code first."""
        if self.handlers is None:
            return self.eval_ranges
        return (self.eval_ranges[0], self.handlers, *self.eval_ranges[1:])

    def is_eval(self, address: int) -> bool:
        """Whether an address is in the eval loop's code."""
        return any(code.begin <= address < code.end for code in self.eval_ranges)


def may_hold_interpreter(path: str, executable: str) -> bool:
    """Whether a mapped file is worth a look: one that is called so, or the program itself.

    Reading the symbols of every library would take longer than all else at the start; extension
    modules, which have "cpython" after their names, are many.
    """
    return path == executable or _FILE_NAME.match(path.rpartition("/")[2]) is not None


def find_interpreter(file: TargetFile, image: ElfImage, name: str) -> Interpreter | None:
    """The interpreter in an open file, or None where it holds none.

    Args:
        file: The file.
        image: Its headers.
        name: Its file name without folders, which tells the version of those before 3.11.

    Raises:
        UnsupportedPython: It is CPython, but of a version, build or machine that is not known here.
        BadTargetFile: As `TargetFile.read`.
    """
    symbols = first_symbols(file, image, (_RUNTIME, _VERSION, _EVAL, _GET_STATE))
    located = _runtime(image, symbols.get(_RUNTIME))
    if located is None:
        return None
    runtime, runtime_bytes = located
    if image.machine != "X86_64" or image.bits != 64:
        raise UnsupportedPython(f"CPython on {image.machine} is not supported yet")
    head = image.read_at(file, runtime, debugoffsets.MAX_BYTES)
    stated = symbols.get(_VERSION)
    value = image.read_at(file, stated.address, 8) if stated else b""
    version = _version(value, head, name)
    layout = layout_of(version, head)
    if _EVAL not in symbols or not symbols[_EVAL].size:
        raise UnsupportedPython(f"CPython {_text(version)} without its eval function's symbol")
    ranges, is_sure = eval_ranges(file, image, symbols[_EVAL])
    place = None
    if layout.runtime_tss_key != ABSENT:
        place = StatePlace(StateKind.KEY, runtime + layout.runtime_tss_key)
    get_state = symbols.get(_GET_STATE)
    if get_state is not None:
        code = image.read_at(file, get_state.address, _GET_STATE_BYTES)
        limit = runtime + min(runtime_bytes, _MAX_RUNTIME_BYTES)
        # What the code reads beats the table: options of the build may move it.
        place = place_of(code, get_state.address, AddressRange(runtime, limit)) or place
    if place is None:
        raise UnsupportedPython(f"CPython {_text(version)}: its thread states were not found")
    handlers = handler_range(file, image) if version >= _FIRST_WITH_HANDLERS else None
    return Interpreter(version, layout, runtime, place, ranges, is_sure, handlers)


def _runtime(image: ElfImage, symbol: Symbol | None) -> tuple[int, int] | None:
    """Address and size of _PyRuntime, from its symbol, else from the section made for it."""
    if symbol is not None and symbol.size:
        return symbol.address, symbol.size
    section = image.section(_RUNTIME_SECTION)
    return None if section is None else (section.virtual_address, section.size)


def _version(stated: bytes, head: bytes, name: str) -> Version:
    """What the interpreter says of itself, else what its file is called."""
    if stated:
        value = int.from_bytes(stated, "little")
        if value >> 24 == 3:
            return (3, value >> 16 & 0xFF)
    said = debugoffsets.version_in(head)
    if said is not None:
        return said
    match = _FILE_NAME.match(name)
    if match is None:
        raise UnsupportedPython("CPython of unknown version: neither symbol nor file name tells it")
    return (int(match[1]), int(match[2]))


def layout_of(version: Version, head: bytes) -> Layout:
    """Returns the layout of a version.

    Args:
        version: Major and minor.
        head: The first bytes of its _PyRuntime, which tell it since 3.13.

    Raises:
        UnsupportedPython: It is not known here, or the bytes make no sense.
    """
    if version < _FIRST_WITH_DEBUG_OFFSETS:
        return table_layout(version)
    layout = debugoffsets.read_layout(head)
    if layout.version != version:
        raise refusal(version, " whose debug offsets are of another version")
    return layout


def _text(version: Version) -> str:
    return f"{version[0]}.{version[1]}"
