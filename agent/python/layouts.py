# SPDX-License-Identifier: Apache-2.0
"""Where CPython keeps what a stack walk needs, per version: all that depends on it is data here.

Up to 3.12 the offsets are a table, one row a version. From 3.13 on the interpreter carries most of
them itself (`_Py_DebugOffsets`, the first bytes of `_PyRuntime`); they are read from there by
`debugoffsets` and fall into the same `Layout`, with what they lack added from `ADDED`.

The rows of 3.8 to 3.12, and the figures of later ones beside their debug offsets, were printed by a
C program using offsetof and each version's own headers (CPython v3.8.18, v3.9.18, v3.10.13,
v3.11.7, v3.12.1, v3.13.0, v3.14.8, v3.14.10, v3.15.0 and v3.15.2;
Include/cpython/{pystate,code,frameobject,unicodeobject}.h and
Include/internal/pycore_{frame,runtime,interp,gil}.h), default builds for x86-64, and read from
running interpreters; a test does so again (tests/python/offsets.c). 3.14's free-threaded build
comes from the published headers and has not been seen running.

An unknown version is refused: a wrong offset shows wrong frames.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, replace

from aiflame.agent.errors import AiflameError

# Offset of what a version does not have.
ABSENT = -1
FIRST_VERSION, LAST_VERSION = (3, 8), (3, 15)

Version = tuple[int, int]


class UnsupportedPython(AiflameError):
    """The interpreter is of a version or a build whose layout is not known here."""


class Position(enum.Enum):
    """How a frame says which instruction it executes. The value is what the kernel half is told."""

    LASTI_BYTES = 0  # int32, bytes from the first instruction; -1 before it
    LASTI_UNITS = 1  # int32, two-byte code units from there; -1 before it
    POINTER = 2  # address of the instruction, or of the unit before the first one


class RunEnd(enum.Enum):
    """How the last Python frame of one call of the eval loop is told. The value likewise."""

    EVERY_FRAME = 0  # each Python call is one call of the eval loop
    ENTRY_BYTE = 1  # the frame's byte at `frame_mark` is not 0
    SHIM = 2  # its caller's frame, which is no Python frame, has a byte >= SHIM_OWNER there


class LineTable(enum.Enum):
    """Format of a code object's line table."""

    LNOTAB = 0
    LINETABLE = 1
    LOCATIONS = 2


class GilHolder(enum.Enum):
    """Where the thread state that holds the GIL is to be found. The value likewise."""

    RUNTIME = 0  # a pointer at `gil` in _PyRuntime, null while nobody holds it
    INTERPRETER = 1  # a pointer to the GIL at `gil` in the interpreter: last holder and locked
    NONE = 2  # the build has no GIL, or has it switched off


# enum _frameowner: 3 on 3.12 and 3.13 is FRAME_OWNED_BY_CSTACK (v3.13.0
# Include/internal/pycore_frame.h); on 3.14 and 3.15 it is FRAME_OWNED_BY_INTERPRETER, and
# 3.14's 4 is no frame of Python code either.
SHIM_OWNER = 3
# Bit of `thread_status`: a thread sets it once it has the GIL, and clears it before it gives it up
# (v3.12.1, v3.13.0 Include/cpython/pystate.h, Python/pystate.c: `_status.active`).
ACTIVE_FLAG = 1 << 4
# Low bits of a tagged _PyStackRef (3.14 Include/internal/pycore_stackref.h: Py_TAG_BITS is 3).
_STACKREF_TAGS = 3


@dataclass(frozen=True, slots=True)
class Layout:
    """Offsets in bytes of one build of CPython, x86-64.

    Attributes:
        version: Major and minor.
        free_threaded: Built with --disable-gil.
        runtime_interpreters: Head of the list of interpreters, in _PyRuntime.
        runtime_tss_key: The pthread key (int32) under which each thread keeps its thread state, in
            _PyRuntime; `ABSENT` where only the code tells it.
        interpreter_next: Next interpreter, in PyInterpreterState.
        interpreter_threads: Head of its list of thread states.
        interpreter_modules: Pointer to the dict of its modules (`sys.modules`).
        thread_next: Next thread state of the interpreter, in PyThreadState.
        thread_interpreter: Its interpreter.
        thread_id: pthread_self() of the thread.
        thread_native_id: Its kernel thread id (unsigned long), `ABSENT` before 3.11.
        thread_status: Its flags (uint32), of which `ACTIVE_FLAG`, `ABSENT` before 3.12.
        thread_frame: Pointer to the leaf frame, or to the _PyCFrame if `cframe_frame` is not
            `ABSENT`.
        cframe_frame: Pointer to the leaf frame in _PyCFrame (3.11, 3.12), else `ABSENT`.
        frame_code: Pointer to the code object, in the frame.
        frame_previous: Pointer to the caller's frame.
        frame_position: What `position` says.
        frame_mark: The byte that `run_end` looks at, `ABSENT` for EVERY_FRAME.
        frame_copy: Which copy of its instructions the frame runs (uint32), `ABSENT` with a GIL.
        frame_bytes: How much of a frame has to be read for all of these.
        code_tags: Bits to clear in the code pointer.
        position: Kind of `frame_position`.
        run_end: How runs of Python frames end.
        gil: See `GilHolder`.
        gil_kind: Where the holder of the GIL is.
        gil_last_holder: Thread state that last held it, in _gil_runtime_state.
        gil_locked: int32, greater than 0 while somebody holds it.
        code_first_line: int32, in PyCodeObject.
        code_filename: Pointer to a str.
        code_name: Pointer to a str.
        code_qualname: Pointer to a str, `ABSENT` before 3.11.
        code_line_table: Pointer to bytes.
        code_instructions: First instruction; for LASTI kinds a pointer to bytes, only of use to
            tell code objects apart.
        code_copies: Pointer to the copies of the instructions that threads run, `ABSENT` where all
            run the same.
        line_table: Format of the line table.
        str_length: Characters (int64), in PyASCIIObject.
        str_state: Bit field: kind, compact, ascii.
        str_kind_shift: Bit at which `kind` begins there; compact and ascii follow its 3 bits.
        str_ascii_data: Characters of an ASCII string.
        str_compact_data: Characters of any other compact string.
        bytes_length: Length (int64), in PyBytesObject.
        bytes_data: First byte.
    """

    version: Version
    free_threaded: bool
    runtime_interpreters: int
    runtime_tss_key: int
    interpreter_next: int
    interpreter_threads: int
    interpreter_modules: int
    thread_next: int
    thread_interpreter: int
    thread_id: int
    thread_native_id: int
    thread_status: int
    thread_frame: int
    cframe_frame: int
    frame_code: int
    frame_previous: int
    frame_position: int
    frame_mark: int
    frame_copy: int
    frame_bytes: int
    code_tags: int
    position: Position
    run_end: RunEnd
    gil: int
    gil_kind: GilHolder
    gil_last_holder: int
    gil_locked: int
    code_first_line: int
    code_filename: int
    code_name: int
    code_qualname: int
    code_line_table: int
    code_instructions: int
    code_copies: int
    line_table: LineTable
    str_length: int
    str_state: int
    str_kind_shift: int
    str_ascii_data: int
    str_compact_data: int
    bytes_length: int
    bytes_data: int


_PY39 = Layout(
    version=(3, 9),
    free_threaded=False,
    runtime_interpreters=32,
    runtime_tss_key=588,
    interpreter_next=0,
    interpreter_threads=8,
    interpreter_modules=856,
    thread_next=8,
    thread_interpreter=16,
    thread_id=176,
    thread_native_id=ABSENT,
    thread_status=ABSENT,
    thread_frame=24,
    cframe_frame=ABSENT,
    frame_code=32,
    frame_previous=24,
    frame_position=104,
    frame_mark=ABSENT,
    frame_copy=ABSENT,
    frame_bytes=108,
    code_tags=0,
    position=Position.LASTI_BYTES,
    run_end=RunEnd.EVERY_FRAME,
    gil=568,
    gil_kind=GilHolder.RUNTIME,
    gil_last_holder=ABSENT,
    gil_locked=ABSENT,
    code_first_line=40,
    code_filename=104,
    code_name=112,
    code_qualname=ABSENT,
    code_line_table=120,
    code_instructions=48,
    code_copies=ABSENT,
    line_table=LineTable.LNOTAB,
    str_length=16,
    str_state=32,
    str_kind_shift=2,
    str_ascii_data=48,
    str_compact_data=72,
    bytes_length=16,
    bytes_data=32,
)
_PY310 = replace(
    _PY39,
    version=(3, 10),
    frame_position=96,
    frame_bytes=100,
    position=Position.LASTI_UNITS,
    line_table=LineTable.LINETABLE,
)
_PY311 = replace(
    _PY310,
    version=(3, 11),
    runtime_interpreters=40,
    runtime_tss_key=596,
    interpreter_threads=16,
    interpreter_modules=888,
    thread_id=152,
    thread_native_id=160,
    thread_frame=56,
    cframe_frame=8,
    frame_code=32,
    frame_previous=48,
    frame_position=56,
    frame_mark=68,
    frame_bytes=72,
    position=Position.POINTER,
    run_end=RunEnd.ENTRY_BYTE,
    gil=576,
    code_first_line=72,
    code_filename=112,
    code_name=120,
    code_qualname=128,
    code_line_table=136,
    code_instructions=184,
    line_table=LineTable.LOCATIONS,
)
_PY312 = replace(
    _PY311,
    version=(3, 12),
    runtime_tss_key=1548,
    interpreter_threads=72,
    interpreter_modules=944,
    thread_id=136,
    thread_native_id=144,
    thread_status=24,
    cframe_frame=0,
    frame_code=0,
    frame_previous=8,
    frame_mark=70,
    run_end=RunEnd.SHIM,
    gil=384,
    gil_kind=GilHolder.INTERPRETER,
    gil_last_holder=8,
    gil_locked=16,
    code_first_line=68,
    code_instructions=192,
    str_ascii_data=40,
    str_compact_data=56,
)
_PY38 = replace(_PY39, version=(3, 8), runtime_tss_key=1396, interpreter_modules=56, gil=1368)
_TABLE = {row.version: row for row in (_PY38, _PY39, _PY310, _PY311, _PY312)}


@dataclass(frozen=True, slots=True)
class Added:
    """What the debug offsets of a version leave out.

    Attributes:
        runtime_tss_key: As in `Layout`.
        code_tags: As in `Layout`.
        str_kind_shift: As in `Layout`.
    """

    runtime_tss_key: int
    code_tags: int
    str_kind_shift: int


# By version and whether it is free-threaded. 3.14: autoTSSkey at 2336 of _PyRuntime, its key
# 4 bytes on. The `interned` of its free-threaded build has a byte of its own (3.14
# Include/cpython/unicodeobject.h).
ADDED: Mapping[tuple[Version, bool], Added] = {
    ((3, 13), False): Added(2164, 0, 2),
    ((3, 13), True): Added(2164, 0, 2),
    ((3, 14), False): Added(2340, _STACKREF_TAGS, 2),
    ((3, 14), True): Added(2340, _STACKREF_TAGS, 8),
    # It has no key: what the code reads is thread-local (`thread_state`).
    ((3, 15), False): Added(ABSENT, _STACKREF_TAGS, 2),
}


def table_layout(version: Version) -> Layout:
    """The layout of a version that has no debug offsets.

    Raises:
        UnsupportedPython: Not a version of the table.
    """
    found = _TABLE.get(version)
    if found is None:
        raise refusal(version)
    return found


def refusal(version: Version, build: str = "") -> UnsupportedPython:
    """The error for a version, or for a build of it, that is not known here."""
    name = f"CPython {version[0]}.{version[1]}{build}"
    if version < FIRST_VERSION:
        return UnsupportedPython(f"{name} is too old: 3.8 is the first supported")
    return UnsupportedPython(f"{name} is not supported yet")
