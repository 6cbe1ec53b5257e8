# SPDX-License-Identifier: Apache-2.0
"""Copied stacks are walked on when their tables come, and given in any case."""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from aiflame.agent.kernel import abi
from aiflame.agent.losses import LossKind
from aiflame.agent.model.profile import StopReason
from aiflame.agent.processes.table import Mapping, ProcessTable
from aiflame.agent.recording import late_walks
from aiflame.agent.recording.late_walks import LateWalks
from aiflame.agent.unwind.table import UnwindTable
from cfibytes import RIP, TEXT, Frames, def_cfa_offset, elf_with, table_of, uleb
from support import blind_inspector

_PID, _IMAGE = 4_000_000, 5  # beyond every pid (PID_MAX_LIMIT)
_BIAS, _STACK = 0x7F00_0000_0000, 0x7FFD_0000_0E00
_ROOT, _PLAIN = TEXT, TEXT + 0x100
_BINARY = 3
_LEAF, _CALLER, _START = _BIAS + _PLAIN, _BIAS + _PLAIN + 8, _BIAS + _ROOT + 8
_KERNEL_FRAME, _GUESS = 0xFFFF_FFFF_8100_0000, 0x1234


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> UnwindTable:
    frames = Frames()
    cie = frames.cie()
    frames.fde(cie, _ROOT, 0x100, b"\x07" + uleb(RIP))
    frames.fde(cie, _PLAIN, 0x100, def_cfa_offset(32))
    return table_of(elf_with(frames), tmp_path_factory.mktemp("late_walks"))


class _Tables:
    """The tables of a recording: one, which may still be on its way."""

    def __init__(self, table: UnwindTable) -> None:
        self.built = table
        self.is_there = self.comes_at_last = False

    def table_of(self, binary: int) -> UnwindTable | None:
        return self.built if self.is_there else None

    def is_being_built(self, binary: int) -> bool:
        return not self.is_there

    def are_settled(self, binaries: Collection[int]) -> bool:
        return self.is_there

    def wait(self, binaries: Collection[int], deadline_ns: int) -> bool:
        self.is_there = self.comes_at_last
        return self.is_there


class _Recording:
    """As much of one as walks stacks late; it takes the stacks itself."""

    def __init__(self, table: UnwindTable) -> None:
        self._sent: list[bytes] = []
        self.tables = _Tables(table)
        self.processes = ProcessTable(0, lambda pid: _IMAGE, blind_inspector())
        self.image = self.processes.image(_PID, _IMAGE)
        images: Any = SimpleNamespace(bias=lambda mapping: mapping.start - mapping.file_offset)
        self.late = LateWalks(self, self.processes, self.tables, images, self)
        self.given: list[tuple[int, list[int], StopReason, bool]] = []

    def map_code(self) -> None:
        code = Mapping(_BIAS + TEXT, _BIAS + TEXT + 0x1000, TEXT, _BINARY)
        self.image.replace_mappings([code])

    def records(self) -> Iterator[bytes]:
        sent, self._sent = self._sent, []
        return iter(sent)

    def add(
        self, keys: npt.NDArray[Any], records: npt.NDArray[Any], *, is_late: bool = False
    ) -> None:
        for stack, record in zip(keys.tolist(), records, strict=True):
            assert abi.kernel_frames(record).tolist() == [_KERNEL_FRAME]
            user = abi.user_frames(record).tolist()
            self.given.append((stack, user, StopReason(int(record["end"])), is_late))

    def copy(self, stack: int = 7, pages: int = abi.STACK_COPY_PAGES) -> None:
        """Has a stack sent that met the code at its leaf, and was walked on to a wrong caller."""
        row = np.zeros(1, abi.STACK_COPY_DTYPE)
        row["stack"], row["depth"], row["pages"] = stack, 1, pages
        row["instruction_pointer"], row["stack_pointer"] = _LEAF, _STACK
        row["is_exact"] = row["has_frame_pointer"] = 1
        memory = bytearray(abi.STACK_COPY_PAGES * abi.STACK_PAGE_BYTES)
        at = _STACK % abi.STACK_PAGE_BYTES
        for offset, word in ((24, _CALLER), (56, _CALLER), (88, _START)):
            struct.pack_into("<Q", memory, at + offset, word)
        row["memory"] = np.void(bytes(memory))
        record = row["record"]
        record["tgid"], record["image"] = _PID, _IMAGE
        record["kernel_depth"], record["user_depth"] = 1, 2
        record["end"] = StopReason.NO_FRAME_POINTER
        record["frames"][0, :3] = _KERNEL_FRAME, _LEAF, _GUESS
        self._sent.append(row.tobytes())
        self.late.take()


_WHOLE = (7, [_LEAF, _CALLER, _CALLER, _START], StopReason.ROOTED_BY_TABLE, True)
_EARLY = (7, [_LEAF, _GUESS], StopReason.NO_TABLE_YET, False)
_CUT = (7, [_LEAF, _GUESS], StopReason.NO_FRAME_POINTER, True)


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has each poll look."""
    monkeypatch.setattr(late_walks, "_LOOK_INTERVAL_NS", 0)


@pytest.fixture
def recording(table: UnwindTable) -> Iterator[_Recording]:
    made = _Recording(table)
    yield made
    made.processes.memory.close()


def test_a_stack_is_given_at_once_and_again_when_its_table_has_come(
    recording: _Recording,
) -> None:
    recording.map_code()
    recording.copy()
    recording.late.poll()
    assert recording.given == [_EARLY]
    assert recording.late.used_images() == {recording.image.index}
    recording.tables.is_there = True
    recording.late.poll()
    assert recording.given == [_EARLY, _WHOLE]
    assert (recording.late.complete, recording.late.truncated) == (1, 0)
    assert not recording.late.used_images()


def test_mappings_that_come_later_are_used(recording: _Recording) -> None:
    recording.tables.is_there = True
    recording.copy()
    recording.late.poll()
    assert recording.given == [_EARLY]
    recording.map_code()
    recording.late.poll()
    assert recording.given == [_EARLY, _WHOLE]


def test_a_table_that_comes_after_the_end_is_waited_for(recording: _Recording) -> None:
    recording.map_code()
    recording.copy()
    recording.tables.comes_at_last = True
    recording.late.finish()
    assert recording.given == [_EARLY, _WHOLE]


def test_without_a_table_a_stack_is_as_the_kernel_half_walked_it(recording: _Recording) -> None:
    recording.map_code()
    recording.copy()
    recording.late.finish()
    assert recording.given == [_EARLY, _CUT]
    assert (recording.late.complete, recording.late.truncated) == (0, 1)


def test_a_process_of_which_nothing_is_known_is_not_waited_for(recording: _Recording) -> None:
    recording.copy()
    recording.late.finish()
    assert recording.given == [_EARLY, _CUT]


def test_memory_that_could_not_be_copied_ends_the_walk(recording: _Recording) -> None:
    recording.map_code()
    recording.tables.is_there = True
    recording.copy(pages=0)
    recording.late.finish()
    assert recording.given == [_EARLY, _CUT]


def test_copies_are_bounded(recording: _Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(late_walks, "_MAX_KEPT_BYTES", 200_000)
    recording.copy(1)
    recording.copy(2)
    assert recording.late.losses == {LossKind.STACK_COPIES_FULL: 1}
    assert [(stack, end) for stack, _, end, _ in recording.given] == [
        (1, StopReason.NO_TABLE_YET),
        (2, StopReason.NO_FRAME_POINTER),
    ]


def test_nothing_is_kept_of_those_that_are_done_while_others_wait(
    recording: _Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(late_walks, "_FORGET_NS", 0)
    recording.map_code()
    recording.tables.is_there = True
    other = recording.processes.image(_PID + 1, _IMAGE)
    recording.late._kept_bytes[other.index] = 1  # as of a stack that waits all day
    recording.copy()
    recording.late.poll()
    assert recording.late.complete == 1
    assert recording.late._kept_bytes == {other.index: 1}
    assert not recording.late._walker._walkers


def test_some_are_walked_at_a_time(recording: _Recording) -> None:
    recording.map_code()
    recording.tables.is_there = True
    for stack in range(3 * late_walks._MOST_WALKED):
        recording.copy(stack, pages=1)
    recording.late.poll()
    assert recording.late.complete == late_walks._MOST_WALKED
    recording.late.poll()
    recording.late.poll()
    assert recording.late.complete == 3 * late_walks._MOST_WALKED
    assert not recording.late.used_images()


def test_a_stack_that_could_not_be_read_is_not_counted_as_one_without_a_table(
    recording: _Recording,
) -> None:
    recording.map_code()
    recording.copy(pages=0)
    recording.copy(8)
    recording.late.finish()
    assert [stack for stack, *_, is_late in recording.given if is_late] == [7, 8]
    assert (recording.late.complete, recording.late.truncated) == (0, 1)
