# SPDX-License-Identifier: Apache-2.0
"""Memory that targets share with a device family: found among their mappings, and kept open.

A helper may also have a pipe, by which it is told what to do. It is on as long as somebody has the
other end open: that of a recorder which was killed is closed by the kernel.

It is read with pread, so that memory which shrinks ends no reader, and never mapped. A process that
is gone leaves it as it was: what it wrote last is read all the same.
"""

from __future__ import annotations

import os
import select
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial

from aiflame.agent.losses import LossKind
from aiflame.agent.processes.table import ProcessImage, ProcessTable

# A helper has one, and another one after it was loaded again. Those that do not open count as well.
_MOST_OF_PROCESS = 4
# At what a process has mapped that shares nothing, each after twice as many drains as the one
# before: a helper that is there may begin at any time. A look takes 0.1 to 2 ms.
_MOST_LOOKS = 4
# A process that maps something all the time, or rings, has no more of them than this.
_LOOKS_PER_DRAIN = 4
# Kernel times that one process says are gone: more than a device runs in the longest recording.
_MOST_GONE = 1 << 32
_CLOSED = -1


class _Memory:
    """See `aiflame.gpu.base.SharedMemory`."""

    def __init__(
        self,
        process: int,
        fd: int,
        open_pipe: Callable[[int], int | None],
        close: Callable[[int], None],
    ) -> None:
        self.process = process
        self.fd = fd
        self._pipe: int | None = None
        self._open_pipe = open_pipe
        self._close = close

    def read(self, size: int, offset: int) -> bytes:
        try:
            return os.pread(self.fd, size, offset)
        except (OSError, OverflowError):  # an offset that no file has
            return b""

    def tell(self, number: int, message: bytes) -> bool:
        if self.fd == _CLOSED:
            return False
        if self._pipe is None:
            self._pipe = self._open_pipe(number)
        try:
            return self._pipe is not None and os.write(self._pipe, message) == len(message)
        except OSError:  # its reader is gone, or reads nothing
            return False

    def is_over(self) -> bool:
        if self._pipe is None:
            return False
        poll = select.poll()
        poll.register(self._pipe, 0)  # of a pipe without a reader: POLLERR (poll(2))
        return any(events & select.POLLERR for _, events in poll.poll(0))

    def leave(self) -> None:
        if self._pipe is not None:
            self._close(self._pipe)
            self._pipe = None

    def close(self) -> None:
        """Closes all of it."""
        self.leave()
        self._close(self.fd)
        self.fd = _CLOSED


@dataclass(slots=True)
class _Process:
    """A process that may share memory, or does."""

    image: ProcessImage
    payer: str
    memories: dict[tuple[str, int], _Memory]  # by device and inode
    is_refused: bool = False  # some of it could not be opened
    is_announced: bool = False  # its helper has rung, or its memory was seen
    kernel_times_gone: int = 0  # as its helper says at its end
    looks: int = 0  # in vain
    drains_to_skip: int = 0
    looks_left: int = _LOOKS_PER_DRAIN


class Memories:
    """What processes share with one family.

    Args:
        table: Process table.
        name: As `Family.memory`; "" for a family that shares none.

    Attributes:
        losses: What could not be opened, or is more than there may be descriptors for.
    """

    def __init__(self, table: ProcessTable, name: str) -> None:
        self._table = table
        self._name = name
        self._processes: dict[int, _Process] = {}  # by index of the image
        self.losses: Counter[LossKind] = Counter()

    def look(self, image: ProcessImage) -> None:
        """Looks for what a process shares, now that it has mapped something, and from now on."""
        if not self._name:
            return
        known = self._processes.setdefault(image.index, _Process(image, image.payer, {}))
        if known.looks_left:
            known.looks_left -= 1
            self._look(known)

    def heard(self, image: ProcessImage, kernel_times_gone: int = 0) -> None:
        """Looks for what a process that rings has begun to share.

        Args:
            image: The process.
            kernel_times_gone: How many it shared that go with it, as it is over.
        """
        known = self._processes.get(image.index)
        if known is None or not known.memories:
            self.look(image)
            known = self._processes.get(image.index)
        if known is not None:
            known.is_announced = True
            known.kernel_times_gone = min(kernel_times_gone, _MOST_GONE)

    def look_again(self) -> None:
        """To be called at a drain: looks at processes that have not begun to share."""
        for process in self._processes.values():
            process.looks_left = _LOOKS_PER_DRAIN
            if process.memories:
                continue
            if process.is_announced and not self._table.is_current(process.image):
                self._lose(process)
            elif process.drains_to_skip:
                process.drains_to_skip -= 1
            else:
                self._look(process)
                process.looks = min(process.looks + 1, _MOST_LOOKS)
                process.drains_to_skip = 1 << process.looks

    def _lose(self, process: _Process) -> None:
        """Counts a process that is over, and whose memory went with it."""
        self.losses[LossKind.DEVICE_MEMORY_GONE] += 1
        self.losses[LossKind.KERNEL_TIMES_GONE] += process.kernel_times_gone
        process.is_announced, process.kernel_times_gone = False, 0

    def _look(self, process: _Process) -> None:
        image, refused = process.image, 0
        for line in self._table.shared_memory(image, self._name):
            identity = line.device, line.inode
            # A child that was forked has its parent's, which the parent has written.
            is_known = any(identity in one.memories for one in self._processes.values())
            if is_known or len(process.memories) + refused == _MOST_OF_PROCESS:
                continue
            fd = self._table.binaries.hold_shared(image.pid, process.payer, line)
            process.is_announced = True
            if fd is None and not self._table.is_current(image):
                continue
            if fd is None:  # there may be a descriptor for it later
                self.losses[LossKind.DEVICE_MEMORY_NOT_OPENED] += not process.is_refused
                process.is_refused = True
                refused += 1
            else:
                process.memories[identity] = self._memory(process, fd)

    def _memory(self, process: _Process, fd: int) -> _Memory:
        close = partial(self._table.binaries.release_shared, process.image.pid, process.payer)
        return _Memory(process.image.index, fd, partial(self._open_pipe, process), close)

    def _open_pipe(self, process: _Process, number: int) -> int | None:
        image = process.image
        if not self._table.is_current(image):  # its pid may be another's by now
            return None
        return self._table.binaries.hold_pipe(image.pid, process.payer, number)

    def all(self) -> list[_Memory]:
        """Returns what is shared by processes that are known."""
        return [memory for one in self._processes.values() for memory in one.memories.values()]

    def forget_images(self, images: Collection[int]) -> None:
        """Forgets process images that have ended."""
        for index in images:
            process = self._processes.pop(index, None)
            if process is not None:
                self._release(process)

    def close(self) -> None:
        """Closes all."""
        self.forget_images([*self._processes])

    def _release(self, process: _Process) -> None:
        for memory in process.memories.values():
            memory.close()
