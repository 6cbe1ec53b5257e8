# SPDX-License-Identifier: Apache-2.0
"""Code that was loaded before a helper could hear of it, found in the files of its process.

CUPTI tells of a module when it is loaded, and never again. Samples of one that was there before
have the name of the kernel, and a number of the cubin that CUPTI alone can compute. So their code
is what has the name in a file that the process maps, where the driver would take it for the device.
If there are several which differ, nobody can tell which of them ran, and none is taken. In PyTorch
2.14 these are 4 of 23,024 functions for sm_80, and 186 for sm_90: most of CUTLASS, built for sm_90a
as well. Of two the smaller one is ruled out by a sample past its end.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import NamedTuple, TypeVar

from aiflame.agent.file_questions import Question
from aiflame.agent.losses import LossKind
from aiflame.gpu.base import Host
from aiflame.gpu.nvidia.cubin import MAX_FUNCTIONS
from aiflame.gpu.nvidia.fatbin import SECTION, Kernel, Position, Section, cubin_at, search_from

T = TypeVar("T")

# Since it began: nobody waits longer for the end of a recording, but for what is begun by then. Of
# it each process has the same part. PyTorch's library takes 2 s (OVERHEAD.md).
_MAX_S = 20.0
# Of one file and architecture, 10 MB of the recorder's memory. What is looked for are 2,048 names,
# few of which a header has brought into many cubins.
_MAX_KERNELS = 50_000

Object = tuple[int, int]  # process and what its samples call it
_Cubins = Mapping[int, Mapping[str, Kernel]]  # kernels by name, by where a cubin is in a file


@dataclass(slots=True)
class Missing:
    """A code object of which kernels were sampled, and that no helper has the bytes of.

    Attributes:
        sm: Of the device, 90 for sm_90.
        counts: Samples by linkage name.
        last: The last offset that was sampled, likewise.
    """

    sm: int
    counts: Counter[str] = field(default_factory=Counter)
    last: dict[str, int] = field(default_factory=dict)


class Found(NamedTuple):
    """A code object, as far as listing its sampled kernels takes it, and the file that has it."""

    data: bytes
    file: int


class _Cubin(NamedTuple):
    file: int
    at: int


def find(
    host: Host, missing: Mapping[Object, Missing], files: Mapping[int, Collection[int]]
) -> Iterator[tuple[Object, Found]]:
    """Yields code objects that are found.

    Args:
        host: Has the files, and takes losses.
        missing: Those to look for.
        files: That each process maps.
    """
    names = _names(missing)
    asked = {sm: frozenset(own) for sm, own in names.items()}
    cubins = _Search(host, missing, files, names).cubins()
    found: defaultdict[_Cubin, list[Object]] = defaultdict(list)
    for one, wanted in missing.items():
        known = [name for name in wanted.counts if name in asked[wanted.sm]]
        every = {file: cubins.get((file, wanted.sm), {}) for file in files[one[0]]}
        candidates = dict(_candidates(wanted, known, every))
        if len(candidates) == 1:
            found[next(iter(candidates.values()))].append(one)
        elif candidates:
            host.lose(LossKind.DEVICE_CODE_AMBIGUOUS)
        else:
            host.lose(LossKind.DEVICE_CODE_NOT_FOUND)
    for cubin, objects in found.items():
        counts = sum((missing[one].counts for one in objects), Counter[str]())
        hot = [name for name, _ in counts.most_common(MAX_FUNCTIONS)]
        data = host.ask(cubin.file, cubin_at(cubin.at, hot))
        if data:
            yield from ((one, Found(data, cubin.file)) for one in objects)
        else:
            host.lose(LossKind.DEVICE_CODE_NOT_KEPT, len(objects))


def _names(missing: Mapping[Object, Missing]) -> dict[int, list[str]]:
    """Returns the kernels to look for by architecture: of each process as many, hot ones first."""
    counts: defaultdict[int, defaultdict[int, Counter[str]]]
    counts = defaultdict(lambda: defaultdict(Counter))
    for (process, _), wanted in missing.items():
        counts[wanted.sm][process].update(wanted.counts)
    found: dict[int, list[str]] = {}
    for sm, of_processes in counts.items():
        hot_first = ([name for name, _ in own.most_common()] for own in of_processes.values())
        ranks = zip_longest(*hot_first)
        names = dict.fromkeys(name for rank in ranks for name in rank if name is not None)
        found[sm] = [*names][:MAX_FUNCTIONS]
    return found


def _candidates(
    wanted: Missing, names: Sequence[str], cubins: Mapping[int, _Cubins]
) -> Iterator[tuple[tuple[str, ...], _Cubin]]:
    """Yields the cubins that may be a code object, each with what tells its code from others."""
    for file, every in cubins.items():
        for at, own in every.items():
            if names and all(name in own and wanted.last[name] < own[name].size for name in names):
                yield tuple(own[name].digest for name in names), _Cubin(file, at)


class _Search:
    """Looks through files of processes, the smallest first, while there is time.

    Args:
        host: Has the files, and takes losses.
        missing: What is looked for.
        files: That each process maps.
        names: Of kernels, by architecture.
    """

    def __init__(
        self,
        host: Host,
        missing: Mapping[Object, Missing],
        files: Mapping[int, Collection[int]],
        names: Mapping[int, Sequence[str]],
    ) -> None:
        self._host = host
        self._names = names
        self._begun_s = time.monotonic()
        self._used_s: defaultdict[int, float] = defaultdict(float)  # by process
        self._architectures: defaultdict[int, set[int]] = defaultdict(set)  # by process
        for (process, _), wanted in missing.items():
            self._architectures[process].add(wanted.sm)
        self._share_s = _MAX_S / max(len(self._architectures), 1)
        self._processes: defaultdict[int, list[int]] = defaultdict(list)  # by file
        for process in self._architectures:
            for file in files[process]:
                self._processes[file].append(process)

    def cubins(self) -> dict[tuple[int, int], _Cubins]:
        """Returns what has some of the kernels, by file and architecture."""
        sections: dict[int, Section] = {}
        unread = 0
        for file in self._processes:
            if not self._has_time(file):
                unread += 1
                continue
            section = self._ask(file, SECTION)
            if section is not None:
                sections[file] = section
        found: dict[tuple[int, int], _Cubins] = {}
        for file in sorted(sections, key=lambda file: sections[file].size):
            every = (self._architectures[process] for process in self._processes[file])
            for sm in sorted(set().union(*every)):
                found[file, sm], more = self._of(file, sections[file], sm)
                unread += more
        if unread:
            self._host.lose(LossKind.DEVICE_CODE_NOT_SEARCHED, unread)
        return found

    def _of(self, file: int, section: Section, sm: int) -> tuple[_Cubins, int]:
        """Returns what a file has, and how much of it was not searched."""
        found: defaultdict[int, dict[str, Kernel]] = defaultdict(dict)
        position: Position | None = Position(section.offset)
        kernels = unread = 0
        while position is not None:
            part = None
            if kernels <= _MAX_KERNELS and self._has_time(file):
                part = self._ask(file, search_from(section, position, sm, self._names[sm]))
            if part is None:
                return found, unread + 1
            for kernel in part.kernels:
                found[kernel.cubin][kernel.name] = kernel
            kernels += len(part.kernels)
            unread += part.unread
            position = part.rest
        return found, unread

    def _has_time(self, file: int) -> bool:
        """Whether a file may be read on: one of the processes that map it has time left."""
        is_over = time.monotonic() - self._begun_s >= _MAX_S
        return not is_over and any(
            self._used_s[process] < self._share_s for process in self._processes[file]
        )

    def _ask(self, file: int, question: Question[T]) -> T | None:
        begun_s = time.monotonic()
        try:
            return self._host.ask(file, question)
        finally:
            processes = self._processes[file]
            used_s = (time.monotonic() - begun_s) / len(processes)
            for process in processes:
                self._used_s[process] += used_s
