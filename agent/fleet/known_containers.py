# SPDX-License-Identifier: Apache-2.0
"""What is known of containers, kept in the agent's directory.

So captures that are cut out of what was recorded have the names of containers that are gone, and so
have stretches that another process left.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from aiflame.agent.fleet.labels import Facts, KnownContainer
from aiflame.agent.fleet.pods import Pod, PodContainer
from aiflame.agent.processes.container_names import EngineFacts

_FILE = "containers.json"


def keep(directory: Path, known: Mapping[str, KnownContainer]) -> None:
    """Keeps what is known, in place of what was kept; where the disk is full, that stays.

    Args:
        directory: Of the agent.
        known: By ids of containers.
    """
    path, new = directory / _FILE, directory / f"{_FILE}.new"
    words = {key: asdict(one) for key, one in known.items()}
    with suppress(OSError):
        new.unlink(missing_ok=True)
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump(words, file)
        new.rename(path)


def kept(directory: Path) -> dict[str, KnownContainer]:
    """Returns what was kept, nothing where that cannot be read.

    Args:
        directory: Of the agent.
    """
    try:
        words = json.loads((directory / _FILE).read_text())
        return {
            key: KnownContainer(_facts(one["facts"]), str(one["of_service"]))
            for key, one in words.items()
        }
    except (OSError, ValueError, RecursionError, TypeError, KeyError, AttributeError):
        return {}  # there is none, or it is of another version


def _facts(words: Mapping[str, Any]) -> Facts:
    if "pod" not in words:
        return EngineFacts(**{**words, "labels": _pairs(words["labels"])})
    tags = {name: _pairs(words["pod"][name]) for name in ("labels", "annotations")}
    return PodContainer(**{**words, "pod": Pod(**{**words["pod"], **tags})})


def _pairs(words: Any) -> tuple[tuple[str, str], ...]:
    return tuple((name, value) for name, value in words)
