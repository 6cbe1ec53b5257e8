# SPDX-License-Identifier: Apache-2.0
"""What switches cost is taken of whole windows, and counted for no longer than it has to be."""

from __future__ import annotations

import os

import pytest
from aiflame.agent.kernel.sysbpf import ProgramCost
from aiflame.agent.recording.switch_cost import SwitchCost

_RUN_NS = 700
_S = 1_000_000_000


class _Kernel:
    """Counts runs of programs while a descriptor is open, or while it is told to."""

    def __init__(self, *, allows: bool = True, counts: bool = False) -> None:
        self._allows, self.counts = allows, counts
        self._runs = 0
        self.switches = 0
        self.descriptor: int | None = None

    def count_run_times(self) -> int:
        if not self._allows:
            raise PermissionError(1, "CAP_SYS_ADMIN")
        self.descriptor, other = os.pipe()
        os.close(other)
        return self.descriptor

    @property
    def is_asked(self) -> bool:
        try:
            os.fstat(-1 if self.descriptor is None else self.descriptor)
        except OSError:
            return False
        return True

    def switch(self, times: int) -> None:
        self.switches += times
        if self.counts or self.is_asked:
            self._runs += times

    def costs(self) -> dict[str, ProgramCost]:
        switches = ProgramCost(self._runs * _RUN_NS, self._runs, 0)
        return {"on_switch": switches, "on_waking": ProgramCost(self._runs, self._runs, 0)}


def _cost_of(kernel: _Kernel) -> SwitchCost:
    return SwitchCost(kernel, kernel.count_run_times, lambda: kernel.switches)


def _windows(
    kernel: _Kernel, cost: SwitchCost, count: int, window_ns: int = _S
) -> list[int | None]:
    found = []
    for _ in range(count):
        kernel.switch(1000)
        found.append(cost.take(window_ns))
    return found


def test_the_first_windows_are_counted_and_then_no_more() -> None:
    kernel = _Kernel()
    cost = _cost_of(kernel)
    cost.begin()
    whole = 1000 * (_RUN_NS + 1)
    # The first window may have begun before the count.
    assert _windows(kernel, cost, 11) == [None, *[whole] * 10]
    assert not kernel.is_asked
    assert _windows(kernel, cost, 3) == [None] * 3


def test_longer_windows_are_not_counted_for_longer() -> None:
    kernel = _Kernel()
    cost = _cost_of(kernel)
    cost.begin()
    assert None not in _windows(kernel, cost, 3, 5 * _S)[1:]
    assert not kernel.is_asked


def test_where_it_is_not_allowed_nothing_is_known() -> None:
    kernel = _Kernel(allows=False)
    cost = _cost_of(kernel)
    cost.begin()
    assert _windows(kernel, cost, 3) == [None] * 3


def test_what_somebody_else_has_counted_is_known_for_as_long_as_they_do() -> None:
    kernel = _Kernel(allows=False, counts=True)
    cost = _cost_of(kernel)
    cost.begin()
    assert None not in _windows(kernel, cost, 20)[1:]


@pytest.mark.parametrize("is_known", [True, False])
def test_a_window_that_somebody_else_has_counted_in_part_is_none(is_known: bool) -> None:
    kernel = _Kernel(allows=False)
    cost = SwitchCost(kernel, kernel.count_run_times, lambda: kernel.switches * is_known)
    cost.begin()
    _windows(kernel, cost, 2)
    found = []
    # WHEN somebody has it counted in half of a window, in two whole ones and half of the next, and
    # after a pause in half of one more
    for share in (0.5, 1, 1, 0.5, 0, 0.5, 0):
        kernel.counts = share == 1
        kernel.switch(500)
        kernel.counts = share > 0
        kernel.switch(500)
        found.append(cost.take(_S))
    # THEN whole windows are known.
    whole = 1000 * (_RUN_NS + 1)
    if is_known:
        assert found == [None, whole, whole, None, None, None, None]
    # AND where nobody tells of switches, all but those that follow one without a count.
    else:
        assert found == [None, whole, whole, whole // 2, None, None, None]


@pytest.mark.parametrize("windows", [0, 3])
def test_the_end_of_a_recording_ends_the_count(windows: int) -> None:
    kernel = _Kernel()
    cost = _cost_of(kernel)
    cost.begin()
    _windows(kernel, cost, windows)
    assert kernel.is_asked
    cost.end()
    assert not kernel.is_asked
