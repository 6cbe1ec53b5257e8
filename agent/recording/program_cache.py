# SPDX-License-Identifier: Apache-2.0
"""Compiled programs, kept between recordings: compiling takes BCC most of a second.

What the compiler made is a list of instructions and of maps; where an instruction names a map it
holds a descriptor of the compiling process. Kept are the instructions with the map's number in
that place, and what each map was created with, so that any process can make the maps and load the
programs by bpf(2) alone. The kernel's verifier judges them each time anew.

A kept bundle is for one source, one set of macros and one kernel: its name is made from these. The
directory is the recorder's own (see `symbols.store`).
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import struct
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from aiflame.agent.recording import syscalls

_SUFFIX = ".bpf"
_MAGIC = b"aifbpf01"
_HEADER = struct.Struct("<8sI")
# The kernel's build id: another kernel, other offsets in its structures.
_KERNEL_NOTES = Path("/sys/kernel/notes")

# struct bpf_insn (include/uapi/linux/bpf.h): opcode, registers, offset, immediate.
_INSTRUCTION = struct.Struct("<BBhi")
_LOAD_IMMEDIATE_64, _PSEUDO_MAP_FD = 0x18, 1


ITERATOR = "iterator"


class CompiledProgram(NamedTuple):
    """Instructions as the kernel takes them, with descriptors of this process where maps are."""

    kind: str
    instructions: bytes
    function_type: int = 0  # of an iterator: BTF id of the kernel function that stands for its kind


def bundle_name(source: str, macros: Mapping[str, int | str]) -> str:
    """Returns the file name of a bundle."""
    try:
        kernel = _KERNEL_NOTES.read_bytes()
    except OSError:
        kernel = platform.release().encode() + platform.version().encode()
    text = json.dumps([source, sorted(macros.items()), kernel.hex()])
    return f"programs-{hashlib.sha256(text.encode()).hexdigest()[:32]}{_SUFFIX}"


def pack(
    programs: Mapping[str, CompiledProgram], maps: Mapping[str, int], inner: Mapping[str, str]
) -> bytes:
    """Makes a bundle.

    Args:
        programs: Compiled and loaded in this process, by name.
        maps: Descriptors of the maps that a recorder needs, by name.
        inner: The template of each map of maps, by name; both among `maps`.

    Raises:
        OSError: The kernel does not tell what a map was created with.
    """
    facts = {name: syscalls.map_facts(fd) for name, fd in maps.items()}
    # A map of maps is made like its template, which so comes first.
    order = sorted(facts, key=lambda name: name in inner)
    names = {found.id: name for name, found in facts.items()}
    rows, bodies = [], []
    for name, made in programs.items():
        body = bytearray(made.instructions)
        places = []
        for at, fd in _map_references(body):
            found = syscalls.map_facts(fd)
            known = names.setdefault(found.id, f"map {len(names)}")
            if known not in facts:
                facts[known] = found
                order.append(known)
            places.append((at, order.index(known)))
            struct.pack_into("<i", body, at + 4, 0)
        rows.append((name, made.kind, made.function_type, len(body), places))
        bodies.append(bytes(body))
    shapes = [(name, *facts[name][1:], inner.get(name)) for name in order]
    text = json.dumps({"maps": shapes, "programs": rows}).encode()
    content = _HEADER.pack(_MAGIC, len(text)) + text + b"".join(bodies)
    return hashlib.sha256(content).digest() + content


def _map_references(body: bytearray) -> list[tuple[int, int]]:
    """Returns (byte offset, descriptor) of each instruction that loads a map."""
    found = []
    for at in range(0, len(body), _INSTRUCTION.size):
        opcode, registers, _, immediate = _INSTRUCTION.unpack_from(body, at)
        if opcode == _LOAD_IMMEDIATE_64 and registers >> 4 == _PSEUDO_MAP_FD:
            found.append((at, immediate))
    return found


class StaleBundle(Exception):
    """A bundle that is damaged, of another version, or that this kernel does not take."""


class LatePrograms:
    """Programs of a bundle that were left out: the verifier takes its time for each."""

    def __init__(self, rows: Sequence[Any], bodies: bytes, maps: Mapping[str, int]) -> None:
        self._rows = rows
        self._bodies = bodies
        self._maps = maps

    def load(self, attach_type: int = 0) -> dict[str, int]:
        """Loads them; returns descriptors by name.

        Args:
            attach_type: As for syscalls.load_program.

        Raises:
            StaleBundle: The kernel refuses one; nothing is left behind then.
        """
        opened: list[int] = []
        try:
            return _load_programs(self._rows, self._bodies, self._maps, opened, attach_type)
        except OSError as error:
            _close_all(opened)
            raise StaleBundle(str(error)) from error


class Loaded(NamedTuple):
    """Descriptors of programs and maps by name, and what can be loaded later."""

    programs: dict[str, int]
    maps: dict[str, int]
    late: LatePrograms | None


def load(bundle: bytes, late: Collection[str] = ()) -> Loaded:
    """Makes the maps and loads the programs.

    Args:
        bundle: As pack made it.
        late: Names of programs that may not be needed.

    Raises:
        StaleBundle: Nothing is left behind then.
    """
    opened: list[int] = []
    try:
        checksum, content = bundle[:32], bundle[32:]
        magic, size = _HEADER.unpack_from(content)
        if magic != _MAGIC or hashlib.sha256(content).digest() != checksum:
            raise StaleBundle("damaged, or of another version")
        head = json.loads(content[_HEADER.size : _HEADER.size + size])
        rows, bodies = _placed(head["programs"]), content[_HEADER.size + size :]
        maps = _make_maps(head["maps"], opened)
        now = [row for row in rows if row[0] not in late]
        programs = _load_programs(now, bodies, maps, opened)
    except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
        _close_all(opened)
        raise StaleBundle(str(error)) from error
    return Loaded(programs, maps, LatePrograms([r for r in rows if r[0] in late], bodies, maps))


def _close_all(descriptors: Sequence[int]) -> None:
    for fd in descriptors:
        os.close(fd)


def _placed(rows: Sequence[Any]) -> list[Any]:
    """Puts before the size of each program where it begins among all bodies."""
    placed, begin = [], 0
    for name, kind, function_type, size, relocations in rows:
        placed.append((name, kind, function_type, begin, size, relocations))
        begin += size
    return placed


def _make_maps(rows: Sequence[Any], opened: list[int]) -> dict[str, int]:
    made: dict[str, int] = {}
    for name, kind, key_bytes, value_bytes, max_entries, flags, inner in rows:
        inner_fd = made[inner] if inner is not None else 0
        shape = syscalls.MapShape(kind, key_bytes, value_bytes, max_entries, flags)
        made[name] = syscalls.create_map(shape, inner_fd)
        opened.append(made[name])
    return made


def _load_programs(
    rows: Sequence[Any],
    bodies: bytes,
    maps: Mapping[str, int],
    opened: list[int],
    attach_type: int = 0,
) -> dict[str, int]:
    fds = list(maps.values())
    loaded: dict[str, int] = {}
    for name, kind, function_type, begin, size, relocations in rows:
        body = bytearray(bodies[begin : begin + size])
        for at, index in relocations:
            struct.pack_into("<i", body, at + 4, fds[index])
        if kind == ITERATOR:
            loaded[name] = syscalls.load_iterator(bytes(body), function_type)
        else:
            loaded[name] = syscalls.load_program(kind, name, bytes(body), attach_type)
        opened.append(loaded[name])
    return loaded
