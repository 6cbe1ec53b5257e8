# SPDX-License-Identifier: Apache-2.0
"""NVIDIA's devices in a recording: what the helpers in its processes tell."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from aiflame.agent.losses import LossKind
from aiflame.agent.model.gpu import Device, Tier
from aiflame.gpu.base import (
    CodeKey,
    DeviceReading,
    Host,
    Interval,
    Listing,
    SharedMemory,
    SourceLines,
)
from aiflame.gpu.helpers import COMMON_PERIOD_CYCLES, Helper, Told, await_end
from aiflame.gpu.nvidia import NAME, machine
from aiflame.gpu.nvidia.code import KeptCode
from aiflame.gpu.nvidia.machine import Limit, Machine
from aiflame.gpu.nvidia.readings import Readings, Said
from aiflame.gpu.protocol import VERSION, Failed, HelperDevice, HelperError
from aiflame.gpu.stalls.nvidia import is_part_of_another

# At a time, and of those that one process is the first to tell of: a machine has 16, and a target
# may invent some.
_MAX_DEVICES, _MAX_DEVICES_OF_PROCESS = 64, 16
# One that nobody has told of for so long may give way to another one: instances of devices (MIG)
# come and go. What was sampled of it is in windows by then.
_UNUSED_S = 60
# How often devices are looked for where the machine has none: an agent may begin before the driver
# is loaded, which in a cluster a container brings.
_LOOK_S = 60
# Of a drain and the second after it: 0.2 s of the recorder's time. Each process has the same part
# of it, and no more than if there were so few of them. Graphs have a fact for each of their nodes.
_MAX_FACTS, _FEWEST_SHARES = 1 << 16, 2
# Of a drain and the second after it, shared in the same way: kernel times that are taken one by
# one, nearly as many as a window has room for; and the recorder's time for all that helpers tell,
# in seconds. What is left is read after the next drain.
_MAX_TIMES, _MAX_CPU_S = 60_000, 0.4
# For what devices still hold: a helper reads twice a second, and ends within one reading.
_END_S = 2.0
# Of processes that are over, what they told of devices.
_MOST_OVER = 64
# With --gpu-calibrate, of the time: windows of 250 ms in each 10 s. A device of 132 multiprocessors
# takes some 55,000 samples in one, computed from its clock and CUPTI's period, most of which are a
# row of their own; the helper's ring has room for 100,000. Shorter ones would hold few steps of a
# training, and to begin and end one costs the same.
_SERIALISED_PERMILLE = 25
# In a device's line: reasons of processes differ seldom.
_MAX_WORDS = 3

NOT_USED = "no recorded process has used it"
NO_HELPER = "aiflame's helper is in no recorded process: only launches are known"

OTHER_VERSION = (
    "a process has a helper of another aiflame (protocol {}, not {}), which is not read: restart it"
)

_NO_WINDOW = "a window to measure the error of sharing failed"

# CUPTI tells so of itself (release notes of 13.1 Update 1), or the helper has found it out.
_WRONG_GRAPHS = (
    "CUPTI gives launches of CUDA graphs wrong numbers{}, kernels are told by their order: update"
    " it (pip install 'nvidia-cuda-cupti>=13.1.115')"
)

_QUIET = (
    "no kernel time came for 30 s though kernels were launched: another profiler of the process,"
    " as PyTorch's, may have had them, and they were asked for anew"
)

# What a helper could not do, and what helps; the vendor's own words follow where it has any.
_ERRORS = {
    HelperError.NO_LIBRARY: (
        "libcupti is neither mapped nor installed",
        "pip install nvidia-cuda-cupti",
    ),
    HelperError.SYMBOL: ("libcupti lacks a function", "install the CUPTI of CUDA 12.8 or later"),
    HelperError.TOO_OLD: ("libcupti is too old", "install the CUPTI of CUDA 12.8 or later"),
    HelperError.TAKEN: ("another profiler has CUPTI", "end it"),
    HelperError.RIGHTS: ("the process may not sample stalls", machine.UNRESTRICT),
    HelperError.UNSUPPORTED: ("this device, as it is set up, does not sample stalls", ""),
    HelperError.MEMORY: ("there was no memory for samples", ""),
    HelperError.CONTROL: ("it was told what it does not understand", ""),
    HelperError.NAMES: ("CUPTI copies each name anew: sampling ended before memory did", ""),
    HelperError.DRIVER: ("the driver has ended profiling", ""),
    HelperError.CALL: ("a call of CUPTI failed", ""),
    HelperError.NO_SAMPLES: ("kernels ran and no sample came", ""),
    HelperError.SERIALISED: (_NO_WINDOW, ""),
}


# What CUPTI says of devices as they are set up (cupti_result.h of CUDA 12.8 and later).
_SETUPS = {
    33: ("a virtual device (vGPU) samples no stalls here", machine.UNRESTRICT_VIRTUAL),
    41: (
        "confidential computing keeps profilers out",
        "leave it off on a machine of your own; kernel times are had with it",
    ),
    42: ("a device for mining (CMP) samples no stalls", "use another model"),
    43: ("MIG is on, and others share this instance's compute", machine.UNSHARE),
    44: ("linked devices (SLI) sample no stalls", "turn SLI off"),
    45: ("this driver of Windows lets nobody sample stalls in WSL", "update it, to 525 or later"),
}


def lowest(here: Machine) -> Limit | None:
    """Returns what keeps a machine at the lowest tier, None where nothing does."""
    return min(here.limits, key=lambda limit: limit.tier, default=None)


def device_of(model: str, here: Machine) -> Device:
    """Returns a device of which no helper has told yet."""
    limits = [limit.why for limit in here.limits]
    why = "; ".join([NO_HELPER, *limits, *here.notes])
    details = f"driver {here.driver}" if here.driver else ""
    return Device(NAME, model, Tier.LAUNCHES, why, 0, details)


@dataclass(slots=True)
class _Known:
    """A device of the recording.

    Attributes:
        device: As it is where no helper tells of it. The name is the machine's where that knows
            the UUID.
        uuid: By which helpers tell of it; None for one that no helper has told of.
        told: As a helper told of it first: another process may tell anything of it.
        used_s: When a process that lives, or NVML, told of it last; since the start.
    """

    device: Device
    uuid: bytes | None
    told: HelperDevice | None = None
    used_s: int = 0


def _known_of(here: Machine) -> list[_Known]:
    return [_Known(device_of(gpu.model, here), gpu.uuid) for gpu in here.gpus]


class NvidiaSampler:
    """See `aiflame.gpu.base.Sampler`."""

    def __init__(self, host: Host, here: Machine) -> None:
        self._host = host
        self._here = here
        self._interval = self._looked_s = 0
        self._helpers: dict[SharedMemory, Helper] = {}
        self._over: deque[Told] = deque(maxlen=_MOST_OVER)  # by processes that are gone
        self._code = KeptCode(host, self._architecture)
        self._made: Counter[int] = Counter()  # devices, by the process that told of them first
        self._refused: defaultdict[int, set[int]] = defaultdict(set)  # by process, its numbers
        self._known = _known_of(here)
        self._readings = Readings(host) if self._known else None
        host.listen(self._hear)

    def owns(self, file: int) -> bool:
        """No file that is mapped holds kernels as they run."""
        return False

    def drain(self, interval: Interval) -> None:
        """Reads what helpers tell."""
        self._interval = interval.number
        if not self._here.gpus and interval.number - self._looked_s >= _LOOK_S:
            self._look_again()
        self._read_all()
        if self._readings is None and self._known:
            self._readings = Readings(self._host)
        said = [] if self._readings is None else self._readings.take()
        self._tell(said)

    def _look_again(self) -> None:
        """Looks for devices, some of which helpers may have told of before the machine."""
        self._looked_s = self._interval
        self._here = machine.look()
        if not self._known:
            self._known = _known_of(self._here)
        for gpu in self._here.gpus:
            if gpu.uuid and self._find(gpu.uuid) is None:
                self._add(gpu.model, gpu.uuid)

    def stop(self) -> None:
        """Has helpers end, and takes what is left."""
        self._read_all()
        for helper in self._helpers.values():  # for as long as it is waited for
            helper.allow(self._share(_MAX_FACTS), self._share(_MAX_TIMES))
        await_end(self._helpers.values(), self._read_one, _END_S)
        self._tell([] if self._readings is None else self._readings.finish())

    def _hear(self, process: int) -> None:
        """Reads what a process shares that has rung."""
        self._read(memory for memory in self._host.memories() if memory.process == process)

    def _read_all(self) -> None:
        memories = [*self._host.memories()]
        for memory in {*self._helpers}.difference(memories):
            helper = self._helpers.pop(memory)
            helper.give_up()
            self._note_devices(helper)
            self._over.append(helper.told)
            self._code.forget(memory.process)
            self._made.pop(memory.process, None)
            self._refused.pop(memory.process, None)
        for helper in self._helpers.values():
            self._allow(helper)
        self._read(memories)

    def _read(self, memories: Iterable[SharedMemory]) -> None:
        for memory in memories:
            if memory not in self._helpers:
                number_of = partial(self._number_of, memory.process)
                helper = self._helpers[memory] = Helper(
                    memory, self._host, number_of, is_part_of_another, self._host.since_ns
                )
                self._allow(helper)
            helper = self._helpers[memory]
            self._read_one(helper)
            serialised = _SERIALISED_PERMILLE if self._host.wanted.calibrates else 0
            duty = self._host.duty_permille(memory.process)
            helper.start(Tier.STALLS, duty, serialised)

    def _allow(self, helper: Helper) -> None:
        """Gives a process its part of what is read until the next drain."""
        cpu_s = _MAX_CPU_S / max(len(self._helpers), _FEWEST_SHARES)
        helper.allow(self._share(_MAX_FACTS), self._share(_MAX_TIMES), cpu_s)

    def _share(self, whole: int) -> int:
        return whole // max(len(self._helpers), _FEWEST_SHARES)

    def _read_one(self, helper: Helper) -> None:
        samples = helper.read(self._interval)
        if self._host.wanted.lists:
            self._code.keep(samples, helper.code)

    def _architecture(self, number: int) -> int:
        """Returns that of a device: 90 for sm_90, 0 where no helper has told it."""
        told = self._known[number].told
        return 0 if told is None else 10 * told.major + told.minor

    def _number_of(self, process: int, told: HelperDevice) -> int | None:
        """Returns the number of a device that a process tells of; None if it is one too many."""
        number = self._find(told.uuid)
        if number is not None:
            self._known[number].told = self._known[number].told or told
        elif self._made[process] < _MAX_DEVICES_OF_PROCESS:
            # May be of a container, or an instance of a device, which has a UUID of its own.
            number = self._add(told.name, told.uuid, told)
            self._made[process] += number is not None
        return number

    def _find(self, uuid: bytes) -> int | None:
        """Returns the number of a device that is told of now, None for one that is new."""
        for number, known in enumerate(self._known):
            if known.uuid == uuid:
                known.used_s = self._interval
                return number
        return None

    def _add(self, name: str, uuid: bytes, told: HelperDevice | None = None) -> int | None:
        """Returns the number of a new device; None while there are too many others."""
        known = self._known
        new = _Known(device_of(name, self._here), uuid, told, self._interval)
        number = next((number for number, one in enumerate(known) if one.uuid is None), len(known))
        if number < len(known):
            new.device = replace(known[number].device, name=name or known[number].device.name)
        elif number < _MAX_DEVICES:
            known.append(new)
        else:
            number = min(range(number), key=lambda number: known[number].used_s)
            if self._interval - known[number].used_s < _UNUSED_S:
                return None
            self._host.replaced(number)
        known[number] = new
        return number

    def _note_devices(self, helper: Helper) -> None:
        refused = self._refused[helper.process]
        for told in helper.told.devices.values():
            number = self._number_of(helper.process, told)
            if number is None and told.device not in refused:
                refused.add(told.device)
                self._host.lose(LossKind.DEVICE_CONTEXTS_FULL)

    def _number_read(self, said: Said) -> int | None:
        """Returns the number of a device that NVML tells of.

        Returns:
            None for an instance that no helper has told of, or for one too many.
        """
        number = self._find(said.uuid)
        if number is None and not said.is_instance:
            number = self._add(said.name, said.uuid)
            if number is None and said.end_ns:
                self._host.lose(LossKind.DEVICE_READINGS_MISSED)
        return number

    def _add_readings(self, said: Iterable[Said]) -> None:
        for one in said:
            number = self._number_read(one)
            if number is not None and one.end_ns:
                reading = (number, one.begin_ns, one.end_ns, one.busy_permille, one.memory)
                self._host.add_readings([DeviceReading(*reading)])

    def _tell(self, said: Iterable[Said]) -> None:
        """Tells what has become known of devices."""
        for helper in self._helpers.values():
            self._note_devices(helper)
        self._add_readings(said)
        processes = [*self._over, *(helper.told for helper in self._helpers.values())]
        if not self._known and any(map(_is_refused, processes)):
            # It runs on a device that this machine does not tell of, as in a container.
            self._known.append(_Known(device_of(machine.UNNAMED, self._here), None))
        self._host.found(
            [self._with_words(self._device(known, processes), known) for known in self._known]
        )

    def _with_words(self, device: Device, known: _Known) -> Device:
        """Returns a device with what NVML does not tell of it."""
        why = "" if self._readings is None else self._readings.why(known.uuid)
        return replace(device, details="; ".join(filter(None, [device.details, why])))

    def _device(self, known: _Known, processes: Sequence[Told]) -> Device:
        """Returns a device as helpers tell of it."""
        own = [
            (process, number)
            for process in processes
            for number, told in process.devices.items()
            if process.best is not None and told.uuid == known.uuid
        ]
        if known.told is None or not own:
            return _beside(known.device, processes)
        own = [(process, number) for process, number in own if _is_used(process, number)]
        if not own:
            return replace(known.device, limit=NOT_USED)
        reached = max(process.tier for process, _ in own)
        whys = _distinct(_why(process) for process, _ in own)
        why = "" if reached is Tier.STALLS else "; ".join(whys)
        return replace(
            known.device,
            tier=reached,
            limit=why or ("" if reached is Tier.STALLS else "its helper does not say why"),
            details="; ".join(filter(None, [known.device.details, *_details(known.told, own)])),
        )

    def resolve(self, code: CodeKey, offsets: frozenset[int], lines: SourceLines) -> Listing | None:
        """Returns a kernel's instructions."""
        return self._code.listing(code, offsets)

    def code(self, code: CodeKey) -> bytes:
        """Returns the cubin that has a kernel."""
        return self._code.code(code)

    def file(self, code: CodeKey) -> int | None:
        """Returns the file in which a kernel's code was found, of which no helper has told."""
        return self._code.found_in(code)


def _beside(device: Device, processes: Sequence[Told]) -> Device:
    """Returns a device that no process tells of; some may, in another version, or if they could."""
    versions = sorted({one.hello.protocol for one in processes if one.hello and one.is_foreign})
    whys = [OTHER_VERSION.format(version, VERSION) for version in versions[:_MAX_WORDS]]
    # One that comes late hears of contexts from CUPTI, to which it may not get.
    refused = _distinct(_why(one) for one in processes if _is_refused(one))
    limit = device.limit
    if refused:
        limit = limit.removeprefix(NO_HELPER).removeprefix("; ")
    return replace(device, limit="; ".join(filter(None, [*whys, *refused, limit])))


def _is_refused(process: Told) -> bool:
    """Whether a helper could not hear of contexts."""
    return bool(process.errors) and not process.contexts


def _is_used(process: Told, number: int) -> bool:
    return any(context.device == number for context in process.contexts.values())


def _distinct(words: Iterable[str]) -> list[str]:
    return [word for word in dict.fromkeys(words) if word][:_MAX_WORDS]


def _why(process: Told) -> str:
    """Returns why a process does not reach the highest tier, and what helps."""
    best = process.best
    found = [] if best is None or not best.why else [best.why]
    for failed in process.errors.values():
        if failed.error not in _ERRORS:
            continue
        words, cure = _ERRORS[HelperError(failed.error)]
        if failed.error == HelperError.UNSUPPORTED:
            words, cure = _SETUPS.get(failed.code, (words, cure))
        found.append(f"{words}{_by(failed)}{f': {cure}' if cure else ''}")
    return "; ".join(found)


def _by(failed: Failed) -> str:
    by = ", ".join(text for text in (failed.what, failed.text) if text)
    return f" ({by})" if by else ""


def _details(told: HelperDevice, own: list[tuple[Told, int]]) -> list[str]:
    """Returns what is known of how a device was sampled, in words."""
    found = [f"sm_{told.major}{told.minor}", f"{told.multiprocessors} multiprocessors"]
    best = [process.best for process, _ in own]
    found += _distinct(f"CUDA {one.driver}" for one in best if one and one.driver)
    found += _distinct(one.library for one in best if one)
    periods: list[int] = []
    samples: Counter[str] = Counter()
    windows = serialised_ns = 0
    for process, number in own:
        for context in process.contexts.values():
            if context.device == number:
                periods.append(context.period_cycles)
                samples["all"] += process.samples[context.context]
                samples["exposed"] += process.twins[context.context]
                windows += process.windows[context.context]
                serialised_ns += process.serialised_ns[context.context]
    found += _distinct(f"a sample each {n:,} cycles" for n in periods if n)
    if {*periods} - {0, COMMON_PERIOD_CYCLES}:
        found.append(f"counted in samples of {COMMON_PERIOD_CYCLES:,} cycles")
    if samples["all"] and samples["exposed"]:
        share = 100 * samples["exposed"] / samples["all"]
        found.append(f"{share:.1f} % of samples while nothing was issued")
    if windows:
        found.append(
            f"kernels serialised for {serialised_ns / 1e9:.2f} s, in {windows} window"
            f"{'s' * (windows > 1)}, which slows down who launches them"
        )
    failed = (process.errors.get(HelperError.SERIALISED) for process, _ in own)
    found += _distinct(f"{_NO_WINDOW}{_by(one)}" for one in failed if one is not None)
    failed = (process.errors.get(HelperError.GRAPH_IDS) for process, _ in own)
    found += _distinct(_WRONG_GRAPHS.format(_by(one)) for one in failed if one is not None)
    if any(HelperError.QUIET in process.errors for process, _ in own):
        found.append(_QUIET)
    return found
