# SPDX-License-Identifier: Apache-2.0
"""An agent that knows the helper for NVIDIA of one test alone: `python prepared_agent.py LIBRARY
ARGUMENT...`.

It would turn on those of other tests otherwise, which expect to be the only ones.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

from aiflame.agent.commands import agent
from aiflame.agent.devices.choice import choose_families
from aiflame.gpu.nvidia.family import NvidiaFamily

# With which such a helper is built.
FLAG = '-DMEMORY_NAME=\\"aiflame-prepared\\"'


class PreparedFamily(NvidiaFamily):
    """See `aiflame.gpu.base.Family`."""

    memory = "/memfd:aiflame-prepared"

    def __init__(self, library: Path) -> None:
        assert NvidiaFamily.helper is not None
        self.helper = replace(NvidiaFamily.helper, path=library)


def _main(library: Path, words: list[str]) -> int:
    parser = argparse.ArgumentParser()
    agent.add_arguments(parser)
    parser.set_defaults(verbose=0, command_words="agent of a test")
    known = {NvidiaFamily.name: partial(PreparedFamily, library)}
    return agent.run(parser.parse_args(words), partial(choose_families, known=known))


if __name__ == "__main__":
    sys.exit(_main(Path(sys.argv[1]), sys.argv[2:]))
