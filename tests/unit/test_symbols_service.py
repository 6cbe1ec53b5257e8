# SPDX-License-Identifier: Apache-2.0
"""The symbol worker may crash, stall or bloat: one binary pays, the others keep their names."""

from __future__ import annotations

import errno
import os
import re
import resource
import signal
import subprocess
import sys
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
from aiflame.agent.fleet.config import AgentSettings
from aiflame.agent.inspector.fork_server import ForkServer
from aiflame.agent.losses import LossKind
from aiflame.agent.symbols import protocol
from aiflame.agent.symbols import service as service_module
from aiflame.agent.symbols.frames import Resolved
from aiflame.agent.symbols.known import is_settled
from aiflame.agent.symbols.service import Request, SymbolService
from breadth import cases
from elfbytes import Elf, Symbol
from recordings import children_of
from support import wait_until

# A worker whose resolver misbehaves by the name of the file; "plain" files do so only in the
# first attempt, with DWARF and demangling.
BAD_WORKER = """\
import ctypes, os, select, sys
from aiflame.agent.symbols import worker
from aiflame.agent.symbols.resolve import Resolver
sound = Resolver._load
def load(self, path, root, plain):
    name = os.path.basename(self._access.path_inside(path) or path)
    if "first" in name and plain:
        return sound(self, path, root, plain)
    if "crash" in name:
        ctypes.string_at(0)
    if "exit" in name:
        sys.exit("the reason")
    if "hang" in name:
        while True:
            pass
    if "stop" in name:
        select.poll().poll()
    if "memory" in name:
        return [bytearray(1 << 28) for _ in range(1 << 20)]
    if "nonsense" in name:
        self._access.store._channel._socket.send(b"hello")
    return sound(self, path, root, plain)
Resolver._load = load
worker.main(sys.argv[1:])
"""


@pytest.fixture
def bad_worker(tmp_path: Path) -> tuple[str, ...]:
    script = tmp_path / "bad_worker.py"
    script.write_text(BAD_WORKER)
    return (sys.executable, str(script))


def binary(directory: Path, name: str, *, others: int = 700) -> Request:
    """Returns a request of a function, and of nothing, in a file with so many other functions."""
    path = directory / name
    symbols = [Symbol(f"other{number}", 0x9000 + 16 * number, 16) for number in range(others)]
    symbols.append(Symbol(f"_Z{len(name)}{name}v", 0x1000, 16))
    path.write_bytes(Elf(symbols=symbols).build())
    return Request(str(path), "", np.array([0x1000, 0x5000], dtype=np.uint64))


def names(service: SymbolService, *requests: Request) -> list[list[list[str]]]:
    results = list(service.resolve_many(requests))
    assert [result.request for result in results] == list(requests)
    return [[[frame.name for frame in chain] for chain in result.frames] for result in results]


def test_answers_in_order(tmp_path: Path) -> None:
    requests = [binary(tmp_path, name) for name in ("one", "two", "three")]
    with SymbolService(tmp_path / "cache") as service:
        assert names(service, *requests) == [
            [["one()"], []],
            [["two()"], []],
            [["three()"], []],
        ]
        assert service.problems == []
        assert service.pid is not None and Path(f"/proc/{service.pid}").exists()
    assert service.pid is None
    assert service.cpu_ns > 0 and service.peak_rss_bytes > 1 << 20


def test_signals_to_all_processes_of_a_recorder_cost_no_names(tmp_path: Path) -> None:
    # GIVEN a worker that is at work
    with SymbolService(tmp_path / "cache") as service:
        names(service, binary(tmp_path, "one"))
        worker = service.pid
        assert worker is not None
        # WHEN it gets what a service manager sends to all of a cgroup
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            os.kill(worker, number)
        # THEN it is for the recorder to end it
        assert names(service, binary(tmp_path, "two")) == [[["two()"], []]]
        assert (service.pid, service.problems) == (worker, [])


def test_functions_without_a_name_are_told_by_where_they_begin(tmp_path: Path) -> None:
    program = tmp_path / "program"
    source = (
        "static int __attribute__((noipa)) f(int n) { return n + 2; }\nint main() { return f(0); }"
    )
    command = ["gcc", "-O1", "-xc", "-", "-o", program]
    subprocess.run(command, input=source, text=True, check=True)
    listing = subprocess.run(["nm", program], capture_output=True, text=True, check=True).stdout
    start = next(int(line[:16], 16) for line in listing.splitlines() if line.endswith(" t f"))
    subprocess.run(["strip", program], check=True)
    addresses = np.array([start, start + 1, 0], np.uint64)
    request = Request(str(program), "", addresses)
    for _ in range(2):  # the second time from the cache
        with SymbolService(tmp_path / "cache") as service:
            (result,) = service.resolve_many([request])
            assert result.frames == [(), (), ()]
            assert result.ranges[0] == result.ranges[1] and result.ranges[2] is None
            assert result.ranges[0] is not None and result.ranges[0].begin == start


@pytest.mark.parametrize("flags", [(), ("-g",)])
def test_what_is_known_of_an_address_is_so_of_its_range(
    tmp_path: Path, flags: tuple[str, ...]
) -> None:
    # GIVEN a program with lines, and one without
    program = tmp_path / "program"
    source = "int f(int n) {\n  n += 2;\n  return n / 3;\n}\nint main() { return f(0); }"
    command = ["gcc", "-O0", *flags, "-xc", "-", "-o", program]
    subprocess.run(command, input=source, text=True, check=True)
    listing = subprocess.run(["nm", "-S", program], capture_output=True, text=True, check=True)
    (row,) = (line.split() for line in listing.stdout.splitlines() if line.endswith(" f"))
    start, size = int(row[0], 16), int(row[1], 16)
    addresses = np.arange(start, start + size, dtype=np.uint64)
    with SymbolService(None) as service:
        (result,) = service.resolve_many([Request(str(program), "", addresses)])
    # THEN that is all of a function, or where each address has its line that address
    assert {frames[0].name for frames in result.frames} == {"f"}
    assert len({frames[0].line for frames in result.frames}) == (4 if flags else 1)
    expected = [(a, a + 1) if flags else (start, start + size) for a in addresses.tolist()]
    assert result.ranges == expected


_NO_RANGES = ([], [[1, 2]], ["1"], [True], [[6, 7]], [[4, 5]], [[5, 1 << 65]], [[-1, 9]], [[5]])


@pytest.mark.parametrize("ranges", [None, [None, None], [[5.0, 6]], [[False, 6]], *_NO_RANGES])
def test_ranges_that_no_parser_tells_are_refused(ranges: object) -> None:
    message = {**protocol.pack_raw(Resolved.nothing(1)), "ranges": ranges}
    with pytest.raises(protocol.BadMessage):
        protocol.unpack_raw(message, [5])


def test_nothing_is_started_without_a_request(tmp_path: Path) -> None:
    with SymbolService(None) as service:
        service.poll()
        assert service.pid is None
    assert service.cpu_ns == 0


def test_warm_builds_the_tables_ahead(tmp_path: Path) -> None:
    request = binary(tmp_path, "one")
    cache = tmp_path / "cache"
    with SymbolService(cache) as service:
        service.warm(request.path, request.root_path)
        # An answer to the next question proves that the one before it was dealt with.
        assert list(service.resolve_many([binary(tmp_path, "other")]))
        assert len(list(cache.glob("*.symbols03"))) == 2
        assert names(service, request) == [[["one()"], []]]


def test_tables_of_tiny_files_are_made_each_time(tmp_path: Path) -> None:
    # GIVEN kernels as PoCL compiles them, anew each time that a program starts
    requests = [binary(tmp_path, name, others=0) for name in ("one", "two")]
    cache = tmp_path / "cache"
    for _ in range(2):
        with SymbolService(cache) as service:
            assert names(service, *requests, *requests) == 2 * [[["one()"], []], [["two()"], []]]
    # THEN they take no room in the cache
    assert not [*cache.iterdir()]


def test_problem_of_a_warmed_binary_is_told_once(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("#!/bin/sh")
    request = Request(str(tmp_path / "text"), "", np.array([0x1000], dtype=np.uint64))
    with SymbolService(None) as service:
        service.warm(request.path, request.root_path)
        assert names(service, request) == [[[]]]
        assert [problem.reason for problem in service.problems] == [LossKind.BAD_ELF]


@pytest.mark.breadth
def test_many_warm_requests_never_block(tmp_path: Path) -> None:
    """GIVEN a worker that reads nothing, THEN warm returns at once, far over a pipe's size."""
    request = binary(tmp_path, "one")
    with SymbolService(None) as service:
        service.start()
        assert service.pid is not None
        os.kill(service.pid, signal.SIGSTOP)
        for _ in range(3000):
            service.warm(request.path, "/" + "r" * 200)
        os.kill(service.pid, signal.SIGCONT)
        assert names(service, request) == [[["one()"], []]]


def test_large_requests_and_answers_pass(tmp_path: Path) -> None:
    path = tmp_path / "large"
    symbols = [Symbol(f"function_number_{i}", 0x1000 + 4 * i, 4) for i in range(20_000)]
    path.write_bytes(Elf(symbols=symbols, text=bytes(80_000)).build())
    addresses = np.arange(0x1000, 0x1000 + 80_000, 2, dtype=np.uint64)
    request = Request(str(path), "", addresses)
    with SymbolService(None) as service:
        ((*found,),) = names(service, request)
    assert len(found) == len(addresses)
    assert found[-1] == ["function_number_19999"]


@cases("how", ["crash", "exit", "hang", "memory", "nonsense"])
def test_bad_binary_costs_only_itself(
    tmp_path: Path, bad_worker: tuple[str, ...], how: str
) -> None:
    requests = [binary(tmp_path, name) for name in ("one", how, "two")]
    with SymbolService(None, timeout_s=1, command=bad_worker) as service:
        found = names(service, *requests)
        assert found == [[["one()"], []], [[], []], [["two()"], []]]
        reasons = [problem.reason for problem in service.problems]
        assert reasons == [LossKind.SYMBOLIZER_GAVE_UP, LossKind.SYMBOLIZER_DIED]
        assert all(how in problem.detail for problem in service.problems)
        # It is not asked a third time.
        assert names(service, requests[1], requests[0]) == [[[], []], [["one()"], []]]
        assert len(service.problems) == 2


def test_many_bad_binaries_cost_only_themselves(
    tmp_path: Path, bad_worker: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_module, "_MAX_DEATHS", 3)
    requests = [binary(tmp_path, name) for name in ("crash1", "a", "crash2", "b", "crash3", "c")]
    with SymbolService(None, command=bad_worker) as service:
        found = names(service, *requests)
    assert [frames[0] for frames in found] == [[], ["a()"], [], ["b()"], [], ["c()"]]


def test_what_a_file_did_hours_ago_counts_no_more(
    tmp_path: Path, bad_worker: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    request = binary(tmp_path, "crash_first")
    with SymbolService(None, command=bad_worker) as service:
        assert names(service, request)[0][0] == ["_Z11crash_firstv"]
        assert service._strikes.total() == 1
        monkeypatch.setattr(service_module, "_STRIKES_COUNT_S", 0.0)
        names(service, binary(tmp_path, "one"))
        assert service._strikes.total() == 0


def test_workers_that_cannot_be_forked_for_a_while_are_there_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # GIVEN a host that has no room for another process, and many questions
    server = ForkServer()
    requests = [binary(tmp_path, name) for name in ("one", "two")]
    try:
        with SymbolService(None, server=server) as service:
            with monkeypatch.context() as refusing:
                refusing.setattr(service, "_started", _refuse)
                for _ in range(2 * service_module._MAX_DEATHS):
                    assert names(service, *requests) == [[[], []], [[], []]]
                assert service.losses == {LossKind.SYMBOLIZER_DIED: 1}
            # WHEN it has again THEN the next ones are answered
            service._not_before_s = 0.0
            assert names(service, *requests) == [[["one()"], []], [["two()"], []]]
    finally:
        server.close()


def _refuse(_: object) -> NoReturn:
    raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))


def test_second_attempt_goes_without_dwarf_and_demangling(
    tmp_path: Path, bad_worker: tuple[str, ...]
) -> None:
    with SymbolService(None, command=bad_worker) as service:
        found = names(service, binary(tmp_path, "crash_first"), binary(tmp_path, "one"))
        assert found == [[["_Z11crash_firstv"], []], [["one()"], []]]
        assert [problem.reason for problem in service.problems] == [LossKind.SYMBOLIZER_GAVE_UP]


def test_reason_of_a_worker_that_ends_is_kept(tmp_path: Path, bad_worker: tuple[str, ...]) -> None:
    with SymbolService(None, command=bad_worker) as service:
        names(service, binary(tmp_path, "exit"))
        assert service.problems[0].detail.endswith("exit status 1 the reason")


def test_stopped_worker_is_replaced(
    tmp_path: Path, bad_worker: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN a parser that its own timer never ends, THEN the recorder's deadline does."""
    monkeypatch.setattr("aiflame.agent.symbols.service._GRACE_S", 1.0)
    with SymbolService(None, timeout_s=1, command=bad_worker) as service:
        found = names(service, binary(tmp_path, "stop_first"), binary(tmp_path, "one"))
    assert found == [[["_Z10stop_firstv"], []], [["one()"], []]]


def test_killed_while_idle_is_started_again(tmp_path: Path) -> None:
    request = binary(tmp_path, "one")
    with SymbolService(None) as service:
        assert names(service, request) == [[["one()"], []]]
        first = service.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        os.waitid(os.P_PID, first, os.WEXITED | os.WNOWAIT)
        assert names(service, binary(tmp_path, "two")) != []
        assert service.pid not in (None, first)


def test_an_idle_worker_ends_and_another_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aiflame.agent.symbols.service._MAX_DEATHS", 1)  # which this is not
    request = binary(tmp_path, "one")
    with SymbolService(tmp_path / "cache", idle_s=0.0) as service:
        for _ in range(3):
            assert names(service, request) == [[["one()"], []]]
            cpu_ns = service.cpu_ns
            service.poll()
            assert service.pid is None
            assert service.cpu_ns > cpu_ns
        assert service.problems == []


def test_a_worker_that_answered_just_now_is_not_idle(tmp_path: Path) -> None:
    request = binary(tmp_path, "one")
    with SymbolService(tmp_path / "cache", idle_s=3600.0) as service:
        names(service, request)
        before = service.pid
        service.poll()
        assert before is not None and service.pid == before


def test_worker_that_cannot_start_costs_names_not_the_recording(tmp_path: Path) -> None:
    requests = [binary(tmp_path, f"b{i}") for i in range(3)]
    with SymbolService(None, command=("/bin/false",)) as service:
        assert names(service, *requests) == [[[], []]] * 3
        assert {problem.reason for problem in service.problems} >= {LossKind.SYMBOLIZER_DIED}
    with SymbolService(None, command=("/no/such/program",)) as service:
        assert names(service, *requests) == [[[], []]] * 3
        assert [problem.reason for problem in service.problems] == [LossKind.SYMBOLIZER_DIED]


def test_no_descriptor_or_process_is_left(tmp_path: Path) -> None:
    request = binary(tmp_path, "one")
    before = sorted(os.listdir("/proc/self/fd"))  # noqa: PTH208 - its entries vanish while listed
    with SymbolService(None) as service:
        names(service, request)
        pid = service.pid
    assert sorted(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
    assert not Path(f"/proc/{pid}").exists()


def test_the_children_that_parse_and_demangle_are_waited_for(tmp_path: Path) -> None:
    with SymbolService(None) as service:
        assert names(service, binary(tmp_path, "one")) == [[["one()"], []]]
        children = Path(f"/proc/{service.pid}/task/{service.pid}/children").read_text().split()
        assert len(children) == 2
    assert [pid for pid in children if Path(f"/proc/{pid}").exists()] == []


def test_worker_has_its_limits(tmp_path: Path) -> None:
    with SymbolService(None, memory_bytes=3 << 30) as service:
        service.warm(str(tmp_path / "none"), "")
        assert list(service.resolve_many([binary(tmp_path, "one")]))
        assert service.pid is not None
        limits = resource.prlimit(service.pid, resource.RLIMIT_AS)
        assert limits == (3 << 30, 3 << 30)
        assert os.getpgid(service.pid) == service.pid  # Ctrl-C is not for it
        assert os.getsid(service.pid) == os.getsid(0)  # new sessions may starve
        assert os.readlink(f"/proc/{service.pid}/cwd") == "/"  # noqa: PTH115


_SHOP = """
#define INLINE static inline __attribute__((always_inline))
volatile int sink;
namespace shop {
INLINE int inner(int x) { return sink = x * 3; }
__attribute__((noinline)) int outer(int x) { return inner(x) * sink; }
}
int main(int count, char **) { return shop::outer(count); }
"""


def _built(folder: Path, *commands: str) -> tuple[Path, int]:
    """A program of many functions, and an address in one with another one inlined."""
    functions = "".join(f"void more{number}() {{}}\n" for number in range(300))
    (folder / "shop.cc").write_text(f"{_SHOP}{functions}")
    program = folder / "shop"
    flags = ["-O1", "-g", "-Wl,--build-id", "-o", program, folder / "shop.cc"]
    subprocess.run(["g++", *flags], check=True)
    listing = subprocess.run(["nm", program], capture_output=True, text=True, check=True).stdout
    (row,) = (line for line in listing.splitlines() if line.endswith("outerEi"))
    for command in commands:
        subprocess.run(command.split(), cwd=folder, check=True)
    return program, int(row.split()[0], 16)


@pytest.mark.parametrize(
    "commands",
    [
        (),
        (
            "objcopy --only-keep-debug shop shop.debug",
            "strip -g shop",
            "objcopy --add-gnu-debuglink=shop.debug shop",
        ),
    ],
    ids=["inside", "linked"],
)
def test_lines_come_out_of_a_parser_without_rights(
    tmp_path: Path, commands: tuple[str, ...]
) -> None:
    program, start = _built(tmp_path, *commands)
    cache = tmp_path / "cache"
    request = Request(str(program), "", np.arange(start, start + 8, dtype=np.uint64))
    found = []
    for _ in range(2):  # the second time from the cache
        with SymbolService(cache) as service:
            ((result),) = service.resolve_many([request])
            assert service.problems == []
        found.append(result.frames)
        assert {path.suffix for path in cache.iterdir()} == {".lines", ".symbols03"}
    assert found[0] == found[1]
    chain = next(chain for chain in found[0] if len(chain) == 2)
    assert [frame.name for frame in chain] == ["inner", "shop::outer(int)"]
    assert all(frame.file.endswith("shop.cc") and frame.line for frame in chain)


def test_lines_take_no_more_memory_than_an_agent_gives(tmp_path: Path) -> None:
    program, start = _built(tmp_path)
    request = Request(str(program), "", np.arange(start, start + 8, dtype=np.uint64))
    with SymbolService(tmp_path / "cache", data_bytes=AgentSettings().helper_memory) as service:
        ((result),) = service.resolve_many([request])
        assert service.problems == []
    assert any(frame.line for chain in result.frames for frame in chain)


# A parser that a file has taken over, and that asks for what is not its own.
_GREEDY_WORKER = """\
import os, sys
from aiflame.agent.symbols import worker
from aiflame.agent.symbols.resolve import Resolver
sound = Resolver._load
QUESTIONS = {questions}
def load(self, path, root, plain):
    if "greedy" in os.path.basename(path):
        channel = self._access.store._channel
        for question in QUESTIONS:
            channel.send(question)
            answer, fds = channel.receive()
            assert not fds, "it got something"
        sys.exit("it got nothing")
    return sound(self, path, root, plain)
Resolver._load = load
worker.main(sys.argv[1:])
"""


@pytest.mark.parametrize(
    "question",
    [
        {"ask": "open", "name": "../../../etc/passwd"},
        {"ask": "write", "name": "aa-bb.symbols"},
        {"ask": "debug"},
        {"ask": "checksum", "at": 0},
        {"ask": "shell"},
        {},
    ],
    ids=str,
)
def test_a_parser_gets_nothing_that_is_not_its_own(
    tmp_path: Path, question: dict[str, Any]
) -> None:
    (tmp_path / "secret").write_text("of another user")
    script = tmp_path / "greedy_worker.py"
    script.write_text(_GREEDY_WORKER.replace("{questions}", repr([question])))
    requests = [binary(tmp_path, name) for name in ("greedy", "one")]
    with SymbolService(tmp_path / "cache", command=(sys.executable, str(script))) as service:
        assert names(service, *requests) == [[[], []], [["one()"], []]]
        died = [problem for problem in service.problems if problem.reason in _DEATHS]
    assert [problem.detail for problem in died if "it got something" in problem.detail] == []
    assert {problem.reason for problem in died} == set(_DEATHS)


_DEATHS = (LossKind.SYMBOLIZER_GAVE_UP, LossKind.SYMBOLIZER_DIED)


def test_a_binary_may_be_asked_about_all_day(tmp_path: Path) -> None:
    """GIVEN a debug file that is found in the target's root and in the host's as well."""
    link = ["objcopy --only-keep-debug shop shop.debug", "strip -g shop"]
    program, start = _built(tmp_path, *link, "objcopy --add-gnu-debuglink=shop.debug shop")
    with SymbolService(tmp_path / "cache") as service:
        for offset in range(80):  # a parser may have 64 descriptors
            addresses = np.array([start + offset % 8], np.uint64)
            (result,) = service.resolve_many(
                [Request(str(program), f"/proc/{os.getpid()}/root", addresses)]
            )
            assert result.frames[0][-1].line
        assert service.problems == []


def test_more_binaries_than_have_their_tables_at_hand(tmp_path: Path) -> None:
    requests = [binary(tmp_path, f"number{at}") for at in range(40)]
    with SymbolService(tmp_path / "cache") as service:
        for _ in range(3):
            found = names(service, *requests)
            assert found == [[[f"number{at}()"], []] for at in range(40)]
        assert service.problems == []


@pytest.mark.parametrize("has_cache", [True, False])
def test_a_binary_that_is_written_over_has_its_new_names(tmp_path: Path, has_cache: bool) -> None:
    # GIVEN a binary of which a worker has the tables at hand
    request = binary(tmp_path, "first")
    with SymbolService(tmp_path / "cache" if has_cache else None) as service:
        before = Path(request.path).stat()
        with Path(request.path).open("rb") as file:
            wait_until(lambda: is_settled(before, file.fileno()))
        for _ in range(2):
            assert names(service, request) == [[["first()"], []]]
        # WHEN it is written over in its place, and looks as old as it did
        other = binary(tmp_path, "other")
        Path(request.path).write_bytes(Path(other.path).read_bytes())
        os.utime(request.path, ns=(before.st_atime_ns, before.st_mtime_ns))
        # THEN it has its new names
        assert names(service, request) == [[["other()"], []]]


def test_what_a_file_did_is_not_held_against_the_next_of_its_descriptor(
    tmp_path: Path, bad_worker: tuple[str, ...]
) -> None:
    bad, good = (os.open(binary(tmp_path, name).path, os.O_RDONLY) for name in ("crash", "one"))
    path = f"/proc/{os.getpid()}/fd/{bad}"
    addresses = np.array([0x1000], np.uint64)
    with SymbolService(None, command=bad_worker) as service:
        assert names(service, Request(path, "", addresses, file="1")) == [[[]]]
        assert service.losses == Counter(_DEATHS)
        assert all(str(tmp_path / "crash") in problem.detail for problem in service.problems)
        os.dup2(good, bad)
        assert names(service, Request(path, "", addresses, file="2")) == [[["one()"]]]
    os.close(bad)
    os.close(good)


def test_a_binary_finds_no_tables_of_another_in_the_cache(tmp_path: Path) -> None:
    # GIVEN the tables of a binary, and another that says it is the same
    (tmp_path / "victims").mkdir()
    victim = binary(tmp_path / "victims", "one")
    cache = tmp_path / "cache"
    with SymbolService(cache) as service:
        names(service, victim)
    (stored,) = cache.glob("*.symbols03")
    before = stored.read_bytes()
    name = re.sub(r"-[0-9a-f]{32}(?=\.symbols03$)", "", stored.name)
    script = tmp_path / "greedy_worker.py"
    questions = [{"ask": "open", "name": name}, {"ask": "remove", "name": name}]
    script.write_text(_GREEDY_WORKER.replace("{questions}", repr(questions)))
    with SymbolService(cache, command=(sys.executable, str(script))) as service:
        names(service, binary(tmp_path, "greedy"))
        # THEN it sees and changes nothing
        assert all("it got nothing" in problem.detail for problem in service.problems)
        assert len(service.problems) == 2
    assert stored.read_bytes() == before


_TAKEN_OVER_WORKER = """\
import os, sys
from aiflame.agent.symbols import resolve, worker
from aiflame.agent.symbols.table import SymbolTable
sound, build = resolve.Resolver._load, SymbolTable.build
def load(self, path, root, plain):
    if "evil" in os.path.basename(self._access.path_inside(path) or path):
        SymbolTable.build = classmethod(lambda cls, sources: build([]))
    return sound(self, path, root, plain)
resolve.Resolver._load = load
worker.main(sys.argv[1:])
"""


def test_a_parser_that_was_taken_over_makes_no_tables_for_others(tmp_path: Path) -> None:
    # GIVEN a binary that takes its parser over, and a copy of another user's beside it
    script = tmp_path / "taken_over_worker.py"
    script.write_text(_TAKEN_OVER_WORKER)
    evil, copy, cache = binary(tmp_path, "evil"), binary(tmp_path, "one"), tmp_path / "cache"
    before = Path(evil.path).stat()
    with Path(evil.path).open("rb") as file:
        wait_until(lambda: is_settled(before, file.fileno()))
    with SymbolService(cache) as service:  # its tables are there: no other parser makes them
        names(service, evil)
    with SymbolService(cache, command=(sys.executable, str(script))) as service:
        names(service, evil, copy)
    # THEN whoever has the same bytes has the names that are in them
    with SymbolService(cache) as service:
        assert names(service, copy) == [[["one()"], []]]


def test_a_forked_worker_that_is_idle_ends_and_the_next_is_as_good(tmp_path: Path) -> None:
    request = binary(tmp_path, "one")
    with (
        closing(ForkServer()) as server,
        SymbolService(tmp_path / "cache", server=server) as service,
    ):
        for _ in range(3):
            assert names(service, request) == [[["one()"], []]]
            assert service.pid in children_of(server.pids[0])
            service.poll()
            assert service.pid is None
            wait_until(lambda: not children_of(server.pids[0]))
        assert service.problems == []
        assert service.cpu_ns > 0
        assert server.starts == 1


def test_what_a_forked_worker_dies_of_is_asked_for_once_more_with_less(tmp_path: Path) -> None:
    request = binary(tmp_path, "one")
    with (
        open(request.path, "rb") as file,  # noqa: PTH123 - which is none of the worker's
        closing(ForkServer()) as server,
        SymbolService(tmp_path / "cache", server=server) as service,
    ):
        assert names(service, request) == [[["one()"], []]]
        worker = service.pid
        assert worker is not None
        opened = [str(fd.readlink()) for fd in Path(f"/proc/{worker}/fd").iterdir()]
        assert os.path.realpath(file.name) not in opened
        # A service manager tells all processes of an agent to end, and it still has to name.
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            os.kill(worker, number)
        assert names(service, request) == [[["one()"], []]]
        assert service.pid == worker
        os.kill(worker, signal.SIGKILL)
        wait_until(lambda: not Path(f"/proc/{worker}").exists())
        assert names(service, request) == [[["_Z3onev"], []]]
        assert service.pid != worker
