# SPDX-License-Identifier: Apache-2.0
"""Every example that a help text ends with runs as it stands.

Only what stands for something of the reader's is replaced: the pid 1234, a container, a unit and a
program by name, and run.aiflame, base.aiflame and new.aiflame by a capture of that name, or by a
recording that was to be one and was killed. A recording that would go on until Ctrl-C gets it once
it is attached. The store "fleet" holds that capture; examples with it need chDB.
"""

from __future__ import annotations

import importlib
import os
import shlex
import signal
import subprocess
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import support
from aiflame.agent.cli import EXAMPLES, VERBS
from aiflame.agent.processes.targets import cgroup2_mounts
from cgroups import made_groups
from recordings import Recording

pytestmark = pytest.mark.bpf


def _examples() -> list[str]:
    texts = [EXAMPLES]
    texts += [importlib.import_module(f"aiflame.agent.commands.{verb}").EPILOG for verb in VERBS]
    lines = (line.partition("  #")[0].strip() for text in texts for line in text.splitlines())
    examples = (line for line in lines if line.partition(" ")[0] in ("sudo", "aiflame"))
    return [*dict.fromkeys(examples)]  # some are in two texts


def _parameters() -> list[Any]:
    """Returns all examples; after the first of each verb they are breadth."""
    verbs: set[str] = set()
    found = []
    for example in _examples():
        verb = example.removeprefix("sudo ").split()[1]
        marks = [pytest.mark.breadth] if verb in verbs else []
        found.append(pytest.param(example, marks=marks, id=example))
        verbs.add(verb)
    return found


_UNIT = f"aiflame-examples-{os.getpid()}"
_CONTAINER_ID = f"{os.getpid():08x}" + "0123456789abcdef" * 3 + "01234567"


# For `diff` to tell a change from chance, on a host where the target gets a tenth of a CPU as well.
_ENOUGH_S, _RATE_HZ = "9", "999"


@pytest.fixture(scope="module")
def target(workload: Callable[..., Path]) -> Iterator[subprocess.Popen[bytes]]:
    """A process in a container in a unit, as podman makes them."""
    group = f"system.slice/{_UNIT}.service/libpod-payload-{_CONTAINER_ID}"
    with (
        made_groups(cgroup2_mounts()[0], group) as (folder,),
        support.serving(workload("serving")) as process,
    ):
        (folder / "cgroup.procs").write_text(str(process.pid))
        yield process


@pytest.fixture(scope="module")
def capture(target: subprocess.Popen[bytes], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("capture") / "run.aiflame"
    command = [
        *support.AIFLAME,
        "record",
        "-q",
        "-p",
        str(target.pid),
        "-d",
        _ENOUGH_S,
        "-F",
        _RATE_HZ,
        "-o",
        str(path),
    ]
    subprocess.run(command, check=True, timeout=120)
    return path


def test_each_help_text_has_examples() -> None:
    text = "\n".join(_examples())
    assert all(f"aiflame {verb}" in text for verb in VERBS)


@pytest.mark.parametrize("example", _parameters())
def test_example_runs(
    example: str,
    target: subprocess.Popen[bytes],
    capture: Path,
    tmp_path: Path,
) -> None:
    # GIVEN the reader's own process and, unless the example makes it, their capture
    aiflame = shlex.join(support.AIFLAME)
    line = example.removeprefix("sudo ").replace("1234", str(target.pid))
    line = line.replace("aiflame ", f"{aiflame} ", 1).replace(
        " train.py", " -c 'print(sum(range(10**7)))'"
    )
    line = line.replace("--container 4f2a9c", f"--container {_CONTAINER_ID[:12]}")
    line = line.replace("--unit nginx", f"--unit {_UNIT}")
    line = line.replace("--comm nginx", "--comm serving")
    line = line.replace("-d 30", "-d 2").replace("-d 10", "-d 2")
    line = line.replace("/var/lib/aiflame/captures", str(tmp_path))
    (tmp_path / "agent.toml").write_text(f'directory = "{tmp_path}/agent"\n')
    if " recover run.aiflame" in line:
        with Recording(tmp_path, "-p", target.pid) as recording:
            support.wait_until(recording.windows, 60)
            recording.stop(signal.SIGKILL)
    elif "-o run.aiflame" not in line:
        for name in ("run", "base", "new"):
            (tmp_path / f"{name}.aiflame").symlink_to(capture)
    if "--store fleet" in line:
        if find_spec("chdb") is None:  # not imported: it swells whatever process it is in
            pytest.skip("chDB is not installed")
        if " init " not in line:
            for words in (("init",), ("add", str(capture))):
                command = [*support.AIFLAME, "store", *words, "--store", "fleet"]
                subprocess.run(command, check=True, timeout=120, cwd=tmp_path)
    environment = {**os.environ, "AIFLAME_DIRECTORY": f"{tmp_path}/agent"}
    agent = None
    if " agent capture " in line:
        agent = subprocess.Popen(
            # Without devices: other tests expect to be the only recorder of their helpers.
            [*support.AIFLAME, "agent", "--health", "", "--gpu", "none"],
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        assert agent.stderr is not None
        while "recording all" not in agent.stderr.readline():
            assert agent.poll() is None
        support.wait_until(lambda: [*tmp_path.glob("agent/stretches/*/*.windows")], 60)
    # WHEN it is typed
    process = subprocess.Popen(
        ["bash", "-c", f"exec {line}" if "|" not in line else line],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert process.stderr is not None
    said = ""
    if " record " in line and " -d " not in line and " -- " not in line:
        while "attached" not in said and process.poll() is None:
            said += process.stderr.readline()
        process.send_signal(signal.SIGINT)
    if " agent " in line and "--check-config" not in line and agent is None:
        while "recording all" not in said and process.poll() is None:
            said += process.stderr.readline()
        process.send_signal(signal.SIGTERM)
    _, rest = process.communicate(timeout=120)
    if agent is not None:
        agent.terminate()
        agent.communicate(timeout=60)
    # THEN it ends well
    assert process.returncode == 0, said + rest
