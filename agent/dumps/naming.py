# SPDX-License-Identifier: Apache-2.0
"""Names the threads of a dump, as a recording names its samples.

A dump is a window with one stack for each thread, named by the namer of recordings. Kernel frames
stay out of it: /proc has told their names, and no addresses.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
from aiflame.agent.dumps.model import DumpFrame
from aiflame.agent.dumps.reading import RawThread, Target
from aiflame.agent.kernel import abi
from aiflame.agent.losses import LossKind
from aiflame.agent.model.profile import COMPLETE_REASONS, FrameKind, GilState, StopReason
from aiflame.agent.model.window import COLUMNS, NO_CHAIN, Rows, Window, newest
from aiflame.agent.processes.elf_images import ElfImages
from aiflame.agent.processes.facts import ProcessFacts
from aiflame.agent.processes.kernel_frames import KernelFrame
from aiflame.agent.processes.python_facts import PythonFacts
from aiflame.agent.processes.table import ProcessTable
from aiflame.agent.python.splice import Match
from aiflame.agent.symbolize.files import JitProcess, OpenFile
from aiflame.agent.symbolize.namer import Namer
from aiflame.agent.symbolize.stacks import NamedStack, UnnamedStack
from aiflame.agent.symbols.frames import SourceFrame, clean_name
from aiflame.agent.symbols.service import SymbolService

# Where eval loops and runs of Python frames do not pair one to one.
_UNPAIRED = {
    Match.NO_EVAL: "not shown, since the native stack has no eval loop",
    Match.RUNS_MISSING: "fewer calls than eval loops, positions are uncertain",
    Match.EVALS_MISSING: "more calls than eval loops, positions are uncertain",
}


class NamedThread(NamedTuple):
    """Frames leaf first, why either half has no root ("" where it has), and what of the GIL."""

    frames: tuple[DumpFrame, ...]
    cut: str
    python_cut: str
    gil: GilState


class ThreadNamer:
    """Names threads; those that do the same are named once.

    Args:
        table: Their processes.
        images: ELF headers of the files of these.
        service: Resolves symbols.
    """

    def __init__(self, table: ProcessTable, images: ElfImages, service: SymbolService) -> None:
        self._window = DumpWindow()
        self._processes = ProcessFacts(self._window, table, images)
        self._pythons = PythonFacts(self._window, Counter[LossKind]())
        self._frames = _Frames()
        files = _OpenFiles(table)
        self._namer = Namer(files, service, self._frames, table.binaries.facts)
        self._next_chain = NO_CHAIN + 1

    def name(self, targets: Sequence[Target]) -> list[list[NamedThread]]:
        """Names the threads of each target, in their order."""
        distinct: dict[Hashable, tuple[RawThread, UnnamedStack]] = {}
        keys: list[list[Hashable]] = []
        self._pythons.begin_round()
        for target in targets:
            process = target.image.index
            keys.append([(process, t.kernel, t.walked, t.python) for t in target.threads])
            for key, thread in zip(keys[-1], target.threads, strict=True):
                if key not in distinct:
                    distinct[key] = thread, self._unnamed(target, thread)
        self._processes.tell(0)
        self._pythons.flush()
        stacks = self._namer.name(self._window.window(), [stack for _, stack in distinct.values()])
        named = {
            key: self._thread(thread, stack)
            for (key, (thread, _)), stack in zip(distinct.items(), stacks, strict=True)
        }
        return [[named[key] for key in some] for some in keys]

    def _unnamed(self, target: Target, thread: RawThread) -> UnnamedStack:
        """Returns the user half of a thread, told to the window."""
        process, python = target.image.index, target.python
        walked, found = thread.walked, thread.python
        chain, gil = NO_CHAIN, abi.PythonGil.NONE
        if python is not None and found is not None:
            chain, gil = self._next_chain, found.gil
            self._next_chain += 1
            frames = self._pythons.name(python.code, found.frames)
            self._pythons.tell_chain(chain, process, frames, found.end)
        return UnnamedStack(
            process=process,
            kernel_depth=0,
            stop_reason=StopReason.NOT_WALKED if walked is None else walked.end,
            addresses=np.array(() if walked is None else walked.addresses, "<u8").tobytes(),
            chain=chain,
            gil=gil,
            is_from_switch=False,
        )

    def _thread(self, thread: RawThread, stack: NamedStack) -> NamedThread:
        user = np.frombuffer(stack.frames, "<u4")[::-1]  # leaf first
        frames = (*map(_kernel_frame, thread.kernel), *self._frames.of(user.tolist()))
        is_cut = thread.walked is not None and stack.stop_reason not in COMPLETE_REASONS
        cut = StopReason(stack.stop_reason).label if is_cut else ""
        python_cut = "" if stack.match is None else _UNPAIRED.get(stack.match, "")
        if thread.python is not None and thread.python.end is not abi.PythonEnd.COMPLETE:
            python_cut = thread.python.end.name.lower().replace("_", " ")
        return NamedThread(frames, cut, python_cut, GilState(stack.gil))


def _kernel_frame(frame: KernelFrame) -> DumpFrame:
    return DumpFrame(FrameKind.KERNEL, clean_name(frame.name), "", 0, clean_name(frame.path))


class DumpWindow:
    """A window that is facts alone: what the namer needs to know of processes."""

    def __init__(self) -> None:
        self._texts = {"": 0}
        self._rows: defaultdict[str, list[Rows]] = defaultdict(list)
        self._part_counts: Counter[str] = Counter()

    def text(self, words: str) -> int:
        """As FactsTaker.text says."""
        return self._texts.setdefault(words, len(self._texts))

    def define(self, column: str, rows: Rows, parts: Rows | None = None) -> None:
        """As FactsTaker.define says."""
        if parts is not None:
            owned = COLUMNS[column].parts
            rows = rows.copy()
            rows["first"] += self._part_counts[owned]
            self._part_counts[owned] += len(parts)
            self._rows[owned].append(parts)
        self._rows[column].append(rows)

    def window(self) -> Window:
        """Returns all that was told so far."""
        columns = {name: np.concatenate(rows) for name, rows in self._rows.items()}
        for name, rows in columns.items():
            if COLUMNS[name].key:
                columns[name] = newest(rows, COLUMNS[name])
        return Window.of(0, 0, 0, columns, texts=tuple(self._texts))


class _Frames:
    """Gives out the ids of frames and binaries, for a namer (FrameIds)."""

    def __init__(self) -> None:
        self._paths: list[str] = []
        self._frames: list[DumpFrame] = []

    def frame(self, kind: FrameKind, source: SourceFrame, binary: int | None, address: int) -> int:
        """As FrameIds.frame says."""
        module = "" if binary is None else self._paths[binary]
        is_glue = kind is FrameKind.INTERPRETER
        kind = FrameKind.NATIVE if is_glue else kind
        frame = DumpFrame(kind, source.name, source.file, source.line, module, is_glue)
        self._frames.append(frame)
        return len(self._frames) - 1

    def binary(self, path: str, build_id: str) -> int:
        """As FrameIds.binary says."""
        self._paths.append(path)
        return len(self._paths) - 1

    def of(self, ids: Iterable[int]) -> list[DumpFrame]:
        """Returns frames by their ids."""
        return [self._frames[number] for number in ids]


class _OpenFiles:
    """What live processes map, for a namer (Files)."""

    def __init__(self, table: ProcessTable) -> None:
        self._table = table

    def open(self, binary: int, path: str, build_id: str) -> OpenFile:
        """As Files.open says."""
        file = self._table.binaries.files[binary]
        return OpenFile(file.fd, file.root)

    def jit_process(self, process: int) -> JitProcess | None:
        """As Files.jit_process says."""
        image = self._table.images[process]
        return JitProcess(image.root, image.owner_uid)
