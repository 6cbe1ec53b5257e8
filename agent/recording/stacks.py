# SPDX-License-Identifier: Apache-2.0
"""Turns the kernel's stack store into rows of windows.

Stacks are told apart by their 64-bit hash. A sample may come before its stack does (another CPU was
between the two writes): a window that mentions a stack which has not come has it as lost.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from aiflame.agent.devices.locations import LocatedStack
from aiflame.agent.kernel import abi
from aiflame.agent.model.profile import StopReason
from aiflame.agent.model.window import COLUMNS, MADE_STACKS, NO_CHAIN, NONE, OpenWindow
from aiflame.agent.processes.python_threads import ThreadPython
from aiflame.agent.processes.table import ProcessImage, ProcessTable
from aiflame.agent.recording.cut_stacks import CutStack, CutStacks
from aiflame.agent.recording.id_slots import IdSlots

# Of these, by their highest bits, threads that were there when the recording began, those that have
# not run yet, long waits that were not sampled, waits that have no stack, and sleeps of later.
ENTERED_STACKS = MADE_STACKS << 32
NOT_RUN_STACKS = ENTERED_STACKS | 1 << 30
NOT_SAMPLED_STACKS = ENTERED_STACKS | 1 << 30 | 1 << 28
SWEPT_STACKS = ENTERED_STACKS | 1 << 30 | 1 << 29
LATE_SLEEPS = ENTERED_STACKS | 1 << 31

# Whose binaries are known: as many as windows keep of them (Bounds.kept_stacks).
_KNOWN_STACKS = 1 << 15
# Sets of binaries that may come before those are dropped that no known stack has: 1 MB.
_MOST_NEW_SETS = 1 << 12

_STACK_DTYPE = COLUMNS["stacks"].dtype
_ADDRESS_DTYPE = COLUMNS["addresses"].dtype


class SeesStacks(Protocol):
    """Whoever has to know of every new stack."""

    def add_stack(self, stack: LocatedStack) -> None:
        """Sees a stack."""


class CompletesCalls(Protocol):
    """Whoever knows the calls of device APIs that left no frame of their own."""

    def with_call(
        self, image: ProcessImage, user: npt.NDArray[np.uint64], slot: int, return_address: int
    ) -> npt.NDArray[np.uint64]:
        """Returns user addresses with that of the call among them."""

    def function_of(self, slot: int) -> int:
        """Returns the function of a slot, NONE where it is no function of a window."""


@dataclass(frozen=True, slots=True)
class MadeStack:
    """A stack that the host half walked: of a thread that slept when the recording began.

    Attributes:
        kernel, user: Addresses, leaf first.
        chain: Id of its Python frames, `NO_CHAIN` for none.
        gil: An abi.PythonGil.
    """

    image: ProcessImage
    kernel: Sequence[int]
    user: Sequence[int]
    end: StopReason
    chain: int = NO_CHAIN
    gil: int = 0


@dataclass(frozen=True, slots=True)
class LateWalk:
    """What another walk of a stack has found, or that there will be one.

    Attributes:
        user: Addresses, leaf first; None for those that it had.
        end: How it ends.
        chain: Id of its Python frames, `NO_CHAIN` for those that it had.
        gil: An abi.PythonGil, with a chain.
        cut: Whose stack it is, and the call that it is inside of.
    """

    user: Sequence[int] | None
    end: StopReason
    chain: int
    gil: int
    cut: CutStack


def digest(numbers: Sequence[int], python: ThreadPython | None) -> bytes:
    """Returns 16 bytes that tell stacks apart, whose content would take a thousand to keep.

    Args:
        numbers: What a stack is but for its Python frames, in a way that no other one has; u64.
        python: These.
    """
    frames = () if python is None else python.frames
    parts = [(frame.code_address, frame.position, frame.ends_run) for frame in frames]
    gil = NONE if python is None else int(python.gil)
    content = np.array([gil, len(parts), *numbers], np.uint64).tobytes()
    content += np.array(parts, COLUMNS["chain_frames"].dtype).tobytes()
    return hashlib.blake2b(content, digest_size=16).digest()


class Stacks:
    """Takes in each distinct stack.

    Args:
        window: Where they go.
        table: Process table, told of addresses in no known mapping.
        calls: Completes stacks inside calls.
        cut: Takes note of stacks that came before their tables.
        observers: Are shown every stack.

    Attributes:
        cut: The same.
    """

    def __init__(
        self,
        window: OpenWindow,
        table: ProcessTable,
        calls: CompletesCalls,
        cut: CutStacks,
        observers: Sequence[SeesStacks],
    ) -> None:
        self.cut = cut
        self._window = window
        self._table = table
        self._calls = calls
        self._observers = observers
        # The binaries that each has addresses in, by slot; slots come round in turn.
        self._known = IdSlots()
        self._known_binaries: list[tuple[int, ...]] = []
        self._oldest = 0  # of the slots
        self._binaries: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._most_sets = _MOST_NEW_SETS

    def add(
        self, keys: npt.NDArray[Any], records: npt.NDArray[Any], *, is_late: bool = False
    ) -> None:
        """Takes in the new ones among stacks of the kernel half.

        Args:
            keys: Their ids.
            records: Of abi.STACK_DTYPE.
            is_late: They have come before, and are better known now.
        """
        rows: list[tuple[Any, ...]] = []
        parts: list[npt.NDArray[np.uint64]] = []
        at = 0
        unknown: dict[int, bool] = {}
        for stack, record in zip(keys.tolist(), records, strict=True):
            if self._window.is_kept("stacks", stack) and not is_late:
                continue
            image = self._table.image(int(record["tgid"]), int(record["image"]))
            user = abi.user_frames(record)
            call, call_return = int(record["call"]), int(record["call_return"])
            if call_return:
                user = self._calls.with_call(image, user, call, call_return)
            found = image.find(user)
            binaries = tuple(sorted(set(image.binaries_at(found))))
            unmapped = found < 0
            if unmapped.any():
                # The leaf is where the processor was; callers found by frame pointer may be junk.
                unknown[image.index] = unknown.get(image.index, False) or bool(unmapped[0])
            self._note(stack, binaries)
            if not is_late:
                self.cut.see(stack, image, record)
            for observer in () if is_late else self._observers:
                observer.add_stack(LocatedStack(stack, image, user, found, binaries))
            kernel = abi.kernel_frames(record)
            parts += [kernel, user]
            rows.append(
                (
                    *(stack, int(record["python"]), image.index, at, len(kernel), len(user)),
                    *(int(record["end"]), int(record["gil"]), bool(record["kernel_cut"])),
                    self._calls.function_of(call) if call_return else NONE,
                    call_return,
                )
            )
            at += len(kernel) + len(user)
        if rows:
            addresses = np.concatenate(parts).astype("<u8").view(_ADDRESS_DTYPE)
            self._window.define("stacks", np.array(rows, _STACK_DTYPE), addresses, is_late=is_late)
        for index, is_certain in unknown.items():
            self._table.unknown_address(self._table.images[index], is_certain)

    def look_again(self, binaries: Set[int]) -> None:
        """Shows stacks again that have addresses in some files, of which more is known now."""
        for slot, known in enumerate(self._known_binaries):
            if binaries.isdisjoint(known):
                continue
            stack = self._known.id_of(slot)
            row = self.row(stack)
            image = None if row is None else self._table.images.get(int(row["process"]))
            if image is None:
                continue
            user = self.user(stack)
            found = image.find(user)
            located = LocatedStack(stack, image, user, found, {*image.binaries_at(found)})
            for observer in self._observers:
                observer.add_stack(located)

    def _note(self, stack: int, binaries: tuple[int, ...]) -> None:
        # Stacks are many, sets of binaries few: each is kept once.
        binaries = self._binaries.setdefault(binaries, binaries)
        if len(self._binaries) > self._most_sets:  # files that are new have new numbers
            self._binaries = {each: each for each in (*self._known_binaries, binaries)}
            self._most_sets = 2 * len(self._binaries) + _MOST_NEW_SETS
        slot = self._known.get(stack)
        if slot is not None:
            self._known_binaries[slot] = binaries
        elif len(self._known) < _KNOWN_STACKS:
            self._known.add(stack)
            self._known_binaries.append(binaries)
        else:
            self._known.drop(self._oldest)
            self._known_binaries[self._known.add(stack)] = binaries  # the same slot
            self._oldest = (self._oldest + 1) % _KNOWN_STACKS

    def _binaries_of(self, stack: int) -> tuple[int, ...]:
        slot = self._known.get(stack)
        return () if slot is None else self._known_binaries[slot]

    def add_made(self, stack: int, made: MadeStack) -> None:
        """Takes in a stack that the host half walked, maybe after windows that mention it."""
        self._note(stack, ())
        row = (
            *(stack, made.chain, made.image.index, 0, len(made.kernel), len(made.user)),
            *(int(made.end), made.gil, False, NONE, 0),
        )
        addresses = np.array([*made.kernel, *made.user], np.uint64).view(_ADDRESS_DTYPE)
        self._window.define("stacks", np.array([row], _STACK_DTYPE), addresses, is_late=True)

    def row(self, stack: int) -> np.void | None:
        """Returns the STACK_DTYPE row of a stack, None where it is not known any more."""
        known = self._window.stack(stack)
        return None if known is None else known[0]

    def user(self, stack: int) -> npt.NDArray[np.uint64]:
        """Returns the user addresses of a stack, leaf first; none where it is not known."""
        return self._window.user_addresses(stack)

    def copy(self, stack: int, made: int, late: LateWalk, *, is_late: bool = False) -> bool:
        """Gives a stack another id, with what is known of it now.

        Args:
            stack: As it is known.
            made: The id: of a stack that the host half makes, or the same.
            late: What it becomes.
            is_late: Windows before had it as it was.

        Returns:
            Whether it is still known.
        """
        known = self._window.stack(stack)
        if known is None:
            return False
        row, addresses = known[0].copy(), known[1]
        row["stack"], row["first"] = made, 0
        row["stop_reason"] = int(late.end)
        if late.chain != NO_CHAIN:
            row["chain"], row["gil"] = late.chain, late.gil
        if late.user is not None:
            user = np.array(late.user, np.uint64)
            if late.cut.call_return:
                image, call = late.cut.image, late.cut.call
                user = self._calls.with_call(image, user, call, late.cut.call_return)
            addresses = np.concatenate([addresses[: int(row["kernel_depth"])], user])
            row["user_depth"] = len(user)
        self._note(made, self._binaries_of(stack))
        rows, parts = np.array([row], _STACK_DTYPE), addresses.view(_ADDRESS_DTYPE)
        self._window.define("stacks", rows, parts, is_late=is_late)
        return True

    def binaries_of(self, stacks: npt.NDArray[np.uint64]) -> Counter[int]:
        """Returns in how many of some stacks each binary is."""
        found: Counter[int] = Counter()
        for binaries, count in Counter(map(self._binaries_of, np.unique(stacks).tolist())).items():
            for binary in binaries:
                found[binary] += count
        return found

    def has_come(self, stack: int) -> bool:
        """Whether the content of a stack is known."""
        return self._window.is_kept("stacks", stack)
