# SPDX-License-Identifier: Apache-2.0
"""Linker names to source names: C++ (Itanium ABI) and both Rust schemes, by LLVM's demangler.

Both languages' back references expand without a bound: a name of 300 bytes can ask for gigabytes
and minutes, and nothing can interrupt it. So names are demangled in a child process, which this
module is as a program, with little memory and little CPU time a name. When it dies, the name that
it was at stays mangled, and another child goes on.

Names that no scheme explains come back as they are. Hashes and crate disambiguators of Rust are
left out, as a flame graph merges by name; so are the suffixes that LLVM adds to Rust's names.
"""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import IO, BinaryIO, NamedTuple, NoReturn

from aiflame.agent import kernelfs
from aiflame.agent.closing import close_all_but
from aiflame.agent.limits import limit_self

# Longer than the longest of libtorch (7.8 KB). LLVM's demangler recurses: some 400 KB of nested
# templates end its stack.
_MAX_MANGLED_BYTES = 10_000
# No reader shows more.
_MAX_READABLE_BYTES = 16_384
# What one name may take; real ones take 2 us and a few KB.
_MEMORY_BYTES = 64 * 1024 * 1024
_CPU_S = 0.25
# Names that go over before the remaining names of a call are left mangled.
_MAX_FAILURES = 3
# Sent at a time. The child reads all of them before it answers: neither waits for the other.
_BATCH = 256

_PLT = b"@plt"
# A name is sent as a line.
_MANGLED = re.compile(rb"_[ZR][^\x00-\x20\x7f]+")
# Rust's legacy scheme is an Itanium name with a hash for its last part.
_LEGACY_HASH = re.compile(rb"17h[0-9a-f]{16}E(?=\.|$)")
_READABLE_HASH = re.compile(rb"::h[0-9a-f]{16}$")
# What compilers add to the name of a copy of a function.
_CLONE = re.compile(rb"\.[^.]+(?:\.[0-9]+)*")


class Demangler:
    """Demangles in a child process: started when it is needed, ended with this object.

    Args:
        forks: Whether the child is a fork, of a process that has one thread: it is there in a few
            ms, and a new interpreter in 25 ms of CPU time.

    Attributes:
        failures: Names of the latest call that went over a limit.
    """

    def __init__(self, *, forks: bool = False) -> None:
        self._forks = forks
        self._child: _Child | None = None
        self._end: Callable[[], object] = lambda: None
        self.failures = 0

    def close(self) -> None:
        """Ends the child; another one is started when it is needed."""
        self._end()
        self._child = None

    def names(self, mangled: Sequence[bytes]) -> list[bytes]:
        """Returns readable names, in order; each of what was mangled is cut at 16 KB."""
        self.failures = 0
        stems = [_stem(name) for name in mangled]
        waiting = list(dict.fromkeys(stem for stem in stems if stem))
        readable = dict(zip(waiting, self._demangled(waiting), strict=True))
        return [
            _whole(name, stem, readable[stem]) if readable.get(stem) else name
            for name, stem in zip(mangled, stems, strict=True)
        ]

    def _demangled(self, stems: list[bytes]) -> list[bytes]:
        """Returns what each is called, b"" for what stays mangled."""
        done: list[bytes] = []
        while len(done) < len(stems) and self.failures < _MAX_FAILURES:
            is_fresh = self._child is None
            answers = self._asked(stems[len(done) : len(done) + _BATCH])
            done += answers
            # One that has done others may have died of these: pydemumble 0.1 frees no answer.
            if is_fresh and not answers:
                done.append(b"")
                self.failures += 1
        return done + [b""] * (len(stems) - len(done))

    def _asked(self, batch: list[bytes]) -> list[bytes]:
        """Returns the child's answers; fewer than questions when it died at the next one."""
        answers: list[bytes] = []
        try:
            child = self._child = self._child or self._started()
            child.stdin.write(b"%d\n%s\n" % (len(batch), b"\n".join(batch)))
            child.stdin.flush()
            for _ in batch:
                line = child.stdout.readline()
                if not line.endswith(b"\n"):
                    break
                answers.append(line[:-1])
        except OSError:
            pass  # it could not be started, or is gone
        if len(answers) < len(batch):
            self.close()
        return answers

    def _started(self) -> _Child:
        child = _forked() if self._forks else _executed()
        self._end = weakref.finalize(self, child.end)
        return child


class _Child(NamedTuple):
    """A child that demangles: what it reads, what it writes, and what ends it."""

    stdin: IO[bytes]
    stdout: IO[bytes]
    end: Callable[[], object]


def _executed() -> _Child:
    # -I: nothing of the working directory and the environment is imported.
    process = subprocess.Popen(
        [sys.executable, "-I", "-m", "aiflame.agent.demangle"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )

    def end() -> None:
        process.kill()
        process.communicate()

    if process.stdin is None or process.stdout is None:
        raise ValueError("started without pipes")
    return _Child(process.stdin, process.stdout, end)


def _forked() -> _Child:
    their_input, our_output = os.pipe()
    our_input, their_output = os.pipe()
    parent = os.getpid()
    try:
        pid = os.fork()
        if pid == 0:
            _run((their_input, their_output), parent)
    except OSError:
        os.close(our_output)
        os.close(our_input)
        raise
    finally:
        os.close(their_input)
        os.close(their_output)
    pipes = os.fdopen(our_output, "wb"), os.fdopen(our_input, "rb")

    def end() -> None:
        os.kill(pid, signal.SIGKILL)
        for pipe in pipes:
            with suppress(BrokenPipeError):  # what it did not read is flushed
                pipe.close()
        os.waitpid(pid, 0)

    return _Child(*pipes, end)


def _run(fds: Sequence[int], parent: int) -> NoReturn:
    """What a fork does: it has nothing open but its two pipes."""
    try:
        for standard, fd in enumerate(fds):
            os.dup2(fd, standard)
        close_all_but(range(len(fds)))
        with os.fdopen(0, "rb") as questions, os.fdopen(1, "wb") as answers:
            _serve(questions, answers, parent)
    finally:
        os._exit(0)


def _stem(name: bytes) -> bytes:
    """Returns the part of a name that a demangler takes, b"" where it is not mangled."""
    head = name.removesuffix(_PLT)
    if len(head) > _MAX_MANGLED_BYTES or _MANGLED.fullmatch(head) is None:
        return b""
    legacy = _LEGACY_HASH.search(head)
    return head.partition(b".")[0] if legacy is None else head[: legacy.end()]


def _whole(name: bytes, stem: bytes, readable: bytes) -> bytes:
    """Returns a readable name with what was added to its stem."""
    plt = _PLT if name.endswith(_PLT) else b""
    if _LEGACY_HASH.search(stem):
        readable = _READABLE_HASH.sub(b"", readable)
    elif not stem.startswith(b"_R"):
        clones = _CLONE.findall(name.removesuffix(_PLT), len(stem))
        readable += b"".join(b" [clone %s]" % clone for clone in clones)
    return readable + plt


def main() -> None:
    """Answers questions on standard input."""
    _serve(sys.stdin.buffer, sys.stdout.buffer, os.getppid())


def _serve(questions: BinaryIO, answers: BinaryIO, parent: int) -> None:
    """Answers questions until there are none: a number, so many names, one on each line.

    Args:
        questions: What is asked.
        answers: A line for each name.
        parent: Pid of whoever asks, with which this process ends.
    """
    # Here, so that only this process has it.
    import pydemumble
    from aiflame.agent.inspector import sandbox

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for whoever asks
    pages = int(kernelfs.read_text("/proc/self/statm").split()[0])
    limit = pages * resource.getpagesize() + _MEMORY_BYTES
    limit_self((resource.RLIMIT_AS, limit), (resource.RLIMIT_CORE, 0))
    calls = {*sandbox.BASE_CALLS.values(), sandbox.FILE_CALLS["setitimer"]}
    sandbox.enter(calls, parent)
    while count := questions.readline():
        for name in [questions.readline()[:-1] for _ in range(int(count))]:
            signal.setitimer(signal.ITIMER_VIRTUAL, _CPU_S)  # its signal ends the process
            try:
                readable = pydemumble.demangle(name.decode()).encode()
            except UnicodeError:
                readable = b""
            answers.write(readable[:_MAX_READABLE_BYTES].replace(b"\n", b" ") + b"\n")
            answers.flush()
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


if __name__ == "__main__":
    main()
