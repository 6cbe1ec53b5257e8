# SPDX-License-Identifier: Apache-2.0
"""Where a user's files are kept: XDG Base Directory Specification 0.8."""

from __future__ import annotations

import os
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
