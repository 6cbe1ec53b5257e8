# SPDX-License-Identifier: Apache-2.0
"""Linker names to source names: C++ (Itanium ABI) and both Rust schemes.

C++ goes to libstdc++ through cxxfilt. Its demangler expands substitutions without a bound: a name
of 300 bytes can ask for gigabytes and minutes, and nothing can interrupt it. So in the worker
process the names of a binary are demangled in a forked child with little memory and little CPU
time a name. When the child dies, the name that it was at stays mangled, and another continues.

Names that no scheme explains come back as they are.
"""

from __future__ import annotations

import os
import resource
import signal
import struct
from collections.abc import Sequence
from pathlib import Path

import cxxfilt
from aiflame.agent.symbols.frames import MAX_NAME_CHARS, clean_name
from aiflame.agent.symbols.rust import demangle_rust

# Longer than the longest of libtorch (7.8 KB); beyond it only the head of the name is of use.
MAX_MANGLED_BYTES = 10_000
# A name of 4,096 characters in the longest UTF-8; more would be cut anyway.
_MAX_READABLE_BYTES = 4 * MAX_NAME_CHARS
# What one name may take; real ones take 2 us and a few KB.
_MEMORY_BYTES = 64 * 1024 * 1024
_CPU_S = 0.25
# Names that go over before the remaining names of a binary are left mangled.
_MAX_FAILURES = 3
_PLT = b"@plt"
_LENGTH = struct.Struct("<I")


class Demangler:
    """Demangles the names of one binary.

    Args:
        guard: Run libstdc++ in forked children. Only for a process with one thread.
        enabled: False gives every name back as it is, only cleaned.

    Attributes:
        failures: Names that went over the limits.
        missing: There is no libstdc++.
    """

    def __init__(self, guard: bool = False, enabled: bool = True) -> None:
        self._guard = guard
        self._enabled = enabled
        self.failures = 0
        self.missing = isinstance(cxxfilt.default_demangler, cxxfilt.DeferedErrorDemangler)

    def names(self, mangled: Sequence[bytes | None]) -> list[str | None]:
        """Readable names, in order; None stays None."""
        distinct = list(dict.fromkeys(name for name in mangled if name is not None))
        readable: dict[bytes | None, str] = {name: self._without_cxx(name) for name in distinct}
        if self._enabled and not self.missing:
            # What Rust did not explain and is not over the length is still as it was.
            waiting = [name for name in distinct if _is_cxx(name, readable[name])]
            stems = [name.removesuffix(_PLT) for name in waiting]
            results = self._guarded(stems) if self._guard else [_itanium(stem) for stem in stems]
            for name, result in zip(waiting, results, strict=True):
                suffix = _PLT if name.endswith(_PLT) else b""
                readable[name] = _text(result + suffix)
        return [None if name is None else readable[name] for name in mangled]

    def one(self, mangled: str) -> str:
        """One readable name."""
        return self.names([mangled.encode("utf-8", "surrogateescape")])[0] or ""

    def _without_cxx(self, name: bytes) -> str:
        if self._enabled and len(name) <= MAX_MANGLED_BYTES and name.startswith((b"_R", b"_ZN")):
            stem = name.removesuffix(_PLT)
            rust = demangle_rust(stem.decode("utf-8", "replace"))
            if rust is not None:
                return clean_name(rust + name[len(stem) :].decode("ascii"))
        return _text(name)

    def _guarded(self, names: list[bytes]) -> list[bytes]:
        results: list[bytes] = []
        while len(results) < len(names) and self.failures < _MAX_FAILURES:
            results += _in_child(names[len(results) :])
            if len(results) < len(names):
                results.append(names[len(results)])
                self.failures += 1
        return results + names[len(results) :]


def _text(name: bytes) -> str:
    return clean_name(name[:_MAX_READABLE_BYTES].decode("utf-8", "replace"))


def _is_cxx(name: bytes, readable: str) -> bool:
    return name.startswith(b"_Z") and len(name) <= MAX_MANGLED_BYTES and readable.startswith("_Z")


def _itanium(name: bytes) -> bytes:
    """The readable name, cut; the name itself when it is no C++ name after all."""
    try:
        readable: bytes = cxxfilt.demangleb(name)
    except cxxfilt.Error:
        return name
    return readable[:_MAX_READABLE_BYTES]


def _in_child(names: list[bytes]) -> list[bytes]:
    """Demangle in a forked child; fewer results than names when it died at the next one."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reading)
            _limited(names, writing)
        finally:
            # Whatever happened: no cleanup of the parent's state may run here.
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        data = pipe.read()
    os.waitpid(child, 0)
    results = []
    position = 0
    while position + _LENGTH.size <= len(data):
        (length,) = _LENGTH.unpack_from(data, position)
        position += _LENGTH.size + length
        if position > len(data):
            break
        results.append(data[position - length : position])
    return results


def _limited(names: list[bytes], writing: int) -> None:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    limit = pages * resource.getpagesize() + _MEMORY_BYTES
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    # The timer of the worker stays with the worker: a fork starts without timers.
    signal.signal(signal.SIGVTALRM, signal.SIG_DFL)
    for name in names:
        signal.setitimer(signal.ITIMER_VIRTUAL, _CPU_S)
        result = _itanium(name)
        os.write(writing, _LENGTH.pack(len(result)) + result)
