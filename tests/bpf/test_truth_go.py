# SPDX-License-Identifier: Apache-2.0
"""Go's programs, which have no .eh_frame: stacks of goroutines, to where each begins."""

from __future__ import annotations

import shutil
import subprocess
from collections import Counter
from pathlib import Path

import pytest
from aiflame.agent.model.profile import COMPLETE_REASONS, SampleClass
from recordings import Workload, frames_of, record_workload, rows_of_process
from support import WORKLOADS

_GO = shutil.which("go")
pytestmark = [
    pytest.mark.breadth,
    pytest.mark.bpf,
    pytest.mark.skipif(_GO is None, reason="Go is not installed"),
]

_GOROUTINE = ("runtime.goexit", "main.main", "main.work")
# Small programs, and those with much code: another way was taken for these. Most that are shipped
# have no symbols.
_KINDS = {
    "small": ("", ()),
    "large": ('import _ "net/http"\n', ()),
    "stripped": ("", ("-ldflags=-s -w",)),
    "stripped, at any address": ("", ("-ldflags=-s -w", "-buildmode=pie")),
    # What calls C is linked by C's linker.
    "with C": ('import "C"\n', ()),
    "with C, stripped, at any address": ('import "C"\n', ("-ldflags=-s -w", "-buildmode=pie")),
}


def _build(program: Path, *arguments: str) -> None:
    command = [_GO or "", "build", "-o", program, *arguments]
    subprocess.run(command, cwd=program.parent, check=True, timeout=300)


@pytest.mark.parametrize("kind", _KINDS)
def test_stacks_of_goroutines_are_complete(tmp_path: Path, kind: str) -> None:
    imports, flags = _KINDS[kind]
    program = tmp_path / "goburns"
    shutil.copy(WORKLOADS / "goburns.go", tmp_path)
    (tmp_path / "imports.go").write_text("package main\n\n" + imports)
    _build(program, *flags, "goburns.go", "imports.go")
    workload = Workload([program])
    profile, _ = record_workload(tmp_path, workload, "-F", 499)
    times: Counter[str] = Counter()
    for row in rows_of_process(profile, workload.pid, SampleClass.ON_CPU):
        names = [name.removesuffix(".abi0") for name in frames_of(profile, row["stack"])]
        is_complete = profile.stacks.ends[row["stack"]] in COMPLETE_REASONS
        times["complete" if is_complete else "cut"] += int(row["ns"])
        for leaf in ("main.spin", "crypto/sha256.block"):
            if leaf in names:
                chain = tuple(name.split(".func")[0] for name in names[:3])
                times[f"{leaf} rooted" if chain == _GOROUTINE else f"{leaf} cut"] += int(row["ns"])
    assert times["complete"] > 0.99 * (times["complete"] + times["cut"]), times
    for leaf in ("main.spin", "crypto/sha256.block"):
        assert times[f"{leaf} rooted"] > 0, times
        assert times[f"{leaf} cut"] <= 0.01 * times[f"{leaf} rooted"], times


@pytest.mark.parametrize("flags", [(), ("-ldflags=-s -w", "-buildmode=pie")], ids=["", "stripped"])
def test_what_goroutines_call_in_c_is_below_them(tmp_path: Path, flags: tuple[str, ...]) -> None:
    # GIVEN C's code on a thread's own stack, above that of the goroutine that called it
    program = tmp_path / "gocalls"
    shutil.copy(WORKLOADS / "gocalls.go", tmp_path)
    _build(program, *flags, "gocalls.go")
    workload = Workload([program])
    profile, _ = record_workload(tmp_path, workload, "-F", 499)
    times: Counter[bool] = Counter()
    for row in rows_of_process(profile, workload.pid, SampleClass.ON_CPU):
        names = [name.removesuffix(".abi0") for name in frames_of(profile, row["stack"])]
        if "runtime.asmcgocall" in names:
            called_by = names[: names.index("runtime.asmcgocall")]
            is_whole = called_by[0] == "runtime.goexit" and "main.call" in called_by
            times[is_whole] += int(row["ns"])
    assert times[True] > 0.99 * times.total() > 0, times
