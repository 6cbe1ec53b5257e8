# SPDX-License-Identifier: Apache-2.0
"""Opens files of this machine that no process has mapped yet."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from aiflame.agent.inspector.opener import Opener, RemoteFile
from aiflame.agent.symbols.file_facts import FileFacts


@contextlib.contextmanager
def opened_at(path: str, opener: Opener, facts: FileFacts) -> Iterator[int]:
    """Hands out a descriptor of a file, about which `facts` is asked meanwhile.

    Args:
        path: Of the file.
        opener: Opens it.
        facts: Is told of one that must not be read here.

    Raises:
        OSError: As `Opener.beneath`.
    """
    opened = opener.beneath("/", path)
    try:
        if not opened.is_local:
            # Nobody has mapped it: the opener is patient with it as with a process of its own.
            facts.guard.remote[opened.fd] = RemoteFile(opener, opened, 0, path)
        yield opened.fd
    finally:
        facts.guard.remote.pop(opened.fd, None)
        os.close(opened.fd)
