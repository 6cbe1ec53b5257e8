# SPDX-License-Identifier: Apache-2.0
"""Rows that a segment has already, by their contents."""

from __future__ import annotations

from typing import Any

import aiflame.agent.capture.seen_rows as seen_rows
import numpy as np
import pytest
from aiflame.agent.capture.seen_rows import SeenRows
from hypothesis import given
from hypothesis import strategies as st

# Of a size that is no multiple of eight.
_DTYPE = np.dtype([("number", "<u8"), ("owner", "<u4"), ("is_known", "?")])
_ROWS = st.lists(
    st.tuples(st.integers(0, 20), st.integers(0, 3), st.booleans()), unique=True, max_size=30
)


def _rows(contents: list[tuple[Any, ...]]) -> np.ndarray[Any, Any]:
    return np.array(contents, _DTYPE)


@given(st.lists(_ROWS, max_size=6))
def test_every_row_has_the_number_of_its_content(windows: list[list[tuple[Any, ...]]]) -> None:
    seen, numbered = SeenRows(_DTYPE), dict[tuple[Any, ...], int]()
    for contents in windows:
        # WHEN the rows of a window are added
        is_new, numbers = seen.take(_rows(contents))
        # THEN those that came before have their numbers, and others count on
        assert is_new.tolist() == [content not in numbered for content in contents]
        for content in contents:
            numbered.setdefault(content, len(numbered))
        assert numbers.tolist() == [numbered[content] for content in contents]
        assert len(seen) == len(numbered)


def test_rows_of_one_hash_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    # GIVEN a target that has found contents of one hash
    monkeypatch.setattr(seen_rows, "_hashes", lambda rows: np.zeros(len(rows), np.uint64))
    seen = SeenRows(_DTYPE)
    contents = [(1, 1, True), (2, 1, True), (3, 1, True)]
    found: list[tuple[Any, ...]] = []
    for _ in range(3):
        # WHEN they come again
        is_new, numbers = seen.take(_rows(contents))
        found += [content for content, new in zip(contents, is_new, strict=True) if new]
        # THEN each number is one of its own content
        assert [found[number] for number in numbers] == contents
