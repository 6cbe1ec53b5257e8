# SPDX-License-Identifier: Apache-2.0
"""Kernels that launches know by handles, and devices by their names."""

from __future__ import annotations

from aiflame.agent.model.window import Window, rows_of
from aiflame.agent.sinks.launch_ids import LaunchIds
from aiflame.agent.sinks.told_kernels import ToldKernels

_TEXTS = ("", "cuda", "scale", "fill", "made before the recording began")
_SCALE, _FILL = (10, 0, 1, 2, 0), (11, 0, 1, 3, 0)
_HANDLE, _GRAPH, _OTHERS = (20, 0, 1, 0, 4), (21, 0, 1, 0, 4), (22, 1, 1, 0, 4)


def _launch(launch_id: int, kernel: int, process: int = 0, count: int = 1) -> tuple[int, ...]:
    return (process, 0, 9, 5, 0, kernel, launch_id, 100, 100, count, 64)


def _time(launch_id: int, kernel: int) -> tuple[int, ...]:
    return (0, kernel, 0, launch_id, 10, 20, 1, 10, 0)


def _put(
    told: ToldKernels,
    ids: LaunchIds,
    kernels: list[tuple[int, ...]],
    launches: list[tuple[int, ...]],
    times: list[tuple[int, ...]],
) -> None:
    columns = {
        "kernels": rows_of("kernels", *kernels),
        "launches": rows_of("launches", *launches),
        "kernel_times": rows_of("kernel_times", *times),
    }
    window = Window.of(0, 0, 1000, columns, texts=_TEXTS)
    ids.put(window)
    told.put(window)


def test_a_handle_is_called_what_its_launches_ran() -> None:
    ids = LaunchIds()
    told = ToldKernels(ids)
    _put(told, ids, [_HANDLE], [_launch(5, 20), _launch(8, 20, count=3)], [])
    assert [*told.rows()] == []
    # WHEN the device tells of two of them, in a later window
    _put(told, ids, [_HANDLE, _SCALE], [], [_time(5, 10), _time(9, 10), _time(77, 10)])
    assert [*told.rows()] == [(20, 0, "cuda", "scale", "")]


def test_what_stands_for_several_kernels_has_the_name_of_none() -> None:
    ids = LaunchIds()
    told = ToldKernels(ids)
    kernels = [_GRAPH, _SCALE, _FILL]
    _put(told, ids, kernels, [_launch(5, 21)], [_time(5, 10), _time(5, 11)])
    assert [*told.rows()] == []


def test_one_that_was_named_meanwhile_and_another_processes_keep_theirs() -> None:
    ids = LaunchIds()
    told = ToldKernels(ids)
    launches = [_launch(5, 20), _launch(6, 22, process=1)]
    _put(told, ids, [_HANDLE, _OTHERS, _SCALE], launches, [_time(5, 10), _time(6, 10)])
    assert [*told.rows()] == [(20, 0, "cuda", "scale", "")]
    _put(told, ids, [(20, 0, 1, 3, 0)], [], [])
    assert [*told.rows()] == []
