# SPDX-License-Identifier: Apache-2.0
"""Lists kernels of which a capture has the code, and no instructions: where what lists them was not
installed when it was recorded, or was too old.

A capture is a file from elsewhere: its code is read, and given to programs, without rights, as that
of targets is.
"""

from __future__ import annotations

import os
import time
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import TypeVar

import numpy as np
from aiflame.agent.file_questions import Question
from aiflame.agent.inspector.fork_server import ForkServer
from aiflame.agent.inspector.tools import is_sound, run_tool
from aiflame.agent.losses import LossKind
from aiflame.agent.model.gpu import CodeObject, GpuProfile, Instruction
from aiflame.agent.model.profile import Loss, Profile
from aiflame.agent.symbols.file_facts import FileFacts
from aiflame.agent.symbols.frames import clean_name
from aiflame.agent.target_files import FileGuard
from aiflame.gpu.base import Listing
from aiflame.gpu.families import LISTS

T = TypeVar("T")

# A report waits no longer, but for what is begun by then: the most sampled ones come first.
_MAX_S = 10.0
# Of a code object that is not compressed: more is not kept of any (devices.devices).
_MAX_CODE_BYTES = 64 << 20
# Of all listings, as of a recording's (gpu.nvidia.listings).
_MAX_LINES = 4_000_000


class _Tools:
    """See `aiflame.gpu.base.CodeTools`."""

    def __init__(self, facts: FileFacts) -> None:
        self._facts = facts

    def about(self, name: str, data: bytes, question: Question[T]) -> T | None:
        fd = os.memfd_create("code", os.MFD_CLOEXEC)
        try:
            os.write(fd, data)
            return self._facts.ask(name, fd, question)
        except OSError:
            return None
        finally:
            os.close(fd)

    def run(self, program: str, arguments: Sequence[str], data: bytes) -> bytes | None:
        return run_tool(program, arguments, data) if is_sound(program) else None

    def lose(self, kind: LossKind, count: int = 1) -> None:
        """Counts nothing: the recording has."""


def with_listings(profile: Profile) -> Profile:
    """Returns a profile with the instructions of kernels whose code the capture has kept."""
    gpu = profile.gpu
    codes = _sampled_codes(gpu)
    if not codes:
        return profile
    with (
        closing(ForkServer()) as server,
        closing(FileFacts(server, FileGuard(), is_urgent=False)) as facts,
    ):
        found = dict(_listed(gpu, codes, _Tools(facts)))
    if not found:
        return profile
    kept = tuple(one for one in gpu.instructions if one.code not in found)
    made = tuple(
        Instruction(code, line.offset, clean_name(line.text), clean_name(line.file), line.line)
        for code, listing in found.items()
        for line in listing.lines
    )
    sizes = {code: listing.size_bytes for code, listing in found.items()}
    listed = replace(
        gpu,
        codes=tuple(
            replace(code, size_bytes=sizes.get(at, code.size_bytes))
            for at, code in enumerate(gpu.codes)
        ),
        instructions=tuple(sorted((*kept, *made), key=lambda one: (one.code, one.offset))),
    )
    count = sum(any(line.text for line in listing.lines) for listing in found.values())
    return replace(profile, gpu=listed, losses=tuple(_losses(profile.losses, count)))


def _sampled_codes(gpu: GpuProfile) -> dict[int, dict[int, dict[int, int]]]:
    """Returns by code object, and code in it, how many samples each offset has."""
    if not gpu.objects or not len(gpu.samples):
        return {}
    keys, at = np.unique(gpu.samples[["code", "offset"]], return_inverse=True)
    counts = np.bincount(at.reshape(-1), gpu.samples["count"].astype(np.float64))
    found: defaultdict[int, dict[int, dict[int, int]]] = defaultdict(dict)
    for (code, offset), count in zip(keys.tolist(), counts.tolist(), strict=True):
        of = gpu.codes[code].object
        if of is not None:
            found[of].setdefault(code, {})[offset] = int(count)
    return found


def _listed(
    gpu: GpuProfile, codes: Mapping[int, Mapping[int, Mapping[int, int]]], tools: _Tools
) -> Iterator[tuple[int, Listing]]:
    """Yields listings by code, those of the most sampled code objects first."""
    begun_s, lines_left = time.monotonic(), _MAX_LINES
    counts = Counter(
        {of: sum(sum(own.values()) for own in every.values()) for of, every in codes.items()}
    )
    for of, _ in counts.most_common():
        data = _content(gpu.objects[of])
        lists = LISTS.get(gpu.objects[of].family)
        if time.monotonic() - begun_s > _MAX_S or lines_left <= 0:
            return
        if lists is None or not data:
            continue
        # Several processes may have the same code object, and the same kernel of it.
        sampled: defaultdict[str, Counter[int]] = defaultdict(Counter)
        name_of = {code: gpu.kernels[gpu.codes[code].kernel].name for code in codes[of]}
        for code, offsets in codes[of].items():
            sampled[name_of[code]].update(offsets)
        listings = lists(tools, data, sampled)
        for code, name in name_of.items():
            if name in listings and lines_left > 0:
                lines_left -= len(listings[name].lines)
                yield code, listings[name]


def _content(code: CodeObject) -> bytes:
    """Returns a code object as it was, b"" for what cannot have been one."""
    if code.size_bytes > _MAX_CODE_BYTES:
        return b""
    try:
        # One byte more than is promised tells what promises too little.
        data = zlib.decompressobj().decompress(code.content, code.size_bytes + 1)
    except zlib.error:
        return b""
    return data if len(data) == code.size_bytes else b""


def _losses(losses: Sequence[Loss], listed: int) -> Iterator[Loss]:
    """Yields the losses of a recording without the kernels that are listed now."""
    for loss in losses:
        if loss.name != LossKind.KERNEL_NOT_DISASSEMBLED.stored_name:
            yield loss
        elif loss.count > listed:
            yield replace(loss, count=loss.count - listed)
