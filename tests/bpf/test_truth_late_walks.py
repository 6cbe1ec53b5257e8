# SPDX-License-Identifier: Apache-2.0
"""Stacks in files that were never recorded before, and that are needed for a moment only.

A program loads libraries, one after the other, and has each compute for 40 ms (plugins.c):
that is over before an unwind table of it is there.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from aiflame.agent.model.profile import COMPLETE_REASONS, FrameKind, Profile, SampleClass
from recordings import Recording, Workload, rows_of_process

pytestmark = pytest.mark.bpf

_LIBRARIES, _CPU_NS, _HZ = 30, 40_000_000, 199

Build = Callable[..., Path]


def _libraries(workload: Build) -> list[Path]:
    """Builds libraries with identities of their own, so that nothing of them is in any cache.

    Stacks go on for 500 bytes or 20 KB in them.
    """
    return [
        workload(
            "plugin",
            *("-shared", "-fPIC", "-O2", "-fomit-frame-pointer", f"-DNUMBER={number}"),
            *(f"-DSTACK_BYTES={4000 * (number % 2) + 100}", f"-DPLUGIN_CPU_NS={_CPU_NS}"),
            f"-Wl,--build-id=0x{os.urandom(20).hex()}",
        )
        for number in range(_LIBRARIES)
    ]


def _truth(number: int) -> list[str]:
    """The functions of a library, root first, with what called them."""
    deeper = [f"deeper_{number}"] * (number % 5 + 1)
    return ["main", "run_plugin", "plugin", *deeper, f"spin_{number}"]


def _spinning(profile: Profile, pid: int) -> Iterator[tuple[int, int, list[str], bool]]:
    """Yields number, samples, functions from `main` on and completeness of stacks in a library."""
    for row in rows_of_process(profile, pid, SampleClass.ON_CPU):
        stack = int(row["stack"])
        begin, end = profile.stacks.offsets[stack : stack + 2]
        indexes = profile.frames["function"][profile.stacks.frames[begin:end]]
        functions = [profile.functions[index] for index in indexes]
        names = [one.name for one in functions if one.kind is not FrameKind.KERNEL]
        spin = [name for name in names if name.startswith("spin_")]
        if spin:
            number = int(spin[0].removeprefix("spin_"))
            chain = names[names.index("main") if "main" in names else 0 : names.index(spin[0]) + 1]
            is_complete = profile.stacks.ends[stack] in COMPLETE_REASONS
            yield number, int(row["count"]), chain, is_complete


def test_stacks_are_complete_although_their_tables_come_later(
    workload: Build, tmp_path: Path
) -> None:
    program = Workload([workload("plugins"), *_libraries(workload)])
    with program, Recording(tmp_path, "-p", program.pid, "-F", _HZ) as recording:
        program.go()
        program.truth()
        ended = recording.stop()
    found = list(_spinning(ended.profile, program.pid))
    samples = sum(count for _, count, _, _ in found)
    # Of 240; each library's ticks are a tenth of what they should be at worst, on a crowded machine
    assert samples > 0.5 * _LIBRARIES * _CPU_NS * _HZ / 1e9
    assert len({number for number, *_ in found}) > 0.9 * _LIBRARIES
    complete = sum(count for _, count, _, is_complete in found if is_complete)
    assert complete >= 0.97 * samples
    for number, _, chain, is_complete in found:
        if is_complete:
            assert chain == _truth(number)
    said = re.search(r"^Stacks walked late, .*: (\d+)", ended.stderr, re.MULTILINE)
    # Beside other work libraries run later after they were loaded, and tables are there before.
    assert said is not None and int(said[1]) > 0.25 * samples
