# SPDX-License-Identifier: Apache-2.0
"""The command of `record -- CMD`: held until it is released, and never run if it is not."""

from __future__ import annotations

import errno
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from aiflame.agent.errors import AiflameError, UsageError
from aiflame.agent.processes import command as launch
from aiflame.agent.processes.command import HeldCommand, SudoUser


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


def test_a_command_that_was_ended_while_it_was_held_is_told_of(tmp_path: Path) -> None:
    proof = tmp_path / "it ran"
    command = HeldCommand(["touch", str(proof)])
    # WHEN it gets a signal, as by a Ctrl-C at the terminal
    os.kill(command.pid, signal.SIGTERM)
    os.waitid(os.P_PID, command.pid, os.WEXITED | os.WNOWAIT)
    # THEN that is no success, and no pipe that nobody reads
    with pytest.raises(AiflameError, match=r"never began: touch was killed by signal 15"):
        command.release()
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


def _ignored(status: str) -> set[int]:
    """Returns the signals that a process ignores, by its /proc/PID/status (proc_pid_status(5))."""
    (mask,) = re.findall(r"^SigIgn:\s*(\w+)$", status, re.MULTILINE)
    return {number for number in signal.valid_signals() if int(mask, 16) >> (number - 1) & 1}


def test_a_command_begins_with_the_signals_of_a_shell_s(tmp_path: Path) -> None:
    # GIVEN what Python ignores, and what `record` does until it records
    ignored = {signal.SIGPIPE, signal.SIGXFSZ, signal.SIGUSR1}
    before = {number: signal.signal(number, signal.SIG_IGN) for number in ignored}
    try:
        command = HeldCommand(["cp", "/proc/self/status", str(tmp_path / "status")])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    # WHEN it runs
    command.release()
    os.waitid(os.P_PID, command.pid, os.WEXITED | os.WNOWAIT)
    command.end()
    # THEN a file size limit ends it, for instance
    found = _ignored((tmp_path / "status").read_text())
    assert found.isdisjoint({*ignored, signal.SIGINT, signal.SIGTERM})


def test_a_program_that_is_not_there_is_refused() -> None:
    with pytest.raises(UsageError, match="no such program") as caught:
        HeldCommand(["./no-such-program"])
    assert caught.value.hint is not None


@pytest.mark.parametrize("hidden", ["folder", "program"])
def test_a_program_that_only_the_user_who_calls_sudo_sees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hidden: str
) -> None:
    # GIVEN a home on a network mount, where root may not look, or not execute
    script = tmp_path / "train.sh"
    script.write_text("#!/bin/sh\nexit 7\n")
    script.chmod(0o755)
    looked, allowed = os.stat, os.access

    def look(path: Any, **named: Any) -> os.stat_result:
        if hidden == "folder" and Path(os.fspath(path)).name == script.name:
            raise PermissionError(errno.EACCES, "Permission denied")
        return looked(path, **named)

    monkeypatch.setattr(os, "stat", look)
    monkeypatch.setattr(
        os, "access", lambda path, *rest, **named: path != str(script) and allowed(path, *rest)
    )
    # THEN root alone does not find it,
    monkeypatch.setattr(launch, "sudo_user", lambda: None)
    with pytest.raises(UsageError, match="no such program"):
        HeldCommand([str(script)])
    # and the user's process runs it.
    user = SudoUser(os.getuid(), os.getgid(), "ann", "/")
    monkeypatch.setattr(launch, "sudo_user", lambda: user)
    monkeypatch.setattr(os, "initgroups", lambda *_: None)  # which takes root
    monkeypatch.setenv("PATH", f"/no/such:{tmp_path}")
    for name in (str(script), script.name):
        held = HeldCommand([name])
        held.release()
        os.waitid(os.P_PID, held.pid, os.WEXITED | os.WNOWAIT)
        assert held.exit_code() == 7
        held.end()
    # One that is not there is still told at once.
    with pytest.raises(UsageError, match="no such program"):
        HeldCommand([str(tmp_path / "no-such-program")])


@pytest.mark.parametrize(
    ("script", "exit_code", "words"),
    [
        ("true", 0, ""),
        ("exit 255", 255, "sh ended with exit code 255"),
        ("kill -TERM $$", 143, "sh was killed by signal 15 (SIGTERM): exit code 143"),
        # A real-time signal, which has no name of its own.
        ("kill -40 $$", 168, "sh was killed by signal 40: exit code 168"),
    ],
)
def test_how_a_command_ended_is_told_as_a_shell_tells_it(
    script: str, exit_code: int, words: str
) -> None:
    command = HeldCommand(["sh", "-c", script])
    assert (command.exit_code(), command.end_words()) == (None, "")
    command.release()
    os.waitid(os.P_PID, command.pid, os.WEXITED | os.WNOWAIT)
    for _ in range(2):  # before and after it is collected
        assert (command.exit_code(), command.end_words()) == (exit_code, words)
        command.end()
