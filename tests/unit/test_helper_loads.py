# SPDX-License-Identifier: Apache-2.0
"""Into which processes helpers are loaded, and what is said of the others."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiflame.agent.devices.helper_loads import HelperLoads
from aiflame.agent.losses import LossKind
from aiflame.agent.processes import procfs
from aiflame.agent.processes.table import ProcessImage
from aiflame.gpu.base import HelperLibrary
from support import wait_until

_OLD, _NEW = 1, 2


@pytest.fixture
def loads(tmp_path: Path) -> Iterator[HelperLoads]:
    library = HelperLibrary(tmp_path / "libhelper.so", ("libcuda",), lambda _: {}, "more")
    found = HelperLoads(library, None, first_image=_OLD, begun_ns=lambda: 0)
    yield found
    found.close()


def _image(index: int, pid: int, image: int = _OLD) -> ProcessImage:
    return ProcessImage(index, pid, image, 0, name="job")


def _said(loads: HelperLoads) -> list[str]:
    said: list[str] = []
    wait_until(lambda: said.extend(loads.look()) or said, timeout_s=30)
    return said


def test_a_process_that_has_ended_meanwhile_is_left_alone(loads: HelperLoads) -> None:
    # GIVEN a process that ends before its turn, so that another one may have its number
    child = subprocess.Popen(["sleep", "60"])
    started = procfs.start_ticks(child.pid)
    loads.ask(_image(0, child.pid))
    child.kill()
    child.wait()
    # THEN that is said, and counted
    (words,) = _said(loads)
    assert words.startswith(f"no helper was loaded into job ({child.pid}): ")
    assert loads.losses[LossKind.HELPERS_NOT_LOADED] == 1
    assert started and not procfs.start_ticks(child.pid)


def test_a_process_that_has_just_begun_is_waited_for(loads: HelperLoads) -> None:
    # A command that was started with a helper has it a moment later.
    loads.ask(_image(0, os.getpid(), _NEW))
    assert loads.look() == []
    loads.forget(0)
    assert loads.losses.total() == 0


def test_what_is_known_at_the_end_is_said(loads: HelperLoads) -> None:
    # GIVEN a loader that is at work when the recording ends
    loads.ask(_image(0, child := os.getpid(), _OLD))
    loads.look()
    # THEN what came of it is waited for: a process does not trace its parent's like this one
    (words,) = loads.finish()
    assert words.startswith(f"no helper was loaded into job ({child}): ")


def test_those_that_are_too_many_are_counted(loads: HelperLoads) -> None:
    for index in range(300):
        loads.ask(_image(index, os.getpid(), _NEW))
        loads.forget(index)
    assert loads.losses[LossKind.HELPERS_NOT_LOADED] == 300 - 256
    # AND an hour later there is room for as many more
    loads._loads_since_ns -= 3_600 * 10**9
    loads.ask(_image(300, os.getpid(), _NEW))
    assert 300 in loads._due
    assert loads.losses[LossKind.HELPERS_NOT_LOADED] == 300 - 256
