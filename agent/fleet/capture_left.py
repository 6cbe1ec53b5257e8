# SPDX-License-Identifier: Apache-2.0
"""What captures on request leave that were killed, as where memory runs out: up to `capture_size`.

Nobody asks for it, and no budget of the agent's disk knows of it.
"""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path

from aiflame.agent.capture.workspace import discard_below

# In the agent's directory.
FOLDER = "capture"


def discard_left(directory: Path) -> bool:
    """Removes it; to be called while no capture is made.

    Args:
        directory: Of the agent.

    Returns:
        Whether nothing is left; else it is to be tried again.
    """
    own = directory / FOLDER
    with suppress(OSError):
        for left in own.iterdir():
            shutil.rmtree(left, ignore_errors=True)
    return discard_recordings(own)


def discard_recordings(folder: Path) -> bool:
    """Removes what is left of recordings for a folder that were killed.

    It lies where all recordings do, to be recovered; nobody asks for these, and they have no folder
    to go to any more.
    """
    try:
        return discard_below(folder)
    except OSError:
        return False
