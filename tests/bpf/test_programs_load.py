# SPDX-License-Identifier: Apache-2.0
"""The compiled programs: the same on every host, loaded without the compiler."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from aiflame.agent import priority
from aiflame.agent.capture.reader import read_capture
from aiflame.agent.errors import EnvironmentUnfit
from aiflame.agent.kernel import abi, compile, loader, syscalls
from aiflame.agent.kernel.bytecode import BadBytecode, Bytecode
from aiflame.agent.kernel.loader import ProgramOptions, Programs, begin_programs, load_programs
from aiflame.agent.kernel.program_list import MAPS, PROGRAMS, SWEEP_ITERATOR
from aiflame.agent.kernel.uprobe_tries import UprobeAnswers, UprobeTries
from breadth import cases
from bytecode_bounds import unbounded_accesses
from recordings import Recording

pytestmark = pytest.mark.bpf

_OPTIONS = ProgramOptions(abi.Filter.PIDS, 10_101_010)


@pytest.fixture
def sleeper() -> Iterator[int]:
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process.pid
        process.kill()


@pytest.fixture(scope="module")
def compiled() -> bytes:
    return loader.compile_in_child()


@pytest.fixture
def no_shipped_bytecode(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A package that was not built."""
    monkeypatch.setattr(compile, "shipped_file", lambda: tmp_path / "missing.bin")


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> bytes:
        raise EnvironmentUnfit("nothing can be compiled here")

    monkeypatch.setattr(loader, "compile_in_child", fail)


def _kept(folder: Path) -> Path:
    (bytecode,) = folder.glob("programs-*.bpf")
    return bytecode


def _close(programs: Programs) -> None:
    programs.need_calls()
    # One is loaded where stacks are taken by chance alone.
    assert {*PROGRAMS} - {SWEEP_ITERATOR} <= set(programs.fds)
    programs.close()


@pytest.mark.breadth
def test_the_same_compiler_gives_the_same_bytes(compiled: bytes) -> None:
    assert loader.compile_in_child() == compiled
    assert compile.shipped_file().read_bytes() == compiled


def test_no_access_is_without_a_bound_that_old_verifiers_see(compiled: bytes) -> None:
    programs = Bytecode.from_bytes(compiled).programs
    assert {p.name: unbounded_accesses(p.instructions) for p in programs} == {
        name: [] for name in PROGRAMS
    }


def test_nothing_of_this_host_is_compiled_in(compiled: bytes) -> None:
    bytecode = Bytecode.from_bytes(compiled)
    assert [definition.name for definition in bytecode.maps] == list(MAPS)
    used = {number for program in bytecode.programs for _, number in program.constants}
    assert used == set(abi.HostConstant)


@cases(
    "filter_, with_stacks, off_cpu",
    [
        (abi.Filter.PIDS, (True, True), True),
        (abi.Filter.CGROUP, (True, True), True),
        (abi.Filter.ALL, (True, True), True),
        (abi.Filter.ALL, (True, False), False),
        (abi.Filter.ALL, (False, True), True),
    ],
)
def test_one_bytecode_loads_for_all_options(
    no_compiler: None,
    tmp_path: Path,
    filter_: abi.Filter,
    with_stacks: tuple[bool, bool],
    off_cpu: bool,
) -> None:
    user, kernel = with_stacks
    options = ProgramOptions(
        filter_, 10_101_010, off_cpu=off_cpu, user_stacks=user, kernel_stacks=kernel, stacks_max=512
    )
    programs = load_programs(options, tmp_path)
    programs.need_calls()
    assert (programs.thread_iterator_fd is not None) == (user and off_cpu)
    programs.close()


def test_programs_for_calls_may_be_there_before_all_others() -> None:
    programs = begin_programs(_OPTIONS)
    try:
        programs.need_calls()
        programs.ready()
        assert {"on_call", "on_fork", "on_cpu_sample"} <= programs.fds.keys()
    finally:
        programs.close()


def _no_memory(*_: object) -> int:
    raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))


def _no_thread(_: int) -> object:
    raise BlockingIOError(errno.EAGAIN, "can't start new thread")


@pytest.mark.parametrize(
    ("module", "function", "refuse", "why"),
    [
        (syscalls, "load_program", _no_memory, "Cannot allocate memory"),
        (priority, "urgent_pool", _no_thread, "can't start new thread"),
    ],
)
def test_programs_for_calls_that_were_refused_for_a_moment_are_loaded_later(
    module: object,
    function: str,
    refuse: Callable[..., object],
    why: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_ns = [time.monotonic_ns()]
    monkeypatch.setattr(time, "monotonic_ns", lambda: now_ns[0])
    tries: list[int] = []

    def counted(*arguments: object) -> object:
        tries.append(1)
        return refuse(*arguments)

    programs = load_programs(_OPTIONS, None, UprobeTries(None, lambda _: UprobeAnswers(True)))
    try:
        descriptors = len([*Path("/proc/self/fd").iterdir()])
        # GIVEN a machine that has nothing left, WHEN a file has functions of APIs
        with monkeypatch.context() as patch:
            patch.setattr(module, function, counted)
            with pytest.raises(EnvironmentUnfit, match=why):
                programs.need_calls()
            refused = len(tries)
            assert refused
            # THEN the kernel is not asked again for each further one,
            with pytest.raises(EnvironmentUnfit, match=why):
                programs.need_calls()
            assert len(tries) == refused
            # but after a minute
            now_ns[0] += 60_000_000_000
            with pytest.raises(EnvironmentUnfit, match=why):
                programs.need_calls()
            assert len(tries) == 2 * refused
        assert len([*Path("/proc/self/fd").iterdir()]) == descriptors
        # WHEN there is some again THEN they are loaded, though not at once
        with pytest.raises(EnvironmentUnfit, match=why):
            programs.need_calls()
        now_ns[0] += 120_000_000_000
        programs.need_calls()
        assert "on_call" in programs.fds
    finally:
        programs.close()


def test_a_recording_ends_where_programs_for_calls_are_still_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    programs = load_programs(_OPTIONS)
    monkeypatch.setattr(priority, "urgent_pool", _no_thread)
    programs.expect_calls()
    programs.close()


@pytest.mark.breadth
def test_what_was_compiled_here_is_kept(
    no_shipped_bytecode: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _close(load_programs(_OPTIONS, tmp_path))
    monkeypatch.setattr(loader, "compile_in_child", None)
    for _ in range(2):
        _close(load_programs(_OPTIONS, tmp_path))


@cases("damage", ["cut", "empty", "flipped", "garbage"])
def test_damaged_bytecode_is_compiled_anew(
    no_shipped_bytecode: None,
    compiled: bytes,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    damage: str,
) -> None:
    to_come = [compiled, compiled]  # of a compiler that takes 4 s each time
    monkeypatch.setattr(loader, "compile_in_child", to_come.pop)
    load_programs(_OPTIONS, tmp_path).close()
    middle = len(compiled) // 2
    broken = {
        "cut": compiled[:-100],
        "empty": b"",
        "flipped": compiled[:middle] + bytes([compiled[middle] ^ 1]) + compiled[middle + 1 :],
        "garbage": b"\xff" * 5000,
    }
    with pytest.raises(BadBytecode):
        Bytecode.from_bytes(broken[damage])
    _kept(tmp_path).write_bytes(broken[damage])
    _close(load_programs(_OPTIONS, tmp_path))
    assert not to_come
    assert _kept(tmp_path).read_bytes() == compiled


def test_a_recording_needs_no_compiler(tmp_path: Path) -> None:
    # GIVEN a machine without BCC, as far as Python sees
    (tmp_path / "bcc.py").write_text("raise ImportError('not installed')\n")
    script = (
        "import sys; sys.path.insert(0, sys.argv[1]);"
        "from aiflame.agent.kernel import abi, loader;"
        "loader.load_programs(loader.ProgramOptions(abi.Filter.ALL, 10_101_010)).close();"
        "print('bcc' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, tmp_path], check=True, capture_output=True, text=True
    )
    assert done.stdout.strip() == "False"


def test_a_refusal_says_what_the_verifier_says(
    no_compiler: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # GIVEN programs that read past the end of a map's value: fewer bytes than were compiled
    bytecode = Bytecode.from_bytes(compile.shipped_file().read_bytes())
    (at,) = (i for i, m in enumerate(bytecode.maps) if m.name == "scratch")
    shape = bytecode.maps[at].shape
    maps = list(bytecode.maps)
    maps[at] = replace(maps[at], shape=shape._replace(value_bytes=64))
    monkeypatch.setattr(loader, "_bytecode", lambda _: replace(bytecode, maps=tuple(maps)))
    with pytest.raises(EnvironmentUnfit, match=r"on_\w+: (.|\n)*invalid access to map value"):
        load_programs(_OPTIONS, tmp_path)


def test_a_second_recording_is_like_the_first(sleeper: int, tmp_path: Path) -> None:
    stacks = []
    for name in ("first", "second"):
        folder = tmp_path / name
        folder.mkdir()
        with Recording(folder, "-p", sleeper, "--stack-storage-size", 4711) as recording:
            stacks.append(read_capture(recording.stop().capture).stacks.ends.tolist())
    assert stacks[0] == stacks[1] == [0]
