# SPDX-License-Identifier: Apache-2.0
"""Checks of the group `gpu`: which devices are here, and how much of them is recorded.

None of them keeps from recording: without a device there are CPU samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from aiflame.agent import kernelfs
from aiflame.agent.doctor.base import Context, Finding, ok, skip, warn
from aiflame.gpu.families import FAMILIES

_DRM = Path("/sys/class/drm")

# PCI vendor ids (pci.ids), as sysfs writes them.
_VENDORS = {"amd": "0x1002", "intel": "0x8086"}
_NAMES = {"amd": "AMD", "intel": "Intel"}


def family(name: str) -> Callable[[Context], Finding]:
    """Returns the check of a family of the registry: what it finds, and how much of it."""

    def find(_: Context) -> Finding:
        finding = FAMILIES[name]().detect()
        if not finding.devices:
            return skip(finding.why)
        words = "; ".join(f"{device.name}: {device.reached}" for device in finding.devices)
        return warn(words, finding.cure) if finding.cure else ok(words)

    return find


def vendor(name: str) -> Callable[[Context], Finding]:
    """Returns the check of a vendor whose devices have no family yet: are there any?"""

    def find(_: Context) -> Finding:
        if _VENDORS[name] in _drm_vendors():
            return skip(
                f"a device of {_NAMES[name]} is here, but this version records its launches only"
            )
        return skip(f"no device of {_NAMES[name]} is visible here")

    return find


def _drm_vendors() -> Iterator[str]:
    for path in _DRM.glob("card*/device/vendor"):
        yield kernelfs.read_text(path).strip()  # "" where it was unplugged meanwhile
