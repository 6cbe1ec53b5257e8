# SPDX-License-Identifier: Apache-2.0
"""`python failing.py MODULE:NAME CALL WORD...`: aiflame, in which a call of a function fails.

From its CALLth call on (counting from 1), or at that call only where it is "=CALL", the function
raises AssertionError, which no part of aiflame expects. That holds in the recorder as well as in
the process that writes the capture: "=CALL" fails in the first that comes so far.
"""

from __future__ import annotations

import atexit
import importlib
import itertools
import runpy
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

_WRITER = "aiflame.agent.sinks.capture_worker"


def _break(where: str, when: str, mark: str) -> None:
    module, _, name = where.partition(":")
    owner: Any = importlib.import_module(module)
    *path, attribute = name.split(".")
    for part in path:
        owner = getattr(owner, part)
    whole = getattr(owner, attribute)
    calls, first = itertools.count(1), int(when.lstrip("="))

    def broken(*arguments: Any, **keywords: Any) -> Any:
        call = next(calls)
        is_once = when.startswith("=")
        if (call == first or (call > first and not is_once)) and Path(mark).exists():
            if is_once:
                Path(mark).unlink()
            raise AssertionError(f"injected into {name}")
        return whole(*arguments, **keywords)

    setattr(owner, attribute, broken)


def _main(where: str, when: str, *words: str) -> None:
    if words[0] == _WRITER:
        mark, *arguments = words[1:]
        sys.argv = [_WRITER, *arguments]
        _break(where, when, mark)
        runpy.run_module(_WRITER, run_name="__main__")
        return
    from aiflame.agent import cli
    from aiflame.agent.sinks import capture_process

    with tempfile.NamedTemporaryFile(delete=False) as mark_file:
        mark = mark_file.name
    atexit.register(partial(Path(mark).unlink, missing_ok=True))
    capture_process.COMMAND = (sys.executable, __file__, where, when, _WRITER, mark)
    _break(where, when, mark)
    sys.exit(cli.main(list(words)))


if __name__ == "__main__":
    _main(*sys.argv[1:])
