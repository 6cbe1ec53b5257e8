# SPDX-License-Identifier: Apache-2.0
"""`_Py_DebugOffsets`: the offsets that CPython 3.13 and later carry at the start of _PyRuntime.

Eight bytes "xdebugpy", PY_VERSION_HEX, free_threaded, then groups of 64-bit offsets whose order
belongs to the minor version (Include/internal/pycore_runtime.h of v3.13.0 and
Include/internal/pycore_debug_offsets.h of 3.14 and 3.15). A minor version without a group list is
refused, and so is a table with an offset outside the structure that it is said to lie in: the bytes
come from the target.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aiflame.agent.python.layouts import (
    ABSENT,
    ADDED,
    GilHolder,
    Layout,
    LineTable,
    Position,
    RunEnd,
    UnsupportedPython,
    Version,
    refusal,
)

COOKIE = b"xdebugpy"
_HEAD = struct.Struct("<8sQQ")
# 3.14's has 760 bytes, 3.15's 888.
MAX_BYTES = 1024
# PyInterpreterState is the largest structure: 194,968 bytes on 3.13, 283,320 with _PyRuntime.
_MAX_STRUCT_BYTES = 16 * 1024 * 1024
_POINTER_BYTES = 8
_COPY_NUMBER_BYTES = 4  # uint32 (3.14 Include/internal/pycore_interpframe_structs.h)
# What the kernel half reads of a frame at most, in words (LARGE_FRAME_BYTES in bpf/python.h).
_MAX_FRAME_BYTES = 112

_INTERPRETER_313 = (
    "size id next threads_head gc imports_modules sysdict builtins ceval_gil gil_runtime_state "
    "gil_runtime_state_enabled gil_runtime_state_locked gil_runtime_state_holder"
)
_THREAD = "size prev next interp current_frame thread_id native_thread_id datastack_chunk status"
_FRAME_313 = "size previous executable instr_ptr localsplus owner"
_CODE_313 = (
    "size filename name qualname linetable firstlineno argcount localsplusnames localspluskinds "
    "co_code_adaptive"
)
_UNICODE = "size state length asciiobject_size"
_THREAD_315 = (
    "size prev next interp current_frame base_frame last_profiled_frame last_profiled_frame_seq "
    "thread_id native_thread_id datastack_chunk status holds_gil gil_requested current_exception "
    "exc_state"
)
# Number of words of the groups between: pyobject, type, tuple, list, [set,] dict, float, long.
_SKIP_313, _SKIP_314 = "-" * (2 + 4 + 3 + 3 + 3 + 2 + 3), "-" * (2 + 4 + 3 + 3 + 4 + 3 + 2 + 3)
# 3.15: err_stackitem before code, heap_type_object after type, and more of type and gc.
_SKIP_315 = "-" * (2 + 6 + 2 + 3 + 3 + 4 + 3 + 2 + 3)
_BYTES = "size ob_size ob_sval"
_DEBUGGER = "eval_breaker support enabled pending_call script_path script_path_size"
# Between: gc, gen_object, llist_node.
_SKIP_TO_DEBUGGER_314, _SKIP_TO_DEBUGGER_315 = "-" * (2 + 4 + 2), "-" * (5 + 4 + 2)
_INTERPRETER_314 = (
    _INTERPRETER_313.replace("threads_head", "threads_head threads_main")
    + " code_object_generation tlbc_generation"
)

_GROUPS: Mapping[Version, tuple[tuple[str, str], ...]] = {
    (3, 13): (
        ("runtime", "size finalizing interpreters_head"),
        ("interpreter", _INTERPRETER_313),
        ("thread", _THREAD),
        ("frame", _FRAME_313),
        ("code", _CODE_313),
        ("", " ".join(_SKIP_313)),
        ("bytes", _BYTES),
        ("unicode", _UNICODE),
    ),
    (3, 14): (
        ("runtime", "size finalizing interpreters_head"),
        ("interpreter", _INTERPRETER_314),
        ("thread", _THREAD),
        ("frame", _FRAME_313 + " stackpointer tlbc_index"),
        ("code", _CODE_313 + " co_tlbc"),
        ("", " ".join(_SKIP_314)),
        ("bytes", _BYTES),
        ("unicode", _UNICODE),
        ("", " ".join(_SKIP_TO_DEBUGGER_314)),
        ("debugger", _DEBUGGER),
    ),
    (3, 15): (
        ("runtime", "size finalizing interpreters_head"),
        ("interpreter", _INTERPRETER_314),
        ("thread", _THREAD_315),
        ("", "-"),
        ("frame", _FRAME_313 + " stackpointer tlbc_index"),
        ("code", _CODE_313 + " co_tlbc"),
        ("", " ".join(_SKIP_315)),
        ("bytes", _BYTES),
        ("unicode", _UNICODE + " compactunicodeobject_size"),
        ("", " ".join(_SKIP_TO_DEBUGGER_315)),
        ("debugger", _DEBUGGER),
    ),
}
# They are no fields of one structure.
_WITHOUT_SIZE = ("", "debugger")

# Field of Layout: the debug offset that it is.
_FIELDS = {
    "runtime_interpreters": "runtime.interpreters_head",
    "interpreter_next": "interpreter.next",
    "interpreter_threads": "interpreter.threads_head",
    "interpreter_modules": "interpreter.imports_modules",
    "thread_next": "thread.next",
    "thread_interpreter": "thread.interp",
    "thread_id": "thread.thread_id",
    "thread_native_id": "thread.native_thread_id",
    "thread_status": "thread.status",
    "thread_frame": "thread.current_frame",
    "frame_code": "frame.executable",
    "frame_previous": "frame.previous",
    "frame_position": "frame.instr_ptr",
    "frame_mark": "frame.owner",
    # All that is read of a frame lies before its locals.
    "frame_bytes": "frame.localsplus",
    "gil": "interpreter.ceval_gil",
    "code_first_line": "code.firstlineno",
    "code_filename": "code.filename",
    "code_name": "code.name",
    "code_qualname": "code.qualname",
    "code_line_table": "code.linetable",
    "code_instructions": "code.co_code_adaptive",
    "str_length": "unicode.length",
    "str_state": "unicode.state",
    "bytes_length": "bytes.ob_size",
    "bytes_data": "bytes.ob_sval",
}


def version_in(data: bytes) -> Version | None:
    """Major and minor of a _PyRuntime that begins with debug offsets, else None."""
    if len(data) < _HEAD.size or not data.startswith(COOKIE):
        return None
    version = _HEAD.unpack_from(data)[1]
    return (version >> 24 & 0xFF, version >> 16 & 0xFF)


def read_layout(data: bytes) -> Layout:
    """The layout that the first `MAX_BYTES` bytes of _PyRuntime describe.

    Raises:
        UnsupportedPython: No cookie, an unknown version or build, or senseless offsets.
    """
    version = version_in(data)
    if version is None:
        raise UnsupportedPython("CPython without its debug offsets is not supported")
    free_threaded = bool(_HEAD.unpack_from(data)[2])
    added = ADDED.get((version, free_threaded))
    if added is None or version not in _GROUPS:
        raise refusal(version, " without the GIL" if free_threaded else "")
    at = _offsets(data, version)
    _check(at, version)
    ascii_bytes = at["unicode.asciiobject_size"]
    gil = at["interpreter.gil_runtime_state"]
    # 3.13's threads run the same instructions even without the GIL.
    has_copies = free_threaded and "code.co_tlbc" in at
    rest: dict[str, Any] = {field: at[name] for field, name in _FIELDS.items()}
    return Layout(
        version=version,
        free_threaded=free_threaded,
        runtime_tss_key=added.runtime_tss_key,
        cframe_frame=ABSENT,
        frame_copy=at["frame.tlbc_index"] if has_copies else ABSENT,
        code_copies=at["code.co_tlbc"] if has_copies else ABSENT,
        code_tags=added.code_tags,
        position=Position.POINTER,
        run_end=RunEnd.SHIM,
        gil_kind=GilHolder.NONE if free_threaded else GilHolder.INTERPRETER,
        gil_last_holder=at["interpreter.gil_runtime_state_holder"] - gil,
        gil_locked=at["interpreter.gil_runtime_state_locked"] - gil,
        line_table=LineTable.LOCATIONS,
        str_kind_shift=added.str_kind_shift,
        str_ascii_data=ascii_bytes,
        # PyCompactUnicodeObject adds utf8_length and utf8 (Include/cpython/unicodeobject.h).
        str_compact_data=ascii_bytes + 16,
        **rest,
    )


@dataclass(frozen=True, slots=True)
class DebuggerSupport:
    """Where `sys.remote_exec` (PEP 768) asks a thread to run a script.

    Attributes:
        main_thread: Pointer to the main thread's state, in PyInterpreterState.
        interpreter_id: int64 there, 0 of the main one.
        enabled: int there, 1 where the process lets itself be asked (PyConfig.remote_debug).
        eval_breaker: Its flags, in PyThreadState (uintptr_t).
        pending_call: int there, 1 until the script is taken.
        script_path: The script's path, with a 0 at its end.
        script_path_size: Bytes of that.
    """

    main_thread: int
    interpreter_id: int
    enabled: int
    eval_breaker: int
    pending_call: int
    script_path: int
    script_path_size: int


def read_debugger_support(data: bytes) -> DebuggerSupport | None:
    """What the first `MAX_BYTES` bytes of _PyRuntime say of it; None where there is none.

    Raises:
        UnsupportedPython: As `read_layout`.
    """
    layout = read_layout(data)
    at = _offsets(data, layout.version)
    if "debugger.support" not in at:
        return None
    support, thread, interpreter = at["debugger.support"], at["thread.size"], at["interpreter.size"]
    found = DebuggerSupport(
        main_thread=at["interpreter.threads_main"],
        interpreter_id=at["interpreter.id"],
        enabled=at["debugger.enabled"],
        eval_breaker=at["debugger.eval_breaker"],
        pending_call=support + at["debugger.pending_call"],
        script_path=support + at["debugger.script_path"],
        script_path_size=at["debugger.script_path_size"],
    )
    last = max(found.eval_breaker, found.pending_call, found.script_path + found.script_path_size)
    if last > thread or found.enabled > interpreter:
        raise UnsupportedPython("damaged debug offsets: the debugger's lie outside")
    return found


def _offsets(data: bytes, version: Version) -> dict[str, int]:
    names = [
        f"{group}.{field}" for group, fields in _GROUPS[version] for field in fields.split(" ")
    ]
    if len(data) < _HEAD.size + 8 * len(names):
        raise UnsupportedPython("damaged debug offsets: cut short")
    values = struct.unpack_from(f"<{len(names)}Q", data, _HEAD.size)
    return dict(zip(names, values, strict=True))


def _check(at: Mapping[str, int], version: Version) -> None:
    """Refuse what lies outside its structure, or a structure outside all reason."""
    # The kernel half reads a frame, and user space a code object's head, in one piece.
    limits = {"frame": 256, "code": 1024, "thread": 65536, "bytes": 256, "unicode": 512}
    for group, fields in _GROUPS[version]:
        if group in _WITHOUT_SIZE:
            continue
        size = at[f"{group}.size"]
        if not 0 < size <= limits.get(group, _MAX_STRUCT_BYTES):
            raise UnsupportedPython(f"damaged debug offsets: a {group} of {size} bytes")
        for field in fields.split(" "):
            if at[f"{group}.{field}"] > size:
                raise UnsupportedPython(f"damaged debug offsets: {group}.{field} lies outside")
    if at["interpreter.gil_runtime_state_holder"] < at["interpreter.gil_runtime_state"]:
        raise UnsupportedPython("damaged debug offsets: the GIL's holder lies before the GIL")
    # What is read at the last of them has to lie in the part of a frame that is read.
    within = at["frame.localsplus"]
    pointers = [at[f"frame.{name}"] for name in ("executable", "previous", "instr_ptr")]
    ends = [pointer + _POINTER_BYTES for pointer in pointers]
    ends += [at["frame.owner"] + 1, at.get("frame.tlbc_index", 0) + _COPY_NUMBER_BYTES]
    if max(ends) > within:
        raise UnsupportedPython("damaged debug offsets: a frame's fields lie among its locals")
    if within > _MAX_FRAME_BYTES or any(pointer % _POINTER_BYTES for pointer in pointers):
        raise UnsupportedPython("damaged debug offsets: a frame that is not read in whole words")
