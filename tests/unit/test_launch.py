# SPDX-License-Identifier: Apache-2.0
"""The command of `record -- CMD`: held until it is released, and never run if it is not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from aiflame.agent.errors import AiflameError, UsageError
from aiflame.agent.processes.command import HeldCommand


def test_a_command_waits_until_it_is_released(tmp_path: Path) -> None:
    proof = tmp_path / "it ran"
    command = HeldCommand(["touch", str(proof)])
    assert not proof.exists()
    command.release()
    os.waitid(os.P_PID, command.pid, os.WEXITED | os.WNOWAIT)
    command.end()
    assert proof.exists()


def test_a_command_that_is_not_released_never_runs(tmp_path: Path) -> None:
    proof = tmp_path / "it ran"
    command = HeldCommand(["touch", str(proof)])
    command.end()
    assert not proof.exists()
    assert not Path(f"/proc/{command.pid}").exists()


def test_a_command_that_cannot_be_executed_says_why(tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text("#!/no/such/interpreter\n")
    script.chmod(0o755)
    command = HeldCommand([str(script)])
    with pytest.raises(AiflameError, match="cannot run the command: ") as caught:
        command.release()
    assert "No such file" in str(caught.value)
    assert not Path(f"/proc/{command.pid}").exists()


def test_a_program_that_is_not_there_is_refused() -> None:
    with pytest.raises(UsageError, match="no such program") as caught:
        HeldCommand(["./no-such-program"])
    assert caught.value.hint is not None
