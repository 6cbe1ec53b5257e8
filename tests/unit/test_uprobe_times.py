# SPDX-License-Identifier: Apache-2.0
"""What times of probed instructions say of a kernel; trying itself needs root (tests/bpf)."""

from __future__ import annotations

import errno

import pytest
from aiflame.agent.kernel.bytecode import Refused
from aiflame.agent.kernel.sysbpf import TRACE_UPROBE_MULTI
from aiflame.agent.kernel.uprobe_tries import NopTreatment, Treatment, classify, load_for_links

EMULATED, STEPPED, REFUSED = Treatment.EMULATED, Treatment.STEPPED, Treatment.REFUSED


@pytest.mark.parametrize(
    ("what", "emulated", "stepped", "long", "prefixed", "expected"),
    [
        ("6.18 in a virtual machine", 8753, 152376, 9083, 8773, (EMULATED, EMULATED)),
        ("5.10 under software emulation", 35170, 317540, 328040, 42140, (STEPPED, EMULATED)),
        ("6.1 on a busy host", 65740, 614720, 634750, 80770, (STEPPED, EMULATED)),
        ("traps that differ little", 3000, 6500, 6100, 3400, (STEPPED, EMULATED)),
        ("a kernel that makes calls of them", 9000, 150000, 5000, 5000, (EMULATED, EMULATED)),
        ("a refused one", 9000, 150000, 149000, None, (STEPPED, REFUSED)),
    ],
)
def test_times_tell_emulated_from_stepped(
    what: str,
    emulated: float,
    stepped: float,
    long: float,
    prefixed: float | None,
    expected: tuple[Treatment, Treatment],
) -> None:
    times = {"emulated": emulated, "stepped": stepped, "long": long}
    if prefixed is not None:
        times["prefixed"] = prefixed
    assert classify(times) == NopTreatment(*expected), what


def test_times_that_do_not_differ_tell_nothing() -> None:
    assert classify({"emulated": 100, "stepped": 120, "long": 100, "prefixed": 100}) is None


class _Kernel:
    """Takes programs for links or not."""

    def __init__(self, takes_links: bool, takes_any: bool = True) -> None:
        self._takes_links, self._takes_any = takes_links, takes_any
        self.asked: list[int] = []

    def load(self, attach_type: int) -> dict[str, int]:
        self.asked.append(attach_type)
        if not self._takes_any or (attach_type and not self._takes_links):
            raise Refused("on_call", OSError(errno.EINVAL, "Invalid argument"))
        return {"on_call": 7}


def test_programs_are_loaded_for_links_where_the_kernel_has_them() -> None:
    kernel = _Kernel(takes_links=True)
    assert load_for_links(kernel.load, links_many=True) == ({"on_call": 7}, True)
    assert load_for_links(kernel.load, links_many=False) == ({"on_call": 7}, False)
    assert kernel.asked == [TRACE_UPROBE_MULTI, 0]


def test_programs_refused_for_links_are_loaded_for_events() -> None:
    kernel = _Kernel(takes_links=False)
    assert load_for_links(kernel.load, links_many=True) == ({"on_call": 7}, False)
    assert kernel.asked == [TRACE_UPROBE_MULTI, 0]


def test_programs_refused_either_way_are_an_error() -> None:
    with pytest.raises(Refused):
        load_for_links(_Kernel(takes_links=False, takes_any=False).load, links_many=True)


@pytest.mark.parametrize("number", [errno.ENOMEM, errno.EMFILE, errno.EAGAIN])
def test_programs_refused_for_a_moment_are_not_loaded_for_events_for_good(number: int) -> None:
    def load(attach_type: int) -> dict[str, int]:
        if attach_type:
            raise Refused("on_call", OSError(number, "for a moment"))
        return {"on_call": 7}

    with pytest.raises(Refused, match="for a moment"):
        load_for_links(load, links_many=True)
