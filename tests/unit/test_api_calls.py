# SPDX-License-Identifier: Apache-2.0
"""Stacks inside of a device API's call that left no frame: where the function is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from aiflame.agent.file_questions import Question
from aiflame.agent.inspector.fork_server import ForkServer
from aiflame.agent.kernel import abi
from aiflame.agent.kernel.uprobe_tries import NopTreatment
from aiflame.agent.launches.calls import ApiCalls
from aiflame.agent.launches.probe_sites import Prologue
from aiflame.agent.launches.probes import ApiProbes
from aiflame.agent.launches.questions import ProbedFunction
from aiflame.agent.model.gpu import Operation
from aiflame.agent.processes.table import Mapping, ProcessImage, ProcessTable
from aiflame.agent.symbols.file_facts import FileFacts
from aiflame.agent.target_files import FileGuard
from aiflame.gpu.apis import APIS
from aiflame.gpu.apis.base import Api, Argument, Bell, Call
from aiflame.gpu.families import FAMILIES
from support import blind_inspector

_LIBRARY, _OTHER, _SLOT = 3, 4, 0
_FUNCTION_OFFSET, _FUNCTION_BYTES = 0x500, 64


class _Mappings(tuple[Mapping, ...]):
    """Counts how often it is gone through."""

    passes = 0

    def __iter__(self) -> Iterator[Mapping]:
        _Mappings.passes += 1
        return super().__iter__()


def _mappings(library_at: int) -> _Mappings:
    """A library among many other mappings, of which it is the last."""
    others = [Mapping(4096 * n, 4096 * n + 64, 0, _OTHER) for n in range(1, 1000)]
    return _Mappings([*others, Mapping(library_at, library_at + 0x1000, 0, _LIBRARY)])


def test_a_function_is_looked_for_once_for_each_state_of_the_mappings() -> None:
    table = ProcessTable(1, lambda pid: 1, blind_inspector())
    anything: Any = SimpleNamespace()
    calls = ApiCalls(anything, table, anything, anything, anything)
    calls._identities[_LIBRARY] = identity = (8, 1)
    calls.probes.ranges[identity, _SLOT] = (_FUNCTION_OFFSET, _FUNCTION_BYTES)
    image = ProcessImage(0, 1, 1, 1)
    _Mappings.passes = 0
    for library_at in (1 << 40, 1 << 41):
        image.laid = _mappings(library_at)
        # WHEN many stacks come that are inside of the call, and have another function's leaf
        for leaf in range(100, 200):
            user = np.array([leaf, 77], np.uint64)
            found = calls.with_call(image, user, _SLOT, return_address=77)
            # THEN the call is put where it belongs
            assert found.tolist() == [leaf, library_at + _FUNCTION_OFFSET + 1, 77]
    assert _Mappings.passes == 2


def test_a_function_that_is_probed_later_is_found() -> None:
    anything: Any = SimpleNamespace()
    calls = ApiCalls(
        anything, ProcessTable(1, lambda pid: 1, blind_inspector()), anything, anything, anything
    )
    image = ProcessImage(0, 1, 1, 1)
    image.laid = _mappings(1 << 40)
    user = np.array([5, 77], np.uint64)
    assert calls.with_call(image, user, _SLOT, 77).tolist() == [5, 77]
    calls._identities[_LIBRARY] = identity = (8, 1)
    calls.probes.ranges[identity, _SLOT] = (_FUNCTION_OFFSET, _FUNCTION_BYTES)
    calls.probes.changes += 1
    assert len(calls.with_call(image, user, _SLOT, 77)) == 3


def test_more_apis_than_the_kernel_half_tells_apart_are_refused() -> None:
    # A ninth would be taken for the first, whose calls inside it would not count.
    anything: Any = SimpleNamespace()
    apis = [replace(APIS[0], name=f"api{number}") for number in range(abi.APIS_MAX + 1)]
    with pytest.raises(ValueError, match="9 device APIs, and room for 8"):
        ApiProbes(anything, FileFacts(ForkServer(), FileGuard()), apis)


class _Programs:
    """Keeps how functions are described to the kernel half."""

    def __init__(self) -> None:
        self.calls: dict[int, np.void] = {}
        self.api_calls = SimpleNamespace(update=self._take_call)
        self.api_probes = SimpleNamespace(update=lambda *_: None)
        self.uprobes = SimpleNamespace(answers=SimpleNamespace(nops=NopTreatment()))

    calls_are_loading = False

    def expect_calls(self) -> None:
        pass

    def _take_call(self, slot: bytes, row: bytes) -> None:
        self.calls[int.from_bytes(slot, "little")] = np.frombuffer(row, abi.API_CALL_DTYPE)[0]


class _Facts:
    """Says that a file has all functions."""

    guard = FileGuard()
    unanswered: frozenset[int] = frozenset()

    def ask(self, path: str, fd: int, question: Question[Any]) -> dict[str, ProbedFunction]:
        prologue = Prologue((), 1)
        return {name: ProbedFunction(name, 64, 8, 0, 8, prologue) for name in question.arguments}


def _described(
    monkeypatch: pytest.MonkeyPatch, apis: list[Api], helpers: Sequence[Api] = (), name: str = ""
) -> dict[str, np.void]:
    """Returns what the kernel half is told of the functions of some APIs, by symbol."""
    programs: Any = _Programs()
    facts: Any = _Facts()
    probes = ApiProbes(programs, facts, apis, helpers)
    attached: list[str] = []
    monkeypatch.setattr(probes, "_attach", lambda one: attached.extend(one.probes))
    with Path("/dev/null").open() as file:
        probes.look(file.fileno(), f"/opt/{name}")
    assert len(attached) == len(probes.functions)
    return {one.symbol: programs.calls[at] for at, (_, one) in enumerate(probes.functions)}


def test_the_last_api_that_there_is_room_for_works(monkeypatch: pytest.MonkeyPatch) -> None:
    apis = [
        Api(f"api{number}", (Call(f"launch{number}", Operation.LAUNCH, kernel=Argument(number)),))
        for number in range(abi.APIS_MAX)
    ]
    found = _described(monkeypatch, apis)
    for number in range(abi.APIS_MAX):
        assert found[f"launch{number}"]["api"] == number
        assert found[f"launch{number}"]["kernel"]["number"] == number


def test_what_a_family_adds_to_an_api_is_of_that_api(monkeypatch: pytest.MonkeyPatch) -> None:
    # GIVEN as many APIs as there is room for, and a helper's functions for one of them
    apis = [
        Api(f"api{number}", (Call(f"launch{number}", Operation.LAUNCH),))
        for number in range(abi.APIS_MAX)
    ]
    helper = Api(
        "api3",
        (Call("helper_launch", Operation.LAUNCH, launch_id=Argument(2, size_bytes=4)),),
        bells=(Bell("helper_bell"),),
        libraries=("libhelper",),
    )
    found = _described(monkeypatch, apis, [helper], "libhelper.so.1")
    assert found["helper_launch"]["api"] == 3
    assert found["helper_launch"]["launch_id"].tolist() == (1, 2, 0, 4, 0)
    assert found["launch3"]["launch_id"].tolist() == (0, 0, 0, 0, 0)
    assert "helper_bell" in found
    # Elsewhere nobody looks for them.
    assert found.keys() - _described(monkeypatch, apis, [helper], "libc.so.6").keys() == {
        "helper_launch",
        "helper_bell",
    }


def test_functions_of_all_families_find_room() -> None:
    helpers = [api for make in FAMILIES.values() for api in make().probes]
    anything: Any = SimpleNamespace()
    ApiProbes(anything, FileFacts(ForkServer(), FileGuard()), APIS, helpers)
    assert sum(len(api.probed) for api in (*APIS, *helpers)) <= abi.API_CALLS_MAX
