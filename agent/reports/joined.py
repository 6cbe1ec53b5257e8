# SPDX-License-Identifier: Apache-2.0
"""Two recordings in one profile, so that they can be compared.

They are of other processes, of other builds, on other hosts: pids, addresses and build ids say
nothing. Functions are one if kind and name are, and of Python the file's name too, as where parts
of a store are compared; processes are one if their names are. Lines of files are left out, since
versions differ in them. What is one is said to be where new has it.

Devices are left out: which launch a sample belongs to is known within a recording only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
from aiflame.agent.model.profile import (
    FRAME_DTYPE,
    LOSSES_FACT,
    OF_HOST,
    WAIT_DTYPE,
    Difference,
    FrameKind,
    Function,
    Loss,
    Process,
    Profile,
    SampleClass,
    Stacks,
)
from aiflame.agent.reports.base import View
from aiflame.agent.reports.device_facts import has_device
from aiflame.agent.reports.facts import lasted
from aiflame.agent.reports.idle import without_idle
from aiflame.agent.reports.merge import is_of_all
from aiflame.agent.reports.words import showable

I64 = npt.NDArray[np.int64]


def joined(
    base: Profile,
    new: Profile,
    names: tuple[str, str],
    view: View,
    *,
    is_idle_shown: bool = False,
) -> tuple[Profile, Difference]:
    """Return both recordings as one profile, and the difference that it has.

    Its spans count from the start of each recording.

    Args:
        base: What is compared with.
        new: What is compared.
        names: Of base and of new.
        view: Which classes of time are compared; only these are in it.
        is_idle_shown: Wall time is also that of threads that slept at one location throughout.
    """
    time, facts = view.label, _facts(base, new, names)
    if view is View.WALL and not is_idle_shown:
        (base, of_base), (new, of_new) = map(without_idle, (base, new))
        left_out = (("idle threads of base", of_base), ("idle threads of new", of_new))
        facts = (*facts, *((name, words) for name, words in left_out if words))
        time += " without idle threads" if of_base or of_new else ""
    sides = (new, base)
    functions, functions_of = _functions(sides)
    processes, processes_of = _processes(sides)
    samples, spans = _samples(sides, view)
    frames = np.zeros(len(functions), FRAME_DTYPE)
    frames["function"] = np.arange(len(functions))
    base_name, new_name = names
    is_new = np.repeat([True, False], [len(side.threads) for side in sides])
    difference = Difference(base_name, new_name, is_new, time)
    profile = Profile(
        recording=replace(
            new.recording,
            command="",
            target=f"{new_name} against {base_name}",
            facts=facts,
            time_range=None,
            window_s=max(side.recording.window_s for side in sides),
        ),
        processes=processes,
        # Their exact times are of all classes, and of whole recordings.
        threads=tuple(
            replace(thread, process=process_of[thread.process], on_cpu_ns=0, observed_ns=0)
            for side, process_of in zip(sides, processes_of, strict=True)
            for thread in side.threads
        ),
        binaries=tuple(binary for side in sides for binary in side.binaries),
        functions=functions,
        frames=frames,
        stacks=_stacks(sides, functions_of),
        samples=samples,
        waits=np.zeros(0, WAIT_DTYPE),
        losses=_losses(sides),
        spans=spans,
        difference=difference,
    )
    return profile, difference


def _samples(
    sides: Sequence[Profile], view: View
) -> tuple[npt.NDArray[np.void], npt.NDArray[np.void]]:
    """Return the samples that a view counts, and their spans."""
    samples: list[npt.NDArray[np.void]] = []
    spans: list[npt.NDArray[np.void]] = []
    first_stack = first_thread = first_sample = 0
    for side in sides:
        is_counted = view.selects(side.samples["klass"])
        counted = side.with_samples(is_counted)
        own, own_spans = counted.samples, counted.spans
        own_spans["sample"] += first_sample
        own["stack"] += first_stack
        own["thread"] += first_thread
        samples.append(own)
        spans.append(own_spans)
        first_stack += len(side.stacks)
        first_thread += len(side.threads)
        first_sample += len(own)
    return np.concatenate(samples), np.concatenate(spans)


def _functions(sides: Sequence[Profile]) -> tuple[tuple[Function, ...], list[I64]]:
    """Return the functions of all sides, and by side the number of each of its own."""
    numbers: dict[tuple[FrameKind, str, str], int] = {}
    found: list[Function] = []
    numbers_of: list[I64] = []
    first_binary = 0
    for side in sides:
        own = np.zeros(len(side.functions), np.int64)
        for i, function in enumerate(side.functions):
            file = function.file.rpartition("/")[2] if function.kind is FrameKind.PYTHON else ""
            own[i] = numbers.setdefault((function.kind, function.name, file), len(found))
            if own[i] == len(found):
                binary = None if function.binary is None else first_binary + function.binary
                found.append(replace(function, binary=binary))
        numbers_of.append(own)
        first_binary += len(side.binaries)
    return tuple(found), numbers_of


def _processes(sides: Sequence[Profile]) -> tuple[tuple[Process, ...], list[list[int]]]:
    """Return the programs of all sides, and by side the number of that of each process."""
    others = _other_name(sides)
    found: dict[str, Process] = {}
    numbers: dict[str, int] = {}
    numbers_of = []
    for side in sides:
        own = []
        for process in side.processes:
            name = others.get(process.name, process.name)
            found.setdefault(name, replace(process, pid=0, parent_pid=0, name=name))
            own.append(numbers.setdefault(name, len(numbers)))
        numbers_of.append(own)
    return tuple(found.values()), numbers_of


def _other_name(sides: Sequence[Profile]) -> dict[str, str]:
    """Return by its name what the one program is called that each side alone has.

    A version may be called otherwise, `serve-1.5` after `serve-1.4`. On a whole machine programs
    come and go, and two that do are two.
    """
    new, base = ({process.name for process in side.processes} for side in sides)
    only_new, only_base = new - base, base - new
    if len(only_new) != 1 or len(only_base) != 1 or any(map(is_of_all, sides)):
        return {}
    (after,), (before,) = only_new, only_base
    return dict.fromkeys((before, after), f"{after} (base: {before})")


def _stacks(sides: Sequence[Profile], functions_of: Sequence[I64]) -> Stacks:
    # Of each function there is one frame, of its number.
    frames = [
        function_of[side.frames["function"]][side.stacks.frames].astype(np.uint32)
        for side, function_of in zip(sides, functions_of, strict=True)
    ]
    lengths = np.concatenate([np.diff(side.stacks.offsets) for side in sides])
    offsets = np.zeros(len(lengths) + 1, np.uint64)
    np.cumsum(lengths, out=offsets[1:])
    ends, gil = (
        np.concatenate([getattr(side.stacks, name) for side in sides]) for name in ("ends", "gil")
    )
    return Stacks(offsets, np.concatenate(frames), ends, gil)


def _losses(sides: Sequence[Profile]) -> tuple[Loss, ...]:
    """Return what was lost in all of both recordings."""
    found: dict[str, Loss] = {}
    for loss in (loss for side in sides for loss in side.losses):
        before = found[loss.name].count if loss.name in found else 0
        found[loss.name] = replace(loss, count=before + loss.count)
    return tuple(found.values())


def _facts(base: Profile, new: Profile, names: tuple[str, str]) -> tuple[tuple[str, str], ...]:
    lines = []
    for word, name, side in zip(("base", "new"), names, (base, new), strict=True):
        recording, samples = side.recording, side.samples
        on_cpu = int(samples["count"][samples["klass"] == SampleClass.ON_CPU].sum())
        facts = (name, recording.target, lasted(recording), f"{on_cpu:,} on-CPU samples")
        lines.append((word, showable(", ".join(facts))))
    if any(has_device(side.gpu) for side in (base, new)):
        lines.append(("devices", "not compared: time of threads only"))
    if any((LOSSES_FACT, OF_HOST) in side.recording.facts for side in (base, new)):
        lines.append((LOSSES_FACT, OF_HOST))
    return tuple(lines)
