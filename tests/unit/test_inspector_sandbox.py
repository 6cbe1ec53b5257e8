# SPDX-License-Identifier: Apache-2.0
"""What a parser can do that a file has taken over: nothing but compute and answer."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiflame.agent.inspector import sandbox
from aiflame.agent.inspector.parser import BadMessage, Channel, Parser, Parsers, contents

_libc = ctypes.CDLL(None, use_errno=True)
_SYS_PTRACE, _SYS_PROCESS_VM_READV, _SYS_BPF, _SYS_OPENAT2 = 101, 310, 321, 437
_SYS_IO_URING_SETUP, _SYS_CLONE3 = 425, 435


def _asked(work: Callable[[Channel], None]) -> dict[str, Any]:
    with Parser(work) as parser:
        message, found = parser.channel.receive()
        assert not found
        assert parser.end() == 0
    return message


def _call(number: int) -> Callable[[], None]:
    def call() -> None:
        if _libc.syscall(number, 0, 0, 0, 0, 0, 0) < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    return call


_FORBIDDEN: dict[str, Callable[[], object]] = {
    "open": lambda: os.open("/etc/passwd", os.O_RDONLY),
    "open beside": lambda: os.open("passwd", os.O_RDONLY, dir_fd=0),
    "openat2": _call(_SYS_OPENAT2),
    "list": lambda: os.listdir("/"),  # noqa: PTH208 - one call
    "read a link": lambda: os.readlink("/proc/self/exe"),  # noqa: PTH115 - one call
    "unlink": lambda: os.unlink("/tmp/none"),  # noqa: PTH108, S108 - one call
    "socket": lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM),
    "pair": socket.socketpair,
    "execute": lambda: os.execv("/bin/true", ["true"]),  # noqa: S606
    "fork": os.fork,
    "clone": _call(_SYS_CLONE3),
    "kill": lambda: os.kill(os.getppid(), 0),
    "trace": _call(_SYS_PTRACE),
    "read memory": _call(_SYS_PROCESS_VM_READV),
    "bpf": _call(_SYS_BPF),
    "io_uring": _call(_SYS_IO_URING_SETUP),
    "become root": lambda: os.setuid(0),
    "run what it wrote": lambda: mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_EXEC),
}


@pytest.mark.parametrize("what", _FORBIDDEN)
def test_a_parser_cannot(what: str) -> None:
    def attempt(channel: Channel) -> None:
        try:
            _FORBIDDEN[what]()
        except OSError as error:
            channel.send({"errno": error.errno})
        else:
            channel.send({"errno": 0})

    assert _asked(attempt) == {"errno": errno.EPERM}


def test_a_parser_has_no_rights() -> None:
    def tell(channel: Channel) -> None:
        channel.receive()

    with Parser(tell) as parser:
        # Its first system call after the filter is on: it waits for a message.
        path = Path(f"/proc/{parser.pid}/status")
        while "Seccomp:\t2" not in path.read_text():
            os.sched_yield()
        lines = path.read_text().splitlines()
        fds = len(os.listdir(f"/proc/{parser.pid}/fd"))  # noqa: PTH208 - counted
    status = {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
    assert status["NoNewPrivs"] == "1"
    assert status["CapPrm"] == status["CapEff"] == status["CapInh"] == "0" * 16
    assert fds == 4  # two that lead nowhere, standard error, the channel
    if os.geteuid() == 0:
        assert set(status["Uid"].split()) == set(status["Gid"].split()) == {str(sandbox.NOBODY)}
        assert (status["CapBnd"], status["CapAmb"], status["Groups"]) == ("0" * 16, "0" * 16, "")


def test_a_parser_reads_what_it_is_handed_and_writes_what_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 3_000_000)

    def double(channel: Channel) -> None:
        message, (given, result) = channel.receive()
        os.write(result, os.pread(given, 1 << 22, 0) + os.pread(given, 10, 0))
        channel.send({"again": message})

    given, result = os.open(path, os.O_RDONLY), os.memfd_create("result")
    with Parser(double) as parser:
        parser.channel.send({"n": 1}, [given, result])
        assert parser.channel.receive() == ({"again": {"n": 1}}, [])
        assert parser.end() == 0
    assert b"".join(contents(result, 1 << 22)) == b"x" * 3_000_010
    with pytest.raises(BadMessage):
        list(contents(result, 3_000_009))
    os.close(given)
    os.close(result)


def test_users_share_no_parser(tmp_path: Path) -> None:
    def wait(channel: Channel) -> None:
        channel.receive()

    parsers = Parsers(wait)
    one, other, shared = (tmp_path / name for name in ("one", "other", "shared"))
    for path in (one, other, shared):
        path.write_bytes(b"")
    shared.chmod(0o666)
    pids: dict[str, set[int]] = {}
    # GIVEN files of one owner, one that all can write to, and one of another mount
    for path in (one, other, shared, shared, Path("/proc/version"), one):
        fd = os.open(path, os.O_RDONLY)
        with parsers.of(fd) as parser:
            pids.setdefault(path.name, set()).add(parser.pid)
        os.close(fd)
    # THEN the first share a parser that stays, and the others have their own
    assert pids["one"] == pids["other"] and len(pids["one"]) == 1
    assert len(pids["shared"]) == 2
    assert len(set.union(*pids.values())) == 4
    parsers.close()
    assert [pid for pid in set.union(*pids.values()) if Path(f"/proc/{pid}").exists()] == []


def test_a_crash_is_the_parser_s_own(capfd: pytest.CaptureFixture[str]) -> None:
    def crash(channel: Channel) -> None:
        ctypes.string_at(0)

    def fail(channel: Channel) -> None:
        raise RuntimeError("bad bytes")

    for work, code in ((crash, -signal.SIGSEGV), (fail, 1)):
        with Parser(work) as parser:
            with pytest.raises(EOFError):
                parser.channel.receive()
            assert parser.end() == code
    assert "RuntimeError: bad bytes" in capfd.readouterr().err


@pytest.mark.parametrize("data", [b"[]", b"{", b"\xff", b'{"a":' * 10_000])
def test_what_is_no_message_is_refused(data: bytes) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        theirs.send(data)
        with pytest.raises(BadMessage):
            Channel(ours).receive()


def test_where_a_filter_is_refused_parsing_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    # GIVEN a kernel without seccomp, or a container that forbids it
    def refuse(instructions: bytes) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(sandbox, "_install", refuse)

    def enter_again(channel: Channel) -> None:
        channel.send({"failures": sandbox.enter([], os.getppid())})

    assert "seccomp: Invalid argument" in _asked(enter_again)["failures"]
