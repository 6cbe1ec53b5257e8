# SPDX-License-Identifier: Apache-2.0
"""Which launches a capture keeps: windows in, launches and their ends out."""

from __future__ import annotations

import numpy as np
from aiflame.agent.model.window import COLUMNS, NO_TIME, NONE, Timing, Window, rows_of
from aiflame.agent.sinks import launch_order
from aiflame.agent.sinks.launch_order import LaunchOrder

_QUEUE = 0x1000


def _launch(at_ns: int, stack: int, *, queue: int = _QUEUE, process: int = 0) -> tuple[int, ...]:
    return (process, process, queue, stack, 0, process, 0, at_ns, at_ns, 1, 64)


def _window(
    begin_ns: int,
    end_ns: int,
    launches: list[tuple[int, ...]],
    waits: list[tuple[int, int]] = [],  # noqa: B006 - nobody writes it
    samples: list[int] = [],  # noqa: B006
    wait_queue: int = _QUEUE,
) -> Window:
    rows = [(0, 0, 0, 0, 0, int(Timing.INSTANT), at_ns, at_ns, 1) for at_ns in samples]
    return Window.of(
        0,
        begin_ns,
        end_ns,
        {
            "launches": rows_of("launches", *launches),
            "queue_waits": rows_of("queue_waits", *((0, wait_queue, *wait) for wait in waits)),
            "device_samples": np.array(rows, COLUMNS["device_samples"].dtype),
            "kernels": rows_of("kernels", (0, 0, 0, 0, 0), (1, 1, 0, 0, 0)),
            "codes": rows_of("codes", (0, 0, NONE), (1, 1, NONE)),
        },
    )


def _all_taken(window: Window) -> list[tuple[int, int]]:
    """The same of a recording of one window."""
    order = LaunchOrder()
    return _taken(order, window) + _taken(order, None)


def _taken(order: LaunchOrder, window: Window | None) -> list[tuple[int, int]]:
    """Stack and known end of what is kept once a window was put, or at the end."""
    found = order.finish() if window is None else order.put(window)
    return [
        (int(row["stack"]), int(end_ns))
        for rows, ended_ns in found
        for row, end_ns in zip(rows, ended_ns, strict=True)
    ]


def test_launches_that_cannot_own_a_sample_are_left_out() -> None:
    # GIVEN launches that are each waited for, and samples in the second and the fourth
    launches = [_launch(at_ns, at_ns) for at_ns in (100, 200, 300, 400)]
    waits = [(110, 200), (210, 300), (310, 400), (410, 500)]
    window = _window(0, 1000, launches, waits, [250, 290, 450])
    assert _all_taken(window) == [(200, 300), (400, 500)]


def test_a_launch_waits_for_its_end() -> None:
    order = LaunchOrder()
    assert _taken(order, _window(0, 1000, [_launch(900, 1)], samples=[950])) == []
    assert _taken(order, _window(1000, 2000, [], samples=[1500])) == []
    assert _taken(order, _window(2000, 3000, [], waits=[(910, 2100)])) == []
    # Its samples may come a window later than they were taken.
    assert _taken(order, _window(3000, 4000, [])) == [(1, 2100)]
    assert _taken(order, None) == []


def test_a_sample_that_comes_a_window_late_finds_its_launch() -> None:
    order = LaunchOrder()
    launches = [_launch(100, 1), _launch(200, 2)]
    assert _taken(order, _window(0, 1000, launches, [(110, 200), (210, 300)])) == []
    assert _taken(order, _window(1000, 2000, [], samples=[150])) == [(1, 200)]


def test_what_nobody_waits_for_is_not_kept_forever() -> None:
    order = LaunchOrder()
    second = 1_000_000_000
    kept = _taken(order, _window(0, second, [_launch(100, 1)], samples=[150]))
    for at in range(1, 40):
        waits = [(at * second + 1, at * second + 2)]
        # A queue of others.
        kept += _taken(order, _window(at * second, (at + 1) * second, [], waits, wait_queue=0x99))
    assert kept == [(1, NO_TIME)]
    assert order._processes == {}


def test_the_first_wait_that_began_later_tells_the_end() -> None:
    launches = [_launch(100, 1), _launch(150, 2)]
    # The first began before the second launch, and says nothing of it.
    window = _window(0, 1000, launches, [(120, 300), (160, 400)], [200])
    assert _all_taken(window) == [(1, 300), (2, 400)]


def test_a_wait_for_all_ends_every_queue() -> None:
    launches = [_launch(100, 1), _launch(110, 2, queue=0x2000)]
    window = _window(0, 1000, launches, [(120, 300)], [200], wait_queue=0)
    assert sorted(_all_taken(window)) == [(1, 300), (2, 300)]


def test_what_is_not_over_at_the_end_has_no_end() -> None:
    order = LaunchOrder()
    assert _taken(order, _window(0, 1000, [_launch(100, 1)], samples=[500])) == []
    assert _taken(order, None) == [(1, NO_TIME)]


def test_launches_without_order_are_kept_where_there_are_samples() -> None:
    launches = [_launch(100, 1, queue=0), _launch(100, 2, queue=0, process=1)]
    assert _all_taken(_window(0, 1000, launches, samples=[500])) == [(1, NO_TIME)]


def test_launches_that_nothing_waits_for_do_not_pile_up() -> None:
    order, most = LaunchOrder(), launch_order._MOST_WAITING
    kept = []
    for second in range(5):
        begin_ns = second * 1_000_000
        launches = [_launch(begin_ns + at, second * most + at) for at in range(most)]
        kept += _taken(order, _window(begin_ns, begin_ns + 1_000_000, launches, samples=[begin_ns]))
        (waiting,) = order._processes.values()
        assert len(waiting.launches) <= most
    # Of those that made way, the ones that a sample came after.
    assert len(kept) == 4 * most


def test_launches_after_the_last_sample_of_their_wait_are_kept() -> None:
    # GIVEN three launches that one wait ends, and one sample before the last two
    launches = [_launch(at_ns, at_ns) for at_ns in (100, 120, 140)]
    # WHEN they are decided THEN all are there: what they cost is told by how long all took
    taken = _all_taken(_window(0, 1000, launches, [(150, 200)], [110]))
    assert taken == [(100, 200), (120, 200), (140, 200)]
