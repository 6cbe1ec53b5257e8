# SPDX-License-Identifier: Apache-2.0
"""Symbol resolution in a child process that may die.

A binary that crashes, stalls or bloats the reader kills the worker, not the recording: the worker
is started again, and that binary is asked for once more without DWARF and demangling, which is
where other people's parsers run; if it kills the worker again, it has no names. The others
continue. Every such event is a `Problem`.

Requests are answered in order, so the one at the head of the queue is the one that the worker
was at when it died. `warm` may be called while recording: tables are then built at low priority,
and are there when `resolve_many` asks.
"""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import signal
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
from aiflame.agent.inspector.fork_server import Ending, ForkRequests, Program
from aiflame.agent.inspector.rootfs import path_in_root
from aiflame.agent.losses import LossKind
from aiflame.agent.memory_file import memory_file
from aiflame.agent.symbols import protocol
from aiflame.agent.symbols.frames import Problem, Range, SourceFrame
from aiflame.agent.symbols.perfmap import perf_map_path
from aiflame.agent.symbols.worker_process import Executed, WorkerProcess

U64 = npt.NDArray[np.uint64]

# libtorch_cpu takes 0.6 s of CPU time; a GB of debug information some 10.
DEFAULT_TIMEOUT_S = 20.0
# Four times what libtorch_cpu needs with its file mapped.
DEFAULT_MEMORY_BYTES = 4 * 1024 * 1024 * 1024
# The worker's own limit, in CPU time, comes first. The deadline in wall-clock time is for a worker
# that is stopped, or blocked in a read; it leaves room for a machine that is busy with others.
_WALL_FACTOR = 3
_GRACE_S = 5.0
# An idle worker ends in some 20 ms.
_ENDING_S = 1.0
# Tables are built while the target runs, which must not wait for us; once the recorder itself
# waits, the worker runs as anyone else.
_NICENESS_WARMING, _NICENESS_WAITED_FOR = 10, 0
# A worker that cannot even start must not be tried for ever: so many die without an answer. Where
# it is forked there may be room again later.
_MAX_DEATHS = 40
_FIRST_PAUSE_S, _WORTH_WAITING_S, _LONGEST_PAUSE_S = 0.1, 0.8, 60.0
# What has happened counts for so long: the out-of-memory killer may come twice in a year.
_DEATHS_COUNT_S, _STRIKES_COUNT_S = 3_600.0, 4 * 3_600.0
# A worker and its children take 100 MB, and 0.15 s of CPU time to start. One that was needed again
# gets twice as long the next time, up to a minute: a host that now and then shows something new
# starts none all the time, and keeps none all day.
_IDLE_S, _LONGEST_IDLE_S = 10.0, 60.0
_READ_BYTES = 1024 * 1024

_MODULE = "aiflame.agent.symbols.worker"
_PROGRAM = Program("symbols.worker", f"{_MODULE}:main", (_MODULE,))
# A host may show bad binaries all day.
_MAX_PROBLEMS = 1_000


@dataclass(frozen=True, slots=True)
class Request:
    """Addresses of one binary; the fields are those of `Resolver.resolve`.

    Attributes:
        file: Tells the binary from others that have its path later, as that of a descriptor; ""
            where there are none.
    """

    path: str
    root_path: str
    addresses: U64
    file: str = ""


@dataclass(frozen=True, slots=True)
class Result:
    """The answer to one request.

    Attributes:
        request: The request.
        frames: Of each address, in order; () outside every symbol.
        ranges: As those of `Resolved`.
    """

    request: Request
    frames: list[tuple[SourceFrame, ...]]
    ranges: list[Range | None]


@dataclass(frozen=True, slots=True)
class ServiceNotes:
    """What a service has met so far, for the process that this one is a copy of.

    Attributes:
        strikes: How often a worker died over a file, by file and root directory.
        strikes_since_s: Since when these are counted, monotonic.
        deaths: How many died without an answer since the last one.
        died_s: When the last one did, monotonic.
        not_before_s, pause_s: When one is forked again, monotonic, and for how long not after that.
        losses, problems: As of a service.
    """

    strikes: Counter[tuple[str, str]]
    strikes_since_s: float
    deaths: int
    died_s: float
    not_before_s: float
    pause_s: float
    losses: Counter[LossKind]
    problems: list[Problem]


@dataclass(slots=True)
class _Pending:
    number: int
    path: str
    root_path: str
    addresses: U64 | None  # None only warms
    perf_map_uid: int | None = None  # whose perf map the path is, None for a binary
    file: str = ""  # as of a request

    @property
    def culprit(self) -> tuple[str, str]:
        """What strikes are counted for."""
        return self.file or self.path, self.root_path

    @property
    def shown_path(self) -> str:
        """What the file is called."""
        return path_in_root(self.path) or self.path

    def message(self, plain: bool) -> bytes:
        return protocol.encode(
            {
                "id": self.number,
                "path": self.path,
                "root": self.root_path,
                "addresses": None if self.addresses is None else self.addresses.tolist(),
                "plain": plain,
                "perf_map_uid": self.perf_map_uid,
            }
        )


class SymbolService:
    """Runs the resolver in a child process. A context manager; start is on first use.

    Args:
        cache: Directory for finished tables, usually `store.cache_dir()`; None for none.
        timeout_s: CPU seconds that one binary may take.
        memory_bytes: Address space of the worker.
        data_bytes: Memory of its own that it may have, files that are mapped aside; 0 for as much
            as there may be in its address space.
        command: What to run instead of the worker module; it gets the same arguments.
        server: Forks the worker, which `poll` ends as soon as it is idle: another one is there in 3
            ms. Without it that is a new interpreter.
        idle_s: After so long without a question `poll` ends such an interpreter; twice as long each
            time.

    Attributes:
        losses: How much went wrong so far.
        problems: The last that went wrong, in order.
        on_strike: Called once a worker has died over a file.
        cpu_ns: CPU time of all workers, complete after `close`.
        peak_rss_bytes: Largest resident set of any worker, as of its latest answer.
    """

    def __init__(
        self,
        cache: Path | None,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        memory_bytes: int = DEFAULT_MEMORY_BYTES,
        data_bytes: int = 0,
        command: Sequence[str] = (),
        server: ForkRequests | None = None,
        idle_s: float = _IDLE_S,
    ) -> None:
        self._command = command or (sys.executable, "-m", _MODULE)
        directory = "" if cache is None else str(cache.absolute())
        self._arguments = [directory, str(memory_bytes), str(timeout_s)]
        if data_bytes:
            self._arguments.append(str(data_bytes))
        self._server = server
        self._patience_s = _WALL_FACTOR * timeout_s + _GRACE_S
        self._niceness = _NICENESS_WARMING
        self._process: WorkerProcess | None = None
        self._errors: IO[bytes] | None = None
        self._deaths = 0
        self._died_s = self._not_before_s = 0.0
        self._pause_s = _FIRST_PAUSE_S
        self._idle_s = 0.0 if server is not None else idle_s
        self._answered_s = 0.0  # when it last answered, or was started
        self._next_number = 0
        self._queue: deque[_Pending] = deque()
        self._outgoing = bytearray()
        self._incoming = bytearray()
        self._deadline = 0.0
        self._strikes: Counter[tuple[str, str]] = Counter()
        self._strikes_since_s = time.monotonic()
        self._done: dict[int, tuple[list[tuple[SourceFrame, ...]], list[Range | None]]] = {}
        self.losses: Counter[LossKind] = Counter()
        self.problems: list[Problem] = []
        self.on_strike: Callable[[], None] = lambda: None
        self.cpu_ns = 0
        self.peak_rss_bytes = 0

    def __enter__(self) -> SymbolService:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int | None:
        """Process id of the worker, None before the first request and after `close`."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the worker now, for a caller that needs `pid` early."""
        now_s = time.monotonic()
        if now_s - self._died_s >= _DEATHS_COUNT_S:
            self._deaths = 0
        if self._process is None and self._deaths < _MAX_DEATHS and now_s >= self._not_before_s:
            self._spawn()

    def warm(self, path: str, root_path: str) -> None:
        """Ask for the tables of a binary to be built; never waits."""
        self._enqueue(_Pending(0, path, root_path, None))
        self.poll()

    def poll(self) -> None:
        """Take in answers that have arrived, without waiting; end a worker that is idle."""
        self._pump(0.0)
        if self._process is None or self._queue:
            return
        if time.monotonic() - self._answered_s >= self._idle_s:
            self._idle_s = min(2 * self._idle_s, _LONGEST_IDLE_S)
            self._end_idle()

    def resolve_many(self, requests: Sequence[Request]) -> Iterator[Result]:
        """Answers in the order of the requests, each as soon as it is there."""
        self._prioritize(_NICENESS_WAITED_FOR)
        numbers = [
            self._enqueue(_Pending(0, r.path, r.root_path, r.addresses, file=r.file))
            for r in requests
        ]
        for number, request in zip(numbers, requests, strict=True):
            while number not in self._done:
                self._pump(max(0.0, self._deadline - time.monotonic()))
            yield Result(request, *self._done.pop(number))
        self._prioritize(_NICENESS_WARMING)

    def resolve_generated(
        self, root_path: str, namespaced_pid: int, uid: int, addresses: U64
    ) -> list[str | None]:
        """Names of code that a JIT made, from the perf map of its process.

        Args:
            root_path: The process's root directory, "" where it is not known.
            namespaced_pid: Its pid inside its own pid namespace.
            uid: Its user id, as the host sees it.
            addresses: Virtual addresses of the process, shape (n,).

        Returns:
            For each address its name, None where there is none.
        """
        if not root_path or not len(addresses):
            return [None] * len(addresses)
        path = perf_map_path(namespaced_pid)
        number = self._enqueue(_Pending(0, path, root_path, addresses, uid))
        while number not in self._done:
            self._pump(max(0.0, self._deadline - time.monotonic()))
        frames, _ = self._done.pop(number)
        return [chain[0].name if chain else None for chain in frames]

    def notes(self) -> ServiceNotes:
        """Returns what it has met so far."""
        strikes, deaths = (self._strikes, self._strikes_since_s), (self._deaths, self._died_s)
        pauses = self._not_before_s, self._pause_s
        return ServiceNotes(*strikes, *deaths, *pauses, self.losses, self.problems)

    def learn(self, notes: ServiceNotes) -> None:
        """Takes what it has met in a copy of this process, which had all that this one has."""
        self._strikes, self._strikes_since_s = notes.strikes, notes.strikes_since_s
        self._deaths, self._died_s = notes.deaths, notes.died_s
        self._not_before_s, self._pause_s = notes.not_before_s, notes.pause_s
        self.losses, self.problems = notes.losses, notes.problems

    def close(self) -> None:
        """End the worker and add up its CPU time; the next request starts another one."""
        if not self._queue:
            self._end_idle()
        self._queue.clear()
        self._reap()

    def _end_idle(self) -> None:
        """End a worker that owes nothing."""
        if self._process is None:
            return
        # It ends by itself, and waits for the child that demangles, whose CPU time is then part of
        # its own.
        self._process.stdin.close()
        with selectors.PollSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            selector.select(_ENDING_S)
        self._reap()

    def _enqueue(self, pending: _Pending) -> int:
        """Gives a request its number, and sends it; returns the number."""
        self._next_number += 1
        pending.number = self._next_number
        if time.monotonic() - self._strikes_since_s >= _STRIKES_COUNT_S:
            self._strikes_since_s = time.monotonic()
            self._strikes.clear()
        strikes = self._strikes[pending.culprit]
        if strikes > 1 or not self._running(waits=pending.addresses is not None):
            self._give_up(pending)
            return pending.number
        if not self._queue:
            self._deadline = time.monotonic() + self._patience_s
        self._queue.append(pending)
        self._outgoing += pending.message(plain=strikes > 0)
        return pending.number

    def _running(self, *, waits: bool = True) -> bool:
        """Starts a worker if there is none; a refusal of a moment is waited out."""
        self.start()
        while waits and self._process is None and self._pause_s <= _WORTH_WAITING_S:
            time.sleep(max(self._not_before_s - time.monotonic(), 0))
            self.start()
            if self._deaths >= _MAX_DEATHS:
                break
        return self._process is not None

    def _give_up(self, pending: _Pending) -> None:
        if pending.addresses is not None:
            count = len(pending.addresses)
            self._done[pending.number] = [()] * count, [None] * count

    def _spawn(self) -> None:
        errors: IO[bytes] | None = None
        try:
            errors = memory_file("errors")  # closed by _reap
            process = self._started(errors)
        except OSError as error:
            if errors is not None:
                errors.close()
            if self._server is None:
                self._deaths, self._died_s = _MAX_DEATHS, time.monotonic()
            else:  # it may be there again, or have room, for a later question
                self._not_before_s = time.monotonic() + self._pause_s
                self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
            self._add(Problem(LossKind.SYMBOLIZER_DIED, f"cannot start: {error.strerror}"))
            return
        for pipe in (process.stdin, process.stdout):
            os.set_blocking(pipe.fileno(), False)
        self._process, self._errors = process, errors
        self._answered_s = time.monotonic()
        self._incoming.clear()
        self._prioritize(self._niceness)

    def _started(self, errors: IO[bytes]) -> WorkerProcess:
        if self._server is None:
            return Executed([*self._command, *self._arguments], errors)
        helper = self._server.run_piped(_PROGRAM, self._arguments, errors.fileno())
        try:
            if helper.begins():
                return helper
            raise TimeoutError(errno.ETIMEDOUT, "the fork server does not answer")
        except OSError:
            helper.close()
            raise

    def _prioritize(self, niceness: int) -> None:
        self._niceness = niceness
        if self._process is not None:
            # Without privilege the worker stays nice, which only makes it slower.
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, self._process.pid, niceness)

    def _pump(self, wait_s: float) -> None:
        """Write and read what is possible now or within the time, and handle a dead worker."""
        process = self._process
        if process is None:
            return
        stdin, stdout = process.stdin, process.stdout
        alive = True
        with selectors.PollSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            if self._outgoing:
                selector.register(stdin, selectors.EVENT_WRITE)
            for key, _ in selector.select(wait_s):
                side = self._send if key.fileobj is stdin else self._receive
                alive = side(key.fd) and alive
        if self._queue and time.monotonic() >= self._deadline:
            alive = False
        if not alive:
            self._restart()

    def _send(self, fd: int) -> bool:
        try:
            written = os.write(fd, self._outgoing[:_READ_BYTES])
        except BlockingIOError:
            return True
        except BrokenPipeError:
            return False
        del self._outgoing[:written]
        return True

    def _receive(self, fd: int) -> bool:
        """Read answers; False when the worker is gone or talks nonsense."""
        try:
            data = os.read(fd, _READ_BYTES)
        except BlockingIOError:
            return True
        self._incoming += data
        try:
            while len(self._incoming) >= protocol.LENGTH.size:
                (length,) = protocol.LENGTH.unpack_from(self._incoming)
                if length > protocol.MAX_MESSAGE_BYTES:
                    return False
                end = protocol.LENGTH.size + length
                if len(self._incoming) < end:
                    break
                body = bytes(self._incoming[protocol.LENGTH.size : end])
                del self._incoming[:end]
                self._accept(protocol.decode(body))
        except protocol.BadMessage:
            return False
        return bool(data)

    def _accept(self, message: dict[str, Any]) -> None:
        if not self._queue or message.get("id") != self._queue[0].number:
            raise protocol.BadMessage("an answer to no question")
        pending = self._queue[0]
        problems = protocol.unpack_problems(message)
        if pending.addresses is not None:
            frames = protocol.unpack_frames(message, len(pending.addresses))
            ranges = protocol.unpack_ranges(message, pending.addresses.tolist())
            self._done[pending.number] = frames, ranges
        peak = message.get("peak_rss_bytes")
        if isinstance(peak, int):
            self.peak_rss_bytes = max(self.peak_rss_bytes, peak)
        for problem in problems:
            # What it opened says which process has the file open, and not which file that is.
            detail = problem.detail.replace(pending.path, pending.shown_path)
            self._add(replace(problem, detail=detail))
        self._queue.popleft()
        self._deaths = 0  # an agent meets files that are too large for it all year
        self._pause_s = _FIRST_PAUSE_S
        self._answered_s = time.monotonic()
        self._deadline = self._answered_s + self._patience_s

    def _restart(self) -> None:
        """Replace the worker and ask again for what it owed, the culprit with less effort."""
        how = self._reap()
        self._deaths, self._died_s = self._deaths + 1, time.monotonic()
        if self._queue:
            self._strike(self._queue[0], how)
        waiting, self._queue = self._queue, deque()
        for pending in waiting:
            strikes = self._strikes[pending.culprit]
            if strikes > 1 or not self._running():
                self._give_up(pending)
                continue
            self._queue.append(pending)
            self._outgoing += pending.message(plain=strikes > 0)
        self._deadline = time.monotonic() + self._patience_s

    def _strike(self, pending: _Pending, how: str) -> None:
        self._strikes[pending.culprit] += 1
        is_first = self._strikes[pending.culprit] == 1
        reason = LossKind.SYMBOLIZER_GAVE_UP if is_first else LossKind.SYMBOLIZER_DIED
        self._add(Problem(reason, f"{pending.shown_path}: {how}"))
        self.on_strike()

    def _add(self, problem: Problem) -> None:
        """Counts what went wrong, once: warming and resolving a binary meet the same problem."""
        if problem in self.problems:
            return
        self.losses[problem.reason] += 1
        self.problems.append(problem)
        if len(self.problems) > _MAX_PROBLEMS:
            del self.problems[0]

    def _reap(self) -> str:
        """Kill the worker, add its CPU time, and say in words how it ended."""
        process, self._process = self._process, None
        self._outgoing.clear()
        if process is None:
            return "the worker could not be started"
        ending = process.end()
        if ending is not None:
            self.cpu_ns += ending.cpu_ns
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        return _words(ending, self._errors)


def _words(ending: Ending | None, errors: IO[bytes] | None) -> str:
    last = b""
    if errors is not None:
        with errors:
            errors.seek(0)
            last = (errors.read(65536).strip().splitlines() or [b""])[-1]
    code = -signal.SIGKILL if ending is None else ending.code
    if code in (-signal.SIGPROF, -signal.SIGKILL):
        return "took too long, or was killed"
    how = f"signal {-code}" if code < 0 else f"exit status {code}"
    return f"{how} {last[:200].decode('utf-8', 'replace')}".strip()
