# SPDX-License-Identifier: Apache-2.0
"""Reads hostile input in numbers: what targets and others may hand to a recorder or a report.

    run.py elf COUNT FILE...   mutations of ELF files, a small one's more often; 0: the files
    run.py perfmaps COUNT      perf maps, and some as large as any that is read
    run.py segments COUNT      segments whose checksums fit, and captures made of them
    run.py captures COUNT      captures, read and rendered
    run.py bombs COUNT         small segments that unpack to windows as large as any
    run.py databases COUNT     databases of container engines

Says what was read, which exceptions were not foreseen, how much CPU time the slowest reader took,
and the peak of memory so far. Ends with 1 if an exception was not foreseen, or something took more
than 3 s or 500 MB. AIFLAME_SEED is for other cases.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

# Also when started as a program, the parts are `hostile.NAME`, as for the tests.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from hostile import databases, elf, perfmaps, recordings
from hostile.outcome import Outcome, peak_bytes

# What one case may take. Readers of files of targets are ended after MAX_CPU_S, which is 2 s, and a
# little: to read a sparse file for the first time, 1 GB of zeros, may take that long.
_MAX_CPU_S, _MAX_BYTES = 3.0, 500 << 20

_KINDS = {
    "perfmaps": perfmaps.read_all,
    "segments": recordings.read_segments,
    "captures": recordings.read_captures,
    "bombs": recordings.read_bombs,
    "databases": databases.read_databases,
}


def _outcomes(words: list[str], folder: Path) -> Iterator[Outcome]:
    kind, count, *files = words
    seed = int(os.environ.get("AIFLAME_SEED", "1"))
    if kind == "elf":
        return elf.read_files([Path(file) for file in files], int(count), folder, seed)
    return _KINDS[kind](int(count), folder, seed)


def main() -> int:
    """Runs one kind."""
    words = sys.argv[1:]
    if len(words) < 2 or words[0] not in (*_KINDS, "elf"):
        sys.exit(__doc__)
    is_good = True
    with TemporaryDirectory() as name:
        for outcome in _outcomes(words, Path(name)):
            print(json.dumps(outcome.facts()), flush=True)
            is_good &= not outcome.unforeseen and outcome.slowest_s <= _MAX_CPU_S
    return 0 if is_good and peak_bytes() <= _MAX_BYTES else 1


if __name__ == "__main__":
    sys.exit(main())
