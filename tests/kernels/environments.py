# SPDX-License-Identifier: Apache-2.0
"""What `make kernels ENVIRONMENTS=1` runs inside a guest: machines on which something is missing.

In each environment `record` either works, or refuses with the sentence that names the cause and
the cure. Prints a line for each; the exit status is 1 if one is otherwise.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

# Also when started as a program, the tests' modules are there.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support import AIFLAME

# Exit statuses of aiflame.
_NO_TARGET, _BAD_USAGE, _REFUSED = 1, 2, 3
_CAPABILITIES = "+bpf,+perfmon,+sys_ptrace,+dac_read_search"
_NOBODY = "setpriv --reuid 65534 --regid 65534 --clear-groups"
_SOMEBODY = f"{_NOBODY} --inh-caps {_CAPABILITIES} --ambient-caps {_CAPABILITIES}"
_CONTAINER = "unshare --pid --mount --fork --mount-proc"
_CGROUP_V1 = (
    "umount -l /sys/fs/cgroup; mount -t tmpfs none /sys/fs/cgroup; mkdir /sys/fs/cgroup/cpu;"
    " mount -t cgroup -o cpu none /sys/fs/cgroup/cpu; mkdir -p /sys/fs/cgroup/cpu/a"
)


@dataclass(frozen=True, slots=True)
class Case:
    """One environment.

    Attributes:
        name: What is different there.
        before: A shell script that makes it so, in a mount namespace of its own.
        target: What is recorded; `PID` stands for a process that computes.
        said: What `record` has to say.
        status: Its exit status.
        prefix: What `record` is started by.
    """

    name: str
    before: str
    said: str
    status: int = 0
    target: str = "-p PID"
    prefix: str = ""


_WORKS = "Complete stacks"
CASES = (
    Case("nothing", "", _WORKS),
    Case("no compiler of BPF to machine code", "sysctl -qw net.core.bpf_jit_enable=0", _WORKS),
    Case(
        "no BTF",
        "mount -t tmpfs none /sys/kernel/btf",
        "this kernel has no type information (/sys/kernel/btf/vmlinux)",
        _REFUSED,
    ),
    Case("cgroup v1, a process", _CGROUP_V1, _WORKS),
    Case(
        "cgroup v1, a cgroup",
        _CGROUP_V1,
        "not a cgroup v2 directory",
        _BAD_USAGE,
        "--cgroup /sys/fs/cgroup/cpu/a",
    ),
    Case(
        "capabilities, at level 3 of perf_event_paranoid",
        "sysctl -qw kernel.perf_event_paranoid=3 kernel.unprivileged_bpf_disabled=2",
        _WORKS,
        prefix=_SOMEBODY,
    ),
    Case(
        "capabilities, at level 4 of perf_event_paranoid",
        "sysctl -qw kernel.perf_event_paranoid=4",
        "run as root or with CAP_SYS_ADMIN, or: sudo sysctl kernel.perf_event_paranoid=2",
        _REFUSED,
        prefix=_SOMEBODY,
    ),
    Case(
        "no capabilities",
        "sysctl -qw kernel.unprivileged_bpf_disabled=1",
        "needs CAP_BPF to load programs into the kernel",
        _REFUSED,
        prefix=_NOBODY,
    ),
    Case(
        "a container's namespaces, a process outside",
        "",
        "run with --pid=host",
        _NO_TARGET,
        prefix=_CONTAINER,
    ),
    Case(
        "a container's namespaces, all processes",
        "",
        "this is a pid namespace of its own",
        _REFUSED,
        "-a",
        _CONTAINER,
    ),
)

# Of a guest that was booted with it.
LOCKDOWN = Case(
    "lockdown=confidentiality",
    "",
    "kernel lockdown is in confidentiality mode: nothing may read kernel memory",
    _REFUSED,
)


def _run(case: Case, pid: int) -> str:
    """Records in an environment; returns what is wrong, or nothing."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)
        target = case.target.replace("PID", str(pid))
        command = f"{' '.join(AIFLAME)} record -o run.aiflame -d 1 {target}"
        script = f"{case.before or ':'}; cd {folder} && HOME={folder} exec {case.prefix} {command}"
        done = subprocess.run(
            ["unshare", "--mount", "bash", "-c", script],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
    if done.returncode == case.status and case.said in done.stdout:
        return ""
    return f"exit status {done.returncode}, where {case.status} was expected:\n{done.stdout}"


def main(cases: Sequence[Case]) -> int:
    """Runs cases in order; returns the exit status."""
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    status = 0
    try:
        for case in cases:
            print(f"  {case.name} ...", end="", flush=True)
            wrong = _run(case, busy.pid)
            print(f" {wrong or ('refused' if case.status else 'works')}", flush=True)
            status = status or int(bool(wrong))
    finally:
        busy.kill()
    return status


if __name__ == "__main__":
    is_locked = "lockdown=confidentiality" in Path("/proc/cmdline").read_text()
    sys.exit(main([LOCKDOWN] if is_locked else CASES))
