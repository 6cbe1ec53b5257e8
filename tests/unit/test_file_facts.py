# SPDX-License-Identifier: Apache-2.0
"""Questions about files: parsers without rights answer them, and a bad file costs itself."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from aiflame.agent.elf.headers import HEADERS
from aiflame.agent.file_questions import BadAnswer, Question, flag, rows, text, whole
from aiflame.agent.inspector import file_parsers, fork_server
from aiflame.agent.inspector.fork_server import ForkServer
from aiflame.agent.inspector.parser import BadMessage
from aiflame.agent.inspector.sandbox import NOBODY
from aiflame.agent.symbols import file_facts
from aiflame.agent.symbols.file_facts import FileFacts
from aiflame.agent.target_files import FileGuard
from elfbytes import Elf
from hostile import answers
from support import wait_until

_TESTS = Path(__file__).resolve().parents[1]


def _question(read: Callable[..., Any], *arguments: Any, is_kept: bool = True) -> Question[Any]:
    return Question(read, lambda answer: answer, arguments, is_kept=is_kept)


class _Files:
    """Files of a test, which are old enough to be known, and what is asked about them."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder = folder
        self._stack = stack
        self.guard = FileGuard()
        self.facts = self.new_facts()

    def new_facts(self) -> FileFacts:
        """As another recording has them."""
        server = ForkServer()
        self._stack.callback(server.close)
        facts = FileFacts(server, self.guard, (), self._folder / "known")
        self._stack.callback(facts.close)
        return facts

    def make(self, name: str, data: bytes, mode: int = 0o644) -> int:
        """Makes a file; returns a descriptor of it."""
        path = self._folder / name
        path.write_bytes(data)
        path.chmod(mode)
        fd = os.open(path, os.O_RDONLY)
        self._stack.callback(os.close, fd)
        return fd


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[_Files]:
    monkeypatch.setenv("PYTHONPATH", str(_TESTS))
    monkeypatch.setattr(file_facts, "_MODULES", ("hostile.answers", "aiflame.agent.elf.headers"))
    # Files that were made just now are known, too.
    monkeypatch.setattr("aiflame.agent.symbols.known._SETTLED_NS", 0)
    monkeypatch.setattr(file_facts, "_MAX_COPIED_BYTES", 0)
    with ExitStack() as stack:
        yield _Files(tmp_path, stack)


def _starts(facts: FileFacts) -> int:
    """How often the process that forks parsers was started."""
    assert isinstance(facts.server, ForkServer)
    return facts.server.starts


def test_a_parser_has_no_rights(files: _Files) -> None:
    fd = files.make("file", b"x")
    assert files.facts.ask("/file", fd, _question(answers.reach)) == []
    pid = files.facts.ask("/file", fd, _question(answers.who))
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    status = {name: value.split() for name, _, value in (line.partition(":") for line in lines)}
    uid = str(NOBODY if os.geteuid() == 0 else os.geteuid())
    assert status["Uid"] == 4 * [uid]
    assert (status["NoNewPrivs"], status["Seccomp"]) == (["1"], ["2"])
    assert {int(status[kind][0], 16) for kind in ("CapEff", "CapPrm", "CapInh")} == {0}


def test_an_answer_is_known_until_the_machine_is_booted(files: _Files) -> None:
    # GIVEN a file that was asked about
    fd = files.make("file", b"first")
    question = _question(answers.first_byte)
    assert files.facts.ask("/file", fd, question) == "f"
    # WHEN another recording asks THEN it starts nobody
    facts = files.new_facts()
    assert facts.ask("/file", fd, question) == "f"
    assert (_starts(files.facts), _starts(facts)) == (1, 0)
    # AND where the file has changed, the answer does
    changed = files.make("file", b"second")
    assert facts.ask("/file", changed, question) == "s"
    assert _starts(facts) == 1


def test_what_several_recordings_ask_is_known(files: _Files) -> None:
    # GIVEN two that know nothing of a file, and each ask about it
    fd, other = files.make("file", b"first"), files.new_facts()
    numbers = [_question(answers.lie, number) for number in range(4)]
    for facts, number in ((files.facts, 0), (other, 1), (files.facts, 2), (other, 3)):
        facts.ask("/file", fd, numbers[number])
    # THEN the next one knows what both were answered
    facts = files.new_facts()
    assert [facts.ask("/file", fd, number) for number in numbers] == [0, 1, 2, 3]
    assert _starts(facts) == 0


def test_arguments_are_part_of_a_question(files: _Files) -> None:
    fd = files.make("file", b"x")
    assert [files.facts.ask("/file", fd, _question(answers.lie, n)) for n in (1, 2, 1)] == [1, 2, 1]


def test_a_question_that_is_not_kept_is_asked_again(files: _Files) -> None:
    fd = files.make("file", b"x")
    question = _question(answers.who, is_kept=False)
    first = files.facts.ask("/file", fd, question)
    facts = files.new_facts()
    assert facts.ask("/file", fd, question) != first
    assert _starts(facts) == 1


def test_standard_questions_are_answered_with_the_first(files: _Files) -> None:
    fd = files.make("file", Elf().build())
    facts = FileFacts(files.facts.server, files.guard, (HEADERS,), None)
    found = facts.ask("/file", fd, _question(answers.first_byte))
    facts.close()
    assert found == "\x7f"
    headers = facts.ask("/file", fd, HEADERS)
    assert headers is not None and headers.machine == "X86_64"
    assert _starts(facts) == 1


def test_files_of_one_owner_share_a_parser_and_those_of_several_do_not(files: _Files) -> None:
    names = ("one", "two", "shared")
    fds = [files.make(name, b"x", 0o666 if name == "shared" else 0o644) for name in names]
    question = _question(answers.who, is_kept=False)
    pids = [files.facts.ask(f"/{fd}", fd, question) for fd in (*fds, fds[-1])]
    assert pids[0] == pids[1]
    assert len(set(pids)) == 3


def test_a_small_file_of_several_is_known_by_its_bytes(
    files: _Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_facts, "_MAX_COPIED_BYTES", 4096)
    question = _question(answers.first_byte)
    assert files.facts.ask("/a", files.make("a", b"same", 0o666), question) == "s"
    facts = files.new_facts()
    assert facts.ask("/b", files.make("b", b"same", 0o666), question) == "s"
    assert _starts(facts) == 0


def test_a_file_that_ends_two_parsers_is_named_and_others_go_on(files: _Files) -> None:
    bad, good = files.make("bad", b"crash"), files.make("good", b"fine")
    question = _question(answers.crash)
    assert files.facts.ask("/good", good, question) == "sound"
    assert files.facts.ask("/bad", bad, question) is None
    assert files.guard.bad == {"/bad": "its parser ended"}
    other = files.make("other", b"fine")
    assert files.facts.ask("/other", other, question) == "sound"
    assert _starts(files.facts) == 1


@pytest.mark.parametrize(
    ("read", "why"),
    [
        (answers.spin, "takes longer to read than any real file"),
        (answers.sleep, "takes longer to read than any real file"),
        (answers.bloat, "MemoryError: "),
        (answers.refuse, "damaged"),
    ],
)
def test_a_file_costs_itself(
    read: Callable[..., Any], why: str, files: _Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_parsers, "_PATIENCE_S", 0.1)
    for module in ("target_files", "symbols.file_facts"):
        monkeypatch.setattr(f"aiflame.agent.{module}.MAX_CPU_S", 0.2)
    bad, good = files.make("bad", b"x"), files.make("good", b"y")
    assert files.facts.ask("/bad", bad, _question(read)) is None
    assert files.guard.bad == {"/bad": why}
    assert not files.facts.unanswered
    assert files.facts.ask("/good", good, _question(answers.first_byte)) == "y"


def test_that_others_left_a_file_no_time_says_nothing_of_it(
    files: _Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_parsers, "_PATIENCE_S", 0.1)
    files.guard.charge(os.getuid(), 30)
    fd = files.make("file", b"x")
    assert files.facts.ask("/file", fd, _question(answers.spin)) is None
    assert files.facts.unanswered == {fd}


def test_what_an_owner_has_spent_is_not_there_for_its_next_file(files: _Files) -> None:
    fd = files.make("bad", b"crash")
    before_s = files.guard.allowance_s(os.getuid())
    for _ in range(11):
        files.facts.ask("/bad", fd, _question(answers.crash))
    assert files.guard.allowance_s(os.getuid()) < before_s
    assert files.guard.allowance_s(os.getuid() + 1) == before_s


_LIES: list[Any] = [
    1,
    "x",
    [],
    {},
    ["", "X86_64", 64, 0, 1],
    ["", "X86_64", 64, -1, 1, [], ""],
    ["", "X86_64", 64, None, 1, [], ""],
    ["", "X86_64", 65, 0, 1, [], ""],
    ["zz", "X86_64", 64, 0, 1, [], ""],
    ["", "../X", 64, 0, 1, [], ""],
    ["", "X86_64", 64, 0, -1, [], ""],
    ["", "X86_64", 64, 0, 1.5, [], ""],
    ["", "X86_64", 64, 0, True, [], ""],
    ["", "X86_64", 64, 0, 1, [[0, 0, 1 << 64, True]], ""],
    ["", "X86_64", 64, 0, 1, [[0, 0, 1, 1]], ""],
    ["", "X86_64", 64, 0, 1, [[0, 0, 1, True]] * 1000, ""],
    ["", "X86_64", 64, 0, 1, [], "x" * 1000],
]


@pytest.mark.parametrize("answer", _LIES)
def test_headers_that_no_parser_finds_are_refused(answer: Any) -> None:
    assert HEADERS.checked(["", "X86_64", 64, 0, 1, [[0, 0, 1, True]], ""]) is not None
    with pytest.raises(BadAnswer):
        HEADERS.checked(answer)


def test_a_lie_is_not_kept(files: _Files) -> None:
    fd = files.make("file", b"x")
    question = Question(answers.lie, whole, ("no number",))
    for facts in (files.facts, files.new_facts()):
        assert facts.ask("/file", fd, question) is None
        assert _starts(facts) == 1
    assert files.guard.bad == {"/file": "no such number"}


def test_a_parser_that_lies_is_not_asked_again(files: _Files) -> None:
    fd = files.make("file", b"x")
    who = _question(answers.who, is_kept=False)
    first = files.facts.ask("/file", fd, who)
    assert files.facts.ask("/file", fd, who) == first
    assert files.facts.ask("/file", fd, Question(answers.lie, whole, ("no number",))) is None
    assert files.facts.ask("/file", fd, who) != first


def test_without_descriptors_a_file_is_not_read(
    files: _Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: int) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    fd = files.make("file", b"x")
    monkeypatch.setattr(file_parsers, "group_of", refuse)
    assert files.facts.ask("/file", fd, _question(answers.first_byte)) is None
    assert files.guard.bad == {"/file": "cannot read: Too many open files"}
    assert files.facts.unanswered == {fd}


def test_a_known_answer_of_another_version_is_asked_for_again(files: _Files) -> None:
    fd = files.make("file", b"x")
    assert files.facts.ask("/file", fd, _question(answers.first_byte)) == "x"
    number = Question(answers.first_byte, whole)
    facts = files.new_facts()
    assert facts.ask("/file", fd, number) is None
    assert _starts(facts) == 1


@pytest.mark.parametrize(
    "data",
    [b"", b"[", b"[" * 1_000_000, b"{}", b"[]", b"[1]", b"[{}]", b'[{"answer": 1}, 2]', None],
)
def test_what_is_no_answer_is_refused(data: bytes | None) -> None:
    fd = os.memfd_create("answers")
    try:
        if data is None:
            os.ftruncate(fd, 1 << 40)
        else:
            os.write(fd, data)
        with pytest.raises((BadMessage, KeyError, TypeError, ValueError)):
            file_parsers._answers(fd, 1)
    finally:
        os.close(fd)


class _Remote:
    """A file that is read for its parser."""

    identity = (1, 1)
    size_bytes = 1 << 30
    owner = 0
    is_stuck = False

    def read(self, size: int, offset: int) -> bytes:
        if offset:
            raise TimeoutError(110, "timed out")
        return b"r"


def test_a_file_that_may_hang_is_not_handed_over(files: _Files) -> None:
    fd = os.open("/", os.O_PATH)
    files.guard.remote[fd] = _Remote()
    try:
        assert files.facts.ask("/far", fd, _question(answers.first_byte)) == "r"
    finally:
        os.close(fd)
    assert files.guard.bad == {}


def test_parsers_that_nobody_asks_end(files: _Files, monkeypatch: pytest.MonkeyPatch) -> None:
    # GIVEN a process that forks parsers, which was killed
    fd = files.make("file", b"x")
    question = _question(answers.who, is_kept=False)
    first = files.facts.ask("/file", fd, question)
    server = files.facts.server
    assert isinstance(server, ForkServer)
    os.kill(server.pids[0], signal.SIGKILL)
    wait_until(lambda: not server.pids)
    # THEN it is started again
    second = files.facts.ask("/file", fd, question)
    assert first != second
    assert _starts(files.facts) == 2
    # AND all of them end with whoever asked
    files.facts.close()
    wait_until(lambda: not Path(f"/proc/{second}").exists())


def test_where_no_parser_can_be_had_a_file_is_not_read(
    files: _Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fork_server.sys, "executable", "/no/such/interpreter")
    fd = files.make("file", b"x")
    assert files.facts.ask("/file", fd, _question(answers.first_byte)) is None
    assert files.guard.bad == {"/file": "no parser could be started"}
    assert files.facts.unanswered == {fd}


@pytest.mark.parametrize("value", [None, -1, 8, 1.0, True, "1"])
def test_no_whole_number(value: Any) -> None:
    with pytest.raises(BadAnswer):
        whole(value, 8)


@pytest.mark.parametrize("check", [lambda v: text(v, 1), lambda v: rows(v, 1), flag])
@pytest.mark.parametrize("value", [None, 2, "xx", ["x", "x"], {}])
def test_no_answer_of_a_kind(check: Callable[[Any], Any], value: Any) -> None:
    with pytest.raises(BadAnswer):
        check(value)
