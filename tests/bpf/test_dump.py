# SPDX-License-Identifier: Apache-2.0
"""`aiflame dump`: what threads do right now, against programs that know it."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import support
from aiflame.agent.dumps.reading import ThreadReader
from aiflame.agent.dumps.session import DumpSession
from aiflame.agent.errors import AiflameError
from aiflame.agent.symbols.service import SymbolService
from aiflame.agent.symbols.store import cache_dir
from interpreters import each, executable

pytestmark = pytest.mark.bpf

Run = Callable[..., subprocess.CompletedProcess[str]]
Start = Callable[..., subprocess.Popen[str]]

# What a thread of workloads/sleepers.c waits in and for, by the first part of its name.
_WAITS = {
    "futex": ("wait_on_futex", "lock"),
    "nanosleep": ("wait_in_nanosleep", "sleep"),
    "read": ("wait_in_read", "pipe/socket"),
    "poll": ("wait_in_poll", "poll"),
    "epoll": ("wait_in_epoll", "poll"),
}

# Each thread says "name tid" and then waits in the line that has its name as a comment.
_PYTHON = """\
import socket, sys, threading, time
lock = threading.Lock()
lock.acquire()
near, far = socket.socketpair()
held = threading.Semaphore(0)

def say(name):
    sys.stdout.write(f"{name} {threading.get_native_id()}\\n")
    sys.stdout.flush()
    held.release()
    return True

class Outer:
    class Inner:
        def method(self):
            say("sleeper") and time.sleep(600)  # sleeper

def locker():
    say("locker") and lock.acquire()  # locker

def receiver():
    say("receiver") and near.recv(1)  # receiver

def callback():
    sorted([1], key=lambda _: say("callback") and time.sleep(600))  # callback

def generator():
    yield say("generator") and time.sleep(600)  # generator

def consumer():
    for _ in generator():
        pass

for function in (Outer.Inner().method, locker, receiver, callback, consumer):
    threading.Thread(target=function, daemon=True).start()
    held.acquire()
say("main") and time.sleep(600)  # main
"""
_PYTHON_TRUTH = {
    "sleeper": (["Outer.Inner.method"], "sleep"),
    "locker": (["locker"], "lock"),
    "receiver": (["receiver"], "pipe/socket"),
    "callback": (["callback.<locals>.<lambda>", "callback"], "sleep"),
    "generator": (["generator", "consumer"], "sleep"),
    "main": (["<module>"], "sleep"),
}

_BUSY = """\
import mmap, sys
with open(sys.argv[1], "r+b") as file:
    shared = mmap.mmap(file.fileno(), 8)
print("ready", flush=True)
count = 0
while True:
    count += 1
    shared[:] = count.to_bytes(8, "little")
"""

_RIVALS = """\
import threading

def compute():
    while True:
        pass

threading.Thread(target=compute, daemon=True).start()
print("ready", flush=True)
compute()
"""

# A CPU burst, so that the wait cannot be taken from when the thread got its CPU.
_BURST = """\
import time
end = time.monotonic() + 0.4
while time.monotonic() < end:
    pass
print(time.monotonic_ns(), flush=True)
time.sleep(600)
"""

# The interpreter runs code of its own after an __init__ that it has specialised (since 3.12).
_CONSTRUCTOR = """\
import time

class Made:
    def __init__(self, is_last):
        if is_last:
            print("ready", flush=True)
            time.sleep(600)

def make():
    for count in range(1000):
        Made(count == 999)

make()
"""

_HOSTILE = """\
import ctypes, time
ctypes.CDLL(None).prctl(15, b"\\x1b[31mred\\x07\\n")  # PR_SET_NAME
code = compile("w(600)", "/x/\\x1b]0;title\\x07<b>\\n.py", "exec")
names = [name for name in ("co_name", "co_qualname") if hasattr(code, name)]
code = code.replace(**dict.fromkeys(names, "f\\u202e\\x1b[2J"))
print("ready", flush=True)
exec(code, {"w": time.sleep})
"""


@pytest.fixture
def start() -> Iterator[Start]:
    """`start(command...)`: runs it, and ends it after the test."""
    running: list[subprocess.Popen[str]] = []

    def go(*command: object) -> subprocess.Popen[str]:
        words = [str(word) for word in command]
        process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={}
        )
        running.append(process)
        return process

    yield go
    for process in running:
        process.kill()
        process.communicate()


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().rstrip("\n")


def _is_asleep(pid: int, tid: int) -> bool:
    stat = Path(f"/proc/{pid}/task/{tid}/stat").read_text()
    return stat.rpartition(")")[2].split()[0] == "S"


def _python(start: Start, script: str, *arguments: object) -> subprocess.Popen[str]:
    return start("/usr/bin/python3", "-I", "-c", script, *arguments)


def _processes(run_aiflame: Run, *pids: int) -> list[dict[str, Any]]:
    done = run_aiflame("dump", "-p", ",".join(map(str, pids)), "--json")
    assert done.returncode == 0, done.stderr
    dump = json.loads(done.stdout)
    assert (dump["schema"], dump["version"]) == ("aiflame-dump", 1)
    found: list[dict[str, Any]] = dump["processes"]
    return found


def _named(thread: dict[str, Any], kind: str) -> list[str]:
    return [frame["name"] for frame in thread["frames"] if frame["kind"] == kind]


def test_native_threads_have_whole_stacks_and_reasons(
    workload: Callable[..., Path], start: Start, run_aiflame: Run
) -> None:
    # GIVEN threads without frame pointers that sleep at the end of known chains of calls
    program = workload("sleepers", "-fomit-frame-pointer")
    target = start(program)
    assert _line(target) == "ready"
    # WHEN they are dumped
    (process,) = _processes(run_aiflame, target.pid)
    threads = {thread["name"]: thread for thread in process["threads"]}
    # THEN each has its chain, from the wait to the thread's start, and why it waits
    for way, (leaf, cause) in _WAITS.items():
        for depth in (0, 7, 90):
            thread = threads[f"{way}-{depth}"]
            own = [
                frame["name"]
                for frame in thread["frames"]
                if Path(frame["module"] or "").name.startswith("sleepers")
                and not frame["name"].startswith("system_call")
            ]
            own = [name for name in own if name not in ("sleep_ns",)]
            assert own == [leaf, *["call_deeper"] * depth, "run_sleeper"], thread["name"]
            assert (thread["state"], thread["cause"]) == ("sleeping", cause)
            assert (thread["doubt"], thread["cut"], thread["gil"]) == (None, None, None)
            assert thread["wait_channel"] == _named(thread, "kernel")[0]


def test_python_threads_have_their_lines(start: Start, run_aiflame: Run) -> None:
    # GIVEN threads of Debian's interpreter that wait in known lines
    target = _python(start, _PYTHON)
    tids = dict(_line(target).split() for _ in _PYTHON_TRUTH)
    for tid in tids.values():
        support.wait_until(lambda tid=tid: _is_asleep(target.pid, int(tid)))
    # WHEN they are dumped
    (process,) = _processes(run_aiflame, target.pid)
    threads = {thread["tid"]: thread for thread in process["threads"]}
    assert len(threads) == len(_PYTHON_TRUTH)
    lines = _PYTHON.splitlines()
    for who, (names, cause) in _PYTHON_TRUTH.items():
        thread = threads[int(tids[who])]
        # THEN each shows the functions, and the line that it waits in
        assert _named(thread, "python")[: len(names)] == names
        leaf = next(frame for frame in thread["frames"] if frame["kind"] == "python")
        assert lines[leaf["line"] - 1].endswith(f"# {who}")
        assert (thread["state"], thread["cause"], thread["gil"]) == ("sleeping", cause, "released")
        assert thread["doubt"] is None


@pytest.mark.parametrize("version", each())
def test_constructors_and_their_callers_are_all_that_is_shown(
    version: str, start: Start, run_aiflame: Run
) -> None:
    # GIVEN a thread in an __init__ that has been called often
    target = start(executable(version), "-I", "-c", _CONSTRUCTOR)
    assert _line(target) == "ready"
    support.wait_until(lambda: _is_asleep(target.pid, target.pid))
    # WHEN it is dumped
    (process,) = _processes(run_aiflame, target.pid)
    (thread,) = process["threads"]
    # THEN its Python frames are those of the program
    names = _named(thread, "python")
    assert [name.rpartition(".")[2] for name in names] == ["__init__", "make", "<module>"]
    # and among all frames are the eval loops that ran them, each marked as the interpreter's own
    names_of_loops = ("_PyEval_EvalFrameDefault", "_TAIL_CALL_")
    loops = [f for f in thread["frames"] if f["name"].startswith(names_of_loops)]
    if version in ("3.14", "3.15"):
        # GCC 16 moves most of it out of its symbol, and Debian's programs have no other.
        outer = [frame["kind"] for frame in thread["frames"]].index("python")
        loops = [f for f in thread["frames"][outer:] if f["name"].startswith("[python3.")]
    assert loops and all(frame["glue"] for frame in loops)


def test_a_program_whose_file_is_gone_has_its_names(
    workload: Callable[..., Path], start: Start, run_aiflame: Run, tmp_path: Path
) -> None:
    program = tmp_path / "replaced"
    shutil.copy(workload("sleepers", "-fomit-frame-pointer"), program)
    target = start(program, "crowd", 3)
    assert _line(target) == "ready"
    program.unlink()
    (process,) = _processes(run_aiflame, target.pid)
    for thread in (t for t in process["threads"] if t["tid"] != target.pid):
        own = [frame["name"] for frame in thread["frames"] if frame["module"] == str(program)]
        assert own[-1] == "run_sleeper", own
        assert thread["cut"] is None


def test_text_shows_each_thread(start: Start, run_aiflame: Run) -> None:
    target = _python(start, _PYTHON)
    tids = dict(_line(target).split() for _ in _PYTHON_TRUTH)
    support.wait_until(lambda: _is_asleep(target.pid, int(tids["main"])))
    done = run_aiflame("dump", "-p", target.pid, "--frames", "python")
    assert done.returncode == 0, done.stderr
    for who, (names, _) in _PYTHON_TRUTH.items():
        block = done.stdout.partition(f"Thread {tids[who]} ")[2].partition("\n\n")[0]
        head, *frames = block.splitlines()
        assert re.search(r": sleeping \(.+\) for [\d.]+ m?s, GIL released$", head), head
        assert [frame.strip().partition(" (")[0] for frame in frames[: len(names)]] == names
    # glue and kernel frames are shown when asked for only
    everything = run_aiflame("dump", "-p", target.pid, "--native").stdout
    assert "(kernel)" in everything
    assert "(kernel)" not in run_aiflame("dump", "-p", target.pid).stdout


def test_the_wait_is_counted_from_when_it_began(start: Start) -> None:
    # GIVEN a thread that computed before it went to sleep
    target = _python(start, _BURST)
    begun_ns = int(_line(target))
    support.wait_until(lambda: _is_asleep(target.pid, target.pid))
    asleep_ns = time.monotonic_ns()
    # WHEN it is dumped
    with SymbolService(cache_dir()) as service, DumpSession(cache_dir(), service) as session:
        dump = session.take([target.pid])
        end_ns = time.monotonic_ns()
    waited_ns = dump.processes[0].threads[0].waited_ns
    # THEN the wait is from after what it computed, where the kernel keeps the time
    if not Path("/proc/self/schedstat").exists():
        assert waited_ns is None
        return
    assert waited_ns is not None
    margin_ns = 20_000_000
    assert end_ns - dump.total_ns - asleep_ns - margin_ns <= waited_ns
    assert waited_ns <= end_ns - begun_ns + margin_ns


def test_five_hundred_threads(
    workload: Callable[..., Path], start: Start, run_aiflame: Run
) -> None:
    target = start(workload("sleepers", "-fomit-frame-pointer"), "crowd", 500)
    assert _line(target) == "ready"
    done = run_aiflame("dump", "-p", target.pid, "--json")
    dump = json.loads(done.stdout)
    threads = dump["processes"][0]["threads"]
    assert len(threads) == 501
    # Ids of threads may have begun anew in between: the first one is not always the lowest.
    crowd = [thread for thread in threads if thread["tid"] != target.pid]
    chains = {tuple(_named(thread, "native")) for thread in crowd}
    assert len(chains) == 1
    assert {thread["doubt"] for thread in threads} == {None}


def test_a_target_goes_on_while_it_is_dumped(
    start: Start, run_aiflame: Run, tmp_path: Path
) -> None:
    # GIVEN a program that counts
    counter = tmp_path / "counter"
    counter.write_bytes(bytes(8))
    target = _python(start, _BUSY, counter)
    assert _line(target) == "ready"
    states: set[str] = set()
    tracers: set[str] = set()
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.is_set():
            status = Path(f"/proc/{target.pid}/status").read_text()
            states.add(re.findall(r"^State:\t(\w)", status, re.M)[0])
            tracers.add(re.findall(r"^TracerPid:\t(\d+)", status, re.M)[0])

    watcher = threading.Thread(target=watch)
    watcher.start()
    before = int.from_bytes(counter.read_bytes(), "little")
    # WHEN it is dumped
    try:
        (process,) = _processes(run_aiflame, target.pid)
    finally:
        is_over.set()
        watcher.join()
    # THEN it counted on, and was neither stopped nor traced
    assert int.from_bytes(counter.read_bytes(), "little") > before
    assert states <= {"R", "S", "D"}
    assert tracers == {"0"}
    (thread,) = process["threads"]
    assert _named(thread, "python")[-1] == "<module>"


def test_a_thread_that_waits_for_the_gil_says_so(start: Start, run_aiflame: Run) -> None:
    # GIVEN two threads that compute all the time: one of them has the GIL
    target = _python(start, _RIVALS)
    assert _line(target) == "ready"

    def is_seen() -> bool:
        (process,) = _processes(run_aiflame, target.pid)
        return ("waiting", "GIL") in {(t["gil"], t["cause"]) for t in process["threads"]}

    # THEN the other is seen to wait for it, unless it is just then taking it over
    support.wait_until(is_seen)


def _take_while_ending(
    pids: list[int], victim: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> Any:
    """Takes a dump of processes, one of which ends once all is ready."""

    def kill_then(*_: object) -> None:
        victim.send_signal(signal.SIGKILL)
        victim.wait()

    monkeypatch.setattr(ThreadReader, "clock_offset_ns", kill_then)
    with SymbolService(cache_dir()) as service, DumpSession(cache_dir(), service) as session:
        return session.take(pids)


def test_a_target_that_ends_meanwhile_is_said(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim, other = _python(start, _BURST), _python(start, _BURST)
    _line(victim)
    _line(other)
    dump = _take_while_ending([victim.pid, other.pid], victim, monkeypatch)
    gone, there = dump.processes
    assert (gone.threads, gone.notes) == ((), ("the process has ended",))
    assert len(there.threads) == 1
    with pytest.raises(AiflameError, match=f"process {other.pid} has ended"):
        _take_while_ending([other.pid], other, monkeypatch)


def test_names_cannot_take_over_the_terminal(start: Start, run_aiflame: Run) -> None:
    target = _python(start, _HOSTILE)
    assert _line(target) == "ready"
    support.wait_until(lambda: _is_asleep(target.pid, target.pid))
    for options in ([], ["--json"]):
        done = run_aiflame("dump", "-p", target.pid, *options)
        assert done.returncode == 0
        shown = done.stdout if not options else json.loads(done.stdout)["processes"][0]["name"]
        assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e]", shown)
    assert "title" in run_aiflame("dump", "-p", target.pid, "--frames", "python").stdout


def test_what_cannot_be_dumped_is_said(run_aiflame: Run) -> None:
    pid_max = int(Path("/proc/sys/kernel/pid_max").read_text())
    missing = run_aiflame("dump", "-p", pid_max)
    assert (missing.returncode, missing.stdout) == (1, "")
    assert missing.stderr.startswith(f"aiflame: no such process: {pid_max}")
    assert run_aiflame("dump", "-p", "x").returncode == 2
    assert run_aiflame("dump").returncode == 2


def test_it_can_look_at_itself_being_looked_at(run_aiflame: Run) -> None:
    (process,) = _processes(run_aiflame, os.getpid())
    main = next(thread for thread in process["threads"] if thread["tid"] == os.getpid())
    assert sys._getframe().f_code.co_name in " ".join(_named(main, "python"))
