# SPDX-License-Identifier: Apache-2.0
"""How busy NVIDIA's devices are, and their memory: who asks NVML, and who listens to that.

The NVML is that of tests/standin/nvml.c. No test here has met the real one.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import shutil
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pynvml
import pytest
from aiflame.agent.devices import line_process
from aiflame.agent.devices.line_process import LineProcess
from aiflame.agent.losses import LossKind
from aiflame.agent.model.gpu import Device, Tier
from aiflame.gpu.base import DeviceReading, Interval
from aiflame.gpu.nvidia import machine, nvml, readings
from aiflame.gpu.nvidia.machine import Gpu, Machine
from aiflame.gpu.nvidia.readings import Readings, Said
from aiflame.gpu.nvidia.sampler import NO_HELPER, NvidiaSampler
from helper_memory import Host, Memory
from nvidia_helper import STANDIN, prebuilt
from support import wait_until

_S = 1_000_000_000
_GIB, _MIB = 1 << 30, 1 << 20
# Of the stand-in: as cuda.c has them.
_A = bytes(range(16))
_B = bytes(range(16, 32))
_INSTANCE, _OTHER_INSTANCE = bytes(range(0x80, 0x90)), bytes(range(0x90, 0xA0))
_TOTAL = 80 * _GIB
_PERIOD_NS = 10_000_000


@pytest.fixture(scope="module")
def standin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nvml")
    shutil.copy(prebuilt() / "libnvidia-ml.so.1", folder)
    return folder


class _RealHost(Host):
    """Runs what is to be run beside it."""

    def beside(self, module: str, arguments: Any) -> LineProcess:
        self.process = LineProcess(module, arguments)
        return self.process


@pytest.fixture
def host(standin: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[_RealHost]:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(standin))
    made = _RealHost()
    made.since_ns = time.monotonic_ns()
    yield made
    made.process.close()


def _tell(monkeypatch: pytest.MonkeyPatch, words: str, curve: str = "") -> int:
    """Sets what the stand-in tells; returns when its curve begins."""
    from_ns = time.monotonic_ns()
    words = f"{words} from={from_ns} curve={curve} period={_PERIOD_NS // 1000}"
    monkeypatch.setenv("NVML_STANDIN", words)
    return from_ns


def _pass(monkeypatch: pytest.MonkeyPatch, seconds: int) -> None:
    """Lets time pass, as this process sees it."""
    now_ns = time.monotonic_ns
    monkeypatch.setattr(time, "monotonic_ns", lambda: now_ns() + seconds * _S)


def _await(asked: Readings, holds: Callable[[], bool]) -> None:
    """Takes what comes until something holds."""

    def holds_now() -> bool:
        asked.take()
        return holds()

    wait_until(holds_now, 30)


def _until(asked: Readings, device: bytes, count: int) -> list[Said]:
    """Returns the readings of a device, when there are so many."""
    found: list[Said] = []

    def has_enough() -> bool:
        found.extend(said for said in asked.take() if said.uuid == device and said.end_ns)
        return len(found) >= count

    wait_until(has_enough, 30)
    return found


def test_readings_are_the_curve_of_the_device(
    host: _RealHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    # GIVEN a device that is busy for a fifth of a second, and then for four of five, and half
    from_ns = _tell(monkeypatch, "", "20/80/50")
    asked = Readings(host, every_ns=_S // 4)
    found = [*_until(asked, _A, 10), *asked.finish()]
    # THEN readings follow each other without a gap
    for one, following in itertools.pairwise(found):
        assert following.begin_ns == one.end_ns
    # AND THEN those that are apart from a step have the curve's values
    steady = [one for one in found if _percent(from_ns, one) is not None]
    assert len(steady) >= 5
    for one in steady:
        percent = _percent(from_ns, one) or 0
        assert one.busy_permille == 10 * percent
        assert one.memory == (_GIB + percent * 100 * _MIB, _TOTAL)
    # AND THEN all together have its area
    busy = sum((one.end_ns - one.begin_ns) * (one.busy_permille or 0) / 1000 for one in found)
    lasted_ns = found[-1].end_ns - from_ns
    before_ns = found[0].begin_ns - from_ns
    area = 0.2 * (_S - before_ns) + 0.8 * _S + 0.5 * (lasted_ns - 2 * _S)
    assert busy == pytest.approx(area, rel=0.05)
    assert host.lost == {}
    assert asked.why(_A) == ""


def _percent(from_ns: int, one: Said) -> int | None:
    """Returns the percentage of a curve of 20, 80, and then 50; None near a step."""
    first, last = ((ns - from_ns) / _S for ns in (one.begin_ns, one.end_ns))
    begins = (0, 1, 2, 1000)
    for percent, begin, end in zip((20, 80, 50), begins, begins[1:], strict=False):
        # A crowded machine may take this long from the clock to the call.
        if begin + 0.1 < first and last < end - 0.1:
            return percent
    return None


@pytest.mark.parametrize(
    ("words", "busy", "memory", "why"),
    [
        ("", 400, (_GIB + 4000 * _MIB, _TOTAL), ""),
        # Without samples the last one counts; without the newer structure memory is what is used
        # and reserved.
        ("no-samples", 400, (_GIB + 4000 * _MIB, _TOTAL), ""),
        ("old", 400, (_GIB + 4512 * _MIB, _TOTAL), ""),
        (
            *("no-busy", None, (_GIB + 4000 * _MIB, _TOTAL)),
            "NVML does not tell how busy it is (Not Supported)",
        ),
        ("no-memory", 400, None, "NVML does not tell its memory (Not Supported)"),
    ],
)
def test_what_a_device_does_not_tell_is_said(
    host: _RealHost,
    monkeypatch: pytest.MonkeyPatch,
    words: str,
    busy: int | None,
    memory: tuple[int, int] | None,
    why: str,
) -> None:
    _tell(monkeypatch, words, "40")
    asked = Readings(host, every_ns=_S // 20)
    *_, last = _until(asked, _A, 3)
    assert (last.busy_permille, last.memory) == (busy, memory)
    assert asked.why(_A) == why
    asked.finish()
    assert host.lost == {}


def test_instances_tell_their_memory(host: _RealHost, monkeypatch: pytest.MonkeyPatch) -> None:
    _tell(monkeypatch, "mig devices=2", "40")
    asked = Readings(host, every_ns=_S // 20)
    (*_, last) = _until(asked, _INSTANCE, 2)
    assert (last.name, last.is_instance) == ("Standin A MIG 1g.10gb", True)
    assert (last.busy_permille, last.memory) == (None, (_GIB // 2 + 2000 * _MIB, _TOTAL))
    assert "an instance of MIG" in asked.why(_INSTANCE)
    assert "MIG is on" in asked.why(_A)
    assert asked.why(_B) == ""


def test_instances_that_are_made_and_removed_come_and_go(
    host: _RealHost, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # GIVEN a device that has one of two instances
    there = tmp_path / "instances"

    def put(digits: str) -> None:
        there.with_suffix(".new").write_text(digits)
        there.with_suffix(".new").replace(there)

    put("0")
    _tell(monkeypatch, f"mig instances={there}", "40")
    asked = Readings(host, every_ns=_S // 100)
    assert _until(asked, _INSTANCE, 2)
    # WHEN another one is made in its place THEN it is asked, and the first one no more
    put("1")
    _until(asked, _OTHER_INSTANCE, 2)
    _await(asked, lambda: "an instance of MIG" not in asked.why(_INSTANCE))
    assert "an instance of MIG" in asked.why(_OTHER_INSTANCE)
    # WHEN the first is made again, which has its UUID again
    put("01")
    _until(asked, _INSTANCE, 2)
    # AND NVML does not tell which there are, as it is short of something
    put("?")
    for device in (_INSTANCE, _OTHER_INSTANCE):
        # THEN those that there were are asked as before, past another look
        _until(asked, device, 2 * nvml._LOOK_EVERY)
    assert "MIG is on" in asked.why(_A)
    # WHEN all are gone THEN the device tells how busy it is, once MIG is off
    put("-")
    _await(asked, lambda: "MIG is on" not in asked.why(_A))
    asked.finish()
    assert host.lost == {}


def test_a_device_that_tells_nothing_is_not_missed(
    host: _RealHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    _tell(monkeypatch, "no-busy no-memory")
    asked = Readings(host, every_ns=_S // 20)
    _await(asked, lambda: "its memory" in asked.why(_A))
    assert "how busy it is" in asked.why(_A)
    _pass(monkeypatch, 60)
    assert asked.take() == []
    assert host.lost == {}


def test_a_lost_device_says_so_and_the_others_go_on(
    host: _RealHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    _tell(monkeypatch, "devices=2 lost=300", "40")
    asked = Readings(host, every_ns=_S // 20)
    _await(asked, lambda: "GPU is lost" in asked.why(_B))
    *_, last = _until(asked, _A, 5)
    assert (last.busy_permille, asked.why(_A)) == (400, "")
    # AND THEN what is missed is counted, by the second
    _pass(monkeypatch, 3)
    asked.take()
    assert host.lost[LossKind.DEVICE_READINGS_MISSED] >= 3


def test_a_device_that_was_lost_is_asked_for_again_later(
    host: _RealHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    # GIVEN a device that is lost, as while a driver is replaced
    _tell(monkeypatch, "devices=2 lost=300", "40")
    asked = Readings(host, every_ns=_S // 20)
    _await(asked, lambda: "GPU is lost" in asked.why(_B))
    before = host.process.pid
    # WHEN it is there again, and some minutes have passed
    _tell(monkeypatch, "devices=2", "40")
    _pass(monkeypatch, 400)
    asked.take()
    # THEN another process asks for it
    assert _until(asked, _B, 3)[-1].busy_permille is not None
    assert asked.why(_B) == "" and host.process.pid != before
    asked.finish()
    host.process.close()


def test_a_process_that_asks_and_ends_is_begun_anew_ever_more_seldom(
    host: _RealHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    _tell(monkeypatch, "", "40")
    asked = Readings(host, every_ns=_S // 20)
    begun = []
    for _ in range(60):
        host.process.close()
        begun.append(host.process)
        asked.take()
        _pass(monkeypatch, 600)
        asked.take()
    host.process.close()
    # Ten hours: after 5 minutes, 10, 20, 40, 80, 160, and 240 then.
    assert 5 <= len({*map(id, begun)}) <= 8


def test_a_process_that_never_answers_is_begun_anew(
    host: _RealHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    _tell(monkeypatch, "", "40")
    asked = Readings(host, every_ns=_S // 20)
    host.process.close()
    begun = host.process
    monkeypatch.setattr(host.process, "is_over", lambda: False)
    _pass(monkeypatch, 31)
    asked.take()
    assert "has not answered" in asked.why(None)
    _pass(monkeypatch, 301)
    asked.take()
    assert host.process is not begun
    assert _until(asked, _A, 2)
    host.process.close()


def test_a_call_that_never_returns_costs_its_device_alone(
    host: _RealHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readings, "_PATIENCE_S", 1)
    _tell(monkeypatch, "devices=2 hang=300", "40")
    asked = Readings(host, every_ns=_S // 20)
    _await(asked, lambda: asked.why(_B) != "")
    assert "had not answered for 1 s" in asked.why(_B)
    assert _until(asked, _A, 5)[-1].busy_permille == 400
    # AND THEN the recording ends in time, and so does the process
    begin_s = time.monotonic()
    pid = host.process.pid
    asked.finish()
    host.process.close()
    assert time.monotonic() - begin_s < 5
    assert pid is not None and not Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize(
    ("words", "library", "why"),
    [
        ("init=9", True, "NVML does not begin (Driver Not Loaded)"),
        ("", False, "libnvidia-ml.so.1 is not on this machine; a container's is not loaded"),
    ],
)
def test_a_machine_without_nvml_says_so(
    host: _RealHost,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    words: str,
    library: bool,
    why: str,
) -> None:
    _tell(monkeypatch, words)
    if not library:
        monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    asked = Readings(host)
    _await(asked, host.process.is_over)
    assert asked.why(_A) == f"how busy it is, and its memory, are not known: {why}"
    assert asked.finish() == []
    assert host.lost == {}


# What the other side may say


def _line(at_s: float = 1.0, device: bytes = _A, kind: str = "GPU", **more: Any) -> bytes:
    words = {
        "uuid": f"{kind}-{uuid.UUID(bytes=device)}",
        "name": "Standin A",
        "begin": int((at_s - 1) * _S),
        "end": int(at_s * _S),
        "busy": 400,
        "memory": [1, 2],
        "why": "",
    }
    return json.dumps({**words, **more}).encode()


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"{}",
        b"[]",
        b"nonsense",
        b'{"uuid": 7}',
        b'{"uuid": "GPU-7", "name": "x"}',
        _line(busy="a"),
        _line(memory=[1]),
        _line(memory=7),
        _line(end=None),
        b"[" * 4000,
        b"\xff\xfe",
    ],
)
def test_lines_that_are_none_of_ours_are_counted(line: bytes) -> None:
    host = Host()
    asked = Readings(host)
    host.lines.said = [line, _line()]
    assert len(asked.take()) == 1
    assert host.lost[LossKind.DEVICE_READINGS_MISSED] >= 1


def test_no_more_devices_are_taken_than_are_asked() -> None:
    host = Host()
    asked = Readings(host)
    host.lines.said = [_line(device=number.to_bytes(16, "big")) for number in range(100)]
    assert len(asked.take()) == 64


def test_words_are_cut() -> None:
    host = Host()
    asked = Readings(host)
    host.lines.said = [_line(why="y" * 3000, name="n" * 3000)]
    (said,) = asked.take()
    assert (len(said.name), len(asked.why(_A))) == (200, 200)


def test_a_process_that_says_too_much_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # GIVEN a process that says one line which never ends
    module = tmp_path / "loud.py"
    module.write_text("import sys\nwhile True: sys.stdout.write('x' * 1000)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    loud = LineProcess("loud", [])
    wait_until(lambda: not loud.take() and loud.is_over(), 30)
    assert loud.pid is None


def test_a_process_that_cannot_be_started_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **keywords: Any) -> None:
        raise BlockingIOError("no more processes")

    monkeypatch.setattr(line_process.subprocess, "Popen", refuse)
    nobody = LineProcess("aiflame.gpu.nvidia.nvml", [])
    assert nobody.is_over() and nobody.take() == []
    nobody.finish()
    nobody.close()


# What becomes of it in a recording


def _sampler(host: Host, *gpus: Gpu) -> NvidiaSampler:
    return NvidiaSampler(host, Machine("580.65.06", gpus, "", (), ()))  # type: ignore[arg-type]


def test_devices_are_told_apart_by_their_uuids() -> None:
    # GIVEN two devices, of which NVML tells in another order, of one's instance, and of a third
    host = Host()
    sampler = _sampler(host, Gpu("NVIDIA H200", _A), Gpu("NVIDIA L4", _B))
    sampler.drain(Interval(0))
    assert host.arguments == [str(host.since_ns), str(_S)]
    host.lines.said = [
        _line(1.0, _B, busy=10),
        _line(1.0, _A, busy=20),
        _line(1.0, _INSTANCE, "MIG", busy=None),
        _line(1.0, b"c" * 16, busy=None, name="Standin C", why="NVML is tired"),
    ]
    sampler.drain(Interval(1))
    assert host.readings == [
        DeviceReading(1, 0, _S, 10, (1, 2)),
        DeviceReading(0, 0, _S, 20, (1, 2)),
        DeviceReading(2, 0, _S, None, (1, 2)),
    ]
    assert [device.name for device in host.devices] == ["NVIDIA H200", "NVIDIA L4", "Standin C"]
    assert host.devices[0].details == "driver 580.65.06"
    assert host.devices[2].details == "driver 580.65.06; NVML is tired"


def test_an_instance_counts_once_a_helper_has_told_of_it() -> None:
    memory = Memory()
    host = Host(memory)
    sampler = _sampler(host, Gpu("NVIDIA H200", _A))
    memory.hello()
    memory.device(0, _INSTANCE, "NVIDIA H200 MIG 1g.18gb")
    sampler.drain(Interval(0))
    host.lines.said = [_line(2.0, _INSTANCE, "MIG", busy=None)]
    sampler.drain(Interval(1))
    assert host.readings == [DeviceReading(1, _S, 2 * _S, None, (1, 2))]


def test_devices_of_a_container_get_the_names_that_nvml_knows() -> None:
    host = Host()
    sampler = _sampler(host, Gpu("NVIDIA device", None), Gpu("NVIDIA device", None))
    sampler.drain(Interval(0))
    host.lines.said = [_line(1.0, _B, name="NVIDIA L4")]
    host.lines.last = [_line(2.0, _B, name="NVIDIA L4")]
    sampler.drain(Interval(1))
    sampler.stop()
    assert [device.name for device in host.devices] == ["NVIDIA L4", "NVIDIA device"]
    assert host.readings == [
        DeviceReading(0, 0, _S, 400, (1, 2)),
        DeviceReading(0, _S, 2 * _S, 400, (1, 2)),
    ]


def test_devices_whose_driver_comes_late_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    # GIVEN an agent that began before the driver was loaded, and one device that a helper tells of
    memory = Memory()
    host = Host(memory)
    sampler = _sampler(host)
    there = Machine("580.65.06", (Gpu("NVIDIA H200", _A), Gpu("NVIDIA L4", _B)), "", (), ())
    monkeypatch.setattr(machine, "look", lambda: there)
    sampler.drain(Interval(0))
    assert host.arguments == [] and host.devices == []
    memory.hello()
    memory.device(0, _B, "NVIDIA L4")
    sampler.drain(Interval(59))
    # WHEN a minute is over
    sampler.drain(Interval(60))
    # THEN NVML is asked, and each device is there once
    assert host.arguments == [str(host.since_ns), str(_S)]
    assert [device.name for device in host.devices] == ["NVIDIA L4", "NVIDIA H200"]
    # AND that is that.
    sampler.drain(Interval(200))
    assert len(host.devices) == 2


def test_nothing_is_asked_where_there_is_no_device() -> None:
    host = Host()
    sampler = _sampler(host)
    sampler.drain(Interval(0))
    sampler.stop()
    assert host.arguments == []


def test_a_silent_nvml_is_said_of_each_device(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host()
    sampler = _sampler(host, Gpu("NVIDIA H200", _A))
    sampler.drain(Interval(0))
    _pass(monkeypatch, 31)
    sampler.drain(Interval(31))
    assert host.devices == [
        Device(
            *("nvidia", "NVIDIA H200", Tier.LAUNCHES, NO_HELPER, 0),
            "driver 580.65.06; NVML has not answered for 30 s",
        )
    ]


# The stand-in's ABI


def test_structures_of_the_standin_are_those_of_nvidia_ml_py(tmp_path: Path) -> None:
    pairs = {
        "struct nvml_utilization": (pynvml.c_nvmlUtilization_t, "gpu memory"),
        "struct nvml_memory": (pynvml.c_nvmlMemory_t, "total free used"),
        "struct nvml_memory_v2": (pynvml.c_nvmlMemory_v2_t, "version total reserved free used"),
        "struct nvml_sample": (pynvml.c_nvmlSample_t, "time_us value"),
        "union nvml_value": (pynvml.c_nvmlValue_t, "d ui ul ull sll si us"),
    }
    checks = [f"_Static_assert(NVML_MEMORY_V2 == {pynvml.nvmlMemory_v2}u);"]
    for name, (declared, fields) in pairs.items():
        checks.append(f"_Static_assert(sizeof({name}) == {ctypes.sizeof(declared)});")
        for ours, (theirs, _) in zip(fields.split(), declared._fields_, strict=True):
            offset = getattr(declared, theirs).offset
            checks.append(f"_Static_assert(offsetof({name}, {ours}) == {offset});")
    for ours, theirs in {
        "NVML_SUCCESS": "NVML_SUCCESS",
        "NVML_INVALID_ARGUMENT": "NVML_ERROR_INVALID_ARGUMENT",
        "NVML_NOT_SUPPORTED": "NVML_ERROR_NOT_SUPPORTED",
        "NVML_NOT_FOUND": "NVML_ERROR_NOT_FOUND",
        "NVML_DRIVER_NOT_LOADED": "NVML_ERROR_DRIVER_NOT_LOADED",
        "NVML_FUNCTION_NOT_FOUND": "NVML_ERROR_FUNCTION_NOT_FOUND",
        "NVML_GPU_IS_LOST": "NVML_ERROR_GPU_IS_LOST",
        "NVML_VERSION_MISMATCH": "NVML_ERROR_ARGUMENT_VERSION_MISMATCH",
        "NVML_UNKNOWN": "NVML_ERROR_UNKNOWN",
        "NVML_GPU_UTILIZATION_SAMPLES": "NVML_GPU_UTILIZATION_SAMPLES",
        "NVML_VALUE_UNSIGNED_INT": "NVML_VALUE_TYPE_UNSIGNED_INT",
    }.items():
        checks.append(f"_Static_assert({ours} == {getattr(pynvml, theirs)});")
    text = '#include <stddef.h>\n#include "nvml.h"\n' + "\n".join(checks) + "\n"
    (tmp_path / "check.c").write_text(text)
    command = ["gcc", "-std=gnu2x", "-fsyntax-only", "-I", STANDIN, tmp_path / "check.c"]
    subprocess.run(command, check=True)
