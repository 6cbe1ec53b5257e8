# SPDX-License-Identifier: Apache-2.0
"""The device APIs whose calls are recorded. Adding one is one new module and one line here."""

from __future__ import annotations

from aiflame.gpu.apis import cuda, hip, level_zero, opencl
from aiflame.gpu.apis.base import Api

APIS: tuple[Api, ...] = (cuda.API, hip.API, level_zero.API, opencl.API)
