# SPDX-License-Identifier: Apache-2.0
"""What kernels do with probes is tried, and each way that an older one needs counts every call."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from aiflame.agent.inspector.inspector import Inspector
from aiflame.agent.kernel import abi, sysbpf
from aiflame.agent.kernel.loader import ProgramOptions, Programs, load_programs
from aiflame.agent.kernel.uprobe_tries import (
    NopTreatment,
    Treatment,
    UprobeAnswers,
    UprobeTries,
    try_uprobes,
)
from aiflame.agent.launches.links import ApiLinks, Probe
from aiflame.agent.launches.probe_sites import ProbeSite
from aiflame.agent.launches.probes import ApiProbes, file_identity
from aiflame.agent.launches.questions import functions, functions_among
from aiflame.agent.losses import LossKind
from aiflame.agent.symbols.file_facts import FileFacts
from aiflame.agent.target_files import FileGuard, TargetFile
from breadth import cases
from recordings import Workload
from support import wait_until

pytestmark = pytest.mark.bpf

_OPTIONS = ProgramOptions(abi.Filter.PIDS, 10_101_010)
_CALLS = 300
# All of workloads/entries.c but the one that no kernel probes.
_PROBED = ("clFinish", "clSVMAlloc", "clReleaseMemObject", "clCreateBuffer", "clWaitForEvents")
_IMAGE = 1

Load = Callable[[UprobeAnswers], Programs]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def load(cache: Path) -> Iterator[Load]:
    """`load(answers)`: programs that are told what the kernel does."""
    with contextlib.ExitStack() as opened:

        def programs_for(answers: UprobeAnswers) -> Programs:
            tries = UprobeTries(None, lambda _: answers)
            programs = load_programs(_OPTIONS, cache, tries)
            opened.callback(programs.close)
            return programs

        yield programs_for


@pytest.fixture
def program(workload: Callable[..., Path]) -> Path:
    return workload("entries")


def _run(programs: Programs, program: Path) -> dict[int, int]:
    """Runs the program as a target; returns how often each function was counted, by slot."""
    with Workload([program, _CALLS]) as running:
        state = np.zeros(1, abi.PROCESS_STATE_DTYPE)
        state["image"], state["flags"] = _IMAGE, int(abi.ProcessFlag.TARGET)
        programs.processes.update(running.pid.to_bytes(4, "little"), state.tobytes())
        programs.set(abi.Setting.END_NS, abi.NEVER_NS)
        running.go()
        running.truth()
    keys, values = programs.calls[0].read_all()
    counts: Counter[int] = Counter()
    for slot, count in zip(keys["call"].tolist(), values["count"].tolist(), strict=True):
        counts[slot] += count
    return dict(counts)


def _probe_and_run(programs: Programs, program: Path) -> tuple[dict[str, int], ApiProbes]:
    with Inspector() as inspector:
        facts = FileFacts(inspector.server, FileGuard())
        probes = ApiProbes(programs, facts)
        probes.look_at_path(program, inspector.opener)
        probes.poll(is_waiting=True)
        facts.close()
    counts = _run(programs, program)
    probes.close()
    return {probes.functions[slot][1].symbol: count for slot, count in counts.items()}, probes


@cases("links_many", [True, False])
@cases("nops", [NopTreatment(), NopTreatment(*[Treatment.EMULATED] * 2)])
def test_every_call_is_counted_in_each_way(
    links_many: bool, nops: NopTreatment, load: Load, program: Path
) -> None:
    # GIVEN a running program, whose instructions the kernel looks at as it is probed
    with Workload([program, 1]):
        programs = load(UprobeAnswers(links_many, nops))
        counts, probes = _probe_and_run(programs, program)
    assert programs.calls_link_many is links_many
    assert counts == dict.fromkeys(_PROBED, _CALLS)
    # AND what cannot be probed is named, with the reason
    assert probes.losses == {LossKind.CALLS_NOT_PROBED: 1}
    (culprit,) = probes.loss_files[LossKind.CALLS_NOT_PROBED]
    assert culprit == f"{program} (the kernel cannot probe its first instruction)"


@cases("links_many", [True, False])
def test_a_file_that_nobody_maps_any_more_has_no_probes(
    links_many: bool, load: Load, program: Path, tmp_path: Path
) -> None:
    programs = load(UprobeAnswers(links_many))
    gone, later = (Path(shutil.copy(program, tmp_path / name)) for name in ("gone", "later"))
    with Inspector() as inspector:
        facts = FileFacts(inspector.server, FileGuard())
        probes = ApiProbes(programs, facts)

        def look(path: Path) -> None:
            with path.open("rb") as file:
                probes.look(file.fileno(), str(path), 1, "container")
            probes.poll(is_waiting=True)

        # GIVEN a file whose probes are taken off, and another that has their numbers
        look(gone)
        with gone.open("rb") as file:
            probes.forget(file_identity(file.fileno()))
        wait_until(lambda: not any(thread.is_alive() for thread, _ in probes._leaving), 30)
        look(later)
        facts.close()
    assert not _run(programs, gone)
    counts = _run(programs, later)
    probes.close()
    found = {probes.functions[slot][1].symbol: count for slot, count in counts.items()}
    assert found == dict.fromkeys(_PROBED, _CALLS)


@cases("links_many", [True, False])
def test_probes_that_found_no_memory_count_every_call_once_there_is_some(
    links_many: bool, load: Load, program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = load(UprobeAnswers(links_many))
    now_ns = [time.monotonic_ns()]
    monkeypatch.setattr(time, "monotonic_ns", lambda: now_ns[0])

    def refuse(*_: object, **__: object) -> int:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    with Inspector() as inspector:
        facts = FileFacts(inspector.server, FileGuard())
        probes = ApiProbes(programs, facts)

        def look() -> None:
            # Of a running program the kernel looks at the instructions.
            with Workload([program, 1]), program.open("rb") as file:
                probes.look(file.fileno(), str(program), 1, "container")
                probes.poll(is_waiting=True)

        # GIVEN a kernel that has no memory for probes
        with monkeypatch.context() as patch:
            patch.setattr(sysbpf, "link_uprobes", refuse)
            patch.setattr(sysbpf, "open_uprobe", refuse)
            look()
        assert probes.losses[LossKind.CALLS_NOT_PROBED] == len(_PROBED) + 1
        # WHEN it has some, a minute later
        now_ns[0] += 60_000_000_000
        assert probes.are_any_due()
        look()
        facts.close()
    # THEN all is counted but what no kernel probes
    counts = _run(programs, program)
    probes.close()
    found = {probes.functions[slot][1].symbol: count for slot, count in counts.items()}
    assert found == dict.fromkeys(_PROBED, _CALLS)
    assert probes.losses == {LossKind.CALLS_NOT_PROBED: 1}
    assert not probes.are_any_due()


def test_a_wrong_yes_loses_no_call(load: Load, program: Path) -> None:
    # GIVEN a kernel that is believed to link many probes, and takes no link of this file
    programs = load(UprobeAnswers(links_many=False))
    programs.need_calls()
    programs.calls_link_many = True
    # WHEN the file is probed THEN events do it
    with Workload([program, 1]):
        counts, probes = _probe_and_run(programs, program)
    assert counts == dict.fromkeys(_PROBED, _CALLS)
    assert probes.losses == {LossKind.CALLS_NOT_PROBED: 1}


@cases("links_many", [True, False])
def test_a_refused_instruction_gives_way_to_the_first(
    links_many: bool, load: Load, program: Path
) -> None:
    # GIVEN a probe that was put on an instruction that the kernel refuses
    descriptor = os.open(program, os.O_RDONLY)
    names = frozenset(("clWaitForEvents",))
    question = functions_among(names)
    found = question.checked(json.loads(json.dumps(functions(TargetFile(descriptor), *names))))
    os.close(descriptor)
    second = ProbeSite(offset_bytes=1, stack_bytes=8, is_emulated=False)
    programs = load(UprobeAnswers(links_many))
    links = ApiLinks(programs)
    probe = Probe("on_call", found["clWaitForEvents"], second, slot=0, number=0)
    links.describe(probe)
    # THEN the entry is taken for it, and calls are seen from there
    with Workload([program, 1]):
        assert links.attach(str(program), [probe]) == []
        assert _run(programs, program) == {0: _CALLS}
    links.close()


def test_this_kernel_gives_an_answer() -> None:
    with contextlib.ExitStack() as opened:
        answers = try_uprobes(opened)
    assert answers is not None


def test_answers_are_kept_until_the_next_boot(tmp_path: Path) -> None:
    asked: list[int] = []
    found = UprobeAnswers(True, NopTreatment(Treatment.STEPPED, Treatment.REFUSED))

    def attempt(_: contextlib.ExitStack) -> UprobeAnswers:
        asked.append(1)
        return found

    assert UprobeTries(tmp_path, attempt).answers == found
    assert UprobeTries(tmp_path, attempt).answers == found
    assert len(asked) == 1
    # WHEN the file is of another boot, or damaged, THEN it is tried again
    (kept,) = tmp_path.iterdir()
    for content in (kept.read_bytes().replace(b"-", b"0"), b"[1, 2", b"[]", b"\xff", b"7"):
        kept.write_bytes(content)
        assert UprobeTries(tmp_path, attempt).answers == found
    assert len(asked) == 6
