# SPDX-License-Identifier: Apache-2.0
"""Loads a library into a live process: finds a thread that can be lent, which makes another one.

The thread that is lent is stopped for some milliseconds: it makes a thread, and goes on. The new
thread makes a memory file, waits for the library to be written into that, loads it, calls a
function of it if that is asked for, says what came of it, and ends.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

from aiflame.agent.elf.image import ElfImage
from aiflame.agent.errors import AiflameError
from aiflame.agent.injection import fitness, remote_exec, requests, seccomp, threads
from aiflame.agent.injection.code import CODE, WAIT
from aiflame.agent.injection.delivery import deliver_file, fill_memory, memory_path
from aiflame.agent.injection.fitness import Fitness
from aiflame.agent.injection.requests import Overwritten, Registers, TaskState
from aiflame.agent.injection.seccomp import Call
from aiflame.agent.injection.tracer import (
    InjectionRefused,
    Lent,
    RefusedForGood,
    Stopped,
    Tracer,
    TryAgain,
)
from aiflame.agent.injection.tracer_worker import USER_CODE_64
from aiflame.agent.inspector.inspector import Inspector
from aiflame.agent.inspector.memory import Span
from aiflame.agent.processes import procfs
from aiflame.agent.processes.cached_tables import CachedTables
from aiflame.agent.processes.elf_images import ElfImages
from aiflame.agent.processes.interpreters import InterpreterFinder
from aiflame.agent.processes.stack_memory import StackMemory
from aiflame.agent.processes.table import NO_BINARY, ProcessTable
from aiflame.agent.processes.thread_walk import StackWalker, WalkBegin
from aiflame.agent.processes.waiting_tables import WaitingTables
from aiflame.agent.unwind import walk

# There is no recording that would tell images of one pid apart.
_IMAGE = 1
# Python programs recurse: 3.8 to 3.10 have four C frames for each call, and 1,000 of these.
_MAX_FRAMES = 5000
# Most stacks are shorter; the rest is read page by page, which takes 0.1 ms each.
_PIECE_BYTES = 65536
# A thread that loads libraries all the time is elsewhere once in a hundred tries, of 10 ms.
_LENDING_S = 10.0
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.0002, 0.005
# A library that begins by starting a GPU's runtime takes seconds.
_LOADING_S = 30.0
_LOOK_S = 0.001
# The new thread waits 30 s and more to be told something (code.S, PAUSES). A write takes no 10 s.
_WAITING_S = 20.0
_MAX_ERROR_BYTES = 1024
_DISTURBED = "in a system call that a stop might disturb"
_ENDED = ("X", "Z")  # proc_pid_status(5)
_SECCOMP_OFF, _SECCOMP_STRICT = "0", "1"  # linux/seccomp.h

_GO, _LEAVE = (1).to_bytes(4, "little"), (2).to_bytes(4, "little")
_NO_ERROR = bytes(8)

# What the dynamic loader says (elf/dl-tls.c, dl-reloc.c, dl-load.c of glibc), and what helps.
_CURES = (
    (
        "static TLS",
        "restart it with GLIBC_TUNABLES=glibc.rtld.optional_static_tls=4096 in its environment",
    ),
    ("failed to map", "allow it to execute memory files, or /tmp without noexec"),
)
# The loader's own function, which programs without libdl have, tells none.
_NO_REASON = "the dynamic loader does not say why"
# What a file may help with: SELinux, no /proc.
_NOT_FROM_MEMORY = ("failed to map", "cannot open", _NO_REASON)


@dataclass(frozen=True, slots=True)
class Injected:
    """A library that is in a process.

    Attributes:
        was_there: It was before, and nothing was done.
        answer: Of the function that was called, 0 for none.
        stopped_ns: How long a thread of the process was held.
        tries: How many threads were stopped until one could be lent; 0 where none was, since the
            process has loaded it by itself (`remote_exec`).
        why_held: Why a process that might have loaded it by itself did not, "" for no reason.
    """

    was_there: bool
    answer: int = 0
    stopped_ns: int = 0
    tries: int = 0
    why_held: str = ""


def inject(
    pid: int,
    library: Path,
    cache: Path | None,
    entry: str = "",
    patience_s: float = _LENDING_S,
    calls: Collection[Call] = (),
) -> Injected:
    """Loads a library into a process, unless it has it.

    Args:
        pid: The process: dynamically linked with glibc, on x86-64, in any namespace.
        library: Its file here.
        cache: Directory of unwind tables, None for none.
        entry: Function of the library to be called, `int entry(void)`, "" for none.
        patience_s: How long a thread is looked for that can be lent.
        calls: System calls that the library makes once it is loaded.

    Raises:
        InjectionRefused: It cannot be, and why.
        AiflameError: The library cannot be read, or its loading failed.
    """
    with Injection(pid, cache, patience_s, calls) as injection:
        return injection.load(library, entry)


class Injection:
    """What it takes to load a library into one process. A context manager.

    Args:
        pid: The process.
        cache: Directory of unwind tables, None for none.
        patience_s: How long a thread is looked for that can be lent.
        calls: System calls that libraries make once they are loaded.

    Attributes:
        tracer: Holds threads.

    Raises:
        InjectionRefused: The process cannot be asked.
    """

    def __init__(
        self,
        pid: int,
        cache: Path | None,
        patience_s: float = _LENDING_S,
        calls: Collection[Call] = (),
    ) -> None:
        fitness.require_fit_process(pid)
        self._pid = pid
        self._patience_s = patience_s
        self._calls = calls
        with contextlib.ExitStack() as parts:
            try:
                self._process_fd = os.pidfd_open(pid)
            except OSError as error:
                raise InjectionRefused(f"process {pid}: {error.strerror}") from error
            parts.callback(os.close, self._process_fd)
            self._inspector = parts.enter_context(Inspector())
            self._inspector.start()
            self._memory = self._inspector.memory
            self._table = ProcessTable(0, lambda pid: _IMAGE, self._inspector)
            self._binaries = self._table.binaries
            parts.callback(self._binaries.close)
            self._images = ElfImages(self._binaries)
            tables = CachedTables(self._binaries, self._images, cache)
            parts.callback(tables.close)
            self._walker = StackWalker(WaitingTables(tables), self._images, _MAX_FRAMES)
            self.tracer = parts.enter_context(Tracer())
            self._image = self._table.seen(pid, _IMAGE, 0, "", 0)
            self._parts = parts.pop_all()
        self._needs_rehearsal = True
        # Registers that threads had, by id: in calls that the kernel had not continued yet.
        self._begun: dict[int, Registers] = {}
        self._filters_heard: set[tuple[bytes, ...]] = set()
        self._heard_s = 0.0  # when the new thread was last known to have taken a step

    def __enter__(self) -> Injection:
        return self

    def __exit__(self, *_: object) -> None:
        self._parts.close()

    def load(self, library: Path, entry: str = "") -> Injected:
        """Loads a library, as `inject`."""
        data, build_id = _read(library)
        if self._has(library.name, build_id):
            return Injected(was_there=True)
        found = fitness.fitness_of(self._image, self._binaries, self._images, self._memory)
        why_held = "" if entry else self._ask_interpreter(library.name, build_id, data)
        if why_held is None:
            return Injected(was_there=False)
        lending = self._lend(found, library.name, build_id, entry)
        if lending is None:
            return Injected(was_there=True)
        lent, tries = lending
        try:
            is_back, result, task = requests.result_of(lent.head)
        except Overwritten as error:
            raise AiflameError(f"process {self._pid}: {error}") from error
        if not is_back:
            raise AiflameError(
                f"process {self._pid} makes no thread: the one that was lent waits for a lock"
            )
        if result:
            raise InjectionRefused(
                f"process {self._pid} cannot make a thread: {os.strerror(abs(result))}",
                "see its limits of processes and memory (ulimit -u, pids.max)",
            )
        try:
            answer = self._load(task, library.name, data)
        except (TryAgain, Overwritten) as error:
            raise AiflameError(f"process {self._pid}: {error}, while it loaded") from error
        return Injected(False, answer, lent.stopped_ns, tries, why_held)

    def _ask_interpreter(self, name: str, build_id: str, data: bytes) -> str | None:
        """Has CPython load a library by itself; returns why it did not, None where it has.

        Of programs that know no such way nothing is said.
        """
        interpreter = InterpreterFinder(self._table, self._images, _ignore).find(self._image)
        if interpreter is None or interpreter.loaded.layout.version < remote_exec.FIRST_VERSION:
            return ""
        asked = remote_exec.RemoteExec(self._pid, interpreter.loaded, self.tracer)
        try:
            if why := asked.load(name, data):
                return why
        except TryAgain as error:
            raise AiflameError(f"process {self._pid}: {error}, while it loaded") from error
        self._table.read_mappings(self._image)
        # The dynamic loader's reasons are told by the other way.
        return None if self._has(name, build_id) else "it failed there"

    def _has(self, name: str, build_id: str) -> bool:
        for mapping in self._image.mappings:
            if mapping.binary == NO_BINARY:
                continue
            headers = self._images.of(mapping.binary)
            is_same = headers is not None and headers.build_id == build_id != ""
            if is_same or Path(self._binaries.files[mapping.binary].path).name == name:
                return True
        return False

    def _lend(
        self, found: Fitness, name: str, build_id: str, entry: str
    ) -> tuple[Lent, int] | None:
        """Lends one of the threads; returns what came of it, and how many were stopped.

        None where another recorder has loaded the library meanwhile.
        """
        until_s = time.monotonic() + self._patience_s
        reasons: Counter[str] = Counter()
        pause_s = _SHORTEST_PAUSE_S
        while True:
            candidates = threads.candidates(self._pid)
            if not candidates:
                reasons[_DISTURBED] += 1
            for tid in candidates:
                if time.monotonic() > until_s:
                    break
                try:
                    lent = self._lend_thread(tid, found, f"/{name}", entry)
                    return lent, reasons.total() + 1
                except TryAgain as reason:
                    reasons[str(reason)] += 1
            if time.monotonic() > until_s or not procfs.thread_ids(self._pid):
                break
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            fitness.require_fit_process(self._pid)
            self._table.read_mappings(self._image)
            if self._has(name, build_id):
                return None
            found = fitness.fitness_of(self._image, self._binaries, self._images, self._memory)
        words = "; ".join(f"{count} times {why}" for why, count in reasons.most_common(3))
        raise InjectionRefused(
            f"process {self._pid} has no thread that could be lent ({words})", "try again"
        )

    def _lend_thread(self, tid: int, found: Fitness, name: str, entry: str) -> Lent:
        fitness.require_fit_thread(self._pid, tid)
        stopped = self._stop(tid)
        if self._needs_rehearsal:
            self.tracer.release()
            self._why_not(stopped, found)  # has the tables read, which may take long
            self._needs_rehearsal = False
            stopped = self._stop(tid)
        if why := self._why_not(stopped, found):
            self.tracer.release()
            raise TryAgain(why)
        loan = requests.loan(
            stopped.registers,
            stopped.mask,
            stopped.xstate,
            found.code_at,
            found.functions,
            name,
            entry,
        )
        if not self._has_room(loan.lowest, stopped.registers):
            self.tracer.release()
            raise TryAgain("not on its own stack, or too little of that is left")
        try:
            return self.tracer.lend(loan, found.code_at, CODE, WAIT)
        except TryAgain:
            self._needs_rehearsal = True
            raise

    def _stop(self, tid: int) -> Stopped:
        """Stops a thread, which is the process's own: ids of threads that ended are used again."""
        if not threads.may_be_stopped(self._pid, tid):
            raise TryAgain(_DISTURBED)
        try:
            stopped = self.tracer.stop(tid)
        except InjectionRefused:
            # The same error stands for a thread that has ended, and for one that another traces,
            # as a second recorder does for some milliseconds.
            if fitness.tracer_of(tid):
                raise TryAgain("another traces it") from None
            fitness.require_fit_process(self._pid)
            if (procfs.status_field(tid, "State") or _ENDED)[0] in _ENDED:
                raise TryAgain("the thread has ended") from None
            raise
        if not (self._is_alive() and Path(f"/proc/{self._pid}/task/{tid}").exists()):
            self.tracer.release()
            raise TryAgain("the thread has ended")
        self._require_calls(tid)
        begun = self._begun_call(stopped)
        if begun is None:
            self.tracer.release()
            raise TryAgain("in a call that was interrupted before")
        self._begun[tid] = begun
        return replace(stopped, registers=begun)

    def _begun_call(self, stopped: Stopped) -> Registers | None:
        """Returns what a thread that is held would begin anew, None where that is not known."""
        registers, size = stopped.registers, requests.CALL_BYTES
        if not requests.is_continued(registers):
            return registers
        span = Span(self._pid, stopped.tid, registers.rip - size, size)
        (code,) = self._memory.read([span])
        return requests.begun_call(registers, self._begun.get(stopped.tid), code.data)

    def _is_alive(self) -> bool:
        """Whether the process id is still that of the process."""
        try:
            signal.pidfd_send_signal(self._process_fd, 0)
        except ProcessLookupError:
            return False
        return True

    def _why_not(self, stopped: Stopped, found: Fitness) -> str:
        """Returns why a thread cannot be lent, "" where it can."""
        registers = stopped.registers
        if registers.cs != USER_CODE_64:
            return "in 32-bit code"
        if stopped.is_in_critical_section:
            return "in a restartable sequence"
        span = Span(self._pid, stopped.tid, registers.rsp, _PIECE_BYTES)
        (piece,) = self._memory.read([span])
        begin = walk.Registers(registers.rip, registers.rsp, registers.rbp, registers.rbx)
        walked = self._walker.walk_on(
            self._image,
            WalkBegin(begin, is_exact=True, depth=1),
            StackMemory(span, piece.data, self._memory),
        )
        return threads.why_not(self._image, found, self._images, registers, walked)

    def _require_calls(self, tid: int) -> None:
        """Raises for a thread, which is held, whose seccomp filters would not let it through."""
        mode = (procfs.status_field(tid, "Seccomp") or [_SECCOMP_OFF])[0]
        if mode == _SECCOMP_OFF:
            self.tracer.continue_wait()
            return
        if mode == _SECCOMP_STRICT:
            self.tracer.release()
            raise RefusedForGood(
                f"process {self._pid} has given up all system calls (strict seccomp)"
            )
        filters = tuple(self.tracer.filters())
        if seccomp.lets_waits_continue(filters):
            self.tracer.continue_wait()
        if filters in self._filters_heard:
            return
        if name := seccomp.why_not(filters, self._calls):
            self.tracer.release()
            raise RefusedForGood(
                f"the seccomp filter of process {self._pid} does not allow {name}(2)",
                "allow it in the filter, or restart it as: aiflame record -- COMMAND",
            )
        self._filters_heard.add(filters)

    def _has_room(self, lowest: int, registers: Registers) -> bool:
        """Whether a thread's own stack reaches down so far.

        The first thread's is called so; glibc has the control block of any other, which FS points
        to, on top of its stack. What coroutines run on may end anywhere.
        """
        own = [
            mapping
            for mapping in procfs.writable_mappings(self._inspector.opener, self._pid)
            if mapping.start <= registers.rsp < mapping.end
        ]
        if not own or lowest < own[0].start:
            return False
        if own[0].path != "[stack]" and not registers.rsp < registers.fs_base < own[0].end:
            return False
        span = Span(self._pid, self._pid, lowest, registers.rsp - lowest)
        return len(self._memory.read([span])[0].data) == span.size

    def _load(self, task: int, name: str, data: bytes) -> int:
        """Has the new thread load the library; returns what its function answered."""
        self._heard_s = time.monotonic()
        try:
            state = self._wait(task, 1)
            why, may_help = self._load_from_memory(task, state.file, data)
            if why and may_help:
                why = self._load_from_file(task, name, data, why)
            if why:
                raise AiflameError(f"process {self._pid} cannot load {name}: {why}", _cure(why))
            return self._state(task).answer
        except Overwritten:
            self._heard_s = -math.inf  # it is not the thread's any more
            raise
        finally:
            with contextlib.suppress(AiflameError):
                self._write(task + requests.GO_AT, _LEAVE)

    def _write(self, address: int, data: bytes) -> None:
        """Writes what the new thread waits for, as long as it does: it unmaps that when it ends."""
        if time.monotonic() - self._heard_s > _WAITING_S:
            raise AiflameError(f"process {self._pid} was not told to load it in time", "try again")
        self.tracer.write(self._pid, address, data)

    def _load_from_memory(self, task: int, fd: int, data: bytes) -> tuple[str, bool]:
        """Returns why it cannot be loaded from memory, "" if it was; whether a file may help."""
        if fd < 0:
            return f"no memory file: {os.strerror(-fd)}", True
        try:
            fill_memory(self._pid, fd, data)
        except OSError as error:
            return f"its memory file cannot be written: {error.strerror}", True
        why = self._open(task, memory_path(fd), 2)
        return why, any(words in why for words in _NOT_FROM_MEMORY)

    def _load_from_file(self, task: int, name: str, data: bytes, before: str) -> str:
        owner_uid = procfs.status(self._pid).owner_uid
        try:
            file = deliver_file(self._pid, owner_uid, name, data)
        except InjectionRefused as error:
            raise InjectionRefused(f"{error}; before: {before}", error.hint) from error
        try:
            return self._open(task, file.path, self._state(task).done + 1)
        finally:
            file.remove()

    def _open(self, task: int, path: str, until: int) -> str:
        """Has a file loaded; returns what the dynamic loader complains of, "" for nothing."""
        self._write(task + requests.PATH_AT, path.encode() + b"\0")
        self._write(task + requests.ERROR_AT, _NO_ERROR)
        self._write(task + requests.GO_AT, _GO)
        state = self._wait(task, until)
        if state.error:
            text = self.tracer.read(self._pid, state.error, _MAX_ERROR_BYTES)
            return text.split(b"\0", 1)[0].decode(errors="replace") or "no reason was given"
        return "" if state.handle else _NO_REASON

    def _wait(self, task: int, until: int) -> TaskState:
        """Waits until the new thread has done so many steps."""
        until_s = time.monotonic() + _LOADING_S
        while time.monotonic() < until_s:
            state = self._state(task)
            if state.done >= until:
                self._heard_s = time.monotonic()
                return state
            time.sleep(_LOOK_S)
        raise AiflameError(f"process {self._pid} has not loaded it within {_LOADING_S:.0f} s")

    def _state(self, task: int) -> TaskState:
        return requests.task_state(self.tracer.read(self._pid, task, requests.TASK_STATE_BYTES))


def _ignore(_: int, __: str) -> None:
    """An interpreter that is not known is asked nothing."""


def _read(library: Path) -> tuple[bytes, str]:
    """Returns the bytes and the build id of a library, which is ours and needs no guard."""
    try:
        with library.open("rb") as file:
            return file.read(), ElfImage.from_fd(file.fileno()).build_id
    except OSError as error:
        raise AiflameError(f"cannot read {library}: {error.strerror}") from error


def _cure(why: str) -> str | None:
    return next((cure for words, cure in _CURES if words in why), None)
