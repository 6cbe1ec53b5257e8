# SPDX-License-Identifier: Apache-2.0
"""Builds unwind tables into the cache (`python -m aiflame.agent.unwind.worker CACHE`).

A process of its own: the recorder goes on draining meanwhile, and a hostile file costs only itself.
It reads a path a line and answers each with a line once the table is in the cache, or cannot be.
"""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

from aiflame.agent.elf.image import ElfImage
from aiflame.agent.symbols.store import Store
from aiflame.agent.target_files import BadTargetFile, TargetFile
from aiflame.agent.unwind.build import load_or_build
from aiflame.agent.unwind.records import BadUnwindInfo

# libtorch_cpu takes 1 s and 370 MB; a hostile file may end the worker, which is started again.
_MAX_MEMORY_BYTES = 4 << 30
# Low: the target comes first.
_NICENESS = 10


def main() -> None:
    """Serves until its standard input ends."""
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY_BYTES, _MAX_MEMORY_BYTES))
    os.nice(_NICENESS)
    store = Store(Path(sys.argv[1]))
    for line in sys.stdin:
        answer = "built"
        try:
            fd = os.open(line.rstrip("\n"), os.O_RDONLY | os.O_CLOEXEC)
            try:
                file = TargetFile(fd)
                load_or_build(file, ElfImage.read(file), store)
            finally:
                os.close(fd)
        except (BadTargetFile, BadUnwindInfo, OSError) as error:
            answer = f"failed: {error}".partition("\n")[0]
        sys.stdout.write(f"{answer}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
