# SPDX-License-Identifier: Apache-2.0
"""Memory that goes back to the kernel, and what must not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from aiflame.agent import allocator
from aiflame.agent.allocator import PagesOfFiles, _clean_mappings

# Of a library with a breakpoint in its text, one whose relocated data are swapped out, and one that
# is as its file.
_SMAPS = b"""\
1000-2000 r-xp 00000000 fe:00 1 /lib/libbroken into.so
Rss: 4 kB
Anonymous: 4 kB
Swap: 0 kB
2000-3000 r--p 00000000 fe:00 2 /lib/librelocated.so
Anonymous: 0 kB
Swap: 4 kB
3000-4000 rw-p 00000000 fe:00 3 /lib/libclean.so
Anonymous: 0 kB
Swap: 0 kB
4000-5000 r-xp 00000000 fe:00 3 /lib/libclean.so (deleted)
Rss: 4 kB
Anonymous: 0 kB
Swap: 0 kB
VmFlags: rd ex mr mw me
5000-6000 r--p 00000000 00:00 0
Rss: 4 kB
Anonymous: 4 kB
Swap: 0 kB
6000-7000 r-xp 00000000 00:00 0 [vdso]
Anonymous: 0 kB
7000-8000 r--s 00000000 00:0e 4 anon_inode:bpf-map
Anonymous: 0 kB
8000-9000 r--s 00000000 00:06 5 /dev/some-device
Anonymous: 0 kB
"""

_GIVES_BACK = """
from pathlib import Path
import numpy
from aiflame.agent.allocator import PagesOfFiles

def of_files():
    fields = dict(x.split(":", 1) for x in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssFile"].split()[0])

pages = PagesOfFiles()
before = of_files()
import sqlite3  # since it was looked: it stays
there = of_files() - before
pages.give_back()
after = of_files() - there
numpy.linalg.inv(numpy.eye(100))  # all is still there
print(before, after)
"""


def test_a_mapping_is_given_back_if_it_was_there_the_time_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    texts = [_SMAPS, _SMAPS.replace(b"4000-5000", b"4000-6000"), _SMAPS, _SMAPS]
    given: list[int] = []
    monkeypatch.setattr(allocator.kernelfs, "lines", lambda _: texts.pop(0).splitlines())
    monkeypatch.setattr(allocator, "_madvise", lambda begin, *_: given.append(begin.value))
    pages = PagesOfFiles()
    pages.give_back()
    pages.give_back()
    assert given == []
    pages.give_back()
    assert given == [0x4000]


def test_only_what_the_file_has_as_well_is_given_back() -> None:
    assert _clean_mappings(_SMAPS.splitlines()) == [(0x4000, 0x5000)]


def test_pages_of_libraries_are_given_back(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", _GIVES_BACK], cwd=tmp_path, capture_output=True, check=True
    )
    before_kb, after_kb = map(int, run.stdout.split())
    assert after_kb < before_kb / 2
