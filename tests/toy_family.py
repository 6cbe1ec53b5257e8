# SPDX-License-Identifier: Apache-2.0
"""The family of tests/workloads/toyhelper.c, a device that does not exist; and `record` with it.

`python toy_family.py ARGUMENT...` is `aiflame record` on a machine that has such devices.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterator

from aiflame.agent.model.gpu import Device, Operation, Tier
from aiflame.gpu.apis.base import Api, Argument, Bell, Call, HandleFrom, Naming
from aiflame.gpu.base import (
    CodeKey,
    Finding,
    HelperLibrary,
    Host,
    Interval,
    KernelTime,
    Listing,
    SharedMemory,
    SourceLines,
)
from aiflame.gpu.ring import RingReader
from record_with import record_with

RECORD = (sys.executable, __file__)

# As in toyhelper.h.
_KERNEL, _TIMES = 1, 2
_NAME, _TIME = struct.Struct("<Q56s"), struct.Struct("<4Q")
_MOST_NAMES = 1000

_PROBES = Api(
    name="toys",
    calls=(
        Call("toy_enqueue", Operation.LAUNCH, kernel=Argument(0), queue=Argument(1)),
        Call(
            "toy_launch",
            Operation.LAUNCH,
            launch_id=Argument(0),
            kernel=Argument(1),
            queue=Argument(2),
        ),
    ),
    namings=(Naming("toy_kernel", Argument(1), HandleFrom.ARGUMENT, handle=Argument(0)),),
    bells=(Bell("toy_bell"),),
    libraries=("libaiflame-toy",),
)


class ToyFamily:
    """See `aiflame.gpu.base.Family`."""

    name = "toy"
    api = "toys"
    probes: tuple[Api, ...] = (_PROBES,)
    memory = "/memfd:aiflame-toy"
    helper: HelperLibrary | None = None

    def runs_by(self, path: str) -> bool:
        return False

    def detect(self, cpu_period_ns: int = 0, *, has_samples: bool = False) -> Finding:
        return Finding((Device(self.name, "Toy 1", Tier.TIMES, "it does not exist", 0),))

    def start(self, host: Host) -> ToySampler:
        return ToySampler(host)


class _Ring:
    """What one process tells."""

    def __init__(self, memory: SharedMemory, host: Host) -> None:
        self._process = memory.process
        self._reader = RingReader(memory, host)
        self._names: dict[int, str] = {}

    def times(self) -> Iterator[KernelTime]:
        for kind, data in self._reader.read():
            if kind == _KERNEL and len(data) == _NAME.size and len(self._names) < _MOST_NAMES:
                handle, name = _NAME.unpack(data)
                self._names[handle] = name.split(b"\0")[0].decode(errors="replace")
            elif kind == _TIMES and len(data) % _TIME.size == 0:
                for launch_id, handle, begin_ns, end_ns in _TIME.iter_unpack(data):
                    name = self._names.get(handle, "")
                    took_ns = end_ns - begin_ns
                    yield KernelTime(
                        *(0, self._process, name, begin_ns, end_ns, took_ns), launch_id=launch_id
                    )


class ToySampler:
    """See `aiflame.gpu.base.Sampler`."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._rings: dict[SharedMemory, _Ring] = {}
        host.listen(lambda process: self._read())

    def owns(self, file: int) -> bool:
        return False

    def drain(self, interval: Interval) -> None:
        self._read()

    def stop(self) -> None:
        self._read()

    def _read(self) -> None:
        known, host = self._rings, self._host
        self._rings = {
            memory: known[memory] if memory in known else _Ring(memory, host)
            for memory in host.memories()
        }
        for ring in self._rings.values():
            host.add_times(ring.times())

    def resolve(self, code: CodeKey, offsets: frozenset[int], lines: SourceLines) -> Listing | None:
        return None

    def code(self, code: CodeKey) -> bytes:
        return b""

    def file(self, code: CodeKey) -> int | None:
        return None


if __name__ == "__main__":
    sys.exit(record_with(ToyFamily.name, ToyFamily))
