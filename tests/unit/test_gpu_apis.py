# SPDX-License-Identifier: Apache-2.0
"""The tables of device APIs are complete, and agree with the libraries and headers at hand."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from aiflame.agent.launches.symbols import find_functions
from aiflame.agent.model.gpu import Direction, Operation
from aiflame.agent.target_files import TargetFile
from aiflame.gpu.apis import APIS
from aiflame.gpu.apis.base import Api, Argument, Call, Grid, HandleFrom, Naming

_BY_NAME = {api.name: api for api in APIS}
_CUDA = Path("/usr/local/cuda")

# Functions that launch, and what tells names, by their vendors' documents.
_LAUNCHES = {
    "cuda": """
        cudaLaunchKernel cudaLaunchKernel_ptsz cudaLaunchKernelExC cudaLaunchKernelExC_ptsz
        cudaLaunchCooperativeKernel cudaLaunchCooperativeKernel_ptsz cudaGraphLaunch
        cudaGraphLaunch_ptsz __cudaLaunchKernel __cudaLaunchKernel_ptsz
        cudaLaunchCooperativeKernelMultiDevice cuLaunchKernel cuLaunchKernel_ptsz cuLaunchKernelEx
        cuLaunchKernelEx_ptsz cuLaunchCooperativeKernel cuLaunchCooperativeKernel_ptsz
        cuGraphLaunch cuGraphLaunch_ptsz cuLaunch cuLaunchGrid cuLaunchGridAsync
    """,
    "hip": """
        hipLaunchKernel hipLaunchKernelExC hipExtLaunchKernel hipLaunchCooperativeKernel
        hipModuleLaunchKernel hipExtModuleLaunchKernel hipGraphLaunch
    """,
    "level_zero": """
        zeCommandListAppendLaunchKernel zeCommandListAppendLaunchCooperativeKernel
        zeCommandListAppendLaunchKernelIndirect zeCommandListAppendLaunchMultipleKernelsIndirect
        zeCommandListAppendLaunchKernelWithParameters zeCommandListAppendLaunchKernelWithArguments
        zeCommandQueueExecuteCommandLists
    """,
    "opencl": "clEnqueueNDRangeKernel",
}
_NAMINGS = {
    "cuda": """
        __cudaRegisterFunction __cudaGetKernel cuModuleGetFunction cuLibraryGetKernel
        cuKernelGetFunction
    """,
    "hip": "__hipRegisterFunction hipModuleGetFunction",
    "level_zero": "zeKernelCreate",
    "opencl": "clCreateKernel",
}


@pytest.fixture(params=APIS, ids=lambda api: str(api.name))
def api(request: pytest.FixtureRequest) -> Api:
    """Each API in turn."""
    found: Api = request.param
    return found


def _call(api_name: str, symbol: str) -> Call:
    return next(call for call in _BY_NAME[api_name].calls if call.symbol == symbol)


def _arguments(entry: Call | Naming) -> list[Argument]:
    if isinstance(entry, Naming):
        given = (entry.name, entry.handle, entry.alias)
    else:
        given = (entry.kernel, entry.queue, entry.bytes, entry.kind)
    return [argument for argument in given if argument is not None]


def test_no_function_is_described_twice() -> None:
    symbols = [entry.symbol for api in APIS for entry in (*api.calls, *api.namings)]
    assert len(symbols) == len(set(symbols))
    assert len(_BY_NAME) == len(APIS)


def test_every_launch_is_there(api: Api) -> None:
    launches = {c.symbol for c in api.calls if c.operation is Operation.LAUNCH}
    assert set(_LAUNCHES[api.name].split()) <= launches
    assert set(_NAMINGS[api.name].split()) <= {naming.symbol for naming in api.namings}


def test_every_api_tells_of_waits_and_memory(api: Api) -> None:
    assert {call.operation for call in api.calls} == set(Operation)


def test_arguments_are_plausible(api: Api) -> None:
    for entry in (*api.calls, *api.namings):
        for argument in _arguments(entry):
            # cuLaunchKernel has the most that is read; cudaLaunchParams is the largest structure.
            assert 0 <= argument.number <= 8, entry.symbol
            assert argument.size_bytes in (4, 8), entry.symbol
            assert argument.offset is None or 0 <= argument.offset <= 48, entry.symbol


def test_fields_fit_the_operation(api: Api) -> None:
    for call in api.calls:
        is_launch = call.operation is Operation.LAUNCH
        assert call.grid is Grid.NONE or is_launch, call.symbol
        assert call.kernel is None or is_launch, call.symbol
        assert call.bytes is None or call.operation in (Operation.COPY, Operation.ALLOCATE)
        assert call.kind is None or (api.directions and call.operation is Operation.COPY)
        is_directed = call.direction is not Direction.UNKNOWN
        assert not is_directed or (call.operation is Operation.COPY and call.kind is None)


def test_namings_have_what_their_kind_needs(api: Api) -> None:
    for naming in api.namings:
        assert (naming.name is None) != (naming.alias is None), naming.symbol
        assert (naming.handle is None) == (naming.handle_from is HandleFrom.RETURNED)


def test_queue_is_not_the_kernel(api: Api) -> None:
    for call in api.calls:
        assert call.kernel is None or call.kernel != call.queue, call.symbol


@pytest.mark.parametrize("name", ["cuda", "hip"])
def test_kinds_of_copies_are_in_the_order_of_the_headers(name: str) -> None:
    assert _BY_NAME[name].directions == (
        Direction.ON_HOST,
        Direction.TO_DEVICE,
        Direction.FROM_DEVICE,
        Direction.ON_DEVICE,
        Direction.UNKNOWN,
    )


def test_symbols_of_opencl_are_those_of_the_loader() -> None:
    path = next(Path("/usr/lib").glob("*/libOpenCL.so.1"), None)
    if path is None:
        pytest.skip("no OpenCL loader")
    api = _BY_NAME["opencl"]
    names = frozenset(entry.symbol for entry in (*api.calls, *api.namings))
    assert _defined_in(path, names) == names


def test_symbols_of_cuda_are_those_of_its_runtime() -> None:
    libraries = sorted(_CUDA.glob("lib64/libcudart.so.1?"))
    if not libraries:
        pytest.skip("no CUDA runtime library")
    api = _BY_NAME["cuda"]
    names = frozenset(
        entry.symbol
        for entry in (*api.calls, *api.namings)
        if entry.symbol.startswith(("cuda", "__cuda"))
    )
    found = frozenset[str]().union(*(_defined_in(path, names) for path in libraries))
    # Gone since CUDA 13.
    assert names - found <= {"cudaLaunchCooperativeKernelMultiDevice"}


def _defined_in(path: Path, names: frozenset[str]) -> frozenset[str]:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return frozenset(find_functions(TargetFile(descriptor), names))
    finally:
        os.close(descriptor)


def _prototypes(*names: str) -> dict[str, list[list[str]]]:
    """Parameters of all functions that CUDA's headers declare, by name."""
    found: dict[str, list[list[str]]] = {}
    for name in names:
        text = (_CUDA / "include" / name).read_text()
        text = re.sub(r"/\*.*?\*/|//[^\n]*", "", text, flags=re.DOTALL)
        text = re.sub(r"\bdim3 (\w+)", r"dim3 \1, dim3_rest \1", text)
        for match in re.finditer(r"\b(_*cu\w+)\s*\(([^();]*(?:\([^()]*\)[^();]*)*)\)\s*;", text):
            parameters = [" ".join(part.split()) for part in match[2].split(",")]
            found.setdefault(match[1], []).append(parameters)
    return found


def _is_declared_so(call: Call, parameters: list[str]) -> bool:
    """Whether what is read of a call is where a prototype has it."""
    wanted = [
        (call.queue, r"[sS]tream"),
        (call.bytes, r"size|count|ByteCount"),
        (call.kind, r"cudaMemcpyKind"),
        (call.kernel, r"func|CUfunction|CUgraphExec|[gG]raphExec|cudaKernel_t"),
    ]
    return all(
        argument.number < len(parameters) and re.search(pattern, parameters[argument.number])
        for argument, pattern in wanted
        if argument is not None and argument.offset is None
    )


def test_arguments_of_cuda_are_where_its_headers_have_them() -> None:
    if not (_CUDA / "include" / "cuda.h").exists():
        pytest.skip("no CUDA runtime headers")
    declared = _prototypes("cuda_runtime_api.h", "cuda.h", "crt/device_functions.h")
    checked = 0
    for call in _BY_NAME["cuda"].calls:
        prototypes = declared.get(re.sub(r"(_v2)?(_ptsz|_ptds)?$", "", call.symbol), [])
        checked += bool(prototypes)
        matching = [p for p in prototypes if _is_declared_so(call, p)]
        assert matching or not prototypes, (call, prototypes)
    assert checked > 90
