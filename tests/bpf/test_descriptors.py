# SPDX-License-Identifier: Apache-2.0
"""Recordings under limits of open files and memory: a loss, or refused at once and plainly."""

from __future__ import annotations

import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from breadth import cases
from recordings import Recording
from support import AIFLAME

pytestmark = pytest.mark.bpf

_LIBRARIES = 600  # more than the smaller limit below, and not by much: each takes 10 ms
_WORK = "int work(int n) { for (volatile int i = 0; i < 1000; i++) n += i; return n; }\n"


def _limit(soft: int, hard: int) -> Callable[[], None]:
    return lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of many files with one function each."""
    folder = tmp_path_factory.mktemp("libraries")
    source = folder.with_suffix(".c")
    source.write_text(_WORK)
    first = folder / "0.so"
    subprocess.run(["gcc", "-O1", "-shared", "-fPIC", "-o", first, source], check=True)
    for number in range(1, _LIBRARIES):
        shutil.copy(first, folder / f"{number}.so")
    return folder


@contextmanager
def _running(*command: object) -> Iterator[int]:
    process = subprocess.Popen([*map(str, command)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "ready\n"
        yield process.pid
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.slow
@cases("soft, hard, is_enough", [(512, 512, False), (256, 4096, True)])
def test_a_process_with_more_files_than_descriptors_is_recorded(
    workload: Callable[..., Path],
    libraries: Path,
    tmp_path: Path,
    soft: int,
    hard: int,
    is_enough: bool,
) -> None:
    with (
        _running(workload("manylibs"), libraries) as pid,
        Recording(tmp_path, "-p", pid, "-d", 2, preexec_fn=_limit(soft, hard)) as recording,
    ):
        profile = recording.wait().profile
    assert len(profile.samples)
    losses = {loss.name: loss.count for loss in profile.losses}
    if is_enough:
        assert "binary_not_opened" not in losses
    else:
        assert 0 < losses["binary_not_opened"] < _LIBRARIES - 300


@pytest.mark.slow
@cases("limit", [128, 256])
def test_a_host_is_recorded_with_few_descriptors(tmp_path: Path, limit: int) -> None:
    with Recording(tmp_path, "-a", "-d", 2, preexec_fn=_limit(limit, limit)) as recording:
        assert len(recording.wait().profile.samples)


def test_too_few_descriptors_are_refused_at_once(tmp_path: Path) -> None:
    command = [*AIFLAME, "record", "-a", "-d", "1", "-o", "run.aiflame"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
        preexec_fn=_limit(64, 64),
    )
    assert done.returncode == 3
    assert "64 files" in done.stderr
    assert "ulimit -n" in done.stderr
    assert not list(tmp_path.iterdir())


def _record_within(megabytes: int, folder: Path) -> subprocess.CompletedProcess[str]:
    limit = (megabytes * 1_000_000, megabytes * 1_000_000)
    return subprocess.run(
        [*AIFLAME, "record", "-a", "-d", "1", "-o", "run.aiflame"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, limit),
    )


@pytest.mark.parametrize("megabytes", [200, 1199])
def test_with_too_few_addresses_nothing_is_recorded(tmp_path: Path, megabytes: int) -> None:
    done = _record_within(megabytes, tmp_path)
    assert done.returncode == 3
    assert f"{megabytes:,} MB" in done.stderr
    assert "ulimit -v" in done.stderr
    assert not list(tmp_path.iterdir())


def test_with_barely_enough_addresses_a_host_is_recorded(tmp_path: Path) -> None:
    done = _record_within(1200, tmp_path)
    assert done.returncode == 0, done.stderr


def test_a_recorded_command_has_the_limit_that_it_would_have_had(tmp_path: Path) -> None:
    words = ("--", "sh", "-c", "ulimit -Sn; ulimit -Hn")
    with Recording(tmp_path, *words, preexec_fn=_limit(300, 5000)) as recording:
        out, said = recording.process.communicate(timeout=60)
    assert recording.process.returncode in (0, 4), said
    assert out == "300\n5000\n"
