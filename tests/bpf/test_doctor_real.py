# SPDX-License-Identifier: Apache-2.0
"""`aiflame doctor` on this kernel: as it is, and with something taken away from the process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import support
from aiflame.agent.kernel import compile
from breadth import cases

pytestmark = [pytest.mark.bpf, pytest.mark.breadth]

Run = Callable[..., subprocess.CompletedProcess[str]]

# Installs a seccomp filter that answers EPERM to one system call, then becomes the command.
# struct sock_filter and the opcodes: include/uapi/linux/filter.h, bpf_common.h; seccomp_data.nr is
# at offset 0. prctl numbers: include/uapi/linux/prctl.h.
SECCOMP = """\
import ctypes, os, struct, sys
code = [(0x20, 0, 0, 0), (0x15, 0, 1, int(sys.argv[1])), (6, 0, 0, 0x50001), (6, 0, 0, 0x7fff0000)]
text = ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *line) for line in code))
program = struct.pack("<HxxxxxxQ", len(code), ctypes.addressof(text))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, program) == 0
os.execv(sys.argv[2], sys.argv[2:])
"""


def _doctor(
    *before: str, arguments: tuple[str | Path, ...] = (), **keywords: Any
) -> tuple[int, dict[str, Any], dict[str, dict[str, str]]]:
    command = [*before, *support.AIFLAME, "doctor", "--json", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, **keywords)
    assert done.stdout, done.stderr
    report = json.loads(done.stdout)
    assert report["exit_code"] == done.returncode
    return done.returncode, report, {check["id"]: check for check in report["checks"]}


def test_machine_that_can_record_passes_and_says_so(run_aiflame: Run) -> None:
    done = run_aiflame("doctor", "--pid", os.getpid())
    assert done.returncode == 0, done.stdout
    rows = {line.split()[1]: line.split()[0] for line in done.stdout.splitlines()[:-1]}
    for name in ("bpf.load", "bpf.attach", "bpf.sample", "bpf.off_cpu", "bpf.ringbuf"):
        assert rows[name] == "ok"
    assert rows["target.visible"] == rows["target.mappings"] == "ok"
    assert "recording on and off the CPU will work" in done.stdout.splitlines()[-1]
    assert "\033" not in done.stdout


def test_json_tells_the_same() -> None:
    code, report, found = _doctor()
    assert code == 0
    assert report["schema"] == 1
    assert report["kernel"] == os.uname().release
    assert "fail" not in {check["status"] for check in found.values()}
    assert found["bpf.sample"]["status"] == "ok"


def test_missing_capability_is_named_and_nothing_is_loaded() -> None:
    code, _, found = _doctor("setpriv", "--bounding-set", "-sys_admin,-bpf")
    assert code == 3
    assert found["os.capabilities"]["status"] == "fail"
    assert "CAP_BPF" in found["os.capabilities"]["finding"]
    assert "CAP_PERFMON" not in found["os.capabilities"]["finding"]
    assert found["bpf.load"]["status"] == "skip"
    assert found["bpf.bcc"]["status"] == "ok"


def test_pid_namespace_is_refused_with_the_words_of_record(tmp_path: Path) -> None:
    inside = ("unshare", "--pid", "--fork", "--mount-proc")
    code, _, found = _doctor(*inside)
    check = found["os.pid_namespace"]
    assert (code, check["status"]) == (3, "fail")
    assert found["bpf.load"]["status"] == "ok"
    assert found["bpf.sample"]["status"] == "skip"
    record = subprocess.run(
        [*inside, *support.AIFLAME, "record", "-a", "-d", "1"],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
        check=False,
    )
    assert record.returncode == 3
    assert check["finding"] in record.stderr
    assert check["cure"] in record.stderr
    assert not list(tmp_path.iterdir())


@cases("number, name", [(321, "bpf()"), (298, "perf_event_open()")])
def test_seccomp_filter_is_named_with_what_it_refuses(number: int, name: str) -> None:
    code, _, found = _doctor(sys.executable, "-c", SECCOMP, str(number))
    assert code == 3
    assert found["os.seccomp"]["status"] == "fail"
    assert name in found["os.seccomp"]["finding"]
    assert found["bpf.load"]["status"] == "skip"


def test_seccomp_filter_that_lets_a_recording_through_is_no_failure() -> None:
    # GIVEN a filter on a system call that nobody makes
    code, _, found = _doctor(sys.executable, "-c", SECCOMP, "156")
    assert code == 0
    assert "filter is active" in found["os.seccomp"]["finding"]
    assert found["bpf.sample"]["status"] == "ok"


@cases("limit, name", [("-v 400000", "os.address_space"), ("-n 60", "os.open_files")])
def test_a_limit_that_is_too_low_is_named_with_its_cure(limit: str, name: str) -> None:
    code, _, found = _doctor("sh", "-c", f'ulimit {limit}; exec "$@"', "sh")
    assert (code, found[name]["status"]) == (3, "fail")
    assert found[name]["cure"].startswith(f"ulimit {limit.split()[0]}")
    assert found["bpf.load"]["status"] == "skip"


# A package that was not built: its bytecode is an empty file.
NOT_BUILT = (
    *("unshare", "--mount", "sh", "-c"),
    f'mount --bind /dev/null "{compile.shipped_file()}" && exec "$@"',
    "sh",
)


def test_built_package_needs_no_compiler(tmp_path: Path) -> None:
    (tmp_path / "bcc").mkdir()
    (tmp_path / "bcc/__init__.py").write_text("raise ImportError")
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    code, _, found = _doctor(env={**os.environ, "PYTHONPATH": path})
    assert code == 0
    assert found["bpf.load"]["status"] == "ok"


def test_package_of_pypi_is_told_from_the_distributions(tmp_path: Path) -> None:
    (tmp_path / "bcc").mkdir()
    (tmp_path / "bcc/__init__.py").touch()
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    code, _, found = _doctor(*NOT_BUILT, env={**os.environ, "PYTHONPATH": path})
    assert code == 3
    assert found["bpf.bcc"]["status"] == "fail"
    assert "PyPI" in found["bpf.bcc"]["finding"]
    assert "python3-bpfcc" in found["bpf.bcc"]["cure"]
    assert found["bpf.load"]["finding"] == "not tried, because bpf.bcc failed"


def test_compiler_that_fails_is_quoted_with_v(tmp_path: Path) -> None:
    # GIVEN a compiler that takes no program
    (tmp_path / "bcc").mkdir()
    (tmp_path / "bcc/__init__.py").write_text("def BPF(**_): raise SystemExit('line 7: no')")
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path}
    # WHEN it is asked, THEN its words are there on demand
    brief, full = (
        subprocess.run(
            [*NOT_BUILT, *support.AIFLAME, "doctor", *verbose],
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        for verbose in ([], ["-v"])
    )
    assert brief.returncode == full.returncode == 3
    assert " FAIL  bpf.load " in brief.stdout
    assert "aiflame doctor -v" in brief.stdout
    assert "line 7: no" not in brief.stdout
    assert "| line 7: no" in full.stdout


def test_limits_are_warnings_and_the_exit_code_stays_0() -> None:
    # GIVEN no cgroup v2, and a folder in which nothing can be written
    script = 'umount -a -l -t cgroup2 && mount -t tmpfs -o ro none /mnt && cd /mnt && exec "$@"'
    code, report, found = _doctor("unshare", "--mount", "sh", "-c", script, "sh")
    # THEN both are named, and recording is still said to work
    assert code == 0
    assert found["os.cgroup2"]["status"] == "warn"
    assert found["out.folder"]["status"] == "warn"
    assert "will work, with limits (" in report["summary"]
    assert "--cgroup" in report["summary"]


def test_process_that_does_not_exist_fails_its_own_check_only(run_aiflame: Run) -> None:
    # Pids end below 2^22 (PID_MAX_LIMIT, include/linux/threads.h).
    done = run_aiflame("doctor", "--pid", 2**22 + 1, "--json")
    found = {check["id"]: check["status"] for check in json.loads(done.stdout)["checks"]}
    assert done.returncode == 3
    assert found["target.visible"] == "fail"
    assert found["target.mappings"] == "skip"
    assert found["bpf.sample"] == "ok"


def test_agent_is_told_what_its_container_takes_away(tmp_path: Path) -> None:
    # GIVEN a configuration of the agent, and namespaces and rights as containers have by default
    config = tmp_path / "agent.toml"
    (tmp_path / "captures").mkdir()
    config.write_text(
        f'directory = "{tmp_path}/agent"\n[sinks.captures]\ndirectory = "{tmp_path}/captures"\n'
    )
    inside = ("unshare", "--pid", "--fork", "--mount-proc", "--cgroup")
    without = ("setpriv", "--bounding-set", "-sys_admin,-syslog,-setuid,-kill")
    # WHEN it is asked outside, THEN the agent can run
    code, _, found = _doctor(arguments=("--agent", "--config", config))
    assert code == 0
    assert found["bpf.sample"]["status"] == "ok"
    for name in ("os.pid_namespace", "agent.config", "agent.directory", "agent.captures"):
        assert found[name]["status"] == "ok"
    assert "out.folder" not in found
    # AND inside, THEN each thing that is missing has its line, and the rest goes on
    code, _, found = _doctor(*inside, *without, arguments=("--agent", "--config", config))
    assert code == 3
    assert "take other processes" in found["os.pid_namespace"]["finding"]
    assert "hostPID: true" in found["os.pid_namespace"]["cure"]
    assert "--cgroupns=host" in found["os.cgroup2"]["cure"]
    assert "CAP_SYSLOG kernel functions have no names" in found["os.capabilities"]["finding"]
    assert found["cpu.kptr_restrict"]["status"] == "warn"
    assert "no CAP_SETUID, CAP_KILL" in found["agent.child_rights"]["finding"]
    assert "SETUID, KILL" in found["agent.child_rights"]["cure"]
    assert found["bpf.load"]["status"] == "ok"
    assert found["bpf.sample"]["status"] == "skip"
    assert found["agent.directory"]["status"] == "ok"


def test_agent_is_told_what_ends_it_at_once(tmp_path: Path) -> None:
    # GIVEN a configuration with a key that there is not, and a process that may not load programs
    config = tmp_path / "agent.toml"
    config.write_text("frequency = 19\n")
    code, _, found = _doctor(
        *("setpriv", "--bounding-set", "-sys_admin,-bpf"),
        arguments=("--agent", "--config", config),
    )
    assert code == 3
    assert "CAP_BPF" in found["os.capabilities"]["finding"]
    assert "frequency: no such setting" in found["agent.config"]["finding"]
    assert "frequency_hz" in found["agent.config"]["cure"]
    assert found["agent.directory"]["status"] == "skip"
