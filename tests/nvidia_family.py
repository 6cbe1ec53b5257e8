# SPDX-License-Identifier: Apache-2.0
"""`record` with tests/standin as NVIDIA's driver: `python nvidia_family.py ARGUMENT...`.

Only the look at /proc/driver/nvidia is left out, which is the kernel's half of the driver.
"""

from __future__ import annotations

import sys

from aiflame.agent.model.gpu import Device, Tier
from aiflame.gpu.base import Finding
from aiflame.gpu.nvidia.family import NvidiaFamily
from record_with import record_with

RECORD = (sys.executable, __file__)


class StandinFamily(NvidiaFamily):
    """See `aiflame.gpu.base.Family`."""

    def detect(self, cpu_period_ns: int = 0, *, has_samples: bool = False) -> Finding:
        """Says what the driver's procfs would."""
        return Finding((Device(self.name, "Standin", Tier.LAUNCHES, "", 0),))


if __name__ == "__main__":
    sys.exit(record_with(StandinFamily.name, StandinFamily))
