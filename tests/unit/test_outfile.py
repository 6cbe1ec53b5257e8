# SPDX-License-Identifier: Apache-2.0
"""Output files are whole or not there, and belong to the user behind sudo."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from aiflame.agent import outfile
from aiflame.agent.errors import AiflameError, UsageError


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_writes_and_leaves_nothing_else(tmp_path: Path) -> None:
    outfile.write_output(tmp_path / "a.svg", b"data", force=False)
    assert (tmp_path / "a.svg").read_bytes() == b"data"
    assert _names(tmp_path) == ["a.svg"]


def test_force_replaces_a_file(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"old")
    outfile.write_output(tmp_path / "a", b"new", force=True)
    assert (tmp_path / "a").read_bytes() == b"new"


def test_what_appears_meanwhile_is_kept(tmp_path: Path) -> None:
    # GIVEN a file that was not there when the work began
    path = tmp_path / "a"
    with (
        pytest.raises(UsageError, match="file exists"),
        outfile.atomic_output(path, force=False) as temporary,
    ):
        temporary.write_bytes(b"ours")
        path.write_bytes(b"theirs")
    # THEN it is still there, and nothing of ours is
    assert path.read_bytes() == b"theirs"
    assert _names(tmp_path) == ["a"]


def test_a_dangling_link_is_a_file_that_exists(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to(tmp_path / "target")
    with pytest.raises(UsageError, match="file exists"):
        outfile.write_output(tmp_path / "a", b"x", force=False)
    assert _names(tmp_path) == ["a"]


def test_force_replaces_a_link_not_its_target(tmp_path: Path) -> None:
    (tmp_path / "target").write_bytes(b"precious")
    (tmp_path / "a").symlink_to(tmp_path / "target")
    outfile.write_output(tmp_path / "a", b"new", force=True)
    assert (tmp_path / "target").read_bytes() == b"precious"
    assert (tmp_path / "a").read_bytes() == b"new"


def test_a_failure_inside_leaves_nothing(tmp_path: Path) -> None:
    with (
        pytest.raises(KeyboardInterrupt),
        outfile.atomic_output(tmp_path / "a", force=False) as temporary,
    ):
        temporary.write_bytes(b"half")
        raise KeyboardInterrupt
    assert _names(tmp_path) == []


def test_a_full_disk_says_so_and_leaves_nothing(tmp_path: Path) -> None:
    with (
        pytest.raises(AiflameError, match=r"cannot write .*/a: no space left on device") as error,
        outfile.atomic_output(tmp_path / "a", force=False) as temporary,
    ):
        temporary.write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert "free some space" in str(error.value.hint)
    assert _names(tmp_path) == []


def test_a_full_disk_keeps_the_file_that_was_to_be_replaced(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"old")
    with (
        pytest.raises(AiflameError),
        outfile.atomic_output(tmp_path / "a", force=True) as temporary,
    ):
        temporary.write_bytes(b"half")
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
    assert (tmp_path / "a").read_bytes() == b"old"


def test_a_planted_temporary_link_is_not_followed(tmp_path: Path) -> None:
    path = tmp_path / "a"
    (tmp_path / "victim").write_bytes(b"precious")
    outfile.temporary_name(path).symlink_to(tmp_path / "victim")
    with pytest.raises(AiflameError, match="file exists"):
        outfile.write_output(path, b"x", force=True)
    assert (tmp_path / "victim").read_bytes() == b"precious"


@pytest.mark.parametrize("name", ["a.svg", "x" * 255, "\u00e9" * 127])
def test_temporary_names_are_hidden_and_fit(tmp_path: Path, name: str) -> None:
    temporary = outfile.temporary_name(tmp_path / name)
    assert temporary.parent == tmp_path
    assert temporary.name.startswith(".")
    assert len(os.fsencode(temporary.name)) <= 255
    outfile.write_output(tmp_path / name, b"x", force=False)
    assert _names(tmp_path) == [name]


def test_devices_are_written_into_and_stay_devices() -> None:
    outfile.write_output(Path(os.devnull), b"x", force=True)
    assert Path(os.devnull).is_char_device()


def test_file_systems_without_hard_links(tmp_path: Path, monkeypatch) -> None:
    def no_links(*args: object, **options: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    outfile.write_output(tmp_path / "a", b"x", force=False)
    assert _names(tmp_path) == ["a"]
    with pytest.raises(UsageError, match="file exists"):
        outfile.write_output(tmp_path / "a", b"y", force=False)
    assert (tmp_path / "a").read_bytes() == b"x"


class _Chown:
    """Stands in for os.chown, so that the test needs not be root."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: int | None = None) -> None:
        self.calls: list[tuple[str, int, int]] = []
        self._error = error
        monkeypatch.setattr(os, "geteuid", lambda: 0)
        monkeypatch.setattr(os, "chown", self)

    def __call__(self, path: Path, uid: int, gid: int, *, follow_symlinks: bool) -> None:
        assert not follow_symlinks
        self.calls.append((path.name, uid, gid))
        if self._error is not None:
            raise OSError(self._error, os.strerror(self._error))


def test_files_belong_to_the_user_behind_sudo_before_they_have_their_name(
    tmp_path: Path, monkeypatch
) -> None:
    chown = _Chown(monkeypatch)
    monkeypatch.setenv("SUDO_UID", "1234")
    monkeypatch.setenv("SUDO_GID", "5678")
    outfile.write_output(tmp_path / "a", b"x", force=False)
    assert chown.calls == [(outfile.temporary_name(tmp_path / "a").name, 1234, 5678)]


@pytest.mark.parametrize(("uid", "gid"), [("", ""), ("1000", ""), ("-1", "-1"), ("x", "1")])
def test_no_user_behind_sudo(tmp_path: Path, monkeypatch, uid: str, gid: str) -> None:
    chown = _Chown(monkeypatch)
    monkeypatch.setenv("SUDO_UID", uid)
    monkeypatch.setenv("SUDO_GID", gid)
    outfile.write_output(tmp_path / "a", b"x", force=False)
    assert chown.calls == []


@pytest.mark.parametrize(("code", "is_kept"), [(errno.EPERM, True), (errno.EROFS, False)])
def test_file_systems_without_owners(tmp_path: Path, monkeypatch, code: int, is_kept: bool) -> None:
    _Chown(monkeypatch, code)
    monkeypatch.setenv("SUDO_UID", "1234")
    monkeypatch.setenv("SUDO_GID", "5678")
    if is_kept:
        outfile.write_output(tmp_path / "a", b"x", force=False)
    else:
        with pytest.raises(AiflameError, match="cannot write"):
            outfile.write_output(tmp_path / "a", b"x", force=False)
    assert _names(tmp_path) == (["a"] if is_kept else [])
