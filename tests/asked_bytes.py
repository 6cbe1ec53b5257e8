# SPDX-License-Identifier: Apache-2.0
"""Questions about bytes that are in no file, as a host of the recorder's has them answered."""

from __future__ import annotations

import os
from typing import TypeVar

from aiflame.agent.file_questions import Question
from aiflame.agent.symbols.file_facts import FileFacts

T = TypeVar("T")


def about(facts: FileFacts, name: str, data: bytes, question: Question[T]) -> T | None:
    """Asks about bytes, which a parser gets as a file."""
    fd = os.memfd_create("cubin")
    try:
        os.write(fd, data)
        return facts.ask(name, fd, question)
    finally:
        os.close(fd)
