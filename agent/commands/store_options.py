# SPDX-License-Identifier: Apache-2.0
"""Options of the verbs that use a store."""

from __future__ import annotations

import argparse
import os

from aiflame.agent.errors import UsageError

_VARIABLE = "AIFLAME_STORE"


def add_store_argument(parser: argparse._ActionsContainer) -> None:
    """Add --store."""
    parser.add_argument(
        "--store",
        metavar="STORE",
        help=f"a directory, clickhouse://host/db or clickhouses://host/db (default: {_VARIABLE})",
    )


def named_store(args: argparse.Namespace) -> str:
    """Return the store that was named.

    Raises:
        UsageError: None was.
    """
    found: str = args.store or os.environ.get(_VARIABLE, "")
    if not found:
        raise UsageError(
            "no store is named", f"--store DIRECTORY, --store clickhouse://host/db, or {_VARIABLE}"
        )
    return found
