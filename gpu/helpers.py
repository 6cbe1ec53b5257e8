# SPDX-License-Identifier: Apache-2.0
"""What helpers in targets tell (gpu/PROTOCOL.md), as kernel times, samples and losses.

Vendor neutral: a family says what its devices are called and which of its reasons count. All that
comes is a target's, and may be anything: it costs that target's numbers, and a bounded amount of
time and memory.
"""

from __future__ import annotations

import math
import random
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from aiflame.agent.losses import LossKind
from aiflame.agent.model.gpu import Tier
from aiflame.gpu import protocol
from aiflame.gpu.base import CodeKey, HelperLoad, Host, KernelSample, KernelTime, SharedMemory
from aiflame.gpu.protocol import (
    AnyFact,
    BadRecord,
    Code,
    Context,
    Facts,
    Failed,
    Hello,
    HelperDevice,
    HelperLoss,
    Name,
    Node,
    Passing,
    Reasons,
    State,
)
from aiflame.gpu.ring import Record, RingReader

T = TypeVar("T")

# Of one process. A program with PyTorch and cuBLAS has some 10,000 kernels, and a machine 16
# devices.
_MAX_NAMES, _MAX_NAME_CHARACTERS = 1 << 16, 4096
# Of the recorder's memory: 30,000 names of 500 bytes, as long as those of templates.
_MAX_NAMES_BYTES = 16 << 20
_MAX_TEXT_CHARACTERS = 200
_MAX_DEVICES, _MAX_CONTEXTS, _MAX_CODES = 32, 256, 1 << 16
_MAX_REASONS = 128  # of a context; a chip has some 40
_MAX_ERRORS = 16
# Nodes of graphs whose building is known, 18 MB of the recorder's memory: a server of a language
# model has some 70 graphs of a thousand nodes, each instantiated once.
_MAX_NODES = 1 << 17
_UNLIMITED = 1 << 62
# Of kernel times that are added up. A kernel runs no 18 minutes, and the clocks of devices are less
# ahead (devices.devices).
_MAX_TIME_NS, _MAX_AHEAD_NS = 1 << 40, 1_000_000_000
# One record may tell of so many; more makes no sense.
_MAX_LOST = 1 << 32

# Of samples: a device takes some million in a second, no function is as long, and all are added up.
_MAX_COUNT, _MAX_COUNT_OF_PROCESS, _MAX_OFFSET = 1 << 28, 1 << 50, 1 << 40
_MAX_LAUNCH_ID = (1 << 63) - 1
# What samples are counted in, whatever the period of a context is: one stands for so many cycles.
# It is a constant, so that windows, processes and hosts add up, and no target can choose it: what
# CUPTI takes for a large device (gpu/nvidia/sampler.py). cupti_pcsampling.h: periods end at 2^31.
COMMON_PERIOD_CYCLES, _MAX_PERIOD_CYCLES = 1 << 20, 1 << 31
# Of a process: instructions that are sampled, kernels that they are in, and reasons for it.
_MAX_SITES, _MAX_KERNELS, _MAX_WORDS = 1 << 19, 1 << 14, 128
# Where nothing is listed in the end, as of an agent, the first two are of so many seconds: who
# compiles kernels all day has ever new ones.
_SITES_S = 60

_LOSSES = {
    HelperLoss.SAMPLES_DROPPED: LossKind.DEVICE_SAMPLES_DROPPED,
    HelperLoss.BUFFER_FULL: LossKind.DEVICE_BUFFER_FULL,
    HelperLoss.SAMPLES_FOREIGN: LossKind.DEVICE_SAMPLES_FOREIGN,
    HelperLoss.TIMES_DROPPED: LossKind.KERNEL_TIMES_DROPPED,
    HelperLoss.NAMES: LossKind.DEVICE_NAMES_FULL,
    HelperLoss.CODE_BYTES: LossKind.DEVICE_CODE_NOT_KEPT,
    HelperLoss.CONTEXTS: LossKind.DEVICE_CONTEXTS_FULL,
    HelperLoss.EVENTS: LossKind.DEVICE_FACTS_FULL,
    HelperLoss.LAUNCH_IDS: LossKind.LAUNCHES_NUMBERED_TWICE,
    HelperLoss.FACTS: LossKind.DEVICE_FACTS_FULL,
    HelperLoss.TIMES_REFUSED: LossKind.KERNEL_TIMES_REFUSED,
    HelperLoss.UNNUMBERED: LossKind.DEVICE_SAMPLES_UNNUMBERED,
    HelperLoss.GRAPH_IDS: LossKind.GRAPH_LAUNCHES_UNKNOWN,
}

# struct control: magic "aifc", version, verb, highest tier, duty in permille, exponent of the
# period (0: the vendor's own), ms between two read-outs, serialised windows in permille.
_CONTROL = struct.Struct("<4s7I")
_START = 1
# A reading is a call into the driver, which takes milliseconds; two of them in each window.
_READ_OUT_MS = 500
# What is wanted is said again so often: another recorder may have asked for more, and was killed.
_AGAIN_NS = 60_000_000_000
# By one that wants more than another one has said again meanwhile: half a cycle of the helper's.
_SOON_AGAIN_NS = 5_000_000_000
# Where the header has the control pipe's descriptor.
_CONTROL_FD = struct.Struct("<i")
_CONTROL_FD_AT = 48


@dataclass(frozen=True, slots=True)
class _ReadOut:
    """When samples of a context were taken that were read out at once; monotonic."""

    begin_ns: int
    end_ns: int


@dataclass(slots=True)
class Told:
    """What one process has told of itself so far; some 100 KB, as it is kept when that is over.

    Attributes:
        hello: Who speaks, None before it did.
        best: What it said when it came furthest in this recording.
        state: What goes on there, None before it was told.
        devices: By number.
        contexts: The same.
        errors: The first of each kind.
        samples: Those of reasons that count, by context.
        twins: Those of reasons that are part of others, likewise.
        windows: In how many its kernels ran one after the other, by context.
        serialised_ns: How long, likewise.
    """

    hello: Hello | None = None
    best: Hello | None = None
    state: State | None = None
    devices: dict[int, HelperDevice] = field(default_factory=dict)
    contexts: dict[int, Context] = field(default_factory=dict)
    errors: dict[int, Failed] = field(default_factory=dict)
    samples: Counter[int] = field(default_factory=Counter)
    twins: Counter[int] = field(default_factory=Counter)
    windows: Counter[int] = field(default_factory=Counter)
    serialised_ns: Counter[int] = field(default_factory=Counter)

    @property
    def is_foreign(self) -> bool:
        """Whether it speaks another version: what it tells means something else."""
        return self.hello is not None and self.hello.protocol != protocol.VERSION

    @property
    def tier(self) -> Tier:
        """How much it lets be known."""
        tier = 0 if self.best is None else self.best.tier
        return Tier(tier) if tier in list(Tier) else Tier.LAUNCHES


class Helper:
    """The helper in one process, as it is read.

    Args:
        memory: What it shares.
        host: Takes losses.
        number_of: A family's number of a device, None for one that it has no room for.
        is_part: Whether the samples of a reason, by its name, are among those of another one.
        since_ns: Monotonic; what was before is another recording's.

    Attributes:
        told: What it told.
    """

    def __init__(
        self,
        memory: SharedMemory,
        host: Host,
        number_of: Callable[[HelperDevice], int | None],
        is_part: Callable[[str], bool],
        since_ns: int,
    ) -> None:
        self._memory = memory
        self._host = host
        self._number_of = number_of
        self._is_part = is_part
        self._since_ns = since_ns
        self._ring = RingReader(memory, host)
        self._facts = Facts(memory, host)
        self._now_ns = 0  # of the records read last
        self._read_outs: dict[int, _ReadOut] = {}  # the last ones, by context
        self._sampled_until_ns = 0
        self._random = random.Random(0)  # noqa: S311 - no secret
        self._serialised_until_ns: dict[int, int] = {}  # by context, of those that were told
        self._waiting: list[Record] = []
        # By context, and number of the chip's: the number of a name.
        self._reasons: dict[int, dict[int, int]] = {}
        self._names: dict[int, str] = {}
        self._names_bytes = 0
        self._codes: dict[int, Code] = {}  # those of which the bytes were kept
        self._builders: dict[int, int] = {}  # launches by whose capture nodes of graphs were built
        self._sites: set[tuple[CodeKey, int]] = set()
        self._kernels: set[CodeKey] = set()
        self._sites_since_s = 0  # since the recording's start
        self._words: set[str] = set()
        self._count = 0
        self._is_unread = False  # from now on
        self._times_left, self._cpu_left_s = _UNLIMITED, math.inf
        self._started_ns: int | None = None
        self._asked_permille: int | None = None  # of the time in which stalls are sampled
        self._serialised_permille = 0
        self._pipe = -1  # its descriptor there
        self._tier = Tier.LAUNCHES
        self._asked_ns = 0  # last
        # What another recorder had asked for before this one began: 0 for nothing, or the same.
        self._before_permille: int | None = None
        self._has_answered = False  # has said how far it comes since it was to begin
        self._is_left = False
        self._is_over = False  # its process, when it was left
        self._is_done = False  # it has said that it is off, or is over, and there was no more
        self.told = told = Told()
        self._of_contexts: Sequence[dict[int, Any]] = (
            *(told.contexts, told.samples, told.twins, told.windows, told.serialised_ns),
            *(self._reasons, self._read_outs, self._serialised_until_ns),
        )

    @property
    def process(self) -> int:
        """Which process image it is in, by an id of the recorder's."""
        return self._memory.process

    def start(self, tier: Tier, duty_permille: int, serialised_permille: int = 0) -> None:
        """Tells it to begin, once it can be told, or that another duty cycle is wanted.

        It is on until the end. To be called often: what is wanted is said again from time to time,
        as the last message of any recorder holds.

        Args:
            tier: The highest that is wanted.
            duty_permille: For how much of the time stalls are sampled.
            serialised_permille: For how much of it in windows that name launches.
        """
        now_ns = time.monotonic_ns()
        is_same = self._asked_permille == duty_permille
        if self._is_over or (is_same and now_ns - self._asked_ns < self._again_ns):
            return
        data = self._memory.read(_CONTROL_FD.size, _CONTROL_FD_AT)
        if len(data) < _CONTROL_FD.size or self.told.hello is None or self.told.is_foreign:
            return  # its memory is not written yet
        is_first = self._started_ns is None
        if is_first:
            self._started_ns = now_ns
            self.told.best = self.told.hello  # what another recording reached counts no more
        (self._pipe,) = _CONTROL_FD.unpack(data)
        self._tier, self._serialised_permille = tier, serialised_permille
        is_told = self._ask(duty_permille, serialised_permille)
        if is_told or is_first:
            self._asked_permille = duty_permille  # else the pipe was full: it is tried again
        if is_told or is_first or is_same:
            self._asked_ns = now_ns
        if is_first and self.told.state is not None:
            self._note_before(self.told.state)
        if is_first and not is_told:
            self._host.lose(LossKind.DEVICE_CONTROL_REFUSED)

    def _note_before(self, state: State) -> None:
        is_other = state.tier and state.duty_permille != self._asked_permille
        self._before_permille = state.duty_permille if is_other else 0

    @property
    def _again_ns(self) -> int:
        """After how long what is wanted is said again: soon where another one wants less."""
        state, asked = self.told.state, self._asked_permille or 0
        is_less = state is not None and bool(state.tier) and state.duty_permille < asked
        # Of serialised windows no STATE tells.
        return _SOON_AGAIN_NS if is_less or self._serialised_permille else _AGAIN_NS

    def _ask(self, duty_permille: int, serialised_permille: int) -> bool:
        """Writes a START into its pipe; returns whether it did."""
        message = _CONTROL.pack(
            *(b"aifc", protocol.VERSION, _START, int(self._tier), duty_permille, 0, _READ_OUT_MS),
            serialised_permille,
        )
        return self._pipe >= 0 and self._memory.tell(self._pipe, message)

    def allow(self, facts: int, times: int = _UNLIMITED, cpu_s: float = math.inf) -> None:
        """Says what may be read until this is called again.

        Args:
            facts: How many; what they are told of waits for the rest.
            times: How many kernel times are taken one by one; others are added up.
            cpu_s: For how long. What is read at once is bounded, and finished; what that took more
                is taken off the next time.
        """
        self._facts.left = min(self._facts.left, 0) + facts
        self._times_left, self._cpu_left_s = times, min(self._cpu_left_s, 0.0) + cpu_s

    def leave(self) -> None:
        """Wants nothing of it any more: it ends, unless another recorder wants it on."""
        self._is_over = self._memory.is_over()
        self._is_left = True
        before, asked = self._before_permille, self._asked_permille
        if (before or self._serialised_permille) and asked is not None and not self._is_over:
            # Another recorder may be there, which has wished for none of what this one asked.
            self._ask(before or asked, 0)
        self._memory.leave()

    @property
    def has_ended(self) -> bool:
        """Whether nothing goes on there any more, and all that it said was read."""
        return self._started_ns is None or self._is_unread or self._is_done

    @property
    def _is_off(self) -> bool:
        """Whether it told so since it was to begin, or can tell no more."""
        hello, state, since_ns = self.told.hello, self.told.state, self._started_ns
        if self._is_over or since_ns is None:
            return self._is_over
        # One that does not come as far as kernel times has no STATE to tell.
        has_nothing = self._has_answered and hello is not None and not hello.tier
        return has_nothing or (state is not None and state.at_ns >= since_ns and not state.tier)

    def give_up(self) -> None:
        """Counts what waits for facts that are read no more."""
        if self._waiting:
            self._host.lose(LossKind.DEVICE_RECORDS_OVERWRITTEN, len(self._waiting))
            self._waiting = []

    def code(self, code: int) -> bytes:
        """Returns a code object, b"" where it was not kept."""
        known = self._codes.get(code)
        return b"" if known is None else self._facts.code(known)

    def read(self, interval: int) -> list[KernelSample]:
        """Gives the host what was told since last; returns the samples that were.

        Args:
            interval: Seconds since the start.
        """
        if self._is_unread or self._cpu_left_s <= 0:
            return []  # it stays in the ring, which counts what is overwritten there
        if not self._host.wanted.lists and interval - self._sites_since_s >= _SITES_S:
            self._sites_since_s = interval
            self._sites.clear()
            self._kernels.clear()
        begun_s = time.thread_time()
        try:
            return self._read_some(interval)
        finally:
            self._cpu_left_s -= time.thread_time() - begun_s

    def _read_some(self, interval: int) -> list[KernelSample]:
        # Facts after the ring: what a record of it speaks of was written before.
        was_off = self._is_off
        if not self._waiting:
            self._waiting = [*self._ring.read()]
        self._is_done = was_off and not self._waiting
        self._learn(self._facts.read())
        if self.told.is_foreign:
            self._is_unread, self._waiting = True, []
            self._host.lose(LossKind.HELPERS_FOREIGN)
        if self._facts.is_behind or self._is_unread:
            return []  # the rest of the facts comes first
        records, self._waiting = self._waiting, []
        samples: list[KernelSample] = []
        try:
            for record in records:
                self._take(record, interval, samples)
        except BadRecord:
            self._is_unread = True
            self._host.lose(LossKind.DEVICE_MEMORY_DAMAGED)
        self._host.add_samples(samples)
        return samples

    def _learn(self, facts: Iterable[AnyFact]) -> None:
        told = self.told
        for fact in facts:
            match fact:
                case Hello():
                    fact = _cut(fact)
                    told.hello = fact
                    if told.is_foreign:
                        return
                    self._has_answered = self._started_ns is not None
                    best_tier = -1 if told.best is None else told.best.tier
                    # What it says when it is left is not why it came no further.
                    if fact.tier > best_tier or (fact.tier == best_tier and not self._is_left):
                        told.best = fact
                case HelperDevice():
                    self._note_device(replace(fact, name=_shown(fact.name)))
                case Context():
                    self._note_context(told.contexts, fact.context, fact)
                case Reasons():
                    rows = fact.reasons[:_MAX_REASONS].tolist()
                    self._note_context(self._reasons, fact.context, dict(rows))
                case Name():
                    self._name(fact.name, fact.text[:_MAX_NAME_CHARACTERS])
                case Code():
                    self._note_code(fact)
                case Node():
                    self._note_node(fact)

    def _note_device(self, device: HelperDevice) -> None:
        known = self.told.devices
        if device.device in known or len(known) < _MAX_DEVICES:
            known[device.device] = device
        else:
            self._host.lose(LossKind.DEVICE_CONTEXTS_FULL)

    def _note_context(self, into: dict[int, T], context: int, fact: T) -> None:
        """Notes what is told of a context, in place of the one that was heard of longest ago.

        Who makes contexts all day has ended the first ones. Of one that goes on, samples are
        refused, and counted, until it is told of again.
        """
        into.pop(context, None)
        into[context] = fact
        if len(into) > _MAX_CONTEXTS:
            oldest = next(iter(into))
            for known in self._of_contexts:
                known.pop(oldest, None)

    def _note_code(self, code: Code) -> None:
        """Notes where the bytes of a code object are, if they were kept."""
        if code.at is None or code.code in self._codes:
            return
        if len(self._codes) < _MAX_CODES:
            self._codes[code.code] = code
        else:
            self._host.lose(LossKind.DEVICE_CODE_NOT_KEPT)

    def _note_node(self, node: Node) -> None:
        """Notes who has built a node; what it is a copy of was told before."""
        launch = node.launch or self._builders.get(node.original, 0)
        if not 0 < launch <= _MAX_LAUNCH_ID:
            return
        self._builders.pop(node.node, None)
        self._builders[node.node] = launch
        if len(self._builders) > _MAX_NODES:
            # Who captures graphs all day has no use for those of the morning, most likely.
            del self._builders[next(iter(self._builders))]
            self._host.lose(LossKind.DEVICE_FACTS_FULL)

    def _name(self, number: int, text: str) -> None:
        before = self._names.get(number)
        size = self._names_bytes + sys.getsizeof(text)
        size -= 0 if before is None else sys.getsizeof(before)
        is_one_more = before is None and len(self._names) == _MAX_NAMES
        if is_one_more or size > _MAX_NAMES_BYTES:
            self._host.lose(LossKind.DEVICE_NAMES_FULL)
            return
        self._names[number] = text
        self._names_bytes = size

    def _take(self, record: Record, interval: int, samples: list[KernelSample]) -> None:
        match record.kind:
            case Passing.TIMES:
                rows = protocol.times(record)
                self._host.add_load(self.process, HelperLoad(times=len(rows)))
                if len(rows):
                    self._now_ns = max(self._now_ns, int(rows["end_ns"].max()))
                # Here, as those of another recording would take the places of this one's.
                self._host.add_times(self._times(rows[rows["end_ns"] > self._since_ns]))
            case Passing.STALLS:
                stalls = protocol.stalls(record)
                self._now_ns = max(self._now_ns, stalls.end_ns)
                _renew(self.told.contexts, stalls.context)
                _renew(self._reasons, stalls.context)
                self._add_load(stalls)
                read_out = self._read_out(stalls)
                if stalls.end_ns > self._since_ns:
                    samples += self._samples(stalls, read_out, interval)
            case Passing.LOSSES:
                if self._now_ns >= self._since_ns or not self._now_ns:
                    self._lose(protocol.losses(record))
            case Passing.ERROR:
                failed = protocol.failed(record)
                failed = replace(failed, what=_shown(failed.what), text=_shown(failed.text))
                self._now_ns = max(self._now_ns, failed.at_ns)
                if failed.at_ns > self._since_ns and len(self.told.errors) < _MAX_ERRORS:
                    self.told.errors.setdefault(failed.error, failed)
            case Passing.STATE:
                self.told.state = protocol.state(record)
                if self._started_ns is not None and self._before_permille is None:
                    self._note_before(self.told.state)  # the answer to the first START
                self._now_ns = max(self._now_ns, self.told.state.at_ns)
            case Passing.SERIALISED:
                self._take_window(protocol.serialised(record))
            case Passing.CODE_UNLOADED:
                pass  # samples name the code that they are of
            case _:
                raise BadRecord("a kind of record that is none")

    def _take_window(self, window: protocol.Serialised) -> None:
        """Notes how long kernels ran one after the other: windows of a context do not overlap."""
        context = window.context
        end_ns = min(window.end_ns, time.monotonic_ns())
        self._now_ns = max(self._now_ns, end_ns)
        # What comes next is of another session: the device held nothing when that began.
        self._read_outs.pop(context, None)
        after_ns = max(self._serialised_until_ns.get(context, 0), self._since_ns)
        begin_ns = max(window.begin_ns, after_ns)
        if context in self.told.contexts and begin_ns < end_ns:
            self.told.windows[context] += 1
            self.told.serialised_ns[context] += end_ns - begin_ns
            self._serialised_until_ns[context] = end_ns

    def _lose(self, rows: npt.NDArray[np.void]) -> None:
        for loss, count in zip(rows["loss"].tolist(), rows["count"].tolist(), strict=True):
            kind = _LOSSES.get(loss)
            if kind is None:
                raise BadRecord("a loss that is none")
            self._host.lose(kind, min(count, _MAX_LOST))

    def _times(self, rows: npt.NDArray[np.void]) -> Iterator[KernelTime]:
        exact = min(len(rows), self._times_left)
        self._times_left -= exact
        yield from self._one_by_one(rows[:exact])
        if exact < len(rows):
            yield from self._added_up(rows[exact:])

    def _added_up(self, rows: npt.NDArray[np.void]) -> Iterator[KernelTime]:
        """Adds up kernel times by kernel: that takes a tenth of the time.

        Their launches are not told any more.
        """
        took_ns = rows["end_ns"] - rows["begin_ns"]
        is_sound = (rows["end_ns"] >= rows["begin_ns"]) & (took_ns <= _MAX_TIME_NS)
        is_sound &= rows["end_ns"] <= time.monotonic_ns() + _MAX_AHEAD_NS
        refused = len(rows) - int(is_sound.sum())
        if refused:
            self._host.lose(LossKind.KERNEL_TIMES_REFUSED, refused)
        rows, took_ns = rows[is_sound], took_ns[is_sound]
        pairs = rows["device"].astype(np.uint64) << np.uint64(32) | rows["name"]
        keys, of = np.unique(pairs, return_inverse=True)
        of = of.reshape(-1)
        counts, sums, ends = np.zeros((3, len(keys)), np.uint64)
        begins = np.full(len(keys), np.iinfo(np.uint64).max)
        np.add.at(counts, of, np.uint64(1))
        np.add.at(sums, of, took_ns)
        np.minimum.at(begins, of, rows["begin_ns"])
        np.maximum.at(ends, of, rows["end_ns"])
        columns = (column.tolist() for column in (keys, begins, ends, sums, counts))
        for key, begin_ns, end_ns, sum_ns, count in zip(*columns, strict=True):
            device, name = divmod(key, 1 << 32)
            number = self._device(device)
            if number is None:
                self._host.lose(LossKind.KERNEL_TIMES_REFUSED, count)
                continue
            self._host.lose(LossKind.KERNEL_TIMES_ADDED_UP, count)
            yield KernelTime(
                device=number,
                process=self.process,
                kernel=self._names.get(name, ""),
                begin_ns=begin_ns,
                end_ns=end_ns,
                duration_ns=sum_ns,
                count=count,
            )

    def _one_by_one(self, rows: npt.NDArray[np.void]) -> Iterator[KernelTime]:
        for row in rows.tolist():
            launch, begin_ns, end_ns, queue, node, name, device, _, _ = row
            number = self._device(device)
            if number is None:
                self._host.lose(LossKind.KERNEL_TIMES_REFUSED)
                continue
            yield KernelTime(
                device=number,
                process=self.process,
                kernel=self._names.get(name, ""),
                begin_ns=begin_ns,
                end_ns=end_ns,
                duration_ns=end_ns - begin_ns,
                queue=queue,
                launch_id=launch,
                built_id=self._builders.get(node, 0) if node else 0,
            )

    def _read_out(self, stalls: protocol.Stalls) -> _ReadOut:
        """Returns when a record's samples were taken; notes it for the context's next record."""
        last = self._read_outs.get(stalls.context)
        begin_ns = min(stalls.begin_ns, stalls.end_ns)
        if last is not None and last.end_ns < stalls.end_ns:
            # What the device held before `begin_ns` was read out with what came after.
            begin_ns = last.end_ns
        elif last is not None and last.end_ns == stalls.end_ns:
            begin_ns = last.begin_ns  # a read-out of many rows is several records
        found = self._read_outs[stalls.context] = _ReadOut(begin_ns, stalls.end_ns)
        while len(self._read_outs) > _MAX_CONTEXTS:
            del self._read_outs[next(iter(self._read_outs))]
        return found

    def _samples(
        self, stalls: protocol.Stalls, read_out: _ReadOut, interval: int
    ) -> Iterator[KernelSample]:
        number = self._device(stalls.device)
        reasons = self._reasons.get(stalls.context, {})
        begin_ns = max(read_out.begin_ns, self._since_ns)
        for row in stalls.stalls.tolist():
            code, offset, launch, name, _, reason, taken = row
            kernel = self._names.get(name, "")
            word = self._names.get(reasons.get(reason, 0), "")
            key = CodeKey(self.process, None, kernel, code)
            is_sound = taken <= _MAX_COUNT and offset <= _MAX_OFFSET and launch <= _MAX_LAUNCH_ID
            is_sound &= stalls.period_cycles <= _MAX_PERIOD_CYCLES
            if number is None or not kernel or not word or not is_sound:
                self._host.lose(LossKind.DEVICE_SAMPLES_REFUSED, min(taken, _MAX_LOST))
                continue
            count = self._scaled(taken, stalls.period_cycles)
            if self._is_part(word):
                self.told.twins[stalls.context] += count
            elif not self._has_room(key, offset, word, count):
                self._host.lose(LossKind.DEVICE_SAMPLES_REFUSED, taken)
            elif count:
                self.told.samples[stalls.context] += count
                yield KernelSample(
                    interval=interval,
                    device=number,
                    code=key,
                    offset=offset,
                    reason=word,
                    count=count,
                    launch_id=launch,
                    begin_ns=begin_ns,
                    end_ns=read_out.end_ns,
                )

    def _add_load(self, stalls: protocol.Stalls) -> None:
        """Tells what samples have cost, before their read-out is noted."""
        last = self._read_outs.get(stalls.context)
        load = HelperLoad(samples=len(stalls.stalls))
        if last is None or last.end_ns != stalls.end_ns:  # or it is the rest of one
            # Contexts are sampled at the same time.
            begin_ns = max(stalls.begin_ns, self._sampled_until_ns)
            load += HelperLoad(read_outs=1, sampled_ns=max(stalls.end_ns - begin_ns, 0))
            self._sampled_until_ns = max(stalls.end_ns, self._sampled_until_ns)
        self._host.add_load(self.process, load)

    def _scaled(self, taken: int, period_cycles: int) -> int:
        """Returns how many samples of the common period and duty some of others stand for.

        What is left of a division is one more as often as it is a part of one: stochastic
        rounding, which neither favours nor drops what is rare.
        """
        wanted = self._host.wanted.duty_permille
        state = self.told.state
        duty = wanted if state is None else state.duty_permille or wanted
        cycles = period_cycles or COMMON_PERIOD_CYCLES
        whole = COMMON_PERIOD_CYCLES * duty
        count, rest = divmod(taken * cycles * wanted, whole)
        return count + (rest > 0 and self._random.randrange(whole) < rest)

    def _has_room(self, key: CodeKey, offset: int, word: str, count: int) -> bool:
        """Whether samples can be told apart and added up with all others; notes them if so."""
        site = (key, offset)
        if (
            self._count + count > _MAX_COUNT_OF_PROCESS
            or (site not in self._sites and len(self._sites) >= _MAX_SITES)
            or (key not in self._kernels and len(self._kernels) >= _MAX_KERNELS)
            or (word not in self._words and len(self._words) >= _MAX_WORDS)
        ):
            return False
        self._count += count
        self._sites.add(site)
        self._kernels.add(key)
        self._words.add(word)
        return True

    def _device(self, device: int) -> int | None:
        known = self.told.devices.get(device)
        return None if known is None else self._number_of(known)


def _renew(known: dict[int, T], key: int) -> None:
    """Has what is known under a key be what goes last."""
    if key in known:
        known[key] = known.pop(key)


def _shown(text: str) -> str:
    """Returns a text of a target's as it may stand in a line."""
    return text[:_MAX_TEXT_CHARACTERS]


def _cut(hello: Hello) -> Hello:
    return Hello(
        hello.protocol,
        hello.tier,
        *map(_shown, (hello.vendor, hello.helper, hello.library, hello.driver, hello.why)),
    )


# Between two looks whether helpers have ended.
_POLL_S = 0.01


def await_end(helpers: Iterable[Helper], read: Callable[[Helper], None], at_most_s: float) -> None:
    """Leaves helpers, and reads what they tell until each says that it has ended, or a time."""
    every, begun_ns = [*helpers], time.monotonic_ns()
    left = every
    for helper in every:
        helper.leave()
    while left:
        for helper in left:
            read(helper)
        left = [helper for helper in left if not helper.has_ended]
        if time.monotonic_ns() - begun_ns > at_most_s * 1e9:
            break
        time.sleep(_POLL_S if left else 0)
    for helper in every:
        helper.give_up()
