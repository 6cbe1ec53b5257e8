# SPDX-License-Identifier: Apache-2.0
"""Judges what a guest recorded, from outside: each capture against what its programs measured."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from aiflame.agent.capture.reader import read_capture
from aiflame.agent.model.gpu import Operation
from aiflame.agent.model.profile import (
    COMPLETE_REASONS,
    FrameKind,
    Profile,
    SampleClass,
    StopReason,
)
from recordings import OFF_CPU, frames_of, off_cpu_by_thread

# Of a thousand samples in two functions, 3.7 standard deviations. An emulated machine that does not
# get its host's processor takes fewer, as a timer that is late fires once: then 4 deviations of
# those, and at least so many samples.
_SHARE_POINTS, _SHARE_DEVIATIONS, _FEWEST_SAMPLES = 0.05, 4, 200
# On and off CPU come from one clock; an emulated machine starts and ends a thread in milliseconds.
_WALL_REL, _WALL_SLACK_NS = 0.02, 2_000_000
# A sample or two at a thread's very start and end have no stack.
_COMPLETE = 0.98
# What a program slept is known to the tick; what it waited for a CPU besides is the machine's.
_SLEEP_REL = 0.1
_LAUNCHES_A_ROUND = 23  # of cudalaunches.cu
_OPENCL_SITES = {
    "scale_most": "scale",
    "scale_rest": "scale",
    "divide_all": "divide",
    "stir_all": "stir",
}


@dataclass(slots=True)
class Verdict:
    """What one kernel has shown.

    Attributes:
        failures: What was not as it should be; none if all was.
        bcc: The version of BCC in the guest, empty for none.
        programs: How many programs the kernel took.
        complete: The smallest share of time with complete stacks of all recordings.
        launches: Launches counted, of all that were made.
        instructions: The most that the verifier went through for one program; 0 where the kernel
            does not tell.
        losses: All that recordings said they lost.
    """

    failures: list[str] = field(default_factory=list)
    bcc: str = ""
    programs: int = 0
    complete: float = 1.0
    launches: int = 0
    instructions: int = 0
    losses: Counter[str] = field(default_factory=Counter)

    def expect(self, holds: bool, failure: str) -> None:
        """Notes a failure where something does not hold."""
        if not holds:
            self.failures.append(failure)


def judge(output: Path, with_cuda: bool) -> Verdict:
    """Judges what a guest has left.

    Args:
        output: Its folder.
        with_cuda: Whether it had a CUDA program to record.
    """
    verdict = Verdict()
    facts = json.loads((output / "facts.json").read_text())
    verdict.failures += facts["failures"]
    _judge_doctor(verdict, output)
    _judge_kernel_objects(verdict, facts)
    wanted = ["pid", "cgroup", "all", *(["cuda"] if with_cuda else [])]
    for name in wanted:
        if name not in facts["truth"]:
            verdict.expect(bool(verdict.failures), f"{name}: not recorded")
            continue
        profile, truth = read_capture(output / f"{name}.aiflame"), facts["truth"][name]
        verdict.losses += Counter({loss.name: loss.count for loss in profile.losses})
        if name == "cuda":
            _judge_cuda(verdict, profile, truth["rounds"])
            continue
        _judge_loads(verdict, name, profile, truth)
        if "opencl" in truth:
            _judge_opencl(verdict, profile, truth["opencl"])
    return verdict


def _judge_doctor(verdict: Verdict, output: Path) -> None:
    checks = json.loads((output / "doctor.json").read_text())["checks"]
    for check in checks:
        if check["id"] == "bpf.bcc" and (version := re.search(r"bcc (\S+)", check["finding"])):
            verdict.bcc = version[1]
        words = f"doctor: {check['id']}: {check['finding']}"
        verdict.expect(check["status"] != "fail", words)


def _judge_kernel_objects(verdict: Verdict, facts: dict[str, Any]) -> None:
    instructions = facts.get("instructions", {})
    verdict.programs = len(instructions)
    verdict.instructions = max(instructions.values(), default=0)
    verdict.expect(len(instructions) > 0, "no program was loaded")
    before, after = facts["before"], facts.get("after")
    verdict.expect(after == before, f"left in the kernel: {after}, where before was {before}")


class _Threads:
    """The part of a recording that some threads are."""

    def __init__(self, profile: Profile, threads: list[int]) -> None:
        self._profile = profile
        self.threads = threads
        self._rows = profile.samples[np.isin(profile.samples["thread"], threads)]

    @classmethod
    def of_ids(cls, profile: Profile, *tids: int) -> _Threads:
        """The threads of some ids."""
        return cls(profile, [i for i, t in enumerate(profile.threads) if t.tid in tids])

    @classmethod
    def of_processes(cls, profile: Profile, pids: set[int]) -> _Threads:
        """The threads of some processes."""
        owners = (profile.processes[thread.process].pid for thread in profile.threads)
        return cls(profile, [i for i, pid in enumerate(owners) if pid in pids])

    def ns_in(self, function: str, kind: FrameKind, *classes: SampleClass) -> int:
        """Nanoseconds of some classes below a function."""
        rows = self._rows_in(function, kind, classes)
        return int(rows["ns"].sum())

    def count_in(self, function: str, kind: FrameKind, *classes: SampleClass) -> int:
        """How often, in place of how long."""
        return int(self._rows_in(function, kind, classes)["count"].sum())

    def _rows_in(
        self, function: str, kind: FrameKind, classes: tuple[SampleClass, ...]
    ) -> npt.NDArray[np.void]:
        rows = self._rows[np.isin(self._rows["klass"], classes)]
        return rows[[self._has(int(stack), function, kind) for stack in rows["stack"]]]

    def _has(self, stack: int, function: str, kind: FrameKind) -> bool:
        stacks, frames = self._profile.stacks, self._profile.frames
        begin, end = stacks.offsets[stack : stack + 2]
        found = (self._profile.functions[f] for f in frames["function"][stacks.frames[begin:end]])
        return any(f.kind is kind and f.name.split("(")[0] == function for f in found)

    def complete_and_whole_ns(self) -> tuple[int, int]:
        """Nanoseconds with complete stacks, and all."""
        ends = self._profile.stacks.ends[self._rows["stack"]]
        without = (StopReason.KERNEL_ONLY, StopReason.NOT_RUN_YET)
        whole = np.isin(ends, [*COMPLETE_REASONS, *without])
        return int(self._rows["ns"][whole].sum()), int(self._rows["ns"].sum())


def _judge_loads(
    verdict: Verdict, name: str, profile: Profile, truth: dict[str, dict[str, int]]
) -> None:
    """The three programs of guest.loads, in one recording."""
    complete_ns = whole_ns = 0
    for which, kind in (("c", FrameKind.NATIVE), ("python", FrameKind.PYTHON)):
        measured = truth[which]
        sharing, napping = (
            _Threads.of_ids(profile, measured[f"{thread}.tid"]) for thread in ("shares", "naps")
        )
        _judge_shares(verdict, f"{name}: {which}", sharing, measured, kind)
        _judge_naps(verdict, f"{name}: {which}", napping, measured, kind)
        for threads in (sharing, napping):
            complete, whole = threads.complete_and_whole_ns()
            complete_ns, whole_ns = complete_ns + complete, whole_ns + whole
            _judge_wall(verdict, name, profile, threads)
    share = complete_ns / max(whole_ns, 1)
    verdict.complete = min(verdict.complete, share)
    verdict.expect(share >= _COMPLETE, f"{name}: {100 * share:.2f} % of the time has whole stacks")
    _judge_children(verdict, name, profile, truth["children"])


def _judge_shares(
    verdict: Verdict, name: str, threads: _Threads, truth: dict[str, int], kind: FrameKind
) -> None:
    three, one = (
        threads.count_in(function, kind, SampleClass.ON_CPU)
        for function in ("spend_three", "spend_one")
    )
    expected = truth["spend_three"] / (truth["spend_three"] + truth["spend_one"])
    share = three / max(three + one, 1)
    deviation = math.sqrt(expected * (1 - expected) / max(three + one, 1))
    verdict.expect(
        abs(share - expected) <= max(_SHARE_POINTS, _SHARE_DEVIATIONS * deviation),
        f"{name}: spend_three has {share:.3f} instead of {expected:.3f} of {three + one} samples",
    )
    verdict.expect(three + one >= _FEWEST_SAMPLES, f"{name}: only {three + one} samples")


def _judge_naps(
    verdict: Verdict, name: str, threads: _Threads, truth: dict[str, int], kind: FrameKind
) -> None:
    found_ns = threads.ns_in("take_naps", kind, *OFF_CPU)
    off_ns = truth["take_naps.wall_ns"] - truth["take_naps.cpu_ns"]
    verdict.expect(
        abs(found_ns - off_ns) <= _SLEEP_REL * off_ns, f"{name}: slept {found_ns} ns of {off_ns}"
    )
    naps = threads.count_in("take_naps", kind, SampleClass.BLOCKED)
    # Python waits for its lock after some of them.
    is_right = naps == truth["naps"] or (kind is FrameKind.PYTHON and naps > truth["naps"])
    verdict.expect(is_right, f"{name}: {naps} naps of {truth['naps']}")


def _judge_children(verdict: Verdict, name: str, profile: Profile, truth: dict[str, int]) -> None:
    """All short children are there, with all of their time."""
    pids = {p.pid for p in profile.processes if p.parent_pid == truth["pid"]}
    children = _Threads.of_processes(profile, pids)
    spent_ns = sum(profile.threads[index].on_cpu_ns for index in children.threads)
    verdict.expect(
        len(pids) == truth["children"], f"{name}: {len(pids)} children of {truth['children']}"
    )
    # They take more, for their exec.
    verdict.expect(
        spent_ns >= 0.98 * truth["cpu_ns"],
        f"{name}: children spent {spent_ns} ns of {truth['cpu_ns']}",
    )
    _judge_wall(verdict, name, profile, children)


def _judge_wall(verdict: Verdict, name: str, profile: Profile, threads: _Threads) -> None:
    off_cpu_ns = off_cpu_by_thread(profile)
    for index in threads.threads:
        thread = profile.threads[index]
        whole_ns = thread.on_cpu_ns + int(off_cpu_ns[index])
        slack_ns = _WALL_REL * thread.observed_ns + _WALL_SLACK_NS
        verdict.expect(
            abs(whole_ns - thread.observed_ns) <= slack_ns,
            f"{name}: {thread.name} ({thread.tid}): on + off CPU is {whole_ns} ns"
            f" of {thread.observed_ns}",
        )


def _launches(profile: Profile) -> Counter[tuple[str, str]]:
    """Launches by the function that made them, of those that are known, and kernel."""
    gpu = profile.gpu
    found: Counter[tuple[str, str]] = Counter()
    for row in gpu.calls:
        if gpu.functions[row["function"]].operation is Operation.LAUNCH:
            frames = frames_of(profile, int(row["stack"]))
            site = next((name for name in _OPENCL_SITES if name in frames), "")
            found[site, gpu.kernels[row["kernel"]].name] += int(row["count"])
    return found


def _says_that_calls_are_not_recorded(profile: Profile) -> bool:
    """Whether the kernel takes no probes of calls (before v5.15), and the recording says so."""
    return not len(profile.gpu.calls) and any(
        loss.name == "calls_not_probed" for loss in profile.losses
    )


def _judge_opencl(verdict: Verdict, profile: Profile, truth: dict[str, int]) -> None:
    if _says_that_calls_are_not_recorded(profile):
        return
    found = _launches(profile)
    made = {(s, k): truth[f"{s}.launches"] for s, k in _OPENCL_SITES.items()}
    verdict.launches += sum(found.values())
    verdict.expect(found == made, f"opencl: launches {dict(found)} instead of {made}")


def _judge_cuda(verdict: Verdict, profile: Profile, rounds: int) -> None:
    if _says_that_calls_are_not_recorded(profile):
        return
    found, made = sum(_launches(profile).values()), _LAUNCHES_A_ROUND * rounds
    verdict.launches += found
    verdict.expect(found == made, f"cuda: {found} launches of {made}")
