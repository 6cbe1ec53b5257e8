# SPDX-License-Identifier: Apache-2.0
"""The compiled kernel programs as one file, and how they get from it into a kernel.

The programs are compiled once, by BCC, when the package is built, and run on every host: nothing in
the compiled code depends on a kernel or on an option. A file holds the instructions, the shapes of
the maps, and where the loader has to put something in: the descriptor of a map, or a constant of
this host (bpf/host.h). Loading takes bpf(2) and no compiler. The kernel's verifier judges the
programs anew each time.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import struct
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType

from aiflame.agent import priority
from aiflame.agent.kernel import syscalls
from aiflame.agent.kernel.program_list import ITERATOR

_MAGIC = b"aifbpf02"
_DIGEST_BYTES = hashlib.sha256().digest_size
_HEADER = struct.Struct("<8sI")

# struct bpf_insn (include/uapi/linux/bpf.h): opcode, registers, offset, immediate. A 64-bit load
# takes two: the second one's immediate is the high half.
_INSTRUCTION = struct.Struct("<BBhi")
_LOAD_IMMEDIATE_64, _PSEUDO_MAP_FD = 0x18, 1
# HOST_MARK of bpf/host.h, its high half: "aifl".
_HOST_MARK = 0x6169666C


class BadBytecode(Exception):
    """A file that is damaged or of another version."""


class Refused(Exception):
    """The kernel does not take a program or a map.

    Attributes:
        errno: The kernel's.
        log: The verifier's last words, "" where it had none.
    """

    def __init__(self, name: str, error: OSError, log: str = "") -> None:
        super().__init__(f"{name}: {error.strerror}" + (f"\n{log}" if log else ""))
        self.errno = error.errno
        self.log = log


@dataclass(frozen=True, slots=True)
class MapDefinition:
    """A map as it was compiled.

    Attributes:
        shape: What it is created with; the number of entries may be the host's to decide.
        template: Of a map of maps: the name of the map that the inner ones are like.
    """

    name: str
    shape: syscalls.MapShape
    template: str | None = None


@dataclass(frozen=True, slots=True)
class ProgramDefinition:
    """A program as it was compiled.

    Attributes:
        kind: As in program_list.
        instructions: struct bpf_insn.
        maps: Offset in bytes of each instruction that loads a map, and the map's name.
        constants: Offset of each that loads a constant of the host, and the constant's number.
    """

    name: str
    kind: str
    instructions: bytes
    maps: tuple[tuple[int, str], ...]
    constants: tuple[tuple[int, int], ...]

    def linked(self, map_fds: Mapping[str, int], constants: Mapping[int, int]) -> bytes:
        """Returns the instructions for this host.

        Args:
            map_fds: Descriptors of the maps in this process.
            constants: Values of the host's constants by number, unsigned 64 bits.
        """
        body = bytearray(self.instructions)
        for at, name in self.maps:
            struct.pack_into("<i", body, at + 4, map_fds[name])
        for at, number in self.constants:
            value = constants[number]
            struct.pack_into("<I", body, at + 4, value & 0xFFFF_FFFF)
            struct.pack_into("<I", body, at + 12, value >> 32)
        return bytes(body)


@dataclass(frozen=True, slots=True)
class Bytecode:
    """All programs and maps.

    Attributes:
        source_digest: Of the C that it was compiled from.
        compiler: Who compiled it, in words.
    """

    source_digest: str
    compiler: str
    maps: tuple[MapDefinition, ...]
    programs: tuple[ProgramDefinition, ...]

    def to_bytes(self) -> bytes:
        """Returns the file: a digest, a header, the facts as JSON, the programs."""
        facts = {
            "source": self.source_digest,
            "compiler": self.compiler,
            "maps": [(m.name, *m.shape, m.template) for m in self.maps],
            "programs": [
                {**asdict(program), "instructions": len(program.instructions)}
                for program in self.programs
            ],
        }
        text = json.dumps(facts).encode()
        bodies = b"".join(program.instructions for program in self.programs)
        content = _HEADER.pack(_MAGIC, len(text)) + text + bodies
        return hashlib.sha256(content).digest() + content

    @classmethod
    def from_bytes(cls, data: bytes) -> Bytecode:
        """Reads what to_bytes wrote.

        Raises:
            BadBytecode: It did not.
        """
        digest, content = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
        if hashlib.sha256(content).digest() != digest or content[: len(_MAGIC)] != _MAGIC:
            raise BadBytecode("damaged, or of another version")
        _, size = _HEADER.unpack_from(content)
        facts = json.loads(content[_HEADER.size : _HEADER.size + size])
        at = _HEADER.size + size
        programs = []
        for row in facts["programs"]:
            end = at + row["instructions"]
            references = {name: tuple(map(tuple, row[name])) for name in ("maps", "constants")}
            programs.append(
                ProgramDefinition(**{**row, **references, "instructions": content[at:end]})
            )
            at = end
        maps = tuple(
            MapDefinition(name, syscalls.MapShape(*shape), template)
            for name, *shape, template in facts["maps"]
        )
        return cls(facts["source"], facts["compiler"], maps, tuple(programs))

    def program(self, name: str) -> ProgramDefinition:
        """Returns the program of that name."""
        return next(program for program in self.programs if program.name == name)


def define_program(
    name: str, kind: str, instructions: bytes, map_names: Mapping[int, str]
) -> ProgramDefinition:
    """Makes a definition of what the compiler gives out.

    Args:
        name: Of the program.
        kind: As in program_list.
        instructions: With descriptors of this process where maps are.
        map_names: Names of all maps by the kernel's number.

    Raises:
        KeyError: It mentions a map that has no name here.
    """
    body = bytearray(instructions)
    maps, constants = [], []
    for at, source, low, high in _loads_of_64_bits(body):
        if source == _PSEUDO_MAP_FD:
            maps.append((at, map_names[syscalls.map_facts(low).id]))
            struct.pack_into("<i", body, at + 4, 0)
        elif high == _HOST_MARK:
            constants.append((at, low))
    return ProgramDefinition(name, kind, bytes(body), tuple(maps), tuple(constants))


def _loads_of_64_bits(body: bytearray) -> Iterator[tuple[int, int, int, int]]:
    """Yields offset, source register, low and high half of each."""
    at = 0
    while at < len(body):
        opcode, registers, _, low = _INSTRUCTION.unpack_from(body, at)
        if opcode == _LOAD_IMMEDIATE_64:
            high = _INSTRUCTION.unpack_from(body, at + _INSTRUCTION.size)[3]
            yield at, registers >> 4, low, high & 0xFFFF_FFFF
            at += _INSTRUCTION.size
        at += _INSTRUCTION.size


@dataclass(frozen=True, slots=True)
class Host:
    """What this host and recording put into the programs.

    Attributes:
        constants: By number, unsigned.
        map_entries: Of maps whose size is not compiled in.
        iterated_function: BTF id of the kernel function that stands for iterators over tasks; None
            where the kernel has none.
    """

    constants: Mapping[int, int]
    map_entries: Mapping[str, int]
    iterated_function: int | None


class Loader:
    """Makes the maps and loads programs of one bytecode.

    Args:
        bytecode: Of which.
        host: What is put into it.
        wanted: Names of all programs that may be loaded: maps that none of them uses are not made.

    Attributes:
        bytecode: As given, or what replaced it.
        host: As given.
        map_fds: Descriptors of the maps by name: those that the wanted programs use.

    Raises:
        Refused: The kernel does not take a map; none is left then.
    """

    def __init__(self, bytecode: Bytecode, host: Host, wanted: Collection[str]) -> None:
        self.bytecode = bytecode
        self.host = host
        used = {name for program in wanted for _, name in bytecode.program(program).maps}
        used |= {m.template for m in bytecode.maps if m.name in used and m.template is not None}
        self.map_fds: dict[str, int] = {}
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(self._close)
            for definition in bytecode.maps:
                if definition.name in used:
                    self.map_fds[definition.name] = self._create(definition)
            on_failure.pop_all()

    def _close(self) -> None:
        close_all(tuple(self.map_fds.values()))

    def _create(self, definition: MapDefinition) -> int:
        entries = self.host.map_entries.get(definition.name, definition.shape.max_entries)
        inner = 0 if definition.template is None else self.map_fds[definition.template]
        try:
            return syscalls.create_map(definition.shape._replace(max_entries=entries), inner)
        except OSError as error:
            raise Refused(f"map {definition.name}", error) from error

    def replace(self, bytecode: Bytecode) -> bool:
        """Loads programs of another bytecode from now on; returns False if its maps are others."""
        if set(bytecode.maps) != set(self.bytecode.maps):
            return False
        self.bytecode = bytecode
        return True

    def load(
        self,
        names: Collection[str],
        attach_type: int = 0,
        instead: Mapping[str, int] = MappingProxyType({}),
    ) -> dict[str, int]:
        """Loads programs; returns descriptors by name.

        Several at a time: the kernel's verifier takes up to 0.1 s for one of them.

        Args:
            names: Of the programs. An iterator is left out where the kernel has none.
            attach_type: As for syscalls.load_program.
            instead: Descriptors of maps to take for those of `map_fds`, by name.

        Raises:
            Refused: The kernel does not take one; none is left then.
        """
        programs = [self.bytecode.program(name) for name in names]
        # The longest first, so that no thread is left with one at the end.
        programs.sort(key=lambda program: -len(program.instructions))
        with priority.urgent_pool(len(programs)) as pool:
            loading = {p.name: pool.submit(self._load, p, attach_type, instead) for p in programs}
        refused = [error for f in loading.values() if (error := f.exception()) is not None]
        loaded = {
            name: fd
            for name, future in loading.items()
            if future.exception() is None and (fd := future.result()) is not None
        }
        if refused:
            close_all(tuple(loaded.values()))
            raise refused[0]
        return loaded

    def _load(
        self, program: ProgramDefinition, attach_type: int, instead: Mapping[str, int]
    ) -> int | None:
        body = program.linked({**self.map_fds, **instead}, self.host.constants)
        if program.kind == ITERATOR:
            if self.host.iterated_function is None:
                return None
            try:
                return syscalls.load_iterator(body, self.host.iterated_function)
            except OSError:
                return None  # switched off, or a kernel before v5.8: a recording does without
        try:
            return syscalls.load_program(program.kind, program.name, body, attach_type)
        except OSError as error:
            is_judged = error.errno not in syscalls.SHORT
            log = ""
            if is_judged:
                log = syscalls.verifier_log(program.kind, program.name, body, attach_type)
            raise Refused(program.name, error, log) from error


def close_all(descriptors: Sequence[int]) -> None:
    """Closes descriptors."""
    for fd in descriptors:
        os.close(fd)
