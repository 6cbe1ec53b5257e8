# SPDX-License-Identifier: Apache-2.0
"""`python failing.py MODULE:NAME CALL WORD...`: aiflame, in which a call of a function fails.

From its CALLth call on (counting from 1), or at that call only where it is "=CALL", the function
raises AssertionError, which no part of aiflame expects.
"""

from __future__ import annotations

import importlib
import itertools
import sys
from typing import Any

from aiflame.agent import cli


def _break(where: str, when: str) -> None:
    module, _, name = where.partition(":")
    owner: Any = importlib.import_module(module)
    *path, attribute = name.split(".")
    for part in path:
        owner = getattr(owner, part)
    whole = getattr(owner, attribute)
    calls, first = itertools.count(1), int(when.lstrip("="))

    def broken(*arguments: Any, **keywords: Any) -> Any:
        call = next(calls)
        if call == first or (call > first and not when.startswith("=")):
            raise AssertionError(f"injected into {name}")
        return whole(*arguments, **keywords)

    setattr(owner, attribute, broken)


if __name__ == "__main__":
    _break(sys.argv[1], sys.argv[2])
    sys.exit(cli.main(sys.argv[3:]))
