# SPDX-License-Identifier: Apache-2.0
"""Forgets processes, threads and files some windows after they have ended, for good.

Their last stacks and sums may come in the window after their end. What windows have said of them is
not this side's any more: so the memory of a recording is that of what lives, however long it lasts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from aiflame.agent.kernel.loader import Programs
from aiflame.agent.processes.table import NO_BINARY, ProcessImage, ProcessTable, ThreadInfo
from aiflame.agent.recording.thread_times import ThreadTimes
from aiflame.agent.recording.window_builder import WindowBuilder

# For how long those that have ended are still known: for three windows, or where these are long for
# two. In a window of a minute, tens of thousands may end.
_GRACE_WINDOWS, _LEAST_GRACE_WINDOWS, _GRACE_NS = 3, 2, 15_000_000_000
# How often it is looked for those of whose end nobody has told: of a process that ends right after
# an exec nobody does. It takes 1 us for each that lives.
_IMAGES_NS = 8_000_000_000
# And for files that nobody has mapped any more: closed at the second time that nobody has. What was
# deleted meanwhile takes its room on disk until then.
_BINARIES_NS = 60_000_000_000


class KeepsImages(Protocol):
    """Whoever keeps something of each process image."""

    def forget_images(self, images: Collection[int]) -> None:
        """Forgets images, by index."""


class KeepsBinaries(Protocol):
    """Whoever keeps something of each mapped file."""

    def forget_binaries(self, binaries: Collection[int]) -> None:
        """Forgets files, by index."""


class Ended:
    """What has ended, and is still known.

    Args:
        programs: Loaded.
        table: Process table.
        window: Builds windows.
        thread_times: Knows which threads windows have been told of.
        of_images: Keep something of images.
        of_binaries: Keep something of files.
        used_binaries: Files that are needed although nobody maps them.
        used_images: Images that are needed for a while although they have ended.
    """

    def __init__(
        self,
        programs: Programs,
        table: ProcessTable,
        window: WindowBuilder,
        thread_times: ThreadTimes,
        of_images: Sequence[KeepsImages],
        of_binaries: Sequence[KeepsBinaries],
        used_binaries: Callable[[], Collection[int]],
        used_images: Callable[[], Collection[int]],
    ) -> None:
        self._programs = programs
        self._table = table
        self._window = window
        self._thread_times = thread_times
        self._of_images = of_images
        self._of_binaries = of_binaries
        self._used_binaries = used_binaries
        self._used_images = used_images
        self._waiting: deque[tuple[int, list[ProcessImage], list[ThreadInfo]]] = deque()
        self._images_ns = self._binaries_ns = 0  # when it was looked, since the recording's start
        self._unused: set[int] = set()

    def forget(self) -> None:
        """To be called when a window was closed, and none has been begun to be filled."""
        now_ns = self._window.start_ns
        if now_ns - self._images_ns >= _IMAGES_NS:
            self._images_ns = now_ns
            self._table.look_for_ended()
        if now_ns - self._binaries_ns >= _BINARIES_NS:
            self._binaries_ns = now_ns
            self._forget_binaries()
            self._table.forget_roots()
        self._waiting.append((now_ns, *self._table.take_ended()))
        while self._is_over(now_ns):
            _, images, threads = self._waiting.popleft()
            used = self._used_images()
            self._waiting[-1][1].extend(image for image in images if image.index in used)
            self._forget([image for image in images if image.index not in used], threads)

    def _is_over(self, now_ns: int) -> bool:
        """Whether those that have waited longest have waited long enough."""
        windows = len(self._waiting) - 1
        is_long = now_ns - self._waiting[0][0] >= _GRACE_NS
        return windows >= (_LEAST_GRACE_WINDOWS if is_long else _GRACE_WINDOWS)

    def _forget(self, images: list[ProcessImage], threads: list[ThreadInfo]) -> None:
        for image in images:
            for thread in self._table.threads_of(image):
                threads.append(thread)
                if not thread.has_ended:
                    self._take_out(thread)
        if not images and not threads:
            return
        indexes = {image.index for image in images}  # keepers look up all that they keep
        for keeper in self._of_images if images else ():
            keeper.forget_images(indexes)
        numbers = [thread.index for thread in threads]
        self._thread_times.forget(numbers)
        self._window.forget(indexes, numbers)
        self._table.forget(images, threads)

    def _take_out(self, thread: ThreadInfo) -> None:
        """Takes a thread out of the kernel's table of whose end nobody has told."""
        key = thread.tid.to_bytes(4, "little")
        state = self._programs.threads.lookup(key)
        if state is not None and int(state[0]["image"]) == thread.image.image:
            self._programs.threads.delete(key)

    def _forget_binaries(self) -> None:
        used = {NO_BINARY, *self._used_binaries(), *self._window.mapped_binaries()}
        for image in self._table.images.values():
            used.update(mapping.binary for mapping in image.laid)
        unused = self._table.binaries.files.keys() - used
        gone, self._unused = unused & self._unused, unused - self._unused
        if not gone:
            return
        for keeper in self._of_binaries:
            keeper.forget_binaries(gone)
        self._window.forget_binaries(gone)
        self._table.binaries.forget(gone)
