# SPDX-License-Identifier: Apache-2.0
"""NVIDIA's devices: what a machine tells of them, and what helpers in a recording do."""

from __future__ import annotations

import gc
import struct
import sys
from pathlib import Path
from typing import Any, cast

import pytest
from aiflame.agent.doctor import gpu as doctor_gpu
from aiflame.agent.doctor.base import Context, Status
from aiflame.agent.losses import LossKind
from aiflame.agent.model.gpu import Device, StallReason, Tier
from aiflame.gpu.base import Interval, Wanted
from aiflame.gpu.families import FAMILIES
from aiflame.gpu.nvidia import machine
from aiflame.gpu.nvidia.family import NvidiaFamily
from aiflame.gpu.nvidia.machine import UNRESTRICT, look
from aiflame.gpu.nvidia.sampler import NO_HELPER, NvidiaSampler
from aiflame.gpu.protocol import VERSION, HelperError
from aiflame.gpu.stalls import StallCategory, category_of
from aiflame.gpu.stalls.nvidia import is_part_of_another
from helper_memory import Host, Memory

_CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}  Sat Aug 19 01:15:15 UTC 2023\n"
_OPEN = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {}  Release Build"
    "  (dvs-builder@U22)  Tue Aug  5\nGCC version:  gcc version 12.3.0\n"
)
_INFORMATION = """Model: \t\t {}
IRQ:   \t\t 143
GPU UUID: \t {}
Video BIOS: \t 96.00.a5.00.01
Bus Type: \t PCIe
Bus Location: \t 0000:{:02x}:00.0
Device Minor: \t {}
"""
_UUID = "GPU-75757575-7575-7575-7575-757575757575"  # sixteen times "u"


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    return tmp_path / "proc"


def _drive(
    proc: Path,
    version: str = "580.65.06",
    models: tuple[str, ...] = ("NVIDIA H200",),
    params: str = "RmProfilingAdminOnly: 0\n",
    form: str = _OPEN,
) -> None:
    proc.mkdir()
    (proc / "version").write_text(form.format(version))
    (proc / "params").write_text(f"ResmanDebugLevel: 4294967295\n{params}TegraGpuPgMask: 0\n")
    for number, model in enumerate(models):
        bus = proc / "gpus" / f"0000:{number + 1:02x}:00.0"
        bus.mkdir(parents=True)
        uuid = _UUID if not number else "GPU-????????-????-????-????-????????????"
        text = _INFORMATION.format(model, uuid, number + 1, number)
        (bus / "information").write_text(text)


def _look(proc: Path) -> machine.Machine:
    return look(proc, proc.parent / "dev", proc.parent / "mps")


@pytest.mark.parametrize("form", [_OPEN, _CLOSED])
def test_a_machine_tells_its_driver_and_devices(proc: Path, form: str) -> None:
    _drive(proc, models=("NVIDIA H200", "NVIDIA L4"), form=form)
    found = _look(proc)
    assert (found.driver, found.why, found.limits, found.notes) == ("580.65.06", "", (), ())
    assert [(gpu.model, gpu.uuid) for gpu in found.gpus] == [
        ("NVIDIA H200", b"u" * 16),
        ("NVIDIA L4", None),  # never initialised
    ]


def test_a_machine_without_a_driver_says_so(proc: Path) -> None:
    found = _look(proc)
    assert (found.driver, found.gpus) == ("", ())
    assert found.why == f"no driver of NVIDIA's is loaded ({proc}/version)"
    (proc.parent / "dev").mkdir()
    (proc.parent / "dev" / "dxg").touch()
    assert "WSL" in _look(proc).why
    _drive(proc, models=())
    assert _look(proc).why == "NVIDIA's driver 580.65.06 is loaded, but has no device"


def test_devices_of_a_container_are_counted_by_their_nodes(proc: Path) -> None:
    dev = proc.parent / "dev"
    dev.mkdir()
    for name in ("nvidiactl", "nvidia0", "nvidia1", "nvidia-uvm", "nvidia-modeset"):
        (dev / name).touch()
    assert len(_look(proc).gpus) == 2


@pytest.mark.parametrize(
    ("version", "tier", "words"),
    [
        ("470.82.01", Tier.LAUNCHES, "driver 470.82.01 is older than CUDA 12"),
        ("525.60.12", Tier.LAUNCHES, "older than CUDA 12"),
        ("525.60.13", Tier.TIMES, "cannot sample stalls beside kernel times"),
        ("570.86.10", Tier.TIMES, "cannot sample stalls beside kernel times"),
        ("570.124.06", None, ""),
        ("610.1", None, ""),
    ],
)
def test_an_old_driver_is_a_limit(proc: Path, version: str, tier: Tier | None, words: str) -> None:
    _drive(proc, version)
    limits = _look(proc).limits
    assert [limit.tier for limit in limits] == ([] if tier is None else [tier])
    assert all(words in limit.why and "or later" in limit.cure for limit in limits)


@pytest.mark.parametrize(
    ("version", "capability"), [("570.124.06", "CAP_PERFMON"), ("535.104.05", "CAP_SYS_ADMIN")]
)
def test_restricted_counters_name_whose_right_it_is(
    proc: Path, version: str, capability: str
) -> None:
    _drive(proc, version, params="RmProfilingAdminOnly: 1\n")
    (limit,) = (limit for limit in _look(proc).limits if "RmProfiling" in limit.why)
    assert limit.tier is Tier.TIMES
    assert f"processes with {capability}" in limit.why
    assert "the recorded ones, not aiflame" in limit.why
    assert limit.cure == f"{UNRESTRICT}; or give the workload {capability}"


@pytest.mark.parametrize(
    ("model", "is_virtual"),
    [
        ("GRID T4-16Q", True),
        ("NVIDIA A100-40C", True),
        ("NVIDIA A16-2B", True),
        ("NVIDIA H100 80GB HBM3", False),
        ("NVIDIA A100-SXM4-80GB", False),
        ("NVIDIA GeForce RTX 4090", False),
    ],
)
def test_a_virtual_device_is_a_limit(proc: Path, model: str, is_virtual: bool) -> None:
    _drive(proc, models=(model,))
    assert bool(_look(proc).limits) == is_virtual


def test_instances_and_mps_are_notes(proc: Path) -> None:
    _drive(proc)
    (proc / "capabilities" / "gpu0" / "mig" / "gi1").mkdir(parents=True)
    (proc.parent / "mps").touch()
    notes = _look(proc).notes
    assert len(notes) == 2
    assert notes[0].startswith("MIG is on")
    assert "nvidia-smi mig -cci" in notes[0]
    assert notes[1].startswith("MPS is on")
    assert "nvidia-cuda-mps-control" in notes[1]


@pytest.mark.parametrize("junk", [b"", b"\xff" * 100, b"NVRM version: \n", b"x" * (1 << 20)])
def test_a_driver_that_says_what_it_likes_is_no_error(proc: Path, junk: bytes) -> None:
    proc.mkdir()
    for name in ("version", "params"):
        (proc / name).write_bytes(junk)
    (proc / "gpus" / "a").mkdir(parents=True)
    (proc / "gpus" / "a" / "information").write_bytes(junk)
    found = _look(proc)
    assert found.driver == ""
    assert [gpu.model for gpu in found.gpus] == ["NVIDIA device"]


@pytest.fixture
def restricted(proc: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    _drive(proc, params="RmProfilingAdminOnly: 1\n")
    monkeypatch.setattr(machine, "look", lambda: _look(proc))
    return proc


def test_the_family_tells_the_same_to_doctor(restricted: Path) -> None:
    finding = NvidiaFamily().detect()
    (device,) = finding.devices
    assert (device.name, device.tier) == ("NVIDIA H200", Tier.LAUNCHES)
    assert device.limit.startswith(NO_HELPER)
    assert "RmProfilingAdminOnly: 1" in device.limit
    assert device.details == "driver 580.65.06"
    assert finding.cure.startswith(UNRESTRICT)
    row = doctor_gpu.family("nvidia")(Context())
    assert (row.status, row.cure) == (Status.WARN, finding.cure)
    assert f"NVIDIA H200: tier 0, launches; {NO_HELPER}" in row.text
    assert "nvidia" in FAMILIES


def _sampler(proc: Path, host: Host) -> NvidiaSampler:
    return NvidiaSampler(cast(Any, host), _look(proc))


def _memory(why: str = "", tier: int = 2, uuid: bytes = b"u" * 16) -> Memory:
    memory = Memory(process=5)
    memory.hello(tier, why)
    memory.device(0, uuid)
    memory.context(1)
    memory.name(1, "scale")
    memory.name(2, "smsp__pcsamp_warps_issue_stalled_barrier")
    memory.name(3, "smsp__pcsamp_warps_issue_stalled_barrier_not_issued")
    memory.reasons(1, {0: 2, 1: 3})
    return memory


_LATER = 1 << 62


@pytest.mark.parametrize("lists", [True, False])
def test_code_is_kept_where_kernels_will_be_listed(proc: Path, lists: bool) -> None:
    _drive(proc)
    memory = _memory()
    memory.code(1, b"code")
    host = Host(memory)
    host.wanted = Wanted(lists=lists)
    sampler = _sampler(proc, host)
    memory.stalls(_LATER, _LATER, (1, 0, 0, 1, 0, 0, 40))
    sampler.drain(Interval(0))
    (sample,) = host.samples
    assert sampler.code(sample.code) == (b"code" if lists else b"")


def test_a_helper_fills_the_devices_row(proc: Path) -> None:
    _drive(proc)
    memory = _memory()
    host = Host(memory)
    sampler = _sampler(proc, host)
    sampler.drain(Interval(0))
    memory.stalls(_LATER, _LATER, (1, 0, 0, 1, 0, 0, 40), (1, 0, 0, 1, 0, 1, 10))
    sampler.drain(Interval(1))
    assert host.devices == [
        Device(
            "nvidia",
            "NVIDIA H200",
            Tier.STALLS,
            "",
            0,
            "driver 580.65.06; sm_90; 132 multiprocessors; CUDA 12.9; CUPTI 28 /x/libcupti.so;"
            " a sample each 1,048,576 cycles; 25.0 % of samples while nothing was issued",
        )
    ]
    assert [sample.count for sample in host.samples] == [40]
    assert len(memory.told) == 1


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (HelperError.TAKEN, "another profiler has CUPTI (cuptiSubscribe, Nsight): end it"),
        (
            HelperError.RIGHTS,
            f"the process may not sample stalls (cuptiSubscribe, Nsight): {UNRESTRICT}",
        ),
        (HelperError.NO_LIBRARY, "libcupti is neither mapped nor installed"),
        (HelperError.TOO_OLD, "libcupti is too old"),
        (HelperError.UNSUPPORTED, "does not sample stalls (cuptiSubscribe, Nsight)"),
    ],
)
def test_what_keeps_a_process_from_a_tier_is_told(
    proc: Path, error: HelperError, words: str
) -> None:
    _drive(proc)
    memory = _memory("why", tier=1)
    memory.error(error, -35, "cuptiSubscribe", "Nsight")
    host = Host(memory)
    _sampler(proc, host).drain(Interval(0))
    (device,) = host.devices
    assert device.tier is Tier.TIMES
    assert device.limit.startswith("why; ")
    assert words in device.limit


def test_what_keeps_a_process_from_telling_of_devices_is_told(proc: Path) -> None:
    # GIVEN a helper that came late, and could not subscribe: it has met no context
    _drive(proc)
    memory = Memory(process=5)
    memory.hello(0, "another profiler uses CUPTI: nsys")
    memory.error(HelperError.TAKEN, 39, "cuptiSubscribe", "nsys")
    host = Host(memory)
    _sampler(proc, host).drain(Interval(0))
    (device,) = host.devices
    assert device.tier is Tier.LAUNCHES
    assert device.limit == (
        "another profiler uses CUPTI: nsys;"
        " another profiler has CUPTI (cuptiSubscribe, nsys): end it"
    )


def test_what_keeps_a_process_from_a_device_that_is_not_seen_here_is_told(proc: Path) -> None:
    # GIVEN no driver that this machine tells of, and a process that runs on a device all the same
    memory = Memory(process=5)
    memory.hello(0, "there is no CUDA driver in this process, or not yet")
    host = Host(memory)
    sampler = _sampler(proc, host)
    sampler.drain(Interval(0))
    assert host.devices == []
    memory.hello(0, "another profiler uses CUPTI: nsys")
    memory.error(HelperError.TAKEN, 39, "cuptiSubscribe", "nsys")
    sampler.drain(Interval(1))
    # THEN that is told, as of any device
    (device,) = host.devices
    assert device.name == "NVIDIA device"
    assert device.reached == (
        "tier 0, launches; another profiler uses CUPTI: nsys;"
        " another profiler has CUPTI (cuptiSubscribe, nsys): end it"
    )
    # AND it is the device of which is told later
    memory.device(0, name="NVIDIA H200")
    memory.context()
    memory.hello(2)
    sampler.drain(Interval(2))
    (device,) = host.devices
    assert (device.name, device.tier) == ("NVIDIA H200", Tier.STALLS)


def test_a_tier_that_is_not_the_highest_has_a_reason() -> None:
    # GIVEN a family that tells none
    for tier in (Tier.LAUNCHES, Tier.TIMES):
        device = Device("toy", "Toy 1", tier, "", 0)
        assert device.reached.endswith("; what is missing for the next tier was not told")
    assert "missing" not in Device("toy", "Toy 1", Tier.STALLS, "", 0).reached


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (33, "(vGPU) samples no stalls here (cuptiPCSamplingEnable): set the plugin parameter"),
        (41, "confidential computing keeps profilers out (cuptiPCSamplingEnable): leave it off"),
        (42, "(CMP) samples no stalls (cuptiPCSamplingEnable): use another model"),
        (43, "share this instance's compute (cuptiPCSamplingEnable): make one compute instance"),
        (44, "(SLI) sample no stalls (cuptiPCSamplingEnable): turn SLI off"),
        (45, "in WSL (cuptiPCSamplingEnable): update it"),
        (27, "this device, as it is set up, does not sample stalls (cuptiPCSamplingEnable)"),
    ],
)
def test_what_a_device_is_set_up_as_has_its_cure(proc: Path, code: int, words: str) -> None:
    _drive(proc)
    memory = _memory("why", tier=1)
    memory.error(HelperError.UNSUPPORTED, code, "cuptiPCSamplingEnable", "")
    host = Host(memory)
    _sampler(proc, host).drain(Interval(0))
    (device,) = host.devices
    assert words in device.limit


def test_windows_and_what_failed_of_them_are_told_with_the_device(proc: Path) -> None:
    _drive(proc)
    memory = _memory()
    memory.error(HelperError.SERIALISED, 0, "the process has several contexts")
    host = Host(memory)
    host.wanted = Wanted(calibrates=True)
    sampler = _sampler(proc, host)
    for begin_ns in (10**6, 10**9):
        memory.serialised(begin_ns, begin_ns + 250 * 10**6)
    sampler.drain(Interval(0))
    (device,) = host.devices
    assert (device.tier, device.limit) == (Tier.STALLS, "")
    assert device.details.endswith(
        "; kernels serialised for 0.50 s, in 2 windows, which slows down who launches them;"
        " a window to measure the error of sharing failed (the process has several contexts)"
    )
    # AND the helper was asked for them, in a fortieth of the time
    assert memory.told == [struct.pack("<4s7I", b"aifc", VERSION, 1, 2, 1000, 0, 500, 25)]


def test_times_that_another_profiler_may_have_had_are_told_with_the_device(proc: Path) -> None:
    _drive(proc)
    memory = _memory()
    memory.error(HelperError.QUIET, 0, "CUPTI")
    host = Host(memory)
    _sampler(proc, host).drain(Interval(0))
    (device,) = host.devices
    assert "; no kernel time came for 30 s though kernels were launched:" in device.details


def test_the_best_of_several_processes_is_the_devices_tier(proc: Path) -> None:
    _drive(proc)
    host = Host(_memory("no rights", tier=1), _memory())
    _sampler(proc, host).drain(Interval(0))
    (device,) = host.devices
    assert (device.tier, device.limit) == (Tier.STALLS, "")


def test_a_device_that_this_machine_does_not_know_is_added(proc: Path) -> None:
    # GIVEN a machine with one device, and a process on an instance of another
    _drive(proc)
    memory = _memory(uuid=b"m" * 16)
    host = Host(memory)
    sampler = _sampler(proc, host)
    memory.times((1, _LATER, _LATER, 0, 0, 1, 0, 1, 0))
    sampler.drain(Interval(0))
    assert [device.tier for device in host.devices] == [Tier.LAUNCHES, Tier.STALLS]
    assert [one.device for one in host.times] == [1]


def test_a_process_that_invents_devices_has_only_so_many(proc: Path) -> None:
    _drive(proc)
    memory = _memory()
    for number in range(100):
        memory.device(number % 32, bytes([number]) * 16)
    host = Host(memory)
    sampler = _sampler(proc, host)
    sampler.drain(Interval(0))
    assert len(host.devices) == 1 + 16
    # AND another one has its own
    other = _memory(uuid=b"m" * 16)
    other.process = 6
    other.times((1, _LATER, _LATER, 0, 0, 1, 0, 1, 0))
    host.shared.append(other)
    sampler.drain(Interval(1))
    assert [one.device for one in host.times] == [17]
    # AND all together no more than a machine may have
    for process in range(100):
        host.shared.append(_memory(uuid=bytes([100 + process]) * 16))
        host.shared[-1].process = 10 + process
    sampler.drain(Interval(2))
    assert len(host.devices) == 64


def test_instances_that_come_and_go_for_months_are_told_apart(proc: Path) -> None:
    _drive(proc)
    lasting = _memory()
    host = Host(lasting)
    sampler = _sampler(proc, host)
    for number in range(300):
        # GIVEN a process on each of ever new instances, one after the other
        memory = _memory(uuid=number.to_bytes(16, "big"))
        memory.process = 10 + number
        host.shared = [lasting, memory]
        for one in (lasting, memory):
            one.times((1, _LATER, _LATER, 0, 0, 1, 0, 1, 0))
        sampler.drain(Interval(2 * number))
        # THEN the kernels of both have run on devices of their own
        assert [(one.process, one.device > 0) for one in host.times[-2:]] == [
            (5, False),
            (memory.process, True),
        ]
        assert [device.tier for device in host.devices[-1:]] == [Tier.STALLS]
    assert not host.lost
    assert len(host.devices) == 64
    # AND it was said of each that has come in the place of another one
    assert len(host.replaced_devices) == 301 - 64
    assert 0 not in host.replaced_devices


def test_a_device_that_is_one_too_many_is_counted_until_there_is_room(proc: Path) -> None:
    _drive(proc)
    host = Host(_memory())
    sampler = _sampler(proc, host)
    for process in range(63):
        host.shared.append(_memory(uuid=bytes([process]) * 16))
        host.shared[-1].process = 10 + process
    late = _memory(uuid=b"m" * 16)
    late.process = 100
    # GIVEN as many devices as are told apart, and another one
    sampler.drain(Interval(0))
    host.shared.append(late)
    for second in range(100, 103):
        sampler.drain(Interval(second))
    late.times((1, _LATER, _LATER, 0, 0, 1, 0, 1, 0))
    sampler.drain(Interval(103))
    # THEN it is counted once, and so are its kernels
    assert host.lost == {LossKind.DEVICE_CONTEXTS_FULL: 1, LossKind.KERNEL_TIMES_REFUSED: 1}
    # WHEN one of the others has been gone for a minute
    host.shared.remove(host.shared[7])
    sampler.drain(Interval(104))
    sampler.drain(Interval(165))
    # THEN it has its place
    late.times((1, _LATER, _LATER, 0, 0, 1, 0, 1, 0))
    sampler.drain(Interval(166))
    assert [one.device for one in host.times] == [7]
    assert host.lost[LossKind.DEVICE_CONTEXTS_FULL] == 1


def test_a_device_has_the_name_that_the_machine_or_the_first_one_tells(proc: Path) -> None:
    _drive(proc)
    honest, other = _memory(), _memory()
    honest.device(1, b"m" * 16, "MIG 1g.18gb")
    other.device(0, b"u" * 16, "Fake")
    other.device(1, b"m" * 16, "Fake")
    other.process = 6
    host = Host(honest, other)
    _sampler(proc, host).drain(Interval(0))
    assert [device.name for device in host.devices] == ["NVIDIA H200", "MIG 1g.18gb"]


def test_of_a_process_that_is_over_its_names_are_forgotten(proc: Path) -> None:
    _drive(proc)
    memory = _memory()
    text = "n" * 4_000
    for number in range(100):
        memory.name(10 + number, f"{number}{text}")
    host = Host(memory)
    sampler = _sampler(proc, host)
    sampler.drain(Interval(0))
    memory.times(*[(1, 5_000, 5_001, 0, 0, 10 + number, 0, 1, 0) for number in range(100)])
    sampler.drain(Interval(1))
    kept = [one.kernel for one in host.times]
    # WHEN the process is gone, THEN nobody but this test has them
    host.times.clear()
    host.shared.clear()
    sampler.drain(Interval(2))
    gc.collect()
    # By the list, the loop and the call.
    assert all(sys.getrefcount(name) <= 3 for name in kept)
    assert [device.tier for device in host.devices] == [Tier.STALLS]


def test_a_command_and_its_children_sample_for_as_much_of_the_time_as_is_wanted() -> None:
    # GIVEN what a command is started with, which its children inherit
    helper = NvidiaFamily().helper
    assert helper is not None
    variables = helper.variables(Wanted(duty_permille=100))
    assert variables == {
        "CUDA_INJECTION64_PATH": str(helper.path),
        "AIFLAME_GPU": "tier=2,duty=100",
    }


def test_a_helper_of_another_version_is_neither_read_nor_told(proc: Path) -> None:
    _drive(proc)
    memory = Memory(process=5)
    memory.hello(version=7)
    memory.put(15, b"a fact of 7")
    memory.times((1, _LATER, _LATER, 0, 0, 1, 0, 1, 0))
    host = Host(memory)
    sampler = _sampler(proc, host)
    for second in range(3):
        sampler.drain(Interval(second))
    sampler.stop()
    (device,) = host.devices
    assert device.tier is Tier.LAUNCHES
    assert f"helper of another aiflame (protocol 7, not {VERSION})" in device.limit
    assert (memory.told, host.times) == ([], [])
    assert host.lost == {LossKind.HELPERS_FOREIGN: 1}


def test_a_bell_is_one_process_s(proc: Path) -> None:
    _drive(proc)
    memories = [_memory(), _memory()]
    memories[1].process = 6
    host = Host(*memories)
    sampler = _sampler(proc, host)
    sampler.drain(Interval(0))
    for memory in memories:
        memory.times((memory.process, 5_000, 5_001, 0, 0, 1, 0, 1, 0))
    (hear,) = host.hears
    hear(6)
    assert [one.process for one in host.times] == [6]
    sampler.drain(Interval(1))
    assert [one.process for one in host.times] == [6, 5]


def test_a_process_that_is_over_has_told_what_it_told(proc: Path) -> None:
    _drive(proc)
    host = Host(_memory())
    sampler = _sampler(proc, host)
    sampler.drain(Interval(0))
    host.shared.clear()
    sampler.drain(Interval(1))
    sampler.stop()
    assert [device.tier for device in host.devices] == [Tier.STALLS]


def test_reasons_that_are_part_of_others_are_known_by_their_names() -> None:
    for prefix in ("smsp__pcsamp_warps_issue_stalled_", "smsp__pcsamp_warp_stall_"):
        assert is_part_of_another(f"{prefix}selected_not_issued")
        assert not is_part_of_another(f"{prefix}not_selected")
        assert not is_part_of_another(f"{prefix}selected")
    found = category_of(StallReason("nvidia", "smsp__pcsamp_warps_issue_stalled_selected"))
    assert found is StallCategory.ISSUING
