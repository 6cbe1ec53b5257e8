# SPDX-License-Identifier: Apache-2.0
"""Programs that are run on bytes of targets: what they get, and what they may not do."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

import pytest
from aiflame.agent.inspector import tools
from aiflame.agent.inspector.tools import INPUT, is_sound, run_tool

_SH = "/bin/sh"


def _said(script: str, data: bytes = b"") -> str:
    """What a shell says that runs builtins only: it may start nothing."""
    found = run_tool(_SH, ["-c", script, "sh", INPUT], data)
    assert found is not None
    return found.decode()


def test_a_program_reads_the_bytes_by_a_path() -> None:
    data = bytes(range(1, 128)) * 1000
    assert run_tool("/bin/cat", [INPUT], data) == data
    assert run_tool("/bin/cat", ["-n", INPUT], b"x") == b"     1\tx"


def test_it_has_no_rights() -> None:
    said = _said("while read line; do echo $line; done < /proc/self/status")
    facts = dict(line.split(":", 1) for line in said.splitlines() if ":" in line)
    assert facts["NoNewPrivs"].strip() == "1"
    for name in ("CapPrm", "CapEff", "CapInh", "CapAmb"):
        assert int(facts[name], 16) == 0
    if os.geteuid() == 0:
        assert set(facts["Uid"].split()) == {"65534"}
        assert set(facts["Gid"].split()) == {"65534"}
        assert facts["Groups"].strip() == ""
        assert int(facts["CapBnd"], 16) == 0


def test_it_writes_no_file_starts_nothing_and_has_no_network() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        file = Path(name, "file")
        Path(name).chmod(0o777)
        assert _said(f"test -w {name} && echo may") == "may\n"
        run_tool(_SH, ["-c", f"echo x > {file}"], b"")
        assert not file.exists() or not file.read_bytes()
    if os.geteuid() == 0:
        assert run_tool(_SH, ["-c", "/bin/echo x; true"], b"") is None
        lines = _said("while read line; do echo $line; done < /proc/self/net/dev").splitlines()
        assert [line.split(":")[0] for line in lines if ":" in line] == ["lo"]


def test_it_knows_nothing_of_us() -> None:
    assert _said("set").count("AIFLAME") == 0
    assert "PWD='/'" in _said("set")
    # Standard input and error are nothing, and of descriptors it has those bytes alone.
    said = _said("for n in 3 4 5 6 7 8 9; do test -e /proc/self/fd/$n && echo $n; done; true")
    assert len(said.split()) <= 1


def test_one_that_fails_or_is_not_there_says_nothing() -> None:
    assert run_tool("/bin/false", [], b"") is None
    assert run_tool("/no/such/program", [], b"") is None
    assert run_tool(_SH, ["-c", "echo half; kill -9 $$"], b"") is None


def test_one_that_takes_or_says_too_much_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tools, "_PATIENCE_S", 0.3)
    begun_s = time.monotonic()
    assert run_tool("/bin/sleep", ["60"], b"") is None
    assert run_tool(_SH, ["-c", "exec >&-; while :; do :; done"], b"") is None
    assert time.monotonic() - begun_s < 20
    monkeypatch.undo()
    monkeypatch.setattr(tools, "_MAX_OUTPUT_BYTES", 1 << 20)
    assert run_tool("/usr/bin/yes", [], b"") is None
    assert time.monotonic() - begun_s < 30


def test_programs_that_others_may_change_are_not_run(tmp_path: Path) -> None:
    program = tmp_path / "tool"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    assert is_sound(str(program))
    program.chmod(0o757)
    assert not is_sound(str(program))
    program.chmod(0o755)
    assert not is_sound(str(tmp_path))
    assert not is_sound(str(tmp_path / "nothing"))
    if os.geteuid() == 0:
        os.chown(program, 1234, 1234)
        assert not is_sound(str(program))
