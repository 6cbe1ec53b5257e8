# SPDX-License-Identifier: Apache-2.0
"""Writes Python programs in which every function has one caller, so that a leaf tells its stack.

What chains.py is for C: a tree of functions, each called in one line of one other function, in all
the ways in which Python or C code calls Python code. A program is a pure function of its seed, and
runs on CPython 3.8 and later. Each function has lines of its own, so that a frame's file and line
tell whose it is whatever its name, and each call has a line of its own.

Not here: running it (workloads/pychains.py).
"""

from __future__ import annotations

import enum
import random
from dataclasses import dataclass, field

# The kernel half keeps 127 frames, native ones of an interpreter among its callers.
_MAX_DEPTH = 24
_REACH_SHARE = 0.1
_ROUNDS = (3, 30)
# Of the functions, those that also compute in Python: many instructions, a place each.
_SPIN_SHARE = 0.3
PROGRAM_FILE = "<chains>"
# Names, files and lines, root first.
Chain = list[tuple[str, str, int]]
_HEAD = """\
import functools
from types import SimpleNamespace as Holder
def finish(coroutine):
    try: coroutine.send(None)
    except StopIteration as result: return result.value
"""
_FINISH = ("finish", PROGRAM_FILE, 4)


class Edge(enum.Enum):
    """How a function is called by its one caller: `F` its name."""

    PLAIN = "x = F(x)"
    KEYWORDS = "x = F(**{'x': x})"
    METHOD = "x = K_F().F(x)"
    CLASS_METHOD = "x = K_F.F(x)"
    INIT = "x = K_F(x).x"
    PROPERTY = "x = K_F(x=x).F"
    ADD = "x = K_F(x=x) + x"
    ITEM = "x = K_F(x=x)[x]"
    CALL = "x = K_F(x=x)(x)"
    FORMAT = "x = len(str(K_F(x=x)))"
    GENERATOR = "x = next(F(x))"
    LOOP = "x = [*F(x)][0]"
    FOR = "for x in F(x): pass"
    FROM = "x = yield from F(x)"
    COROUTINE = "x = finish(F(x))"
    LAMBDA = "x = F(x) "
    PARTIAL = "x = functools.partial(F, x)()"
    SORT = "x = sorted([x, x + 1], key=F)[0]"
    MAP = "x = [*map(F, [x])][0]"
    REDUCE = "x = functools.reduce(F, [x, 3])"
    EXEC = "exec(F, globals(), {'x': x})"


_METHODS = {
    Edge.METHOD: "F(self, x)",
    Edge.INIT: "__init__(self, x)",
    Edge.ADD: "__add__(self, x)",
    Edge.ITEM: "__getitem__(self, x)",
    Edge.CALL: "__call__(self, x)",
    Edge.FORMAT: "__str__(self)",
    Edge.PROPERTY: "F(self)",
    Edge.CLASS_METHOD: "F(cls, x)",
}
_NEEDS_X = (Edge.PROPERTY, Edge.ADD, Edge.ITEM, Edge.CALL, Edge.FORMAT)
_RETURNS = {
    Edge.INIT: "self.x = x",
    Edge.FORMAT: "return str(x)",
    Edge.GENERATOR: "yield x",
    Edge.LOOP: "yield x",
    Edge.FOR: "yield x",
    Edge.EXEC: "pass",
}
# Only they can say `yield from`.
_GENERATORS = (Edge.GENERATOR, Edge.LOOP, Edge.FOR, Edge.FROM)
_FROM_SHARE = 0.3


@dataclass(slots=True)
class Function:
    """One function.

    Attributes:
        name: As frames show it before 3.11.
        qualified: As frames show it from 3.11 on.
        file: As frames show it.
        lines: From its first to its last, in its file.
        call_line: The line of its caller that calls it, in the caller's file.
    """

    number: int
    caller: int | None
    edge: Edge
    depth: int
    name: str = ""
    qualified: str = ""
    file: str = PROGRAM_FILE
    lines: range = range(0)
    call_line: int = 0
    calls: list[int] = field(default_factory=list)

    @property
    def symbol(self) -> str:
        """What its caller knows it by."""
        return f"f_{self.number:04d}"


class Tree:
    """All functions, by number, and the program.

    Args:
        size: Functions.
        seed: Of what is chosen.

    Attributes:
        functions: By number.
        source: The program; its functions are called through f_0000(x).
    """

    def __init__(self, size: int, seed: int) -> None:
        choose = random.Random(seed)
        reach = round(size * _REACH_SHARE)
        self.functions = [Function(0, None, Edge.PLAIN, 0)]
        edges = [*Edge]
        for number in range(1, size):
            candidates = [one for one in self.functions[-reach:] if one.depth < _MAX_DEPTH]
            caller = choose.choice(candidates)
            # One after the other, so that none is missing.
            edge = edges[number % len(edges)]
            if caller.edge in _GENERATORS and choose.random() < _FROM_SHARE:
                edge = Edge.FROM
            elif edge is Edge.FROM:
                edge = Edge.GENERATOR
            if caller.edge is Edge.LAMBDA:
                edge = Edge.PLAIN
            self.functions.append(Function(number, caller.number, edge, caller.depth + 1))
            caller.calls.append(number)
        lines = _HEAD.splitlines()
        for one in self.functions:
            self._write(one, lines, choose)
        self.source = "\n".join(lines) + "\n"
        self._by_line = {(one.file, line): one for one in self.functions for line in one.lines}

    def chains(self, leaf: Function, line: int, has_qualified: bool) -> list[Chain]:
        """Returns the chains that a leaf can have: nearly always it is one."""
        above = self._callers(leaf, has_qualified)
        own = [(leaf.qualified if has_qualified else leaf.name, leaf.file, line)]
        if leaf.edge is not Edge.COROUTINE:
            return [above + own]
        # From 3.11 on its caller enters it first, which makes the coroutine.
        return [[*above, _FINISH, *own], *([above + own] if line == leaf.lines[0] else [])]

    def _callers(self, function: Function, has_qualified: bool) -> Chain:
        found: Chain = []
        while function.caller is not None:
            line = function.call_line
            function = self.functions[function.caller]
            found.append(
                (function.qualified if has_qualified else function.name, function.file, line)
            )
            if function.edge is Edge.COROUTINE:
                found.append(_FINISH)
        return found[::-1]

    def find(self, file: str, line: int) -> Function | None:
        """Returns the function that a line is of."""
        return self._by_line.get((file, line))

    def _write(self, one: Function, lines: list[str], choose: random.Random) -> None:
        rounds = choose.randint(*_ROUNDS)
        one.name = one.qualified = one.symbol
        calls = [self.functions[number] for number in one.calls]
        if one.edge is Edge.LAMBDA:
            self._write_lambda(one, calls, lines, rounds)
            return
        is_exec = one.edge is Edge.EXEC
        body = [f"x = sum(range(x % 7, {rounds * 5}))"]
        if one.edge is Edge.REDUCE:
            body.insert(0, "x += y")
        if one.edge in (Edge.PROPERTY, Edge.FORMAT):
            body.insert(0, "x = self.x")
        if one.edge is Edge.FROM:
            body.insert(0, "if x is None: yield")
        head = [] if is_exec else self._head(one)
        first = 1 if is_exec else len(lines) + 1
        at = first + len(head) + len(body)
        for callee in calls:
            body.append(callee.edge.value.replace("F", callee.symbol))
            callee.call_line = at
            at += 1
        if choose.random() < _SPIN_SHARE:
            body.append(f"for _ in range({rounds}): x = (x * 3 + 5) % 1000003")
        body.append(_RETURNS.get(one.edge, "return x"))
        if is_exec:
            one.name = one.qualified = "<module>"
            one.file = f"<{one.symbol}>"
            one.lines = range(1, len(body) + 1)
            text = "\n".join(body) + "\n"
            lines.append(f"{one.symbol} = compile({text!r}, {one.file!r}, 'exec')")
            return
        depth = "    " * (2 if one.edge in _METHODS else 1)
        lines += head + [depth + line for line in body]
        one.lines = range(first, len(lines) + 1)

    def _head(self, one: Function) -> list[str]:
        signature = _METHODS.get(one.edge)
        if signature is None:
            word = "async def" if one.edge is Edge.COROUTINE else "def"
            arguments = "x, y" if one.edge is Edge.REDUCE else "x"
            return [f"{word} {one.symbol}({arguments}):"]
        signature = signature.replace("F", one.symbol)
        one.name = signature.partition("(")[0]
        one.qualified = f"K_{one.symbol}.{one.name}"
        head = [f"class K_{one.symbol}:"]
        if one.edge in _NEEDS_X:
            # Its __init__ is in C: no frame that is not of the tree.
            head = [f"class K_{one.symbol}(Holder):"]
        if one.edge is Edge.PROPERTY:
            head.append("    @property")
        if one.edge is Edge.CLASS_METHOD:
            head.append("    @classmethod")
        return [*head, f"    def {signature}:"]

    def _write_lambda(
        self, one: Function, calls: list[Function], lines: list[str], rounds: int
    ) -> None:
        text = f"sum(range(x % 7, {rounds}))"
        for callee in calls:
            text = f"{callee.symbol}({text})"
            callee.call_line = len(lines) + 1
        lines.append(f"{one.symbol} = lambda x: {text}")
        one.name = one.qualified = "<lambda>"
        one.lines = range(len(lines), len(lines) + 1)
