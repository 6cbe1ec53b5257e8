# SPDX-License-Identifier: Apache-2.0
"""What a machine says of its NVIDIA devices, without loading anything: /proc/driver/nvidia.

The files are those of NVIDIA's kernel driver (open-gpu-kernel-modules, nv-procfs.c): `version`,
`params`, and `gpus/BUS/information` for each device. What a machine keeps from being known is told
as a tier, with the reason and what helps.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from aiflame.agent.model.gpu import Tier

PROC = Path("/proc/driver/nvidia")
DEV = Path("/dev")
# Where the control daemon of MPS has its pipes, unless CUDA_MPS_PIPE_DIRECTORY says otherwise
# (NVIDIA, Multi-Process Service, "Environment variables").
MPS_CONTROL = Path("/tmp/nvidia-mps/control")  # noqa: S108 - looked for, never used

# A device of which nothing else is known.
UNNAMED = "NVIDIA device"

_MAX_BYTES = 1 << 16
_MAX_DEVICES = 32

# "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  ...", and of the open one
# "... Open Kernel Module for x86_64  580.65.06  Release Build  ...".
_VERSION = re.compile(r"^NVRM version:.*?\s(\d{3}\.\d{1,3}(?:\.\d{1,3})?)\s", re.MULTILINE)
_RESTRICTED = re.compile(r"^RmProfilingAdminOnly:\s*1\s*$", re.MULTILINE)
_FIELD = re.compile(r"^([^:\n]+):[ \t]*(.*)$", re.MULTILINE)
# A guest's device by the name of its profile: "GRID T4-16Q", "NVIDIA A16-2C".
_VIRTUAL = re.compile(r"^GRID |-\d+[ABCQ]$")

# The first drivers of CUDA 12, and of CUDA 12.8 Update 1, with which stalls and kernel times are
# had in one run (release notes: CUDA 12.9, table 3; CUPTI 12.8, Update 1).
OLDEST_WITH_TIMES = (525, 60, 13)
OLDEST_WITH_STALLS = (570, 124, 6)
# From this one on CAP_PERFMON is enough (NVIDIA, ERR_NVGPUCTRPERM).
_PERFMON_SINCE = (565,)

UNRESTRICT = (
    "echo 'options nvidia NVreg_RestrictProfilingToAdminUsers=0' |"
    " sudo tee /etc/modprobe.d/nvidia-profiling.conf, and restart"
)
UNRESTRICT_VIRTUAL = (
    "set the plugin parameter enable_profiling=1 of this virtual device on its host"
)
UNSHARE = (
    "make one compute instance of the whole GPU instance (nvidia-smi mig -cci), or use a device"
    " without MIG"
)


@dataclass(frozen=True, slots=True)
class Limit:
    """What keeps a tier from being reached: why, and what helps ("" for nothing known)."""

    tier: Tier  # that is reached all the same
    why: str
    cure: str = ""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A device: its model as the driver calls it, and its UUID, None where it does not say."""

    model: str
    uuid: bytes | None


@dataclass(frozen=True, slots=True)
class Machine:
    """What is here.

    Attributes:
        driver: Its version, "" where there is none or it does not say.
        gpus: The devices, in the order of their buses.
        why: Why there are none, "" where there are.
        limits: What keeps the higher tiers from being reached.
        notes: What else may keep stalls from being sampled: it shows when a process tries.
    """

    driver: str
    gpus: tuple[Gpu, ...]
    why: str
    limits: tuple[Limit, ...]
    notes: tuple[str, ...]


def look(proc: Path = PROC, dev: Path = DEV, mps: Path = MPS_CONTROL) -> Machine:
    """Looks at a machine; never raises for what it lacks."""
    match = _VERSION.search(_text(proc / "version"))
    driver = "" if match is None else match[1]
    gpus = tuple(_gpus(proc / "gpus"))
    has_nodes = _exists(dev / "nvidiactl")
    if not gpus and has_nodes:
        # In a container, of which /proc is often the host's, and sometimes not.
        gpus = tuple(Gpu(UNNAMED, None) for _ in _nodes(dev))
    return Machine(
        driver,
        gpus,
        "" if gpus else _why_none(proc, dev, driver),
        tuple(_limits(driver, _text(proc / "params"), gpus)),
        tuple(_notes(proc, mps, gpus)),
    )


def _why_none(proc: Path, dev: Path, driver: str) -> str:
    if driver:
        return f"NVIDIA's driver {driver} is loaded, but has no device"
    if _exists(dev / "dxg"):
        return "a device of Windows (WSL) tells nothing here"
    return f"no driver of NVIDIA's is loaded ({proc}/version)"


def version_of(driver: str) -> tuple[int, ...]:
    """Returns a driver's version as numbers."""
    return tuple(int(part) for part in driver.split(".") if part.isdigit())


def _limits(driver: str, params: str, gpus: tuple[Gpu, ...]) -> Iterator[Limit]:
    version = version_of(driver)
    if version and version < OLDEST_WITH_TIMES:
        oldest = ".".join(map(str, OLDEST_WITH_TIMES))
        yield Limit(
            Tier.LAUNCHES,
            f"driver {driver} is older than CUDA 12",
            f"install NVIDIA's driver {oldest} or later",
        )
    elif version and version < OLDEST_WITH_STALLS:
        oldest = f"{OLDEST_WITH_STALLS[0]}.{OLDEST_WITH_STALLS[1]}.{OLDEST_WITH_STALLS[2]:02}"
        yield Limit(
            Tier.TIMES,
            f"driver {driver} cannot sample stalls beside kernel times",
            f"install NVIDIA's driver {oldest} (CUDA 12.8 Update 1) or later",
        )
    if _RESTRICTED.search(params):
        capability = "CAP_PERFMON" if version >= _PERFMON_SINCE else "CAP_SYS_ADMIN"
        yield Limit(
            Tier.TIMES,
            f"the driver lets only processes with {capability} sample stalls"
            " (RmProfilingAdminOnly: 1): the recorded ones, not aiflame",
            f"{UNRESTRICT}; or give the workload {capability}",
        )
    if any(_VIRTUAL.search(gpu.model) for gpu in gpus):
        yield Limit(
            Tier.TIMES,
            "a virtual device (vGPU) samples stalls only if its host enabled that",
            UNRESTRICT_VIRTUAL,
        )


def _notes(proc: Path, mps: Path, gpus: tuple[Gpu, ...]) -> Iterator[str]:
    if _has_instances(proc):
        yield (
            "MIG is on: stalls are sampled on instances whose compute is not shared; if they are"
            f" not: {UNSHARE}"
        )
    if _exists(mps):
        yield (
            "MPS is on: whether its clients can sample stalls shows when one tries; if not: start"
            " the process outside of it, or end it (echo quit | nvidia-cuda-mps-control)"
        )


def _has_instances(proc: Path) -> bool:
    # capabilities/gpuN/mig/giN is there for each instance.
    try:
        return any(True for _ in (proc / "capabilities").glob("gpu*/mig/gi*"))
    except OSError:
        return False


def _gpus(folder: Path) -> Iterator[Gpu]:
    try:
        files = sorted(folder.glob("*/information"))[:_MAX_DEVICES]
    except OSError:
        return
    for file in files:
        fields = {key.strip(): value.strip() for key, value in _FIELD.findall(_text(file))}
        model = fields.get("Model", "")
        yield Gpu(model or UNNAMED, _uuid(fields.get("GPU UUID", "")))


def _uuid(text: str) -> bytes | None:
    # "GPU-d17d2a44-...", with question marks for one that was never initialised.
    try:
        return uuid.UUID(text.removeprefix("GPU-")).bytes
    except ValueError:
        return None


def _nodes(dev: Path) -> list[Path]:
    try:
        nodes = [path for path in dev.glob("nvidia[0-9]*") if path.name[6:].isdigit()]
    except OSError:
        return []
    return sorted(nodes)[:_MAX_DEVICES]


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:
        return False


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(_MAX_BYTES).decode(errors="replace")
    except OSError:
        return ""
