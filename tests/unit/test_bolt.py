# SPDX-License-Identifier: Apache-2.0
"""Values out of databases of bbolt's, while they are written to, and out of damaged ones."""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from aiflame.agent.processes import bolt
from aiflame.agent.processes.bolt import BoltError, value
from bolt_files import PAGE_BYTES, BoltFile, Bucket, branch, leaf, meta_page

_IDS = [f"{number * 7919:064x}".encode() for number in range(500)]
_LARGE = b"x" * 20_000


def _containers() -> Bucket:
    return {
        b"all-ctrs": dict.fromkeys(_IDS, b"name"),
        b"ctr": {
            each: {b"config": each + _LARGE[at * 40 :], b"dependencies": {}, b"state": b"{}"}
            for at, each in enumerate(_IDS)
        },
        b"runtime-config": {b"graph-root": b"/var/lib/containers/storage"},
    }


@contextmanager
def _opened(path: Path, content: bytes | None = None) -> Iterator[int]:
    if content is not None:
        path.write_bytes(content)
    fd = os.open(path, os.O_RDONLY)
    try:
        yield fd
    finally:
        os.close(fd)


@pytest.mark.parametrize("page_bytes", [1024, 4096, 65536])
@pytest.mark.parametrize("most", [3, 40])
def test_values_of_trees_of_any_depth(tmp_path: Path, page_bytes: int, most: int) -> None:
    content = BoltFile(_containers(), page_bytes, most).content()
    with _opened(tmp_path / "db", content) as fd:
        for at, each in enumerate(_IDS):
            assert value(fd, (b"ctr", each, b"config")) == each + _LARGE[at * 40 :]
        assert value(fd, (b"runtime-config", b"graph-root")) == b"/var/lib/containers/storage"
        # What is not there, before, between and after what is:
        for key in (b"0", b"7", b"f" * 64, _IDS[3] + b"0", b""):
            assert value(fd, (b"ctr", key, b"config")) is None
        for keys in (
            (b"ctr",),
            (b"ctr", _IDS[0]),
            (b"none", b"x"),
            (),
            (b"all-ctrs", _IDS[0], b"x"),
        ):
            assert value(fd, keys) is None
        assert value(fd, (b"ctr", _IDS[0], b"dependencies", b"x")) is None


def test_of_a_large_database_little_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = BoltFile(_containers()).content()
    sizes: list[int] = []
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda *words: sizes.append(words[1]) or pread(*words))
    with _opened(tmp_path / "db", content) as fd:
        assert value(fd, (b"ctr", _IDS[250], b"config")) is not None
    assert sum(sizes) < 50_000 < len(content) / 50


def test_what_the_newest_whole_transaction_says(tmp_path: Path) -> None:
    old = BoltFile({b"a": {b"b": b"old"}})
    pages = BoltFile({b"a": {b"b": b"new"}}).pages[2]
    # GIVEN a transaction that has written another page, and its meta page
    content = bytearray(old.content(transaction=2)) + bytes(PAGE_BYTES)
    content[3 * PAGE_BYTES : 3 * PAGE_BYTES + len(pages)] = struct.pack("=Q", 3) + pages[8:]
    with _opened(tmp_path / "db", bytes(content)) as fd:
        assert value(fd, (b"a", b"b")) == b"old"
    content[PAGE_BYTES : 2 * PAGE_BYTES] = meta_page(1, root=3, end=4, transaction=3)
    with _opened(tmp_path / "db", bytes(content)) as fd:
        assert value(fd, (b"a", b"b")) == b"new"
    # AND one of which half of the meta page is there
    content[PAGE_BYTES + 40] ^= 1
    with _opened(tmp_path / "db", bytes(content)) as fd:
        assert value(fd, (b"a", b"b")) == b"old"
    # AND the first meta page is the damaged one
    content[PAGE_BYTES + 40] ^= 1
    content[20] ^= 1
    with _opened(tmp_path / "db", bytes(content)) as fd:
        assert value(fd, (b"a", b"b")) == b"new"


@pytest.mark.parametrize("times", [1, 2, 100])
def test_a_page_that_is_written_to_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    # GIVEN a writer that uses the page with the value for something else, two transactions later
    path = tmp_path / "db"
    path.write_bytes(BoltFile({b"a": {b"b": b"1", b"c": _LARGE}}).content(transaction=2))
    transactions = iter(range(4, 4 + 2 * times, 2))
    page = bolt._Search._page

    def written(search: bolt._Search, number: int) -> bytes:
        transaction = next(transactions, None)
        if transaction is not None:
            file = BoltFile({b"a": {b"b": b"%d" % transaction, b"c": _LARGE}})
            path.write_bytes(file.content(transaction))
            return b"\xff" * PAGE_BYTES
        return page(search, number)

    monkeypatch.setattr(bolt._Search, "_page", written)
    with _opened(path) as fd:
        # THEN what is told is of the newest one, or it is said that nothing can be
        if times == 100:
            with pytest.raises(BoltError, match="written to all the time"):
                value(fd, (b"a", b"b"))
        else:
            assert value(fd, (b"a", b"b")) == b"%d" % (2 + 2 * times)


def _with_pages(pages: dict[int, bytes], root: int = 2) -> bytes:
    metas = meta_page(0, root, 100, 2) + meta_page(1, root, 100, 1)
    content = bytearray(metas.ljust(100 * PAGE_BYTES, b"\0"))
    for number, page in pages.items():
        content[number * PAGE_BYTES : number * PAGE_BYTES + len(page)] = page
    return bytes(content)


def _page(number: int, flags: int, part: tuple[int, bytes], more: int = 0) -> bytes:
    return struct.pack("=QHHI", number, flags, part[0], more) + part[1]


_LOOP = _page(2, 1, branch([(b"a", 2)]))
_RING = {2: _page(2, 1, branch([(b"a", 3)])), 3: _page(3, 1, branch([(b"a", 2)]))}
_TO_ROOT = _page(2, 2, leaf([(b"a", 1, struct.pack("=QQ", 2, 0))]))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"x",
        b"\0" * 100_000,
        b"SQLite format 3\0".ljust(8192, b"\0"),
        _with_pages({}),  # no page of a tree
        _with_pages({}, root=0),
        _with_pages({}, root=1 << 63),
        _with_pages({}, root=99)[: 99 * PAGE_BYTES],
        _with_pages({2: _LOOP}),
        _with_pages(_RING),
        _with_pages({2: _page(2, 1, (0, b""))}),  # a branch to nowhere
        _with_pages({2: _page(2, 2, (0xFFFF, b""))}),
        _with_pages({2: _page(2, 2, leaf([(b"a", 0, b"")]), 0xFFFF_FFFF)}),
        _with_pages({2: _page(2, 2, leaf([(b"a", 0, b"")]), 98)}),
        _with_pages({2: _page(2, 4, leaf([(b"a", 0, b"")]))}),
        _with_pages({2: _page(3, 2, leaf([(b"a", 0, b"")]))}),  # another page's number
        _with_pages({2: _page(2, 2, (1, struct.pack("=IIII", 1, 0xFFFF_FFF0, 1, 1)))}),
        _with_pages({2: _page(2, 2, (1, struct.pack("=IIII", 1, 16, 0xFFFF_FFFF, 1)))}),
        _with_pages({2: _page(2, 2, (1, struct.pack("=IIII", 1, 16, 1, 0xFFFF_FFFF) + b"a"))}),
        _with_pages({2: _page(2, 2, leaf([(b"a", 1, b"")]))}),  # a bucket without a header
        _with_pages({2: _page(2, 2, leaf([(b"a", 1, bytes(16))]))}),  # and without a page
        _with_pages({2: _page(2, 2, leaf([(b"a", 1, struct.pack("=QQ", 50, 0))]))}),
    ],
)  # fmt: skip
def test_what_is_damaged_says_so(tmp_path: Path, content: bytes) -> None:
    begun_s = time.process_time()
    with _opened(tmp_path / "db", content) as fd, pytest.raises(BoltError):
        value(fd, (b"a", b"b", b"c"))
    assert time.process_time() - begun_s < 0.5


def test_a_bucket_that_is_inside_itself(tmp_path: Path) -> None:
    with _opened(tmp_path / "db", _with_pages({2: _TO_ROOT})) as fd:
        assert value(fd, (b"a",) * 50) is None
        with pytest.raises(BoltError):
            value(fd, (b"a",) * 50_000)  # more than is read for one value
