# SPDX-License-Identifier: Apache-2.0
"""Looks up single values in a database of bbolt's, while another process writes to it.

Format (etcd-io/bbolt, internal/common/page.go, meta.go and bucket.go): the file consists of pages.
The first two are meta pages, written in turn, each with the number of its transaction, the page of
the root bucket, and a checksum. All other pages are nodes of B+ trees, or lists of free pages. A
bucket is a tree; buckets inside it are values with a flag, which have the page of their root, or a
single page in themselves.

No lock is taken: bbolt's is exclusive while a writer has the file open (db.go, flock), so readers
with a lock would hold up writers. It is not needed: a transaction writes only to pages that the one
before does not use, and the meta page last (tx.go, Commit; freelist.go). So what is found through
a meta page is right if that is still the newest one afterwards.
"""

from __future__ import annotations

import os
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from aiflame.agent.processes.engine_files import read_at

# In the byte order of the machine that writes. Meta: magic, version, page size, flags; page and
# sequence of the root bucket; page of the free list, first page that was never used, transaction,
# checksum of all before.
_META = struct.Struct("=IIIIQQQQQQ")
_MAGIC, _VERSION = 0xED0CDAED, 2
_CHECKED_BYTES = _META.size - 8
# Page: number, flags, number of elements, further pages that it has.
_PAGE = struct.Struct("=QHHI")
_BRANCH, _LEAF = 0x01, 0x02
# Elements, in the order of their keys; of both the first is where the key begins, from the element.
_BRANCH_ELEMENT = struct.Struct("=IIQ")  # , its size, and a page
_LEAF_ELEMENT = struct.Struct("=IIII")  # flags before it; after it the sizes of key and value
_ELEMENT_BYTES = 16
_IS_BUCKET = 0x01
_BUCKET = struct.Struct("=QQ")  # page of its root, 0 for one that follows; sequence

# What db.go tries where the first meta page cannot be read; page sizes of kernels are among them.
_PAGE_SIZES = tuple(1024 << power for power in range(15))
# Of a tree: with two keys a page at least, more would be larger than any disk.
_MAX_DEPTH = 32
# Of all pages on the way to a value; 1 MB for a value, and what lies beside it.
_MAX_BYTES = 4 << 20
# A writer commits some times a second; a look-up takes some 0.1 ms.
_MAX_TRIES = 5

_FNV_OFFSET, _FNV_PRIME = 0xCBF29CE484222325, 0x100000001B3


class BoltError(Exception):
    """The file is none of bbolt's, is damaged, or was written to all the time."""


@dataclass(frozen=True, slots=True)
class _Meta:
    page_bytes: int
    root: int
    end: int
    transaction: int


def value(fd: int, keys: Sequence[bytes]) -> bytes | None:
    """Returns a value; None where there is none.

    Args:
        fd: Of the file.
        keys: Of buckets, each in the one before, and of the value in the last of them.

    Raises:
        BoltError: It cannot be told.
        OSError: As of pread(2).
    """
    for _ in range(_MAX_TRIES):
        meta = _newest(fd)
        found, error = None, None
        try:
            found = _Search(fd, meta).value(keys)
        except (BoltError, struct.error) as caught:
            error = caught
        if _newest(fd) == meta:
            if error is not None:
                raise BoltError(str(error)) from error
            return found
    raise BoltError("it was written to all the time")


def _newest(fd: int) -> _Meta:
    first = _meta(fd, 0)
    sizes = _PAGE_SIZES if first is None else (first.page_bytes,)
    second = next(filter(None, (_meta(fd, size) for size in sizes)), None)
    found = [each for each in (first, second) if each is not None]
    if not found:
        raise BoltError("no meta page")
    return max(found, key=lambda meta: meta.transaction)


def _meta(fd: int, offset: int) -> _Meta | None:
    text = read_at(fd, offset + _PAGE.size, _META.size)
    if len(text) < _META.size:
        return None
    magic, version, page_bytes, _, root, _, _, end, transaction, checksum = _META.unpack(text)
    if (magic, version) != (_MAGIC, _VERSION) or page_bytes not in _PAGE_SIZES:
        return None
    if checksum != _fnv1a(text[:_CHECKED_BYTES]):
        return None
    return _Meta(page_bytes, root, end, transaction)


def _fnv1a(text: bytes) -> int:
    found = _FNV_OFFSET
    for byte in text:
        found = (found ^ byte) * _FNV_PRIME & 0xFFFF_FFFF_FFFF_FFFF
    return found


class _Search:
    """A way through the trees of one transaction."""

    def __init__(self, fd: int, meta: _Meta) -> None:
        self._fd = fd
        self._page_bytes = meta.page_bytes
        self._root = meta.root
        self._end = min(meta.end, os.fstat(fd).st_size // meta.page_bytes)
        self._left_bytes = _MAX_BYTES

    def value(self, keys: Sequence[bytes]) -> bytes | None:
        page = self._page(self._root)
        for at, key in enumerate(keys):
            found = self._find(page, key)
            if found is None:
                return None
            flags, text = found
            is_last = at == len(keys) - 1
            if bool(flags & _IS_BUCKET) == is_last:
                return None
            if is_last:
                return text
            root, _ = _BUCKET.unpack_from(text)
            page = self._page(root) if root else text[_BUCKET.size :]
        return None

    def _find(self, page: bytes, key: bytes) -> tuple[int, bytes] | None:
        """Returns flags and value of a key in the tree below a page."""
        for _ in range(_MAX_DEPTH):
            _, flags, count, _ = _PAGE.unpack_from(page)
            if _PAGE.size + count * _ELEMENT_BYTES > len(page):
                raise BoltError("more elements than a page has room for")
            if flags == _LEAF:
                return _in_leaf(page, count, key)
            if flags != _BRANCH or not count:
                raise BoltError("a page that is not of a tree")
            page = self._page(_below(page, count, key))
        raise BoltError("a tree without an end")

    def _page(self, number: int) -> bytes:
        """Returns a page, with those that belong to it."""
        if not 2 <= number < self._end:
            raise BoltError("a page that is not there")
        offset = number * self._page_bytes
        own, _, _, more = _PAGE.unpack(read_at(self._fd, offset, _PAGE.size))
        size = (1 + more) * self._page_bytes
        if own != number or number + more >= self._end or size > self._left_bytes:
            raise BoltError("a page of another number, or a size that cannot be")
        self._left_bytes -= size
        text = read_at(self._fd, offset, size)
        if len(text) < size:
            raise BoltError("a page that was cut off")
        return text


def _below(page: bytes, count: int, key: bytes) -> int:
    """Returns the page below a branch that a key would be in."""

    def at(index: int) -> bytes:
        start = _PAGE.size + index * _ELEMENT_BYTES
        offset, size, _ = _BRANCH_ELEMENT.unpack_from(page, start)
        return _part(page, start + offset, size)

    index = max(bisect_right(range(count), key, key=at) - 1, 0)
    below: int = _BRANCH_ELEMENT.unpack_from(page, _PAGE.size + index * _ELEMENT_BYTES)[2]
    return below


def _in_leaf(page: bytes, count: int, key: bytes) -> tuple[int, bytes] | None:
    def at(index: int) -> bytes:
        start = _PAGE.size + index * _ELEMENT_BYTES
        _, offset, size, _ = _LEAF_ELEMENT.unpack_from(page, start)
        return _part(page, start + offset, size)

    index = bisect_left(range(count), key, key=at)
    if index == count or at(index) != key:
        return None
    start = _PAGE.size + index * _ELEMENT_BYTES
    flags, offset, key_bytes, value_bytes = _LEAF_ELEMENT.unpack_from(page, start)
    return flags, _part(page, start + offset + key_bytes, value_bytes)


def _part(page: bytes, start: int, size: int) -> bytes:
    if start + size > len(page):
        raise BoltError("an element outside its page")
    return page[start : start + size]
