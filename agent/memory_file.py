# SPDX-License-Identifier: Apache-2.0
"""Files that are in no directory."""

from __future__ import annotations

import os
from typing import BinaryIO


def memory_file(name: str) -> BinaryIO:
    """Makes a file to write to and to read from, which is gone when it is closed.

    There may be no directory to write to, not even /tmp: in a container with a read-only root, and
    in a service with systemd's ProtectSystem=strict.

    Args:
        name: What /proc shows of it, for people.

    Raises:
        OSError: There is no memory, or no descriptor.
    """
    return os.fdopen(os.memfd_create(name, os.MFD_CLOEXEC), "w+b")
