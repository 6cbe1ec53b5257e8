# SPDX-License-Identifier: Apache-2.0
"""Builds databases as bbolt writes them (etcd-io/bbolt, internal/common)."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import TypeAlias

PAGE_BYTES = 4096
_ELEMENT_BYTES = 16
_BRANCH, _LEAF = 0x01, 0x02

# Values and further buckets, by keys.
Bucket: TypeAlias = Mapping[bytes, "bytes | Bucket"]


def meta_page(
    number: int, root: int, end: int, transaction: int, page_bytes: int = PAGE_BYTES
) -> bytes:
    """Returns one of the two first pages."""
    free = 0xFFFF_FFFF_FFFF_FFFF  # it is not kept
    text = struct.pack("=IIIIQQQQQ", 0xED0CDAED, 2, page_bytes, 0, root, 0, free, end, transaction)
    checksum = 0xCBF29CE484222325
    for byte in text:
        checksum = (checksum ^ byte) * 0x100000001B3 & 0xFFFF_FFFF_FFFF_FFFF
    page = struct.pack("=QHHI", number, 0x04, 0, 0) + text + struct.pack("=Q", checksum)
    return page.ljust(page_bytes, b"\0")


class BoltFile:
    """The pages of a database with one transaction.

    Args:
        root: What it has.
        page_bytes: Of a page.
        most: Elements of a page; with more of them a tree has branches.
        inline: How many bytes a bucket without pages of its own may have.
    """

    def __init__(
        self, root: Bucket, page_bytes: int = PAGE_BYTES, most: int = 40, inline: int = 1024
    ) -> None:
        self._page_bytes, self._most, self._inline = page_bytes, most, inline
        self.pages: dict[int, bytes] = {}
        self._end = 2
        self.root = self._tree(root)

    def content(self, transaction: int = 2) -> bytes:
        """Returns the file."""
        found = bytearray(self._end * self._page_bytes)
        for number, page in self.pages.items():
            start = number * self._page_bytes
            found[start : start + len(page)] = page
        metas = ((transaction % 2, transaction), ((transaction - 1) % 2, transaction - 1))
        for number, each in metas:
            page = meta_page(number, self.root, self._end, each, self._page_bytes)
            found[number * self._page_bytes : (number + 1) * self._page_bytes] = page
        return bytes(found)

    def _tree(self, bucket: Bucket) -> int:
        """Returns the page of the root of a tree."""
        entries = []
        for key, value in sorted(bucket.items()):
            if isinstance(value, bytes):
                entries.append((key, 0, value))
            else:
                entries.append((key, 1, self._bucket(value)))
        parts = [entries[at : at + self._most] for at in range(0, len(entries), self._most)] or [[]]
        level = [(part[0][0] if part else b"", self._add(_LEAF, leaf(part))) for part in parts]
        while len(level) > 1:
            groups = [level[at : at + self._most] for at in range(0, len(level), self._most)]
            level = [(group[0][0], self._add(_BRANCH, branch(group))) for group in groups]
        return level[0][1]

    def _bucket(self, bucket: Bucket) -> bytes:
        """Returns the value that a bucket inside another one is."""
        if all(isinstance(value, bytes) for value in bucket.values()):
            entries = [(key, 0, value) for key, value in sorted(bucket.items())]
            count, text = leaf(entries)  # type: ignore[arg-type]
            if len(text) <= self._inline:
                return struct.pack("=QQ", 0, 0) + struct.pack("=QHHI", 0, _LEAF, count, 0) + text
        return struct.pack("=QQ", self._tree(bucket), 0)

    def _add(self, flags: int, part: tuple[int, bytes]) -> int:
        count, text = part
        number, more = self._end, (16 + len(text) - 1) // self._page_bytes
        self._end += 1 + more
        self.pages[number] = struct.pack("=QHHI", number, flags, count, more) + text
        return number


def leaf(entries: list[tuple[bytes, int, bytes]]) -> tuple[int, bytes]:
    """Returns how many elements a leaf has, and all of it but its header."""
    table, data = b"", b""
    for at, (key, flags, value) in enumerate(entries):
        offset = (len(entries) - at) * _ELEMENT_BYTES + len(data)
        table += struct.pack("=IIII", flags, offset, len(key), len(value))
        data += key + value
    return len(entries), table + data


def branch(entries: list[tuple[bytes, int]]) -> tuple[int, bytes]:
    """The same of a branch, with keys and pages."""
    table, data = b"", b""
    for at, (key, page) in enumerate(entries):
        offset = (len(entries) - at) * _ELEMENT_BYTES + len(data)
        table += struct.pack("=IIQ", offset, len(key), page)
        data += key
    return len(entries), table + data
