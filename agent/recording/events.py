# SPDX-License-Identifier: Apache-2.0
"""Takes the ring buffer's events in, each to whom it concerns."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from aiflame.agent.kernel import abi
from aiflame.agent.kernel.ringbuf import RingBuffer
from aiflame.agent.launches.calls import ApiCalls
from aiflame.agent.processes.table import ProcessTable
from aiflame.agent.recording.samples import Samples
from aiflame.agent.recording.thread_times import ThreadTimes

# PROCESS_EVENT_DTYPE and the beginning of EXEC_EVENT_DTYPE: a host may have hundreds a second, and
# reading fields of a numpy row takes ten times as long.
_PROCESS = struct.Struct("<IIIIQQQ16s")
_BECOMES = struct.Struct("<IIQI4x")
# Of THREAD_EVENT_DTYPE what comes first, and last.
_THREAD = struct.Struct("<IIIIQQ")
_THREAD_NAME = struct.Struct("<Q16s")


class KeepsProcesses(Protocol):
    """Whoever keeps something in the kernel for each process."""

    def forget(self, pid: int) -> None:
        """Gives up what is kept for a process that has ended."""


class Events:
    """All events of a recording.

    Args:
        ring: Where they come from.
        table: Is told of processes and threads.
        samples: Takes long waits.
        thread_times: Is told when threads end.
        keepers: Are told when a process has ended.
        calls: Takes calls of device APIs.
        follow_mappings: Is called when the mappings of processes may have been read, before
            anything later of them is told.
        take_sample: Takes the stack, thread and time of samples of which that is asked.
        take_bell: Takes the pid and image of a process whose helper has something to tell, or had
            so many kernel times that nobody has taken.
        take_left_out_exec: Takes the pid and image of a process that is left out, and when it has
            become another program.

    Attributes:
        details_after_ns: As `Chances` has it.
    """

    def __init__(
        self,
        ring: RingBuffer,
        table: ProcessTable,
        samples: Samples,
        thread_times: ThreadTimes,
        keepers: Sequence[KeepsProcesses],
        calls: ApiCalls,
        follow_mappings: Callable[[], None],
        take_sample: Callable[[int, int, int], None],
        take_bell: Callable[[int, int, int], None],
        take_left_out_exec: Callable[[int, int, int], None],
    ) -> None:
        self._ring = ring
        self._table = table
        self._samples = samples
        self._thread_times = thread_times
        self._keepers = keepers
        self._calls = calls
        self._follow_mappings = follow_mappings
        self._take_sample = take_sample
        self._take_bell = take_bell
        self._take_left_out_exec = take_left_out_exec
        self.details_after_ns = 0

    def take(self) -> bool:
        """Takes in what the ring buffer holds; returns whether the kernel asks to be drained."""
        is_pressed = False
        payloads = [*self._ring.records()]
        waits: list[bytes] = []
        self._table.expect_ends(_current_since(payloads))
        for payload in payloads:
            kind = int.from_bytes(payload[:4], "little")
            if kind == abi.EventType.PROCESS_SEEN:
                _, pid, parent_pid, _, image, ns, cgroup_id, comm = _PROCESS.unpack(payload)
                self._table.seen(pid, image, parent_pid, _text(comm), ns, cgroup_id)
                self._follow_mappings()
            elif kind == abi.EventType.EXEC:
                _, pid, image, size = _BECOMES.unpack_from(payload)
                arguments = payload[_BECOMES.size : _BECOMES.size + size]
                # What fills the room may have been cut. Without a NUL at its end, it is a title
                # that the program gave itself, and that goes on elsewhere.
                is_whole = size < abi.ARGUMENTS_BYTES - 1 and arguments.endswith(b"\0")
                self._table.has_become(pid, image, arguments, is_whole=is_whole)
            elif kind == abi.EventType.PROCESS_EXIT:
                _, pid, _, _, image, ns, _, _ = _PROCESS.unpack(payload)
                self._table.exited(pid, image, ns)
                for keeper in self._keepers:
                    keeper.forget(pid)
            elif kind == abi.EventType.THREAD_EXIT:
                self._thread_ended(payload)
            elif kind == abi.EventType.WAIT:
                waits.append(payload)
            elif kind == abi.EventType.SAMPLE:
                event = np.frombuffer(payload, abi.SAMPLE_EVENT_DTYPE, 1)[0]
                self._take_sample(int(event["stack"]), int(event["tid"]), int(event["ns"]))
            elif kind == abi.EventType.BELL:
                event = np.frombuffer(payload, abi.BELL_EVENT_DTYPE, 1)[0]
                pid, image = int(event["tgid"]), int(event["image"])
                self._take_bell(pid, image, int(event["kernel_times"]))
            elif kind == abi.EventType.LEFT_OUT_EXEC:
                event = np.frombuffer(payload, abi.PROCESS_EVENT_DTYPE, 1)[0]
                pid, image = int(event["tgid"]), int(event["image"])
                for keeper in self._keepers:  # its exit may not be told
                    keeper.forget(pid)
                self._take_left_out_exec(pid, image, int(event["ns"]))
            elif kind in (abi.EventType.CALL, abi.EventType.KERNEL_NAMED):
                self._calls.take_event(kind, payload)
            elif kind == abi.EventType.DRAIN:
                is_pressed = True
        if waits:
            self._samples.add_waits(np.frombuffer(b"".join(waits), abi.WAIT_EVENT_DTYPE))
        self._table.expect_ends({})
        return is_pressed

    def _thread_ended(self, event: bytes) -> None:
        table = self._table
        _, tgid, tid, parent_tgid, number, ns = _THREAD.unpack_from(event)
        cgroup_id, comm = _THREAD_NAME.unpack_from(event, len(event) - _THREAD_NAME.size)
        name = _text(comm)
        self._thread_times.end(event)
        image = table.known(tgid, number)
        if image is None and ns - number < self.details_after_ns:
            if tid != tgid:
                name = table.name_told(tgid, number) or name
            table.join(tgid, number, parent_tgid, name, cgroup_id)
            return
        if image is None:
            name_of_all = name if tid == tgid else ""
            image = table.image(tgid, number, parent_tgid, name_of_all, cgroup_id)
        if not image.is_joined:
            thread = table.thread(image, tid)
            table.rename(thread, name)
            table.thread_ended(thread)


def _text(comm: bytes) -> str:
    return comm.rstrip(b"\0").decode(errors="replace")


def _current_since(payloads: Sequence[bytes]) -> dict[int, int]:
    """Returns, by pid, before which image all are over once events have been taken in.

    Of a process that begins and ends between two looks nothing is to be asked.
    """
    found = {}
    for payload in payloads:
        kind = int.from_bytes(payload[:4], "little")
        if kind == abi.EventType.PROCESS_EXIT:
            _, pid, _, _, image, *_ = _PROCESS.unpack(payload)
            found[pid] = image + 1
        elif kind == abi.EventType.EXEC:
            _, pid, image, _ = _BECOMES.unpack_from(payload)
            found[pid] = image
    return found
