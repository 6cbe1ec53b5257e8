# SPDX-License-Identifier: Apache-2.0
"""Whether aiflame and py-spy see the same hot stacks in the same program.

They record in turn, and each more than once: how far a profiler agrees with itself is what its
agreement with another is to be held against.
"""

from __future__ import annotations

import subprocess
from collections import Counter
from collections.abc import Sequence
from itertools import groupby, takewhile
from pathlib import Path

from aiflame.agent.capture.reader import read_capture
from bench import hot_stacks, loads, tools
from bench.hot_stacks import Chain, Comparison, Key, Leaf, Seen, compare, share
from bench.loads import Load
from bench.table import Aim, Table, code
from bench.tools import Running

_RATE_HZ = 499
_SECONDS, _ROUNDS = 5, 2
# Until the unwind tables of a library that was built a moment ago are there.
_WARM_UP_S = 2
_BUILD_TIMEOUT_S = 60.0

_OURS, _THEIRS, _NATIVE = "aiflame", "py-spy", "py-spy --native"

_INTRO = f"""\
`mixed.py` recorded at {_RATE_HZ} Hz in turn by each tool, {_ROUNDS} times for {_SECONDS} s, on one
CPU: a stack is hot if its share of samples is above {100 * hot_stacks.HOT:.0f} %. Overlap is the
sum of the smaller of the two shares of every stack, 100 % if they are the same; what a tool reaches
with itself is what chance leaves of that. In brackets: stacks whose shares also differ by more than
three standard deviations, as independent samples have. A native function is compared together with
the Python function that called it."""

_STACKS_INTRO = """\
Shares of samples in %, of all stacks that are hot for one of the tools, with their lines; what they
have in common at the root is left out."""

_LEAVES_INTRO = """\
Shares of samples in %, of native functions on top of the stack, outside of the interpreter, that
are hot for one of the tools. Without a name: a library has no symbol there, or the tool did not
find it; py-spy then prints an address, aiflame a module and an offset."""


def _build(folder: Path) -> Path:
    library = folder / "libmixed.so"
    command = ["gcc", "-O2", "-fPIC", "-shared", "-o", str(library), str(tools.HERE / "mixed.c")]
    subprocess.run(command, check=True, timeout=_BUILD_TIMEOUT_S)
    return library


def _by_aiflame(pid: int, folder: Path) -> Seen:
    tool = tools.aiflame("-p", pid, "-F", _RATE_HZ, "-d", _SECONDS)
    with Running(tool, folder) as running:
        running.wait()
    return hot_stacks.of_capture(read_capture(folder / "bench.aiflame"))


def _by_py_spy(pid: int, folder: Path, *more: str) -> Seen:
    words = ("-r", _RATE_HZ, "-d", _SECONDS, "-f", "raw", "--full-filenames", "-o", "bench.raw")
    with Running(tools.py_spy(pid, *words, *more), folder) as running:
        running.wait()
    return hot_stacks.of_py_spy((folder / "bench.raw").read_text())


def _record(folder: Path) -> dict[str, list[Seen]]:
    command = loads.pinned(loads.PYTHON, tools.HERE / "mixed.py", _build(folder))
    found: dict[str, list[Seen]] = {_OURS: [], _THEIRS: [], _NATIVE: []}
    with Load(command) as load:
        load.go()
        with Running(tools.aiflame("-p", load.pid, "-d", _WARM_UP_S), folder) as running:
            running.wait()
        for _ in range(_ROUNDS):
            found[_OURS].append(_by_aiflame(load.pid, folder))
            found[_THEIRS].append(_by_py_spy(load.pid, folder))
            found[_NATIVE].append(_by_py_spy(load.pid, folder, "--native"))
    return found


def _row(what: str, who: str, found: Comparison) -> tuple[str, ...]:
    beyond = found.beyond_chance

    def only(keys: set[Key]) -> str:
        return f"{len(keys)} ({len(keys & beyond)})"

    return (
        what,
        who,
        f"{len(found.both)}",
        only(found.only_first),
        only(found.only_second),
        f"{100 * found.overlap:.1f}",
    )


def _comparisons(found: dict[str, list[Seen]], whole: dict[str, Seen]) -> Table:
    ours, theirs, native = whole[_OURS], whole[_THEIRS], whole[_NATIVE]
    rows: list[tuple[str, ...]] = []
    aims: list[Aim] = []
    for name, both in found.items():
        first, second = both[0], both[-1]
        rows.append(_row("stacks by line", f"{name}, twice", compare(first.chains, second.chains)))
    for name, other in ((_THEIRS, theirs), (_NATIVE, native)):
        who = f"{_OURS}, {name}"
        by_function = compare(*map(hot_stacks.by_function, (ours.chains, other.chains)))
        rows.append(_row("stacks by function", who, by_function))
        by_line = compare(ours.chains, other.chains)
        rows.append(_row("stacks by line", who, by_line))
        words = f"hot Python stacks on which {name} differs"
        aims.append(Aim(words, len(by_line.beyond_chance), 1, "stacks"))
    who = f"{_OURS}, {_NATIVE}"
    by_binary = compare(*map(hot_stacks.by_binary, (ours.leaves, native.leaves)))
    rows.append(_row("native functions by binary", who, by_binary))
    rows.append(_row("native functions by name", who, compare(ours.leaves, native.leaves)))
    columns = ("compared", "tools", "hot in both", "only in first", "only in second", "overlap, %")
    return Table("Agreement with py-spy", _INTRO, columns, rows, aims)


def _shares(counts: Sequence[Counter[Key]], key: Key) -> list[str]:
    return [f"{100 * share(one, key):.1f}" for one in counts]


def _words(chain: Chain) -> str:
    frames = [(code(frame), len(list(same))) for frame, same in groupby(chain)]
    return " ".join(f"{frame} x{count}" if count > 1 else frame for frame, count in frames)


def _stacks(whole: dict[str, Seen]) -> Table:
    counts = [seen.chains for seen in whole.values()]
    chosen: list[Chain] = sorted(set().union(*map(hot_stacks.hot, counts)))
    shared = len(list(takewhile(lambda frames: len(set(frames)) == 1, zip(*chosen, strict=False))))
    rows = [(_words(chain[shared:]), *_shares(counts, chain)) for chain in chosen]
    return Table("The hot stacks", _STACKS_INTRO, ("stack", *whole), rows)


def _leaves(whole: dict[str, Seen]) -> Table:
    counts = [whole[name].leaves for name in (_OURS, _NATIVE)]
    hottest = set().union(*map(hot_stacks.hot, counts))
    chosen: list[Leaf] = sorted(leaf for leaf in hottest if leaf.binary)
    rows = [
        (
            code(leaf.function),
            code(leaf.name) if leaf.name else "without a name",
            code(leaf.binary),
            *_shares(counts, leaf),
        )
        for leaf in chosen
    ]
    columns = ("called by", "native function", "binary", _OURS, _NATIVE)
    return Table("Native functions", _LEAVES_INTRO, columns, rows)


def measure(busy: Path, folder: Path) -> list[Table]:
    """Records with both and compares."""
    del busy
    found = _record(folder)
    whole = {name: sum(seen, Seen()) for name, seen in found.items()}
    return [_comparisons(found, whole), _stacks(whole), _leaves(whole)]
