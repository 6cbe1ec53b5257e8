# SPDX-License-Identifier: Apache-2.0
"""Gives the stacks of a window their names.

Pure but for caches: all that is known of processes comes from the window itself, so that a
recording is named while it goes on, after it was killed, or on another day, by one and the same
code. User-space names come from the symbol service, a child process, kernel names from kallsyms,
code in anonymous memory from the target's perf-PID.map. Stacks are then truncated where a walk by
frame pointers left the code of the process, and it is told which ones are complete.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from aiflame.agent.elf.headers import HEADERS, Headers
from aiflame.agent.kernel import abi
from aiflame.agent.losses import LossKind
from aiflame.agent.model.profile import (
    COMPLETE_REASONS,
    EXITED,
    KERNEL_FRAMES_MARKER,
    UNMAPPED,
    FrameKind,
    StopReason,
)
from aiflame.agent.model.window import NONE, Rows, Window
from aiflame.agent.python.codes import UNREADABLE_FRAME
from aiflame.agent.python.interpreter import Interpreter, may_hold_interpreter
from aiflame.agent.python.questions import interpreter_in
from aiflame.agent.python.splice import Role, role_of
from aiflame.agent.python.trampolines import trampoline_source
from aiflame.agent.python.walk import PythonFrame
from aiflame.agent.symbolize.files import Files
from aiflame.agent.symbolize.known_names import KnownNames, NamedRange
from aiflame.agent.symbolize.mapped import MappedProcess, by_process
from aiflame.agent.symbolize.raw_stacks import I64, KERNEL_OWNER, U64, RawRow, RawStacks
from aiflame.agent.symbolize.recent import Recent
from aiflame.agent.symbolize.splicing import (
    MappedInterpreter,
    NativeFrame,
    PythonChain,
    Splicer,
    symbol_of,
)
from aiflame.agent.symbolize.stacks import KERNEL_CUT, FrameIds, NamedStack, UnnamedStack
from aiflame.agent.symbols import roots
from aiflame.agent.symbols.file_facts import FileFacts
from aiflame.agent.symbols.frames import SourceFrame, clean_name
from aiflame.agent.symbols.kallsyms import KernelName, KernelSymbols
from aiflame.agent.symbols.service import Request, SymbolService

_KERNEL_PATH = "[kernel]"

# What stands between a tracepoint and a BPF program (include/trace/bpf_probe.h, v6.18).
_TRACING_PREFIXES = ("bpf_trace_run", "__bpf_trace_", "__traceiter_", "trace_call_bpf")

# The system call (arch/x86/entry/syscalls, since v4.17), and what it calls only once the thread has
# the new program's address space: begin_new_exec frees the old one, load_elf_binary does the rest
# (fs/exec.c and fs/binfmt_elf.c, v5.10 and v6.18; elf_map is elf_load since v6.10).
_EXEC_SUFFIXES = ("_sys_execve", "_sys_execveat")
_PAST_EXEC = frozenset(
    {
        *("exit_mmap", "setup_arg_pages", "elf_map", "elf_load", "load_elf_interp"),
        *("create_elf_tables", "arch_setup_additional_pages", "set_brk", "vm_brk_flags"),
    }
)

# What is kept from window to window: for how many, and how much, as `Recent` has it. Addresses of
# hot code and what is read of files are asked of other processes, so they stay for long; what a
# process had mapped is sorted in 0.1 ms.
_ADDRESSES = (300, 1 << 14)
_FILES = (300, 1 << 9)
_PROCESSES = (60, 1 << 9)


@dataclass(slots=True)
class Location:
    """What is known of one distinct address of a window while it is being named."""

    chain: tuple[int, ...] = ()  # frame ids, innermost inlined function first
    is_mapped: bool = True
    is_start: bool = False
    is_tracing: bool = False  # the profiler's own, when it is at the leaf of a switch stack
    is_exec: bool = False
    is_past_exec: bool = False  # exec comes there once the caller's memory is gone
    is_trampoline: bool = False  # of CPython's -X perf
    binary: int = NONE
    binary_id: int | None = None
    address: int = 0  # in the binary
    sources: tuple[SourceFrame, ...] = ()
    label: str = ""

    @property
    def name(self) -> str:
        """Of the function that is not inlined, as far as one is known."""
        return self.sources[-1].name if self.sources else self.label


# Stands for one that is not named yet.
_UNNAMED = Location()


class Namer:
    """Names the stacks of one recording, window by window.

    Args:
        files: What processes had mapped.
        service: Names addresses in binaries.
        ids: Of frames and binaries.
        file_facts: Answers questions about files; closing it stays the caller's.
        known: What others have named of the same files; None: nothing.

    Attributes:
        losses: What could not be named.
        jit_symbols: What perf maps said of addresses of the stacks that were named last, by process
            and address.
    """

    def __init__(
        self,
        files: Files,
        service: SymbolService,
        ids: FrameIds,
        file_facts: FileFacts,
        known: KnownNames | None = None,
    ) -> None:
        self._files = files
        self._service = service
        self._ids = ids
        self._file_facts = file_facts
        self._guard = file_facts.guard
        self._splicer = Splicer(ids)
        self._known = KnownNames() if known is None else known
        self._is_kernel_hidden = False
        self._locations: Recent[tuple[int, int], Location] = Recent(*_ADDRESSES)
        self._headers: Recent[int, Headers | None] = Recent(*_FILES)
        self._interpreters: Recent[int, Interpreter | None] = Recent(*_FILES)
        self._processes: Recent[tuple[int, bytes], MappedProcess] = Recent(*_PROCESSES)
        self._expected: dict[tuple[int, int], NamedRange | None] = {}
        self._losses: Counter[LossKind] = Counter()
        # Who answers may have done so for captures before this one.
        self._losses_before = Counter(service.losses)
        self.jit_symbols: dict[tuple[int, int], str] = {}

    @property
    def losses(self) -> Counter[LossKind]:
        """What could not be named."""
        found = Counter(self._losses)
        found[LossKind.PYTHON_MISFIT] = self._splicer.misfits
        return found + (self._service.losses - self._losses_before)

    def name(self, window: Window, stacks: Sequence[UnnamedStack]) -> list[NamedStack]:
        """Names stacks of a window, in their order."""
        self.jit_symbols = {}
        for recent in (self._locations, self._headers, self._interpreters, self._processes):
            recent.turn()
        self._known.turn()
        if not stacks:
            return []
        facts = _Facts(window, self._mapped)
        rows = [
            (at, s.process, s.kernel_depth, s.stop_reason, s.addresses)
            for at, s in enumerate(stacks)
        ]
        raw = RawStacks.of_rows(rows)
        locations = self._located(raw, facts)
        kept = raw.kept_lengths(np.array([location.is_mapped for location in locations], bool))
        is_gone = raw.taken_by_exec(
            kept,
            np.array([location.is_exec for location in locations], bool),
            np.array([location.is_past_exec for location in locations], bool),
        )
        kept[is_gone] = raw.kernel_depths[is_gone]
        is_start = np.array([location.is_start for location in locations], bool)
        final = raw.final_stop_reasons(kept, is_start)
        final[is_gone] = StopReason.KERNEL_ONLY
        stop_reasons = final.tolist()
        sizes = np.array([len(location.chain) for location in locations], np.int64)
        chain_starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
        chains = np.array([frame for location in locations for frame in location.chain], np.int64)
        kept = raw.without_clone(
            kept,
            np.array([roots.is_clone(location.name) for location in locations], bool),
            np.array([roots.is_thread_start(location.name) for location in locations], bool),
        )
        first = raw.first_kept(
            np.array([location.is_tracing for location in locations], bool),
            np.array([stack.is_from_switch for stack in stacks], bool),
        )
        frames = raw.frame_ids(first, kept, chain_starts, chains)
        natives = _Natives(raw, locations)
        found = []
        for at, stack in enumerate(stacks):
            named = NamedStack(stop_reasons[at], frames[at], 0)
            if stack.chain or stack.gil:
                positions = range(int(first[at]), int(kept[at]))
                start = int(raw.starts[at])
                inside = raw.location[start + positions.start : start + positions.stop].tolist()
                named = self._spliced(facts, stack, natives, inside, named)
            found.append(named)
        return found

    def expect(self, windows: Sequence[tuple[Window, Sequence[RawRow]]]) -> None:
        """Asks about files for several windows at once: naming one by one asks for each anew.

        Args:
            windows: That are named next, each with some of its stacks; none once they are.
        """
        new: defaultdict[int, set[int]] = defaultdict(set)
        files: dict[int, tuple[str, str]] = {}
        for window, rows in windows:
            texts, mappings = window.texts, by_process(window.mappings)
            for binary, path, build_id in window.binaries.tolist():
                files[binary] = texts[path], texts[build_id]
            raw = RawStacks.of_rows(rows)
            for process in np.unique(raw.owners).tolist():
                if process in mappings:
                    mapped = self._mapped(process, mappings[process])
                    addresses = raw.addresses[raw.owners == process]
                    for key in zip(*_in_files(mapped, addresses), strict=True):
                        if key not in self._locations and self._known.find(*key) is None:
                            new[key[0]].add(key[1])
        self._expected = self._asked(new, files.__getitem__)

    def _spliced(
        self,
        facts: _Facts,
        stack: UnnamedStack,
        known: _Natives,
        inside: Sequence[int],
        named: NamedStack,
    ) -> NamedStack:
        """Combines a stack with its Python half.

        Args:
            facts: Of the window.
            stack: As it came.
            known: Native frames.
            inside: Which of these it has, leaf first.
            named: Its native half.
        """
        interpreter = facts.interpreter(stack.process, self._interpreter_of)
        if interpreter is None:
            return named
        natives = [known.get(index, interpreter) for index in inside]
        chain = facts.chain(stack.chain)
        if chain is not None:
            is_rooted = named.stop_reason in COMPLETE_REASONS
            found, match = self._splicer.splice(natives, chain, is_rooted)
            named = named._replace(frames=np.array(found[::-1], "<u4").tobytes(), match=match)
        has_python = chain is not None and any(chain.sources)
        return named._replace(gil=int(self._splicer.gil(natives, stack.gil, has_python)))

    def _located(self, raw: RawStacks, facts: _Facts) -> list[Location]:
        """Names each distinct address."""
        locations = [_UNNAMED] * len(raw.addresses)
        in_binaries: dict[int, list[tuple[int, int]]] = {}
        for owner in np.unique(raw.owners).tolist():
            indexes = np.flatnonzero(raw.owners == owner)
            addresses = raw.addresses[indexes]
            if owner == KERNEL_OWNER:
                found = self._kernel(addresses)
            else:
                found = self._user(facts, owner, addresses, indexes, in_binaries)
            for index, location in zip(indexes.tolist(), found, strict=True):
                locations[index] = location
        self._in_binaries(facts, in_binaries, locations)
        return locations

    def _kernel(self, addresses: U64) -> list[Location]:
        names: Sequence[KernelName | None] = [None] * len(addresses)
        symbols = self._symbols_of_kernel()
        if symbols is not None:
            names = symbols.lookup(addresses)
        found = []
        for address, symbol in zip(addresses.tolist(), names, strict=True):
            if (address + 1) % (1 << 64) == KERNEL_CUT:
                marker = SourceFrame(KERNEL_FRAMES_MARKER, "", 0, False)
                chain = (self._ids.frame(FrameKind.MARKER, marker, None, 0),)
                found.append(Location(chain))
                continue
            if symbol is None:
                self._known.tell_gap(address)
            name, module = symbol or (f"[kernel {address:#x}]", _KERNEL_PATH)
            binary = self._ids.binary(f"[{module.strip('[]')}]", "")
            frame = SourceFrame(clean_name(name), "", 0, False)
            chain = (self._ids.frame(FrameKind.KERNEL, frame, binary, address),)
            is_tracing = module == "bpf" or name.startswith(_TRACING_PREFIXES)
            function = name.partition(".")[0]  # of a part or a clone of it
            found.append(
                Location(
                    chain,
                    is_tracing=is_tracing,
                    is_exec=function.endswith(_EXEC_SUFFIXES),
                    is_past_exec=function in _PAST_EXEC,
                )
            )
        return found

    def _symbols_of_kernel(self) -> KernelSymbols | None:
        symbols = self._known.kernel()
        if symbols is None and not self._is_kernel_hidden:
            self._is_kernel_hidden = True
            self._losses[LossKind.KERNEL_SYMBOLS_HIDDEN] += 1
        return symbols

    def _user(
        self,
        facts: _Facts,
        process: int,
        addresses: U64,
        indexes: I64,
        in_binaries: dict[int, list[tuple[int, int]]],
    ) -> list[Location]:
        """Names what needs no binary, and sorts the rest by binary, as (address, index)."""
        mapped = facts.mapped(process)
        found = mapped.find(addresses)
        locations = []
        jit = self._jit_names(facts, process, addresses, mapped, found)
        for at, address, index, name in zip(
            found.tolist(), addresses.tolist(), indexes.tolist(), jit, strict=True
        ):
            if at < 0:
                is_known = len(mapped.rows) > 0
                reason = UNMAPPED if is_known else EXITED
                location = self._labelled(reason, None, address)
                location.is_mapped = False
                locations.append(location)
                continue
            mapping = mapped.rows[at]
            if mapping["binary"] == NONE:
                locations.append(self._generated(name, address))
                continue
            own = (address - int(mapping["bias"])) % (1 << 64)
            in_binaries.setdefault(int(mapping["binary"]), []).append((own, index))
            locations.append(_UNNAMED)
        return locations

    def _jit_names(
        self, facts: _Facts, process: int, addresses: U64, mapped: MappedProcess, found: I64
    ) -> list[str | None]:
        """Names code that a runtime made, by the perf-PID.map where it wrote one.

        Else by what the window has of it: the process and its map may be gone.
        """
        names: list[str | None] = [None] * len(addresses)
        if not len(mapped.rows):
            return names
        of_runtime = np.flatnonzero((found >= 0) & (mapped.rows["binary"][found] == NONE))
        if not len(of_runtime):
            return names
        wanted, jit = addresses[of_runtime], self._files.jit_process(process)
        read: list[str | None] = [None] * len(wanted)
        if jit is not None:
            pid = facts.namespaced_pid(process)
            read = self._service.resolve_generated(jit.root, pid, jit.uid, wanted)
        for at, address, name in zip(of_runtime.tolist(), wanted.tolist(), read, strict=True):
            if name is not None:
                self.jit_symbols[process, address] = name
            names[at] = name or facts.jit_symbol(process, address)
        return names

    def _generated(self, name: str | None, address: int) -> Location:
        location = self._labelled(name or "[generated code]", None, address)
        source = trampoline_source(location.label)
        if source is not None:
            location.is_trampoline = True
            location.chain = (self._ids.frame(FrameKind.PYTHON, source, None, 0),)
        return location

    def _in_binaries(
        self, facts: _Facts, wanted: dict[int, list[tuple[int, int]]], locations: list[Location]
    ) -> None:
        """Names addresses in binaries: those that are not known are asked for together."""
        named: dict[tuple[int, int], NamedRange | None] = {}
        new: dict[int, list[int]] = {}
        for binary, pairs in wanted.items():
            unnamed = {(binary, own) for own, _ in pairs if (binary, own) not in self._locations}
            for key in unnamed:
                known = self._known.find(*key)
                if known is not None or key in self._expected:
                    named[key] = known or self._expected[key]
            new[binary] = [own for _, own in unnamed if (binary, own) not in named]
        named.update(self._asked(new, facts.binary))
        for binary, pairs in wanted.items():
            for own, index in pairs:
                key = (binary, own)
                make = partial(self._in_binary, facts, binary, own, named.get(key))
                locations[index] = self._locations.get(key, make)

    def _asked(
        self, new: Mapping[int, Collection[int]], file_of: Callable[[int], tuple[str, str]]
    ) -> dict[tuple[int, int], NamedRange | None]:
        """Asks for names of addresses in files, and takes note of them.

        Args:
            new: Addresses by binary.
            file_of: Returns path and build id of a binary.

        Returns:
            By binary and address what is there; None where nothing is known.
        """
        asked: list[tuple[int, list[int]]] = []
        requests = []
        for binary, addresses in new.items():
            if addresses:
                wanted = sorted(addresses)
                file = self._files.open(binary, *file_of(binary))
                path = "" if file.fd is None else f"/proc/{os.getpid()}/fd/{file.fd}"
                requests.append(Request(path, file.root, np.array(wanted, np.uint64), str(binary)))
                asked.append((binary, wanted))
        found: dict[tuple[int, int], NamedRange | None] = {}
        for (binary, wanted), result in zip(
            asked, self._service.resolve_many(requests), strict=True
        ):
            for own, frames, around in zip(wanted, result.frames, result.ranges, strict=True):
                found[binary, own] = None
                if around is not None:  # else it may be known later
                    answer = found[binary, own] = NamedRange(around, frames)
                    self._known.keep(binary, answer)
        return found

    def _in_binary(
        self,
        facts: _Facts,
        binary: int,
        address: int,
        named: NamedRange | None,
    ) -> Location:
        path, build_id = facts.binary(binary)
        binary_id = self._ids.binary(path, build_id)
        if named is not None and named.frames:
            frames = tuple(
                self._ids.frame(FrameKind.NATIVE, source, binary_id, address)
                for source in named.frames
            )
            location = Location(frames, sources=named.frames)
            location.is_start = roots.is_start_name(named.frames[-1].name)
        else:
            name, is_start = self._name_by_code(facts, binary, address)
            module = path.rpartition("/")[2]
            where = f"+{address:#x}" if named is None else f" fn@{named.addresses.begin:#x}"
            shown = name or clean_name(f"[{module}{where}]")
            location = self._labelled(shown, binary_id, address)
            location.is_start = is_start
        location.binary, location.binary_id, location.address = binary, binary_id, address
        return location

    def _name_by_code(self, facts: _Facts, binary: int, address: int) -> tuple[str, bool]:
        """Names an address without a symbol that is known by its code, "" if it is not.

        Returns:
            The name, and whether threads or processes start there.
        """
        path, build_id = facts.binary(binary)
        fd = self._files.open(binary, path, build_id).fd
        headers = self._headers.get(binary, partial(self._read_headers, path, fd))
        if headers is None or fd is None:
            return "", False
        with self._guard.each_file(path, fd) as file:
            return roots.name_by_code(file, headers, address)
        return "", False

    def _read_headers(self, path: str, fd: int | None) -> Headers | None:
        return None if fd is None else self._file_facts.ask(path, fd, HEADERS)

    def _interpreter_of(self, facts: _Facts, process: int) -> MappedInterpreter | None:
        executable = facts.executable(process)
        for mapping in facts.mapped(process).rows:
            binary = int(mapping["binary"])
            if binary == NONE:
                continue
            path, _ = facts.binary(binary)
            if not may_hold_interpreter(path, executable):
                continue
            make = partial(self._read_interpreter, facts, binary)
            interpreter = self._interpreters.get(binary, make)
            if interpreter is None:
                continue
            with self._guard.each_file(path):
                return MappedInterpreter(binary, interpreter.loaded_at(int(mapping["bias"])))
        return None

    def _read_interpreter(self, facts: _Facts, binary: int) -> Interpreter | None:
        path, build_id = facts.binary(binary)
        fd = self._files.open(binary, path, build_id).fd
        found = None if fd is None else self._file_facts.ask(path, fd, interpreter_in(path))
        return found if isinstance(found, Interpreter) else None

    def _labelled(self, name: str, binary: int | None, address: int) -> Location:
        source = SourceFrame(name, "", 0, False)
        chain = (self._ids.frame(FrameKind.NATIVE, source, binary, address),)
        return Location(chain, label=name)

    def _mapped(self, process: int, rows: Rows) -> MappedProcess:
        key = (process, hashlib.blake2b(rows.tobytes(), digest_size=16).digest())
        return self._processes.get(key, partial(MappedProcess, rows))


def _in_files(mapped: MappedProcess, addresses: U64) -> tuple[list[int], list[int]]:
    """Returns those addresses that are in files: the binaries, and the addresses there."""
    found = mapped.find(addresses)
    is_there = found >= 0
    rows = mapped.rows[found[is_there]]
    own = addresses[is_there] - rows["bias"].astype(np.uint64)
    is_in_file = rows["binary"] != NONE
    return rows["binary"][is_in_file].tolist(), own[is_in_file].tolist()


class _Facts:
    """What a window says of its processes, looked up by number."""

    def __init__(self, window: Window, mapped: Callable[[int, Rows], MappedProcess]) -> None:
        self._window = window
        self._make_mapped = mapped
        texts = window.texts
        self._binaries = {
            binary: (texts[path], texts[build_id])
            for binary, path, build_id in window.binaries.tolist()
        }
        self._processes = {int(row["process"]): row for row in window.processes}
        self._mappings = by_process(window.mappings)
        self._mapped: dict[int, MappedProcess] = {}
        self._chains = {int(row["chain"]): row for row in window.chains}
        self._codes: dict[tuple[int, int], tuple[str, str]] = {}
        self._lines: dict[tuple[int, int, int], int] = {}
        self._sources: dict[tuple[int, int, int], SourceFrame | None] = {}
        self._interpreters: dict[int, MappedInterpreter | None] = {}
        self._jit_symbols = {
            (process, address): texts[name]
            for process, address, name in window.jit_symbols.tolist()
        }

    def jit_symbol(self, process: int, address: int) -> str | None:
        """Returns what an address of generated code is called, None where that is not known."""
        return self._jit_symbols.get((process, address))

    def interpreter(
        self, process: int, find: Callable[[_Facts, int], MappedInterpreter | None]
    ) -> MappedInterpreter | None:
        """Returns the interpreter of a process, looked for once."""
        if process not in self._interpreters:
            self._interpreters[process] = find(self, process)
        return self._interpreters[process]

    def binary(self, binary: int) -> tuple[str, str]:
        """Returns path and build id of a binary."""
        return self._binaries[binary]

    def namespaced_pid(self, process: int) -> int:
        """Returns the pid of a process in its own namespace."""
        return int(self._processes[process]["namespaced_pid"])

    def executable(self, process: int) -> str:
        """Returns the path of a process's program."""
        return self._window.texts[int(self._processes[process]["executable"])]

    def mapped(self, process: int) -> MappedProcess:
        """Returns what a process had mapped."""
        found = self._mapped.get(process)
        if found is None:
            rows = self._mappings.get(process, self._window.mappings[:0])
            found = self._mapped[process] = self._make_mapped(process, rows)
        return found

    def chain(self, number: int) -> PythonChain | None:
        """Returns Python frames by the id of their chain, None for one that never came."""
        row = self._chains.get(number)
        if row is None:
            return None
        first = int(row["first"])
        rows = self._window.chain_frames[first : first + int(row["depth"])].tolist()
        frames = tuple(PythonFrame(code, position, bool(ends)) for code, position, ends in rows)
        process = int(row["process"])
        sources = tuple(self._source(process, frame) for frame in frames)
        return PythonChain(frames, sources, int(row["end"]) == abi.PythonEnd.COMPLETE)

    def _source(self, process: int, frame: PythonFrame) -> SourceFrame | None:
        if not frame.code_address:
            return None
        key = (process, frame.code_address, frame.position)
        if key not in self._sources:
            self._sources[key] = self._named(process, frame)
        return self._sources[key]

    def _named(self, process: int, frame: PythonFrame) -> SourceFrame | None:
        self._read_codes()
        names = self._codes.get((process, frame.code_address))
        if names is None:
            return UNREADABLE_FRAME
        line = self._lines.get((process, frame.code_address, frame.position), 0)
        return SourceFrame(*names, line, False) if names[0] else None

    def _read_codes(self) -> None:
        window, texts = self._window, self._window.texts
        if self._codes or not len(window.code_objects):
            return
        for process, code, name, file, _ in window.code_objects.tolist():
            self._codes[process, code] = (texts[name], texts[file])
        for process, code, position, line in window.code_lines.tolist():
            self._lines[process, code, position] = line


class _Natives:
    """The native frames of a window's Python stacks, each made once.

    Args:
        stacks: Of the window.
        locations: Their distinct addresses, named.
    """

    def __init__(self, stacks: RawStacks, locations: list[Location]) -> None:
        self._stacks = stacks
        self._locations = locations
        self._known: dict[tuple[int, int], NativeFrame] = {}

    def get(self, index: int, interpreter: MappedInterpreter) -> NativeFrame:
        """Returns the frame of a distinct address in a process with an interpreter."""
        key = (index, id(interpreter))  # kernel addresses belong to all processes
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._make(index, interpreter)
        return known

    def _make(self, index: int, interpreter: MappedInterpreter) -> NativeFrame:
        location = self._locations[index]
        is_kernel = int(self._stacks.owners[index]) == KERNEL_OWNER
        in_interpreter = location.binary == interpreter.binary
        is_eval = not is_kernel and interpreter.loaded.is_eval(int(self._stacks.addresses[index]))
        role = Role.TRAMPOLINE
        if not location.is_trampoline:
            role = role_of(symbol_of(location.sources), is_eval, in_interpreter, is_kernel)
        return NativeFrame(
            role=role,
            is_kernel=is_kernel,
            in_interpreter=in_interpreter,
            binary_id=location.binary_id,
            address=location.address,
            sources=location.sources,
            label=location.label,
            frames=location.chain,
        )
