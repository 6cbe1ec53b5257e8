# SPDX-License-Identifier: Apache-2.0
"""What `make kernels SYSTEMD=1` runs inside a guest whose PID 1 is systemd: the agent as a service.

It is installed as deploy/README.md says, with the unit as it is, then started, reloaded, asked for
a capture, killed and stopped by systemctl. Prints a line for each step, and what the service said
where one fails; the exit status is 1 then.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

# Also when started as a program, the tests' modules are there.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from aiflame.agent.capture.reader import read_capture
from aiflame.agent.model.profile import Profile, SampleClass
from support import wait_until

_CHECKOUT = Path(__file__).resolve().parents[2]
_UNIT = "aiflame-agent"
_CONFIGURATION = Path("/etc/aiflame/agent.toml")
_AIFLAME = "/opt/aiflame/bin/aiflame"
# Emulation is ten to thirty times as slow as the machine that it runs on, which may be busy.
_PATIENCE_S = 300.0
_LOAD = "load.service"
_COMPUTES = "while True: sum(range(10000))"


def _run(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise AssertionError(f"{' '.join(words)}: {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def _property(name: str) -> str:
    return _run("systemctl", "show", "--value", "-p", name, _UNIT).strip()


def _journal() -> str:
    return _run("journalctl", "--no-pager", "-o", "cat", "-u", _UNIT)


def _install() -> None:
    # In place of pip: the checkout's environment has all that a wheel brings.
    Path("/opt").mkdir(exist_ok=True)
    Path("/opt/aiflame").symlink_to(_CHECKOUT / ".venv")
    _CONFIGURATION.parent.mkdir()
    _CONFIGURATION.write_bytes((_CHECKOUT / "deploy/kubernetes/agent.toml").read_bytes())
    unit = _CHECKOUT / f"deploy/systemd/{_UNIT}.service"
    _run("install", "-m", "644", "-t", "/etc/systemd/system", str(unit))
    _run("systemctl", "enable", _UNIT)
    _run("systemd-run", f"--unit={_LOAD}", sys.executable, "-c", _COMPUTES)


def _start() -> None:
    _run("systemctl", "start", _UNIT)  # which returns when it is ready
    assert _property("ActiveState") == "active"


def _doctor() -> None:
    _run(_AIFLAME, "doctor", "--agent", "--config", str(_CONFIGURATION))


def _on_cpu_ns(profile: Profile, cgroup: str) -> int:
    rows = profile.samples[profile.samples["klass"] == SampleClass.ON_CPU]
    threads = (profile.threads[thread] for thread in rows["thread"].tolist())
    cgroups = [profile.processes[thread.process].cgroup for thread in threads]
    return sum(int(ns) for ns, of in zip(rows["ns"], cgroups, strict=True) if of.endswith(cgroup))


def _capture() -> None:
    path = Path("/tmp/all.aiflame")  # noqa: S108 - nobody else is in this guest
    _run(_AIFLAME, "agent", "capture", "--all", "-d", "10s", "-o", str(path))
    profile = read_capture(path)
    print(f" {len(profile.processes)} processes,", end="")
    for loss in profile.losses:
        print(f" {loss.name} {loss.count}", end="")
    assert _on_cpu_ns(profile, _LOAD) > 0


def _reload() -> None:
    _CONFIGURATION.write_text(_CONFIGURATION.read_text() + 'max_age = "2h"\n')
    _run("systemctl", "reload", _UNIT)
    assert _property("ActiveState") == "active"


def _is_active_again(pid: str) -> bool:
    return _property("ActiveState") == "active" and _property("MainPID") not in ("0", pid)


def _restart() -> None:
    pid = _property("MainPID")
    _run("systemctl", "kill", "--kill-who=main", "-s", "KILL", _UNIT)
    wait_until(lambda: _is_active_again(pid), _PATIENCE_S)
    assert _property("NRestarts") == "1"


def _stop() -> None:
    _run("systemctl", "stop", _UNIT)
    assert _property("Result") == "success", _property("Result")
    assert not [*Path("/sys/fs/cgroup/system.slice").glob(f"{_UNIT}.service")]


_STEPS: tuple[Callable[[], None], ...] = (
    _install,
    _start,
    _doctor,
    _capture,
    _reload,
    _restart,
    _stop,
)


def main() -> int:
    """Takes the steps in order; returns the exit status."""
    for step in _STEPS:
        print(f"  {step.__name__[1:]} ...", end="", flush=True)
        begun_s = time.monotonic()
        try:
            step()
        except Exception as error:  # whatever it is, the journal tells more
            print(f" {error!r}\n{_journal()}", flush=True)
            return 1
        print(f" {time.monotonic() - begun_s:.0f} s", flush=True)
    print(_journal())
    return 0


if __name__ == "__main__":
    sys.exit(main())
