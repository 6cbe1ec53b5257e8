# SPDX-License-Identifier: Apache-2.0
"""Which OpenCL implementations a machine has, by the files that the ICD loader reads.

Nothing is loaded: /etc/OpenCL/vendors/*.icd each hold the name of a library (Khronos, OpenCL ICD
Loader specification, "Linux").
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from aiflame.agent.model.gpu import Device, Tier

VENDORS = Path("/etc/OpenCL/vendors")
_LIBRARY_FOLDERS = ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu")
_MORE_LIBRARY_FOLDERS = ("/usr/lib64", "/usr/lib", "/usr/local/lib")

# What clGetPlatformInfo(CL_PLATFORM_VERSION) answers stands in the library as text.
_VERSION = re.compile(rb"PoCL (\d+\.\d+[\w.+~-]*)")
_MAX_ICD_BYTES = 4096
# Debian's has 1 MB; with LLVM linked in, a hundred, and the text may lie anywhere in it.
_MAX_LIBRARY_BYTES = 256 << 20

LAUNCHES_ONLY = "samples of kernels are had from PoCL only; of this one, launches"


def find_devices(folder: Path, cpu_period_ns: int) -> tuple[Device, ...]:
    """Returns the devices that the ICD files name, PoCL's first."""
    libraries = sorted(set(_libraries(folder)), key=lambda name: ("pocl" not in name, name))
    found: list[Device] = []
    for library in libraries:
        if "pocl" not in library:
            name = library.rpartition("/")[2]
            found.append(Device("opencl", name, Tier.LAUNCHES, LAUNCHES_ONLY, 0))
        elif not found:
            found.append(pocl_device(_version(library), cpu_period_ns))
    return tuple(found)


def pocl_device(version: str, cpu_period_ns: int) -> Device:
    """Returns PoCL's device: the processors of this machine."""
    name = f"PoCL {version}".rstrip() + f" on {_processor()}"
    return Device("opencl", name, Tier.STALLS, "", cpu_period_ns)


def _libraries(folder: Path) -> Iterator[str]:
    try:
        files = sorted(folder.glob("*.icd"))
    except OSError:
        return
    for file in files:
        try:
            with file.open("rb") as stream:
                text = stream.read(_MAX_ICD_BYTES).decode(errors="replace")
        except OSError:
            continue
        name = (text.splitlines() or [""])[0].strip()
        if name and name.isprintable():
            yield name


def _version(library: str) -> str:
    """Returns PoCL's version, "" where its library does not say."""
    candidates = [Path(library)] if library.startswith("/") else []
    candidates += [Path(f, library) for f in (*_LIBRARY_FOLDERS, *_MORE_LIBRARY_FOLDERS)]
    return next(filter(None, map(_version_in, candidates)), "")


def _version_in(path: Path) -> str:
    try:
        with path.open("rb") as file:
            found = _VERSION.search(file.read(_MAX_LIBRARY_BYTES))
    except OSError:
        return ""
    return "" if found is None else found[1].decode()


def _processor() -> str:
    try:
        with Path("/proc/cpuinfo").open() as lines:
            for line in lines:
                key, _, value = line.partition(":")
                if key.strip() == "model name":
                    return value.strip()
    except OSError:
        pass
    return "the CPU"
