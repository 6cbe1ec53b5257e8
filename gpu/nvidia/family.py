# SPDX-License-Identifier: Apache-2.0
"""The family `nvidia`: kernel times and stall samples, from aiflame's helper in the targets.

Launches need no helper. One that is in a process, from its start or injected, tells the rest by
way of CUPTI, as far as driver, device and rights let it; what keeps it from that is told with the
device.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from aiflame.agent.model.gpu import Operation
from aiflame.gpu.apis.base import Api, Argument, Bell, Call
from aiflame.gpu.base import Finding, HelperLibrary, Host, Wanted
from aiflame.gpu.nvidia import NAME

if TYPE_CHECKING:
    from aiflame.gpu.nvidia.sampler import NvidiaSampler

_PROBES = Api(
    name="cuda",
    calls=(
        Call(
            "aiflame_gpu_launch",
            Operation.LAUNCH,
            launch_id=Argument(0),
            kernel=Argument(1),
            queue=Argument(2),
        ),
    ),
    bells=(Bell("aiflame_gpu_bell"), Bell("aiflame_gpu_gone", Argument(0))),
    libraries=("libaiflame-nvidia",),
)

_LIBRARY = Path(__file__).with_name("libaiflame-nvidia.so")


def _variables(wanted: Wanted) -> dict[str, str]:
    """Returns what gpu/PROTOCOL.md, "Beginning", has, which children inherit."""
    asked = f"tier=2,duty={wanted.duty_permille}"
    return {"CUDA_INJECTION64_PATH": str(_LIBRARY), "AIFLAME_GPU": asked}


_HELPER = HelperLibrary(
    path=_LIBRARY,
    # The driver: who has CUDA's runtime alone has not begun.
    beside=("libcuda.so",),
    variables=_variables,
    adds="how long each kernel ran and, where rights allow, why it stalled",
    # gpu/helper/memory.c, control.c and helper.c; a test compares. What CUPTI calls is what the
    # driver of a process that runs CUDA has called before.
    calls=(
        *("mmap", "munmap", "madvise", "read", "write", "close", "getpid", "prlimit64"),
        *("memfd_create", "ftruncate", "fallocate", "fcntl", "epoll_create1", "epoll_ctl"),
        *("epoll_wait", "eventfd2", "pipe2", "fchmod", "prctl", "clock_nanosleep"),
    ),
)


class NvidiaFamily:
    """See `aiflame.gpu.base.Family`."""

    name = NAME
    api = "cuda"
    probes: tuple[Api, ...] = (_PROBES,)
    memory = "/memfd:aiflame-nvidia"
    helper: HelperLibrary | None = _HELPER

    def runs_by(self, path: str) -> bool:
        """Kernels of it run on no CPU."""
        return False

    def detect(self, cpu_period_ns: int = 0, *, has_samples: bool = False) -> Finding:
        """Looks at what the driver tells of itself."""
        # Most recordings have no such device: importing what reads it takes 10 ms.
        from aiflame.gpu.nvidia import machine
        from aiflame.gpu.nvidia.sampler import device_of, lowest

        here = machine.look()
        if not here.gpus:
            return Finding((), here.why)
        limit = lowest(here)
        devices = tuple(device_of(gpu.model, here) for gpu in here.gpus)
        return Finding(devices, cure="" if limit is None else limit.cure)

    def start(self, host: Host) -> NvidiaSampler:
        """Begins; helpers are told to when they are seen."""
        from aiflame.gpu.nvidia import machine
        from aiflame.gpu.nvidia.sampler import NvidiaSampler

        return NvidiaSampler(host, machine.look())
