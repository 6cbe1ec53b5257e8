# SPDX-License-Identifier: Apache-2.0
"""Real containers, of podman: whose they are, and what their stacks say.

The image is a tar of this host's own interpreter and of a test program: no registry is asked.
"""

from __future__ import annotations

import json
import os
import pwd
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
import support
from aiflame.agent.capture.reader import read_capture
from aiflame.agent.fleet.labels import Labeller, LabelOptions
from aiflame.agent.model.batch import Labels
from aiflame.agent.model.profile import Profile, SampleClass, StopReason
from aiflame.agent.processes import procfs
from aiflame.agent.processes.targets import cgroup2_mounts
from cgroups import made_groups
from podman import LIMITS, interpreter, require_podman, working_podman
from receivers.pyroscope import Pyroscope
from receivers.server import serving
from recordings import Recording, Workload, frames_of
from support import wait_until

pytestmark = [pytest.mark.bpf, pytest.mark.slow]

# Other than any that another run of the tests has at the same time.
_OWN = f"aiflame-test-{os.getpid()}"
_IMAGE = f"localhost/{_OWN}:1.2"
_OPTIONS = (*LIMITS, "--network", "none")  # which is not needed
# Modules that an interpreter in a container does not need here.
_LEFT_OUT = re.compile(
    r"(?:test|idlelib|tkinter|ensurepip|lib2to3|dist-packages|__pycache__|config-.*|turtledemo)"
)
# As tests/workloads/truth.h has it; the time is that of `guest`.
# Long enough to be known while it computes, beside much other work.
_PYTHON = """
import time
def compute_in_container():
    end = time.process_time() + 1
    while time.process_time() < end:
        pass
print("ready", flush=True)
input()
compute_in_container()
print("done", flush=True)
try:
    input()
except EOFError:
    pass
"""
_SHORT_NS = 50_000_000
_CONTAINERS = 50
_PATIENCE_S = 180
_SHORT = f"""
import time
end = time.process_time_ns() + {_SHORT_NS}
while time.process_time_ns() < end:
    pass
"""
_BRIEF = f"{_SHORT}time.sleep(0.25)"
_UNTIL_EOF = """
import os, time
print("ready", flush=True)
input()
os.set_blocking(0, False)
def is_over():
    try:
        return not os.read(0, 1)
    except BlockingIOError:
        return False
"""
# Children that are over within some milliseconds, 50 a second: of them there is hardly a sample.
_FORKING = f"""{_UNTIL_EOF}
while not is_over():
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
    time.sleep(0.02)
"""
# A fifth of a CPU.
_COMPUTING = f"""{_UNTIL_EOF}
while not is_over():
    end = time.process_time() + 0.01
    while time.process_time() < end:
        pass
    time.sleep(0.04)
"""


@dataclass(frozen=True)
class _Podman:
    """podman, as it runs containers here."""

    command: tuple[str, ...]

    def __call__(self, *words: object, timeout_s: float = 60) -> str:
        done = subprocess.run(
            [*self.command, *map(str, words)], capture_output=True, text=True, timeout=timeout_s
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def run_command(
        self, name: str, *words: object, options: Sequence[object] = ()
    ) -> list[object]:
        """Returns the command that runs a container of a name, with its standard input."""
        names = ("--name", f"{_OWN}-{name}")
        return [*self.command, "run", "-i", *names, *options, *_OPTIONS, _IMAGE, *words]

    @contextmanager
    def running(
        self, name: str, *words: object, options: Sequence[object] = ()
    ) -> Iterator[tuple[Workload, str, int]]:
        """Runs a workload in a container; yields it, the container's id, and its host's pid."""
        try:
            with Workload(self.run_command(name, *words, options=options)) as workload:
                said = self("inspect", f"{_OWN}-{name}", "--format", "{{.Id}} {{.State.Pid}}")
                container_id, pid = said.split()
                yield workload, container_id, int(pid)
        finally:
            self("rm", "--force", "--ignore", "--time", 0, f"{_OWN}-{name}")


def _libraries(programs: Sequence[Path]) -> set[Path]:
    found = set()
    for program in programs:
        listed = subprocess.run(["ldd", program], capture_output=True, text=True, check=True)
        found |= {Path(path) for path in re.findall(r"(/\S+) \(0x", listed.stdout)}
    return found


def _make_root(root: Path, program: Path) -> None:
    """Copies what an interpreter and a program need, under the same names."""
    python = Path(interpreter())
    standard = Path(os.__file__).parent
    shutil.copytree(
        standard,
        root / str(standard).lstrip("/"),
        ignore=lambda _, names: [name for name in names if _LEFT_OUT.fullmatch(name)],
        symlinks=False,
        ignore_dangling_symlinks=True,
    )
    for path in (python, *_libraries([python, program])):
        target = root / str(path).lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    shutil.copy(program, root / "guest")
    for folder in ("proc", "sys", "dev", "etc", "tmp"):
        (root / folder).mkdir(exist_ok=True)


@pytest.fixture(scope="module")
def archive(workload: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of the image."""
    require_podman()
    folder = tmp_path_factory.mktemp("image")
    program = workload("guest", str(workload("guestlib", "-c")))
    _make_root(folder / "root", program)
    archive = folder / "image.tar"
    subprocess.run(["tar", "-C", folder / "root", "-cf", archive, "."], check=True)
    return archive


@pytest.fixture(scope="module")
def podman(archive: Path) -> Iterator[_Podman]:
    """podman with an image, by the first of its runtimes that works here."""
    plain = _Podman(("podman",))
    plain("import", "--quiet", archive, _IMAGE)
    try:
        yield _Podman(working_podman(_IMAGE, interpreter()))
    finally:
        plain("rmi", "--force", _IMAGE)


def _labels(profile: Profile) -> dict[int, Labels]:
    found = Labeller(LabelOptions("this-node")).of(profile.processes)
    return {process.pid: each for process, each in zip(profile.processes, found, strict=True)}


def _stacks_of(profile: Profile, pid: int, function: str) -> list[int]:
    """Returns the on-CPU stacks of a process that a function is in."""
    of_process = [profile.processes[thread.process].pid == pid for thread in profile.threads]
    return [
        int(row["stack"])
        for row in profile.samples
        if of_process[row["thread"]]
        and row["klass"] == SampleClass.ON_CPU
        and function in frames_of(profile, int(row["stack"]))
    ]


def _computed_ns(profile: Profile, labels: dict[int, Labels], container_id: str) -> int:
    """Returns the time on a CPU of all processes that are labelled with a container."""
    of_container = [
        labels[profile.processes[thread.process].pid].container_id == container_id
        for thread in profile.threads
    ]
    rows = profile.samples[profile.samples["klass"] == SampleClass.ON_CPU]
    return sum(int(row["ns"]) for row in rows if of_container[row["thread"]])


def _assert_rooted(profile: Profile, stacks: list[int]) -> None:
    assert len(stacks) > 0
    rooted = {
        StopReason.ROOTED,
        StopReason.ROOTED_BY_TABLE,
        StopReason.ROOTED_BY_HEURISTIC,
    }
    whole = [StopReason(int(profile.stacks.ends[stack])) in rooted for stack in stacks]
    # On a crowded machine tables of what a container brought come late: 34 of 52 stacks, once.
    assert sum(whole) > 0.5 * len(whole), [int(profile.stacks.ends[stack]) for stack in stacks]


def test_two_containers_with_equal_pids_and_what_is_in_them(
    podman: _Podman, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        # GIVEN an interpreter and a program, each the first process of a container
        python = stack.enter_context(podman.running("py", interpreter(), "-c", _PYTHON))
        native = stack.enter_context(podman.running("native", "/guest"))
        assert {procfs.namespaced_pid(pid) for _, _, pid in (python, native)} == {1}
        # WHEN the host is recorded while they compute
        with Recording(tmp_path, "-a", "-F", 499, "--no-off-cpu") as recording:
            for workload, _, _ in (python, native):
                workload.go()
            for workload, _, _ in (python, native):
                workload.truth()
            profile = recording.stop().profile
        labels = _labels(profile)
    # THEN each has the labels of its own container
    for name, (_, container_id, pid) in (("py", python), ("native", native)):
        found = labels[pid]
        assert found == Labels(
            service=f"{_OWN}-{name}",
            container_id=container_id,
            container=f"{_OWN}-{name}",
            engine="podman",
            node="this-node",
            version="1.2",
        )
    # AND its own functions, Python's and those of a program that is nowhere else, down to the root
    in_python = _stacks_of(profile, python[2], "compute_in_container")
    in_program = _stacks_of(profile, native[2], "compute_in_program")
    _assert_rooted(profile, in_python)
    _assert_rooted(profile, in_program)
    assert _stacks_of(profile, native[2], "compute_in_container") == []
    assert any("main" in frames_of(profile, stack) for stack in in_program)


@pytest.mark.breadth
def test_a_container_that_is_there_for_50_ms(podman: _Podman, tmp_path: Path) -> None:
    name = f"{_OWN}-short"
    try:
        with Recording(tmp_path, "-a", "-F", 499, "--no-off-cpu") as recording:
            # WHEN a container comes and goes while the host is recorded
            command = podman.run_command("short", interpreter(), "-S", "-c", _SHORT)
            subprocess.run([*map(str, command)], check=True, stdin=subprocess.DEVNULL, timeout=60)
            profile = recording.stop().profile
        container_id = podman("inspect", name, "--format", "{{.Id}}")
        labels = _labels(profile)
    finally:
        podman("rm", "--force", "--ignore", "--time", 0, name)
    # THEN what it computed is its own
    assert _computed_ns(profile, labels, container_id) > 0.7 * _SHORT_NS
    found = [each for each in labels.values() if each.container_id == container_id]
    assert {(each.service, each.engine, each.version) for each in found} == {
        (name, "podman", "1.2")
    }


@pytest.mark.breadth
def test_a_container_that_is_gone_has_its_id(podman: _Podman, tmp_path: Path) -> None:
    ids = tmp_path / "id"
    with Recording(tmp_path, "-a", "-F", 499, "--no-off-cpu") as recording:
        # WHEN nothing is left of a container by the time that labels are made
        words = ("--rm", "--cidfile", ids)
        command = podman.run_command("gone", interpreter(), "-S", "-c", _SHORT, options=words)
        subprocess.run([*map(str, command)], check=True, stdin=subprocess.DEVNULL, timeout=60)
        profile = recording.stop().profile
    container_id = ids.read_text()
    # THEN its id is a label, and it is of the one service of all such containers
    labels = _labels(profile)
    assert _computed_ns(profile, labels, container_id) > 0.7 * _SHORT_NS
    found = [each for each in labels.values() if each.container_id == container_id]
    assert {(each.service, each.container) for each in found} == {("unknown-container", "")}


@dataclass(frozen=True)
class _Rootless:
    """podman, as an ordinary user runs it, in cgroups as systemd gives them to users.

    Attributes:
        podman: Runs its commands.
        uid: Of the user.
    """

    podman: _Podman
    uid: int

    def create(self, name: str, script: str) -> str:
        """Makes a container that is removed once it has ended; returns its id."""
        options = ("--interactive", "--rm", "--name", name, *_OPTIONS, _IMAGE)
        return self.podman("create", *options, interpreter(), "-S", "-c", script)

    def group(self, container_id: str) -> str:
        """Returns the cgroup that systemd would make for a container."""
        slices = f"user.slice/user-{self.uid}.slice/user@{self.uid}.service/user.slice"
        return f"{slices}/libpod-{container_id}.scope"

    @contextmanager
    def running(self, container_id: str, group: Path) -> Iterator[subprocess.Popen[bytes]]:
        """Runs a container in a cgroup, with its standard input."""
        script = 'echo $$ > "$1/cgroup.procs" && shift && exec "$@"'
        command = [*self.podman.command, "start", "--attach", "--interactive", container_id]
        with subprocess.Popen(
            ["sh", "-c", script, "sh", str(group), *command], stdin=subprocess.PIPE
        ) as process:
            try:
                yield process
            finally:
                process.kill()

    def run(self, container_id: str, group: Path) -> None:
        """The same, to its end."""
        with self.running(container_id, group) as process:
            process.communicate(timeout=_PATIENCE_S)
            assert process.returncode == 0


@pytest.fixture
def rootless(archive: Path) -> Iterator[_Rootless]:
    """An ordinary user, who has an image."""
    name = f"aflame{os.getpid()}"
    # One uid takes no set-uid program to map it.
    no_uids = ("-K", "SUB_UID_COUNT=0", "-K", "SUB_GID_COUNT=0")
    subprocess.run(["useradd", "--create-home", *no_uids, name], check=True, timeout=60)
    user = pwd.getpwnam(name)
    run = Path(f"/run/user/{user.pw_uid}")
    run.mkdir(parents=True)
    os.chown(run, user.pw_uid, user.pw_gid)
    as_user = ["setpriv", "--reuid", name, "--regid", name, "--clear-groups"]
    variables = (f"HOME={user.pw_dir}", f"XDG_RUNTIME_DIR={run}", f"PATH=/usr/sbin:{os.defpath}")
    drivers = ("--storage-driver", "vfs", "--cgroup-manager", "cgroupfs")
    podman = _Podman((*as_user, "env", "-i", "-C", "/", *variables, "podman", *drivers))
    try:
        image = shutil.copy(archive, user.pw_dir)
        podman("import", "--quiet", image, _IMAGE)
        yield _Rootless(podman, user.pw_uid)
    finally:
        for pid in procfs.process_ids():
            with suppress(OSError):
                if Path(f"/proc/{pid}").stat().st_uid == user.pw_uid:
                    os.kill(pid, signal.SIGKILL)
        shutil.rmtree(run)
        wait_until(lambda: subprocess.run(["userdel", "--remove", name]).returncode in (0, 6), 60)


@pytest.fixture
def pyroscope() -> Iterator[tuple[Pyroscope, str]]:
    """A stand-in of a Pyroscope, with its URL."""
    receiver = Pyroscope(time.time_ns() + _PATIENCE_S * 10**9)
    with serving(receiver) as server:
        yield receiver, server.url


@contextmanager
def _agent(folder: Path, url: str, *more: object) -> Iterator[Path]:
    """Runs an agent that pushes to a Pyroscope, and keeps captures; yields their folder."""
    captures, log = folder / "captures", folder / "log"
    captures.mkdir()
    command = [
        *(*support.AIFLAME, "agent", "--directory", str(folder / "agent"), "--health", ""),
        # Without devices: other tests expect to be the only recorder of their helpers.
        *("--gpu", "none", "--stretch", "15s", "--sinks-captures-directory", str(captures)),
        *("--sinks-pyroscope-url", url, *map(str, more)),
    ]
    with log.open("wb") as errors, subprocess.Popen(command, stderr=errors) as process:
        try:
            # The process that names makes it, and knows of containers from then on.
            wait_until((folder / "agent" / "spool").exists, _PATIENCE_S)
            yield captures
            process.terminate()
            assert process.wait(60) == 0, log.read_text()
        finally:
            process.kill()


def _is_recorded(directory: Path, ids: set[str]) -> bool:
    """Whether windows of an agent tell of all these containers, and so do its kept names."""
    known = directory / "containers.json"
    return known.exists() and ids <= json.loads(known.read_text()).keys()


def _captured(folder: Path, *words: str) -> Profile:
    """Asks an agent for a capture of the last minutes; the last word is its name."""
    path = folder / f"{words[-1]}.aiflame"
    asked = ["agent", "capture", "--directory", str(folder / "agent"), *words[:-1]]
    done = subprocess.run(
        [*support.AIFLAME, *asked, "--last", "10m", "-q", "-o", str(path)],
        stderr=subprocess.PIPE,
        text=True,
        timeout=_PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    return read_capture(path)


@pytest.mark.breadth
def test_many_containers_that_are_gone_before_they_are_asked_for(
    podman: _Podman, tmp_path: Path, pyroscope: tuple[Pyroscope, str]
) -> None:
    receiver, url = pyroscope
    folder = tmp_path / "ids"
    folder.mkdir()
    with _agent(tmp_path, url) as captures:

        def run(number: int) -> None:
            words = ("--rm", "--cidfile", folder / f"{_OWN}-job{number}")
            python = (interpreter(), "-S", "-c", _BRIEF)
            command = podman.run_command(f"job{number}", *python, options=words)
            subprocess.run(
                [*map(str, command)], check=True, stdin=subprocess.DEVNULL, timeout=_PATIENCE_S
            )

        # WHEN containers come and go, which leave nothing behind
        with ThreadPoolExecutor(4) as threads:
            deque(threads.map(run, range(_CONTAINERS)), 0)
        # AND one of them is asked for, when what was recorded of it is on disk
        names = {path.read_text(): path.name for path in folder.iterdir()}
        wait_until(lambda: _is_recorded(tmp_path / "agent", {*names}), _PATIENCE_S)
        of_one = _captured(tmp_path, "--container", f"{_OWN}-job0", "one")
    # THEN its capture is of it,
    first = next(key for key, name in names.items() if name == f"{_OWN}-job0")
    assert {each.container_id for each in of_one.labels if each is not None} == {first}
    assert int(of_one.samples["ns"].sum()) > 0  # at 19 Hz, no tick may come in 50 ms on the CPU
    # AND each has its name, though no stretch was over while it ran,
    assert len(names) == _CONTAINERS
    found = {
        labels.container_id: labels.container
        for path in captures.iterdir()
        for labels in read_capture(path).labels
        if labels is not None and labels.container_id in names
    }
    assert found == names
    # AND a back-end has one service for each, and no other for any of them.
    services = {dict(labels)["service_name"] for _, labels in receiver.series}
    assert {name for name in services if name.startswith(_OWN)} <= {*names.values()}
    assert not any(re.search("[0-9a-f]{12}", name) for name in services), services


@pytest.mark.breadth
def test_short_lived_processes_that_are_joined_have_their_container(
    podman: _Podman, tmp_path: Path, pyroscope: tuple[Pyroscope, str]
) -> None:
    with ExitStack() as stack:
        # GIVEN two containers with short-lived processes, and an agent for which they are too dear
        budget = ("--cost-host-percent", 0.05, "--cost-cpu-percent", 0.1)
        captures = stack.enter_context(_agent(tmp_path, pyroscope[1], *budget))
        forking = (interpreter(), "-S", "-c", _FORKING)
        ids = []
        for name in ("forks1", "forks2"):
            workload, container_id, _ = stack.enter_context(podman.running(name, *forking))
            workload.go()
            ids.append(container_id)

        # WHEN it has begun to join them
        def joined() -> set[str]:
            """Which of the containers a joined process has the label of."""
            found = set()
            for path in captures.glob("*.aiflame"):
                profile = read_capture(path)
                for process, labels in zip(profile.processes, profile.labels, strict=True):
                    if process.pid == 0 and labels is not None:
                        found.add(labels.container_id)
            return found & {*ids}

        # THEN what stands for those of each container is that container's
        wait_until(lambda: joined() == {*ids}, _PATIENCE_S)


def test_rules_and_labels_by_what_podman_was_told_of_a_container(
    podman: _Podman, tmp_path: Path, pyroscope: tuple[Pyroscope, str]
) -> None:
    receiver, url = pyroscope
    options = ("--pod-labels", "team", "--exclude", "label:team=secret", "--stretch", "5s")
    ids: dict[str, str] = {}
    with ExitStack() as stack:
        # GIVEN an agent, and containers that are told apart by a label
        captures = stack.enter_context(_agent(tmp_path, url, *options))
        computing = (interpreter(), "-S", "-c", _COMPUTING)
        for team in ("search", "secret"):
            label = ("--label", f"team={team}", "--label", "other=none")
            running = podman.running(team, *computing, options=label)
            workload, ids[team], _ = stack.enter_context(running)
            workload.go()

        def computed(profile: Profile) -> dict[str, int]:
            """Returns the time on a CPU of containers, by their ids."""
            found: dict[str, int] = {}
            for row in profile.samples[profile.samples["klass"] == SampleClass.ON_CPU]:
                labels = profile.labels[profile.threads[row["thread"]].process]
                if labels is not None and labels.container_id:
                    assert labels.container_id != ids["search"] or labels.extra == (
                        ("team", "search"),
                    )
                    found[labels.container_id] = found.get(labels.container_id, 0) + int(row["ns"])
            return found

        def excluded(profile: Profile) -> int:
            return sum(loss.count for loss in profile.losses if loss.name == "excluded")

        # WHEN a stretch is over that began after both
        def whole() -> list[Profile]:
            profiles = map(read_capture, captures.glob("*.aiflame"))
            return [each for each in profiles if computed(each).get(ids["search"], 0) > 3e8]

        wait_until(lambda: any(map(excluded, whole())), _PATIENCE_S)
        found = whole()
    # THEN what is recorded of the one has its label, here and in a back-end,
    teams = {dict(labels).get("team") for _, labels in receiver.series}
    assert "search" in teams
    # AND of the other there is nothing anywhere: the kernel leaves it out.
    assert "secret" not in teams
    for profile in found:
        assert ids["secret"] not in {each.container_id for each in profile.labels if each}
    services = {dict(labels)["service_name"] for _, labels in receiver.series}
    assert f"{_OWN}-search" in services
    assert f"{_OWN}-secret" not in services


@pytest.mark.breadth
def test_rootless_containers_have_the_names_of_their_user(
    rootless: _Rootless, tmp_path: Path, pyroscope: tuple[Pyroscope, str]
) -> None:
    receiver, url = pyroscope
    names = [f"{_OWN}-r{number}" for number in range(11)]
    ids: list[str] = []
    keys: set[str] = set()
    mount = cgroup2_mounts()[0]

    def create(name: str, script: str) -> tuple[str, Path]:
        ids.append(rootless.create(name, script))
        keys.add(f"user-{rootless.uid}/{ids[-1]}")
        (group,) = groups.enter_context(made_groups(mount, rootless.group(ids[-1])))
        return ids[-1], group

    with ExitStack() as groups, _agent(tmp_path, url) as captures:
        # GIVEN a user of whom a container was seen
        long = create(names[0], f"input()\n{_SHORT}")
        with rootless.running(*long) as first:
            wait_until(lambda: _is_recorded(tmp_path / "agent", keys), _PATIENCE_S)
            # WHEN others come and go, and leave nothing
            for name in names[1:]:
                rootless.run(*create(name, _BRIEF))
            first.communicate(b"\n", _PATIENCE_S)
        wait_until(lambda: _is_recorded(tmp_path / "agent", keys), _PATIENCE_S)
        of_one = _captured(tmp_path, "--container", f"user-{rootless.uid}/{names[1]}", "one")
    assert {each.container_id for each in of_one.labels if each is not None} == {ids[1]}
    # THEN each has its name, below that of its user,
    expected = {
        key: (f"user-{rootless.uid}/{name}", "podman", "1.2")
        for key, name in zip(ids, names, strict=True)
    }
    found = {
        labels.container_id: (labels.container, labels.engine, labels.version)
        for path in captures.iterdir()
        for labels in read_capture(path).labels
        if labels is not None and labels.container_id in ids
    }
    assert found == expected
    # AND a back-end has it as its service.
    services = {dict(labels)["service_name"] for _, labels in receiver.series}
    assert {name for name, _, _ in expected.values()} <= services


def test_the_agent_refuses_a_pid_namespace_of_its_own() -> None:
    script = "from aiflame.agent.fleet.host_checks import require_host_pids as r; r()"
    inside = ("unshare", "--pid", "--fork", "--mount-proc")
    refused = subprocess.run(
        [*inside, sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert refused.returncode == 1
    assert "EnvironmentUnfit: the agent is in a pid namespace of its own" in refused.stderr
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


@pytest.mark.parametrize("bounds", ["+all", "+all,-sys_admin"])
def test_the_agent_sees_cgroups_of_the_host_from_a_cgroup_namespace_of_its_own(bounds: str) -> None:
    script = "from aiflame.agent.fleet import host_checks as h; h.enter_host_cgroup_namespace();"
    script += "print(open('/proc/self/cgroup').read(), 'note:' + h.cgroup_namespace_note())"
    # GIVEN a process that is in a group of its own, and in a namespace that begins there
    enter = 'echo $$ > "$1/cgroup.procs" && shift && exec "$@"'
    inside = ("unshare", "--cgroup", "setpriv", f"--bounding-set={bounds}")
    with made_groups(cgroup2_mounts()[0], f"{_OWN}/own") as (group,):
        said = subprocess.run(
            ["sh", "-c", enter, "sh", group, *inside, sys.executable, "-c", script],
            stdout=subprocess.PIPE,
            text=True,
            timeout=60,
            check=True,
        ).stdout
    # THEN it sees the host's path where it may, and says what is missing where it may not
    may_enter = "sys_admin" not in bounds
    assert (f"0::/{_OWN}/own\n" in said) == may_enter, said
    assert said.endswith("note:\n") == may_enter
    assert ("SYS_ADMIN" in said) != may_enter
