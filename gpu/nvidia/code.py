# SPDX-License-Identifier: Apache-2.0
"""The machine code of what was sampled: kept while a recording runs, listed when it is over."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator

from aiflame.agent.losses import LossKind
from aiflame.gpu.base import CodeKey, Host, KernelSample, Line, Listing
from aiflame.gpu.nvidia import disassembly
from aiflame.gpu.nvidia.cubin import MAX_FUNCTIONS, CodeLine, Function, functions_of
from aiflame.gpu.nvidia.disassembly import MAX_INSTRUCTIONS, Instruction

# Of a recording, in the recorder's memory. What is sampled is a part of a library's, but a cubin of
# cuBLAS with one hot kernel may have some 10 MB.
_MAX_BYTES = 64 << 20
# At least so much of it goes to each object, for what is kept beside its bytes: 16,384 at most.
_LEAST_BYTES = 4096
# Of the code of one process, and of all in one second, as much is read and the object with which it
# becomes more: it takes 1 ms a MiB, in which the recorder does nothing else. More of one process
# would find no room; what one second has no time for is read when it is sampled again.
_MAX_READ_OF_PROCESS, _MAX_READ_AT_ONCE = _MAX_BYTES, 256 << 20
# Since a recording ended. Nobody waits longer, but for what is begun by then: the most sampled ones
# come first. A cubin's functions are told within 5 ms; one run of nvdisasm takes 0.3 s, most of
# which is its start. A program with Triton has a cubin for each kernel.
_MAX_FUNCTIONS_S, _MAX_TOOL_S = 5.0, 10.0
# Of all listings: 2,000 kernels of 2,000 instructions. After that only what was sampled is listed.
_MAX_LINES = 4_000_000

_Object = tuple[int, int]  # process and what its samples call it


class KeptCode:
    """Code objects of which kernels were sampled.

    Args:
        host: Takes losses, and has what reads code.
    """

    def __init__(self, host: Host) -> None:
        self._host = host
        self._bytes: dict[_Object, bytes] = {}
        # Processes of one program have the same code, which is kept once.
        self._distinct: dict[bytes, bytes] = {}
        self._samples: defaultdict[bytes, Counter[str]] = defaultdict(Counter)
        self._left = _MAX_BYTES
        self._read: Counter[int] = Counter()  # bytes, by process
        self._read_at_once = 0
        self._interval = -1
        self._functions: dict[bytes, dict[str, Function]] = {}
        self._texts: dict[bytes, dict[str, list[Instruction]]] | None = None
        self._lines_left = _MAX_LINES

    def keep(self, samples: Collection[KernelSample], read: Callable[[int], bytes]) -> None:
        """Keeps the code of what was sampled in one process.

        Args:
            samples: Of the process.
            read: Has the bytes of a code object, b"" where they were not kept there.
        """
        for sample in samples:
            key = sample.code
            if not key.object:
                continue
            one = key.process, key.object
            if one not in self._bytes and not self._keep(one, sample.interval, read):
                continue
            if self._bytes[one]:
                self._samples[self._bytes[one]][key.name] += sample.count

    def _keep(self, one: _Object, interval: int, read: Callable[[int], bytes]) -> bool:
        """Reads a code object, unless this second has no time for it."""
        if interval != self._interval:
            self._interval, self._read_at_once = interval, 0
        if self._read_at_once >= _MAX_READ_AT_ONCE:
            return False
        process, code = one
        data, is_refused = b"", self._read[process] >= _MAX_READ_OF_PROCESS
        if not is_refused:
            data = read(code)
            self._read[process] += len(data)
            self._read_at_once += len(data)
            data = self._distinct.get(data, data)
            cost = max(len(data), _LEAST_BYTES) if data and data not in self._distinct else 0
            is_refused = cost > self._left
            if cost and not is_refused:
                self._left -= cost
                self._distinct[data] = data
        if is_refused:
            self._host.lose(LossKind.DEVICE_CODE_NOT_KEPT)
        self._bytes[one] = b"" if is_refused else data
        return True

    def listing(self, key: CodeKey, offsets: frozenset[int]) -> Listing | None:
        """Returns a kernel's instructions, as far as there are any, and its source lines."""
        if self._texts is None:
            self._texts = self._disassembled()
        data = self._bytes.get((key.process, key.object), b"")
        function = self._functions.get(data, {}).get(key.name)
        if function is None:
            self._host.lose(LossKind.KERNEL_NOT_DISASSEMBLED)
            return None
        texts = self._texts.get(data, {}).get(key.name, []) if self._lines_left > 0 else []
        if not texts:
            self._host.lose(LossKind.KERNEL_NOT_DISASSEMBLED)
        found = {
            text.offset - function.begin: text.text
            for text in texts
            if 0 <= text.offset - function.begin < function.size
        }
        known = dict.fromkeys(sorted(offsets), "") | found
        lines = tuple(_lines(_nearest(sorted(known), offsets), known, function.lines))
        self._lines_left -= len(lines)
        return Listing(function.size, lines) if lines else None

    def _disassembled(self) -> dict[bytes, dict[str, list[Instruction]]]:
        """Reads and disassembles what was sampled, the most sampled first, while there is time."""
        begun_s = time.monotonic()
        for data, samples in sorted(self._samples.items(), key=lambda one: -one[1].total()):
            if time.monotonic() - begun_s > _MAX_FUNCTIONS_S:
                break
            names = [name for name, _ in samples.most_common(MAX_FUNCTIONS)]
            self._functions[data] = self._host.about(names[0], data, functions_of(names)) or {}
        return {
            data: self._texts_of(data, [one.symbol for one in functions.values()], begun_s)
            for data, functions in self._functions.items()
            if functions
        }

    def _texts_of(
        self, data: bytes, symbols: list[int], begun_s: float
    ) -> dict[str, list[Instruction]]:
        for program in dict.fromkeys(disassembly.programs()):
            if time.monotonic() - begun_s > _MAX_TOOL_S:
                break
            output = self._host.run(program, disassembly.arguments(symbols, "{}"), data)
            if output is not None:
                return disassembly.parsed(output)
        return {}


def _nearest(every: list[int], sampled: frozenset[int]) -> list[int]:
    """Returns those nearest to a sample if there are too many."""
    if len(every) <= MAX_INSTRUCTIONS:
        return every
    hits = sorted(sampled)

    def distance(offset: int) -> int:
        at = bisect_right(hits, offset)
        return min(abs(hit - offset) for hit in hits[max(at - 1, 0) : at + 1])

    return sorted(sorted(every, key=distance)[:MAX_INSTRUCTIONS])


def _lines(
    offsets: list[int], texts: dict[int, str], lines: tuple[CodeLine, ...]
) -> Iterator[Line]:
    for offset in offsets:
        at = bisect_right(lines, offset, key=lambda line: line.offset) - 1
        where = lines[at] if at >= 0 else CodeLine(0, "", 0)
        yield Line(offset, texts[offset], where.file, where.line)
