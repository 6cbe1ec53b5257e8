# SPDX-License-Identifier: Apache-2.0
"""What windows are told of Python frames, by a reader of code objects that is stood in for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import cast

from aiflame.agent.dumps.naming import DumpWindow
from aiflame.agent.kernel import abi
from aiflame.agent.losses import LossKind
from aiflame.agent.model.window import Window, check, rows_of
from aiflame.agent.processes.python_facts import ProcessCode, PythonFacts
from aiflame.agent.python.codes import UNREADABLE_FRAME, Code, CodeReader
from aiflame.agent.python.memory import NoMemoryAccess
from aiflame.agent.python.walk import PythonFrame

_PROCESS = 3


class _Reader:
    """The code objects of a process that can be replaced, and read while it lives."""

    def __init__(self, codes: dict[int, Code]) -> None:
        self.codes = codes
        self.has_ended = False
        self.reads: list[list[int]] = []

    def read_many(self, addresses: Sequence[int]) -> list[Code | None]:
        self.reads.append(sorted(addresses))
        if self.has_ended:
            raise NoMemoryAccess("gone")
        return [self.codes.get(address) for address in addresses]

    def line(self, code: Code, position: int) -> int:
        return code.first_line + position


class _Told:
    """Facts, and the window that they make."""

    def __init__(self, *readers: _Reader) -> None:
        self._window = DumpWindow()
        row = (_PROCESS, 7, 1, 7, 0, 0, -1, 0xFFFF_FFFF, 0, 0, 0)
        self._window.define("processes", rows_of("processes", row))
        self.losses: Counter[LossKind] = Counter()
        self._facts = PythonFacts(self._window, self.losses)
        self._code = ProcessCode(_PROCESS, tuple(cast(CodeReader, reader) for reader in readers))
        self._chains = 0

    def tell(self, *frames: tuple[int, int]) -> None:
        """One round, of one stack of (address, position)."""
        self._facts.begin_round()
        found = [PythonFrame(address, position, True) for address, position in frames]
        self._chains += 1
        named = self._facts.name(self._code, found)
        self._facts.tell_chain(self._chains, _PROCESS, named, abi.PythonEnd.COMPLETE)
        self._facts.flush()

    def window(self) -> Window:
        window = self._window.window()
        check(window)
        return window

    def stacks(self) -> list[list[str]]:
        """Of each stack what its frames are called, as those who read the window find it."""
        window = self.window()
        names = {int(row["code"]): row for row in window.code_objects}  # the last one counts
        lines = {(code, at): line for _, code, at, line in window.code_lines.tolist()}
        return [
            [
                f"{window.texts[names[code]['name']]}"
                f" ({window.texts[names[code]['file']]}:{lines[code, position]})"
                for code, position, _ in window.chain_frames[first : first + depth].tolist()
            ]
            for first, depth in window.chains[["first", "depth"]].tolist()
        ]

    def names(self) -> dict[int, str]:
        window = self.window()
        return {int(row["code"]): window.texts[row["name"]] for row in window.code_objects}


def _code(name: str, file: str = "/app/a.py") -> Code:
    return Code(name, f"Class.{name}", file, 10, b"")


def test_frames_are_named_with_their_lines_and_read_together() -> None:
    reader = _Reader({0x10: _code("f"), 0x20: _code("g")})
    told = _Told(reader)
    told.tell((0x10, 1), (0x20, 2), (0x10, 5), (0, 0))
    told.tell((0x20, 3))
    assert reader.reads == [[0x10, 0x20], [0x20]]
    window = told.window()
    assert told.names() == {0x10: "Class.f", 0x20: "Class.g"}
    lines = window.code_lines[["code", "position", "line"]].tolist()
    assert lines == [(0x10, 1, 11), (0x20, 2, 12), (0x10, 5, 15), (0x20, 3, 13)]
    # Each stack has its own frames.
    firsts = window.chains[["first", "depth"]].tolist()
    assert firsts == [(0, 4), (4, 1)]
    assert window.chain_frames["code"].tolist() == [0x10, 0x20, 0x10, 0, 0x20]


def test_an_address_that_another_function_has_by_now_is_read_again() -> None:
    reader = _Reader({0x10: _code("f")})
    told = _Told(reader)
    told.tell((0x10, 1))
    reader.codes[0x10] = _code("other", "/app/b.py")
    told.tell((0x10, 1))
    told.tell((0x10, 2))
    assert told.stacks() == [
        ["Class.f (/app/a.py:11)"],
        ["Class.other (/app/b.py:11)"],
        ["Class.other (/app/b.py:12)"],
    ]


def test_what_was_read_at_an_address_stays_when_nothing_can_be_read_there_any_more() -> None:
    reader = _Reader({0x10: _code("f"), 0x20: _code("g")})
    told = _Told(reader)
    told.tell((0x10, 1))
    del reader.codes[0x10]  # a module's code is freed after its import
    told.tell((0x10, 1))
    told.tell((0x20, 1))
    reader.has_ended = True
    told.tell((0x20, 1))
    named, unreadable, other, gone = told.stacks()
    assert (named, other) == (["Class.f (/app/a.py:11)"], ["Class.g (/app/a.py:11)"])
    assert unreadable[0].startswith(UNREADABLE_FRAME.name)
    assert "exited" in gone[0]


def test_what_the_interpreter_runs_after_an_init_is_no_frame() -> None:
    told = _Told(_Reader({0x10: _code("__init__", "__init__"), 0x20: _code("__init__")}))
    told.tell((0x10, 1), (0x20, 1))
    assert told.names() == {0x10: "", 0x20: "Class.__init__"}


def test_names_that_cannot_be_read_are_said_to_be_so() -> None:
    reader = _Reader({})
    told = _Told(reader)
    told.tell((0x10, 1))
    assert told.names() == {0x10: UNREADABLE_FRAME.name}
    assert told.losses == {LossKind.PYTHON_CODE_GONE: 1}
    reader.has_ended = True
    told.tell((0x20, 1))
    assert "exited" in told.names()[0x20]
    assert told.losses[LossKind.PYTHON_EXITED] == 1


def test_a_forked_child_that_is_gone_has_the_names_of_its_parent() -> None:
    child, parent = _Reader({0x10: _code("f")}), _Reader({0x10: _code("f"), 0x20: _code("g")})
    told = _Told(child, parent)
    told.tell((0x10, 1))
    assert not parent.reads
    child.has_ended = True
    told.tell((0x20, 1))
    assert told.names() == {0x10: "Class.f", 0x20: "Class.g"}
    assert not +told.losses
    parent.has_ended = True
    told.tell((0x30, 1))
    assert told.losses[LossKind.PYTHON_EXITED] == 1


def test_a_child_of_a_forked_child_has_the_names_of_whoever_is_left() -> None:
    gone, left = _Reader({}), _Reader({0x10: _code("f")})
    child = _Reader({})
    told = _Told(child, gone, left)
    child.has_ended = gone.has_ended = True
    told.tell((0x10, 3))
    assert told.stacks() == [["Class.f (/app/a.py:13)"]]
    assert not +told.losses
