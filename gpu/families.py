# SPDX-License-Identifier: Apache-2.0
"""The device families, in the order in which they are looked for."""

from __future__ import annotations

from collections.abc import Callable

from aiflame.gpu.base import Family
from aiflame.gpu.nvidia.family import NvidiaFamily
from aiflame.gpu.opencl.family import OpenClFamily

FAMILIES: dict[str, Callable[[], Family]] = {
    OpenClFamily.name: OpenClFamily,
    NvidiaFamily.name: NvidiaFamily,
}
