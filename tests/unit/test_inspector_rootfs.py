# SPDX-License-Identifier: Apache-2.0
"""Opening files beneath a target's root: nothing leads out, nothing hangs."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiflame.agent.inspector import rootfs


@pytest.fixture(params=["openat2", "walk"])
def root(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[int, Path]]:
    """A root directory, for the kernel's own resolution and for the fallback."""
    if request.param == "walk":
        monkeypatch.setattr(rootfs, "_SYS_OPENAT2", None)
    directory = tmp_path / "root"
    (directory / "usr/lib").mkdir(parents=True)
    (tmp_path / "secret").write_text("outside")
    fd = rootfs.open_root(str(directory))
    yield fd, directory
    os.close(fd)


def read(root_fd: int, path: str) -> str:
    with os.fdopen(rootfs.open_beneath(root_fd, path)) as file:
        return file.read()


def test_reads_a_file_of_the_target(root: tuple[int, Path]) -> None:
    (root[1] / "usr/lib/libx.so").write_text("inside")
    assert read(root[0], "/usr/lib/libx.so") == "inside"


def test_missing_file_says_so(root: tuple[int, Path]) -> None:
    with pytest.raises(FileNotFoundError):
        rootfs.open_beneath(root[0], "/usr/lib/none.so")


@pytest.mark.parametrize("path", ["/../secret", "/usr/../../secret", "/usr/lib/../../../secret"])
def test_dots_do_not_leave_the_root(root: tuple[int, Path], path: str) -> None:
    with pytest.raises(OSError, match="secret"):
        rootfs.open_beneath(root[0], path)


@pytest.mark.parametrize("link", ["../../../secret", "/secret", "/proc/self/root/etc/passwd"])
def test_links_do_not_leave_the_root(root: tuple[int, Path], link: str) -> None:
    (root[1] / "usr/lib/evil.so").symlink_to(link)
    with pytest.raises(OSError, match=r"evil\.so"):
        rootfs.open_beneath(root[0], "/usr/lib/evil.so")


def test_absolute_link_is_followed_inside_the_root(tmp_path: Path) -> None:
    (tmp_path / "usr").mkdir()
    (tmp_path / "usr/real").write_text("inside")
    (tmp_path / "link").symlink_to("/usr/real")
    fd = rootfs.open_root(str(tmp_path))
    try:
        assert read(fd, "/link") == "inside"
    finally:
        os.close(fd)


def test_fifo_neither_hangs_nor_opens(root: tuple[int, Path]) -> None:
    os.mkfifo(root[1] / "fifo")
    with pytest.raises(OSError, match="not a regular file") as caught:
        rootfs.open_beneath(root[0], "/fifo")
    assert caught.value.errno == errno.EINVAL


def test_directory_is_refused(root: tuple[int, Path]) -> None:
    with pytest.raises(OSError, match="not a regular file"):
        rootfs.open_beneath(root[0], "/usr/lib")


def test_zero_byte_in_a_path_is_refused(root: tuple[int, Path]) -> None:
    with pytest.raises(OSError, match="zero byte"):
        rootfs.open_beneath(root[0], "/usr\0/lib")


def test_no_descriptor_is_left_open(root: tuple[int, Path]) -> None:
    (root[1] / "file").write_text("x")
    os.mkfifo(root[1] / "fifo")
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - its entries vanish while listed
    for path in ("/file", "/fifo", "/none", "/usr/none/none", "/../x"):
        with contextlib.suppress(OSError):
            os.close(rootfs.open_beneath(root[0], path))
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


def test_a_device_of_the_host_is_not_opened() -> None:
    with pytest.raises(OSError, match="not a regular file"):
        rootfs.open_regular("/dev/zero")
