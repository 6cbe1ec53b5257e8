# SPDX-License-Identifier: Apache-2.0
"""Unwind tables and mappings come into the kernel whole, whether arrays can be mapped or not."""

from __future__ import annotations

import os
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from aiflame.agent.kernel import abi
from aiflame.agent.kernel.sysbpf import Map
from aiflame.agent.kernel.syscalls import MapShape, bpf, create_map, map_facts
from aiflame.agent.kernel.unwind_tables import KernelTables, table_bytes
from aiflame.agent.losses import LossKind
from aiflame.agent.unwind.table import ROW, UnwindTable
from aiflame.agent.unwind.x86_64 import RULE
from breadth import cases

pytestmark = pytest.mark.bpf

_ARRAY, _ARRAY_OF_MAPS, _HASH_OF_MAPS = 2, 12, 13  # enum bpf_map_type
_MMAPABLE, _INNER_MAP = 1 << 10, 1 << 12
_MAP_GET_FD_BY_ID = 14
_U32, _U64 = np.dtype(np.uint32), np.dtype(np.uint64)
_PID = 4321

Maps = Callable[[int], Any]


@pytest.fixture
def maps() -> Iterator[Maps]:
    """`maps(flags)`: the maps of loaded programs whose inner arrays are of these flags."""
    with ExitStack() as opened:

        def make(flags: int) -> SimpleNamespace:
            def created(shape: MapShape, inner_fd: int, key: Any, value: Any) -> Map:
                made = Map(create_map(shape, inner_fd), key, value, shape.max_entries)
                opened.callback(made.close)
                return made

            row_fd = create_map(MapShape(_ARRAY, 4, 8, 1, flags))
            slot_fd = create_map(MapShape(_ARRAY, 4, abi.MAPPING_SLOT_DTYPE.itemsize, 1, flags))
            opened.callback(os.close, row_fd)
            opened.callback(os.close, slot_fd)
            tables = MapShape(_ARRAY_OF_MAPS, 4, 4, abi.TABLES_MAX, 0)
            return SimpleNamespace(
                unwind_tables=created(tables, row_fd, _U32, _U32),
                process_mappings=created(MapShape(_HASH_OF_MAPS, 4, 4, 8, 0), slot_fd, _U32, _U32),
                inner_flags=map_facts(row_fd).flags,
            )

        yield make


def _content(outer: Map, key: int, value: np.dtype[Any]) -> bytes:
    """Returns all values of an inner array, as the kernel has them."""
    number = outer.lookup(key.to_bytes(4, "little"))
    assert number is not None
    fd = bpf(_MAP_GET_FD_BY_ID, struct.pack("<III", int(number[0]), 0, 0))
    inner = Map(fd, _U32, value, map_facts(fd).max_entries)
    try:
        return b"".join(values.tobytes() for _, values in inner.chunks())
    finally:
        inner.close()


def _table(rows: int) -> UnwindTable:
    """A table with more rows than are written at a time."""
    numbers = np.arange(rows)
    pages = np.arange(0, rows + 1, 4, dtype=np.uint32)
    content = np.zeros(rows, ROW)
    content["offset"], content["rule"] = numbers % 512, numbers % 3
    rules = np.zeros(3, RULE)
    rules["cfa_offset"] = (0, 1, 2)
    return UnwindTable(16, pages, content, rules)


@cases("flags", [_INNER_MAP, _INNER_MAP | _MMAPABLE])
def test_tables_are_written_whole(flags: int, maps: Maps) -> None:
    programs = maps(flags)
    tables = KernelTables(programs, 64 << 20, Counter())
    table = _table(200_000)
    tables.enter({7: table})
    content = _content(programs.unwind_tables, tables.loaded[7].slot, _U64)
    assert len(content) == table_bytes(table)
    halves = np.frombuffer(content, np.uint32)
    pages = len(table.page_first_row)
    rules_at = pages + pages % 2
    rows_at = rules_at + 2 * len(table.rules)
    assert (halves[:pages] == table.page_first_row + rows_at).all()
    assert halves[rules_at:rows_at].tobytes() == table.rules.tobytes()
    rows = halves[rows_at:][: len(table)]
    assert (rows & 0xFFFF == table.rows["offset"]).all()
    assert (rows >> 16 == table.rows["rule"]).all()


@cases("flags", [_INNER_MAP, _INNER_MAP | _MMAPABLE])
def test_mappings_are_written_whole_and_replaced(flags: int, maps: Maps) -> None:
    programs = maps(flags)
    losses: Counter[LossKind] = Counter()
    tables = KernelTables(programs, 64 << 20, losses)
    free_bytes = tables.free_mapping_bytes
    for count in (5, 3000):
        slots = np.zeros(count, abi.MAPPING_SLOT_DTYPE)
        slots["start"] = np.arange(count) << 12
        tables.set_mappings({_PID: slots})
        found = _content(programs.process_mappings, _PID, abi.MAPPING_SLOT_DTYPE)
        assert found == slots.tobytes()
    assert losses.total() == 0
    tables.drop_mappings([_PID])
    assert programs.process_mappings.lookup(_PID.to_bytes(4, "little")) is None
    assert tables.free_mapping_bytes == free_bytes


def test_what_a_full_map_refuses_is_told(maps: Maps) -> None:
    programs = maps(_INNER_MAP)  # its map of processes has room for 4
    losses: Counter[LossKind] = Counter()
    tables = KernelTables(programs, 64 << 20, losses)
    free_bytes = tables.free_mapping_bytes
    tables.set_mappings({pid: np.zeros(3, abi.MAPPING_SLOT_DTYPE) for pid in range(1, 8)})
    entered = [
        pid
        for pid in range(1, 8)
        if programs.process_mappings.lookup(pid.to_bytes(4, "little")) is not None
    ]
    assert losses == {LossKind.MAPPINGS_NOT_KEPT: 7 - len(entered)}
    # THEN those that were refused take nothing
    tables.drop_mappings(entered)
    assert tables.free_mapping_bytes == free_bytes
