# SPDX-License-Identifier: Apache-2.0
"""Stacks inside of a device API's call that left no frame: where the function is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from aiflame.agent.kernel import abi
from aiflame.agent.launches.calls import ApiCalls
from aiflame.agent.launches.probes import ApiProbes
from aiflame.agent.processes.table import Mapping, ProcessImage, ProcessTable
from aiflame.agent.symbols.file_facts import FileFacts
from aiflame.agent.target_files import FileGuard
from aiflame.gpu.apis import APIS
from support import blind_inspector

_LIBRARY, _OTHER, _SLOT = 3, 4, 0
_FUNCTION_OFFSET, _FUNCTION_BYTES = 0x500, 64


class _Mappings(list[Mapping]):
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
        image.mappings = _mappings(library_at)
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
    image.mappings = _mappings(1 << 40)
    user = np.array([5, 77], np.uint64)
    assert calls.with_call(image, user, _SLOT, 77).tolist() == [5, 77]
    calls._identities[_LIBRARY] = identity = (8, 1)
    calls.probes.ranges[identity, _SLOT] = (_FUNCTION_OFFSET, _FUNCTION_BYTES)
    assert len(calls.with_call(image, user, _SLOT, 77)) == 3


def test_more_apis_than_the_kernel_half_tells_apart_are_refused() -> None:
    # A ninth would be taken for the first, whose calls inside it would not count.
    anything: Any = SimpleNamespace()
    apis = [replace(APIS[0], name=f"api{number}") for number in range(abi.APIS_MAX + 1)]
    with pytest.raises(ValueError, match="9 device APIs, and room for 8"):
        ApiProbes(anything, FileFacts(FileGuard()), apis)


def test_there_is_room_for_all_apis_and_their_functions() -> None:
    anything: Any = SimpleNamespace()
    ApiProbes(anything, FileFacts(FileGuard()))
    assert sum(len(api.calls) + len(api.namings) for api in APIS) <= abi.API_CALLS_MAX
