# SPDX-License-Identifier: Apache-2.0
"""The agent in a container that has what the DaemonSet gives it, and nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from aiflame.agent.capture.reader import read_capture
from aiflame.agent.doctor.checks import AGENT_CHECKS
from aiflame.agent.model.profile import COMPLETE_REASONS, Profile
from deployment import DEPLOY, container, pod, podman_options
from podman import LIMITS, interpreter, require_podman, working_podman
from recordings import frames_of, rows_of
from support import wait_until
from wheels import build_wheel

pytestmark = [pytest.mark.bpf, pytest.mark.slow]

_NAME = f"aiflame-test-{os.getpid()}-agent"
_PROGRAM = "/opt/aiflame/bin/aiflame"  # of deploy/Dockerfile
# A crowded host may take minutes, says the manifest.
_PATIENCE_S = 180
_STATE = Path("/var/lib/aiflame")
# What the manifest decides. Others take seconds, and load programs as the agent has just done.
_CHECKS = (
    *("os.pid_namespace", "os.capabilities", "os.seccomp", "out.cache"),
    *("agent.child_rights", "agent.config", "agent.directory", "agent.captures"),
)
_OTHER_CHECKS = {check.id for check in AGENT_CHECKS} - {*_CHECKS, "os.linux", "os.arch"}


@dataclass(frozen=True)
class _Deployed:
    """The agent's container.

    Attributes:
        podman: What runs podman.
        state: The directory of the host that outlives it.
    """

    podman: tuple[str, ...]
    state: Path

    def execute(self, *words: object) -> subprocess.CompletedProcess[str]:
        """Runs a command in it, as `kubectl exec` and probes do."""
        return subprocess.run(
            [*self.podman, "exec", _NAME, *map(str, words)],
            capture_output=True,
            text=True,
            timeout=_PATIENCE_S,
            check=False,
        )

    def is_passed(self, probe: str) -> bool:
        """Whether it passes a probe of the manifest."""
        return self.execute(*container()[probe]["exec"]["command"]).returncode == 0

    def log(self) -> str:
        """Returns what the agent has said."""
        words = [*self.podman, "logs", _NAME]
        return subprocess.run(words, capture_output=True, text=True, check=True).stderr

    def captured(self, *words: object) -> Profile:
        """Returns a capture of what the agent has on disk."""
        name = "asked.aiflame"
        asked = ("agent", "capture", *words, "-q", "--force", "-o", _STATE / name)
        done = self.execute(_PROGRAM, *asked)
        assert done.returncode == 0, done.stderr
        return read_capture(self.state / name)

    def stop(self) -> int:
        """Ends it as a kubelet does; returns its exit status."""
        grace = ("--time", str(pod()["terminationGracePeriodSeconds"]))
        subprocess.run([*self.podman, "stop", *grace, _NAME], capture_output=True, check=True)
        words = [*self.podman, "inspect", _NAME, "--format", "{{.State.ExitCode}}"]
        return int(subprocess.run(words, capture_output=True, text=True, check=True).stdout)


def _install(root: Path, wheel: Path) -> list[str]:
    """Makes a root directory with a wheel in it; returns what podman has to mount there.

    It is the image's, but that Debian's files and what the wheel depends on are the host's.
    """
    packages = [path for path in sys.path if path.endswith("-packages") and Path(path).is_dir()]
    mounted = {"/usr", sys.base_prefix, *packages}
    for name in ("bin", "sbin", "lib", "lib64"):
        path = Path("/", name)
        if path.is_symlink():
            (root / name).symlink_to(path.readlink())
        elif path.exists():
            mounted.add(str(path))
    for folder in ("proc", "sys", "dev", "etc", "run", "tmp", "var"):
        (root / folder).mkdir()
    (root / "var/run").symlink_to("/run")
    home = root / "opt/aiflame"
    installed = home / f"lib/python3.{sys.version_info.minor}/site-packages"
    installed.mkdir(parents=True)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)
    (installed / "dependencies.pth").write_text("\n".join(packages))
    (home / "pyvenv.cfg").write_text(f"home = {Path(interpreter()).parent}\n")
    (home / "bin").mkdir()
    (home / "bin/python").symlink_to(interpreter())
    program = root / _PROGRAM.lstrip("/")
    program.write_text(
        f"#!{Path(_PROGRAM).with_name('python')}\n"
        "import sys\nfrom aiflame.agent.cli import main\nsys.exit(main())\n"
    )
    program.chmod(0o755)
    return [f"--volume={path}:{path}:ro" for path in sorted(mounted)]


def _configure(folder: Path) -> Path:
    """Makes the directory of a ConfigMap, with the links that a kubelet makes."""
    folder.mkdir()
    (folder / "..data").mkdir()
    (folder / "..data/agent.toml").write_bytes((DEPLOY / "kubernetes/agent.toml").read_bytes())
    (folder / "agent.toml").symlink_to("..data/agent.toml")
    return folder


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """What podman has to be told of a root directory with the agent."""
    require_podman()
    root = tmp_path_factory.mktemp("root")
    mounts = _install(root, build_wheel(tmp_path_factory.mktemp("source")))
    return (*mounts, "--rootfs", str(root))


@contextmanager
def _running(image: tuple[str, ...], folder: Path) -> Iterator[_Deployed]:
    podman = working_podman(*image, interpreter())
    on_host = {str(_STATE): folder / "state", "/var/cache/aiflame": folder / "cache"}
    for path in on_host.values():
        path.mkdir(mode=0o755)  # as DirectoryOrCreate makes it
    options = podman_options(_configure(folder / "configuration"), on_host)
    command = [*podman, "run", "--detach", "--name", _NAME, *LIMITS, *options, *image, _PROGRAM]
    try:
        subprocess.run([*command, *container()["args"]], capture_output=True, check=True)
        yield _Deployed(podman, on_host[str(_STATE)])
    finally:
        subprocess.run([*podman, "rm", "--force", "--ignore", "--time", "0", _NAME], check=True)


def _whole_stacks(profile: Profile) -> set[str]:
    """Returns the functions of a program's stacks, if all of these are complete."""
    stacks = rows_of(profile, "forward_pass")["stack"]
    if not np.isin(np.asarray(profile.stacks.ends)[stacks], COMPLETE_REASONS).all():
        return set()
    return {name for stack in set(stacks.tolist()) for name in frames_of(profile, stack)}


def test_the_rights_of_the_daemon_set_record_the_host(
    image: tuple[str, ...], busy: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    with _running(image, tmp_path) as agent:
        # WHEN it has begun THEN it passes its probes,
        wait_until(lambda: agent.is_passed("startupProbe"), _PATIENCE_S)
        assert agent.is_passed("livenessProbe") and agent.is_passed("readinessProbe")
        # has all rights and directories that it asks for,
        asked = ("doctor", "--agent", "--config", container()["args"][-1], "--json")
        said = agent.execute(_PROGRAM, *asked, "--skip-checks", ",".join(_OTHER_CHECKS)).stdout
        found = {one["id"]: one for one in json.loads(said)["checks"]}
        assert {found[check]["status"] for check in _CHECKS} == {"ok"}, found
        assert "CAP_" not in agent.log()

        # and has whole stacks of a program of the host's, with their names.
        def is_whole() -> bool:
            profile = agent.captured("--pid", busy.pid, "--last", "10s")
            return {"worker", "forward_pass"} <= _whole_stacks(profile)

        wait_until(is_whole, _PATIENCE_S)
        # It ends by itself, 1 where this machine is so crowded that it does so by force,
        code, log = agent.stop(), agent.log()
        assert code == 0 or (code == 1 and "takes too long to end" in log), log
        assert "Traceback" not in agent.log()
        # and leaves what outlives it to nobody else.
        assert not [path for path in agent.state.rglob("*") if path.stat().st_mode & 0o077]
