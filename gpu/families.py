# SPDX-License-Identifier: Apache-2.0
"""The device families, in the order in which they are looked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from aiflame.gpu.base import CodeTools, Family, Listing, Lists
from aiflame.gpu.nvidia.family import NvidiaFamily
from aiflame.gpu.opencl.family import OpenClFamily

FAMILIES: dict[str, Callable[[], Family]] = {
    OpenClFamily.name: OpenClFamily,
    NvidiaFamily.name: NvidiaFamily,
}


def _of_cubin(
    tools: CodeTools, code: bytes, sampled: Mapping[str, Mapping[int, int]]
) -> dict[str, Listing]:
    from aiflame.gpu.nvidia.listings import of_cubin  # few recordings have such devices

    return of_cubin(tools, code, sampled)


# Of those whose code captures keep.
LISTS: dict[str, Lists] = {NvidiaFamily.name: _of_cubin}
