# SPDX-License-Identifier: Apache-2.0
"""The symbol worker believes a parser of the files that it is for, and of no others."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from aiflame.agent.inspector.parser import Channel, Parser, group_of
from aiflame.agent.symbols.debugfiles import Candidate
from aiflame.agent.symbols.known import KnownTables, file_key, is_settled
from aiflame.agent.symbols.resolve import DirectAccess
from aiflame.agent.symbols.worker import _Files, _Remembered
from elfbytes import Elf, Symbol
from support import wait_until


def test_what_a_parser_says_of_a_file_of_others_is_not_kept(tmp_path: Path) -> None:
    # GIVEN a parser that lies of a binary, and of a file of others, its debug file as it says
    own, other = tmp_path / "own", tmp_path / "other"
    for path in (own, other):
        path.write_bytes(Elf(symbols=[Symbol("f", 0x1000, 16)]).build() + bytes(1 << 15))
    other.chmod(0o666)
    fds = [os.open(path, os.O_RDONLY) for path in (own, other)]
    wait_until(lambda: all(is_settled(os.fstat(fd), fd) for fd in fds))

    def lie(channel: Channel) -> None:
        while True:
            _, (fd,) = channel.receive()
            os.close(fd)
            channel.send({"outline": ["", "other", False, [[0, 1 << 15]]]})

    class Access(DirectAccess):
        def candidates(self, *_: str) -> Iterator[Candidate]:
            yield Candidate(str(other), True, os.dup(fds[1]))

    known, remembered = KnownTables(tmp_path / "known"), _Remembered()
    access = Access(tmp_path / "cache")
    # WHEN it is asked
    with (
        Parser(lie) as parser,
        _Files(access, parser, known, remembered, False, fds[0], "", "") as files,
    ):
        assert len(files.handed) == 2
    # THEN whoever has its files is told both again, and others nothing of the other
    own_key, other_key = (file_key(os.fstat(fd)) for fd in fds)
    assert remembered.outline(group_of(fds[0]), own_key) is not None
    assert remembered.digest(group_of(fds[0]), other_key)
    assert remembered.outline(other_key, other_key) is None
    assert not remembered.digest(other_key, other_key)
    assert [bool(known.name(fd)) for fd in fds] == [True, False]
    for fd in fds:
        os.close(fd)
