# SPDX-License-Identifier: Apache-2.0
"""Where files of a user and temporary ones are kept; XDG Base Directory Specification 0.8."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from aiflame.agent.errors import EnvironmentUnfit


def user_folder(variable: str, usual: str) -> Path:
    """Returns a folder of the user who runs this process; it need not be there.

    Args:
        variable: Names it; a relative path counts as unset.
        usual: Its path below the user's home, where the variable is not set.

    Raises:
        EnvironmentUnfit: Nothing says where the home is, as in a container with a user of its own.
    """
    configured = Path(os.environ.get(variable, ""))
    if configured.is_absolute():
        return configured
    try:
        return Path.home() / usual
    except RuntimeError:
        raise EnvironmentUnfit(
            f"no home of user {os.geteuid()} is known",
            f"set HOME, or {variable}, to a folder that this user can write to",
        ) from None


def temporary_folder() -> Path:
    """Returns where temporary files are made.

    Raises:
        EnvironmentUnfit: Nowhere, as in a container whose files are read-only.
    """
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError:
        raise EnvironmentUnfit(
            "no directory for temporary files can be written to",
            "set TMPDIR to one that can be: export TMPDIR=DIRECTORY",
        ) from None
