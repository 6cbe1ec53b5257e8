# SPDX-License-Identifier: Apache-2.0
"""Run by each interpreter: prints its own line tables, and the line of each instruction.

One JSON object per code object of the standard library's larger modules: `table` in hex, `first`,
and `lines`, one per two bytes of code, null where the instruction has none. It has to run on
CPython 3.8.
"""

import dis
import json
import types
from pathlib import Path

NAMES = """argparse ast asyncio/base_events asyncio/tasks collections/__init__ configparser
contextlib csv dataclasses datetime difflib dis enum functools heapq inspect json/decoder
logging/__init__ pickle pdb random re sre_parse re/_parser statistics subprocess tarfile
threading tokenize traceback typing unittest/mock zipfile zipfile/__init__"""

ODD = """
def far():
    x = 1
%s
    return (x +
            y(
                3)
            )
def empty(): pass
def tries():
    try:
        with a as b, c as d:
            return [i for i in b if i]
    except (ValueError, TypeError) as e:
        raise KeyError from e
    finally:
        print(1)
async def co():
    async with a:
        async for b in c:
            yield b
class C:
    '''doc'''
    x: int = 1
lambda: (1 if a else
  2)
""" % ("\n" * 5000)


def codes(code):
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes(constant)


def lines_of(code):
    count = len(code.co_code) // 2
    if hasattr(code, "co_lines"):
        found = [None] * count
        for begin, end, line in code.co_lines():
            for index in range(begin // 2, end // 2):
                found[index] = line
        return found
    starts = dict(dis.findlinestarts(code))
    found, line = [], None
    for index in range(count):
        line = starts.get(2 * index, line)
        found.append(line)
    return found


def main():
    folder = Path(dis.__file__).parent
    paths = [folder / (name + ".py") for name in NAMES.split()]
    sources = [path.read_text("utf-8") for path in paths if path.exists()]
    for source in [ODD, *sources]:
        for code in codes(compile(source, "x", "exec")):
            table = code.co_linetable if hasattr(code, "co_linetable") else code.co_lnotab
            said = {
                "table": table.hex(),
                "first": code.co_firstlineno,
                "lines": lines_of(code),
            }
            print(json.dumps(said))


main()
