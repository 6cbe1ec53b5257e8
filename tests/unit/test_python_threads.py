# SPDX-License-Identifier: Apache-2.0
"""Thread lists, keys and the GIL on constructed memory."""

from __future__ import annotations

import os
import struct
import subprocess
from pathlib import Path

import pytest
from aiflame.agent.elf.image import ElfImage
from aiflame.agent.model.profile import GilState
from aiflame.agent.python.debugoffsets import read_layout
from aiflame.agent.python.gil import LeafFrame, gil_state, holds_gil
from aiflame.agent.python.layouts import ACTIVE_FLAG, Layout, table_layout
from aiflame.agent.python.threads import (
    UnsupportedLibc,
    find_key_block,
    list_threads,
    read_tss_key,
    tss_slot_offset,
)
from aiflame.agent.target_files import TargetFile
from pymemory import ConstructedMemory, debug_offsets

PY310, PY312 = table_layout((3, 10)), table_layout((3, 12))
FREE = read_layout(debug_offsets((3, 14), free_threaded=True))


def _process(
    layout: Layout, tids: list[list[int]]
) -> tuple[ConstructedMemory, int, list[list[int]]]:
    """A runtime whose interpreters have threads of these ids, and the thread states' addresses."""
    memory = ConstructedMemory()
    runtime = memory.allocate(4096)
    link = runtime + layout.runtime_interpreters
    states: list[list[int]] = []
    for group in tids:
        interpreter = memory.allocate(8192)
        memory.word(link, interpreter)
        link = interpreter + layout.interpreter_next
        thread_link = interpreter + layout.interpreter_threads
        states.append([])
        for tid in group:
            state = memory.allocate(512)
            memory.word(thread_link, state)
            thread_link = state + layout.thread_next
            memory.word(state + layout.thread_interpreter, interpreter)
            memory.word(state + layout.thread_native_id, tid)
            states[-1].append(state)
    return memory, runtime, states


def test_threads_of_all_interpreters_are_listed() -> None:
    memory, runtime, states = _process(PY312, [[11, 12], [21]])
    listed = list_threads(memory, PY312, runtime)
    assert listed.complete
    assert [t.tid for t in listed.threads] == [11, 12, 21]
    assert [t.address for t in listed.threads] == [state for group in states for state in group]
    assert len({t.interpreter for t in listed.threads}) == 2


def test_a_looping_list_ends() -> None:
    memory, runtime, ((first, second),) = _process(PY312, [[1, 2]])
    memory.word(second + PY312.thread_next, first)
    listed = list_threads(memory, PY312, runtime)
    assert not listed.complete
    assert [t.tid for t in listed.threads] == [1, 2]


def test_a_list_that_leaves_the_memory_ends() -> None:
    memory, runtime, ((first,),) = _process(PY312, [[1]])
    memory.word(first + PY312.thread_next, 1 << 40)
    listed = list_threads(memory, PY312, runtime)
    assert not listed.complete
    assert len(listed.threads) == 1


def test_before_the_runtime_is_there_no_thread_is() -> None:
    listed = list_threads(ConstructedMemory(), PY312, 64)
    assert (listed.threads, listed.complete) == ((), False)


def test_the_gil_of_an_interpreter() -> None:
    memory, runtime, ((first, _),) = _process(PY312, [[1, 2]])
    threads = list_threads(memory, PY312, runtime).threads
    gil = memory.allocate(64)
    memory.word(threads[0].interpreter + PY312.gil, gil)
    memory.word(gil + PY312.gil_last_holder, first)
    memory.write(gil + PY312.gil_locked, struct.pack("<i", 1))
    # Another thread has locked it by now, and is about to enter itself.
    assert holds_gil(memory, PY312, runtime, threads[0]) is False
    memory.write(first + PY312.thread_status, struct.pack("<I", ACTIVE_FLAG | 1))
    assert [holds_gil(memory, PY312, runtime, thread) for thread in threads] == [True, False]
    # Released: the last holder stays written.
    memory.write(gil + PY312.gil_locked, struct.pack("<i", 0))
    assert holds_gil(memory, PY312, runtime, threads[0]) is False


def test_the_gil_of_old_versions_is_in_the_runtime() -> None:
    memory, runtime, ((first,),) = _process(table_layout((3, 11)), [[1]])
    layout = table_layout((3, 11))
    (thread,) = list_threads(memory, layout, runtime).threads
    assert holds_gil(memory, layout, runtime, thread) is False
    memory.word(runtime + layout.gil, first)
    assert holds_gil(memory, layout, runtime, thread) is True


def test_without_a_gil_nothing_is_said() -> None:
    memory, runtime, _ = _process(PY312, [[1]])
    (thread,) = list_threads(memory, PY312, runtime).threads
    assert holds_gil(memory, FREE, runtime, thread) is None


def test_a_key_counts_once_it_is_made() -> None:
    memory = ConstructedMemory()
    place = memory.allocate(16)
    memory.write(place, struct.pack("<ii", 0, 7))
    assert read_tss_key(memory, place + 4) is None
    memory.write(place, struct.pack("<ii", 1, 7))
    assert read_tss_key(memory, place + 4) == 7


def test_key_slots() -> None:
    assert [tss_slot_offset(key) for key in (0, 1, 31)] == [0x318, 0x328, 0x318 + 31 * 16]
    for key in (-1, 32, 1 << 40):
        with pytest.raises(UnsupportedLibc):
            tss_slot_offset(key)


_COND = LeafFrame("pthread_cond_timedwait", False)


@pytest.mark.parametrize(
    ("holds", "has_python", "leaf", "expected"),
    [
        (True, True, [LeafFrame("take_gil", True)], GilState.HELD),
        (False, True, [_COND, LeafFrame("take_gil.lto_priv.0", True)], GilState.WAITING),
        # stripped: the function that waits has no name
        (False, True, [_COND, LeafFrame("", True)], GilState.WAITING),
        # an extension's own condition variable, with the GIL released
        (False, True, [_COND, LeafFrame("work", False)], GilState.RELEASED),
        (False, True, [LeafFrame("read", False), LeafFrame("_Py_read", True)], GilState.RELEASED),
        (False, False, [_COND], GilState.NO_PYTHON),
        (None, True, [], GilState.UNKNOWN),
    ],
)
def test_what_a_thread_has_to_do_with_the_gil(
    holds: bool | None, has_python: bool, leaf: list[LeafFrame], expected: GilState
) -> None:
    assert gil_state(holds, has_python, leaf) is expected


def _library(folder: Path, body: str) -> Path:
    """A C library whose pthread_getspecific is made of these instructions."""
    source = 'asm(".globl pthread_getspecific\\n.type pthread_getspecific, @function\\n' + (
        f"pthread_getspecific:\\n{body}\\nret\\n.size pthread_getspecific, "
        '. - pthread_getspecific");'
    )
    (folder / "c.c").write_text(source)
    command = ["gcc", "-shared", "-nostdlib", "-fPIC", "-o", folder / "c.so", folder / "c.c"]
    subprocess.run(command, check=True)
    return folder / "c.so"


def _key_block(path: Path) -> int | None:
    fd = os.open(path, os.O_RDONLY)
    try:
        return find_key_block(TargetFile(fd), ElfImage.from_fd(fd))
    finally:
        os.close(fd)


def test_key_data_is_where_the_c_library_reads_it(tmp_path: Path) -> None:
    assert _key_block(_library(tmp_path, "mov %fs:0x590(,%rdx,8), %rcx")) == 0x390


@pytest.mark.parametrize(
    "body",
    [
        "mov %fs:0, %rax; mov 0x80(%rax), %rax; mov (%rax,%rdi,8), %rax",  # as musl does
        "mov %fs:0x20(,%rdx,8), %rcx",
        "mov %fs:0x590(,%rdx,8), %rcx; mov %fs:0x690(,%rdx,8), %rcx",
        "nop",
    ],
)
def test_another_kind_of_c_library_is_refused(tmp_path: Path, body: str) -> None:
    with pytest.raises(UnsupportedLibc, match="unlike glibc"):
        _key_block(_library(tmp_path, body))


def test_a_library_without_keys_has_no_block() -> None:
    assert _key_block(Path("/bin/true").resolve()) is None
