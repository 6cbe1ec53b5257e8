# SPDX-License-Identifier: Apache-2.0
"""By how much attribution is off on real runs: OpenCL programs that know who launched what.

Each scenario is a recording of workloads/clsites.c, whose samples tell by their line which function
launched them. `python tests/launch_truth.py 10` prints the table that the documentation shows.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
from aiflame.agent.model.gpu import NONE
from aiflame.agent.model.profile import NS_PER_S, Profile
from aiflame.gpu.attribution import Certainty, attribution_of
from recordings import Ended, Recording, Workload, frames_of
from support import AIFLAME, WORKLOADS

# The line of site 0's loop in the kernels' source; those of the others follow.
_FIRST_LINE = 6
_SITES = 10
_UNKNOWN = -1


@dataclass(frozen=True)
class Scenario:
    """What is launched, as the arguments of workloads/clsites.c say, and how it is recorded.

    Attributes:
        is_late: The recording begins while launches are under way.
        recorder: What records.
    """

    name: str
    kernel_us: int
    sites: int
    depth: int = 1
    queues: int = 1
    cost: str = "items"
    wait: str = "finish"
    order: str = "ordered"
    kernels: str = "random"
    processes: int = 1
    length_ms: int = 5000
    is_late: bool = False
    options: tuple[str, ...] = field(default=())
    recorder: tuple[str, ...] = (*AIFLAME, "record")


@dataclass(frozen=True)
class Measured:
    """What became of a recording's samples: shares of those whose launch is known, 0 to 1.

    Attributes:
        samples: How many.
        wrong: Samples that are with another function than that which launched them.
        off: Half the sum of differences between true and found counts, by function.
        exact: Samples that are said to be exact.
        exact_wrong: Samples that are said to be exact, and are wrong.
        unattributed: Samples of which nothing is said.
        told: What is said of `off`.
        told_if_unequal: And if nothing tells what launches cost.
    """

    samples: int
    wrong: float
    off: float
    exact: float
    exact_wrong: float
    unattributed: float
    told: float
    told_if_unequal: float


# Longer than others: a recorder may need seconds to start.
_LATE_MS = 8000

SCENARIOS = (
    Scenario("2 sites, 100 ms, one by one", 100_000, 2, length_ms=8000),
    Scenario("2 sites, 500 ms, one by one", 500_000, 2, length_ms=12_000),
    Scenario("10 sites, 20 ms, one by one", 20_000, 10),
    Scenario("4 sites, 1 ms, one by one", 1_000, 4),
    Scenario("4 sites, 20 us, one by one", 20, 4),
    Scenario("4 sites, 20 ms, by event", 20_000, 4, wait="event"),
    Scenario("4 sites, 20 ms, by a blocking read", 20_000, 4, wait="read"),
    Scenario("4 sites, 20 ms, cost not by work", 20_000, 4, cost="rounds"),
    Scenario("2 sites, 100 ms, queued by 8", 100_000, 2, depth=8, length_ms=8000),
    Scenario("1 site, 5 ms, queued by 16", 5_000, 1, depth=16),
    Scenario("4 sites, 5 ms, queued by 16", 5_000, 4, depth=16),
    Scenario("4 sites, 200 us, queued by 64", 200, 4, depth=64),
    Scenario("4 sites, 5 ms, queued by 16, cost not by work", 5_000, 4, depth=16, cost="rounds"),
    Scenario("10 sites, 5 ms, queued by 16", 5_000, 10, depth=16),
    Scenario("4 sites, 20 ms, 3 queues", 20_000, 4, depth=3, queues=3),
    Scenario("4 sites, 5 ms, 3 queues, queued by 12", 5_000, 4, depth=12, queues=3),
    Scenario("4 processes, 4 sites, 20 ms", 20_000, 4, processes=4),
    Scenario("4 processes, 4 sites, 5 ms, queued by 16", 5_000, 4, depth=16, processes=4),
    Scenario(
        "4 sites, 20 ms, one by one, late attach", 20_000, 4, length_ms=_LATE_MS, is_late=True
    ),
    Scenario(
        "4 sites, 5 ms, queued by 16, late attach",
        5_000,
        4,
        depth=16,
        length_ms=_LATE_MS,
        is_late=True,
    ),
    Scenario("4 sites, 5 ms, queued by 16, any order", 5_000, 4, depth=16, order="any"),
    Scenario(
        "4 sites, 5 ms, queued by 4, any order, by event", 5_000, 4, 4, wait="event", order="any"
    ),
    Scenario("4 sites, 2 kernels in turn, 200 us", 200, 4, 4, kernels="turn"),
    Scenario("4 sites, 2 kernels in turn, 2 ms", 2_000, 4, 4, kernels="turn"),
    Scenario("10 sites, 2 kernels in turn, 200 us", 200, 10, 10, kernels="turn"),
    Scenario(
        *("4 sites, 2 kernels in turn, 2 ms, cost not by work", 2_000, 4, 4),
        *(1, "rounds", "finish", "ordered", "turn"),
    ),
)


def build(folder: Path) -> Path:
    """Compiles the workload; returns the program."""
    program = folder / "clsites"
    command = ["cc", "-g", "-O1", "-fno-omit-frame-pointer", "-o", str(program)]
    subprocess.run([*command, str(WORKLOADS / "clsites.c"), "-lOpenCL", "-lpthread"], check=True)
    return program


def record(scenario: Scenario, program: Path, folder: Path) -> Ended:
    """Records a scenario."""
    cache = folder / "cache"
    cache.mkdir(exist_ok=True)
    environment = {**os.environ, "POCL_CACHE_DIR": str(cache), "HOME": str(folder)}
    s = scenario
    numbers = s.length_ms, s.kernel_us, s.sites, s.depth, s.queues
    command = [program, *numbers, s.cost, s.wait, s.order, s.kernels]
    with ExitStack() as stack:
        running = [
            stack.enter_context(Workload(command, env=environment)) for _ in range(s.processes)
        ]
        if s.is_late:
            for workload in running:
                workload.go()
        pids = ",".join(str(workload.pid) for workload in running)
        words = ["-p", pids, "--force", *s.options]
        recording = stack.enter_context(Recording(folder, *words, program=s.recorder))
        if not s.is_late:
            for workload in running:
                workload.go()
        for workload in running:
            workload.truth()
        return recording.stop()


def _true_sites(profile: Profile) -> npt.NDArray[np.int64]:
    """Returns the site that launched each sample by its line, or _UNKNOWN; shape (samples,)."""
    lines = {(row.code, row.offset): row.line for row in profile.gpu.instructions}
    found = [lines.get((int(s["code"]), int(s["offset"])), 0) for s in profile.gpu.samples]
    site = np.array(found, np.int64) - _FIRST_LINE
    return np.where((site >= 0) & (site < _SITES), site, _UNKNOWN)


def _sites_of_stacks(profile: Profile) -> npt.NDArray[np.int64]:
    """Returns the site that each stack is of, or _UNKNOWN; shape (stacks,)."""
    found = np.full(len(profile.stacks), _UNKNOWN, np.int64)
    for stack in range(len(found)):
        for name in frames_of(profile, stack):
            if name.startswith("site_"):
                found[stack] = int(name.removeprefix("site_"))
    return found


def measure(profile: Profile) -> Measured:
    """Compares what a profile says with what its samples tell."""
    found = attribution_of(profile.gpu)
    parts = found.rows
    truth = _true_sites(profile)[parts["sample"]]
    stacks = np.append(_sites_of_stacks(profile), _UNKNOWN)
    site = stacks[np.where(parts["stack"] == NONE, len(stacks) - 1, parts["stack"])]
    is_known = truth != _UNKNOWN
    count = parts["count"].astype(float)[is_known]
    truth, site, certainty = truth[is_known], site[is_known], parts["certainty"][is_known]
    whole = count.sum()
    by_truth = np.bincount(truth, count, _SITES)
    by_site = np.bincount(site + 1, count, _SITES + 1)
    is_exact = certainty == Certainty.EXACT
    return Measured(
        samples=int(whole),
        wrong=float(count[site != truth].sum() / whole),
        off=float((abs(by_truth - by_site[1:]).sum() + by_site[0]) / 2 / whole),
        exact=float(count[is_exact].sum() / whole),
        exact_wrong=float(count[is_exact & (site != truth)].sum() / whole),
        unattributed=float(count[certainty == Certainty.UNATTRIBUTED].sum() / whole),
        told=found.error.expected,
        told_if_unequal=found.error.if_unequal,
    )


def without_times(profile: Profile) -> Profile:
    """Returns the same recording of a device that tells the second of a sample alone."""
    samples = profile.gpu.samples.copy()
    samples["begin_ns"] = samples["interval"].astype(np.uint64) * NS_PER_S
    samples["end_ns"] = samples["begin_ns"] + NS_PER_S
    return replace(profile, gpu=replace(profile.gpu, samples=samples))


def table(runs: Mapping[str, Sequence[tuple[Measured, Measured]]]) -> Iterator[str]:
    """Yields the lines of the table: by scenario, what was measured with and without times."""
    yield "| scenario | samples | off | told | one by one | exact | without times | told |"
    yield "|---|---|---|---|---|---|---|---|"
    for name, measured in runs.items():
        timed, untimed = ([pair[i] for pair in measured] for i in (0, 1))
        cells = (
            *(name, f"{np.median([m.samples for m in timed]):.0f}"),
            *(_typical([m.off for m in timed]), _told(timed)),
            _typical([m.wrong for m in timed]),
            f"{100 * np.median([m.exact for m in timed]):.1f} %",
            *(_typical([m.off for m in untimed]), _told(untimed)),
        )
        yield f"| {' | '.join(cells)} |"


def _typical(shares: Sequence[float]) -> str:
    """Returns the median and the worst of some runs."""
    return f"{100 * np.median(shares):.1f} ({100 * max(shares):.1f}) %"


def _told(measured: Sequence[Measured]) -> str:
    """Returns what is told in the median, if it matters also of launches of unequal cost."""
    told = float(np.median([m.told for m in measured]))
    if_unequal = float(np.median([m.told_if_unequal for m in measured]))
    words = f"{100 * told:.1f} %"
    return words if if_unequal < 2 * max(told, 0.005) else f"{words}, {100 * if_unequal:.0f} %"


def main() -> None:
    """Prints the table: of so many runs of the scenarios that have a text in their names."""
    runs: dict[str, list[tuple[Measured, Measured]]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        program = build(folder)
        for _ in range(int(sys.argv[1]) if len(sys.argv) > 1 else 1):
            for scenario in SCENARIOS:
                if len(sys.argv) > 2 and sys.argv[2] not in scenario.name:
                    continue
                ended = record(replace(scenario, options=("-F", "499")), program, folder)
                profile = ended.profile
                pair = measure(profile), measure(without_times(profile))
                runs.setdefault(scenario.name, []).append(pair)
    print("\n".join(table(runs)))


if __name__ == "__main__":
    main()
