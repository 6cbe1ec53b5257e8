# SPDX-License-Identifier: Apache-2.0
"""Instructions and source lines of kernels, from the cubins that have them.

They are listed when a recording is over and, where a capture has kept cubins, by reports.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping

from aiflame.agent.losses import LossKind
from aiflame.gpu.base import CodeTools, Line, Listing
from aiflame.gpu.nvidia import disassembly
from aiflame.gpu.nvidia.cubin import MAX_FUNCTIONS, CodeLine, Function, functions_of
from aiflame.gpu.nvidia.disassembly import MAX_INSTRUCTIONS, Instruction

# Since it began. Nobody waits longer, but for what is begun by then: the most sampled ones come
# first. A cubin's functions are told within 5 ms; one run of nvdisasm takes 0.3 s, most of which is
# its start. A program with Triton has a cubin for each kernel.
_MAX_FUNCTIONS_S, _MAX_TOOL_S = 5.0, 10.0
# A program that does not know the architecture says so at once. One that fails later fails for the
# code, which no other is asked to read.
_REFUSES_WITHIN_S = 1.0
# Of all listings: 2,000 kernels of 2,000 instructions. After that only what was sampled is listed.
_MAX_LINES = 4_000_000


class Listings:
    """Reads and disassembles cubins once, the most sampled first, while there is time.

    Args:
        tools: Take losses, and have what reads code.
        samples: By cubin: how often each of its kernels was sampled.
    """

    def __init__(self, tools: CodeTools, samples: Mapping[bytes, Counter[str]]) -> None:
        self._tools = tools
        self._functions: dict[bytes, dict[str, Function]] = {}
        self._lines_left = _MAX_LINES
        begun_s = time.monotonic()
        for data, own in sorted(samples.items(), key=lambda one: -one[1].total()):
            if time.monotonic() - begun_s > _MAX_FUNCTIONS_S:
                break
            names = most_sampled(own)
            self._functions[data] = tools.about(names[0], data, functions_of(names)) or {}
        self._texts = {
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
            asked_s = time.monotonic()
            output = self._tools.run(program, disassembly.arguments(symbols, "{}"), data)
            if output is not None:
                return disassembly.parsed(output)
            if time.monotonic() - asked_s > _REFUSES_WITHIN_S:
                break
        return {}

    def of(self, data: bytes, name: str, offsets: frozenset[int]) -> Listing | None:
        """Returns a kernel's instructions, as far as there are any, and its source lines.

        Args:
            data: Its cubin.
            name: Its linkage name.
            offsets: Of all samples.
        """
        function = self._functions.get(data, {}).get(name)
        if function is None:
            self._tools.lose(LossKind.KERNEL_NOT_DISASSEMBLED)
            return None
        texts = self._texts.get(data, {}).get(name, []) if self._lines_left > 0 else []
        if not texts:
            self._tools.lose(LossKind.KERNEL_NOT_DISASSEMBLED)
        found = {
            text.offset - function.begin: text.text
            for text in texts
            if 0 <= text.offset - function.begin < function.size
        }
        known = dict.fromkeys(sorted(offsets), "") | found
        lines = tuple(_lines(_nearest(sorted(known), offsets), known, function.lines))
        self._lines_left -= len(lines)
        return Listing(function.size, lines) if lines else None


def of_cubin(
    tools: CodeTools, code: bytes, sampled: Mapping[str, Mapping[int, int]]
) -> dict[str, Listing]:
    """Lists kernels of a cubin that a capture has kept (`aiflame.gpu.base.Lists`)."""
    samples = Counter({name: sum(offsets.values()) for name, offsets in sampled.items()})
    listings = Listings(tools, {code: samples})
    found = {name: listings.of(code, name, frozenset(own)) for name, own in sampled.items()}
    return {name: listing for name, listing in found.items() if listing is not None}


def most_sampled(samples: Counter[str]) -> list[str]:
    """Returns the kernels of a cubin of which is asked at once."""
    return [name for name, _ in samples.most_common(MAX_FUNCTIONS)]


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
