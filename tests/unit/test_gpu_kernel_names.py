# SPDX-License-Identifier: Apache-2.0
"""Names of GPU kernels as the kernel half tells them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from aiflame.agent.kernel import abi
from aiflame.agent.launches import gpu_kernel_names
from aiflame.agent.launches.gpu_kernel_names import KernelNames
from aiflame.agent.launches.gpu_kernels import KernelTable
from aiflame.agent.processes.table import ProcessTable
from aiflame.agent.recording.window_builder import Bounds, WindowBuilder
from support import blind_inspector

_PID, _IMAGE = 7, 1


def _told(number: int, name: bytes) -> bytes:
    """An event of the kernel half that tells a name."""
    event = np.zeros(1, abi.KERNEL_NAMED_DTYPE)
    event["tgid"], event["image"], event["name_id"] = _PID, _IMAGE, number
    event["name"] = np.void(name.ljust(abi.KERNEL_NAME_BYTES, b"\0"))
    event["name_bytes"] = len(name) + 1
    return event.tobytes()


def test_a_kernel_that_is_launched_for_weeks_keeps_its_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gpu_kernel_names, "_MOST_TOLD", 4)
    table = ProcessTable(1, lambda pid: _IMAGE, blind_inspector())
    image = table.image(_PID, _IMAGE)
    window = WindowBuilder(Bounds())
    anything: Any = None
    names = KernelNames(table, anything, KernelTable(window), window)
    # GIVEN a kernel that was named once, and others that are compiled while it is launched
    names.take(_told(0, b"lasting"))
    kernels = set()
    for number in range(1, 20):
        names.take(_told(number, b"compiled %d" % number))
        for one in (number, 0):
            kernels.add(names.kernel(image, "cuda", one, is_named=True, stack=0))
    # THEN all have their names
    found = window.close(1_000)
    assert {found.texts[row["name"]] for row in found.kernels} == {
        "lasting",
        *(f"compiled {number}" for number in range(1, 20)),
    }
    assert len(kernels) == 20
