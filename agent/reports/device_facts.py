# SPDX-License-Identifier: Apache-2.0
"""What is said in words of device samples and GPU time: how much, and how sure the stacks are."""

from __future__ import annotations

from collections.abc import Sequence

from aiflame.agent.losses import LossKind
from aiflame.agent.model.gpu import GpuProfile, MeasuredError, SharingError
from aiflame.agent.model.profile import Profile
from aiflame.agent.reports.base import View
from aiflame.agent.reports.device_rows import DeviceSamples
from aiflame.agent.reports.device_times import DeviceTimes
from aiflame.agent.reports.facts import counted, lasted, range_words
from aiflame.agent.reports.words import duration, percent, showable
from aiflame.gpu.attribution import Certainty

# Less is told of no estimate: rounding alone is that much of some hundred samples.
_LEAST_ERROR = 0.005

# How many times the expected error is another one that is worth a word.
_OFTEN = 2.0

# Losses that count device samples. Others of devices cost a sample its words only.
_LOSSES = frozenset(kind.stored_name for kind in LossKind if kind.is_of_device)


def amount(view: View, weight: int) -> str:
    """Return a weight of a view with its unit."""
    return counted(weight, "sample") if view is View.GPU else duration(weight)


def subtitle(profile: Profile, samples: DeviceSamples) -> str:
    """Return what the whole of a flame graph of device samples is."""
    whole = int(samples.count.sum())
    kernels = counted(len(set(samples.kernel.tolist())), "kernel")
    return f"100 % = {counted(whole, 'device sample')} of {kernels}, {lasted(profile.recording)}"


def times_subtitle(profile: Profile, times: DeviceTimes) -> str:
    """Return what the whole of a flame graph of GPU time is."""
    kernels = counted(len(set(times.kernel.tolist())), "kernel")
    devices = counted(len(set(times.device.tolist())), "device")
    whole = duration(int(times.ns.sum()))
    label = View.GPU_TIME.label
    return f"100 % = {whole} of {label} of {kernels} on {devices}, {lasted(profile.recording)}"


def times_note(profile: Profile, times: DeviceTimes) -> str:
    """Return how sure the launching stacks of GPU time are; why there is none, where there is."""
    if not len(times):
        return times_absence(profile)
    counts = [int(times.ns[times.certainty == c].sum()) for c in Certainty]
    shares = ", ".join(
        f"{percent(count, sum(counts))} {certainty.label}"
        for certainty, count in zip(Certainty, counts, strict=True)
    )
    return f"Attribution of GPU time: {shares}{_when(profile)}."


def attribution(profile: Profile, samples: DeviceSamples) -> str:
    """Return how sure the launching stacks are, and how many samples were lost."""
    return " ".join(notes(profile, samples))


def _certainty(profile: Profile, samples: DeviceSamples) -> str:
    whole = int(samples.count.sum())
    shares = ", ".join(
        f"{percent(int(samples.count[samples.certainty == c].sum()), whole)} {c.label}"
        for c in Certainty
    )
    return f"Attribution: {shares}, {lost(profile):,} lost{_when(profile)}."


def _when(profile: Profile) -> str:
    return "" if profile.recording.time_range is None else " in the whole recording"


def error_words(error: SharingError, when: str = "") -> str:
    """Return by how much what is shared is off; `when` follows what it is a part of."""
    if error.measured is not None:
        return _measured_words(error.measured, when)
    words = f"Shared is an estimate, off by {_about(error.expected)} of all samples{when}"
    if error.if_unequal < _OFTEN * max(error.expected, _LEAST_ERROR):
        return f"{words}."
    unequal = "if launches of equal work took unequal time, which nothing told"
    return f"{words}; by {_about(error.if_unequal)} {unequal}."


def _measured_words(measured: MeasuredError, when: str) -> str:
    windows = counted(measured.windows, "serialised window")
    whole = counted(measured.samples, "sample")
    of_what = f"of {whole} there of kernels that several stacks launch"
    if measured.uncorrected is None:
        return (
            f"Shared is an estimate; sharing measured in {windows}{when}: {_about(measured.off)}"
            f" with another stack, {of_what}."
        )
    return (
        f"Shared is an estimate, corrected by what {windows} tell{when}: {_about(measured.off)}"
        f" with another stack in windows that it was not fitted to,"
        f" {_about(measured.uncorrected)} without the correction, {of_what}."
    )


def _about(share: float) -> str:
    """Return a share of samples in two digits, which is more than is known of it."""
    if share < _LEAST_ERROR:
        return f"less than {100 * _LEAST_ERROR:.1f} %"
    return f"about {100 * share:.1f} %" if share < 0.1 else f"about {100 * share:.0f} %"


def certainty_words(counts: Sequence[int]) -> str:
    """Return how sure the launching stacks of some samples are; `counts` is by Certainty."""
    whole = sum(counts)
    found = [(Certainty(i).label, count) for i, count in enumerate(counts) if count]
    if len(found) == 1:
        return found[0][0]
    return ", ".join(f"{percent(count, whole)} {label}" for label, count in found)


def device_lines(gpu: GpuProfile) -> list[tuple[str, str]]:
    """Return a line about each device: what it let be known, and what is missing."""
    lines = []
    for device in gpu.devices:
        name = f"{device.name} ({device.family})" if device.name else device.family
        details = f"; {device.details}" if device.details else ""
        lines.append(("device", showable(f"{name}: {device.reached}{details}")))
    return lines


def short_name(gpu: GpuProfile, number: int) -> str:
    """Return what a device is called where there is little room: "GPU 1", as its driver counts."""
    family = gpu.devices[number].family
    return f"GPU {sum(device.family == family for device in gpu.devices[:number])}"


def lost(profile: Profile) -> int:
    """Return how many device samples and launches were lost."""
    return sum(loss.count for loss in profile.losses if loss.name in _LOSSES)


def has_device(gpu: GpuProfile) -> bool:
    """Whether a recording has anything of a device: a call, a sample, or a kernel's time."""
    return any(map(len, (gpu.calls, gpu.events, gpu.samples, gpu.times)))


def is_about_devices(profile: Profile) -> bool:
    """Whether there is anything to say of devices: the target uses one, or one cannot be read."""
    return has_device(profile.gpu) or bool(_limits(profile.gpu))


def absence(profile: Profile) -> str:
    """Return why there is no flame graph of device samples; "" where there is one."""
    if len(profile.gpu.samples):
        return ""
    but = "only how long kernels ran (--view gputime)" if len(profile.gpu.times) else ""
    return _absence(profile, "Device API calls were seen{}, but no device samples were taken", but)


def times_absence(profile: Profile) -> str:
    """Return why there is no flame graph of GPU time; "" where there is one."""
    if len(profile.gpu.times):
        return ""
    but = "but there are samples of them (--view gpu)" if len(profile.gpu.samples) else ""
    return _absence(profile, "No device told how long it ran kernels{}", but)


def _absence(profile: Profile, what: str, but: str) -> str:
    """Return what is missing, when, what there is instead, and why, in one sentence."""
    gpu, recording = profile.gpu, profile.recording
    when = "" if recording.time_range is None else f" in {range_words(recording)}"
    limits = _limits(gpu)
    if not has_device(gpu):
        return _no_calls(when, limits)
    why = what.format(when) + (f", {but}" if but else "")
    return f"{why}: {'; '.join(limits)}" if limits else f"{why}."


def _limits(gpu: GpuProfile) -> list[str]:
    return [
        f"{showable(device.name or device.family)}: {showable(device.limit)}"
        for device in gpu.devices
        if device.limit
    ]


def _no_calls(when: str, limits: Sequence[str]) -> str:
    why = f"No device API calls were seen in the recorded processes{when}."
    return why if not limits else f"{why} {'; '.join(limits)}"


def notes(profile: Profile, samples: DeviceSamples) -> list[str]:
    """Return the lines under a flame graph of device samples."""
    if not len(samples):
        return [absence(profile)]
    lines = [_certainty(profile, samples)]
    if samples.count[samples.certainty == Certainty.SHARED].sum():
        lines.append(error_words(samples.error, _when(profile)))
    return lines
