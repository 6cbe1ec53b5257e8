# SPDX-License-Identifier: Apache-2.0
"""Names of Python threads: what is shown, and memory that a target has made up."""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence

import pytest
from aiflame.agent.python.interpreter import LoadedInterpreter
from aiflame.agent.python.layouts import table_layout
from aiflame.agent.python.thread_names import (
    MAX_THREADS,
    ThreadNameReader,
    shown_name,
    thread_name_reader,
)
from aiflame.agent.python.thread_state import StateKind, StatePlace
from pymemory import BASE, ConstructedMemory

_VERSIONS = [(3, 8), (3, 9), (3, 10), (3, 11), (3, 12)]
_MB = 1 << 20


@pytest.mark.parametrize(
    ("comm", "python", "shown"),
    [
        ("python3", "worker", "worker"),
        ("python3", "Thread-3 (work)", "Thread-3 (work)"),
        ("python3.11", "worker", "worker"),
        ("python3", "", "python3"),
        ("python3", "MainThread", "python3"),
        ("cuda-EvtHandlr", "Dummy-2", "cuda-EvtHandlr"),
        ("a name of 15 by", "a name of 15 bytes and more", "a name of 15 bytes and more"),
        ("pt_data_worker", "loader", "loader [pt_data_worker]"),
    ],
)
def test_what_the_kernel_says_besides_is_kept(comm: str, python: str, shown: str) -> None:
    assert shown_name(comm, python, ("python3", "python3.11")) == shown


class _Counted(ConstructedMemory):
    """Counts what it is asked for, and answers every sound address."""

    def __init__(self, pattern: bytes) -> None:
        super().__init__(4 * _MB)
        self.data[:] = pattern * (len(self.data) // len(pattern))
        self.asked_bytes = 0

    def read_many(self, ranges: Sequence[tuple[int, int]]) -> list[bytes | None]:
        self.asked_bytes += sum(size for _, size in ranges)
        return super().read_many(ranges)


def _reader(
    memory: ConstructedMemory, version: tuple[int, int], runtime: int = BASE + 4096
) -> ThreadNameReader:
    place = StatePlace(StateKind.KEY, BASE)
    found = thread_name_reader(memory, LoadedInterpreter(table_layout(version), runtime, place, ()))
    assert found is not None
    return found


def _word(address: int) -> bytes:
    return struct.pack("<Q", address)


@pytest.mark.parametrize("version", _VERSIONS)
def test_memory_that_refers_to_itself_costs_little(version: tuple[int, int]) -> None:
    # GIVEN a process in which each word is an address in it, or a number that is as large
    for chance in range(40):
        seed = random.Random(chance)
        words = [
            _word(
                seed.choice(
                    (
                        BASE + 8 * seed.randrange(400_000),
                        *(seed.randrange(64), 1 << seed.randrange(64), (1 << 64) - 1),
                        int.from_bytes(b"_active\0", "little"),
                    )
                )
            )
            for _ in range(seed.choice((1, 3, 64, 512)))
        ]
        memory = _Counted(b"".join(words))
        reader = _reader(memory, version)
        # WHEN its threads are asked for twice, THEN it is over soon
        for _ in range(2):
            reader.state()
            names = reader.read()
            assert len(names) <= MAX_THREADS
            assert all(len(name) <= 128 for name in names.values())
        assert memory.asked_bytes < 64 * _MB
        assert memory.reads < 200_000


@pytest.mark.parametrize("version", _VERSIONS)
def test_a_list_of_threads_without_end_is_cut(version: tuple[int, int]) -> None:
    # GIVEN a process whose modules, and threads, are one dict of a billion entries
    memory = _Counted(bytes(8))
    layout = table_layout(version)
    runtime, interpreter, a_dict, keys = (BASE + n * 65536 for n in (1, 2, 3, 4))
    reader = _reader(memory, version, runtime)
    memory.word(runtime + layout.runtime_interpreters + 8, interpreter)
    memory.word(interpreter + layout.interpreter_modules, a_dict)
    memory.word(a_dict + 16, a_dict)  # as a module, it is its own dict
    memory.word(a_dict + 32, keys)
    text = memory.text(layout, "threading")
    active = memory.text(layout, "_active")
    if version >= (3, 11):
        memory.write(keys + 8, bytes((3, 3, 1)))
        memory.word(keys + 24, 1 << 30)
        entries, words = keys + 40, 2
    else:
        memory.word(keys + 8, 8)
        memory.word(keys + 32, 1 << 30)
        entries, words = keys + 48, 3
    for index in range(20_000):
        at = entries + 8 * words * index + 8 * (words - 2)
        memory.word(at, (text, active)[index % 2])
        memory.word(at + 8, a_dict)
    # WHEN they are read, THEN there is an end, and no name
    assert reader.read() == {}
    assert memory.asked_bytes < 16 * _MB
