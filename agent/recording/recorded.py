# SPDX-License-Identifier: Apache-2.0
"""Names for what segments hold: of a recording that was killed, or that still runs.

All that naming needs is in the windows, but for the files that processes had mapped: these are
opened by their paths, and count if they have the build id that was recorded. What cannot be opened
keeps its module and offset.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
from aiflame.agent.capture.writer import CaptureWriter
from aiflame.agent.elf.image import ElfImage, NotElf
from aiflame.agent.inspector.inspector import Inspector
from aiflame.agent.inspector.rootfs import open_regular
from aiflame.agent.kernel import abi
from aiflame.agent.losses import LossKind
from aiflame.agent.model.window import COLUMNS, NONE, Rows, Window, newest
from aiflame.agent.processes.binaries import BinaryFile, BinaryTable
from aiflame.agent.processes.elf_images import ElfImages
from aiflame.agent.processes.table import NO_BINARY, Mapping, ProcessImage
from aiflame.agent.python.interpreter import (
    LoadedInterpreter,
    find_interpreter,
    may_hold_interpreter,
)
from aiflame.agent.python.layouts import UnsupportedPython
from aiflame.agent.python.walk import PythonFrame
from aiflame.agent.recording.pythons import UNREADABLE_SOURCE, PythonChain
from aiflame.agent.recording.resolve import CaptureResolver, StackPython
from aiflame.agent.sinks.capture import CaptureSink, laid_over
from aiflame.agent.symbols.frames import SourceFrame
from aiflame.agent.symbols.service import SymbolService
from aiflame.agent.symbols.store import cache_dir
from aiflame.agent.target_files import BadTargetFile, TargetFile


@dataclass(frozen=True, slots=True)
class RecordedTable:
    """What a process table knows that naming asks for."""

    images: list[ProcessImage]
    binaries: BinaryTable


@dataclass(frozen=True, slots=True)
class RecordedInterpreter:
    """The interpreter of a process that may be gone."""

    binary: int
    loaded: LoadedInterpreter


@dataclass(slots=True)
class RecordedFacts:
    """Collects from windows what naming needs besides the capture: the newest of each."""

    _processes: dict[int, tuple[int, int, str, str]] = field(default_factory=dict)
    _binaries: dict[int, tuple[str, str]] = field(default_factory=dict)
    _mappings: dict[int, Rows] = field(default_factory=dict)
    _chains: dict[int, tuple[int, bytes, int]] = field(default_factory=dict)
    _codes: dict[tuple[int, int], tuple[str, str]] = field(default_factory=dict)
    _lines: dict[tuple[int, int, int], int] = field(default_factory=dict)

    def put(self, window: Window) -> None:
        """Takes a window in."""
        texts = window.texts
        for row in window.processes:
            words = (texts[row["name"]], texts[row["executable"]])
            pids = (int(row["pid"]), int(row["namespaced_pid"]))
            self._processes[int(row["process"])] = (*pids, *words)
        for binary, path, build_id in window.binaries.tolist():
            self._binaries[binary] = (texts[path], texts[build_id])
        for process in np.unique(window.mappings["process"]).tolist():
            rows = window.mappings[window.mappings["process"] == process]
            before = self._mappings.get(process, rows[:0])
            self._mappings[process] = newest(np.concatenate([before, rows]), COLUMNS["mappings"])
        for row in window.chains:
            first, depth = int(row["first"]), int(row["depth"])
            frames = window.chain_frames[first : first + depth].tobytes()
            self._chains[int(row["chain"])] = (int(row["process"]), frames, int(row["end"]))
        for process, code, name, file, _ in window.code_objects.tolist():
            self._codes[process, code] = (texts[name], texts[file])
        for process, code, position, line in window.code_lines.tolist():
            self._lines[process, code, position] = line

    def table(self) -> RecordedTable:
        """Opens what is still there; closing its binaries is the caller's."""
        binaries = BinaryTable(Inspector())
        for number in range(max(self._binaries, default=-1) + 1):
            path, build_id = self._binaries.get(number, ("", ""))
            binaries.add(BinaryFile(number, path, _open_same(path, build_id), "/"))
        images = []
        for number in range(max(self._processes, default=-1) + 1):
            pid, namespaced, name, executable = self._processes.get(number, (0, 0, "", ""))
            image = ProcessImage(number, pid, 0, 0, name=name, executable=executable)
            image.namespaced_pid = namespaced
            rows = self._mappings.get(number)
            if rows is not None:
                image.was_read = True
                image.replace_mappings(
                    [
                        Mapping(start, end, offset, NO_BINARY if binary == NONE else binary)
                        for start, end, offset, _, binary in laid_over(rows)
                    ]
                )
            images.append(image)
        return RecordedTable(images, binaries)

    def chain(self, number: int) -> PythonChain | None:
        """Returns Python frames by the number of their chain, None for one that never came."""
        found = self._chains.get(number)
        if found is None:
            return None
        process, blob, end = found
        rows = np.frombuffer(blob, COLUMNS["chain_frames"].dtype).tolist()
        frames = tuple(PythonFrame(code, position, bool(ends)) for code, position, ends in rows)
        sources = tuple(self._source(process, frame) for frame in frames)
        return PythonChain(frames, sources, end == abi.PythonEnd.COMPLETE)

    def _source(self, process: int, frame: PythonFrame) -> SourceFrame | None:
        if not frame.code_address:
            return None
        names = self._codes.get((process, frame.code_address))
        if names is None:
            return UNREADABLE_SOURCE
        line = self._lines.get((process, frame.code_address, frame.position), 0)
        return SourceFrame(*names, line, False) if names[0] else None


class RecordedNamer:
    """Names captures that are made of segments (sinks.rebuilt.Namer)."""

    def __init__(self) -> None:
        self._facts = RecordedFacts()

    def put(self, window: Window) -> None:
        """Takes in what naming needs besides the capture."""
        self._facts.put(window)

    def name(self, writer: CaptureWriter, sink: CaptureSink) -> Counter[str]:
        """Names the stacks; where that fails, they keep modules and addresses."""
        facts = self._facts
        table = facts.table()
        try:
            with SymbolService(cache_dir()) as service:
                images = ElfImages(table.binaries)
                resolver = CaptureResolver(writer, table, images, sink.names)
                interpreters: dict[int, RecordedInterpreter | None] = {}
                pythons = {}
                for row, half in sink.pythons.items():
                    if half.process not in interpreters:
                        interpreters[half.process] = _interpreter(table, images, half.process)
                    interpreter = interpreters[half.process]
                    if interpreter is not None:
                        chain = facts.chain(half.chain)
                        pythons[row] = StackPython(interpreter, chain, half.gil)
                resolver.resolve(service, pythons)
                for problem in service.problems:
                    resolver.losses[problem.reason] += 1
        finally:
            table.binaries.close()
        resolver.losses[LossKind.PYTHON_MISFIT] = resolver.splicer.misfits
        return Counter({kind.stored_name: count for kind, count in resolver.losses.items()})


def _interpreter(
    table: RecordedTable, images: ElfImages, process: int
) -> RecordedInterpreter | None:
    image = table.images[process]
    for binary, loaded in _interpreters_in(table, images, image):
        return RecordedInterpreter(binary, loaded)
    return None


def _interpreters_in(
    table: RecordedTable, images: ElfImages, image: ProcessImage
) -> Iterator[tuple[int, LoadedInterpreter]]:
    for mapping in image.mappings:
        if mapping.binary == NO_BINARY:
            continue
        file = table.binaries.files[mapping.binary]
        is_likely = file.fd is not None and may_hold_interpreter(file.path, image.executable)
        elf = images.of(mapping.binary) if is_likely else None
        if elf is None or file.fd is None:
            continue
        with (
            table.binaries.guard.each_file(file.path, file.fd) as opened,
            suppress(UnsupportedPython),
        ):
            found = find_interpreter(opened, elf, file.path.rpartition("/")[2])
            if found is not None:
                yield mapping.binary, found.loaded_at(images.bias(mapping))


def _open_same(path: str, build_id: str) -> int | None:
    """Opens a file if it is the one that was recorded."""
    if not path.startswith("/") or not build_id:
        return None
    try:
        fd = open_regular(path)
    except (OSError, ValueError):
        return None
    with suppress(BadTargetFile, NotElf, OSError):
        if ElfImage.read(TargetFile(fd)).build_id == build_id:
            return fd
    os.close(fd)
    return None
