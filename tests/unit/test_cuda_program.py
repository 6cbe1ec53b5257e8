# SPDX-License-Identifier: Apache-2.0
"""In programs that nvcc built, every call of the tables is found, and is probed at low cost."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from aiflame.agent.kernel.uprobe_tries import NopTreatment
from aiflame.agent.launches.probe_sites import choose_site, read_prologue
from aiflame.agent.launches.symbols import ApiFunction, find_functions
from aiflame.agent.target_files import TargetFile
from aiflame.gpu.apis.cuda import API
from breadth import cases

pytestmark = pytest.mark.slow

_RUNTIME = frozenset(
    entry.symbol
    for entry in (*API.calls, *API.namings)
    if entry.symbol.startswith(("cuda", "__cuda"))
)
# What the program calls, and what each of these goes on to.
_CALLED = {"cudaLaunchKernel", "cudaLaunchKernelExC", "cudaLaunchCooperativeKernel"}
_ALSO_CALLED = {"cudaMalloc", "cudaFree", "cudaDeviceSynchronize", "__cudaRegisterFunction"}


def _functions(path: Path) -> dict[str, ApiFunction]:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return find_functions(TargetFile(descriptor), _RUNTIME)
    finally:
        os.close(descriptor)


def _libcudart_of(program: Path) -> Path:
    listing = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
    found = re.search(r"libcudart\S* => (\S+)", listing)
    if found is None or found[1] == "not":
        pytest.skip("no CUDA runtime library to run the program with")
    return Path(found[1])


@cases("linkage", ["static", "shared"])
@cases("streams", ["legacy", "per-thread"])
def test_every_call_of_a_program_is_found(
    cuda_workload: Callable[..., Path], linkage: str, streams: str
) -> None:
    # GIVEN a program, which says what it launched
    program = cuda_workload("cudalaunches", "-cudart", linkage, f"-default-stream={streams}")
    run = subprocess.run([program, "2"], capture_output=True, text=True, check=True, timeout=60)
    assert json.loads(run.stdout)["launches"] == 46
    # WHEN the file is searched that holds the runtime
    home = program if linkage == "static" else _libcudart_of(program)
    found = _functions(home)
    # THEN what it called is there, in both variants, and a probe of each costs one trap
    twins = {name + "_ptsz" for name in _CALLED}
    assert _CALLED | twins | _ALSO_CALLED <= set(found)
    assert _RUNTIME - set(found) <= {"cudaLaunchCooperativeKernelMultiDevice"}
    sites = {
        name: choose_site(read_prologue(f.code, f.file_offset), NopTreatment())
        for name, f in found.items()
    }
    assert [name for name, site in sites.items() if not site.is_emulated] == []


def test_program_with_a_shared_runtime_defines_nothing_itself(
    cuda_workload: Callable[..., Path],
) -> None:
    program = cuda_workload("cudalaunches", "-cudart", "shared", "-default-stream=legacy")
    assert _functions(program) == {}


def test_stripped_program_keeps_no_names(
    cuda_workload: Callable[..., Path], tmp_path: Path
) -> None:
    program = cuda_workload("cudalaunches", "-cudart", "static", "-default-stream=legacy")
    stripped = tmp_path / "stripped"
    subprocess.run(["strip", "-o", stripped, program], check=True)
    assert _functions(stripped) == {}
