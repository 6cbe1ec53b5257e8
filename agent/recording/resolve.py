# SPDX-License-Identifier: Apache-2.0
"""Gives the recorded addresses their names: frames, functions and binaries of the capture.

Runs once, when the recording has ended. Each distinct place is resolved once; user-space names come
from the symbol service, a child process, kernel names from kallsyms, code in anonymous memory from
the target's perf-PID.map. Stacks are then cut where a frame-pointer walk went astray, and judged.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
from aiflame.agent.capture.writer import CaptureWriter
from aiflame.agent.losses import LossKind
from aiflame.agent.model.profile import ROOTED_ENDS, FrameKind
from aiflame.agent.processes.binaries import BinaryTable
from aiflame.agent.processes.elf_images import ElfImages
from aiflame.agent.processes.table import NO_BINARY, ProcessImage
from aiflame.agent.python.trampolines import trampoline_source
from aiflame.agent.recording.pythons import PythonChain
from aiflame.agent.recording.raw_stacks import I64, KERNEL_OWNER, U64, RawStacks
from aiflame.agent.recording.splicing import NativeFrame, SplicedInterpreter, Splicer
from aiflame.agent.sinks.capture import KERNEL_CUT
from aiflame.agent.sinks.names import Names
from aiflame.agent.symbols import roots
from aiflame.agent.symbols.frames import SourceFrame, clean_name
from aiflame.agent.symbols.kallsyms import KernelName, KernelSymbols, KernelSymbolsHidden
from aiflame.agent.symbols.service import Request, SymbolService

_KERNEL_PATH = "[kernel]"

# What stands between a tracepoint and a BPF program (include/trace/bpf_probe.h, v6.18).
_TRACING_PREFIXES = ("bpf_trace_run", "__bpf_trace_", "__traceiter_", "trace_call_bpf")


@dataclass(slots=True)
class Place:
    """What is known of one distinct place while it is being resolved."""

    chain: tuple[int, ...] = ()  # frame ids, innermost inlined function first
    is_mapped: bool = True
    is_start: bool = False
    is_tracing: bool = False  # the profiler's own, when it is at the leaf of a switch stack
    is_trampoline: bool = False  # of CPython's -X perf
    binary: int = NO_BINARY
    binary_id: int | None = None
    address: int = 0  # in the binary
    sources: tuple[SourceFrame, ...] = ()
    label: str = ""


@dataclass(frozen=True, slots=True)
class StackPython:
    """What is known of the Python half of a stack; `gil` is abi.PythonGil."""

    process: SplicedInterpreter
    chain: PythonChain | None
    gil: int


def _natives(
    stacks: RawStacks, places: list[Place], index: int, positions: range
) -> list[NativeFrame]:
    """The native frames of one stack, leaf first."""
    start = int(stacks.starts[index])
    found = []
    for at in stacks.place[start + positions.start : start + positions.stop].tolist():
        place = places[at]
        found.append(
            NativeFrame(
                address=int(stacks.addresses[at]),
                is_kernel=int(stacks.owners[at]) == KERNEL_OWNER,
                binary=place.binary,
                binary_id=place.binary_id,
                place=place.address,
                sources=place.sources,
                label=place.label,
                frames=place.chain,
                is_trampoline=place.is_trampoline,
            )
        )
    return found


class NamedProcesses(Protocol):
    """The processes whose addresses are named."""

    @property
    def images(self) -> list[ProcessImage]:
        """By index."""

    @property
    def binaries(self) -> BinaryTable:
        """What they map."""


class CaptureResolver:
    """Resolves everything that a recording stored.

    Args:
        writer: Open capture; all stacks are in it.
        table: Process table of the recording.
        images: ELF headers of its binaries.
        names: Of the capture.
    """

    def __init__(
        self, writer: CaptureWriter, table: NamedProcesses, images: ElfImages, names: Names
    ) -> None:
        self._writer = writer
        self._table = table
        self._names = names
        self._images = images
        self.splicer = Splicer(self._names)
        self.losses: Counter[LossKind] = Counter()

    def binary_id(self, binary: int) -> int:
        """Returns the id in the capture of a binary, by its index."""
        elf = self._images.of(binary)
        path = clean_name(self._table.binaries.files[binary].path)
        return self._names.binary(path, "" if elf is None else elf.build_id)

    def resolve(self, service: SymbolService, pythons: Mapping[int, StackPython]) -> None:
        """Resolves all stacks and writes their frames.

        Args:
            service: Resolves binaries.
            pythons: Python frames of stacks, by row id of the stack.

        Raises:
            DiskFull: Nothing of this is kept; the capture stays readable without names.
        """
        stacks = RawStacks.of_rows(self._writer.stack_rows())
        places = [Place() for _ in stacks.addresses]
        in_binaries: dict[int, list[tuple[U64, I64]]] = {}
        for owner in np.unique(stacks.owners).tolist():
            indexes = np.flatnonzero(stacks.owners == owner)
            addresses = stacks.addresses[indexes]
            if owner == KERNEL_OWNER:
                self._kernel(addresses, [places[i] for i in indexes.tolist()])
            else:
                image = self._table.images[owner]
                self._user(service, image, addresses, indexes, places, in_binaries)
        self._binaries(service, in_binaries, places)
        self._write(stacks, places, pythons)

    def _write(
        self, stacks: RawStacks, places: list[Place], pythons: Mapping[int, StackPython]
    ) -> None:
        kept = stacks.kept_lengths(np.array([place.is_mapped for place in places], bool))
        ends = stacks.judged_ends(kept, np.array([place.is_start for place in places], bool))
        sizes = np.array([len(place.chain) for place in places], np.int64)
        chain_starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
        chains = np.array([frame for place in places for frame in place.chain], np.int64)
        first = stacks.first_kept(
            np.array([place.is_tracing for place in places], bool),
            np.isin(stacks.ids, self._writer.switch_stack_ids()),
        )
        blobs = stacks.frame_blobs(first, kept, chain_starts, chains)
        first_kept = np.stack([first, kept], axis=1)
        python_rows = self._splice(stacks, places, pythons, first_kept, ends, blobs)
        self._names.write(self._writer)
        self._writer.set_stack_frames(zip(ends.tolist(), blobs, stacks.ids.tolist(), strict=True))
        self._writer.set_python_stacks(python_rows)

    def _splice(
        self,
        stacks: RawStacks,
        places: list[Place],
        pythons: Mapping[int, StackPython],
        first_kept: I64,
        ends: npt.NDArray[np.uint8],
        blobs: list[bytes],
    ) -> list[tuple[int, bytes, int, int]]:
        """Combines the stacks that have a Python half; returns rows for the writer."""
        rows = []
        for index in np.flatnonzero(np.isin(stacks.ids, list(pythons))).tolist():
            row, end = int(stacks.ids[index]), int(ends[index])
            python = pythons[row]
            natives = _natives(stacks, places, index, range(*first_kept[index].tolist()))
            frames = blobs[index]
            if python.chain is not None:
                is_rooted = end in ROOTED_ENDS
                found = self.splicer.splice(python.process, natives, python.chain, is_rooted)
                frames = np.array(found[::-1], "<u4").tobytes()
            has_python = python.chain is not None and any(python.chain.sources)
            gil = self.splicer.gil(python.process, natives, python.gil, has_python)
            rows.append((end, frames, int(gil), row))
        return rows

    def _kernel(self, addresses: U64, places: list[Place]) -> None:
        found: Sequence[KernelName | None] = [None] * len(addresses)
        try:
            found = KernelSymbols.load().lookup(addresses)
        except KernelSymbolsHidden:
            self.losses[LossKind.KERNEL_SYMBOLS_HIDDEN] += 1
        for address, symbol, place in zip(addresses.tolist(), found, places, strict=True):
            if (address + 1) % (1 << 64) == KERNEL_CUT:
                marker = SourceFrame("[truncated: kernel frames]", "", 0, False)
                place.chain = (self._names.frame(FrameKind.MARKER, marker, None, 0),)
                continue
            name, module = symbol or (f"[kernel {address:#x}]", _KERNEL_PATH)
            binary = self._names.binary(f"[{module.strip('[]')}]", "")
            frame = SourceFrame(clean_name(name), "", 0, False)
            place.chain = (self._names.frame(FrameKind.KERNEL, frame, binary, address),)
            place.is_tracing = module == "bpf" or name.startswith(_TRACING_PREFIXES)

    def _user(
        self,
        service: SymbolService,
        image: ProcessImage,
        addresses: U64,
        indexes: I64,
        places: list[Place],
        in_binaries: dict[int, list[tuple[U64, I64]]],
    ) -> None:
        """Names what needs no binary, and sorts the rest by binary."""
        mapping_at = image.find(addresses)
        for at in np.unique(mapping_at).tolist():
            chosen = mapping_at == at
            if at < 0:
                self._unmapped(image, addresses[chosen], [places[i] for i in indexes[chosen]])
                continue
            mapping = image.mappings[at]
            if mapping.binary == NO_BINARY:
                chosen_places = [places[i] for i in indexes[chosen]]
                self._anonymous(service, image, addresses[chosen], chosen_places)
                continue
            bias = self._images.bias(mapping) % (1 << 64)
            found = addresses[chosen] - np.uint64(bias)
            in_binaries.setdefault(mapping.binary, []).append((found, indexes[chosen]))

    def _unmapped(self, image: ProcessImage, addresses: U64, places: list[Place]) -> None:
        reason = "[unmapped memory]" if image.was_read else "[exited before it could be read]"
        for address, place in zip(addresses.tolist(), places, strict=True):
            place.is_mapped = False
            self._name(place, reason, None, address)

    def _anonymous(
        self,
        service: SymbolService,
        image: ProcessImage,
        addresses: U64,
        places: list[Place],
    ) -> None:
        """Code that a runtime made: named by its perf-PID.map where it wrote one."""
        owner = image.root, image.namespaced_pid, image.owner_uid
        names = service.resolve_generated(*owner, addresses)
        for address, name, place in zip(addresses.tolist(), names, places, strict=True):
            self._name(place, name or "[generated code]", None, address)
            source = trampoline_source(place.label)
            if source is not None:
                place.is_trampoline = True
                place.chain = (self._names.frame(FrameKind.PYTHON, source, None, 0),)

    def _binaries(
        self,
        service: SymbolService,
        in_binaries: dict[int, list[tuple[U64, I64]]],
        places: list[Place],
    ) -> None:
        joined = {
            binary: (
                np.concatenate([addresses for addresses, _ in parts]),
                np.concatenate([indexes for _, indexes in parts]),
            )
            for binary, parts in in_binaries.items()
        }
        requests, asked = [], []
        for binary, (addresses, _) in joined.items():
            distinct, where = np.unique(addresses, return_inverse=True)
            asked.append((binary, where))
            requests.append(self._request(binary, distinct))
        for (binary, where), result in zip(asked, service.resolve_many(requests), strict=True):
            addresses, indexes = joined[binary]
            rows = zip(addresses.tolist(), indexes.tolist(), where.tolist(), strict=True)
            for address, index, at in rows:
                self._in_binary(places[index], binary, address, result.frames[at])

    def _request(self, binary: int, addresses: U64) -> Request:
        file = self._table.binaries.files[binary]
        path = "" if file.fd is None else f"/proc/{os.getpid()}/fd/{file.fd}"
        return Request(path, file.root, addresses)

    def _in_binary(
        self, place: Place, binary: int, address: int, chain: tuple[SourceFrame, ...]
    ) -> None:
        binary_id = self.binary_id(binary)
        place.binary, place.binary_id, place.address = binary, binary_id, address
        if not chain:
            name, place.is_start = self._name_by_code(binary, address)
            module = self._table.binaries.files[binary].path.rpartition("/")[2]
            self._name(place, name or clean_name(f"[{module}+{address:#x}]"), binary_id, address)
            return
        place.sources = chain
        place.chain = tuple(
            self._names.frame(FrameKind.NATIVE, source, binary_id, address) for source in chain
        )
        place.is_start = roots.is_start_name(chain[-1].name)

    def _name_by_code(self, binary: int, address: int) -> tuple[str, bool]:
        """Names a place without a symbol that is known by its code, "" if it is not.

        Returns:
            The name, and whether threads or processes start there.
        """
        file, elf = self._table.binaries.files[binary], self._images.of(binary)
        if file.fd is None or elf is None:
            return "", False
        with self._table.binaries.guard.each_file(file.path, file.fd) as opened:
            return roots.name_by_code(opened, elf, address)
        return "", False

    def _name(self, place: Place, name: str, binary: int | None, address: int) -> None:
        place.label = name
        source = SourceFrame(name, "", 0, False)
        place.chain = (self._names.frame(FrameKind.NATIVE, source, binary, address),)
