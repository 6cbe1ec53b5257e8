# SPDX-License-Identifier: Apache-2.0
"""What the end of a recording says of devices: which, how much is known, what is missing."""

from __future__ import annotations

from collections.abc import Iterator

from aiflame.agent.model.gpu import Device
from aiflame.agent.model.profile import Profile
from aiflame.agent.reports.device_facts import attribution, times_note
from aiflame.agent.reports.device_rows import device_samples
from aiflame.agent.reports.device_times import device_times
from aiflame.agent.reports.words import duration
from aiflame.agent.symbols.frames import clean_name


def device_lines(profile: Profile) -> Iterator[str]:
    """Yields a line for each device, and for times and samples of all how sure their stacks are."""
    gpu = profile.gpu
    for device in gpu.devices:
        yield _device_line(device)
    if len(gpu.times):
        times = device_times(profile)
        ran = len({*times.kernel.tolist()})
        yield f"{duration(int(times.ns.sum()))} of GPU time in {ran:,} kernels."
        yield times_note(profile, times)
    count = int(gpu.samples["count"].sum())
    if count:
        kernels = {gpu.codes[code].kernel for code in gpu.samples["code"].tolist()}
        yield f"{count:,} device samples in {len(kernels):,} kernels."
        yield attribution(profile, device_samples(profile))


def _device_line(device: Device) -> str:
    if not device.name:
        return f"device {device.family}: none: {clean_name(device.limit)}."
    return f"device {device.family}: {clean_name(device.name)}: {clean_name(device.reached)}."
