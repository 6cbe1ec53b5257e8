# SPDX-License-Identifier: Apache-2.0
"""How long code is looked for that was loaded before a recording: `late_code.py SM LIBRARY...`

SM is an architecture, 90 for sm_90. One kernel of every eighth cubin that is for it is looked for,
as at the end of a recording of a process that maps the libraries. NVIDIA's are in PyPI's wheels
(nvidia-cublas-cu12, nvidia-cusparse-cu12, ...). Prints a line for each library, and one for all.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar, cast

from aiflame.agent.file_questions import Question
from aiflame.agent.inspector.fork_server import ForkServer
from aiflame.agent.losses import LossKind
from aiflame.agent.symbols.file_facts import FileFacts
from aiflame.agent.target_files import FileGuard, TargetFile
from aiflame.gpu.nvidia import cubin, fatbin, late

T = TypeVar("T")

_EVERY = 8


class _Host:
    """As the recorder has files read, by processes without rights."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = paths
        self._fds = [os.open(path, os.O_RDONLY) for path in paths]
        self.facts = FileFacts(ForkServer(), FileGuard(), is_urgent=False)
        self.lost: Counter[str] = Counter()
        self.questions = 0

    def ask(self, file: int, question: Question[T]) -> T | None:
        self.questions += 1
        return self.facts.ask(self._paths[file], self._fds[file], question)

    def lose(self, kind: LossKind, count: int = 1) -> None:
        self.lost[kind.stored_name] += count

    def peak_mb(self) -> int:
        """The most that a process which reads files took."""
        statuses = (Path(f"/proc/{pid}/status").read_text() for pid in self.facts.pids)
        peaks = (status.split("VmHWM:")[1].split()[0] for status in statuses)
        return max(map(int, peaks)) // 1024


def _cubins(path: str, sm: int) -> Iterator[cubin.Cubin]:
    fd = os.open(path, os.O_RDONLY)
    file = TargetFile(fd, max_bytes=1 << 50)
    begin, size = fatbin.section(file) or (0, 0)
    at, end = begin, begin + size
    while (at := fatbin._next_container(file, at, end)) < end:
        entries, at = fatbin._entries(file, at, end)
        for entry in fatbin._taken(entries, sm):
            yield cubin.Cubin(fatbin._contents(file, entry))
    os.close(fd)


def _kernels(path: str, sm: int) -> Iterator[str]:
    """Yields names of kernels; those of functions within one begin with a dollar sign."""
    for number, one in enumerate(_cubins(path, sm)):
        names = [one.name_of(section) for section in one.sections]
        kernels = [name for name in names if name.startswith(b".text.")]
        if kernels and number % _EVERY == 0:
            yield kernels[0].removeprefix(b".text.").decode()


def _measured(sm: int, paths: Sequence[str], names: Sequence[str]) -> str:
    missing = {
        (1, number): late.Missing(sm, Counter([name]), {name: 0})
        for number, name in enumerate(names)
    }
    host = _Host(paths)
    with closing(host.facts):
        begun_s = time.monotonic()
        found = dict(late.find(cast(Any, host), missing, {1: range(len(paths))}))
        took_s = time.monotonic() - begun_s
        size = sum(Path(path).stat().st_size for path in paths)
        return (
            f"{size / 1e6:.0f} MB: {len(found)} of {len(missing)} kernels found, {dict(host.lost)}"
            f" in {took_s:.2f} s, {host.questions} questions, parser {host.peak_mb()} MB at most"
        )


def main() -> None:
    sm, paths = int(sys.argv[1]), sys.argv[2:]
    names = {path: list(dict.fromkeys(_kernels(path, sm))) for path in paths}
    for path in paths:
        print(f"{Path(path).name}, {_measured(sm, [path], names[path])}")
    if len(paths) > 1:
        every = list(dict.fromkeys(name for own in names.values() for name in own))
        print(f"all, {_measured(sm, paths, every)}")


if __name__ == "__main__":
    main()
