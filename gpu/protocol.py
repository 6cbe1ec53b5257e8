# SPDX-License-Identifier: Apache-2.0
"""What helpers in targets tell, as gpu/PROTOCOL.md and gpu/helper/protocol.h have it: the reader.

The memory belongs to a target, and may hold anything. What is no record of the protocol raises
`BadRecord`; numbers that are none of a device, a context or a name are for the caller to refuse.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from aiflame.agent.losses import LossKind
from aiflame.agent.model.gpu import MOST_PERMILLE
from aiflame.gpu.base import Host, SharedMemory
from aiflame.gpu.ring import HEADER_BYTES, Record

VERSION = 3


class Fact(enum.IntEnum):
    """Kinds of records among the facts."""

    HELLO = 1
    DEVICE = 2
    CONTEXT = 3
    REASONS = 4
    NAME = 5
    CODE = 6
    NODE = 7


class Passing(enum.IntEnum):
    """Kinds of records in the ring."""

    TIMES = 16
    STALLS = 17
    CODE_UNLOADED = 18
    LOSSES = 19
    ERROR = 20
    STATE = 21
    SERIALISED = 22


class HelperTier(enum.IntEnum):
    """What a helper reaches."""

    LAUNCHES = 0
    TIMES = 1
    STALLS = 2


class HelperLoss(enum.IntEnum):
    """What was lost in the target; gpu/PROTOCOL.md has the meanings."""

    SAMPLES_DROPPED = 1
    BUFFER_FULL = 2
    SAMPLES_FOREIGN = 3
    TIMES_DROPPED = 4
    NAMES = 5
    CODE_BYTES = 6
    CONTEXTS = 7
    EVENTS = 8
    LAUNCH_IDS = 9
    FACTS = 10
    TIMES_REFUSED = 11
    UNNUMBERED = 12
    GRAPH_IDS = 13


class HelperError(enum.IntEnum):
    """What failed in the target; gpu/PROTOCOL.md has the meanings."""

    NO_LIBRARY = 1
    SYMBOL = 2
    TOO_OLD = 3
    TAKEN = 4
    RIGHTS = 5
    UNSUPPORTED = 6
    MEMORY = 7
    CONTROL = 8
    NAMES = 9
    DRIVER = 10
    CALL = 11
    NO_SAMPLES = 12
    SERIALISED = 13
    GRAPH_IDS = 14
    QUIET = 15


class Why(enum.IntEnum):
    """Why a helper was turned on or off."""

    ASKED = 0
    RECORDER_GONE = 1
    ERROR = 2
    DUTY = 3


# struct kernel_time, struct stall, struct reason, struct loss_count.
TIMES = np.dtype(
    [
        ("launch", "<u8"),
        ("begin_ns", "<u8"),
        ("end_ns", "<u8"),
        ("queue", "<u8"),
        ("node", "<u8"),
        ("name", "<u4"),
        ("device", "<u4"),
        ("context", "<u4"),
        ("graph", "<u4"),
    ]
)
STALLS = np.dtype(
    [
        ("code", "<u8"),
        ("offset", "<u8"),
        ("launch", "<u8"),
        ("name", "<u4"),
        ("function", "<u4"),
        ("reason", "<u4"),
        ("count", "<u4"),
    ]
)
REASONS = np.dtype([("reason", "<u4"), ("name", "<u4")])
LOSSES = np.dtype([("loss", "<u4"), ("unused", "<u4"), ("count", "<u8")])


class BadRecord(ValueError):
    """No helper writes this."""


@dataclass(frozen=True, slots=True)
class Hello:
    """What a helper is, and how far it came; `why` it came no further is "" where it did.

    Of one that speaks another version than `VERSION` nothing else is known.
    """

    protocol: int
    tier: int
    vendor: str
    helper: str
    library: str
    driver: str
    why: str


@dataclass(frozen=True, slots=True)
class HelperDevice:
    """A device as the driver in a target has it."""

    device: int
    multiprocessors: int
    clock_khz: int
    major: int
    minor: int
    uuid: bytes
    name: str


@dataclass(frozen=True, slots=True)
class Context:
    """A context; its period is that of stall sampling, in cycles, 0 for none."""

    context: int
    device: int
    period_cycles: int


@dataclass(frozen=True, slots=True)
class Reasons:
    """The reasons of a context: rows of `REASONS`."""

    context: int
    reasons: npt.NDArray[np.void]


@dataclass(frozen=True, slots=True)
class Name:
    """A text by its number."""

    name: int
    text: str


@dataclass(frozen=True, slots=True)
class Code:
    """A code object; `at` is where its bytes are (`Facts.code`), None where they were not kept."""

    code: int
    loaded_ns: int
    size_bytes: int
    context: int
    module: int
    at: int | None


@dataclass(frozen=True, slots=True)
class Node:
    """A node of a graph; 0 where it copies none, and where its launch is unknown."""

    node: int
    original: int
    launch: int


@dataclass(frozen=True, slots=True)
class Stalls:
    """Samples that were read out at once: rows of `STALLS`, one each so many cycles (0: none)."""

    begin_ns: int
    end_ns: int
    context: int
    device: int
    period_cycles: int
    stalls: npt.NDArray[np.void]


@dataclass(frozen=True, slots=True)
class CodeUnloaded:
    """A code object is gone from a context."""

    code: int
    unloaded_ns: int
    context: int
    module: int


@dataclass(frozen=True, slots=True)
class Serialised:
    """A window in which kernels of a context ran one after the other: samples name launches."""

    begin_ns: int
    end_ns: int
    context: int
    device: int


@dataclass(frozen=True, slots=True)
class Failed:
    """An error of `HelperError`: what failed, the vendor's code and what the vendor says."""

    at_ns: int
    error: int
    code: int
    what: str
    text: str


@dataclass(frozen=True, slots=True)
class State:
    """What goes on from a time on: a `HelperTier`, `Why`, and the duty cycle, 0 if not told."""

    at_ns: int
    tier: int
    why: int
    duty_permille: int = 0


AnyFact = Hello | HelperDevice | Context | Reasons | Name | Code | Node

_HELLO = struct.Struct("<IiII")
_DEVICE = struct.Struct("<IIIHH16s")
_CONTEXT = struct.Struct("<IIQ")
_PAIR = struct.Struct("<II")
_CODE = struct.Struct("<QQQII")
_NODE = struct.Struct("<QQQ")
_STALLS = struct.Struct("<QQIIQ")
_UNLOADED = struct.Struct("<QQII")
_SERIALISED = struct.Struct("<QQII")
_ERROR = struct.Struct("<QIi")
_STATE, _DUTY = struct.Struct("<QII"), struct.Struct("<I")

# Texts of records are looked at no further. C++ names of 32 KiB occur.
_MAX_TEXT = 64 << 10


def _fields(form: struct.Struct, data: bytes) -> tuple[int, ...]:
    if len(data) < form.size:
        raise BadRecord("it is cut")
    return form.unpack_from(data)


def _texts(data: bytes, count: int) -> list[str]:
    parts = data.split(b"\0", count)
    if len(parts) <= count:
        raise BadRecord("a text that has no end")
    return [part.decode(errors="replace") for part in parts[:count]]


def _rows(dtype: np.dtype[np.void], data: bytes) -> npt.NDArray[np.void]:
    if len(data) % dtype.itemsize:
        raise BadRecord("a row that is cut")
    return np.frombuffer(data, dtype)


def times(record: Record) -> npt.NDArray[np.void]:
    """Returns the rows (`TIMES`) of Passing.TIMES."""
    return _rows(TIMES, record.data)


def stalls(record: Record) -> Stalls:
    """Reads Passing.STALLS."""
    begin_ns, end_ns, context, device, period_cycles = _fields(_STALLS, record.data)
    rows = _rows(STALLS, record.data[_STALLS.size :])
    return Stalls(begin_ns, end_ns, context, device, period_cycles, rows)


def code_unloaded(record: Record) -> CodeUnloaded:
    """Reads Passing.CODE_UNLOADED."""
    return CodeUnloaded(*_fields(_UNLOADED, record.data))


def serialised(record: Record) -> Serialised:
    """Reads Passing.SERIALISED."""
    return Serialised(*_fields(_SERIALISED, record.data))


def losses(record: Record) -> npt.NDArray[np.void]:
    """Returns the rows (`LOSSES`) of Passing.LOSSES."""
    return _rows(LOSSES, record.data)


def failed(record: Record) -> Failed:
    """Reads Passing.ERROR."""
    at_ns, error, code = _fields(_ERROR, record.data)
    what, text = _texts(record.data[_ERROR.size :], 2)
    return Failed(at_ns, error, code, what, text)


def state(record: Record) -> State:
    """Reads Passing.STATE."""
    at_ns, tier, why = _fields(_STATE, record.data)
    (duty,) = _fields(_DUTY, record.data[_STATE.size :] or bytes(_DUTY.size))
    if duty > MOST_PERMILLE:
        raise BadRecord("a duty cycle of more than all of the time")
    return State(at_ns, tier, why, duty)


_HEADER = struct.Struct("<16sQQQQ")
_RECORD = struct.Struct("<IIQ")
# Of what is read at once: the longest record, without a code object's bytes; of others, hundreds.
_MAX_RECORD = _MAX_TEXT + 64
# In how many facts' time (measured: 1.2 to 2 us) so much is read, and how many bytes of a text that
# is no UTF-8 are looked at in that of one.
_BLOCK_COST, _BYTES_OF_COST = 8, 512
# Of one code object. The largest of cuBLAS has some 50 MB.
MAX_CODE_BYTES = 64 << 20


class Facts:
    """Reads the facts of one memory, from the first on.

    Args:
        memory: Where they are.
        host: Counts what is lost.

    Attributes:
        left: How many facts may be read until it is set again, as each takes time of the
            recording's: who asks sets it. Long ones, and blocks that are read, count as some.
        is_behind: Whether that kept some from being read.
    """

    def __init__(self, memory: SharedMemory, host: Host) -> None:
        self._memory = memory
        self._host = host
        self.left = 1 << 62
        self.is_behind = False
        self._position = 0
        self._number = 0
        self._is_damaged = False

    def read(self) -> Iterator[AnyFact]:
        """Yields the facts since last; none any more of a memory that is no helper's."""
        if self._is_damaged:
            return
        try:
            yield from self._read()
        except BadRecord:
            self._is_damaged, self.is_behind = True, False
            self._host.lose(LossKind.DEVICE_MEMORY_DAMAGED)

    def code(self, code: Code) -> bytes:
        """Returns the bytes of a code object, b"" where they are not there."""
        if code.at is None or code.size_bytes > MAX_CODE_BYTES:
            return b""
        data = self._memory.read(code.size_bytes, code.at)
        return data if len(data) == code.size_bytes else b""

    def _read(self) -> Iterator[AnyFact]:
        data = self._memory.read(_HEADER.size, 0)
        if len(data) < _HEADER.size or data.startswith(b"\0"):  # it is not whole yet
            return
        _, ring_bytes, _, facts_bytes, head = _HEADER.unpack(data)
        if head > facts_bytes or head < self._position:
            raise BadRecord("the head of the facts went back")
        block, begin = b"", self._position
        while self._position < head:
            self.is_behind = self.left <= 0
            if self.is_behind:
                return
            at = self._position - begin
            if not _is_whole(block, at):
                where = HEADER_BYTES + ring_bytes + self._position
                block = self._memory.read(min(_MAX_RECORD, head - self._position), where)
                begin, at = self._position, 0
                self.left -= _BLOCK_COST
            size, kind, number = _fields(_RECORD, block[at : at + _RECORD.size])
            if not _RECORD.size <= size <= head - self._position or size % 8:
                raise BadRecord("a record that has no end")
            if number != self._number:
                raise BadRecord("a record with another's number")
            where = HEADER_BYTES + ring_bytes + self._position + _RECORD.size
            self._position += size
            self._number += 1
            record = block[at + _RECORD.size : at + size]
            if kind != Fact.CODE:
                self.left -= len(record) // _BYTES_OF_COST
            self.left -= 1
            yield _fact(kind, record, where, size - _RECORD.size)


def _is_whole(block: bytes, at: int) -> bool:
    """Whether a block has all of a record that is looked at."""
    if at + _RECORD.size > len(block):
        return False
    size, kind, _ = _RECORD.unpack_from(block, at)
    # A code object's bytes stay where they are.
    return at + (_RECORD.size + _CODE.size if kind == Fact.CODE else size) <= len(block)


def _fact(kind: int, data: bytes, at: int, size: int) -> AnyFact:
    """Reads a fact of `size` bytes at `at`, of which `data` is the beginning or all."""
    if kind == Fact.HELLO:
        protocol, _, tier, _ = _fields(_HELLO, data)
        if protocol != VERSION:
            return Hello(protocol, 0, "", "", "", "", "")
        return Hello(protocol, tier, *_texts(data[_HELLO.size :], 5))
    if kind == Fact.DEVICE:
        if len(data) < _DEVICE.size:
            raise BadRecord("it is cut")
        return HelperDevice(*_DEVICE.unpack_from(data), *_texts(data[_DEVICE.size :], 1))
    if kind == Fact.CONTEXT:
        return Context(*_fields(_CONTEXT, data))
    if kind == Fact.REASONS:
        context, count = _fields(_PAIR, data)
        rows = data[_PAIR.size : _PAIR.size + count * REASONS.itemsize]
        if len(rows) < count * REASONS.itemsize:
            raise BadRecord("it is cut")
        return Reasons(context, _rows(REASONS, rows))
    if kind == Fact.NAME:
        name, _ = _fields(_PAIR, data)
        return Name(name, *_texts(data[_PAIR.size :], 1))
    if kind == Fact.CODE:
        code, loaded_ns, code_bytes, context, module = _fields(_CODE, data)
        is_kept = 0 < code_bytes <= size - _CODE.size
        where = at + _CODE.size if is_kept else None
        return Code(code, loaded_ns, code_bytes, context, module, where)
    if kind == Fact.NODE:
        return Node(*_fields(_NODE, data))
    raise BadRecord("a kind of fact that is none")
