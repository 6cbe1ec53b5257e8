# SPDX-License-Identifier: Apache-2.0
"""Writes C programs in which every function has one caller, so that a leaf tells its whole stack.

The functions form a tree, f_0000 at its root, and a second one that a signal handler walks
through. Their shapes are mixed so that compilers emit every kind of unwind rule: red zones, many
saved registers, large and variable frames, realigned stacks, cold parts, pushed arguments, early
returns, recursion, callbacks from the C library. A program is a pure function of its seed.

Not here: compiling it, and comparing stacks with it (`chain_truth`).
"""

from __future__ import annotations

import enum
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

# The kernel half keeps 127 frames: room for both trees, the C library's frames and main.
_MAX_DEPTH = 70
_MAX_SIGNAL_DEPTH = 25
_MAX_RECURSION = 4
# A child is called by one of the last so many functions, which makes a tree some 50 deep.
_REACH_SHARE = 0.03
# Of the functions, those in the signal handler's tree.
_SIGNAL_SHARE = 0.08
# Callbacks of callbacks are slow: each call of the C library's compares a few times.
_ROUNDS = (2, 25)

_HEAD = """\
/* Written by tests/chains.py. */
typedef unsigned long size_t;
extern volatile long here;
void qsort(void *, size_t, size_t, int (*)(const void *, const void *));
void *bsearch(const void *, const void *, size_t, size_t, int (*)(const void *, const void *));
int clock_gettime(int, long *);
void *memmove(void *, const void *, size_t);
int getppid(void);
#define SHAPE __attribute__((noipa, noinline))
#define KEEP(x) __asm__ volatile("" : "+r"(x))
#define ROOM(x) __asm__ volatile("" : : "r"(x) : "memory")
/* A macro: debug information would name a function, though it is inlined. */
#define spin(start, rounds) ({ \\
	long y = start; \\
	for (int i = 0; i < rounds; i++) { \\
		y = y * 6364136223846793005 + 1442695040888963407; \\
		KEEP(y); \\
	} \\
	y; })
"""


class Edge(enum.Enum):
    """How a function is called by its one caller, and with which arguments."""

    PLAIN = "long {0}(long x)"
    POINTER = "long {0}(long x) "  # through memory
    WIDE = "long {0}(long x, long p, long q, long r, long s, long t, long u, long v)"
    SORT = "int {0}(const void *left, const void *right)"  # by qsort
    SEARCH = "int {0}(const void *left, const void *right) "  # by bsearch

    @property
    def is_callback(self) -> bool:
        """Whether the C library stands between."""
        return self in (Edge.SORT, Edge.SEARCH)


class Shape(enum.Enum):
    """What a function does around its calls: `C` the calls, `N` rounds, `I` the function."""

    SMALL = "C x = spin(x, N); return x;"
    SAVES = """long a = spin(x, 2), b = a * 3, c = b ^ x, d = c + 7, e = d * 5, g = e ^ b;
	KEEP(a); KEEP(b); KEEP(c); KEEP(d); KEEP(e); KEEP(g);
	C KEEP(a); KEEP(b); KEEP(c); KEEP(d); KEEP(e); KEEP(g);
	return spin(x + a + b + c + d + e + g, N);"""
    BIG = "char room[700 * I % 19000 + 200]; ROOM(room); C ROOM(room); return spin(x, N);"
    ALLOCA = "char *room = __builtin_alloca(64 + (x & 255)); ROOM(room); C return spin(x, N);"
    VLA = "char room[1 + (x & 127)]; ROOM(room); x = spin(x, N); C ROOM(room); return x;"
    ALIGNED = "_Alignas(64) char room[64]; ROOM(room); x = spin(x, N); C ROOM(room); return x;"
    ALIGNED_ALLOCA = """_Alignas(32) char room[32]; char *more = __builtin_alloca(9 + (x & 63));
	ROOM(room); ROOM(more); x = spin(x, N); C ROOM(room); return x;"""
    COLD = """here += x;
	if ((x & 3) != 0) {
		long a = spin(x, 5); C x += a * 3; here = x; x = spin(x, N);
	}
	return spin(x, 9);"""
    EARLY = """if ((x & 7) == 0) { here = x; return spin(x, N); }
	long a = spin(x, 2), b = a * 3, c = b ^ x, d = c + 7, e = d * 5, g = e ^ b;
	C KEEP(a); KEEP(b); KEEP(c); KEEP(d); KEEP(e); KEEP(g);
	if ((a & 3) == 0) return x + a + b + c + d + e + g;
	x = spin(x, N); return x + g + e * c - d * b;"""
    RECURSIVE = """static int depth;
	if (++depth < D) { x += f_I(x); } else { C }
	depth--; return spin(x, N);"""
    SWITCH = """switch (x & 7) {
	case 0: x = spin(x, N); break; case 1: x *= here; break; case 2: x ^= here; break;
	case 3: here = 5; break; case 4: x = spin(x, 7); break; case 5: x = here * x + 9; break;
	case 6: x = -x; break; default: x = ~here;
	}
	C return spin(x, N);"""
    CLOCK = "long now[2]; clock_gettime(1, now); x += now[1]; C return spin(x, N);"
    COPY = "char a[600] = { x }; memmove(a + (x & 31), a, 500 + (x & 15)); C return a[9] + x;"
    SYSCALL = "x += getppid(); C return spin(x, N);"

    @property
    def calls_out(self) -> bool:
        """Whether it calls the C library, the vDSO or the kernel itself."""
        return self in (Shape.CLOCK, Shape.COPY, Shape.SYSCALL)


@dataclass(slots=True)
class Function:
    """One function. `caller` is None for the roots; `copies` are its frames when it has called."""

    number: int
    caller: int | None
    edge: Edge
    shape: Shape
    is_in_library: bool
    is_cold: bool = False  # to the compiler: so are the blocks that call it
    copies: int = 1
    depth: int = 0
    calls: list[int] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Its symbol."""
        return f"f_{self.number:04d}"


@dataclass(frozen=True, slots=True)
class Tree:
    """All functions by number; those from `first_signal` on are the signal handler's."""

    functions: list[Function]
    first_signal: int

    def calls_out(self, function: Function) -> bool:
        """Whether code that is not of the tree may stand above a function, as its callee."""
        below = (self.functions[number] for number in function.calls)
        return function.shape.calls_out or any(callee.edge.is_callback for callee in below)

    def calls(self, function: Function, callee: int) -> bool:
        """Whether a function calls another one, or itself."""
        recurses = callee == function.number and function.copies > 1
        return recurses or self.functions[callee].caller == function.number

    def write(self, folder: Path) -> tuple[Path, Path]:
        """Writes program.c and library.c; returns their paths."""
        paths = folder / "program.c", folder / "library.c"
        declared = "".join(f"{_signature(one)};\n" for one in self.functions)
        for path, is_library in zip(paths, (False, True), strict=True):
            bodies = (self._code(f) for f in self.functions if f.is_in_library == is_library)
            path.write_text(_HEAD + declared + "".join(bodies) + self._roots(is_library))
        return paths

    def _roots(self, is_library: bool) -> str:
        if is_library:
            return ""
        roots = ("f_main", self.functions[0]), ("f_signal", self.functions[self.first_signal])
        return "".join(
            f"SHAPE long {name}(long x)\n{{\n\treturn {root.name}(x) + 1;\n}}\n"
            for name, root in roots
        )

    def _code(self, function: Function) -> str:
        calls = [self.functions[number] for number in function.calls]
        pointers = "".join(
            f"static long (*volatile p_{one.number})(long) = {one.name};\n"
            for one in calls
            if one.edge is Edge.POINTER
        )
        rounds = _ROUNDS[0] + function.number * 7 % (_ROUNDS[1] - _ROUNDS[0])
        body = _substituted(
            function.shape.value,
            C=" ".join(map(_call, calls)),
            N=str(rounds),
            D=str(function.copies),
            I=str(function.number) if function.shape is Shape.BIG else f"{function.number:04d}",
        )
        opening = {
            Edge.WIDE: "x += p + q * r + s + t * u + v;",
            Edge.SORT: "long x = *(const long *)left + (right != left);",
            Edge.SEARCH: "long x = *(const long *)left + (right != left);",
        }.get(function.edge, "")
        return (
            f"{pointers}SHAPE {_signature(function)}\n{{\n"
            f"\t{opening}\n\there = {function.number};\n\t{body}\n}}\n"
        )


def _substituted(text: str, **words: str) -> str:
    """The text with single capital letters replaced where they are words or follow f_."""
    out, at = [], 0
    while at < len(text):
        letter = text[at]
        before, after = text[at - 1 : at], text[at + 1 : at + 2]
        alone = not (before.isalnum() or after.isalnum() or after == "_")
        alone = alone and (before != "_" or text[at - 2 : at] == "f_")
        out.append(words[letter] if alone and letter in words else letter)
        at += 1
    return "".join(out)


def _signature(function: Function) -> str:
    cold = "__attribute__((cold)) " if function.is_cold else ""
    return cold + function.edge.value.format(function.name).rstrip()


def _call(callee: Function) -> str:
    name = callee.name
    pair = "long pair[2] = { x, here }; "
    return {
        Edge.PLAIN: f"x += {name}(x);",
        Edge.POINTER: f"x += p_{callee.number}(x);",
        Edge.WIDE: f"x += {name}(x, 1, x, 2, here, x, 4, x);",
        # Two elements are compared once, and so is one.
        Edge.SORT: f"{{ {pair}qsort(pair, 2, sizeof(long), {name}); x += pair[0]; }}",
        Edge.SEARCH: f"{{ {pair}x += !bsearch(&x, pair, 1, sizeof(long), {name}); }}",
    }[callee.edge]


def make_tree(size: int, seed: int, shapes: Sequence[Shape] = tuple(Shape)) -> Tree:
    """Returns a tree of so many functions of these shapes, always the same for a seed."""
    choose = random.Random(seed)
    reach = round(size * _REACH_SHARE)
    first_signal = size - max(2, round(size * _SIGNAL_SHARE))
    functions: list[Function] = []
    for number in range(size):
        begin, limit = (
            (0, _MAX_DEPTH) if number < first_signal else (first_signal, _MAX_SIGNAL_DEPTH)
        )
        candidates = [one for one in functions[max(begin, number - reach) :] if one.depth < limit]
        functions.append(_function(choose, number, choose.choice(shapes), candidates))
    return Tree(functions, first_signal)


def _function(
    choose: random.Random, number: int, shape: Shape, candidates: list[Function]
) -> Function:
    if not candidates:  # a root
        return Function(number, None, Edge.PLAIN, Shape.SAVES, False)
    caller = choose.choice(candidates)
    edge = choose.choice([*[Edge.PLAIN] * 6, *Edge])
    # Arguments in memory are found through another register where the stack is realigned.
    if shape in (Shape.RECURSIVE, Shape.ALIGNED):
        edge = Edge.PLAIN
    made = Function(number, caller.number, edge, shape, choose.random() < 0.5)
    made.is_cold = caller.shape is Shape.COLD
    made.copies = choose.randint(2, _MAX_RECURSION) if shape is Shape.RECURSIVE else 1
    # qsort and bsearch add frames of their own.
    made.depth = caller.depth + made.copies + (4 if edge.is_callback else 0)
    caller.calls.append(number)
    return made
