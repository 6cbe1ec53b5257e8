# SPDX-License-Identifier: Apache-2.0
"""Gives a stretch names, window by window as they come, or in its end.

Where the agent has to do less, windows wait on disk, for a minute or, at last, two. Where all of a
stretch has waited, it is named in a copy of this process (`fork`), which writes the capture and
ends: what naming takes for a moment is as much as this process has. What was found out comes back:
names that other stretches need, and which files are bad.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO

from aiflame.agent.errors import AiflameError, DiskFull
from aiflame.agent.fleet.cost import NAMES_WAIT_NS, THRIFT_OF_NAMES
from aiflame.agent.fleet.fork import Fork, ForkEnded
from aiflame.agent.fleet.labelling import Labelling
from aiflame.agent.fleet.log import Log, words_of
from aiflame.agent.fleet.stretches import count_try, keep_kernel_file
from aiflame.agent.model.profile import NS_PER_S
from aiflame.agent.model.window import COLUMNS, Window
from aiflame.agent.sinks.rebuilt import capture_of_windows
from aiflame.agent.sinks.segments import FollowedWindows, JitSymbolSink, RecordedWindows
from aiflame.agent.sinks.written import Naming, NamingNotes, WrittenCapture
from aiflame.agent.symbolize.files import GivenFiles
from aiflame.agent.symbols.service import ServiceNotes

DATABASE = "capture.aiflame"
_PROCESS_NAME = "aiflame names"
# The out-of-memory killer may come once; what needs more than there is has no names.
_TRIES_APART = 2
# Whoever is so late leaves out names: of each second of a window, this is for them.
_LATE_NS = 30_000_000_000
_BUDGET_S = 0.3
# The same where the agent has to do less of everything, by how many times less: 2 % of a CPU, 1 %
# and so on. The first 256 stacks of a window are named in any case (sinks/bounded_naming.py).
_THRIFTY_S = 0.04
# Of windows whose names are asked for together: 10,000 launches and as many samples of devices a
# second have 113 MB in a minute.
_MOST_AT_ONCE_BYTES = 16_000_000
# Where more comes at once, it waits, too; as it is on disk, compressed: the first windows of 10,000
# threads have 2 and 3 MB, those of a busy host 30 to 300 KB. Naming takes twenty times as much.
_LARGE_BYTES = 500_000
# What is read of windows that wait for their names: their containers may be gone by then.
_OF_CONTAINERS = ("cgroups",)
# For so long after a name came from a process's own list of its code, none waits: the list may go.
_PROMPT_S = 600.0


class Lateness:
    """How long names may take: as long as they do, until windows are late or cost is too high.

    Attributes:
        thrift, delay_factor: As `recording.chance.Chances` has them.
        prompt_until_s: Until when no window waits for its names, by `time.monotonic`.
    """

    def __init__(self) -> None:
        self.thrift = self.delay_factor = 1
        self.prompt_until_s = 0.0
        self._started_unix_ns: int | None = None

    def begin(self, facts: Mapping[str, str | int]) -> None:
        """Takes what is known of a recording."""
        self._started_unix_ns = int(facts["started_unix_ns"])

    def budget_s(self, window: Window) -> float | None:
        """Returns how long those of a window may take, None for as long as they take."""
        if self._started_unix_ns is None:
            return None
        is_late = time.time_ns() - self._started_unix_ns - window.end_ns > _LATE_NS
        window_s = (window.end_ns - window.start_ns) / NS_PER_S
        if self.thrift > 1:
            return _THRIFTY_S / self.thrift * window_s
        return _BUDGET_S * window_s if is_late else None

    def may_wait(self, waited_ns: int, *, are_large: bool = False) -> bool:
        """Returns whether names of windows are asked for with those of later ones.

        Args:
            waited_ns: From the beginning of the first that waits to the end of the last.
            are_large: It takes much memory for a moment.
        """
        if time.monotonic() < self.prompt_until_s:
            return False
        may_wait = are_large or self.thrift >= THRIFT_OF_NAMES
        return may_wait and waited_ns < NAMES_WAIT_NS * self.delay_factor


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What became of a stretch in a copy of this process.

    Attributes:
        notes: What was found out.
        cpu_ns, rss_bytes: As of a `StretchNaming`.
        prompt_until_s: As of a `Lateness`.
        error: Why it has no names, "" where it has.
        is_disk_full: Whether that is why.
    """

    notes: NamingNotes
    cpu_ns: int = 0
    rss_bytes: int = 0
    prompt_until_s: float = 0.0
    error: str = ""
    is_disk_full: bool = False


class StretchNaming:
    """A stretch that is being named while its windows come.

    Those that wait for their names are on disk, and nowhere else.

    Args:
        folder: Of its segments.
        naming: Gives names.
        files: What it opens.
        lateness: Of names.
        log: Takes a line for each event.

    Attributes:
        database: Its capture, once it is finished.
        cpu_ns, rss_bytes: What recording it took: CPU time, and the most memory.
    """

    def __init__(
        self, folder: Path, naming: Naming, files: GivenFiles, lateness: Lateness, log: Log
    ) -> None:
        self.folder = folder
        self.database = folder / DATABASE
        self.cpu_ns = self.rss_bytes = 0
        self._naming: Naming | None = naming
        self._files = files
        self._lateness = lateness
        self._log = log
        self._following = FollowedWindows(folder)
        self._ahead = FollowedWindows(folder, _OF_CONTAINERS)
        self._come = self._come_ahead = self._waiting = 0
        self._waiting_from_ns = self._waited_ns = 0
        self._are_large = False
        self._jit_symbols = JitSymbolSink(folder)
        self._capture: WrittenCapture | None = None
        self.database.unlink(missing_ok=True)  # of a process that was killed
        if count_try(folder) > 1:
            self._naming = None

    def take(self, count: int, labelling: Labelling | None) -> None:
        """Takes so many windows more; whom they are of is looked for before names are."""
        if self._naming is None:  # it is made as a whole, in the end
            return
        try:
            for _ in range(count):
                self._come += 1
                self._take_one(labelling)
        except Exception as error:  # of one stretch; it is written once more, without names
            self._leave_names(error)

    def _take_one(self, labelling: Labelling | None) -> None:
        if not self._waiting:
            self._are_large = self._following.unread_bytes() > _LARGE_BYTES
            if not self._may_wait(0):
                for window in self._following.take(1):
                    if labelling is not None:
                        labelling.expect(window)
                    self._put([window])
                return
        for window in self._newest():
            if labelling is not None:
                labelling.expect(window)
            if self._waiting and not self._may_wait(self._waited_ns):
                self._put_waiting()
            if not self._waiting:
                self._waiting_from_ns = window.start_ns
            self._waited_ns = window.end_ns - self._waiting_from_ns
            self._waiting += 1
            self._files.hold(True)
            if not self._may_wait(0):
                self._put_waiting()

    def _may_wait(self, waited_ns: int) -> bool:
        return self._lateness.may_wait(waited_ns, are_large=self._are_large)

    def _newest(self) -> Iterator[Window]:
        """Yields the window that came last, with what tells whom it is of."""
        count, self._come_ahead = self._come - self._come_ahead, self._come
        yield from islice(self._ahead.take(count), count - 1, None)

    def _put_waiting(self) -> None:
        waiting, self._waiting = self._waiting, 0
        if self._naming is None:
            return
        group: list[Window] = []
        group_bytes = 0
        for window in self._following.take(waiting):
            group.append(window)
            group_bytes += sum(window.rows(name).nbytes for name in COLUMNS)
            if group_bytes > _MOST_AT_ONCE_BYTES:
                self._put(group)
                group, group_bytes = [], 0
        self._put(group)
        self._files.hold(False)

    def _put(self, windows: Sequence[Window]) -> None:
        """Names windows that follow each other; files are asked about once for all."""
        if not windows or self._naming is None:
            return
        if self._capture is None:
            facts = self._following.facts
            self._lateness.begin(facts)
            self._capture = WrittenCapture(
                *(self.database, windows[0].start_ns, facts, self._naming),
                keep=partial(keep_kernel_file, self.folder),
            )
        with self._capture.expecting(windows):
            for window in windows:
                self.cpu_ns += window.cost.all_ns
                self.rss_bytes = max(self.rss_bytes, window.cost.rss_bytes)
                self._capture.put(window)
                self._jit_symbols.put(window, self._capture.jit_symbols)
                if self._capture.jit_symbols:
                    self._lateness.prompt_until_s = time.monotonic() + _PROMPT_S

    def _leave_names(self, error: Exception) -> None:
        self._log.say_seldom("naming", f"a stretch stays without names: {words_of(error)}")
        self._naming = None
        self._waiting = 0
        self._files.hold(False)

    def finish(self) -> None:
        """Completes its capture.

        Raises:
            DiskFull: There is no room for it.
            AiflameError: There is none: no window can be read, or nothing can be written.
        """
        try:
            if self._waiting and self._capture is None and self._finish_apart():
                return
            self._put_waiting()
        except DiskFull:
            raise
        except Exception as error:  # of one stretch; it is written once more, without names
            self._leave_names(error)
        else:
            if self._naming is not None and self._capture is not None:
                self._capture.finish()
                return
        finally:
            self._close()
        self.database.unlink(missing_ok=True)
        windows = RecordedWindows(self.folder)
        capture_of_windows(self.database, windows, windows.facts, with_names=False)
        self.cpu_ns, self.rss_bytes = cost_of(windows)

    def _finish_apart(self) -> bool:
        """Has all that waits named in a copy of this process; returns False if there can be none.

        Raises:
            DiskFull: There is no room for its capture.
            AiflameError: It has no names.
        """
        naming = self._naming
        if naming is None:
            return False
        found: _Outcome | None = None
        for _ in range(_TRIES_APART):
            naming.before_fork()
            try:
                fork = Fork(_PROCESS_NAME, partial(self._name_all, naming))
            except OSError:  # no room for a process: here it takes more memory, for longer
                return False
            with fork:
                found = self._outcome(naming, fork.pipe)
            if found is not None:
                break
            self.database.unlink(missing_ok=True)
        if found is None:
            raise ForkEnded("the process that names it has ended")
        self._lateness.prompt_until_s = max(self._lateness.prompt_until_s, found.prompt_until_s)
        if found.is_disk_full:
            raise DiskFull(found.error)
        if found.error:
            raise AiflameError(found.error)
        self.cpu_ns, self.rss_bytes = found.cpu_ns, found.rss_bytes
        return True

    def _outcome(self, naming: Naming, pipe: IO[bytes]) -> _Outcome | None:
        """Takes in what a copy finds out; returns what became of it, None where it was killed."""
        with suppress(EOFError, pickle.UnpicklingError):
            while True:
                found: _Outcome | ServiceNotes = pickle.load(pipe)  # noqa: S301 - of this program
                if isinstance(found, _Outcome):
                    naming.learn(found.notes)
                    return found
                naming.service.learn(found)
        return None

    def _name_all(self, naming: Naming, pipe: IO[bytes]) -> None:
        """What the copy does: what it finds out and what became of it are written to the pipe."""

        def tell_strike() -> None:
            # A file that costs much is not to cost it again, whatever becomes of this process.
            pickle.dump(naming.service.notes(), pipe)
            pipe.flush()

        naming.service.on_strike = tell_strike
        naming.begin_notes()
        # A copy before this one may have written some.
        self._jit_symbols = JitSymbolSink(self.folder)
        error: Exception | None = None
        try:
            self._put_waiting()
            self._jit_symbols.close()
            if self._capture is not None:
                self._capture.finish()
        except Exception as caught:  # of one stretch
            error = caught
        outcome = _Outcome(
            naming.end_notes(),
            self.cpu_ns,
            self.rss_bytes,
            self._lateness.prompt_until_s,
            "" if error is None else words_of(error),
            isinstance(error, DiskFull),
        )
        pickle.dump(outcome, pipe)

    def _close(self) -> None:
        self._files.hold(False)
        self._jit_symbols.close()
        self._following.close()
        self._ahead.close()
        capture, self._capture = self._capture, None
        if capture is not None:
            capture.close()


def cost_of(windows: Iterable[Window]) -> tuple[int, int]:
    """Returns what recording windows took: CPU time in ns, and the most memory in bytes."""
    cost = [(window.cost.all_ns, window.cost.rss_bytes) for window in windows]
    return sum(cpu_ns for cpu_ns, _ in cost), max(rss_bytes for _, rss_bytes in cost)
