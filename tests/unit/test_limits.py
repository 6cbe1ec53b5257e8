# SPDX-License-Identifier: Apache-2.0
"""Limits of processes: what whoever started us allows stays, and is named where it is met."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest
from aiflame.agent import outfile
from aiflame.agent.capture.writer import CaptureWriter
from aiflame.agent.errors import AiflameError, DiskFull
from aiflame.agent.limits import limit_self, room_hint

_FILE_BYTES = 1 << 20


def _in_child(what: str) -> str:
    """Runs a function of this module where files may have 1 MiB; returns what it prints."""
    code = f"import sys; sys.path[:0] = {sys.path!r}; import test_limits; test_limits.{what}()"
    done = subprocess.run(
        [sys.executable, "-c", code],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (_FILE_BYTES, _FILE_BYTES)),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def lower_twice() -> None:
    """Asks for more than there is, and for less."""
    for most in (1 << 30, 1 << 10):
        limit_self((resource.RLIMIT_FSIZE, most), (resource.RLIMIT_CORE, 0))
        sys.stdout.write(f"{resource.getrlimit(resource.RLIMIT_FSIZE)} ")


def test_limits_are_lowered_and_never_raised() -> None:
    assert _in_child("lower_twice") == f"{(_FILE_BYTES,) * 2} (1024, 1024)"


def write_much() -> None:
    """Writes more than a file may have: by SQLite, and by itself."""
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        writer = CaptureWriter(Path(name) / "x.aiflame", is_new=True)
        try:
            writer.put_meta({str(i): "x" * 100_000 for i in range(50)})
            writer.commit()
        except DiskFull as error:
            sys.stdout.write(f"{error.hint}\n")
        try:
            outfile.write_output(Path(name) / "y.html", bytes(2 * _FILE_BYTES), force=False)
        except AiflameError as error:
            sys.stdout.write(f"{error}, {error.hint}\n")


def test_a_limit_of_files_is_not_taken_for_a_full_disk() -> None:
    sqlite, plain = _in_child("write_much").splitlines()
    assert sqlite.startswith("raise the limit of files (ulimit -f), which is 1.0 MB")
    assert "file too large, raise the limit of files (ulimit -f)" in plain


def test_without_a_limit_none_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    monkeypatch.setattr(resource, "getrlimit", lambda _: unlimited)
    assert room_hint() == "free some space on that disk"
