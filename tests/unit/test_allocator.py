# SPDX-License-Identifier: Apache-2.0
"""Memory that goes back to the kernel, and what must not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from aiflame.agent.allocator import _clean_mappings

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
"""

_GIVES_BACK = """
from pathlib import Path
import numpy
from aiflame.agent.allocator import give_back_pages_of_files

def of_files():
    fields = dict(x.split(":", 1) for x in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssFile"].split()[0])

before = of_files()
give_back_pages_of_files()
after = of_files()
numpy.linalg.inv(numpy.eye(100))  # all is still there
print(before, after)
"""


def test_only_what_the_file_has_as_well_is_given_back() -> None:
    assert _clean_mappings(_SMAPS.splitlines()) == [(0x4000, 0x5000)]


def test_pages_of_libraries_are_given_back(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", _GIVES_BACK], cwd=tmp_path, capture_output=True, check=True
    )
    before_kb, after_kb = map(int, run.stdout.split())
    assert after_kb < before_kb / 2
