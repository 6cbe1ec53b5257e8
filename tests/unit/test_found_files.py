# SPDX-License-Identifier: Apache-2.0
"""Files of what was recorded, looked for later: the same ones, and nobody is waited for."""

from __future__ import annotations

import errno
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from aiflame.agent.elf.headers import HEADERS
from aiflame.agent.inspector.fork_server import ForkServer
from aiflame.agent.inspector.opener import OpenedFile, Opener
from aiflame.agent.symbolize.files import NO_FILE, FoundFiles
from aiflame.agent.symbols.file_facts import FileFacts
from aiflame.agent.target_files import FileGuard

_PATH = "/opt/of-a-container/program"


@pytest.fixture
def facts() -> Iterator[FileFacts]:
    with (
        closing(ForkServer()) as server,
        closing(FileFacts(server, FileGuard(), is_urgent=False)) as made,
    ):
        yield made


@pytest.fixture
def build_id(facts: FileFacts) -> str:
    fd = os.open(sys.executable, os.O_RDONLY)
    try:
        headers = facts.ask(sys.executable, fd, HEADERS)
    finally:
        os.close(fd)
    assert headers is not None
    return headers.build_id


def _container(root: Path) -> str:
    program = root / _PATH.lstrip("/")
    program.parent.mkdir(parents=True)
    shutil.copyfile(Path(sys.executable).resolve(), program)
    return str(root)


def test_what_one_container_has_no_more_another_may_have(
    tmp_path: Path, facts: FileFacts, build_id: str
) -> None:
    # GIVEN two containers of one image, of which one has ended
    roots = {2: [_container(tmp_path)]}
    with (
        closing(Opener()) as opener,
        closing(FoundFiles(facts, opener, lambda binary: roots.get(binary, []))) as files,
    ):
        assert files.open(1, _PATH, build_id) is NO_FILE
        found = files.open(2, _PATH, build_id)
        assert (found.fd is not None, found.root) == (True, str(tmp_path))
        # The other's frames are not named by it, and another build is none.
        assert files.open(1, _PATH, build_id) is NO_FILE
        assert files.open(4, _PATH, "00" * 20) is NO_FILE
        assert files.open(3, "/opt\0/bin", build_id) is NO_FILE


class _StuckOpener(Opener):
    """Cannot open what is in one root: whoever serves that does not answer."""

    def __init__(self, root: str) -> None:
        super().__init__()
        self._root = root

    def beneath(self, root: str, path: str, *, follows_last: bool = True) -> OpenedFile:
        if root == self._root:
            raise OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
        return super().beneath(root, path, follows_last=follows_last)


def test_one_that_does_not_open_is_looked_for_elsewhere(
    tmp_path: Path, facts: FileFacts, build_id: str
) -> None:
    roots = ["/stuck", _container(tmp_path)]
    with (
        closing(_StuckOpener("/stuck")) as opener,
        closing(FoundFiles(facts, opener, lambda _: roots)) as files,
    ):
        assert files.open(1, _PATH, build_id).root == str(tmp_path)


def test_one_whose_bytes_come_from_elsewhere_is_read_by_the_opener(
    tmp_path: Path, facts: FileFacts, build_id: str
) -> None:
    class Remote(Opener):
        asked = 0

        def beneath(self, root: str, path: str, *, follows_last: bool = True) -> OpenedFile:
            return super().beneath(root, path, follows_last=follows_last)._replace(is_local=False)

        def read(self, fd: int, size: int, offset: int, pid: int, words: str) -> bytes:
            self.asked += 1
            return super().read(fd, size, offset, pid, words)

    with closing(Remote()) as opener:
        with closing(FoundFiles(facts, opener, lambda _: [_container(tmp_path)])) as files:
            assert files.open(1, _PATH, build_id).fd is not None
            assert opener.asked > 0
            assert len(facts.guard.remote) == 1
        assert not facts.guard.remote
