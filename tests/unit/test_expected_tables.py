# SPDX-License-Identifier: Apache-2.0
"""Tables of files that nobody has mapped yet are built once, and found when somebody does."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiflame.agent.processes.binaries import BinaryTable
from aiflame.agent.processes.cached_tables import CachedTables
from aiflame.agent.processes.elf_images import ElfImages
from aiflame.agent.unwind.questions import TINY_FILE_BYTES
from support import blind_inspector

_PATIENCE_S = 60


@pytest.fixture
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CachedTables]:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    (tmp_path / "run").mkdir()
    inspector = blind_inspector()
    binaries = BinaryTable(inspector)
    made = CachedTables(binaries, ElfImages(binaries), tmp_path / "cache")
    yield made
    made.close()
    binaries.close()
    inspector.server.close()


def _wait(tables: CachedTables) -> None:
    while tables.is_expecting:
        assert tables.wait(_PATIENCE_S)
        assert tables.finished() == []


def test_a_table_is_there_before_its_file_is_mapped(tables: CachedTables, tmp_path: Path) -> None:
    fd = os.open("/bin/sh", os.O_RDONLY)
    tables.expect(fd)
    assert tables.is_expecting
    _wait(tables)
    assert list((tmp_path / "cache").glob("*.unwind*"))
    os.close(fd)


def test_a_file_that_is_none_of_code_holds_nobody_up(tables: CachedTables, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no program" * TINY_FILE_BYTES)
    fd = os.open(tmp_path / "text", os.O_RDONLY)
    tables.expect(fd)
    _wait(tables)
    os.close(fd)


def test_what_the_cache_has_is_not_built(tables: CachedTables) -> None:
    fd = os.open("/bin/sh", os.O_RDONLY)
    tables.expect(fd)
    _wait(tables)
    tables.expect(fd)
    assert not tables.is_expecting
    os.close(fd)
