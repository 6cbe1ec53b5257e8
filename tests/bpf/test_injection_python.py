# SPDX-License-Identifier: Apache-2.0
"""CPython 3.14 and later load libraries by themselves; where they do not, a thread is held."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import interpreters
import pytest
from aiflame.agent.elf.image import ElfImage
from aiflame.agent.injection import remote_exec
from aiflame.agent.injection.inject import Injected, inject
from aiflame.agent.symbols.store import cache_dir
from nvidia_family import RECORD
from nvidia_helper import Target, build
from recordings import Recording
from support import WORKLOADS, wait_until

pytestmark = [pytest.mark.bpf, pytest.mark.breadth]

# As often as there is time for; by hand: 100.
_TIMES = int(os.environ.get("INJECTIONS", "3"))
_VERSIONS = [name for name in interpreters.VERSIONS if name.startswith(("3.14", "3.15"))]
_FLAGS = ("-shared", "-fPIC", "-Wl,--build-id=sha1")
_HELPER = "libaiflame-nvidia"


class Asked:
    """workloads/pyasked.py, and a supply of libraries that it has not loaded yet."""

    def __init__(self, folder: Path, library: Path, version: str, *words: object) -> None:
        self._folder, self._library = folder, library
        self._fd = os.open(library, os.O_RDONLY)
        self._count = 0
        self._notes = folder / "notes"
        self._notes.touch()
        self._errors = folder / "errors"
        command = [interpreters.executable(version), *words]
        environment = {**os.environ, "INJECTED_NOTES": str(self._notes)}
        with self._errors.open("w") as errors:
            self.process = subprocess.Popen(
                [*map(str, command)],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"

    def load(self) -> Injected:
        """Loads a library that is like no other."""
        self._count += 1
        build_id = bytes.fromhex(ElfImage.from_fd(self._fd).build_id)
        path = self._folder / f"libinjected{self._count}.so"
        other = self._count.to_bytes(len(build_id), "big")
        path.write_bytes(self._library.read_bytes().replace(build_id, other))
        found = inject(self.process.pid, path, cache_dir())
        assert not found.was_there
        # In a file of its own memory: none is left, nor a directory for it.
        maps = Path(f"/proc/{self.process.pid}/maps").read_text()
        assert f"/memfd:/{path.name} (deleted)" in maps
        assert not [*Path(f"/proc/{self.process.pid}/root/tmp").glob(".aiflame-*")]
        assert inject(self.process.pid, path, cache_dir()) == Injected(was_there=True)
        return found

    def end(self) -> None:
        """Ends it; it has noticed nothing, and each library was loaded once."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdin = None  # for communicate()
        assert self.process.stdout.readline().startswith("OK"), self._errors.read_text()
        assert self.process.wait(10) == 0
        assert self._errors.read_text() == ""
        assert self._notes.read_text() == self._count * "loaded\n"

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
        os.close(self._fd)


@pytest.fixture
def start(workload: Callable[..., Path], tmp_path: Path) -> Iterator[Callable[..., Asked]]:
    """`start("3.14", "runs", 2)`: that interpreter, with pyasked.py and its arguments."""
    programs: list[Asked] = []

    def run(version: str, *words: object, options: tuple[str, ...] = ()) -> Asked:
        library = workload("injected", *_FLAGS)
        arguments = (*options, WORKLOADS / "pyasked.py", *words)
        programs.append(Asked(tmp_path, library, version, *arguments))
        return programs[-1]

    yield run
    for program in programs:
        program.close()


@pytest.mark.parametrize("version", interpreters.each(_VERSIONS))
@pytest.mark.parametrize("words", [("runs", 0), ("runs", 3), ("naps", 3)])
def test_a_main_thread_that_runs_python_loads_it_and_is_not_held(
    start: Callable[..., Asked],
    version: str,
    words: tuple[object, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(remote_exec, "_ASKED_S", 20)  # however crowded the machine is
    program = start(version, *words)
    for _ in range(_TIMES):
        found = program.load()
        assert (found.tries, found.stopped_ns, found.why_held) == (0, 0, "")
    program.end()


@pytest.mark.parametrize("version", interpreters.each(_VERSIONS))
def test_one_that_waits_in_c_is_asked_in_vain_and_loads_it_once(
    start: Callable[..., Asked], version: str
) -> None:
    program = start(version, "sleeps", 3)
    for _ in range(_TIMES):
        found = program.load()
        assert found.tries > 0
        assert found.why_held == "its main thread did not run the script within 1 s"
    program.end()  # it runs Python again, and nothing that was taken back


@pytest.mark.parametrize("version", interpreters.each(_VERSIONS))
def test_one_that_comes_by_when_it_is_given_up_loads_it_once(
    start: Callable[..., Asked], version: str
) -> None:
    program = start(version, "edges", 1)
    for _ in range(_TIMES):
        program.load()
    program.end()


@pytest.mark.parametrize("version", interpreters.each(_VERSIONS))
def test_one_that_may_not_be_asked_is_not(start: Callable[..., Asked], version: str) -> None:
    program = start(version, "runs", 0, options=("-X", "disable-remote-debug"))
    found = program.load()
    assert found.tries > 0
    assert "PYTHON_DISABLE_REMOTE_DEBUG" in found.why_held
    program.end()


@pytest.fixture(scope="module")
def standin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("standin") / "out")


@pytest.mark.parametrize("version", interpreters.each(_VERSIONS))
@pytest.mark.parametrize(
    ("way", "variables", "words"),
    [
        ("polls", {}, "its main thread ran a script (sys.remote_exec), and none was held"),
        ("waits", {}, "ms, as sys.remote_exec does not work there: its main thread did not run"),
        ("polls", {"PYTHON_DISABLE_REMOTE_DEBUG": "1"}, "it was started with PYTHON_DISABLE"),
    ],
)
def test_the_helper_gets_into_a_python_program(
    standin: Path, tmp_path: Path, version: str, way: str, variables: dict[str, str], words: str
) -> None:
    # GIVEN a Python program that runs CUDA
    arguments = (WORKLOADS / "pycuda.py", standin / "program.so", way)
    program = interpreters.executable(version)
    with Target(standin, program=program, arguments=arguments, environment=variables) as target:
        target.obey("init", "context 0", "module 4096", "function 0 _Z4gemmPf")
        # WHEN it is recorded
        run = ("-p", target.pid, "--gpu", "nvidia")
        with Recording(tmp_path, *run, program=RECORD) as recording:
            target.read_until(lambda told: told.states and told.states[-1].tier > 0)
            for _ in range(20):
                target.obey("launch 0 64 20 0", "sync")
            ended = recording.stop()
        # THEN it is said how the helper got there, and its kernels' times are known
        assert f"loaded {_HELPER}.so into {program.name} ({target.pid}), " in ended.stderr
        assert words in ended.stderr
        assert int(ended.profile.gpu.times["count"].sum()) == 400
        # AND THEN a second recording finds it there
        (tmp_path / "again").mkdir()
        with Recording(tmp_path / "again", *run, program=RECORD) as recording:
            wait_until(lambda: _launches_are_seen(target, recording))
            again = recording.stop()
        assert f"loaded {_HELPER}" not in again.stderr
        assert len(_helpers(target)) == 1


def _launches_are_seen(target: Target, recording: Recording) -> bool:
    target.obey("launch 0 64 20 0", "sync")
    return any(len(window.launches) for window in recording.windows())


def _helpers(target: Target) -> set[str]:
    """The inodes of helpers that it has mapped."""
    maps = Path(f"/proc/{target.pid}/maps").read_text().splitlines()
    return {line.split()[4] for line in maps if f"{_HELPER}.so" in line}
