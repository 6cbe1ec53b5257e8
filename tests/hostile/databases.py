# SPDX-License-Identifier: Apache-2.0
"""Damaged databases of container engines, of bbolt's and of SQLite's."""

from __future__ import annotations

import json
import random
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from aiflame.agent.processes.podman_state import configurations
from bolt_files import PAGE_BYTES, BoltFile
from hostile.outcome import Outcome

_IDS = [f"{number * 7919:064x}" for number in range(40)]
# Where pages have their headers and their tables.
_TABLE_BYTES = 150


class _Unforeseen(Exception):
    """No exception is foreseen: whoever asks for labels catches none."""


def _bolt(folder: Path) -> tuple[Path, bytes]:
    containers = {each.encode(): {b"config": _config(each), b"state": b"{}"} for each in _IDS}
    return folder / "bolt_state.db", BoltFile({b"ctr": containers}, most=4).content()


def _sqlite(folder: Path) -> tuple[Path, bytes]:
    path = folder / "db.sql"
    with closing(sqlite3.connect(path, isolation_level=None)) as database:
        database.execute(
            "CREATE TABLE ContainerConfig(ID TEXT PRIMARY KEY NOT NULL, Name TEXT UNIQUE NOT NULL,"
            " PodID TEXT, JSON TEXT NOT NULL)"
        )
        database.executemany(
            "INSERT INTO ContainerConfig VALUES (?, ?, NULL, ?)",
            [(each, each, _config(each)) for each in _IDS],
        )
    return path, path.read_bytes()


def _config(container_id: str) -> bytes:
    return json.dumps({"id": container_id, "spec": "x" * 6000, "labels": {"a": "b"}}).encode()


def _damaged(whole: bytes, dice: random.Random) -> bytes:
    content = bytearray(whole)
    for _ in range(dice.randrange(1, 6)):
        at = dice.randrange(len(content))
        if dice.random() < 0.7:
            at = at // PAGE_BYTES * PAGE_BYTES + dice.randrange(_TABLE_BYTES)
        content[at] = dice.choice((0, 1, 2, 0xFF, dice.randrange(256)))
    return bytes(content[: dice.randrange(len(content)) if dice.random() < 0.2 else None])


def read_databases(count: int, folder: Path, random_seed: int) -> Iterator[Outcome]:
    """Reads damaged databases of both kinds."""
    dice = random.Random(random_seed)
    for name, (path, whole) in {"bbolt": _bolt(folder), "SQLite": _sqlite(folder)}.items():
        outcome = Outcome(f"databases of {name}'s")
        for _ in range(count):
            path.write_bytes(_damaged(whole, dice))
            outcome.cases += 1
            with outcome.reading(name, _Unforeseen):
                found = configurations([path], _IDS[::5])
                outcome.refused["missing"] += len(found) < len(_IDS[::5])
                assert {*found} <= {*_IDS}, found
        yield outcome
