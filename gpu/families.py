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


def _of_kernel_file(
    tools: CodeTools, code: bytes, sampled: Mapping[str, Mapping[int, int]]
) -> dict[str, Listing]:
    from aiflame.gpu.opencl.listing import of_kernel_file  # as above

    return of_kernel_file(tools, code, sampled)


# Of those whose code captures keep.
LISTS: dict[str, Lists] = {OpenClFamily.name: _of_kernel_file, NvidiaFamily.name: _of_cubin}
