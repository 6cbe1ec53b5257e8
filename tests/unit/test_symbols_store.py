# SPDX-License-Identifier: Apache-2.0
"""The cache on disk: whole files or none, bounded, private, and never in the way."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from aiflame.agent.symbols.store import Store, cache_dir, store_key


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    store = Store(tmp_path / "cache")
    assert store.open("a") is None
    assert store.write("a", [b"one ", memoryview(b"two")])
    mapping = store.open("a")
    assert mapping is not None and mapping[:] == b"one two"
    mapping.close()
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["a"]
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700


def test_least_recently_used_files_go_first(tmp_path: Path) -> None:
    # Small ones take a page of memory each.
    store = Store(tmp_path, max_bytes=13_000)
    for index, name in enumerate(("old", "used", "newer")):
        store.write(name, [bytes(300)])
        os.utime(tmp_path / name, (1000 + index, 1000 + index))
    mapping = store.open("old")
    assert mapping is not None
    mapping.close()
    store.write("new", [bytes(300)])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "old"]


@pytest.mark.breadth
def test_many_processes_that_write_a_file_each_stay_within_the_bound(tmp_path: Path) -> None:
    most = 0
    for number in range(4000):
        Store(tmp_path, max_bytes=4 << 20).write(f"{number}", [bytes(1000)])
        most = max(most, len([*tmp_path.iterdir()]))
    # It is over by what is written between two looks, 10 files on average: by 250 once in 10^11.
    assert 1000 < most < 1024 + 250


def test_what_others_write_and_remove_is_seen(tmp_path: Path) -> None:
    store, other = Store(tmp_path), Store(tmp_path)
    for count in range(50):  # some within one tick of the kernel's clock
        assert not store.holds(f"<{count}>")
        other.write(f"{count % 7}-<{count}>.symbols", [b"x"])
        assert store.holds(f"<{count}>")
    other.remove("0-<49>.symbols")
    assert not store.holds("<49>")


def test_directory_open_to_others_is_not_used(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    assert not Store(tmp_path).usable


def test_works_without_a_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for store in (Store(None), Store(tmp_path / "file" / "cache")):
        assert not store.usable
        assert not store.write("a", [b"x"])
        assert store.open("a") is None
        store.remove("a")


def test_failed_write_leaves_nothing(tmp_path: Path) -> None:
    """GIVEN any error while writing, THEN the old file stays and no part remains."""

    def failing() -> object:
        yield b"x" * 100
        raise OSError(5, "Input/output error")

    store = Store(tmp_path)
    store.write("a", [b"old"])
    assert not store.write("a", failing())  # type: ignore[arg-type]
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("a", b"old")]


@pytest.mark.parametrize(("used_bytes", "is_ours"), [(60_000, True), (1 << 30, False)])
def test_a_disk_that_is_full_of_the_cache_has_room_for_what_comes_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, used_bytes: int, is_ours: bool
) -> None:
    """As a small one in memory, far below the bound; not where others have filled it."""
    full = SimpleNamespace(f_blocks=used_bytes, f_bfree=0, f_frsize=1)
    monkeypatch.setattr(os, "statvfs", lambda _: full)

    def failing() -> object:
        yield b"x" * 100
        raise OSError(28, "No space left on device")

    store = Store(tmp_path)
    for index in range(10):
        store.write(f"{index}", [b"old"])
        os.utime(tmp_path / f"{index}", (1000 + index, 1000 + index))
    assert not store.write("new", failing())  # type: ignore[arg-type]
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == [f"{index}" for index in range(2 if is_ours else 0, 10)]
    assert store.write("new", [b"new"])


def test_empty_cache_file_counts_as_none(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"")
    assert Store(tmp_path).open("a") is None


def test_link_in_the_cache_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("x")
    (tmp_path / "cache").mkdir(mode=0o700)
    (tmp_path / "cache/a").symlink_to(tmp_path / "target")
    assert Store(tmp_path / "cache").open("a") is None


def test_cache_dir_by_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert cache_dir() == Path("/var/cache/aiflame")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("XDG_CACHE_HOME", "/x/cache")
    assert cache_dir() == Path("/x/cache/aiflame")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", "/home/someone")
    assert cache_dir() == Path("/home/someone/.cache/aiflame")


def test_keys_fit_a_file_name_and_differ() -> None:
    key = store_key("ab" * 64 + "-0123", "cd" * 64 + "-4567")
    assert len(key) < 100 and key != store_key("ab" * 64 + "-0123")
