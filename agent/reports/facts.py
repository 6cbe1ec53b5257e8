# SPDX-License-Identifier: Apache-2.0
"""What is said in words around a flame graph: title, what its whole is, what is missing from it.

Each number comes with its unit and each percentage names its whole.
"""

from __future__ import annotations

import math
from pathlib import PurePosixPath
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from aiflame.agent.losses import LossKind
from aiflame.agent.model.profile import (
    EXITED,
    LOSSES_FACT,
    OF_HOST,
    UNMAPPED,
    FrameKind,
    Function,
    Loss,
    Profile,
    Recording,
    SampleClass,
    StopReason,
)
from aiflame.agent.reports.accounts import account_facts, disagreement
from aiflame.agent.reports.base import ReportOptions
from aiflame.agent.reports.rows import TRUNCATED_REASONS
from aiflame.agent.reports.words import duration, percent, showable

# Below this many samples a flame graph says little; flame graph tools have long warned at 100.
FEW_SAMPLES = 100

# Where stacks are truncated, in a line: more is in `aiflame stats`.
_MODULES_NAMED = 3
# Less time in truncated stacks than this share of it is worth no sentence.
_LEAST_TOLD = 0.005
_LEAST_SHARE = 0.0005
# What stands for a module where there is none, and what that says.
_GENERATED, _NO_STACK = "[generated code]", "[no stack]"
MODULE_MARKS = {
    _GENERATED: "code of no file, as compilers at run time make it",
    _NO_STACK: "not one frame is known",
    EXITED: "of processes whose mappings nobody had read",
    UNMAPPED: "at addresses where nothing was mapped",
}
# The library of OpenJDK's virtual machine.
_JVM = "libjvm.so"

# Losses that cost time. Others cost frames, names or single events.
_LOSSES_OF_TIME = frozenset(kind.stored_name for kind in LossKind if kind.is_of_time)

_ASKED_FOR = frozenset(kind.stored_name for kind in LossKind if kind.is_asked_for)


def moment(ns: int) -> str:
    """Return a time since the start of a recording, to the millisecond: "2.5 s"."""
    return f"{ns / 1e9:.3f}".rstrip("0").rstrip(".") + " s"


def range_words(recording: Recording) -> str:
    """Return which part of a recording a profile is of: "10 s to 25 s of 30 s"."""
    shown = recording.shown_range
    whole = f" of {moment(recording.duration_ns)}" if recording.duration_ns else ""
    return f"{moment(shown.start_ns)} to {moment(shown.end_ns)}{whole}"


def lasted(recording: Recording) -> str:
    """Return how long was recorded, or which part of that a profile is of."""
    if recording.time_range is None:
        return f"recorded in {duration(recording.duration_ns)}"
    return f"{range_words(recording)} recorded"


def counted(number: int, noun: str) -> str:
    """Return "1 frame", "2 frames", "3,000 frames"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def left_out(nodes: int, reason: str, ns: int, whole_ns: int) -> str:
    """Return the sentence about frames that a flame graph does not show."""
    return (
        f"Left out: {counted(nodes, 'frame')}, {reason}; the frames they belong to keep their"
        f" time, {percent(ns, whole_ns)} of the whole."
    )


def title(profile: Profile, options: ReportOptions) -> str:
    """Return the title of a flame graph."""
    return showable(options.title or f"aiflame: {profile.recording.target}")


def subtitle(profile: Profile, options: ReportOptions, whole_ns: int) -> str:
    """Return what the whole of the flame graph is."""
    whole = f"100 % = {duration(whole_ns)} of {options.view.label}"
    if profile.fleet is not None:  # which tells no threads apart
        return f"{whole}, {profile.fleet.when}"
    threads = counted(len(np.unique(profile.samples["thread"])), "thread")
    return f"{whole} summed over {threads}, {lasted(profile.recording)}"


def complete_share(profile: Profile, *, is_on_cpu: bool = False) -> tuple[int, int]:
    """Return the time in stacks walked to their root, and the time in all stacks, in ns.

    Args:
        profile: The profile.
        is_on_cpu: Of CPU time, else of all.
    """
    samples = profile.samples
    if is_on_cpu:
        samples = samples[samples["klass"] == SampleClass.ON_CPU]
    truncated = np.isin(profile.stacks.ends, TRUNCATED_REASONS)[samples["stack"]]
    ns = samples["ns"]
    whole = int(ns.sum())
    return whole - int(ns[truncated].sum()), whole


def complete_words(profile: Profile) -> str:
    """Return the share of CPU time and of all time in complete stacks: waits hide the former.

    Of CPU time, what a checked heuristic found a caller of is told apart.
    """
    if not len(profile.samples):
        return "none, as nothing was recorded"
    of_all = f"{percent(*complete_share(profile))} of all time"
    complete, whole = complete_share(profile, is_on_cpu=True)
    if not whole:
        return of_all
    samples = profile.samples[profile.samples["klass"] == SampleClass.ON_CPU]
    ends = profile.stacks.ends[samples["stack"]]
    heuristic = int(samples["ns"][ends == StopReason.ROOTED_BY_HEURISTIC].sum())
    is_told = heuristic >= max(_LEAST_SHARE * whole, 1)
    apart = f" ({percent(heuristic, whole)} by a checked heuristic)" if is_told else ""
    return f"{percent(complete, whole)} of CPU time{apart} and {of_all}"


def missing_time(profile: Profile) -> tuple[int, int]:
    """Return the time of threads that is in no sample, and all that they were observed, in ns.

    Off the CPU both are exact. On it samples are compared with the exact time of all threads, and
    what may be chance counts as nothing: three standard deviations of a Poisson process.
    """
    threads = len(profile.threads)
    observed = np.array([thread.observed_ns for thread in profile.threads], np.int64)
    exact = np.array([thread.on_cpu_ns for thread in profile.threads], np.int64)
    samples, ns = profile.samples, profile.samples["ns"].astype(np.int64)
    on_cpu = samples["klass"] == SampleClass.ON_CPU
    sampled, off_cpu = np.zeros(threads, np.int64), np.zeros(threads, np.int64)
    np.add.at(sampled, samples["thread"][on_cpu], ns[on_cpu])
    np.add.at(off_cpu, samples["thread"][~on_cpu], ns[~on_cpu])
    # Nobody counted the time on the CPU of a thread that found no room in the kernel half's table.
    accounted = np.where(exact > 0, exact, sampled) + off_cpu
    missing = int(np.maximum(observed - accounted, 0).sum())
    known = (observed > 0) & (exact > 0)
    chance = 3 * profile.recording.period_ns * math.sqrt(max(1, samples["count"][on_cpu].sum()))
    unsampled = int(exact[known].sum()) - int(sampled[known].sum())
    missing += unsampled if unsampled > chance else 0
    return missing, int(observed.sum())


def missing_line(profile: Profile) -> str:
    """Return how much time of threads losses have cost; "" for too little to say."""
    names = [loss.name for loss in profile.losses if loss.count and loss.name in _LOSSES_OF_TIME]
    missing, observed = missing_time(profile)
    if not names or missing < max(_LEAST_SHARE * observed, 1):
        return ""
    whole, why = duration(observed), ", ".join(names)
    return f"{duration(missing)} of {whole} of thread time is missing ({why})"


def truncated_modules(profile: Profile, stack_ns: npt.NDArray[np.integer]) -> dict[str, int]:
    """Return the modules that truncated stacks end in, and the ns of such stacks, most first.

    Args:
        profile: The profile.
        stack_ns: Time of each stack, shape (stacks,).
    """
    is_truncated = np.isin(profile.stacks.ends, TRUNCATED_REASONS)
    cut = np.flatnonzero(is_truncated & (stack_ns > 0))
    walked = np.diff(profile.stacks.offsets)[cut] > 0
    function = np.full(len(cut), -1, np.int64)
    function[walked] = _outermost(profile, cut[walked])
    ns = np.zeros(len(profile.functions) + 1, np.int64)
    np.add.at(ns, function, stack_ns[cut].astype(np.int64))
    sums: dict[str, int] = {}
    for at in np.unique(function).tolist():
        name = _NO_STACK if at < 0 else _shown_module(profile, profile.functions[at])
        sums[name] = sums.get(name, 0) + int(ns[at])
    return dict(sorted(sums.items(), key=lambda item: (-item[1], item[0])))


def _outermost(profile: Profile, stacks: npt.NDArray[np.int64]) -> npt.NDArray[np.uint32]:
    """Return the outermost function of each stack, none of which is empty.

    Python's own, which are known where native ones are cut short, are passed over where there are
    others: they are in no module.
    """
    is_python = np.array([f.kind is FrameKind.PYTHON for f in profile.functions], np.bool_)
    starts, stops = (profile.stacks.offsets[stacks + more].astype(np.int64) for more in (0, 1))
    at = starts.copy()
    left: npt.NDArray[np.int64] = np.arange(len(stacks))
    while len(left):
        left = left[is_python[_functions_at(profile, at[left])]]
        at[left] += 1
        left = left[at[left] < stops[left]]
    return _functions_at(profile, np.where(at < stops, at, starts))


def _functions_at(profile: Profile, at: npt.NDArray[np.int64]) -> npt.NDArray[np.uint32]:
    found: npt.NDArray[np.uint32] = profile.frames["function"][profile.stacks.frames[at]]
    return found


def _shown_module(profile: Profile, function: Function) -> str:
    if function.name in (EXITED, UNMAPPED):
        return function.name
    module = module_of(profile, function.binary)
    return showable(module) if module else _GENERATED


def module_of(profile: Profile, binary: int | None) -> str:
    """Return the file name of a binary, "" for none."""
    if binary is None:
        return ""
    path = profile.binaries[binary].path
    return PurePosixPath(path).name or path


def truncated_words(profile: Profile) -> str:
    """Return where stacks are truncated, for how much of all time, and why; "" for too little."""
    found = _truncated(profile, _LEAST_SHARE)
    return ", ".join(
        f"{module} {percent(all_ns, whole_ns)} ({reason.label})"
        for module, reason, _, (all_ns, whole_ns) in found
    )


def truncated_lines(profile: Profile) -> list[str]:
    """Return where most time is in truncated stacks, why, and what cures it, a sentence each."""
    lines = []
    java = generated_line(profile)
    for module, reason, (cpu_ns, cpu_whole_ns), of_all in _truncated(profile, _LEAST_TOLD):
        if java and module == _GENERATED and reason is StopReason.NO_TABLE:
            continue
        of_cpu = f"{percent(cpu_ns, cpu_whole_ns)} of CPU time, " if cpu_whole_ns else ""
        where = "without any frame" if module == _NO_STACK else f"in {module}"
        lines.append(
            f"Truncated {where}: {of_cpu}{percent(*of_all)} of all time"
            f" ({reason.label}: {reason.meaning})."
        )
    return [f"{java}.", *lines] if java else lines


class _Truncated(NamedTuple):
    """Stacks that end in a module for a reason: their time, and that of all stacks, in ns."""

    module: str
    reason: StopReason
    of_cpu: tuple[int, int]
    of_all: tuple[int, int]


def _truncated(profile: Profile, least_share: float) -> list[_Truncated]:
    """Return where stacks are truncated for at least a share of CPU time or of all, most first."""
    all_ns = _stack_ns(profile, profile.samples)
    is_on_cpu = profile.samples["klass"] == SampleClass.ON_CPU
    cpu_ns = _stack_ns(profile, profile.samples[is_on_cpu])
    all_whole, cpu_whole = int(all_ns.sum()), int(cpu_ns.sum())
    found = []
    for reason in TRUNCATED_REASONS:
        is_of_reason = profile.stacks.ends == reason
        of_cpu = truncated_modules(profile, np.where(is_of_reason, cpu_ns, 0))
        for module, ns in truncated_modules(profile, np.where(is_of_reason, all_ns, 0)).items():
            on_cpu = (of_cpu.get(module, 0), cpu_whole)
            found.append(_Truncated(module, reason, on_cpu, (ns, all_whole)))
    shares = {one: max(a / b if b else 0 for a, b in (one.of_cpu, one.of_all)) for one in found}
    told = [one for one in found if shares[one] >= least_share]
    return sorted(told, key=lambda one: (-shares[one], one.module))[:_MODULES_NAMED]


def _stack_ns(profile: Profile, samples: npt.NDArray[np.void]) -> npt.NDArray[np.int64]:
    """Return the time of each stack in some samples, shape (stacks,)."""
    found = np.zeros(len(profile.stacks), np.int64)
    np.add.at(found, samples["stack"], samples["ns"].astype(np.int64))
    return found


def generated_line(profile: Profile) -> str:
    """Return how much CPU time lost its callers in code that Java made; "" for too little."""
    if not any(module_of(profile, at) == _JVM for at in range(len(profile.binaries))):
        return ""
    on_cpu = profile.samples["klass"] == SampleClass.ON_CPU
    stack_ns = _stack_ns(profile, profile.samples[on_cpu])
    whole = int(stack_ns.sum())
    stack_ns[profile.stacks.ends != StopReason.NO_TABLE] = 0
    cut = truncated_modules(profile, stack_ns).get(_GENERATED, 0)
    if cut < max(_LEAST_SHARE * whole, 1):
        return ""
    return (
        f"{percent(cut, whole)} of CPU time is truncated in generated code, which keeps no frame"
        " pointers: Java's does when it is started with -XX:+PreserveFramePointer"
    )


def warnings(profile: Profile) -> list[str]:
    """Return what a reader should know before trusting the flame graph, one sentence each."""
    return [*doubts(profile), *lost(profile)]


def doubts(profile: Profile) -> list[str]:
    """Return the same without losses."""
    on_cpu = profile.samples["klass"] == SampleClass.ON_CPU
    samples = int(profile.samples["count"][on_cpu].sum())
    recording = profile.recording
    lines = []
    if not len(profile.samples) and recording.time_range is not None:
        lines.append(f"No thread of the target ran or waited in {range_words(recording)}.")
    elif not len(profile.samples):
        lines.append(
            "Nothing was recorded: no thread of the target ran or waited. Was it the right"
            " process, and did the recording last long enough?"
        )
    elif samples < FEW_SAMPLES and (samples or profile.difference is None):
        # What is compared may be time off the CPU alone.
        whole = recording.time_range is None
        cure = "Record for longer, or with" if whole else "Choose a longer range, or record with"
        lines.append(
            f"Few samples on the CPU ({samples}): shares of CPU time are rough. {cure} a higher -F."
        )
    found = (generated_line(profile), missing_line(profile), disagreement(profile))
    lines += [f"{line}." for line in found if line]
    return lines


def lost(profile: Profile) -> list[str]:
    """Return what was lost and what that means, one sentence each."""
    return [
        _lost(loss, profile.recording) + (f" ({showable(loss.meaning)})" if loss.meaning else "")
        for loss in profile.losses
        if loss.count and not is_asked_for(loss)
    ]


def lost_in_short(profile: Profile) -> str:
    """Return the names of all losses and how often each was, in one sentence."""
    losses = [loss for loss in profile.losses if loss.count and not is_asked_for(loss)]
    names = ", ".join(f"{showable(loss.name)} {loss.count:,}" for loss in losses)
    return f"Lost{loss_scope(profile.recording)}: {names}."


def _lost(loss: Loss, recording: Recording) -> str:
    return f"Lost {showable(loss.name)}: {loss.count:,}{loss_scope(recording)}"


def is_asked_for(loss: Loss) -> bool:
    """Whether the user said that it is to be left out: then nothing is wrong."""
    return loss.name in _ASKED_FOR


def asked_for(profile: Profile) -> list[str]:
    """Return what is not in a profile because the user said so, one sentence each."""
    scope = loss_scope(profile.recording)
    return [
        f"Left out as asked for: {showable(loss.name)} {loss.count:,}{scope}"
        for loss in profile.losses
        if loss.count and is_asked_for(loss)
    ]


def loss_scope(recording: Recording) -> str:
    """Return what losses are of, if that is more than what is reported, to be said after them."""
    where = " on the whole host" if (LOSSES_FACT, OF_HOST) in recording.facts else ""
    return where if recording.time_range is None else f"{where} in the whole recording"


def _range_fact(recording: Recording) -> str:
    return (
        f"{range_words(recording)}: whole seconds, all that the chosen range touches. Waits shorter"
        " than the recording's --min-wait, and time preempted, are in the second in which they"
        " ended; losses and the recorder's own cost are of the whole recording"
        + _evenly_words(recording.window_s)
    )


def _evenly_words(window_s: int) -> str:
    if window_s == 1:
        return ""
    return (
        f". Of up to {window_s} s at once it is not known when in them something was: each second"
        " has an equal part, but for waits that are listed one by one"
    )


def own_cost(recording: Recording) -> str:
    """Return what recording took; "" where nobody told, as of several hosts."""
    if not recording.recorder_peak_rss_bytes:
        return ""
    own = recording.recorder_cpu_ns
    return (
        f"{duration(own)} of CPU time ({percent(own, recording.duration_ns)} of one CPU),"
        f" {recording.recorder_peak_rss_bytes / 2**20:.1f} MiB of memory at its peak"
    )


def recording_facts(profile: Profile) -> list[tuple[str, str]]:
    """Return the lines shown under a page: the recording, and what it cost."""
    recording = profile.recording
    on_cpu = profile.samples["klass"] == SampleClass.ON_CPU
    counts = profile.samples["count"]
    ended = "" if recording.time_range is None else " that ended in the time range"
    lines = [
        *([("command", recording.command)] if recording.command else []),
        ("target", recording.target),
        ("duration", duration(recording.duration_ns)),
        *([("time range", _range_fact(recording))] if recording.time_range is not None else []),
        (
            "on-CPU samples",
            f"{int(counts[on_cpu].sum()):,}, each weighing {duration(recording.period_ns)}",
        ),
        ("off-CPU intervals", f"{int(counts[~on_cpu].sum()):,}{ended}, exact"),
        *account_facts(profile),
        ("complete stacks", complete_words(profile)),
        *([("truncated in", cut)] if (cut := truncated_words(profile)) else []),
        *recording.facts,
        *([("recorder's own cost", cost)] if (cost := own_cost(recording)) else []),
        ("aiflame", recording.aiflame_version),
    ]
    return [(showable(name), showable(value)) for name, value in lines]
