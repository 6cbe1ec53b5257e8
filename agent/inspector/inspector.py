# SPDX-License-Identifier: Apache-2.0
"""The only way from a recorder, a dump or doctor to the files and the memory of targets."""

from __future__ import annotations

from collections import Counter

from aiflame.agent.inspector.fork_server import ForkServer
from aiflame.agent.inspector.memory import RemoteMemory
from aiflame.agent.inspector.opener import Opener
from aiflame.agent.losses import LossKind


class Inspector:
    """The children that do what may never end. A context manager, which ends them.

    Args:
        server: One that is there already, which ends with them; None to start one when needed.

    Attributes:
        opener: Opens files, and reads what /proc tells of memory.
        memory: Reads memory.
        server: Forks those who parse files.
    """

    def __init__(self, server: ForkServer | None = None) -> None:
        self.opener = Opener()
        self.memory = RemoteMemory()
        self.server = ForkServer() if server is None else server

    def start(self) -> None:
        """Starts them now: they are ready by the time that somebody asks."""
        self.opener.start()
        self.memory.start()

    @property
    def pids(self) -> list[int]:
        """Of the children that there are."""
        found = [pid for pid in (self.opener.pid, self.memory.pid) if pid is not None]
        return [*found, *self.server.pids]

    @property
    def losses(self) -> Counter[LossKind]:
        """What is missing for want of files and memory that could be read."""
        found = Counter({**self.opener.losses, **self.memory.losses})
        found[LossKind.SANDBOX_INCOMPLETE] = int(bool(self._failures))
        return found

    @property
    def loss_files(self) -> dict[LossKind, set[str]]:
        """The files and processes to blame."""
        own = {LossKind.SANDBOX_INCOMPLETE: self._failures}
        return {**self.opener.loss_files, **self.memory.loss_files, **own}

    @property
    def _failures(self) -> set[str]:
        return {self.opener.failures, self.memory.failures} - {""}

    def __enter__(self) -> Inspector:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the children."""
        self.opener.close()
        self.memory.close()
        self.server.close()
