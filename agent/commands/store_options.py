# SPDX-License-Identifier: Apache-2.0
"""Options of the verbs that use a store."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from aiflame.agent.errors import EnvironmentUnfit
from aiflame.agent.user_folders import user_folder

_VARIABLE = "AIFLAME_STORE"
# Beside what an agent of this host keeps (file-hierarchy(7)).
_ROOT_STORE = Path("/var/lib/aiflame-store")


def add_store_argument(parser: argparse._ActionsContainer) -> None:
    """Add --store."""
    try:
        own = str(_own_store())
    except EnvironmentUnfit:  # who names one needs none
        own = "$XDG_DATA_HOME/aiflame/store"
    parser.add_argument(
        "--store",
        metavar="STORE",
        help="a directory, clickhouse://host/db or clickhouses://host/db (default:"
        f" {_VARIABLE}, else {own})",
    )


def named_store(args: argparse.Namespace) -> str:
    """Return the store that was named, else this user's own directory."""
    return args.store or os.environ.get(_VARIABLE) or str(_own_store())


def _own_store() -> Path:
    """Return where a store is that nobody named.

    Of a user $XDG_DATA_HOME/aiflame/store, by default ~/.local/share/aiflame/store.

    Raises:
        EnvironmentUnfit: Nothing says where that is.
    """
    if os.geteuid() == 0:
        return _ROOT_STORE
    return user_folder("XDG_DATA_HOME", ".local/share") / "aiflame" / "store"
