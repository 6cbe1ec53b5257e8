# SPDX-License-Identifier: Apache-2.0
"""Helpers that an agent keeps in a directory, for processes that load them by themselves."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from aiflame.agent.errors import UsageError
from aiflame.agent.fleet.log import Log
from aiflame.agent.fleet.prepared import PreparedHelpers
from aiflame.gpu.base import HelperLibrary

_NAME = "libaiflame-toy.so"


@pytest.fixture
def log(tmp_path: Path) -> Log:
    return Log(os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT))


def _helper(folder: Path, content: bytes = b"one") -> HelperLibrary:
    path = folder / _NAME
    path.write_bytes(content)
    return HelperLibrary(path, ("libtoy",), lambda _: {}, "something")


def _files(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir() if not path.is_symlink()}


def test_a_helper_is_there_for_all_whatever_the_umask_is(tmp_path: Path, log: Log) -> None:
    directory = tmp_path / "helpers"
    before = os.umask(0o077)
    try:
        (file,) = PreparedHelpers(directory, [_helper(tmp_path)], log).files
    finally:
        os.umask(before)
    assert stat.S_IMODE(directory.stat().st_mode) == 0o755
    assert stat.S_IMODE(file.stat().st_mode) == 0o755
    # A mount of the directory elsewhere has it as well.
    assert (directory / _NAME).readlink() == Path(file.name)
    assert (directory / _NAME).read_bytes() == b"one"
    assert f"{directory}/{_NAME}" in (tmp_path / "log").read_text()


def test_an_upgrade_leaves_what_processes_have_mapped(tmp_path: Path, log: Log) -> None:
    directory = tmp_path / "helpers"
    (old,) = PreparedHelpers(directory, [_helper(tmp_path)], log).files
    identity = old.stat().st_ino
    (new,) = PreparedHelpers(directory, [_helper(tmp_path, b"two")], log).files
    assert (directory / _NAME).resolve() == new
    assert old.read_bytes() == b"one" and old.stat().st_ino == identity
    assert _files(directory) == {old.name, new.name}
    # The same once more changes nothing.
    identity = new.stat().st_ino
    PreparedHelpers(directory, [_helper(tmp_path, b"two")], log)
    assert new.stat().st_ino == identity
    assert _files(directory) == {old.name, new.name}


@pytest.mark.parametrize("removed", ["file", "link", "all"])
def test_what_is_removed_comes_back(tmp_path: Path, log: Log, removed: str) -> None:
    directory = tmp_path / "helpers"
    prepared = PreparedHelpers(directory, [_helper(tmp_path)], log)
    prepared.keep()
    assert "it is back" not in (tmp_path / "log").read_text()
    (file,) = prepared.files
    if removed != "link":
        file.unlink()
    if removed != "file":
        (directory / _NAME).unlink()
    if removed == "all":
        directory.rmdir()
    prepared.keep()
    assert (directory / _NAME).read_bytes() == b"one"
    assert "it is back" in (tmp_path / "log").read_text()


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o700])
def test_a_directory_that_others_can_write_or_not_read_is_refused(
    tmp_path: Path, log: Log, mode: int
) -> None:
    directory = tmp_path / "helpers"
    directory.mkdir()
    directory.chmod(mode)
    with pytest.raises(UsageError, match="files into" if mode & 0o022 else "may read"):
        PreparedHelpers(directory, [_helper(tmp_path)], log)
    assert not _files(directory)
