# SPDX-License-Identifier: Apache-2.0
"""A dump as text for a person, and as JSON for a program.

Names were cleaned when they were read: none holds a control character or one that reorders text.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Iterator, Sequence
from typing import Any

from aiflame.agent.dumps.model import Dump, DumpFrame, ProcessDump, ThreadDump
from aiflame.agent.model.profile import FrameKind, GilState

# Of the JSON form; raised when a field changes its meaning or goes. New ones may come without.
SCHEMA, SCHEMA_VERSION = "aiflame-dump", 1

_GIL_WORDS = {
    GilState.HELD: "GIL held",
    GilState.WAITING: "waiting for the GIL",
    GilState.RELEASED: "GIL released",
}
_NS_PER_MS = 1_000_000


class Shown(enum.Enum):
    """Which frames are shown; the values are those of --frames."""

    PYTHON = "python"  # of threads that have any; else as MIXED
    MIXED = "mixed"  # Python and native frames
    ALL = "all"  # also the kernel's, and the interpreter calling itself


def shown_frames(thread: ThreadDump, shown: Shown) -> list[DumpFrame]:
    """Returns the frames of a thread to be shown, leaf first."""
    if shown is Shown.ALL:
        return list(thread.frames)
    has_python = any(frame.kind is FrameKind.PYTHON for frame in thread.frames)
    if shown is Shown.PYTHON and has_python:
        return [frame for frame in thread.frames if frame.kind is FrameKind.PYTHON]
    has_user = any(frame.kind is not FrameKind.KERNEL for frame in thread.frames)
    return [
        frame
        for frame in thread.frames
        if not frame.is_glue and not (has_user and frame.kind is FrameKind.KERNEL)
    ]


def duration_text(ns: int) -> str:
    """Returns a wait in words, as exact as it is known: to a millisecond or so."""
    seconds = ns / 1e9
    if seconds < 1:
        return f"{ns // _NS_PER_MS} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, whole = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {whole} s"


def text(dump: Dump, shown: Shown) -> str:
    """Returns the dump as lines of text."""
    lines: list[str] = []
    for process in dump.processes:
        lines += _process(process, shown)
    count = sum(len(process.threads) for process in dump.processes)
    lines.append(
        f"{count} thread{'s' * (count != 1)} read in {dump.read_ns / 1e6:.1f} ms, "
        f"named in {(dump.total_ns - dump.read_ns) / 1e6:.1f} ms"
    )
    return "\n".join(lines) + "\n"


def _process(process: ProcessDump, shown: Shown) -> Iterator[str]:
    python = f", Python {process.python}" if process.python else ""
    command = f": {process.command_line}" if process.command_line else ""
    yield f"{process.name} (pid {process.pid}{python}){command}"
    for note in process.notes:
        yield f"  note: {note}"
    yield ""
    for thread in process.threads:
        yield _heading(thread)
        if thread.doubt is not None:
            yield f"    [{thread.doubt.value}]"
        for frame in shown_frames(thread, shown):
            yield f"    {_frame(frame)}"
        if thread.python_cut:
            yield f"    [Python frames: {thread.python_cut}]"
        if thread.cut:
            yield f"    [truncated: {thread.cut}]"
        yield ""


def _heading(thread: ThreadDump) -> str:
    state = thread.state.value
    if thread.cause or thread.wait_channel:
        what = " in ".join(word for word in (thread.cause, thread.wait_channel) if word)
        state += f" ({what})"
    if thread.waited_ns is not None:
        state += f" for {duration_text(thread.waited_ns)}"
    gil = _GIL_WORDS.get(thread.gil) if thread.gil is not None else None
    return f'Thread {thread.tid} "{thread.name}": {state}' + (f", {gil}" if gil else "")


def _frame(frame: DumpFrame) -> str:
    if frame.kind is FrameKind.PYTHON:
        name = frame.file.rpartition("/")[2] or "?"
        return f"{frame.name} ({name}:{frame.line})"
    module = frame.module.rpartition("/")[2].strip("[]")
    location = f"{frame.file.rpartition('/')[2]}:{frame.line}" if frame.file and frame.line else ""
    where = ", ".join(word for word in (module, location) if word)
    return f"{frame.name} ({where})" if where else frame.name


def as_json(dump: Dump) -> str:
    """Returns the dump as one JSON object: all frames, each with its kind."""
    found = {
        "schema": SCHEMA,
        "version": SCHEMA_VERSION,
        "start_ns": dump.start_ns,
        "read_ns": dump.read_ns,
        "total_ns": dump.total_ns,
        "processes": [_process_object(process) for process in dump.processes],
    }
    return json.dumps(found, indent=1, ensure_ascii=True) + "\n"


def _process_object(process: ProcessDump) -> dict[str, Any]:
    return {
        "pid": process.pid,
        "name": process.name,
        "command_line": process.command_line,
        "python": process.python or None,
        "notes": list(process.notes),
        "threads": [_thread_object(thread) for thread in process.threads],
    }


def _thread_object(thread: ThreadDump) -> dict[str, Any]:
    return {
        "tid": thread.tid,
        "name": thread.name,
        "state": thread.state.name.lower(),
        "cause": thread.cause or None,
        "wait_channel": thread.wait_channel or None,
        "waited_ns": thread.waited_ns,
        "gil": None if thread.gil is None else thread.gil.name.lower(),
        "doubt": None if thread.doubt is None else thread.doubt.name.lower(),
        "cut": thread.cut or None,
        "python_cut": thread.python_cut or None,
        "frames": _frame_objects(thread.frames),
    }


def _frame_objects(frames: Sequence[DumpFrame]) -> list[dict[str, Any]]:
    return [
        {
            "kind": frame.kind.name.lower(),
            "name": frame.name,
            "file": frame.file or None,
            "line": frame.line or None,
            "module": frame.module or None,
            "glue": frame.is_glue,
        }
        for frame in frames
    ]
