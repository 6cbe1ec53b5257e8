# SPDX-License-Identifier: Apache-2.0
"""Names of kernels that a launch knows by a handle, as devices tell them.

A process that is attached to late has made its kernels before: a launch has a handle then, and no
name. The device names the launch by its number, and the kernel that ran.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from aiflame.agent.model.window import NONE, Window
from aiflame.agent.sinks.launch_ids import LaunchIds


class ToldKernels:
    """Kernels without a name, and what was told of their launches.

    Args:
        launch_ids: Launches by their numbers.
    """

    def __init__(self, launch_ids: LaunchIds) -> None:
        self._launch_ids = launch_ids
        self._unnamed: dict[int, tuple[int, str]] = {}  # process and API
        self._names: dict[int, str] = {}
        self._told: dict[int, str] = {}  # "" of one that stands for several, as a graph does

    def put(self, window: Window) -> None:
        """Takes a window, whose launches the numbers have taken."""
        texts, process_of = window.texts, {}
        for kernel, process, api, name, _ in window.kernels.tolist():
            process_of[kernel] = process
            if name:
                self._names[kernel] = texts[name]
                self._unnamed.pop(kernel, None)
            else:
                self._unnamed[kernel] = process, texts[api]
        times = window.kernel_times
        if not self._unnamed or not len(times):
            return
        processes = np.array([process_of[kernel] for kernel in times["kernel"].tolist()], np.int64)
        launched = self._launch_ids.kernels(processes, times["launch_id"])
        pairs = np.unique(
            np.stack((launched.astype(np.int64), times["kernel"].astype(np.int64))), axis=1
        )
        for kernel, ran in pairs.T.tolist():
            name = self._names.get(ran, "")
            if kernel != NONE and kernel in self._unnamed and name:
                known = self._told.setdefault(kernel, name)
                self._told[kernel] = name if known == name else ""

    def rows(self) -> Iterator[tuple[int, int, str, str, str]]:
        """Yields rows of the kernels that have a name now, and had none."""
        for kernel, name in self._told.items():
            if name and kernel in self._unnamed:
                process, api = self._unnamed[kernel]
                yield kernel, process, api, name, ""
