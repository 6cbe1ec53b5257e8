# SPDX-License-Identifier: Apache-2.0
"""What is asked about a command's files for its Python frames, before it runs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiflame.agent.python.questions import KEY_BLOCK_OF_LIBRARY, interpreter_in
from aiflame.agent.recording.pythons import PythonProcesses

_FD = 3


@pytest.mark.parametrize(
    ("path", "questions"),
    [
        ("/usr/bin/python3.11", [interpreter_in("/usr/bin/python3.11").key]),
        ("/opt/lib/libpython3.12.so.1.0", [interpreter_in("libpython3.12.so.1.0").key]),
        ("/usr/lib/libc.so.6", [KEY_BLOCK_OF_LIBRARY.key]),
        ("/usr/lib/libm.so.6", []),
        ("/usr/bin/make", []),
    ],
)
def test_only_files_with_an_answer_are_asked(path: str, questions: list[str]) -> None:
    asked: list[tuple[str, int, str]] = []
    facts = SimpleNamespace(ask=lambda path, fd, question: asked.append((path, fd, question.key)))
    pythons: Any = SimpleNamespace(
        _table=SimpleNamespace(binaries=SimpleNamespace(facts=facts)),
    )
    PythonProcesses.expect(pythons, _FD, Path(path))
    assert asked == [(path, _FD, question) for question in questions]
