# SPDX-License-Identifier: Apache-2.0
"""Stacks of code without frame pointers, each compared with the one that it must have been.

One recording of several programs at once, each a tree of functions in which the leaf tells all its
callers (tests/chains.py), compiled so that unwinding finds its rules in another way. The tables are
in the cache by then: a first recording, while the programs still wait, is there to have them built.
"""

from __future__ import annotations

import subprocess
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from aiflame.agent.elf.contents import for_unwinding, whole_file
from aiflame.agent.elf.image import ElfImage
from aiflame.agent.model.profile import Profile, SampleClass, StopReason
from aiflame.agent.symbols.store import Store, cache_dir
from aiflame.agent.target_files import TargetFile
from aiflame.agent.unwind.build import load, table_name
from aiflame.agent.unwind.questions import TINY_FILE_BYTES
from breadth import cases
from chain_truth import Verdict, Wrong, judge, user_frames
from chains import Shape, Tree, make_tree
from recordings import Recording, Workload
from support import WORKLOADS, wait_until

pytestmark = [pytest.mark.bpf, pytest.mark.slow]

_HZ = 4999
# As in chains.c: what is not judged, since the tables may still be on their way.
_SETTLED_MS = 100
# For a table of a hundred kilobytes, on a machine with other work.
_PATIENCE_S = 30
# Tail calls would take callers out of the truth.
_FLAGS = ("-fomit-frame-pointer", "-fno-optimize-sibling-calls", "-pthread")
_LAZY = ("-rdynamic", "-Wl,-z,lazy")


@dataclass(frozen=True, slots=True)
class Variant:
    """A way to build a tree. The largest is what most samples are of."""

    size: int
    cpu_ms: int
    flags: tuple[str, ...]
    link_flags: tuple[str, ...] = _LAZY
    has_library: bool = True

    @property
    def tree(self) -> Tree:
        """The functions, always the same."""
        return make_tree(self.size, self.size, list(Shape))


VARIANTS = {
    "O2": Variant(1500, 4300, ("-O2",)),
    "O3-ibt": Variant(400, 800, ("-O3", "-fcf-protection=full"), (*_LAZY, "-Wl,-z,ibtplt")),
    "static-pie": Variant(400, 800, ("-O2", "-fPIE"), ("-static-pie",), False),
    "static": Variant(400, 800, ("-Os", "-fno-pie"), ("-static", "-no-pie"), False),
    "debug-frame": Variant(400, 800, ("-O2", "-g1", "-fno-asynchronous-unwind-tables")),
}


@dataclass(frozen=True, slots=True)
class Run:
    """The recording of this file."""

    profile: Profile
    trees: dict[str, Tree]
    pids: dict[str, int]


def _build(folder: Path, tree: Tree, variant: Variant) -> Path:
    folder.mkdir()
    program, library = tree.write(folder)
    flags = [*variant.flags, *_FLAGS]
    sources: list[Path | str] = [program, WORKLOADS / "chains.c"]
    if variant.has_library:
        shared = ["-shared", "-fPIC", "-Wl,-z,lazy", "-o", folder / "library.so"]
        subprocess.run(["gcc", *flags, *shared, library], check=True)
        sources += [folder / "library.so", "-Wl,-rpath,$ORIGIN"]
    else:
        sources.append(library)
    output = folder / "chains"
    subprocess.run(["gcc", *flags, *variant.link_flags, "-o", output, *sources], check=True)
    return output


def _has_table(binary: Path) -> bool:
    with binary.open("rb") as file:
        opened = TargetFile(file.fileno())
        if opened.size_bytes <= TINY_FILE_BYTES:  # it is made whenever somebody maps it
            return True
        whole = whole_file(opened.size_bytes)
        if whole.is_small:
            name = table_name("", whole.digest(opened))
        else:
            image = ElfImage.read(opened)
            name = table_name(image.build_id, for_unwinding(opened, image).digest(opened))
        return load(name, Store(cache_dir())) is not None


def _mapped_files(pid: int) -> set[Path]:
    lines = map(str.split, Path(f"/proc/{pid}/maps").read_text().splitlines())
    return {Path(line[5]) for line in lines if "x" in line[1] and line[5].startswith("/")}


def _fill_cache(folder: Path, programs: list[Path]) -> None:
    """Records the programs until each of the files that they map has its table."""
    with ExitStack() as stack:
        loads = [stack.enter_context(Workload([program])) for program in programs]
        with Recording(folder, *_target(loads), "-o", "1.aiflame") as recording:
            for load in loads:
                load.go()
            files = [file for load in loads for file in _mapped_files(load.pid)]
            wait_until(lambda: all(map(_has_table, files)), _PATIENCE_S)
            for load in loads:
                load.process.kill()
            recording.wait()


def _target(loads: list[Workload]) -> list[object]:
    return ["-p", ",".join(str(load.pid) for load in loads), "--no-off-cpu", "-F", _HZ]


@pytest.fixture(scope="module")
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("chains")
    tests = [item for item in request.session.items if item.path == request.path]
    tested = {test.callspec.params["name"] for test in tests}
    variants = {name: variant for name, variant in VARIANTS.items() if name in tested}
    trees = {name: variant.tree for name, variant in variants.items()}
    programs = [_build(folder / name, trees[name], v) for name, v in variants.items()]
    _fill_cache(folder, programs)
    with ExitStack() as stack:
        loads = [
            stack.enter_context(Workload([program, variant.cpu_ms]))
            for program, variant in zip(programs, variants.values(), strict=True)
        ]
        with Recording(folder, *_target(loads)) as recording:
            for load in loads:
                load.go()
            for load in loads:
                load.truth()
            profile = recording.stop().profile
    pids = {name: load.pid for name, load in zip(variants, loads, strict=True)}
    return Run(profile, trees, pids)


def _judged(run: Run, name: str) -> tuple[Counter[StopReason], Counter[Verdict]]:
    """Judges all on-CPU samples of a program; returns samples by end and by verdict."""
    profile, wrong = run.profile, []
    ends: Counter[StopReason] = Counter()
    verdicts: Counter[Verdict] = Counter()
    for row in profile.samples[profile.samples["klass"] == SampleClass.ON_CPU]:
        thread = profile.threads[row["thread"]]
        if profile.processes[thread.process].pid != run.pids[name]:
            continue
        frames = user_frames(profile, int(row["stack"]))
        end = StopReason(profile.stacks.ends[row["stack"]])
        if frames and "settle" in frames[:3]:
            continue
        ends[end] += int(row["count"])
        if frames and frames[0] in ("__restore_rt", "_dl_runtime_resolve@plt"):
            frames = frames[1:]  # a handler has returned; a function's first call is on its way
        try:
            verdicts[judge(run.trees[name], frames, end)] += int(row["count"])
        except Wrong as error:
            wrong.append((str(error), end.label, frames))
    assert not wrong, (len(wrong), wrong[:3])
    return ends, verdicts


@cases("name", VARIANTS)
def test_every_stack_is_the_one_that_its_leaf_can_have(run: Run, name: str) -> None:
    ends, verdicts = _judged(run, name)
    samples = ends.total()
    # A sample a period; a machine with other work may be late with some.
    assert samples > 0.85 * (VARIANTS[name].cpu_ms - _SETTLED_MS) * _HZ / 1000
    # The rest: prologues of functions that realign their stack, lazy binding: 0.4 % of the largest
    # tree, and 0.2 to 0.5 % of the others, of which 1 % would be four standard deviations more.
    assert ends[StopReason.ROOTED] >= 0.99 * samples, ends
    assert sum(n for verdict, n in verdicts.items() if verdict.is_judged) > 0.8 * samples
    assert sum(n for verdict, n in verdicts.items() if verdict.has_signal) > 0.005 * samples
    assert max(verdict.depth for verdict in verdicts) > 25
    assert not run.profile.losses
