# SPDX-License-Identifier: Apache-2.0
"""Tables of integers: from the file's own pages the same as from SQLite, never a wrong number."""

from __future__ import annotations

import contextlib
import random
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiflame.agent.capture import integer_tables
from aiflame.agent.capture.integer_tables import NULL, IntegerTables
from hypothesis import given, settings
from hypothesis import strategies as st

_NAMES = ("a", "b", "c")
# What each width of SQLite's integers can just hold, and can just not.
_EDGES = [
    side * ((1 << bits) + more)
    for bits in (0, 7, 8, 15, 16, 23, 31, 32, 47, 48, 62)
    for more in (-1, 0, 1)
    for side in (1, -1)
]
_NUMBERS = st.one_of(st.none(), st.sampled_from(_EDGES), st.integers(-(2**63), 2**63 - 1))
_ROWS = st.lists(st.tuples(_NUMBERS, _NUMBERS, _NUMBERS), max_size=400)


@contextlib.contextmanager
def _tables(path: Path) -> Iterator[IntegerTables]:
    with contextlib.closing(sqlite3.connect(path)) as database, path.open("rb") as file:
        yield IntegerTables(database, file.fileno())


def _make(path: Path, rows: list[tuple[object, ...]], page_bytes: int = 4096) -> None:
    path.unlink(missing_ok=True)
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute(f"PRAGMA page_size = {page_bytes}")
        database.execute("CREATE TABLE t (a INTEGER, b INTEGER, c INTEGER)")
        database.executemany("INSERT INTO t VALUES (?, ?, ?)", rows)
        database.commit()


@pytest.fixture
def without_sqlite(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("was left to SQLite")

    monkeypatch.setattr(IntegerTables, "_from_rows", refuse)


@pytest.mark.usefixtures("without_sqlite")
@settings(max_examples=100, deadline=None)
@given(rows=_ROWS, page_bytes=st.sampled_from([512, 4096, 65536]))
def test_pages_hold_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[int | None, ...]], page_bytes: int
) -> None:
    path = tmp_path_factory.mktemp("pages") / "t.db"
    _make(path, rows, page_bytes)
    with _tables(path) as tables:
        found = tables.columns("t", ("c", "a"))
    for column, at in zip(found, (2, 0), strict=True):
        assert column.tolist() == [NULL if row[at] is None else row[at] for row in rows]


@pytest.mark.usefixtures("without_sqlite")
def test_rows_stay_in_order_over_many_pages_and_after_some_were_deleted(tmp_path: Path) -> None:
    path = tmp_path / "t.db"
    rows = [(i, i * 7919 % 65_537, -i) for i in range(40_000)]
    _make(path, rows, 512)  # of so small pages, the tree has four levels
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute("DELETE FROM t WHERE a % 3 = 1")
        database.execute("INSERT INTO t (rowid, a, b, c) VALUES (?, 1, 2, 3)", (1 << 34,))
        database.commit()
    kept = [*(row for row in rows if row[0] % 3 != 1), (1, 2, 3)]
    with _tables(path) as tables:
        found = [column.tolist() for column in tables.columns("t", _NAMES)]
    assert list(zip(*found, strict=True)) == kept


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("ALTER TABLE t ADD COLUMN d INTEGER DEFAULT 5", [1, 3]),  # rows before it are shorter
        ("INSERT INTO t (rowid, a) VALUES (9007199254740993, 7)", [1, 3, 7]),
        ("DROP TABLE t; CREATE TABLE t (b INT, a INTEGER PRIMARY KEY); INSERT INTO t VALUES (1, 2)",
         [2]),
        ("DROP TABLE t; CREATE TABLE t (a INT PRIMARY KEY, b INT) WITHOUT ROWID", []),
    ],
)  # fmt: skip
def test_what_pages_do_not_tell_sqlite_does(
    tmp_path: Path, change: str, expected: list[int]
) -> None:
    path = tmp_path / "t.db"
    _make(path, [(1, 2, 3), (3, 4, 5)])
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.executescript(change)
        is_keyed = "WITHOUT" in change
    with _tables(path) as tables:
        if is_keyed:  # has no rowid to order by
            with pytest.raises(sqlite3.Error):
                tables.columns("t", ("a",))
        else:
            assert tables.columns("t", ("a",))[0].tolist() == expected


@pytest.mark.parametrize("value", ["a word", b"bytes", 2.5])
def test_a_value_that_is_no_integer_is_not_taken_for_one(tmp_path: Path, value: object) -> None:
    path = tmp_path / "t.db"
    _make(path, [(1, 2, 3), (4, value, 6)])
    with _tables(path) as tables:
        if isinstance(value, float):
            assert tables.columns("t", ("b",))[0].tolist() == [2, 2]  # as SQLite's rows give it
        else:
            with pytest.raises((TypeError, ValueError)):
                tables.columns("t", ("b",))


def test_damaged_pages_end_as_sqlite_says_or_with_numbers(tmp_path: Path) -> None:
    # Whatever bytes there are, nothing is read outside of the file and nothing goes on forever.
    path, damaged = tmp_path / "t.db", tmp_path / "damaged.db"
    _make(path, [(i, i << 20, i << 40) for i in range(3_000)], 1024)
    whole = path.read_bytes()
    chance = random.Random(20_261_122)
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(chance.choice((1, 1, 3, 30))):
            # Headers of pages are hit more often than by chance.
            page = chance.randrange(1, len(data) // 1024) * 1024
            data[page + chance.choice((0, 3, 4, 8, 9, chance.randrange(1024)))] = chance.randrange(
                256
            )
        damaged.write_bytes(data)
        try:
            with _tables(damaged) as tables:
                found = tables.columns("t", _NAMES)
        except (sqlite3.Error, ValueError, TypeError, OverflowError):
            continue
        assert len({len(column) for column in found}) == 1


def test_a_tree_that_leads_back_to_itself_is_left_to_sqlite(tmp_path: Path) -> None:
    path = tmp_path / "t.db"
    _make(path, [(i, i, i) for i in range(3_000)], 512)
    with contextlib.closing(sqlite3.connect(path)) as database:
        (root,) = database.execute("SELECT rootpage FROM sqlite_master").fetchone()
    data = bytearray(path.read_bytes())
    data[(root - 1) * 512 + 8 : (root - 1) * 512 + 12] = root.to_bytes(4, "big")  # its last child
    path.write_bytes(data)
    with _tables(path) as tables, pytest.raises(sqlite3.DatabaseError):
        tables.columns("t", _NAMES)


@settings(max_examples=50, deadline=None)
@given(
    rows=st.dictionaries(
        st.integers(0, 1 << 34),
        st.tuples(
            _NUMBERS,
            st.one_of(st.none(), st.text(max_size=200), st.floats(), st.binary(max_size=200)),
            st.one_of(st.none(), st.binary(max_size=300).map(lambda data: data * 4)),
        ),
        max_size=40,
    ),
    page_bytes=st.sampled_from([4096, 65536]),
)
def test_columns_beside_words_and_texts(
    tmp_path_factory: pytest.TempPathFactory,
    rows: dict[int, tuple[int | None, object, bytes | None]],
    page_bytes: int,
) -> None:
    path = tmp_path_factory.mktemp("pages") / "t.db"
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute(f"PRAGMA page_size = {page_bytes}")
        database.execute("CREATE TABLE t (id INTEGER PRIMARY KEY, a INTEGER, b, w BLOB, c INTEGER)")
        database.executemany(
            "INSERT INTO t VALUES (?, ?, ?, ?, ?)",
            [(key, *row, key % 7) for key, row in rows.items()],
        )
        database.commit()
    ordered = sorted(rows.items())
    with _tables(path) as tables:
        found = tables.columns_and_words("t", ("id", "c"), "w")
        numbers = tables.columns("t", ("a", "id"))
    assert found is not None
    (ids, last), words = found
    assert ids.tolist() == [key for key, _ in ordered] == numbers[1].tolist()
    assert last.tolist() == [key % 7 for key, _ in ordered]
    assert numbers[0].tolist() == [NULL if a is None else a for _, (a, _, _) in ordered]
    assert words.is_null.tolist() == [each is None for _, (_, _, each) in ordered]
    assert (4 * words.lengths).tolist() == [len(each or b"") for _, (_, _, each) in ordered]
    assert words.words.tobytes() == b"".join(each or b"" for _, (_, _, each) in ordered)


@pytest.mark.parametrize("value", ["four", 7, b"123", b"1234" * 1100])
def test_words_that_are_none_or_do_not_fit_a_page_are_left_to_sqlite(
    tmp_path: Path, value: object
) -> None:
    path = tmp_path / "t.db"
    _make(path, [(1, 2, None), (3, 4, value)])
    with _tables(path) as tables:
        assert tables.columns_and_words("t", ("a",), "c") is None
        assert tables.columns("t", ("a",))[0].tolist() == [1, 3]


def test_damaged_words_are_left_to_sqlite_or_are_as_many_as_there_are(tmp_path: Path) -> None:
    path, damaged = tmp_path / "t.db", tmp_path / "damaged.db"
    _make(path, [(i, i << 40, b"1234" * (i % 60)) for i in range(1_000)], 1024)
    whole = path.read_bytes()
    chance = random.Random(20_261_123)
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(chance.choice((1, 3, 30))):
            page = chance.randrange(1, len(data) // 1024) * 1024
            data[page + chance.choice((0, 3, 4, 8, chance.randrange(1024)))] = chance.randrange(256)
        damaged.write_bytes(data)
        try:
            with _tables(damaged) as tables:
                found = tables.columns_and_words("t", ("a",), "c")
        except sqlite3.Error:
            continue
        if found is not None:
            assert len(found[0][0]) == len(found[1].lengths) == len(found[1].is_null)
            assert found[1].lengths.sum() == len(found[1].words)


def test_understood_types_are_those_of_the_file_format() -> None:
    widths = integer_tables._BYTES_OF_TYPE.tolist()
    assert widths == [0, 1, 2, 3, 4, 6, 8, 8, 0, 0, 0, 0]
