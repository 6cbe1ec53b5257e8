# SPDX-License-Identifier: Apache-2.0
"""A capture that is written window by window, from nothing to its end."""

from __future__ import annotations

import contextlib
import resource
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from aiflame.agent.capture.code_objects import StoredCode
from aiflame.agent.capture.schema import SYMBOLS_FACT
from aiflame.agent.capture.writer import CaptureWriter
from aiflame.agent.losses import KINDS_BY_NAME, LossKind
from aiflame.agent.model.window import Window
from aiflame.agent.sinks.bounded_naming import BoundedNamer
from aiflame.agent.sinks.capture import CaptureSink
from aiflame.agent.sinks.capture_report import Report
from aiflame.agent.sinks.kernel_files import KernelFiles
from aiflame.agent.sinks.names import Names
from aiflame.agent.symbolize.files import Files
from aiflame.agent.symbolize.known_names import KnownNames, NameNotes
from aiflame.agent.symbolize.namer import Namer
from aiflame.agent.symbols.file_facts import FileFacts
from aiflame.agent.symbols.service import ServiceNotes, SymbolService
from aiflame.agent.target_files import GuardNotes


@dataclass(frozen=True, slots=True)
class NamingNotes:
    """What naming has found out in a copy of this process.

    Attributes:
        names: Names.
        service: What reading symbols has met.
        guard: Files that are bad, and what reading them took.
    """

    names: NameNotes
    service: ServiceNotes
    guard: GuardNotes


@dataclass(frozen=True, slots=True)
class Naming:
    """What names take: the files that processes had mapped, and who reads them.

    Attributes:
        files: Opens them.
        service: Reads symbols.
        file_facts: Tells what is in them.
        budget_s: How long the names of a window may take, None for as long as they take.
        known: What was named for captures before; they all are of one recorder.
        keeps_kernel_files: Of kernels that nobody else lists.
    """

    files: Files
    service: SymbolService
    file_facts: FileFacts
    budget_s: Callable[[Window], float | None] | None = None
    known: KnownNames = field(default_factory=KnownNames)
    keeps_kernel_files: bool = True

    def before_fork(self) -> None:
        """Ends helpers of this process, which a copy must not share; reads what copies share."""
        self._end_helpers()
        self.known.kernel()

    def begin_notes(self) -> None:
        """From now on what is found out is for the process that this one is a copy of."""
        self.known.begin_notes()

    def end_notes(self) -> NamingNotes:
        """Ends helpers; returns what was found out since `begin_notes`."""
        self._end_helpers()
        guard = self.file_facts.guard
        return NamingNotes(self.known.notes(), self.service.notes(), guard.notes())

    def learn(self, notes: NamingNotes) -> None:
        """Takes in what was found out in a copy of this process."""
        self.known.learn(notes.names)
        self.service.learn(notes.service)
        self.file_facts.guard.learn(notes.guard)

    def _end_helpers(self) -> None:
        self.service.close()
        self.file_facts.close()


class WrittenCapture:
    """A capture that is being written.

    Args:
        path: Where nothing is; in a folder that nobody else may write to.
        start_ns: Where its first window begins.
        facts: Of the recording.
        naming: Without it stacks show modules and addresses.
        keep: As of `KernelFiles`.

    Raises:
        DiskFull: It cannot be written.
        AiflameError: It cannot be made.
    """

    def __init__(
        self,
        path: Path,
        start_ns: int,
        facts: Mapping[str, str | int],
        naming: Naming | None = None,
        keep: Callable[[int, bytes], None] = lambda *_: None,
    ) -> None:
        self._path = path
        names = Names()
        self._service = None if naming is None else naming.service
        self._namer: Namer | BoundedNamer | None = None
        if naming is not None:
            namer = Namer(naming.files, naming.service, names, naming.file_facts, naming.known)
            budget_s = naming.budget_s
            self._namer = namer if budget_s is None else BoundedNamer(namer, budget_s)
        try:
            with contextlib.ExitStack() as parts:
                self._writer = CaptureWriter(path)
                parts.callback(self._writer.close)
                kernel_files = None
                if naming is not None and naming.keeps_kernel_files:
                    stored = StoredCode(self._writer.put)
                    kernel_files = KernelFiles(stored, naming.files, naming.file_facts, keep)
                self._sink = CaptureSink(self._writer, start_ns, names, self._namer, kernel_files)
                began_ns = int(facts.get("started_unix_ns", 0)) + start_ns
                self._writer.put_meta({**facts, "started_unix_ns": began_ns})
                self._parts = parts.pop_all()
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        self._has_windows = False

    @contextlib.contextmanager
    def expecting(self, windows: Sequence[Window]) -> Iterator[None]:
        """While windows are written one after another: files are asked about once for all."""
        if len(windows) < 2 or not isinstance(self._namer, BoundedNamer):
            yield
            return
        self._namer.expect(self._sink.unnamed(windows))
        try:
            yield
        finally:
            self._namer.expect(())

    def put(self, window: Window) -> None:
        """Writes a window.

        Args:
            window: The one after the window before.

        Raises:
            DiskFull: It is not in the capture; all before are.
        """
        self._sink.put(window)
        self._writer.put_meta({"duration_ns": self._sink.end_ns})
        self._writer.commit()
        self._has_windows = True

    @property
    def jit_symbols(self) -> Mapping[tuple[int, int], str]:
        """What perf maps said of stacks of the last window, by process and address."""
        return {} if self._namer is None else self._namer.jit_symbols

    def finish(self, disk_full: str = "") -> Report:
        """Ends it; returns what there is to say of it.

        Args:
            disk_full: Why not all windows are in it; then nothing more is written. Where none is,
                the file is removed.
        """
        sink, writer, namer, service = self._sink, self._writer, self._namer, self._service
        naming: dict[str, int] = {}
        if namer is not None:
            lost = namer.losses + Counter({LossKind.NAMING_BEHIND: sink.unnamed_stacks})
            naming = {kind.stored_name: count for kind, count in lost.items() if count}
        if disk_full:
            writer.rollback()
        else:
            sink.finish()
            if namer is not None:
                writer.drop_meta(SYMBOLS_FACT)
            # A stack that was missing in one window may have come in a later one.
            losses = {**sink.losses, LossKind.STACK_LOST.stored_name: sink.lost_stacks, **naming}
            writer.set_losses(_loss_rows(losses))
            writer.commit()
        self.close()
        if not self._has_windows:
            self._path.unlink(missing_ok=True)
        problems = [] if service is None else service.problems
        return Report(
            lost_stacks=sink.lost_stacks,
            window_losses=dict(sink.losses),
            naming_losses=naming,
            problems=tuple(f"{each.reason.stored_name}: {each.detail}" for each in problems),
            peak_rss_bytes=_peak_rss_bytes() + (0 if service is None else service.peak_rss_bytes),
            disk_full=disk_full,
        )

    def close(self) -> None:
        """Closes the file, whether it is finished or not."""
        self._parts.close()


def _peak_rss_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _loss_rows(losses: Mapping[str, int]) -> Iterator[tuple[str, int, str]]:
    for name, count in losses.items():
        kind = KINDS_BY_NAME.get(name)
        words = "" if kind is None else "; ".join(filter(None, (kind.meaning, kind.cure)))
        if count:
            yield name, count, words
