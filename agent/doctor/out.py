# SPDX-License-Identifier: Apache-2.0
"""Checks of the group `out`: where captures and the symbol cache go."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from aiflame.agent.capture.workspace import ENOUGH_BYTES, recordings_directory
from aiflame.agent.doctor.base import Context, Finding, ok, warn
from aiflame.agent.outfile import try_folder
from aiflame.agent.symbols.store import Store, cache_dir


def folder(_: Context) -> Finding:
    """Can files be made here, where record writes without -o?"""
    try:
        try_folder(Path())
    except OSError as error:
        return warn(
            f"no file can be made in {_here()}: {error.strerror}",
            "change to another folder, or name one: aiflame record -o FOLDER/NAME.aiflame",
        )
    return ok(f"files can be made in {_here()}")


def space(_: Context) -> Finding:
    """Is there room for captures?"""
    free_bytes = shutil.disk_usage(".").free
    free = f"{free_bytes / 1e9:,.1f} GB are free in {_here()}"
    if free_bytes < ENOUGH_BYTES:
        return warn(f"only {free}", "free some space, or record for a short time: -d 10")
    return ok(free)


def recordings(_: Context) -> Finding:
    """Is there a private directory to record into, with room for a capture?"""
    directory = recordings_directory()
    free_bytes = shutil.disk_usage(directory).free
    free = f"{free_bytes / 1e9:,.1f} GB are free in {directory}, where recordings are written"
    if free_bytes < ENOUGH_BYTES:
        return warn(f"only {free}", "free some space, or record for a short time: -d 10")
    return ok(free)


def cache(_: Context) -> Finding:
    """Can symbol tables be kept from one run to the next?"""
    directory = cache_dir()
    store = Store(directory)
    name = f".doctor-{os.getpid()}"
    if not store.write(name, [b"aiflame"]):
        return warn(
            f"symbols cannot be kept in {directory}: not writable, or others may write there",
            f'sudo install -d -m 700 -o {os.geteuid()} "{directory}"',
        )
    store.remove(name)
    return ok(f"symbols are kept in {directory}")


def _here() -> str:
    try:
        return str(Path.cwd())
    except OSError:  # the folder was removed
        return "the current folder"
