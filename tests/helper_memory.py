# SPDX-License-Identifier: Apache-2.0
"""The memory of a helper (gpu/PROTOCOL.md), written by a test; and a host that keeps things."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence

import numpy as np
from aiflame.agent.losses import LossKind
from aiflame.agent.model.gpu import Device
from aiflame.gpu import protocol
from aiflame.gpu.base import (
    ALWAYS,
    DeviceReading,
    HelperLoad,
    KernelSample,
    KernelTime,
    Lines,
    SharedMemory,
)
from aiflame.gpu.protocol import Fact, Passing
from aiflame.gpu.ring import HEADER_BYTES

_RING, _FACTS = 1 << 16, 1 << 20


def texts(*words: str) -> bytes:
    return b"".join(word.encode() + b"\0" for word in words)


class Memory:
    """See `aiflame.gpu.base.SharedMemory`; `told` is what came through its pipe."""

    def __init__(self, process: int = 0, ring: int = _RING, facts: int = _FACTS) -> None:
        self.process = process
        self.ring, self.facts = ring, facts
        self.bytes = bytearray(HEADER_BYTES + ring + facts)
        self.heads, self.numbers = [0, 0], [0, 0]
        self.control_fd = 7
        self.told: list[bytes] = []
        self.is_full = False  # its pipe
        self.is_left = self.has_ended = False
        self.on_leave: Callable[[], None] = lambda: None
        self.write_header()

    def write_header(self) -> None:
        struct.pack_into(
            *("<8sIIQQQQii", self.bytes, 0, b"aiflame\0", 1, 0, self.ring, self.heads[0]),
            *(self.facts, self.heads[1], self.control_fd, 1),
        )

    def put(self, kind: int, data: bytes) -> None:
        """Writes a record among the facts, or into the ring."""
        data += bytes(-len(data) % 8)
        which = 1 if kind < Passing.TIMES else 0
        record = struct.pack("<IIQ", 16 + len(data), kind, self.numbers[which]) + data
        at = HEADER_BYTES + (self.ring if which else 0)
        size = self.facts if which else self.ring
        for byte in record:
            self.bytes[at + self.heads[which] % size] = byte
            self.heads[which] += 1
        self.numbers[which] += 1
        self.write_header()

    def read(self, size: int, offset: int) -> bytes:
        return bytes(self.bytes[offset : offset + size])

    def tell(self, number: int, message: bytes) -> bool:
        if number != self.control_fd or number < 0 or self.is_full:
            return False
        self.told.append(message)
        return True

    def is_over(self) -> bool:
        return self.has_ended

    def leave(self) -> None:
        self.is_left = True
        self.on_leave()

    # ---- what a helper tells -------------------------------------------------------------------

    def hello(self, tier: int = 2, why: str = "", version: int = protocol.VERSION) -> None:
        head = struct.pack("<IiII", version, 1, tier, 0)
        self.put(Fact.HELLO, head + texts("nvidia", "1", "CUPTI 28 /x/libcupti.so", "12.9", why))

    def device(self, number: int = 0, uuid: bytes = b"u" * 16, name: str = "Test 9") -> None:
        data = struct.pack("<IIIHH16s", number, 132, 1_755_000, 9, 0, uuid)
        self.put(Fact.DEVICE, data + texts(name))

    def context(self, number: int = 1, device: int = 0, period: int = 1 << 20) -> None:
        self.put(Fact.CONTEXT, struct.pack("<IIQ", number, device, period))

    def name(self, number: int, text: str) -> None:
        self.put(Fact.NAME, struct.pack("<II", number, 0) + texts(text))

    def reasons(self, context: int, names: dict[int, int]) -> None:
        rows = b"".join(struct.pack("<II", *pair) for pair in names.items())
        self.put(Fact.REASONS, struct.pack("<II", context, len(names)) + rows)

    def code(self, code: int, data: bytes) -> None:
        self.put(Fact.CODE, struct.pack("<QQQII", code, 5, len(data), 1, 1) + data)

    def node(self, node: int, original: int, launch: int) -> None:
        self.put(Fact.NODE, struct.pack("<QQQ", node, original, launch))

    def times(self, *rows: tuple[int, ...]) -> None:
        """Rows: launch, begin, end, queue, node, name, device, context, graph."""
        self.put(Passing.TIMES, np.array([*rows], protocol.TIMES).tobytes())

    def stalls(
        self,
        begin_ns: int,
        end_ns: int,
        *rows: tuple[int, ...],
        context: int = 1,
        device: int = 0,
        period: int = 1 << 20,
    ) -> None:
        """Rows: code, offset, launch, name, function, reason, count."""
        head = struct.pack("<QQIIQ", begin_ns, end_ns, context, device, period)
        self.put(Passing.STALLS, head + np.array([*rows], protocol.STALLS).tobytes())

    def serialised(self, begin_ns: int, end_ns: int, context: int = 1, device: int = 0) -> None:
        self.put(Passing.SERIALISED, struct.pack("<QQII", begin_ns, end_ns, context, device))

    def losses(self, losses: dict[int, int]) -> None:
        rows = [(loss, 0, count) for loss, count in losses.items()]
        self.put(Passing.LOSSES, np.array(rows, protocol.LOSSES).tobytes())

    def error(
        self, error: int, code: int = 0, what: str = "", text: str = "", at_ns: int = 5_000
    ) -> None:
        self.put(Passing.ERROR, struct.pack("<QIi", at_ns, error, code) + texts(what, text))

    def state(self, at_ns: int, tier: int, why: int = 0, duty: int | None = None) -> None:
        more = b"" if duty is None else struct.pack("<II", duty, 0)
        self.put(Passing.STATE, struct.pack("<QII", at_ns, tier, why) + more)


class Host:
    """Keeps what it is given; does nothing else of a `aiflame.gpu.base.Host`."""

    def __init__(self, *memories: Memory) -> None:
        self.shared: list[Memory] = [*memories]
        self.wanted = ALWAYS
        self.since_ns = 1_000
        self.lost: Counter[LossKind] = Counter()
        self.times: list[KernelTime] = []
        self.samples: list[KernelSample] = []
        self.readings: list[DeviceReading] = []
        self.lines = SaidLines()
        self.arguments: list[str] = []
        self.devices: list[Device] = []
        self.replaced_devices: list[int] = []
        self.hears: list[Callable[[int], None]] = []
        self.duties: dict[int, int] = {}
        self.loads: list[HelperLoad] = []

    def duty_permille(self, process: int) -> int:
        return self.duties.get(process, self.wanted.duty_permille)

    def add_load(self, process: int, load: HelperLoad) -> None:
        self.loads.append(load)

    def files(self, process: int) -> Collection[int]:
        return ()

    def memories(self) -> Collection[SharedMemory]:
        return self.shared

    def listen(self, hear: Callable[[int], None]) -> None:
        self.hears.append(hear)

    def found(self, devices: Sequence[Device]) -> None:
        self.devices = [*devices]

    def replaced(self, device: int) -> None:
        self.replaced_devices.append(device)

    def add_times(self, times: Iterable[KernelTime]) -> None:
        self.times += times

    def add_samples(self, samples: Iterable[KernelSample]) -> None:
        self.samples += samples

    def add_readings(self, readings: Iterable[DeviceReading]) -> None:
        self.readings += readings

    def beside(self, module: str, arguments: Sequence[str]) -> Lines:
        self.arguments = [*arguments]
        return self.lines

    def lose(self, kind: LossKind, count: int = 1) -> None:
        self.lost[kind] += count


class SaidLines:
    """A process of a family's that says what a test gives it."""

    def __init__(self) -> None:
        self.said: list[bytes] = []
        self.last: list[bytes] = []  # at its end
        self.has_ended = False

    def take(self) -> list[bytes]:
        said, self.said = self.said, []
        return said

    def finish(self) -> None:
        self.said += self.last
        self.has_ended = True

    def is_over(self) -> bool:
        return self.has_ended
