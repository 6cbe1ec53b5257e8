# SPDX-License-Identifier: Apache-2.0
"""Fixtures for all tests, and the rules about what may be skipped.

A test marked `bpf` is never skipped: without root or BTF it fails, so that a run in the wrong place
cannot look green. Under CI any other skip fails the run too, unless `support.ABSENT_HERE` names it.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import support
from browser.chromium import CHROMIUM, Page, browser
from hypothesis import settings
from shared_modules import SharedModules
from support import WORKLOADS

# Beside the caches of all other tools; by default a folder where the tests are run.
os.environ.setdefault(
    "HYPOTHESIS_STORAGE_DIRECTORY", str(Path(__file__).parents[1] / ".venv/cache/hypothesis")
)

# Frame pointers, and no tail calls: with workloads/frames.h every frame is there to be seen.
WORKLOAD_FLAGS = (
    "-O2",
    "-g",
    "-fno-omit-frame-pointer",
    "-fno-optimize-sibling-calls",
    "-pthread",
)


def _heed_signals() -> None:
    """Undoes nohup, and what a shell does to jobs in the background: children would inherit it."""
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:
            is_interrupt = number is signal.SIGINT
            signal.signal(number, signal.default_int_handler if is_interrupt else signal.SIG_DFL)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden",
        action="store_true",
        help="write the expected files anew from what the code makes now",
    )
    parser.addoption(
        "--share-modules",
        type=Path,
        metavar="FOLDER",
        help="run the modules that no other run with this folder has taken",
    )


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """A page in a browser, for all tests of a module."""
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed")
    with browser(tmp_path_factory.mktemp("chromium")) as opened:
        yield opened


@pytest.fixture
def update_golden(request: pytest.FixtureRequest) -> bool:
    """Whether a golden test is to write its expected file instead of comparing with it."""
    return bool(request.config.getoption("--update-golden"))


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The processes that a test forks, in their order; in such a one, 0 for itself."""
    found: list[int] = []
    fork = os.fork

    def note() -> int:
        pid = fork()
        found.append(pid)
        return pid

    monkeypatch.setattr(os, "fork", note)
    return found


@pytest.fixture
def wait_until() -> Callable[..., None]:
    """`wait_until(predicate, timeout_s=10)`."""
    return support.wait_until


@pytest.fixture
def aiflame_command() -> tuple[str, ...]:
    """The command line of aiflame, to be followed by a verb."""
    return support.AIFLAME


@pytest.fixture
def run_aiflame(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """`run_aiflame("report", path, ...)`, in tmp_path; keywords as for subprocess.run."""

    def run(*arguments: object, **keywords: Any) -> subprocess.CompletedProcess[str]:
        command = [*support.AIFLAME, *map(str, arguments)]
        defaults = {"cwd": tmp_path, "capture_output": True, "text": True, "timeout": 120}
        # Pytest loads readline, which sets COLUMNS=80 where children see it and Python does not:
        # https://tiswww.case.edu/php/chet/readline/readline.html, rl_change_environment.
        defaults["env"] = {**os.environ}
        return subprocess.run(command, **{"check": False, **defaults, **keywords})

    return run


@pytest.fixture(scope="session")
def workload(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`workload("serving", *flags)`: builds tests/workloads/serving.c, once a session.

    A .cc file is built as C++. Flags are added to `WORKLOAD_FLAGS`, and override them.
    """
    folder = tmp_path_factory.mktemp("workloads")
    # Programs may be run as another user, who has to get to them.
    for parent in (folder, folder.parent, folder.parent.parent):
        parent.chmod(parent.stat().st_mode | 0o055)
    built: dict[tuple[str, ...], Path] = {}

    def build(name: str, *flags: str) -> Path:
        key = (name, *flags)
        if key not in built:
            source = next(path for path in WORKLOADS.glob(f"{name}.c*"))
            program = folder / (name if not flags else f"{name}-{len(built)}")
            compiler = "gcc" if source.suffix == ".c" else "g++"
            command = [compiler, *WORKLOAD_FLAGS, "-o", str(program), str(source), *flags]
            subprocess.run(command, check=True)
            built[key] = program
        return built[key]

    return build


@pytest.fixture(scope="module")
def busy(workload: Callable[..., Path]) -> Iterator[subprocess.Popen[bytes]]:
    """A process of this user's that both computes and waits, for longer than any test takes."""
    with support.serving(workload("serving")) as process:
        yield process


@pytest.fixture(scope="session")
def cuda_workload(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`cuda_workload("cudalaunches", "-cudart", "static")`: builds a .cu file, once a session."""
    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    if not Path(nvcc).exists():
        pytest.skip("no nvcc to build CUDA programs with")
    folder = tmp_path_factory.mktemp("cuda")
    host_flags = ",".join(flag for flag in WORKLOAD_FLAGS if flag not in ("-O2", "-g"))
    built: dict[tuple[str, ...], Path] = {}

    def build(name: str, *flags: str) -> Path:
        key = (name, *flags)
        if key not in built:
            program = folder / f"{name}-{len(built)}"
            source = WORKLOADS / f"{name}.cu"
            command = [nvcc, "-O2", "-g", "-std=c++17", "-Xcompiler", host_flags, *flags]
            subprocess.run([*command, "-o", str(program), str(source)], check=True)
            built[key] = program
        return built[key]

    return build


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("bpf") is None:
        return
    if os.geteuid() != 0:
        pytest.fail("needs root: sudo make test (make unit runs the other tests)", pytrace=False)
    if not Path("/sys/kernel/btf/vmlinux").exists():
        pytest.fail("this kernel has no BTF (CONFIG_DEBUG_INFO_BTF)", pytrace=False)


class _SkipRule:
    """Fails a CI session that skipped a test which could have run."""

    def __init__(self) -> None:
        self._unexpected: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped and not hasattr(report, "wasxfail"):
            self._note(report.nodeid, report.longrepr)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self._note(report.nodeid, report.longrepr)

    def _note(self, node: str, where_and_why: Any) -> None:
        reason = str(where_and_why[2]).removeprefix("Skipped: ")
        if not reason.startswith(support.ABSENT_HERE):
            self._unexpected.append(f"{node}: {reason}")

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._unexpected and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._unexpected:
            terminalreporter.section("skipped, but could have run", red=True)
            terminalreporter.write("".join(f"{line}\n" for line in self._unexpected))


def pytest_configure(config: pytest.Config) -> None:
    _heed_signals()
    # No example fails for the time it takes: the machine may have other things to do. Random ones
    # are for those who can look into what they find.
    settings.register_profile("aiflame", deadline=None, derandomize=bool(os.environ.get("CI")))
    settings.load_profile("aiflame")
    if (folder := config.getoption("--share-modules")) is not None:
        config.pluginmanager.register(SharedModules(folder.resolve()), "aiflame-shared-modules")
    if os.environ.get("CI"):
        config.pluginmanager.register(_SkipRule(), "aiflame-skip-rule")
