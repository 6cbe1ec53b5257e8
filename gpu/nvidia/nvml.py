# SPDX-License-Identifier: Apache-2.0
"""The process that asks NVML how busy devices are, and how much of their memory is in use.

`python -m aiflame.gpu.nvidia.nvml SINCE_NS EVERY_NS` says so in lines of JSON, each of one device
(`aiflame.gpu.nvidia.readings` reads them), until its standard input ends; then once more. It loads
libnvidia-ml.so.1 of this machine, never that of a container: it has the recorder's rights.

A call of NVML may take long, or for ever where a device is off its bus. So each device has a thread
of its own, and whoever listens does not wait.

Instances of devices (MIG) are made and removed while others run, so it is looked again which there
are: of one that is not there any more a line says so, and no more.

What calls return is as NVIDIA documents it (NVML API Reference Guide, "Device Queries").
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

_NS_PER_S = 1_000_000_000
# Of a machine: 16, and seven instances of each at most. Each has a thread.
_MAX_DEVICES = 64
# For a last reading, when the recording ends: a call takes some ms.
_LAST_S = 0.5
# Readings between two looks at which devices there are: a minute, as recordings look for devices.
# It takes a call for each device, and some for each of up to seven instances, of some us.
_LOOK_EVERY = 60

# How busy, and its memory.
_QUESTIONS = 2
# Members of nvmlValue_t by nvmlValueType_t (nvml.h).
_MEMBERS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")

_said = threading.Lock()


def _say(**words: object) -> None:
    with _said:
        sys.stdout.write(json.dumps(words) + "\n")
        sys.stdout.flush()


class _Lost(Exception):
    """There is no device any more. The message says why."""


class _Device:
    """One device, or an instance of one.

    Args:
        nvml: The module `pynvml`.
        handle: Of the device.
        note: Why something may be missing.
        parent: UUID of the device that it is an instance of, "" for a whole one.

    Attributes:
        note, parent: As given.
    """

    def __init__(self, nvml: Any, handle: Any, note: str = "", parent: str = "") -> None:
        self._nvml = nvml
        self._handle = handle
        self.note = note
        self.parent = parent
        self._seen_us = 0  # the time of the last sample, on a clock of NVML's
        self._never: dict[str, str] = {}  # what it does not tell, and why
        self._end = threading.Event()
        self._is_gone = False
        self.words = {
            "uuid": nvml.nvmlDeviceGetUUID(handle),
            "name": nvml.nvmlDeviceGetName(handle),
        }

    def take_note(self, note: str) -> None:
        """Takes why something may be missing from now on: the other may be there by then."""
        if note != self.note:
            self.note, self._never = note, {}

    def end(self, *, is_gone: bool = False) -> None:
        """Has `watch` end: where it is gone, without a word."""
        self._is_gone = is_gone
        self._end.set()

    def watch(self, since_ns: int, every_ns: int) -> None:
        """Says what there is to say, at full seconds since a time, and once more at the end."""
        _say(**self.words)
        begin_ns = time.monotonic_ns()
        is_last = False
        try:
            self._ask(self._busy)  # what was before does not count
            while not is_last and len(self._never) < _QUESTIONS:
                now_ns = time.monotonic_ns()
                next_ns = since_ns + ((now_ns - since_ns) // every_ns + 1) * every_ns
                is_last = self._end.wait((next_ns - now_ns) / _NS_PER_S)
                if self._is_gone:
                    return
                end_ns = time.monotonic_ns()
                busy, busy_why = self._ask(self._busy)
                memory, memory_why = self._ask(self._memory)
                why = "; ".join(filter(None, (busy_why, memory_why)))
                found = {"busy": busy, "memory": memory, "why": why}
                if len(self._never) < _QUESTIONS:
                    _say(**self.words, begin=begin_ns, end=end_ns, **found)
                begin_ns = end_ns
        except _Lost as lost:
            _say(**self.words, why=f"NVML tells no more of it: {lost}", over=True)
        else:
            if len(self._never) == _QUESTIONS:
                _say(**self.words, why="; ".join(self._never.values()), over=True, never=True)

    def _ask(self, question: Any) -> tuple[Any, str]:
        """Returns an answer, None for none, and why there is none.

        Raises:
            _Lost: There is no device any more.
        """
        name = question.__name__
        if name in self._never:
            return None, self._never[name]
        nvml = self._nvml
        try:
            return question(), ""
        except nvml.NVMLError as error:
            if error.value in (nvml.NVML_ERROR_GPU_IS_LOST, nvml.NVML_ERROR_RESET_REQUIRED):
                raise _Lost(str(error)) from error
            what = "how busy it is" if name == "_busy" else "its memory"
            note = f"; {self.note}" if self.note else ""
            why = f"NVML does not tell {what} ({error}{note})"
            if error.value in (nvml.NVML_ERROR_NOT_SUPPORTED, nvml.NVML_ERROR_FUNCTION_NOT_FOUND):
                self._never[name] = why
            return None, why

    def _busy(self) -> int:
        """Returns for how much of the time since last any kernel ran, in permille.

        NVML keeps a sample of each sixth of a second or second, by device, for some seconds: so
        none is lost between two calls. Where it has no new one, its last one counts.
        """
        nvml = self._nvml
        try:
            kind, found = nvml.nvmlDeviceGetSamples(
                self._handle, nvml.NVML_GPU_UTILIZATION_SAMPLES, self._seen_us
            )
        except nvml.NVMLError as error:
            if error.value == nvml.NVML_ERROR_GPU_IS_LOST:
                raise
            kind, found = 0, []
        new = [sample for sample in found if sample.timeStamp > self._seen_us]
        is_first, self._seen_us = (
            not self._seen_us,
            max((sample.timeStamp for sample in new), default=self._seen_us),
        )
        if new and not is_first and kind < len(_MEMBERS):
            values = [float(getattr(sample.sampleValue, _MEMBERS[kind])) for sample in new]
            percent = sum(values) / len(values)
        else:
            percent = float(nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu)
        return round(10 * min(max(percent, 0.0), 100.0))

    def _memory(self) -> tuple[int, int]:
        """Returns bytes in use, and all; what the driver keeps for itself is in the latter only."""
        nvml = self._nvml
        try:
            found = nvml.nvmlDeviceGetMemoryInfo(self._handle, version=nvml.nvmlMemory_v2)
        except nvml.NVMLError as error:
            older = (nvml.NVML_ERROR_FUNCTION_NOT_FOUND, nvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH)
            if error.value not in older:
                raise
            found = nvml.nvmlDeviceGetMemoryInfo(self._handle)
        return int(found.used), int(found.total)


class _Asked(NamedTuple):
    device: _Device
    thread: threading.Thread


class _Devices:
    """The devices that there are and their instances, each asked in a thread of its own.

    Args:
        nvml: The module `pynvml`, begun.
        since_ns: As for `_Device.watch`, and so is the next.
        every_ns: Between two readings.
    """

    def __init__(self, nvml: Any, since_ns: int, every_ns: int) -> None:
        self._nvml = nvml
        self._times_ns = since_ns, every_ns
        self._asked: dict[str, _Asked] = {}  # by UUID

    def __len__(self) -> int:
        return len(self._asked)

    def look(self) -> None:
        """Begins to ask those that are new, and asks those no more that are gone.

        Raises:
            NVMLError: NVML tells of none.
        """
        found, whole = _listed(self._nvml)
        there = {device.words["uuid"] for device in found}
        for uuid, asked in [*self._asked.items()]:
            if asked.device.parent in whole and uuid not in there:
                self._let_go(uuid)
        for device in found:
            uuid = device.words["uuid"]
            if uuid in self._asked and uuid in whole:
                self._asked[uuid].device.take_note(device.note)
            elif uuid not in self._asked and len(self._asked) < _MAX_DEVICES:
                thread = threading.Thread(target=device.watch, args=self._times_ns, daemon=True)
                thread.start()
                self._asked[uuid] = _Asked(device, thread)

    def _let_go(self, uuid: str) -> None:
        device, thread = self._asked.pop(uuid)
        device.end(is_gone=True)
        thread.join(_LAST_S)
        if not thread.is_alive():  # in a call that never returns, it is silent
            _say(**device.words, gone=True)

    def look_again(self) -> None:
        """Looks each minute, for good."""
        while True:
            time.sleep(_LOOK_EVERY * self._times_ns[1] / _NS_PER_S)
            with contextlib.suppress(self._nvml.NVMLError, RuntimeError):  # no thread for one
                self.look()

    def finish(self) -> None:
        """Has each say what there is to say once more; waits for those that do it soon."""
        asked = [*self._asked.values()]
        for device, _ in asked:
            device.end()
        until_s = time.monotonic() + _LAST_S
        for _, thread in asked:
            thread.join(max(until_s - time.monotonic(), 0))


def _listed(nvml: Any) -> tuple[list[_Device], set[str]]:
    """Returns the devices and their instances, and of which devices all instances are among them.

    Raises:
        NVMLError: NVML does not tell how many there are.
    """
    found: list[_Device] = []
    whole: set[str] = set()
    for number in range(nvml.nvmlDeviceGetCount()):
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(number)
            device = _Device(nvml, handle)
        except nvml.NVMLError as error:
            _say(why=f"NVML tells nothing of device {number}: {error}")
            continue
        uuid, instances = device.words["uuid"], list[_Device]()
        with contextlib.suppress(nvml.NVMLError):  # it does not tell now
            instances += _instances(nvml, handle, uuid)
            whole.add(uuid)
        device.note = "MIG is on" if instances else ""
        found += [device, *instances]
    return found, whole


def _instances(nvml: Any, handle: Any, parent: str) -> Iterator[_Device]:
    """Yields the instances of a device, where it has some (MIG).

    Raises:
        NVMLError: NVML does not tell.
    """
    try:
        is_on = nvml.nvmlDeviceGetMigMode(handle)[0] == nvml.NVML_DEVICE_MIG_ENABLE
    except nvml.NVMLError as error:
        if error.value in (nvml.NVML_ERROR_NOT_SUPPORTED, nvml.NVML_ERROR_FUNCTION_NOT_FOUND):
            return  # one that cannot have any
        raise
    for number in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle) if is_on else 0):
        try:
            instance = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number)
        except nvml.NVMLError as error:
            if error.value == nvml.NVML_ERROR_NOT_FOUND:  # there may be as many
                continue
            raise
        yield _Device(nvml, instance, "an instance of MIG", parent)


def _begin(since_ns: int, every_ns: int) -> _Devices | None:
    """Begins to ask devices; None where NVML is not to be had, which is said."""
    try:
        import pynvml as nvml
    except ImportError:
        _say(why="how busy it is, and its memory, need: pip install nvidia-ml-py")
        return None
    devices = _Devices(nvml, since_ns, every_ns)
    try:
        nvml.nvmlInit()
        devices.look()
    except nvml.NVMLError as error:
        why = f"NVML does not begin ({error})"
        if error.value == nvml.NVML_ERROR_LIBRARY_NOT_FOUND:
            why = "libnvidia-ml.so.1 is not on this machine; a container's is not loaded"
        _say(why=f"how busy it is, and its memory, are not known: {why}")
        return None
    return devices


def main() -> None:
    """Says what devices tell, until standard input ends."""
    devices = _begin(*map(int, sys.argv[1:3]))
    if not devices:
        return
    threading.Thread(target=devices.look_again, daemon=True).start()
    sys.stdin.read()
    devices.finish()
    # A thread may be in a call that never returns.
    os._exit(0)


if __name__ == "__main__":
    main()
