# SPDX-License-Identifier: Apache-2.0
"""What /proc says, also when a process chose its own names to be misread.

Files are literal text; nothing is asked of the machine but in the tests of this process itself.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from aiflame.agent import kernelfs
from aiflame.agent.processes import procfs
from aiflame.agent.processes.procfs import MapsLine

# Where str.splitlines() would end a line, and the kernel does not.
_NOT_LINE_ENDS = ["\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\x85", "\u2028", "\u2029", "\r"]


class _HereOpener:
    """Reads in this process what the opener's child reads."""

    def proc(self, pid: int, name: str, limit: int) -> bytes:
        return kernelfs.read_text(f"/proc/{pid}/{name}", limit).encode()


_HERE: Any = _HereOpener()


@pytest.fixture
def proc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """`proc(text)`: every file of /proc now holds this."""
    file = tmp_path / "text"
    read = kernelfs.read_text

    def holds(text: str) -> None:
        file.write_bytes(text.encode())
        monkeypatch.setattr(kernelfs, "read_text", lambda path, limit=65536: read(file, limit))

    return holds


def test_executable_mappings(proc: Callable[[str], None]) -> None:
    proc(
        "55d0c0000000-55d0c0001000 r--p 00000000 fe:01 131 /usr/bin/server\n"
        "55d0c0001000-55d0c0009000 r-xp 00001000 fe:01 131                        /usr/bin/server\n"
        "55d0c0009000-55d0c000a000 rw-p 00009000 fe:01 131                        /usr/bin/server\n"
        "7f0000000000-7f0000021000 rwxp 00000000 00:00 0 \n"
        "7f0000100000-7f0000200000 rwxs 00000000 00:01 2049  /memfd:jit (deleted)\n"
        "7ffd1b5f2000-7ffd1b5f4000 r-xp 00000000 00:00 0                          [vdso]\n"
        "ffffffffff600000-ffffffffff601000 --xp 00000000 00:00 0                  [vsyscall]\n"
    )
    assert procfs.executable_mappings(_HERE, 1) == [
        MapsLine(0x55D0C0001000, 0x55D0C0009000, 0x1000, "fe:01", 131, "/usr/bin/server"),
        MapsLine(0x7F0000000000, 0x7F0000021000, 0, "00:00", 0, ""),
        MapsLine(0x7F0000100000, 0x7F0000200000, 0, "00:01", 2049, "/memfd:jit (deleted)"),
        MapsLine(0x7FFD1B5F2000, 0x7FFD1B5F4000, 0, "00:00", 0, "[vdso]"),
        MapsLine(0xFFFFFFFFFF600000, 0xFFFFFFFFFF601000, 0, "00:00", 0, "[vsyscall]"),
    ]


@pytest.mark.parametrize(
    ("written", "path"),
    [
        ("/opt/a b/lib c.so", "/opt/a b/lib c.so"),
        ("/opt/trailing  ", "/opt/trailing  "),
        ("/opt/two\\012lines", "/opt/two\nlines"),
        ("/opt/lib.so (deleted)", "/opt/lib.so (deleted)"),
        ("/opt/lib.so (deleted) (deleted)", "/opt/lib.so (deleted) (deleted)"),
        ("//anon_hugepage (deleted)", "//anon_hugepage (deleted)"),
        ("/opt/" + "x" * 4090, "/opt/" + "x" * 4090),
        ("/opt/\u05d0\U0001f525.so", "/opt/\u05d0\U0001f525.so"),
        ("/opt/1-2 r-xp 0 0:0 1 /etc/shadow", "/opt/1-2 r-xp 0 0:0 1 /etc/shadow"),
        *(
            (f"/opt/a{c}1-2 r-xp 0 0:0 1 /b", f"/opt/a{c}1-2 r-xp 0 0:0 1 /b")
            for c in _NOT_LINE_ENDS
        ),
        *((f"/opt/a{c}x x x x x x", f"/opt/a{c}x x x x x x") for c in _NOT_LINE_ENDS),
    ],
)
def test_a_path_is_the_whole_rest_of_its_line(
    proc: Callable[[str], None], written: str, path: str
) -> None:
    proc(f"1000-2000 r-xp 00000000 fe:01 7  {written}\n3000-4000 r-xp 00000000 fe:01 8  /next\n")
    assert [line.path for line in procfs.executable_mappings(_HERE, 1)] == [path, "/next"]


def test_a_path_that_is_not_utf8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "maps"
    file.write_bytes(b"1000-2000 r-xp 00000000 fe:01 7  /opt/\xff\xfe.so\n")
    read = kernelfs.read_text
    monkeypatch.setattr(kernelfs, "read_text", lambda path, limit: read(file, limit))
    assert [line.path for line in procfs.executable_mappings(_HERE, 1)] == ["/opt/\ufffd\ufffd.so"]


@pytest.mark.parametrize(
    "cut",
    [
        "",
        "\n",
        "7f",
        "7f00-7f",
        "7f00-7f10 r-xp 000",
        "7f00-7f10 r-xp 00000000 fe:01",
        "what is this line doing here\n",
        "zz-zz r-xp 00000000 fe:01 7 /lib\n",
        "1000 r-xp 00000000 fe:01 7 /lib\n",
        "1000- r-xp 00000000 fe:01 7 /lib\n",
        "1000-2000 r-xp zz fe:01 7 /lib\n",
        "1000-2000 r-xp 00000000 fe:01 zz /lib\n",
        "\0\0\0\0 x x x x x\n",
    ],
)
def test_a_cut_or_foreign_line_costs_only_itself(proc: Callable[[str], None], cut: str) -> None:
    proc(f"1000-2000 r-xp 00000000 fe:01 7  /lib\n{cut}")
    assert [line.path for line in procfs.executable_mappings(_HERE, 1)] == ["/lib"]


def test_65_000_mappings(proc: Callable[[str], None]) -> None:
    proc(
        "".join(
            f"{0x7F0000000000 + 0x2000 * i:x}-{0x7F0000001000 + 0x2000 * i:x} r-xp 00000000 fe:01"
            f" {i + 1}                    /opt/lib/{i}.so\n"
            for i in range(65_000)
        )
    )
    begun = time.process_time()
    found = procfs.executable_mappings(_HERE, 1)
    assert time.process_time() - begun < 2  # 0.15 s where this was written
    assert len(found) == 65_000
    assert found[-1].path == "/opt/lib/64999.so"


def test_the_own_mappings_hold_the_own_code() -> None:
    address = ctypes.cast(ctypes.pythonapi.Py_GetVersion, ctypes.c_void_p).value or 0
    holders = [
        m for m in procfs.executable_mappings(_HERE, os.getpid()) if m.start <= address < m.end
    ]
    assert len(holders) == 1
    assert Path(holders[0].path).stat().st_ino == holders[0].inode


@pytest.fixture
def gone() -> Iterator[int]:
    """The id of a process that was there."""
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    yield pid


def test_a_process_that_is_gone(gone: int) -> None:
    assert procfs.executable_mappings(_HERE, gone) == []
    assert procfs.comm(gone) == procfs.comm(gone, gone) == ""
    assert (
        procfs.command_line(_HERE, gone)
        == procfs.executable(gone)
        == procfs.cgroups(gone).telling
        == ""
    )
    assert procfs.status_field(gone, "Tgid") == []
    assert procfs.status(gone) == procfs.Status(0, gone, -1)
    assert (procfs.parent_pid(gone), procfs.namespaced_pid(gone)) == (0, gone)
    assert procfs.thread_ids(gone) == []
    assert procfs.thread_stat(gone, gone) is None
    assert gone not in procfs.process_ids()


def test_this_process() -> None:
    pid = os.getpid()
    assert procfs.parent_pid(pid) == os.getppid()
    assert procfs.status(pid).owner_uid == os.getuid()
    assert procfs.status_field(pid, "Tgid") == [str(pid)]
    assert pid in procfs.process_ids()
    assert procfs.command_line(_HERE, pid).startswith(sys.orig_argv[0])
    assert Path(procfs.executable(pid)).samefile("/proc/self/exe")
    assert procfs.comm(pid) == Path("/proc/self/comm").read_text()[:-1]
    tid = threading.get_native_id()
    assert tid in procfs.thread_ids(pid)
    stat = procfs.thread_stat(pid, tid)
    assert stat is not None
    assert stat.state == "R"


_STATUS = (
    "Name:\t{name}\nUmask:\t0022\nState:\tS (sleeping)\nTgid:\t41\nNgid:\t0\nPid:\t41\nPPid:\t7\n"
    "TracerPid:\t0\nUid:\t1000\t1000\t1000\t1000\nNSpid:\t41\t12\t1\n"
    "voluntary_ctxt_switches:\t150\nnonvoluntary_ctxt_switches:\t5\n"
)


@pytest.mark.parametrize(
    "name",
    [
        "server",
        "",
        "Tgid:\\t9",
        *(f"a{c}{field}" for c in _NOT_LINE_ENDS for field in ("Tgid:\t9", "State:", "PPid:x")),
        "\x0cUid:\tx",
        "\x0cNSpid:\tx",
        "\x0cctxt_switches",
    ],
)
def test_status_says_what_the_kernel_wrote_whatever_the_name(
    proc: Callable[[str], None], name: str
) -> None:
    proc(_STATUS.format(name=name))
    assert procfs.status_field(41, "Tgid") == ["41"]
    assert procfs.status(41) == procfs.Status(7, 1, 1000)
    assert procfs.thread_stat(41, 41) == procfs.ThreadStat("S", 155)


@pytest.mark.parametrize(
    "text", ["", "Name:\tx\n", "State:", "State:\t", "Name:\tx\nState:\t\nPPid:\nUid:\nNSpid:\n"]
)
def test_a_status_that_ends_early(proc: Callable[[str], None], text: str) -> None:
    proc(text)
    assert procfs.thread_stat(1, 1) is None
    assert procfs.status(1) == procfs.Status(0, 1, -1)


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        ("", ""),
        ("python3\0train.py\0--lr\x000.1\0", "python3 train.py --lr 0.1"),
        ("nginx: worker process\0\0\0\0\0", "nginx: worker process"),
        ("a" * 10_000, "a" * 4096),
    ],
)
def test_command_lines(proc: Callable[[str], None], raw: str, shown: str) -> None:
    proc(raw)
    assert procfs.command_line(_HERE, 1) == shown


def test_an_executable_whose_name_is_not_utf8_can_be_stored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Path, "readlink", lambda path: Path(os.fsdecode(b"/opt/\xff/run")))
    assert procfs.executable(1).encode() == "/opt/\ufffd/run".encode()


def test_a_name_that_is_not_utf8(tmp_path: Path) -> None:
    (tmp_path / "comm").write_bytes(b"ab\xff\n")
    assert kernelfs.read_text(tmp_path / "comm") == "ab\ufffd\n"


def test_reading_stops_at_the_limit(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * 300_000)
    assert len(kernelfs.read_text(tmp_path / "file", 200_001)) == 200_001
    assert len(kernelfs.read_text("/dev/zero", 5)) == 5


@pytest.mark.parametrize("path", ["/nonexistent/file", "/proc/self", "/proc/self/mem"])
def test_what_cannot_be_read_is_empty(path: str) -> None:
    assert kernelfs.read_text(path) == ""


def test_descendants_are_those_of_others_only(monkeypatch: pytest.MonkeyPatch) -> None:
    # GIVEN a shell, 10, from which this process was started, as well as others
    own = os.getpid()
    parents = {1: 0, 10: 1, 11: 10, 12: 11, 13: 12, 14: 1, own: 10, own + 1: own, 15: 99}
    monkeypatch.setattr(procfs, "process_ids", lambda: [*parents])
    monkeypatch.setattr(procfs, "parent_pid", parents.__getitem__)
    assert procfs.descendants([10]) == [11, 12, 13]
    assert sorted(procfs.descendants([1])) == [10, 11, 12, 13, 14]
    assert procfs.descendants([10, 11, 12]) == [13]
    assert procfs.descendants([13, 14, 16]) == procfs.descendants([]) == []
    assert procfs.descendants([10], [12]) == [11]
    # A process id may be used again between two looks, so that two are each other's parents.
    parents.update({20: 21, 21: 20})
    assert procfs.descendants([20]) == [21]


def test_the_time_of_all_that_was_begun_counts_also_once_it_has_ended() -> None:
    # GIVEN a child whose own child computes for a fifth of a second, and waits
    burn = "import os, sys, time\nwhile time.process_time() < 0.2: pass\nprint(flush=True)\ninput()"
    script = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {burn!r}])"
    before_ns = procfs.helpers_cpu_ns()
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdout.readline()
        # THEN it counts while both live
        alive_ns = procfs.helpers_cpu_ns() - before_ns
        child.stdin.write(b"\n")
        child.stdin.close()
        child.wait()
    # AND when they have ended; the kernel counts in hundredths of a second.
    assert alive_ns > 180_000_000
    assert procfs.helpers_cpu_ns() - before_ns >= alive_ns - 20_000_000


def test_switches_of_the_host_are_counted() -> None:
    before = procfs.host_switches()
    for _ in range(100):
        time.sleep(0.0001)  # which switches to another thread, and back
    assert 200 <= procfs.host_switches() - before < 10_000_000


@pytest.mark.parametrize("text", ["", "cpu  1 2 3\nintr 5 1\n"])
def test_where_switches_are_not_told_they_are_unknown(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernelfs, "read_text", lambda *_: text)
    assert procfs.host_switches() == 0
