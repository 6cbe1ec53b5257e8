# SPDX-License-Identifier: Apache-2.0
"""How busy devices are, and their memory, by the second: what the process that asks NVML says."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from aiflame.agent.losses import LossKind
from aiflame.gpu.base import Host

_MODULE = "aiflame.gpu.nvidia.nvml"
_NS_PER_S = 1_000_000_000
# A device that says nothing for so long is given up: a call of NVML takes some ms. To begin it may
# have to wake up eight devices, one after the other, each of which takes a second or two.
_PATIENCE_S, _BEGINNING_S = 5, 30
# What has ended, or was given up, is begun anew after so long, and after twice as long each time: a
# driver may be replaced, and a device reset or partitioned. One that lasted is another first time.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 300, 4 * 3_600
# As many as the process asks.
_MAX_DEVICES = 64
# When the recording ends: it says what it has at once, or not at all.
_LAST_S = 0.6
_MAX_WORDS = 200


@dataclass(frozen=True, slots=True)
class Said:
    """What was said of one device; times are monotonic.

    Attributes:
        uuid: Of the device, or of an instance of one.
        name: Its model.
        is_instance: It is a part of another device.
        begin_ns: Of a reading.
        end_ns: 0 for no reading.
        busy_permille: None for not known.
        memory: Bytes in use and of how many; None for not known.
        why: Why something is not known.
        is_over: No more will be said of it.
        is_silent: And nothing ever was: it does not tell.
    """

    uuid: bytes
    name: str
    is_instance: bool
    begin_ns: int
    end_ns: int
    busy_permille: int | None
    memory: tuple[int, int] | None
    why: str
    is_over: bool
    is_silent: bool


@dataclass(slots=True)
class _Known:
    """A device that something was said of.

    Attributes:
        heard_ns: Until when it is known.
        why: What is not known of it, in words.
        is_over: Nothing more is taken.
        is_silent: Nothing of it is missed.
        missed: Seconds that were counted as missing.
    """

    heard_ns: int
    why: str = ""
    is_over: bool = False
    is_silent: bool = False
    missed: int = 0


class Readings:
    """Has NVML asked in a process of its own, once a second.

    Args:
        host: The recording.
        every_ns: Between two readings.
    """

    def __init__(self, host: Host, every_ns: int = _NS_PER_S) -> None:
        self._host = host
        self._arguments = [str(host.since_ns), str(every_ns)]
        self._lines = host.beside(_MODULE, self._arguments)
        self._began_ns = time.monotonic_ns()
        self._known: dict[bytes, _Known] = {}
        self._why = ""  # of all
        self._has_spoken = False
        self._pause_s = _FIRST_PAUSE_S
        self._is_dumb = False  # it has not answered at all
        self._broken_ns = 0  # since when something has ended or was given up; 0: nothing

    def why(self, device: bytes | None) -> str:
        """Returns what is not known of a device, in words; "" where everything is."""
        known = None if device is None else self._known.get(device)
        return self._why if known is None else known.why

    def take(self) -> list[Said]:
        """Returns what was said since last, of readings those of devices that were not given up."""
        found = self._heard()
        now_ns = time.monotonic_ns()
        self._look(now_ns)
        are_given_up = any(one.is_over and not one.is_silent for one in self._known.values())
        if not (self._lines.is_over() or are_given_up or self._is_dumb):
            self._broken_ns = 0
        elif not self._broken_ns:
            self._broken_ns = now_ns
        elif now_ns - self._broken_ns >= self._pause_s * _NS_PER_S:
            self._begin_anew(now_ns)
        return found

    def _begin_anew(self, now_ns: int) -> None:
        """Has another process ask; what it says of devices is taken again."""
        lasted_ns = self._broken_ns - self._began_ns
        is_first = lasted_ns >= _LONGEST_PAUSE_S * _NS_PER_S
        self._pause_s = _FIRST_PAUSE_S if is_first else min(2 * self._pause_s, _LONGEST_PAUSE_S)
        self._lines.close()
        self._lines = self._host.beside(_MODULE, self._arguments)
        self._began_ns, self._broken_ns, self._has_spoken, self._why = now_ns, 0, False, ""
        self._is_dumb, self._known = False, {}

    def finish(self) -> list[Said]:
        """Returns what is said at last; nothing more is taken then."""
        until_s = time.monotonic() + _LAST_S
        self._lines.finish()
        found = self._heard()
        while not self._lines.is_over() and time.monotonic() < until_s:
            time.sleep(0.005)
            found += self._heard()
        for known in self._known.values():
            self._count_missed(known, time.monotonic_ns())
        return found

    def _heard(self) -> list[Said]:
        return [said for line in self._lines.take() for said in self._said(line)]

    def _said(self, line: bytes) -> Iterator[Said]:
        self._has_spoken = True
        try:
            words = json.loads(line)
            if "uuid" not in words:
                self._why = str(words["why"])[:_MAX_WORDS]
                return
            said = _said_of(words)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            self._host.lose(LossKind.DEVICE_READINGS_MISSED)
            return
        if words.get("gone"):  # an instance that was removed: one like it may be made again
            self._known.pop(said.uuid, None)
            return
        if said.uuid not in self._known and len(self._known) == _MAX_DEVICES:
            return
        known = self._known.setdefault(said.uuid, _Known(said.begin_ns or time.monotonic_ns()))
        if known.is_over:
            return
        known.why, known.is_over, known.is_silent = said.why, said.is_over, said.is_silent
        known.heard_ns = max(known.heard_ns, said.end_ns)
        yield said

    def _look(self, now_ns: int) -> None:
        """Gives up who is silent, and counts what is missed of those who were."""
        if self._lines.is_over() and not self._why:
            self._why = "NVML was asked by a process that has ended"
        elif not self._has_spoken and now_ns - self._began_ns > _BEGINNING_S * _NS_PER_S:
            self._has_spoken = self._is_dumb = True
            self._why = f"NVML has not answered for {_BEGINNING_S} s"
        for known in self._known.values():
            if not known.is_over and self._lines.is_over():
                known.is_over, known.why = True, self._why
            elif not known.is_over and now_ns - known.heard_ns > _PATIENCE_S * _NS_PER_S:
                known.is_over = True
                known.why = f"NVML had not answered for {_PATIENCE_S} s, and is not listened to"
            if known.is_over:
                self._count_missed(known, now_ns)

    def _count_missed(self, known: _Known, now_ns: int) -> None:
        missed = 0 if known.is_silent else (now_ns - known.heard_ns) // _NS_PER_S
        if missed > known.missed:
            self._host.lose(LossKind.DEVICE_READINGS_MISSED, missed - known.missed)
            known.missed = missed


def _said_of(words: dict[str, Any]) -> Said:
    """Returns what a line says.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: It is none of ours.
    """
    kind, _, number = words["uuid"].partition("-")
    begin_ns, end_ns = int(words.get("begin", 0)), int(words.get("end", 0))
    busy, memory = words.get("busy"), words.get("memory")
    used_and_total = None
    if memory is not None:
        used, total = map(int, memory)
        used_and_total = used, total
    return Said(
        uuid.UUID(number).bytes,
        str(words["name"])[:_MAX_WORDS],
        kind == "MIG",
        begin_ns,
        end_ns,
        None if busy is None else int(busy),
        used_and_total,
        str(words.get("why", ""))[:_MAX_WORDS],
        bool(words.get("over", False)),
        bool(words.get("never", False)),
    )
