# SPDX-License-Identifier: Apache-2.0
"""What `record`, `dump` and `doctor` do with the least rights, and what each other one adds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from aiflame.agent import rights
from aiflame.agent.capture.reader import read_capture
from aiflame.agent.doctor.checks import CHECKS
from aiflame.agent.model.profile import COMPLETE_REASONS, FrameKind
from aiflame.agent.rights import Capability
from breadth import cases
from deployment import capabilities
from recordings import Recording, Workload, children_of, frames_of, public_folder, stacks_with
from support import AIFLAME, wait_until

pytestmark = pytest.mark.bpf

_LEAST = (*rights.REQUIRED, Capability.DAC_READ_SEARCH)
_WITHOUT_ROOT = (
    *_LEAST,
    Capability.SYSLOG,
    Capability.CHECKPOINT_RESTORE,
    Capability.SYS_NICE,
    Capability.SYS_ADMIN,
)
_NOBODY = 65534


def _as_nobody(*capabilities: Capability) -> Sequence[str]:
    """What starts a command as a user who has nothing but these, at a priority nobody chose."""
    words = "".join(f",+{capability.name.lower()}" for capability in capabilities)
    user = ("--reuid", str(_NOBODY), "--regid", str(_NOBODY), "--clear-groups")
    ordinary = ("nice", "-n", str(-os.getpriority(os.PRIO_PROCESS, 0)))
    return (
        *ordinary,
        "setpriv",
        *user,
        *(f"--{kind}-caps=-all{words}" for kind in ("inh", "ambient")),
    )


def _run(folder: Path, prefix: Sequence[str], *arguments: object) -> tuple[str, str]:
    done = subprocess.run(
        [*prefix, *AIFLAME, *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "HOME": str(folder)},
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


@pytest.fixture
def folder() -> Iterator[Path]:
    with public_folder() as found:
        yield found


@pytest.fixture(scope="module")
def hidden(
    workload: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[subprocess.Popen[bytes]]:
    """A process of root's whose program no other user can get to, and that was deleted."""
    folder = tmp_path_factory.mktemp("hidden")
    folder.chmod(0o700)
    program = folder / "hidden"
    program.write_bytes(workload("serving").read_bytes())
    program.chmod(0o700)
    process = subprocess.Popen([program, "600"], stdout=subprocess.DEVNULL)
    program.unlink()
    yield process
    process.kill()
    process.wait()


def test_the_least_rights_record_complete_stacks_with_names(
    busy: subprocess.Popen[bytes], folder: Path
) -> None:
    _, said = _run(
        *(folder, _as_nobody(*_LEAST), "record", "-p", busy.pid, "-d", "2", "-F", "499"),
        *("-o", "run.aiflame"),
    )
    profile = read_capture(folder / "run.aiflame")
    rows = profile.samples[stacks_with(profile, "forward_pass")[profile.samples["stack"]]]
    assert len(rows) > 0, said
    assert np.isin(np.asarray(profile.stacks.ends)[rows["stack"]], COMPLETE_REASONS).all()
    assert {"worker", "forward_pass"} <= {
        frame for stack in set(rows["stack"].tolist()) for frame in frames_of(profile, stack)
    }
    assert (folder / "run.aiflame").stat().st_uid == _NOBODY


_OTHER_CHECKS = {check.id for check in CHECKS} - {"os.linux", "os.capabilities"}
_OPTIONAL = {
    Capability.DAC_READ_SEARCH: {"lost: binary_not_opened"},
    Capability.CHECKPOINT_RESTORE: {"lost: binary_not_opened"},
    Capability.SYSLOG: {"lost: kernel_symbols_hidden", "lost: sleepers_kernel_frames_lost"},
    Capability.SYS_NICE: {"note: no CAP_SYS_NICE"},
    Capability.SYS_ADMIN: {"lost: sleepers_kernel_frames_lost"},
}


_ADMIN = Capability.SYS_ADMIN  # which contains the right to open mapped files


@cases(
    "lacking",
    [
        (),
        (Capability.DAC_READ_SEARCH, _ADMIN),
        (Capability.CHECKPOINT_RESTORE, _ADMIN),
        (Capability.SYSLOG,),
        (Capability.SYS_NICE,),
        (_ADMIN,),
    ],
    ids=lambda lacking: "+".join(capability.name for capability in lacking) or "nothing",
)
def test_each_other_right_costs_what_is_said(
    lacking: Sequence[Capability], hidden: subprocess.Popen[bytes], folder: Path
) -> None:
    # GIVEN a kernel that shows its addresses to those with CAP_SYSLOG
    assert Path("/proc/sys/kernel/kptr_restrict").read_text().strip() in "01"
    prefix = _as_nobody(*(one for one in _WITHOUT_ROOT if one not in lacking))
    _, said = _run(folder, prefix, "record", "-p", hidden.pid, "-d", "1", "-o", "run.aiflame")
    found, _ = _run(folder, prefix, "doctor", "--json", "--skip-checks", ",".join(_OTHER_CHECKS))
    (check,) = (one for one in json.loads(found)["checks"] if one["id"] == "os.capabilities")
    # THEN both name what is missing, and nothing else is
    costs = set().union(*(_OPTIONAL[capability] for capability in lacking))
    assert {text for text in set().union(*_OPTIONAL.values()) if text in said} == costs, said
    assert check["status"] == ("warn" if lacking else "ok")
    for capability in _OPTIONAL:
        assert (f"without {capability} " in check["finding"]) is (capability in lacking)
    names = {function.name for function in read_capture(folder / "run.aiflame").functions}
    assert ("forward_pass" in names) is ("lost: binary_not_opened" not in costs)


def test_the_least_rights_dump(busy: subprocess.Popen[bytes], folder: Path) -> None:
    shown, _ = _run(folder, _as_nobody(*_LEAST), "dump", "-p", busy.pid)
    assert "monitor (" in shown


def _capabilities_of(task: Path) -> dict[str, int]:
    rows = (line.split() for line in (task / "status").read_text().splitlines())
    return {row[0]: int(row[1], 16) for row in rows if row[0] in ("CapEff:", "CapPrm:")}


def _have_at_most(pid: int, capabilities: int) -> bool:
    """Whether no thread of a process has others."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return not any(
        bits & ~capabilities for task in tasks for bits in _capabilities_of(task).values()
    )


def test_root_gives_up_what_a_recording_does_not_use(
    busy: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    used = sum(1 << capability for capability in rights.USED)
    # GIVEN a kernel that asks for this one at the start only
    at_start = used | 1 << Capability.SYS_ADMIN
    with Recording(tmp_path, "-p", busy.pid) as recording:
        own = Path(f"/proc/{recording.pid}")
        wait_until(lambda: _capabilities_of(own) == {"CapEff:": used, "CapPrm:": used})
        wait_until(lambda: children_of(recording.pid))
        for pid in (recording.pid, *children_of(recording.pid)):
            # THEN no thread has others: they could do for each other
            if b"taskstats_worker" in Path(f"/proc/{pid}/cmdline").read_bytes():
                # Where the kernel accounts delays: what it needs, once it has begun.
                wait_until(partial(_have_at_most, pid, 1 << Capability.NET_ADMIN))
            else:
                assert _have_at_most(pid, at_start)
        profile = recording.stop().profile
    kinds = {function.kind for function in profile.functions}
    assert {FrameKind.KERNEL, FrameKind.NATIVE} <= kinds


def test_threads_asleep_since_before_are_entered_before_rights_are_given_up(
    workload: Callable[..., Path], tmp_path: Path
) -> None:
    with (
        Workload([workload("waits")]) as asleep,
        Recording(tmp_path, "-p", asleep.pid) as recording,
    ):
        own = Path(f"/proc/{recording.pid}")
        used = sum(1 << capability for capability in rights.USED)
        wait_until(lambda: _capabilities_of(own)["CapEff:"] == used)
        profile = recording.stop().profile
    assert len(profile.samples) > 0
    for stack in profile.samples["stack"]:
        begin, end = profile.stacks.offsets[stack : stack + 2]
        functions = profile.frames["function"][profile.stacks.frames[begin:end]]
        kinds = [profile.functions[function].kind for function in functions]
        assert kinds.count(FrameKind.KERNEL) > 2


@cases("lacking", ["", "KILL", "SETUID", "SETPCAP"])
def test_root_in_a_container(lacking: str, busy: subprocess.Popen[bytes], folder: Path) -> None:
    # GIVEN root that never gets more than this, as in a container
    names = (f"+{name.lower()}" for name in capabilities() if name != lacking)
    prefix = ("setpriv", f"--bounding-set=-all,{','.join(names)}")
    arguments = ("-p", busy.pid, "-d", "1", "-o", "run.aiflame", "--force")
    # WHEN it records THEN that works, and what keeps children from giving up all is said
    _, said = _run(folder, prefix, "record", *arguments)
    assert ("sandbox_incomplete" in said) == bool(lacking), said
    assert ("could not end it, without CAP_KILL" in said) == (lacking == "KILL")
    assert "complete stacks: 100.00 % of cpu time" in said.lower()


def test_the_command_has_what_it_would_have_had(tmp_path: Path) -> None:
    tell = "import os; status = open('/proc/self/status').read();"
    tell += (
        "print(status.split('CapInh')[1].split('Seccomp')[0], os.getenv('OPENBLAS_NUM_THREADS'))"
    )
    command = [sys.executable, "-c", tell]
    alone = subprocess.run(command, capture_output=True, text=True, check=True)
    recorded, _ = _run(tmp_path, (), "record", "-q", "-o", "run.aiflame", "--", *command)
    assert recorded == alone.stdout
