# SPDX-License-Identifier: Apache-2.0
"""Has CPython 3.14 and later load a library by itself, in the way of `sys.remote_exec` (PEP 768).

The path of a script is written into the state of the main thread, which runs it between two
instructions of Python: no thread is stopped. What it runs there only makes a thread, in which the
library is loaded, so that it waits neither for the dynamic loader nor for a disk.

A main thread that is in C code, or waits, does not come by: it is asked for `_ASKED_S`, and then
the request is taken back. The library is called `asked` until the new thread renames it, and is
removed when all is done. Whoever is first, the target by renaming or we by removing, has its way:
what was taken back is not loaded later, whenever the script may run.
"""

from __future__ import annotations

import struct
import time

from aiflame.agent.errors import AiflameError
from aiflame.agent.injection.delivery import DeliveredFile, deliver_own_files, memory_path
from aiflame.agent.injection.requests import SYNCHRONOUS
from aiflame.agent.injection.tracer import InjectionRefused, Tracer
from aiflame.agent.processes import procfs
from aiflame.agent.python import debugoffsets
from aiflame.agent.python.debugoffsets import DebuggerSupport, read_debugger_support
from aiflame.agent.python.interpreter import LoadedInterpreter
from aiflame.agent.python.layouts import UnsupportedPython
from aiflame.agent.python.memory import sound_address
from aiflame.agent.python.threads import MAX_INTERPRETERS

# Steps of a training loop take 0.1 s and more, in which the main thread may wait for a device.
_ASKED_S = 1.0
# Loading, after that; as of a thread that is made for it.
_LOADING_S = 30.0
_LOOK_S = 0.001

# Before that there is none.
FIRST_VERSION = (3, 14)

_SCRIPT, _ASKED = "script.py", "asked"
# _PY_EVAL_PLEASE_STOP_BIT, in the lowest byte of eval_breaker with all other flags: what follows is
# a version, which is not ours to write (v3.14.8 Include/internal/pycore_ceval.h).
_PLEASE_STOP = 1 << 5
_MAIN_INTERPRETER = 0
_SECCOMP_OFF = "0"
_WORD, _INT = struct.Struct("<Q"), struct.Struct("<i")

# Of built-in modules but for _ctypes, without which there is no way: packages take long to import.
# Signals are for the program's own threads, also in threads that the library makes, but for those
# that an instruction raises. Exceptions would be printed, wherever the program writes to: what
# fails is found out from outside.
_TEXT = """\
import posix

def remove(path):
    try:
        posix.unlink(path)
    except OSError:
        pass

def load():
    try:
        import _ctypes, _signal
        blocked = _signal.valid_signals() - {synchronous}
        _signal.pthread_sigmask(_signal.SIG_BLOCK, blocked)
        posix.rename({asked!r}, {library!r})
    except BaseException:
        return remove({asked!r})
    try:
        try:
            memory = posix.memfd_create({name!r}, posix.MFD_CLOEXEC)
            try:
                with open({library!r}, "rb") as file:
                    data = memoryview(file.read())
                while data:
                    data = data[posix.write(memory, data):]
                _ctypes.dlopen({before!r} + str(memory), {now})
            finally:
                posix.close(memory)
        except OSError:
            _ctypes.dlopen({library!r}, {now})
    except BaseException:
        pass
    remove({library!r})

try:
    import _thread
    _thread.start_new_thread(load, ())
except BaseException:
    remove({asked!r})
"""
_RTLD_NOW = 2  # bits/dlfcn.h


class _NotAsked(AiflameError):
    """The process does not run scripts for others, or not now."""


class RemoteExec:
    """Asks one process.

    Args:
        pid: The process.
        interpreter: What it runs.
        tracer: Reads and writes its memory.
    """

    def __init__(self, pid: int, interpreter: LoadedInterpreter, tracer: Tracer) -> None:
        self._pid = pid
        self._runtime = interpreter.runtime_address
        self._layout = interpreter.layout
        self._tracer = tracer

    def load(self, name: str, library: bytes) -> str:
        """Has it load a library.

        Args:
            name: What the library is called.
            library: Its bytes.

        Returns:
            Why it did not begin to, and will not, "" where it has tried: the process's mappings
            tell what came of that.

        Raises:
            TryAgain: It has ended.
            AiflameError: It is at it, and does not finish.
        """
        try:
            support, thread = self._main_thread()
            file = deliver_own_files(
                self._pid,
                self._file_uid(),
                (_SCRIPT, _ASKED, name),
                lambda directory: {
                    _ASKED: library,
                    _SCRIPT: _script(directory, name),
                },
            )
        except (_NotAsked, InjectionRefused) as error:
            return str(error)
        try:
            self._ask(support, thread, file.path)
            if not self._is_taken(file, _ASKED_S):
                if not self._int(thread + support.pending_call):
                    self._is_taken(file, _LOADING_S)  # the script is being run
                self._write(thread + support.pending_call, _INT.pack(0))
                if file.take(_ASKED):
                    return f"its main thread did not run the script within {_ASKED_S:.0f} s"
            self._wait(file, name)
            return ""
        finally:
            file.remove()

    def _main_thread(self) -> tuple[DebuggerSupport, int]:
        """Returns where things are, and the state of the main thread.

        Raises:
            _NotAsked: It cannot be asked.
        """
        if (procfs.status_field(self._pid, "Seccomp") or ["?"])[0] != _SECCOMP_OFF:
            # They may end the process for a call; the other way has few, and looks before.
            raise _NotAsked("the process has a seccomp filter")
        try:
            support = read_debugger_support(self._read(self._runtime, debugoffsets.MAX_BYTES))
        except UnsupportedPython as error:
            raise _NotAsked(str(error)) from error
        if support is None:
            version = ".".join(map(str, self._layout.version))
            raise _NotAsked(f"CPython {version} has no sys.remote_exec")
        interpreter = self._main_interpreter(support)
        if self._int(interpreter + support.enabled) != 1:
            raise _NotAsked(
                "it was started with PYTHON_DISABLE_REMOTE_DEBUG or -X disable-remote-debug"
            )
        thread = self._pointer(interpreter + support.main_thread)
        if self._int(thread + support.pending_call):
            raise _NotAsked("a script of another debugger waits there")
        return support, thread

    def _main_interpreter(self, support: DebuggerSupport) -> int:
        interpreter = self._pointer(self._runtime + self._layout.runtime_interpreters)
        for _ in range(MAX_INTERPRETERS):
            if self._word(interpreter + support.interpreter_id) == _MAIN_INTERPRETER:
                return interpreter
            interpreter = self._pointer(interpreter + self._layout.interpreter_next)
        raise _NotAsked("its main interpreter was not found")

    def _file_uid(self) -> int:
        """The user that it opens files as, the last of the four of proc_pid_status(5)."""
        return int((procfs.status_field(self._pid, "Uid") or ["-1"])[-1])

    def _ask(self, support: DebuggerSupport, thread: int, path: str) -> None:
        """Asks in the order of `sys.remote_exec`: path, request, flag."""
        text = path.encode() + b"\0"
        if len(text) > support.script_path_size:
            raise AiflameError(f"the path of a script is longer than {support.script_path_size}")
        self._write(thread + support.script_path, text)
        self._write(thread + support.pending_call, _INT.pack(1))
        flags = self._read(thread + support.eval_breaker, 1)
        self._write(thread + support.eval_breaker, bytes([flags[0] | _PLEASE_STOP]))

    def _is_taken(self, file: DeliveredFile, patience_s: float) -> bool:
        """Waits for a thread that takes the library."""
        until_s = time.monotonic() + patience_s
        while file.has(_ASKED):
            if time.monotonic() > until_s:
                return False
            self._require_alive()
            time.sleep(_LOOK_S)
        return True

    def _wait(self, file: DeliveredFile, name: str) -> None:
        """Waits until the thread that has taken the library has removed it."""
        until_s = time.monotonic() + _LOADING_S
        while file.has(name):
            if time.monotonic() > until_s:
                raise AiflameError(
                    f"process {self._pid} has not loaded it within {_LOADING_S:.0f} s"
                )
            self._require_alive()
            time.sleep(_LOOK_S)

    def _require_alive(self) -> None:
        self._read(self._runtime, 1)

    def _pointer(self, address: int) -> int:
        value = self._word(address)
        if not sound_address(value):
            raise _NotAsked("its main thread was not found")
        return value

    def _word(self, address: int) -> int:
        return int(_WORD.unpack(self._read(address, _WORD.size))[0])

    def _int(self, address: int) -> int:
        return int(_INT.unpack(self._read(address, _INT.size))[0])

    def _read(self, address: int, size: int) -> bytes:
        data = self._tracer.read(self._pid, address, size)
        if len(data) < size:
            raise _NotAsked("its memory cannot be read")
        return data

    def _write(self, address: int, data: bytes) -> None:
        self._tracer.write(self._pid, address, data)


def _script(directory: str, name: str) -> bytes:
    # The dynamic loader takes libraries of one path for one: this one has no number yet.
    before = memory_path(0).removesuffix("0")
    return _TEXT.format(
        asked=f"{directory}/{_ASKED}",
        library=f"{directory}/{name}",
        name=f"/{name}",
        before=before,
        now=_RTLD_NOW,
        synchronous={*SYNCHRONOUS},
    ).encode()
