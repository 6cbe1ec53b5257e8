# SPDX-License-Identifier: Apache-2.0
"""perf-PID.map: what JITs write, and what a hostile container may put in its place."""

from __future__ import annotations

import os
import random
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from aiflame.agent.inspector import rootfs
from aiflame.agent.losses import LossKind
from aiflame.agent.symbols import perfmap
from aiflame.agent.symbols.perfmap import BadPerfMap, PerfMap, open_perf_map, perf_map_path
from aiflame.agent.symbols.service import SymbolService


def look(perf_map: PerfMap | None, *addresses: int) -> list[str | None]:
    assert perf_map is not None
    return perf_map.lookup(np.array(addresses, dtype=np.uint64))


def write(root: Path, text: bytes) -> Path:
    (root / "tmp").mkdir(exist_ok=True)
    path = root / "tmp/perf-7.map"
    path.write_bytes(text)
    return path


def load(root: str, pid: int, uid: int, **limits: int) -> PerfMap | None:
    fd = open_perf_map(root, perf_map_path(pid), uid)
    if fd is None:
        return None
    try:
        return PerfMap.read(fd, **limits)
    finally:
        os.close(fd)


def test_names_with_spaces_and_prefixes(tmp_path: Path) -> None:
    write(tmp_path, b"1000 10 py::main:/a b.py\n0x2000 0x20 LazyCompile:~f a.js:1\n")
    found = load(str(tmp_path), 7, os.getuid())
    assert look(found, 0xFFF, 0x1000, 0x100F, 0x1010, 0x201F, 2**64 - 1) == [
        None,
        "py::main:/a b.py",
        "py::main:/a b.py",
        None,
        "LazyCompile:~f a.js:1",
        None,
    ]


def test_later_lines_win(tmp_path: Path) -> None:
    found = PerfMap.parse(b"1000 100 old\n1040 20 new\n1000 100 newest\n10f0 20 tail\n")
    assert look(found, 0x1000, 0x1050, 0x10EF, 0x10F0, 0x110F) == [
        "newest",
        "newest",
        "newest",
        "tail",
        "tail",
    ]
    found = PerfMap.parse(b"1000 100 old\n1040 20 new\n")
    assert look(found, 0x1000, 0x1040, 0x105F, 0x1060) == ["old", "new", "new", "old"]


def test_random_maps_agree_with_reading_line_by_line() -> None:
    choose = random.Random(11)
    for _ in range(20):
        memory: dict[int, str] = {}
        lines = []
        for index in range(60):
            start, size = choose.randrange(300), choose.randrange(1, 50)
            lines.append(b"%x %x f%d\n" % (start, size, index))
            memory.update(dict.fromkeys(range(start, start + size), f"f{index}"))
        found = PerfMap.parse(b"".join(lines))
        assert look(found, *range(360)) == [memory.get(address) for address in range(360)]


def test_malformed_lines_are_counted_and_a_line_being_written_is_not() -> None:
    found = PerfMap.parse(
        b"1000 10 good\nnonsense\n\nzz 10 f\n1000 -5 f\n2000 10\nffffffffffffffff 10 f\n3000 10 ha"
    )
    assert (found.malformed_lines, len(found)) == (5, 1)


def test_control_characters_and_long_names() -> None:
    found = PerfMap.parse(b"1000 10 a\x1b[2J;<b>\xff\n2000 10 " + b"n" * 20_000 + b"\n")
    first, second = look(found, 0x1000, 0x2000)
    assert first == "a\ufffd[2J;<b>\ufffd"
    assert second is not None and len(second) == 4096


def test_of_too_many_lines_the_last_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(perfmap, "_MAX_LINES", 3)
    monkeypatch.setattr(perfmap, "_CHUNK_BYTES", 10)
    text = b"".join(b"%x 10 f%d\n" % (0x1000 * n, n) for n in range(1, 9)) + b"9000 10 half"
    found = PerfMap.parse(text)
    assert look(found, 0x5000, 0x6000, 0x8000, 0x9000) == [None, "f6", "f8", None]
    assert found.skipped_bytes == text.index(b"6000")


def test_a_million_functions_over_each_other_take_no_longer_than_others() -> None:
    text = b"".join(b"%x %x f%d\n" % (n, 3_000_000 - 2 * n, n) for n in range(1_000_000))
    addresses = np.arange(0, 1_000_000, 10, dtype=np.uint64)
    names = PerfMap.parse(text).lookup(addresses)
    assert names == [f"f{address}" for address in addresses.tolist()]


def test_no_map_is_no_error(tmp_path: Path) -> None:
    assert load(str(tmp_path), 7, 0) is None
    assert load(str(tmp_path / "gone"), 7, 0) is None


@pytest.mark.parametrize("target", ["/secret", "../secret", "../../secret", "missing"])
def test_a_link_is_refused_wherever_it_leads(tmp_path: Path, target: str) -> None:
    root = tmp_path / "root"
    (root / "tmp").mkdir(parents=True)
    (tmp_path / "secret").write_text("1000 10 secret\n")
    (root / "secret").write_text("1000 10 secret\n")
    (root / "tmp/perf-7.map").symlink_to(target)
    with pytest.raises(BadPerfMap, match="not a regular file"):
        load(str(root), 7, os.getuid())


def test_a_link_is_refused_without_openat2(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "tmp").mkdir()
    (tmp_path / "secret").write_text("1000 10 secret\n")
    (tmp_path / "tmp/perf-7.map").symlink_to("../secret")
    monkeypatch.setattr(rootfs, "_SYS_OPENAT2", None)
    with pytest.raises(BadPerfMap, match="symbolic links"):
        load(str(tmp_path), 7, os.getuid())


def test_a_second_name_of_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("1000 10 secret\n")
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp/perf-7.map").hardlink_to(tmp_path / "secret")
    with pytest.raises(BadPerfMap, match="2 names"):
        load(str(tmp_path), 7, os.getuid())


def test_fifo_is_refused_without_waiting(tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    os.mkfifo(tmp_path / "tmp/perf-7.map")
    with pytest.raises(BadPerfMap, match="not a regular file"):
        load(str(tmp_path), 7, os.getuid())


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to give a file away")
def test_map_of_another_user_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, b"1000 10 forged\n")
    os.chown(path, 1234, 1234)
    with pytest.raises(BadPerfMap, match="user 1234"):
        load(str(tmp_path), 7, 1000)
    assert look(load(str(tmp_path), 7, 1234), 0x1000) == ["forged"]


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to own a file")
def test_a_file_of_root_is_for_processes_of_root_only(tmp_path: Path) -> None:
    write(tmp_path, b"1000 10 roots\n")
    with pytest.raises(BadPerfMap, match="user 0"):
        load(str(tmp_path), 7, 1000)
    assert look(load(str(tmp_path), 7, 0), 0x1000) == ["roots"]


def test_end_of_an_oversized_file_is_read(tmp_path: Path) -> None:
    """GIVEN 10 GB, THEN the bounded end is read, and what was skipped is counted."""
    path = write(tmp_path, b"1000 10 head\n")
    size = 10 * 1024**3
    with path.open("r+b") as file:
        file.seek(size)
        file.write(b"\n2000 10 tail\n")
    began = time.thread_time()
    found = load(str(tmp_path), 7, os.getuid(), max_bytes=1024 * 1024)
    assert time.thread_time() - began < 2
    assert look(found, 0x1000, 0x2000) == [None, "tail"]
    assert found is not None and found.skipped_bytes == size + 14 - 1024 * 1024


def test_a_process_without_rights_reads_it(tmp_path: Path) -> None:
    addresses = np.array([0x1000, 0x5000], np.uint64)
    with SymbolService(None) as service:

        def names(root: Path | str, pid: int, uid: int) -> list[str | None]:
            return service.resolve_generated(str(root), pid, uid, addresses)

        write(tmp_path, b"1000 10 _Z3onev of a JIT\nnonsense\n")
        assert names(tmp_path, 7, os.getuid()) == ["_Z3onev of a JIT", None]
        assert [problem.reason for problem in service.problems] == [LossKind.PERF_MAP_CUT]
        # AND where there is none, or it may not be read, there are no names
        assert names(tmp_path, 8, os.getuid()) == [None, None]
        assert names("", 7, os.getuid()) == [None, None]
        assert names(tmp_path, 7, os.getuid() + 1) == [None, None]
        assert service.problems[-1].reason is LossKind.PERF_MAP_REFUSED


def test_a_map_that_kills_its_parser_costs_its_own_names(tmp_path: Path) -> None:
    # GIVEN one that takes too long, and another of the same name in another container
    script = tmp_path / "worker.py"
    script.write_text(_SLOW_WORKER)
    for name, text in (("slow", b"1000 10 endless\n"), ("sound", b"1000 10 sound\n")):
        (tmp_path / name).mkdir()
        write(tmp_path / name, text)
    addresses = np.array([0x1000], np.uint64)
    command = (sys.executable, str(script))
    with SymbolService(None, timeout_s=0.5, command=command) as service:
        found = [
            service.resolve_generated(str(tmp_path / name), 7, os.getuid(), addresses)
            for name in ("slow", "sound", "slow")
        ]
    assert found == [[None], ["sound"], [None]]
    assert LossKind.SYMBOLIZER_DIED in {problem.reason for problem in service.problems}


_SLOW_WORKER = """\
import sys
from aiflame.agent.symbols import worker
from aiflame.agent.symbols.perfmap import PerfMap
sound = PerfMap.lookup
def lookup(self, addresses):
    while b"endless" in self._text:
        pass
    return sound(self, addresses)
PerfMap.lookup = lookup
worker.main(sys.argv[1:])
"""
