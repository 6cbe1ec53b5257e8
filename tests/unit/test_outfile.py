# SPDX-License-Identifier: Apache-2.0
"""Output files are whole or not there, and belong to the user who calls sudo."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import select
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiflame.agent import outfile
from aiflame.agent.errors import AiflameError, UsageError


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


class _Source(io.BytesIO):
    """Content that calls something when it is read for the first time."""

    def __init__(self, content: bytes, first: Any) -> None:
        super().__init__(content)
        self._first = first

    def read(self, *size: Any) -> bytes:
        first, self._first = self._first, lambda: None
        first()
        return super().read(*size)


def test_writes_and_leaves_nothing_else(tmp_path: Path) -> None:
    outfile.write_output(tmp_path / "a.svg", b"data", force=False)
    assert (tmp_path / "a.svg").read_bytes() == b"data"
    assert _names(tmp_path) == ["a.svg"]


def test_copies_a_file(tmp_path: Path) -> None:
    outfile.write_output(tmp_path / "a", io.BytesIO(b"data" * 10**6), force=False)
    assert (tmp_path / "a").stat().st_size == 4 * 10**6


def test_a_path_relative_to_the_current_folder(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "b").mkdir()
    monkeypatch.chdir(tmp_path / "b")
    outfile.write_output(Path("a"), b"here", force=False)
    outfile.write_output(Path("../b/../a"), b"above", force=False)
    assert (tmp_path / "b/a").read_bytes() == b"here"
    assert (tmp_path / "a").read_bytes() == b"above"


def test_force_replaces_a_file(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"old")
    outfile.write_output(tmp_path / "a", b"new", force=True)
    assert (tmp_path / "a").read_bytes() == b"new"


def test_what_appears_meanwhile_is_kept(tmp_path: Path) -> None:
    # GIVEN a file that was not there when the work began
    path = tmp_path / "a"
    content = _Source(b"ours", lambda: path.write_bytes(b"theirs"))
    with pytest.raises(UsageError, match="file exists"):
        outfile.write_output(path, content, force=False)
    # THEN it is still there, and nothing of ours is
    assert path.read_bytes() == b"theirs"
    assert _names(tmp_path) == ["a"]


def test_a_file_of_ours_is_replaced_without_force(tmp_path: Path) -> None:
    path = tmp_path / "a"
    ours = outfile.write_output(path, b"raw", force=False)
    named = outfile.write_output(path, b"named", force=False, replaces=ours)
    assert path.read_bytes() == b"named"
    # but not another one under its name, also not one that came when ours was written.
    path.unlink()
    path.write_bytes(b"theirs")
    with pytest.raises(UsageError, match="file exists"):
        outfile.write_output(path, b"again", force=False, replaces=named)
    path.unlink()
    content = _Source(b"ours", lambda: path.write_bytes(b"theirs"))
    with pytest.raises(UsageError, match="file exists"):
        outfile.write_output(path, content, force=False, replaces=named)
    assert path.read_bytes() == b"theirs"


def test_a_dangling_link_is_a_file_that_exists(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to(tmp_path / "target")
    with pytest.raises(UsageError, match="file exists"):
        outfile.write_output(tmp_path / "a", b"x", force=False)
    assert _names(tmp_path) == ["a"]


@pytest.mark.parametrize("target", ["target", os.devnull])
def test_force_replaces_a_link_not_its_target(tmp_path: Path, target: str) -> None:
    (tmp_path / "target").write_bytes(b"precious")
    (tmp_path / "a").symlink_to(target)
    outfile.write_output(tmp_path / "a", b"new", force=True)
    assert (tmp_path / "target").read_bytes() == b"precious"
    assert not (tmp_path / "a").is_symlink()
    assert (tmp_path / "a").read_bytes() == b"new"


def test_a_failure_leaves_nothing(tmp_path: Path) -> None:
    def interrupt() -> None:
        assert len(_names(tmp_path)) == 1
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        outfile.write_output(tmp_path / "a", _Source(b"half", interrupt), force=False)
    assert _names(tmp_path) == []


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_says_so_and_keeps_what_was_to_be_replaced(tmp_path: Path, code: int) -> None:
    def fill() -> None:
        raise OSError(code, os.strerror(code))

    (tmp_path / "a").write_bytes(b"old")
    with pytest.raises(AiflameError, match=r"cannot write .*/a: .*(space|quota)") as error:
        outfile.write_output(tmp_path / "a", _Source(b"half", fill), force=True)
    assert "free some space" in str(error.value.hint)
    assert (tmp_path / "a").read_bytes() == b"old"
    assert _names(tmp_path) == ["a"]


def test_a_temporary_file_that_is_swapped_is_not_what_gets_the_name(tmp_path: Path) -> None:
    # GIVEN a folder whose owner puts a link where the temporary file was
    folder = tmp_path / "folder"
    folder.mkdir()
    (tmp_path / "victim").write_bytes(b"precious")
    (tmp_path / "victim").chmod(0o600)

    def swap() -> None:
        (temporary,) = folder.glob(".*")
        temporary.rename(folder / "away")
        temporary.symlink_to(tmp_path / "victim")

    # THEN nothing happens to what the link leads to,
    outfile.write_output(folder / "a", _Source(b"ours", swap), force=False)
    # and the file that was written has its name.
    assert (folder / "a").read_bytes() == b"ours"
    (folder / "away").unlink()
    with pytest.raises(AiflameError, match="somebody replaced it"):
        outfile.write_output(folder / "b", _Source(b"ours", swap), force=True)
    assert (tmp_path / "victim").read_bytes() == b"precious"
    assert (tmp_path / "victim").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("name", ["a.svg", "x" * 255, "\u00e9" * 127])
def test_temporary_names_are_hidden_and_fit(tmp_path: Path, name: str) -> None:
    def look() -> None:
        (temporary,) = _names(tmp_path)
        assert temporary.startswith(".")
        assert len(os.fsencode(temporary)) <= 255

    outfile.write_output(tmp_path / name, _Source(b"x", look), force=False)
    assert _names(tmp_path) == [name]


@pytest.mark.parametrize("is_private", [False, True])
def test_the_umask_decides_who_may_read_unless_it_is_private(
    tmp_path: Path, is_private: bool
) -> None:
    previous = os.umask(0o027)
    try:
        outfile.write_output(tmp_path / "a", b"x", force=False, is_private=is_private)
    finally:
        os.umask(previous)
    assert (tmp_path / "a").stat().st_mode & 0o777 == (0o600 if is_private else 0o640)


def test_devices_that_were_named_are_written_into_and_stay_devices() -> None:
    for force in (False, True):
        outfile.refuse_existing(Path(os.devnull), force)
        outfile.write_output(Path(os.devnull), b"x", force)
        assert Path(os.devnull).is_char_device()


def test_devices_and_fifos_that_were_not_named_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a")
    for path in (Path(os.devnull), tmp_path / "a"):
        for force in (False, True):
            with pytest.raises(UsageError, match="not a file, and in the way"):
                outfile.refuse_existing(path, force, is_named=False)
            with pytest.raises(UsageError, match="not a file, and in the way"):
                outfile.write_output(path, b"x", force, is_named=False)
    assert _names(tmp_path) == ["a"]


def test_a_fifo_without_a_reader_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a")
    outfile.refuse_existing(tmp_path / "a", force=False)  # one may come until it is written
    with pytest.raises(AiflameError, match="nobody reads from this FIFO") as error:
        outfile.write_output(tmp_path / "a", b"x", force=False)
    assert error.value.hint == "start its reader first"


def test_a_fifo_with_a_reader_gets_all(tmp_path: Path) -> None:
    # GIVEN more than a pipe holds
    path, content = tmp_path / "a", os.urandom(1 << 20)
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    writer = threading.Thread(target=outfile.write_output, args=(path, content, False))
    writer.start()
    select.select([reader], [], [])  # before that there is no writer, which reads as the end
    os.set_blocking(reader, True)
    with os.fdopen(reader, "rb") as file:
        assert file.read() == content
    writer.join()
    assert path.is_fifo()


def test_a_descriptor_that_a_shell_handed_over_is_written_into() -> None:
    reader, writer = os.pipe()
    os.set_inheritable(writer, True)
    outfile.refuse_existing(Path(f"/dev/fd/{writer}"), force=False)
    outfile.write_output(Path(f"/dev/fd/{writer}"), b"data", force=False)
    assert os.read(reader, 10) == b"data"
    os.close(reader)
    os.close(writer)


@contextlib.contextmanager
def _handed_over(path: Path, flags: int) -> Iterator[Path]:
    """Yields a name of a descriptor that this process was given, of a file."""
    descriptor = os.open(path, flags)
    os.set_inheritable(descriptor, True)
    try:
        yield Path(f"/dev/fd/{descriptor}")
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("force", [False, True])
def test_a_file_that_a_shell_opened_is_written_on_and_never_replaced(
    tmp_path: Path, force: bool
) -> None:
    (tmp_path / "a").write_bytes(b"before ")
    inode = (tmp_path / "a").stat().st_ino
    with _handed_over(tmp_path / "a", os.O_WRONLY | os.O_APPEND) as path:
        outfile.refuse_existing(path, force)
        assert outfile.write_output(path, b"data", force, is_private=True) is None
    assert (tmp_path / "a").read_bytes() == b"before data"
    assert (tmp_path / "a").stat().st_ino == inode
    assert _names(tmp_path) == ["a"]


def test_standard_output_that_is_a_file_is_written_into() -> None:
    words = "from aiflame.agent.outfile import Path, write_output;"
    words += "write_output(Path('/dev/fd/1'), b'data', False)"
    with tempfile.TemporaryFile() as file:
        subprocess.run([sys.executable, "-c", words], stdout=file, check=True)
        file.seek(0)
        assert file.read() == b"data"


def test_names_of_descriptors() -> None:
    names = ("/dev/stdout", "/dev//stderr", "/dev/fd/63", "/proc/self/fd/0")
    assert [outfile.own_descriptor(Path(name)) for name in names] == [1, 2, 63, 0]
    for name in ("dev/stdout", "/dev/null", "/dev/fd/", "/dev/fd/-1", "/dev/fd/\u0663", "stdout"):
        assert outfile.own_descriptor(Path(name)) is None


def test_a_full_pipe_that_does_not_block_gets_all() -> None:
    # GIVEN a pipe that another process has set to O_NONBLOCK, and more than it holds
    content = os.urandom(1 << 20)
    reader, writer = os.pipe()
    os.set_inheritable(writer, True)
    os.set_blocking(writer, False)

    def write() -> None:
        outfile.write_output(Path(f"/dev/fd/{writer}"), content, force=False)
        os.close(writer)

    thread = threading.Thread(target=write)
    thread.start()
    with os.fdopen(reader, "rb") as file:
        assert file.read() == content
    thread.join()


@pytest.mark.parametrize("force", [False, True])
def test_descriptors_that_are_not_open_for_it_are_refused(tmp_path: Path, force: bool) -> None:
    (tmp_path / "a").write_bytes(b"precious")
    with (tmp_path / "a").open("r+b") as of_this_process:
        ours = Path(f"/proc/self/fd/{of_this_process.fileno()}")
        with _handed_over(tmp_path / "a", os.O_RDONLY) as read_only:
            for path in (ours, read_only, Path("/dev/fd/999999999")):
                with pytest.raises(UsageError, match="not open for writing"):
                    outfile.refuse_existing(path, force)
                with pytest.raises(UsageError, match="not open for writing"):
                    outfile.write_output(path, b"x", force)
    with pytest.raises(UsageError, match="not a file, and in the way"):  # nobody named it
        outfile.write_output(Path("/dev/fd/1"), b"x", force, is_named=False)
    assert (tmp_path / "a").read_bytes() == b"precious"


def test_folders_and_sockets_are_refused(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    for path in (Path("folder"), Path(), Path("/"), Path(".."), tmp_path):
        with pytest.raises(UsageError, match="is a folder"):
            outfile.write_output(path, b"x", force=True)
    with pytest.raises(UsageError, match="no such folder: missing"):
        outfile.write_output(Path("missing/a"), b"x", force=True)
    (tmp_path / "file").touch()
    with pytest.raises(AiflameError, match="not a directory"):
        outfile.write_output(Path("file/a"), b"x", force=True)


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
    """Stands in for os.fchown, so that the test needs not be root."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: int | None = None) -> None:
        self.calls: list[tuple[int, int]] = []
        self._error = error
        monkeypatch.setattr(os, "geteuid", lambda: 0)
        monkeypatch.setattr(os, "fchown", self)

    def __call__(self, descriptor: int, uid: int, gid: int) -> None:
        self.calls.append((uid, gid))
        if self._error is not None:
            raise OSError(self._error, os.strerror(self._error))


@pytest.fixture
def sudo_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUDO_UID", "1234")
    monkeypatch.setenv("SUDO_GID", "5678")


@pytest.mark.usefixtures("sudo_user")
def test_files_belong_to_the_user_who_calls_sudo(tmp_path: Path, monkeypatch) -> None:
    chown = _Chown(monkeypatch)
    outfile.write_output(tmp_path / "a", b"x", force=False)
    outfile.make_folder(tmp_path / "b")
    outfile.make_folder(tmp_path / "b")
    outfile.write_output(tmp_path / "c", b"x", force=False, owner=outfile.Owner(1, 2))
    assert chown.calls == [(1234, 5678), (1234, 5678), (1, 2)]


@pytest.mark.parametrize(("uid", "gid"), [("", ""), ("1000", ""), ("-1", "-1"), ("x", "1")])
def test_no_user_who_calls_sudo(tmp_path: Path, monkeypatch, uid: str, gid: str) -> None:
    chown = _Chown(monkeypatch)
    monkeypatch.setenv("SUDO_UID", uid)
    monkeypatch.setenv("SUDO_GID", gid)
    outfile.write_output(tmp_path / "a", b"x", force=False)
    assert chown.calls == []


@pytest.mark.usefixtures("sudo_user")
@pytest.mark.parametrize(("code", "is_kept"), [(errno.EPERM, True), (errno.EROFS, False)])
def test_file_systems_without_owners(tmp_path: Path, monkeypatch, code: int, is_kept: bool) -> None:
    _Chown(monkeypatch, code)
    if is_kept:
        outfile.write_output(tmp_path / "a", b"x", force=False)
    else:
        with pytest.raises(AiflameError, match="cannot write"):
            outfile.write_output(tmp_path / "a", b"x", force=False)
    assert _names(tmp_path) == (["a"] if is_kept else [])


@pytest.mark.parametrize("mode", [0o700, 0o755, 0o777])
def test_a_private_directory_is_one_that_only_we_write_to(tmp_path: Path, mode: int) -> None:
    directory = tmp_path / "a/b"
    assert outfile.private_directory(directory) == directory
    assert directory.stat().st_mode & 0o777 == 0o700
    directory.chmod(mode)
    assert outfile.private_directory(directory) == (None if mode & 0o022 else directory)
